"""Runs with fused blocks end as runs without: losses, scores and tuned weights, whatever is kept,
accumulated, packed or resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from petune import load_run
from petune.errors import Stopped
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import Rung
from petune.recipe import shipped_recipes
from petune.run.audit import Audit
from petune.run.train import Run
from tests.fused_runs import LORA, NEAR, assert_alike, recipe, tuned
from tests.small_runs import Listener, assert_same_run, brief, run, terminate_at, training, write_model

pytestmark = pytest.mark.usefixtures("no_picture")
DROPPED = {"name": "lora", "r": 2, "dropout": 0.2}
KEPT = ("memory", "gradient_checkpointing")  # what says which values are kept for the backward pass

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, lora": ("llama", {}),
    "llama, lora with dropout": ("llama", {"method": DROPPED}),
    "llama, full": ("llama", {"method": "full"}),
    "llama, lora on some": ("llama", {"method": {"name": "lora", "r": 3, "targets": ["q", "v", "down"]}}),
    "llama, row by row": ("llama", {"batch_size": 1, "accumulate": 5}),
    "llama, recomputed": ("llama", {"gradient_checkpointing": True}),
    "llama, recomputed, with dropout": ("llama", {"gradient_checkpointing": True, "method": DROPPED}),
    "llama, projections": ("llama", {"memory": "projections"}),
    "llama, attention offloaded": ("llama", {"memory": {"keep": "attention", "offload": "attention"}}),
    "llama, input offloaded, accumulated": (
        "llama",
        {"memory": {"keep": "input", "offload": "input"}, "accumulate": 4},
    ),
    "llama, tiled": (
        "llama",
        {"memory": {"keep": "input", "tile": 128}, "batch_size": 24, "accumulate": 1, "max_steps": 3},
    ),
    "llama, packed": ("llama", {"packing": True}),
    "llama, packed, with dropout": ("llama", {"packing": True, "method": DROPPED}),
    "llama, chat": ("llama", {"task": "chat"}),
    "bert, lora": ("bert", {}),
    "bert, lora with dropout": ("bert", {"method": DROPPED}),
    "bert, full": ("bert", {"method": "full"}),
    "bert, full, recomputed": ("bert", {"method": "full", "gradient_checkpointing": True}),
    "bert, balanced": ("bert", {"class_weights": "balanced", "accumulate": 3}),
    "bert, input offloaded": ("bert", {"memory": {"keep": "input", "offload": "input"}}),
    "llama, adapter": ("llama", {"method": {"name": "adapter", "reduction": 4}}),
    "llama, side": ("llama", {"method": {"name": "side", "reduction": 4}}),
    "t5, lora": ("t5", {"method": DROPPED}),
    "t5, full, recomputed": ("t5", {"method": "full", "gradient_checkpointing": True}),
    "bart, lora": ("bart", {"method": DROPPED}),
    "t5, side": ("t5", {"method": {"name": "side", "reduction": 4}}),
    "bart, side": ("bart", {"method": {"name": "side", "reduction": 4}}),
    "t5, adapter": ("t5", {"method": {"name": "adapter", "reduction": 4}}),
    "bart, input offloaded": ("bart", {"memory": {"keep": "input", "offload": "input"}}),
}
# Each setting of these is in another of the cases, with something beside it.
OFTEN = {"llama, lora", "llama, recomputed", "llama, packed", "bert, lora", "bert, full", "t5, side"}
OFTEN |= {"bert, full, recomputed", "bert, input offloaded", "t5, adapter", "bart, lora"}


class Plain(NamedTuple):
    """A run without fused blocks and what it told."""

    run: Run
    told: Listener


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plain]:
    """The run of a recipe without fused blocks, trained when it is first asked for; it is only read. What
    says which values are kept changes none, so such recipes share a run that keeps all."""
    place, made = tmp_path_factory.mktemp("plain"), dict[str, Plain]()

    def trained_once(family: str, **changes: Any) -> Plain:
        own = {name: value for name, value in changes.items() if name not in KEPT}
        if (key := json.dumps([family, own])) not in made:
            told = Listener()
            made[key] = Plain(
                run(recipe(place, family, f"run-{len(made)}", kernels="off", **own), told), told
            )
        return made[key]

    return trained_once


@pytest.mark.forks
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long if case in OFTEN else ()) for case in CASES]
)
def test_a_run_with_fused_blocks_ends_as_one_without(
    case: str, tmp_path: Path, plain: Callable[..., Plain]
) -> None:
    (family, changes), told = CASES[case], Listener()
    changes = {"max_steps": 2} | changes
    fused = run(recipe(tmp_path, family, "fused", kernels="reference", **changes), told)
    expected = plain(family, **changes)
    assert_alike(fused.folder, expected.run.folder, told, expected.told)


@pytest.mark.parametrize("name", [pytest.param("llama_lora", marks=pytest.mark.long), "llama_full"])
def test_a_shipped_recipe_ends_alike_with_and_without_fused_blocks(name: str, tmp_path: Path) -> None:
    file = next(file for file in shipped_recipes() if file.stem == name)
    small = (
        "max_steps=2",
        "warmup=0",
        "data.max_rows=16",
        "data.max_length=32",
        "head_only=false",
        "device=cpu",
        "batch_size=4",
    )
    told, other = Listener(), Listener()
    fused = run(file, told, overrides=[*small, "kernels=reference", f"out={tmp_path / 'fused'}"])
    plain = run(file, other, overrides=[*small, "kernels=off", f"out={tmp_path / 'plain'}"])
    assert_alike(fused.folder, plain.folder, told, other)


# The comparisons above say nothing if nothing is fused, or if what is asked of memory does not arrive.
@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    ("changes", "rung"),
    [
        ({}, Rung("all")),
        ({"gradient_checkpointing": True}, Rung("input")),
        ({"memory": {"keep": "attention", "offload": "attention"}}, Rung("attention", "attention")),
    ],
    ids=["auto", "gradient_checkpointing", "memory"],
)
@pytest.mark.parametrize("family", ["llama", "bert", "bart", "t5"])
def test_blocks_of_a_run_are_fused_and_keep_what_the_recipe_says(
    family: str, changes: dict[str, Any], rung: Rung, tmp_path: Path
) -> None:
    made = training(recipe(tmp_path, family, "run", kernels="reference", **changes))
    blocks = [module for module in made.model.modules() if isinstance(module, FusedBlock)]
    assert len(blocks) == (4 if family in ("bart", "t5") else 2)
    made.audit = Audit(made.tuned, {})
    made.take()
    assert {block.spec.rung for block in blocks} == {rung}
    assert not any(block.spec.said for block in blocks)


def test_auto_fuses_nothing_on_a_cpu(tmp_path: Path) -> None:
    made = training(recipe(tmp_path, "llama", "run", device="cpu"))
    assert not any(isinstance(module, FusedBlock) for module in made.model.modules())


# ------------------------------------------------------------------ stopped and gone on with


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    "changes",
    [{"method": DROPPED}, {"memory": {"keep": "input", "offload": "input"}, "method": DROPPED}],
    ids=["all", "offloaded"],
)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_stopped_run_with_fused_blocks_goes_on_bit_by_bit(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    straight = run(recipe(tmp_path, family, "straight", kernels="reference", **changes))
    stopped = recipe(tmp_path, family, "stopped", kernels="reference", **changes)
    with pytest.raises(Stopped):
        run(stopped, terminate_at(1))
    assert_same_run(run(stopped, resume=True).folder, straight.folder)


@pytest.mark.parametrize(("first", "then"), [("off", "reference"), ("reference", "off")])
def test_a_run_may_go_on_with_other_kernels(
    first: str, then: str, tmp_path: Path, plain: Callable[..., Plain]
) -> None:
    expected = tuned(plain("llama", method=DROPPED).run.folder)
    with pytest.raises(Stopped):
        run(recipe(tmp_path, "llama", "mixed", kernels=first, method=DROPPED), terminate_at(2))
    mixed = run(recipe(tmp_path, "llama", "mixed", kernels=then, method=DROPPED), resume=True)
    for name, value in expected.items():
        assert float((tuned(mixed.folder)[name] - value).abs().max()) <= 20 * NEAR, name


def test_files_of_a_run_with_fused_blocks_are_read_and_merged_as_any(
    tmp_path: Path, plain: Callable[..., Plain]
) -> None:
    fused, other = run(recipe(tmp_path, "llama", "fused", kernels="reference")), plain("llama").run
    ids = {"input_ids": torch.arange(9, 16)[None]}
    with torch.no_grad():
        found, expected = (one.speaker.model(**ids).logits for one in (fused, other))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert (fused.merge() / "model.safetensors").stat().st_size == (
        other.merge() / "model.safetensors"
    ).stat().st_size


@pytest.mark.parametrize(
    ("kernels", "base_dtype"),
    [("off", None), ("reference", None), pytest.param("reference", "int8", marks=pytest.mark.long)],
)
def test_biases_train_in_float32_beside_narrower_weights(
    kernels: str, base_dtype: str | None, tmp_path: Path
) -> None:
    method = {"name": "lora", "r": 2, "bias": "all"}
    exact = run(brief(tmp_path, "bert", method, out="exact", kernels="off", lr=0.01))
    given = {"dtype": "bf16", "kernels": kernels, "base_dtype": base_dtype, "lr": 0.01}
    found = run(brief(tmp_path, "bert", method, **given))
    loss = found.summary["after"]["loss"]
    assert loss == pytest.approx(exact.summary["after"]["loss"], abs=0.01)
    biases = {name: value for name, value in tuned(found.folder).items() if name.endswith(".bias")}
    assert len(biases) > 15 and {value.dtype for value in biases.values()} == {torch.float32}
    assert load_run(found.folder).eval()["tuned"]["loss"] == pytest.approx(loss, abs=0.01)


# ------------------------------------------------------------------ what cannot be


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_model_with_dropout_in_attention_trains_as_it_did(family: str, tmp_path: Path) -> None:
    write_model(tmp_path / family, family, dropout=0.1)
    told, other = Listener(), Listener()
    fused = run(recipe(tmp_path, family, "fused", kernels="reference"), told)
    unfused = run(recipe(tmp_path, family, "plain", kernels="off"), other)
    assert_alike(fused.folder, unfused.folder, told, other)


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "adapter"), ("llama", "side"), ("t5", "lora"), ("bart", "lora"), ("bart", "full")],
)
def test_what_has_no_fused_blocks_ends_the_same_bit_by_bit_under_auto_on_a_cpu(
    family: str, method: str, tmp_path: Path
) -> None:
    own = {
        "adapter": {"name": method, "reduction": 4},
        "side": {"name": method, "reduction": 4},
        "lora": LORA,
        "full": {"name": "full"},
    }[method]
    found, expected = (
        training(recipe(tmp_path, family, name, kernels=name, method=own)) for name in ("auto", "off")
    )
    for _ in range(2):
        record, other = found.take(), expected.take()
        assert (record["loss"], record["grad_norm"]) == (other["loss"], other["grad_norm"])
    for name, value in expected.tuned.items():
        assert torch.equal(found.tuned[name], value), name


def test_a_base_in_eight_bits_trains_to_nearly_the_same_losses(
    tmp_path: Path, plain: Callable[..., Plain]
) -> None:
    told = Listener()
    run(recipe(tmp_path, "llama", "eight", kernels="reference", base_dtype="fp8"), told)
    for one, two in zip(told.steps, plain("llama").told.steps, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=0.02) and one["loss"] != two["loss"]
