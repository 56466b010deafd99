"""What the products of a group of linears cost: kernels, and bytes of a row."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.block.dense import WIDE
from petune.kernels.block.packed_linear import FOLDED
from petune.kernels.block.steps import Charge
from petune.kernels.memory import op_cost
from petune.kernels.memory.op_cost import SMALL, Cost
from petune.kernels.memory.shape import BlockShape, GroupPlace

FEW = 4  # kernels of an update in a pass that take no more than their launches


def result_bytes(shape: BlockShape, place: GroupPlace, behind: int | None) -> int:
    """Bytes of a row of what a product gives."""
    return shape.linears(place)[1] * item_before(shape, behind)


def item_before(shape: BlockShape, behind: int | None) -> int:
    """Bytes of a number of what a sub-layer gives: in float32 where a bottleneck behind it reads that."""
    return shape.itemsize if behind is None else max(4, shape.itemsize)


def bytes_within(shape: BlockShape, place: GroupPlace) -> int:
    """Bytes of a row within a product: its input in eight bits, its result in float32 where the update is
    added to it afterwards."""
    inputs, outputs, _ = shape.linears(place)
    entered = inputs * shape.itemsize * place.enters
    return inputs * shape.fp8 + 4 * outputs * _sums(shape, place) + entered


def bytes_within_back(shape: BlockShape, place: GroupPlace) -> int:
    """Bytes of a row within the way back through a product: the gradient of the result before it was scaled,
    which takes the place of the other unless that is the sum's too; and that of the input after."""
    inputs, outputs, _ = shape.linears(place)
    before = outputs if place.kind == "out" else max(0, outputs - inputs)
    scaled = place.scaled and not place.unscaled_by_reader
    return (before * scaled + inputs * place.enters) * shape.itemsize


def dropping(shape: BlockShape, place: GroupPlace) -> int:
    """The updates of a group whose inputs drop out."""
    return shape.updates(place) if shape.drops else 0


def low_input(shape: BlockShape, place: GroupPlace, rows: float) -> Charge:
    """s = x a^T, or ds^T x."""
    inputs, _, rank = shape.linears(place)
    return "narrow", op_cost.dropped_low(rows, inputs, rank, dropping(shape, place), shape.itemsize)


def _factors(shape: BlockShape, place: GroupPlace) -> Iterator[Charge]:
    """What is small for each update in a pass: factors scaled, rounded and placed, partial sums added up."""
    for _ in range(FEW * shape.updates(place)):
        yield "memory", SMALL


def _sums(shape: BlockShape, place: GroupPlace) -> bool:
    """Whether product and update meet in a sum of float32, neither in one product nor in the activation; or
    the product and what scales it."""
    if place.scaled:
        return True
    deferred = place.kind == "up" and shape.defers
    return shape.linears(place)[2] > 0 and not deferred and not shape.room(place)


def _entry(shape: BlockShape, place: GroupPlace, rows: float) -> Iterator[Charge]:
    """An input scaled."""
    if place.enters:
        yield "memory", Cost(0, 2 * shape.itemsize * rows * shape.linears(place)[0])


def _lengths(shape: BlockShape, place: GroupPlace) -> Iterator[Charge]:
    """The lengths of rows where an update is scaled; those of a group are put side by side."""
    inputs, outputs, rank = shape.linears(place)
    if (place.scaled or place.scaled_by_reader) and rank:
        for _ in place.roles:
            share = outputs / len(place.roles), inputs, rank / len(place.roles)
            yield "memory", op_cost.over_lengths(*share, shape.itemsize)
        yield "memory", SMALL


def _pieces(shape: BlockShape, place: GroupPlace) -> int:
    """Products of a group: one of frozen weights, which lie side by side, one each of those that train."""
    return len(place.paths) if shape.trained else 1


def _weighted(shape: BlockShape, rows: float, inner: float, columns: float) -> Iterator[Charge]:
    """A product with a weight, which in eight bits quantises what it reads first, or is made dense; a wider
    one is rounded first."""
    yield "memory", op_cost.cast(inner * columns, shape.weight_bytes, shape.itemsize)
    if shape.made:
        yield "memory", op_cost.dense_into(columns, inner, shape.made, shape.itemsize)
    if shape.fp8:
        yield "memory", op_cost.quantise(rows, inner, shape.itemsize)
    yield "matmul_fp8" if shape.fp8 else "matmul", op_cost.matmul(rows, inner, columns, shape.itemsize)


def updated(shape: BlockShape, place: GroupPlace, rows: float) -> Iterator[Charge]:
    """A product with a weight and its low-rank update."""
    inputs, outputs, rank = shape.linears(place)
    yield from _factors(shape, place)
    yield from _lengths(shape, place)
    yield from _entry(shape, place, rows)
    pieces = _pieces(shape, place)
    for _ in range(pieces):
        yield from _weighted(shape, rows, inputs + shape.room(place), outputs / pieces)
    if _sums(shape, place):
        wider = Cost(0, (4 - shape.itemsize) * rows * outputs)
        yield "memory", wider + op_cost.add_low(rows, outputs, shape.itemsize, rank)


def returned(shape: BlockShape, place: GroupPlace, rows: float) -> Iterator[Charge]:
    """The way back through a product: ds, db, dx without its update, the gradient of a weight that trains."""
    inputs, outputs, rank = shape.linears(place)
    yield from _factors(shape, place)
    if place.scaled and not place.unscaled_by_reader:
        yield "memory", op_cost.unscale(rows, outputs, shape.itemsize)
    for _ in range(2):  # what enters again, and its gradient
        yield from _entry(shape, place, rows)
    both = rank > 0 and outputs > WIDE * inputs and (shape.room(place) > 0 or (shape.gated and not shape.fp8))
    # else dx and ds are one product: linears that share an input have room for b even where an activation
    # adds it
    if not both:
        yield "narrow", op_cost.low_rank(rows, outputs, rank, shape.itemsize)
    if place.kind != "up" or rank > FOLDED * (1 + shape.gated):
        yield "narrow", op_cost.low_rank(rows, outputs, rank, shape.itemsize)
    if shape.fp8:  # turned first
        yield "memory", Cost(0, 2 * inputs * outputs)
    pieces = _pieces(shape, place)
    for _ in range(pieces):
        yield from _weighted(shape, rows, outputs / pieces, inputs + rank * both)
    if shape.trained:
        yield from learned(shape, place, rows)


def learned(shape: BlockShape, place: GroupPlace, rows: float) -> Iterator[Charge]:
    """The gradients of the weights, each a product in float32, rounded where the weight is narrower."""
    inputs, outputs, _ = shape.linears(place)
    for _ in place.paths:
        each = outputs / len(place.paths)
        wider = Cost(0, (4 - shape.itemsize) * inputs * each)
        yield "matmul", op_cost.matmul(each, rows, inputs, shape.itemsize) + wider
        yield "memory", op_cost.cast(inputs * each, 4, shape.weight_bytes)


def added_back(shape: BlockShape, place: GroupPlace, rows: float) -> Charge:
    """dx += ds a."""
    inputs, _, rank = shape.linears(place)
    return "memory", op_cost.add_dropped_low_(rows, inputs, rank, dropping(shape, place), shape.itemsize)
