"""Two devices of unequal speed: the even plan, the plan made from measured speeds, and what the planner
promises of it.

    PYTHONPATH=. python benchmarks/unequal.py                  tp, galaxy, pp and dp, the second device three
                                                               times slower
    PYTHONPATH=. python benchmarks/unequal.py --slow 2 --steps 15 --only tp pp
    PYTHONPATH=. python benchmarks/unequal.py --every --steps 5          the plan found beside others, too
    PYTHONPATH=. python benchmarks/unequal.py --link 100,1       over a link of 100 MB/s, 1 ms a message
    PYTHONPATH=. python benchmarks/unequal.py --device cuda --every      two GPUs
    PYTHONPATH=. python benchmarks/unequal.py --shape tiny --twice --every        the same code, without a GPU

The devices of a CPU are two processes of one thread, each on a core of its own, that talk through gloo. The
second is slowed by a child on the same core: every millisecond it stops its parent (SIGSTOP), uses the core
twice as long as the parent has just done, and lets it go on. So the parent's computing takes three times as
much, on a busy machine too, and its waiting does not; the ranks meet every 20 ms or more. A GPU, and a CPU
with --twice, runs its work twice instead (benchmarks/twice.py): operations and kernels, forward and backward,
but for what torch writes in place and what is sent; --slow 3 runs it three times. How much slower a device
is, is measured.

With --link what ranks say is slowed as well (benchmarks/slow_link.py): every message takes its latency and
its bytes, beside what gloo needs for it, in what measures the link as in the steps.

Both are measured as `petune plan --auto` does it, at the same time, and so is the link. Then steps of the two
plans take turns, so that whatever else the machine does hits both. A step is as long as on the rank that
takes longest. Times are medians with quartiles, and the fastest step stands beside them, as any other load
only slows; the machine's load is printed. Promised is the planner's time of a step, communication and all.
Memory is the most that tensors took on a GPU in a step, beside what the planner counts for the rank and what
`petune plan` foretells once blocks are fused, both without what a process takes by itself.

With --every, the plan found is run beside all others of its backend that give the first device half or more:
of rows (dp), of stages (pp), or of heads (tp and galaxy), with MLP columns in the same ratio, as found, or by
a tenth more or less, and of galaxy those found with tokens cut evenly and like heads; or beside the --most of
these that are nearest to it. Everything that was measured goes to unequal.json in the folder $OUT, where
there is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel import ENVIRONMENT, GIB, RUNS, Here, Job, Options, Shape, attempt, stepper
from benchmarks.shapes import TINY, Case, method_settings
from benchmarks.slow_link import slow_link
from benchmarks.twice import Twice
from petune.estimate.balance import reduced
from petune.estimate.choice import PricedPlan
from petune.estimate.cluster import Cluster
from petune.estimate.forecast import PROCESS, priced, sketch
from petune.estimate.fused_forecast import outlook
from petune.estimate.measure import cluster_of, device_facts, link_of
from petune.estimate.planner import Planner
from petune.parallel import Mesh, ParallelConfig, ParallelPlan, describe
from petune.parallel.configs import CutConfig, DpConfig, PpConfig
from petune.parallel.link_speed import link_speed
from petune.parallel.mesh import coordinate
from petune.parallel.plan import apportion
from petune.recipe import Recipe, load_recipe

_ALIKE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SHAPES = {
    "8b": Shape(Case.parse("petune:llama-8b:lora:8x2048:layers=8"), {"vocab_size": 32000}),
    "1k": Shape(
        Case.parse("petune:llama-8b:lora:4x256:layers=4:r=8"),
        {"vocab_size": 512, **dict(zip(_ALIKE, (1024, 2816, 16, 16, 64), strict=True))},
    ),
    "tiny": Shape(
        Case.parse("petune:llama-8b:lora:8x32:layers=8:r=4"),
        TINY | dict(zip(_ALIKE, (64, 128, 8, 4, 8), strict=True)),
    ),
}
NAMES = ("tp", "galaxy", "pp", "dp")
PAIR = (
    *("backend", "plan found", "even, ms", "promised", "as found, ms", "promised"),
    *("ratio promised", "of medians", "of fastest"),
)
EVERY = (
    *("backend", "plan found", "ms", "plans", "best of them", "ms", "found / best"),
    *("promised of all: off by, median", "most"),
)
MEMORY = (
    "backend",
    "plan",
    "rank",
    "GiB by the planner",
    "once fused",
    "measured",
    "planner off",
    "fused off",
)
TICK_S = 1e-3  # between two looks at what the slowed process has used
WARM = {"cpu": 1, "cuda": 3}  # steps of each plan that do not count
ALIKE = 1e-2  # losses of plans that train alike, relatively
MOST_SHOWN = 20  # operations and kernels in unequal.json, of those that ran again
LONGEST_S = 60.0  # of the steps of a backend, if three of each plan count by then


@dataclass(frozen=True)
class Asked:
    """What the command line says. folder: for files of this run; most: plans beside the one found, 0 for
    all; link: bytes a second and seconds of a message, where the link is slowed."""

    device: str
    folder: str
    shape: Shape
    kernels: Any
    dtype: torch.dtype
    twice: bool
    slow: float
    steps: int
    every: bool
    most: int
    link: tuple[float, float] | None

    @property
    def rows(self) -> int:
        """Of a step."""
        return self.shape.case.rows

    @property
    def place(self) -> Path:
        """Of the config's file, which is written before ranks read it."""
        return Path(self.folder, "llama.json")

    def config(self) -> Any:
        """transformers' config of the model."""
        return self.shape.case.config(self.shape.sizes)

    def backend(self, name: str) -> ParallelConfig:
        """A backend over two devices, without shares."""
        return {
            "tp": ParallelConfig(tp=CutConfig(size=2)),
            "galaxy": ParallelConfig(galaxy=CutConfig(size=2, vocabulary=True)),
            "pp": ParallelConfig(pp=PpConfig(size=2, microbatches=self.rows)),
            "dp": ParallelConfig(dp=DpConfig(size=2)),
        }[name]

    def recipe(self) -> Recipe:
        """The same model and method as a recipe, for what measures and plans."""
        case = self.shape.case
        settings = {"model": f"config:{self.place}", "data": {"path": "nowhere", "max_length": case.tokens}}
        settings |= {"task": "causal", "method": {"name": case.method, **method_settings(case)}}
        settings |= {"batch_size": case.rows, "device": self.device, "kernels": self.kernels}
        settings |= {"dtype": "bf16" if self.dtype is torch.bfloat16 else "fp32"}
        return load_recipe(settings)


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


