"""A ladder that starts by Fisher information: measured on rows of the run, the same under every plan."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.errors import Stopped, UsageError
from petune.methods import tuned_parameters
from petune.recipe import load_recipe
from petune.run.build import build, prepare
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import assert_same_run, brief, numbers, run, settings, terminate_at

pytestmark = pytest.mark.usefixtures("no_picture")
FISHER: dict[str, Any] = {"name": "side", "reduction": 4, "start": "fisher"}


def side_blocks(place: Path, family: str = "llama", **changes: Any) -> dict[str, torch.Tensor]:
    """What the side blocks of a recipe begin as."""
    recipe = brief(place, family, FISHER | changes.pop("method", {}), **changes)
    model = build(prepare(load_recipe(recipe)))
    return {name: value for name, value in tuned_parameters(model).items() if ".side.blocks." in name}


def test_rows_say_which_weights_a_side_block_keeps_and_the_seed_which_rows(tmp_path: Path) -> None:
    few = {"fisher_rows": 3}
    first = side_blocks(tmp_path, method=few)
    again, other = side_blocks(tmp_path, method=few), side_blocks(tmp_path, method={"start": "pruned"})
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert any(not torch.equal(value, other[name]) for name, value in first.items())
    drawn = side_blocks(tmp_path, method=few, seed=5)
    assert any(not torch.equal(value, drawn[name]) for name, value in first.items())


@pytest.mark.parametrize("plan", ["tp", pytest.param("pp", marks=pytest.mark.long)])
def test_ranks_start_as_one_process_does(plan: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 2, "epochs": 1, "warmup": 0}
    expected = trained(small(tmp_path, "llama", FISHER, **changes))
    cut = {"parallel": PLANS[plan], "out": str(tmp_path / "cut")}
    found = trained(small(tmp_path, "llama", FISHER, **changes, **cut))
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_rows_without_a_probability_of_their_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="probability of their targets"):
        run(brief(tmp_path, "llama", FISHER, task="prefer"))


def test_streamed_rows_are_refused(tmp_path: Path) -> None:
    recipe = brief(tmp_path, "llama", FISHER)
    with pytest.raises(UsageError, match="and these are streamed"):
        run(recipe | {"data": recipe["data"] | {"stream": True}})


def test_a_resumed_run_measures_nothing_and_ends_as_one_that_was_not_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = run(settings(tmp_path, "llama", FISHER, max_steps=2, warmup=0, out="straight"))
    stopped = settings(tmp_path, "llama", FISHER, max_steps=2, warmup=0, out="stopped")
    with pytest.raises(Stopped):
        run(stopped, terminate_at(1))

    def measured(*_: Any) -> None:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr("petune.run.fisher.fisher_of", measured)
        run(stopped, resume=True)
    assert_same_run(tmp_path / "stopped", straight.folder)


def test_a_run_resumed_before_its_first_checkpoint_is_measured(tmp_path: Path) -> None:
    straight = run(settings(tmp_path, "llama", FISHER, max_steps=2, warmup=0, out="straight"))
    begun = settings(tmp_path, "llama", FISHER, max_steps=2, warmup=0, out="begun")
    with pytest.raises(Stopped):
        run(begun, terminate_at(1))
    for place in (tmp_path / "begun" / "checkpoints").glob("step-*"):
        shutil.rmtree(place)
    run(begun, resume=True)
    assert_same_run(tmp_path / "begun", straight.folder)
