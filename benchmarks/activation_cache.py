"""Epochs of ladder side-tuning with and without the activation cache, random weights, in turn.

    PYTHONPATH=. python3 benchmarks/activation_cache.py [--models bert t5 llama] [--rows 32] [--tokens 64]
                                                           [--width 768]

    PYTHONPATH=. python3 benchmarks/activation_cache.py --memory [--width 768] [--blocks 12] [--bf16]

    PYTHONPATH=. python3 benchmarks/activation_cache.py --shapes bert-large t5-large 8b demo-t5   one GPU

    PYTHONPATH=.:cli python3 benchmarks/activation_cache.py --demo [NAMES] [--kernels reference]

Prints seconds of an epoch without a cache (median), of the first and of a later one with it, what three and
ten epochs with it take of those without, the largest relative difference of a step's loss, and the step of a
loss's dtype: transformers gives that of a bf16 T5 or BERT in bf16, which tells no two losses apart that are
nearer than 0.4 to 0.8 %. On the CPU seconds are of the processor, so that other programs do not count.

With --memory: runs of a Llama of random weights by full fine-tuning, by the ladder, and by the ladder with
its cache, each in a process of its own; what is held in the first epoch and in the last. On a GPU that is the
peak of a step, on the CPU what is resident after one, in both with what the process holds before it.

With --shapes: tokens a second of steps of large models of random weights on one GPU, and what they hold
(benchmarks/cached_steps.py); rows of a later epoch are on the device where they fit half of what is free.

With --demo: the shipped ladders of the demo with and without a cache, as commands train them; seconds of an
epoch's steps, of the processor on the CPU, so that other programs do not count.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import petune
from petune import demo
from petune.methods.activation_cache import Stored

VOCABULARY = 4096
BATCH = 8


def inner_of(width: int) -> int:
    """The columns of a gated MLP: 2048 beside 768."""
    return width * 8 // 3 // 64 * 64


def model_of(name: str, device: str, dtype: torch.dtype, width: int) -> Any:
    """A model with heads of 64: BERT and Llama of 12 blocks, T5 of 8 and 8."""
    torch.manual_seed(0)
    made: nn.Module
    if name == "bert":
        made = BertForSequenceClassification(
            BertConfig(
                vocab_size=VOCABULARY,
                hidden_size=width,
                intermediate_size=4 * width,
                num_attention_heads=width // 64,
                num_labels=3,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    elif name == "t5":
        sizes = {"d_model": width, "d_ff": inner_of(width), "num_layers": 8, "num_heads": width // 64}
        made = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY,
                feed_forward_proj="gated-gelu",
                dropout_rate=0.0,
                decoder_start_token_id=0,
                **sizes,
            )
        )
    else:
        sizes = {"hidden_size": width, "intermediate_size": inner_of(width), "num_hidden_layers": 12}
        made = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=width // 64, **sizes))
    return petune.wrap(made.to(device, dtype), "side", reduction=8)


def batches_of(name: str, rows: int, tokens: int, epoch: int, device: str) -> list[dict[str, Tensor]]:
    """Rows of `tokens`, the same in every epoch, in another order."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=draw)
    labels = torch.randint(0, 3, (rows,), generator=draw) if name == "bert" else ids.clone()
    labels = labels[:, : tokens // 4] if name == "t5" else labels
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch))
    return [
        {
            "input_ids": ids[chunk].to(device),
            "attention_mask": torch.ones_like(ids[chunk]).to(device),
            "labels": labels[chunk].to(device),
        }
        for chunk in order.split(BATCH)
    ]


