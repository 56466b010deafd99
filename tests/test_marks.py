"""Tests that start processes, run kernels in the interpreter or train whole runs are found by what they
reach."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from petune.kernels.dispatch import triton_ops
from petune.kernels.triton import residual
from tests import small_runs
from tests.kernels.exactness import matrix
from tests.marks import marks_of
from tests.parallel.harness import check
from tests.planned_runs import trained
from tests.pool import run as in_ranks


def by_a_pool() -> None:
    in_ranks(2, print)


def by_a_function_of_the_tests() -> None:
    check(None)  # type: ignore[arg-type]


def by_a_module() -> None:
    assert [subprocess.run([one], check=True) for one in ("true",)]


def within() -> None:
    def inner() -> int:
        return os.fork()

    inner()


def by_a_kernel() -> None:
    residual.total(matrix)  # type: ignore[call-arg]


OPS = triton_ops()


def by_operations() -> None:
    assert OPS.activate


def by_a_whole_run(tmp_path: Path) -> None:
    small_runs.run(tmp_path)


def by_ranks(tmp_path: Path) -> None:
    trained({"out": str(tmp_path)})


def in_itself() -> None:
    assert os.getpid() and matrix


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (by_a_pool, {"forks"}),
        (by_a_function_of_the_tests, {"forks"}),
        (by_a_module, {"forks"}),
        (within, {"forks"}),
        (by_a_kernel, {"interpret"}),
        (by_operations, {"interpret"}),
        (by_a_whole_run, {"slow"}),
        (by_ranks, {"forks", "slow"}),
        (in_itself, set()),
    ],
)
def test_a_test_is_marked_by_what_it_reaches(function: object, expected: set[str]) -> None:
    assert marks_of([function], []) == expected  # type: ignore[list-item]


def test_a_parameter_marks_its_test() -> None:
    assert marks_of([in_itself], ["triton"]) == marks_of([in_itself], [residual.total]) == {"interpret"}
    assert marks_of([in_itself], ["reference", 3, None]) == set()


def test_a_fixture_marks_its_test() -> None:
    assert marks_of([in_itself, by_a_pool], []) == {"forks"}
