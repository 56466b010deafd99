"""Parallel training on the GPUs of one machine: is it right, how fast is it, what does communication cost,
and what do peers reach.

    PYTHONPATH=. python benchmarks/parallel.py --world 2            everything on two GPUs: parity, then speed
    PYTHONPATH=. python benchmarks/parallel.py --world 4 --only 'speed/tp*' parity
    PYTHONPATH=. python benchmarks/parallel.py --world 4 --shape t5-lora --only speed
    PYTHONPATH=. python benchmarks/parallel.py --world 2 --device cpu --shape tiny      every path without a
                                                                                        GPU, with gloo
    PYTHONPATH=. python benchmarks/parallel.py --world 2 --device cpu --shape 70b-fp8 --tiny --only speed

It starts its own ranks: every job has fresh processes, forked from this one, which has imported everything
and never touches a GPU. So a job that fails, runs out of memory or hangs is ended and recorded, and the next
one begins with empty devices. Jobs go by importance, and those for which `--budget` seconds do not suffice
are listed as not run. Results are written after every job, to parallel-WORLD.json and parallel-WORLD.md in
the folder $OUT, or the working directory.

Parity: tiny models in float32 without TF32 (and one in bf16), every gradient under a plan beside plain
autograd on one device.

Speed: a `--shape` is a CASE of benchmarks/shapes.py with random weights, its rows those per GPU: bf16 weights
under autocast, float32 tensors of the method, AdamW, dropout 0, no clipping. Each rank draws its part of the
weights on its device, the same numbers under every plan. A step is forward, backward, every sum over ranks
and the update; ranks meet before it, and it is over when the last rank is done. Tokens are those that are
not padding. `one` and `peft` are one GPU, by petune and by transformers + peft; what splits rows has a GPU's
rows on each; what cuts a decoder is measured with as many in all as on one GPU, and with as many per GPU.
Peers, of decoders only: peft under torch's DDP, and under FSDP2 block by block in bf16. `8b`, the first
choice, is Llama 3.1 8B with LoRA r=16 on all projections and rows of 2,048 tokens; `8b-256k` is one row on
all GPUs, which only the plans that cut sequences take; `70b-fp8` fits no single GPU. `--tiny` makes any of
them tiny.

The file is long because what is measured, how ranks are started and what is printed belong to one program
that has to work alone.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import gzip
import json
import multiprocessing
import os
import platform
import re
import socket
import statistics
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from fnmatch import fnmatch
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from benchmarks.shapes import SHAPES as MODELS
from benchmarks.shapes import TINY, Case, Sizes, base_model, batches, method_settings
from petune.files.ranges import RangeReader
from petune.kernels.configs import KernelsName, MemoryConfig
from petune.kernels.memory.private_pools import held_bytes, peak_bytes
from petune.methods import tune, tuned_parameters
from petune.methods.configs import make_config
from petune.models import family_of
from petune.models.contents import NO_PLAN, Contents, TensorPart, allocate, attach, make_buffers
from petune.models.fresh import box_of, tuned_owner
from petune.parallel import (
    Mesh,
    Objective,
    ParallelConfig,
    ParallelPlan,
    Runner,
    alone,
    describe,
    make_mesh,
    make_plan,
    parallelize,
)
from petune.parallel.configs import BACKENDS
from petune.parallel.launch import process_group
from petune.recipe import Recipe
from petune.run.fusing import fuse
from petune.run.objective import objective_of
from petune.tasks import TASKS, count
from tests.methods import zoo

try:
    import peft
except ImportError:  # the jobs of peers then say so
    peft = None  # type: ignore[assignment]

Batch = dict[str, Tensor]
Pair = tuple[Connection, Connection]  # the parent's end and a rank's
Axes = dict[str, dict[str, Any]]  # backend -> its settings, as in a recipe

GIB = 2**30
LONGEST_S = 25.0  # of the steps of one case, if three count by then
ENVIRONMENT = {
    # NVLink multicast can put GPUs that others share out of service
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    # asking whether there is a GPU must not start CUDA in the process that forks
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


@dataclass(frozen=True)
class Shape:
    """What speed is measured of. The rows of `case` are those per GPU, or where they go `together` those on
    all. sizes: of the model, where they are not the case's. stages: blocks of so many stages of a pipeline,
    where a plan's own would not count that a decoder's blocks are dearer.
    """

    case: Case
    sizes: Sizes = field(default_factory=dict)
    together: bool = False
    stages: Mapping[int, list[int]] = field(default_factory=dict)

    @property
    def task(self) -> str:
        """What the model is trained for."""
        return MODELS[self.case.shape].task


_LONGEST: Sizes = {"max_position_embeddings": 524288}
_SMALL: Sizes = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SHAPES = {
    "8b": Shape(Case.parse("petune:llama-8b:lora:4x2048:limit=60")),
    "8b-12": Shape(Case.parse("petune:llama-8b:lora:4x2048:layers=12:limit=60")),
    "8b-16k": Shape(Case.parse("petune:llama-8b:lora:1x16384:limit=90")),
    "8b-256k": Shape(Case.parse("petune:llama-8b:lora:1x262144:limit=400"), _LONGEST, together=True),
    "8b-512k": Shape(Case.parse("petune:llama-8b:lora:1x524288:limit=500"), _LONGEST, together=True),
    "70b": Shape(Case.parse("petune:llama-70b:lora:2x2048:layers=80:limit=120")),
    "70b-40": Shape(Case.parse("petune:llama-70b:lora:1x2048:layers=40:limit=120")),
    "70b-fp8": Shape(Case.parse("petune:llama-70b:lora:2x2048:layers=80:base=fp8:limit=120")),
    "bert-adapter": Shape(Case.parse("petune:bert-large:adapter:32x512:fill=0.3:limit=60")),
    "t5-lora": Shape(Case.parse("petune:t5-large:lora:16x512:fill=0.4:limit=60"), stages={2: [18, 30]}),
    "1b-full": Shape(Case.parse("petune:llama-1b:full:4x2048:limit=60")),
    "moe": Shape(Case.parse("petune:qwen3-moe:lora:4x2048:layers=12:limit=90")),
    "tiny": Shape(Case.parse("petune:llama-8b:lora:4x32:r=4:limit=60"), _SMALL),
}
_EIGHT_BLOCKS: Sizes = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "num_attention_heads"), 8),
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Job:
    """Something that `ranks` fresh processes do together. `run` is a key of RUNS; `rows` are those of a step
    on all ranks; `kernels`, where not None, are used whatever the command line says."""

    name: str
    run: str
    ranks: int
    axes: Axes = field(default_factory=dict)
    rows: int = 0
    recompute: bool = False
    model: str = ""
    method: str = ""
    dtype: str = ""
    limit: float = 60.0
    kernels: KernelsName | None = None


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    world: int
    device: str
    name: str
    tiny: bool
    warm: int
    steps: int
    profile: bool
    start: str
    kernels: KernelsName = "auto"
    traces: str = ""

    @property
    def shape(self) -> Shape:
        """What speed is measured of."""
        shape = SHAPES[self.name]
        if not self.tiny:
            return shape
        small = replace(shape.case, tokens=32, layers=0)
        return replace(shape, case=small, sizes=TINY | _EIGHT_BLOCKS, stages={})


@dataclass
class Outcome:
    """What became of a job: each rank's answer, or why there is none."""

    job: Job
    answers: list[dict[str, Any]]
    error: str = ""
    seconds: float = 0.0


