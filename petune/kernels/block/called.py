"""Cores that a fused block calls as they are: modules of the model's own, which no steps compute, a
gated-delta mixer say.

Such a call is a graph of autograd's inside the node of its block: of a leaf with the same hidden states, and
of leaves with the tensors that train. The node's backward pass goes through that graph by itself. Hooks on
tensors, and whoever waits for gradients of parameters, see the node's gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from petune.kernels.block.scored import ScoredAttention
from petune.models.extension import extend
from petune.models.spec import Attention, LinearAttention, Positions, Role
from petune.models.tuned_linear import bottleneck_of, linear_of
from petune.rng.context import Running, running
from petune.rng.dropout import Drop, drawing

# What a block hands its core by name, and attention with scores besides, beside arguments unknown to itself
_READ, _PLACED = ("attention_mask",), ("position_ids", "position_embeddings")


@dataclass(frozen=True)
class CalledCore:
    """A module that a block calls, and what its family's table says of it."""

    module: nn.Module
    table: Attention

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of its parameters."""
        return tuple(name for name, _ in self.module.named_parameters())

    @property
    def layers(self) -> list[nn.Module]:
        """All modules inside it, and itself."""
        return list(self.module.modules())

    @property
    def tensors(self) -> list[Tensor]:
        """Its parameters as they are at this moment."""
        return [self.module.get_parameter(name) for name in self.names]

    @property
    def settings(self) -> list[object]:
        """What a call reads beside tensors, for the comparison of two moments."""
        linears = (linear_of(layer) for layer in self.layers if isinstance(layer, nn.Linear))
        updates = [(part.scale, part.dropout) for part in linears if part is not None]
        return [[(layer.training, getattr(layer, "p", None)) for layer in self.layers], updates]

    @property
    def draws(self) -> int:
        """How often something drops out in a call while training: of the inputs of updates, in bottlenecks,
        of the probabilities of attention."""
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        parts = [part for layer in layers for part in (linear_of(layer), bottleneck_of(layer))]
        if self.table.positions is not None:
            return self._scoring(self.table.positions)
        scores = None if self.table.drop is None else self.table.drop.rpartition(".")[2]
        own = float(getattr(self.module, scores, 0.0)) if scores else 0.0
        return sum(part is not None and part.dropout > 0 for part in parts) + (own > 0)

    def _scoring(self, positions: Positions) -> int:
        """How often in attention that scores positions: of a table that goes through linears of tokens, in
        these twice."""
        twice = self.table.tabled and bool(getattr(self.module, positions.twice))
        roles: list[Role] = [*self.table.region.sites, *(("q", "k") if twice else ())]
        sites, at = self.table.region.sites, f"{self.table.at}."
        names = [sites[role].removeprefix(at) for role in roles if role != "o"]
        parts = [linear_of(self.module.get_submodule(name)) for name in names]
        drops = [getattr(self.module, name, None) for name in positions.drops]
        return sum(part is not None and part.dropout > 0 for part in parts) + sum(
            isinstance(drop, nn.Dropout) and drop.p > 0 for drop in drops
        )

    def arguments(self, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
        """What a block hands it of its own arguments `given`, but for a table. known: those that the block
        has names for."""
        if self.table.positions is not None:
            return {name: given.get(name) for name in self.table.positions.handed}
        placed = () if isinstance(self.table, LinearAttention) else _PLACED
        others = {name: value for name, value in given.items() if name not in known}
        return {name: given.get(name) for name in (*_READ, *placed)} | others


@dataclass
class CoreCall:
    """One call of a core. batch: rows of equal length; here: where dropout is drawn; autocast: whether the
    caller computes in it, and its dtype; kernels: it may use Triton's. states: of torch's generators as the
    first pass found them, where what drops out is drawn from these."""

    core: CalledCore
    arguments: Mapping[str, Any]
    batch: int
    here: Running
    autocast: tuple[bool, torch.dtype]
    kernels: bool = False
    states: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        core: CalledCore,
        drawn: Sequence[Drop],
        given: Mapping[str, Any],
        known: Sequence[str],
        batch: int,
        kind: str,
        kernels: bool,
    ) -> CoreCall:
        """A call that is running, on a kind of device, with what is `drawn` for it. given, known: see
        `CalledCore.arguments`."""
        here = replace(running(), drawn=0, bases=tuple(drop.base for drop in drawn))
        if drawn and here.segments is not None:  # attention that scores positions, which may be recorded:
            # by index without a key too, as torch's generator has drawn bases then
            here.key, here.numbers = here.key or 0, drawn[0].numbers
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return cls(core, core.arguments(given, known), batch, here, autocast, kernels)

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, table: Tensor | None = None) -> Tensor:
        """What it makes of hidden states [m, width], and of a table [positions, width], with these tensors in
        the place of its own; the same again at every call."""
        enabled, dtype = self.autocast
        # a cache would hold weights that were rounded without a graph
        rounding = torch.autocast(x.device.type, dtype, enabled, cache_enabled=False)
        with self._drawn_alike(x.device), drawing(self.here), rounding:
            hidden = x.reshape(self.batch, -1, x.shape[-1])
            given = {"hidden_states": hidden, **self.arguments}
            if (positions := self.core.table.positions) is not None:
                given[positions.argument] = table
                if self.here.segments is not None:  # else a mask may say what is padding
                    extend(self.core.module, positions.own[""])
                    given["attend"] = ScoredAttention(self.here.segments, self.kernels)
            found = functional_call(self.core.module, dict(tensors), (), given)
        y: Tensor = found[0] if isinstance(found, tuple) else found
        return y.reshape(len(x), -1)

    @contextmanager
    def _drawn_alike(self, device: torch.device) -> Iterator[None]:
        """Have torch's own dropout draw what it has drawn the first time."""
        if self.here.key is not None or not (self.core.module.training and self.core.draws):
            yield
            return
        on_device = device.type == "cuda"
        if not self.states:
            self.states += [torch.get_rng_state()]
            self.states += [torch.cuda.get_rng_state(device)] if on_device else []
            yield
            return
        with torch.random.fork_rng([device] if on_device else []):
            torch.set_rng_state(self.states[0])
            if on_device:
                torch.cuda.set_rng_state(self.states[1], device)
            yield


