"""Runs in several processes: the numbers of one whatever the recipe asks for, resumed under other plans,
stopped, spoilt and killed.

Ranks are forked; each trains a tiny model as `python -m petune` would. What the launcher does is in
tests/run/test_distributed.py.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import petune.run.fusing
import petune.run.saver
import petune.run.step
import petune.run.train
from petune.errors import DistributedError, FileError, MachineError, Stopped, TrainingFault
from petune.models.contents import Contents
from petune.parallel.launch import process_group
from petune.parallel.runner import Runner
from petune.run.build import build
from petune.run.loop import Loop
from petune.saving import checkpoint
from tests.group_pool import (
    assert_same_but_for_rounding,
    assert_same_records,
    assert_same_state,
    ends,
    ranks,
)
from tests.planned_runs import PLANS, at_steps, infinite_loss, killed, small, spoilt, train_as_a_rank, trained
from tests.small_runs import METHODS, newest, numbers, run, state_of, training, write_model

pytestmark = pytest.mark.usefixtures("no_picture")
SHAPES = [("llama", "lora"), ("bert", "adapter"), ("bart", "full"), ("t5", "side")]
# Encoder and decoder under every plan are in tests/test_matrix.py; whole runs of them take longest.
SHORT = {"max_steps": 3}  # the last step of an epoch, of fewer rows, is the third
EVERYWHERE: dict[str, Any] = {"none": "none", **PLANS}


def some(*short: str) -> list[Any]:
    """Every plan; those not named are left to the long suite. What the plans below have in common, agreeing
    before they act, has a turn on each of dp, galaxy and pp."""
    return [pytest.param(plan, marks=() if plan in short else pytest.mark.long) for plan in PLANS]


# Each plan meets dropout and uneven batches among the wishes below too; shards and columns do so here, with
# their uneven last step, and the others in the long suite.
PAIRS = [
    pytest.param(
        plan,
        family,
        method,
        marks=() if (plan, family) in {("shard", "bert"), ("tp", "llama")} else pytest.mark.long,
    )
    for family, method in SHAPES
    for plan in PLANS
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The run folder of what `small` says in one process, trained when it is first asked for."""
    place, made = tmp_path_factory.mktemp("alone"), dict[str, Path]()

    def trained_once(family: str, method: Any, **changes: Any) -> Path:
        key = json.dumps([family, method, changes])
        if key not in made:
            made[key] = run(small(place, family, method, **changes, out=f"run-{len(made)}")).folder
        return made[key]

    return trained_once


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# ------------------------------------------------------------------ the numbers of one process


@pytest.mark.parametrize(("plan", "family", "method"), PAIRS)
def test_a_run_in_two_processes_is_that_of_one_dropout_and_uneven_batches_included(
    plan: str, family: str, method: str, tmp_path: Path, alone: Callable[..., Path]
):
    found = trained(small(tmp_path, family, method, **SHORT, parallel=PLANS[plan]))
    assert_same_but_for_rounding(found, alone(family, method, **SHORT))


def _train_fused(recipe: dict[str, Any], options: dict[str, Any]) -> None:
    """Train, and write down what was fused."""

    def watched(fuse: Callable[..., Any]) -> Any:
        def seen(*args: Any) -> Any:
            done = fuse(*args)
            Path(recipe["out"]).with_name(f"fused-{process_group.started()[0]}").write_text(
                f"{done.sites} {done.blocks} {done.reasons}"
            )
            return done

        return seen

    for name in ("fuse_stages", "fuse_modules"):  # in this very process, which ends soon
        setattr(petune.run.fusing, name, watched(getattr(petune.run.fusing, name)))
    run(recipe, **options)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        *(("galaxy", "bert"), ("pp", "llama")),
        *(
            pytest.param(*pair, marks=pytest.mark.long)
            for pair in (("tp", "llama"), ("sp", "bert"), ("shard", "llama"))
        ),
        *(pytest.param(plan, "t5", marks=pytest.mark.long) for plan in ("galaxy", "sp", "shard", "pp")),
    ],
)
def test_a_run_with_fused_blocks_under_a_plan_is_that_of_one_process(
    plan: str, family: str, tmp_path: Path, alone: Callable[..., Path]
):
    fused = {"kernels": "reference", "memory": "attention"}
    recipe = small(tmp_path, family, "lora", **SHORT, parallel=PLANS[plan], **fused)
    ranks(2, _train_fused, recipe, {}, timeout=40)
    assert_same_but_for_rounding(Path(recipe["out"]), alone(family, "lora", **SHORT))
    assert [tmp_path.joinpath(f"fused-{rank}").read_text().split()[1] for rank in range(2)] == [
        "True",
        "True",
    ]