# ------------------------------------------------------------------ the jobs


def backends(world: int) -> dict[str, Axes]:
    """The plans of the parity cells, with unequal shares wherever a plan knows shares."""
    heads = {2: [6, 2], 4: [2, 2, 2, 2]}[world]
    columns, sequence = {2: ([72, 24], [3, 1]), 4: ([40, 24, 24, 8], [4, 3, 2, 1])}[world]
    both = {"heads": heads, "columns": columns}
    found: dict[str, Axes] = {
        "dp": {"dp": {"shares": [3, 1] if world == 2 else [2, 1, 1, 1]}},
        "shard": {"dp": {"size": world, "shard": True}},
        "tp": {"tp": {**both, "vocabulary": True}},
        "tp-overlap": {"tp": {**both, "overlap": True}},
        "sp-gather": {"sp": {"sequence": sequence}},
        "sp-ulysses": {"sp": {"sequence": sequence, "exchange": "ulysses"}},
        "sp-ring": {"sp": {"sequence": sequence, "exchange": "ring"}},
        "sp-gather-overlap": {"sp": {"sequence": sequence, "overlap": True}},
        "sp-ulysses-overlap": {"sp": {"sequence": sequence, "exchange": "ulysses", "overlap": True}},
        "galaxy": {"galaxy": {**both, "sequence": sequence}},
        "galaxy-overlap": {"galaxy": {**both, "sequence": sequence, "overlap": True}},
        "galaxy2": {"galaxy2": {"heads": heads, "sequence": sequence}},
        "pp": {"pp": {"stages": [2, 1] if world == 2 else [1, 1, 2, 1], "microbatches": world + 1}},
        "pp-interleaved": {
            "pp": {"size": 2, "stages": [2, 1, 1, 1], "schedule": "interleaved", "microbatches": 4}
        },
        "pp-zero-bubble": {
            "pp": {"size": 2, "stages": [2, 1, 1, 1], "schedule": "zero-bubble", "microbatches": 4}
        },
    }
    if world == 4:
        del found["pp-interleaved"], found["pp-zero-bubble"]
        two: Axes = {
            "dp": {"shares": [2, 1]},
            "pp": {"stages": [2, 1], "microbatches": 2},
            "tp": {"heads": [6, 2], "columns": [72, 24]},
        }
        two["galaxy"] = {**two["tp"], "sequence": [3, 1]}
        for one, other in (("dp", "tp"), ("dp", "galaxy"), ("dp", "pp"), ("tp", "pp"), ("galaxy", "pp")):
            found[f"{one} x {other}"] = {one: two[one], other: two[other]}
        for other in ("tp", "pp"):
            found[f"shard x {other}"] = {"dp": {"size": 2, "shard": True}, other: two[other]}
    return found


# Their experts in a block: one has a dense block too, the other biases and transposed weights.
EXPERTS = {"qwen3moe-causal": 5, "gptoss-causal": 4}


def expert_backends(world: int, experts: int) -> dict[str, Axes]:
    """The plans of the parity cells of experts: shared by ranks unequally, in replicas too, cut by columns,
    and sharded."""
    counts, shares = [1] * (world - 1) + [experts - world + 1], {2: [3, 1], 4: [2, 1, 1, 1]}[world]
    return {
        "ep": {"ep": {"shares": shares, "experts": counts}},
        "tp": {"tp": {"size": world}},
        "shard": {"dp": {"size": world, "shard": True}},
        **({"dp x ep": {"dp": {"size": 2}, "ep": {"size": 2}}} if world == 4 else {}),
    }


def parity_jobs(world: int) -> list[Job]:
    """Every plan on a decoder and an encoder, LoRA and full, in float32; and LoRA on a wider decoder in
    bf16."""
    cells = []
    for name, axes in backends(world).items():
        for model in ("llama-causal", "bert-classify"):
            for method in ("lora", "full"):
                own = {
                    axis: {key: value for key, value in one.items() if key != "vocabulary"}
                    for axis, one in axes.items()
                }
                cells.append((name, axes if model == "llama-causal" else own, model, method, "fp32"))
        cells.append((name, axes, "llama-causal", "lora", "bf16"))
    for model, experts in EXPERTS.items():
        for name, axes in expert_backends(world, experts).items():
            cells += [(name, axes, model, method, "fp32") for method in ("lora", "full")]
    cells.sort(key=lambda cell: cell[4] == "bf16")
    return [
        Job(
            f"parity/{name}/{model}/{method}/{dtype}",
            "parity",
            world,
            axes,
            6,
            False,
            model,
            method,
            dtype,
            20,
            # kernels that have to fuse find nothing there
            "auto" if (model, method) == ("bert-classify", "full") and "overlap" in name else None,
        )
        for name, axes, model, method, dtype in cells
    ]


