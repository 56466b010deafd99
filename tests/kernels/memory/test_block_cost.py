"""The work of a block and the rates of devices: known FLOP, the ladder, known ceilings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petune.kernels.configs import Level
from petune.kernels.memory import block_cost
from petune.kernels.memory.block_cost import A100, CPU, CUDA, H100, H200
from petune.kernels.memory.buffers import kept_bytes
from petune.kernels.memory.op_cost import Cost, KernelCost, attention, matmul, total
from petune.kernels.memory.shape import BlockShape, Ranks
from petune.models import llama, olmo2, t5
from petune.models.spec import SubLayer
from tests.kernels.shapes import BERT, DEPTH, KEEPS, LLAMA, ROUTED, VOCABULARY

PASSES = (block_cost.forward, block_cost.backward)


def step_flop(shape: BlockShape, tokens: int) -> float:
    """Of a step without recomputation, one sequence."""
    block = total(block_cost.forward(shape, tokens, tokens) + block_cost.backward(shape, tokens, tokens))
    return (
        DEPTH * block.flop
        + total(block_cost.linear_cross_entropy(tokens, shape.width, VOCABULARY, shape.trained)).flop
    )


def step_seconds(tokens: int, sequence: int, keep: Level) -> float:
    work = block_cost.forward(LLAMA, tokens, sequence) + block_cost.backward(LLAMA, tokens, sequence)
    work += block_cost.recomputed(LLAMA, keep, tokens, sequence)
    return DEPTH * H200.seconds(work, sequence) + H200.seconds(
        block_cost.linear_cross_entropy(tokens, 4096, VOCABULARY), sequence
    )


# ------------------------------------------------------------------ a block


def test_a_block_of_llama_has_its_known_numbers() -> None:
    assert DEPTH * LLAMA.parameters == pytest.approx(6.979e9, rel=1e-4)
    assert DEPTH * LLAMA.adapters == pytest.approx(41.94e6, rel=1e-4)


@pytest.mark.parametrize(("tokens", "gigaflop"), [(2048, 32.2), (8192, 37.8), (32768, 60.3), (131072, 150.5)])
def test_a_token_costs_the_flop_that_arithmetic_says(tokens: int, gigaflop: float) -> None:
    """LoRA: two products with every frozen weight, 3.5 times attention's forward, the head twice."""
    assert step_flop(LLAMA, tokens) / tokens == pytest.approx(gigaflop * 1e9, rel=0.01)


@pytest.mark.parametrize(("tokens", "gigaflop"), [(2048, 46.9), (32768, 75.1)])
def test_weights_that_train_add_their_gradients(tokens: int, gigaflop: float) -> None:
    assert step_flop(replace(LLAMA, trained=True, ranks=Ranks()), tokens) / tokens == pytest.approx(
        gigaflop * 1e9, rel=0.01
    )


def test_each_rung_runs_less_again_and_none_the_down_projection() -> None:
    flop = [total(block_cost.recomputed(LLAMA, keep, 8192, 8192)).flop for keep in KEEPS]
    assert flop[0] == 0 and flop == sorted(flop)
    whole = total(block_cost.forward(LLAMA, 8192, 8192)).flop
    assert whole - flop[-1] == pytest.approx(matmul(8192, 14336, 4096).flop, rel=0.03)
    assert flop[2] - flop[1] == pytest.approx(matmul(8192, 4096, 4096 + 6144).flop, rel=0.02)
    assert flop[3] - flop[2] == attention(8192, 8192, 32, 8, 128).flop


def test_a_post_norm_block_needs_its_down_projection_again() -> None:
    stages = {one.stage for one in block_cost.recomputed(BERT, "input", 512, 512)}
    assert {"attention.a", "mlp.s_down", "mlp.r"} <= stages and "attention.h" not in stages


def test_tiles_do_the_same_work_in_more_launches() -> None:
    whole, tiled = (block_cost.forward(LLAMA, 8192, 8192, tile) for tile in (None, 2048))
    assert total(whole).flop == pytest.approx(total(tiled).flop)
    assert sum(one.times for one in tiled) > sum(one.times for one in whole)


def test_a_mixture_costs_what_the_chosen_experts_do_and_reads_all_of_them() -> None:
    """Qwen3-30B-A3B: 30.5e9 weights in 48 blocks, of which 3.3e9 take part for a token, embeddings among
    them."""
    embedded = 2 * 151936 * 2048
    assert 48 * ROUTED.parameters + embedded == pytest.approx(30.53e9, rel=1e-3)
    bare = replace(ROUTED, ranks=Ranks(), experts=replace(ROUTED.routed, up=0, down=0))
    work = block_cost.forward(bare, 8192, 1)
    products = [one for one in work if one.kind in ("matmul", "grouped")]
    active = sum(one.cost.flop for one in products) / 2 / 8192
    assert 48 * active + embedded == pytest.approx(3.35e9, rel=1e-2)
    read = sum(one.cost.bytes for one in products if one.stage == "mlp.s")
    copies = 8 * 8192
    assert read == 2 * (128 * 2048 * 1536 + copies * (2048 + 1536))


