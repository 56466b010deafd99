"""What each fused block keeps, decided when its stack is entered: by the policy, for the number of tokens of
this very call."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from petune.errors import UsageError
from petune.kernels.block.call import Spec
from petune.kernels.block.cores import calls_all
from petune.kernels.block.known_layers import known_part
from petune.kernels.block.layout import MEMORY, NO_MASK
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.memory.block_cost import Rates, rates_of
from petune.kernels.memory.block_step import GIB, Alike, BlockStep
from petune.kernels.memory.buffers import waiting_bytes
from petune.kernels.memory.core_shape import core_shape
from petune.kernels.memory.outside import fixed_bytes, once, resident_bytes, vocabulary_of
from petune.kernels.memory.policy import Policy, choose, least_bytes
from petune.kernels.memory.private_pools import private_bytes
from petune.kernels.memory.shape import FIRST, BlockShape, ExpertSizes, Ranks
from petune.log import say
from petune.models.fp8 import Fp8
from petune.models.frozen_weight import QuantisedWeight, bytes_a_number, form_in
from petune.models.sharded import shards_of
from petune.models.stack import Arguments, Stack
from petune.rng.context import running

ROUND = 1024


def usable(sharded: bool) -> float:
    """The part of the free memory that is planned with. The rest is lost between pieces of unequal size: more
    of it where weights are gathered and freed among what blocks keep (of 79 GiB, 7 on four H100s)."""
    return 0.9 if sharded else 0.95


class Governor:
    """Hooks of a stack and its model: set what the blocks keep. A number of tokens seen before gets the
    policy it got then. passes: how many passes' worth of the stack's blocks are on the way at once; beside:
    what else of the model this process holds, other stages of a pipeline; pieces: passes of a step; waiting:
    how many blocks' products of weights wait for a pass of their own at once."""

    def __init__(
        self,
        config: MemoryConfig,
        passes: float = 1,
        beside: Sequence[nn.Module] = (),
        pieces: int = 1,
        waiting: float = 0.0,
    ) -> None:
        self.config, self.passes, self.pieces, self.waiting = config, passes, pieces, waiting
        self.besides = [weakref.ref(model) for model in beside]
        self.policies: dict[tuple[int, int, tuple[int, int], torch.dtype, bool, bool], Policy] = {}
        self.unhalved: set[str] = set()  # why rows did not go in halves
        self.model: Any = None  # a weak reference to the one that is running
        self.said: tuple[str, ...] = ()
        # of the memory that the last call read, rounded: its tokens, as what an encoder keeps is in the way,
        # and those of its longest text
        self.beside = (0, 0)
        # the last call: its tokens, and those of its longest row or segment
        self.entered: tuple[int, int] | None = None
        self.halved = False  # whether rows of the last call go in halves, which leave no products to wait

    def __getstate__(self) -> dict[str, Any]:
        """A copy of a model copies its hooks, or a file holds them: they know no other model."""
        return self.__dict__ | {"model": None, "besides": []}

    def register(self, model: nn.Module, stack: Stack) -> tuple[RemovableHandle, RemovableHandle]:
        """Act before the model, to know it, and before the blocks of `stack`."""
        return model.register_forward_pre_hook(self.meet), stack.register_forward_pre_hook(
            self, with_kwargs=True
        )

    def meet(self, model: nn.Module, args: Any) -> None:
        """Before the model's forward."""
        self.model = weakref.ref(model)

    def become(self, config: MemoryConfig) -> None:
        """Go by other settings from the next call on."""
        self.config = config
        self.policies.clear()

    def __call__(self, stack: Stack, args: Any, kwargs: Any) -> None:
        """Before the stack's forward."""
        if not torch.is_grad_enabled():
            return
        if stack.ladder is not None:  # beside which blocks have no backward pass
            for _, block in stack.ladder.numbered:
                if isinstance(block, FusedBlock):
                    block.spec.rung, block.spec.tile = self._asked(stack)
            return
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        found = running().segments
        tokens, longest = hidden.shape[0] * hidden.shape[1], hidden.shape[1]
        if found is not None:
            tokens, longest = found.total, found.longest
        self.entered, self.beside = (tokens, longest), _memory_size(kwargs.get(MEMORY))
        for spec in _specs(stack):  # a call that keeps its padding has a mask, and scores of all pairs
            spec.pairs = found is None and any(core.table.positions is not None for core in spec.called)
        self._look_at_halves(stack, len(hidden), kwargs)
        for spec, (rung, tile) in zip(
            _specs(stack), self._kept(stack, hidden.device, tokens, longest), strict=True
        ):
            spec.rung, spec.tile = rung, tile

    def _look_at_halves(self, stack: Stack, rows: int, given: Arguments) -> None:
        """Note whether rows go through the blocks in halves, and say once why not, though overlap asks for
        it: of all blocks or of none, as one plan cuts them."""
        first = _specs(stack)[0]
        given = {name: value for name, value in given.items() if value is not NO_MASK}
        reason = first.unhalved(rows, given) if first.overlapped else None
        self.halved = first.overlapped and reason is None
        if reason is not None and reason not in self.unhalved:
            self.unhalved.add(reason)
            say(f"overlap: rows go through the {stack.name} at once, nothing hides what is sent: {reason}")

    def _kept(
        self, stack: Stack, device: torch.device, tokens: int, longest: int
    ) -> list[tuple[Rung, int | None]]:
        """What each block keeps. A CPU keeps all unless the config says otherwise: no plan is made for it."""
        if device.type == "cpu":
            return [self._asked(stack)] * len(stack.blocks)
        size = rounded(tokens), rounded(longest, 128)
        first = _specs(stack)[0]
        key = (*size, self.beside, first.computes_in(device.type), first.pairs, self.halved)
        if key not in self.policies:
            self.policies[key] = self._shared(stack, device, *size)
            self._say(self.policies[key], stack)
        policy = self.policies[key]
        return [(rung, None if rung.keep == "all" else policy.tile) for rung in policy.rungs]

    def _asked(self, stack: Stack) -> tuple[Rung, int | None]:
        """What the config says of every block; all where it says nothing or the stack recomputes."""
        keep = "all" if self.config.keep == "auto" or stack.recompute else self.config.keep
        offload = "none" if self.config.offload == "auto" or stack.recompute else self.config.offload
        return Rung(keep, offload), self.config.tile

    def _say(self, policy: Policy, stack: Stack) -> None:
        """What is kept, unless it is what the batches before had; the figures differ with every size. Of a
        model of two stacks, which of them is meant."""
        lines = policy.lines()
        if lines[:1] == self.said:
            return
        model = None if self.model is None else self.model()
        stacks = [] if model is None else [one for one in model.modules() if isinstance(one, Stack)]
        whose = f"memory of the {stack.name}" if len(stacks) > 1 else "memory"
        for line in lines:
            say(whose + line.removeprefix("memory"))
        self.said = lines[:1]

    def _shared(self, stack: Stack, device: torch.device, tokens: int, longest: int) -> Policy:
        """The policy; the least of theirs among ranks that share these blocks. Raises UsageError on all of
        them where one has no room."""
        peers = next((peers for spec in _specs(stack) if (peers := spec.peers) is not None), None)
        if peers is None:
            return self._policy(stack, device, tokens, longest)
        least, problem, found = partial(peers.least, device=device), None, None
        try:
            found = self._policy(stack, device, tokens, longest)
        except UsageError as error:
            problem = error
        (room,) = least([int(found is not None)])
        if problem is not None:
            raise problem
        if found is None or not room:
            what = "a step does not fit the memory of another rank that shares these blocks"
            raise UsageError(what, where="memory", remedy="see the message of that rank")
        return found.agreed(least)

    def _policy(self, stack: Stack, device: torch.device, tokens: int, longest: int) -> Policy:
        specs = _specs(stack)
        model = stack if self.model is None else self.model() or stack
        here = [model, *(other for ref in self.besides if (other := ref()) is not None)]
        free, total = torch.cuda.mem_get_info(device)
        allocated, recorded = torch.cuda.memory_allocated(device), private_bytes(device)
        idle = torch.cuda.memory_reserved(device) - allocated - recorded
        budget = (free + idle) * usable(shards_of(model) is not None) + allocated
        cap = torch.cuda.get_per_process_memory_fraction(device) * total
        if self.config.budget is not None:
            cap = min(cap, self.config.budget * GIB)
        rates = rates_of(torch.cuda.get_device_name(device))
        # of several passes all blocks are counted as this stack's
        later = _later(model, stack) if self.passes == 1 else []
        size = tokens, longest
        reserved = sum(_least(one, size, vocabulary_of(model), rates, self.config, device) for one in later)
        dtype, (read, longest_read) = specs[0].computes_in(device.type), self.beside
        memory = (read / tokens, longest_read) if read else None
        shape = shape_of(typical(specs), dtype, longest, memory)
        begins = next(iter(_fused_stacks(model)), stack) is stack
        rooms = max((_room_bytes(one, shape, tokens) for one in specs), key=sum)
        every = [spec for one in here for other in _fused_stacks(one) for spec in _specs(other)]
        late = late_bytes(self.waiting * (not self.halved), every, len(here), shape, tokens)
        if (stream := self.config.stream) == "none":
            fixed = max(fixed_bytes(*here) + rooms[0], self._standing(device)) + rooms[1] + late
        else:
            fixed = resident_bytes(model) + sum(rooms)
        step = BlockStep(
            shape,
            len(specs),
            tokens,
            min(longest, tokens),
            0 if later else max(map(vocabulary_of, here)),
            rates,
            fixed,
            None if stream == "none" else stream == "fp32",
            self.passes,
            kinds_of(specs, dtype, tokens, longest, memory),
            once(model, rates, self.pieces) if begins else 0.0,
        )
        host = pinnable(self.config)
        if self.config.host is None:  # what streams is pinned already, and the system no longer calls it free
            host += step.pinned
        return choose(step, self.config, int(min(budget, cap - recorded)) - reserved, host)

    def _standing(self, device: torch.device) -> int:
        """Bytes on the device now; without what other passes that are on the way keep."""
        passing = running().passing
        several = self.passes > 1 and passing is not None
        return int(passing.standing) if several else torch.cuda.memory_allocated(device)


