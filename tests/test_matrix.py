"""The matrix: every method under every backend on every family gives the gradients of one process.

What a cell does and how closely it must agree stands in tests/parallel/harness.py, the plans in tests/parallel/plans.py. The long part,
`make test-long`, crosses everything with everything.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from petune.parallel.plan import ParallelPlan
from tests.methods.zoo import FOUR, SETTINGS
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, COMPOSED, EIGHT, LOOPED, OVERLAPPED, pp, settings_of

long = pytest.mark.long
METHODS = tuple(SETTINGS)
CELLS = [(method, backend, name) for name in FOUR for method in METHODS for backend in BACKENDS]
# One cell for each backend, so that the family and the method go round.
ROUND = [(METHODS[at % 4], backend, FOUR[(at + at // 4) % 4]) for at, backend in enumerate(BACKENDS)]
# Each composition with two families here, methods going round, and with the other two in the long part, which has every method too.
COMPOSITIONS = [
    pytest.param(METHODS[(at + turn // 2) % 4], composed, FOUR[at], marks=long if (at + turn) % 2 else ())
    for at in range(4)
    for turn, composed in enumerate(COMPOSED)
]
OTHERS = (
    "bert-tokens",
    "bert-mlm",
    "bart-classify",
    "t5-gated",
    "t5-classify",
    "llama-classify",
    "mistral-causal",
    "qwen2-causal",
    "qwen3-causal",
    "qwen3-classify",
)


def case(name: str, method: str, plan: ParallelPlan, **changes: object) -> Case:
    """The cell with as many blocks as the plan's stages say."""
    return Case(name, method, plan, settings=settings_of(name, plan), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("method", "backend", "name"), CELLS)
def test_two_ranks_train_as_one_process(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), steps=2 if method == "lora" else 1))


@pytest.mark.parametrize(("method", "backend", "name"), ROUND)
def test_three_ranks_train_as_one_process(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 3)))


@pytest.mark.parametrize(("method", "backend", "name"), ROUND)
def test_recomputed_blocks_and_dropout_are_those_of_one_process(method: str, backend: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2), recompute=True, dropout=0.1))


def test_norms_of_single_heads_train_as_in_one_process() -> None:
    """Such a norm is whole on every rank, sees its heads alone, and is no linear: only what is left of a region says so."""
    check(case("qwen3-causal", "full", BACKENDS["tp"]("qwen3-causal", 2), steps=1, passes=(3,)))


# Each plan that cuts or shards with one family here, with all of them in the long part.
CUTTING = {
    name: plan
    for name, plan in {**BACKENDS, **{f"{name}, overlapped": one for name, one in OVERLAPPED.items()}, **LOOPED}.items()
    if name != "dp"
}
FUSED = [
    pytest.param(backend, name, marks=() if (at + turn) % 4 == 0 else long)
    for at, backend in enumerate(CUTTING)
    for turn, name in enumerate(FOUR)
]
# Every other pair here; tests/parallel/test_overlap.py has more of them under galaxy, in float64.
OVERLAPS = [
    pytest.param(backend, METHODS[at], FOUR[at], marks=long if (at + turn) % 2 else ())
    for at in range(4)
    for turn, backend in enumerate(OVERLAPPED)
]


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=long), 0.1])
@pytest.mark.parametrize(("backend", "method", "name"), OVERLAPS)
def test_overlapped_communication_trains_as_one_process(backend: str, method: str, name: str, dropout: float) -> None:
    check(case(name, method, OVERLAPPED[backend](name, 2), recompute=dropout > 0, dropout=dropout))


@pytest.mark.parametrize(("method", "name"), [("lora", "llama-causal"), ("side", "t5-seq2seq")])
@pytest.mark.parametrize("backend", ["galaxy", "sp-gather", "sp-ulysses", "sp-ring", "cut"])
def test_a_sequence_shorter_than_its_ranks_is_refused_and_training_pads_it(backend: str, method: str, name: str) -> None:
    with pytest.raises(Exception, match="needs a token for each"):
        check(case(name, method, BACKENDS[backend](name, 3), longest=2))


@pytest.mark.parametrize("backend", ["sp-gather", "sp-ulysses", "sp-ring", "galaxy"])
def test_a_sliding_window_reaches_over_ranks(backend: str) -> None:
    plan = BACKENDS[backend]("mistral-causal", 2)
    check(Case("mistral-causal", "lora", plan, settings=(("sliding_window", 3),)))


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("method", METHODS)
def test_the_runner_of_a_single_process_is_plain_torch(method: str, name: str) -> None:
    check(case(name, method, ParallelPlan(), recompute=True))


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=long), 0.1])
@pytest.mark.parametrize(("backend", "name"), FUSED)
def test_single_modules_fused_in_cut_blocks_train_as_in_one_process(backend: str, name: str, dropout: float) -> None:
    plan = CUTTING[backend](name, 2)
    check(case(name, "lora", plan, recompute=dropout > 0, dropout=dropout, steps=1, fused=True))


@pytest.mark.parametrize(("method", "composed", "name"), COMPOSITIONS)
def test_four_ranks_of_two_axes_train_as_one_process(method: str, composed: str, name: str) -> None:
    check(case(name, method, COMPOSED[composed](name)))


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


@long
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_other_models_and_heads(backend: str, method: str, name: str) -> None:
    check(case(name, method, BACKENDS[backend](name, 2)))


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