def test_what_a_mixture_runs_again_is_its_first_product_and_never_its_second() -> None:
    flop = {keep: total(block_cost.recomputed(ROUTED, keep, 8192, 8192)).flop for keep in KEEPS}
    up = total(one for one in block_cost.forward(ROUTED, 8192, 8192) if one.stage == "mlp.s").flop
    assert flop["all"] < 1e-3 * up  # the norm, whose result the factors' gradients read
    assert flop["projections"] == pytest.approx(up, rel=0.01)
    stages = {one.stage for one in block_cost.recomputed(ROUTED, "input", 8192, 8192)}
    assert "mlp.s" in stages and not {"mlp.routes", "mlp.s_down"} & stages


def test_what_trains_is_updated_in_its_own_bytes_and_rounded_where_it_is_wider() -> None:
    """Parameter, gradient and two states: 14 bytes of bf16, 28 of float32, which is cast in both passes and
    whose gradient is not."""
    full = replace(LLAMA, trained=True, ranks=Ranks())
    narrow, wide = ([one, replace(one, weight=4)] for one in (full, LLAMA))
    numbers = full.parameters
    bytes_of = [total(block_cost.update(one)).bytes for one in narrow]
    assert bytes_of == [14 * numbers, 28 * numbers]
    assert total(block_cost.update(full, recorded=True)).bytes == 18 * numbers
    assert total(block_cost.update(LLAMA)).bytes == 28 * LLAMA.adapters
    passes = [[total(way(one, 64, 64)).bytes for one in narrow] for way in PASSES]
    assert [two - one for one, two in passes] == [6 * numbers, 0]  # back the cast of each, no gradient's
    frozen = [[total(way(one, 64, 64)).bytes for one in wide] for way in PASSES]
    assert [two - one for one, two in frozen] == pytest.approx([6 * numbers] * 2, rel=0.005)


def test_a_decoder_reads_all_that_its_encoder_gives() -> None:
    own = BlockShape(64, 4, 4, 16, 256, ranks=Ranks(*[4] * 7), sublayers=t5.DECODER)
    longer = replace(own, memory=(3.0, 96))
    for way, times in zip(PASSES, (1, 2.5), strict=True):
        one, two = (total(part for part in way(shape, 128, 32)) for shape in (own, longer))
        read = ("cross.kv", "cross.s_kv", "d memory")
        products = total(part for part in way(own, 128, 32) if part.stage in read).flop
        scores = times * 4 * 4 * 16 * 128
        assert two.flop - one.flop == pytest.approx(2 * products + scores * (96 - 32), rel=0.02)
    assert kept_bytes(longer, "all") - kept_bytes(own, "all") == 2 * 2 * (
        2 * 64 + 8
    )  # k, v and their updates'


def test_norms_over_whole_widths_take_them_apart() -> None:
    """q, k and v are copied, normed, put together and turned; in one kernel where each head is normed."""
    heads, widths = (
        replace(LLAMA, sublayers=(SubLayer(replace(core, scale=1.0)),))
        for core in (llama.ATTENTION, olmo2.ATTENTION)
    )
    moved = [total(block_cost.forward(one, 64, 64)).bytes for one in (heads, widths)]
    qkv = 2 * 64 * 6144
    assert moved[1] - moved[0] == pytest.approx((2 + 2 + 2 - 1 / 3) * qkv, rel=0.01)


# ------------------------------------------------------------------ rates


@pytest.mark.parametrize(
    ("sizes", "idle"),
    [
        ((8192, 4096, 14336), 55 * 132 / (64 * 112)),
        ((5120, 1024, 1024), 3 * 132 / (40 * 8)),
        ((1024, 1024, 1024), 132 / 64),
        ((1024, 3072, 1024), 132 / 128),  # cut in two along the sum, which is long
        ((100, 1024, 100), 132),
    ],
)
def test_processors_without_a_tile_wait_for_the_others(sizes: tuple[int, int, int], idle: float) -> None:
    cost = matmul(*sizes)
    assert cost.idle(132) == pytest.approx(idle)
    assert cost.idle(1) == 1.0 == Cost(1, 1).idle(132)
    rates = replace(CPU, matmul=1e12, memory=1e30, launch=0.0, processors=132)
    seconds = rates.seconds((KernelCost("u", "matmul", cost),), 1)
    assert seconds == pytest.approx(idle * cost.flop / 1e12)


