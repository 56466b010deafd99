"""The transitions between layouts against what they are by definition, and each backward as the true adjoint
of its forward."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from petune.models.transition import transition
from petune.parallel import collectives
from tests.pool import run

CUTS = [(11, 5), (4, 4), (0, 6), (5, 3, 1), (4, 0, 3), (0, 0)]
# what is the same on every rank
SHARED = {"reduce": "output", "copy": "input", "split_shared": "input", "gather_shared": "output"}
WHOLE_IN = ("copy", "reduce", "reduce_scatter_seq", "split_shared")
WHOLE_OUT = ("copy", "reduce", "gather_seq", "gather_shared")
NAMES = ("copy", "reduce", "gather_seq", "reduce_scatter_seq", "split_shared", "gather_shared")


def drawn(seed: int, length: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, length, 3, generator=generator, dtype=torch.float64).to(dtype)


def called(name: str, x: Tensor, sizes: tuple[int, ...], group: Any) -> Tensor:
    if name == "reduce_scatter_seq":  # which blocks call by themselves
        return transition(x, *collectives.REDUCE_SCATTER_SEQ, sizes, group)
    function = getattr(collectives, name)
    found: Tensor = function(x, group) if name in ("copy", "reduce") else function(x, sizes, group)
    return found


def both_ways(sizes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> dict[str, list[Tensor]]:
    """Of each transition: what went in and came out, and what went back in and came back out."""
    rank, whole, own = dist.get_rank(), sum(sizes), sizes[dist.get_rank()]
    found = {}
    for name in NAMES:
        x = drawn(
            0 if SHARED.get(name) == "input" else 1 + rank, whole if name in WHOLE_IN else own, dtype
        ).requires_grad_()
        z = drawn(
            10 if SHARED.get(name) == "output" else 11 + rank, whole if name in WHOLE_OUT else own, dtype
        )
        y = called(name, x, sizes, dist.group.WORLD)
        y.backward(z)
        assert x.grad is not None
        assert y.dtype == x.grad.dtype == dtype
        assert y.is_contiguous()
        found[name] = [x.detach(), y.detach(), z, x.grad]
    return found


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_transitions_do_what_their_names_say(sizes: tuple[int, ...]) -> None:
    ranks = run(len(sizes), both_ways, sizes)
    inputs = {name: [rank[name][0] for rank in ranks] for name in NAMES}
    expected = {
        "copy": inputs["copy"],
        "reduce": [sum(inputs["reduce"])] * len(sizes),
        "gather_seq": [torch.cat(inputs["gather_seq"], 1)] * len(sizes),
        "reduce_scatter_seq": list(sum(inputs["reduce_scatter_seq"]).split(sizes, 1)),
        "split_shared": [x.split(sizes, 1)[rank] for rank, x in enumerate(inputs["split_shared"])],
        "gather_shared": [torch.cat(inputs["gather_shared"], 1)] * len(sizes),
    }
    for name in NAMES:
        for rank in range(len(sizes)):
            torch.testing.assert_close(
                ranks[rank][name][1], expected[name][rank], atol=1e-14, rtol=0, msg=name
            )


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_backward_is_the_adjoint_of_forward(sizes: tuple[int, ...]) -> None:
    """<A x, z> = <x, A* z>; of what is the same on every rank, there is one in the product and not one per
    rank."""
    ranks = run(len(sizes), both_ways, sizes)
    for name in NAMES:
        outer = [float((rank[name][1] * rank[name][2]).sum()) for rank in ranks]
        inner = [float((rank[name][0] * rank[name][3]).sum()) for rank in ranks]
        outside = outer[0] if SHARED.get(name) == "output" else sum(outer)
        inside = inner[0] if SHARED.get(name) == "input" else sum(inner)
        assert outside == pytest.approx(inside, abs=1e-12), name
        assert (outside != 0) == (sum(sizes) > 0), name


def by_rows(sizes: tuple[int, ...]) -> dict[str, list[Tensor]]:
    """`both_ways` where every row is long enough to travel by itself."""
    collectives._travels_by_rows = lambda part: len(part) > 1  # in this very process, which ends soon
    return both_ways(sizes)


@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2)], ids=str)
def test_rows_that_travel_one_by_one_are_those_that_travel_together(sizes: tuple[int, ...]) -> None:
    together, apart = run(len(sizes), both_ways, sizes), run(len(sizes), by_rows, sizes)
    for whole, rows in zip(together, apart, strict=True):
        for name in NAMES:
            torch.testing.assert_close(rows[name], whole[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "tokens", "travels"), [(4, 2048, True), (1, 2048, False), (4, 16, False)], ids=str
)
def test_long_rows_of_a_gpu_travel_one_by_one(rows: int, tokens: int, travels: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = torch.empty(rows, tokens, 4096, dtype=torch.bfloat16, device="cuda")
    assert collectives._travels_by_rows(part) is travels
    assert not collectives._travels_by_rows(torch.empty(4, 2048, 1024))


def test_every_rank_gets_the_same_gradient_of_what_is_the_same_on_every_rank() -> None:
    ranks = run(3, both_ways, (5, 3, 1))
    for name in ("copy", "split_shared"):
        for rank in ranks[1:]:
            assert torch.equal(rank[name][3], ranks[0][name][3]), name


def test_gathers_differ_in_their_gradient_by_who_consumes_them() -> None:
    ranks = run(2, consumed)
    for seq, shared in ranks:
        assert torch.equal(shared, torch.full_like(shared, 3.0))
        assert torch.equal(seq, torch.full_like(seq, 6.0))


def consumed() -> list[Tensor]:
    x = torch.ones(1, 2, 1, requires_grad=True)
    gathers = (collectives.gather_seq, collectives.gather_shared)
    return [torch.autograd.grad(3 * gather(x, (2, 2), dist.group.WORLD).sum(), x)[0] for gather in gathers]


def test_bfloat16_travels_as_bfloat16() -> None:
    for name, (x, *_) in run(2, both_ways, (3, 2), torch.bfloat16)[0].items():
        assert x.dtype == torch.bfloat16, name


@pytest.mark.parametrize("name", [name for name in NAMES if hasattr(collectives, name)])
def test_a_group_of_nobody_or_of_one_gives_back_the_tensor(name: str) -> None:
    x = drawn(0, 4)
    assert called(name, x, (4,), None) is x
    assert collectives.gather_dim(x, (4,), 1, None) is x
    assert run(1, alone, name) == [True]


def alone(name: str) -> bool:
    x = drawn(0, 4)
    return called(name, x, (4,), dist.group.WORLD) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_gather_dim_makes_any_dim_of_any_dtype_whole(dtype: torch.dtype) -> None:
    whole = (drawn(3, 8) * 3).to(dtype)

    def gathered() -> list[Tensor]:
        rank = dist.get_rank()
        cuts = {0: (2, 0), 1: (5, 3), 2: (1, 2), -1: (0, 3), -2: (8, 0)}
        return [
            collectives.gather_dim(whole.split(sizes, dim)[rank], sizes, dim, dist.group.WORLD)
            for dim, sizes in cuts.items()
        ]

    for rank in run(2, gathered):
        for found in rank:
            assert found.dtype == dtype
            assert torch.equal(found, whole)


def test_gather_dim_has_no_graph() -> None:
    def gathered() -> bool:
        return collectives.gather_dim(drawn(0, 2).requires_grad_(), (2, 2), 1, dist.group.WORLD).requires_grad

    assert run(2, gathered) == [False, False]


WHOLES = [
    ((4, 3), 0, (1, 3)),
    ((2, 5, 2), 1, (5, 0)),
    ((6,), 0, (6, 0)),
    ((3, 4), -1, (0, 4)),
    ((2, 2), 0, (1, 1)),
]


def filled(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(-9, 9, shape, generator=draw).to(dtype)


def test_tensors_cut_along_any_dim_are_made_whole_together_one_call_a_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float32, torch.bool, torch.float32)
    wholes = [
        filled(at, shape, dtype) for at, ((shape, _, _), dtype) in enumerate(zip(WHOLES, kinds, strict=True))
    ]

    def gathered() -> tuple[list[Tensor], int]:
        calls, talk = [], collectives._all_gather
        monkeypatch.setattr(
            collectives, "_all_gather", lambda *args, **kwargs: (calls.append(1), talk(*args, **kwargs))
        )
        rank = dist.get_rank()
        parts = [whole.split(sizes, dim)[rank] for whole, (_, dim, sizes) in zip(wholes, WHOLES, strict=True)]
        return collectives.gather_dims(
            parts, [(sizes, dim) for _, dim, sizes in WHOLES], dist.group.WORLD
        ), len(calls)

    for found, calls in run(2, gathered):
        assert calls == 3
        for one, whole in zip(found, wholes, strict=True):
            assert one.dtype == whole.dtype and torch.equal(one, whole)


def test_parts_of_the_wrong_shape_are_refused_before_anything_is_sent() -> None:
    def gathered() -> str:
        with pytest.raises(ValueError) as error:
            collectives.gather_dims([drawn(0, 2), drawn(0, 4)], [((4, 4), 1), ((2, 2), 1)], dist.group.WORLD)
        return str(error.value)

    assert run(2, gathered) == ["dim 1 of (2, 2, 3) does not have this rank's 4 of (4, 4)"] * 2


def test_what_one_rank_has_is_broadcast_in_one_call_a_dtype_and_left_as_it_was() -> None:
    shapes = [((3, 2), torch.float32), ((), torch.int64), ((4,), torch.float32), ((0, 2), torch.float32)]

    def sent() -> tuple[list[Tensor], bool]:
        own = [filled(10 * dist.get_rank() + at, shape, dtype) for at, (shape, dtype) in enumerate(shapes)]
        before = [value.clone() for value in own]
        found = collectives.broadcast(own, 1, dist.group.WORLD)
        return found, all(map(torch.equal, own, before))

    expected = [filled(10 + at, shape, dtype) for at, (shape, dtype) in enumerate(shapes)]
    for found, untouched in run(3, sent):
        assert untouched
        assert [value.shape for value in found] == [value.shape for value in expected]
        assert all(map(torch.equal, found, expected))


def test_a_part_of_another_length_than_planned_is_refused_before_anything_is_sent() -> None:
    def gathered() -> str:
        with pytest.raises(ValueError) as error:
            collectives.gather_seq(drawn(0, 3), (2, 2), dist.group.WORLD)
        return str(error.value)

    assert run(2, gathered) == ["dim 1 of (2, 3, 3) does not have this rank's 2 of (2, 2)"] * 2


@pytest.mark.parametrize("bucket", [2**26, 40, 1])
def test_sums_and_maxima_are_taken_in_place_whatever_the_shapes_and_buckets(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "BUCKET", bucket)

    def reduced() -> list[Tensor]:
        tensors = mixed(dist.get_rank())
        same = list(tensors)
        tensors[0].requires_grad_()
        collectives.all_sum_(tensors, dist.group.WORLD)
        assert all(a is b for a, b in zip(tensors, same, strict=True))
        most = mixed(dist.get_rank())
        collectives.all_max_(most, dist.group.WORLD)
        return tensors + most

    parts = [mixed(rank) for rank in range(3)]
    expected = [torch.stack(x).sum(0) for x in zip(*parts, strict=True)] + [
        torch.stack(x).amax(0) for x in zip(*parts, strict=True)
    ]
    for rank in run(3, reduced):
        for found, plain in zip(rank, expected, strict=True):
            torch.testing.assert_close(found, plain, atol=0, rtol=0)


def mixed(rank: int) -> list[Tensor]:
    """Of several dtypes, one not contiguous; whole numbers, so that sums are exact in any order."""
    kinds = [
        ((3, 2), torch.float32),
        ((4,), torch.float64),
        ((5, 2), torch.float32),
        ((2, 3), torch.bfloat16),
        ((), torch.float32),
    ]
    generator = torch.Generator().manual_seed(rank)
    tensors = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape, dtype in kinds]
    return [*tensors, tensors[2].clone().t(), torch.tensor([rank, 2 - rank])]


def test_an_empty_tensor_among_sums_is_left_alone() -> None:
    def reduced() -> Tensor:
        tensors = [torch.empty(0, 3), torch.ones(2)]
        collectives.all_sum_(tensors, dist.group.WORLD)
        return tensors[1]

    assert torch.equal(run(2, reduced)[0], torch.full((2,), 2.0))


def test_buckets_keep_to_their_size_and_to_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [(3, torch.float32), (3, torch.float64), (90, torch.float32), (2, torch.float32)]
    tensors = [torch.zeros(count, dtype=dtype) for count, dtype in kinds]
    assert [[x.numel() for x in bucket] for bucket in collectives._buckets(tensors)] == [[3, 90, 2], [3]]
    monkeypatch.setattr(collectives, "BUCKET", 24)
    assert [[x.numel() for x in bucket] for bucket in collectives._buckets(tensors)] == [[3], [90], [2], [3]]


def test_the_documented_table_is_the_modules() -> None:
    listed = re.findall(r"^    (\w+) {3,}\S", collectives.__doc__ or "", re.MULTILINE)
    assert [name for name in listed if name != "name"] == list(NAMES)
