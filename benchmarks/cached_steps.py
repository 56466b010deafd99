"""Steps of a ladder beside large backbones of random weights on one GPU: without the activation cache, in its
first epoch and in later ones, beside the ladder alone and what the files give.

benchmarks/activation_cache.py --shapes runs this. bf16 backbones under autocast, reduction 8, fused AdamW.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import petune
from petune import demo
from petune.kernels.block.module import FusedBlock
from petune.methods.activation_cache import _Next
from petune.methods.cached_backbone import identity_of
from petune.methods.stack_levels import StackLevels
from petune.models.stack import stacks_in

BATCHES = 4  # of an epoch
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """A model, rows and tokens of a batch, and the tokens of a row that a decoder writes."""

    make: Callable[[], Any]
    rows: int
    tokens: int
    targets: int = 0

    @property
    def batch_tokens(self) -> int:
        """Tokens of a batch, of both sides."""
        return self.rows * (self.tokens + self.targets)


def _bert() -> Any:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_labels": 3}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(intermediate_size=4096, **sizes, **drops))


def _t5() -> Any:
    sizes = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(vocab_size=32128, decoder_start_token_id=0, **sizes))


def _llama() -> Any:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 12}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128256, **sizes, **heads))


def _tiny() -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))


def _demo_t5() -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(demo.model_path("tiny-t5"))


def _demo_bart() -> Any:
    return AutoModelForSeq2SeqLM.from_pretrained(demo.model_path("tiny-bart"))


def _demo_llama() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.model_path("tiny-llama"))


SHAPES = {
    "bert-large": Shape(_bert, 32, 128),
    "t5-large": Shape(_t5, 8, 512, 128),
    "8b": Shape(_llama, 4, 1024),  # 12 of its 32 blocks
    "demo-t5": Shape(_demo_t5, 16, 128, 64),
    "demo-bart": Shape(_demo_bart, 16, 128, 64),
    "demo-llama": Shape(_demo_llama, 16, 128),
    "tiny": Shape(_tiny, 2, 16),  # to try this on a CPU
}


class Steps:
    """Steps of a tuned model on the batches of a shape."""

    def __init__(self, shape: Shape, method: str, device: torch.device) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        # full fine-tuning trains float32 weights, as recipes have it
        dtype = torch.bfloat16 if method == "side" else torch.float32
        torch.set_default_dtype(dtype)
        try:
            with device:
                made = shape.make().to(device, dtype)
        finally:
            torch.set_default_dtype(before)
        settings = {"reduction": 8} if method == "side" else {}
        self.model: Any = petune.wrap(made, method, **settings).train()
        trained = [value for value in self.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=device.type == "cuda")
        self.batches = self._drawn(made.config.vocab_size)

    def _drawn(self, vocabulary: int) -> list[Batch]:
        """On the CPU; no row is padded."""
        draw, shape = torch.Generator().manual_seed(1), self.shape
        found = []
        for _ in range(BATCHES):
            ids = torch.randint(3, vocabulary, (shape.rows, shape.tokens), generator=draw)
            batch = {"input_ids": ids, "labels": ids}
            if shape.targets:
                batch["labels"] = ids[:, : shape.targets].contiguous()
            elif "Bert" in type(self.model).__name__:
                batch["labels"] = torch.randint(0, 3, (shape.rows,), generator=draw)
            found.append(batch)
        return found

    def on_device(self, times: int = 1) -> Iterable[Batch]:
        """Batches of so many epochs, as a loop without a cache has them."""
        return (
            {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}
            for _ in range(times)
            for batch in self.batches
        )

    def loss(self, batch: Mapping[str, Any]) -> Tensor:
        """Of a batch on the device."""
        more = {} if "Bert" in type(self.model).__name__ else {"use_cache": False}
        with torch.autocast(self.device.type, torch.bfloat16):
            found: Tensor = self.model(**batch, **more).loss
        return found

    def run(self, batches: Iterable[Mapping[str, Any]]) -> float:
        """Tokens a second of a step on each of these batches."""
        done, began = 0, self.now()
        for batch in batches:
            self.loss(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            done += self.shape.batch_tokens
        return done / (self.now() - began)

    def now(self) -> float:
        """Seconds, when the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def peak(self, batches: Iterable[Mapping[str, Any]]) -> int:
        """The most bytes of steps on these batches; 0 on the CPU."""
        _tidy()
        if self.device.type != "cuda":
            self.run(batches)
            return 0
        torch.cuda.reset_peak_memory_stats(self.device)
        self.run(batches)
        return torch.cuda.max_memory_allocated(self.device)


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def levels_of(model: nn.Module) -> list[StackLevels]:
    """Those of an open cache, one for each stack."""
    found: list[Any] = [stack.levels for stack in stacks_in(model).values()]
    return found


