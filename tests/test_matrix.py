"""The matrix: every method under every backend on every family gives the gradients of one process.

What a cell does and how closely it must agree stands in tests/parallel/harness.py, the plans in
tests/parallel/plans.py, the cells in tests/parallel/cells.py: every pair here, the whole product in the long
part, `make test-long`. That the pairs see what the product sees is tried with every fault of
tests/test_mutations.py, in its own long part.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petune.kernels.configs import MemoryConfig
from petune.models import fp8
from petune.parallel import runner
from petune.parallel.plan import ParallelPlan, Sharding
from tests.methods.zoo import FOUR
from tests.parallel.cells import (
    APART,
    CELLS,
    COMPOSITIONS,
    EXCHANGING,
    FUSED_SQUARE,
    KEPT,
    KIN,
    METHODS,
    ONE_EACH,
    OTHERS,
    ROUND,
    SHORT_KIN,
    SHORT_ROUND,
    SQUARE,
    TWINS,
    UNSTAGED,
    case,
    in_part,
)
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, COMPOSED, EIGHT, FSDP, LOOPED, OVERLAPPED, VOCABULARY, pp

pytestmark = pytest.mark.usefixtures("standing")
long = pytest.mark.long
ONE = (5,)  # rows of a step in one pass: SQUARE has every backend and family with two, which add up
# Masks and angles differ from block to block: one method under each plan in the short part.
MIXED = [(backend, METHODS[at % 4], "gemma3-causal") for at, backend in enumerate(BACKENDS)]


@pytest.mark.parametrize(
    "two", [(0, 1), (1, 2), (0, 2)], ids=["method, backend", "backend, family", "method, family"]
)
def test_the_short_part_has_every_pair_of_a_method_a_backend_and_a_family(two: tuple[int, int]) -> None:
    staged = [(method, staged, name) for method, staged, name, _ in FUSED_STAGES if staged in BACKENDS]
    short = [*SQUARE, *(cell[:3] for cell in FUSED_SQUARE), *staged]
    assert {tuple(cell[at] for at in two) for cell in short} == {
        tuple(cell[at] for at in two) for cell in CELLS
    }
    assert len(short) <= 4 * len(BACKENDS) + 2


def test_the_fused_square_has_every_method_family_and_rung_and_both_every_backend() -> None:
    for at, kinds in ((0, METHODS), (2, FOUR)):
        assert {(cell[at], cell[3]) for cell in FUSED_SQUARE} == set(product(kinds, range(4)))
    assert {cell[1] for cell in SQUARE} == set(BACKENDS)
    assert {cell[1] for cell in FUSED_SQUARE} == {*APART, *EXCHANGING}


@pytest.mark.parametrize(("method", "backend", "name"), in_part(CELLS, SQUARE))
def test_two_ranks_train_as_one_process(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), steps=2 if method == "lora" else 1))


# Three of one kind: what more ranks than two have is a middle one.
MIDDLE = [cell for cell in SHORT_ROUND if cell[1] not in ("dp", "shard", "sp-gather")]


@pytest.mark.parametrize(("method", "backend", "name"), in_part(ROUND, MIDDLE))
def test_three_ranks_train_as_one_process(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 3), steps=2 if method == "lora" else 1))


@pytest.mark.parametrize(("method", "backend", "name"), in_part(ROUND, SHORT_ROUND))
def test_recomputed_blocks_and_dropout_are_those_of_one_process(method: str, backend: str, name: str) -> None:
    steps = 2 if method == "lora" else 1  # the second draws from a key of its own
    check(case(name, method, BACKENDS[backend](name, 2), recompute=True, dropout=0.1, steps=steps))


def test_norms_of_single_heads_train_as_in_one_process() -> None:
    """Such a norm is whole on every rank, sees its heads alone, and is no linear: only what is left of a
    region says so."""
    check(case("qwen3-causal", "full", BACKENDS["tp"]("qwen3-causal", 2), steps=1, passes=(3,)))


# Adapters of sums: (backend, family, which rung of fused blocks, or None), of norms behind them and of blocks
SUMS = list(product(BACKENDS, (*FOUR, "gemma3-causal"), (None, *range(4))))
SHORT_SUMS = [
    *(("tp", "bert-classify", 2), ("galaxy", "bart-seq2seq", 3), ("galaxy2", "llama-causal", None)),
    *(("shard", "llama-causal", 1), ("pp-1f1b", "bart-seq2seq", 0), ("sp-ring", "t5-seq2seq", None)),
]


@pytest.mark.parametrize(("backend", "name", "kept"), in_part(SUMS, SHORT_SUMS))
def test_adapters_of_sums_train_as_in_one_process(backend: str, name: str, kept: int | None) -> None:
    plan, blocks = BACKENDS[backend](name, 2), None if kept is None else KEPT[kept]
    kind = (("kind", "pfeiffer"),)
    check(case(name, "adapter", plan, steps=1, passes=ONE, dropout=0.1, tuning=kind, blocks=blocks))


@pytest.mark.parametrize(
    ("composed", "name", "kept"),
    in_part(list(product(COMPOSED, FOUR, (None, 2))), [("galaxy x pp", "bert-classify", 2)]),
)
def test_adapters_of_sums_train_under_composed_plans(composed: str, name: str, kept: int | None) -> None:
    plan, blocks = COMPOSED[composed](name), None if kept is None else KEPT[kept]
    check(case(name, "adapter", plan, steps=1, passes=ONE, tuning=(("kind", "pfeiffer"),), blocks=blocks))


@pytest.mark.parametrize("backend", ["pp-1f1b", *(pytest.param(one, marks=long) for one in ("tp", "shard"))])
def test_a_tied_table_that_trains_beside_trains_on_every_stage_with_an_end_of_it(backend: str) -> None:
    """The last stage has its other ends alone: the decoder's table and the head."""
    own = (("also_train", ("model.shared",)),)
    plan = BACKENDS[backend]("bart-seq2seq", 2)
    check(case("bart-seq2seq", "adapter", plan, tuning=own))


