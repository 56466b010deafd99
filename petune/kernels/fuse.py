"""The fuse pass: blocks of families that have a table become fused blocks, the head makes its loss lazily.

It acts last, on a model or the stages of one.
What cannot be fused stays as it is and the reason is said; nothing is patched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from petune.errors import UsageError
from petune.kernels.block.call import Spec
from petune.kernels.block.edges import InDtype, Unpadded
from petune.kernels.block.hooks import NoCache, dense
from petune.kernels.block.lent_steps import lenders
from petune.kernels.block.linear import Bank, bankable
from petune.kernels.block.module import FusedBlock, fused_class
from petune.kernels.block.packed_linear import FOLDED
from petune.kernels.block.specs import spec_of
from petune.kernels.block.unpad import leave_padding_out, owner_of
from petune.kernels.configs import KernelsName, MemoryConfig
from petune.kernels.dispatch import Ops, refusal, select
from petune.kernels.graphs.beneath import BeneathGraphs
from petune.kernels.graphs.replay import Graphs, ungraph
from petune.kernels.graphs.ways import way_through
from petune.kernels.head.hooks import fuse_head, unfuse_head
from petune.kernels.memory.block_step import GIB
from petune.kernels.memory.offload import Store
from petune.kernels.memory.policy_hook import Governor
from petune.kernels.single_modules import fuse_sites, unfuse_sites
from petune.log import say
from petune.models.frozen_weight import QuantisedWeight, bytes_in
from petune.models.sharded import class_of, shards_of
from petune.models.spec import Family
from petune.models.stack import Stack, disown_stacks, ends_here, own_stacks, stacks_in, unownable
from petune.models.tuned_linear import linear_of
from petune.models.tuned_parts import LowRank


@dataclass(frozen=True)
class Fused:
    """What `fuse` has done: whether there are fused blocks, how many single modules were exchanged besides,
    and why it is not more."""

    blocks: bool
    sites: int
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether there are fused blocks."""
        return self.blocks


@dataclass(frozen=True)
class Plan:
    """What every stack is fused with. store: where all park what they offload; models: what a process holds
    of the model; in_flight: passes that each of these has on the way at once, on average, of `pieces` of a
    step; waiting: those whose products of weights wait at once for a pass of their own."""

    ops: Ops
    memory: MemoryConfig
    store: Store
    models: Sequence[nn.Module]
    in_flight: float
    pieces: int
    waiting: float

    def governor(self, model: nn.Module, stack: Stack) -> Governor:
        """What says how much blocks of this stack keep."""
        blocks = sum(len(one.blocks) for other in self.models for one in stacks_in(other).values())
        passes = self.in_flight * (blocks / len(stack.blocks)) if self.in_flight * len(self.models) > 1 else 1
        beside = [one for one in self.models if one is not model]
        return Governor(self.memory, passes, beside, self.pieces, self.waiting * blocks)


def fuse(
    model: nn.Module,
    family: Family | None,
    kernels: KernelsName = "auto",
    memory: MemoryConfig | None = None,
) -> Fused:
    """Fuse what can be fused on the device the model computes on: blocks, else single modules, and the loss
    head. Idempotent.

    memory: what blocks keep for the backward pass; None: chosen. Raises UsageError where what is asked for
    cannot be: kernels "triton" without a device for it, either by name where nothing can be fused,
    memory.stream without all blocks fused.
    """
    return fuse_stages([model], family, kernels, memory)


def fuse_stages(
    models: Sequence[nn.Module],
    family: Family | None,
    kernels: KernelsName = "auto",
    memory: MemoryConfig | None = None,
    device: torch.device | None = None,
    in_flight: float = 1.0,
    pieces: int = 1,
    waiting: float = 0.0,
) -> Fused:
    """`fuse` for all stages of a pipeline that a process holds, in order. device: where they will compute;
    None: where they are. The last three: see Plan."""
    model = models[-1]
    first, memory = next(model.parameters()), memory or MemoryConfig()
    device = device or first.device
    ops = select(kernels, device, _dtype(model, first.dtype))
    if ops is None:
        why = "kernels: off" if kernels == "off" else cast("str", refusal(device, first.dtype))
        done = Fused(False, 0, (why,))
    else:
        limit = None if memory.host is None else int(memory.host * GIB)
        plan = Plan(ops, memory, Store(device, limit), models, in_flight, pieces, waiting)
        found = [_fuse_blocks(one, family, plan) for one in models]
        blocks = any(fused for fused, _ in found)
        sites = sum(fuse_sites(one, ops) for one in models)
        heads = ends_here(model, family) and fuse_head(model, ops)
        done = Fused(blocks, sites + heads, tuple(dict.fromkeys(chain(*(why for _, why in found)))))
    if memory.stream != "none" and (done.reasons or not done.blocks):
        what = f"not all blocks of this {class_of(model).__name__} can be fused, as streamed ones must be"
        remedy = "set memory.stream: none"
        remedy += ", or kernels: reference, which is slow, where only Triton is missing" * (ops is None)
        raise UsageError(
            what, where="memory.stream", expected="fused blocks", found="; ".join(done.reasons), remedy=remedy
        )
    return _complain(model, device, kernels, done)


