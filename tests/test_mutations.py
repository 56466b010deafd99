"""Faults put in on purpose: each must make the comparison with one process fail. A matrix that a fault
survives guards nothing.

A fault is a patch of one name, made in the ranks, which are forked once for many faults: a fork takes several
times as long as a step. One that ends a rank within a step has ranks of its own. Every one of them is a
mistake that somebody has made in a parallel trainer. Only an AssertionError of the comparison counts; a crash
or a hang would say nothing about it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from petune.kernels import reference
from petune.kernels.block import attention as attending
from petune.kernels.block import (
    attention_steps,
    bottleneck_steps,
    drawing,
    exchange_steps,
    packed_linear,
    part,
)
from petune.kernels.block.steps import BlockRun
from petune.kernels.block.varlen import overlapping
from petune.kernels.configs import MemoryConfig
from petune.kernels.mixing import mixed
from petune.methods import head, miss, pissa, pruning, registry, several, side
from petune.methods.adapter import AdapterBlock, AdapterLinear, AdapterNorm, BottleneckLayer
from petune.methods.configs import AdapterConfig, LoraConfig
from petune.methods.dora import DoraLinear
from petune.methods.ia3 import Ia3Linear
from petune.methods.lora import LoraConv2d, LoraLayer
from petune.methods.miss import MissLinear
from petune.methods.side import Ladder
from petune.methods.token_rows import RowLayer
from petune.models import attention, nf4
from petune.models.exchange import QueryRows
from petune.models.int8 import Int8
from petune.models.stack import Stack
from petune.models.tuned_parts import BottleneckPart
from petune.parallel import placement, runner
from petune.parallel.boundary import SequenceBoundary, WholeBoundary
from petune.parallel.collectives import GATHER_SHARED, gather_seq, gather_shared
from petune.parallel.pipeline import schedule, stage_module
from petune.parallel.plan import ALONE
from petune.parallel.runner import Runner
from petune.parallel.sequence import exchange, ring
from petune.parallel.tensor import shard_params, stack_edges, vocabulary
from petune.parallel.tensor.stack_edges import StackEdges
from petune.rng import dropout as dropping
from petune.rng.context import Running
from petune.tasks.loss import count
from tests.kernels import fused_pairs
from tests.methods import equations, references
from tests.methods.named_jobs import assert_rows_meet_their_own, assert_trained_as_alone
from tests.methods.peft_twins import assert_trains_as_peft
from tests.methods.zoo import stir
from tests.parallel import harness
from tests.parallel.cells import case, short_cells
from tests.parallel.harness import Case, Trace, check, compare
from tests.parallel.plans import BACKENDS, COMPOSED
from tests.pool import RankError, run


def cell(name: str, method: str, backend: str, **changes: Any) -> Case:
    plan = COMPOSED[backend](name) if " x " in backend else BACKENDS[backend](name, 2)
    return case(name, method, plan, steps=1, **changes)


def _id(case: Case) -> str:
    cut = case.plan.cut
    return f"{case.method}-{case.name}-" + (
        "dp" if cut is None else f"{cut.attention}-{cut.mlp}-{cut.connection}"
    )


def long(setting: str) -> Any:
    """A setting of a fault that is planted in another, too."""
    return pytest.param(setting, marks=pytest.mark.long)


Fails = Callable[..., None]


@pytest.fixture(params=["one cell", pytest.param("the short matrix", marks=pytest.mark.long)])
def fails(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Fails:
    """Plant a fault: one cell agrees with one process no longer; in the long part, one of the short matrix's
    under the same backend.

    That they do without the fault is the matrix's to say, but for a cell with dropout.
    """
    monkeypatch.setattr(harness, "on_other_rows", lambda case: None)  # whose oracle would have the fault

    def one_cell(case: Case, owner: Any, name: str, fault: Any, match: str) -> None:
        if match == START:
            monkeypatch.setattr(owner, name, fault)
            with pytest.raises(AssertionError, match=match):
                check(case)
            return
        expected, found = harness.oracle(case), in_tests(request.session)
        if case.dropout:
            compare(found[request.node.nodeid, "sound"], expected, case)
        with pytest.raises(AssertionError, match=match):
            compare(found[request.node.nodeid, "wrong"], expected, case)

    def the_short_matrix(case: Case, owner: Any, name: str, fault: Any, match: str) -> None:
        cells = short_cells(case)
        for one in cells:
            harness.oracle(one)  # remembered, so that it does without the fault
        monkeypatch.setattr(owner, name, fault)
        assert any(map(caught, cells)), f"none of {len(cells)} cells sees it"

    return one_cell if request.param == "one cell" else the_short_matrix


@cache
def in_tests(session: pytest.Session) -> dict[tuple[str, str], list[Trace]]:
    """By test, and whether "sound" or "wrong", what ranks do without and with the faults that the tests of
    this session plant in one cell."""
    every: dict[Any, Planted] = {}
    for item in session.items:
        if not isinstance(item, pytest.Function) or item.module.__name__ != __name__:
            continue
        given = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        if given.pop("fails", "") != "one cell":
            continue

        def noted(case: Case, *fault: Any, at: str = item.nodeid) -> None:
            *patch, match = fault
            if match != START:
                every[at, "wrong"] = case, (patch[0], patch[1], patch[2]), match
            if case.dropout:
                every[at, "sound"] = case, None, ""

        item.function(**given, fails=noted)
    return on_ranks_of_each(every)


def caught(case: Case) -> bool:
    """Whether the comparison sees the fault; a crash says nothing about it."""
    try:
        check(case)
    except AssertionError:
        return True
    except RankError:
        pass
    return False


GRADIENTS = "gradients of the first step"
LOGITS = "logits in eval mode"
START = "at the start"  # is compared within a rank


# ------------------------------------------------------------------ sums over ranks


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    "case",
    [
        cell("llama-causal", "lora", "tp"),
        cell("bert-classify", "lora", "galaxy"),
        cell("bart-seq2seq", "adapter", "galaxy2"),
        cell("t5-seq2seq", "full", "sp-gather"),
        cell("llama-causal", "side", "sp-ring"),
        cell("bert-classify", "adapter", "dp"),
    ],
    ids=_id,
)
@pytest.mark.parametrize("times", [0, 2])
def test_gradients_that_are_parts_of_a_sum_are_summed_once(case: Case, times: int, fails: Fails) -> None:
    def sums(tensors: Any, group: Any) -> None:
        for _ in range(times):
            for tensor in tensors:
                dist.all_reduce(tensor, group=group)

    fails(case, runner, "all_sum_", sums, GRADIENTS)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", ["llama-causal", "bart-seq2seq"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_gradient_of_what_enters_a_region_cut_by_heads_is_summed(
    name: str, method: str, fails: Fails
) -> None:
    """One copy after the embeddings does not stand for those at the entries."""
    fails(
        cell(name, method, "tp"),
        WholeBoundary,
        "enter_backward",
        lambda self, dx, own=False: dx,
        GRADIENTS,
    )


def test_what_leaves_a_region_cut_by_heads_is_summed(fails: Fails) -> None:
    fails(
        cell("llama-causal", "lora", "tp"),
        WholeBoundary,
        "leave",
        lambda self, y, own=False: y.clone(),
        LOGITS,
    )


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", ["sp-gather", "cut"])
@pytest.mark.parametrize("name", ["llama-causal", "bert-classify"])
def test_the_gradient_of_gathered_keys_and_values_comes_from_all_ranks(
    name: str, backend: str, fails: Fails
) -> None:
    """A gather whose backward only slices: .585 of a key's gradient was missing."""
    fails(cell(name, "lora", backend), exchange, "gather_seq", gather_shared, GRADIENTS)


