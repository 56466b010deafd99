"""How long a checkpoint stops training: full fine-tuning of a Llama of random weights on the CPU, once with
saves that all wait for and once with saves beside training.

    PYTHONPATH=.:cli python benchmarks/saves.py                 91 million parameters: a state of 1.02 GiB
    PYTHONPATH=.:cli python benchmarks/saves.py --blocks 2      a smaller one

`stall` is what a save keeps training from its next step, `computing` how long it has a core meanwhile,
which a busy machine changes little, `committed` when the checkpoint has its name, from the moment at which it
was asked for; `step` is a step while nothing is written, `beside` one while something is. The median of each,
and the most. The checkpoints of both runs are compared: exits 1 where a file differs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import petune
import petune.run.saver
from petune import demo
from petune.log import human
from petune.run.reporting import Silent
from petune.run.saver import Saver
from petune.run.step import Step
from petune.saving import checkpoint


def write(folder: Path, blocks: int) -> None:
    """A checkpoint, its tokenizer, and rows of text."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=blocks,
        num_attention_heads=12,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo.model_path("tiny-llama")).save_pretrained(folder)
    rows = '{"text": "red sun"}\n{"text": "blue sea"}\n{"text": "green hill"}\n{"text": "one cat"}\n'
    (folder / "rows.jsonl").write_text(rows * 16)


class Clock:
    """Notes when saves begin, let go of training and are committed, and how long steps take."""

    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.computing: list[float] = []
        self.commits: list[float] = []
        self.steps: dict[bool, list[float]] = {False: [], True: []}
        self.asked: dict[int, float] = {}

    def __enter__(self) -> Clock:
        save, take, commit = Saver.save, Step.take, checkpoint.commit

        def saved(saver: Saver, *, beside: bool = False) -> Path:
            began, computed = time.perf_counter(), time.thread_time()
            if beside:
                self.asked[saver.progress.step] = began
            path = save(saver, beside=beside)
            if beside:
                self.stalls.append(time.perf_counter() - began)
                self.computing.append(time.thread_time() - computed)
            return path

        def taken(step: Step) -> dict[str, Any]:
            busy = any(thread.name == "petune-save" for thread in threading.enumerate())
            began = time.perf_counter()
            record = take(step)
            self.steps[busy].append(time.perf_counter() - began)
            return record

        def committed(root: Path, step: int, *given: Any, **named: Any) -> Path:
            path = commit(root, step, *given, **named)
            if step in self.asked:
                self.commits.append(time.perf_counter() - self.asked[step])
            return path

        self.before = save, take, commit
        Saver.save, Step.take, checkpoint.commit = saved, taken, committed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Saver.save, Step.take, checkpoint.commit = self.before  # type: ignore[method-assign]

    def row(self, name: str) -> str:
        cells = (self.stalls, self.computing, self.commits, self.steps[False][1:], self.steps[True])
        return f"| {name} | {' | '.join(_middle(cell) for cell in cells)} |"


def _middle(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({max(seconds):.2f})" if seconds else ""


def digests(folder: Path) -> dict[str, Mapping[str, Any]]:
    """What is known of each file of each checkpoint, but for when it was written."""
    places = sorted((folder / "checkpoints").glob("step-*"))
    return {path.name: checkpoint.verify(path).files for path in places}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch)
        write(folder / "base", given.blocks)
        steps = given.every * (given.saves + 1)
        recipe = {
            "model": str(folder / "base"),
            "data": str(folder / "base" / "rows.jsonl"),
            "task": "causal",
        }
        recipe |= {"method": "full", "device": "cpu", "batch_size": 2, "epochs": 100, "max_steps": steps}
        recipe |= {"save_every": given.every, "eval_every": 1000, "keep": given.saves + 1, "lr": 1e-5}
        print("| saves | stall, s (most) | computing | committed | step | beside |")
        print("|---|---|---|---|---|---|", flush=True)
        found = []
        for name in ("all wait", "beside"):
            room = petune.run.saver.lacks_room
            if name == "all wait":
                petune.run.saver.lacks_room = lambda needed: "as before"
            with Clock() as clock:
                petune.train(recipe | {"out": str(folder / name.replace(" ", "-"))}, reporter=Silent())
            petune.run.saver.lacks_room = room
            print(clock.row(name), flush=True)
            found.append(digests(folder / name.replace(" ", "-")))
        size = next((folder / "beside" / "checkpoints").glob("step-*/*.safetensors")).stat().st_size
        same = found[0] == found[1]
        print(f"{human(size)} a state, torch {torch.__version__}; files {'equal' if same else 'DIFFER'}")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
