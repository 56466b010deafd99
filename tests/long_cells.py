"""The cells of parametrised tests that the short suite leaves to `make test-long`, of which long_cells.txt is
the list: behind the first BUDGET seconds of a test, those that took DEAR or more when they were last
measured.

    .venv/bin/python -m pytest -m "not long and not system" --junitxml=times.xml    measures
    .venv/bin/python -m tests.long_cells times.xml                                  adds to the list

A test that is `crossed` chooses its cells by itself (tests/crossings.py), the pairs of methods, backends and
families are chosen in tests/parallel/cells.py, and planted faults are all short.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

BUDGET, DEAR = 0.3, 0.1  # seconds
KEPT = ("tests.test_matrix", "tests.test_mutations", "tests.test_breakages")  # all of whose cells are short
PLACE = Path(__file__).with_suffix(".txt")


@cache
def long_cells() -> frozenset[str]:
    """Cells as `cell` gives them."""
    return frozenset(PLACE.read_text(encoding="utf-8").splitlines())


def cell(module: str, name: str) -> str:
    """A test with its parameters."""
    return f"{module.removeprefix('tests.')}::{name}"


def behind(times: Iterable[tuple[str, str, float]]) -> list[str]:
    """Those of (module, test, seconds), in the order in which they are collected, that belong on the list."""
    spent, found = defaultdict[tuple[str, str], float](float), list[str]()
    for module, name, seconds in times:
        test = module, name.partition("[")[0]
        first = test not in spent
        if module not in KEPT and not first and seconds >= DEAR and spent[test] + seconds > BUDGET:
            found.append(cell(module, name))
        else:
            spent[test] += seconds
    return found


def main(measured: str) -> None:
    """Write the list: what is on it already, which was not run, and what is dear now."""
    cases = xml.parse(measured).getroot().iter("testcase")
    times = [(case.attrib["classname"], case.attrib["name"], float(case.attrib["time"])) for case in cases]
    PLACE.write_text("".join(f"{one}\n" for one in sorted({*long_cells(), *behind(times)})), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