def _own_part(self: Any, dx: Tensor, *_: Any, own: bool = False) -> Tensor:
    """What a gather gives back before the same work on every rank."""
    part: Tensor = GATHER_SHARED.back(dx, self.sizes, self.group)
    return part


@pytest.mark.parametrize("name", ["llama-causal", long("t5-seq2seq")])
def test_a_gather_before_different_work_sums_its_gradient(name: str, fails: Fails) -> None:
    fails(cell(name, "lora", "galaxy"), SequenceBoundary, "enter_backward", _own_part, GRADIENTS)


@pytest.mark.parametrize("backend", ["galaxy", long("sp-gather")])
def test_a_gather_before_the_same_loss_on_every_rank_does_not(backend: str, fails: Fails) -> None:
    """A gather that sums there gives twice the gradient."""
    fails(cell("bert-classify", "lora", backend), stack_edges, "gather_shared", gather_seq, GRADIENTS)


def _of_the_first(
    self: StackEdges,
    stack: Any,
    name: str,
    value: Any,
    here: Running,
    plain: Any = StackEdges.argument,
) -> Any:
    """A rank's arguments with the angles of the first tokens."""
    if name == "position_embeddings":
        return value[:, : here.sizes[self.rank]]
    return plain(self, stack, name, value, here)


FUSED = MemoryConfig("attention")


CROSSINGS = (
    ("tp", "enter_backward", lambda self, dx, own=False: dx, GRADIENTS),
    ("tp", "leave", lambda self, y, own=False: y, LOGITS),
    ("tp", "leave_backward", lambda self, dy: self.link.all_reduce(dy), GRADIENTS),
    ("galaxy", "enter_backward", _own_part, GRADIENTS),
    ("galaxy", "leave_backward", lambda self, dy: self.link.gather(dy, self.sizes) / 2, GRADIENTS),
)


def _rolled(plain: Any) -> Any:
    """What another token was to get."""
    return lambda *given: plain(*given).roll(1, 1)


def _behind(x: Tensor, around: tuple[int, ...]) -> Tensor:
    """Zeros behind alone."""
    return nn.functional.pad(x, (*around[:-2], 0, sum(around[-2:])))


def _halved(*given: Any, plain: Any = ring.back) -> tuple[Tensor, ...]:
    """The gradients of keys as half of what they are."""
    dq, dk, dv = plain(*given)
    return dq, dk / 2, dv


TRADES = exchange.Ulysses
Fault = tuple[Any, str, Any]  # what is patched by what
# The case, its fault or none, and which comparison sees that.
Planted = tuple[Case, Fault | None, str]