def test_stages_hold_a_base_in_eight_bits_as_one_process_does(
    tmp_path: Path, alone: Callable[..., Path]
) -> None:
    eight = {"kernels": "reference", "base_dtype": "fp8", **SHORT}
    recipe = small(tmp_path, "llama", "lora", parallel=PLANS["pp"], **eight)
    ranks(2, _train_fused, recipe, {}, timeout=40)
    assert_same_but_for_rounding(Path(recipe["out"]), alone("llama", "lora", **eight))


@pytest.mark.parametrize(
    ("plan", "method", "reason"),
    [
        ("shard", {"name": "dora", "r": 2, "dropout": 0.1}, "is a Dora"),
    ],
)
def test_single_modules_are_fused_where_no_block_is_under_a_plan(
    plan: str, method: Any, reason: str, tmp_path: Path, alone: Callable[..., Path]
):
    two = {"max_steps": 2, "warmup": 0}
    recipe = small(tmp_path, "llama", method, **two, parallel=PLANS[plan], kernels="reference")
    ranks(2, _train_fused, recipe, {}, timeout=40)
    assert_same_but_for_rounding(Path(recipe["out"]), alone("llama", method, **two))
    for rank in range(2):
        sites, blocks, reasons = tmp_path.joinpath(f"fused-{rank}").read_text().split(maxsplit=2)
        assert int(sites) >= 5 and blocks == "False" and reason in reasons


def test_dropout_is_on_in_these_runs(tmp_path: Path):
    losses = []
    for method in ("lora", {"name": "lora", "r": 2}):
        losses.append(training(small(tmp_path, "bert", method)).take()["loss"])
    assert losses[0] != pytest.approx(losses[1], rel=1e-5)


RECOMPUTED = {
    "gradient_checkpointing": True,
    "accumulate": 3,
    "clip": 0.05,
    "weight_decay": 0.1,
    "schedule": "cosine",
    "max_steps": 3,
}
WISHES: dict[str, tuple[str, dict[str, Any]]] = {
    "recomputed": ("llama", RECOMPUTED),
    # the usual seed puts an input of a ReLU as near to 0 as rounding is: its gradient is there or not
    "recomputed, of two stacks": ("t5", RECOMPUTED | {"seed": 1}),
    "packed": (
        "llama",
        {"data": {"packing": True, "max_length": 24}, "batch_size": 3, "accumulate": 1, **SHORT},
    ),
    "weighted": ("bert", {"class_weights": "balanced", "metric": "f1_macro", "eval_batch_size": 4, **SHORT}),
    "chat": ("llama", {"task": "chat", "accumulate": 1, **SHORT}),
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize(  # columns are among the pairs above, shards among the chains below
    "plan", [pytest.param(plan, marks=pytest.mark.long if plan in ("shard", "tp") else ()) for plan in PLANS]
)
@pytest.mark.parametrize(
    "wish",
    [pytest.param(wish, marks=pytest.mark.long if "two stacks" in wish else ()) for wish in WISHES],
)
def test_what_a_recipe_may_ask_for_changes_nothing_of_that(
    wish: str, plan: str, tmp_path: Path, alone: Callable[..., Path]
):
    family, changes = WISHES[wish]
    method = list(METHODS)[(list(WISHES).index(wish) + list(PLANS).index(plan)) % 4]
    found = trained(small(tmp_path, family, method, **changes, parallel=PLANS[plan]))
    assert_same_but_for_rounding(found, alone(family, method, **changes))


THREE: dict[str, Any] = {
    "dp": {"dp": 3},
    "shard": {"dp": {"size": 3, "shard": True}},
    "pp": {"pp": {"size": 2, "microbatches": 4}},
}


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.long if plan == "shard" else ()) for plan in THREE]
)
def test_a_last_batch_of_fewer_rows_than_replicas_or_microbatches_counts_in_full(
    plan: str, tmp_path: Path, alone: Callable[..., Path]
):
    shape = {"batch_size": 4, "accumulate": 1, "data": {"max_rows": 9}, "epochs": 2, "max_steps": None}
    found = trained(small(tmp_path, "bert", "lora", **shape, parallel=THREE[plan]))
    assert_same_but_for_rounding(found, alone("bert", "lora", **shape))