def late_bytes(blocks: float, every: Sequence[Spec], models: int, shape: BlockShape, tokens: int) -> int:
    """Bytes of what products of weights wait with, those of so many blocks at once. every: the blocks of all
    `models` of a process; if not all of them have weights that train, those that have may be of one model."""
    share = min(1.0, models * sum(spec.learns for spec in every) / len(every))
    return int(blocks * share * shape.own(tokens) * waiting_bytes(replace(shape, trained=True)))


def _room_bytes(spec: Spec, shape: BlockShape, tokens: int) -> tuple[int, int]:
    """Bytes that stand for what a block says to other ranks, and bytes to come for so many tokens of all."""
    sizes, item = spec.program.sizes, tokens * shape.itemsize
    queries, keys = (item * heads * sizes.head_dim for heads in (sizes.heads, sizes.kv_heads))
    found = [boundary.room_bytes(item * shape.width) for boundary in spec.boundaries.values()]
    found += [exchange.room_bytes(queries, keys) for exchange in spec.exchanges if exchange is not None]
    return max(found, key=sum, default=(0, 0))


def _later(model: nn.Module, stack: Stack) -> list[Stack]:
    """The fused stacks after this one that keep something beside it: a decoder after its encoder."""
    stacks = _fused_stacks(model)
    return stacks[stacks.index(stack) + 1 :] if stack in stacks else []