def fuse_modules(
    models: Sequence[nn.Module],
    kernels: KernelsName,
    device: torch.device,
    reason: str,
    memory: MemoryConfig | None = None,
) -> Fused:
    """Fuse tuned linears, norms and activations of `models`, but no blocks, and `reason` says why: a parallel
    plan cuts them, say.

    models: the parts of one model that a process holds; device: where they will compute. Idempotent. Raises
    UsageError for kernels asked for by name that cannot run, or where nothing can be fused, and for memory, a
    setting of fused blocks.
    """
    if memory not in (None, MemoryConfig()):
        what = f"no block of this {type(models[0]).__name__} can be fused"
        raise UsageError(what, where="memory", found=reason, remedy="leave the setting out")
    first = next(models[0].parameters())
    ops = select(kernels, device, _dtype(models[0], first.dtype))
    sites = 0 if ops is None else sum(fuse_sites(model, ops) for model in models)
    reason = cast("str", refusal(device, first.dtype)) if ops is None else reason
    return _complain(models[0], device, kernels, Fused(False, sites, (reason,)))


def unfusable(
    models: Sequence[nn.Module], family: Family, kernels: KernelsName, device: torch.device
) -> tuple[str, ...]:
    """Why `fuse_stages` would leave blocks of these as they are; nothing where they can be fused, or where
    there are no kernels for any.

    All stages of a stack are fused or none, as what one hands on the next has to understand.
    """
    ops = select(kernels, device, _dtype(models[0], torch.float32))
    stacks = [
        (cast("Any", model).config, stack) for model in models for stack in own_stacks(model, family).values()
    ]
    found = [] if ops is None else [_specs(stack.numbered, stack, family, own, ops) for own, stack in stacks]
    return tuple(dict.fromkeys(reason for reason in found if isinstance(reason, str)))


def _fuse_blocks(model: nn.Module, family: Family | None, plan: Plan) -> tuple[bool, tuple[str, ...]]:
    """Whether any stack was fused, and why others were not."""
    if family is None:
        return False, (f"{class_of(model).__name__} is of no family with a table",)
    if (reason := unownable(model)) is not None:
        return False, (reason,)
    before, owned = bool(_hooks_of(model)), stacks_in(model)
    stacks = own_stacks(model, family)
    for path, stack in stacks_in(model).items():
        stack.for_fusing = stack.for_fusing or path not in owned
    reasons = [
        f"{stack.name}: {reason}"
        for stack in stacks.values()
        if (reason := _fuse_stack(model, stack, family, plan)) is not None
    ]
    beside = [
        f"{stack.name}.side: {reason}"
        for stack in stacks.values()
        if isinstance(stack.blocks[0], FusedBlock)
        and (reason := _fuse_ladder(model, stack, family, plan)) is not None
    ]
    owner = owner_of(model, family)
    _hooks_of(model).extend(leave_padding_out(model, owner, family, stacks))
    disown_stacks(model, lambda stack: stack.for_fusing and not isinstance(stack.blocks[0], FusedBlock))
    if len(reasons) < len(stacks) and not before:
        _hooks_of(model).append(NoCache().register(owner))
    return len(reasons) < len(stacks), (*reasons, *beside)


def _hooks_of(model: nn.Module) -> list[RemovableHandle]:
    """The hooks that fusing has hung on a model and on its parts."""
    return cast("list[RemovableHandle]", model.__dict__.setdefault("petune_fused_hooks", []))


