"""Fused blocks in stages: what their blocks compute on, what the last stage makes of their output, and what
waits in host memory while several passes are on the way. That they train as one process does is the matrix's
business, tests/test_matrix.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import fuse
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import MemoryConfig
from petune.kernels.memory.offload import Parked, Store
from petune.models import family_of
from petune.models.stack import own_stacks
from petune.models.stack_protocols import Carried
from petune.parallel.pipeline import schedule, stage_module
from petune.parallel.pipeline.stage_io import StageWire
from petune.rng.context import Running
from petune.rng.dropout import drawing
from petune.run import fusing
from tests.methods.zoo import tiny
from tests.parallel.cells import case
from tests.parallel.harness import Case, check, collate, place, rows, total
from tests.parallel.plans import BACKENDS, LOOPED, stages
from tests.pool import run

INPUT = MemoryConfig("input", offload="input")


def trained(one: Case) -> None:
    """A forward and a backward pass of the first rows, padded to the longest of them."""
    runner = place(one, one.plan)
    runner.backward([collate(rows(one, 0)[0], one)], total(one, 0))


# ------------------------------------------------------------------ what blocks compute on


def _computed(one: Case) -> dict[str, Any]:
    """Rows and tokens of the hidden states and of the memory of each call of a block."""
    seen: list[Any] = []
    fused = FusedBlock._fused

    def watched(self: FusedBlock, hidden: Tensor, given: dict[str, Any]) -> Any:
        memory = given.get("encoder_hidden_states")
        seen.append([tuple(hidden.shape[:2]), None if memory is None else tuple(memory.shape[:2])])
        return fused(self, hidden, given)

    FusedBlock._fused = watched  # type: ignore[method-assign]  # in this very process, which ends soon
    trained(one)
    return {"seen": seen}


def pieces_of(one: Case) -> list[int]:
    """Real tokens of each piece; the first row stands in for those that are missing."""
    mask = collate(rows(one, 0)[0], one)["attention_mask"]
    mask = torch.cat([mask, mask[:1].expand(-len(mask) % one.plan.microbatches, -1)])
    return mask.unflatten(0, (one.plan.microbatches, -1)).flatten(1).sum(1).tolist()


def test_padding_is_left_out_on_every_stage() -> None:
    one = case("llama-causal", "lora", BACKENDS["pp-1f1b"]("llama-causal", 3), blocks=INPUT)
    for rank in run(3, _computed, one):
        assert {(1, tokens) for tokens in pieces_of(one)} <= {hidden for hidden, _ in rank["seen"]}


def test_a_decoder_reads_real_tokens_of_an_encoder_on_another_stage() -> None:
    one = case("t5-seq2seq", "lora", BACKENDS["pp-1f1b"]("t5-seq2seq", 2), blocks=INPUT)
    first, last = run(2, _computed, one)
    for rank in (first, last):
        assert {(1, tokens) for tokens in pieces_of(one)} <= {memory for _, memory in rank["seen"]}
    assert all(memory is not None for _, memory in last["seen"]), (
        "the last stage has blocks of the decoder alone"
    )


@pytest.mark.parametrize("fused", [True, False])
def test_what_an_earlier_stage_sends_enters_in_the_dtype_of_the_blocks(fused: bool) -> None:
    model = tiny("llama-causal").to(torch.bfloat16)
    family = family_of(model)
    assert family is not None
    (stack,) = own_stacks(model, family).values()
    if fused:
        fuse.fuse(model, family, "reference")
    arrived = torch.zeros(2, 3, model.config.hidden_size)
    stack.wire = StageWire(begins=False, ends=True, inbox=Carried({"hidden_states": arrived}, None))
    with drawing(Running()), torch.autocast("cpu", torch.bfloat16):
        found = stack(arrived.bfloat16()).carry["hidden_states"]
    assert found.dtype == (torch.bfloat16 if fused else torch.float32)


# ------------------------------------------------------------------ the loss


def test_the_last_stage_makes_its_loss_without_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*args: Any) -> None:
        raise AssertionError("there are logits")

    monkeypatch.setattr(stage_module.Chunk, "_of_logits", made)
    name = "llama-causal"
    plan = replace(BACKENDS["pp-1f1b"](name, 2), microbatches=4)  # of which one has no row in the second pass
    check(case(name, "full", plan, blocks=MemoryConfig("all")))


def test_labels_are_counted_by_piece_where_they_are() -> None:
    labels = torch.tensor([[1, 2, -100], [3, -100, -100], [4, 5, 6]])
    assert schedule._trained({"labels": labels}, 2, 1) == [3, 3]
    assert schedule._trained({"labels": labels}, 4, 1) == [2, 1, 3, 0]
    assert schedule._trained({"labels": torch.tensor([1, 0, 2])}, 2, 1) == [2, 1]
    assert schedule._trained({"labels": torch.tensor([1, 0, -1, 2, 3, 4])}, 2, 2) == [3, 2]  # of whole pairs


# ------------------------------------------------------------------ what waits in host memory


def _fetched(one: Case) -> dict[str, Any]:
    """How many fetches there were, how many found their tensors on the way back, and the most tensors that
    waited on the device after one."""
    found = {"fetches": 0, "ahead": 0, "early": 0}
    parked: list[Parked] = []
    park, fetch = Store.park, Store.fetch

    def parking(self: Store, tensors: Any) -> Parked:
        parked.append(park(self, tensors))
        return parked[-1]

    def fetching(self: Store, wanted: Parked) -> Any:
        found["fetches"] += 1
        found["ahead"] += wanted.back is not None
        tensors = fetch(self, wanted)
        found["early"] = max(found["early"], sum(other.back is not None for other in parked))
        return tensors

    Store.park, Store.fetch = parking, fetching  # type: ignore[method-assign]
    trained(one)
    return found


@pytest.mark.parametrize("staged", ["pp-1f1b", "pp-interleaved", "pp-zero-bubble"])
def test_one_block_is_brought_back_ahead_and_it_is_the_next(staged: str) -> None:
    """The first to go back cannot have been; nor, on the last stage, a pass that begins when the one before
    has gone back."""
    name = "llama-causal"
    plan = {**BACKENDS, **LOOPED}[staged](name, 2)
    if staged == "pp-1f1b":
        plan = replace(plan, stages=stages(name, (3, 2)), microbatches=4)
    first, last = run(2, _fetched, case(name, "lora", plan, blocks=INPUT))
    assert first["early"] == last["early"] == 1
    assert first["fetches"] - first["ahead"] == 1 and last["fetches"] - last["ahead"] == 4


# ------------------------------------------------------------------ all stages or none


def _fused_by_a_run(one: Case) -> dict[str, Any]:
    """What a run would fuse where the blocks of rank 0 cannot be."""
    runner = place(one, one.plan)
    recipe: Any = SimpleNamespace(
        kernels="reference",
        compile=False,
        memory=MemoryConfig(),
        base_dtype=None,
        gradient_checkpointing=False,
    )
    lines: list[str] = []
    fusing.unfusable = lambda *_: ("they are odd",) if runner.mesh.rank == 0 else ()  # type: ignore[assignment]
    fuse.say = lines.append  # type: ignore[assignment]
    fusing.fuse(runner, recipe)
    return {"blocks": sum(len(fuse.fused_blocks(module)) for module in runner.modules), "lines": lines}


def test_no_stage_has_fused_blocks_where_one_cannot() -> None:
    name = "t5-seq2seq"
    first, second = run(2, _fused_by_a_run, case(name, "lora", BACKENDS["pp-1f1b"](name, 2)))
    assert first["blocks"] == second["blocks"] == 0
    assert "they are odd" in first["lines"][-1]
    assert "a stage on another rank cannot be fused" in second["lines"][-1]