def _fused_stacks(model: nn.Module) -> list[Stack]:
    """In the order in which they run."""
    stacks = (module for module in model.modules() if isinstance(module, Stack))
    return [stack for stack in stacks if isinstance(stack.blocks[0], FusedBlock)]


def _memory_size(memory: Tensor | None) -> tuple[int, int]:
    """Tokens of the encoder's states that a decoder is handed, padding left out where it is, and those of the
    longest text; rounded."""
    if memory is None:
        return 0, 0
    kept = running().memory
    found = memory.shape[:2].numel() if kept is None else int(kept.total)
    return rounded(found), rounded(memory.shape[1] if kept is None else int(kept.longest), 128)


def _least(
    stack: Stack,
    size: tuple[int, int],
    vocabulary: int,
    rates: Rates,
    config: MemoryConfig,
    device: torch.device,
) -> int:
    """The least bytes of a stack that is entered later, for the tokens that it had last, or for `size`."""
    hooks = stack._forward_pre_hooks.values()
    tokens, longest = next(
        (hook.entered for hook in hooks if isinstance(hook, Governor) and hook.entered), size
    )
    specs = _specs(stack)
    longest, shape_dtype = rounded(longest, 128), specs[0].computes_in(device.type)
    shape = shape_of(typical(specs), shape_dtype, longest)
    return least_bytes(BlockStep(shape, len(specs), rounded(tokens), longest, vocabulary, rates), config)


def _specs(stack: Stack) -> list[Spec]:
    return [cast("FusedBlock", block).spec for block in stack.blocks]