def speed_jobs(world: int, shape: Shape) -> list[Job]:
    """The measured cases, most wanted first."""
    rows, limit = shape.case.rows, shape.case.limit
    many = rows * world

    def made(name: str, run: str, ranks: int, total: int, axes: Axes | None = None) -> Job:
        return Job(f"speed/{name}/{total}", run, ranks, axes or {}, total, limit=limit)

    def ours(name: str, total: int, **axes: dict[str, Any]) -> Job:
        return made(name, "petune", world, total, axes)

    def cut(name: str, **settings: Any) -> dict[str, dict[str, Any]]:
        return {name: {"size": world, "vocabulary": True, **settings}}

    def pipeline(microbatches: int, schedule: str = "1f1b") -> dict[str, dict[str, Any]]:
        stages = shape.stages.get(world if schedule == "1f1b" else 2 * world)
        given = {} if stages is None else {"stages": stages}
        return {"pp": {"size": world, **given, "schedule": schedule, "microbatches": microbatches}}

    def sequences(total: int) -> list[Job]:
        ways = ("gather", {}), ("ulysses", {}), ("ring", {})
        hidden = [(way, {"overlap": True}) for way in ("gather", "ulysses")]
        return [
            ours(f"sp {way}{' overlap' * bool(more)}", total, sp={"size": world, "exchange": way, **more})
            for way, more in (*ways, *hidden)
        ]

    if shape.together:
        return sequences(rows)
    one, dp = made("one", "petune", 1, rows), ours("dp", many, dp={"size": world})
    if shape.task != "causal":
        whole = {"size": world} if shape.task == "classify" else {"size": world, "vocabulary": True}
        staged = [ours("pp", total, **pipeline(8)) for total in (many, 8 * rows)]
        cuts = [ours(name, total, **{name: whole}) for total in (many, 4 * many) for name in ("galaxy", "tp")]
        return [one, made("one", "petune", 1, 4 * rows), dp, *cuts, *staged]
    jobs = [
        one,
        made("peft", "plain", 1, rows),
        dp,
        made("peft ddp", "ddp", world, many),
        ours("shard", many, dp={"size": world, "shard": True}),
        ours("shard kept", many, dp={"size": world, "shard": True, "reshard": False}),
        made("peft fsdp2", "fsdp2", world, many),
    ]
    if MODELS[shape.case.shape].experts:
        jobs.append(made("one", "petune", 1, 2 * rows))
        jobs += [ours("ep", total, ep={"size": world}) for total in (many, 2 * many)]
    for total in (many, rows):
        jobs += [ours("tp", total, **cut("tp")), ours("tp overlap", total, **cut("tp", overlap=True))]
        jobs += [
            ours("galaxy", total, **cut("galaxy")),
            ours("galaxy overlap", total, **cut("galaxy", overlap=True)),
        ]
        if total >= world:
            jobs.append(ours("pp", total, **pipeline(total)))
    jobs += sequences(many)
    if world == 4:
        sharded = ("dp", {}), ("shard", {"shard": True})
        jobs.append(ours("dp x tp", many, dp={"size": 2}, tp={"size": 2, "vocabulary": True}))
        jobs.append(ours("dp x galaxy", many, dp={"size": 2}, galaxy={"size": 2, "vocabulary": True}))
        stages = {"size": 2, "microbatches": rows}
        jobs += [ours(f"{name} x pp", many, dp={"size": 2, **more}, pp=stages) for name, more in sharded]
    jobs.append(ours("pp", 2 * many, **pipeline(2 * many)))
    split = ("interleaved", *(["zero-bubble"] if shape.case.method == "full" else []))
    jobs += [
        ours(f"pp {name}", total, **pipeline(total, name)) for name in split for total in (many, 2 * many)
    ]
    if many > 8:
        schedules = {"pp 8": "1f1b", "pp interleaved 8": "interleaved"}
        jobs += [ours(name, many, **pipeline(8, schedule)) for name, schedule in schedules.items()]
    return jobs


def all_jobs(options: Options, only: Sequence[str], skip: Sequence[str]) -> list[Job]:
    """What is to be done, in order: a look at the machine, parity, speed. `only` and `skip`: patterns or
    beginnings of names."""
    found = [Job("probe", "probe", options.world), Job("join", "join", options.world, limit=40)]
    if options.world in (2, 4):
        found += parity_jobs(options.world)
    found += speed_jobs(options.world, options.shape)

    def named(job: Job, patterns: Sequence[str]) -> bool:
        return any(fnmatch(job.name, pattern) or job.name.startswith(f"{pattern}/") for pattern in patterns)

    return [job for job in found if (not only or named(job, only)) and not named(job, skip)]


# ------------------------------------------------------------------ inside a rank


@dataclass
class Here:
    """This rank. `device` is its own."""

    rank: int
    world: int
    device: torch.device

    @property
    def cuda(self) -> bool:
        """Whether there are GPUs."""
        return self.device.type == "cuda"

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def meet(self, flag: bool = False) -> bool:
        """Wait for the device and for every rank; whether any of them raised its flag."""
        flags = torch.tensor(float(flag), device=self.device)
        if self.world > 1:
            dist.all_reduce(flags)
        self.sync()
        return bool(flags)

    def allocated(self, peak: bool = False) -> float:
        """GiB of tensors on the device with what CUDA graphs hold, now or at most since the last reset; 0 on
        a CPU."""
        if not self.cuda:
            return 0.0
        return (peak_bytes if peak else held_bytes)(self.device) / GIB


def probe(job: Job, here: Here, options: Options) -> dict[str, Any]:
    """What the machine is, and the bus bandwidth of an all-reduce of 256 MiB."""
    x = torch.ones(2**27 if here.cuda else 2**16, dtype=torch.bfloat16, device=here.device)
    dist.all_reduce(x)
    if float(x[-1]) != here.world:
        raise RuntimeError(f"an all-reduce of ones over {here.world} ranks gave {float(x[-1])}")
    times = []
    for _ in range(10):
        here.meet()
        began = time.perf_counter()
        dist.all_reduce(x)
        here.sync()
        times.append(time.perf_counter() - began)
    bandwidth = (
        2 * (here.world - 1) / here.world * x.numel() * x.element_size() / statistics.median(times) / 1e9
    )
    name = torch.cuda.get_device_name() if here.cuda else "CPU"
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if here.cuda else "-"
    return {"device": name, "nccl": nccl, "all_reduce_GB_per_s": round(bandwidth, 1)}


def join(job: Job, here: Here, options: Options) -> dict[str, Any]:
    """petune's own way into a group and out of it, as `petune train` goes under torchrun."""
    began = time.perf_counter()
    rank, world = process_group.join("cuda" if here.cuda else "cpu", timeout_s=30, start_timeout_s=30)
    ones = torch.ones((), device=here.device)
    dist.all_reduce(ones)
    joined = time.perf_counter() - began
    process_group.leave()
    if (rank, world, float(ones)) != (here.rank, here.world, here.world):
        raise RuntimeError(f"rank {rank} of {world} sums to {float(ones)}")
    return {"joined_s": round(joined, 2)}


