"""A fused block: Hugging Face's own block, whose training forward is one autograd node with both passes
written by hand.

The class of a block is exchanged for a subclass of it, so names, hooks and state stay. A call that the node
cannot do (a cache, attention probabilities asked for) goes to the block's own forward, and the reason is said
once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from operator import is_not
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from petune.kernels.block import attention as attending
from petune.kernels.block.attention import Backend, How
from petune.kernels.block.call import BlockLayers, Call, Draws, Spec
from petune.kernels.block.called import CoreCall
from petune.kernels.block.distance import by_distance, made_by
from petune.kernels.block.drawing import Places, drawn
from petune.kernels.block.exchange_steps import shared
from petune.kernels.block.halves import BlockPass, Halves, calls_of_halves
from petune.kernels.block.known_layers import exchanged, known_bottleneck, known_part
from petune.kernels.block.layout import BIAS, MASKS, MEMORY, Layout, angles_of, memory_in_autocast
from petune.kernels.block.lent_steps import OF_ONE, lend, met
from petune.kernels.block.node import passed
from petune.kernels.block.sublayers import begun
from petune.kernels.block.watchers import hooks_act
from petune.log import say
from petune.models.exchange import exchange_of
from petune.models.tuned_linear import class_of, made_of
from petune.rng.context import bound, bound_to, running
from petune.rng.dropout import drawing


class FusedBlock(nn.Module):
    """Mixed in before the class of a block; `spec` says what it computes."""

    spec: Spec

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's own arguments and result."""
        given = memory_in_autocast(dict(zip(self.spec.arguments, args, strict=False)) | kwargs)
        reason = self.declines(hidden_states, given)
        if reason is None:
            return self._fused(hidden_states, given)
        generates = given.get("past_key_values") is not None and not torch.is_grad_enabled()
        if reason not in self.spec.said and not generates:
            self.spec.said.add(reason)
            say(f"kernels: {type(self).__name__} runs unfused: {reason}")
        bias = given.get(BIAS)
        if isinstance(bias, Tensor) and bias.dim() == 2:  # by distance, as another block made it
            args, kwargs = (), given | {BIAS: by_distance(bias, hidden_states.shape[1])[None]}
        cached = given.get("past_key_values") is not None  # which a second forward would fill a second time
        return self._unfused(super().forward, cached, hidden_states, *args, **kwargs)

    def _unfused(self, own: Callable[..., Any], cached: bool, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward, computed again in the backward pass where the block is not to keep
        everything."""
        if self.spec.rung.keep == "all" or cached or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        here = replace(running())

        def again(*args: Any, **kwargs: Any) -> Any:
            with drawing(replace(here)):
                return own(*args, **kwargs)

        return checkpoint(again, *args, use_reentrant=False, **kwargs)

    def unready(self, device: torch.device) -> str | None:
        """Why every call at this moment goes to the block's own forward, or None."""
        dtype = self.spec.computes_in(device.type)
        if vars(self).get("_is_replica"):
            return "nn.DataParallel runs copies of it, whose layers it does not know"
        if any(map(is_not, map(exchange_of, self.spec.attentions), self.spec.exchanges)):
            return "its attention exchanges tokens with other ranks otherwise than when it was fused"
        if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
            return (
                f"autocast computes in {_short(torch.get_autocast_dtype(device.type))}, weights are"
                f" {_short(dtype)}"
            )
        if (reason := self.spec.overflows(dtype)) is not None:
            return reason
        if begun(self.spec.vectors, self.spec.program.sublayers):
            return "a vector that scales its sub-layers trains, and did not when it was fused"
        hooked = self._hooked()
        return None if hooked is None else f"somebody waits for its {hooked} to be called (a hook)"

    def _hooked(self) -> str | None:
        """The module inside that has a hook; looked for anew where one has been registered anywhere since, or
        was found."""
        count, found = self.spec.hooked
        if count != RemovableHandle.next_id or found is not None:
            found = next((name for name, module in self.spec.inside if hooks_act(module)), None)
            self.spec.hooked = RemovableHandle.next_id, found
        return found

    def declines(self, hidden: Tensor, given: dict[str, Any]) -> str | None:
        """Why this call goes to the block's own forward, or None."""
        dtype = self.spec.computes_in(hidden.device.type)
        if given.get("past_key_values") is not None:
            return "a cache of keys and values is in use"
        if given.get("output_attentions"):
            return "attention probabilities are asked for"
        if given.get("output_router_logits") and self.spec.mixtures:
            return "the scores of its routers are asked for (output_router_logits)"
        for mask in (given.get(name) for name in MASKS if self.spec.program.attends):
            if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 4):
                return (
                    f"it is handed a {type(mask).__name__} as its mask, no tensor [batch, heads, queries,"
                    " keys]"
                )
        memory, inputs = given.get(MEMORY), self.spec.program.inputs
        if (memory is None) == ("memory" in inputs):
            what = "is handed no hidden states of" if memory is None else "attends to"
            return f"it {what} an encoder"
        if "bias" in inputs and (reason := self._declines_bias(given.get(BIAS))) is not None:
            return reason
        if "table" in inputs and self.table(given) is None:
            return "it is handed no table of positions"
        others = (core.table.positions for core in self.spec.called)
        if any(one is not None and given.get(one.queries) is not None for one in others):
            return "its queries are made of others than its hidden states"
        if self.spec.program.meets and isinstance(read := met(self.spec, hidden, given), str):
            return read
        if any(self.spec.exchanges) and not running().sizes:
            return "its sequence is not cut in this call"
        for states in (hidden, memory):
            if states is not None and states.dtype != dtype:
                return f"hidden states are {_short(states.dtype)}, blocks compute in {_short(dtype)}"
        return self.unready(hidden.device)

    def _declines_bias(self, bias: Tensor | None) -> str | None:
        if bias is None and self.spec.distances is None:
            return "it is handed no bias of relative positions"
        if bias is None or bias.dim() != 4 or running().segments is None:
            return None
        return "padding is left out, and its bias is one of padded rows"

    def _fused(self, hidden: Tensor, given: dict[str, Any]) -> Any:
        if self.spec.goes_in_halves(len(hidden), given):
            halved, tensors = self.halved(hidden, given)
            return self.result(Halves.apply([halved], hidden, *tensors), None)  # type: ignore[no-untyped-call]  # torch's
        parts, memory = self.parts(), given.get(MEMORY)
        layout = Layout.of(hidden, memory, self.spec.by_sequence)
        bias = self.bias(given.get(BIAS), layout.row)  # of one shape, wherever padding is
        call = self._call_of(parts, layout, hidden, given, bias)
        inputs = self.inputs(hidden, memory, bias, self.table(given), given)
        out, lent = passed(call, inputs, self.tensors(parts))
        lend(self.spec, lent, hidden, given)
        return self.result(out, bias)

    def _call_of(
        self,
        parts: BlockLayers,
        layout: Layout,
        hidden: Tensor,
        given: dict[str, Any],
        bias: Tensor | None = None,
    ) -> Call:
        masks = tuple(given.get(name) for name in MASKS)
        draws = self.draws(parts, Places(layout, hidden, given.get(MEMORY)))
        program = self.spec.program
        pairs = program.sizes.head_dim, program.pairs
        angles = angles_of(given["position_embeddings"], *pairs) if program.rotary else None
        forms = self.forms(hidden, layout, masks, bias)
        call = self.call(parts, self.hows(layout, forms, draws, masks), draws, angles)
        call = replace(call, reach=self._reach(hidden, given)) if program.reach else call
        return replace(call, called=self.core_calls(given, draws, hidden)) if self.spec.called else call

    def _reach(self, hidden: Tensor, given: dict[str, Any]) -> Tensor:
        """What its queries are multiplied by at each place, [p], as the block's own attention rounds it."""
        (core,) = self.spec.program.reach
        assert core.reach is not None
        found = core.reach(self.get_submodule(core.at), given["position_ids"])
        return found.to(self.spec.computes_in(hidden.device.type)).flatten()

    def core_calls(self, given: dict[str, Any], draws: Draws, like: Tensor) -> list[CoreCall]:
        """Of the cores that are called as they are, with hidden states of this form."""
        rest = given, self.spec.arguments, len(like), like.device.type, self.scores(like)
        every = zip(self.spec.called, draws.cores, strict=True)
        return [CoreCall.of(core, drawn, *rest) for core, drawn in every]

    def scores(self, like: Tensor) -> bool:
        """Whether kernels make scores of positions there."""
        unfit = attending.unfit(like.device, self.spec.program.sizes.head_dim)
        return self.spec.ops.name == "triton" and unfit is None

    def halved(self, hidden: Tensor, given: dict[str, Any]) -> tuple[BlockPass, list[Tensor | None]]:
        """Both halves of a call with hidden states of this shape, as it is running, and its tensors."""
        parts, here, kind = self.parts(), replace(running()), hidden.device.type
        tensors = self.tensors(parts)
        rounding = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

        def make() -> tuple[Call, Call]:
            with bound_to(here), rounding:
                return self._calls_of_halves(parts, hidden, given)

        return BlockPass(self.spec, make, len(tensors)), tensors

    def _calls_of_halves(
        self, parts: BlockLayers, hidden: Tensor, given: dict[str, Any]
    ) -> tuple[Call, Call]:
        angles, numbers = given.get("position_embeddings"), running().rows
        apart = angles is not None and len(angles[0]) > 1
        if numbers is None:  # a half does not begin at row 0
            numbers = torch.arange(len(hidden), device=hidden.device)

        def call(rows: slice) -> Call:
            own, cut = hidden[rows], dict(given)
            if angles is not None and apart:
                cut["position_embeddings"] = tuple(angle[rows] for angle in angles)
                cut["position_ids"] = None if (ids := given.get("position_ids")) is None else ids[rows]
            with bound(rows=numbers[rows]):
                return self._call_of(parts, Layout.of(own, None, self.spec.by_sequence), own, cut)

        return calls_of_halves(len(hidden), apart, call)

    @property
    def distances(self) -> Tensor | None:
        """The table of relative positions [buckets, heads] that its bias is made of, or None."""
        if self.spec.distances is None:
            return None
        attention, path = self.spec.distances
        return cast("Tensor", attention.get_submodule(path).weight)

    def bias(self, given: Tensor | None, longest: int) -> Tensor | None:
        """The bias of relative positions: as the block before has handed it on, or made of this one's table
        for rows or segments of at most `longest` tokens; None where there is none."""
        if given is not None or self.spec.distances is None:
            return given
        return made_by(*self.spec.distances, longest, self.spec.program.attends[0].causal)

    def table(self, given: dict[str, Any]) -> Tensor | None:
        """The table of positions that attention scores itself, None where none does."""
        called = (core.table.positions for core in self.spec.called if core.table.tabled)
        return next((given.get(one.argument) for one in called if one is not None), None)

    def inputs(
        self,
        hidden: Tensor,
        memory: Tensor | None,
        bias: Tensor | None,
        table: Tensor | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> list[Tensor]:
        """What the program is given, in its order; given: the arguments of a call, without which what is one
        block's own is left out."""
        own = met(self.spec, hidden, given) if given and self.spec.program.meets else {}
        named = {"x": hidden, "memory": memory, "bias": bias, "table": table, **cast("dict[str, Any]", own)}
        names = (name for name in self.spec.program.inputs if given is not None or name not in OF_ONE)
        return [cast("Tensor", named[name]) for name in names]

    def result(self, out: Tensor, bias: Tensor | None) -> Any:
        """What the block's own forward returns; of several values one that is not known is None."""
        found = tuple({"hidden_states": out, BIAS: bias}.get(name) for name in self.spec.carry)
        return found if len(found) > 1 else out

    def linears(self) -> BlockLayers:
        """The layers as they are at this moment.

        Raises UsageError where a layer has been exchanged for another: which of the two was to be computed
        would be a guess.
        """
        for parent, name, layer in self.spec.homes:
            if parent._modules.get(name) is not layer:
                raise exchanged(name, parent._modules.get(name))
        groups = tuple(
            tuple(part for layer in layers for part in known_part(layer).each) for layers in self.spec.layers
        )
        behind = tuple(known_bottleneck(layer) for layer in self.spec.behind)
        return BlockLayers(groups, behind, tuple(mixture.part() for mixture in self.spec.mixtures))

    def parts(self) -> BlockLayers:
        """`linears`; in training, in their banks, though the model was copied or moved."""
        found = self.linears()
        for at, (bank, parts) in enumerate(
            zip(self.spec.banks, found.groups, strict=True) if torch.is_grad_enabled() else ()
        ):
            if bank is not None and not bank.intact(parts):
                self.spec.banks[at] = bank.again(self.spec.layers[at])
        return found

    def bank_again(self) -> None:
        """Have banks of the weights as they are now, also where they went to the meta device or came back."""
        self.spec.banks = [
            None if bank is None else bank.again(layers)
            for bank, layers in zip(self.spec.banks, self.spec.layers, strict=True)
        ]

    def tensors(self, parts: BlockLayers) -> list[Tensor | None]:
        """What autograd must know of: the tensors of `parts`, those of linears first, then the norms'."""
        behind = [tensor for part in parts.bottlenecks for tensor in part.tensors or (None,) * 4]
        behind += [tensor for mixture in parts.mixtures for tensor in mixture.tensors]
        every = self.spec.sinks, self.spec.vectors, self.spec.norms
        sinks, vectors, norms = ([getattr(*own, None) for own in each] for each in every)
        called = [tensor for core in self.spec.called for tensor in core.tensors]
        linears = [tensor for group in parts.groups for part in group for tensor in part.tensors]
        return linears + behind + sinks + called + vectors + norms

    def call(
        self, parts: BlockLayers, hows: tuple[How, ...], draws: Draws, angles: tuple[Tensor, Tensor] | None
    ) -> Call:
        """A call of these parts."""
        spec = self.spec
        dtype = spec.computes_in(parts.groups[0][0].weight.device.type)
        cut = {number: boundary.here() for number, boundary in spec.boundaries.items()}
        return Call(spec, hows, spec.rung, spec.tile, parts, draws, angles, dtype, cut)

    def hows(
        self,
        layout: Layout,
        forms: Sequence[Backend],
        draws: Draws,
        masks: Sequence[Tensor | None] = (None, None),
    ) -> tuple[How, ...]:
        """How each attention of a call is computed. masks: of the tokens, and of the memory."""
        found = [
            How(
                one.causal,
                one.scale,
                layout.batch,
                layout.segments,
                masks[one.crosses],
                form,
                None if one.drop is None else draws.drops[one.drop],
                layout.memory if one.crosses else None,
                one.window,
                softcap=one.softcap,
            )
            for one, form in zip(self.spec.program.attends, forms, strict=True)
        ]
        return tuple(
            how if exchange is None else shared(how, one, exchange.here())
            for how, one, exchange in zip(found, self.spec.program.attends, self.spec.exchanges, strict=True)
        )

    def forms(
        self,
        hidden: Tensor,
        layout: Layout,
        masks: Sequence[Tensor | None] = (None, None),
        bias: Tensor | None = None,
    ) -> tuple[Backend, ...]:
        """The form of each attention of a call with these hidden states. masks: see `hows`."""
        chances, dense = self.spec.probabilities, bias is not None and bias.dim() == 4
        return tuple(
            "ring"
            if one.exchange is not None and one.exchange.kind == "ring"
            else attending.choose(
                hidden.device,
                hidden.dtype,
                self.spec.program.sizes.head_dim,
                layout.longest,
                segmented=layout.segments is not None or (one.crosses and layout.memory is not None),
                masked=masks[one.crosses] is not None or (dense and one.bias is not None),
                drops=self.training and one.drop is not None and chances[one.drop] > 0,
                plain=self.spec.ops.name == "reference",
                keys=layout.keys if one.crosses else layout.longest if one.gathered else None,
                window=one.window,
                distant=one.bias is not None and not dense,
                capped=bool(one.softcap),
                sinks=one.sinks is not None,
                last=one.gathered and one.causal,
                folded=running().folded,
            ).backend
            for one in self.spec.program.attends
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, made_of(type(self).__bases__[1]), self.__dict__  # its own class is made at run time

    def draws(self, parts: BlockLayers, places: Places) -> Draws:
        """What drops out in a call, drawn in the order in which the block's own forward draws."""
        return drawn(self.spec, parts, places) if self.training else Draws.nothing(parts, self.spec.program)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _blank(form: Any, kind: Any) -> Any:
    made = fused_class(class_of(form, kind))
    return made.__new__(made)


@cache
def fused_class(kind: Any) -> Any:
    """The fused subclass of a block's class."""
    return type(f"Fused{kind.__name__}", (FusedBlock, kind), {"__module__": kind.__module__})
