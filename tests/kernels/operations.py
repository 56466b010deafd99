"""The operations of a form with others in the place of some."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from petune.kernels.dispatch import Ops


def exchanged(ops: Ops, **others: Callable[..., Any]) -> Ops:
    """The same but for these."""
    return replace(ops, forms=tuple((dict(ops.forms) | others).items()))
