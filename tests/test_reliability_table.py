"""The fault matrix of docs/reliability.md: every case is there, has an exit code, and every test that it
names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = 66
CODES = {"0", "2", "3", "4", "5", "6", "7", "75", "130", "141", "-", "its own"}
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`(?: \((\w+)\))?")


@cache
def functions_of(file: str) -> dict[str, str]:
    """The tests of a file, each with its decorators as source."""
    path = TESTS / file
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text()).body
    functions = [node for node in tree if isinstance(node, ast.FunctionDef)]
    of_all = [text for node in tree if (text := ast.unparse(node)).startswith("pytestmark")]
    return {
        node.name: " ".join([*of_all, *map(ast.unparse, node.decorator_list)])
        for node in functions
        if node.name.startswith("test_")
    }


def complaints(document: str) -> list[str]:
    """What is wrong with the matrix of a document."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in document.splitlines()
        if re.match(r"\| \d+ \| ", line)
    ]
    numbers = [int(row[0]) for row in rows]
    wrong = [f"case {number} is missing" for number in range(1, CASES + 1) if number not in numbers]
    wrong += [
        f"case {number} is there {numbers.count(number)} times"
        for number in sorted(set(numbers))
        if numbers.count(number) > 1
    ]
    for number, *cells in rows:
        if len(cells) != 4 or not all(cells):
            wrong.append(f"case {number} has not five cells")
            continue
        wrong += [
            f"case {number}: {code} is no exit code" for code in cells[2].split(", ") if code not in CODES
        ]
        named = NAMED.findall(cells[3])
        if not named or len(named) != cells[3].count("::"):
            wrong.append(f"case {number} has no test, or one that cannot be read")
        for file, name, mark in named:
            if name not in functions_of(file):
                wrong.append(f"case {number}: tests/{file} has no {name}")
            elif mark and f"mark.{mark}" not in functions_of(file)[name]:
                wrong.append(f"case {number}: {name} is not marked {mark}")
        if all(mark == "long" for *_, mark in named):
            wrong.append(f"case {number} has no test in the short suite")
    return wrong


def test_every_case_has_an_exit_code_and_tests_that_exist() -> None:
    assert complaints((TESTS.parent / "docs" / "reliability.md").read_text()) == []


NAME = "test_a_run_killed_again_and_again_ends_bit_by_bit_as_one_that_was_not"
GOOD = f"| {{}} | a kill | all is well | 6, 75 | `run/test_rank_kills.py::{NAME}` |"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "case 66 is missing"),
        (GOOD.format(65), "case 65 is there 2 times"),
        (GOOD.format(66).replace("6, 75", "6, 76"), "case 66: 76 is no exit code"),
        (GOOD.format(66).replace("a kill", ""), "case 66 has not five cells"),
        ("| 66 | a kill | all is well | 6 | none |", "case 66 has no test, or one that cannot be read"),
        (
            GOOD.format(66).replace("test_a_run", "test_no_run"),
            "tests/run/test_rank_kills.py has no test_no_run",
        ),
        (GOOD.format(66).replace("_kills.py", "_lills.py"), "tests/run/test_rank_lills.py has no"),
        (GOOD.format(66).replace("not` |", "not` (long) |"), "case 66 has no test in the short suite"),
    ],
)
def test_a_matrix_that_says_something_else_is_seen(line: str, says: str) -> None:
    rows = [GOOD.format(number) for number in range(1, CASES)]
    assert complaints("\n".join([*rows, GOOD.format(66)])) == []
    assert any(says in complaint for complaint in complaints("\n".join([*rows, line])))
