"""The generators of a process: every one continues where it was, or none is touched."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from petune.errors import FileError
from petune.files.safetensors import read_json, read_tensors, write_json, write_tensors
from petune.rng.generators import rng_state, set_rng_state


@pytest.fixture(autouse=True)
def _generators_are_given_back() -> Iterator[None]:
    kept = rng_state()
    yield
    set_rng_state(*kept, "test")


def draw() -> list[float]:
    torch_draws = [*torch.randn(3).tolist(), float(torch.empty(1).exponential_())]
    return [
        *torch_draws,
        random.random(),
        random.gauss(0, 1),
        *numpy.random.standard_normal(3).tolist(),
        numpy.random.randint(2**31),
    ]


def test_every_generator_continues_where_it_was(tmp_path: Path) -> None:
    random.seed(5)
    numpy.random.seed(6)
    torch.manual_seed(7)
    random.gauss(0, 1)  # leaves its second value in the state
    numpy.random.standard_normal()
    draw()
    tensors, facts = rng_state()
    write_tensors(tmp_path / "a", tensors)
    write_json(tmp_path / "b", facts)
    wanted = [draw() for _ in range(3)]
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    for _ in range(2):
        set_rng_state(read_tensors(tmp_path / "a"), read_json(tmp_path / "b"), "here")
        assert [draw() for _ in range(3)] == wanted


@pytest.mark.parametrize("broken", ["rng/torch", "rng/python", "rng/numpy"])
@pytest.mark.parametrize("tensor", [None, torch.ones(3), torch.full((625,), -1)])
def test_a_generator_state_that_does_not_fit_sets_nothing(broken: str, tensor: Tensor | None) -> None:
    tensors, facts = rng_state()
    bad = {key: value for key, value in tensors.items() if key != broken} | (
        {broken: tensor} if tensor is not None else {}
    )
    random.random(), torch.rand(1), numpy.random.rand()
    kept = rng_state()
    with pytest.raises(FileError, match="step-2"):
        set_rng_state(bad, facts, "step-2")
    with pytest.raises(FileError, match="step-2"):
        set_rng_state(tensors, {"python": 3, "numpy": 4}, "step-2")
    now = rng_state()
    assert all(torch.equal(now[0][key], value) for key, value in kept[0].items()) and now[1] == kept[1]
