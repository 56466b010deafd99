"""How fast the devices of this machine are at a recipe, and the links between them: measured by one process
for each, all at the same time.

A model of the recipe's with two blocks in each stack, tuned as the recipe says and with weights drawn at
random, runs forward and back over one, two and four rows. Of the seconds the preset of the device
(petune.kernels.memory.block_cost) foretells, the measured ones are so many times as long, and each operation
takes so long beside: a line through three points, by least squares of relative errors.

The preset of a CPU is assumed, its memory's rate too, and what moves memory is what a rank computes whatever
its share of a block (norms, residuals). So there a rank's half of the same model runs as well, without the
other, which tells both rates apart.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.estimate.cluster import Cluster, Device, LinkSpeed, scaled
from petune.estimate.footprint import held_by
from petune.estimate.forecast import Sketch, limits_of, sketch
from petune.estimate.part_seconds import line
from petune.estimate.rank_shares import share_of
from petune.estimate.workload import Workload, workload
from petune.kernels.fuse import fuse
from petune.kernels.memory.block_cost import Rates, rates_of
from petune.parallel import ParallelConfig, make_plan
from petune.parallel.configs import CutConfig
from petune.parallel.launch import process_group
from petune.parallel.launch.launcher import launch
from petune.parallel.link_speed import link_speed
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import Cut
from petune.recipe import Recipe
from petune.run.build import choose_place
from petune.run.folder import RunFolder
from petune.run.job import Job

BLOCKS = 2  # of each stack, so that the first is not all
ROWS = (1, 2, 4)
HALVED = (1, 4)  # rows of which a half of the blocks is measured as well
SECONDS = 1.0  # for each number of rows
LEAST = 3  # repetitions


def measured(recipe: Recipe, world: int | None = None) -> Cluster:
    """The devices of this machine, or `world` of its processes, each measured by one of its own."""
    number = world or devices_here(recipe)
    if number == 1:
        return cluster_of([device_facts(recipe)], LinkSpeed())
    with tempfile.TemporaryDirectory(prefix="petune-") as scratch:
        file, answer = Job(recipe, RunFolder.of(recipe)).write(Path(scratch)), Path(scratch) / "cluster.json"
        launch([sys.executable, "-m", "petune", "--measure", str(file), str(answer)], number)
        found = json.loads(answer.read_text(encoding="utf-8"))
    return cluster_of(found["devices"], link_of(found["link"]))


def devices_here(recipe: Recipe) -> int:
    """CUDA devices, or the two processes that a CPU runs."""
    return torch.cuda.device_count() if choose_place(recipe).device.type == "cuda" else 2


def measure_rank(job: Path, answer: Path) -> None:
    """What each process of `measured` does; the first writes what all have found."""
    recipe = Job.read(job).recipe
    process_group.join("cuda" if choose_place(recipe).device.type == "cuda" else "cpu", recipe.timeout)
    device = choose_place(recipe).device
    link = link_speed(device)
    facts = process_group.gather(json.dumps(device_facts(recipe)))
    if process_group.started()[0] == 0:
        found = {"devices": [json.loads(one) for one in facts], "link": link}
        answer.write_text(json.dumps(found), encoding="utf-8")
    process_group.barrier()
    process_group.leave()


def link_of(speeds: Mapping[str, tuple[float, float]]) -> LinkSpeed:
    """The link of what `link_speed` has found: that of gradients, and of every other kind of message."""
    kinds = ((kind, *speed) for kind, speed in speeds.items() if kind != "gradients")
    return LinkSpeed(*speeds["gradients"], tuple(kinds))


def cluster_of(facts: Sequence[dict[str, Any]], link: LinkSpeed) -> Cluster:
    """The devices of one machine, by what their processes have found."""
    devices = []
    for rank, one in enumerate(facts):
        rates = scaled(rates_of(one["preset"]), one["speed"])
        traffic = one["traffic"] / one["speed"]
        rates = replace(rates, launch=one["launch"], memory=rates.memory * traffic)
        devices.append(Device(f"{one['preset']} {rank}", rates, one["memory"]))
    return Cluster(tuple(devices), link, link)


def device_facts(recipe: Recipe) -> dict[str, Any]:
    """What this process finds of its device: the preset, how many times as fast it and its memory are,
    seconds of a launch, bytes."""
    device = choose_place(recipe).device
    cuda = device.type == "cuda"
    preset = torch.cuda.get_device_name(device) if cuda else "CPU"
    drawn = sketch(recipe, BLOCKS, str(device))
    half = None if cuda else _half(drawn)
    run = _runner(drawn, drawn.model, device)
    points: list[TimedRows] = [(rows, None, _fastest(run, rows)) for rows in ROWS]
    if half is not None:
        plan, model = half
        run = _runner(drawn, model, device)
        points += [(rows, plan, _fastest(run, rows)) for rows in HALVED]
    speed, traffic, launch_s = fitted(workload(drawn), rates_of(preset), points)
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if cuda
        else limits_of(process_group.started()[1], "cpu", None)[0]
    )
    return {"preset": preset, "speed": speed, "traffic": traffic, "launch": launch_s, "memory": memory}


def _half(drawn: Sketch) -> tuple[Cut, nn.Module] | None:
    """What one of two ranks has of the model under tp, whose vocabulary is whole; None where it cannot be
    cut so."""
    if drawn.family is None:
        return None
    config, rows, head = ParallelConfig(tp=CutConfig(size=2, vocabulary=False)), drawn.work.rows, False
    try:
        plan = make_plan(config, drawn.family, drawn.config, 2, rows, 2, head)
        held = held_by(drawn.model, drawn.family, plan, Coordinate())
    except UsageError:
        return None
    assert plan.cut is not None
    return plan.cut, held.modules[0]


def _runner(drawn: Sketch, model: nn.Module, device: torch.device) -> Callable[[int], None]:
    """A forward and a backward pass over so many rows."""
    model, recipe = model.train(), drawn.recipe
    if recipe.kernels != "off" and not recipe.compile and device.type == "cuda":
        fuse(model, drawn.family, recipe.kernels, recipe.memory)
    for value in model.parameters():
        if value.requires_grad and value.dim() > 1:
            torch.nn.init.normal_(value, std=0.02)
    autocast = choose_place(recipe).autocast
    tokens, signal = list(drawn.work.tokens.items()), drawn.family.signal if drawn.family else None

    def run(rows: int) -> None:
        def ids(length: int) -> Tensor:
            return torch.ones((rows, length), dtype=torch.long, device=device)

        given = {"input_ids": ids(tokens[0][1]), "attention_mask": ids(tokens[0][1])}
        if signal is not None:
            given = {signal.argument: torch.ones((rows, *signal.shape(drawn.config)), device=device)}
        if len(tokens) > 1 and drawn.work.vocabulary_head:
            given["decoder_input_ids"] = ids(tokens[1][1])
        with autocast():
            found = model(**given)
            logits = found.logits if "logits" in found else found.last_hidden_state
        flat = logits.float().flatten(0, -2)
        F.cross_entropy(flat, flat.new_zeros(len(flat), dtype=torch.long)).backward()
        model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _fastest(run: Callable[[int], None], rows: int) -> float:
    """Seconds of a pass: the fastest of some, as anything else that a machine does only slows."""
    run(rows)
    found: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(found) < LEAST or time.perf_counter() < until:
        began = time.perf_counter()
        run(rows)
        found.append(time.perf_counter() - began)
    return min(found)


TimedRows = tuple[int, Cut | None, float]  # rows, the cut of which the first rank has run, seconds


# what is fitted by itself: computing (0), what moves memory (1) and launches (2), by the first that can be
_APART = (((0,), (1,), (2,)), ((0,), (1,)))
_TOGETHER = (((0, 1), (2,)), ((0, 1),))
_NUDGE = 1e-6  # by which memory is slower, to see what that is to a part
_STEPS = 10  # a product may turn out to be bound by memory, or no longer so


def fitted(work: Workload, preset: Rates, points: Sequence[TimedRows]) -> tuple[float, float, float]:
    """(how many times as fast as the preset, as its memory, seconds of a launch) of a device with these
    seconds; both rates are alike where no cut was run, or no two rates give such seconds."""
    halved = any(cut is not None for _, cut, _ in points)
    ways = (_fit(work, preset, points, one) for one in (*_APART * halved, *_TOGETHER))
    return next(one for one in ways if one is not None)


def _fit(
    work: Workload, preset: Rates, points: Sequence[TimedRows], groups: Sequence[tuple[int, ...]]
) -> tuple[float, float, float] | None:
    """The same by least squares of relative errors, each group alike; None where a rate would be none."""
    speed = traffic = 1.0
    launch_s = 0.0
    for _ in range(_STEPS):
        rates = replace(scaled(preset, speed), memory=preset.memory * traffic, launch=1.0)
        rows = []
        for number, cut, seconds in points:
            terms = _foretold(work, rates, number, cut)
            rows.append([sum(terms[one] for one in group) / seconds for group in groups])
        known = torch.tensor(rows, dtype=torch.float64)
        solved = torch.linalg.lstsq(known, torch.ones(len(rows), dtype=known.dtype)).solution.tolist()
        found = {one: times for group, times in zip(groups, solved, strict=True) for one in group}
        launch_s = found.get(2, 0.0)
        if launch_s < 0 or not 0 < min(found[0], found[1]) <= max(found[0], found[1]) < math.inf:
            return None
        speed, traffic = speed / found[0], traffic / found[1]
    return speed, traffic, launch_s


def _foretold(work: Workload, rates: Rates, rows: int, cut: Cut | None) -> tuple[float, float, float]:
    """Seconds of what is bound by computing and by memory, and launches, of the first rank of a cut. rates:
    of which a launch takes a second."""
    slower, computing, moving, launches = replace(rates, memory=rates.memory / (1 + _NUDGE)), 0.0, 0.0, 0.0
    for part, times in work.parts(0, len(work.blocks)).items():
        share = times * share_of(part, cut, 0)
        one, other = line(rates, part, rows), line(slower, part, rows)
        for way, nudged in ((one.forward, other.forward), (one.backward, other.backward)):
            bound = (nudged[1] - way[1]) / _NUDGE  # by memory
            computing, moving = computing + share * (way[1] - bound), moving + share * bound
            launches += times * way[0]
    return computing, moving, launches