def epoch_of(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> Tensor:
    """The losses of an epoch, in their dtype."""
    losses = []
    for batch in batches:
        loss = model(**batch, **({} if "Bert" in type(model).__name__ else {"use_cache": False})).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def measure(name: str, options: argparse.Namespace, stored: Stored) -> str:
    """One line of the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    plain, cached = (model_of(name, device, dtype, options.width).train() for _ in range(2))
    # of the processor on the CPU, where other programs do not count then
    now = time.perf_counter if device == "cuda" else time.process_time
    steps = [
        torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-3)
        for model in (plain, cached)
    ]
    warm = batches_of(name, BATCH, options.tokens, 99, device)
    with torch.no_grad():
        plain(**warm[0]), cached(**warm[0])
    times: tuple[list[float], list[float]] = ([], [])
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder, petune.ActivationCache(cached, folder, stored) as cache:
        for epoch in range(options.epochs):
            losses = []
            for model, step, took in zip((plain, cached), steps, times, strict=True):
                rows = batches_of(name, options.rows, options.tokens, epoch, device)
                began = now()
                losses.append(epoch_of(model, step, rows))
                took.append(now() - began)
            worst = max(
                worst, *(abs(a - b) / abs(a) for a, b in zip(*(one.tolist() for one in losses), strict=True))
            )
            step_of_loss = torch.finfo(losses[0].dtype).eps
        size = cache.nbytes
    usual, later = statistics.median(times[0]), statistics.median(times[1][1:])
    first = times[1][0]
    three, ten = ((first + (epochs - 1) * later) / (epochs * usual) for epochs in (3, 10))
    ratios = f"{usual / later:.1f} | {first / later:.1f} | {three:.0%} | {ten:.0%}"
    return (
        f"| {name} | {stored} | {usual:.2f} | {first:.2f} | {later:.2f} | {ratios} | {size / 2**20:.0f} MiB"
        f" | {worst:.1e} | {step_of_loss:.0e} |"
    )


# ---------------------------------------------------------------- memory


class Held(petune.Callback):
    """The bytes held in each step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After a step."""
        if torch.cuda.is_available():
            self.bytes.append(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        else:
            ctypes.CDLL(None).malloc_trim(0)
            self.bytes.append(
                int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            )


def written(folder: Path, options: argparse.Namespace) -> Path:
    """A checkpoint of random weights, with the tokenizer of the demo."""
    if not folder.exists():
        sizes = {"hidden_size": options.width, "intermediate_size": inner_of(options.width)}
        heads = {"num_hidden_layers": options.blocks, "num_attention_heads": options.width // 64}
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
        model.to(torch.bfloat16 if options.bf16 else torch.float32).save_pretrained(folder)
        AutoTokenizer.from_pretrained(demo.model_path("tiny-llama")).save_pretrained(folder)
    return folder


def held(folder: Path, method: str, cache: bool, options: argparse.Namespace) -> None:
    """Print a line of the table."""
    from benchmarks.demo import Silent  # runs want pydantic, which the seconds of epochs do not

    recipe = {"model": str(folder / "model"), "task": "causal", "method": method, "cache": cache}
    recipe |= {
        "data": {"path": "demo:docstrings-domain", "max_rows": options.rows, "max_length": options.tokens}
    }
    recipe |= {"epochs": 3, "batch_size": BATCH, "dtype": "bf16" if options.bf16 else "fp32", "report": False}
    seen = Held()
    run = petune.train(
        recipe | {"out": str(folder / f"{method}-{cache}")},
        callbacks=[seen],
        reporter=Silent(),
        save_every=10000,
    )
    each = len(seen.bytes) // 3
    first, last = (max(part) / 2**20 for part in (seen.bytes[:each], seen.bytes[-each + 1 :]))
    name = f"{method} with cache" if cache else method
    print(f"| {name} | {first:,.0f} | {last:,.0f} | {run.summary['loss'][1]:.4f} |", flush=True)


def memory(options: argparse.Namespace) -> None:
    """The table of memory."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        model = written(Path(place) / "model", options)
        blocks = sum(value.nbytes for value in load_file(model / "model.safetensors").values())
        print(
            f"weights {blocks / 2**20:,.0f} MiB\n\n| | first epoch, MiB | last | loss |\n" + "|---" * 4 + "|"
        )
        for method, cache in (("side", False), ("side", True), ("full", False)):
            child = context.Process(target=held, args=(Path(place), method, cache, options))
            child.start()
            child.join()


# ---------------------------------------------------------------- large shapes, and the demo


def large(options: argparse.Namespace) -> None:
    """The table of steps on a GPU."""
    from benchmarks.cached_steps import HEADS
    from benchmarks.cached_steps import measure as measure_shape

    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{where}, torch {torch.__version__}; tokens a second\n\n| {' | '.join(HEADS)} |")
    print("|---" * len(HEADS) + "|", flush=True)
    for name in options.shapes:
        print(measure_shape(name, options.later), flush=True)


class Clock(petune.Callback):
    """The seconds of the steps of each epoch."""

    def __init__(self) -> None:
        self.now = time.perf_counter if torch.cuda.is_available() else time.process_time
        self.epochs: dict[int, float] = {}
        self.last: tuple[int, float] | None = None

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After a step; the first of a run has no beginning here, and what lies between epochs is no step."""
        epoch, now = int(metrics["epoch"] - 1e-9), self.now()
        if self.last is not None and self.last[0] == epoch:
            self.epochs[epoch] = self.epochs.get(epoch, 0.0) + now - self.last[1]
        self.last = epoch, now


def demo_epochs(options: argparse.Namespace) -> None:
    """The table of the demo: of each epoch all steps but its first."""
    from benchmarks.demo import Silent
    from petune.recipe import load_recipe, recipe_folder

    print(
        "| recipe | epoch, uncached | first, cached | later | x uncached | x first | loss |\n"
        + "|---" * 7
        + "|"
    )
    for name in options.demo or ("bert_side", "bart_side", "t5_side", "llama_side"):
        took, losses = {}, []
        for cache in ("false", "true"):
            with tempfile.TemporaryDirectory() as out:
                given = [f"cache={cache}", f"kernels={options.kernels}", f"out={out}/run", "epochs=4"]
                given += ["report=false", "head_only=false", "eval_every=100000", "save_every=100000"]
                given.append(f"data.max_rows={options.demo_rows}")
                recipe = load_recipe(recipe_folder() / f"{name}.yaml", given)
                took[cache] = clock = Clock()
                run = petune.train(recipe, callbacks=[clock], reporter=Silent())
                losses.append(run.summary["loss"][1])
        usual = statistics.median(took["false"].epochs.values())
        first, *others = took["true"].epochs.values()
        later = statistics.median(others)
        differ = abs(losses[0] - losses[1]) / abs(losses[0])
        ratios = f"{usual / later:.1f} | {first / later:.1f} | {differ:.0e}"
        print(f"| {name} | {usual:.2f} | {first:.2f} | {later:.2f} | {ratios} |", flush=True)


def main() -> None:
    """The table, a line a model and dtype of the cache; or that of memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    models, dtypes = ["bert", "t5", "llama"], ["auto", "fp32", "bf16", "fp8"]
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--stored", nargs="+", default=["auto"], choices=dtypes)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--bf16", action="store_true", help="a bf16 backbone")
    parser.add_argument("--memory", action="store_true", help="what runs hold instead of their seconds")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=12)
    shapes = ["bert-large", "t5-large", "8b", "demo-t5", "demo-bart", "demo-llama", "tiny"]
    parser.add_argument("--shapes", nargs="+", choices=shapes, help="steps of these on a GPU")
    parser.add_argument("--later", type=int, default=8, help="with --shapes: later epochs that are timed")
    ladders = ["bert_side", "bart_side", "t5_side", "llama_side"]
    parser.add_argument("--demo", nargs="*", choices=ladders, help="the shipped ladders of the demo")
    parser.add_argument("--demo-rows", type=int, default=128)
    parser.add_argument("--kernels", default="auto", help="with --demo: auto, reference, triton or off")
    options = parser.parse_args()
    if options.shapes:
        large(options)
        return
    torch.set_num_threads(1)
    if options.demo is not None:
        demo_epochs(options)
        return
    if options.memory:
        memory(options)
        return
    heads = "model", "stored", "epoch s", "first, cached", "later", "x epoch", "x first", "3 epochs", "10"
    print("|", " | ".join((*heads, "cache", "loss differs", "its step")), "|")
    print("|---" * (len(heads) + 3) + "|", flush=True)
    for name in options.models:
        for stored in options.stored:
            print(measure(name, options, stored), flush=True)


if __name__ == "__main__":
    main()
