"""What one stage of a pipeline holds: the whole model's module tree, with everything that works on another
stage taken out of it.

A stage runs Hugging Face's own forward around its blocks, so masks, positions and rotary embeddings are made
where they are used, and no family needs code of its own. Modules whose parameters belong elsewhere are
replaced by ones without parameters that pass their input by (norms, heads) or make zeros of the right shape
(embeddings); what they compute is replaced by what arrives. Names of what stays do not change. Tensors that
several stages hold are tied embeddings (tables where a stack begins, a head on the last stage), and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models.behind import embeds, spine_of
from petune.models.copied import copied
from petune.models.spec import Family, StackName, StackRule, stack_paths
from petune.models.stack import Stack, own_stacks
from petune.models.tuned_linear import TunedModule
from petune.parallel.pipeline.stage_io import (
    MADE_ANEW,
    STATES,
    TRAVELS,
    EncoderHandOff,
    Ends,
    Slot,
    StageWire,
)
from petune.parallel.plan import Stage

ATTRIBUTE = "petune_stage"  # where `cut_stage` leaves its Ends on a model
# beside a stack and no embedding: BART's norm and OPT's way to the blocks' width, which work before it, and
# OPT's way back, which works behind it
OPENERS, CLOSERS = ("layernorm_embedding", "project_in"), ("project_out",)
LOGITS_BIAS = "final_logits_bias"  # BART adds this buffer [1, vocabulary] to what its head gives


# ---------------------------------------------------------------- in the place of what is elsewhere


class Zeros(nn.Module):
    """In the place of an embedding: ids [b, s] -> zeros [b, s, width], which take no memory; of position_ids
    where a mask comes before them. weight: without rows, in the dtype of the table."""

    weight: Tensor

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.width, self.num_embeddings = embedding.embedding_dim, embedding.num_embeddings
        like = torch.empty(0, dtype=embedding.weight.dtype)  # moves with the model, wherever the table is
        self.register_buffer("weight", like, persistent=False)

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros in the dtype of the table, on the ids' device."""
        ids = ids if kwargs.get("position_ids") is None else kwargs["position_ids"]
        return torch.zeros((), dtype=self.weight.dtype, device=ids.device).expand(*ids.shape, self.width)


class PassBy(nn.Module):
    """In the place of a norm or a head: gives back its input."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The first argument."""
        return hidden


class Outline(nn.Module):
    """In the place of what makes hidden states of pictures or sounds, or of another width: zeros of the shape
    it would have given, which take no memory. What else the model asks of it its copy on the meta device
    answers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # not a child, whose tensors would count as here
        self.__dict__["copy"] = copied(module).to("meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["copy"], name)

    def forward(self, given: Tensor, **kwargs: Any) -> Tensor:
        """Zeros in the dtype and the shape of the copy's answer, on the device of what is given."""
        found: Tensor = self.copy(given.to("meta"), **kwargs)
        return torch.zeros((), dtype=found.dtype, device=given.device).expand(found.shape)


