"""What ranks say to one another: the six transitions between layouts as autograd functions, five plain
collectives, a transfer.

The transitions act on activations [batch, seq, ...] whose dim 1 is cut by `sizes`, the tokens of every rank
of `group` in order; zero tokens are allowed. They talk in the tensor's own dtype. The backward of each is its
true adjoint, which depends on who consumes the result:

    name                 forward          backward         leads
    copy                 identity         all-reduce       whole -> the entry of a layer cut by heads or
                         columns
    reduce               all-reduce       identity         partial sums -> whole
    gather_seq           all-gather       reduce-scatter   sequence -> whole, where ranks then do different
                         work
    reduce_scatter_seq   reduce-scatter   all-gather       partial sums -> sequence
    split_shared         own slice        all-gather       whole, the same on every rank -> sequence
    gather_shared        all-gather       own slice        sequence -> whole, where every rank then does the
                         same work

Each is a `WithAdjoint` of plain functions, which fused blocks call by themselves, and but for
reduce_scatter_seq, which nobody else asks for, the autograd function made of it. Taking gather_seq for
gather_shared multiplies gradients by the number of ranks; the reverse loses the other ranks' part.

A group of None or of one rank means that nothing is said and `x` comes back. Every rank must make the same
calls in the same order. Uneven all-gathers are padded to the longest part and uneven reduce-scatters take a
list, which gloo and NCCL can both do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved_versions
from torch.distributed.distributed_c10d import _coalescing_manager

from petune.models.transition import transition

MaybeGroup = dist.ProcessGroup | None
Sizes = tuple[int, ...]
T = TypeVar("T")

SEQ = 1  # the dim of an activation that holds tokens
# bytes of one flat all-reduce: long enough for bandwidth, short enough not to matter beside the model
BUCKET = 64 * 2**20

# from this many bytes of a rank's part the rows of a batch travel one by one
LONG_ROW = 2**20

# their names from torch 2.13, and before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_one = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def alone(group: MaybeGroup) -> bool:
    """Whether there is nobody to talk to."""
    return group is None or dist.get_world_size(group) == 1


def copy(x: Tensor, group: MaybeGroup) -> Tensor:
    """`x`, the same on every rank; its gradient is the sum of what every rank makes of it."""
    return x if alone(group) else transition(x, *COPY, group)


def reduce(x: Tensor, group: MaybeGroup) -> Tensor:
    """The sum of every rank's `x`, for consumers that are the same on every rank."""
    return x if alone(group) else transition(x, *REDUCE, group)