def inside(backend: str, name: str = "llama-causal", **changes: Any) -> Case:
    """A cell of fused blocks."""
    return cell(name, "lora", backend, blocks=FUSED, packed=name == "bart-seq2seq", **changes)


WITHIN: dict[str, Planted] = {
    name: (inside(*where), fault, match)
    for name, where, fault, match in (
        (
            "gather ahead",
            ("sp-gather", "llama-causal"),
            (exchange.GatherExchange, "enter", _rolled(exchange.GatherExchange.enter)),
            LOGITS,
        ),
        (
            "gather back",
            ("sp-gather", "llama-causal"),
            (exchange.GatherExchange, "enter_backward", _own_part),
            GRADIENTS,
        ),
        (
            "zeros around the keys that are seen",
            ("sp-gather", "llama-causal"),
            (exchange_steps, "F", SimpleNamespace(pad=_behind)),
            GRADIENTS,
        ),
        (
            "keys behind the last query",
            ("sp-gather", "bert-classify"),
            (exchange_steps, "overlapping", lambda *given: overlapping(*given[:-1], True)),
            LOGITS,
        ),
        (
            "the offset of queries",
            ("sp-gather", "llama-causal"),
            (attending, "_seen", lambda how, q, k, device: torch.ones(q, k).bool().tril()[None, None]),
            LOGITS,
        ),
        (
            "zeros around the memory that is seen",
            ("sp-gather", "bart-seq2seq"),
            (attention_steps, "F", SimpleNamespace(pad=_behind)),
            GRADIENTS,
        ),
        ("trade", ("sp-ulysses", "llama-causal"), (TRADES, "enter", _rolled(TRADES.enter)), LOGITS),
        (
            "trade, on the way back",
            ("sp-ulysses", "llama-causal"),
            (TRADES, "enter_backward", _rolled(TRADES.enter_backward)),
            GRADIENTS,
        ),
        ("trade back", ("sp-ulysses", "bert-classify"), (TRADES, "leave", _rolled(TRADES.leave)), LOGITS),
        (
            "trade back, on the way back",
            ("sp-ulysses", "bert-classify"),
            (TRADES, "leave_backward", _rolled(TRADES.leave_backward)),
            GRADIENTS,
        ),
        (
            "the heads of a bias",
            ("sp-ulysses", "t5-seq2seq"),
            (part, "some_heads", lambda x, whole, first, held: x[:, : min(held, x.shape[1])]),
            LOGITS,
        ),
        (
            "blocks of a ring that matter",
            ("sp-ring", "llama-causal"),
            (ring.Trip, "matters", lambda self, block: block == self.index),
            LOGITS,
        ),
        (
            "gradients that go round",
            ("sp-ring", "llama-causal"),
            (ring, "back", _halved),
            GRADIENTS,
        ),
        (
            "the rows of a mask",
            ("sp-ring", "t5-seq2seq"),
            (QueryRows, "of", lambda self, x: x if x is None or x.shape[-2] == 1 else x[..., : self.own, :]),
            LOGITS,
        ),
    )
}


WITHIN["angles"] = inside("sp-gather"), (StackEdges, "argument", _of_the_first), LOGITS
ADJOINTS: dict[str, Planted] = {
    f"{backend}, {end}": (
        inside(backend),
        (WholeBoundary if backend == "tp" else SequenceBoundary, end, fault),
        match,
    )
    for backend, end, fault, match in CROSSINGS
}


def _whole(over: str) -> Fault:
    """What is dropped out over all heads, or all features, as if a rank had them."""
    part_of = drawing.part_of
    return (
        drawing,
        "part_of",
        lambda spec, drop, how: drop if how.over == over else part_of(spec, drop, how),
    )


DROPPING: dict[str, tuple[str, Fault]] = {
    "features": ("tp", _whole("features")),
    "heads": ("tp", _whole("heads")),
    "the place of heads": ("sp-ulysses", (drawing, "part_of", lambda spec, drop, how: drop)),
    "the place of keys": ("sp-gather", (attending, "_key_tokens", lambda how, q, k: torch.arange(len(k)))),
}
DROPPED: dict[str, Planted] = {
    name: (inside(backend, dropout=0.1), fault, "losses of step 0")
    for name, (backend, fault) in DROPPING.items()
}
SLICES: dict[str, Planted] = {
    name: (inside("tp"), (vocabulary.Logits, what, fault), match)
    for name, what, fault, match in (
        ("largest and sum of one slice", "gather", lambda self, x: x[None], "losses of step 0"),
        ("or as if all were alike", "gather", lambda self, x: 2 * x[None], "losses of step 0"),
        ("gradient", "enter_backward", lambda self, dx: dx, GRADIENTS),
        (
            "offset of labels",
            "first",
            property(lambda self: sum(self.sizes[: self.index]) + 1),
            "losses of step 0",
        ),
    )
}
# that they agree without a fault is the matrix's to say, but for those with dropout
SOUND: dict[str, Planted] = {
    backend: (inside(backend, dropout=0.1), None, "") for backend in ("tp", "sp-ulysses", "sp-gather")
}