def settings_of(axes: Axes) -> ParallelConfig:
    """The axes as a recipe's `parallel` would give them."""
    makers: dict[str, Any] = dict(BACKENDS)
    made: dict[str, Any] = {
        name: makers[name](
            **{key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}
        )
        for name, one in axes.items()
    }
    return ParallelConfig(**made)


def objective_for(task: str, here: Here, dtype: torch.dtype) -> Objective:
    """What a runner needs to know of a task, as in training."""
    return replace(
        objective_of(TASKS[task], None),
        autocast=lambda: torch.autocast(here.device.type, dtype, enabled=dtype is torch.bfloat16),
    )


# ------------------------------------------------------------------ parity


@cache
def _mesh(sizes: tuple[int, int, int, int], device: torch.device) -> Mesh:
    dp, tp, pp, ep = sizes
    return make_mesh(ParallelPlan(dp=dp, tp=tp, pp=pp, ep=ep), device)


def parity(job: Job, here: Here, options: Options) -> dict[str, Any]:
    """Loss and every gradient of one step under the plan, beside plain autograd in float32 on this rank's
    device alone.

    own: how far plain autograd in bf16 is from that.
    """
    task, wide = job.model.partition("-")[2], job.dtype == "bf16"
    dtype = torch.bfloat16 if wide else torch.float32
    # By columns and heads the wider model has the same lists. It is of a size that fused kernels of attention
    # take.
    sizes: dict[str, Any] = {"hidden_size": 256, "max_position_embeddings": 256} if wide else {}
    batch = zoo.batch(job.model, rows=job.rows, length=192 if wide else 13)
    config = settings_of(job.axes)
    layers = sum(config.pp.stages) if config.pp else 2

    def made() -> nn.Module:
        model: nn.Module = zoo.tiny(job.model, num_hidden_layers=layers, **sizes).to(dtype)
        torch.manual_seed(3)
        tune(model, make_config(job.method, zoo.SETTINGS[job.method]))
        zoo.stir(model, std=0.1)
        return model.train()

    objective, total = objective_for(task, here, dtype), count(batch)
    loss, expected = _in_one_process(
        made().float(), batch, objective_for(task, here, torch.float32), total, here
    )
    own = (
        _differences(_in_one_process(made(), batch, objective, total, here)[1], expected)["of_norm"]
        if wide
        else 0.0
    )
    model = made()
    plan = make_plan(
        config, family_of(model), model.config, here.world, job.rows, vocabulary_head=task != "classify"
    )
    mesh = replace(_mesh((plan.dp, plan.tp, plan.pp, plan.ep), here.device), plan=plan)
    runner = Runner(parallelize(model, family_of(model), plan, mesh, objective.tuned), objective)
    fuse_as_training_does(runner, job, options)
    mine = runner.share(list(range(job.rows)))
    part = {name: value[mine] for name, value in batch.items()} | {"rows": torch.tensor(mine)}
    found = runner.backward([part], total)
    gradients = runner.whole({name: _gradient(value) for name, value in runner.tuned.items()})
    answer = {"plan": describe(plan), "loss": loss, "loss_difference": abs(found - loss), "own": own}
    return answer | (_differences(gradients, expected) if mesh.main else {})


