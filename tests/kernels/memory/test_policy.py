"""The choice of rungs: known plans of Llama-3.1-8B on an H200, and what holds for every plan."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.memory import policy
from petune.kernels.memory.block_cost import A100, H200
from petune.kernels.memory.block_step import GIB, WORTH, Alike, BlockStep
from petune.kernels.memory.buffers import streamed_host_bytes
from petune.kernels.memory.policy import Policy, choose
from petune.kernels.memory.shape import BlockShape, Ranks
from petune.models.exchange import Exchanged
from tests.kernels.shapes import BERT, LLAMA, VOCABULARY

FULL = replace(LLAMA, trained=True, ranks=Ranks())
FIXED = 14.96 + 0.63  # GiB: weights in bf16, LoRA's parameters, gradients and states


def llama(
    tokens: int,
    budget: float,
    host: float = 100,
    sequence: int | None = None,
    shape: BlockShape = LLAMA,
    fixed: float = FIXED,
    streamed: bool = False,
    **config: Any,
) -> Policy:
    """Budget, host and fixed in GiB."""
    wide = False if streamed else None
    step = BlockStep(shape, 32, tokens, sequence or tokens, VOCABULARY, H200, int(fixed * GIB), wide)
    return choose(step, MemoryConfig(**config), int(budget * GIB), int(host * GIB))


# ------------------------------------------------------------------ known plans


def test_a_short_batch_keeps_everything() -> None:
    found = llama(4 * 2048, 139, sequence=2048)
    assert found.rungs == (Rung("all"),) * 32
    assert found.tile is None and found.host == 0 and found.recompute == 0
    assert 39 * GIB < found.peak < 41 * GIB  # 23 GiB kept over what stands
    assert found.seconds == pytest.approx(8192 / 18500, rel=0.03)


def test_a_long_sequence_keeps_attention_in_host_memory() -> None:
    found = llama(131072, 80)
    assert found.rungs[:30] == (Rung("attention", "attention"),) * 30 and found.rungs[31] == Rung("attention")
    assert found.peak == pytest.approx(30.5 * GIB, rel=0.05)  # as measured
    assert 36 < found.seconds < 41 and found.roofline < found.seconds
    assert found.tile is not None


def test_a_longer_one_mixes_what_rests_where() -> None:
    found = llama(262144, 80)
    assert {rung.keep for rung in found.rungs} == {"attention"}
    assert {"none", "attention"} <= {rung.offload for rung in found.rungs}
    assert found.peak <= 80 * GIB and found.host <= 100 * GIB


def test_the_least_that_can_be_kept_fits_close_to_the_weights() -> None:
    found = llama(8192, 80, keep="input", offload="input", tile=2048)
    assert found.peak < 17.7 * GIB
    assert found.rungs == (Rung("input", "input"),) * 31 + (Rung("input"),)
    assert found.tile == 2048


def test_memory_that_buys_next_to_nothing_stays_free() -> None:
    assert llama(131072, 139).peak < 100 * GIB
    assert llama(32768, 139).peak > 100 * GIB


def test_host_memory_stays_unused_where_the_device_has_room() -> None:
    assert llama(32768, 139).host == 0
    assert llama(32768, 80).host > 0


def test_offloading_too_little_to_hide_is_avoided() -> None:
    slow = replace(H200, link=H200.link / 50)
    step = BlockStep(LLAMA, 32, 8192, 2048, VOCABULARY, slow, int(FIXED * GIB))
    assert choose(step, MemoryConfig(), 24 * GIB, 100 * GIB).host == 0


def test_full_fine_tuning_streams_blocks_from_host_memory() -> None:
    found = llama(32768, 48, shape=FULL, fixed=4, streamed=True)
    assert found.peak <= 48 * GIB
    assert found.host >= 32 * streamed_host_bytes(FULL)
    short = llama(2048, 48, shape=FULL, fixed=4, streamed=True)
    # weights come twice, states once each way: the link bounds
    assert short.seconds > 32 * 7 * FULL.parameters * 2 / 2 / H200.link
    assert {rung.keep for rung in short.rungs} != {"all"}, "recomputing is free while blocks are on their way"


def test_blocks_that_do_not_train_do_not_stream() -> None:
    with pytest.raises(ValueError, match="stream"):
        llama(8192, 80, streamed=True)


def test_blocks_of_several_kinds_take_the_time_of_each_and_a_step_what_is_once() -> None:
    """A quarter of the blocks have a window of 128; which is typical decides about their bytes alone."""
    attention, mlp = LLAMA.sublayers
    narrow = replace(LLAMA, sublayers=(replace(attention, core=replace(attention.core, window=128)), mlp))

    def found(shape: BlockShape, *numbers: int, once: float = 0.0) -> Policy:
        kinds = zip((LLAMA, narrow), numbers, strict=False)
        several = tuple(Alike(one, number, 8192, 8192) for one, number in kinds if number)
        step = BlockStep(shape, 32, 8192, 8192, 0, H200, int(FIXED * GIB), kinds=several, once=once)
        return choose(step, MemoryConfig(), 139 * GIB, 0)

    whole, windows = found(LLAMA), found(narrow)
    mixed, typical = found(LLAMA, 24, 8), found(narrow, 24, 8, once=0.5)
    assert windows.seconds < 0.9 * whole.seconds
    assert mixed.seconds == pytest.approx(0.75 * whole.seconds + 0.25 * windows.seconds)
    assert mixed.roofline == pytest.approx(0.75 * whole.roofline + 0.25 * windows.roofline)
    assert typical.seconds == pytest.approx(mixed.seconds + 0.5)
    assert mixed.peak == whole.peak


# ------------------------------------------------------------------ settings


@pytest.mark.parametrize("keep", ["all", "projections", "attention", "input"])
@pytest.mark.parametrize("offload", ["none", "input", "attention"])
def test_settings_hold_for_all_blocks_but_the_last_ones_offload(keep: Any, offload: Any) -> None:
    if (keep, offload) == ("input", "attention"):
        with pytest.raises(UsageError, match="no attention output"):
            llama(8192, 80, keep=keep, offload=offload)
        return
    found = llama(8192, 80, keep=keep, offload=offload)
    assert found.rungs == (Rung(keep, offload),) * 31 + (Rung(keep),)


def test_a_tile_that_is_named_is_obeyed_and_one_that_contradicts_refused() -> None:
    assert llama(131072, 80, tile=1024).tile == 1024
    assert llama(8192, 80, keep="input", tile=8192).tile is None, "a tile of all tokens is none"
    with pytest.raises(UsageError, match="not tiled"):
        llama(8192, 80, keep="all", tile=1024)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(
        UsageError, match=r"memory: auto fits: 29\.\d GiB, host 61\.0 GiB \(blocks 0-29 keep attention"
    ) as found:
        llama(131072, 40, keep="all")
    assert "at most 40.0 GiB" in str(found.value) and "at least 33" in str(found.value)
    with pytest.raises(UsageError, match="more host memory: 29"):
        llama(131072, 40, host=10)
    with pytest.raises(UsageError, match="fewer tokens per step"):
        llama(131072, 18)
    with pytest.raises(UsageError, match=r"found at least .*host 1\.9 GiB") as found:
        llama(8192, 80, host=1, keep="input", offload="input")
    assert "host 1.0 GiB" in str(found.value)


def test_a_policy_reads_as_two_lines() -> None:
    rungs = (*[Rung("attention", "attention")] * 26, *[Rung("all")] * 6)
    found = Policy(rungs, 8192, int(38.2 * GIB), 80 * GIB, 52 * GIB, 41.9, 0.071, 38.0)
    assert found.lines() == (
        (
            "memory: blocks 0-25 keep attention (input and attention output in host memory), 26-31 keep all;"
            " MLP in tiles of 8,192 tokens"
        ),
        (
            "memory: peak 38.2 GiB of 80.0, host 52.0 GiB; step 41.9 s predicted, roofline 38.0 s, 7% of the"
            " FLOP done again"
        ),
    )
    alone = Policy((Rung("input", "input"), Rung("input")), None, GIB, 2 * GIB, 0, 0.5, 0.3, 0.4)
    assert alone.lines()[0] == "memory: block 0 keeps input (input in host memory), 1 keeps input"
    assert alone.lines()[1].startswith("memory: peak 1.0 GiB of 2.0; step 500 ms")


def test_several_passes_keep_less_each_and_park_the_last_block_too() -> None:
    sizes, limits = (16384, 2048, VOCABULARY, H200, int(FIXED * GIB)), (76 * GIB, 100 * GIB)
    steps = [BlockStep(LLAMA, 16, *sizes, passes=passes) for passes in (1, 4)]
    one, four = (choose(step, MemoryConfig(), *limits) for step in steps)
    assert one.rungs == (Rung("all"),) * 16
    assert four.rungs != one.rungs and four.peak <= 76 * GIB
    parked = choose(steps[1], MemoryConfig("input", offload="input"), *limits)
    assert parked.rungs == (Rung("input", "input"),) * 16
    assert parked.host == 4 * 16 * 16384 * LLAMA.width * LLAMA.itemsize


# ------------------------------------------------------------------ every plan

SHAPES = st.sampled_from(
    [LLAMA, BERT, replace(LLAMA, ranks=Ranks(), trained=True), replace(LLAMA, heads=4, kv_heads=4)]
)
DEPTHS = st.integers(1, 12)
TOKENS = st.sampled_from([128, 2048, 8192, 20000, 65536, 262144])


def chosen(
    shape: BlockShape, depth: int, tokens: int, budget: int, host: int, **config: Any
) -> Policy | None:
    try:
        step = BlockStep(shape, depth, tokens, tokens, 32000, A100, GIB)
        return choose(step, MemoryConfig(**config), budget, host)
    except UsageError:
        return None


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    SHAPES, DEPTHS, TOKENS, st.integers(GIB, 200 * GIB), st.integers(0, 100 * GIB), st.integers(0, 50 * GIB)
)
def test_more_memory_is_never_slower_and_a_budget_never_exceeded(
    shape: BlockShape, depth: int, tokens: int, budget: int, host: int, more: int
) -> None:
    found = chosen(shape, depth, tokens, budget, host)
    if found is None:
        return
    assert found.peak <= budget and found.host <= host and len(found.rungs) == depth
    assert found.rungs[-1].offload == "none" and found.seconds >= found.roofline * (1 - 1e-9)
    assert found == chosen(shape, depth, tokens, budget, host)
    roomier, hosted = (
        chosen(shape, depth, tokens, budget + more, host),
        chosen(shape, depth, tokens, budget, host + more),
    )
    assert roomier is not None and roomier.seconds <= found.seconds * (1 + 1e-9)
    price = WORTH * found.peak / GIB * found.roofline
    assert hosted is not None and hosted.seconds <= found.seconds + price + 1e-9


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    SHAPES,
    st.integers(1, 7),
    TOKENS,
    st.integers(2 * GIB, 100 * GIB),
    st.integers(0, 40 * GIB),
    st.booleans(),
    st.sampled_from([1, 1, 2, 2.5, 4]),
)
def test_no_plan_of_two_rungs_is_better(
    shape: BlockShape, depth: int, tokens: int, budget: int, host: int, offload: bool, passes: float
) -> None:
    """Against every pair of rungs at every length and tile, its peak found block by block; other passes on
    the way keep all that they keep, their last block as the others."""
    config = MemoryConfig() if offload else MemoryConfig(offload="none")
    step = BlockStep(shape, depth, tokens, tokens, 32000, A100, GIB, passes=passes)
    best = float("inf")
    for _, options in policy._tables(step, config):
        for first, last in policy._pairs(options):
            for suffix in range(1, depth) if first is not last else (depth,):
                blocks = [first] * (depth - suffix) + [last] * suffix
                alone = passes == 1
                kept = [option.kept for option in blocks[:-1]] + [last.kept + alone * last.host]
                pinned = [option.host for option in (blocks[:-1] if alone else blocks)]
                early, late = (
                    2 * max(pinned, default=0),
                    2 * next((size for size in reversed(pinned) if size), 0),
                )
                slots = [early if block is first is not last else late for block in blocks]
                peaks = [
                    size + option.working + slot
                    for size, option, slot in zip(accumulate(kept), blocks, slots, strict=True)
                ]
                others = ceil((passes - 1) * sum(option.kept for option in blocks))
                peak = step.standing + others + max(*peaks, sum(kept) + step.head + late)
                if peak <= budget and ceil(passes * sum(pinned)) <= host:
                    seconds = step.other + sum(option.seconds for option in blocks[:-1])
                    seconds += last.alone if alone else last.seconds
                    best = min(best, step.price(seconds, peak))
    found = policy._best(step, config, budget, host)
    if found is None:
        assert best == float("inf")
    elif found.host or not offload:
        assert step.price(found.seconds, found.peak) == pytest.approx(best, rel=1e-12)
    else:
        assert step.price(found.seconds, found.peak) >= best - 1e-12


def test_choosing_is_quick_for_many_blocks() -> None:
    """Less than 20 ms on a machine at rest."""
    times = []
    for _ in range(5):
        policy._options.cache_clear()  # a step's options are kept
        began = time.process_time()
        step = BlockStep(LLAMA, 80, 131072, 131072, VOCABULARY, H200, 16 * GIB)
        choose(step, MemoryConfig(), 80 * GIB, 100 * GIB)
        times.append(time.process_time() - began)
    assert min(times) < 0.1


def test_ranks_that_share_blocks_keep_the_least_that_one_of_them_would() -> None:
    """A rung that falls to `input` has no attention left to park; a tile is the smallest."""
    rungs = Rung("all"), Rung("attention", "attention"), Rung("projections", "input")
    own = Policy(rungs, None, 1, 2, 0, 1.0, 0.0, 1.0)
    assert own.agreed(list) == own
    found = own.agreed(lambda mine: [min(pair) for pair in zip(mine, [2, 0, 3, 4096], strict=True)])
    assert (
        found.rungs == (Rung("projections"), Rung("input", "input"), Rung("projections", "input"))
        and found.tile == 4096
    )


def test_blocks_compute_on_own_tokens_and_the_head_on_all() -> None:
    attention, mlp = LLAMA.sublayers
    core = replace(attention.core, exchange=Exchanged("ring", (3, 1), 1))  # type: ignore[type-var]
    shape = replace(LLAMA, sublayers=(replace(attention, core=core), mlp))
    assert shape.own(8192) == 2048 and LLAMA.own(8192) == 8192
    cut = replace(shape, sublayers=(shape.sublayers[0], replace(mlp, connection="sequence")))
    assert cut.own(8192) == 8192, "an MLP that is cut by columns is handed all of them"
    found = BlockStep(shape, 4, 8192, 2048, VOCABULARY, H200)
    whole = BlockStep(LLAMA, 4, 8192, 2048, VOCABULARY, H200)
    assert found.own == 2048 and found.head == whole.head
    assert found.roofline - found.other < (whole.roofline - whole.other) / 3