def on_ranks_of_each(every: dict[Any, Planted]) -> dict[Any, list[Trace]]:
    """By its name what ranks do under each fault; those of each number of ranks are forked once for all."""
    # one model after the other, each of which is made once
    every = dict(sorted(every.items(), key=lambda one: (one[1][0].name, one[1][0].dropout)))
    limits = {name: harness.oracle(one).norms[0] / 2 for name, (one, *_) in every.items()}

    def steps(world: int) -> dict[Any, dict[str, Any]]:
        found: dict[Any, dict[str, Any]] = {}
        for name, (one, fault, _) in every.items():
            if one.plan.world != world:
                continue
            with pytest.MonkeyPatch.context() as patched:
                if fault is not None:
                    patched.setattr(*fault)
                found[name] = dict(vars(harness.steps(one, one.plan, limits[name])))
        return found

    traces: dict[Any, list[Trace]] = {}
    for world in {one.plan.world for one, *_ in every.values()}:
        ranks = run(world, steps, world, timeout=90)
        traces |= {name: [Trace(**rank[name]) for rank in ranks] for name in ranks[0]}
    return traces


@cache
def planted() -> dict[str, list[Trace]]:
    """By its name what two ranks do under each fault within fused blocks."""
    return on_ranks_of_each(WITHIN | ADJOINTS | DROPPED | SLICES | SOUND)


def seen(name: str, one: Case, match: str) -> None:
    """The comparison with one process sees the fault."""
    with pytest.raises(AssertionError, match=match):
        compare(planted()[name], harness.oracle(one), one)


@pytest.mark.parametrize("fault", WITHIN)
def test_what_attention_exchanges_within_a_fused_block_is_guarded(fault: str) -> None:
    one, _, match = WITHIN[fault]
    seen(fault, one, match)


@pytest.mark.parametrize("fault", ADJOINTS)
def test_every_crossing_within_a_fused_block_has_its_adjoint(fault: str) -> None:
    one, _, match = ADJOINTS[fault]
    seen(fault, one, match)


@pytest.mark.parametrize("fault", DROPPED)
def test_what_a_fused_block_drops_out_is_that_of_its_place_in_the_whole(fault: str) -> None:
    one, _, match = DROPPED[fault]
    compare(planted()[DROPPING[fault][0]], harness.oracle(one), one)
    seen(fault, one, match)


@pytest.mark.parametrize("fault", SLICES)
def test_a_loss_without_logits_is_that_of_all_slices(fault: str) -> None:
    one, _, match = SLICES[fault]
    seen(fault, one, match)


@pytest.mark.parametrize("backend", ["tp", long("galaxy")])
def test_the_bias_of_a_row_site_is_added_once(backend: str, fails: Fails) -> None:
    narrow = shard_params.narrow

    def everywhere(layer: Any, own: str, split: Any, *rest: Any) -> set[str]:
        return narrow(layer, own, None if split == "owner" else split, *rest)

    fails(cell("bert-classify", "full", backend), shard_params, "narrow", everywhere, LOGITS)


def test_the_norm_counts_what_several_ranks_hold_once(fails: Fails) -> None:
    fails(cell("llama-causal", "lora", "tp"), Runner, "_copies", lambda self, name: 1, "norms of step 0")


def test_the_gradients_of_sharded_tensors_are_summed_and_not_averaged(fails: Fails) -> None:
    plain = FSDPModule.set_gradient_divide_factor
    fault = lambda unit, factor: plain(unit, 2 * factor)  # noqa: E731
    fails(cell("llama-causal", "lora", "shard"), FSDPModule, "set_gradient_divide_factor", fault, GRADIENTS)


# ------------------------------------------------------------------ rows, tokens and masks


def test_replicas_have_rows_of_their_own(fails: Fails) -> None:
    """Without a sampler every rank trains on the same rows."""
    share = Runner.share

    def first(self: Runner, rows: Any) -> Any:
        at, self.mesh = self.mesh, dataclasses.replace(self.mesh, at=dataclasses.replace(self.mesh.at, dp=0))
        found, self.mesh = share(self, rows), at
        return found

    fails(cell("llama-causal", "lora", "dp"), Runner, "share", first, "losses of step 0")


@pytest.mark.parametrize("backend", ["dp", long("shard"), long("dp x pp")])
def test_tokens_weigh_the_same_wherever_they_are(backend: str, fails: Fails) -> None:
    """A mean of the means of forward passes and replicas is not the mean."""
    summed = harness.summed

    def mean(logits: Tensor, batch: Any, case: Case) -> Tensor:
        return summed(logits, batch, case) / count(batch) * harness.total(case, 0) / (2 * case.plan.dp)

    fails(cell("llama-causal", "lora", backend), harness, "summed", mean, "losses of step 0")


@pytest.mark.parametrize("name", ["bert-classify", long("llama-causal"), long("t5-seq2seq")])
def test_padding_is_masked_in_attention_over_other_ranks_tokens(name: str, fails: Fails) -> None:
    plain = exchange.GatherExchange.__call__

    def unmasked(
        self: Any, attend: Any, module: Any, query: Any, key: Any, value: Any, mask: Any, **kw: Any
    ) -> Any:
        return plain(self, attend, module, query, key, value, None, **kw)

    fails(cell(name, "lora", "sp-gather"), exchange.GatherExchange, "__call__", unmasked, LOGITS)