def check_kernels(model: nn.Module, kernels: KernelsName) -> None:
    """Raise UsageError for names that mean nothing and for kernels that cannot run where the model is, before
    anything is changed."""
    first = next(model.parameters(), torch.zeros((), dtype=torch.float32, device="cpu"))
    select(kernels, first.device, _dtype(model, first.dtype))


def _complain(model: nn.Module, device: torch.device, kernels: KernelsName, done: Fused) -> Fused:
    """`done`; raise UsageError if more was asked for by name, else say what is missing, but for a CPU, where
    nobody expects it."""
    why = "; ".join(done.reasons)
    if kernels in ("triton", "reference") and not (done.blocks or done.sites):
        what = f"nothing of this {class_of(model).__name__} can be fused"
        raise UsageError(what, where="kernels", found=why, remedy="use kernels: auto")
    if why and kernels != "off" and (done.sites or device.type != "cpu" or kernels != "auto"):
        within = f", with {done.sites} of their modules fused" if done.sites else ""
        rest = "not all is fused" if done.blocks else f"the model's own blocks run{within}"
        say(f"kernels: {rest}: {why}")
    return done


def _dtype(model: nn.Module, otherwise: torch.dtype) -> torch.dtype:
    """What the blocks compute in: the dtype of the first linear."""
    return next(
        (module.weight.dtype for module in model.modules() if isinstance(module, nn.Linear)), otherwise
    )


def _fuse_stack(model: nn.Module, stack: Stack, family: Family, plan: Plan) -> str | None:
    """Fuse the blocks of one stack, all or none. Returns why it could not be, or None."""
    if isinstance(stack.blocks[0], FusedBlock):
        for hook in stack._forward_pre_hooks.values():
            if isinstance(hook, Governor):
                hook.become(plan.memory)
        return None
    if plan.memory.stream != "none" and family.kind == "encoder-decoder":
        return "blocks beside which another stack or a table of positions is read do not stream"
    specs = _specs(stack.numbered, stack, family, cast("Any", model).config, plan.ops)
    if isinstance(specs, str):
        return specs
    if plan.memory.stream != "none" and (stays := [one.unstreamed for one in specs if one.unstreamed]):
        return stays[0]
    _hooks_of(model).extend(_exchange_classes(stack.numbered, specs, plan))
    if stack.ladder is None:  # whose levels are nobody else's to compute again
        stack.recompute = False  # the blocks do it themselves, as their rungs say
    _hooks_of(model).extend(plan.governor(model, stack).register(model, stack))
    stack.edges.append(InDtype())
    records = stack.ladder is None and _recordable(model, specs, plan)
    passes = math.ceil(plan.in_flight * len(plan.models)) if records else 0
    stack.whole = way_through(passes, stack.wire is not None, specs[0].overlapped)
    return None


def _recordable(model: nn.Module, specs: Sequence[Spec], plan: Plan) -> bool:
    """Whether blocks may run as CUDA graphs: these have fixed addresses, tell nobody who is sent where, read
    no positions, all the same, and keys of no block elsewhere, call only attention that scores them, whole,
    and say what one can hold."""
    told = any(spec.mixtures or spec.program.reach for spec in specs) or lenders(specs) is None
    told |= any(spec.crossings for spec in specs if spec.program.meets)
    told |= any(spec.crossings or core.table.positions is None for spec in specs for core in spec.called)
    says = all(one.recordable for spec in specs for one in spec.crossings)
    fixed = plan.memory.stream == "none" and shards_of(model) is None
    return plan.ops.name == "triton" and fixed and not told and says


def _fuse_ladder(model: nn.Module, stack: Stack, family: Family, plan: Plan) -> str | None:
    """Fuse the blocks of the ladder beside a stack, all or none, and its gates. Returns why not, or None."""
    ladder = stack.ladder
    if ladder is None or ladder.ops is not None or not ladder.numbered:
        return None
    specs = _specs(ladder.numbered, stack, family, ladder.config, plan.ops)
    if isinstance(specs, str):
        return specs
    _hooks_of(model).extend(_exchange_classes(ladder.numbered, specs, plan))
    ladder.ops = plan.ops
    alone = stack.wire is None and specs[0].peers is None
    if alone and ladder.reads(ladder.numbered[0][0]) and _recordable(model, specs, plan):
        stack.whole = Graphs(beside=True)
        below = [cast("FusedBlock", block).spec for block in stack.blocks]
        shared = any(spec.peers is not None for spec in below)
        stack.beneath = BeneathGraphs() if not shared and _recordable(model, below, plan) else None
    return None