def _in_one_process(
    model: nn.Module, batch: Batch, objective: Objective, total: float, here: Here
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the model's own forward pass and autograd, without a group, stacks or hooks."""
    model.to(here.device)
    batch = {name: value.to(here.device) for name, value in batch.items()}
    with objective.autocast():
        outputs = objective.forward(model, batch)
    loss = objective.loss(outputs, batch) / total
    loss.backward()
    return float(loss.detach()), {
        name: _gradient(value).cpu() for name, value in tuned_parameters(model).items()
    }


def _gradient(value: nn.Parameter) -> Tensor:
    return torch.zeros_like(value) if value.grad is None else value.grad


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    """The largest difference of an entry; the same over the largest entry of its tensor (or a hundredth of
    the largest of all, as some gradients are zero but for rounding); and the difference over the norm, of all
    gradients as one vector."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"other tensors train: {sorted(found.keys() ^ expected.keys())[:4]}")
    pairs = {name: (found[name].double(), value.double()) for name, value in expected.items()}
    largest = max(float(value.abs().max()) for _, value in pairs.values())
    each = {name: float((one - value).abs().max()) for name, (one, value) in pairs.items()}
    relative = {
        name: each[name] / max(float(value.abs().max()), largest / 100) for name, (_, value) in pairs.items()
    }
    worst = max(
        relative, key=lambda name: relative[name] if relative[name] == relative[name] else float("inf")
    )
    squares = [
        (float((one - value).square().sum()), float(value.square().sum())) for one, value in pairs.values()
    ]
    of_norm = (sum(one for one, _ in squares) / sum(value for _, value in squares)) ** 0.5
    return {
        "difference": max(each.values()),
        "relative": relative[worst],
        "of_norm": of_norm,
        "tensors": len(each),
        "worst": worst,
    }


# float32 sums in another order: of the norm, and of the largest entry of any tensor. A sum that is missing is
# wrong by its whole size.
CLOSE, CLOSE_ENTRY = 1e-5, 1e-3


def passes(outcome: Outcome) -> bool:
    """Whether a parity cell agrees: float32 in every entry, bf16 in the norm, where plain bf16 is off too."""
    if outcome.error:
        return False
    first = outcome.answers[0]
    of_loss = max(answer["loss_difference"] for answer in outcome.answers) / max(1.0, abs(first["loss"]))
    if outcome.job.dtype == "fp32":
        return bool(first["of_norm"] <= CLOSE and of_loss <= CLOSE and first["relative"] <= CLOSE_ENTRY)
    return bool(first["of_norm"] <= 1.5 * first["own"] and of_loss <= 1e-2)


# ------------------------------------------------------------------ speed


class Drawn(Contents):
    """Contents that no file holds, drawn on the device they go to: a rank's part of a tensor is the same
    whatever the plan."""

    def _draw(self, part: TensorPart, reader: RangeReader) -> None:
        if tuned_owner(self.model, part.name) is not None:
            super()._draw(part, reader)
            return
        name, out = self.names.get(part.name, part.name), part.out
        whole = torch.empty(self._like(name).shape, dtype=out.dtype, device=out.device)
        if whole.dim() == 1:
            whole.fill_(float(not name.endswith("bias")))
        else:
            draw = torch.Generator(out.device).manual_seed(zlib.crc32(name.encode()))
            whole.normal_(std=0.02, generator=draw)
        out.detach().copy_(box_of(whole, part.start, out.shape))


def untouched(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Contents]:
    """The base model, its parameters in `dtype` on the meta device, and what they hold."""
    model = base_model(shape.case, "meta", shape.sizes)
    for value in model.parameters():
        value.data = value.data.to(dtype)
    contents = Drawn(model, {}, NO_PLAN, 0, "random weights")
    make_buffers(model, contents)
    return model, contents


def batch_of(shape: Shape, model: Any, total: int) -> tuple[Batch, dict[str, float]]:
    """The `total` rows of a step, and how many of their tokens are no padding and count in the loss."""
    batch, tokens = batches(replace(shape.case, rows=total), model.config.vocab_size)[0]
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    if shape.task == "causal":
        batch["labels"][:, 0] = -100  # nothing is before it
    return batch, {"tokens": tokens, "trained": count(batch)}


def petune_steps(job: Job, here: Here, options: Options) -> dict[str, Any]:
    """Steps of petune's runner under the job's plan."""
    runner, step, counts = stepper(options.shape, settings_of(job.axes), job, here, options)
    return {"plan": describe(runner.plan), **counts, **measured(step, job, here, options)}


def stepper(
    shape: Shape,
    config: ParallelConfig,
    job: Job,
    here: Here,
    options: Options,
    dtype: torch.dtype = torch.bfloat16,
    mesh: Mesh | None = None,
) -> tuple[Runner, Callable[[], float], dict[str, float]]:
    """petune's runner under a plan, a step of the job's rows with it, which gives its loss, and how many
    tokens these have. mesh: of another plan with axes as long, whose groups are used again."""
    case = shape.case
    model, contents = untouched(shape, dtype)
    tune(model, make_config(case.method, method_settings(case)))
    for value in tuned_parameters(model).values():
        value.data = value.data.float()
    attach(model, contents)
    batch, counts = batch_of(shape, model, job.rows)
    family, head = family_of(model), TASKS[shape.task].over_vocabulary
    plan = make_plan(config, family, model.config, here.world, job.rows, vocabulary_head=head)
    if mesh is None:
        mesh = make_mesh(plan, here.device) if here.world > 1 else alone(here.device)
    mesh = replace(mesh, plan=plan)
    objective = objective_for(shape.task, here, dtype)
    more: dict[str, Any] = {"recompute": job.recompute, "base_dtype": case.base or None}
    runner = Runner(parallelize(model, family, plan, mesh, objective.tuned, **more), objective)
    fuse_as_training_does(runner, job, options)
    del model, contents
    for module in runner.modules:
        module.train()
    mine = runner.share(list(range(job.rows)))
    part = {name: value[mine] for name, value in batch.items()} | {"rows": torch.tensor(mine)}
    optimizer = torch.optim.AdamW(runner.tuned.values(), lr=1e-4, fused=here.cuda)

    def step() -> float:
        loss = runner.backward([part], counts["trained"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return runner, step, counts


def fuse_as_training_does(runner: Runner, job: Job, options: Options) -> None:
    """Fused blocks, or single modules where the plan leaves blocks as they are."""
    kernels, memory = job.kernels or options.kernels, MemoryConfig()
    how: dict[str, Any] = {"kernels": kernels, "memory": memory, "gradient_checkpointing": job.recompute}
    fuse(runner, Recipe.model_construct(**how, compile=False))


def peer_steps(job: Job, here: Here, options: Options) -> dict[str, Any]:
    """Steps of transformers + peft, each rank with rows of its own: alone, under DDP, or under FSDP2."""
    if peft is None:
        raise RuntimeError("peft is not installed here")
    shape = options.shape
    case = shape.case
    if shape.task != "causal" or case.method != "lora" or case.base:
        raise RuntimeError("peers are measured with LoRA on decoders in bf16 only")
    base, contents = untouched(shape)
    contents.remember(base)

    def place(value: nn.Parameter) -> nn.Parameter:
        return nn.Parameter(torch.empty_like(value, device=here.device))

    made = allocate([base], place)
    contents.fill(TensorPart(name, value.data, (0,) * value.dim()) for name, value in made)
    base.to(here.device)
    config = peft.LoraConfig(
        r=case.r,
        lora_alpha=2 * case.r,
        lora_dropout=0.0,
        target_modules=list(MODELS[case.shape].linears),
        task_type="CAUSAL_LM",
    )
    model: Any = peft.get_peft_model(base, config)
    if job.recompute:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    if job.run == "fsdp2":
        _fully_shard(model, here)
    if job.run == "ddp":
        model = DistributedDataParallel(
            model, device_ids=[here.device.index] if here.cuda else None, gradient_as_bucket_view=True
        )
    whole, counts = batch_of(shape, base, job.rows)
    del base, contents, made
    own = job.rows // here.world
    batch = {
        name: value[own * here.rank : own * (here.rank + 1)].to(here.device) for name, value in whole.items()
    }
    optimizer = torch.optim.AdamW(
        [value for value in model.parameters() if value.requires_grad], lr=1e-4, fused=here.cuda
    )

    def step() -> Tensor:
        # FSDP2's policy casts by itself; the others train as transformers' Trainer does with bf16
        with torch.autocast(here.device.type, torch.bfloat16, enabled=job.run != "fsdp2"):
            loss: Tensor = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return {
        "plan": f"transformers + peft {peft.__version__}, {job.run}",
        **counts,
        **measured(step, job, here, options),
    }


def _fully_shard(model: Any, here: Here) -> None:
    """torch's FSDP2 as its tutorials have it: every block a unit, then the root; computed in bf16, gradients
    reduced in float32."""
    mesh = init_device_mesh(here.device.type, (here.world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    units = [*model.get_base_model().model.layers, model]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        if not here.cuda:  # gloo has no mean
            unit.set_gradient_divide_factor(float(here.world))
            unit.set_force_sum_reduction_for_comms(True)


def measured(step: Callable[[], float | Tensor], job: Job, here: Here, options: Options) -> dict[str, Any]:
    """Seconds of each step, GiB after placing and at the peak of the steps, and losses; this rank's, and what
    a profile of a step says."""
    gc.collect()
    if here.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    placed, times, losses = here.allocated(), [], []
    late = time.perf_counter() + LONGEST_S
    for turn in range(options.warm + options.steps):
        if here.meet(time.perf_counter() > late) and turn >= options.warm + 3:
            break
        began = time.perf_counter()
        losses.append(step())
        here.sync()
        times.append(time.perf_counter() - began)
    reserved = torch.cuda.max_memory_reserved() / GIB if here.cuda else 0.0
    found = {
        "times": times[options.warm :],
        "placed_GiB": placed,
        "peak_GiB": here.allocated(peak=True),
        "reserved_GiB": reserved,
        "losses": [float(losses[0]), float(losses[-1])],
    }
    return found | (_profile(step, job, here, options) if options.profile and here.cuda else {})


# ------------------------------------------------------------------ where a step's time goes


def _profile(step: Callable[[], Any], job: Job, here: Here, options: Options) -> dict[str, Any]:
    """One step under the profiler; what it cannot say is said to be missing, as the times are measured
    already."""
    here.meet()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                step()
                here.sync()
            profiler.export_chrome_trace(f"{folder}/trace.json")
            trace = Path(folder, "trace.json").read_text(encoding="utf-8", errors="replace")
            if options.traces:
                name = re.sub(r"\W+", "-", f"{job.name}-{here.rank}")
                Path(options.traces, f"{name}.json.gz").write_bytes(gzip.compress(trace.encode()))
            return {"profile": shares(json.loads(trace))}
        except Exception as error:
            return {"profile_error": f"{type(error).__name__}: {error}"[:300]}


def shares(trace: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of one step on one GPU, from its first kernel to the end of its last.

    communication: some NCCL kernel runs, waiting for other ranks included. exposed: of that, no other kernel
    runs beside it. compute: some other kernel or copy runs. idle: nothing runs.
    """
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in trace["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            found["nccl" in event.get("name", "").lower()].append((event["ts"], event["ts"] + event["dur"]))
    every = found[True] + found[False]
    if not every:
        raise ValueError("the trace has no kernels")
    span = max(end for _, end in every) - min(begin for begin, _ in every)
    communication, compute, busy = covered(found[True]), covered(found[False]), covered(every)
    return {
        "span_ms": span / 1e3,
        "communication_ms": communication / 1e3,
        "exposed_ms": (busy - compute) / 1e3,
        "compute_ms": compute / 1e3,
        "idle_ms": (span - busy) / 1e3,
    }


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, last = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, last))
        last = max(last, end)
    return total