@pytest.mark.parametrize("name", [long("bert-classify"), long("llama-causal"), "bart-seq2seq"])
def test_every_stage_masks_padding(name: str, fails: Fails) -> None:
    plain = stage_module.Chunk.run

    def unmasked(self: Any, arrived: Any, batch: Any) -> Tensor:
        left = {key: value for key, value in batch.items() if key != "attention_mask" or self.number == 0}
        return plain(self, arrived, left)

    fails(cell(name, "lora", "pp-1f1b"), stage_module.Chunk, "run", unmasked, LOGITS)


@pytest.mark.parametrize("fault", ["as if own tokens were the first", "none"])
def test_later_tokens_are_hidden_where_no_mask_is_made(fault: str, fails: Fails) -> None:
    """The rows of a pass without padding come with no mask, and SDPA's own causal mask begins at the first
    query it sees."""

    def wrong(first: int, end: int, device: Any) -> Tensor:
        square = torch.ones(1, 1, end - first, end, dtype=torch.bool, device=device)
        return square if fault == "none" else square.tril()

    fails(cell("llama-causal", "lora", "sp-gather"), exchange, "no_later", wrong, "losses of step 0")


def test_positions_are_those_of_the_whole_sequence(fails: Fails) -> None:
    fails(cell("llama-causal", "lora", "sp-gather"), StackEdges, "argument", _of_the_first, LOGITS)


# ------------------------------------------------------------------ stages


def test_micro_batches_are_not_averaged(fails: Fails) -> None:
    plain = schedule.SCHEDULES["1f1b"]

    def scaled(*args: Any, **settings: Any) -> Any:
        return plain(*args, **(settings | {"scale_grads": True}))

    fails(
        cell("llama-causal", "lora", "pp-1f1b"),
        schedule,
        "SCHEDULES",
        {**schedule.SCHEDULES, "1f1b": scaled},
        GRADIENTS,
    )


@pytest.mark.parametrize("name", ["t5-seq2seq", long("bart-seq2seq")])
def test_what_several_stages_hold_gets_the_gradient_of_all(name: str, fails: Fails) -> None:
    """Tied embeddings are on the first stage and on the last."""
    fails(cell(name, "full", "pp-1f1b"), Runner, "_sum_over_stages", lambda self, grads: None, GRADIENTS)


def test_the_encoders_gradient_passes_through_every_stage_of_the_decoder(fails: Fails) -> None:
    plain = stage_module.Chunk._running

    def stopped(self: Any, arrived: Any, batch: Any) -> Any:
        return plain(self, [value.detach() if at else value for at, value in enumerate(arrived)], batch)

    fails(cell("t5-seq2seq", "lora", "pp-1f1b"), stage_module.Chunk, "_running", stopped, GRADIENTS)


# ------------------------------------------------------------------ the vocabulary


@pytest.mark.parametrize("name", ["llama-causal", long("bart-seq2seq")])
def test_every_part_of_the_vocabulary_adds_to_the_gradient_of_the_last_hidden_states(
    name: str, fails: Fails
) -> None:
    fails(cell(name, "full", "tp"), vocabulary, "copy", lambda x, group: x, GRADIENTS)


def test_the_loss_is_that_of_the_whole_vocabulary(fails: Fails) -> None:
    def own(logits: Tensor, labels: Tensor, group: Any, first: int) -> Tensor:
        here = (labels >= first) & (labels < first + logits.shape[-1])
        return nn.functional.cross_entropy(logits[here], labels[here] - first, reduction="none")

    fails(cell("llama-causal", "lora", "tp"), runner, "vocabulary_losses", own, "losses of step 0")


# ------------------------------------------------------------------ what ranks start from, and what they draw


@pytest.mark.parametrize("backend", [long("dp"), "tp", long("pp-1f1b")])
def test_every_rank_starts_from_the_same_tensors(backend: str, fails: Fails) -> None:
    case = cell("llama-causal", "lora", backend)

    plain = harness.place

    def differently(case: Case, plan: Any, model: nn.Module) -> Any:
        if dist.is_initialized() and dist.get_rank():
            stir(model)
        return plain(case, plan, model)

    fails(case, harness, "place", differently, START)


@pytest.mark.parametrize("backend", ["galaxy", long("sp-gather"), "dp"])
def test_dropout_is_drawn_by_the_place_in_the_whole(backend: str, fails: Fails) -> None:
    case = cell("bert-classify", "lora", backend, dropout=0.1)

    def from_the_first(x: Tensor, p: float) -> Tensor:
        now = dropping.running()
        now.token, now.rows = 0, None
        return plain(x, p)

    plain = dropping.drop
    fails(case, dropping, "drop", from_the_first, "losses of step 0")


@pytest.mark.parametrize("backend", ["tp", long("galaxy"), long("sp-ulysses")])
def test_attention_probabilities_are_dropped_by_the_number_of_their_head(backend: str, fails: Fails) -> None:
    plain = attention.drop_attention

    def from_the_first(probabilities: Tensor, p: float, head: int, query: int) -> Tensor:
        return plain(probabilities, p, 0, query)

    fails(
        cell("llama-causal", "lora", backend, dropout=0.1),
        attention,
        "drop_attention",
        from_the_first,
        "losses of step 0",
    )