@pytest.mark.parametrize("plan", some("pp"))
def test_the_best_checkpoint_and_an_early_end_are_those_of_one_process(
    plan: str, tmp_path: Path, alone: Callable[..., Path]
):
    shape = {
        "lr": 0.03,
        "warmup": 0,
        "schedule": "constant",
        "eval_every": 1,
        "patience": 2,
        "epochs": 20,
        "max_steps": None,
    }
    shape |= {"save_every": 50}
    one = petune.run.train.load_run(alone("bert", "full", **shape))
    assert 0 < one.summary["best_step"] < one.summary["steps"] < 60, "this run does not show what it should"
    found = petune.run.train.load_run(trained(small(tmp_path, "bert", "full", **shape, parallel=PLANS[plan])))
    assert (found.summary["steps"], found.summary["best_step"]) == (
        one.summary["steps"],
        one.summary["best_step"],
    )
    assert (found.folder / "best").read_text().splitlines()[0] == (
        one.folder / "best"
    ).read_text().splitlines()[0]
    assert found.summary["after"] == pytest.approx(one.summary["after"], rel=1e-3)
    assert found.eval()["tuned"] == pytest.approx(one.eval()["tuned"], rel=1e-3)


@pytest.mark.parametrize("plan", some("pp"))
def test_a_head_trained_on_the_frozen_base_scores_as_in_one_process(
    plan: str, tmp_path: Path, alone: Callable[..., Path]
):
    shape = {"head_only": True, "max_steps": 1, "warmup": 0}
    expected = petune.run.train.load_run(alone("bert", "lora", **shape)).summary["head_only"]
    found = petune.run.train.load_run(trained(small(tmp_path, "bert", "lora", **shape, parallel=PLANS[plan])))
    assert expected is not None
    assert found.summary["head_only"] == pytest.approx(expected, abs=1e-9)


def test_a_tuning_of_the_last_blocks_is_saved_where_the_first_stage_trains_nothing(tmp_path: Path):
    method = {"name": "lora", "r": 2, "targets": r"model\.layers\.1\..*q_proj"}
    recipe = small(tmp_path, "llama", method, max_steps=2, warmup=0)
    alone = trained({**recipe, "out": str(tmp_path / "alone")})
    assert_same_but_for_rounding(trained({**recipe, "parallel": PLANS["pp"]}), alone)


# ------------------------------------------------------------------ resumed under other plans