@pytest.mark.parametrize("backend", [pytest.param(backend, marks=long) for backend in BACKENDS])
def test_adapters_of_an_activation_without_a_kernel_train_as_in_one_process(backend: str) -> None:
    kind = (("activation", "quick_gelu"),)
    check(case("llama-causal", "adapter", BACKENDS[backend]("llama-causal", 2), steps=1, tuning=kind))


# Adapters beside MLPs: (backend, family, which rung of fused blocks, or None)
BESIDE = list(product(BACKENDS, FOUR, (None, *range(4))))
SHORT_BESIDE = [
    *(("tp", "bert-classify", None), ("tp", "llama-causal", 2), ("galaxy", "t5-seq2seq", None)),
    *(("galaxy2", "llama-causal", 0), ("sp-gather", "bert-classify", 3), ("pp-1f1b", "llama-causal", 1)),
]


@pytest.mark.parametrize(("backend", "name", "kept"), in_part(BESIDE, SHORT_BESIDE))
def test_adapters_beside_mlps_train_as_in_one_process(backend: str, name: str, kept: int | None) -> None:
    plan, blocks = BACKENDS[backend](name, 2), None if kept is None else KEPT[kept]
    kind = (("kind", "parallel"),)
    check(case(name, "adapter", plan, steps=1, passes=ONE, dropout=0.1, tuning=kind, blocks=blocks))


# Each plan that cuts or shards, but for twins, with one family here, with all of them in the long part.
CUTTING = {
    name: plan
    for name, plan in {
        **BACKENDS,
        **{f"{name}, overlapped": one for name, one in OVERLAPPED.items()},
    }.items()
    if name != "dp"
}
KNOWN = {*TWINS, *(f"{name}, overlapped" for name in OVERLAPPED)}  # whose overlap is tried in OVERLAPS
FUSED = [
    pytest.param(backend, name, marks=() if (at + turn) % 4 == 0 and backend not in KNOWN else long)
    for at, backend in enumerate(CUTTING)
    for turn, name in enumerate(FOUR)
]
# Norms of 1 + weight, before and behind: where they are whole and on a part of the tokens.
FUSED += [
    pytest.param(backend, "gemma3-causal", marks=() if backend in ("tp", "galaxy") else long)
    for backend in CUTTING
]
# Every plan, method and family once here; tests/parallel/tensor/test_overlap.py has more of them in float64.
OVERLAPS = [
    pytest.param(backend, METHODS[at], FOUR[at], marks=() if at == turn else long)
    for at in range(4)
    for turn, backend in enumerate(OVERLAPPED)
]


