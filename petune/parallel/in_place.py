"""Large tensors of an FSDP2 unit gathered in place: each rank's rows go straight to where the whole tensor is
read.

FSDP2 sends the tensors of a unit as one message: it copies shards into it and wholes out of it. For blocks of
an 8B model these copies take 47 of 528 ms of a step on two H200s. A shard may say itself how it is gathered
(`fsdp_pre_all_gather` and `fsdp_post_all_gather`, torch's extension for tensor subclasses, which also takes
them from attributes). So a shard of a large tensor adds one element to the message, and what is large in a
unit travels in one group of all-gathers beside it, on the stream of FSDP2's own, as early.

A quantised weight is several tensors, of which each travels so (petune.parallel.sharded_weight).

Frozen shards do not even have to be sent: where the GPUs of all ranks can read one another's memory, each
copies what it needs from there (peer_memory.py), and no rank waits for another.

The memory of the wholes is FSDP2's to free. It is taken on the stream that computes, so the all-gather waits
for what has been launched there until then. Blocks therefore ask for the next one's before they begin
(`in_turn`), as FSDP2 does by itself in the backward pass.

Frozen tensors of units that are not freed after their forward pass (`dp.reshard: false`, and what lies
outside the blocks) stay whole between steps, too, and travel once. Nobody may write into frozen shards after
the first forward pass, which torch's version counter tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserved_versions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor

from petune.errors import PetuneError
from petune.parallel.collectives import gather_rows_
from petune.parallel.peer_memory import PeerMemory, reachable
from petune.parallel.sharded_weight import ShardedWeight

# bytes from which a whole tensor is gathered in place
LARGE = 2**20


def gather_in_place(
    model: nn.Module, units: Iterable[tuple[FSDPModule, Sequence[Tensor], bool]], device: torch.device
) -> None:
    """Let the large tensors of FSDP2's units of `model` be gathered in place. units: with their sharded
    parameters, and whether these are freed after the forward pass.

    Shards must have their memory, on the `device` that computes, and the first forward pass must be to come.
    Tensors whose rows are not equally many on all ranks travel as before. All ranks must call this.
    """
    streams, found = _Streams(), []
    for module, parameters, freed in units:
        unit = _Unit(streams)
        for value in parameters:
            if isinstance(value, DTensor) and _fits(value):
                unit.members.append(_Member(unit, value, kept=not (freed or value.requires_grad)))
        if unit.members:
            found.append((module, unit))
            cast("nn.Module", module).register_forward_pre_hook(streams.note, prepend=True)
        if unit.members and len(unit.members) == len(parameters):
            module.set_custom_all_gather(_Unsent(unit))
    if not found:
        return
    group = found[0][1].members[0].value.device_mesh.get_group(-1)
    if reachable(device, group):
        for module, unit in found:
            if unit.share(group):
                cast("nn.Module", module)._apply(same)  # FSDP2 lets go of the memory that shards were in
        dist.barrier(group)  # before anybody reads

    def attach() -> None:
        for _, unit in found:
            for member in unit.members:
                member.attach()

    attach()
    apply: Callable[..., nn.Module] = model._apply

    def applied(function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        made = apply(function, recurse)
        attach()  # torch has made new objects of the shards
        return made

    model._apply = applied  # type: ignore[method-assign]  # of this one model, as nn.Module has no hook there


def same(tensor: Tensor) -> Tensor:
    """The tensor itself: what to apply to a module so that FSDP2 looks at its parameters again."""
    return tensor


def in_turn(blocks: Iterable[nn.Module]) -> None:
    """Let each block gather the next one's tensors while it computes."""
    for one, other in pairwise(block for block in blocks if isinstance(block, FSDPModule)):
        one.set_modules_to_forward_prefetch([other])


def _fits(value: DTensor) -> bool:
    """Whether what a rank holds can be a part of the message as it is."""
    shard, ranks = value._local_tensor, value.device_mesh.size(-1)
    held = _rows_of(shard)
    if not held or shard.device.type != value.device_mesh.device_type or len(value) % ranks:
        return False
    return ranks * sum(part.nbytes for part in held) >= LARGE and all(part.is_contiguous() for part in held)


def _rows_of(shard: Tensor) -> tuple[Tensor, ...]:
    """The plain tensors of a shard that have a part for each row; none of a tensor of another make."""
    if isinstance(shard, ShardedWeight):
        return shard.form.by_rows
    return (shard,) if type(shard) is Tensor else ()


def _sent(value: Tensor) -> Tensor:
    """As what ranks send: not all of them know numbers of eight bits."""
    return value.view(torch.uint8) if value.itemsize == 1 else value


class _Unsent(AllGather):
    """Stands for FSDP2's all-gather in a unit all of whose tensors are gathered in place: nobody reads what
    its message would bring."""

    def __init__(self, unit: _Unit) -> None:
        self.unit = unit

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Room for the message."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Send nothing. Raises PetuneError where FSDP2 has lost sight of what gathers in its place."""
        if not all(member.attached for member in self.unit.members):
            raise PetuneError("sharded parameters were replaced after the model was placed")


class _Streams:
    """The stream that computes: that of the last forward pass of a unit."""

    def __init__(self) -> None:
        self.now: torch.cuda.Stream | None = None

    def note(self, module: nn.Module, args: object) -> None:
        """Hook before a unit, which FSDP2's own follows."""
        if torch.cuda.is_initialized():
            self.now = torch.cuda.current_stream()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """On that stream; what follows on the present one waits for it."""
        if self.now is None:
            yield
            return
        with torch.cuda.stream(self.now):
            yield
        torch.cuda.current_stream().wait_stream(self.now)


