"""Guards of a recording of blocks: what has to be as it was, compared by identity, which costs no more than
reading it.

What a layer says of itself (`TunedLinear.low_rank`, `bottleneck`) follows from its attributes, tensors and
children, so none has to be asked again while they are the very same objects. What is replaced by its equal
counts as changed: only then is it worth looking closely.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import nn

from petune.kernels.block.module import FusedBlock

_ANY = vars(nn.Module()).keys()  # attributes of every module


class Guards:
    """The attributes, tensors and children of what blocks read, as they are when this is made.

    Not where tensors lie and whether they train, which are properties of the tensors themselves.
    """

    def __init__(self, blocks: Sequence[FusedBlock]) -> None:
        found = {id(module): module for block in blocks for module in _read_by(block)}
        self.blocks, self.modules = list(blocks), list(found.values())
        owned = [
            own for module in self.modules for own in (module._parameters, module._buffers, module._modules)
        ]
        self.children: list[dict[str, Any]] = [own for own in owned if own]
        self.attributes = [vars(module) for module in self.modules]
        self.sized = [*self.attributes, *owned]
        names = [sorted(own.keys() - _ANY) for own in self.attributes]
        self.getters = [itemgetter("training", "_parameters", *own) for own in names]
        self.held = self._now()

    def hold(self, blocks: Sequence[FusedBlock]) -> bool:
        """Whether these are the same blocks, and nothing in them was replaced, added or removed."""
        try:
            return _same(blocks, self.blocks) and _same(self._now(), self.held)
        except KeyError:  # an attribute is gone
            return False

    def _now(self) -> list[object]:
        values = [getter(own) for getter, own in zip(self.getters, self.attributes, strict=True)]
        children = chain.from_iterable(map(dict.values, self.children))
        return [*map(type, self.modules), *map(len, self.sized), *chain.from_iterable(values), *children]


def _same(now: Sequence[object], then: Sequence[object]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _read_by(block: FusedBlock) -> Iterator[nn.Module]:
    """The modules that a call of a block reads something of."""
    spec = block.spec
    yield block
    for parent, _, layer in spec.homes:
        yield parent
        yield from layer.modules()
    for owner, _ in (*spec.norms, *spec.vectors, *spec.dropouts):
        yield owner
        yield from owner.children()  # a dropout
