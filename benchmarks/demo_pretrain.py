"""Pretrains the tiny demo checkpoints: `python -m benchmarks.demo_pretrain llama|bart|t5 [--steps N]
[--device cuda|cpu] [--out DIR]`.

Real training at a toy size: 1.8 M parameters, the general part of demo:docstrings, AdamW with a cosine
schedule. Llama learns to continue text, BART and T5 to restore cut spans and, in a quarter of the rows, to
write a body's summary. The weights kept are the best on held-out modules.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.demo_corpus import order, split_summary
from benchmarks.demo_tokenizer import (
    ASSISTANT,
    BOS,
    EOS,
    MASK,
    PAD,
    POSITIONS,
    SENTINELS,
    USER,
    VOCABULARY,
    for_family,
    train_bpe,
)
from petune.demo import HERE, data_path

LENGTH = 256  # tokens of a packed sequence
CHAT_SHARE, PAIR_SHARE = 0.2, 0.25  # rows shown as a chat turn (Llama), as body -> summary (BART, T5)
NOISE = {"bart": 0.3, "t5": 0.2}  # share of the tokens cut out
SPAN = 3  # tokens of a cut span, on average
EVERY = 100  # steps between two looks at the held-out loss
LIMIT = 4_000_000  # bytes of a shipped checkpoint

Pair = tuple[list[int], list[int]]  # what the model reads, what it is to write
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Schedule:
    """How long and how hard to train; rows are packed sequences, lr is the peak."""

    steps: int
    rows: int
    lr: float
    dropout: float
    warmup: int = 100
    weight_decay: float = 0.1
    seed: int = 0


SCHEDULES = {
    "llama": Schedule(steps=2000, rows=32, lr=3e-3, dropout=0.15),
    "bart": Schedule(steps=3000, rows=64, lr=2e-3, dropout=0.1, warmup=300),
    "t5": Schedule(steps=3000, rows=64, lr=3e-3, dropout=0.1, warmup=300),
}


# --- the three shapes: 8 heads, every width divisible by 8 so that a narrower side network can keep the heads
# ----------------------------


def build(family: str, dropout: float) -> PreTrainedModel:
    """A freshly initialised model of the family, fp32: 8 layers (or 4 + 4) of width 128."""
    ids: dict[str, Any] = {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "vocab_size": VOCABULARY,
    }
    size: dict[str, Any]
    if family == "llama":
        heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
        size = {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 8,
            "max_position_embeddings": POSITIONS["llama"],
        }
        return LlamaForCausalLM(LlamaConfig(**ids, **heads, **size, tie_word_embeddings=True))
    if family == "bart":
        parts: dict[str, Any] = {"layers": 4, "attention_heads": 8, "ffn_dim": 336}
        sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in parts.items()}
        start: dict[str, Any] = {"decoder_start_token_id": EOS, "forced_eos_token_id": EOS}
        size = {"d_model": 128, "max_position_embeddings": POSITIONS["bart"], "scale_embedding": True}
        return BartForConditionalGeneration(BartConfig(**ids, **sides, **start, **size, dropout=dropout))
    size = {"d_model": 128, "d_kv": 16, "d_ff": 256, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 8}
    shape: dict[str, Any] = {
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": True,
        "decoder_start_token_id": PAD,
    }
    return T5ForConditionalGeneration(T5Config(**ids, **size, **shape, dropout_rate=dropout))


def drop_out(model: nn.Module, share: float) -> None:
    """Dropout on what Llama's attention and MLP add to the stream; the class has none of its own, and 1 MB of
    text needs some."""

    def after(module: nn.Module, _: object, output: object) -> object:
        if isinstance(output, tuple):
            return (nn.functional.dropout(output[0], share, module.training), *output[1:])
        return nn.functional.dropout(output, share, module.training)  # type: ignore[arg-type]

    for name, module in model.named_modules():
        if name.endswith((".mlp", ".self_attn")):
            module.register_forward_hook(after)


# --- text into rows
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Document:
    """One docstring in token ids, without any special token."""

    text: list[int]
    question: list[int]
    summary: list[int]
    body: list[int]


def general_rows() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """(rows to learn from, held-out rows) of train.jsonl and extra.jsonl; a twentieth of the modules is held
    out, whole."""
    rows = [row for name in ("train", "extra") for row in rows_of(name)]
    held = [order("pretrain", row["module"]) < "0d" for row in rows]
    return [row for row, out in zip(rows, held, strict=True) if not out], [
        row for row, out in zip(rows, held, strict=True) if out
    ]


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of one corpus file."""
    return [
        json.loads(line)
        for line in (data_path("docstrings") / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def documents(rows: Sequence[dict[str, str]], encode: Callable[[str], list[int]]) -> list[Document]:
    """Tokenizes each row once."""
    parts = [(row, *split_summary(row["text"])) for row in rows]
    return [
        Document(encode(row["text"]), encode(f"What is {row['name']}?"), encode(summary), encode(body))
        for row, summary, body in parts
    ]


def packed(
    docs: Sequence[Document], length: int, dice: random.Random, chat_share: float
) -> Iterator[list[int]]:
    """Rows of `length` tokens: the documents shuffled, `<s> text </s>` or a chat turn each, end to end,
    without a short last row."""
    stream: list[int] = []
    for doc in dice.sample(docs, len(docs)):
        asked = dice.random() < chat_share
        stream += (
            [BOS, USER, *doc.question, EOS, ASSISTANT, *doc.text, EOS] if asked else [BOS, *doc.text, EOS]
        )
        while len(stream) >= length:
            yield stream[:length]
            del stream[:length]


def spans(length: int, share: float, dice: random.Random) -> list[tuple[int, int]]:
    """Places (start, stop) to cut, in order, apart: `share` of `length` tokens, SPAN each on average (Raffel
    et al. 2020, 3.1.4)."""
    cut = max(1, round(length * share))
    count = max(1, min(round(cut / SPAN), length - cut, len(SENTINELS)))
    sizes = pieces(cut, count, dice)
    gaps = pieces(length - cut, count, dice)
    places, at = [], 0
    for gap, size in zip(gaps, sizes, strict=True):
        places.append((at + gap, at + gap + size))
        at += gap + size
    return places


def pieces(total: int, count: int, dice: random.Random) -> list[int]:
    """`total` as a sum of `count` positive numbers, uniformly at random."""
    marks = [0, *sorted(dice.sample(range(1, total), count - 1)), total]
    return [stop - start for start, stop in pairwise(marks)]


def cut_out(family: str, ids: list[int], dice: random.Random) -> Pair:
    """BART: every span becomes one `<mask>`, the target is the whole text. T5: span i becomes sentinel i, the
    target lists the spans."""
    source: list[int] = []
    target: list[int] = []
    last = 0
    for sentinel, (start, stop) in zip(SENTINELS, spans(len(ids), NOISE[family], dice), strict=False):
        source += [*ids[last:start], sentinel if family == "t5" else MASK]
        target += [sentinel, *ids[start:stop]]
        last = stop
    return source + ids[last:], target if family == "t5" else ids


def rows_once(family: str, docs: Sequence[Document], dice: random.Random) -> Iterator[Pair]:
    """One pass over the documents: (read, write) for each row, special tokens included; Llama reads what it
    writes."""
    if family == "llama":
        yield from ((row, row) for row in packed(docs, LENGTH, dice, CHAT_SHARE))
        return
    start = [BOS] if family == "bart" else []
    bodies = [doc for doc in docs if doc.body]
    for row in packed(docs, LENGTH - 2, dice, 0.0):
        doc = dice.choice(bodies)
        read, write = (
            (doc.body[: LENGTH - 2], doc.summary[: LENGTH - 2])
            if dice.random() < PAIR_SHARE
            else cut_out(family, row, dice)
        )
        yield [*start, *read, EOS], [*start, *write, EOS]


def batches(
    family: str, docs: Sequence[Document], rows: int, dice: random.Random, *, forever: bool
) -> Iterator[Batch]:
    """Padded batches: input_ids, attention_mask [rows, longest] and labels (-100 where padded). Each pass is
    packed anew."""
    waiting: list[Pair] = []
    while True:
        for pair in rows_once(family, docs, dice):
            waiting.append(pair)
            if len(waiting) == rows:
                yield collate(waiting)
                waiting = []
        if not forever:
            if waiting:
                yield collate(waiting)
            return


def collate(pairs: Sequence[Pair]) -> Batch:
    """Pads the rows on the right."""
    read = [torch.tensor(source) for source, _ in pairs]
    write = [torch.tensor(target) for _, target in pairs]
    return {
        "input_ids": pad_sequence(read, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(ids) for ids in read], batch_first=True),
        "labels": pad_sequence(write, batch_first=True, padding_value=-100),
    }


# --- the loop
# ----------------------------------------------------------------------------------------------------------------------------


def loss_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """The mean loss over the batch's labels, nats per token; bf16 autocast on a GPU."""
    device = model.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return model(**{key: value.to(device, non_blocking=True) for key, value in batch.items()}).loss  # type: ignore[no-any-return]


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, family: str, docs: Sequence[Document]) -> float:
    """Nats per token over the documents, with the same cuts at every call; leaves the model in training
    mode."""
    model.train(False)
    total = count = 0.0
    for batch in batches(family, docs, 32, random.Random(1), forever=False):
        tokens = int((batch["labels"] != -100).sum())
        total += float(loss_of(model, batch)) * tokens
        count += tokens
    model.train()
    return total / count