def typical(specs: Sequence[Spec]) -> Spec:
    """The block that stands for all of a stack: the first of the commonest kind, where some have a sliding
    window, say."""
    kinds = Counter(spec.program for spec in specs)
    return max(specs, key=lambda spec: kinds[spec.program])


def rounded(tokens: int, step: int = ROUND) -> int:
    """The next multiple of `step`, so that batches of nearly as many tokens share a policy, or a
    recording."""
    return -(-tokens // step) * step


def pinnable(config: MemoryConfig) -> int:
    """Bytes of this host's memory that may be pinned."""
    if config.host is not None:
        return int(config.host * GIB)
    try:
        with open("/proc/meminfo") as lines:
            available = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except OSError:  # a system without it, whose memory nobody has told
        return 0
    return int(available * 1024 * 0.8)


def kinds_of(
    specs: Sequence[Spec],
    dtype: torch.dtype,
    tokens: int,
    longest: int,
    memory: tuple[float, int] | None = None,
) -> tuple[Alike, ...]:
    """The blocks of a stack by what they are: some have a sliding window, say, or a mixer. See `shape_of`."""
    numbers, first = Counter(spec.program for spec in specs), {spec.program: spec for spec in reversed(specs)}
    shapes = [(shape_of(first[one], dtype, longest, memory), number) for one, number in numbers.items()]
    return tuple(Alike(shape, number, shape.own(tokens), min(longest, tokens)) for shape, number in shapes)


def shape_of(
    spec: Spec, dtype: torch.dtype | None = None, longest: int = 0, memory: tuple[float, int] | None = None
) -> BlockShape:
    """A fused block as the cost model sees it, computing in `dtype` or else in that of its weights; longest:
    tokens of a row, of which a core that is called may keep scores; memory: see BlockShape."""
    program, sizes = spec.program, spec.program.sizes
    roles = (role for group in program.groups for role in group.roles)
    linears = (known_part(layer).each for layer in chain(*spec.layers))
    parts = dict(zip(roles, chain(*linears), strict=True))
    out, down, experts = parts.get("o"), parts.get("down"), _experts(spec)
    leave = down if out is None else out
    trained = out if down is None else down
    assert leave is not None and trained is not None, "a block has linears of its own"
    # shards are in no bank, nor is what is transposed
    sharded = [] if any(spec.banks) else [form_in(part.weight) for part in parts.values()]
    unbanked = [bytes_a_number(form, leave.transposed) for form in sharded]
    itemsize = (dtype or spec.dtype).itemsize
    heads = 0 if any(calls_all(core.table) for core in spec.called) else 1
    ranks = {FIRST.get(role, role): 0 if part.a is None else len(part.a) for role, part in parts.items()}
    return BlockShape(
        width=leave.outputs,
        heads=heads * sizes.heads,
        kv_heads=heads * sizes.kv_heads,
        head_dim=sizes.head_dim,
        columns=0 if down is None else down.inputs,
        gated=program.gated,
        ranks=Ranks(**ranks),
        trained=trained.weight.requires_grad,
        itemsize=itemsize,
        sublayers=program.sublayers,
        fp8=any(bank is not None and bank.base.rate == "matmul_fp8" for bank in spec.banks)
        or any(isinstance(form, Fp8) for form in sharded if not leave.transposed),
        made=max(0, *(0 if bank is None else bank.base.made for bank in spec.banks), *unbanked),
        weight=spec.dtype.itemsize if spec.casts and spec.dtype.itemsize != itemsize else 0,
        memory=memory,
        drops=any(part.dropout > 0 for part in parts.values()),
        dropouts=any(spec.probabilities),
        roomless=leave.transposed,
        share=next((one.share for one in spec.boundaries.values()), 1.0),
        experts=experts,
        called=core_shape(spec.called[0], itemsize, longest, pairs=spec.pairs) if spec.called else None,
    )


def _experts(spec: Spec) -> ExpertSizes | None:
    """Those of a block's mixture."""
    if not spec.mixtures:
        return None
    (core,), part = spec.program.mixtures, spec.mixtures[0].part()
    number, columns = len(part.down.weight), part.down.weight.shape[1 if part.transposed else 2]
    up, down = (0 if one.a is None else one.a.shape[1] for one in (part.up, part.down))
    held = part.down.weight
    made = held.nbytes / held.numel() if isinstance(held, QuantisedWeight) else bytes_a_number(form_in(held))
    return ExpertSizes(number, core.chosen, columns, up, down, core.shared is not None, made)
