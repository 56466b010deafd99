"""What the rows of a run cost each rank, in memory and in time: `python benchmarks/rows.py`.

    python benchmarks/rows.py                      3 million tokens, every process its own, then kept
    python benchmarks/rows.py --rows 200000        more of them
    python benchmarks/rows.py --packing            packed into sequences of 1,024 tokens

A process of its own for each line prepares a recipe (causal, demo:tiny-llama) on a JSONL file of random
words, as every rank does, and says how long that took and how much anonymous memory it has kept since before.
What is mapped from files, which ranks share, is not counted. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORDS = 120  # of a row, on average


def write_rows(path: Path, number: int) -> None:
    """Plain texts of random words."""
    drawn = random.Random(0)
    words = [
        "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz", k=drawn.randint(2, 9))) for _ in range(20_000)
    ]
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            text = " ".join(drawn.choices(words, k=drawn.randint(WORDS // 2, WORDS * 3 // 2)))
            file.write(json.dumps({"text": text}) + "\n")


def status(name: str) -> int:
    """A line of /proc/self/status, in bytes."""
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(f"{name}:"))


def measure(rows: Path, cache: str, packing: bool) -> None:
    """Prepare as a rank does; print the figures as JSON."""
    import torch

    from petune.recipe import load_recipe
    from petune.run.build import prepare

    small = rows.with_name("few.jsonl")
    given = {"model": "demo:tiny-llama", "task": "causal", "method": "lora", "data": {"path": str(small)}}
    prepare(load_recipe(given, {"rows_cache": "off"}))  # imports, tokenizer
    torch.set_num_threads(1)
    gc.collect()
    before, began = status("RssAnon"), time.perf_counter()
    settings = {"data.path": str(rows), "data.packing": packing, "rows_cache": cache}
    prepared = prepare(load_recipe(given, settings))
    took = time.perf_counter() - began
    gc.collect()
    seen = sum(len(one.input_ids) for one in prepared.encoded.train[:4096])  # a first part, as steps read it
    tokens = prepared.encoded.report.tokens
    found = {"seconds": took, "kept": status("RssAnon") - before, "tokens": tokens, "seen": seen}
    print(json.dumps(found | {"rows": prepared.encoded.report.rows}))


def run(rows: Path, cache: str, packing: bool) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(rows), cache, *(["--packing"] if packing else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Each way once, in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--packing", action="store_true")
    parser.add_argument("--measure", nargs=2)
    given = parser.parse_args()
    if given.measure:
        measure(Path(given.measure[0]), given.measure[1], given.packing)
        return
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        write_rows(rows, given.rows)
        write_rows(rows.with_name("few.jsonl"), 20)
        print("| rows | s | MB kept | bytes a token |\n|---|---|---|---|")
        for name, cache in (("every process its own", "off"), ("first", scratch), ("second", scratch)):
            place = cache if cache == "off" else f"{cache}/kept"
            found = run(rows, place, given.packing)
            each = found["kept"] / found["tokens"]
            print(f"| {name} | {found['seconds']:.2f} | {found['kept'] / 1e6:.0f} | {each:.1f} |")
        print(f"{found['tokens']:,} tokens in {found['rows']:,} rows of {rows.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
