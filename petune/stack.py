"""A stack: the blocks of one encoder or decoder as one module that owns the loop over them.

It takes the place of the model's module list with the same children under the same names, but iterates as a single block: Hugging Face's
own forward then calls it once, with masks and positions already made, and everything that happens between blocks has one home.
Code that iterates `model.layers` itself therefore sees one element; index it, or read `blocks`, to reach a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.sites import Family, StackName, StackRule, stack_paths

Call = dict[str, Any]  # a block's arguments by name; "hidden_states" is always there


class Ladder(Protocol):
    """A narrow network that climbs beside the blocks (see methods/side.py). All three run with gradients on."""

    def begin(self, call: Call) -> tuple[Call, Call]:
        """Split what enters the stack into the backbone's call and the ladder's own."""
        ...

    def step(self, index: int, hidden: Tensor, call: Call) -> Call:
        """One level: mix the output of block `index`, [batch, seq, hidden], into the side state and advance it."""
        ...

    def end(self, hidden: Tensor, call: Call) -> Tensor:
        """What leaves the stack in place of the last block's output, same shape."""
        ...


class Stack(nn.ModuleList):
    """The blocks of one stack, called as one block. With `ladder` None it computes exactly what the plain list did."""

    def __init__(self, blocks: nn.ModuleList, rule: StackRule) -> None:
        super().__init__(list(blocks))
        self.training = blocks.training
        self.rule = rule
        self.climbs = True  # False: the ladder is passed by, see methods.without_tuning
        parameters = inspect.signature(type(blocks[0]).forward).parameters.values()
        self.arguments = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")
        attention_type = getattr(blocks[0], "attention_type", None)
        if attention_type is not None:  # the model's forward reads it off the element to choose a mask
            self.attention_type = attention_type

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
        """Run every block; arguments and result are those of one block."""
        call: Call = dict(zip(self.arguments, args, strict=False)) | kwargs
        ladder = self.ladder
        if ladder is None:
            for block in self.blocks:
                call = self.step(block, call)
        else:
            call, side = ladder.begin(call)
            for index, block in enumerate(self.blocks):
                with torch.no_grad():
                    call = self.step(block, call)
                side = ladder.step(index, call["hidden_states"], side)
            call["hidden_states"] = ladder.end(call["hidden_states"], side)
        carried = tuple(call.get(name) for name in self.rule.carry)
        return carried if len(carried) > 1 else carried[0]

    def step(self, block: nn.Module, call: Call) -> Call:
        """`call` advanced by one block: what the family's table names as carry is replaced by what the block returned."""
        return call | carried_by(self.rule, run_block(block, call))


def run_block(block: nn.Module, call: Call) -> Any:
    """Call `block`; hidden states go by position, where recorders of hidden states look for them."""
    return block(call["hidden_states"], **{name: value for name, value in call.items() if name != "hidden_states"})


def carried_by(rule: StackRule, output: Any) -> Call:
    """The carry of a block's output, by name."""
    return dict(zip(rule.carry, output if isinstance(output, tuple) else (output,), strict=False))


def own_stacks(model: nn.Module, family: Family) -> Mapping[StackName, Stack]:
    """Put a `Stack` in the place of each of the model's module lists of blocks and return them by name; idempotent.

    Raises UsageError for a model whose forward treats its blocks differently from one another (mixed attention types, layer drop), as a
    stack is handed the arguments of one block only.
    """
    config = getattr(model, "config", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise UsageError(f"{family.name} with mixed attention types is not supported here", found=", ".join(sorted(kinds)))
    for side in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if getattr(config, side, None):
            raise UsageError(f"layer drop is not supported here: config.{side} = {getattr(config, side)}", remedy=f"set config.{side} = 0")
    stacks: dict[StackName, Stack] = {}
    for name, path in stack_paths(model, family).items():
        blocks = model.get_submodule(path)
        if not isinstance(blocks, Stack):
            blocks = Stack(cast("nn.ModuleList", blocks), family.stacks[name])
            model.set_submodule(path, blocks)
        stacks[name] = blocks
    return stacks


def disown_stacks(model: nn.Module) -> None:
    """Put plain module lists back where `own_stacks` put stacks."""
    for path, module in [(path, module) for path, module in model.named_modules() if isinstance(module, Stack)]:
        model.set_submodule(path, nn.ModuleList(module.blocks))
