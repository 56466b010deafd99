"""How fast the devices of this machine are at a recipe, and the links between them: measured by one process
for each, all at the same time.

A model of the recipe's with two blocks in each stack, tuned as the recipe says and with weights drawn at
random, runs forward and back over one, two and four rows. Of the seconds the preset of the device
(petune.kernels.memory.block_cost) foretells, the measured ones are so many times as long, and each operation
takes so long beside: a line through three points, by least squares of relative errors.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.estimate.cluster import Cluster, Device, Link, scaled
from petune.estimate.forecast import Sketch, limits_of, sketch
from petune.estimate.workload import Workload, line, workload
from petune.kernels.fuse import fuse
from petune.kernels.memory.block_cost import Rates, rates_of
from petune.parallel.launch import process_group
from petune.parallel.launch.launcher import launch
from petune.parallel.launch.link_speed import link_speed
from petune.recipe import Recipe
from petune.run.build import choose_place
from petune.run.folder import RunFolder
from petune.run.job import Job

BLOCKS = 2  # of each stack, so that the first is not all
ROWS = (1, 2, 4)
SECONDS = 1.0  # for each number of rows
LEAST = 3  # repetitions


def measured(recipe: Recipe, world: int | None = None) -> Cluster:
    """The devices of this machine, or `world` of its processes, each measured by one of its own."""
    number = world or devices_here(recipe)
    if number == 1:
        return cluster_of([device_facts(recipe)], Link())
    with tempfile.TemporaryDirectory(prefix="petune-") as scratch:
        file, answer = Job(recipe, RunFolder.of(recipe)).write(Path(scratch)), Path(scratch) / "cluster.json"
        launch([sys.executable, "-m", "petune", "--measure", str(file), str(answer)], number)
        found = json.loads(answer.read_text(encoding="utf-8"))
    return cluster_of(found["devices"], Link(*found["link"]))


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


def cluster_of(facts: Sequence[dict[str, Any]], link: Link) -> Cluster:
    """The devices of one machine, by what their processes have found."""
    devices = []
    for rank, one in enumerate(facts):
        rates = replace(scaled(rates_of(one["preset"]), one["speed"]), launch=one["launch"])
        devices.append(Device(f"{one['preset']} {rank}", rates, one["memory"]))
    return Cluster(tuple(devices), link, link)


def device_facts(recipe: Recipe) -> dict[str, Any]:
    """What this process finds of its device: the preset, how many times as fast it is, seconds of a launch,
    bytes."""
    device = choose_place(recipe).device
    cuda = device.type == "cuda"
    preset = torch.cuda.get_device_name(device) if cuda else "CPU"
    drawn = sketch(recipe, BLOCKS, str(device))
    run = _runner(drawn, device)
    speed, launch_s = fitted(
        workload(drawn), rates_of(preset), [(rows, _fastest(run, rows)) for rows in ROWS]
    )
    memory = (
        torch.cuda.get_device_properties(device).total_memory
        if cuda
        else limits_of(process_group.started()[1], "cpu", None)[0]
    )
    return {"preset": preset, "speed": speed, "launch": launch_s, "memory": memory}


def _runner(drawn: Sketch, device: torch.device) -> Callable[[int], None]:
    """A forward and a backward pass over so many rows."""
    model, recipe = drawn.model.train(), drawn.recipe
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


def fitted(work: Workload, preset: Rates, points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(how many times as fast as the preset, seconds of a launch) of a device with these seconds by rows."""
    sums = []
    for rows, seconds in points:
        whole = [line(preset, part, rows) for part in work.parts(0, len(work.blocks)).elements()]
        ways = [way for one in whole for way in (one.forward, one.backward)]
        launches = sum(fixed for fixed, _ in ways) / preset.launch
        sums.append((sum(slope for _, slope in ways) / seconds, launches / seconds))
    # least squares of 1 = times * x + launch * y
    xx, xy, yy = (sum(one[a] * one[b] for one in sums) for a, b in ((0, 0), (0, 1), (1, 1)))
    x, y = sum(one[0] for one in sums), sum(one[1] for one in sums)
    determinant = xx * yy - xy * xy
    times, launch_s = (
        ((x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant) if determinant else (0.0, 0.0)
    )
    if times <= 0 or launch_s < 0:
        times, launch_s = x / xx, 0.0
    return 1 / times, launch_s