def slow_way(asked: Asked, here: Here) -> AbstractContextManager[Any]:
    """What makes the second device slow, on its rank."""
    if here.rank != 1 or asked.slow <= 1:
        return nullcontext()
    return Twice(round(asked.slow)) if asked.twice else slowed(asked.slow)


def told(run: Callable[[Job, Here, Options], dict[str, Any]], asked: Asked) -> Callable[..., dict[str, Any]]:
    """The same, over the link that was asked for, and whatever is raised on any rank is printed in full."""

    def on_a_rank(job: Job, here: Here, options: Options) -> dict[str, Any]:
        if not here.cuda:
            os.sched_setaffinity(0, {cores_apart()[here.rank]})
        try:
            with nullcontext() if asked.link is None else slow_link(*asked.link):
                return run(job, here, options)
        except BaseException:
            print(f"\nrank {here.rank}, {job.name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            raise

    return on_a_rank


def cores_apart() -> tuple[int, int]:
    """Two processors that share no core, where there are such; else any two, or the only one twice."""
    every = sorted(os.sched_getaffinity(0))
    first, others = every[0], every[1:] or every
    together = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list")
    beside = together.read_text().strip() if together.exists() else ""
    ends = [[int(end) for end in part.split("-")] for part in beside.split(",") if part]
    apart = [one for one in others if not any(low[0] <= one <= low[-1] for low in ends)]
    return first, (apart or others)[0]


def measure(asked: Asked, job: Job, here: Here, options: Options) -> dict[str, Any]:
    """What `petune plan --auto` finds of this rank's device and of the link, while the other does the
    same."""
    with slow_way(asked, here) as way:
        link = link_speed(here.device)
        here.meet()
        facts = device_facts(asked.recipe())
    return {"facts": facts, "link": link} | counted(way)


def counted(way: Any) -> dict[str, Any]:
    """How many operations and kernels ran more than once, and which of them most."""
    if not isinstance(way, Twice):
        return {}
    return {"again": way.counted.total(), "most": dict(way.counted.most_common(MOST_SHOWN))}


def run_plans(asked: Asked, cluster: Cluster, job: Job, here: Here, options: Options) -> dict[str, Any]:
    """Steps of the plans of a backend, which take turns, with what was promised of each; `found` is the place
    of the planner's among them, and the even one is the first."""
    planner = Planner(sketch(asked.recipe()), cluster)
    name = job.name
    choice = planner.search([asked.backend(name)]).choices[0]
    if choice.again:
        raise RuntimeError(f"the plan found for {name} recomputes its blocks")
    others = plans_of(asked, name, choice, planner) if asked.every else []
    known: dict[object, ParallelConfig] = {}
    for one in (asked.backend(name), choice.parallel, *others):
        known.setdefault(_meaning(planner, one), one)
    configs = list(known.values())
    plans = [planner.plan(one) for one in configs]
    ways: list[Callable[[], float]] = []
    mesh: Mesh | None = None
    own: list[float] = []
    with slow_way(asked, here) as way:
        for config in configs:
            before = here.allocated()
            runner, step, _ = stepper(asked.shape, config, job, here, options, asked.dtype, mesh)
            mesh = runner.mesh
            here.meet()
            step()
            ways.append(step)
            own.append(held(here) - before)
        began = counted(way)
        turns = take_turns(asked, ways, own, here)
    promised = [planner.clocks[False].of(plan) for plan in plans]
    return {
        "plans": [describe(plan) for plan in plans],
        "found": list(known).index(_meaning(planner, choice.parallel)),
        "promised": [one.total for one in promised],
        "parts": [asdict(one) for one in promised],
        **foretold(planner, configs, here),
        **turns,
        "built": began,
        **counted(way),
    }


def held(here: Here) -> float:
    """GiB on the device once what nobody needs is gone."""
    here.meet()
    gc.collect()
    return here.allocated()


def take_turns(
    asked: Asked, ways: Sequence[Callable[[], float]], own: list[float], here: Here
) -> dict[str, Any]:
    """Seconds of the steps of each, the most GiB that one took, and the losses of the last. own: GiB that
    each holds between steps."""
    times: list[list[float]] = [[] for _ in ways]
    peaks, losses = [0.0] * len(ways), [0.0] * len(ways)
    late = time.perf_counter() + LONGEST_S
    for turn in range(1 - WARM[asked.device], asked.steps):
        if here.meet(time.perf_counter() > late) and turn >= min(3, asked.steps):
            break
        for at, step in enumerate(ways):
            if here.cuda:
                torch.cuda.reset_peak_memory_stats()
            others = here.allocated() - own[at]
            here.meet()
            began = time.perf_counter()
            losses[at] = step()
            here.sync()
            took = time.perf_counter() - began
            peaks[at] = max(peaks[at], here.allocated(peak=True) - others)
            own[at] = here.allocated() - others  # a step that is recorded as a CUDA graph holds more after it
            if turn >= 0:
                times[at].append(took)
    return {"times": times, "peaks": peaks, "losses": losses}


def foretold(planner: Planner, configs: Sequence[ParallelConfig], here: Here) -> dict[str, list[float]]:
    """GiB that this rank needs under each plan, but for what a process takes by itself: as the planner counts
    them, and as `petune plan` tells them of fused blocks."""
    drawn, memory = planner.drawn, [device.memory or 0 for device in planner.cluster.devices]
    process, found = PROCESS[drawn.device], dict[str, list[float]](planner=[], fused=[])
    logging.getLogger("petune").setLevel(logging.WARNING)  # of every plan the same would be said
    for config in configs:
        plan = planner.plan(config)
        at = coordinate(plan, here.rank)
        rows = apportion(planner.work.rows, plan.shares)[at.dp]
        counted = planner.memory.bytes_of(plan, at.pp, at.tp, rows, False, at.dp)
        seen = outlook(priced(drawn, config, here.world, memory)).forecast.ranks[here.rank]
        found["planner"].append((counted - process) / GIB)
        found["fused"].append((seen.total - process) / GIB)
    return found


# ------------------------------------------------------------------ plans


def _meaning(planner: Planner, config: ParallelConfig) -> object:
    """What two settings have in common that are the same plan."""
    plan = planner.plan(config)
    return apportion(planner.work.rows, plan.shares), plan.cut, str(plan.stages)


def plans_of(asked: Asked, name: str, choice: PricedPlan, planner: Planner) -> list[ParallelConfig]:
    """Every plan of a backend that gives the first device half or more, or those nearest to the one found."""
    found, plan = choice.parallel, choice.plan
    rows, blocks = asked.rows, len(planner.work.blocks)
    changes: list[tuple[float, dict[str, Any]]]
    if name == "dp":
        own = apportion(rows, plan.shares)[0]
        changes = [(abs(k - own), {"shares": reduced((k, rows - k))}) for k in range(rows // 2, rows)]
    elif name == "pp":
        own = plan.stages[0].blocks["decoder"][1]
        changes = [(abs(k - own), {"stages": (k, blocks - k)}) for k in range(blocks // 2, blocks)]
    else:
        changes = _cuts(asked.config(), plan)
    nearest = sorted(changes, key=lambda one: one[0])[: asked.most or None]
    return [replace(found, **{name: replace(getattr(found, name), **one)}) for _, one in nearest]


def _cuts(config: Any, plan: ParallelPlan) -> list[tuple[float, dict[str, Any]]]:
    """Heads of both devices with MLP columns, each with how far it is from what was found."""
    assert plan.cut is not None
    heads, inner = config.num_attention_heads, config.intermediate_size
    own, columns, made = plan.cut.heads[0], plan.cut.columns[0], []
    for k in range(heads // 2, heads, heads // config.num_key_value_heads):
        near = [columns * part / 10 for part in (9, 11)] if k == own else []
        for many in dict.fromkeys(round(one / 8) * 8 for one in (inner * k / heads, columns, *near)):
            far = abs(k - own) / heads + abs(many - columns) / inner
            if 0 < many < inner:
                made.append((far, {"heads": (k, heads - k), "columns": (many, inner - many)}))
    if plan.cut.sequence:  # evenly, and as heads: near, whatever was found
        made += [(0.0, {"sequence": one}) for one in ((1, 1), reduced((own, heads - own)))]
    return made


# ------------------------------------------------------------------ the tables


@dataclass(frozen=True)
class Result:
    """The plans of a backend with all ranks in one: names, which of them was found, seconds promised and
    measured of each, and of each and each rank GiB by the planner, of fused blocks, and measured."""

    name: str
    plans: list[str]
    found: int
    promised: list[float]
    times: list[list[float]]
    losses: list[float]
    memory: list[list[tuple[float, float, float]]]

    @classmethod
    def of(cls, name: str, answers: Sequence[dict[str, Any]]) -> Result:
        """From what ranks have answered."""
        first = answers[0]
        number = range(len(first["plans"]))
        each = [zip(*(one["times"][at] for one in answers), strict=True) for at in number]
        memory = [
            [(one["planner"][at], one["fused"][at], one["peaks"][at]) for one in answers] for at in number
        ]
        alike = {key: first[key] for key in ("plans", "found", "promised", "losses")}
        return cls(name, times=[[max(pair) for pair in one] for one in each], memory=memory, **alike)

    def compared(self) -> list[str]:
        """A row of the table: the even plan against the one that the planner makes of it, and how the second
        is to the first."""
        cells = [self.name, self.plans[self.found]]
        for at in (0, self.found):
            cells += [spread(self.times[at]), f"{1e3 * self.promised[at]:.0f}"]
        ways = (
            self.promised,
            [statistics.median(one) for one in self.times],
            [min(one) for one in self.times],
        )
        return [*cells, *(f"{one[self.found] / one[0]:.2f}" for one in ways)]

    def exhausted(self) -> list[str]:
        """A row of the other table: the plan found against the best of all."""
        times = [statistics.median(one) for one in self.times]
        best = min(range(len(times)), key=times.__getitem__)
        off = [abs(a / b - 1) for a, b in zip(self.promised, times, strict=True)]
        own = times[self.found]
        cells = [self.name, self.plans[self.found], f"{1e3 * own:.0f}", str(len(times)), self.plans[best]]
        cells += [f"{1e3 * times[best]:.0f}", f"{own / times[best]:.3f}"]
        return [*cells, f"{statistics.median(off):.1%}", f"{max(off):.1%}"]

    def remembered(self) -> list[list[str]]:
        """Rows of the table of memory: every plan and rank."""
        rows = []
        for plan, ranks in zip(self.plans, self.memory, strict=True):
            for rank, (planner, fused, peak) in enumerate(ranks):
                off = [f"{one / peak - 1:+.1%}" if peak else "-" for one in (planner, fused)]
                rows.append(
                    [self.name, plan, str(rank), *(f"{one:.2f}" for one in (planner, fused, peak)), *off]
                )
        return rows

    def train_alike(self) -> bool:
        """Whether the last losses of all plans are the same but for rounding."""
        return max(self.losses) - min(self.losses) <= ALIKE * max(self.losses)


def spread(values: Sequence[float]) -> str:
    """Milliseconds: median (quartiles; fastest)."""
    low, middle, high = (1e3 * value for value in statistics.quantiles(values, n=4))
    return f"{middle:.0f} ({low:.0f} to {high:.0f}; {1e3 * min(values):.0f})"


def show(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    print("\n|", " | ".join(heads), "|\n" + "|---" * len(heads) + "|")
    for row in rows:
        print("|", " | ".join(row), "|", flush=True)


def do(job: Job, run: Callable[..., dict[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    """What two fresh processes, one for each device, answer; none where one fails, which is printed."""
    RUNS[job.run] = told(run, asked)
    kernels = Options(2, asked.device, "", False, 0, asked.steps, False, "fork", asked.kernels)
    (outcome,) = attempt([job], kernels, time.monotonic() + job.limit)
    if outcome.error:
        print(f"FAILED {job.name}: {outcome.error}", flush=True)
    again = next((one["again"] for one in outcome.answers if "again" in one), None)
    note = f"; {again} operations and kernels ran again" if again else ""
    print(f"{job.name}: {outcome.seconds:.0f} s{note}", file=sys.stderr, flush=True)
    return outcome.answers


def measured(asked: Asked) -> tuple[Cluster, list[dict[str, Any]]]:
    """The two devices and the link, by what each rank has found."""
    found = do(Job("measuring", "measure", 2, limit=150), partial(measure, asked), asked)
    if not found:
        raise SystemExit(1)
    return cluster_of([one["facts"] for one in found], link_of(found[0]["link"])), found


def heading(asked: Asked, cluster: Cluster, load: float) -> None:
    """Print what is measured, and what of the devices was."""
    rates, sizes, case = [device.rates.matmul for device in cluster.devices], asked.config(), asked.shape.case
    where = f"2 of {os.cpu_count()} cores" if asked.device == "cpu" else cluster.devices[0].name[:-2]
    print(
        f"{time.strftime('%Y-%m-%d')}: torch {torch.__version__}, Python {platform.python_version()},"
        f" {where}, load before {load:.1f};"
        f" {case.rows} rows of {case.tokens} tokens, hidden {sizes.hidden_size},"
        f" {sizes.num_hidden_layers} blocks, LoRA, {str(asked.dtype).removeprefix('torch.')}."
    )
    if asked.link is not None:
        rate, latency = asked.link
        print(f"Over a link of {rate / 1e6:g} MB/s and {1e3 * latency:g} ms a message, beside gloo's own.")
    how = f"runs its work {asked.slow:g} times" if asked.twice else f"asked for {asked.slow:g} : 1"
    print(
        f"Measured speeds {rates[0] / rates[1]:.2f} : 1, {how}; link {1e6 * cluster.inside.latency:.0f} us,"
        f" {cluster.inside.bandwidth / 1e9:.2f} GB/s; a launch"
        f" {' and '.join(f'{1e6 * device.rates.launch:.0f} us' for device in cluster.devices)}.",
        flush=True,
    )


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=tuple(SHAPES), help="1k on a CPU, 8b on GPUs")
    parser.add_argument("--twice", action="store_true", help="slow a CPU as a GPU is slowed")
    parser.add_argument(
        "--slow",
        type=float,
        help="how many times slower the second device is: 3, 2 where work runs twice",
    )
    parser.add_argument("--link", help="MB/s, or MB/s,ms a message, of a link that is slowed: 100,1")
    parser.add_argument("--steps", type=int, default=9, help="steps of each plan")
    parser.add_argument("--every", action="store_true", help="beside the plan found, others of its backend")
    parser.add_argument("--most", type=int, help="of these, the nearest: all on a CPU, 11 on GPUs")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    given = parser.parse_args()
    if given.link and given.device == "cuda":
        parser.error("--link slows what goes through gloo: copy engines of GPUs do not")
    return given


def asked_by(given: argparse.Namespace, folder: str) -> Asked:
    """What it means."""
    cuda = given.device == "cuda"
    twice, name = given.twice or cuda, given.shape or ("8b" if cuda else "1k")
    return Asked(
        given.device,
        folder,
        SHAPES[name],
        "auto" if cuda or name != "tiny" else "reference",
        torch.float32 if name == "1k" else torch.bfloat16,
        twice,
        given.slow or (2.0 if twice else 3.0),
        given.steps,
        given.every,
        (11 if cuda else 0) if given.most is None else given.most,
        link_asked(given.link) if given.link else None,
    )


def link_asked(text: str) -> tuple[float, float]:
    """Bytes a second, and seconds of a message, of what --link says."""
    bandwidth, _, latency = text.partition(",")
    return 1e6 * float(bandwidth), 1e-3 * float(latency or 0)


def main() -> int:
    """Print the tables; 1 where a backend failed or its plans train differently."""
    given, load = parsed(), os.getloadavg()[0]
    warnings.simplefilter("ignore", FutureWarning)
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as folder:
        asked = asked_by(given, folder)
        asked.place.write_text(json.dumps(asked.config().to_dict()), encoding="utf-8")
        cluster, facts = measured(asked)
        heading(asked, cluster, load)
        answers: dict[str, list[dict[str, Any]]] = {}
        for name in given.only:
            job = Job(name, "plans", 2, rows=asked.rows, limit=LONGEST_S + (240 if asked.every else 120))
            answers[name] = do(job, partial(run_plans, asked, cluster), asked)
            write({"measured": facts, **answers})
    results = [Result.of(name, found) for name, found in answers.items() if found]
    show(PAIR, [one.compared() for one in results])
    if asked.every:
        show(EVERY, [one.exhausted() for one in results])
    if given.device == "cuda":
        show(MEMORY, [row for one in results for row in one.remembered()])
    unlike = [one for one in results if not one.train_alike()]
    for one in unlike:
        print(f"the plans of {one.name} train differently: losses {one.losses}")
    print(f"\nload after {os.getloadavg()[0]:.1f}")
    return int(bool(unlike) or len(results) < len(given.only))


def write(found: dict[str, Any]) -> None:
    """What is known so far, on disk."""
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "unequal.json").write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