class NoBlocks(nn.Module):
    """In the place of a stack of which no block is here. Iterates as one block, as a Stack does, which gives
    back its input."""

    def __init__(self, rule: StackRule) -> None:
        super().__init__()
        self.others = len(rule.carry) - 1 + rule.besides

    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    def __getitem__(self, index: slice) -> NoBlocks:
        return self

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hidden states as they came, and nothing for the rest of the carry."""
        return (hidden_states, *[None] * self.others) if self.others else hidden_states


# ---------------------------------------------------------------- cutting


def cut_stage(model: nn.Module, family: Family, stage: Stage, first: bool, last: bool) -> Ends:
    """Reduce a whole model to one stage, in place, and leave the returned Ends on it as `model.petune_stage`.

    Works on meta tensors and talks to nobody. Raises UsageError for a model with a part of which it cannot be
    told on which stage it works, or whose blocks hand on what is not known.
    """
    stacks = own_stacks(model, family)
    spans = {name: stage.blocks.get(name, (0, 0)) for name in stacks}  # [start, end) of the blocks here
    for name, stack in stacks.items():
        for carried in stack.rule.carry:
            if carried not in TRAVELS + MADE_ANEW:
                what = f"a pipeline does not know the shape of what blocks of the {name} hand on"
                raise UsageError(what, found=carried)
    ends = _ends(stacks, spans, first, last)
    ends.splits &= not any(isinstance(one, TunedModule) for one in model.modules())
    paths = stack_paths(model, family)
    around = {name: path.rpartition(".")[0] for name, path in paths.items()}
    signal = () if family.signal is None else family.signal.embeddings
    places = {path: (stacks[name], *spans[name]) for name, path in paths.items()}
    _take_out_the_rest(model, places, signal, first, last)
    if ends.crossing is not None:
        model.get_submodule(around["encoder"]).register_forward_hook(ends.crossing)
    for name, stack in stacks.items():
        _take_out_blocks(model, paths[name], stack, spans[name])
        if name in ends.wires:
            stack.wire = ends.wires[name]
    setattr(model, ATTRIBUTE, ends)
    return ends


def ends_of(model: nn.Module) -> Ends:
    """What `cut_stage` has left on a model."""
    return cast("Ends", getattr(model, ATTRIBUTE))


def _ends(
    stacks: Mapping[StackName, Stack], spans: Mapping[StackName, tuple[int, int]], first: bool, last: bool
) -> Ends:
    """Which stacks begin, end or go on here, and the slots on either side."""
    ends = Ends()
    incoming: list[Slot] = []
    outgoing: list[Slot] = []
    for name, (start, end) in spans.items():
        if start == end:
            continue
        stack = stacks[name]
        wire = ends.wires[name] = StageWire(start == 0, end == len(stack))
        laddered = "side" in stack._modules
        # tables of positions are put through layers outside the blocks too
        ends.splits &= (first or not wire.begins) and stack.rule.positions is None
        carry = [carried for carried in stack.rule.carry if carried in TRAVELS]
        slots = [Slot(name, carried, side) for side in (False, True)[: 1 + laddered] for carried in carry]
        incoming += [] if wire.begins else slots
        outgoing += [] if wire.ends else slots
    if len(spans) > 1:
        here = ends.wires.get("encoder")
        ends.crossing = EncoderHandOff(arrives=here is None, leaves=not last and (here is None or here.ends))
        incoming += [STATES] if ends.crossing.arrives else []
        outgoing += [STATES] if ends.crossing.leaves else []
    ends.incoming, ends.outgoing = tuple(incoming), tuple(outgoing)
    return ends


def _take_out_blocks(model: nn.Module, path: str, stack: Stack, span: tuple[int, int]) -> None:
    """Keep the blocks of `span` and the ladder's levels beside them."""
    start, end = span
    ladder: Any = stack._modules.get("side")
    if ladder is not None:
        ladder.keep(start, end)
    for index, _ in stack.numbered:
        if not start <= index < end:
            stack.give_away(index)
    if start == end:
        stack._modules.pop("side", None)
        model.set_submodule(path, NoBlocks(stack.rule))


def _take_out_the_rest(
    model: nn.Module,
    stacks: dict[str, tuple[Stack, int, int]],
    signal: tuple[str, ...],
    first: bool,
    last: bool,
) -> None:
    """Replace what lies outside the stacks and works on another stage. signal: names of the modules that make
    hidden states of pictures or sounds.

    Embeddings, these modules, and OPENERS, work before the stack they lie beside, or before the first if they
    lie further up; the tail after its stack; everything else outside, the heads, after the last one.
    """
    spine = spine_of(path.rpartition(".")[0] for path in stacks)
    for path in sorted(spine):
        owner = model.get_submodule(path)
        if not last and (bias := owner._buffers.get(LOGITS_BIAS)) is not None:
            owner._buffers[LOGITS_BIAS] = bias.new_zeros(())
        if any(value is not None for value in owner._parameters.values()):
            what = f"it cannot be told on which stage {type(owner).__name__} uses its own tensors"
            raise UsageError(what, where=path or "the model")
        beside = next((stack for stack in stacks if stack.rpartition(".")[0] == path), None)
        for name, child in list(owner.named_children()):
            full = f"{path}.{name}" if path else name
            if full in stacks or full in spine or next(child.parameters(), None) is None:
                continue
            opens = name in signal or embeds(child)
            further_up = first if opens else last
            if further_up if beside is None else _works_here(name, child, opens, full, *stacks[beside]):
                continue
            if name in signal or (name in OPENERS and isinstance(child, nn.Linear)):  # another width leaves
                owner._modules[name] = Outline(child)
            else:
                _replace(owner, name, child)


def _works_here(
    name: str, child: nn.Module, opens: bool, where: str, stack: Stack, start: int, end: int
) -> bool:
    """Whether a module that lies beside a stack works on this stage; opens: it makes hidden states."""
    if name == stack.rule.tail or name in CLOSERS:
        return start < end == len(stack)
    if stack.rule.positions is not None and name in stack.rule.positions.makers:
        return start < end
    if opens or name in OPENERS:
        return start == 0 < end
    what = "it cannot be told whether this module works before the blocks or after them"
    remedy = "use dp or tp, which keep the modules around the blocks on every rank"
    raise UsageError(what, where=where, found=type(child).__name__, remedy=remedy)


def _replace(owner: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the topmost modules that hold parameters of their own."""
    if any(value is not None for value in module._parameters.values()):
        owner._modules[name] = Zeros(module) if isinstance(module, nn.Embedding) else PassBy()
        return
    for own, child in list(module.named_children()):
        _replace(module, own, child)
