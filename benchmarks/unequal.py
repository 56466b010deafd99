"""Two devices of unequal speed: the even plan, the plan made from measured speeds, and what the planner
promises of it.

    PYTHONPATH=. python benchmarks/unequal.py                  tp, galaxy, pp and dp, the second device three
                                                               times slower
    PYTHONPATH=. python benchmarks/unequal.py --slow 2 --steps 15 --only tp pp
    PYTHONPATH=. python benchmarks/unequal.py --every --steps 5          the plan found beside every other

The devices are two processes of one thread, each on a core of its own, that talk through gloo. The second is
slowed by a child on the same core: every millisecond it stops its parent (SIGSTOP), uses the core twice as
long as the parent has just done, and lets it go on. So the parent's computing takes three times as much, on a
busy machine too, and its waiting does not; the ranks meet every 20 ms or more. Both are measured as `petune
plan --auto` does it, at the same time, and so is the link. Then steps of the two plans take turns, so that
whatever else the machine does hits both. A step is as long as on the rank that takes longest. Times are
medians with quartiles, and the fastest step stands beside them, as any other load only slows; the machine's
load is printed. Promised is the planner's time of a step, communication and all.

With --every, the plan found is run beside all others of its backend that give the first device half or more:
of rows (dp), of stages (pp), or of heads (tp and galaxy), with MLP columns in the same ratio or as found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from petune.estimate.cluster import Link
from petune.estimate.forecast import sketch
from petune.estimate.measure import cluster_of, device_facts
from petune.estimate.planner import Planner
from petune.methods import tune, tuned_parameters
from petune.methods.configs import LoraConfig
from petune.models import FAMILIES
from petune.parallel import (
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
from petune.parallel.configs import CutConfig, DpConfig, PpConfig
from petune.parallel.launch.link_speed import link_speed
from petune.recipe import Recipe, load_recipe
from petune.run.evaluate import outputs_of
from petune.tasks import loss_sum
from petune.tasks.loss import trained_positions
from tests.pool import run

CPU = torch.device("cpu")
FAMILY = FAMILIES["llama"]
ROWS, TOKENS, BLOCKS = 4, 256, 4
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": TOKENS,
}
BACKENDS: dict[str, ParallelConfig] = {
    "tp": ParallelConfig(tp=CutConfig(size=2)),
    "galaxy": ParallelConfig(galaxy=CutConfig(size=2, vocabulary=True)),
    "pp": ParallelConfig(pp=PpConfig(size=2, microbatches=ROWS)),
    "dp": ParallelConfig(dp=DpConfig(size=2)),
}
PAIR = (
    *("backend", "plan found", "even, ms", "promised", "as found, ms", "promised"),
    *("ratio promised", "of medians", "of fastest"),
)
EVERY = (
    *("backend", "plan found", "ms", "plans", "best of them", "ms", "found / best"),
    *("promised of all: off by, median", "most"),
)
TICK_S = 1e-3  # between two looks at what the slowed process has used


# ------------------------------------------------------------------ a slow device


@contextmanager
def slowed(times: float) -> Iterator[None]:
    """What this process computes takes `times` as much of its core, for the length of the block; what it
    waits for does not."""
    watched = os.getpid()
    child = os.fork()
    if child == 0:
        _make_slow(watched, times)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _make_slow(watched: int, times: float) -> None:
    """For what `watched` has used of the core, stop it and use the core in its place, until it is gone; never
    returns."""
    clock = (~watched << 3) | 2  # the CPU-time clock of another process: linux/posix-timers.h
    charged = time.clock_gettime(clock)
    while os.getppid() == watched:
        time.sleep(TICK_S)
        os.kill(watched, signal.SIGSTOP)
        used = time.clock_gettime(clock)
        until = time.thread_time() + (times - 1) * (used - charged)
        while time.thread_time() < until:
            pass
        charged = used
        os.kill(watched, signal.SIGCONT)
    os._exit(0)


# ------------------------------------------------------------------ on a rank


def model_of(blocks: int) -> tuple[nn.Module, LlamaConfig]:
    """A Llama in float32, random by a seed, with LoRA on every linear of its blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=blocks, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    tune(model, LoraConfig(r=8))
    return model.train(), config


