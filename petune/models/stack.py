"""A stack: the blocks of one encoder or decoder as one module that owns the loop over them.

It takes the place of the model's module list with the same children under the same names, but iterates as a single block: Hugging Face's
own forward then calls it once, with masks and positions already made, and everything that happens between blocks has one home.
Code that iterates `model.layers` itself therefore sees one element; index it, or read `blocks`, to reach a block. The file has a little
over 300 lines, as what a stack meets (ladders, wires, edges) is described beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from petune.errors import UsageError
from petune.models.spec import Family, StackName, StackRule, stack_paths
from petune.rng.context import Running, running
from petune.rng.dropout import drawing

Call = dict[str, Any]  # a block's arguments by name; "hidden_states" is always there


class Ladder(Protocol):
    """A narrow network that climbs beside the blocks (see methods/side.py). All three run with gradients on."""

    def begin(self, call: Call, arrived: Call | None) -> tuple[Call, Call]:
        """Split what enters the stack into the backbone's call and the ladder's own; `arrived` is its carry from an earlier stage."""
        ...

    handed: Tensor | None  # an encoder's side state, on its way to the decoder's ladder

    def step(self, index: int, hidden: Tensor, call: Call) -> Call:
        """One level: mix the output of block `index`, [batch, seq, hidden], into the side state and advance it."""
        ...

    def end(self, hidden: Tensor, call: Call) -> Tensor:
        """What leaves the stack in place of the last block's output, same shape."""
        ...


@dataclass(frozen=True)
class Carried:
    """What travels from one pipeline stage to the next: a block's carry, and the ladder's own where there is one."""

    backbone: Call
    side: Call | None


class Wire(Protocol):
    """The ends of a stack that goes on in another process."""

    def receive(self) -> Carried | None:
        """What the stage before has sent; None where this stage begins the stack."""
        ...

    ends: bool  # whether the stack ends on this stage, and is left as it always is; nothing is sent then

    def send(self, carried: Carried) -> None:
        """Take what the next stage needs."""
        ...


class Edges(Protocol):
    """How a call enters and leaves a stack whose activations are cut across ranks. Hidden states outside are always whole."""

    def enter(self, stack: Stack, call: Call) -> tuple[Call, Running]:
        """The call as this rank's blocks see it, and where that lies in the whole."""
        ...

    def enter_side(self, stack: Stack, call: Call, here: Running) -> Call:
        """The same for a ladder's call; `here` as `enter` gave it."""
        ...

    def part(self, hidden: Tensor, here: Running) -> Tensor:
        """This rank's part of whole hidden states that every rank has."""
        ...

    def leave(self, hidden: Tensor, here: Running) -> Tensor:
        """Hidden states [batch, part of the sequence, width] made whole again."""
        ...


class Whole(Protocol):
    """A way through all blocks of a stack at once, where no ladder climbs beside them."""

    def __call__(self, stack: Stack, call: Call, here: Running) -> Call | None:
        """`call` advanced by every block, or None where they have to run one by one."""
        ...


