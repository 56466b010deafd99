"""Whoever asks for overlap where blocks are not fused is told that nothing hides what is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from petune.run import fusing


@pytest.mark.parametrize(
    ("attention", "overlap", "told"),
    [("sequence", True, True), ("heads", True, False), ("sequence", False, False), (None, False, False)],
)
def test_overlap_of_blocks_that_are_not_fused_is_said_to_hide_nothing(
    attention: str | None, overlap: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fusing, "say", said.append)
    cut = SimpleNamespace(attention=attention, mlp="sequence", overlap=overlap) if attention else None
    runner: Any = SimpleNamespace(plan=SimpleNamespace(cut=cut), modules=[nn.Linear(1, 1)])
    recipe: Any = SimpleNamespace(kernels="off", compile=False)
    fusing.fuse(runner, recipe)
    assert bool(said) == told and all("nothing hides" in line for line in said)
