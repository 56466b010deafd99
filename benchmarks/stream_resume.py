"""How long a run on streamed rows takes to go on: `python benchmarks/stream_resume.py`.

    python benchmarks/stream_resume.py                 a run that has trained on 200,000 rows
    python benchmarks/stream_resume.py --rows 400000   on more

A tiny Llama trains on a JSONL file of texts, about 600 bytes each, in steps of 2,000 rows of which it
reads the first 8 tokens, and is stopped. Then it goes on for one step, by where its checkpoint says that the
next row is, and again as if the checkpoint did not say so. Told are the seconds until the rows of that step
are there, from the moment when the state has been read, of the clock and of computing, and the least of
--times. Both must end with the same state, or it exits 1.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from petune.recipe import load_recipe
from petune.run.reporting import Silent
from petune.run.train import train
from petune.tasks import Example
from petune.tasks.streamed import Streamed
from tests.small_runs import newest, settings, state_of

STEP = 2_000  # rows
_GO_TO, _EXAMPLES = Streamed.go_to, Streamed.examples


def write(path: Path, rows: int) -> None:
    """Rows of text, no two alike."""
    words = ["red", "blue", "green", "one", "two", "three", "sun", "sea", "hill"]
    with path.open("w", encoding="utf-8") as file:
        for row in range(rows):
            text = " ".join(words[(row // 9**at) % 9] for at in range(8))
            file.write(json.dumps({"text": f"{text} " * 18, "id": row}) + "\n")


def going_on(recipe: dict[str, Any], place: Path, *, knows: bool) -> tuple[float, float, Path]:
    """Seconds of the clock and of computing until the first step of a run that goes on has its rows, and the
    folder; `knows` whether its checkpoint says where those are."""
    copy, began, took = place / f"again-{knows}", [0.0, 0.0], [0.0, 0.0]
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(place / "run", copy)

    def go_to(stream: Streamed, at: int, mark: Any) -> str | None:
        began[:] = time.perf_counter(), time.process_time()
        return _GO_TO(stream, at, mark if knows else None)

    def examples(stream: Streamed, first: int, count: int) -> list[Example]:
        found = _EXAMPLES(stream, first, count)
        if not any(took):
            took[:] = time.perf_counter() - began[0], time.process_time() - began[1]
        return found

    with patch.multiple(Streamed, go_to=go_to, examples=examples):
        train(
            load_recipe(recipe | {"out": str(copy)}),
            resume=True,
            allow_change=["max_steps"],
            reporter=Silent(),
        )
    return took[0], took[1], copy


def main() -> int:
    """Measure and say; 1 where the two ways end differently."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--times", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        recipe = settings(place, method="lora") | {"batch_size": 500, "accumulate": STEP // 500}
        write(place / "rows.jsonl", asked.rows + 2 * STEP)
        print(f"{(place / 'rows.jsonl').stat().st_size / 1e6:.0f} MB, {asked.rows:,} rows trained on")
        data = recipe["data"] | {"path": str(place / "rows.jsonl"), "stream": True, "max_length": 8}
        recipe |= {
            "data": data | {"truncation": "left"},
            "eval_every": 10**6,
            "save_every": 10**6,
            "warmup": 0,
        }
        steps = asked.rows // STEP
        train(load_recipe(recipe | {"max_steps": steps}), reporter=Silent())
        states = []
        for knows in (True, False):
            found = [
                going_on(recipe | {"max_steps": steps + 1}, place, knows=knows) for _ in range(asked.times)
            ]
            clock, computing = (min(one[at] for one in found) for at in (0, 1))
            said = "says where they are" if knows else "does not say it"
            print(f"the checkpoint {said}: {clock:.2f} s, {computing:.2f} s of computing")
            states.append(state_of(newest(found[0][2]))[0])
    same = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    print("the same state" if same else "DIFFERENT STATES")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