@pytest.mark.parametrize(
    ("tokens", "sequence", "keep", "speed"),
    [
        (8192, 2048, "all", 19000),
        (8192, 8192, "all", 15800),
        (8192, 8192, "attention", 11900),
        (32768, 32768, "attention", 8150),
        (131072, 131072, "attention", 3450),
        (131072, 131072, "input", 2890),
    ],
)
def test_an_h200_comes_to_its_known_ceilings(tokens: int, sequence: int, keep: Level, speed: int) -> None:
    assert tokens / step_seconds(tokens, sequence, keep) == pytest.approx(speed, rel=0.05)


@pytest.mark.parametrize(
    ("length", "rate"), [(128, 1e12), (1024, 1e12), (2048, 2e12), (4096, 3e12), (10**6, 3e12)]
)
def test_attention_goes_from_one_known_length_to_the_next(length: int, rate: float) -> None:
    rates = replace(CPU, attention=((1024, 1e12), (4096, 3e12)), memory=1e30, launch=0.0)
    assert rates.seconds((KernelCost("a", "attention", Cost(flop=6e12)),), length) == pytest.approx(
        6e12 / rate
    )


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [
        (KernelCost("u", "matmul", Cost(4e9, 1)), 4e-3),
        (KernelCost("u", "matmul_fp8", Cost(4e9, 1)), 2e-3),
        (KernelCost("u", "matmul", Cost(1, 1e9)), 1e-2),
        (KernelCost("u", "memory", Cost(4e15, 1e9)), 1e-2),
        (KernelCost("u", "memory", Cost(1, 1e6, hashes=1e9)), 1e-1),
        (KernelCost("u", "matmul", Cost(4e9, 1, hashes=1e6)), 4e-3),
        (KernelCost("u", "attention", Cost(1e9, 1, beside=3e9)), 4e-3),
        (KernelCost("u", "memory", Cost(), times=7), 0.0),
    ],
)
def test_the_slowest_of_arithmetic_traffic_and_hashes_counts_and_the_launch_besides(
    operation: KernelCost, seconds: float
) -> None:
    rates = replace(
        CPU, matmul=1e12, matmul_fp8=2e12, attention=((1, 1e12),), memory=1e11, hashes=1e10, launch=1e-5
    )
    assert rates.seconds((operation,), 1) == pytest.approx(seconds + operation.times * 1e-5)


def test_a_product_with_few_ranks_is_slower_than_the_memory() -> None:
    cost, rates = Cost(1, 1e9), replace(CPU, launch=0.0)
    narrow, plain = (rates.seconds((KernelCost("s", kind, cost),), 1) for kind in ("narrow", "memory"))
    assert narrow == pytest.approx(plain / block_cost.NARROW)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("NVIDIA H200", H200),
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA A100-SXM4-80GB", A100),
        ("cpu", CPU),
        ("NVIDIA GeForce RTX 3060", CUDA),
    ],
)
def test_a_device_gets_its_preset_by_name(name: str, rates: block_cost.Rates) -> None:
    assert block_cost.rates_of(name) is rates
    assert rates.measured == (rates in (H200, H100))


def test_dropout_of_updates_costs_time_and_no_flop() -> None:
    """Every update's input is hashed ahead, for its gradient and for that of A; within the kernels of an
    activation those are one."""
    wide = replace(LLAMA, ranks=Ranks(*[64] * 7))
    large = replace(LLAMA, ranks=Ranks(*[128] * 7))
    for shape, hashed in (
        (LLAMA, 3 * 6 * 4096 + 2 * 14336),
        (wide, 3 * 6 * 4096 + 2 * 14336),
        (large, 3 * (6 * 4096 + 14336)),
    ):
        plain, drops = (
            block_cost.forward(one, 8192, 2048) + block_cost.backward(one, 8192, 2048)
            for one in (shape, replace(shape, drops=True))
        )
        assert total(plain).flop == total(drops).flop and total(plain).hashes == 0
        assert H200.seconds(drops, 2048) > H200.seconds(plain, 2048)
        assert total(drops).hashes == 8192 * hashed


def test_a_blocks_own_dropouts_cost_passes_of_their_own() -> None:
    described = replace(BERT, sublayers=tuple(replace(one, drop="drop") for one in BERT.sublayers))
    plain, drops = (
        total(block_cost.forward(one, 512, 512)) for one in (described, replace(described, dropouts=True))
    )
    assert drops.hashes == 2 * 512 * 1024 and plain.hashes == 0
    assert drops.bytes > plain.bytes


def test_narrow_heads_are_slower_by_their_exponentials() -> None:
    wide, narrow = (
        H200.seconds((KernelCost("a", "attention", attention(8192, 2048, heads, 8, dim)),), 2048)
        for heads, dim in ((32, 128), (64, 64))
    )
    assert narrow == pytest.approx(2**0.5 * wide, rel=0.01)


def test_eight_bits_are_faster_where_matmuls_bound() -> None:
    bf16, fp8 = (
        H200.seconds(block_cost.forward(shape, 8192, 2048), 2048)
        for shape in (LLAMA, replace(LLAMA, fp8=True))
    )
    assert 0.5 < fp8 / bf16 < 0.7
