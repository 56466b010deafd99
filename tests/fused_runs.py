"""Short runs with fused blocks and without, and the comparison of their losses, scores and tuned tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.small_runs import Listener, flat, newest, settings, state_of, write_model

NEAR = 1e-5
LORA = {"name": "lora", "r": 2}


def recipe(place: Path, family: str, out: str, **changes: Any) -> dict[str, Any]:
    """Three steps of four rows, saved at their end, on a model whose attention has no dropout; BERT's
    connections have some."""
    if not (place / family).exists():
        connections = {"hidden_dropout_prob": 0.1} if family == "bert" else {}
        write_model(place / family, family, **connections)
    packing = changes.pop("packing", False)
    made = settings(
        place,
        family,
        changes.pop("method", LORA),
        out=out,
        **{"max_steps": 3, "warmup": 0, "lr": 3e-3, "save_every": 50, **changes},
    )
    if packing:
        made["data"] |= {"packing": True, "max_length": 32}
    return made


def tuned(folder: Path) -> dict[str, Tensor]:
    """The tuned tensors of a run's last checkpoint."""
    return {name: value for name, value in state_of(newest(folder))[0].items() if name.startswith("tuned/")}


def assert_alike(
    found: Path,
    expected: Path,
    told: Listener,
    other: Listener,
    near: float = NEAR,
    but: tuple[str, ...] = (),
) -> None:
    """Two runs the same to rounding; `but` end the names of weights that nobody can compare."""
    assert len(told.steps) == len(other.steps) > 0
    for one, two in zip(told.steps, other.steps, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=near)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=20 * near)
    assert len(told.scores) == len(other.scores) > 0
    for one, two in zip(told.scores, other.scores, strict=True):
        assert flat(one) == pytest.approx(flat(two), rel=20 * near, nan_ok=True)
    ours, theirs = tuned(found), tuned(expected)
    assert ours.keys() == theirs.keys()
    for name, value in ((name, value) for name, value in theirs.items() if not name.endswith(but)):
        # all but one in a hundred: AdamW's first steps make a whole lr of the sign of a gradient that is
        # nearly nothing
        far = (ours[name] - value).abs() > 20 * near * max(1.0, float(value.abs().max()))
        assert float(far.float().mean()) <= 0.01, name
