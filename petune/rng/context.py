"""Where the tensors that are being computed right now lie in the whole batch: bound around each call, read by
whoever needs it.

A rank may hold some rows of a batch, some positions of each row, some heads or columns of a layer. Hooks,
exchanges and dropout need to know which, and must not remember it: two micro-batches of different length may
be on their way at once, and recomputing the first after the second must see the first one's sizes. So it is
bound for the length of a call, by whoever starts the call, and again when a call is recomputed. It is
thread-local, as autograd recomputes on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import local
from typing import Any

import torch
from torch import Tensor

# a tensor on a device, the same on the CPU, and how often each had been changed in place by then
Twins = tuple[tuple[Tensor, Tensor, tuple[int, int]], ...]

TokenSpan = tuple[int, int]  # tokens [first, end) of a sequence


@dataclass
class Running:
    """What is known of the running call. Fields are replaced on entering a narrower call and put back on
    leaving it.

    rows: [batch] int64, the number of each row within the optimizer step, or None outside training. key: what
    the step's dropout is drawn from. site: names the place in the model, `stack.block`; drawn counts the
    dropouts of that site so far. sizes: tokens per rank of the tp axis when the sequence is cut, else empty;
    rank: which of them this is; laid: tokens of each rank in the recording in which this call's may lie, else
    empty; folded: each rank has two pieces of the sequence (petune.models.exchange).
    bases, numbers: the words of the draws of the site, one for each, and the places of its tokens, as
    `petune.rng.dropout` draws and places them, where somebody has done so before; else empty, and None.
    token, feature: the place in the whole sequence and in the whole last dim of the first element that is
    held here. segments: which tokens of a padded or packed batch are kept and attend to each other
    (petune.kernels.block.varlen.Segments), inside the model that has them, else None. memory: those of the
    encoder's tokens, inside a decoder that attends across to them. passing: which of several passes that are
    on the way at once this is (petune.kernels.memory.offload.Passing), else None. host: tensors
    on a device that the call was given, and the same on the CPU, where they came from. See `on_host`.
    """

    rows: Tensor | None = None
    key: int | None = None
    site: str = ""
    drawn: int = 0
    bases: tuple[int | Tensor, ...] = ()
    numbers: Tensor | None = None
    sizes: tuple[int, ...] = ()
    rank: int = 0
    laid: tuple[int, ...] = ()
    folded: bool = False
    token: int = 0
    feature: int = 0
    segments: Any = None
    memory: Any = None
    passing: Any = None
    host: Twins = ()


_now = local()


def running() -> Running:
    """The innermost binding of this thread; changing its fields changes what the rest of the call sees."""
    found: Running | None = getattr(_now, "running", None)
    if found is None:
        found = _now.running = Running()
    return found


@contextmanager
def bound(**changes: object) -> Iterator[Running]:
    """Bind a copy of the current facts with `changes` for the length of the block."""
    with bound_to(replace(running(), **changes)) as now:  # type: ignore[arg-type]  # fields of a dataclass by name
        yield now


@contextmanager
def bound_to(here: Running) -> Iterator[Running]:
    """Bind a copy of `here`, whatever was bound before: what a recomputation on another thread needs."""
    before = running()
    _now.running = replace(here)
    try:
        yield _now.running
    finally:
        _now.running = before


def pieces_of(sizes: Sequence[int], index: int, folded: bool) -> tuple[TokenSpan, ...]:
    """The tokens of rank `index`: one piece, or two where they are folded."""
    first, whole = sum(sizes[:index]), sum(sizes)
    if not folded:
        return ((first, first + sizes[index]),)
    fronts, backs = ([size - size // 2 for size in sizes], [size // 2 for size in sizes])
    front, back = sum(fronts[:index]), whole - sum(backs[:index])
    return (front, front + fronts[index]), (back - backs[index], back)


# ------------------------------------------------------------------ what the host knows without asking


def on_host(tensor: Tensor) -> Tensor:
    """The same tensor on the CPU where the running call knows it and neither was changed since, so that
    nothing waits for the device; else the tensor itself."""
    for given, host, versions in running().host:
        if given is tensor and host.shape == tensor.shape and versions == (given._version, host._version):
            return host
    return tensor


def sent(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on its way to a device, for which the host does not wait; one that is there."""
    if value.device == device:
        return value
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


def chosen(kept: Tensor, *values: Tensor) -> list[Tensor]:
    """The entries [n, ...] of each of `values`, of one device, where `kept`, a mask of their first dims,
    holds. Where the mask is on the host, nothing waits for the device."""
    places = sent(kept.nonzero().T.contiguous(), values[0].device).unbind()
    return [value[places] for value in values]


def moved(batch: Mapping[str, Tensor], device: torch.device) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the batch on `device`, on its way there without a wait; what of it the CPU has and the device got a
    copy of)."""
    there = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
    copied = {
        name: value
        for name, value in batch.items()
        if value.device.type == "cpu" and there[name] is not value
    }
    return there, copied


def twins(there: Mapping[str, Tensor], here: Mapping[str, Tensor]) -> Twins:
    """`Running.host` of a call that is given the tensors `there`, of which the CPU has those in `here`."""
    pairs = ((there[name], value) for name, value in here.items() if name in there)
    return tuple((given, host, (given._version, host._version)) for given, host in pairs)