def stepper(plan: ParallelPlan, blocks: int, rows: int = ROWS) -> Callable[[], float]:
    """One step of `rows` rows under `plan`, all ranks together, or alone; returns its loss."""
    objective = Objective(
        forward=outputs_of,
        loss=lambda outputs, batch: loss_sum(outputs.logits, batch, "causal")[0],
        select=lambda outputs, batch: trained_positions(outputs.logits, batch["labels"], "causal"),
        tuned=tuned_parameters,
    )
    model, _ = model_of(blocks)
    mesh = make_mesh(plan, CPU) if plan.world > 1 else alone(CPU)
    runner = Runner(parallelize(model, FAMILY, plan, mesh, tuned_parameters), objective)
    optimizer = torch.optim.AdamW(runner.tuned.values(), lr=1e-4)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, TOKENS), generator=torch.Generator().manual_seed(1))
    mine = runner.share(list(range(rows)))
    batch = {
        "input_ids": ids[mine],
        "attention_mask": torch.ones_like(ids[mine]),
        "labels": ids[mine],
        "rows": torch.tensor(mine),
    }

    def step() -> float:
        loss = runner.backward([batch], float(rows * (TOKENS - 1)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def seconds(step: Callable[[], float]) -> float:
    """Of one step, which every rank begins at the same time."""
    dist.barrier()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def recipe_of(folder: Path) -> Recipe:
    """The same model and method as a recipe, for what measures and plans."""
    place = folder / "llama.json"
    config = LlamaConfig(**SIZES, num_hidden_layers=BLOCKS, tie_word_embeddings=False)
    place.write_text(json.dumps(config.to_dict()))
    settings = {"model": f"config:{place}", "data": {"path": "nowhere", "max_length": TOKENS}}
    method = {"name": "lora", "r": 8}
    return load_recipe({**settings, "task": "causal", "method": method, "batch_size": ROWS, "device": "cpu"})


def measured_on_a_rank(slow: float, folder: str) -> tuple[dict[str, Any], tuple[float, float]]:
    """What `petune plan --auto` finds of this rank's device and of the link, while the other does the
    same."""
    _own_core()
    with slowed(slow) if dist.get_rank() == 1 and slow > 1 else nullcontext():
        link = link_speed(CPU)
        dist.barrier()
        return device_facts(recipe_of(Path(folder))), link


def steps_on_a_rank(
    plans: list[ParallelPlan], slow: float, number: int
) -> tuple[list[list[float]], list[float]]:
    """Seconds of `number` steps of each plan, which take turns, and the losses of the last."""
    _own_core()
    ways = [stepper(plan, BLOCKS) for plan in plans]
    found: list[list[float]] = [[] for _ in plans]
    with slowed(slow) if dist.get_rank() == 1 and slow > 1 else nullcontext():
        for turn in range(-1, number):  # the first turn warms up
            for times, step in zip(found, ways, strict=True):
                took = seconds(step)
                if turn >= 0:
                    times.append(took)
    return found, [step() for step in ways]


def _own_core() -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[dist.get_rank() % len(cores)]})


# ------------------------------------------------------------------ the table


def compare(name: str, planner: Planner, slow: float, number: int) -> list[str]:
    """A row of the table: the even plan against the one that the planner makes of it."""
    plans = _plans([BACKENDS[name], found_of(name, planner)])
    promised = [planner.clocks[False].of(plan).total for plan in plans]
    times = run_in_turn(name, plans, slow, number)
    cells = [name, describe(plans[1])]
    for took, seconds_ in zip(times, promised, strict=True):
        cells += [spread(took), f"{1e3 * seconds_:.0f}"]
    return [*cells, *(f"{ratio:.2f}" for ratio in ratios_of(promised, times))]


def found_of(name: str, planner: Planner) -> ParallelConfig:
    """What the planner chooses of a backend."""
    return planner.search([BACKENDS[name]]).choices[0].parallel


def _plans(configs: Sequence[ParallelConfig]) -> list[ParallelPlan]:
    _, config = model_of(1)
    config.num_hidden_layers = BLOCKS
    return [make_plan(one, FAMILY, config, 2, ROWS) for one in configs]


def run_in_turn(name: str, plans: list[ParallelPlan], slow: float, number: int) -> list[list[float]]:
    """Seconds of `number` steps of each plan; AssertionError unless all train alike."""
    ranks = run(2, steps_on_a_rank, plans, slow, number, timeout=600)
    losses = ranks[0][1]
    if max(losses) - min(losses) > 1e-3:
        raise AssertionError(f"the plans of {name} train differently: losses {losses}")
    return [
        [max(pair) for pair in zip(*(rank[0][which] for rank in ranks), strict=True)]
        for which in range(len(plans))
    ]


