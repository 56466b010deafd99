"""LoRA on a BERT-large shape beside transformers + peft, on batches as they are: most texts short, some long.

    PYTHONPATH=.:SITE python3 benchmarks/bert_peers.py                  every variant
    PYTHONPATH=.:SITE python3 benchmarks/bert_peers.py petune peft-compile --steps 40
    PYTHONPATH=. python benchmarks/bert_peers.py --tiny petune peft     without a GPU

A batch is 32 texts whose lengths are drawn from a log-normal distribution (median 110 tokens, one in twenty
above 480) and cut to 8 to 512; the same batches for all. What counts is tokens that are not padding. LoRA of
rank 16 on query, key, value and every dense layer of a block, no dropout unless `--dropout` says so, bf16
weights under autocast, fused AdamW. `peft` pads a batch to its longest text, `peft-512` always to 512;
`peft-compile` has each block compiled for any length; `full` trains everything in bf16, by transformers
alone; `petune` has kernels="auto". Warm-up runs over other batches of the same distribution. A step's time
includes the copy of its batch to the device.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.peers import (
    LEARNING_RATE,
    SIZES,
    Steps,
    answer,
    heading,
    in_own_process,
    markdown,
    memory_of,
    timings,
)

CLASSES = 3
ROLES = ("q", "k", "v", "o", "up", "down")
SHAPES: dict[str, dict[str, int]] = {
    "large": {
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 300,
    },
}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """What a worker is asked: rows of a batch, the longest text, steps that count, seconds of warm-up,
    dropout of the model."""

    variant: str
    shape: str
    device: str
    rows: int
    longest: int
    steps: int
    warm: float
    dropout: float


# ------------------------------------------------------------------ the variants


def base_model(options: Options) -> BertForSequenceClassification:
    """Random weights, the same each time."""
    torch.manual_seed(0)
    p = options.dropout
    sizes: dict[str, Any] = {
        **SHAPES[options.shape],
        "hidden_dropout_prob": p,
        "attention_probs_dropout_prob": p,
        "num_labels": CLASSES,
    }
    return BertForSequenceClassification(BertConfig(**sizes, attn_implementation="sdpa")).to(
        options.device, torch.bfloat16
    )


def petune_model(options: Options) -> Any:
    """Our own."""
    import petune

    return petune.wrap(base_model(options), method="lora", r=16, targets=ROLES, kernels="auto")


def peft_model(options: Options) -> Any:
    """transformers + peft."""
    import peft

    targets = r".*encoder\.layer\.\d+\..*(query|key|value|dense)"
    return peft.get_peft_model(
        base_model(options),
        peft.LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules=targets, task_type="SEQ_CLS"),
    )


def peft_compile_model(options: Options) -> Any:
    """The same with each block compiled."""
    model = peft_model(options)
    for module in model.modules():
        if type(module).__name__ == "BertLayer":
            module.compile(dynamic=True)
    return model


@dataclass(frozen=True)
class Variant:
    """How its model is made, and whether its batches are padded to the longest length there is."""

    model: Callable[[Options], Any]
    padded: bool = False


VARIANTS: Mapping[str, Variant] = {
    "petune": Variant(petune_model),
    "peft": Variant(peft_model),
    "peft-512": Variant(peft_model, padded=True),
    "peft-compile": Variant(peft_compile_model),
    "full": Variant(base_model),
}


# ------------------------------------------------------------------ batches and steps


def lengths(rows: int, longest: int, seed: int) -> Iterator[list[int]]:
    """The lengths of the texts of batch after batch, without end."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.randn(rows, generator=draw) * 0.9 + 4.7).exp().long().clamp(8, longest).tolist()


