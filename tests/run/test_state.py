"""A saved state fills what trains exactly or is refused by the tensor's name."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from petune.errors import FileError
from petune.recipe import load_recipe
from petune.run.state import check_tuned, make_optimizer, refuse_foreign, write_packed
from petune.saving import checkpoint
from tests.group_pool import files, ranks
from tests.planned_runs import PLANS, rewritten, small, trained
from tests.small_runs import METHODS, newest


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int64, "holds int64, not weights"),
        (torch.bool, "bool"),
        (torch.float8_e5m2, "float8"),
        (torch.float64, "rounded"),
    ],
)
def test_a_tensor_of_another_kind_is_refused_before_anything_is_filled(
    dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    runner: Any = SimpleNamespace(shapes={name: (torch.Size([2]), torch.float32) for name in ("a", "b")})
    for other in (dtype, torch.bfloat16):  # every bfloat16 is a float32
        saved = {
            "tuned/a": torch.zeros(2),
            "tuned/b": torch.zeros(2, dtype=other),
            "optimizer/x": torch.ones(1),
        }
        write_packed(tmp_path, saved, {})
        with pytest.raises(FileError, match=message) if other is dtype else nullcontext() as caught:
            check_tuned(tmp_path, runner)
        assert caught is None or f"{tmp_path}  b" in str(caught.value)
    runner.shapes["c"] = runner.shapes.pop("b")
    with pytest.raises(FileError, match=r": b  is not the tensor this recipe trains\n.*: c  is not"):
        check_tuned(tmp_path, runner)


@pytest.mark.parametrize(
    ("family", "method", "plan"),
    [
        pytest.param("llama", "full", "tp", marks=pytest.mark.long),
        pytest.param("llama", "full", "pp", marks=pytest.mark.long),
        pytest.param("llama", "full", "shard", marks=pytest.mark.long),
        ("llama", "lora", "galaxy"),
        ("t5", "full", "pp"),
        ("bert", "lora", "shard"),
        pytest.param("t5", "full", "tp", marks=pytest.mark.long),
        pytest.param("t5", "lora", "pp", marks=pytest.mark.long),
        pytest.param("bart", "full", "galaxy", marks=pytest.mark.long),
        pytest.param("bert", "full", "dp", marks=pytest.mark.long),
    ],
)
def test_a_state_and_a_tuned_folder_have_the_same_bytes_whichever_ranks_hold_it(
    family: str, method: str, plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.files.hashes.BLOCK", 1000)  # for ranks to share
    recipe = small(tmp_path, family, METHODS[method], max_steps=2, warmup=0)
    saved = newest(trained(recipe))
    ranks(2, rewritten, recipe | {"parallel": PLANS[plan]}, saved, tmp_path / "again")
    again = tmp_path / "again" / "step-2"
    assert (again / "state.safetensors").read_bytes() == (saved / "state.safetensors").read_bytes()
    assert checkpoint.verify(again).files == checkpoint.verify(saved).files
    rewritten(recipe, saved, tmp_path / "alone")
    found, expected = (tmp_path / place / "tuned" for place in ("again", "alone"))
    assert files(found) == files(expected)
    for name in files(expected):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_a_hundred_small_updates_are_those_of_float64_and_would_be_lost_in_bfloat16():
    recipe = load_recipe({"model": "m", "data": "d", "method": "lora", "lr": 1e-5, "weight_decay": 0.0})
    drawn = torch.Generator().manual_seed(0)
    start, pushes = 0.1 * torch.randn(16, 16, generator=drawn), torch.randn(100, 16, 16, generator=drawn)
    moved = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        weight = nn.Parameter(start.to(torch.bfloat16).to(dtype))
        before, optimizer = weight.detach().double().clone(), make_optimizer(recipe, {"weight": weight})
        for push in pushes:
            weight.grad = push.to(dtype)
            optimizer.step()
        moved[dtype] = weight.detach().double() - before
    exact = moved[torch.float64]
    assert float((moved[torch.float32] - exact).norm() / exact.norm()) < 1e-3
    assert float((moved[torch.bfloat16] - exact).norm() / exact.norm()) > 0.5


def test_rows_that_have_changed_say_how_to_go_on(tmp_path: Path) -> None:
    saved = {"rows": "a", "frozen": "b", "method": "c"}
    with pytest.raises(FileError, match=r"the data has changed since[\s\S]*--allow-change data"):
        refuse_foreign(saved, saved | {"rows": "z"}, tmp_path, ())
    refuse_foreign(saved, saved | {"rows": "z"}, tmp_path, ("data",))
