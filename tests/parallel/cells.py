"""The cells of the matrix: the methods, backends and families that are tried together.

CELLS is their whole product, for the long suite. SQUARE is the part in the short one: under every backend
four cells, a Latin square of methods and families that turns with the backend, so that every pair of a
method, a backend and a family is there.
"""

from __future__ import annotations

from petune.parallel.plan import ParallelPlan
from tests.methods.zoo import FOUR, SETTINGS
from tests.parallel.harness import Case
from tests.parallel.plans import BACKENDS, COMPOSED, settings_of

METHODS = tuple(SETTINGS)
CELLS = [(method, backend, name) for name in FOUR for method in METHODS for backend in BACKENDS]
SQUARE = [
    (method, backend, FOUR[(at - turn - 1) % 4])
    for turn, backend in enumerate(BACKENDS)
    for at, method in enumerate(METHODS)
]
# One cell for each backend, so that the family and the method go round. How far these two lists turn is
# decided by the long part of tests/test_mutations.py: biases train under tp and galaxy, Llama's positions are
# cut under sp-gather, BERT drops out under galaxy.
ROUND = [(METHODS[(at + at // 4) % 4], backend, FOUR[(at + 1) % 4]) for at, backend in enumerate(BACKENDS)]
# Each composition with every family and methods that go round; the short suite has the cells of every other
# one.
COMPOSITIONS = [
    (METHODS[(at + turn // 2) % 4], composed, FOUR[at])
    for at in range(4)
    for turn, composed in enumerate(COMPOSED)
]
HALF = COMPOSITIONS[::2]


def case(name: str, method: str, plan: ParallelPlan, **changes: object) -> Case:
    """The cell with as many blocks as the plan's stages say."""
    return Case(name, method, plan, settings=settings_of(name, plan), **changes)  # type: ignore[arg-type]


def short_cells(like: Case) -> list[Case]:
    """The cells of the short suite under the backend of `like`: with its dropout and recomputation, or
    without as it is."""
    backends = {name for name, plan in BACKENDS.items() if plan(like.name, 2) == like.plan}
    composed = {name for name, plan in COMPOSED.items() if plan(like.name) == like.plan}
    changes = {"dropout": like.dropout, "recompute": True, "steps": 1} if like.dropout else {"steps": 1}
    found = [
        case(name, method, BACKENDS[backend](name, 2), **changes)
        for method, backend, name in (ROUND if like.dropout else SQUARE)
        if backend in backends
    ]
    return found + [
        case(name, method, COMPOSED[both](name), **changes) for method, both, name in HALF if both in composed
    ]
