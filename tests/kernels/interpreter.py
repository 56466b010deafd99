"""Triton's interpreter, with bfloat16 and without its search for what it patches.

The interpreter of Triton 3.7 keeps bfloat16 as the uint16 of its bits: it adds and multiplies those, and its
casts from float32 cut the low bits off. Here sums, products and comparisons are made in float32, and results
rounded to the nearest, ties to even, as a GPU does. A reduction (tl.sum, tl.max) of bfloat16 is not mended:
kernels reduce in float32.

At every launch, and again at every call of a device function, it looks through triton.language for the
functions that it exchanges, a quarter of the time of a small kernel. Here they are found once. So are the
dtype that numpy has for each of Triton's, the types of blocks, and what values know of theirs. And it makes
every sum and product of integers a second time in int64 for an assertion that it leaves out, for `debug` is
off: that is left out too.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

Array = npt.NDArray[Any]


def widened(bits: Array) -> Array:
    """float32 of bfloat16's bits, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: Array) -> Array:
    """The bits, uint16, of the bfloat16 nearest to each float32; not a number stays that."""
    bits = values.astype(np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)


def apply() -> None:
    """Mend the interpreter, once for the process."""
    if getattr(InterpreterBuilder, "rounds_bfloat16", False):
        return
    binary, cast = InterpreterBuilder.binary_op, InterpreterBuilder.cast_impl
    fma, dot = InterpreterBuilder.create_fma, InterpreterBuilder.create_dot

    def wide(handle: TensorHandle) -> TensorHandle:
        return (
            TensorHandle(widened(handle.data), tl.float32) if handle.dtype.scalar == tl.bfloat16 else handle
        )

    def narrow(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(rounded(handle.data), tl.bfloat16)

    def binary_op(self: Any, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        result = binary(self, wide(lhs), wide(rhs), op)
        if result.data.dtype == np.bool_:
            return TensorHandle(result.data, tl.int1)
        return narrow(result) if lhs.dtype.scalar == tl.bfloat16 else result

    def create_fma(self: Any, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        result = fma(self, wide(x), wide(y), wide(z))
        return narrow(result) if z.dtype.scalar == tl.bfloat16 else result

    def create_dot(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, wide(a), wide(b), d, *rest)

    def cast_impl(self: Any, src: TensorHandle, dst: tl.dtype) -> TensorHandle:
        return (
            narrow(cast(self, wide(src), tl.float32))
            if dst.scalar == tl.bfloat16
            else cast(self, wide(src), dst)
        )

    def get_bf16(self: Any, value: float) -> TensorHandle:
        return narrow(self.get_fp32(value))

    for method in (binary_op, create_fma, create_dot, cast_impl, get_bf16):
        setattr(InterpreterBuilder, method.__name__, method)
    InterpreterBuilder.rounds_bfloat16 = True
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    remember_types()
    remember_patches()


def remember_types() -> None:
    """Look up by the names of types, which say all of them, numpy's dtypes, types of blocks, and the shapes
    of values."""
    plain, known = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()
    blocks, shapes = dict[tuple[Any, ...], tl.block_type](), dict[str, tuple[Any, Any]]()

    def np_dtype(kind: tl.dtype) -> np.dtype[Any]:
        found = known.get(kind.name)
        if found is None:
            found = known[kind.name] = plain(kind)
        return found

    def block_of(kind: tl.dtype, shape: Any) -> tl.block_type:
        key = (kind.name, *shape)
        found = blocks.get(key)
        if found is None:
            found = blocks[key] = tl.block_type(kind, shape)
        return found

    def of_type(self: tl.tensor, handle: Any, kind: tl.dtype) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        found = shapes.get(kind.name)
        if found is None:
            made(self, handle, kind)
            found = shapes[kind.name] = self.shape, self.numel
        self.shape, self.numel = found

    made = tl.tensor.__init__
    interpreter._get_np_dtype = np_dtype
    tl.block_type.with_element_ty = lambda self, kind: block_of(kind, self.shape)
    InterpreterBuilder.get_block_ty = lambda self, kind, shape: block_of(kind, shape)
    tl.tensor.__init__ = of_type


def remember_patches() -> None:
    """Exchange the functions that the interpreter does, from a list and once for a launch."""
    plain = interpreter._patch_lang
    exchanged: dict[ModuleType, list[tuple[object, str, object]]] = {}
    for language in (tl, tl.core):
        scope = plain(SimpleNamespace(__globals__={"language": language}))
        exchanged[language] = [(owner, name, getattr(owner, name)) for owner, name, _ in scope._changes]
        scope.restore()
    running: list[Launch] = []

    class Launch(interpreter._LangPatchScope):
        """What is exchanged until the kernel ends, whichever of its functions asked for it."""

        def __init__(self) -> None:
            super().__init__()
            self.languages: set[ModuleType] = set()

        def restore(self) -> None:
            super().restore()
            running.clear()

    def patch(function: FunctionType) -> Launch:
        if not running:
            running.append(Launch())
        for language in seen_by(function) - running[0].languages:
            running[0].languages.add(language)
            for owner, name, value in exchanged[language]:
                running[0].set_attr(owner, name, value)
        return running[0]

    @cache
    def seen_by(function: FunctionType) -> frozenset[ModuleType]:
        seen = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return frozenset(value for value in seen if value in exchanged)

    interpreter._patch_lang = patch
