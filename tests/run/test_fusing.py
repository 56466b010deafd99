"""What a plan asks for and its blocks cannot give is told of: overlap where nothing hides what is sent,
columns that slow tensor cores down."""

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
    cut = (
        SimpleNamespace(attention=attention, mlp="sequence", overlap=overlap, columns=(), heads=())
        if attention
        else None
    )
    said = told_of(cut, "cuda", monkeypatch)
    assert bool(said) == told and all("nothing hides" in line for line in said)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_columns_that_are_slow_on_a_gpu_are_told_of_there(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = SimpleNamespace(attention="heads", mlp="heads", overlap=False, columns=(10344, 3992), heads=())
    said = told_of(cut, device, monkeypatch)
    assert [line.partition(":")[0] for line in said] == ["columns [10344, 3992]"] * (device == "cuda")


@pytest.mark.parametrize(
    ("ranks", "overlap", "inputs", "linked", "told"),
    [
        (4, False, ("x",), True, True),
        (4, True, ("x",), True, False),
        (2, False, ("x",), True, False),  # of two GPUs it hides no more than halves cost
        (4, False, ("x", "memory"), True, False),
        (4, False, ("x",), False, False),
    ],
)
def test_overlap_is_recommended_where_it_pays(
    ranks: int,
    overlap: bool,
    inputs: tuple[str, ...],
    linked: bool,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = SimpleNamespace(program=SimpleNamespace(inputs=inputs), mixtures=(), called=())
    monkeypatch.setattr(fusing, "fused_blocks", lambda model: [SimpleNamespace(spec=spec)])
    cut = SimpleNamespace(attention="heads", mlp="heads", overlap=overlap, columns=(), heads=(1,) * ranks)
    said = told_of(cut, "cpu", monkeypatch, linked)
    assert [line.partition(" share")[0] for line in said] == [f"{ranks} linked GPUs"] * told


def told_of(cut: Any, device: str, monkeypatch: pytest.MonkeyPatch, linked: bool = False) -> list[str]:
    """What is said of these blocks, which are not fused where nothing else is said."""
    said: list[str] = []
    monkeypatch.setattr(fusing, "say", said.append)
    mesh = SimpleNamespace(device=SimpleNamespace(type=device), engines=object() if linked else None)
    runner: Any = SimpleNamespace(plan=SimpleNamespace(cut=cut), mesh=mesh, modules=[nn.Linear(1, 1)])
    recipe: Any = SimpleNamespace(kernels="off", compile=False)
    fusing.fuse(runner, recipe)
    return said
