"""AdamW for a model that does not fit its device: blocks rest in host memory, and each is updated inside the
backward pass.

A block's weights come when its forward or backward pass begins, its neighbour's while it runs. Its gradients
live from the autograd node that makes them to that node's own hook, where AdamW's states have come meanwhile;
weights and states go back at once. So the device holds a few slots of one block each, whatever the depth:

        forward  i: weights in, those of i + 1 on their way
        backward i: weights and states in, those of i - 1 on their way; gradients, update, weights and states
        out

Embedding, last norm and head keep their weights on the device; their states rest on the host and pass through
the same slots.

Between the passes a parameter's data is exchanged for another tensor. Autograd keeps a leaf as itself, so a
node that takes the parameters themselves finds in its backward pass what they are then, but a view of a
weight, as an unfused linear keeps it, would read a slot that has another block in it. A block has to be such
a node, and is looked at each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.kernels.memory.adamw import AdamWStep, adamw_for, random_words
from petune.kernels.memory.offload import pin
from petune.log import warn
from petune.models.decay import decays

Event = Any  # a torch.cuda.Event, or None on a CPU
ALIGN = 64  # elements: where a parameter begins in a flat buffer, so that kernels read whole lines

# ------------------------------------------------------------------ what travels


class HostTraffic:
    """Copies between host and device beside the computation, a stream each way; at once on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda = device.type == "cuda"
        self.arriving, self.leaving = (torch.cuda.Stream(device) if cuda else None for _ in range(2))

    def bring(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Begin to copy (to, source) to the device once `after` has happened; when it is done."""
        return self._copy(self.arriving, pairs, after)

    def send(self, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]) -> Event:
        """Begin to copy (to, source) to the host once `after` has happened; when it is done."""
        return self._copy(self.leaving, pairs, after)

    def _copy(
        self, stream: torch.cuda.Stream | None, pairs: Iterable[tuple[Tensor, Tensor]], after: Sequence[Event]
    ) -> Event:
        if stream is not None:
            for event in after:
                if event is not None:
                    stream.wait_event(event)
        with torch.cuda.stream(stream):
            for to, source in pairs:
                to.copy_(source, non_blocking=True)
        return None if stream is None else stream.record_event()

    def now(self) -> Event:
        """What the computation has been told to do until here."""
        return None if self.arriving is None else torch.cuda.current_stream(self.device).record_event()

    def wait(self, event: Event) -> None:
        """Let the computation wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def settle(self) -> None:
        """Let the host wait for every copy."""
        for stream in (self.arriving, self.leaving):
            if stream is not None:
                stream.synchronize()


class ParameterSpan(NamedTuple):
    """A parameter, or its stretch from element `first` on, and where it lies in its piece's flat tensors."""

    name: str
    parameter: nn.Parameter
    span: slice
    first: int = 0


@dataclass(eq=False)
class OffloadUnit:
    """What travels together: a block with its states, or the states of a stretch of a tensor whose weight
    stays on the device.

    name: the block's or the tensor's. host: flat tensors by key, "weight" only where the weights travel.
    index: the block's, -1 for none.
    """

    name: str
    host: dict[str, Tensor]
    entries: list[ParameterSpan]
    index: int = -1
    written: Event = None

    def rest(self) -> None:
        """Let the parameters be what rests on the host."""
        for entry in self.entries:
            entry.parameter.data = self.host["weight"][entry.span].view(entry.parameter.shape)


@dataclass(eq=False)
class DeviceSlot:
    """Room for one piece on the device. arrived: when each key's tensor is there; free: when it may be
    overwritten."""

    device: dict[str, Tensor]
    piece: OffloadUnit | None = None
    arrived: dict[str, Event] = field(default_factory=dict)
    free: Event = None


# ------------------------------------------------------------------ the optimizer


class StreamedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) over a model that it takes over: `blocks`, in the order they run,
    live in host memory from now on.

    model: its parameters float32 or bfloat16; all of a block train and are in one dtype. device: where it
    computes (default: where the first parameter is); everything outside the blocks is moved there. lr, betas,
    eps, weight_decay: as of torch.optim.AdamW; biases and norms do not decay. What `param_groups` say counts
    from the next backward pass on. states: torch.bfloat16 keeps weights and states in bfloat16, each rounded
    stochastically by `seed`, 6 bytes a parameter. torch.float32 keeps states and, of bfloat16 weights, a
    master copy in float32 beside the weights rounded to nearest from it: 14 bytes a parameter. slots: blocks
    on the device at once, at least 2; 3 let weights come while others leave.

    backward() updates; step() then ends the step. Between steps the parameters of blocks are views of host
    memory, and so is `state`: `model.state_dict()` and `state_dict()` wait for copies still under way, other
    readers call `settle()` first. Gradients are not clipped, as the norm of all is known only when none is
    left. Raises UsageError for what cannot be: more than one backward pass a step, frozen or shared
    parameters of blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        states: torch.dtype = torch.bfloat16,
        seed: int = 0,
        slots: int = 3,
        device: torch.device | None = None,
    ) -> None:
        _check(model, blocks, states, slots)
        self.names = {value: name for name, value in model.named_parameters()}
        self.device = device or next(iter(self.names)).device
        trained = [(name, value) for value, name in self.names.items() if value.requires_grad]
        kinds = {
            kind: [value for name, value in trained if decays(name, value) is kind] for kind in (True, False)
        }
        groups = [
            {"params": values, "weight_decay": weight_decay * kind}
            for kind, values in kinds.items()
            if values
        ]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.rules = {self.names[value]: group for group in self.param_groups for value in group["params"]}
        self.seed, self.steps = seed, 0
        # of each gradient of the last backward pass, by name, a scalar on the device
        self.squares: dict[str, Tensor] = {}
        kind = next(blocks[0].parameters()).dtype
        master = states is torch.float32 and kind is not torch.float32
        self.kept = {"exp_avg": states, "exp_avg_sq": states} | ({"master": torch.float32} if master else {})
        self.traffic = HostTraffic(self.device)
        self.adamw = adamw_for(self.device, kind)
        self.count = torch.zeros(())  # of steps, as torch keeps it
        self.blocks = [self._block(at, block) for at, block in enumerate(blocks)]
        self.capacity = max(len(block.host["weight"]) for block in self.blocks)
        self.slots = [self._slot(kind) for _ in range(slots)]  # the one to be overwritten first comes first
        self.running: DeviceSlot | None = None  # whose block's parameters are on the device
        self.at = -1  # the last block of the forward pass so far
        self.updated: set[str] = set()  # names of blocks and of tensors beside them, in this step
        self._take_residents(model)
        self._hook(model, blocks)

    # ------------------------------------------------------------ taking over

    def _block(self, index: int, module: nn.Module) -> OffloadUnit:
        entries, end = [], 0
        for parameter in module.parameters():
            entries.append(
                ParameterSpan(self.names[parameter], parameter, slice(end, end + parameter.numel()))
            )
            end += -(-parameter.numel() // ALIGN) * ALIGN
        dtypes = {"weight": entries[0].parameter.dtype, **self.kept}
        host = {key: self._host(end, dtype) for key, dtype in dtypes.items()}
        for _, parameter, span, _ in entries:
            for key in host.keys() & {"weight", "master"}:
                host[key][span].copy_(parameter.data.reshape(-1))
            self._keep(parameter, {key: host[key][span] for key in self.kept})
        piece = OffloadUnit(f"block {index}", host, entries, index)
        piece.rest()
        return piece

    def _keep(self, parameter: nn.Parameter, states: Mapping[str, Tensor]) -> None:
        """Let `state` show the states of a parameter, [n] on the host, in its shape."""
        shown = {key: value.view(parameter.shape) for key, value in states.items()}
        self.state[parameter] = {"step": self.count, **shown}

    def _take_residents(self, model: nn.Module) -> None:
        """Move everything outside the blocks to the device, the states of what trains there to the host."""
        streamed = {entry.parameter for block in self.blocks for entry in block.entries}
        for module in model.modules():
            for key, buffer in module.named_buffers(recurse=False):
                module._buffers[key] = buffer.to(self.device)
        for parameter, name in self.names.items():
            if parameter not in streamed:
                parameter.data = parameter.data.to(self.device).contiguous()
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        partial(self._update_resident, self._resident(name, parameter))
                    )

    def _resident(self, name: str, parameter: nn.Parameter) -> list[OffloadUnit]:
        """The states of a tensor that stays on the device, in stretches that fit a slot."""
        host = {key: self._host(parameter.numel(), dtype) for key, dtype in self.kept.items()}
        if "master" in host:
            host["master"].copy_(parameter.data.view(-1))
        self._keep(parameter, host)
        pieces = []
        for start in range(0, parameter.numel(), self.capacity):
            own = {key: value[start : start + self.capacity] for key, value in host.items()}
            pieces.append(
                OffloadUnit(name, own, [ParameterSpan(name, parameter, slice(0, len(own["exp_avg"])), start)])
            )
        return pieces

    def _host(self, size: int, dtype: torch.dtype) -> Tensor:
        buffer = torch.zeros(size, dtype=dtype)
        if self.device.type == "cuda" and size:
            pin(buffer)
        return buffer

    def _slot(self, kind: torch.dtype) -> DeviceSlot:
        kinds = {"weight": kind, **self.kept}
        return DeviceSlot(
            {key: torch.empty(self.capacity, dtype=dtype, device=self.device) for key, dtype in kinds.items()}
        )

    def _hook(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        for piece, block in zip(self.blocks, blocks, strict=True):
            block.register_forward_pre_hook(partial(self._enter, piece))
            block.register_forward_hook(partial(self._left, piece), always_call=True)
        for module in model.modules():
            module.register_state_dict_pre_hook(lambda *_: self.settle())
            module.register_load_state_dict_pre_hook(lambda *_: self.settle())
            module.register_load_state_dict_post_hook(lambda module, _: self._loaded(module))

    # ------------------------------------------------------------ slots

    def _bring(self, piece: OffloadUnit, keys: Iterable[str]) -> DeviceSlot:
        """The slot of a piece, where tensors that are not there yet begin to arrive. It is the last to be
        overwritten."""
        slot = next((slot for slot in self.slots if slot.piece is piece), None)
        if slot is None:
            slot = self.slots[0]
            slot.piece, slot.arrived = piece, {}
        self.slots.remove(slot)
        self.slots.append(slot)
        for key in keys:
            if key not in slot.arrived:
                source = piece.host[key]
                slot.arrived[key] = self.traffic.bring(
                    [(slot.device[key][: len(source)], source)], after=(slot.free, piece.written)
                )
        return slot

    def _send(self, slot: DeviceSlot, piece: OffloadUnit) -> None:
        pairs = [(host, slot.device[key][: len(host)]) for key, host in piece.host.items()]
        piece.written = slot.free = self.traffic.send(pairs, after=(self.traffic.now(),))

    def _attach(self, piece: OffloadUnit, keys: Iterable[str], following: int) -> None:
        """Let the parameters of a block be what is on the device; begin to bring the block that follows."""
        slot = self.running = self._bring(piece, keys)
        if 0 <= following < len(self.blocks):
            self._bring(self.blocks[following], keys)
        self.traffic.wait(slot.arrived["weight"])
        for _, parameter, span, _ in piece.entries:
            parameter.data = slot.device["weight"][span].view(parameter.shape)

    def _leave(self) -> None:
        """Let the parameters of the block that runs be what rests on the host."""
        slot, self.running = self.running, None
        if slot is not None and slot.piece is not None:
            slot.piece.rest()
            slot.free = self.traffic.now()

    # ------------------------------------------------------------ forward

    def _enter(self, piece: OffloadUnit, *_: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            remedy = "turn gradient checkpointing off: a fused block keeps what petune's memory settings say"
            raise UsageError(
                "a streamed block cannot be run again inside a backward pass", where=piece.name, remedy=remedy
            )
        self._leave()  # what an interrupted pass has left
        if piece.index <= self.at:
            for slot in self.slots:  # a new pass, before which the host's weights may have been changed
                slot.piece = None
        self.at = piece.index
        self._attach(piece, ("weight",), piece.index + 1)

    def _left(self, piece: OffloadUnit, module: nn.Module, _: Any, output: Any) -> None:
        self._leave()
        made = output[0] if isinstance(output, tuple) else output
        if isinstance(made, Tensor) and made.requires_grad:
            self._watch(piece, module, made)

    def _watch(self, piece: OffloadUnit, module: nn.Module, output: Tensor) -> None:
        """Be there before and after the node that has made `output` runs backward."""
        node, own = output.grad_fn, {entry.parameter: entry for entry in piece.entries}
        edges = [] if node is None else [getattr(edge, "variable", None) for edge, _ in node.next_functions]
        if node is None or own.keys() - set(edges):
            problem = f"{type(module).__name__} did not run as one autograd node, which alone can be streamed"
            remedy = "see why it runs unfused in the log, or keep the parameters on the device"
            raise UsageError(problem, where=piece.name, remedy=remedy)
        node.register_prehook(partial(self._open, piece, self.steps))
        node.register_hook(
            partial(self._update, piece, [None if edge is None else own.get(edge) for edge in edges])
        )

    # ------------------------------------------------------------ backward

    def _open(self, piece: OffloadUnit, step: int, _: Any) -> None:
        if step != self.steps:
            raise UsageError(
                "a backward pass of an earlier step's forward pass, whose weights are gone", where=piece.name
            )
        self._begin(piece.name)
        self._leave()
        self._attach(piece, tuple(piece.host), piece.index - 1)

    def _update(
        self,
        piece: OffloadUnit,
        takers: Sequence[ParameterSpan | None],
        grads: Sequence[Tensor | None],
        _: Any,
    ) -> tuple[Tensor | None, ...]:
        """AdamW's step of a block from its node's gradients; what is left for autograd to pass on."""
        slot = self.running
        assert slot is not None and slot.piece is piece
        for event in slot.arrived.values():
            self.traffic.wait(event)
        for entry, grad in zip(takers, grads, strict=True):
            if entry is not None and grad is not None:
                self._step(entry, {key: value[entry.span] for key, value in slot.device.items()}, grad)
        self.updated.add(piece.name)
        self._leave()
        self._send(slot, piece)
        return tuple(grad if entry is None else None for entry, grad in zip(takers, grads, strict=True))

    def _update_resident(self, pieces: Sequence[OffloadUnit], parameter: Tensor) -> None:
        """AdamW's step of a tensor that stays on the device."""
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        self._begin(pieces[0].name)
        self.updated.add(pieces[0].name)
        weights = parameter.data.view(-1).split(self.capacity)
        gradients = grad.reshape(-1).split(self.capacity)
        for piece, weight, gradient in zip(pieces, weights, gradients, strict=True):
            slot = self._bring(piece, piece.host)
            self.slots.insert(-1, self.slots.pop())  # the block that runs next may be in the last
            for event in slot.arrived.values():
                self.traffic.wait(event)
            own = {key: slot.device[key][: len(weight)] for key in piece.host} | {"weight": weight}
            self._step(piece.entries[0], own, gradient)
            self._send(slot, piece)

    def _step(self, entry: ParameterSpan, tensors: Mapping[str, Tensor], grad: Tensor) -> None:
        square = torch.linalg.vector_norm(grad, dtype=torch.float32).square()
        self.squares[entry.name] = self.squares[entry.name] + square if entry.name in self.squares else square
        group = self.rules[entry.name]
        rule = AdamWStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], self.steps + 1)
        words = random_words(self.seed, self.steps + 1, entry.name)
        weight, copy = (
            (tensors["master"], tensors["weight"]) if "master" in tensors else (tensors["weight"], None)
        )
        states = tensors["exp_avg"], tensors["exp_avg_sq"]
        self.adamw(weight, grad.reshape(-1), *states, rule, words, entry.first, copy)

    def _begin(self, name: str) -> None:
        """Before the update of a block, or of a tensor beside them, which a step has once."""
        if not self.updated:
            self.squares.clear()
        if name in self.updated:
            remedy = (
                "call step() after each backward pass; for larger batches give more rows at once, or keep the"
                " parameters on the device"
            )
            what = "a second backward pass in one step, but streamed gradients cannot be accumulated"
            raise UsageError(what, where=name, remedy=remedy)

    # ------------------------------------------------------------ between steps

    def has_gradient(self, name: str) -> bool:
        """Whether the last backward pass gave the parameter of this name a gradient that is not zero
        everywhere."""
        return name in self.squares and bool(self.squares[name] != 0)

    @property
    def moving(self) -> dict[str, Tensor]:
        """By name, what a step surely changes: the weight in float32, or the first moment where a small step
        is left to chance."""
        found: dict[str, Tensor] = {}
        for value, name in self.names.items():
            if value in self.state:
                own = self.state[value]
                found[name] = own.get(
                    "master", value.data if value.dtype is torch.float32 else own["exp_avg"]
                )
        return found

    @property
    def grad_norm(self) -> Tensor:
        """The norm of all gradients of the last backward pass, a scalar on the device; 0 before the first."""
        return torch.stack([*self.squares.values(), torch.zeros((), device=self.device)]).sum().sqrt()

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # torch's has wider types
        """End the step that backward() has made: count it. Raises UsageError without a backward pass."""
        if not self.updated:
            raise UsageError(
                "a step without a backward pass: nothing was updated", remedy="call loss.backward() first"
            )
        self._leave()
        missed = [block.name for block in self.blocks if block.name not in self.updated]
        if missed:
            what = f"{len(missed)} of {len(self.blocks)} blocks"
            warn(f"step {self.steps + 1} leaves {what} as they were: its backward pass did not reach them")
        self.updated.clear()
        self.steps += 1
        self.count.fill_(self.steps)

    def settle(self) -> None:
        """Let the host wait until what rests there is whole."""
        self.traffic.settle()

    def state_dict(self) -> dict[str, Any]:
        """As of torch's AdamW, with a float32 weight as master; states are views of host memory."""
        self.settle()
        return super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave, all of it or nothing. Raises UsageError where parameters, states or
        shapes differ."""
        own = [self.state[value] for group in self.param_groups for value in group["params"]]
        given = [state_dict["state"].get(at, {}) for at in range(len(own))]
        for name, mine, theirs in zip(self.rules, own, given, strict=True):
            for key, value in mine.items():
                found = theirs.get(key)
                if found is None or found.shape != value.shape:
                    sides = {
                        "expected": f"shape {[*value.shape]}",
                        "found": "nothing" if found is None else f"shape {[*found.shape]}",
                    }
                    raise UsageError(
                        "the optimizer's state does not fit this model", where=f"{key} of {name}", **sides
                    )
        self.settle()
        for mine, theirs in zip(own, given, strict=True):
            for key, value in mine.items():
                value.copy_(theirs[key])
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        self.steps = int(self.count)
        self.updated.clear()

    def _loaded(self, module: nn.Module) -> None:
        """Masters follow weights that were loaded into the model."""
        for parameter in module.parameters(recurse=False):
            if parameter not in self.names:
                what = "load_state_dict(assign=True) exchanges parameters that are streamed"
                raise UsageError(what, remedy="leave assign out")
            own = self.state.get(parameter, {})
            if "master" in own:
                own["master"].copy_(parameter.data)


def _check(model: nn.Module, blocks: Sequence[nn.Module], states: torch.dtype, slots: int) -> None:
    """Raise UsageError for what cannot be streamed."""
    if slots < 2 or states not in (torch.bfloat16, torch.float32):
        what = "streaming needs two slots or more and states in bfloat16 or float32"
        raise UsageError(what, found=f"slots {slots}, states {states}")
    own = [parameter for block in blocks for parameter in block.parameters()]
    inside = {module for block in blocks for module in block.modules()}
    others = (module for module in model.modules() if module not in inside)
    outside = {value for module in others for value in module.parameters(recurse=False)}
    kinds = {parameter.dtype for parameter in own}
    if len(kinds) != 1 or not kinds <= {torch.bfloat16, torch.float32}:
        found = ", ".join(sorted(map(str, kinds))) or "no parameter"
        what, remedy = "blocks stream in one dtype", "load the model in bfloat16"
        raise UsageError(what, expected="bfloat16 or float32", found=found, remedy=remedy)
    if not all(parameter.requires_grad for parameter in own):
        what = "only blocks that train whole are streamed, and some parameters are frozen"
        raise UsageError(what, remedy="use method: full")
    if len(set(own)) < len(own) or outside & set(own):
        what = "blocks that share parameters with others cannot be streamed"
        raise UsageError(what, remedy="keep the parameters on the device")