def batches(options: Options, seed: int) -> Iterator[Batch]:
    """Random tokens of those lengths, padded to a multiple of 8, with their mask and classes; on the CPU."""
    vocabulary = SHAPES[options.shape].get("vocab_size", 30000)
    for number, sizes in zip(count(), lengths(options.rows, options.longest, seed), strict=False):
        draw = torch.Generator().manual_seed(seed * 1_000_003 + number)
        width = options.longest if VARIANTS[options.variant].padded else -(-max(sizes) // 8) * 8
        mask = torch.arange(width)[None] < torch.tensor(sizes)[:, None]
        ids = torch.randint(5, vocabulary, (options.rows, options.longest), generator=draw)[:, :width] * mask
        yield {
            "input_ids": ids,
            "attention_mask": mask.long(),
            "labels": torch.randint(0, CLASSES, (options.rows,), generator=draw),
        }


def measure(options: Options) -> dict[str, Any]:
    """Train, and say how many tokens a second that are not padding, and in how much memory."""
    model = VARIANTS[options.variant].model(options).train()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)

    def over(feed: Iterator[Batch]) -> Callable[[], Tensor]:
        def step() -> Tensor:
            batch = {name: value.to(options.device, non_blocking=True) for name, value in next(feed).items()}
            with torch.autocast(options.device, dtype=torch.bfloat16):
                loss: Tensor = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    counted = batches(options, seed=1)
    timed = [next(counted) for _ in range(options.steps)]
    tokens = sum(int(batch["attention_mask"].sum()) for batch in timed)
    if options.device == "cuda":
        timed = [{name: value.pin_memory() for name, value in batch.items()} for batch in timed]
        torch.cuda.reset_peak_memory_stats()
    steps = Steps(options.device)
    steps.warm_up(over(batches(options, seed=2)), options.warm)
    following = over(iter(timed))
    seconds = [steps.take(following) for _ in timed]
    losses = [float(loss) for loss in steps.losses[-len(timed) :]]
    numbers = {
        "tokens_per_s": tokens / sum(seconds),
        "fill": tokens / sum(batch["input_ids"].numel() for batch in timed),
        "loss": sum(losses) / len(losses),
        "trained": sum(value.numel() for value in trained),
        "first_step_s": steps.first,
    }
    return timings(seconds, tokens) | memory_of(options.device) | numbers


# ------------------------------------------------------------------ what is printed

HEADS = (
    "variant",
    "tokens/s, not padding",
    "not padding",
    "step, ms (quartiles)",
    *SIZES.values(),
    "mean loss",
    "trained",
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A measurement as a row of the table."""
    low, high = (1e3 * value for value in row["quartiles_s"])
    step = f"{1e3 * row['step_s']:.1f} ({low:.1f} to {high:.1f})"
    sizes = [f"{row[name]:.1f}" if name in row else "-" for name in SIZES]
    return [
        row["spec"],
        f"{row['tokens_per_s']:,.0f}",
        f"{row['fill']:.0%}",
        step,
        *sizes,
        f"{row['loss']:.4f}",
        f"{row['trained']:,}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the variants; 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", nargs="*", default=[], metavar="VARIANT", help=", ".join(VARIANTS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--steps", type=int, default=24, help="steps that count")
    parser.add_argument("--warm", type=float, default=3.0, help="seconds of steps before those that count")
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="of hidden states and attention, as the model's config has it",
    )
    parser.add_argument("--limit", type=float, default=150, help="seconds for one variant")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        answer(measure(Options(**json.loads(given.worker))))
        return 0
    if unknown := [name for name in given.variants if name not in VARIANTS]:
        parser.error(f"no variant {unknown[0]!r}; there are {', '.join(VARIANTS)}")
    wide = {
        "shape": "large",
        "device": "cuda",
        "rows": 32,
        "longest": 512,
        "steps": given.steps,
        "warm": given.warm,
    }
    small = {"shape": "tiny", "device": "cpu", "rows": 4, "longest": 64, "steps": 2, "warm": 0.0}
    out = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    rows = []
    for name in given.variants or VARIANTS:
        request = {"variant": name, "dropout": given.dropout, **(small if given.tiny else wide)}
        rows.append(
            {"spec": name}
            | in_own_process(__file__, request, given.limit, out / f"bert-{name}.log" if out else None)
        )
        print(json.dumps(rows[-1]), flush=True)
        if out:
            (out / "bert-peers.jsonl").open("a", encoding="utf-8").write(json.dumps(rows[-1]) + "\n")
    device = next((row["device"] for row in rows if "device" in row), "")
    print(
        f"\n{heading(('torch', 'triton', 'transformers', 'peft'))};"
        f" {device}\n\n{markdown(rows, HEADS, cells)}"
    )
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