def test_recomputing_draws_what_was_drawn(fails: Fails) -> None:
    plain = Stack.step

    def another(self: Stack, index: int, block: nn.Module, call: Any, here: Running) -> Any:
        again = torch._C._current_graph_task_id() != -1  # inside a backward pass
        return plain(self, index, block, call, dataclasses.replace(here, key=1) if again else here)

    fails(cell("bert-classify", "lora", "tp", dropout=0.1, recompute=True), Stack, "step", another, GRADIENTS)


# ------------------------------------------------------------------ what trains


def test_a_norm_that_begins_to_train_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own sequence parallelism makes norms anew and so unfreezes them."""
    plain = placement.cross

    def unfreezing(model: nn.Module, *rest: Any) -> None:
        plain(model, *rest)
        model.get_parameter("model.norm.weight").requires_grad_(True)

    monkeypatch.setattr(placement, "cross", unfreezing)
    with pytest.raises(RankError, match="changed what trains"):
        check(cell("llama-causal", "lora", "galaxy"))


def test_the_comparison_sees_one_wrong_tensor_among_all() -> None:
    case = Case("bert-classify", "lora", steps=2)
    limit = harness.oracle(case).norms[0] / 2
    trace = partial(harness.steps, case, ALONE, limit)
    harness.compare([trace()], harness.oracle(case), case)
    faults: dict[str, Callable[[harness.Trace], None]] = {
        "gradients of the first step": lambda found: found.gradients["classifier.bias"].mul_(1.0001),
        "tuned tensors after 2 steps": lambda found: found.tuned["classifier.bias"].add_(1e-4),
        "other names": lambda found: found.tuned.clear(),
        "losses of step 1": lambda found: found.losses.__setitem__(1, found.losses[1] + 1e-4),
    }
    for match, fault in faults.items():
        wrong = trace()
        with torch.no_grad():
            fault(wrong)
        with pytest.raises(AssertionError, match=match):
            harness.compare([wrong], harness.oracle(case), case)


# ------------------------------------------------------------------ several adapters on one base

ROWS_MEET = partial(assert_rows_meet_their_own, "llama-causal")
STACKED, PLACES = several._stacked, several._places
# Fault: what is put in the place of which function, and the test that sees it.
OF_ROWS: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "the adapter of a row": ("_places", lambda *given: PLACES(*given).roll(1), ROWS_MEET),
    "rows without one": ("_places", lambda *given: PLACES(*given).clamp_max(len(given[1]) - 1), ROWS_MEET),
    "scales": (
        "_stacked",
        lambda updates: (STACKED(updates)[0], STACKED([_unscaled(one) for one in updates])[1]),
        ROWS_MEET,
    ),
    "gradients of A": (
        "_stacked",
        lambda updates: (STACKED(updates)[0].detach(), STACKED(updates)[1]),
        assert_trained_as_alone,
    ),
}


def _unscaled(update: several.Update) -> several.Update:
    update.scale = 1.0
    return update


@pytest.mark.parametrize("fault", OF_ROWS)
def test_rows_of_several_adapters_are_guarded(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, sees = OF_ROWS[fault]
    monkeypatch.setattr(several, name, wrong)
    with pytest.raises(AssertionError):
        sees()


# ------------------------------------------------------------------ shards

SUMMED: dict[str, Callable[[MissLinear, Tensor], Tensor]] = {
    "neighbours": lambda self, x: x.unflatten(-1, (len(self.miss_block), -1)).sum(-1),
    "the first one": lambda self, x: x[..., : len(self.miss_block)],
    "their mean": lambda self, x: x.unflatten(-1, (-1, len(self.miss_block))).mean(-2),
}


@pytest.mark.parametrize("fault", SUMMED)
def test_what_miss_sums_is_guarded(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(self: MissLinear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias) + SUMMED[fault](self, x) @ self.miss_block

    monkeypatch.setattr(MissLinear, "forward", wrong)
    with pytest.raises(AssertionError):
        assert_trains_as_peft("llama-causal", tmp_path, "miss", r=8)


# ------------------------------------------------------------------ what a method adds


def _fused(name: str, method: str) -> Callable[[], None]:
    """Fused blocks against the model's own, whose layers have no fault, in float64; biases are no zeros."""

    def sees() -> None:
        torch.set_default_dtype(torch.float64)
        try:
            models = fused_pairs.pair(name, fused_pairs.METHODS[method])
            for model in models:
                draw = torch.Generator().manual_seed(6)
                for path, value in model.named_parameters():
                    if path.endswith("dense.bias"):
                        value.data.normal_(generator=draw)
            fused_pairs.assert_alike(*models, fused_pairs.batch(name), 2e-6)
        finally:
            torch.set_default_dtype(torch.float32)

    return sees


def _norms_that_train(self: DoraLinear) -> Tensor:
    return (self.weight + self.scale * self.lora_B @ self.lora_A).norm(dim=1)


