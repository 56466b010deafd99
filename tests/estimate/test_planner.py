"""The search for a plan: nothing that anybody could write is faster by its own model, and what it proposes
fits."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from petune.errors import MachineError, UsageError
from petune.estimate.advice import advise
from petune.estimate.choice import PricedPlan
from petune.estimate.cluster import Cluster, Device, LinkSpeed, of_speeds
from petune.estimate.forecast import Sketch, forecast, priced
from petune.estimate.fused_forecast import outlook
from petune.estimate.layouts import layouts, plain
from petune.estimate.planner import Planner
from petune.kernels.memory.block_cost import CPU
from petune.parallel import ParallelConfig
from petune.parallel.configs import CutConfig, DpConfig, EpConfig, PpConfig
from petune.recipe import Recipe, load_recipe
from petune.run import distributed
from tests.methods.zoo import tiny
from tests.parallel.plans import BACKENDS
from tests.written_recipes import foretold, recipe_of, sketched

FREE = LinkSpeed()
SLOW = LinkSpeed(1e-5, 1e8)


def drawn_of(folder: Path, name: str = "llama-causal", **changes: Any) -> Sketch:
    return sketched(recipe_of(name, folder, batch_size=8, **changes))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Sketch:
    return drawn_of(tmp_path_factory.mktemp("planner"))


def cluster_of(speeds: Sequence[float], link: LinkSpeed = FREE, memory: int | None = None) -> Cluster:
    return replace(of_speeds(speeds, (memory,) * len(speeds)), inside=link, between=link)


def deep(folder: Path, **sizes: int) -> str:
    """A Llama of the zoo with other sizes, by its config."""
    place = folder / "deep.json"
    with torch.device("meta"):
        model = tiny("llama-causal", **sizes)
    place.write_text(json.dumps(model.config.to_dict()))
    return f"config:{place}"


def best_of(drawn: Sketch, cluster: Cluster) -> float:
    return Planner(drawn, cluster).search().choices[0].time.total


# ------------------------------------------------------------------ nothing is faster


def parted(total: int, ranks: int, step: int = 1) -> Iterator[tuple[int, ...]]:
    """Every way to share out `total` in steps, each rank with some."""
    sizes = range(step, total, step)
    return (one for one in itertools.product(sizes, repeat=ranks) if sum(one) == total)


def every_plan(ranks: int, rows: int) -> Iterator[ParallelConfig]:
    """All plans of a tiny Llama along one axis, with tokens in eighths."""
    for shares in parted(rows, ranks):
        yield ParallelConfig(dp=DpConfig(size=ranks, shares=shares))
    for heads in parted(8, ranks, 2):
        for columns in parted(96, ranks, 8):
            yield ParallelConfig(tp=CutConfig(size=ranks, heads=heads, columns=columns))
            for sequence in parted(8, ranks):
                lists = {"heads": heads, "columns": columns, "sequence": sequence}
                yield ParallelConfig(galaxy=CutConfig(size=ranks, **lists, vocabulary=True))  # type: ignore[arg-type]
    for sequence in parted(8, ranks):
        yield ParallelConfig(sp=CutConfig(size=ranks, sequence=sequence))
    for pieces in (2, 4, 8):
        yield ParallelConfig(pp=PpConfig(size=2, stages=(1, 1), microbatches=pieces))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("link", [FREE, SLOW], ids=["free", "slow"])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_no_plan_that_could_be_written_is_faster(
    drawn: Sketch, speeds: tuple[float, ...], link: LinkSpeed
) -> None:
    planner = Planner(drawn, cluster_of(speeds, link))
    clock = planner.clocks[False]
    brute = min(clock.of(planner.plan(one)).total for one in every_plan(2, 8))
    assert planner.search().choices[0].time.total <= brute * (1 + 1e-6)


@pytest.mark.parametrize("link", [FREE, SLOW], ids=["free", "slow"])
@pytest.mark.parametrize("name", ["tp", "galaxy"])
def test_no_lists_of_a_cut_are_faster(drawn: Sketch, name: str, link: LinkSpeed) -> None:
    """Between meetings a slow rank has norms, too; and over a slow link tokens stay even."""
    rates = (
        replace(CPU, launch=0.0, memory=CPU.memory / 20),
        replace(CPU, launch=0.0, matmul=CPU.matmul / 3),
    )
    planner = Planner(drawn, Cluster(tuple(Device("a", one) for one in rates), link, link))
    given = [one for one in every_plan(2, 8) if name in one.axes]
    brute = min(planner.clocks[False].of(planner.plan(one)).total for one in given)
    wanted = replace(given[0], **{name: CutConfig(size=2, vocabulary=given[0].axes[name].vocabulary)})
    assert planner.search([wanted]).choices[0].time.total <= brute * (1 + 1e-6)


def test_tokens_suit_an_encoder_and_a_causal_decoder_alike(tmp_path: Path) -> None:
    """Of a decoder alone, the later tokens cost more."""
    planner = Planner(drawn_of(tmp_path, "t5-seq2seq"), cluster_of((2, 1)))
    written = [ParallelConfig(sp=CutConfig(size=2, sequence=one)) for one in parted(32, 2)]
    best = min(planner.clocks[False].of(planner.plan(one)).total for one in written)
    found = planner.search([ParallelConfig(sp=CutConfig(size=2))]).choices[0]
    assert found.time.total <= best * (1 + 1e-6)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Sketch:
    return drawn_of(tmp_path_factory.mktemp("mixed"), "qwen2moe-causal")


def every_spread(ranks: int, rows: int, experts: int) -> Iterator[ParallelConfig]:
    """All plans in which replicas share experts."""
    for shares in parted(rows, ranks):
        for held in parted(experts, ranks):
            yield ParallelConfig(ep=EpConfig(size=ranks, shares=shares, experts=held))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("link", [FREE, SLOW], ids=["free", "slow"])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)])
def test_no_shares_of_experts_are_faster(mixed: Sketch, speeds: tuple[float, ...], link: LinkSpeed) -> None:
    planner = Planner(mixed, cluster_of(speeds, link))
    clock = planner.clocks[False]
    brute = min(clock.of(planner.plan(one)).total for one in every_spread(2, 8, 5))
    own = planner.search([ParallelConfig(ep=EpConfig(size=2))]).choices[0]
    assert own.time.total == pytest.approx(brute, rel=1e-6)
    assert planner.search().choices[0].time.total <= brute * (1 + 1e-6)


def test_replicas_share_experts_where_their_memory_or_their_speed_asks_for_it(mixed: Sketch) -> None:
    fast = Planner(mixed, cluster_of((1, 3))).search().choices[0].parallel.ep
    assert fast is not None and fast.experts == (1, 4) and fast.shares == (1, 3)
    spread = [one for one in layouts(4, 8, 2, 5) if one.ep is not None]
    assert [(str(one), one.dp and one.dp.size) for one in spread] == [("dp 2 x ep 2", 2), ("ep 4", None)]
    assert not [one for one in layouts(4, 8, 2) if one.ep is not None]


def test_experts_go_where_memory_is(tmp_path: Path) -> None:
    drawn = drawn_of(tmp_path, "mixtral-causal", method="full")
    only = [ParallelConfig(ep=EpConfig(size=2, shares=(1, 1)))]
    roomy = Planner(drawn, cluster_of((1, 1), memory=10**12))
    needs = [roomy.memory.bytes_of(roomy.plan(only[0]), 0, 0, 4, False, dp) for dp in (0, 1)]
    small = replace(
        cluster_of((1, 1)), devices=tuple(Device("a", CPU, int(size)) for size in (needs[0] - 1e5, 1e12))
    )
    found = Planner(drawn, small).search([ParallelConfig(ep=EpConfig(size=2))]).choices[0]
    assert found.plan.experts[0] < found.plan.experts[1] or found.plan.shares[0] < found.plan.shares[1]
    assert found.fullest <= 1


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(speeds=st.lists(st.floats(0.3, 4), min_size=2, max_size=4), bandwidth=st.floats(1e6, 1e11))
def test_the_even_plan_is_never_faster(drawn: Sketch, speeds: list[float], bandwidth: float) -> None:
    planner = Planner(drawn, cluster_of(speeds, LinkSpeed(1e-6, bandwidth)))
    found = planner.search().choices[0].time.total
    for even in layouts(len(speeds), 8, 2):
        try:
            assert found <= planner.clocks[False].of(planner.plan(even)).total * (1 + 1e-9)
        except UsageError:
            continue  # more ranks than heads, say


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(1e5, 1e12), min_size=2, max_size=4), st.floats(0.3, 3))
def test_a_faster_link_never_makes_a_slower_step(drawn: Sketch, rates: list[float], speed: float) -> None:
    times = [best_of(drawn, cluster_of((1, speed, 1), LinkSpeed(1e-6, rate))) for rate in sorted(rates)]
    assert all(slow >= fast * (1 - 1e-6) for slow, fast in itertools.pairwise(times))


def test_slow_links_are_a_reason_to_send_less(tmp_path: Path) -> None:
    full = drawn_of(tmp_path, method="full")
    near = Planner(full, cluster_of((1, 1), FREE)).search().choices[0]
    far = Planner(full, cluster_of((1, 1), LinkSpeed(1e-4, 1e6))).search().choices[0]
    assert near.parallel.pp is None and far.parallel.pp is not None, "gradients of all weights against states"
    assert far.time.total > near.time.total


# ------------------------------------------------------------------ memory


def test_what_is_proposed_fits_and_what_does_not_is_refused(drawn: Sketch) -> None:
    alone = Planner(drawn, cluster_of((1, 1), memory=10**12))
    free = alone.search().choices[0]
    size = free.fullest * 10**12
    roomy = Planner(drawn, cluster_of((1, 1), memory=int(size * 1.001))).search().choices[0]
    assert roomy.time == free.time
    tight = Planner(drawn, cluster_of((1, 1), memory=int(size - 10**5))).search().choices[0]
    assert tight.fullest <= 1 and tight.time.total >= free.time.total
    with pytest.raises(MachineError, match="no plan"):
        Planner(drawn, cluster_of((1, 1), memory=2**28)).search()


PLANS = {
    "dp": ParallelConfig(dp=DpConfig(size=2)),
    "shard": ParallelConfig(dp=DpConfig(size=2, shard=True)),
    "tp": ParallelConfig(tp=CutConfig(size=2, shares=(3, 1))),
    "galaxy": ParallelConfig(galaxy=CutConfig(size=2, shares=(3, 1))),
    "sp": ParallelConfig(sp=CutConfig(size=2, shares=(3, 1))),
    "pp": ParallelConfig(pp=PpConfig(size=2, microbatches=4)),
}
OF_EXPERTS = {
    "ep": ParallelConfig(ep=EpConfig(size=2, shares=(1, 3), experts=(3, 1))),
    "tp": ParallelConfig(tp=CutConfig(size=2)),
    "galaxy": ParallelConfig(galaxy=CutConfig(size=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *itertools.product(["llama-causal", "t5-gated"], ["lora", "full", "side"]),
        ("mixtral-causal", "lora"),
        ("mixtral-causal", "full"),
    ],
)
def test_memory_is_the_footprint(name: str, method: str, tmp_path: Path) -> None:
    beside = [1] if name == "llama-causal" else None
    how = {"name": "side", "reduction": 4, "layers": beside} if method == "side" else method
    drawn = sketched(recipe_of(name, tmp_path, batch_size=8, method=how))
    planner = Planner(drawn, cluster_of((1, 1), memory=10**12))
    for parallel in (OF_EXPERTS if name == "mixtral-causal" else PLANS).values():
        plan = planner.plan(parallel)
        ranks = priced(drawn, parallel, 2, [10**12]).ranks
        for rank in ranks:
            place = rank.at.pp, rank.at.tp, rank.rows
            own = planner.memory.bytes_of(plan, *place, again=False, dp=rank.at.dp) - rank.process
            assert own == pytest.approx(rank.memory.total, rel=0.06), (parallel, rank.rank)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe for GPUs, whose model is large enough for what blocks keep to count."""
    folder = tmp_path_factory.mktemp("gpus")
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16}
    model = deep(folder, **sizes, num_key_value_heads=8, head_dim=128, num_hidden_layers=8, vocab_size=32000)
    return load_recipe(
        recipe_of("llama-causal", folder, batch_size=8),
        {"model": model, "device": "cuda", "dtype": "bf16", "data.max_length": 2048},
    )


