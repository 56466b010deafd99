"""The tests that `make quick` leaves out because they take long, of which slow_tests.txt is the list: those
that took LONGEST seconds or more on average over their parameters when they were last measured.

    .venv/bin/python -m pytest -m "not long and not system" --junitxml=times.xml    measures
    .venv/bin/python -m tests.slow_tests times.xml                                  writes the list
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

LONGEST = 0.08  # seconds
PLACE = Path(__file__).with_suffix(".txt")


@cache
def slow_tests() -> frozenset[str]:
    """Names as `named` gives them."""
    return frozenset(PLACE.read_text(encoding="utf-8").split())


@cache
def functions(module: str) -> frozenset[str]:
    """Names of a module's functions, in classes too; the suite has too many lines to parse them all."""
    path = PLACE.parent / f"{module.replace('.', '/')}.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return frozenset(re.findall(r"^ *def (\w+)\(", text, re.MULTILINE))


def named(module: str, function: str) -> str:
    """A test, whatever its parameters."""
    return f"{module.removeprefix('tests.')}::{function.partition('[')[0]}"


def slowest(times: Iterable[tuple[str, str, float]]) -> list[str]:
    """Those of (module, test, seconds) that belong on the list, sorted."""
    found = defaultdict[str, list[float]](list)
    for module, function, seconds in times:
        found[named(module, function)].append(seconds)
    return sorted(name for name, every in found.items() if sum(every) / len(every) >= LONGEST)


def main(measured: str) -> None:
    """Write the list."""
    cases = xml.parse(measured).getroot().iter("testcase")
    times = ((case.attrib["classname"], case.attrib["name"], float(case.attrib["time"])) for case in cases)
    PLACE.write_text("".join(f"{name}\n" for name in slowest(times)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
