"""One step under torch's profiler: operations by their self time, the backward pass by module, how long
collectives run.

Times are the device's: of kernels on CUDA, of operations on the CPU, where the profiler's own cost is in
them.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from petune.errors import UsageError
from petune.profiling.attribution import Attribution
from petune.profiling.repeat_step import Rehearsal

NODE = "autograd::engine::evaluate_function"  # what the profiler calls the running of an autograd node
REST = "element by element, and others"

# The first that matches names the group: operations of ATen, nodes of autograd, kernels of CUDA's libraries.
GROUPS = {
    "communication": r"(?i)c10d|nccl|gloo|^mpi",
    "autograd and dispatch": r"autograd::|Backward\d*$",
    "attention": r"(?i)attention|flash|fmha|sdpa",
    "matrix products": (
        r"(?i)aten::(mm|addmm|bmm|baddbmm|linear|matmul)$|mkldnn::_linear|gemm|cutlass|nvjet|xmma|cublas"
    ),
    "optimizer and clipping": (
        r"(?i)_foreach|_fused_adam|addcmul_|addcdiv_|multi_tensor|optimizer|vector_norm"
    ),
    "norms": r"(?i)norm",
    "softmax and loss": r"(?i)softmax|nll|cross_entropy",
    "activations": r"(?i)gelu|silu|relu|tanh|sigmoid|activate",
    "embeddings and indexing": r"(?i)embedding|index|gather|scatter|arange|nonzero",
    "copies and casts": r"(?i)copy|clone|aten::cat$|catarray|fill|zero|memset|memcpy|contiguous|empty",
}


@dataclass(frozen=True)
class Operation:
    """An operation, or a group of them, of one step. seconds: self time in all calls. share: of the self time
    of all operations."""

    name: str
    group: str
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class Traced:
    """What the profiler saw of one step. operations: longest first. backward: seconds by path of a module,
    without its children's.

    communication: the part of the step's wall time in which at least one collective runs, on this rank;
    waiting for others is in it.
    """

    operations: tuple[Operation, ...]
    backward: Mapping[str, float]
    communication: float


def traced(rehearsal: Rehearsal, attribution: Attribution, trace: Path | None) -> Traced:
    """Profile one step; `trace`: write it there as a Chrome trace. Raises UsageError where that cannot be
    written."""
    cuda = rehearsal.runner.mesh.device.type == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with attribution, torch_profile(activities=activities) as profiler:
        began = time.perf_counter()
        with record_function("petune: batches"):
            micro = rehearsal.batches()
        with record_function("petune: forward and backward"):
            rehearsal.passes(micro)
        with record_function("petune: update"):
            rehearsal.update()
        if cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - began
    if trace is not None:
        _write(profiler, trace)
    events = list(profiler.events() or ())
    return Traced(
        _by_self_time(profiler.key_averages(), cuda),
        _backward(events, attribution, cuda),
        _communication(events, cuda) / took,
    )


def _write(profiler: torch_profile, trace: Path) -> None:
    try:
        trace.parent.mkdir(parents=True, exist_ok=True)
        trace.write_text("")  # the exporter itself only complains on stderr
        profiler.export_chrome_trace(str(trace))
    except OSError as error:
        found, remedy = f"{trace}: {error.strerror}", "give another file"
        raise UsageError("the trace cannot be written", where="--trace", found=found, remedy=remedy) from None


def _by_self_time(averages: Iterable[Any], cuda: bool) -> tuple[Operation, ...]:
    """Kernels on CUDA, so that what is launched outside of any operation is there too; operations on the
    CPU."""
    found = []
    for one in averages:
        if not _on_device(one, cuda) or one.is_user_annotation or one.key.startswith("petune: "):
            continue
        found.append(
            (one.key, one.count, (one.self_device_time_total if cuda else one.self_cpu_time_total) / 1e6)
        )
    whole = sum(seconds for _, _, seconds in found) or 1.0
    made = (
        Operation(name, group_of(name), calls, seconds, seconds / whole) for name, calls, seconds in found
    )
    return tuple(sorted(made, key=lambda one: -one.seconds))


def group_of(name: str) -> str:
    """The group of an operation or kernel, by its name."""
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), REST)


def grouped(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """One entry per group, longest first."""
    members: dict[str, list[Operation]] = defaultdict(list)
    for one in operations:
        members[one.group].append(one)
    sums = (
        Operation(
            name,
            name,
            sum(one.calls for one in of),
            sum(one.seconds for one in of),
            sum(one.share for one in of),
        )
        for name, of in members.items()
    )
    return tuple(sorted(sums, key=lambda one: -one.seconds))


def _backward(events: Iterable[Any], attribution: Attribution, cuda: bool) -> dict[str, float]:
    """Seconds of the autograd nodes of each module. Nodes that accumulate gradients have no number and are
    outside all modules."""
    found: dict[str, float] = defaultdict(float)
    for event in events:
        if event.name.startswith(NODE):
            spent = event.device_time_total if cuda else event.cpu_time_total
            found[attribution.owner(max(event.sequence_nr, 0))] += spent / 1e6
    return dict(found)


def _communication(events: Iterable[Any], cuda: bool) -> float:
    """Seconds covered by collectives, those that overlap counted once."""
    spans = sorted(
        (one.time_range.start, one.time_range.end)
        for one in events
        if _on_device(one, cuda) and group_of(one.name) == "communication"
    )
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered / 1e6


def _on_device(event: Any, cuda: bool) -> bool:
    return bool(event.device_type.name == ("CUDA" if cuda else "CPU"))
