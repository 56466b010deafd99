"""Methods beside each other on the demo tasks: score, share that trains, peak memory, time of an epoch.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--tasks llama bert] [--seeds 3] [--folder FOLDER]

Each row is the shipped recipe of its family and method, cut to a few minutes: shorter rows, STEPS steps. The
rate is the recipe's; where there is no recipe, and for full fine-tuning, it is the best of three for the
first seed (`grid` of petune sweep). Each run is a process of its own, so its peak is its own; seconds are of
the processor, so other programs on the machine do not count. With --folder a second call goes on with what is
there. Prints Markdown tables, of which `python -m benchmarks.pictures` draws the picture of docs/methods.md
once they are there, and whether default LoRA ends within 1 % of the tuned full fine-tuning.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers

import petune
from benchmarks.demo import Silent
from petune.recipe import Recipe, load_recipe
from petune.run.sweep import grid

STEPS = 60
SMALL = {
    "llama": ["data.max_length=64", "batch_size=8"],
    "bert": ["data.max_length=32"],
    "bart": ["data.max_length=64", "batch_size=8"],
}
# evaluated and saved at the end alone
ALIKE = [f"max_steps={STEPS}", "head_only=false", "report=false", "eval_every=10000", "save_every=10000"]
# rates to choose among, over that of the recipe of full fine-tuning; the others keep their recipes'
TRIED = {"full": (0.5, 1, 2), "ia3": (5, 20, 80), "miss": (0.5, 2, 8)}
METHODS = ("full", "lora", "dora", "ia3", "miss", "adapter", "side")
FEW = ("full", "lora", "head")  # of bert, whose steps are long
# recipes of another name; a run of less than an epoch meets no row twice
OTHERS = {"dora": ("{}_lora", []), "head": ("{}_head_cache", ["cache=false"])}
WITHIN = 0.01


class Clock(petune.Callback):
    """The seconds of the processor at which steps end."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After a step."""
        self.at.append(time.process_time())

    def step(self) -> float:
        """Of a step, the median."""
        return statistics.median(b - a for a, b in zip(self.at, self.at[1:], strict=False))


@dataclass(frozen=True)
class Found:
    """What a run has given. share: of the parameters, those that train; epoch: seconds; peak: bytes."""

    score: float
    before: float
    share: float
    epoch: float
    peak: int


def measured(recipe: Recipe) -> Found:
    """A run in a process of its own; what it gave is kept in its folder."""
    kept = Path(cast("str", recipe.out)) / "measured.json"
    if not kept.exists():
        if (child := os.fork()) == 0:
            try:
                kept.write_text(json.dumps(_run(recipe).__dict__))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    return Found(**json.loads(kept.read_text()))


def _run(recipe: Recipe) -> Found:
    clock = Clock()
    run = petune.train(recipe, callbacks=[clock], reporter=Silent(), overwrite=True)
    values = list(run.model.parameters())
    tuned = sum(value.numel() for value in values if value.requires_grad)
    steps = STEPS / run.history[-1]["epoch"]
    before, after = (run.summary[when][run.summary["metric"]] for when in ("before", "after"))
    peak = run.summary["peak_memory_bytes"]
    return Found(after, before, tuned / sum(map(torch.numel, values)), steps * clock.step(), peak)


def recipe_of(task: str, method: str, folder: Path) -> Recipe:
    """The recipe of a family and method, made small; of a method without one, LoRA's with another method."""
    words = [*SMALL[task], *ALIKE, f"out={folder / f'{task}-{method}'}"]
    if method in TRIED:
        return load_recipe(f"{task}_full", [*words, f"method={method}"])
    name, more = OTHERS.get(method, (f"{{}}_{method}", []))
    return load_recipe(name.format(task), [*words, f"method={method}", *more])


@dataclass(frozen=True)
class Row:
    """A method on a task: its rate, and what runs with each seed have given."""

    method: str
    lr: float
    found: list[Found]

    @property
    def score(self) -> float:
        """The mean over seeds."""
        return statistics.mean(one.score for one in self.found)

    def cells(self) -> list[str]:
        """Those of the table."""
        scores = [one.score for one in self.found]
        first = self.found[0]
        peak, epoch = (
            statistics.median(getattr(one, name) for one in self.found) for name in ("peak", "epoch")
        )
        return [
            self.method,
            f"{self.lr:g}",
            f"{self.score:.4f} ({min(scores):.4f} to {max(scores):.4f})",
            f"{100 * first.share:.2f}",
            f"{peak / 2**20:.0f}",
            f"{epoch:.1f}",
        ]


def row_of(task: str, method: str, seeds: int, folder: Path, better: Any) -> Row:
    """A method on a task: the best of its rates for the first seed, then the other seeds with that."""
    recipe = recipe_of(task, method, folder)
    rates = [f"{recipe.learning_rate * times:g}" for times in TRIED.get(method, (1,))]
    if len(rates) > 1:
        tried = {cell.values["lr"]: measured(cell.recipe).score for cell in grid(recipe, {"lr": rates})}
        print(f"{task} {method}: " + ", ".join(f"lr {lr} {score:.4f}" for lr, score in tried.items()))
        rates = [better(tried, key=tried.__getitem__)]
    cells = grid(recipe, {"lr": rates}, seeds)
    return Row(method, float(rates[0]), [measured(cell.recipe) for cell in cells])


def main() -> int:
    """The tables. Exits 1 where the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["llama", "bert"], choices=list(SMALL))
    parser.add_argument(
        "--methods", nargs="+", default=None, choices=(*METHODS, "head"), help="default: all, of bert three"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="keep the runs here, and go on with them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"petune {petune.__version__}, {versions}, Python {platform.python_version()}, 1 thread, ", end="")
    print(f"{time.strftime('%Y-%m-%d')}; {STEPS} steps, {options.seeds} seeds\n", flush=True)
    holds = True
    with tempfile.TemporaryDirectory() as own:
        for task in options.tasks:
            methods = options.methods or (FEW if task == "bert" else METHODS)
            holds &= table(task, methods, options.seeds, options.folder or Path(own))
    return 0 if holds else 1


def table(task: str, methods: tuple[str, ...], seeds: int, folder: Path) -> bool:
    """Print that of a task; whether LoRA is as good as full fine-tuning, where both are in it."""
    largest = load_recipe(f"{task}_full").task == "classify"
    better, word = (max, "accuracy") if largest else (min, "loss")
    rows = []
    for method in methods:
        rows.append(row_of(task, method, seeds, folder, better))
        print(f"| {task} | " + " | ".join(rows[-1].cells()) + " |", flush=True)
    heads = "method", "lr", f"{word} (of {seeds} seeds)", "trains, %", "peak, MiB", "s an epoch"
    print(f"\n| {task}: " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    print("\n".join("| " + " | ".join(row.cells()) + " |" for row in rows))
    print(f"\nuntouched base: {word} {rows[0].found[0].before:.4f}")
    scores = {row.method: row.score for row in rows}
    if not {"full", "lora"} <= scores.keys():
        return True
    behind = scores["lora"] / scores["full"] - 1
    behind = -behind if largest else behind
    good = behind <= WITHIN
    print(
        f"default LoRA is {100 * behind:+.1f} % behind tuned full: {'holds' if good else 'DOES NOT HOLD'}\n"
    )
    return good


if __name__ == "__main__":
    sys.exit(main())
