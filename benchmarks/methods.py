"""Methods beside each other on the demo tasks: score, share that trains, peak memory, time of an epoch.

    OMP_NUM_THREADS=1 python benchmarks/methods.py [--tasks llama bert] [--seeds 3] [--folder FOLDER]
    OMP_NUM_THREADS=1 python benchmarks/methods.py [device=cuda] --whole [--tasks llama bart t5 bert tokens]

Each row is the shipped recipe of its family and method, cut to a few minutes: shorter rows, STEPS steps. The
rate is the recipe's; where there is no recipe, and for full fine-tuning, it is the best of three for the
first seed (`grid` of petune sweep). Each run is a process of its own, so its peak is its own; seconds are of
the processor, so other programs on the machine do not count. With --folder a second call goes on with what is
there. With --whole every run has the rows and steps of its recipe, and there are three: full fine-tuning, at
the best of three rates for rows of every EACH-th module of those to train on, kept apart while it is chosen;
`lora` at the usual rate (`lr=null`), which nothing was chosen for; and `recipe`, LoRA at the recipe's rate,
which was chosen on the rows held out. Settings of every run may be given (device=cuda). Prints Markdown
tables, of which `python -m benchmarks.pictures` draws the picture of docs/methods.md once they are there, and
whether `lora` ends within 1 % of the tuned full fine-tuning.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers

import petune
from benchmarks.demo import Silent
from petune.demo import data_path
from petune.demo.punctuation import punctuated
from petune.recipe import Recipe, load_recipe, usual_rate
from petune.run.build import Base
from petune.run.sweep import grid

STEPS, EACH = 60, 8
SMALL = {
    "llama": ["data.max_length=64", "batch_size=8"],
    "bert": ["data.max_length=32"],
    "bart": ["data.max_length=64", "batch_size=8"],
}
# evaluated and saved at the end alone
ALIKE = ["head_only=false", "report=false", "eval_every=10000", "save_every=10000"]
# rates to choose among, over that of the recipe of full fine-tuning; the others keep their recipes'
TRIED = {"full": (0.5, 1, 2), "ia3": (5, 20, 80), "miss": (0.5, 2, 8)}
METHODS = ("full", "lora", "dora", "ia3", "miss", "adapter", "side")
FEW = ("full", "lora", "head")  # of bert, whose steps are long
WHOLE = ("full", "lora", "recipe")
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
    steps = len(clock.at) / run.history[-1]["epoch"]
    before, after = (run.summary[when][run.summary["metric"]] for when in ("before", "after"))
    peak = run.summary["peak_memory_bytes"]
    return Found(after, before, tuned / sum(map(torch.numel, values)), steps * clock.step(), peak)


def recipe_of(task: str, method: str, folder: Path, given: Sequence[str], *, whole: bool) -> Recipe:
    """The recipe of a family and method, made small unless it is wanted whole; of a method without one,
    LoRA's with another method."""
    words = [*ALIKE, f"out={folder / f'{task}-{method}'}", *given]
    if whole:
        name = "bert_lora_tokens" if task == "tokens" else f"{task}_lora"
        if method == "full":
            rate = load_recipe("bert_full" if task == "tokens" else f"{task}_full").lr
            return load_recipe(name, [*words, "method=full", f"lr={rate}"])
        return load_recipe(name, [*words, *(["lr=null"] if method == "lora" else [])])
    words += [*SMALL[task], f"max_steps={STEPS}"]
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


def apart(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with every EACH-th module of its rows to train on held out, and its own held-out rows left
    alone."""
    file = folder / f"{recipe.name}-apart.jsonl"
    start = "domain_" if recipe.data.path.endswith("-domain") else ""
    rows = list(map(json.loads, (data_path("docstrings") / f"{start}train.jsonl").read_text().splitlines()))
    chosen = set(sorted({row["module"] for row in rows})[::EACH])
    rows = [row for row in rows if row["module"] in chosen and (row["body"] or recipe.task != "seq2seq")]
    if recipe.task == "tokens":
        rows = [dict(zip(("tokens", "tags"), punctuated(row["text"]), strict=True)) for row in rows]
        rows = [row for row in rows if row["tokens"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_recipe(recipe, [f"data.eval={file.absolute()}", f"out={recipe.out}-apart"])


def row_of(recipe: Recipe, method: str, seeds: int, folder: Path, better: Any, *, whole: bool) -> Row:
    """A method on a task: the best of its rates for the first seed, then the other seeds with that."""
    task = recipe.name
    rate = usual_rate(recipe, Base(recipe).config) if recipe.lr is None else recipe.lr
    rates = [f"{rate * times:g}" for times in TRIED.get(method, (1,))]
    if len(rates) > 1:
        trial = apart(recipe, folder) if whole else recipe
        tried = {cell.values["lr"]: measured(cell.recipe).score for cell in grid(trial, {"lr": rates})}
        print(f"{task} {method}: " + ", ".join(f"lr {lr} {score:.4f}" for lr, score in tried.items()))
        rates = [better(tried, key=tried.__getitem__)]
    cells = grid(recipe, {"lr": rates}, seeds)
    return Row(method, float(rates[0]), [measured(cell.recipe) for cell in cells])


def main() -> int:
    """The tables. Exits 1 where the claim fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["llama", "bert"], choices=[*SMALL, "t5", "tokens"])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=None,
        choices=(*METHODS, "head", "recipe"),
        help="default: those that fit",
    )
    parser.add_argument("--whole", action="store_true", help="full and LoRA for as long as their recipes say")
    parser.add_argument("settings", nargs="*", help="of every run, as device=cuda")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="keep the runs here, and go on with them")
    options = parser.parse_args()
    if not options.whole and (odd := set(options.tasks) - SMALL.keys()):
        parser.error(f"{', '.join(odd)}: with --whole alone")
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"petune {petune.__version__}, {versions}, Python {platform.python_version()}, 1 thread, ", end="")
    steps = "the recipes'" if options.whole else STEPS
    print(f"{time.strftime('%Y-%m-%d')}; {steps} steps, {options.seeds} seeds\n", flush=True)
    holds = True
    with tempfile.TemporaryDirectory() as own:
        for task in options.tasks:
            usual = WHOLE if options.whole else FEW if task == "bert" else METHODS
            folder, methods = options.folder or Path(own), options.methods or usual
            folder.mkdir(parents=True, exist_ok=True)
            recipes = {
                method: recipe_of(task, method, folder, options.settings, whole=options.whole)
                for method in methods
            }
            holds &= table(task, recipes, options.seeds, folder, whole=options.whole)
    return 0 if holds else 1


def table(task: str, recipes: dict[str, Recipe], seeds: int, folder: Path, *, whole: bool) -> bool:
    """Print that of a task; whether LoRA is as good as full fine-tuning, where both are in it."""
    word = {"bert": "accuracy", "tokens": "entity F1"}.get(task, "loss")
    largest = word != "loss"
    better = max if largest else min
    rows = []
    for method, recipe in recipes.items():
        rows.append(row_of(recipe, method, seeds, folder, better, whole=whole))
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