# What a graph is held by: what came out of it, the leaves that went in, and those of what trains
TracedTensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class BoundCore:
    """A call of a core with the tensors that its block is given for it, in the order of its names."""

    call: CoreCall
    tensors: Sequence[Tensor]

    @cached_property
    def trained(self) -> list[int]:
        """Which of its tensors train."""
        return [at for at, value in enumerate(self.tensors) if value.requires_grad]

    def plain(self, x: Tensor, *table: Tensor) -> Tensor:
        """What it makes of hidden states [m, width], and of a table, without a graph."""
        return self.call({}, x, *table).to(x.dtype)

    def traced(self, *inputs: Tensor) -> TracedTensors:
        """The same with a graph, whose first tensor it is."""
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in inputs]
            own = [self.tensors[at].detach().requires_grad_() for at in self.trained]
            names = [self.call.core.names[at] for at in self.trained]
            return self.call(dict(zip(names, own, strict=True)), *leaves), *leaves, *own

    def gradients(
        self, graph: TracedTensors, dy: Tensor, asked: Sequence[bool], needs: Sequence[bool]
    ) -> tuple[list[Tensor | None], dict[int, Tensor]]:
        """(the gradients of the inputs, where they are `asked` for; those of its tensors that train and whose
        are needed, by their place), for that of what came out. The graph stays."""
        y, *given = graph
        inputs, own = given[: len(asked)], given[len(asked) :]
        places = [at for at in self.trained if needs[at]]
        leaves = [own[self.trained.index(at)] for at in places]
        wanted = [*(one for one, ask in zip(inputs, asked, strict=True) if ask), *leaves]
        if not wanted:
            return [None] * len(inputs), {}
        found = iter(torch.autograd.grad(y, wanted, dy.to(y.dtype), retain_graph=True, allow_unused=True))
        grads: list[Tensor | None] = []
        for one, ask in zip(inputs, asked, strict=True):
            grad = next(found) if ask else None
            grads.append(torch.zeros_like(one) if ask and grad is None else grad)
        learned = {at: grad for at, grad in zip(places, found, strict=True) if grad is not None}
        return [None if grad is None else grad.contiguous() for grad in grads], learned
