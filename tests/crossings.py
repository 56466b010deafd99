"""Crossings of parameters: a few of their cells in the short suite, all the others in the long one.

    @pytest.mark.crossed
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize("p", [0.0, 0.3])

Nearly every fault shows where two values meet, and most wherever one of them is. So every two values of
different parameters are together in a cell of the short suite; under `crossed(1)` every value is in one. What
asks for three that meet is left to `make test-long`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Cell = tuple[Hashable, ...]


def leave_to_long(items: list[pytest.Item]) -> None:
    """Mark as long what the short suite does without, of every function that is marked as crossed."""
    crossings: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("crossed")
            and not item.get_closest_marker("long")
        ):
            crossings[item.nodeid.partition("[")[0], item.originalname].append(item)
    for cells in crossings.values():
        mark: Any = cells[0].get_closest_marker("crossed")
        # a decorator's parameters are one, and have one name
        short = cover([tuple(item.callspec._idlist) for item in cells], *mark.args)
        for at, item in enumerate(cells):
            if at not in short:
                item.add_marker(pytest.mark.long)


def cover(cells: Sequence[Cell], together: int = 2) -> set[int]:
    """Places of few cells in which every `together` values that meet in one of them do. Equal on every
    call."""
    meetings = [frozenset(combinations(enumerate(cell), together)) for cell in cells]
    left, chosen = set[Any]().union(*meetings), set[int]()
    while left:
        best = max(range(len(cells)), key=lambda at: len(meetings[at] & left))
        chosen.add(best)
        left -= meetings[best]
    return chosen
