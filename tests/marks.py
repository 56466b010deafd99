"""The marks `forks`, `interpret` and `slow`, given to a test by what its code reaches, so that nobody has to
keep them by hand.

A test starts processes, runs kernels in Triton's interpreter or trains a whole run where its code, that of
its fixtures, or that of functions of tests/ which they name, names one of REACHED. Where petune itself starts
a process, no name says so, and the test has its mark by hand; tests/conftest.py fails a test that starts a
process without one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

REACHED = {
    "forks": (
        *(
            "subprocess",
            "multiprocessing",
            "os.fork",
            "petune.parallel.launch.launcher",
            "petune.tasks.bounded",
        ),
        *("tests.pool", "tests.group_pool", "tests.forked_launch", "tests.kills", "tests.kernels.gate"),
    ),
    "interpret": ("triton", "petune.kernels.triton"),
    "slow": (
        *("petune.train", "petune.run.train.train", "transformers.trainer", "torch.compile"),
        *("tests.small_runs.run", "tests.planned_runs", "tests.profiling.conftest"),
    ),
}


def marks_of(functions: list[Callable[..., Any]], settings: list[object]) -> set[str]:
    """The marks of a test that consists of `functions`, itself and its fixtures, called with `settings`."""
    found = {mark for function in functions for mark in _marks(inspect.unwrap(function))}
    return found.union(*(_named(name) for value in settings for name in _names_of(value)))


@cache
def _named(name: str) -> frozenset[str]:
    """The marks of a dotted name: those of what it is, or lies in."""
    return frozenset(
        mark for mark, ones in REACHED.items() if any(f"{name}.".startswith(f"{one}.") for one in ones)
    )


@cache
def _marks(function: Callable[..., Any]) -> frozenset[str]:
    """The marks of a function by what it, or a function of tests/ that it names, may call or use."""
    found, seen, waiting = set(_names_of(function)), set[Callable[..., Any]](), [function]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, FunctionType) or one in seen:
            continue
        seen.add(one)
        words = set(_words(one.__code__))
        for word in words:
            value = one.__globals__.get(word, word)
            found.update(_names_of(value))
            if isinstance(value, ModuleType):
                found.update(f"{value.__name__}.{other}" for other in words if other.isidentifier())
            if str(getattr(value, "__module__", "")).startswith("tests."):
                waiting += vars(value).values() if inspect.isclass(value) else [inspect.unwrap(value)]
    return frozenset[str]().union(*map(_named, found))


def _words(code: CodeType) -> Iterator[str]:
    """Names and texts of a function and of those within it."""
    yield from code.co_names
    yield from (value for value in code.co_consts if isinstance(value, str))
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _words(inner)


def _names_of(value: object) -> tuple[str, ...]:
    """The dotted name of a module, function or class; a text is taken for a name."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, ModuleType):
        return (value.__name__,)
    if type(value).__module__ == "petune.kernels.dispatch":  # Ops, which say whose they are
        return (str(getattr(value, "name", "")),)
    return (
        (f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}",)
        if callable(value)
        else ()
    )
