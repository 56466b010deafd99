"""Attention over a cut sequence against plain attention over the whole of it, in float64: outputs and every
gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import DistributedError, UsageError
from petune.models.attention import attend, attention
from petune.parallel import collectives
from petune.parallel.sequence import exchange, ring
from petune.parallel.sequence.exchange import Cross, GatherExchange, Ring, Ulysses, ulysses_heads
from petune.parallel.sequence.trade import AllToAll
from petune.rng.context import Running, bound_to
from petune.rng.dropout import drawing
from tests.pool import run

KINDS = {"gather": GatherExchange, "ulysses": Ulysses, "ring": Ring}
CUTS = [(11, 5), (5, 3, 1), (0, 6), (4, 0, 3)]
HEADS, WIDTH, ROWS = 6, 4, 2
TOLERANCE = 1e-10


class Module(nn.Module):
    """What attention functions read off an attention module."""

    def __init__(self, groups: int, is_causal: bool) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


@dataclass(frozen=True)
class Case:
    """One attention. mask: how to make it of the number of queries and keys; bias: T5's, trained."""

    is_causal: bool = False
    mask: Any = None
    bias: bool = False
    kv_heads: int = HEADS
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def module(self) -> Module:
        return Module(HEADS // self.kv_heads, self.is_causal)

    def inputs(self, queries: int, keys: int) -> list[Tensor]:
        """query, key, value and perhaps bias, whole."""
        generator = torch.Generator().manual_seed(7)
        shapes = [
            (ROWS, HEADS, queries, WIDTH),
            (ROWS, self.kv_heads, keys, WIDTH),
            (ROWS, self.kv_heads, keys, WIDTH + 1),
        ]
        shapes += [(1, HEADS, queries, keys)] * self.bias
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def made(self, queries: int, keys: int) -> Tensor | None:
        found: Tensor | None = None if self.mask is None else self.mask(queries, keys)
        return found


def padding(queries: int, keys: int) -> Tensor:
    """[b, 1, 1, k]: the second row begins with two paddings."""
    mask = torch.ones(ROWS, 1, 1, keys, dtype=torch.bool)
    mask[1, ..., :2] = False
    return mask


def padding_causal(queries: int, keys: int) -> Tensor:
    """[b, 1, q, k]: two queries may attend to nothing."""
    return padding(queries, keys) & torch.ones(queries, keys, dtype=torch.bool).tril()


def additive(queries: int, keys: int) -> Tensor:
    """[b, 1, q, k] added to scores, with a query that may attend to nothing."""
    values = torch.randn(
        ROWS, 1, queries, keys, generator=torch.Generator().manual_seed(8), dtype=torch.float64
    )
    return values.masked_fill(~padding_causal(queries, keys), -torch.inf)


def by_head(queries: int, keys: int) -> Tensor:
    """[b, heads, q, k], every query seeing the first key."""
    mask = torch.rand(ROWS, HEADS, queries, keys, generator=torch.Generator().manual_seed(9)) < 0.6
    mask[..., 0] = True
    return mask


CASES = {
    "causal": Case(is_causal=True),
    "causal by keyword": Case(keywords={"is_causal": True}),
    "not causal by keyword": Case(is_causal=True, keywords={"is_causal": False}),
    "bidirectional": Case(),
    "padding": Case(mask=padding),
    "padding, causal": Case(is_causal=True, mask=padding_causal),
    "additive": Case(mask=additive),
    "mask by head": Case(mask=by_head),
    "grouped, causal": Case(is_causal=True, kv_heads=3),
    "grouped, padding": Case(is_causal=True, mask=padding_causal, kv_heads=3, keywords={"scaling": 0.3}),
    "bias": Case(bias=True, keywords={"scaling": 1.0}),
    "bias, causal": Case(is_causal=True, bias=True, keywords={"scaling": 1.0}),
    "bias, padding": Case(bias=True, mask=padding),
    "bias, padding, causal": Case(is_causal=True, bias=True, mask=padding_causal),
    "bias, additive": Case(bias=True, mask=additive),
}


def weight(queries: int) -> Tensor:
    """What the output is multiplied by, so that every element of it has a gradient of its own."""
    return torch.randn(
        ROWS, queries, HEADS, WIDTH + 1, generator=torch.Generator().manual_seed(10), dtype=torch.float64
    )


def on_one(case: Case, queries: int, keys: int) -> list[Tensor]:
    """Output and gradients of plain attention."""
    inputs = [x.requires_grad_() for x in case.inputs(queries, keys)]
    bias = inputs[3] if case.bias else None
    output, _ = attend(
        case.module(), *inputs[:3], case.made(queries, keys), position_bias=bias, **case.keywords
    )
    return [output.detach(), *torch.autograd.grad((output * weight(queries)).sum(), inputs)]


def tokens_of(sizes: tuple[int, ...], index: int, folded: bool) -> list[int]:
    """Those of a rank: in a row, or as a line is folded up whose ends meet."""
    ends = [rank for rank, size in enumerate(sizes) for _ in range(size if not folded else size - size // 2)]
    if folded:
        ends += [rank for rank in reversed(range(len(sizes))) for _ in range(sizes[rank] // 2)]
    return [token for token, rank in enumerate(ends) if rank == index]


def on_ranks(
    kind: str, sizes: tuple[int, ...], cases: Mapping[str, Case], keys: int | None, folded: bool = False
) -> dict[str, list[Tensor]]:
    """The same of one rank's part of the sequence; the bias, and keys of their own, are whole on every
    rank."""
    index, whole = dist.get_rank(), sum(sizes)
    own = tokens_of(sizes, index, folded)
    found = {}
    for name, case in cases.items():
        module = case.module()
        module.exchange = Cross(index) if kind == "cross" else KINDS[kind](dist.group.WORLD, index)
        inputs = case.inputs(whole, whole if keys is None else keys)
        cut = 1 if kind == "cross" else 3
        inputs = [x[:, :, own] for x in inputs[:cut]] + inputs[cut:]
        inputs = [x.clone().requires_grad_() for x in inputs]
        bias = inputs[3] if case.bias else None
        with bound_to(Running(sizes=sizes, rank=index, token=sum(sizes[:index]), folded=folded)):
            mask = case.made(whole, whole if keys is None else keys)
            output, _ = attention(module, *inputs[:3], mask, position_bias=bias, **case.keywords)
        assert output.is_contiguous()
        loss = (output * weight(whole)[:, own]).sum()
        found[name] = [output.detach(), *torch.autograd.grad(loss, inputs)]
    return found


def joined(parts: list[list[Tensor]], cross: bool = False) -> list[Tensor]:
    """Tokens of all ranks behind one another; what is whole on every rank has partial gradients, which add
    up."""
    output, query, key, value, *bias = zip(*parts, strict=True)
    sides = [sum(x) if cross else torch.cat(x, 2) for x in (key, value)]
    return [torch.cat(output, 1), torch.cat(query, 2), *sides, *(sum(x) for x in bias)]


def in_order(parts: list[Tensor], sizes: tuple[int, ...]) -> Tensor:
    """[rows, tokens, ...] of ranks that have them folded."""
    own = [token for index in range(len(sizes)) for token in tokens_of(sizes, index, True)]
    return torch.cat(parts, 1)[:, torch.tensor(own).argsort()]


def assert_equal(found: list[Tensor], expected: list[Tensor], name: str) -> None:
    for what, own, plain in zip(("output", "query", "key", "value", "bias"), found, expected, strict=False):
        assert own.shape == plain.shape, (name, what)
        assert float((own - plain).abs().max()) < TOLERANCE, (name, what)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_sequence_attends_as_a_whole_one_does(kind: str, sizes: tuple[int, ...]) -> None:
    ranks = run(len(sizes), on_ranks, kind, sizes, CASES, None)
    for name, case in CASES.items():
        assert_equal(joined([rank[name] for rank in ranks]), on_one(case, sum(sizes), sum(sizes)), name)


@pytest.mark.parametrize("sizes", [(11, 5), (5, 3, 2)], ids=str)
def test_ranks_with_a_piece_from_both_ends_attend_as_one_does(sizes: tuple[int, ...]) -> None:
    cases = {name: case for name, case in CASES.items() if not case.bias}
    ranks = run(len(sizes), on_ranks, "gather", sizes, cases, None, True)
    for name, case in cases.items():
        output, *grads = zip(*(rank[name] for rank in ranks), strict=True)
        found = [in_order([x.transpose(1, 2) for x in own], sizes).transpose(1, 2) for own in grads]
        assert_equal([in_order(output, sizes), *found], on_one(case, sum(sizes), sum(sizes)), name)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_own_queries_attend_across_to_a_whole_sequence(sizes: tuple[int, ...]) -> None:
    def by_query(queries: int, keys: int) -> Tensor:
        return padding(queries, keys).expand(-1, -1, queries, -1)

    cases = {
        "all": Case(),
        "padding": Case(mask=padding),
        "by query": Case(mask=by_query),
        "bias": Case(mask=by_query, bias=True),
    }
    ranks = run(len(sizes), on_ranks, "cross", sizes, cases, 5)
    for name, case in cases.items():
        assert_equal(joined([rank[name] for rank in ranks], cross=True), on_one(case, sum(sizes), 5), name)


def test_across_a_bias_made_for_own_queries_is_taken_as_it_is() -> None:
    case, whole = Case(bias=True), Case(bias=True).inputs(8, 5)
    module = case.module()
    module.exchange = Cross(1)
    with bound_to(Running(sizes=(5, 3), token=5)):
        output, _ = attention(
            module, whole[0][:, :, 5:], whole[1], whole[2], None, position_bias=whole[3][:, :, 5:]
        )
    torch.testing.assert_close(output, on_one(case, 8, 5)[0][:, 5:])


# -- mutations: each of these faults has to be seen by the comparison above --


def test_keys_whose_gradient_is_only_sliced_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "gather_seq", collectives.gather_shared)
    with pytest.raises(AssertionError, match="key"):
        assert_causal("gather")


def test_a_causal_mask_without_its_offset_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        exchange, "no_later", lambda first, end, _: torch.ones(end - first, end).bool().tril()[None, None]
    )
    with pytest.raises(AssertionError, match="output"):
        assert_causal("gather")


def test_a_ring_without_its_causal_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "no_later", lambda *_: None)
    with pytest.raises(AssertionError, match="output"):
        assert_causal("ring")


def test_heads_traded_back_to_other_places_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = AllToAll.to_tokens
    monkeypatch.setattr(AllToAll, "to_tokens", lambda self, x: right(self, x).roll(WIDTH + 1, -1))
    with pytest.raises(AssertionError, match="output"):
        assert_causal("ulysses")


def assert_causal(kind: str) -> None:
    ranks = run(2, on_ranks, kind, (11, 5), {"causal": CASES["causal"]}, None)
    assert_equal(joined([rank["causal"] for rank in ranks]), on_one(CASES["causal"], 16, 16), "causal")


# -- dropout --


def dropped(kind: str, sizes: tuple[int, ...], folded: bool = False) -> Tensor:
    """Probabilities after dropout of one rank's queries, as values are unit vectors: [b, own, heads,
    keys]."""
    index, whole = dist.get_rank(), sum(sizes)
    own = tokens_of(sizes, index, folded)
    module = Case(is_causal=True).module()
    module.exchange = KINDS[kind](dist.group.WORLD, index)
    query, key, _ = Case().inputs(whole, whole)
    value = torch.eye(whole, dtype=torch.float64).expand(ROWS, HEADS, whole, whole)
    place = Running(sizes=sizes, rank=index, token=sum(sizes[:index]), folded=folded)
    with drawing(replace(place, rows=torch.tensor([4, 1]), key=5, site="decoder.1")):
        return attention(module, query[:, :, own], key[:, :, own], value[:, :, own], None, dropout=0.4)[0]


@pytest.mark.parametrize("kind", ["gather", "ulysses"])
def test_ranks_drop_the_probabilities_that_one_process_drops(kind: str) -> None:
    whole = run(1, dropped, kind, (9,))[0]
    assert 0.4 < float((whole != 0).double().mean()) * 18 / 10 < 0.8
    for sizes in [(6, 3), (4, 3, 2)]:
        torch.testing.assert_close(torch.cat(run(len(sizes), dropped, kind, sizes), 1), whole)
    if kind == "gather":
        torch.testing.assert_close(in_order(run(2, dropped, kind, (6, 3), True), (6, 3)), whole)


def test_a_ring_refuses_attention_dropout_and_names_the_remedy() -> None:
    def refused() -> str:
        with pytest.raises(UsageError) as error:
            dropped("ring", (6, 3))
        return str(error.value)

    assert "exchange: gather" in run(2, refused)[0]


# -- precision --


def rounded(kind: str, sizes: tuple[int, ...], autocast: bool) -> list[Tensor]:
    index = dist.get_rank()
    own = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
    module = Case(is_causal=True, kv_heads=3).module()
    module.exchange = KINDS[kind](dist.group.WORLD, index)
    inputs = [
        x[:, :, own].to(torch.float32 if autocast else torch.bfloat16)
        for x in Case(kv_heads=3).inputs(sum(sizes), sum(sizes))
    ]
    inputs = [x.clone().requires_grad_() for x in inputs]
    with (
        bound_to(Running(sizes=sizes, token=own.start)),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        output, _ = attention(module, *inputs, None)
    loss = (output.double() * weight(sum(sizes))[:, own]).sum()
    return [output.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_bfloat16_and_near(kind: str, autocast: bool) -> None:
    ranks = run(2, rounded, kind, (6, 3), autocast)
    assert ranks[0][0].dtype == torch.bfloat16
    assert ranks[0][1].dtype == (torch.float32 if autocast else torch.bfloat16)
    for own, plain in zip(joined(ranks), on_one(Case(is_causal=True, kv_heads=3), 9, 9), strict=True):
        assert float((own.double() - plain).abs().max()) < 6e-2


# -- where it is not cut, and where it cannot be --


@pytest.mark.parametrize("kind", [*KINDS, "cross"])
def test_where_the_sequence_is_not_cut_attention_is_plain(kind: str) -> None:
    module, inputs = Case(is_causal=True).module(), Case().inputs(6, 6)
    plain = attention(module, *inputs, None)[0]
    module.exchange = Cross(0) if kind == "cross" else KINDS[kind](None, 0)
    assert torch.equal(attention(module, *inputs, None)[0], plain)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exchange_is_shared_by_copies_and_refuses_to_work_alone_after_pickling(kind: str) -> None:
    module = Case().module()
    module.exchange = KINDS[kind]("a group", 1)
    assert (
        copy.deepcopy(module).exchange
        is copy.copy(module).exchange
        is copy.copy(module.exchange)
        is module.exchange
    )
    made, fields = module.exchange.__reduce__()
    lone = made(*fields)
    assert (type(lone), lone.group, lone.index) == (KINDS[kind], None, 1)
    with bound_to(Running(sizes=(4, 2), token=4)), pytest.raises(DistributedError, match="cannot reach"):
        lone(attend, module, *Case().inputs(2, 2), None)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_made_from_own_tokens_alone_is_refused(kind: str) -> None:
    def refused() -> str:
        with pytest.raises(UsageError, match="does not fit") as error:
            module = Case().module()
            module.exchange = KINDS[kind](dist.group.WORLD, dist.get_rank())
            with bound_to(Running(sizes=(3, 3), token=3 * dist.get_rank())):
                attention(module, *Case().inputs(3, 3), None, position_bias=torch.zeros(1, HEADS, 3, 3))
        return str(error.value)

    assert "[..., 6, 6]" in run(2, refused)[0]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((8, 8, 2), ((4, 4), (4, 4))),
        ((8, 4, 3), ((4, 2, 2), (2, 1, 1))),
        ((6, 3, 2), ((4, 2), (2, 1))),
        ((8, 1, 1), ((8,), (1,))),
    ],
)
def test_ulysses_apportions_heads_by_groups(counts: tuple[int, int, int], expected: Any) -> None:
    assert ulysses_heads(*counts) == expected


def test_two_calls_of_different_length_may_be_on_their_way_at_once() -> None:
    ranks = run(2, two_lengths)
    for part, length in enumerate((9, 4)):
        found = joined([rank[part] for rank in ranks])
        assert_equal(found, on_one(CASES["causal"], length, length), str(length))


def two_lengths() -> list[list[Tensor]]:
    """Forward, forward, backward, backward through one module."""
    index, case = dist.get_rank(), CASES["causal"]
    module = case.module()
    module.exchange = Ring(dist.group.WORLD, index)
    going = []
    for sizes in [(6, 3), (1, 3)]:
        own = slice(sum(sizes[:index]), sum(sizes[: index + 1]))
        inputs = [x[:, :, own].clone().requires_grad_() for x in case.inputs(sum(sizes), sum(sizes))]
        with bound_to(replace(Running(), sizes=sizes, token=own.start)):
            going.append((attention(module, *inputs, None)[0], inputs, weight(sum(sizes))[:, own]))
    return [
        [output.detach(), *torch.autograd.grad((output * by).sum(), inputs)] for output, inputs, by in going
    ]
