"""The backbone's blocks leave memory once all rows are cached, and come back where a pass needs them: to the
bit the run that keeps them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from petune.errors import FileError, Stopped
from petune.models.stack import stacks_in
from petune.run.backbone import Backbone
from petune.run.step import OptimizerStep
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import Listener, assert_same_run, numbers, run, settings, terminate_at

pytestmark = pytest.mark.usefixtures("no_picture")


def cached(place: Path, family: str, **changes: Any) -> dict[str, Any]:
    """A recipe of two epochs of 24 rows, six steps each, by a ladder, saved in each epoch."""
    shape = {"epochs": 2, "save_every": 5, "cache": True, "batch_size": 4, "accumulate": 1}
    method = changes.pop("method", "side")
    return settings(place, family, method, **{**shape, **changes})


class Watch:
    """Whether blocks were in memory after each step, and what else is to happen after a step."""

    def __init__(self) -> None:
        self.here: list[bool] = []
        self.model = nn.Module()
        self.after: dict[int, Callable[[nn.Module], None]] = {}

    def look(self, step: OptimizerStep) -> None:
        """After a step."""
        self.model = step.model
        self.here.append(all_here(step.model))
        self.after.get(len(self.here), lambda model: None)(step.model)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Looks after each step of a run."""
    made, take = Watch(), OptimizerStep.take

    def taken(step: OptimizerStep) -> dict[str, Any]:
        record = take(step)
        made.look(step)
        return record

    monkeypatch.setattr(OptimizerStep, "take", taken)
    return made


def all_here(model: nn.Module) -> bool:
    """Whether all blocks of a model are in memory; False if none is."""
    blocks = (block for stack in stacks_in(model).values() for block in stack.blocks)
    (found,) = {not value.is_meta for block in blocks for value in block.parameters()}
    return found


def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no backbone leave from here on."""
    monkeypatch.setattr(Backbone, "leave_if_known", lambda *_: None)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("t5", {}),
        ("llama", {"kernels": "reference", "base_dtype": "fp8"}),
        pytest.param("llama", {"kernels": "reference"}, marks=pytest.mark.long),
        pytest.param("bart", {}, marks=pytest.mark.long),
        pytest.param("bert", {"kernels": "reference", "base_dtype": "int8"}, marks=pytest.mark.long),
    ],
    ids=["t5", "llama fp8", "llama fused", "bart", "bert int8"],
)
def test_later_epochs_train_without_the_blocks_as_with_them_to_the_bit(
    family: str, changes: Any, tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(cached(tmp_path, family, **changes, out="left")).folder
    assert watch.here == [True] * 6 + [False] * 6
    assert all_here(watch.model)  # at the end, when what is frozen is looked at
    keep(monkeypatch)
    assert_same_run(found, run(cached(tmp_path, family, **changes, out="kept")).folder)
    assert watch.here[12:] == [True] * 12


def test_a_resumed_run_that_finds_all_rows_takes_no_step_with_the_blocks(
    tmp_path: Path, watch: Watch
) -> None:
    recipe = cached(tmp_path, "bert")
    with pytest.raises(Stopped):
        run(recipe, terminate_at(8))
    listener = Listener()
    run(recipe, listener, resume=True)
    assert watch.here == [True] * 6 + [False] * 6
    assert any("blocks leave memory" in line for line in listener.notes)


def test_a_pass_over_unknown_tokens_calls_the_blocks_back_until_the_next_epoch(
    tmp_path: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []

    @torch.no_grad()
    def ask(model: Any) -> None:
        state = torch.random.get_rng_state()
        asked.append(model.eval().generate(torch.tensor([[9, 10, 9, 11]]), max_new_tokens=4, do_sample=False))
        torch.random.set_rng_state(state)

    watch.after = {8: ask, 26: ask}  # the eighth step of the second run too
    found = run(cached(tmp_path, "llama", epochs=3, out="left")).folder
    assert watch.here == [True] * 6 + [False] * 2 + [True] * 4 + [False] * 6
    keep(monkeypatch)
    assert_same_run(found, run(cached(tmp_path, "llama", epochs=3, out="kept")).folder)
    assert torch.equal(*asked)


def test_other_values_in_the_files_are_found_when_the_blocks_come_back(tmp_path: Path, watch: Watch) -> None:
    recipe, weights = cached(tmp_path, "llama"), tmp_path / "llama" / "model.safetensors"
    values = load_file(weights)

    def spoil(model: nn.Module) -> None:
        values["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
        save_file(values, weights, metadata={"format": "pt"})

    watch.after = {10: spoil}
    with pytest.raises(FileError, match="another tensor") as error:
        run(recipe)
    assert "layers.1.mlp.up_proj.weight" in str(error.value)


def test_a_model_that_was_read_whole_keeps_its_blocks_and_says_so(tmp_path: Path, watch: Watch) -> None:
    method, listener = {"name": "side", "reduction": 4, "start": "pruned"}, Listener()
    run(cached(tmp_path, "bert", method=method), listener)
    assert all(watch.here)
    assert any("stay in memory: they were not read by ranges" in line for line in listener.notes)


def test_a_run_of_one_epoch_never_lets_them_go(tmp_path: Path, watch: Watch) -> None:
    run(cached(tmp_path, "llama", epochs=1))
    assert watch.here == [True] * 6


@pytest.mark.parametrize("kernels", ["off", "reference"])
def test_nothing_else_holds_the_weights_that_have_left(kernels: str, tmp_path: Path, watch: Watch) -> None:
    places, held = set[int](), list[int]()

    def look(model: nn.Module) -> None:  # the width of the MLP is no other's, with its gate beside it or not
        every = (one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter))
        wide = [one for one in every if not one.is_meta and one.shape in {(48, 32), (96, 32)}]
        if not places:
            blocks = [value for stack in stacks_in(model).values() for value in stack.parameters()]
            places.update(value.untyped_storage().data_ptr() for value in blocks)
        held.append(sum(one.untyped_storage().data_ptr() in places for one in wide))

    watch.after = {1: look, 7: look}
    run(cached(tmp_path, "llama", kernels=kernels, max_steps=8))
    assert held[0] >= 4 and held[1] == 0


@pytest.mark.parametrize(
    "plan", ["galaxy", *(pytest.param(plan, marks=pytest.mark.long) for plan in ("dp", "tp", "sp", "pp"))]
)
def test_ranks_let_their_parts_go_and_train_as_with_them(plan: str, tmp_path: Path) -> None:
    family = {"tp": "t5", "pp": "bart", "sp": "bert"}.get(plan, "llama")
    method = {"name": "side", "reduction": 4}
    changes: dict[str, Any] = {"parallel": PLANS[plan], "max_steps": 4, "epochs": 2}
    expected = trained(small(tmp_path, family, method, **changes, out=str(tmp_path / "uncached")))
    found = trained(small(tmp_path, family, method, **changes, cache=True, out=str(tmp_path / "left")))
    log = (found / "run.log").read_text()
    assert "blocks leave memory" in log and "were read again" in log
    assert_nearly(found, expected)


def assert_nearly(found: Path, expected: Path) -> None:
    """Two runs say the same, but for how batches of other widths round."""
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
