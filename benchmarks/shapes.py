"""Speed and memory of one training step over families, methods and lengths, beside an older petune and beside
peft.

    PYTHONPATH=.:SITE python3 benchmarks/shapes.py petune:llama-8b:lora:4x2048 petune:llama-8b:adapter:4x2048
    PYTHONPATH=. python3 benchmarks/shapes.py --before DIR {before,petune}:llama-8b:lora:4x2048
    {before,petune}:llama-8b:lora:4x2048
    PYTHONPATH=. python benchmarks/shapes.py --tiny petune:t5-large:lora:2x16:fill=0.4      one block of the
                                                                                            family, without a
                                                                                            GPU

A CASE is VARIANT:SHAPE:METHOD:ROWSxTOKENS and settings after further colons. Variants: petune
(kernels="auto"), eager (kernels="off"), before (kernels="auto" of the petune that lies in the folder
--before, such as an older commit's), peft. Settings: fill (mean part of a row that is not padding; lengths
are log-normal with sigma 0.8 and rows are cut at the longest), r, dropout (of LoRA), layers, base (what
frozen weights are held in: fp8, int8 or nf4), budget and host (GiB that petune's memory policy may take on
the device and on the host), steps, warm (seconds of steps that do not count), limit (seconds).

All of a shape train the same random weights on the same eight random batches: bf16 weights under autocast,
fused AdamW at 1e-4, LoRA on every linear layer and expert of the blocks with alpha = 2 r, adapters with
reduction 16, no dropout of the model. What counts is tokens that are not padding, of both sides where there
are two: labels of an encoder-decoder are the first quarter of its text. `predicted` is the time of a step
that petune's memory policy predicts. Every case has a process of its own. Results go to shapes.jsonl in $OUT
where there is one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count, cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from benchmarks.peers import LEARNING_RATE, SIZES, Steps, answer, heading, in_own_process, markdown, memory_of

VARIANTS = ("petune", "eager", "before", "peft")
METHODS = ("lora", "dora", "ia3", "miss", "adapter", "side", "full")
Sizes = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A family of models, the sizes of one of its members, and the names of the linear layers of its blocks,
    and of the weights of its experts."""

    family: str
    sizes: Sizes
    linears: tuple[str, ...]
    heads: Any = AutoModelForCausalLM
    experts: tuple[str, ...] = ()
    least: int = 1  # blocks of which it has one of every kind

    @property
    def task(self) -> str:
        """What it is trained for, as in a recipe."""
        return {AutoModelForCausalLM: "causal", AutoModelForSeq2SeqLM: "seq2seq"}.get(self.heads, "classify")


_GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _llama(
    hidden: int, inner: int, layers: int, vocabulary: int, *, heads: int = 32, head: int = 128, **sizes: Any
) -> Sizes:
    """Sizes of a model of Llama's form with 8 heads of keys."""
    given = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
    }
    plain = {
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head,
        "tie_word_embeddings": False,
    }
    return {**given, **plain, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, **sizes}


def _gemma(hidden: int, inner: int, layers: int, *, heads: int, keys: int, window: int) -> Sizes:
    """Sizes of a text model of Gemma 3."""
    sizes = {
        "num_key_value_heads": keys,
        "sliding_window": window,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
    }
    return _llama(
        hidden, inner, layers, 262144, heads=heads, head=256, **{**sizes, "tie_word_embeddings": True}
    )


def _bart() -> Sizes:
    """Sizes of BART-large."""
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in _BART_SIDE.items()}
    return {"vocab_size": 50265, "d_model": 1024, "dropout": 0.0, "attention_dropout": 0.0, **sides}


