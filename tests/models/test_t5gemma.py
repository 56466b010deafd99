"""T5Gemma beside transformers: two stacks with configs of their own, every plan, and what is refused."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.errors import UsageError
from petune.estimate.forecast import forecast
from petune.methods import wrap
from petune.models import FAMILIES, attention
from petune.models.stack import own_stacks
from petune.parallel.configs import CutConfig, ParallelConfig
from petune.parallel.planning import make_plan
from tests.methods.zoo import (
    GENERATE,
    SETTINGS,
    assert_same_gradients,
    batch,
    gradients,
    prompt,
    stir,
    tiny,
)
from tests.parallel.cells import case
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS
from tests.written_recipes import recipe_of

FAMILY, NAME = FAMILIES["t5gemma"], "t5gemma-seq2seq"


def exactly(method: str, backend: str) -> Case:
    """Three steps in float64, of rows so short that every token sees one that is no padding: transformers'
    own attention gives no number to others."""
    return case(NAME, method, BACKENDS[backend](NAME, 2), steps=3, longest=5, dtype=torch.float64)


@pytest.mark.usefixtures("no_float32")
def test_loss_and_gradients_are_those_of_transformers() -> None:
    model, inputs = tiny(NAME).double(), batch(NAME, length=5)
    inputs["attention_mask"][:, :2] = 1
    expected = gradients(model, inputs)
    attention.use(model, FAMILY)
    own_stacks(model, FAMILY)
    found = gradients(model, inputs)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    assert_same_gradients(found[1], expected[1], 1e-12)


@pytest.mark.usefixtures("no_float32")
@pytest.mark.parametrize(("method", "backend"), [("side", "galaxy"), ("lora", "pp-1f1b")])
def test_three_steps_leave_nothing_to_rounding(method: str, backend: str) -> None:
    check(exactly(method, backend))


@pytest.mark.long
@pytest.mark.usefixtures("no_float32")
@pytest.mark.parametrize("method", SETTINGS)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sp-ring"])
def test_every_method_and_plan_in_float64(method: str, backend: str) -> None:
    check(exactly(method, backend))


@pytest.mark.parametrize("backend", ["tp", "sp-gather"])
def test_dropout_of_every_part_is_that_of_one_process(backend: str) -> None:
    check(case(NAME, "lora", BACKENDS[backend](NAME, 2), steps=1, dropout=0.1))


@pytest.mark.parametrize("method", ["lora", "side"])
def test_it_writes_the_same_with_and_without_a_cache(method: str) -> None:
    model = wrap(tiny(NAME), method, **SETTINGS[method])
    stir(model, std=0.1)
    found = model.eval().generate(**prompt(NAME), **GENERATE)
    assert torch.equal(found, model.generate(**prompt(NAME), use_cache=False, **GENERATE))
    assert not torch.equal(found, tiny(NAME).generate(**prompt(NAME), **GENERATE))


def wider(config: Any) -> Any:
    """A config whose encoder is wider than its decoder, as t5gemma-9b-2b's."""
    other = deepcopy(config)
    other.encoder.hidden_size, other.encoder.intermediate_size = 96, 160
    return other


@pytest.mark.parametrize("plan", ["tp", "galaxy", "galaxy2", "sp"])
def test_one_list_does_not_cut_stacks_of_two_sizes(plan: str) -> None:
    with pytest.raises(UsageError, match=r"differ in sizes(.|\n)*lora or adapter on whole blocks"):
        make_plan(ParallelConfig(**{plan: CutConfig(size=2)}), FAMILY, wider(tiny(NAME).config), None, 8)


def test_no_ladder_stands_beside_stacks_of_two_sizes() -> None:
    model = type(tiny(NAME))(wider(tiny(NAME).config))
    with pytest.raises(UsageError, match="encoder and decoder of this model differ in sizes"):
        wrap(model, "side", reduction=2)


@pytest.mark.parametrize(
    "method", ["lora", *(pytest.param(name, marks=pytest.mark.long) for name in ("full", "adapter"))]
)
def test_what_stacks_of_two_sizes_cost_is_foretold_where_none_is_cut(method: str, tmp_path: Path) -> None:
    (place := tmp_path / "wider.json").write_text(json.dumps(wider(tiny(NAME).config).to_dict()))
    other = {"model": f"config:{place}"}
    for plan in ({}, {"dp": 2}):
        one, more = (
            forecast(recipe_of(NAME, tmp_path, method=method, parallel=plan, **given)).ranks[0].memory
            for given in ({}, other)
        )
        assert more.activations > one.activations and more.total > one.total
    with pytest.raises(UsageError, match="differ in sizes"):
        forecast(recipe_of(NAME, tmp_path, method=method, parallel={"pp": 2}, **other))


def test_stacks_of_other_sizes_and_a_ring_are_refused() -> None:
    config = tiny(NAME).config
    ring = ParallelConfig(sp=CutConfig(size=2, exchange="ring"))
    with pytest.raises(UsageError, match=r"a ring does not cap attention scores\n.*found 2"):
        make_plan(ring, FAMILY, config, None, 8)
    other = deepcopy(config)
    other.encoder.intermediate_size *= 2
    with pytest.raises(UsageError, match="encoder and decoder of this model differ in sizes"):
        make_plan(ParallelConfig(tp=CutConfig(size=2)), FAMILY, other, None, 8)
    with pytest.raises(UsageError, match="reduction 5 does not divide the model's intermediate_size"):
        wrap(tiny(NAME), "side", reduction=5)
