"""A device that is slower: what it computes, it computes several times over.

    with Twice(2):
        loss = model(**batch)
        loss.backward()

Each operation of torch is run, its result dropped, and run again, so results are those of once, to the bit
where the operation's are the same each time, and the most memory is that of once, but for the result of a
product that is added to one. Autograd's own threads do as the thread that asked them. Run once are: what
ranks say to one another; views, and what only takes memory; what writes over its inputs, but for products
that are added to one, which run beside; what draws at random, but for attention, whose generator is put back.
Kernels that are launched past torch, as Triton's are, are not seen, so a device is less than so many times as
slow: measure how much.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten
# products whose result lies where an input does: what computes the same beside it
BESIDE: dict[Any, Any] = {
    aten.addmm_.default: aten.addmm.default,
    aten.baddbmm_.default: aten.baddbmm.default,
    aten.addmm.out: aten.addmm.default,
    aten.baddbmm.out: aten.baddbmm.default,
    aten.mm.out: aten.mm.default,
    aten.bmm.out: aten.bmm.default,
}
if hasattr(aten.addmm, "dtype_out"):
    BESIDE[aten.addmm.dtype_out] = aten.addmm.dtype


class Twice(TorchDispatchMode):
    """What is done within takes `times` as long. counted: operations that ran so often, by whether the thread
    that began is the one that asked."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.times, self.began = times, threading.get_ident()
        self.counted: Counter[bool] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        again, given = _again(func), kwargs
        if again is func and _overwrites(func, args, kwargs):
            again = BESIDE.get(func)
            given = {name: value for name, value in kwargs.items() if name not in _outs(func)}
        if again is not None:
            self.counted[threading.get_ident() == self.began] += 1
            for _ in range(self.times - 1):
                with _unmoved(func, args):
                    again(*args, **given)
        return func(*args, **kwargs)


@cache
def _again(func: Any) -> Any:
    """What does the work of an operation and changes nothing but an `out`; None where nothing does."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    schema, name = func._schema, func._schema.name
    only_memory = "empty" in name or not any("Tensor" in str(one.type) for one in schema.returns)
    random = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name
    if func.namespace not in ("aten", "petune") or only_memory or random:
        return None
    if any(one.alias_info is not None and not one.is_out for one in schema.arguments):  # a view, or in place
        return BESIDE.get(func)
    return func


@cache
def _outs(func: Any) -> tuple[str, ...]:
    return tuple(one.name for one in func._schema.arguments if one.is_out)


def _overwrites(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an `out` lies where an input does."""
    outs = _outs(func)
    written = _places([kwargs.get(name) for name in outs])
    rest = [value for name, value in kwargs.items() if name not in outs]
    return bool(outs and written & _places([args, rest]))


def _places(tree: Any) -> set[int]:
    plain = (one for one in tree_leaves(tree) if type(one) in (Tensor, Parameter))
    return {one.untyped_storage().data_ptr() for one in plain} - {0}


def _unmoved(func: Any, args: Any) -> AbstractContextManager[None]:
    """Puts the generator that attention may draw from back where it was, where none is being recorded."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return nullcontext()
    device = next(one.device for one in tree_leaves(args) if isinstance(one, Tensor))
    recording = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return nullcontext() if recording else _put_back(device)


@contextmanager
def _put_back(device: torch.device) -> Iterator[None]:
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    try:
        yield
    finally:
        if cuda:
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