_BART_SIDE = {"layers": 12, "attention_heads": 16, "ffn_dim": 4096}
_T5: Sizes = {
    "vocab_size": 32128,
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 2816,
    "num_layers": 24,
    "num_decoder_layers": 24,
    "num_heads": 16,
}
_BERT: Sizes = {
    "vocab_size": 30522,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
_ROUTED = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES: Mapping[str, Shape] = {
    "llama-8b": Shape("llama", _llama(4096, 14336, 32, 128256), _GATED),
    "llama-70b": Shape("llama", _llama(8192, 28672, 80, 128256, heads=64), _GATED),
    "llama-1b": Shape("llama", _llama(2048, 8192, 16, 128256, head=64, tie_word_embeddings=True), _GATED),
    "qwen3-4b": Shape(
        "qwen3", _llama(2560, 9728, 36, 151936, tie_word_embeddings=True, rms_norm_eps=1e-6), _GATED
    ),
    "gemma3-1b": Shape("gemma3_text", _gemma(1152, 6912, 26, heads=4, keys=1, window=512), _GATED),
    "gemma2-2b": Shape("gemma2", _gemma(2304, 9216, 26, heads=8, keys=4, window=4096), _GATED),
    "olmo2-1b": Shape(
        "olmo2", _llama(2048, 8192, 16, 100352, heads=16, num_key_value_heads=16, rms_norm_eps=1e-6), _GATED
    ),
    "phi3-4b": Shape(
        "phi3",
        _llama(3072, 8192, 32, 32064, head=96, num_key_value_heads=32, pad_token_id=0),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "phi4-mini": Shape(  # positions turn 96 of a head's 128 columns
        "phi3",
        _llama(
            *(3072, 8192, 32, 200064),
            **{"heads": 24, "tie_word_embeddings": True, "partial_rotary_factor": 0.75, "pad_token_id": 0},
        ),
        ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "qwen3-moe": Shape(  # Qwen3-30B-A3B; with layers=12 on one card
        "qwen3_moe",
        _llama(2048, 6144, 48, 151936, num_key_value_heads=4, rms_norm_eps=1e-6, **_ROUTED),
        _GATED[:4],
        experts=("experts.gate_up_proj", "experts.down_proj"),
    ),
    "gpt-oss-20b": Shape(
        "gpt_oss",
        _llama(2880, 2880, 24, 201088, heads=64, head=64, num_local_experts=32, num_experts_per_tok=4),
        _GATED[:4],
        experts=("experts.gate_up_proj", "experts.down_proj"),
    ),
    "gemma3-4b": Shape("gemma3_text", _gemma(2560, 10240, 34, heads=8, keys=4, window=1024), _GATED),
    "gemma4-31b": Shape(  # five blocks with sliding attention, then one with full
        "gemma4_text",
        {
            **_llama(5376, 21504, 60, 262144, head=256, tie_word_embeddings=True, rms_norm_eps=1e-6),
            **{"num_key_value_heads": 16, "sliding_window": 1024, "final_logit_softcapping": 30.0},
            **{"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
            "hidden_size_per_layer_input": 0,
        },
        _GATED,
        least=6,
    ),
    "gemma4-e2b": Shape(  # a vector for each token and block; the last 20 blocks read keys of earlier ones
        "gemma4_text",
        {
            **_llama(1536, 6144, 35, 262144, head=256, tie_word_embeddings=True, rms_norm_eps=1e-6),
            **{"num_attention_heads": 8, "num_key_value_heads": 1, "global_head_dim": 512},
            **{"sliding_window": 512, "final_logit_softcapping": 30.0, "num_kv_shared_layers": 20},
            **{"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144},
            "use_double_wide_mlp": True,
        },
        _GATED,
        least=12,
    ),
    "t5-large": Shape(
        "t5",
        {
            **_T5,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
        ("q", "k", "v", "o", "wi_0", "wi_1", "wo"),
        AutoModelForSeq2SeqLM,
    ),
    "bart-large": Shape(
        "bart", _bart(), ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"), AutoModelForSeq2SeqLM
    ),
    "bert-large": Shape(
        "bert",
        {**_BERT, **_NO_DROPOUT},
        ("query", "key", "value", "dense"),
        AutoModelForSequenceClassification,
    ),
    "modernbert-large": Shape(
        "modernbert",
        {
            "vocab_size": 50368,
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "intermediate_size": 2624,
            "pad_token_id": 0,
        },
        ("Wqkv", "Wo", "Wi"),
        AutoModelForSequenceClassification,
    ),
    "deberta-large": Shape(  # DeBERTa-v3
        "deberta-v2",
        {
            **_BERT,
            **_NO_DROPOUT,
            "vocab_size": 128100,
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
            "max_relative_positions": -1,
        },
        ("query_proj", "key_proj", "value_proj", "dense"),
        AutoModelForSequenceClassification,
    ),
    "gpt2-large": Shape(
        "gpt2",
        {
            "vocab_size": 50257,
            "n_embd": 1280,
            "n_layer": 36,
            "n_head": 20,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
        ("c_attn", "c_proj", "c_fc"),
    ),
    "glm4-9b": Shape(
        "glm4",
        _llama(4096, 13696, 40, 151552, num_key_value_heads=2, partial_rotary_factor=0.5, pad_token_id=0),
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"),
    ),
    "cohere2-7b": Shape(
        "cohere2",
        _llama(4096, 14336, 32, 256000, tie_word_embeddings=True, layer_norm_eps=1e-5, sliding_window=4096),
        _GATED,
    ),
    "command-r-plus": Shape(  # with layers=4 on one card
        "cohere",
        _llama(
            *(12288, 33792, 64, 256000),
            **{"heads": 96, "tie_word_embeddings": True, "layer_norm_eps": 1e-5, "use_qk_norm": True},
        ),
        _GATED,
    ),
    "ministral3-8b": Shape("ministral3", _llama(4096, 14336, 34, 131072, tie_word_embeddings=True), _GATED),
    "qwen3.5-4b": Shape(  # three mixers, then attention
        "qwen3_5_text",
        {
            "vocab_size": 248320,
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
        },
        (*_GATED, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
        least=4,
    ),
}
TINY: Sizes = {
    "vocab_size": 300,
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"), 1
    ),
    **dict.fromkeys(
        ("hidden_size", "d_model", "intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64
    ),
    **dict.fromkeys(
        ("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4
    ),
    **{"num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "num_experts": 8, "moe_intermediate_size": 16},
    **{"global_head_dim": 32, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": 300},
    "num_kv_shared_layers": 2,
    **{"num_local_experts": 8, "n_layer": 1, "n_embd": 64, "n_head": 4},
}


@dataclass(frozen=True)
class Case:
    """One measurement; see the head of this file. rows, tokens: of a batch, padding included."""

    variant: str
    shape: str
    method: str
    rows: int
    tokens: int
    fill: float = 1.0
    r: int = 16
    dropout: float = 0.0
    layers: int = 0
    base: str = ""
    budget: float = 0.0
    host: float = 0.0
    steps: int = 16
    warm: float = 4.0
    limit: float = 120.0

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that a word of the command line names. Raises ValueError that says what is wrong with
        it."""
        variant, shape, method, size, *settings = [*text.split(":"), "", "", ""][
            : max(4, text.count(":") + 1)
        ]
        for value, known in ((variant, VARIANTS), (shape, tuple(SHAPES)), (method, METHODS)):
            if value not in known:
                raise ValueError(f"{text}: expected one of {', '.join(known)}, found {value!r}")
        if not re.fullmatch(r"\d+x\d+", size):
            raise ValueError(f"{text}: expected ROWSxTOKENS after the method, found {size!r}")
        kinds = {entry.name: str(entry.type) for entry in fields(cls)[5:]}
        values: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            if name not in kinds:
                raise ValueError(f"{text}: {setting!r} is no setting; there are {', '.join(kinds)}")
            values[name] = {"int": int, "float": float, "str": str}[kinds[name]](value)
        rows, _, tokens = size.partition("x")
        return cls(variant, shape, method, int(rows), int(tokens), **values)

    def config(self, sizes: Sizes) -> Any:
        """transformers' config of the model, with those of `sizes` that it has in place of its own."""
        shape = SHAPES[self.shape]
        own = {name: sizes.get(name, size) for name, size in shape.sizes.items()}
        if shape.least > 1:
            own["num_hidden_layers"] = max(shape.least, own["num_hidden_layers"])
        config = AutoConfig.for_model(shape.family, **own)
        config.num_hidden_layers = self.layers or config.num_hidden_layers
        if getattr(config, "attn_logit_softcapping", None):
            config._attn_implementation = "eager"  # some transformers choose a form that leaves the cap out
        return config


# ------------------------------------------------------------------ model and batches


def base_model(case: Case, device: str, sizes: Sizes) -> Any:
    """Random bf16 weights, the same each time."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = SHAPES[case.shape].heads.from_config(case.config(sizes))
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    return model


def tuned_model(case: Case, model: Any, before: str | None) -> Any:
    """The model as the variant wraps it."""
    linears, experts = list(SHAPES[case.shape].linears), list(SHAPES[case.shape].experts)
    if case.variant == "peft":
        import peft

        return peft.get_peft_model(model, _of_peft(case, peft, linears, experts))
    if case.variant == "before":
        sys.path.insert(0, str(before))
    import petune

    fused = "reference" if next(model.parameters()).is_meta else "auto"  # which nothing runs
    settings: dict[str, Any] = {"kernels": "off" if case.variant == "eager" else fused}
    if case.base:
        settings["base_dtype"] = case.base
    if memory := {name: gib for name in ("budget", "host") if (gib := getattr(case, name))}:
        settings["memory"] = memory
    return petune.wrap(model, method=case.method, **settings, **method_settings(case))


def method_settings(case: Case) -> dict[str, Any]:
    """petune's settings of the case's method."""
    shape = SHAPES[case.shape]
    if case.method not in ("lora", "dora", "miss"):
        return {}
    roles = (
        ["q", "k", "v", "o", "up", "down"]
        if shape.family in ("bert", "deberta-v2")
        else [*shape.linears, *shape.experts]
    )
    settings = {"r": case.r, "dropout": case.dropout, "targets": roles}
    return settings if case.method == "miss" else settings | {"alpha": 2 * case.r}


def _of_peft(case: Case, peft: Any, linears: list[str], experts: list[str]) -> Any:
    """peft's config of the same method; of (IA)^3 its own targets. experts: names of their weights."""
    if case.method == "ia3":
        return peft.IA3Config()
    if case.method == "miss":
        return peft.MissConfig(r=case.r, miss_dropout=case.dropout, target_modules=linears)
    settings: dict[str, Any] = {"r": case.r, "lora_alpha": 2 * case.r, "lora_dropout": case.dropout}
    settings |= {"target_modules": linears, "target_parameters": experts or None}
    return peft.LoraConfig(**settings, use_dora=case.method == "dora")


def batches(case: Case, vocabulary: int) -> list[tuple[dict[str, Tensor], int]]:
    """Eight batches on the CPU, each with its number of tokens that are not padding."""
    torch.manual_seed(0)
    draw, family, made = torch.Generator().manual_seed(0), SHAPES[case.shape].family, []
    for _ in range(8):
        lengths = torch.full((case.rows,), case.tokens)
        if case.fill < 1:
            drawn = torch.distributions.LogNormal(0.0, 0.8).sample((case.rows,))  # of mean 1.38
            lengths = drawn.mul(case.tokens * case.fill / 1.38).clamp(8, case.tokens).long()
        width = int(lengths.max())
        ids = torch.randint(4, min(2000, vocabulary), (case.rows, width), generator=draw)
        mask = (torch.arange(width)[None] < lengths[:, None]).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask}
        if SHAPES[case.shape].task == "classify":
            batch["labels"] = torch.randint(0, 2, (case.rows,), generator=draw)
        else:
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        if family in ("t5", "bart"):
            batch["labels"] = batch["labels"][:, : max(8, width // 4)].contiguous()
        elif case.fill >= 1 and family != "bert":
            del batch["attention_mask"]
        extra = int((batch["labels"] >= 0).sum()) if family in ("t5", "bart") else 0
        made.append((batch, int(mask.sum()) + extra))
    return made


# ------------------------------------------------------------------ in the process of one measurement


UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


class Predictions(logging.Handler):
    """Keeps the time of a step, in seconds, that petune's log predicts last for each stack of blocks, and
    what it says of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.of_stacks: dict[str, float] = {}

    @property
    def seconds(self) -> float | None:
        """Of all stacks."""
        return sum(self.of_stacks.values()) or None

    def emit(self, record: logging.LogRecord) -> None:
        """Read one message."""
        if "fused" in record.getMessage():
            self.said.append(record.getMessage())
        if found := re.search(r"(memory.*): peak .* step ([\d.]+) (s|ms|us) predicted", record.getMessage()):
            self.of_stacks[found[1]] = float(found[2]) * UNITS[found[3]]


def measure(case: Case, before: str | None, device: str, tiny: bool) -> dict[str, Any]:
    """Train, and say how fast it was and what it took; see the head of this file."""
    predictions = Predictions()
    logging.getLogger("petune").addHandler(predictions)
    logging.getLogger("petune").setLevel(logging.INFO)
    model = tuned_model(case, base_model(case, device, TINY if tiny else {}), before).train()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    made = [
        ({name: value.to(device) for name, value in batch.items()}, size)
        for batch, size in batches(case, model.config.vocab_size)
    ]
    following = cycle(batch for batch, _ in made)

    def step() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: Tensor = model(**next(following)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps, spent = Steps(device), 0.0
    for number in count():  # every batch once before any counts: a batch's shape may compile
        if number >= len(made) and spent >= case.warm:
            break
        spent += steps.take(step)
    seconds = [steps.take(step) for _ in range(case.steps)]
    counted = [made[at % len(made)][1] for at in range(len(steps.losses) - case.steps, len(steps.losses))]
    numbers = {
        "tokens_per_s": sum(counted) / sum(seconds),
        "step_s": statistics.median(seconds),
        "predicted_s": predictions.seconds,
        "losses": [float(steps.losses[at]) for at in (0, 1, 7)],
        "trained": sum(value.numel() for value in trained),
        "first_step_s": steps.first,
        "said": predictions.said,
    }
    return numbers | memory_of(device)


# ------------------------------------------------------------------ what is printed

HEADS = ("case", "tokens/s, not padding", "step, ms", "predicted", *SIZES.values(), "losses", "trained")


def cells(row: Mapping[str, Any]) -> list[str]:
    """A measurement as a row of the table."""
    sizes = [f"{row[name]:.1f}" if name in row else "-" for name in SIZES]
    predicted = f"{1e3 * row['predicted_s']:.0f}" if row["predicted_s"] else "-"
    losses = " ".join(f"{value:.4f}" for value in row["losses"])
    return [
        row["spec"],
        f"{row['tokens_per_s']:,.0f}",
        f"{1e3 * row['step_s']:.1f}",
        predicted,
        *sizes,
        losses,
        f"{row['trained']:,}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every CASE; 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--before", metavar="DIR", help="folder of the older petune")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        request = json.loads(given.worker)
        answer(measure(Case(**request.pop("case")), **request))
        return 0
    try:
        cases = [Case.parse(text) for text in given.cases]
    except ValueError as error:
        parser.error(str(error))
    if not given.before and any(case.variant == "before" for case in cases):
        parser.error("`before` needs --before DIR")
    small = {"steps": 2, "warm": 0.0} if given.tiny else {}
    place = {"before": given.before, "device": "cpu" if given.tiny else "cuda", "tiny": given.tiny}
    out = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    rows = []
    for at, (text, case) in enumerate(zip(given.cases, cases, strict=True)):
        log = out / f"shapes-{at}.log" if out else None
        rows.append(
            {"spec": text} | in_own_process(__file__, place | {"case": asdict(case) | small}, case.limit, log)
        )
        print(json.dumps(rows[-1]), flush=True)
        if out:
            (out / "shapes.jsonl").open("a", encoding="utf-8").write(json.dumps(rows[-1]) + "\n")
    device = next((row["device"] for row in rows if "device" in row), "")
    print(
        f"\n{heading(('torch', 'triton', 'transformers', 'peft'))};"
        f" {device}\n\n{markdown(rows, HEADS, cells)}"
    )
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