def _bias_left_out(self: Ia3Linear, x: Tensor) -> Tensor:
    """The bias is not scaled."""
    y = nn.functional.linear(x, self.weight) * self.ia3_l[:, 0]
    return y if self.bias is None else y + self.bias


def _behind_the_norm(self: Any, total: Tensor) -> Tensor:
    """What the adapter adds is not normed."""
    normed: Tensor = nn.functional.layer_norm(total, self.normalized_shape, self.weight, self.bias, self.eps)
    return normed + self.update(normed)


def _of_the_sum(self: Any, total: Tensor) -> Tensor:
    """The adapter reads the sum before the norm."""
    shape = self.normalized_shape, self.weight, self.bias, self.eps
    return nn.functional.layer_norm(total + self.update(total), *shape)


def _of_its_input(self: Any, hidden: Tensor, *args: Any, **settings: Any) -> Tensor:
    """The adapter reads what the block is given."""
    total: Tensor = self.base.forward(self, hidden, *args, **settings)
    return total + self.update(hidden)


def _but_not_to_the_sum(self: BlockRun, name: str, grad: Tensor) -> None:
    if name != "mlp.r":
        GIVE(self, name, grad)


def _in_a_row(self: BottleneckLayer, y: Tensor) -> Tensor:
    """The adapter reads what the MLP gives."""
    return y + self.update(y)


def _unscaled_up(self: BottleneckPart, tensors: Any, dtype: torch.dtype) -> BottleneckPart:
    return WITH_TENSORS(self._replace(scale=1.0), tensors, dtype)._replace(scale=self.scale)


def _the_least(importance: Tensor, reduction: int) -> Tensor:
    return KEPT(-importance, reduction)


