"""Fused blocks whose weights are sharded, against fused blocks of one process: what they keep, compute again
and gather.

Every method and family against plain torch is in tests/test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode

from petune.errors import UsageError
from petune.kernels.block import unpad
from petune.kernels.configs import MemoryConfig
from petune.kernels.dispatch import reference_ops
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.head.lazy_logits import Unmade
from petune.kernels.memory.outside import STATES, fixed_bytes
from petune.kernels.memory.policy_hook import shape_of
from petune.methods import tuned_parameters
from petune.models import family_of
from petune.models.quantise import quantise_blocks
from petune.models.sharded import Shards, shards_of
from petune.parallel.mesh import make_mesh
from petune.parallel.placement import parallelize
from petune.parallel.plan import ALONE, ParallelPlan, Sharding
from petune.parallel.runner import Runner
from tests.methods.zoo import GENERATE, prompt
from tests.parallel import harness
from tests.parallel.harness import Case, assert_same, check, collate, rows, total
from tests.pool import run

PLAIN = Sharding(replicas=1, reshard=True, offload=False, frozen=True)
LESS = MemoryConfig("attention", "input", tile=5)


def plan_of(world: int = 2, **changes: Any) -> ParallelPlan:
    """Shares are uneven."""
    return ParallelPlan(dp=world, shares=(2, *(1,) * (world - 1)), sharding=replace(PLAIN, **changes))


def gradients(case: Case, hooked: bool = False) -> dict[str, Tensor]:
    """The whole gradients of the first step and its loss, on the main rank of the case's plan. hooked:
    somebody waits for a module inside a block."""
    placed = harness.place(case, case.plan)
    model: Any = placed.model.train()
    if hooked:
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    batches = [collate(placed.share(chosen), case) for chosen in rows(case, 0)]
    loss = placed.backward(batches, total(case, 0), case.key)
    found = placed.whole({name: harness.gradient(value) for name, value in placed.tuned.items()})
    assert bool(fused_blocks(model)[0].spec.said) is hooked
    return found | {"loss": torch.tensor(loss)} if placed.mesh.main else {}


def assert_as_fused_alone(case: Case, hooked: bool = False) -> None:
    """In float64, where replicas that add up other rows first round nothing that is seen."""
    case = replace(case, dtype=torch.float64)
    expected = gradients(replace(case, plan=ALONE), hooked)
    assert_same(run(case.plan.world, gradients, case, hooked)[0], expected, 1e-10, case.name)


# ------------------------------------------------------------------ the numbers of one process


@pytest.mark.parametrize(
    ("changes", "name", "method"),
    [
        ({"reshard": False}, "t5-seq2seq", "lora"),
        ({"frozen": False}, "llama-causal", "lora"),
        ({"offload": True}, "bart-seq2seq", "full"),
        ({}, "gemma3-causal", "full"),
    ],
    ids=str,
)
def test_every_setting_computes_what_fused_blocks_of_one_process_do(
    changes: dict[str, bool], name: str, method: str
) -> None:
    assert_as_fused_alone(Case(name, method, plan_of(**changes), blocks=LESS))


@pytest.mark.parametrize("keep", ["all", "input"])
def test_a_hook_inside_a_block_is_called_and_those_of_fsdp_are_no_reason(keep: Any) -> None:
    """Such a block runs by itself, and computes again what it is not to keep."""
    assert_as_fused_alone(Case("llama-causal", "full", plan_of(), blocks=MemoryConfig(keep)), hooked=True)


def test_factors_in_float32_train_over_sharded_weights_in_half_precision() -> None:
    case = Case("llama-causal", "lora", plan_of(), torch.bfloat16, blocks=LESS)
    expected, found = gradients(replace(case, plan=ALONE)), run(2, gradients, case)[0]
    assert {value.dtype for name, value in found.items() if "lora" in name} == {torch.float32}
    assert_same(found, expected, 0.0, case.name, relative=2e-2)


@pytest.mark.long  # in the short suite with frozen weights that are quantised, or gathered in place
def test_replicas_of_shards_train_as_one_process() -> None:
    check(Case("llama-causal", "lora", plan_of(4, replicas=2), blocks=LESS, passes=(6, 5), steps=1))


def _said_of_padding(case: Case) -> list[str]:
    said: list[str] = []
    unpad.say = said.append  # type: ignore[attr-defined]  # in this very process, which ends soon
    gradients(case)
    return said


def test_padding_is_left_out_of_shards_too() -> None:
    case = Case("llama-causal", "lora", plan_of(), blocks=LESS)
    assert run(2, _said_of_padding, case) == [[], []]


# ------------------------------------------------------------------ the loss


@pytest.mark.crossed(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_loss_without_logits_reads_and_trains_a_sharded_head(
    method: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(logits: Unmade) -> Tensor:
        raise AssertionError("logits were made")

    case = Case("llama-causal", method, plan_of(), blocks=LESS, settings=(("tie_word_embeddings", tied),))
    monkeypatch.setattr(Unmade, "materialise", never)
    assert_as_fused_alone(case)


def head_alone(plan: ParallelPlan) -> dict[str, Tensor]:
    """Gradients of a model whose head trains, and nothing before it: no block waits for a gradient."""
    case = Case("llama-causal", "full", plan, settings=(("tie_word_embeddings", False),))
    model: Any = harness.build(case)
    model.requires_grad_(False).lm_head.requires_grad_(True)
    placed = Runner(
        parallelize(model, family_of(model), plan, make_mesh(plan, harness.CPU)), harness.objective(case)
    )
    assert fuse(placed.model, family_of(model), "reference").blocks
    placed.backward([collate(placed.share(rows(case, 0)[0]), case)], total(case, 0))
    return placed.whole({name: harness.gradient(value) for name, value in placed.tuned.items()})


def test_a_head_above_blocks_that_are_all_frozen_is_summed_over_ranks() -> None:
    assert_same(run(2, head_alone, plan_of())[0], head_alone(ALONE), 1e-8, "the head", relative=1e-6)


# ------------------------------------------------------------------ what is gathered and held


@pytest.mark.parametrize("reshard", [True, False])
def test_recomputing_gathers_nothing_again(reshard: bool) -> None:
    """Two blocks twice where they are freed after the forward pass, else once; the rest once."""

    def gathers(case: Case) -> int:
        placed = harness.place(case, case.plan)
        placed.model.train()
        with CommDebugMode() as heard:
            placed.backward([collate(placed.share(rows(case, 0)[0]), case)], total(case, 0))
        return sum(number for kind, number in heard.get_comm_counts().items() if "allgather" in str(kind))

    kept = MemoryConfig("all"), MemoryConfig("input")
    cases = [Case("llama-causal", "full", plan_of(reshard=reshard), blocks=keep) for keep in kept]
    assert run(2, lambda: [gathers(case) for case in cases]) == [[5 if reshard else 3] * 2] * 2


@pytest.mark.parametrize("changes", [{}, {"reshard": False}, {"frozen": False}, {"offload": True}], ids=str)
def test_memory_is_planned_by_what_a_rank_holds_and_gathers(changes: dict[str, bool]) -> None:
    case = Case("llama-causal", "lora", plan_of(**changes), blocks=LESS, settings=(("num_hidden_layers", 3),))
    model: Any = harness.build(case)
    trains = {id(value) for value in tuned_parameters(model).values()}
    cut = trains if "frozen" in changes else {id(value) for value in model.parameters()}

    def size(values: Iterable[Tensor], of: set[int]) -> int:
        return sum(value.nbytes for value in values if id(value) in of)

    block, every = list(model.model.layers[0].parameters()), list(model.parameters())
    gathered = size(every, cut) + size(every, trains) - size(block, trains)
    gathered -= size(block, cut) * ("reshard" not in changes)  # two blocks of three
    whole = size(every, {id(value) for value in every}) - size(every, cut)
    whole += sum(value.nbytes for value in model.buffers())

    def held(case: Case) -> tuple[Shards | None, int, str]:
        model = harness.place(case, case.plan).model
        return shards_of(model), fixed_bytes(model), str(shape_of(fused_blocks(model)[0].spec))

    ranks, alone = run(2, held, case), held(replace(case, plan=ALONE))
    assert alone[0] is None
    for shards, fixed, shape in ranks:
        assert shape == alone[2], "blocks are planned as whole ones"
        assert shards.gathered == gathered
        assert fixed == shards.own + STATES * shards.trained + gathered
    resting = "offload" in changes
    assert sum(shards.own for shards, *_ in ranks) == 2 * whole + (not resting) * size(every, cut)
    assert 4 * sum(shards.trained for shards, *_ in ranks) == (not resting) * size(every, trains)


def test_frozen_weights_are_packed_only_where_they_are_whole() -> None:
    """Views of one tensor would each be copied into a shard, and packed again when they are gathered."""

    def packed(case: Case) -> list[bool]:
        placed = harness.place(case, case.plan)
        placed.backward([collate(placed.share(rows(case, 0)[0]), case)], total(case, 0))
        return [bank is not None for bank in fused_blocks(placed.model)[0].spec.banks]

    cases = [Case("llama-causal", "lora", plan_of(frozen=frozen), blocks=LESS) for frozen in (True, False)]
    expected = [[False] * 4, [True, False, True, True]]
    assert run(2, lambda: [packed(case) for case in cases]) == [expected] * 2


@pytest.mark.parametrize("plan", [ALONE, plan_of()], ids=["whole", "sharded"])
def test_shards_are_not_recorded_as_graphs(plan: ParallelPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = replace(reference_ops(), name="triton")
    monkeypatch.setattr("petune.kernels.fuse.select", lambda *_: ops)
    case = Case("llama-causal", "lora", plan, blocks=LESS)

    def recorded() -> bool:
        model: Any = harness.place(case, plan).model
        return model.model.layers.whole is not None

    assert run(plan.world, recorded) == [plan is ALONE] * plan.world


def test_a_sharded_model_of_fused_blocks_generates_what_a_whole_one_does() -> None:
    case = Case("t5-seq2seq", "lora", plan_of(), blocks=LESS)
    expected = harness.build(case).eval().generate(**prompt(case.name), **GENERATE)  # type: ignore[operator]

    def part() -> Tensor:
        model: Any = harness.place(case, case.plan).model.eval()
        return cast("Tensor", model.generate(**prompt(case.name), **GENERATE))

    for found in run(2, part):
        assert torch.equal(found, expected)


def test_quantising_sharded_weights_is_refused() -> None:
    def part() -> None:
        case = Case("llama-causal", "lora", plan_of())
        placed = harness.place(case, case.plan)
        with pytest.raises(UsageError, match="quantises whole weights, and these are sharded"):
            quantise_blocks(placed.model, family_of(placed.model), "fp8")

    run(2, part)