@pytest.fixture(scope="module")
def of_gpus(on_gpus: Recipe) -> Planner:
    return Planner(sketched(on_gpus), cluster_of((1, 1), memory=10**12))


ON_GPUS = PLANS | {
    "sp, ulysses": ParallelConfig(sp=CutConfig(size=2, sequence=(3, 1), exchange="ulysses")),
    "pp, interleaved": ParallelConfig(pp=PpConfig(size=2, microbatches=4, schedule="interleaved")),
    "galaxy, apart": ParallelConfig(
        galaxy=CutConfig(size=2, heads=(12, 4), columns=(5120, 3072), sequence=(7, 1))
    ),
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ON_GPUS)
def test_memory_of_gpus_is_what_fused_blocks_keep(
    name: str, again: bool, on_gpus: Recipe, of_gpus: Planner
) -> None:
    recipe, plan = on_gpus.model_copy(update={"gradient_checkpointing": again}), of_gpus.plan(ON_GPUS[name])
    told = outlook(foretold(recipe, 2, [140 * 2**30], ON_GPUS[name]), "H200")
    assert told.policies, told.lines
    for rank in told.forecast.ranks:
        own = of_gpus.memory.bytes_of(plan, rank.at.pp, rank.at.tp, rank.rows, again, dp=rank.at.dp)
        assert own == pytest.approx(rank.total, rel=0.05), rank.rank


