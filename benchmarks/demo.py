"""The figures of the demo, measured: every recipe against its untouched base, the floor in three seeds, and a
control on other text.

    python benchmarks/demo.py recipes            all 16 recipes: score before and after, time
    python benchmarks/demo.py floor              bert_lora, seeds 0 1 2, beside majority, naive Bayes and a
                                                 head on the frozen base
    python benchmarks/demo.py tags               bert_lora_tokens beside the most frequent tag of neighbouring
                                                 words: entity F1
    python benchmarks/demo.py control            llama, t5, bart with LoRA: tuned on the domain, and equally
                                                 long on other text

Prints a Markdown table; exits 1 when a claim fails. Runs in a temporary folder; overrides (`device=cuda`) may
follow.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers

import petune
from benchmarks.demo_baselines import majority, naive_bayes, tag_by_neighbours
from petune.demo import data_path
from petune.recipe import load_recipe, recipe_folder
from petune.run.build import prepare
from petune.run.finished import Run
from petune.run.reporting import PlainReporter
from petune.run.rows import texts_of
from petune.tasks import DataConfig, Labelled, Tagged, load_rows
from petune.tasks.configs import METRICS
from petune.tasks.metrics import entities


class Silent(PlainReporter):
    """A reporter with nothing to say."""

    def _quiet(self, *_: object) -> None:
        return

    header = step = evaluated = note = done = _quiet  # type: ignore[assignment]


def train(name: str, **settings: object) -> Run:
    """One shipped recipe, trained silently in the working directory, command-line overrides applied."""
    overrides = [word for word in sys.argv[2:] if "=" in word]
    recipe = load_recipe(recipe_folder() / f"{name}.yaml", overrides)
    return petune.train(recipe, reporter=Silent(), **settings)


def recipes() -> bool:
    """Every recipe: the named metric must beat the untouched base."""
    print("| recipe | metric | base | tuned | steps | s | tokens/s |\n|---|---|---|---|---|---|---|")
    good = True
    for file in sorted(recipe_folder().glob("*.yaml")):
        summary = train(file.stem, head_only=False).summary
        metric = summary["metric"]
        before, after = summary["before"][metric], summary["after"][metric]
        good &= after > before if METRICS[summary["task"]][metric] == "max" else after < before
        row = (
            file.stem,
            metric,
            f"{before:.4f}",
            f"{after:.4f}",
            summary["steps"],
            f"{summary['seconds']:.0f}",
            summary["tokens_per_s"],
        )
        print("| " + " | ".join(map(str, row)) + " |", flush=True)
    return good


def floor() -> bool:
    """LoRA on MiniLM against a trained head on the frozen backbone: at least 8 points of accuracy in each
    seed."""
    rows = load_rows(DataConfig(path="demo:docstrings"), "classify", Path())
    train_rows, eval_rows = (
        [(row.text, row.label) for row in side if isinstance(row, Labelled)]
        for side in (rows.train, rows.eval)
    )
    print(
        f"majority {majority([label for _, label in train_rows], [label for _, label in eval_rows]):.4f}, ",
        end="",
    )
    print(
        f"naive Bayes {naive_bayes(train_rows, eval_rows):.4f}, {len(train_rows)} rows to train on,"
        f" {len(eval_rows)} held out\n"
    )
    print("| seed | head only | LoRA | points | s |\n|---|---|---|---|---|")
    good = True
    for seed in range(3):
        summary = train("bert_lora", seed=seed, out=f"runs/floor-{seed}").summary
        head, lora = summary["head_only"], summary["after"]["accuracy"]
        good &= lora - head >= 0.08
        print(
            f"| {seed} | {head:.4f} | {lora:.4f} | {100 * (lora - head):+.1f} | {summary['seconds']:.0f} |",
            flush=True,
        )
    return good


def control() -> bool:
    """Loss on the held-out domain: untouched, tuned equally long on other text, tuned on the domain."""
    print("| model | base | other text | the domain |\n|---|---|---|---|")
    good = True
    held_out = str(data_path("docstrings") / "domain_eval.jsonl")
    other = str(data_path("docstrings") / "train.jsonl")
    for family, columns in (
        ("llama", {"text": "text"}),
        ("t5", {"source": "body", "target": "summary"}),
        ("bart", {"source": "body", "target": "summary"}),
    ):
        domain = train(f"{family}_lora", out=f"runs/{family}-domain").summary
        data = {
            "path": other,
            "eval": held_out,
            "columns": columns,
            "max_length": 128,
            "on_bad_line": "error",
        }
        if family != "llama":
            data |= {"path": str(_pairs(other)), "eval": str(_pairs(held_out))}
        elsewhere = train(
            f"{family}_lora", out=f"runs/{family}-other", data=data, max_steps=domain["steps"], epochs=100.0
        ).summary
        base, far, near = domain["before"]["loss"], elsewhere["after"]["loss"], domain["after"]["loss"]
        assert abs(base - elsewhere["before"]["loss"]) < 1e-3, "the two runs are not scored on the same rows"
        good &= near < far
        print(f"| tiny-{family} | {base:.4f} | {far:.4f} | {near:.4f} |", flush=True)
    return good


def _pairs(file: str) -> Path:
    """The rows of `file` that have a body, in a file of the working directory."""
    kept = Path(file).name
    lines = [
        line
        for line in Path(file).read_text(encoding="utf-8").splitlines(keepends=True)
        if '"body": ""' not in line
    ]
    Path(kept).write_text("".join(lines), encoding="utf-8")
    return Path(kept).absolute()


def tags() -> bool:
    """Entity F1 of the recipe of tags must beat tags by neighbouring words, on the words that are left after
    cutting."""
    run = train("bert_lora_tokens", head_only=False)
    prepared = prepare(run.recipe)
    texts = texts_of(run.recipe, "tokens", prepared.rows.labels, run.objects)
    known = [(row.tokens, row.tags) for row in texts.train if isinstance(row, Tagged)]
    rows = {row.where: row for row in texts.eval if isinstance(row, Tagged)}
    guesses = dict(zip(rows, tag_by_neighbours(known, [row.tokens for row in rows.values()]), strict=True))
    right = found = true = 0
    for example in prepared.encoded.eval:
        where, left = example.where, example.trained
        said, gold = entities(guesses[where][:left]), entities(rows[where].tags[:left])
        right, found, true = right + len(said & gold), found + len(said), true + len(gold)
    baseline, tuned = 2 * right / (found + true), run.summary["after"]["f1"]
    print(
        f"| neighbours | untouched | LoRA | steps | s |\n|---|---|---|---|---|\n| {baseline:.4f} |"
        f" {run.summary['before']['f1']:.4f} ",
        end="",
    )
    print(f"| {tuned:.4f} | {run.summary['steps']} | {run.summary['seconds']:.0f} |")
    return bool(tuned > baseline)


def main() -> int:
    """Run the part that is named."""
    parts = {"recipes": recipes, "floor": floor, "tags": tags, "control": control}
    if len(sys.argv) < 2 or sys.argv[1] not in parts:
        print(__doc__)
        return 2
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"CPU, {torch.get_num_threads()} threads"
    )
    print(
        f"petune {petune.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, ",
        end="",
    )
    print(f"Python {platform.python_version()}, {device}, {time.strftime('%Y-%m-%d')}\n")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        good = parts[sys.argv[1]]()
    print("\nholds" if good else "\nDOES NOT HOLD")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