RUNS: dict[str, Callable[[Job, Here, Options], dict[str, Any]]] = {
    "probe": probe,
    "join": join,
    "parity": parity,
    "petune": petune_steps,
    "plain": peer_steps,
    "ddp": peer_steps,
    "fsdp2": peer_steps,
}


# ------------------------------------------------------------------ starting ranks


def rank_main(
    rank: int, port: int, folder: str, ends: Sequence[Pair], jobs: Sequence[Job], options: Options
) -> None:
    """Do the jobs and answer each; stay until this process's parent has heard of every rank, then leave
    without tidying up."""
    for other, (theirs, mine) in enumerate(ends):  # of a rank that dies, nobody else may hold an end open
        theirs.close()
        if other != rank:
            mine.close()
    end, world = ends[rank][1], len(ends)
    os.environ |= ENVIRONMENT | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def say(kind: str, value: Any) -> None:
        end.send_bytes(json.dumps([kind, value]).encode())

    with open(f"{folder}/stack-{rank}", "w", encoding="utf-8") as stack, suppress(EOFError, OSError):
        try:
            here = _enter(rank, world, port, jobs[0].run != "join", options)
            for job in jobs:
                # a thread's work, as a driver's call that does not come back keeps signals waiting, too
                faulthandler.dump_traceback_later(job.limit - 1, file=stack)
                say("done", RUNS[job.run](job, here, options))
                faulthandler.cancel_dump_traceback_later()
        except BaseException:
            say("failed", traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        end.recv_bytes()
    os._exit(0)


def _enter(rank: int, world: int, port: int, grouped: bool, options: Options) -> Here:
    """This rank's device, and the group of all ranks."""
    warnings.simplefilter("ignore", FutureWarning)  # one from every rank of every job
    torch.manual_seed(1000 + rank)
    torch.set_float32_matmul_precision("highest")
    if options.device == "cuda":
        here = Here(rank, world, torch.device("cuda", rank))
        torch.cuda.set_device(here.device)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world))  # as petune train
    else:
        torch.set_num_threads(1)
        here = Here(rank, world, torch.device("cpu"))
    if world > 1 and grouped:
        dist.init_process_group(
            "nccl" if here.cuda else "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=120),
            device_id=here.device if here.cuda else None,
        )
        here.meet()
    return here


def attempt(jobs: Sequence[Job], options: Options, until: float) -> Iterator[Outcome]:
    """Fresh ranks for jobs of one world size, and their outcomes up to the first that fails or time
    `until`."""
    world = jobs[0].ranks
    context: Any = multiprocessing.get_context(options.start)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ends = [context.Pipe() for _ in range(world)]
        ranks = [
            context.Process(target=rank_main, args=(rank, port, folder, ends, jobs, options), daemon=True)
            for rank in range(world)
        ]
        try:
            for rank in ranks:
                rank.start()
            for _, theirs in ends:
                theirs.close()
            yield from _outcomes(jobs, [mine for mine, _ in ends], ranks, folder, until)
        finally:
            for mine, _ in ends:
                with suppress(OSError):
                    mine.send_bytes(b"end")
                mine.close()
            late = time.monotonic() + 3
            for rank in ranks:
                rank.join(max(0.0, late - time.monotonic()))
                if rank.is_alive():
                    rank.kill()
                rank.join(20.0)


def _outcomes(
    jobs: Sequence[Job], ends: Sequence[Connection], ranks: Sequence[Any], folder: str, until: float
) -> Iterator[Outcome]:
    extra = 30.0  # processes start and meet
    for job in jobs:
        began = time.monotonic()
        if began > until:
            return
        answers, error = _answers(ends, ranks, folder, job.limit + extra)
        yield Outcome(job, answers, error, time.monotonic() - began)
        if error:
            return
        extra = 0.0