def others_of(name: str, found: ParallelConfig) -> list[ParallelConfig]:
    """Every plan of a backend that gives the first device half or more."""
    changes: list[dict[str, Any]]
    if name == "dp":
        changes = [{"shares": (k, ROWS - k)} for k in range(ROWS // 2, ROWS)]
    elif name == "pp":
        changes = [{"stages": (k, BLOCKS - k)} for k in range(BLOCKS // 2, BLOCKS)]
    else:
        changes = _cuts(getattr(found, name).columns[0])
    return [replace(found, **{name: replace(getattr(found, name), **one)}) for one in changes]


def _cuts(columns: int) -> list[dict[str, Any]]:
    """Heads of both devices, with MLP columns in the same ratio, and with so many for the first."""
    heads, inner, made = SIZES["num_attention_heads"], SIZES["intermediate_size"], []
    for k in range(heads // 2, heads):
        for many in dict.fromkeys((round(inner * k / heads / 8) * 8, columns)):
            made.append({"heads": (k, heads - k), "columns": (many, inner - many)})
    return made


def exhaust(name: str, planner: Planner, slow: float, number: int) -> list[str]:
    """A row of the other table: the plan found against the best of all."""
    found = found_of(name, planner)
    plans = _plans([found, *(one for one in others_of(name, found) if one != found)])
    times = [statistics.median(one) for one in run_in_turn(name, plans, slow, number)]
    promised = [planner.clocks[False].of(plan).total for plan in plans]
    best = min(range(len(plans)), key=times.__getitem__)
    off = [abs(a / b - 1) for a, b in zip(promised, times, strict=True)]
    cells = [name, describe(plans[0]), f"{1e3 * times[0]:.0f}", str(len(plans)), describe(plans[best])]
    cells += [f"{1e3 * times[best]:.0f}", f"{times[0] / times[best]:.3f}"]
    return [*cells, f"{statistics.median(off):.1%}", f"{max(off):.1%}"]


def ratios_of(promised: list[float], times: list[list[float]]) -> tuple[float, float, float]:
    """The plan by speed over the even one: as promised, by medians, by the fastest steps."""
    medians, fastest = [statistics.median(one) for one in times], [min(one) for one in times]
    return promised[1] / promised[0], medians[1] / medians[0], fastest[1] / fastest[0]


def spread(values: list[float]) -> str:
    """Milliseconds: median (quartiles; fastest)."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.0f} ({low:.0f} to {high:.0f}; {1e3 * min(values):.0f})"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", type=float, default=3.0, help="how many times slower the second device is")
    parser.add_argument("--steps", type=int, default=9, help="steps of each plan")
    parser.add_argument(
        "--every", action="store_true", help="beside the plan found, all others of its backend"
    )
    parser.add_argument("--only", nargs="+", choices=tuple(BACKENDS), default=list(BACKENDS))
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = run(2, measured_on_a_rank, given.slow, folder, timeout=300)
        cluster = cluster_of([facts for facts, _ in found], Link(*found[0][1]))
        planner = Planner(sketch(recipe_of(Path(folder))), cluster)
    rates = [device.rates.matmul for device in cluster.devices]
    machine = (
        f"{time.strftime('%Y-%m-%d')}: torch {torch.__version__}, Python {platform.python_version()}, 2 of"
        f" {os.cpu_count()} cores"
    )
    model = f"{ROWS} rows of {TOKENS} tokens, hidden {SIZES['hidden_size']}, {BLOCKS} blocks, LoRA, float32"
    print(f"{machine}, load before {load:.1f}; {model}.")
    print(
        f"Measured speeds {rates[0] / rates[1]:.2f} : 1, asked for {given.slow:g} : 1; link"
        f" {1e6 * cluster.inside.latency:.0f} us, {cluster.inside.bandwidth / 1e9:.2f} GB/s.\n"
    )
    heads, row = (EVERY, exhaust) if given.every else (PAIR, compare)
    print("|", " | ".join(heads), "|\n" + "|---" * len(heads) + "|")
    for name in given.only:
        print("|", " | ".join(row(name, planner, given.slow, given.steps)), "|", flush=True)
    print(f"\nload after {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