def chain(place: Path, family: str, method: str, plans: list[str], **settings: Any) -> None:
    """One run of as many steps as plans, each made under one of them, stopped after it and resumed under the
    next."""
    # six steps an epoch
    shape = {
        "accumulate": 1,
        "max_steps": None,
        "epochs": len(plans) / 6,
        "keep": 1000,
        "schedule": "constant",
        "save_every": 1,
        **settings,
    }
    alone = trained(small(place, family, method, **shape, out="alone"))
    steps = len([record for record in numbers(alone) if "loss" in record])
    assert steps == len(plans)
    for step, name in enumerate(plans, 1):
        recipe = small(place, family, method, **shape, parallel=EVERYWHERE[name])
        options = {"resume": step > 1}
        world = petune.run.train.distributed.wanted(petune.run.train.settle(recipe)).world
        last = step == steps
        found = ends(
            world, at_steps((step * world) // 2 % world, {} if last else {step: terminate}), recipe, options
        )
        assert [end.code for end in found] == [0 if last else 75] * world, (
            step,
            name,
            [end.error for end in found],
        )
        assert newest(place / "run").name == f"step-{step}"
        try:
            assert_same_state(newest(place / "run"), alone / "checkpoints" / f"step-{step}")
        except AssertionError as error:
            raise AssertionError(
                f"step {step} under {name} after {plans[step - 2] if step > 1 else 'nothing'}: {error}"
            ) from error
    assert_same_but_for_rounding(place / "run", alone)


# tp is in galaxy, and sp holds what dp does; the second epoch begins in the long suite.
FEW = ("llama", "lora", ["none", "dp", "galaxy", "pp", "shard"])


@pytest.mark.parametrize(
    ("family", "method", "plans"),
    [
        pytest.param(*FEW, id="few"),
        *(
            pytest.param(
                *shape,
                ["none", "dp", "tp", "galaxy", "pp", "shard", "sp", "none"],
                marks=pytest.mark.long,
                id="-".join(shape),
            )
            for shape in SHAPES
        ),
    ],
)
def test_a_run_that_changes_its_plan_after_every_step_ends_as_one_that_never_had_one(
    family: str, method: str, plans: list[str], tmp_path: Path
):
    chain(tmp_path, family, method, plans)


def test_fused_blocks_go_on_with_and_without_shards(tmp_path: Path):
    chain(tmp_path, "llama", "lora", ["none", "shard", "none"], kernels="reference", memory="attention")


def test_biases_train_under_shards_as_in_one_process(tmp_path: Path):
    recipe = small(tmp_path, "bert", {"name": "lora", "r": 2, "bias": "lora"}, max_steps=2, warmup=0)
    expected = trained({**recipe, "out": str(tmp_path / "one")})
    assert_same_but_for_rounding(trained({**recipe, "parallel": PLANS["shard"]}), expected)


@pytest.mark.long
def test_a_ring_trains_a_head_alone_whose_blocks_drop_no_probabilities(tmp_path: Path):
    recipe = small(tmp_path, "bert", {"name": "head"}, max_steps=2, warmup=0, lr=0.1)
    expected = trained({**recipe, "out": str(tmp_path / "one")})
    ring = {"sp": {"sequence": [5, 3], "exchange": "ring"}}
    assert_same_but_for_rounding(trained({**recipe, "parallel": ring}), expected)


@pytest.mark.parametrize("plan", some("tp"))
def test_the_base_below_an_adapter_to_begin_with_has_its_own_biases(plan: str, tmp_path: Path):
    method = {"name": "lora", "r": 2, "bias": "all"}
    recipe = small(tmp_path, "bert", method, max_steps=2, lr=0.1, warmup=0, out="first")
    begun = {**recipe, "init_adapter": str(run(recipe).folder / "tuned")}
    expected = run({**begun, "out": str(tmp_path / "one")}).summary["before"]
    found = trained({**begun, "out": str(tmp_path / "two"), "parallel": PLANS[plan]})
    summary = json.loads((found / "summary.json").read_text())
    assert summary["before"]["loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.parametrize(
    "plans",
    [["tp", "shard"], pytest.param(["tp", "none", "shard", "pp"], marks=pytest.mark.long)],
    ids=["two", "four"],
)
def test_a_base_in_fewer_bytes_is_the_same_base_under_every_plan(plans: list[str], tmp_path: Path):
    chain(tmp_path, "llama", "lora", plans, base_dtype="int8")


@pytest.mark.long
def test_every_plan_goes_on_from_every_other(tmp_path: Path):
    names = list(EVERYWHERE)
    plans = [names[0]]  # a way through all 42 pairs: to the plan furthest ahead that was not gone to yet
    for gap in range(1, 7):
        for _ in names:  # seven is a prime, so steps of one width meet every plan
            plans.append(names[(names.index(plans[-1]) + gap) % 7])
    assert len(set(pairwise(plans))) == 42
    chain(tmp_path, "bert", "lora", plans)


@pytest.mark.parametrize("plan", some("galaxy"))
def test_a_checkpoint_of_any_plan_holds_whole_tensors(plan: str, tmp_path: Path, alone: Callable[..., Path]):
    expected = alone("llama", "full", max_steps=1, warmup=0)
    found = trained(small(tmp_path, "llama", "full", max_steps=1, warmup=0, parallel=PLANS[plan]))
    (tensors, facts), (others, other_facts) = state_of(newest(found)), state_of(newest(expected))
    assert {name: (value.shape, value.dtype) for name, value in tensors.items()} == {
        name: (value.shape, value.dtype) for name, value in others.items()
    }
    assert facts["optimizer"] == other_facts["optimizer"]
    first, second = (checkpoint.verify(newest(folder)).facts for folder in (found, expected))
    assert {key: first[key] for key in ("rows", "frozen", "method")} == {
        key: second[key] for key in ("rows", "frozen", "method")
    }


def test_a_changed_base_is_refused_by_every_rank_whatever_the_plan(tmp_path: Path):
    recipe = small(tmp_path, "llama", "lora", parallel=PLANS["tp"])
    ends(2, at_steps(0, {2: terminate}), recipe, {})
    write_model(tmp_path / "llama", "llama", dropout=0.1, seed=1)
    found = ends(2, train_as_a_rank, recipe | {"parallel": PLANS["pp"]}, {"resume": True})
    assert "the base model is another one" in str(found[0].error)
    assert found[0].code == 4 and found[1].code != 0
    assert newest(tmp_path / "run").name == "step-2"


@pytest.mark.long
def test_a_rank_that_cannot_read_its_share_of_the_base_ends_the_run_with_that(tmp_path: Path):
    """Checksums of the base are taken by all ranks; the others wait for what this one has to give."""

    def train(recipe: dict[str, Any]) -> None:
        if process_group.started()[0] == 1:

            def refuse(*_: Any) -> torch.Tensor:
                raise FileError("not what its header says", where="model.safetensors")

            Contents.entries = refuse  # type: ignore[method-assign]  # in this process, which ends soon
        run(recipe)

    found = ends(2, train, small(tmp_path, "llama", "lora", parallel=PLANS["tp"]))
    assert [end.code for end in found] == [DistributedError.code, FileError.code], found
    assert all("not what its header says" in str(end.error) for end in found)


# ------------------------------------------------------------------ stopping


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 1])
@pytest.mark.parametrize("plan", some("dp"))
def test_sigterm_to_one_rank_stops_all_at_the_same_step_and_saves(plan: str, rank: int, tmp_path: Path):
    recipe = small(tmp_path, "bert", "lora", parallel=PLANS[plan], save_every=50)
    found = ends(2, at_steps(rank, {3: terminate}), recipe, {})
    assert [end.code for end in found] == [Stopped.code] * 2, found
    assert all("at step 3 of 5" in str(end.error) for end in found)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-3"]
    checkpoint.verify(newest(tmp_path / "run"))