def _answers(
    ends: Sequence[Connection], ranks: Sequence[Any], folder: str, limit: float
) -> tuple[list[dict[str, Any]], str]:
    """Every rank's answer to the job that runs, or what went wrong first."""
    answers: dict[int, dict[str, Any]] = {}
    failed: dict[int, str] = {}
    until = time.monotonic() + limit
    while waiting := [end for rank, end in enumerate(ends) if rank not in answers and rank not in failed]:
        ready = wait(waiting, max(0.0, until - time.monotonic()))
        if not ready:
            break
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.index(end)
            try:
                kind, value = json.loads(end.recv_bytes())
            except (EOFError, OSError):
                ranks[rank].join(5)
                kind, value = "failed", f"the process ended with exit code {ranks[rank].exitcode}"
            if kind == "done":
                answers[rank] = value
            else:
                failed[rank] = value
                until = min(until, time.monotonic() + 3)  # its peers now fail too, or wait for ever
    if failed:
        rank, text = next(iter(failed.items()))
        return [], f"rank {rank}: {text.strip()[-6000:]}"
    if len(answers) < len(ends):
        late = [rank for rank in range(len(ends)) if rank not in answers]
        stood = "\n".join(
            f"rank {rank} stands at\n{Path(folder, f'stack-{rank}').read_text(encoding='utf-8')[-3000:]}"
            for rank in late
        )
        return [], f"{stood}\nTimeout: ranks {late} had not finished after {limit:.0f} s"
    return [answers[rank] for rank in range(len(ends))], ""


# ------------------------------------------------------------------ all jobs, whatever happens to one


def outcomes(jobs: Sequence[Job], options: Options, budget: float, parity_budget: float) -> Iterator[Outcome]:
    """Every job's outcome, in order. A case of speed that runs out of memory is tried again with activations
    recomputed.

    What of parity is left when `parity_budget` seconds are spent on it, as hung cells may take long, comes
    after all else.
    """
    until, left = time.monotonic() + budget, list(jobs)
    while left:
        together, began, done = _together(left), time.monotonic(), 0
        if began > until:
            yield Outcome(left.pop(0), [], "not run: out of time")
            continue
        of_parity = left[0].run == "parity" and len(together) < len(left)
        for outcome in attempt(together, options, min(until, began + parity_budget) if of_parity else until):
            if "Cannot re-initialize CUDA in forked" in outcome.error:
                # something imported has touched a GPU: start over, with fresh interpreters
                options = replace(options, start="spawn")
                break
            done += 1
            yield outcome
            if (
                "OutOfMemoryError" in outcome.error
                and outcome.job.run != "parity"
                and not outcome.job.recompute
            ):
                left.insert(done, replace(outcome.job, name=f"{outcome.job.name}/recompute", recompute=True))
        del left[:done]
        parity_budget -= time.monotonic() - began if of_parity else 0.0
        if of_parity and parity_budget <= 0:
            left.sort(key=lambda job: job.run == "parity")


def _together(jobs: Sequence[Job]) -> list[Job]:
    """The jobs that the same ranks do one after the other: cells of parity, which leave nothing behind."""
    first = next((at for at, job in enumerate(jobs) if job.run != "parity"), len(jobs))
    return list(jobs[: max(1, first)])


# ------------------------------------------------------------------ what is printed


def row(outcome: Outcome, options: Options) -> dict[str, Any]:
    """One case of speed with all its ranks in one."""
    job, answers = outcome.job, outcome.answers
    if outcome.error:
        return {"name": job.name, "rows": job.rows, "recompute": job.recompute, "error": outcome.error}
    times = [max(parts) for parts in zip(*(answer["times"] for answer in answers), strict=True)]
    median = statistics.median(times)
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
    profiles = [answer["profile"] for answer in answers if "profile" in answer]
    return {
        "name": job.name,
        "rows": job.rows,
        "ranks": job.ranks,
        "recompute": job.recompute,
        "plan": answers[0]["plan"],
        "tokens_per_s": answers[0]["tokens"] / median,
        "step_s": median,
        "quartiles_s": [quartiles[0], quartiles[2]],
        "placed_GiB": [answer["placed_GiB"] for answer in answers],
        "peak_GiB": [answer["peak_GiB"] for answer in answers],
        "reserved_GiB": [answer["reserved_GiB"] for answer in answers],
        "losses": [statistics.mean(answer["losses"][at] for answer in answers) for at in (0, 1)],
        "profile": (
            {key: statistics.mean(one[key] for one in profiles) for key in profiles[0]} if profiles else None
        ),
        "profile_error": next(
            (answer["profile_error"] for answer in answers if "profile_error" in answer), None
        ),
        "seconds": outcome.seconds,
    }


def line(outcome: Outcome, options: Options) -> str:
    """A job in a line, as soon as it is over."""
    job = outcome.job
    if outcome.error:
        return f"FAIL  {job.name}: {outcome.error.splitlines()[-1][:300]}"
    if job.run == "parity":
        first = outcome.answers[0]
        loss = max(answer["loss_difference"] for answer in outcome.answers)
        numbers = (
            f"loss {loss:.1e}, gradient {first['difference']:.1e}, relative {first['relative']:.1e}, of norm"
            f" {first['of_norm']:.1e}"
        )
        return f"{'PASS' if passes(outcome) else 'FAIL'}  {job.name}: {numbers}, {first['tensors']} tensors"
    if job.run in ("probe", "join"):
        return f"ok    {job.name}: {outcome.answers[0]}"
    found = row(outcome, options)
    text = (
        f"{found['tokens_per_s']:,.0f} tokens/s, step {1e3 * found['step_s']:.0f} ms, peak"
        f" {max(found['peak_GiB']):.1f} GiB"
    )
    return f"ok    {job.name}: {text}, loss {found['losses'][0]:.4f}  [{outcome.seconds:.0f} s]"


def markdown(done: Sequence[Outcome], options: Options, cells: bool = True) -> str:
    """The tables; `cells`: that of parity too."""
    speed = [row(outcome, options) for outcome in done if outcome.job.name.startswith("speed/")]
    parts = [f"# Parallel training, {options.world} ranks, {options.device}, {options.name}", _heading(done)]
    parts += _parity_table([outcome for outcome in done if outcome.job.run == "parity"], cells)
    parts += _speed_table(speed)
    parts += _profile_table([found for found in speed if found.get("profile")])
    failures = [
        f"- {outcome.job.name}: {outcome.error.splitlines()[-1][:300]}" for outcome in done if outcome.error
    ]
    return "\n".join([*parts, "", "## Failures and what was not run", "", *(failures or ["none"])]) + "\n"