def gather_seq(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    """[b, own tokens, ...] -> [b, all tokens, ...]; the gradient is the sum of what every rank makes of the
    own tokens."""
    return x if alone(group) else transition(x, *GATHER_SEQ, sizes, group)


def split_shared(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    """[b, all tokens, ...], the same on every rank -> own tokens; the gradient comes back whole."""
    return x if alone(group) else transition(x, *SPLIT_SHARED, sizes, group)


def gather_shared(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    """[b, own tokens, ...] -> [b, all tokens, ...] for a consumer that is the same on every rank."""
    return x if alone(group) else transition(x, *GATHER_SHARED, sizes, group)


def all_sum_(tensors: Sequence[Tensor], group: MaybeGroup) -> None:
    """Replace each tensor by its sum over the ranks, in place and without a graph. All ranks give the same
    shapes in the same order."""
    _all_reduce_(tensors, dist.ReduceOp.SUM, group)


def all_max_(tensors: Sequence[Tensor], group: MaybeGroup) -> None:
    """Replace each tensor by its elementwise maximum over the ranks, as `all_sum_` does by the sum."""
    _all_reduce_(tensors, dist.ReduceOp.MAX, group)


def least_of(numbers: Sequence[int], device: torch.device, group: MaybeGroup) -> list[int]:
    """The least of each number among the ranks, on all of them; the message lies on `device`."""
    if alone(group):
        return list(numbers)
    negative = torch.tensor([-number for number in numbers], device=device)
    all_max_([negative], group)
    return [-number for number in negative.tolist()]


@torch.no_grad()
def gather_dim(x: Tensor, sizes: Sizes, dim: int, group: MaybeGroup) -> Tensor:
    """The whole of what is cut along `dim` by `sizes`, on every rank and without a graph. Other dims are
    equal on all ranks."""
    return x if alone(group) else _gather(x.detach(), sizes, group, dim)


@torch.no_grad()
def gather_dims(
    parts: Sequence[Tensor], cuts: Sequence[tuple[Sizes, int]], group: MaybeGroup
) -> list[Tensor]:
    """`gather_dim` of each of `parts` by its (sizes, dim), in one call for each dtype: what is asked for
    together has to fit together."""
    if alone(group):
        return list(parts)
    found: list[Tensor] = list(parts)
    ranks, own = range(dist.get_world_size(group)), dist.get_rank(group)
    for part, (sizes, dim) in zip(parts, cuts, strict=True):
        _check(part, sizes, dim, own)
    for places in alike(parts):
        if len(places) == 1:  # a large one is not copied into a flat one first
            found[places[0]] = gather_dim(parts[places[0]], *cuts[places[0]], group)
            continue
        shapes = [
            [_resized(parts[at].shape, cuts[at][1], cuts[at][0][rank]) for at in places] for rank in ranks
        ]
        counts = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
        lengths = tuple(map(sum, counts))
        flat = _gather(torch.cat([parts[at].reshape(-1) for at in places]), lengths, group, 0)
        pieces = [of_rank.split(count) for of_rank, count in zip(flat.split(lengths), counts, strict=True)]
        for number, at in enumerate(places):
            found[at] = torch.cat(
                [pieces[rank][number].view(shapes[rank][number]) for rank in ranks], cuts[at][1]
            )
    return found


@torch.no_grad()
def gather_rows_(wholes: Sequence[Tensor], parts: Sequence[Tensor], group: MaybeGroup) -> None:
    """Fill each of `wholes`, in place, with every rank's rows, of which `parts` are this rank's: equally many
    on all of them. Autograd is not told that they change."""
    with preserved_versions(tuple(wholes)):
        for places in alike(parts):
            with _coalescing_manager(group):
                for at in places:
                    _all_gather(wholes[at], parts[at], group=group)


@torch.no_grad()
def broadcast(tensors: Sequence[Tensor], source: int, group: MaybeGroup) -> list[Tensor]:
    """What rank `source` of the group gives, on every rank; all give the same shapes and dtypes. One call for
    each dtype."""
    if alone(group):
        return list(tensors)
    found: list[Tensor] = list(tensors)
    for places in alike(tensors):
        flat = torch.cat([tensors[at].reshape(-1) for at in places])
        dist.broadcast(flat, group_src=source, group=group)
        for at, value in zip(places, flat.split([tensors[at].numel() for at in places]), strict=True):
            found[at] = value.view(tensors[at].shape)
    return found


def own_slice(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    """This rank's part of a whole `x`, as a view."""
    rank = dist.get_rank(group)
    return x.narrow(SEQ, sum(sizes[:rank]), sizes[rank])


def _gather(x: Tensor, sizes: Sizes, group: MaybeGroup, dim: int = SEQ) -> Tensor:
    """All-gather along `dim`: every part padded to the longest, moved in one call, and trimmed."""
    if x.dtype is torch.bool:  # not every backend has it
        return _gather(x.to(torch.uint8), sizes, group, dim).bool()
    _check(x, sizes, dim, dist.get_rank(group))
    ranks, longest = len(sizes), max(sizes)
    if longest == 0:
        return x.clone()
    even = min(sizes) == longest
    if even and dim == SEQ and _travels_by_rows(x):
        return _gathered_by_rows(x, ranks, group)
    if x.shape[dim] < longest:
        missing = _resized(x.shape, dim, longest - x.shape[dim])
        x = torch.cat([x, x.new_zeros(missing)], dim)
    found = x.new_empty(ranks, *x.shape)
    _all_gather(found.flatten(0, 1), x.contiguous(), group=group)
    if even and math.prod(x.shape[:dim]) == 1:  # the parts lie as they are wanted
        return found.view(_resized(x.shape, dim, ranks * longest))
    parts = zip(found, sizes, strict=True)
    return torch.cat([part.narrow(dim, 0, size) for part, size in parts], dim)


def _travels_by_rows(part: Tensor) -> bool:
    """Whether the rows of [b, own tokens, ...] travel one by one, in one launch: long ones do, as none has to
    be copied to lie beside the others then."""
    return part.is_cuda and len(part) > 1 and part.nbytes >= LONG_ROW * len(part)


def _gathered_by_rows(x: Tensor, ranks: int, group: MaybeGroup) -> Tensor:
    found = x.new_empty(len(x), ranks * x.shape[SEQ], *x.shape[SEQ + 1 :])
    with _coalescing_manager(group):
        for whole, own in zip(found, x.contiguous(), strict=True):
            _all_gather(whole, own, group=group)
    return found


def _check(x: Tensor, sizes: Sizes, dim: int, rank: int) -> None:
    """Raise ValueError unless `x` is the part of `rank`."""
    if x.shape[dim] != sizes[rank]:
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not have this rank's {sizes[rank]} of {sizes}")


def _reduce_scatter(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    """Sum over the ranks, of which each keeps its own tokens."""
    if max(sizes) == 0:
        return x.clone()
    own = x.new_empty(_resized(x.shape, SEQ, sizes[dist.get_rank(group)]))
    if min(sizes) < max(sizes):
        parts = [part.contiguous() for part in x.split(list(sizes), SEQ)]
        dist.reduce_scatter(own, parts, group=group)
    elif _travels_by_rows(own):
        with _coalescing_manager(group):
            for part, whole in zip(own, x.contiguous(), strict=True):
                _reduce_scatter_one(part, whole, group=group)
    else:
        stacked = x.unflatten(SEQ, (len(sizes), -1)).movedim(SEQ, 0).contiguous()
        _reduce_scatter_one(own, stacked.flatten(0, 1), group=group)
    return own


def _copied_slice(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    return own_slice(x, sizes, group).clone(memory_format=torch.contiguous_format)


def _contiguous_slice(x: Tensor, sizes: Sizes, group: MaybeGroup) -> Tensor:
    return own_slice(x, sizes, group).contiguous()


def _all_reduce(x: Tensor, group: MaybeGroup, own: bool = False) -> Tensor:
    """The sum over the ranks; in the place of `x` where that is the caller's `own`."""
    x = x.contiguous() if own else x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


class WithAdjoint(NamedTuple):
    """A function of a tensor, and of where it lies, and its adjoint: plain functions, without autograd."""

    ahead: Callable[..., Tensor]
    back: Callable[..., Tensor]


COPY = WithAdjoint(lambda x, group: x.view_as(x), _all_reduce)
REDUCE = WithAdjoint(_all_reduce, lambda x, group: x)
GATHER_SEQ = WithAdjoint(_gather, _reduce_scatter)
REDUCE_SCATTER_SEQ = WithAdjoint(_reduce_scatter, _gather)
SPLIT_SHARED = WithAdjoint(_copied_slice, _gather)
GATHER_SHARED = WithAdjoint(_gather, _contiguous_slice)


@torch.no_grad()
def _all_reduce_(tensors: Sequence[Tensor], operation: dist.ReduceOp.RedOpType, group: MaybeGroup) -> None:
    if alone(group):
        return
    for bucket in _buckets([tensor.detach() for tensor in tensors if tensor.numel()]):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.all_reduce(bucket[0], operation, group=group)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, operation, group=group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        shaped = [part.view(tensor.shape) for tensor, part in zip(bucket, parts, strict=True)]
        torch._foreach_copy_(bucket, shaped)


def alike(tensors: Sequence[Tensor]) -> Iterable[list[int]]:
    """Which of the tensors have one dtype and device, in order."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for at, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(at)
    return kinds.values()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The `portions` of tensors of one dtype and device."""
    for places in alike(tensors):
        yield from portions([tensors[at] for at in places], lambda tensor: tensor.nbytes)


def portions(items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """The items in order, at most BUCKET bytes together unless one alone has more."""
    portion: list[T] = []
    held = 0
    for item in items:
        if portion and held + nbytes(item) > BUCKET:
            yield portion
            portion, held = [], 0
        portion.append(item)
        held += nbytes(item)
    if portion:
        yield portion


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """`shape` with another size of one dim."""
    found = list(shape)
    found[dim] = size
    return tuple(found)


class Transfer:
    """A tensor on its way to rank `to`, while one of `shape` comes in from rank `source`."""

    def __init__(self, x: Tensor, shape: tuple[int, ...], group: MaybeGroup, to: int, source: int) -> None:
        self.shape = shape
        # An empty one travels as one number: a group's first transfer has to have all of its ranks in it.
        self.sent = x.reshape(-1) if x.numel() else x.new_zeros(1)
        self.received = x.new_empty(max(1, math.prod(shape)))
        send = dist.P2POp(dist.isend, self.sent, group=group, group_peer=to)
        receive = dist.P2POp(dist.irecv, self.received, group=group, group_peer=source)
        self.works = dist.batch_isend_irecv([send, receive])

    def wait(self) -> Tensor:
        """What came in. On CUDA it is the stream that waits, so both tensors must be held until then and may
        be let go after."""
        while self.works:
            self.works.pop().wait()
        return self.received[: math.prod(self.shape)].view(self.shape)