def test_a_rank_that_cannot_write_its_part_ends_the_save_and_the_last_commit_stands(tmp_path: Path):
    def fill_the_disk() -> None:
        def refuse(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        os.pwrite = refuse

    recipe = small(tmp_path, "llama", "lora", parallel=PLANS["tp"], save_every=1, max_steps=4)
    found = ends(2, at_steps(1, {3: fill_the_disk}), recipe, {})
    assert [end.code for end in found] == [DistributedError.code, MachineError.code], found
    assert "state.safetensors  cannot write: No space left on device (ENOSPC)" in str(found[1].error)
    checkpoints = tmp_path / "run" / "checkpoints"
    cut = re.search(r"step-(\d)\.tmp", str(found[1].error))  # step 2 may still be written in step 3
    assert cut is not None and checkpoint.newest_good(checkpoints)[0].name == f"step-{int(cut[1]) - 1}"
    trained(recipe, resume=True)
    assert checkpoint.leftovers(checkpoints) == [] and newest(tmp_path / "run").name == "step-4"


def test_a_folder_removed_in_mid_run_costs_no_step_of_any_rank(tmp_path: Path, alone: Callable[..., Path]):
    recipe = small(tmp_path, "llama", "lora", parallel=PLANS["galaxy"], save_every=50, max_steps=4)
    found = ends(2, at_steps(0, {3: lambda: shutil.rmtree(tmp_path / "run")}), recipe, {})
    assert found[0].code == MachineError.code and found[1].code in (Stopped.code, DistributedError.code), (
        found
    )
    kept = tmp_path / "run-rescued-1"
    assert (
        f"step 3 is kept in {kept / 'checkpoints' / 'step-3'}" in str(found[0].error)
        and not (tmp_path / "run").exists()
    )
    trained(recipe | {"out": str(kept)}, resume=True)
    assert_same_state(newest(kept), newest(alone("llama", "lora", save_every=50, max_steps=4)))


@pytest.mark.parametrize("plan", some("pp"))
def test_sigterm_during_an_evaluation_loses_nothing(plan: str, tmp_path: Path, alone: Callable[..., Path]):
    shape = {"eval_every": 2, "save_every": 50, "max_steps": 3}
    recipe = small(tmp_path, "bert", "lora", **shape, parallel=PLANS[plan])

    def in_evaluation(recipe: dict[str, Any], options: dict[str, Any]) -> None:
        score = Loop.score

        def told(self: Loop) -> Any:
            if self.progress.step == 2 and process_group.started()[0] == 1:
                terminate()
            return score(self)

        Loop.score = told  # type: ignore[method-assign]
        run(recipe, **options)

    found = ends(2, in_evaluation, recipe, {})
    assert [end.code for end in found] == [Stopped.code] * 2, found
    trained(recipe, resume=True)
    assert_same_records(tmp_path / "run", alone("bert", "lora", **shape))


# ------------------------------------------------------------------ training faults


def infinite_gradient() -> None:
    complete = Runner._complete

    def spoil(self: Runner) -> None:
        complete(self)
        grad = next(value.grad for value in self.tuned.values() if value.grad is not None)
        grad.mul_(math.inf)

    Runner._complete = spoil  # type: ignore[method-assign]


FAULTS = (infinite_loss, infinite_gradient)
SHORTEST = {("pp", infinite_loss), ("tp", infinite_gradient)}
SPOILT = [
    pytest.param(plan, what, marks=() if (plan, what) in SHORTEST else pytest.mark.long)
    for plan in PLANS
    for what in FAULTS
]


@pytest.mark.parametrize(("plan", "what"), SPOILT)
def test_a_value_that_is_not_finite_on_one_rank_ends_all_before_the_update(
    plan: str, what: Callable[[], None], tmp_path: Path, alone: Callable[..., Path]
):
    recipe = small(tmp_path, "bert", "lora", **SHORT, save_every=2, parallel=PLANS[plan])
    found = ends(2, spoilt(1, 3, what), recipe, {})
    assert [end.code for end in found] == [TrainingFault.code] * 2, found
    assert all("step 3 " in str(end.error) and "is not finite" in str(end.error) for end in found)
    assert newest(tmp_path / "run").name == "step-2"
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        checkpoint.verify(path)
        assert all(
            bool(value.isfinite().all()) for value in state_of(path)[0].values() if value.is_floating_point()
        )
    trained(recipe, resume=True)
    assert_same_but_for_rounding(tmp_path / "run", alone("bert", "lora", **SHORT, save_every=2))


@pytest.mark.parametrize("plan", some("pp"))
def test_a_tuned_tensor_without_a_gradient_is_named_under_every_plan(
    plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def disconnected(prepared: Any) -> torch.nn.Module:
        model = build(prepared)
        model.get_submodule("model.layers.1.mlp.up_proj").update = lambda x: torch.zeros(())  # type: ignore[assignment]
        return model

    monkeypatch.setattr(petune.run.step, "build", disconnected)
    found = ends(2, train_as_a_rank, small(tmp_path, "llama", "lora", parallel=PLANS[plan]), {})
    assert [end.code for end in found] == [TrainingFault.code] * 2, found
    for end in found:
        assert all(
            f"model.layers.1.mlp.up_proj.lora_{part}  has had no gradient" in str(end.error) for part in "AB"
        )
        assert "down_proj" not in str(end.error).rpartition("TrainingFault")[2]


@pytest.mark.parametrize("plan", some("galaxy"))
def test_a_frozen_tensor_that_moves_on_one_rank_ends_all(plan: str, tmp_path: Path):
    def move() -> None:
        petune.run.step.Audit.check_frozen = moved(petune.run.step.Audit.check_frozen)  # type: ignore[method-assign]

    def moved(check: Callable[[Any], None]) -> Callable[[Any], None]:
        def checked(self: Any) -> None:
            with torch.no_grad():
                next(value for value in self.frozen.values() if value.is_floating_point()).add_(1)
            check(self)

        return checked

    recipe = small(tmp_path, "llama", "lora", save_every=1, parallel=PLANS[plan], timeout=5)
    found = ends(2, spoilt(1, 3, move), recipe, {})
    assert found[1].code == TrainingFault.code, found
    assert found[0].code in (TrainingFault.code, 6)
    assert newest(tmp_path / "run").name == "step-2"


# ------------------------------------------------------------------ killed anywhere


def kill_and_go_on(place: Path, number: int, seed: int) -> int:
    """Kill `number` runs at random moments, on to the end each time, and compare with one that was left
    alone; how many were hit."""
    draw, hits = random.Random(seed), 0
    for at in range(number):
        plan = draw.choice(list(PLANS))
        family, method = draw.choice(SHAPES)
        shape = {"save_every": draw.choice([1, 2]), "keep": 2, "eval_every": 2, "timeout": 5}
        if not (place / f"alone-{family}-{shape['save_every']}").exists():
            trained(small(place, family, method, **shape, out=f"alone-{family}-{shape['save_every']}"))
        recipe = small(place, family, method, **shape, parallel=PLANS[plan], out=f"run-{at}")
        rank, after_s = draw.randrange(2), draw.uniform(0, 0.6)
        found = killed(recipe, rank, after_s, resume=False)
        what = (at, plan, family, rank, after_s)
        if found[rank].code == -signal.SIGKILL:
            hits += 1
            other = found[1 - rank]
            assert other.code in (0, 6), (what, other)  # 0: it had done its part when the other was killed
            assert other.code == 0 or other.seconds - found[rank].seconds < 5, what
            folder = place / f"run-{at}"
            if (folder / "resolved.yaml").exists():
                trained(recipe | {"parallel": PLANS[draw.choice(list(PLANS))]}, resume=True)
            else:
                trained(recipe)
        assert_same_but_for_rounding(place / f"run-{at}", place / f"alone-{family}-{shape['save_every']}")
    return hits


@pytest.mark.long
def test_runs_killed_at_four_random_moments_go_on_to_the_same_end(tmp_path: Path, fast_beats: None):
    assert kill_and_go_on(tmp_path, 4, seed=0) > 0


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_runs_killed_at_two_hundred_random_moments_go_on_to_the_same_end(tmp_path: Path, fast_beats: None):
    assert kill_and_go_on(tmp_path, 200, seed=1) > 100


def test_replicas_that_share_weights_evaluate_in_as_many_pieces_each(tmp_path: Path) -> None:
    """Of three held-out rows one replica has two and the other one, which would be pieces of their own."""
    shape = {"max_steps": 1, "warmup": 0, "eval_batch_size": 3}
    plan = {"dp": {"size": 2, "shard": True}, "pp": {"size": 2}}
    expected = trained(small(tmp_path, "llama", "lora", **shape, out="one"))
    assert_same_but_for_rounding(
        trained(small(tmp_path, "llama", "lora", **shape, parallel=plan, kernels="reference")), expected
    )