class _Unit:
    """What of a unit is gathered in place, all at once. asked: of which members FSDP2 has asked for the
    message that it is making."""

    def __init__(self, streams: _Streams) -> None:
        self.streams = streams
        self.members: list[_Member] = []
        self.memory: PeerMemory | None = None
        self.places: list[tuple[Tensor, Tensor]] = []  # to copy to and from, of all that is read
        self.asked: set[int] = set()

    def share(self, group: dist.ProcessGroup) -> bool:
        """Let the other ranks read the frozen shards that travel in every pass; whether there are any. All
        ranks must call this."""
        shared = [member for member in self.members if member.frozen and not member.kept]
        parts: list[Tensor] = []
        for member in shared:
            member.number = len(parts)
            parts += member.shards
        if parts:
            self.memory = PeerMemory(parts, group)
        return bool(parts)

    def ask(self, member: _Member, mesh: DeviceMesh) -> None:
        """FSDP2 asks each member once for a message: gather all at the first. Nothing else tells when one
        begins, as some are never waited for."""
        if self.asked and id(member) not in self.asked:
            self.asked.add(id(member))
            return
        self.gather(mesh)
        self.asked = {id(member)}

    def gather(self, mesh: DeviceMesh) -> None:
        """Fill the wholes. Raises PetuneError for a frozen shard that was written to."""
        for member in self.members:
            member.check()
        due = [member for member in self.members if not member.holds]
        with self.streams.computing():
            for member in due:
                member.allocate()
        if self.memory is not None:
            self._read([member for member in due if member.number is not None])
        sent = [member for member in due if member.number is None]
        wholes = [_sent(whole) for member in sent for whole in member.wholes]
        gather_rows_(wholes, [_sent(part) for member in sent for part in member.shards], mesh.get_group())

    @torch.no_grad()
    def _read(self, members: Sequence[_Member]) -> None:
        """Copy what other ranks hold; autograd is not told. The places are made once, as the host would be
        busier with them than the device is with a block."""
        assert self.memory is not None
        wholes = [whole for one in members for whole in one.wholes]
        if not self.places:
            numbers = [cast("int", one.number) + at for one in members for at in range(len(one.wholes))]
            rows = list(map(self.memory.places, wholes, numbers))
            self.places = list(chain.from_iterable(zip(*rows, strict=True)))
        with preserved_versions(tuple(wholes)):
            for place, part in self.places:
                place.copy_(part)


class _Member:
    """A parameter of a unit. wholes: all its rows, in one tensor or in those that it is quantised in, whose
    memory FSDP2 frees with the unit, or where it is `kept` nobody. version: that of the shard which was
    gathered first; None before. number: that of its first tensor in the unit's memory that other ranks read;
    None where it is sent."""

    def __init__(self, unit: _Unit, value: DTensor, kept: bool) -> None:
        self.unit, self.value, self.kept = unit, value, kept
        self.frozen, self.number = not value.requires_grad, cast("int | None", None)
        self.wholes: tuple[Tensor, ...] = ()
        self.version: int | None = None

    @property
    def shard(self) -> Tensor:
        """The rows that this rank holds: FSDP2's own object, as `local` gives another one."""
        return self.value._local_tensor

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The plain tensors that these are."""
        return _rows_of(self.shard)

    @property
    def written(self) -> int:
        """How often somebody wrote into them."""
        return sum(part._version for part in self.shards)

    @property
    def attached(self) -> bool:
        """Whether FSDP2 asks it."""
        return "fsdp_pre_all_gather" in self.shard.__dict__

    def attach(self) -> None:
        """Take the parameter over from FSDP2's message."""
        self.shard.__dict__.update(fsdp_pre_all_gather=self.begin, fsdp_post_all_gather=self.end)
        if self.version is not None:
            self.version = self.written

    @property
    def holds(self) -> bool:
        """Whether the whole is there already."""
        return self.kept and self.version is not None

    def check(self) -> None:
        """Raise PetuneError where a frozen shard is no longer what was gathered first."""
        if self.frozen and self.version not in (None, self.written):
            raise PetuneError("a frozen shard was written to after the first forward pass")

    def allocate(self) -> None:
        """Give the wholes memory."""
        if self.version is None:
            with torch.inference_mode(False):  # training may follow
                self.wholes = tuple(part.new_empty(len(self.value), *part.shape[1:]) for part in self.shards)
        for one in self.wholes:
            one.untyped_storage().resize_(one.nbytes)
        self.version = self.written

    def begin(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], int]:
        """Called by FSDP2 before its own message, of which one element is the least; with this rank among
        those that hold shards."""
        self.unit.ask(self, mesh)
        return (self.shards[0].view(-1)[:1],), mesh.get_local_rank()

    def end(
        self, outputs: Sequence[Tensor], rank: int, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The whole tensor and what of it is to be freed, which FSDP2 asks for once: later it only waits."""
        if out is not None:
            return None
        shard, whole = self.shard, self.wholes[0]
        if isinstance(shard, ShardedWeight):
            whole = shard.gathered(self.wholes, rank * len(shard))
        return whole, () if self.kept else self.wholes
