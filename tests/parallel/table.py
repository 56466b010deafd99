"""The matrix as a table: `python -m tests.parallel.table` runs every cell on two ranks and prints the largest
difference of a gradient.

One row per method and backend, one column per family; `float64` as an argument runs it in double precision. A
cell that does not agree shows FAIL, and the run ends with code 1.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.methods.zoo import FOUR, SETTINGS
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of


def cell(name: str, method: str, backend: str, dtype: torch.dtype) -> str:
    """The largest difference of one cell, as text."""
    plan = BACKENDS[backend](name, 2)
    try:
        return f"{check(Case(name, method, plan, dtype, settings=settings_of(name, plan))):.1e}"
    except Exception as error:
        print(f"{method} {backend} {name}: {error}", file=sys.stderr)
        return "FAIL"


def main(dtype: torch.dtype) -> int:
    """Print the table in Markdown, row by row as they are ready."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    print(
        f"| method | backend | {' | '.join(name.partition('-')[0] for name in FOUR)}"
        f" |\n|---|---|{'---|' * len(FOUR)}"
    )
    failed = 0
    for method in SETTINGS:
        for backend in BACKENDS:
            cells = [cell(name, method, backend, dtype) for name in FOUR]
            failed += "FAIL" in cells
            print(f"| {method} | {backend} | {' | '.join(cells)} |", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(torch.float64 if "float64" in sys.argv[1:] else torch.float32))