def _in_order_of_size(importance: Tensor, reduction: int) -> Tensor:
    return importance.topk(importance.shape[-1] // reduction, dim=-1).indices


def _the_last_components(weight: Tensor, r: int, iterations: int | None) -> tuple[Tensor, Tensor]:
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    return s[-r:].sqrt()[:, None] * vh[-r:], u[:, -r:] * s[-r:].sqrt()


def _components_that_stay(self: LoraLayer, iterations: int | None) -> None:
    """The weight keeps what went into the factors."""
    before = self.weight
    STARTED(self, iterations)
    self.weight = before


def _some_biases(model: nn.Module, which: str, also_train: Any) -> dict[str, Tensor]:
    return BIASES(model, "lora", also_train)


def _at_every_place(self: LoraConv2d, x: Tensor) -> Tensor:
    """The factors are moved by one place where the base's are moved by its stride."""
    inner = nn.functional.conv2d(x, self.lora_A, None, 1, self.padding)
    made: Tensor = nn.functional.conv2d(inner, self.lora_B) * self.scale
    return made[..., : -(-made.shape[-2] // 2), : -(-made.shape[-1] // 2)]


def _of_rows_above(weight: Tensor) -> tuple[Tensor, Tensor]:
    q, scale = INT8(weight)
    return q, scale.roll(1, 0)


GIVE = BlockRun.give
STARTED, BIASES, INT8 = LoraLayer._start_from_components, registry.base_biases, Int8.quantised
LEVELS, SCALES = nf4.levels, nf4.Nf4.block_scales
WITH_TENSORS, KEPT = BottleneckPart.with_tensors, pruning.kept
PFEIFFER = partial(
    references.pfeiffers_adapters_follow_the_paper,
    *("bert-classify", [f"bert.encoder.layer.{at}.output.LayerNorm" for at in (0, 1)], "off", 1e-10),
)
PFEIFFER_BEHIND = partial(
    references.pfeiffers_adapters_follow_the_paper,
    *("llama-causal", [f"model.layers.{at}" for at in (0, 1)], "off", 3e-6),
)
PRUNED = references.pruned_start_follows_the_paper
PARALLEL = partial(references.parallel_adapters_follow_the_paper, "bert-classify", {}, 4.0)
# Fault: what is patched by what, and the test that sees it.
ADDED: dict[str, tuple[Any, str, Any, Callable[[], None]]] = {
    "dora: the norm is no constant": (
        *(DoraLinear, "row_norms", _norms_that_train),
        partial(references.dora_follows_the_equation, True),
    ),
    "dora's node: norms of the base alone": (
        *(reference, "lengths_of", lambda weight, a, b: weight.norm(dim=1)),
        _fused("bert", "dora"),
    ),
    "dora's node: the bias is scaled": (
        *(packed_linear, "own_of", lambda parts, columns: None),
        _fused("bert", "dora"),
    ),
    "dora's node: the gradient of lengths": (
        *(packed_linear, "over_vector", lambda sums, by: sums.view(by.shape)),
        _fused("bert", "dora"),
    ),
    "dora's node: what is before rotary positions": (
        *(reference, "rope_backward", lambda dq, dk, dv, *_: torch.cat([dq, dk, dv], 1).flatten(1)),
        _fused("llama", "dora"),
    ),
    "dora's node: the gradient of lengths that readers scale by": (
        *(packed_linear.Group, "learn_scale", lambda self, sink, sums: None),
        _fused("llama", "dora"),
    ),
    "ia3: the bias": (
        *(Ia3Linear, "forward", _bias_left_out),
        partial(references.ia3_follows_the_equation, False),
    ),
    "ia3's node: inputs": (
        *(packed_linear, "scaled_inputs", lambda x, by: x.clone()),
        _fused("bert", "ia3"),
    ),
    "miss's node: the shards": (
        *(miss, "_identities", lambda r, inputs, dtype, device: torch.eye(r, inputs, dtype=dtype)),
        _fused("bert", "miss"),
    ),
    "pfeiffer: behind the norm": (AdapterNorm, "forward", _behind_the_norm, PFEIFFER),
    "pfeiffer: what it reads": (AdapterNorm, "forward", _of_the_sum, PFEIFFER),
    "pfeiffer behind a block: what it reads": (AdapterBlock, "forward", _of_its_input, PFEIFFER_BEHIND),
    "pfeiffer's step: the sum": (
        *(bottleneck_steps, "wide", lambda x: torch.zeros_like(x)),
        _fused("llama", "adapter of sums"),
    ),
    "pfeiffer's step: the sum's own gradient": (
        *(BlockRun, "give", _but_not_to_the_sum),
        _fused("bert", "adapter of sums"),
    ),
    "parallel: what it reads": (BottleneckLayer, "adapted", _in_a_row, PARALLEL),
    "parallel: its scale": (AdapterConfig, "factor", property(lambda self: 1.0), PARALLEL),
    "parallel's step: its scale": (
        *(BottleneckPart, "with_tensors", _unscaled_up),
        _fused("llama", "adapter beside"),
    ),
    "head: its base stands still": (
        *(head.StandStill, "__call__", lambda self, base, args: None),
        partial(references.head_trains_behind_a_base_without_gradients, "bert-classify", "off"),
    ),
    "head: its blocks have no way back": (
        *(head, "own_stacks", lambda model, family: {}),
        references.blocks_below_a_head_make_no_node,
    ),
    "a ladder's start: what matters": (pruning, "kept", _the_least, PRUNED),
    "a ladder's start: the order": (pruning, "kept", _in_order_of_size, PRUNED),
    "a ladder's start: drawn over": (
        *(Ladder, "begun", lambda self: ()),
        references.drawing_anew_leaves_what_was_pruned,
    ),
}


# The same of what stands in one equation, on one layer.
ADDED |= {
    "lora: its scale": (LoraConfig, "scale", property(lambda self: 1.0), partial(equations.lora, False)),
    "rslora: its divisor": (
        *(LoraConfig, "divisor", property(lambda self: self.r)),
        partial(equations.lora, True),
    ),
    "pissa: the components": (pissa, "principal", _the_last_components, equations.pissa),
    "pissa: the weight keeps them": (
        *(LoraLayer, "_start_from_components", _components_that_stay),
        equations.pissa,
    ),
    "token rows: whose they are": (
        *(RowLayer, "at", lambda self, near: self.index.flip(0).to(near.device)),
        equations.token_rows,
    ),
    "bias: those of tuned layers alone": (registry, "base_biases", _some_biases, equations.biases),
    "lora+: A instead of B": (
        *(LoraLayer, "rates", lambda self: {"lora_A": self.lr_ratio}),
        equations.lora_plus,
    ),
    "lora+: no ratio": (LoraLayer, "rates", lambda self: {}, equations.lora_plus),
    "a convolution: its stride": (LoraConv2d, "update", _at_every_place, equations.convolution),
    "houlsby: the residual": (BottleneckLayer, "adapted", lambda self, y: self.update(y), equations.houlsby),
    "a ladder's gate: the sides": (
        *(side, "mixed", lambda ops, state, below, *gate: mixed(ops, below, state, *gate)),
        equations.ladder_gate,
    ),
    "a ladder's gate: its temperature": (
        *(side, "mixed", lambda ops, state, below, gate, heat: mixed(ops, state, below, gate, 1.0)),
        equations.ladder_gate,
    ),
    "nf4: the order of its levels": (
        *(nf4, "levels", lambda device: LEVELS(device).flip(0)),
        partial(equations.held_in, nf4.Nf4),
    ),
    "nf4: the mean of the scales": (
        *(nf4.Nf4, "block_scales", lambda self: SCALES(self) - self.mean),
        partial(equations.held_in, nf4.Nf4),
    ),
    "int8: another row's scale": (
        *(Int8, "quantised", classmethod(lambda cls, weight: _of_rows_above(weight))),
        partial(equations.held_in, Int8),
    ),
}


@pytest.mark.parametrize("fault", ADDED)
def test_the_line_that_matters_of_every_method_is_guarded(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, wrong, sees = ADDED[fault]
    sees()
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError):
        sees()


def test_an_adapter_beside_a_region_that_is_cut_acts_behind_the_sum(fails: Fails) -> None:
    """Its gradient is whole on every rank: it is no part of a sum."""
    kind = (("kind", "parallel"),)
    splits = AdapterLinear.splits

    def inside(self: AdapterLinear, cut: Any) -> Any:
        return {name: None if split == "after" else split for name, split in splits(self, cut).items()}

    fails(cell("bert-classify", "adapter", "tp", tuning=kind), AdapterLinear, "splits", inside, GRADIENTS)
