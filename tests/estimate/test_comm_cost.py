"""What a plan sends, against volumes worked out by hand; and what a pipeline waits and holds."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from petune.estimate.comm_cost import Load, Transition, bubble, of_experts, summed_over, transitions
from petune.models import FAMILIES
from petune.parallel.configs import CutConfig, ParallelConfig, PpConfig
from petune.parallel.plan import ParallelPlan, in_flight, waiting
from petune.parallel.planning import make_plan
from tests.methods.zoo import MOE, ZOO

B, S = 4, 64
T = B * S * 64 * 4  # hidden states of the zoo's width in float32
KV = B * S * 32 * 4  # keys, or values, of llama's 4 heads


def sent(
    parallel: ParallelConfig, name: str = "llama-causal", backward: bool = True, **changes: Any
) -> tuple[Transition, ...]:
    _, config_type, values = ZOO[name]
    config = config_type(**{**values, **changes})
    family = FAMILIES[config.model_type]
    plan = make_plan(parallel, family, config, None, B, vocabulary_head=False)
    load = Load(B, {stack: S for stack in family.stacks}, 4, backward)
    return transitions(plan, family, family.shape(config), family.depth(config), load)


def per_block(found: tuple[Transition, ...], blocks: int = 2) -> tuple[int, int]:
    """Bytes forward and backward of one block."""
    inside = [one for one in found if one.times == blocks]
    return sum(one.forward for one in inside), sum(one.backward for one in inside)


def test_a_token_is_sent_once_to_each_other_rank_of_its_experts_and_back() -> None:
    _, config_type, values = MOE["mixtral-causal"]  # of four experts two
    shape = FAMILIES["mixtral"].shape(config_type(**values))
    plan = ParallelPlan(dp=2, shares=(3, 1), ep=2, experts=(3, 1))
    (found,) = of_experts(plan, 5, 2, (3, 1), shape, Load(B, {"decoder": S}, 4, True))
    rows = 3 / 2 + 1  # half of the tokens have the second rank's expert, all have one of the first rank's
    assert (found.times, found.forward, found.backward) == (5, rows * S * 32 * 4, rows * S * 32 * 4)


@pytest.mark.parametrize(
    ("parallel", "forward", "backward"),
    [
        (ParallelConfig(tp=CutConfig(size=2)), 2 * T, 2 * T),
        (ParallelConfig(tp=CutConfig(size=4)), 3 * T, 3 * T),
        (ParallelConfig(galaxy=CutConfig(size=2)), 2 * T, 2 * T),
        (ParallelConfig(galaxy2=CutConfig(size=2)), T, T),
        (ParallelConfig(sp=CutConfig(size=2)), KV, KV),
        (ParallelConfig(sp=CutConfig(size=4)), 6 * KV // 4, 6 * KV // 4),
        (ParallelConfig(sp=CutConfig(size=2, exchange="ring")), KV, 2 * KV),
        (
            ParallelConfig(sp=CutConfig(size=2, exchange="ulysses")),
            (2 * T + 2 * KV) // 4,
            (2 * T + 2 * KV) // 4,
        ),
        (ParallelConfig(galaxy=CutConfig(size=2, sequence=(3, 1))), 3 * T, 3 * T),
        (ParallelConfig(cut=CutConfig(2, "sequence", "heads", "sequence")), KV + T, KV + T),
    ],
)
def test_a_block_sends_what_its_layouts_need(parallel: ParallelConfig, forward: int, backward: int) -> None:
    assert per_block(sent(parallel)) == (forward, backward)


def test_mixers_send_nothing_and_attention_where_it_takes_its_turn() -> None:
    """Two blocks, of which one has attention."""
    found = sent(ParallelConfig(tp=CutConfig(size=2)), "qwen3_5-causal")
    assert {one.where: (one.times, one.forward) for one in found} == {
        "decoder attention": (1, T),
        "decoder mlp": (2, T),
    }


@pytest.mark.parametrize("row", ["tp", "galaxy", "sp"])
def test_nothing_goes_backward_where_nothing_trains(row: str) -> None:
    found = sent(ParallelConfig(**{row: CutConfig(size=2)}), backward=False)
    assert found and all(one.forward and not one.backward for one in found)


def test_a_stack_is_entered_and_left_on_every_stage() -> None:
    ends = [
        (one.where, one.forward, one.backward, one.times)
        for one in sent(ParallelConfig(galaxy=CutConfig(size=2)))
        if one.times == 1
    ]
    assert ends == [("decoder entry", 0, T // 2, 1), ("decoder exit", T // 2, 0, 1)]
    piped = sent(ParallelConfig(galaxy=CutConfig(size=2), pp=PpConfig(size=3)), num_hidden_layers=5)
    assert [one.times for one in piped if one.where in ("decoder entry", "decoder exit")] == [3, 3]


def test_cross_attention_is_a_region_and_encoder_states_enter_once() -> None:
    found = {one.where: one for one in sent(ParallelConfig(tp=CutConfig(size=2)), "bart-seq2seq")}
    assert found["decoder cross-attention"].forward == T
    assert (found["decoder, encoder states"].times, found["decoder, encoder states"].backward) == (1, T)
    by_sequence = {one.where for one in sent(ParallelConfig(sp=CutConfig(size=2)), "bart-seq2seq")}
    assert "decoder cross-attention" not in by_sequence
    assert "encoder mlp" not in by_sequence


def test_between_stages_go_hidden_states_encoder_states_and_t5s_bias() -> None:
    bias = 4 * 8 * S * S * 4  # one for each of four micro-batches
    pieces = PpConfig(stages=(1, 2, 1), microbatches=4)
    assert [(one.forward, one.backward) for one in sent(ParallelConfig(pp=pieces), "t5-seq2seq")] == [
        (T + bias, T),
        (2 * T + bias, 2 * T),
    ]
    halves = PpConfig(stages=(2, 2), microbatches=4)
    assert [(one.forward, one.backward) for one in sent(ParallelConfig(pp=halves), "bart-seq2seq")] == [
        (T, T)
    ]
    assert [one.forward for one in sent(ParallelConfig(pp=PpConfig(size=2)))] == [T]


def test_one_rank_sends_nothing() -> None:
    assert summed_over(1, 100) == 0
    assert summed_over(4, 100) == 150
    assert sent(ParallelConfig()) == ()


# ------------------------------------------------------------------ pipelines


def pipeline(schedule: str, pp: int, per_rank: int, microbatches: int) -> ParallelPlan:
    config = ParallelConfig(
        pp=PpConfig(size=pp, stages=(1,) * pp * per_rank, schedule=schedule, microbatches=microbatches)
    )
    _, config_type, values = ZOO["llama-causal"]
    return make_plan(
        config, FAMILIES["llama"], config_type(**{**values, "num_hidden_layers": pp * per_rank}), None, 64
    )


def test_a_bubble_shrinks_with_micro_batches_and_with_stages_on_a_rank() -> None:
    assert bubble(pipeline("1f1b", 4, 1, 4)) == pytest.approx(3 / 7)
    assert bubble(pipeline("gpipe", 4, 1, 16)) == pytest.approx(3 / 19)
    assert bubble(pipeline("interleaved", 4, 2, 16)) == pytest.approx(3 / (2 * 16 + 3))
    assert bubble(ParallelPlan()) == 0


def test_zero_bubble_gains_by_what_trains() -> None:
    plan = pipeline("zero-bubble", 4, 2, 8)
    assert bubble(plan, trained=0.0) == bubble(pipeline("interleaved", 4, 2, 8)) == pytest.approx(3 / 19)
    assert bubble(plan, trained=1.0) == pytest.approx(0.5 / (8 + 0.5))


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    assert [in_flight(pipeline("gpipe", 4, 1, 8), rank) for rank in range(4)] == [8, 8, 8, 8]
    assert [in_flight(pipeline("1f1b", 4, 1, 8), rank) for rank in range(4)] == [4, 3, 2, 1]
    assert in_flight(ParallelPlan(), 0) == 1


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble"])
@pytest.mark.parametrize(("pp", "per_rank", "microbatches"), [(2, 2, 4), (4, 2, 8), (2, 3, 6), (4, 2, 4)])
def test_what_a_rank_holds_is_the_most_in_torchs_order_of_passes(
    schedule: str, pp: int, per_rank: int, microbatches: int
) -> None:
    order_of = getattr(schedules, "_get_1f1b_rank_ops", None)
    warm_up_of = getattr(schedules, "_get_warmup_ops", None)
    if order_of is None or warm_up_of is None:
        pytest.skip("this torch makes its orders elsewhere")
    plan, zero = pipeline(schedule, pp, per_rank, microbatches), schedule == "zero-bubble"
    per_round, total = microbatches // max(1, microbatches // pp), per_rank * microbatches
    for rank in range(pp):
        warm_up = warm_up_of(rank, per_rank, per_round, pp, microbatches, multiply_factor=1 if zero else 2)

        def forward(step: int, rank: int = rank) -> int:
            return step // per_round % per_rank * pp + rank

        def backward(step: int, rank: int = rank, warm_up: int = warm_up) -> int:
            return (per_rank - 1 - (step - warm_up) // per_round % per_rank) * pp + rank

        late = {"num_1f1b_microbatches": rank, "enable_zero_bubble": True} if zero else {}
        order = order_of(per_rank, pp, warm_up, total - warm_up, warm_up, rank, forward, backward, **late)
        held = apart = most = kept = waits = 0
        for kind in (action.computation_type.name for action in order if action is not None):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_WEIGHT": -1}.get(kind, 0)
            apart += {"BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": -1}.get(kind, 0)
            most, kept, waits = max(most, held), max(kept, held - apart), max(waits, apart)
        assert held == apart == 0
        assert in_flight(plan, rank) * per_rank == pytest.approx(most, abs=1 if zero else 0)
        assert in_flight(plan, rank, fused=True) * per_rank == pytest.approx(kept, abs=1 if zero else 0)
        assert waiting(plan, rank) * per_rank == pytest.approx(waits)