@contextmanager
def alone(cache: petune.ActivationCache, steps: Steps) -> Any:
    """Gives batches on the device whose levels lie there ready: to train on them is the ladder's own work."""
    kept = []
    for batch in steps.on_device():
        with torch.no_grad():
            cache._begin(steps.model, (), batch | {"use_cache": False})
        kept.append((batch, [level.known for level in levels_of(steps.model)]))
        cache._end(steps.model, None, None)
    for handle in cache._hooks:
        handle.remove()

    def ready(times: int) -> Iterable[Batch]:
        for _ in range(times):
            for batch, known in kept:
                for level, one in zip(levels_of(steps.model), known, strict=True):
                    level.known = one
                yield batch

    yield ready
    for level in levels_of(steps.model):
        level.known = None


def read_rate(cache: petune.ActivationCache, steps: Steps, times: int) -> float:
    """Tokens a second that come from the files to the device, where nothing else is done."""
    done, began = 0, steps.now()
    for _ in range(times):
        for batch in steps.batches:
            for level, request in cache._requests(_Next(batch | {"use_cache": False})):
                level.reader.take(request)
            done += steps.shape.batch_tokens
    return done / (steps.now() - began)


@torch.no_grad()
def send_away(model: nn.Module) -> int:
    """Take the blocks' weights from memory, as a run does where all rows are known; their bytes."""
    size = 0
    for stack in stacks_in(model).values():
        if stack.beneath is not None:
            stack.beneath.forget()
        for _, block in stack.numbered:
            for value in block.parameters():
                size += value.nbytes
                swap_tensors(value, nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False))
            if isinstance(block, FusedBlock):
                block.bank_again()
    return size


def full_peak(shape: Shape, device: torch.device) -> str:
    """The peak of full fine-tuning in GiB, or more than what there is."""
    try:
        steps = Steps(shape, "full", device)
        peak = steps.peak(list(steps.on_device())[:2])
    except torch.cuda.OutOfMemoryError:
        return f"> {torch.cuda.get_device_properties(device).total_memory / 2**30:.0f}"
    return f"{peak / 2**30:.2f}"


def measure(name: str, epochs: int) -> str:
    """A line of the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape = SHAPES[name]
    steps = Steps(shape, "side", device)
    steps.run(steps.on_device(1))
    uncached = steps.run(steps.on_device(2))
    steps.model.eval()  # without dropout, for the numbers
    with torch.no_grad():
        before = [float(steps.loss(batch)) for batch in steps.on_device()]
    with tempfile.TemporaryDirectory() as folder:
        with petune.ActivationCache(steps.model, folder) as cache, torch.no_grad():
            for batch in steps.on_device():
                steps.loss(batch)
            after = [float(steps.loss(batch)) for batch in steps.on_device()]
        steps.model.train()
        differs = max(abs(one - other) / abs(one) for one, other in zip(before, after, strict=True))
    known = {"identity": identity_of(steps.model)}  # which cannot be asked once blocks are away
    with tempfile.TemporaryDirectory() as folder:
        with petune.ActivationCache(steps.model, folder, **known) as cache:
            first = steps.run(cache.ahead(steps.batches, device))
            steps.run(cache.ahead(steps.batches * 3, device))
            later = steps.run(cache.ahead(steps.batches * epochs, device))
            size, held, base = cache.nbytes, cache.held_bytes, cache.folder.name
            with alone(cache, steps) as ready:
                steps.run(ready(2))
                ladder = steps.run(ready(epochs))
            del ready  # which has all levels
        with petune.ActivationCache(steps.model, folder, room=0, identity=base) as cache:
            read_rate(cache, steps, 1)
            rate = read_rate(cache, steps, 2)
            from_files = steps.run(cache.ahead(steps.batches * epochs, device))
        with petune.ActivationCache(steps.model, folder, identity=base) as cache:
            steps.run(cache.ahead(steps.batches * 2, device))
            away = send_away(steps.model)
            peak = steps.peak(cache.ahead(steps.batches * 2, device))
        with petune.ActivationCache(steps.model, folder, room=0, identity=base) as cache:
            lean = steps.peak(cache.ahead(steps.batches * 2, device))
    del steps
    _tidy()
    speeds = (uncached, first, later, ladder, rate, from_files)
    shares = f"{later / ladder:.0%} | {from_files / min(ladder, rate):.0%}"
    sizes = " | ".join(f"{one / 2**30:.2f}" for one in (size, held, away, peak, lean))
    full = full_peak(shape, device)
    _tidy()
    return (
        f"| {name} | {shape.rows} x {shape.tokens} + {shape.targets} | "
        + " | ".join(f"{speed:,.0f}" for speed in speeds)
        + f" | {shares} | {sizes} | {full} | {differs:.1e} |"
    )


HEADS = (
    *("shape", "batch", "uncached", "first", "later", "ladder alone", "read rate", "later, from files"),
    *("later / alone", "from files / min(alone, read)", "cache GiB", "held", "blocks away", "peak, later"),
    *("peak, from files", "peak, full", "loss differs"),
)