# (backend, family, kind of side network, whether it is fused). Beside the second block of each stack alone,
# the first of two stages has no level, and a learned position bias begins in the second.
KINDS = {"some": (("layers", (1,)),), "blend": (("end", "blend"),)}
BESIDES = list(product(BACKENDS, FOUR, KINDS, (False, True)))
SHORT_BESIDES = [
    *(("pp-1f1b", "t5-seq2seq", "some", False), ("galaxy", "t5-seq2seq", "some", True)),
    *(("tp", "bart-seq2seq", "some", False), ("shard", "bert-classify", "some", True)),
    *(("sp-ring", "llama-causal", "blend", False), ("galaxy", "bart-seq2seq", "blend", True)),
    ("pp-1f1b", "llama-causal", "blend", False),
]


@pytest.mark.parametrize(("backend", "name", "kind", "fused"), in_part(BESIDES, SHORT_BESIDES))
def test_side_networks_of_other_kinds_train_as_in_one_process(
    backend: str, name: str, kind: str, fused: bool
) -> None:
    plan, blocks = BACKENDS[backend](name, 2), KEPT[0] if fused else None
    one = case(name, "side", plan, steps=1, passes=ONE, dropout=0.1, tuning=KINDS[kind])
    check(replace(one, blocks=blocks))


# (backend, family, whether blocks are fused): a head alone, whose gradients no block sees
HEADED = ("bert-classify", "bart-classify", "t5-classify", "llama-classify")
HEADS = list(product(BACKENDS, HEADED, (False, True)))
SHORT_HEADS = [
    *(("pp-1f1b", "llama-classify", False), ("pp-1f1b", "bart-classify", True)),
    *(("tp", "t5-classify", False), ("shard", "bert-classify", True), ("galaxy", "bert-classify", False)),
]


@pytest.mark.parametrize(("backend", "name", "fused"), in_part(HEADS, SHORT_HEADS))
def test_a_head_alone_trains_as_in_one_process(backend: str, name: str, fused: bool) -> None:
    plan, blocks = BACKENDS[backend](name, 2), KEPT[0] if fused else None
    check(case(name, "head", plan, passes=ONE, blocks=blocks))


def test_side_blocks_that_read_positions_have_those_of_their_own_tokens() -> None:
    """Ministral 3 scales queries by them."""
    check(case("ministral3-causal", "side", BACKENDS["galaxy"]("ministral3-causal", 2), passes=(3,), steps=1))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=long), 0.1])
@pytest.mark.parametrize(("backend", "method", "name"), OVERLAPS)
def test_overlapped_communication_trains_as_one_process(
    backend: str, method: str, name: str, dropout: float
) -> None:
    check(case(name, method, OVERLAPPED[backend](name, 2), recompute=dropout > 0, dropout=dropout, steps=1))


@pytest.mark.crossed(1)
@pytest.mark.parametrize(("method", "name"), [("lora", "llama-causal"), ("side", "t5-seq2seq")])
@pytest.mark.parametrize("backend", ["galaxy", "sp-gather", "sp-ulysses", "sp-ring", "cut"])
def test_a_sequence_shorter_than_its_ranks_is_refused_and_training_pads_it(
    backend: str, method: str, name: str
) -> None:
    with pytest.raises(Exception, match="needs a token for each"):
        check(case(name, method, BACKENDS[backend](name, 3), longest=2))


@pytest.mark.parametrize("backend", ["sp-gather", "sp-ulysses", "sp-ring", "galaxy"])
def test_a_sliding_window_reaches_over_ranks(backend: str) -> None:
    plan = BACKENDS[backend]("mistral-causal", 2)
    check(Case("mistral-causal", "lora", plan, settings=(("sliding_window", 3),), steps=1))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", METHODS)
def test_the_runner_of_a_single_process_is_plain_torch(method: str, name: str) -> None:
    check(case(name, method, ParallelPlan(), recompute=True))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=long), 0.1])
@pytest.mark.parametrize(("backend", "name"), FUSED)
def test_single_modules_fused_in_cut_blocks_train_as_in_one_process(
    backend: str, name: str, dropout: float
) -> None:
    plan = CUTTING[backend](name, 2)
    one = case(name, "lora", plan, recompute=dropout > 0, dropout=dropout, steps=1, passes=ONE)
    check(replace(one, fused=True))


# Blocks that are cut or sharded, and fused: methods, families and what is kept go round under each plan here,
# their product in the long part.
EVERY_FUSED = list(product(METHODS, APART + EXCHANGING, FOUR, range(4)))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=long), 0.1])
@pytest.mark.parametrize(("method", "backend", "name", "kept"), in_part(EVERY_FUSED, FUSED_SQUARE))
def test_fused_blocks_that_are_cut_or_sharded_train_as_in_one_process(
    method: str, backend: str, name: str, kept: int, dropout: float
) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), dropout=dropout, steps=1, blocks=KEPT[kept]))


