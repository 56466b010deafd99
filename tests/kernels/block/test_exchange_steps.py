"""What blocks whose attention exchanges tokens say again on each rung, compute on, and hand to their own
forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import petune
from petune.kernels.block import attention as attending
from petune.kernels.block import unpad
from petune.kernels.block.exchange_steps import Gather, Trade, TradeBack
from petune.kernels.block.layout import Layout
from petune.kernels.block.program import Program, compiled
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.memory.shape import BlockShape
from petune.kernels.memory.shaped_program import needs_of, of_shape
from petune.models import family_of
from petune.models.exchange import Exchange, Exchanged, ExchangeKind
from petune.models.stack import own_stacks
from petune.parallel.plan import ParallelPlan
from petune.parallel.sequence.exchange import Cross, Ring, Ulysses
from petune.parallel.sequence.exchange import GatherExchange as Gathering
from petune.parallel.tensor.hooks import put_boundaries
from petune.rng.context import bound
from tests.kernels.shapes import BERT, KEEPS, LLAMA
from tests.methods.zoo import tiny
from tests.parallel.plans import BACKENDS


def program_of(shape: BlockShape, kind: ExchangeKind) -> Program:
    """The program of a block on a third of the tokens."""
    attention, mlp = of_shape(shape).sublayers
    heads = (shape.kv_heads // 4, shape.kv_heads * 3 // 4) if kind == "ulysses" else ()
    core = replace(attention.core, exchange=Exchanged(kind, (1, 2), 0, heads))  # type: ignore[type-var]
    return compiled((replace(attention, core=core), mlp), of_shape(shape).sizes)


AGAIN = {
    "gather": {"all": [], "projections": [Gather], "attention": [Gather], "input": [Gather]},
    "ulysses": {
        "all": [],
        "projections": [TradeBack],
        "attention": [TradeBack, Trade],
        "input": [Trade, TradeBack],
    },
}


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("shape", [LLAMA, BERT], ids=["llama", "bert"])
@pytest.mark.parametrize("kind", AGAIN)
def test_what_is_said_again_on_the_way_back_is_on_record(kind: Any, shape: BlockShape, keep: Any) -> None:
    """All ranks keep the same, so all of them say it."""
    program = program_of(shape, kind)
    tuned = replace(shape, ranks=replace(shape.ranks, o=8))
    back = program.schedules.backward(keep, needs_of(tuned, program), (True,))
    actions = [action for section in back.sections for action in section.actions]
    crossings = [one for one in actions if isinstance(one.step, Gather | Trade | TradeBack)]
    assert [type(one.step) for one in crossings if not one.back] == AGAIN[kind][keep]
    assert len([one for one in crossings if one.back]) == 1 + (kind == "ulysses")


def test_a_block_whose_tokens_are_all_here_has_no_step_for_others() -> None:
    whole, ring = of_shape(LLAMA), program_of(LLAMA, "ring")
    assert [type(step) for step in whole.steps] == [type(step) for step in ring.steps]
    assert len(program_of(LLAMA, "gather").steps) == len(whole.steps) + 1
    assert len(program_of(LLAMA, "ulysses").steps) == len(whole.steps) + 2


@pytest.mark.parametrize("kind", [Gathering, Ulysses, Ring])
def test_every_exchange_of_a_plan_is_one_that_fused_blocks_know(kind: Any) -> None:
    assert isinstance(kind(None, 0, (2, 1)), Exchange) and isinstance(Cross(1, (2, 1)), Exchange)
    assert not isinstance(lambda attend, *given: attend(*given), Exchange)


def shared(name: str, backend: str, method: str = "lora") -> tuple[Any, ParallelPlan]:
    """A fused model of which a plan says that it is cut by tokens, without anybody to talk to."""
    model = petune.wrap(tiny(name), method, kernels="off")
    family, plan = family_of(model), BACKENDS[backend](name, 2)
    assert family is not None and plan.cut is not None
    own_stacks(model, family)
    put_boundaries(model, family, plan.cut, 0)
    assert fuse(model, family, "reference").blocks
    return model.train(), plan


@pytest.mark.parametrize(
    ("name", "backend", "words"),
    [
        ("llama-causal", "sp-ring", "rows of equal length"),
        ("t5-seq2seq", "sp-gather", "bias of relative positions"),
        ("t5-seq2seq", "sp-ulysses", "bias of relative positions"),
        ("llama-causal", "sp-gather", None),
        ("bart-seq2seq", "sp-ulysses", None),
    ],
)
def test_padding_is_left_out_or_it_is_said_why_not(
    name: str, backend: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.block.unpad.say", said.append)
    model, _ = shared(name, backend)
    edges = [one for module in model.modules() for one in getattr(module, "edges", ())]
    assert any(isinstance(one, unpad.Unpadded) for one in edges) == (words is None)
    lines = [line for line in said if "padding, where there is any, is computed too" in line]
    assert len(lines) == (words is not None) and (words is None or words in lines[0])


def test_a_call_whose_sequence_is_not_cut_goes_to_the_own_forward() -> None:
    model, _ = shared("llama-causal", "sp-gather")
    block: Any = fused_blocks(model)[0]
    hidden = torch.zeros(1, 3, 64)
    assert "not cut in this call" in block.declines(hidden, {})
    with bound(sizes=(2, 1)):
        assert block.declines(hidden, {}) is None
    block.self_attn.exchange = Ring(None, 0, (3, 1))
    assert "otherwise than when it was fused" in block.unready(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "backend", "asked"),
    [
        ("llama-causal", "sp-gather", {"last": True, "keys": 9}),
        ("bert-classify", "sp-gather", {"last": False, "keys": 9}),
        ("llama-causal", "sp-ulysses", {"last": False, "keys": None}),
        ("llama-causal", "sp-ring", {}),
    ],
)
def test_the_form_of_attention_is_chosen_for_queries_of_one_rank(
    name: str, backend: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []

    def chosen(*given: Any, **settings: Any) -> Any:
        said.append(settings)
        return choose(*given, **settings)

    choose = attending.choose
    monkeypatch.setattr(attending, "choose", chosen)
    model, _ = shared(name, backend)
    block: Any = fused_blocks(model)[0]
    (form,) = block.forms(torch.zeros(1, 6, 64), Layout(1, 9))
    assert form == ("ring" if backend == "sp-ring" else "sdpa") and len(said) == (backend != "sp-ring")
    assert all(asked.items() <= settings.items() for settings in said)