def _exchange_classes(
    numbered: Sequence[tuple[int, nn.Module]], specs: Sequence[Spec], plan: Plan
) -> list[RemovableHandle]:
    """Make fused blocks of these; the hooks that this takes."""
    hooks = []
    for (_, block), spec in zip(numbered, specs, strict=True):
        spec.store, spec.said = plan.store, specs[0].said
        spec.banks = [  # what attention writes has no room for s beside it, nor what is scaled in float32
            _bank(
                layers,
                plan,
                room=group.kind != "out" and not group.scaled,
                alone=group.kind == "up" and spec.defers,
            )
            for group, layers in zip(spec.program.groups, spec.layers, strict=True)
        ]
        spec.inside = [(name, module) for name, module in block.named_modules() if module is not block]
        whole = [*(one.layers for one in spec.mixtures), *(one.layers for one in spec.called)]
        layers = {id(layer) for group in (*spec.layers, *whole) for layer in group}
        spec.homes = [
            (parent, name, child)
            for parent in block.modules()
            for name, child in parent.named_children()
            if id(child) in layers
        ]
        block.__dict__["spec"] = spec
        block.__class__ = fused_class(cast("Any", type(block)))
        hooks.append(block.register_state_dict_post_hook(dense))
    return hooks


def _specs(
    numbered: Sequence[tuple[int, nn.Module]], stack: Stack, family: Family, config: Any, ops: Ops
) -> list[Spec] | str:
    """What each block of a stack, or of the ladder beside it, computes, or why one cannot be fused."""
    specs, config = [], family.part(config, stack.name)
    if (reason := family.refused(config).get("fused")) is not None:
        return reason
    for number, block in numbered:
        spec = spec_of(block, stack, family.shape(config), config, ops)
        if isinstance(spec, str):
            return f"block {number}: {spec}"
        specs.append(spec)
    return specs


def _bank(layers: Sequence[nn.Module], plan: Plan, room: bool, alone: bool) -> Bank | None:
    """One tensor for the frozen weights of linears, with `room` for their factors b; None where that is of no
    use or they train or differ.

    alone: of a single linear, a rank that the activation adds needs no room.
    """
    if not bankable(layers):
        return None
    parts = [part for layer in layers for part in cast("LowRank", linear_of(layer)).each]
    rank = sum(0 if part.a is None else len(part.a) for part in parts) if room else 0
    rank = 0 if alone and len(parts) == 1 and rank <= FOLDED else rank
    dense = not isinstance(layers[0].weight, QuantisedWeight)
    return None if dense and len(layers) == 1 and not rank else Bank(layers, plan.ops, rank)


def fused_blocks(model: nn.Module) -> list[FusedBlock]:
    """The fused blocks of a model, in order."""
    return [module for module in model.modules() if isinstance(module, FusedBlock)]


def unfuse(model: nn.Module) -> None:
    """The model's own blocks, module lists and head again; every weight has memory of its own."""
    ungraph(model)
    for handle in model.__dict__.pop("petune_fused_hooks", ()):
        handle.remove()
    for module in model.modules():
        if isinstance(module, FusedBlock):
            for layers, bank in zip(module.spec.layers, module.spec.banks, strict=True):
                _out_of(bank, layers)
            module.__class__ = type(module).__mro__[2]
            del module.__dict__["spec"]
        elif isinstance(module, Stack):
            module.edges = [edges for edges in module.edges if not isinstance(edges, (Unpadded, InDtype))]
            if module.ladder is not None:
                module.ladder.ops = None
    disown_stacks(model, lambda stack: stack.for_fusing)
    unfuse_sites(model)
    unfuse_head(model)


def _out_of(bank: Bank | None, layers: Sequence[nn.Module]) -> None:
    """Copy what still lies in the bank out of it: such a view keeps the whole bank alive, and is saved and
    pickled with it."""
    homes = {
        whole.untyped_storage().data_ptr()
        for whole in (() if bank is None else (*bank.tensors, bank.bias))
        if whole is not None
    }
    for value in (value for layer in layers for value in layer._parameters.values() if value is not None):
        first = bytes_in(value)[0]
        storage = first.untyped_storage()
        if storage.data_ptr() in homes and storage.nbytes() > first.nbytes:
            value.data = value.detach().clone(memory_format=torch.contiguous_format)