@pytest.mark.parametrize(
    ("backend", "method", "name"), [("galaxy", "full", "t5-seq2seq"), ("galaxy2", "lora", "llama-causal")]
)
def test_a_vocabulary_cut_beside_a_sequence_has_its_loss_without_logits(
    backend: str, method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "vocabulary_losses", None)
    plan = BACKENDS[backend](name, 2)
    assert plan.cut is not None
    plan = replace(plan, cut=replace(plan.cut, vocabulary=VOCABULARY[2]))
    check(case(name, method, plan, steps=1, passes=ONE, blocks=KEPT[0]))


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("tp", "llama-causal"), ("galaxy", "llama-causal"), ("sp-ring", "bert-classify")),
        *(pytest.param(backend, "t5-seq2seq", marks=long) for backend in ("tp", "galaxy")),
        pytest.param("sp-gather", "llama-causal", marks=long),
        pytest.param("sp-ulysses", "bart-seq2seq", marks=long),
    ],
)
def test_two_steps_of_fused_blocks_cut_over_three_ranks_are_those_of_one_process(
    name: str, backend: str
) -> None:
    check(case(name, "lora", BACKENDS[backend](name, 3), blocks=KEPT[3]))


@pytest.mark.parametrize("name", OTHERS[3:])
def test_other_models_fused_and_cut(name: str) -> None:
    check(case(name, "lora", BACKENDS["tp"](name, 2), steps=1, passes=(3,), blocks=KEPT[2]))


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", EXCHANGING[:3])
@pytest.mark.parametrize("name", ["gemma3-causal", "mistral-causal"])
def test_windows_of_fused_blocks_reach_over_ranks(name: str, backend: str) -> None:
    """Gemma 3 has blocks with and without one, and norms of heads, which train here."""
    one = case(name, "full" if name == "gemma3-causal" else "lora", BACKENDS[backend](name, 2), steps=1)
    check(replace(one, settings=(*one.settings, ("sliding_window", 3)), blocks=KEPT[2]))


@pytest.mark.parametrize("backend", EXCHANGING[:3])
def test_samples_packed_in_rows_that_are_cut_do_not_see_one_another(backend: str) -> None:
    one = case("llama-causal", "lora", BACKENDS[backend]("llama-causal", 2), steps=1, packed=True)
    check(replace(one, blocks=KEPT[2]))
    check(one)


@pytest.mark.parametrize(
    ("method", "backend"),
    [
        *(("lora", "shard"), ("side", "pp-1f1b"), ("full", "tp")),
        *(pytest.param(*cell, marks=long) for cell in (("full", "dp"), ("lora", "pp-gpipe"))),
    ],
)
def test_no_state_goes_from_sample_to_sample_on_any_rank(method: str, backend: str) -> None:
    name = "qwen3_5-causal"
    check(case(name, method, BACKENDS[backend](name, 2), steps=1, packed=True, recompute=True))


def test_padding_that_a_decoder_leaves_out_is_left_out_of_what_it_reads_across() -> None:
    one = case("bart-seq2seq", "lora", BACKENDS["sp-gather"]("bart-seq2seq", 2), steps=1, packed=True)
    check(replace(one, blocks=KEPT[2]))


EVEN = {"heads": (4, 4), "kv_heads": (2, 2), "columns": (64, 64)}  # no share cuts a block of NF4


@pytest.mark.parametrize(
    ("backend", "base_dtype", "method", "name"),
    [
        ("tp", "nf4", "lora", "llama-causal"),
        ("galaxy", "nf4", "adapter", "qwen3-causal"),
        ("galaxy2", "int8", "lora", "t5-seq2seq"),
        ("tp", "int8", "side", "bert-classify"),
        ("pp-1f1b", "nf4", "lora", "bart-seq2seq"),
    ],
)
def test_a_quantised_base_that_is_cut_trains_as_in_one_process(
    backend: str, base_dtype: str, method: str, name: str
) -> None:
    plan, settings = BACKENDS[backend](name, 2), dict[str, Any]()
    if base_dtype == "nf4":
        wide = ("encoder_ffn_dim", "decoder_ffn_dim") if name == "bart-seq2seq" else ("intermediate_size",)
        settings = dict.fromkeys(wide, 128)
    if base_dtype == "nf4" and plan.cut is not None:
        plan, settings = replace(plan, cut=replace(plan.cut, **EVEN)), settings | {"head_dim": 16}
    one = case(name, method, plan, steps=1, passes=ONE, blocks=KEPT[2], base_dtype=base_dtype)
    check(replace(one, settings=(*one.settings, *settings.items())))


