"""A device that is slower: what it computes, it computes several times over.

    with Twice(2):
        loss = model(**batch)
        loss.backward()

Each operation of torch and each kernel of Triton's is run, its result dropped, and run again, so results are
those of once, to the bit where the operation's are the same each time, and the most memory is that of once,
but for what is written over. That holds of every thread, autograd's too, and of what CUDA graphs record
meanwhile. It lies beneath autograd (BackendSelect, the last key before a device's own kernels), so no mode
watches operations, which fused stacks would not be recorded under.

Run once are: what ranks say to one another; views, casts and copies, and what only takes memory; what of
torch writes over its inputs, but for products that are added to one, which run beside; what draws at random,
but for attention, whose generator is put back. A kernel of Triton's that writes over its inputs runs over
tensors of its own before. How much slower a device is, is to be measured.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

aten: Any = torch.ops.aten
SPACES = ("aten", "mkldnn")  # of operations; oneDNN makes large gradients of linears on a CPU
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
# torch calls it for a number to the power of a tensor, of which it makes a tensor that Python is not given
NOT_FROM_PYTHON = (aten.pow.Tensor_Tensor_out,)
# what kernels of Triton's write over
OVER = {
    "_rope_kernel": ("qkv",),
    "_cross_entropy": ("logits",),
    "_add_kernel": ("dx",),
    "_adamw": ("weight", "mean", "square", "copy"),
}


class Twice:
    """What is done within takes `times` as long. counted: how often each operation and kernel ran so."""

    def __init__(self, times: int = 2) -> None:
        self.times, self.counted = times, Counter[str]()
        self.inside = threading.local()
        self.held = ExitStack()

    def __enter__(self) -> Twice:
        for space in SPACES:
            library = Library(space, "IMPL")
            self.held.callback(library._destroy)
            for name, func in _repeatable(space):
                library.impl(name, self._of(func), "BackendSelect", with_keyset=True)
        for kind in _launchers():
            self.held.enter_context(patch.object(kind, "run", self._launched(kind.run)))
        return self

    def __exit__(self, *_: object) -> None:
        self.held.close()

    def _of(self, func: Any) -> Callable[..., Any]:
        """What is run in the place of an operation, given the keys of those that would run it."""
        key: Any = torch._C.DispatchKey.BackendSelect  # type: ignore[attr-defined]  # no stub names it
        below = torch._C._dispatch_keyset_full_after(key)

        def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
            left, args = keys & below, _with_tensors(func, args)
            if not getattr(self.inside, "here", False):  # else it is a part of one that runs again itself
                self.inside.here = True
                try:
                    self._repeat(func, left, args, kwargs)
                    return func.redispatch(left, *args, **kwargs)
                finally:
                    self.inside.here = False
            return func.redispatch(left, *args, **kwargs)

        return run

    def _repeat(self, func: Any, keys: Any, args: Any, kwargs: dict[str, Any]) -> None:
        again, given = _again(func), kwargs
        if again is func and _overwrites(func, args, kwargs):
            again = BESIDE.get(func)
            given = {name: value for name, value in kwargs.items() if name not in _outs(func)}
        if again is not None:
            self.counted[str(func)] += 1
            for _ in range(self.times - 1):
                with _unmoved(func, args):
                    again.redispatch(keys, *args, **given)

    def _launched(self, once: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a launch of a kernel of Triton's, compiled or interpreted."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            if not warmup:
                name = kernel.fn.__name__
                self.counted[name] += 1
                given = dict(zip(inspect.signature(kernel.fn).parameters, args, strict=False)) | kwargs
                for _ in range(self.times - 1):
                    own = {at: _room(given[at]) for at in OVER.get(name, ())}
                    once(kernel, grid=grid, warmup=False, **(given | own))
            return once(kernel, *args, grid=grid, warmup=warmup, **kwargs)

        return run


def _launchers() -> list[type[Any]]:
    """Classes whose `run` launches kernels; none where Triton is not installed."""
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        return []
    if os.environ.get("TRITON_INTERPRET") != "1":
        return [JITFunction]
    from triton.runtime.interpreter import InterpretedFunction

    return [JITFunction, InterpretedFunction]


@cache
def _repeatable(space: str) -> list[tuple[str, Any]]:
    """Names of operations that do their work themselves, with the operations."""
    has, found = torch._C._dispatch_has_kernel_for_dispatch_key, []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(f"{space}::") and not (
            has(name, "CompositeImplicitAutograd") or has(name, "BackendSelect")
        ):
            packet, _, overload = name.removeprefix(f"{space}::").partition(".")
            every = getattr(getattr(torch.ops, space), packet, None)
            func = getattr(every, overload or "default", None)
            if _again(func) is not None:
                found.append((name, func))
    return found


@cache
def _again(func: Any) -> Any:
    """What does the work of an operation and changes nothing but an `out`; None where nothing does."""
    if not isinstance(func, torch._ops.OpOverload) or func in NOT_FROM_PYTHON:
        return None
    schema, name = func._schema, func._schema.name
    only_memory = "empty" in name or not any("Tensor" in str(one.type) for one in schema.returns)
    if only_memory or (_draws(func) and "attention" not in name):
        return None
    if any(one.alias_info is not None and not one.is_out for one in schema.arguments):  # a view, or in place
        return BESIDE.get(func)
    return func


@cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


@cache
def _tensors(func: Any) -> tuple[int, ...]:
    """Places among its arguments where an operation takes a tensor."""
    return tuple(at for at, one in enumerate(func._schema.arguments) if str(one.type) == "Tensor")


def _with_tensors(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with tensors where numbers stand for such, of which results have the same dtype: torch
    gives a number that it has wrapped back as one, and takes it again only where it is asked from above."""
    numbers = [at for at in _tensors(func) if at < len(args) and isinstance(args[at], (int, float))]
    if not numbers:
        return args
    given = list(args)
    like = next(args[at] for at in _tensors(func) if at < len(args) and isinstance(args[at], Tensor))
    for at in numbers:
        weak = (
            like.dim() > 0 and like.is_floating_point()
        )  # a float64 of no dims does not widen what has some
        dtype = torch.float64 if weak else torch.result_type(like, args[at])
        given[at] = torch.scalar_tensor(args[at], dtype=dtype)
    return tuple(given)


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


def _room(value: Tensor | None) -> Tensor | None:
    """A tensor laid out like another, not initialised."""
    if value is None:
        return None
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)


def _unmoved(func: Any, args: Any) -> AbstractContextManager[None]:
    """Puts the generator that attention may draw from back where it was, where none is being recorded."""
    if not _draws(func):
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