class Stack(nn.ModuleList):
    """The blocks of one stack, called as one block: receive -> enter -> blocks, the ladder's step beside each -> leave -> send.

    With `ladder`, `edges` and `wire` None it computes exactly what the plain list did. Children keep their numbers in the whole model, also
    where a stage holds only some of them. With `recompute`, activations inside a block are computed again in the backward pass.
    """

    wire: Wire | None = None
    edges: Edges | None = None
    whole: Whole | None = None
    recompute = False
    begins: RemovableHandle | None = None  # the hook on the module that holds the stack
    for_fusing = False  # nobody but the fuse pass has asked for it

    def __init__(self, blocks: nn.ModuleList, rule: StackRule, name: StackName) -> None:
        super().__init__(list(blocks))
        self.training = blocks.training
        self.plain = type(blocks), {name: value for name, value in blocks.__dict__.items() if name != "_modules"}
        self.rule, self.name = rule, name
        self.climbs = True  # False: the ladder is passed by, see methods.without_tuning
        parameters = inspect.signature(type(blocks[0]).forward).parameters.values()
        self.arguments = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")
        attention_type = getattr(blocks[0], "attention_type", None)
        if attention_type is not None:  # the model's forward reads it off the element to choose a mask
            self.attention_type = attention_type

    @property
    def numbered(self) -> list[tuple[int, nn.Module]]:
        """The blocks that are here, with their numbers in the whole model."""
        return [(int(name), child) for name, child in self.named_children() if name.isdigit()]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks themselves, in order."""
        return [child for name, child in self.named_children() if name.isdigit()]

    @property
    def ladder(self) -> Ladder | None:
        """The side network, or None."""
        return cast("Ladder | None", self._modules.get("side")) if self.climbs else None

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else self.blocks[index]

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks that are here; arguments and result are those of one block."""
        call: Call = dict(zip(self.arguments, args, strict=False)) | kwargs
        self._refuse_their_checkpointing(call)
        arrived = self.wire.receive() if self.wire else None
        if arrived is not None:
            call |= arrived.backbone
        call, here = self.edges.enter(self, call) if self.edges else (call, running())
        ladder, side = self.ladder, None
        if ladder is not None:
            call, side = self._begin_ladder(ladder, call, arrived.side if arrived else None, here)
        elif self.whole is not None and (advanced := self.whole(self, call, here)) is not None:
            return self._go_on(advanced, None, here)
        for index, block in self.numbered:
            with nullcontext() if ladder is None else torch.no_grad():
                call = self._maybe_again(self.step, index, block, call, here)
            if side is not None:
                side = self._maybe_again(self._climb, index, call["hidden_states"], side, here)
        return self._go_on(call, side, here)

    def _refuse_their_checkpointing(self, call: Call) -> None:
        """Raise UsageError for Hugging Face's gradient checkpointing where it cannot be right.

        It knows nothing of what happens at the edges of a cut stack, and its reentrant form loses encoder states, which are keywords here.
        """
        theirs = [block for _, block in self.numbered if getattr(block, "gradient_checkpointing", False)]
        if theirs and (self.edges is not None or self.wire is not None):
            remedy = "leave it off and let the stacks recompute: gradient_checkpointing: true in a recipe, memory='input' in petune.wrap"
            problem = "the model's own gradient checkpointing is on, which knows nothing of what happens at this stack's edges"
            raise UsageError(problem, remedy=remedy)
        settings = getattr(getattr(theirs[0], "_gradient_checkpointing_func", None), "keywords", {}) if theirs else {}
        if settings.get("use_reentrant") and self.training and call.get("encoder_hidden_states") is not None:
            remedy = 'call gradient_checkpointing_enable({"use_reentrant": False})'
            raise UsageError("reentrant gradient checkpointing cannot go back to the encoder", where=self.name, remedy=remedy)

    def _begin_ladder(self, ladder: Ladder, call: Call, arrived: Call | None, here: Running) -> tuple[Call, Call]:
        if arrived is not None and self.edges is not None:
            arrived = arrived | {"hidden_states": self.edges.part(arrived["hidden_states"], here)}
        with drawing(replace(here, site=f"{self.name}.side", drawn=0)):
            call, side = ladder.begin(call, arrived)
        return call, self.edges.enter_side(self, side, here) if self.edges is not None else side

    def _go_on(self, call: Call, side: Call | None, here: Running) -> Any:
        """Hand over to the next stage or end the stack; what a block returns."""
        if self.wire is not None and not self.wire.ends:
            self.wire.send(self._carried(call, side, here))
        else:
            call = call | {"hidden_states": self._end(call["hidden_states"], side, here)}
        _at(f"after {self.name}")
        carried = tuple(call.get(name) for name in self.rule.carry)
        return carried if len(carried) > 1 else carried[0]

    def _end(self, hidden: Tensor, side: Call | None, here: Running) -> Tensor:
        """What leaves the stack, whole."""
        ladder, edges = self.ladder, self.edges
        if side is not None and ladder is not None:
            with drawing(replace(here, site=f"{self.name}.end", drawn=0)):
                hidden = ladder.end(hidden, side)
            if edges is not None and ladder.handed is not None:
                ladder.handed = edges.leave(ladder.handed, here)
        return hidden if edges is None else edges.leave(hidden, here)

    def _carried(self, call: Call, side: Call | None, here: Running) -> Carried:
        """What a later stage needs of this one, hidden states whole."""

        def whole(part: Call) -> Call:
            found = {name: part.get(name) for name in self.rule.carry}
            if self.edges is not None:
                found["hidden_states"] = self.edges.leave(part["hidden_states"], here)
            return found

        return Carried(whole(call), None if side is None else whole(side))

    def _maybe_again(self, step: Any, *args: Any) -> Call:
        """`step(*args)`, with its activations kept or, with `recompute`, only its inputs."""
        if self.recompute and torch.is_grad_enabled():
            return cast("Call", checkpoint(step, *args, use_reentrant=False))
        return cast("Call", step(*args))

    def step(self, index: int, block: nn.Module, call: Call, here: Running) -> Call:
        """`call` advanced by one block: what the family's table names as carry is replaced by what the block returned."""
        with drawing(self.at(index, here)):
            return call | carried_by(self.rule, run_block(block, call))

    def at(self, index: int, here: Running) -> Running:
        """`here` inside a block."""
        return replace(here, site=f"{self.name}.{index}", drawn=0)

    def _climb(self, index: int, hidden: Tensor, side: Call, here: Running) -> Call:
        """The ladder's step beside block `index`."""
        assert self.ladder is not None
        with drawing(replace(here, site=f"{self.name}.side.{index}", drawn=0)):
            return self.ladder.step(index, hidden, side)