def test_eight_bits_of_cut_blocks_differ_by_the_scales_of_slices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank has a part of the rows that enter some products, and quantises that. With the scales of whole
    rows nothing differs."""
    plan, quantise = BACKENDS["tp"]("llama-causal", 2), fp8.quantise
    one = case("llama-causal", "lora", plan, dtype=torch.float64, steps=1, base_dtype="fp8")
    with pytest.raises(AssertionError, match="logits in eval mode"):
        check(one)

    def by_whole_rows(x: Tensor, by: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if not dist.is_initialized():
            return quantise(x, by)
        wide = x if by is None else x * by
        largest = wide.abs().amax(1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        q, scale = quantise(torch.cat([wide, largest], 1))
        return q[:, :-1].contiguous(), scale

    monkeypatch.setattr(fp8, "quantise", by_whole_rows)
    check(one)


@pytest.mark.parametrize("composed", [pytest.param("dp x tp", marks=long), "dp x galaxy", "shard x tp"])
def test_fused_blocks_that_are_cut_in_every_replica(composed: str) -> None:
    plan = COMPOSED[composed]("llama-causal")
    check(case("llama-causal", "lora", plan, steps=1, passes=ONE, blocks=KEPT[2]))


@pytest.mark.parametrize("sharding", [pytest.param(None, marks=long), FSDP], ids=["whole", "sharded"])
def test_fused_blocks_exchange_tokens_in_every_replica(sharding: Sharding | None) -> None:
    plan = replace(BACKENDS["sp-ulysses"]("llama-causal", 2), dp=2, shares=(3, 1), sharding=sharding)
    check(case("llama-causal", "lora", plan, steps=1, blocks=KEPT[2]))


# The same for the stages of a pipeline, several passes on the way: what is offloaded goes round too.
STAGED = {**LOOPED, **{name: BACKENDS[name] for name in ("pp-1f1b", "pp-gpipe")}}
PARKED = [
    MemoryConfig("all"),
    MemoryConfig("projections", tile=7, offload="input"),
    MemoryConfig("attention", offload="attention"),
    MemoryConfig("input", tile=5, offload="input"),
]
FUSED_STAGES = [
    (METHODS[at], staged, FOUR[(at + turn) % 4], (at + 2 * turn + 1) % 4)
    for turn, staged in enumerate(STAGED)
    if staged != "pp-gpipe"
    for at in range(4)
    if staged not in LOOPED or at % 2 == turn  # of two schedules with several stages on a rank, half each
]


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=long), 0.1])
@pytest.mark.parametrize(
    ("method", "staged", "name", "kept"),
    in_part(list(product(METHODS, STAGED, FOUR, range(4))), FUSED_STAGES),
)
def test_fused_blocks_in_stages_train_as_in_one_process(
    method: str, staged: str, name: str, kept: int, dropout: float
) -> None:
    check(case(name, method, STAGED[staged](name, 2), dropout=dropout, steps=1, blocks=PARKED[kept]))


@pytest.mark.parametrize(
    ("method", "name"), [("full", "t5-seq2seq"), pytest.param("lora", "llama-causal", marks=long)]
)
def test_two_steps_of_fused_blocks_in_three_stages_are_those_of_one_process(method: str, name: str) -> None:
    check(case(name, method, BACKENDS["pp-1f1b"](name, 3), blocks=PARKED[3]))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("bert-mlm", "t5-classify", "gemma3-causal") else long)
        for name in OTHERS
    ]
    + ["opt-causal"],  # which counts positions along a mask that fused blocks take away
)
def test_other_models_fused_in_stages(name: str) -> None:
    check(case(name, "lora", BACKENDS["pp-1f1b"](name, 2), steps=1, passes=ONE, blocks=PARKED[2]))


def test_a_stage_has_fused_blocks_of_an_encoder_of_sounds_that_begins_on_another_one() -> None:
    plan = BACKENDS["pp-gpipe"]("whisper-seq2seq", 2)  # one block on the first
    check(case("whisper-seq2seq", "lora", plan, steps=1, passes=(4,), blocks=PARKED[2]))


@pytest.mark.parametrize(
    ("composed", "name"),
    [
        ("galaxy x pp", "llama-causal"),
        ("sp x pp", "llama-causal"),
        pytest.param("tp x pp", "t5-seq2seq", marks=long),
        pytest.param("sp x pp", "t5-seq2seq", marks=long),
        pytest.param("sp x pp", "bert-classify", marks=long),
        pytest.param("dp x pp", "bart-seq2seq", marks=long),
        pytest.param("galaxy x pp", "t5-seq2seq", marks=long),
    ],
)
def test_fused_blocks_in_stages_of_another_axis(composed: str, name: str) -> None:
    one = case(name, "lora", COMPOSED[composed](name), steps=1, passes=ONE, dropout=0.1)
    check(replace(one, blocks=PARKED[2]))


@pytest.mark.parametrize(("method", "composed", "name"), in_part(COMPOSITIONS, ONE_EACH))
def test_four_ranks_of_two_axes_train_as_one_process(method: str, composed: str, name: str) -> None:
    check(case(name, method, COMPOSED[composed](name), steps=1))


# ------------------------------------------------------------------ the long part


@long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("method", "backend", "name"), CELLS)
def test_float64_leaves_nothing_to_rounding(method: str, backend: str, name: str, ranks: int) -> None:
    check(case(name, method, BACKENDS[backend](name, ranks), dtype=torch.float64, steps=3))


@long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", list(OVERLAPPED))
def test_overlapped_communication_in_float64(backend: str, method: str, name: str, ranks: int) -> None:
    check(case(name, method, OVERLAPPED[backend](name, ranks), dtype=torch.float64, steps=3))


@long
@pytest.mark.parametrize(("method", "backend", "name"), CELLS)
def test_dropout_and_recomputation_in_every_cell(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), recompute=True, dropout=0.1))


@pytest.mark.parametrize(
    ("backend", "method", "name"), in_part(list(product(BACKENDS, METHODS, OTHERS)), MIXED)
)
def test_other_models_and_heads(backend: str, method: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), steps=1, passes=ONE))


@pytest.mark.parametrize("kept", [None, KEPT[2]], ids=["unfused", "fused"])
def test_rows_that_a_block_lays_one_behind_the_other_drop_out_as_in_one_process(
    kept: MemoryConfig | None,
) -> None:
    plan = BACKENDS["galaxy"]("opt-causal", 2)
    check(case("opt-causal", "lora", plan, steps=1, passes=ONE, dropout=0.1, blocks=kept))


@pytest.mark.parametrize(
    ("method", "ranks", "kept"),
    [
        ("full", 3, None),
        ("lora", 2, KEPT[2]),
        *(pytest.param(method, 2, None, marks=long) for method in ("lora", "adapter", "side")),
    ],
)
def test_embeddings_narrower_than_blocks_are_widened_and_narrowed_by_the_end_stages(
    method: str, ranks: int, kept: MemoryConfig | None
) -> None:
    plan = BACKENDS["pp-1f1b"]("opt350-causal", ranks)
    check(case("opt350-causal", method, plan, steps=1, passes=ONE, blocks=kept))


@pytest.mark.parametrize("name", UNSTAGED)
def test_a_model_whose_stages_nobody_can_tell_is_refused_a_pipeline(name: str) -> None:
    with pytest.raises(Exception, match="cannot be told whether this module works before the blocks"):
        check(case(name, "lora", BACKENDS["pp-1f1b"](name, 2), steps=1))


@pytest.mark.parametrize(("method", "backend", "name"), in_part(KIN, SHORT_KIN))
def test_families_that_are_a_few_lines_more(method: str, backend: str, name: str) -> None:
    one = case(name, method, BACKENDS[backend](name, 2), steps=1, passes=(4,))
    check(replace(one, blocks=KEPT[2] if backend == "tp" else None))


@long
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("schedule", list(LOOPED))
def test_several_stages_on_a_rank(schedule: str, method: str, name: str) -> None:
    check(case(name, method, LOOPED[schedule](name, 2), passes=(5, 4)))


@long
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 1), ("gpipe", 7), ("1f1b", 4), ("1f1b", 7)])
def test_more_and_fewer_micro_batches_than_rows(schedule: str, microbatches: int, name: str) -> None:
    plan = replace(pp(schedule)(name, 2), microbatches=microbatches)
    check(case(name, "lora", plan))


@long
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("composed", list(COMPOSED))
def test_compositions_with_dropout(composed: str, method: str, name: str) -> None:
    check(case(name, method, COMPOSED[composed](name), recompute=True, dropout=0.1))


@long
@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("composed", list(EIGHT))
def test_eight_ranks_of_three_axes_train_as_one_process(composed: str, method: str, name: str) -> None:
    check(case(name, method, EIGHT[composed](name)), timeout=100)
