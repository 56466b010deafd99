"""Wrap, save and load beside peft, in one process: `python benchmarks/wrap.py`. Exits 1 when petune is slower
than it promises.

A 32-layer Llama (hidden 256, random weights), LoRA of rank 8 on every linear but the output head. The two
libraries take turns, each on base models copied outside the timing; the medians' ratio is what counts, as the
machine's own speed cancels out. petune's save includes its flushes to disk (peft does none), the fingerprint
of the base and the check for non-finite values; its load checks all of them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from transformers.models.llama import LlamaConfig, LlamaForCausalLM

from petune import methods
from petune.saving import export
from petune.saving.load import load

LIMITS = {"wrap": 0.3, "save": 0.8, "load": 0.5}


def base_model() -> LlamaForCausalLM:
    """The model both libraries tune."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, **sizes)).eval()


def wrap_peft(base: Any) -> Any:
    """peft's way in."""
    return peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))


def wrap_petune(base: Any) -> Any:
    """petune's way in."""
    return methods.wrap(base, "lora", r=8, targets="all-linear")


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of one call, with the garbage of earlier ones gone."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds, result


def measure(repeats: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Seconds by step and library, `repeats` each, the libraries taking turns at going first."""
    original = base_model()
    ways: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Path], Any], Callable[[Any, Path], Any]]] = {
        "peft": (
            wrap_peft,
            lambda model, place: model.save_pretrained(place),
            lambda base, place: peft.PeftModel.from_pretrained(base, place),
        ),
        "petune": (wrap_petune, export.save, load),
    }
    seconds: dict[str, dict[str, list[float]]] = {step: {name: [] for name in ways} for step in LIMITS}
    for turn in range(-1, repeats):  # the first turn warms up and is not counted
        for name, (wrap, save, take_up) in sorted(ways.items(), reverse=bool(turn % 2)):
            base, other = copy.deepcopy(original), copy.deepcopy(original)
            place = folder / f"{name}-{turn}"
            wrapping, model = timed(lambda wrap=wrap, base=base: wrap(base))
            train(model)
            saving, _ = timed(lambda save=save, model=model, place=place: save(model, place))
            loading, _ = timed(lambda take_up=take_up, other=other, place=place: take_up(other, place))
            if turn >= 0:
                for step, value in zip(LIMITS, (wrapping, saving, loading), strict=True):
                    seconds[step][name].append(value)
    return seconds


def train(model: Any) -> None:
    """Make the factors those of a trained adapter, so that neither library writes or reads zeros."""
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.normal_(std=0.02)


def main() -> int:
    """Print the table; 1 when a limit is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: a temporary folder)"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    # not its own, which would print a line per wrapping
    logging.getLogger("petune").addHandler(logging.NullHandler())
    logging.getLogger("petune").propagate = False
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        seconds = measure(options.repeats, Path(folder))
    print(
        f"peft {peft.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads,"
        f" {options.repeats} turns"
    )
    print(f"{'step':6}{'peft ms':>18}{'petune ms':>18}{'ratio':>8}{'limit':>8}      median (min)")
    missed = False
    for step, limit in LIMITS.items():
        theirs, ours = (statistics.median(seconds[step][name]) for name in ("peft", "petune"))
        cells = [
            f"{1e3 * statistics.median(runs):.1f} ({1e3 * min(runs):.1f})"
            for runs in (seconds[step]["peft"], seconds[step]["petune"])
        ]
        missed |= ours > limit * theirs
        print(
            f"{step:6}{cells[0]:>18}{cells[1]:>18}{ours / theirs:8.2f}{limit:8.2f} "
            f" {'MISSED' if ours > limit * theirs else 'holds'}"
        )
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