def test_tokens_are_counted_in_the_steps_of_the_policy(on_gpus: Recipe) -> None:
    """Of 4 rows of 200 tokens as for 1,024."""
    recipe = load_recipe(on_gpus, {"data.max_length": 200, "batch_size": 8})
    planner, parallel = Planner(sketched(recipe), cluster_of((1, 1), memory=10**12)), PLANS["dp"]
    told = outlook(foretold(recipe, 2, [140 * 2**30], parallel), "H200").forecast.ranks[0]
    own = planner.memory.bytes_of(planner.plan(parallel), 0, 0, told.rows, False) - planner.room.process
    kept = told.memory.activations
    assert own - told.memory.total == pytest.approx(0, abs=0.1 * kept)


def test_blocks_that_a_cut_leaves_unfused_are_counted_so(tmp_path: Path) -> None:
    """Whole, those of gpt-oss are fused; over own tokens, which a run is refused, their sinks are not."""
    recipe = recipe_of("gptoss-causal", tmp_path, batch_size=8, device="cuda", dtype="bf16")
    planner = Planner(sketched(recipe), cluster_of((1, 1), memory=10**12))
    cut = BACKENDS["sp-gather"]("gptoss-causal", 2)
    assert planner.room.fuses(planner.plan(PLANS["dp"])) and not planner.room.fuses(cut)
    alone = Planner(sketched(recipe.model_copy(update={"kernels": "off"})), planner.cluster)
    for again in (False, True):
        assert planner.memory.bytes_of(cut, 0, 0, 8, again) == alone.memory.bytes_of(cut, 0, 0, 8, again)


