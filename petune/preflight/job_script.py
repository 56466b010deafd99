"""The job that trains a recipe on several machines, as a script for Slurm or for torchrun. Torch-free.

What both have in common: the run goes to one folder that all machines see, a start that finds it there goes
on (`--resume`), a stop is asked for some minutes before the time is over, and each rank has its own log.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from petune.errors import Problem, Stopped, UsageError
from petune.recipe import Recipe

_TIME = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


@dataclass(frozen=True)
class ClusterJob:
    """What is asked of the machines. `time`: [days-]hours:minutes:seconds; `warn`: seconds before its end at
    which the ranks are told to save and stop."""

    nodes: int = 1
    ranks: int = 1
    time: str | None = None
    warn: int = 300

    @property
    def seconds(self) -> int | None:
        """The time in seconds; None where there is no limit."""
        found = _TIME.fullmatch(self.time or "")
        if found is None:
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def job_of(words: Sequence[str]) -> tuple[ClusterJob, list[str]]:
    """The job of `nodes=4 ranks=8 time=24:00:00 warn=300` among words, and the other words, settings of the
    recipe. Raises UsageError with every value that cannot be."""
    known = {entry.name for entry in fields(ClusterJob)}
    given = dict(word.split("=", 1) for word in words if word.partition("=")[0] in known)
    job = ClusterJob(time=given.get("time"))
    wrong = [
        Problem(
            f"{name} is a whole number of at least 1", "command line", f"{name}=2", f"{name}={given[name]}"
        )
        for name in given
        if name != "time" and not (given[name].isdecimal() and int(given[name]) > 0)
    ]
    if "time" in given and job.seconds is None:
        what = "time is [days-]hours:minutes:seconds"
        wrong.append(Problem(what, "command line", "time=12:00:00", given["time"]))
    if wrong:
        raise UsageError(wrong)
    numbers = {name: int(value) for name, value in given.items() if name != "time"}
    job = ClusterJob(time=job.time, **numbers)
    if job.seconds is not None and job.seconds <= job.warn:
        what = "the ranks would be told to stop before they begin"
        raise UsageError(what, expected=f"time above {job.warn} s", found=job.time, remedy="set warn=SECONDS")
    return job, [word for word in words if word.partition("=")[0] not in known]


def script(
    kind: str, target: str, recipe: Recipe, settings: Sequence[str], job: ClusterJob, folder: Path
) -> str:
    """The script that trains the recipe `target` (a file or a shipped name), with `settings` laid over it, by
    `kind`, slurm or torchrun, from the working directory `folder`.

    Raises UsageError for several ranks of a recipe without a plan.
    """
    if job.nodes * job.ranks > 1 and not recipe.parallel.axes:
        what = f"{job.nodes * job.ranks} ranks, and the recipe has no plan for several"
        raise UsageError(what, where="parallel", remedy="add parallel=dp, or another backend")
    out = recipe.out or f"runs/{recipe.name}"
    run = ["-m", "petune", target, *settings, *([] if recipe.out else [f"out={out}"])]
    there = f"resume=(); if [ -e {shlex.quote(f'{out}/resolved.yaml')} ]; then resume=(--resume); fi"
    written = {"slurm": _slurm, "torchrun": _torchrun}[kind]
    return written(recipe, job, f'{shlex.join(run)} "${{resume[@]}}"', there, f"{out}-logs", folder)


def _slurm(recipe: Recipe, job: ClusterJob, run: str, there: str, logs: str, folder: Path) -> str:
    wanted = {
        "job-name": recipe.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.ranks,
        "gpus-per-node": None if recipe.device == "cpu" else job.ranks,
        "time": job.time,
        "signal": f"TERM@{job.warn}" if job.time else None,
        "open-mode": "append",
        "output": f"{logs}/job-%j.log",
        "chdir": folder,
    }
    lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in wanted.items() if value]
    return f"""\
#!/bin/bash
{chr(10).join(lines)}
#SBATCH --requeue
# mkdir -p {shlex.quote(logs)} && sbatch THIS; cancel it with: scancel --signal=TERM JOB, which saves
set -u
mkdir -p {shlex.quote(logs)}
export PETUNE_SECRET="$(head -c 24 /dev/urandom | base64)"   # ranks know each other by it
{there}

srun --open-mode=append --output={shlex.quote(f"{logs}/rank-%t.log")} {shlex.quote(sys.executable)} {run}
code=$?
# {Stopped.code}: told to stop, and saved; the same job goes on when it is scheduled again
if [ "$code" -eq {Stopped.code} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _torchrun(recipe: Recipe, job: ClusterJob, run: str, there: str, logs: str, folder: Path) -> str:
    limit = f"timeout --signal=TERM {job.seconds - job.warn} " if job.seconds else ""
    secret = 'export PETUNE_SECRET="${PETUNE_SECRET:?the same random text on every machine}"\n'
    return f"""\
#!/bin/bash
# On each of {job.nodes} machines: bash THIS HOST [PORT]; HOST is the first of them. The same again goes on.
set -eu
host="${{1:?the name of the first machine}}"
port="${{2:-29500}}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={job.warn}   # seconds in which ranks save, before it kills them
{secret if job.nodes > 1 else ""}cd {shlex.quote(str(folder))}
logs={shlex.quote(logs)}/$(hostname)-$$
mkdir -p "$logs"
{there}
exec {limit}{shlex.quote(sys.executable)} -m torch.distributed.run \\
    --nnodes {job.nodes} --nproc-per-node {job.ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$host:$port" --rdzv-id {shlex.quote(recipe.name)} \\
    --log-dir "$logs" --tee 3 \\
    {run}
"""
