"""How many examples a random test of the reader draws."""

from __future__ import annotations

from hypothesis import settings


def drawn(number: int) -> settings:
    """`number` of them in the long suite, which draws fresh ones, and a quarter in the short one, where they
    are the same every time."""
    return settings(max_examples=number // 4 if settings.default.derandomize else number, deadline=None)