def _at(site: str) -> None:
    """Name the place outside the stacks that is running from here on: a pipeline's stage may have skipped what came before."""
    now = running()
    if now.key is not None:
        now.site, now.drawn = site, 0


class Begins:
    """Hook before the module that holds a stack."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, owner: nn.Module, args: Any) -> None:
        """Name the place."""
        _at(f"before {self.name}")


def run_block(block: nn.Module, call: Call) -> Any:
    """Call `block`; hidden states go by position, where recorders of hidden states look for them."""
    return block(call["hidden_states"], **{name: value for name, value in call.items() if name != "hidden_states"})


def carried_by(rule: StackRule, output: Any) -> Call:
    """The carry of a block's output, by name."""
    return dict(zip(rule.carry, output if isinstance(output, tuple) else (output,), strict=False))


def unownable(model: nn.Module) -> str | None:
    """Why a stack cannot own the loop over this model's blocks, or None: it is handed the arguments of one block for all of them."""
    config = getattr(model, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        return f"its blocks have mixed attention types: {', '.join(sorted(kinds))}"
    for side in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if getattr(config, side, None):
            return f"it drops whole layers: config.{side} = {getattr(config, side)}"
    return None


def own_stacks(model: nn.Module, family: Family) -> Mapping[StackName, Stack]:
    """Put a `Stack` in the place of each of the model's module lists of blocks and return them by name; idempotent.

    Raises UsageError where `unownable` has a reason.
    """
    if (reason := unownable(model)) is not None:
        setting = reason.rpartition(": ")[2].partition(" = ")[0]
        remedy = f"set {setting} = 0" if setting.startswith("config.") else "train it in one process"
        raise UsageError(f"this {type(model).__name__} is not supported here: {reason}", remedy=remedy)
    stacks: dict[StackName, Stack] = {}
    for name, path in stack_paths(model, family).items():
        blocks = model.get_submodule(path)
        if not isinstance(blocks, Stack):
            blocks = Stack(cast("nn.ModuleList", blocks), family.stacks[name], name)
            model.set_submodule(path, blocks)
            blocks.begins = model.get_submodule(path.rpartition(".")[0]).register_forward_pre_hook(Begins(name))
        stacks[name] = blocks
    return stacks


def stacks_in(model: nn.Module) -> dict[str, Stack]:
    """The stacks that are in a model, by their full names."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Stack)}


def disown_stacks(model: nn.Module, which: Callable[[Stack], bool] = lambda stack: True) -> None:
    """Put the module lists back where `own_stacks` put stacks, with no hook left; `which` chooses among them."""
    for path, stack in stacks_in(model).items():
        if not which(stack):
            continue
        if stack.begins is not None:
            stack.begins.remove()
        kind, attributes = stack.plain
        blocks = kind.__new__(kind)
        blocks.__dict__ = attributes | {"training": stack.training, "_modules": {str(n): block for n, block in stack.numbered}}
        model.set_submodule(path, blocks)
