"""How tensors begin that no file holds: drawn from (seed, name), so that whoever draws a part of one gets the
numbers that all others get, whatever else is drawn before, beside or elsewhere.

A tensor is drawn whole, on the CPU, in float32 or wider, and narrowed then; a large weight of a linear in
blocks of rows, each from (seed, name, number of the block). By which law is said by the tuned module it
belongs to (`TunedModule.draw`), and for the heads of a task by transformers' own `_init_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from petune.files.ranges import Piece, overlap
from petune.models.tuned_linear import TunedModule, tuned_modules
from petune.rng.generators import seeded

BLOCK = 4 << 20  # elements of a weight that are drawn at once


@torch.no_grad()
def draw(model: nn.Module, name: str, seed: int, out: Tensor, start: Sequence[int]) -> None:
    """Fill `out`, of any dtype and device, with the box of its shape from `start` on of the tensor `name` of
    `model`.

    The model is whole. Nothing of it changes, but where transformers' law is meant it must be on the meta
    device.
    """
    owner, leaf = _owner(model, name)
    shape = tuple(getattr(owner, leaf).shape)
    dtype = torch.promote_types(getattr(owner, leaf).dtype, torch.float32)
    rows = _rows(owner, leaf, shape)
    for number, first in enumerate(range(0, shape[0], rows) if shape else [0]):
        size = (min(rows, shape[0] - first), *shape[1:]) if shape else ()
        own = overlap(Piece(name, (first,) * bool(shape) + (0,) * len(shape[1:]), size), start, out.shape)
        if own is None:
            continue
        block = torch.empty(size, dtype=dtype)
        with seeded(f"{seed}/{name}/{number}"), holding(owner, leaf, block):
            _initialise(model, name)
        box_of(out, own.inside, own.size).copy_(box_of(block, own.there, own.size))


def draw_tuned(model: nn.Module, seed: int) -> None:
    """Draw every tensor that a method has added to `model`, which is whole and in memory, in place."""
    for name, module in tuned_modules(model):
        begun = module.begun()
        for own, value in module.tuned().items():
            if own in begun:
                continue
            draw(model, f"{name}.{own}", seed, value.data, (0,) * value.dim())


@contextmanager
def holding(module: nn.Module, leaf: str, value: Tensor) -> Iterator[None]:
    """`module` with `value` as its parameter `leaf`, for as long as the block lasts."""
    before = module._parameters[leaf]
    module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    try:
        yield
    finally:
        module._parameters[leaf] = before


def tuned_owner(model: nn.Module, name: str) -> tuple[TunedModule, str] | None:
    """The tuned module that says how the tensor `name` begins, and the tensor's name there; None for a tensor
    of the base."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module, own = model.get_submodule(".".join(parts[:count])), ".".join(parts[count:])
        if isinstance(module, TunedModule) and own in module.tuned():
            return module, own
    return None


def initialiser(model: nn.Module, path: str) -> PreTrainedModel | None:
    """The model of transformers, around the module at `path` or that module itself, whose `_init_weights` is
    meant for it."""
    while True:
        if isinstance(module := model.get_submodule(path), PreTrainedModel):
            return module
        if not path:
            return None
        path = path.rpartition(".")[0]


def _initialise(model: nn.Module, name: str) -> None:
    """Draw the tensor `name`, by transformers' law inside out, as a module may draw for those in it."""
    if (found := tuned_owner(model, name)) is not None:
        found[0].draw(found[1])
        return
    path = name.rpartition(".")[0]
    while True:
        if (law := initialiser(model, path)) is not None:
            law._init_weights(model.get_submodule(path))
        if not path:
            return
        path = path.rpartition(".")[0]


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _rows(owner: nn.Module, leaf: str, shape: Sequence[int]) -> int:
    """Rows of a block: all of them, but where the law sees a row at a time."""
    if not isinstance(owner, nn.Linear) or leaf != "weight" or not all(shape):
        return max(1, shape[0]) if shape else 1
    return max(1, BLOCK // shape[1])


def box_of(tensor: Tensor, start: Sequence[int], size: Sequence[int]) -> Tensor:
    """The box of `size` from `start` on of a tensor, as a view."""
    for dim, (first, count) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, first, count)
    return tensor