def optimizer_for(
    model: nn.Module, plan: Schedule
) -> tuple[torch.optim.AdamW, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW, weight decay on matrices only; linear warm-up, then a cosine down to a hundredth of the peak."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": plan.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98))
    warmup = max(1, min(plan.warmup, plan.steps // 5))

    def scale(step: int) -> float:
        through = max(0.0, (step - warmup) / max(1, plan.steps - warmup))
        return min((step + 1) / warmup, 0.505 + 0.495 * math.cos(math.pi * min(1.0, through)))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def fit(
    model: PreTrainedModel, family: str, learn: Sequence[Document], held: Sequence[Document], plan: Schedule
) -> tuple[int, float]:
    """Trains in place and leaves the best weights in the model; returns their step and held-out loss."""
    optimizer, scheduler = optimizer_for(model, plan)
    best, best_step, kept = math.inf, 0, {}
    model.train()
    began = time.monotonic()
    source = batches(family, learn, plan.rows, random.Random(plan.seed), forever=True)
    for step, batch in zip(range(1, plan.steps + 1), source, strict=False):
        loss = loss_of(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % EVERY == 0 or step == plan.steps:
            now = held_out_loss(model, family, held)
            print(
                f"step {step:5}  train {loss.item():.4f}  held-out {now:.4f} "
                f" {time.monotonic() - began:6.1f} s",
                flush=True,
            )
            if now < best:
                best, best_step = now, step
                kept = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(kept)
    return best_step, best


CARD = """---
license: psf-2.0
library_name: transformers
---
# demo:tiny-{family}

**Self-pretrained**: a toy that petune's authors trained from random weights to show tuning without a network.
It knows nothing of the world.

- Architecture: {architecture}, {parameters:,} parameters, {bytes:,} bytes of bf16 safetensors, 8 heads, vocabulary {vocabulary:,}.
- Text: train.jsonl and extra.jsonl of demo:docstrings (docstrings of the Python 3.11 standard library), {tokens:,} tokens.
  Not used: eval.jsonl, the domain files, and the held-out twentieth of the modules that chose the step.
- Objective: {objective}.
- Training: {steps} steps of {rows} rows of {length} tokens, AdamW, peak learning rate {lr}, cosine, dropout {dropout}, seed {seed};
  weights of step {best_step}.
- Loss in nats per token, of the bf16 weights computed in {precision}: held-out modules {held:.3f}, eval.jsonl {eval:.3f},
  domain_eval.jsonl (tkinter family) {domain:.3f}.
- Made with torch {torch} and transformers {transformers} on {device}. To make it again:
  `python -m benchmarks.demo_pretrain {family} --steps {steps} --rows {rows} --lr {lr} --dropout {dropout} --seed {seed} --out DIR`
  (the same seed gives the same data and start; the last digits depend on the device).
- Licence: the weights are derived from text under PSF-2.0 (notice in ../docstrings/PROVENANCE) and are offered under the same terms;
  the script is Apache-2.0.
"""

OBJECTIVES = {
    "llama": "next token; a fifth of the texts as chat turns, `What is NAME?` answered by the docstring",
    "bart": (
        "restore the text from one with 30 % of its tokens masked in spans; a quarter of the rows: body to"
        " summary"
    ),
    "t5": "write the 20 % of tokens cut out in spans; a quarter of the rows: body to summary",
}


def pretrain(family: str, plan: Schedule, device: torch.device, out: Path) -> None:
    """Trains tokenizer and model and writes the checkpoint with its card into `out`; ValueError when it would
    be over LIMIT bytes."""
    learn_rows, held_rows = general_rows()
    bpe = train_bpe(row["text"] for row in learn_rows)
    tokenizer = for_family(bpe, family)

    def encode(text: str) -> list[int]:
        return list(bpe.encode(text, add_special_tokens=False).ids)

    learn = documents(learn_rows, encode)
    held, unseen, domain = (
        documents(rows, encode) for rows in (held_rows, rows_of("eval"), rows_of("domain_eval"))
    )
    torch.manual_seed(plan.seed)
    model = build(family, plan.dropout)
    model.to(device)  # type: ignore[arg-type]  # transformers' wrapper hides the signature
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if 2 * parameters > LIMIT - 50_000:
        raise ValueError(f"{parameters:,} parameters do not fit in {LIMIT:,} bytes of bf16")
    if family == "llama":
        drop_out(model, plan.dropout)
    tokens = sum(len(doc.text) for doc in learn)
    print(f"tiny-{family}: {parameters:,} parameters, {tokens:,} tokens, {plan}", flush=True)
    best_step, _ = fit(model, family, learn, held, plan)
    model = model.bfloat16()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written 0600; the others of a machine read it too
    model = model.float()
    facts = {
        **{
            name: held_out_loss(model, family, docs)
            for name, docs in (("held", held), ("eval", unseen), ("domain", domain))
        },
        **{name: getattr(plan, name) for name in ("steps", "rows", "lr", "dropout", "seed")},
        "bytes": (out / "model.safetensors").stat().st_size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "precision": "bf16 autocast" if device.type == "cuda" else "fp32",
    }
    card = CARD.format(
        **facts,
        family=family,
        architecture=type(model).__name__,
        parameters=parameters,
        vocabulary=VOCABULARY,
        tokens=tokens,
        objective=OBJECTIVES[family],
        length=LENGTH,
        best_step=best_step,
        torch=torch.__version__.partition("+")[0],
        transformers=transformers.__version__,
    )
    (out / "README.md").write_text(card, encoding="utf-8")
    losses = ", ".join(f"{name} {facts[name]:.4f}" for name in ("held", "eval", "domain"))
    print(f"kept step {best_step}: {losses}; {facts['bytes']:,} bytes in {out}")


def main(arguments: Sequence[str]) -> int:
    """Parses the command line, trains, returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_pretrain", description="Pretrain a tiny demo checkpoint."
    )
    parser.add_argument("family", choices=sorted(SCHEDULES))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="packed sequences in a batch")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--dropout", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="default: the folder petune ships")
    given = parser.parse_args(arguments)
    changes = {
        name: getattr(given, name)
        for name in ("steps", "rows", "lr", "dropout", "seed")
        if getattr(given, name) is not None
    }
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    plan = replace(SCHEDULES[given.family], **changes)
    pretrain(given.family, plan, torch.device(given.device), given.out or HERE / f"tiny-{given.family}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