def _heading(done: Sequence[Outcome]) -> str:
    versions = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, peft"
        f" {getattr(peft, '__version__', '-')}"
    )
    probes = [outcome.answers[0] for outcome in done if outcome.job.run == "probe" and outcome.answers]
    machine = (
        f"{probes[0]['device']}, NCCL {probes[0]['nccl']}, all-reduce {probes[0]['all_reduce_GB_per_s']} GB/s"
        if probes
        else "-"
    )
    return f"\n{time.strftime('%Y-%m-%d')}: {versions}, Python {platform.python_version()}; {machine}"


def _parity_table(done: Sequence[Outcome], cells: bool) -> list[str]:
    if not done:
        return []
    rows = ["", "## Parity with one process", ""]
    rows.append(
        f"{sum(map(passes, done))} of {len(done)} cells agree: float32 within {CLOSE} by the norm and"
        f" {CLOSE_ENTRY} by any entry;"
    )
    rows += ["bf16, by the norm, within 1.5 times the distance of one process in bf16 from float32.", ""]
    if cells:
        rows += [
            "| plan | model | method | dtype | loss | gradient | relative | of norm | one process | |",
            "|---" * 10 + "|",
        ]
    for outcome in done if cells else ():
        job, first = outcome.job, (outcome.answers or [{}])[0]
        numbers = [
            f"{first[key]:.1e}" if key in first else "-"
            for key in ("loss_difference", "difference", "relative", "of_norm", "own")
        ]
        verdict = "PASS" if passes(outcome) else "FAIL"
        rows.append(
            "| "
            + " | ".join([job.name.split("/")[1], job.model, job.method, job.dtype, *numbers, verdict])
            + " |"
        )
    return rows


def _speed_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = (
        "| case | rows | tokens/s | of one GPU | step ms (quartiles) | GiB placed | GiB peak | loss, first"
        " and last |"
    )
    found = ["", "## Speed", "", head, "|---|---|---|---|---|---|---|---|"]
    alone_by = {
        name: one["tokens_per_s"]
        for one in rows
        for name in ("one", "peft")
        if one["name"].split("/")[1] == name and "plan" in one
    }
    for one in rows:
        name = _title(one)
        if "error" in one:
            found.append(
                f"| {name} | {one['rows']} | {one['error'].splitlines()[-1][:120].replace('|', '/')} | | |"
                " | | |"
            )
            continue
        base = alone_by.get("peft" if name.startswith("peft") else "one")
        times = f"{base and one['tokens_per_s'] / base:.2f} x" if base else "-"
        quartiles = " to ".join(f"{1e3 * value:.0f}" for value in one["quartiles_s"])
        placed, peak = (
            " ".join(f"{value:.1f}" for value in sorted(set(one[key]))) for key in ("placed_GiB", "peak_GiB")
        )
        cells = [
            name,
            one["rows"],
            f"{one['tokens_per_s']:,.0f}",
            times,
            f"{1e3 * one['step_s']:.0f} ({quartiles})",
            placed,
            peak,
        ]
        found.append(
            "| " + " | ".join(map(str, cells)) + f" | {one['losses'][0]:.4f} {one['losses'][1]:.4f} |"
        )
    return found


def _title(one: dict[str, Any]) -> str:
    return str(one["name"].split("/")[1]) + (", recomputed" if one["recompute"] else "")


def _profile_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = "| case | rows | step ms | compute | communication | exposed | idle |"
    text = "One step under the profiler, mean over GPUs; communication holds the wait for other ranks."
    found = ["", "## Where a step's time goes", "", text, "", head, "|---|---|---|---|---|---|---|"]
    for one in rows:
        share = one["profile"]
        parts = [
            f"{share[key]:.0f} ({share[key] / share['span_ms']:.0%})"
            for key in ("compute_ms", "communication_ms", "exposed_ms", "idle_ms")
        ]
        found.append(
            f"| {_title(one)} | {one['rows']} | {share['span_ms']:.0f} | " + " | ".join(parts) + " |"
        )
    return found


def write(done: Sequence[Outcome], options: Options, folder: Path) -> None:
    """What is known so far, on disk."""
    found = {
        "options": asdict(options),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": getattr(peft, "__version__", None),
        },
        "speed": [row(outcome, options) for outcome in done if outcome.job.name.startswith("speed/")],
        "outcomes": [asdict(outcome) for outcome in done],
    }
    (folder / f"parallel-{options.world}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (folder / f"parallel-{options.world}.md").write_text(markdown(done, options), encoding="utf-8")


def main() -> int:
    """Do the jobs; 1 when a parity cell or a job failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2, help="ranks, one per GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes of the shape")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="jobs by pattern or beginning: parity 'speed/tp*'",
    )
    parser.add_argument("--skip", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--warm", type=int, default=3, help="steps before those that count")
    parser.add_argument("--steps", type=int, default=6, help="steps that count")
    parser.add_argument("--budget", type=float, default=440, help="seconds after which no job begins")
    parser.add_argument(
        "--parity-budget",
        type=float,
        default=150,
        help="seconds after which parity waits for speed to be done",
    )
    parser.add_argument(
        "--kernels", choices=get_args(KernelsName), default="auto", help="of petune's jobs, as in a recipe"
    )
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--traces", default="", metavar="DIR", help="keep profiles here")
    parser.add_argument(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="how ranks begin; spawn imports everything anew",
    )
    parser.add_argument("--list", action="store_true", help="say what would be done")
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    options = Options(
        given.world,
        given.device,
        given.shape,
        given.tiny,
        given.warm,
        given.steps,
        not given.no_profile,
        given.start,
        given.kernels,
        given.traces,
    )
    jobs = all_jobs(options, given.only, given.skip)
    if given.list:
        print("\n".join(job.name for job in jobs))
        return 0
    folder, began, done = Path(os.environ.get("OUT", ".")), time.monotonic(), []
    for outcome in outcomes(jobs, options, given.budget, given.parity_budget):
        done.append(outcome)
        print(f"{time.monotonic() - began:5.0f} s  {line(outcome, options)}", flush=True)
        if outcome.error and not outcome.error.startswith("not run"):
            print("\n".join(outcome.error.splitlines()[-12:]), flush=True)
        if outcome.job.run != "parity":
            write(done, options, folder)
    write(done, options, folder)
    print("\n" + markdown(done, options, cells=False), flush=True)
    return int(
        any(outcome.error or (outcome.job.run == "parity" and not passes(outcome)) for outcome in done)
    )


if __name__ == "__main__":
    sys.exit(main())