def test_cores_that_are_called_are_counted_unfused_where_ranks_hide_what_they_say(tmp_path: Path) -> None:
    recipe = recipe_of("qwen3_5-causal", tmp_path, batch_size=8, device="cuda", dtype="bf16")
    planner = Planner(sketched(recipe), cluster_of((1, 1), memory=10**12))
    plain, hidden = (planner.plan(ParallelConfig(tp=CutConfig(size=2, overlap=own))) for own in (False, True))
    assert planner.room.fuses(plain) and not planner.room.fuses(hidden)


def test_fused_blocks_recompute_by_themselves(on_gpus: Recipe) -> None:
    """So no recipe is told to: what is kept is chosen in the run, block by block."""

    def best(kernels: str) -> PricedPlan:
        drawn = sketched(on_gpus.model_copy(update={"kernels": kernels}))
        planner = Planner(drawn, cluster_of((1, 1)))
        kept, again = (
            planner.memory.bytes_of(planner.plan(PLANS["dp"]), 0, 0, 4, one) for one in (False, True)
        )
        assert again < kept
        tight = cluster_of((1, 1), memory=int(kept + again) // 2)
        return Planner(drawn, tight).search([PLANS["dp"]]).choices[0]

    fused, unfused = best("auto"), best("off")
    assert fused.again and fused.fused and not fused.checkpointing
    assert unfused.checkpointing and not unfused.fused


# ------------------------------------------------------------------ what work costs


def stage_blocks(drawn: Sketch, ranks: int) -> tuple[int, ...]:
    planner = Planner(drawn, cluster_of((1,) * ranks))
    given = [ParallelConfig(pp=PpConfig(size=ranks, microbatches=8))]
    found = planner.search(given).choices[0].parallel.pp
    assert found is not None
    return found.stages


def test_a_stage_with_the_head_has_fewer_blocks(tmp_path: Path) -> None:
    model = deep(tmp_path, num_hidden_layers=8, vocab_size=4096)
    recipe = load_recipe(recipe_of("llama-causal", tmp_path, batch_size=8), {"model": model})
    first, last = stage_blocks(sketched(recipe), 2)
    assert first > last


def test_decoder_blocks_of_t5_cost_more_than_those_of_the_encoder(tmp_path: Path) -> None:
    planner = Planner(drawn_of(tmp_path, "t5-gated"), cluster_of((1,)))
    clock, plan = planner.clocks[False], planner.plan(ParallelConfig())
    group = clock.group(plan, 0, 0)
    times = {
        stack: clock.each(group, None, 8.0)[number][0].total
        for number, (stack, _) in enumerate(planner.work.blocks)
    }
    assert times["decoder"] > 1.15 * times["encoder"]


def test_frozen_weights_have_no_gradients_and_ladders_no_backbone_behind_them(tmp_path: Path) -> None:
    def times(**changes: Any) -> Any:
        planner = Planner(drawn_of(tmp_path, **changes), cluster_of((1,)))
        plan = planner.plan(ParallelConfig())
        clock = planner.clocks[False]
        return clock.each(clock.group(plan, 0, 0), None, 8.0)[0][0], clock.of(plan).total

    full, lora = times(method="full"), times()
    side = times(method={"name": "side", "reduction": 4})
    upper = times(method={"name": "lora", "layers": [1]})
    assert full[0].backward / full[0].forward > 1.1 * lora[0].backward / lora[0].forward
    assert side[0].backward < 0.6 * side[0].forward
    assert upper[0].backward == 0, "below the lowest tuned block nothing goes back"


def test_blocks_talk_about_attention_where_it_is_their_turn(tmp_path: Path) -> None:
    """Three of four blocks have a mixer, which all ranks compute in full."""
    kinds = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    place = tmp_path / "mixed.json"
    place.write_text(json.dumps(tiny("qwen3_5-causal", **kinds).config.to_dict()))
    planner = Planner(drawn_of(tmp_path, model=f"config:{place}"), cluster_of((1, 1), SLOW))
    plan, clock = planner.plan(ParallelConfig(tp=CutConfig())), planner.clocks[False]
    said = [said.total for _, said in clock.each(clock.group(plan, 0, 0), plan.cut, 8.0)[:4]]
    assert said[0] == said[1] == said[2] > 0 and said[3] > 1.5 * said[0]


def test_a_cached_backbone_does_not_run(tmp_path: Path) -> None:
    side = {"name": "side", "reduction": 4}
    plain_, cached = (
        Planner(drawn_of(tmp_path, method=side, cache=cache), cluster_of((1,))) for cache in (False, True)
    )
    alone = plain_.plan(ParallelConfig())
    assert cached.clocks[False].of(alone).total < 0.7 * plain_.clocks[False].of(alone).total


def test_recomputing_costs_the_forward_pass_again(drawn: Sketch) -> None:
    planner = Planner(drawn, cluster_of((1,)))
    alone = planner.plan(ParallelConfig())
    kept, again = (planner.clocks[one].of(alone).total for one in (False, True))
    assert 1.2 * kept < again < 1.5 * kept


# ------------------------------------------------------------------ devices of given speeds


def test_advice_goes_by_speed_and_says_what_it_gains(tmp_path: Path) -> None:
    found = advise(recipe_of("llama-causal", tmp_path, parallel="galaxy"), (3, 1))
    assert found.parallel.galaxy == CutConfig(size=2, heads=(6, 2), columns=(72, 24), sequence=(3, 1))
    assert 0.5 <= found.ratio < 0.6, "the head is whole on both"
    assert [rank.heads for rank in found.forecast.ranks] == [6, 2]
    rows = advise(recipe_of("llama-causal", tmp_path, parallel="dp", batch_size=8), (3, 1))
    assert rows.parallel.dp == DpConfig(size=2, shares=(3, 1)) and rows.ratio == pytest.approx(0.5, abs=0.05)


def test_advice_turns_to_memory_only_where_it_must(tmp_path: Path) -> None:
    recipe = recipe_of("llama-causal", tmp_path, parallel="dp", batch_size=8)
    first = advise(recipe, (3, 1)).forecast.ranks[0]
    tight = advise(recipe, (3, 1), [first.total - first.memory.activations // 4, 10**9])
    assert tight.parallel.dp is not None and tight.parallel.dp.shares in ((), (5, 3))
    tight.forecast.check()
    assert 0.5 < tight.ratio <= 1
    with pytest.raises(MachineError, match="no plan"):
        advise(recipe, (3, 1), [2**28])


@pytest.mark.slow
def test_blocks_move_to_the_rank_with_memory(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 2048}
    for parallel in ("pp", "galaxy"):
        how = {"batch_size": 2, "parallel": parallel, "method": "full"}
        recipe = load_recipe(recipe_of("llama-causal", tmp_path, **how), {"model": deep(tmp_path, **sizes)})
        first = advise(recipe, (3, 1)).forecast.ranks[0]
        tight = advise(recipe, (3, 1), [first.total - 120 * 10**6, 4 * 10**9])
        tight.forecast.check()
        assert 0.5 < tight.ratio < 1


def test_advice_shares_out_experts_too(tmp_path: Path) -> None:
    found = advise(recipe_of("qwen2moe-causal", tmp_path, parallel="ep", batch_size=8), (3, 1))
    assert found.parallel.ep == EpConfig(size=2, shares=(3, 1), experts=(4, 1))
    assert found.ratio == pytest.approx(0.55, abs=0.1)


def test_speeds_are_positive_and_for_the_axes_of_a_recipe(tmp_path: Path) -> None:
    for speeds in ((1, 0), (1, -1), (1, float("nan"))):
        with pytest.raises(UsageError, match="positive"):
            of_speeds(speeds, (None, None))
    with pytest.raises(UsageError, match="speeds are for the axes"):
        advise(recipe_of("llama-causal", tmp_path), (3, 1))


# ------------------------------------------------------------------ the rest


def test_axes_are_written_as_a_recipe_has_them(drawn: Sketch) -> None:
    found = Planner(drawn, cluster_of((3, 1))).search().choices[0].parallel
    assert load_recipe(drawn.recipe, {"parallel": plain(found)}).parallel == found


def test_rules_of_recipes_hold_for_what_is_proposed(tmp_path: Path) -> None:
    drawn = drawn_of(tmp_path, method="ia3")
    for choice in Planner(drawn, cluster_of((1, 1), SLOW)).search().choices:
        assert not {"tp", "galaxy", "galaxy2"} & set(choice.parallel.axes)


def test_a_model_without_a_table_is_refused(drawn: Sketch) -> None:
    with pytest.raises(UsageError, match="no table"):
        Planner(replace(drawn, family=None), cluster_of((1, 1)))


def test_ranks_of_one_host_talk_over_its_own_link() -> None:
    devices = (Device("a", CPU),) * 4
    cluster = Cluster(devices, FREE, SLOW, hosts=(0, 2))
    assert cluster.link((0, 1)) == cluster.link((2, 3)) == FREE
    assert cluster.link((1, 2)) == cluster.link((0, 3)) == SLOW


# ------------------------------------------------------------------ parallel: auto


def test_a_recipe_may_leave_its_plan_open(tmp_path: Path) -> None:
    recipe = recipe_of("llama-causal", tmp_path, parallel="auto")
    assert recipe.parallel.auto and not recipe.parallel.axes and str(recipe.parallel) == "auto"
    again = load_recipe(recipe.resolved() | {"data": {"path": "nowhere"}})
    assert again.parallel == recipe.parallel and "parallel: auto" in recipe.to_yaml()
    assert load_recipe(recipe, ["parallel=dp:2"]).parallel == ParallelConfig(dp=DpConfig(size=2))
    with pytest.raises(UsageError, match="yet to be chosen"):
        forecast(recipe)


def test_a_plan_is_not_chosen_for_ranks_of_another_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed.process_group, "started", lambda: (0, 2))
    with pytest.raises(UsageError, match="ranks that petune itself starts"):
        distributed.planned(recipe_of("llama-causal", tmp_path, parallel="auto"))
    known = recipe_of("llama-causal", tmp_path)
    assert distributed.planned(known) is known
