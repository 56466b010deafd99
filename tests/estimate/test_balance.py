"""Shares for unequal devices: they add up, stay in memory, and no other division is done sooner."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.errors import MachineError, UsageError
from petune.estimate.balance import Parameters, Room, balance, parameters_of, plan_for, ratio, step_time
from petune.models import FAMILIES
from petune.parallel.configs import CutConfig, DpConfig, ParallelConfig, PpConfig
from petune.parallel.plan import ParallelPlan, make_plan
from tests.methods.zoo import ZOO, tiny


def config_of(name: str, **changes: Any) -> Any:
    _, config, values = ZOO[name]
    return config(**{**values, **changes})


def planned(
    parallel: ParallelConfig,
    speeds: tuple[float, ...],
    room: Room | None = None,
    name: str = "llama-causal",
    **changes: Any,
) -> Any:
    """The config with lists, and the time of its step over that of the even plan."""
    config = config_of(name, **changes)
    family = FAMILIES[config.model_type]
    shape, depth = family.shape(config), family.depth(config)
    found = plan_for(parallel, speeds, room, family, shape, depth, 16)
    parameters = parameters_of(family, shape, depth)

    def time(one: ParallelConfig) -> float:
        plan: ParallelPlan = make_plan(one, family, config, len(speeds), 16)
        return step_time(plan, speeds, parameters, 16)

    return found, time(found) / time(parallel)


# ------------------------------------------------------------------ shares


def test_a_cut_goes_by_speed() -> None:
    found, gain = planned(ParallelConfig(galaxy=CutConfig()), (3, 1))
    assert found.galaxy == CutConfig(size=2, heads=(6, 2), columns=(72, 24), sequence=(3, 1))
    assert gain == pytest.approx(0.5)


def test_layouts_that_do_not_occur_get_no_list() -> None:
    assert planned(ParallelConfig(sp=CutConfig()), (3, 1))[0].sp == CutConfig(size=2, sequence=(3, 1))
    assert planned(ParallelConfig(tp=CutConfig()), (3, 1))[0].tp == CutConfig(
        size=2, heads=(6, 2), columns=(72, 24)
    )
    assert planned(ParallelConfig(galaxy2=CutConfig(shares=(1, 1))), (3, 1))[0].galaxy2 == CutConfig(
        size=2, heads=(6, 2), sequence=(3, 1)
    )


def test_stages_and_rows_go_by_speed() -> None:
    found, gain = planned(ParallelConfig(pp=PpConfig(microbatches=16)), (3, 1), num_hidden_layers=8)
    assert found.pp == PpConfig(size=2, stages=(6, 2), microbatches=16)
    # even: stages of 4/8 at speeds 3 and 1 -> (1/6 + 1/2 + 15/2) / 16; planned: (1/4 + 1/4 + 15/4) / 16
    assert gain == pytest.approx((0.25 + 0.25 + 15 * 0.25) / (1 / 6 + 0.5 + 15 * 0.5))
    found, gain = planned(ParallelConfig(dp=DpConfig()), (3, 1))
    assert (found.dp, gain) == (DpConfig(size=2, shares=(3, 1)), pytest.approx(0.5))


def test_several_stages_on_a_rank_share_its_speed() -> None:
    found, _ = planned(ParallelConfig(pp=PpConfig(schedule="interleaved")), (3, 1), num_hidden_layers=16)
    assert found.pp.stages == (6, 2, 6, 2)


def test_equal_speeds_give_the_even_plan() -> None:
    for parallel in (
        ParallelConfig(galaxy=CutConfig()),
        ParallelConfig(pp=PpConfig()),
        ParallelConfig(dp=DpConfig()),
    ):
        assert planned(parallel, (2.0, 2.0))[1] == 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.floats(0.2, 8), min_size=2, max_size=4),
    st.integers(4, 10),
    st.lists(st.integers(1, 6), min_size=4, max_size=4),
)
def test_no_other_division_is_done_sooner(speeds: list[float], total: int, most: list[int]) -> None:
    limits = most[: len(speeds)]
    if sum(limits) < total:
        with pytest.raises(MachineError):
            balance(total, speeds, limits, "block")
        return
    counts = balance(total, speeds, limits, "block")
    assert sum(counts) == total and all(
        1 <= count <= limit for count, limit in zip(counts, limits, strict=True)
    )

    def last(division: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(division, speeds, strict=True))

    others = (
        one for one in itertools.product(*(range(1, limit + 1) for limit in limits)) if sum(one) == total
    )
    assert last(counts) <= min(last(one) for one in others) + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_lists_for_any_speeds_add_up_and_are_a_plan(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 4))
    speeds = tuple(data.draw(st.lists(st.floats(0.1, 20), min_size=ranks, max_size=ranks)))
    groups, columns = data.draw(st.integers(ranks, 8)), data.draw(st.integers(ranks, 600))
    changes = {
        "num_attention_heads": 2 * groups,
        "num_key_value_heads": groups,
        "intermediate_size": columns,
        "num_hidden_layers": 9,
    }
    for parallel in (
        ParallelConfig(galaxy=CutConfig()),
        ParallelConfig(pp=PpConfig()),
        ParallelConfig(dp=DpConfig()),
    ):
        # make_plan refuses what does not add up
        planned(parallel, speeds, hidden_size=16 * groups, **changes)


# ------------------------------------------------------------------ memory


def whole_of(name: str = "llama-causal") -> Parameters:
    config = config_of(name)
    family = FAMILIES[config.model_type]
    return parameters_of(family, family.shape(config), family.depth(config))


def test_what_does_not_fit_goes_to_the_ranks_with_slack() -> None:
    whole = 2.0 * whole_of().total
    room = Room(memory=(0.4 * whole + 100, whole), fixed=(100, 0), parameter=2.0)
    found = planned(ParallelConfig(galaxy=CutConfig()), (3, 1), room)[0].galaxy
    held = [
        2 * (whole_of().attention * heads / 8 + whole_of().mlp * columns / 96)
        for heads, columns in zip(found.heads, found.columns, strict=True)
    ]
    assert held[0] <= 0.4 * whole < 0.75 * whole, "by speed alone it would hold three quarters"
    assert sum(found.heads) == 8 and sum(found.columns) == 96
    assert found.sequence == (3, 1), "tokens of what lies between weigh nothing"


def test_blocks_and_rows_stay_in_memory_too() -> None:
    whole = 2.0 * whole_of().total
    room = Room(memory=(whole / 2, whole), fixed=(0, 0), parameter=2.0, row=whole / 16)
    assert planned(ParallelConfig(pp=PpConfig()), (7, 1), Room((whole, 2 * whole), (0, 0), 2.0))[
        0
    ].pp.stages == (1, 1)
    assert planned(ParallelConfig(dp=DpConfig()), (3, 1), room)[0].dp.shares == (1, 1)


def test_devices_that_are_too_small_together_are_refused() -> None:
    whole = 2.0 * whole_of().total
    with pytest.raises(MachineError, match="together") as caught:
        planned(ParallelConfig(galaxy=CutConfig()), (1, 1), Room((0.5 * whole, 0.4 * whole), (0, 0), 2.0))
    assert caught.value.code == 5
    with pytest.raises(MachineError, match="rank 1 has no memory for a single"):
        planned(ParallelConfig(galaxy=CutConfig()), (1, 1), Room((2 * whole, 50), (0, 49), 2.0))


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    "name", ["bert-classify", "bart-seq2seq", "t5-gated", "llama-causal", "qwen3-causal"]
)
def test_parameters_are_those_of_the_models_linears(name: str) -> None:
    model = tiny(name)
    family = FAMILIES[model.config.model_type]
    from petune.models.spec import find_sites

    found = {"attention": 0, "mlp": 0}
    for site in find_sites(model, family):
        found[site.region.kind] += site.module.weight.numel()  # type: ignore[union-attr, operator]
    expected = parameters_of(family, family.shape(model.config), family.depth(model.config))
    assert found == {"attention": expected.attention, "mlp": expected.mlp}


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        ((3, 1), (3, 1)),
        ((6.0, 2.0), (3, 1)),
        ((1.5, 1), (3, 2)),
        ((1, 1, 1), (1, 1, 1)),
        ((123.4, 41.2), (3, 1)),
    ],
)
def test_speeds_become_a_ratio_of_small_numbers(speeds: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert ratio(speeds) == expected


@given(st.lists(st.floats(0.05, 50), min_size=2, max_size=6))
def test_a_ratio_is_near_the_speeds(speeds: list[float]) -> None:
    found = ratio(speeds)
    assert math.gcd(*found) == 1 and min(found) >= 1 and max(found) <= 100
    for part, speed in zip(found, speeds, strict=True):
        assert part / max(found) == pytest.approx(speed / max(speeds), rel=0.12, abs=0.011)


def test_a_region_waits_for_its_slowest_rank() -> None:
    plan = make_plan(
        ParallelConfig(galaxy=CutConfig(heads=(4, 4), columns=(72, 24))),
        FAMILIES["llama"],
        config_of("llama-causal"),
        2,
        8,
    )
    assert step_time(plan, (3, 1), Parameters(1, 3), 8) == pytest.approx(0.25 * 0.5 + 0.75 * 0.25)


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(dp=DpConfig(), pp=PpConfig())])
def test_speeds_are_for_one_axis(parallel: ParallelConfig) -> None:
    with pytest.raises(UsageError, match="one axis"):
        planned(parallel, (1, 1))


@pytest.mark.parametrize("speed", [0.0, -1.0, math.inf, math.nan])
def test_a_speed_is_a_positive_number(speed: float) -> None:
    with pytest.raises(UsageError, match="positive"):
        planned(ParallelConfig(dp=DpConfig()), (1.0, speed))


def test_fewer_units_than_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="every rank needs a block"):
        planned(ParallelConfig(pp=PpConfig()), (1, 1, 1))
