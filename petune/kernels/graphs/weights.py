"""The tensors of recorded blocks: where they lie, what of them trains, and room for its gradients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from petune.kernels.block.call import BlockLayers, Draws
from petune.kernels.block.module import FusedBlock
from petune.kernels.graphs.guards import Guards


class Learned:
    """Room for the gradients of what trains, one flat tensor for each dtype: graphs fill it, each backward
    pass gives away a copy."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        self.trained = trained
        sizes: dict[torch.dtype, list[int]] = defaultdict(list)
        for value in trained:
            sizes[value.dtype].append(value.numel())
        self.sizes, device = sizes, trained[0].device if trained else None
        self.flat = {dtype: torch.zeros(sum(own), dtype=dtype, device=device) for dtype, own in sizes.items()}
        self.rooms = self._views(self.flat)

    def taken(self) -> list[Tensor]:
        """A copy, one view for each tensor: whoever is given one may keep it."""
        return self._views({dtype: value.clone() for dtype, value in self.flat.items()})

    def _views(self, flat: dict[torch.dtype, Tensor]) -> list[Tensor]:
        pieces = {dtype: iter(value.split(self.sizes[dtype])) for dtype, value in flat.items()}
        return [next(pieces[value.dtype]).view(value.shape) for value in self.trained]


class Weights:
    """The tensors of a stack's blocks as they are at this moment, and what of them is part of a recording."""

    def __init__(self, blocks: Sequence[FusedBlock], parts: Sequence[BlockLayers]) -> None:
        self.parts, self.programs = parts, [block.spec.program for block in blocks]
        self.tensors = [block.tensors(own) for block, own in zip(blocks, parts, strict=True)]
        places = [value for own in self.tensors for value in own]
        self.all = [value for value in places if value is not None]
        self.lay = self.addresses()
        self.scaled: list[tuple[object, float]] = [
            (part.scale, part.dropout) for own in parts for group in own.groups for part in group
        ]
        behind = [part for own in parts for part in own.bottlenecks]
        self.scaled += [((part.activation, part.scale), part.dropout) for part in behind]
        self.modes = [(block.training, *block.spec.probabilities) for block in blocks]
        self.called = [core.settings for block in blocks for core in block.spec.called]
        self.draws = any(block.training and core.draws for block in blocks for core in block.spec.called)
        self.recorded = (
            [id(value) for value in places],  # of None too: an update may be passed by
            self.lay,
            [value.requires_grad for value in self.all],
            self.scaled,
            self.modes,
            self.called,
        )
        self.alike = len({block.training and block.spec.attention_dropouts for block in blocks}) == 1
        self.guards: Guards | None = None  # see `current`

    def current(self, blocks: Sequence[FusedBlock]) -> bool:
        """Whether these are still the tensors of `blocks`, and what is part of a recording is as it was."""
        guards = self.guards
        if guards is None or not guards.hold(blocks):
            guards = Guards(blocks)
            if self.recorded != Weights(blocks, [block.linears() for block in blocks]).recorded:
                return False
            self.guards = guards
        # past what draws dropout, which would be shown every read of hundreds of tensors
        with torch._C.DisableTorchFunction():
            return (
                self.addresses() == self.lay
                and [value.requires_grad for value in self.all] == self.recorded[2]
            )

    def addresses(self) -> list[int]:
        """Where the tensors lie now."""
        return [value.data_ptr() for value in self.all]

    @cached_property
    def trained(self) -> list[Tensor]:
        """Those that train."""
        return [value for value in self.all if value.requires_grad]

    @cached_property
    def drops(self) -> bool:
        """Whether anything drops out."""
        own = any(dropout for _, dropout in self.scaled) or self.draws
        return own or any(training and any(others) for training, *others in self.modes)

    @cached_property
    def undrawn(self) -> Sequence[Draws]:
        """What is drawn where nothing drops out."""
        return [
            Draws.nothing(parts, program) for parts, program in zip(self.parts, self.programs, strict=True)
        ]
