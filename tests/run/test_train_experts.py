"""Whole runs whose experts lie on several ranks: numbers and files are those of one process."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from petune.errors import UsageError
from petune.parallel import alone
from petune.parallel.plan import ParallelPlan
from petune.recipe import load_recipe
from petune.run.balance import balance_in
from petune.run.build import plan_of
from tests.group_pool import files, ranks
from tests.methods.zoo import tiny
from tests.planned_runs import rewritten, trained
from tests.small_runs import moe_folder, newest, numbers, settings, state_of

pytestmark = pytest.mark.usefixtures("no_picture", "no_network")

OVER_TWO = {"ep": {"shares": [3, 1], "experts": [2, 3]}}
OVER_THREE = {"ep": {"size": 3}}
BY_COLUMNS = {"tp": {"shares": [2, 1]}}
BY_COLUMNS_AND_TOKENS = {"galaxy": {"size": 2, "sequence": [3, 2]}}


def recipe(place: Path, out: str, method: Any, parallel: Any, **changes: Any) -> dict[str, Any]:
    """Three steps of eight rows in two passes, the last of four and three."""
    if not (place / "llama").exists():  # whose routers are kept even
        moe_folder(place / "llama", output_router_logits=True, router_aux_loss_coef=0.5)
    own = {
        "batch_size": 4,
        "accumulate": 2,
        "max_steps": 3,
        "keep": 10,
        "warmup": 1,
        "save_every": 2,
        "epochs": 2,
    }
    made = settings(place, "llama", method, out=out, parallel=parallel, **{**own, **changes})
    made["data"] |= {"max_rows": 23}
    return made


def assert_alike(found: Path, expected: Path) -> None:
    """Records, the newest state and tuned files of two runs, but for rounding."""
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == (pytest.approx(value, abs=2e-5) if isinstance(value, float) else value), key
    (tensors, _), (others, _) = state_of(newest(found)), state_of(newest(expected))
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert name.startswith("rng/") or torch.allclose(value, others[name], atol=1e-5), name
    for file in (expected / "tuned").glob("*.safetensors"):
        (one, other) = (load_file(run / "tuned" / file.name) for run in (found, expected))
        assert {name: value.shape for name, value in one.items()} == {
            name: value.shape for name, value in other.items()
        }
        assert all(torch.allclose(value, other[name], atol=1e-5) for name, value in one.items())


@pytest.mark.parametrize(
    ("method", "parallel"),
    [
        pytest.param("full", OVER_TWO, marks=pytest.mark.long),
        ({"name": "lora", "r": 2}, OVER_TWO),
        pytest.param({"name": "lora", "r": 2}, OVER_THREE, marks=pytest.mark.long),
        ("full", BY_COLUMNS),
        pytest.param({"name": "lora", "r": 2}, BY_COLUMNS_AND_TOKENS, marks=pytest.mark.long),
    ],
    ids=["full", "lora", "lora over three", "full by columns", "lora by columns and tokens"],
)
def test_a_run_over_ranks_is_that_of_one_process_and_goes_on_from_its_checkpoint(
    method: Any, parallel: Any, tmp_path: Path
) -> None:
    whole = trained(recipe(tmp_path, "whole", method, "none"))
    shutil.copytree(whole, tmp_path / "there")
    shutil.rmtree(tmp_path / "there" / "tuned")
    (tmp_path / "there" / "summary.json").unlink()
    shutil.rmtree(newest(tmp_path / "there"))
    there = recipe(tmp_path, "there", method, parallel)
    assert_alike(trained(there, resume=True, allow_change=["parallel"]), whole)
    assert f"{next(iter(parallel))} " in (tmp_path / "there" / "run.log").read_text()
    assert_alike(trained(recipe(tmp_path, "spread", method, parallel)), whole)


@pytest.mark.long
@pytest.mark.parametrize(
    "parallel", [{"dp": {"shares": [3, 1]}}, {"dp": {"size": 2, "shard": True}}], ids=str
)
def test_replicas_keep_routers_even_as_one_process_does(parallel: Any, tmp_path: Path) -> None:
    whole = trained(recipe(tmp_path, "whole", "full", "none"))
    assert_alike(trained(recipe(tmp_path, "replicas", "full", parallel)), whole)


def test_ranks_without_all_layers_of_their_tokens_refuse_the_loss_of_routers() -> None:
    model: Any = tiny("qwen3moe-causal", output_router_logits=True)
    mesh: Any = SimpleNamespace(plan=ParallelPlan(pp=2))
    with pytest.raises(UsageError, match="made of all layers' scores"):
        balance_in(model, mesh)


def test_a_plan_that_the_loss_of_routers_refuses_is_refused_before_ranks_start(tmp_path: Path) -> None:
    moe_folder(tmp_path / "llama", output_router_logits=True)
    given = load_recipe(settings(tmp_path, "llama", out="run", parallel="pp:2"))
    with pytest.raises(UsageError, match="expected parallel: dp, tp, galaxy, ep or none"):
        plan_of(given)


def test_packed_rows_which_do_not_say_their_padding_refuse_the_loss_of_routers() -> None:
    model = tiny("qwen3moe-causal", output_router_logits=True)
    with pytest.raises(UsageError, match="packed rows do not say"):
        balance_in(model, alone(torch.device("cpu")), packed=True)


def test_a_head_of_classes_trains_without_the_loss_of_routers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds it to a language model's loss alone."""
    said: list[str] = []
    monkeypatch.setattr("petune.run.balance.say", said.append)
    config = tiny("qwen3moe-causal", output_router_logits=True, num_labels=3).config
    model = AutoModelForSequenceClassification.from_config(config)
    assert balance_in(model, alone(torch.device("cpu"))) is None
    assert "left out here" in "".join(said)


LORA = pytest.param({"name": "lora", "r": 2}, marks=pytest.mark.long, id="lora")


@pytest.mark.parametrize("plan", [OVER_TWO, BY_COLUMNS], ids=["ep", "tp"])
@pytest.mark.parametrize("method", ["full", LORA])
def test_a_state_and_a_tuned_folder_have_the_bytes_of_one_process(
    method: Any, plan: Any, tmp_path: Path
) -> None:
    own = recipe(tmp_path, "run", method, "none", max_steps=2, warmup=0)
    saved = newest(trained(own))
    ranks(2, rewritten, own | {"parallel": plan}, saved, tmp_path / "again")
    again = tmp_path / "again" / "step-2"
    assert (again / "state.safetensors").read_bytes() == (saved / "state.safetensors").read_bytes()
    rewritten(own, saved, tmp_path / "alone")
    found, expected = (tmp_path / place / "tuned" for place in ("again", "alone"))
    assert files(found) == files(expected)
    for name in files(expected):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name
