"""A stack: the blocks of one encoder or decoder, and what happens between them.

It takes the place of the model's module list with the same children under the same names. Hugging Face's own
loop iterates over it and gets a `Port` for each block; in what is done around a block (edges, wires, ladders,
recomputation, dropout) this file is alone. `blocks`, or an index, give the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from petune.errors import UsageError
from petune.models.port import (
    OWN,
    Arguments,
    Elsewhere,
    Found,
    Port,
    Recorded,
    StackPass,
    WrittenArguments,
    alike,
    ends_alone,
    names_of,
    same_numbers,
)
from petune.models.spec import Family, StackName, StackRule, stack_paths
from petune.models.stack_protocols import Beneath, Carried, Edges, LadderLike, Levels, Whole, Wire
from petune.rng.context import Running, running
from petune.rng.dropout import drawing

__all__ = ["Arguments", "Stack"]


class Stack(nn.ModuleList):
    """The blocks of one stack, each run by its port: receive -> enter -> block, the ladder's step beside it,
    ... -> leave -> send.

    Without a ladder, edges and a wire it computes exactly what the plain list did. Children keep their
    numbers in the whole model, also where a stage holds only some of them. With `recompute`, activations
    inside a block are computed again in the backward pass. Called as a module it begins a pass, so that hooks
    before it act then.
    """

    wire: Wire | None = None
    whole: Whole | None = None
    beneath: Beneath | None = None
    levels: Levels | None = None
    recompute = False
    still = False  # its blocks have a forward pass alone: nothing trains in them or before them
    now: StackPass | None = None  # the pass that is on its way
    reached = True  # whether a port was called since the module around the stack was
    shortened = False  # whether that was asked for the last logits alone: see `ends_alone`
    around: tuple[RemovableHandle, ...] = ()  # the hooks on the module that holds the stack
    for_fusing = False  # nobody but the fuse pass has asked for it

    def __init__(self, blocks: nn.ModuleList, rule: StackRule, name: StackName) -> None:
        super().__init__()
        self.training = blocks.training
        self.plain = (
            type(blocks),
            {name: value for name, value in blocks.__dict__.items() if name != "_modules"},
        )
        self.rule, self.name = rule, name
        self.edges: list[Edges] = []  # from the outermost
        self.climbs = True  # False: the ladder is passed by, see methods.without_tuning
        self.elsewhere: dict[int, Elsewhere] = {}
        # by number; a block's class changes when it is fused
        self.arguments = [names_of(type(block)) for block in blocks]
        self.extend(blocks)

    @property
    def numbered(self) -> list[tuple[int, nn.Module]]:
        """The blocks that are here, with their numbers in the whole model."""
        return [
            (int(name), child)
            for name, child in self._modules.items()
            if name.isdigit() and child is not None
        ]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that are here, in order."""
        return [child for _, child in self.numbered]

    @property
    def ladder(self) -> LadderLike | None:
        """The side network, or None."""
        return cast("LadderLike | None", self._modules.get("side")) if self.climbs else None

    def give_away(self, number: int) -> None:
        """Let go of a block, which another process runs; its port returns what it is handed."""
        self.elsewhere[number] = Elsewhere(self._modules.pop(str(number)))

    def __len__(self) -> int:
        """The number of blocks, wherever they live."""
        return len(self.numbered) + len(self.elsewhere)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._ports(slice(None)))

    def __getitem__(self, index: Any) -> Any:
        return self._ports(index) if isinstance(index, slice) else self.blocks[index]

    def __repr__(self) -> str:
        return nn.Module.__repr__(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a port is no object that it can trace
    def _ports(self, which: slice) -> list[nn.Module]:
        """The ports of an iteration over these blocks."""
        numbers = range(len(self))[which]
        here = [number for number in numbers if number not in self.elsewhere]
        found = [
            Port(
                self,
                number,
                self.elsewhere.get(number) or self._modules[str(number)],
                first=here[:1] == [number],
                last=here[-1:] == [number],
            )
            for number in numbers
        ]
        return cast("list[nn.Module]", found)

    # ------------------------------------------------------------------ a pass

    def advance(
        self,
        number: int,
        block: nn.Module | Elsewhere,
        first: bool,
        last: bool,
        args: tuple[Any, ...],
        kwargs: Arguments,
    ) -> Any:
        """The call of a port: run block `number` with these arguments. Returns what the block does; the last
        one's hidden states are those that leave the stack. Raises UsageError for a block that is called
        before the first one."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.still):
            self.reached = True
            by_position = self.arguments[number][: len(args)]
            call: Arguments = dict(zip(by_position, args, strict=True)) | kwargs
            if isinstance(block, Elsewhere):
                return self._handed_on(call)
            if first:
                others = {name: value for name, value in call.items() if name != "hidden_states"}
                self.now = cast("StackPass", self(call["hidden_states"], **others))
            now = self.now
            if now is None:
                what = f"block {number} of the {self.name} was called before the first block"
                raise UsageError(what, expected="a loop over all blocks, in order")
            one = Recorded(number, block, call, by_position)
            if now.waiting is not None:
                return self._wait(now.waiting, one, last)
            output = self._run(one, self._inside(now, call) | (now.carry if first else {}))
            return self._finish(output) if last else output

    def _handed_on(self, call: Arguments) -> Any:
        """What a block returns that hands on these values."""
        carried = tuple(call.get(name) for name in self.rule.carry) + (None,) * self.rule.besides
        return carried if len(carried) > 1 else carried[0]

    def forward(self, hidden_states: Tensor, **others: Any) -> StackPass:
        """Begin a pass with the arguments of the first block; what a pass with an error has left is
        dropped."""
        call: Arguments = {"hidden_states": hidden_states, **others}
        self._refuse_their_checkpointing()
        arrived = self.wire.receive() if self.wire else None
        if arrived is not None:
            call |= arrived.backbone
        now = StackPass(replace(running()), {name: call[name] for name in self.rule.carry if name in call})
        for edges in self.edges:
            now.carry, now.here = edges.begin(self, now.carry, now.here)
        now.found = self._known(now.here)
        if self.ladder is not None:
            self._begin_ladder(
                self.ladder, now, self._inside(now, call) | now.carry, arrived.side if arrived else None
            )
        elif self._goes_whole(now, call):
            now.waiting = []
        return now

    def _known(self, here: Running) -> Found | None:
        """What `levels` know of this pass, as it is inside."""
        if self.levels is None or (known := self.levels.known) is None:
            return None
        apart = known.unbind()
        inside = [self._parted(level, here) for level in apart]
        changed = any(one is not level for one, level in zip(inside, apart, strict=True))
        return Found(list(self.levels.numbers), torch.stack(inside) if changed else known)

    def _goes_whole(self, now: StackPass, call: Arguments) -> bool:
        """Whether a pass that begins with `call` runs all blocks at once."""
        if self.whole is None or self.levels is not None:
            return False
        return self.whole.takes(self, self._inside(now, call) | now.carry)

    def _refuse_their_checkpointing(self) -> None:
        """Raise UsageError for Hugging Face's gradient checkpointing where it cannot be right: it knows
        nothing of what happens at the edges of a cut stack."""
        if (self.edges or self.wire is not None) and any(
            getattr(block, "gradient_checkpointing", False) for block in self.blocks
        ):
            remedy = (
                "leave it off (gradient_checkpointing=False in TrainingArguments or SFTConfig) and let the"
                " stacks recompute: gradient_checkpointing: true in a recipe, memory='input' in petune.wrap"
            )
            problem = (
                "the model's own gradient checkpointing is on, which knows nothing of what happens at this"
                " stack's edges"
            )
            raise UsageError(problem, remedy=remedy)

    def room_for(self, hidden: Tensor, here: Running) -> int | None:
        """See Whole; edges that cut tokens across ranks ask."""
        return None if self.whole is None else self.whole.room_for(self, hidden, here)

    def _begin_ladder(
        self, ladder: LadderLike, now: StackPass, call: Arguments, arrived: Arguments | None
    ) -> None:
        if arrived is not None:
            arrived = arrived | {"hidden_states": self._parted(arrived["hidden_states"], now.here)}
        with drawing(replace(now.here, site=f"{self.name}.side", drawn=0)):
            now.side = ladder.begin(call, arrived)
        for edges in self.edges:
            now.side = edges.begin_side(self, now.side, now.here)
        if (
            ladder.ops is None
            or self.recompute
            or not any(ladder.reads(number) for number, _ in ladder.numbered)
        ):
            return
        backbone, side = ladder.split(call, now)
        if now.found is not None:
            now.below = self._lowered(ladder, now.found)
        elif self.beneath is not None and self.beneath.takes(self, backbone):
            now.waiting = []
        if self.whole is not None and self.whole.takes(self, side | (now.side or {})):
            now.waiting = []

    def _lowered(self, ladder: LadderLike, found: Found) -> Tensor:
        """What the gates of all levels mix in, of what every block gives."""
        wanted = [number for number, _ in ladder.numbered]
        count, own = len(wanted), found.numbers  # beside the last block there may be none
        levels = found.values[:count] if own[:count] == wanted else found.values[[*map(own.index, wanted)]]
        return ladder.lower(levels)

    def _inside(self, now: StackPass, call: Arguments) -> Arguments:
        """The arguments of a block as they are inside; what the block before has handed on is inside
        already."""
        if not self.edges:
            return call
        return {
            name: value if name in self.rule.carry else self._entered(now, name, value)
            for name, value in call.items()
        }

    def _entered(self, now: StackPass, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self._entered(now, name, one) for one in value)
        for at, edges in enumerate(self.edges):
            if isinstance(value, Tensor):
                value = now.once((at, name), partial(edges.argument, self, name, here=now.here), value)
        return value

    def _run(self, one: Recorded, call: Arguments) -> Any:
        """What a block returns for a call that is inside; the ladder advances beside it."""
        now, ladder = cast("StackPass", self.now), self.ladder
        if ladder is None or now.side is None:
            return self._output(one, call, now)
        call, side = ladder.split(call, now)
        with torch.no_grad():
            output = self._output(one, call, now)
        if not ladder.has(one.number):
            return output
        hidden = carried_by(self.rule, output)["hidden_states"] if now.level is None else now.level
        below = None if now.below is None else now.once("below", self._by_number, now.below)[one.number]
        now.side = now.side | self._maybe_again(
            self._climb, one.number, hidden, side | now.side, now.here, below
        )
        return output

    def _by_number(self, levels: Tensor) -> dict[int, Tensor]:
        """The levels that are here by the numbers of their blocks, of [levels, ...]."""
        assert self.ladder is not None
        return dict(zip((number for number, _ in self.ladder.numbered), levels.unbind(), strict=True))

    def _output(self, one: Recorded, call: Arguments, now: StackPass) -> Any:
        """What a block returns: as it was found before, else computed."""
        levels, now.level = self.levels, None
        if now.found is not None:  # what nobody reads is handed on as it came
            now.level = found = now.found.of(one.number)
            leaves = now.found.computed if now.found.numbers[-1:] == [one.number] else None
            hidden = found if leaves is None else leaves
            return self._handed_on(call if hidden is None else call | {"hidden_states": hidden})
        output = self._maybe_again(self.step, one.number, one.block, _given(call, one.by_position), now.here)
        if levels is not None and levels.writes and one.number in levels.numbers:
            hidden = self._left(carried_by(self.rule, output)["hidden_states"].detach(), now.here)
            return self._as_read(one, call, now, output, levels.write(one.number, hidden))
        return output

    def _as_read(
        self, one: Recorded, call: Arguments, now: StackPass, output: Any, kept: Tensor | None
    ) -> Any:
        """What a block returns whose level later passes read as `kept`: the ladder climbs beside that in this
        one too, and it is what leaves the stack; the next block is handed what was computed."""
        now.level = None if kept is None else self._parted(kept, now.here)
        ends = one.number == len(self) - 1 and (self.wire is None or self.wire.ends)
        return self._handed_on(call | {"hidden_states": now.level}) if kept is not None and ends else output

    def _wait(self, waiting: list[Recorded], one: Recorded, last: bool) -> Any:
        """Record a call and return its hidden states as they are; the last one runs all blocks.

        Raises UsageError where the loop changes hidden states between blocks, as those do not exist yet."""
        if waiting and not same_numbers(one.call["hidden_states"], waiting[-1].call["hidden_states"]):
            what = (
                f"hidden states are changed between blocks {waiting[-1].number} and {one.number} of the"
                f" {self.name}"
            )
            raise UsageError(what, where="kernels", remedy="use kernels: off")
        waiting.append(one)
        return self._run_all(waiting) if last else self._handed_on(one.call)

    def _run_all(self, waiting: list[Recorded]) -> Any:
        """At once, where all calls are alike and the way through the whole stack takes them; else one by
        one."""
        now = cast("StackPass", self.now)
        call = self._inside(now, waiting[0].call) | now.carry
        if all(alike(waiting[0].call, one.call) for one in waiting[1:]):
            owns = [tuple(id(one.call.get(name)) for name in OWN) for one in waiting]
            inside = {owns[0]: call}  # most stacks have the same arguments for all
            for own, one in zip(owns, waiting, strict=True):
                if own not in inside:
                    inside[own] = self._inside(now, one.call) | now.carry
            advanced = self._advanced(waiting, [inside[own] for own in owns], now)
            if advanced is not None:
                return self._finish(self._handed_on(advanced))
        output: Any = None
        for one in waiting:
            output = self._run(
                one, call if output is None else self._inside(now, one.call) | carried_by(self.rule, output)
            )
        return self._finish(output)

    def _advanced(self, waiting: list[Recorded], calls: list[Arguments], now: StackPass) -> Arguments | None:
        """The first of `calls` behind all blocks, which the ladder beside them has climbed; None where they,
        or its levels, have to run one by one."""
        ladder = self.ladder
        if ladder is None or now.side is None:
            return None if self.whole is None else self.whole(self, calls, now.here)
        if now.found is None:
            now.found = self._find(waiting, [ladder.split(call, now)[0] for call in calls], now)
            now.below = self._lowered(ladder, now.found)
        side = ladder.split(calls[0], now)[1] | now.side
        if self.whole is None or not self.whole.takes(self, side):
            return None
        climbed = self.whole(
            self, [ladder.call(number, side) for number, _ in ladder.numbered], now.here, now.below
        )
        if climbed is None:
            return None
        now.side = now.side | climbed
        computed = now.found.computed
        return calls[0] | {"hidden_states": now.found.values[-1] if computed is None else computed}

    def _find(self, waiting: list[Recorded], calls: list[Arguments], now: StackPass) -> Found:
        """What every block gives: of all at once where `beneath` takes them, else of one after the other."""
        numbers = [one.number for one in waiting]
        if self.beneath is not None and self.beneath.takes(self, calls[0]):
            values = self.beneath.levels(self, calls, now.here)
            if values is not None:
                return Found(numbers, self._written(numbers, values, now.here))
        values, carried = None, dict[str, Any]()
        with torch.no_grad():
            for at, (one, call) in enumerate(zip(waiting, calls, strict=True)):
                carried = carried_by(self.rule, self._output(one, call | carried, now))
                hidden = carried["hidden_states"]
                if values is None:
                    values = hidden.new_empty(len(numbers), *hidden.shape)
                values[at] = hidden if now.level is None else now.level
        return Found(numbers, cast("Tensor", values), None if now.level is None else carried["hidden_states"])

    def _written(self, numbers: list[int], values: Tensor, here: Running) -> Tensor:
        """`values` of all blocks as later passes read them, where `levels` want them."""
        if self.levels is None or not self.levels.writes:
            return values
        found = dict(zip(numbers, values.unbind(), strict=True))
        rounded = False
        for number in self.levels.numbers:
            kept = self.levels.write(number, self._left(found[number], here))
            if kept is not None:
                found[number], rounded = self._parted(kept, here), True
        return torch.stack([*found.values()]) if rounded else values

    def _finish(self, output: Any) -> Any:
        """Hand over to the next stage or end the stack; the last block's output, with the hidden states that
        leave."""
        now, self.now = cast("StackPass", self.now), None
        carry = now.carry | carried_by(self.rule, output)
        if self.wire is not None and not self.wire.ends:
            carried = self._carried(carry, now)
            self.wire.send(carried)
            hidden = carried.backbone["hidden_states"]
        else:
            hidden = self._end(carry["hidden_states"], now)
        _at(f"after {self.name}")
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def _end(self, hidden: Tensor, now: StackPass) -> Tensor:
        """What leaves the stack, whole."""
        ladder = self.ladder
        if now.side is not None and ladder is not None:
            with drawing(replace(now.here, site=f"{self.name}.end", drawn=0)):
                hidden = ladder.end(hidden, now.side)
            if ladder.handed is not None:
                ladder.handed = self._left(ladder.handed, now.here)
        return self._left(hidden, now.here)

    def _parted(self, hidden: Tensor, here: Running) -> Tensor:
        """Hidden states inside all edges."""
        for edges in self.edges:
            hidden = edges.part(hidden, here)
        return hidden

    def _left(self, hidden: Tensor, here: Running) -> Tensor:
        """Hidden states outside all edges."""
        for edges in reversed(self.edges):
            hidden = edges.leave(hidden, here)
        return hidden

    def _carried(self, carry: Arguments, now: StackPass) -> Carried:
        """What a later stage needs of this one, hidden states whole."""

        def whole(part: Arguments) -> Arguments:
            found = {name: part.get(name) for name in self.rule.carry}
            return found | {"hidden_states": self._left(part["hidden_states"], now.here)}

        return Carried(whole(carry), None if now.side is None else whole(now.side))

    def _maybe_again(self, step: Any, *args: Any) -> Any:
        """`step(*args)`, with its activations kept or, with `recompute`, only its inputs."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(step, *args, use_reentrant=False)
        return step(*args)

    def step(self, index: int, block: nn.Module, given: WrittenArguments, here: Running) -> Any:
        """What block `index` returns for the arguments `given`, by position and by name as the model's loop
        gave them."""
        with drawing(self.at(index, here)):
            return block(*given[0], **given[1])

    def at(self, index: int, here: Running) -> Running:
        """`here` inside a block."""
        return replace(here, site=f"{self.name}.{index}", drawn=0)

    def _climb(
        self, index: int, hidden: Tensor, side: Arguments, here: Running, below: Tensor | None
    ) -> Arguments:
        """The ladder's step beside block `index`."""
        assert self.ladder is not None
        with drawing(replace(here, site=f"{self.name}.side.{index}", drawn=0)):
            return self.ladder.step(index, hidden, side, below)


def _at(site: str) -> None:
    """Name the place outside the stacks that is running from here on: a pipeline's stage may have skipped
    what came before."""
    now = running()
    if now.key is not None:
        now.site, now.drawn = site, 0


class Around:
    """Hooks on the module that holds a stack under `child`: they name the place, and see that its loop ran
    the ports."""

    def __init__(self, name: str, child: str) -> None:
        self.name, self.child = name, child

    def before(self, owner: nn.Module, args: Any, kwargs: Arguments) -> None:
        """Name the place; forget a pass that an error has ended."""
        _at(f"before {self.name}")
        if isinstance(stack := getattr(owner, self.child), Stack):  # a stage may have none of its blocks
            stack.now, stack.reached, stack.shortened = None, False, ends_alone(kwargs)

    def after(self, owner: nn.Module, args: Any, output: Any) -> None:
        """Raise UsageError for a loop that passed the ports by, or left before what only its last port
        does."""
        stack = getattr(owner, self.child)
        if not isinstance(stack, Stack):
            return
        now, stack.now = stack.now, None
        what = None
        if not stack.reached:
            what = f"{type(owner).__name__} calls no element of its list of blocks"
        elif now is not None and (
            stack.edges or stack.wire or now.side is not None or now.waiting is not None
        ):
            what = f"{type(owner).__name__} leaves the loop over its blocks before the last one"
        if what is not None:
            expected = "a loop that calls every block"
            remedy = "use no plan and no kernels, and another method than side"
            raise UsageError(what, where=self.name, expected=expected, remedy=remedy)


def _given(call: Arguments, by_position: tuple[str, ...]) -> WrittenArguments:
    """A call as its loop wrote it: what was given by position, where checkpointing and recorders look, and by
    name."""
    named = {name: value for name, value in call.items() if name not in by_position}
    return tuple(call[name] for name in by_position), named


def run_block(block: nn.Module, call: Arguments) -> Any:
    """Call `block`, hidden states by position."""
    args, kwargs = _given(call, ("hidden_states",))
    return block(*args, **kwargs)


def tail_of(around: nn.Module, rule: StackRule) -> nn.Module | None:
    """The norm after the last block, beside the stack in `around`; None where a model leaves it out."""
    return None if rule.tail is None else cast("nn.Module | None", getattr(around, rule.tail))


def carried_by(rule: StackRule, output: Any) -> Arguments:
    """The carry of a block's output, by name."""
    return dict(zip(rule.carry, output if isinstance(output, tuple) else (output,), strict=False))


def unownable(model: nn.Module) -> str | None:
    """Why a stack cannot own what happens between this model's blocks, or None."""
    config = getattr(model, "config", None)
    for side in ("encoder_layerdrop", "decoder_layerdrop", "layerdrop"):
        if getattr(config, side, None):
            return f"it drops whole layers: config.{side} = {getattr(config, side)}"
    return None


def own_stacks(model: nn.Module, family: Family) -> Mapping[StackName, Stack]:
    """Put a `Stack` in the place of each of the model's module lists of blocks and return them by name;
    idempotent.

    Raises UsageError where `unownable` has a reason.
    """
    if (reason := unownable(model)) is not None:
        setting = reason.rpartition(": ")[2].partition(" = ")[0]
        what = f"this {type(model).__name__} is not supported here: {reason}"
        raise UsageError(what, remedy=f"set {setting} = 0")
    stacks: dict[StackName, Stack] = {}
    for name, path in stack_paths(model, family).items():
        blocks = model.get_submodule(path)
        if not isinstance(blocks, Stack):
            blocks = Stack(cast("nn.ModuleList", blocks), family.stacks[name], name)
            model.set_submodule(path, blocks)
            above, _, child = path.rpartition(".")
            owner, around = model.get_submodule(above), Around(name, child)
            blocks.around = (
                owner.register_forward_pre_hook(around.before, with_kwargs=True),
                owner.register_forward_hook(around.after),
            )
        stacks[name] = blocks
    return stacks


def stacks_in(model: nn.Module) -> dict[str, Stack]:
    """The stacks that are in a model, by their full names."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Stack)}


def ends_here(model: nn.Module, family: Family | None) -> bool:
    """Whether the model's last block is here, and what works after it: on one stage of a pipeline."""
    last = next(reversed(stacks_in(model).values()), None)
    if family is None or last is None or last.wire is None:
        return True
    return last.wire.ends and last.name == list(family.stacks)[-1]


def disown_stacks(model: nn.Module, which: Callable[[Stack], bool] = lambda stack: True) -> None:
    """Put the module lists back where `own_stacks` put stacks, with no hook left; `which` chooses among
    them."""
    for path, stack in stacks_in(model).items():
        if not which(stack):
            continue
        for handle in stack.around:
            handle.remove()
        kind, attributes = stack.plain
        blocks = kind.__new__(kind)
        blocks.__dict__ = attributes | {
            "training": stack.training,
            "_modules": {str(n): block for n, block in stack.numbered},
        }
        model.set_submodule(path, blocks)
