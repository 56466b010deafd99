"""What each rank of a plan takes of its host's memory to have its part of a model, to save it, to write
`tuned/` and to resume, and how long: `python benchmarks/load_memory.py`.

    python benchmarks/load_memory.py                       tp, pp and FSDP2 over 2 and 4 ranks, LoRA and full
    python benchmarks/load_memory.py --blocks 4            a smaller checkpoint
    python benchmarks/load_memory.py --plans tp:2,none     some plans only
    python benchmarks/load_memory.py --run                 a step, saves, the end and a resume of full tuning
    python benchmarks/load_memory.py --run --method lora   the same of LoRA

A checkpoint of a Llama in bfloat16, by default of 383 MiB, is written into --folder (default: a temporary
one). For every plan and method as many processes read it as a run does: base, method, plan, the whole model's
checksums, then each rank's part. Anonymous memory above what the process had before, at the most, in MiB, by
phase: `build` is the model with its method, `place` its part on the rank's device, CPU. What a rank may take
is its share of the tensors, a tenth more and a GiB. Exits 1 if one takes more.

With --run each rank takes a step; then `state` is what rests in its memory, its part of what trains and of
the moments, and `save`, that all wait for, `beside`, a save beside training, `end` and `resume` are what
those take above it: of the first rank, and the most of any other.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from petune import demo
from petune.methods import tuned_parameters
from petune.models import family_of
from petune.parallel import alone, local, make_mesh, parallelize
from petune.recipe import load_recipe
from petune.run import distributed, state
from petune.run.build import build, plan_of, prepare
from petune.run.reporting import Silent
from petune.run.saves import Saves
from petune.run.step import OptimizerStep
from petune.run.tuned_files import TunedFiles
from petune.saving import checkpoint

MIB = 1 << 20
PLANS = ("none", "tp:2", "pp:2", "shard:2", "tp:4", "pp:4", "shard:4")
_FORK = multiprocessing.get_context("fork")


def write(folder: Path, blocks: int) -> None:
    """A checkpoint in bfloat16, its tokenizer, and rows of text."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=blocks,
        num_attention_heads=16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu").bfloat16()
    for value in model.parameters():
        value.data.normal_(std=0.02)
    model.save_pretrained(folder, max_shard_size="150MB")
    AutoTokenizer.from_pretrained(demo.model_path("tiny-llama")).save_pretrained(folder)
    rows = '{"text": "red sun"}\n{"text": "blue sea"}\n{"text": "green hill"}\n{"text": "one cat"}\n'
    (folder / "rows.jsonl").write_text(rows * 4)


def settings(folder: Path, plan: str, method: str) -> dict[str, Any]:
    """The recipe of a plan and a method."""
    kind, _, ranks = plan.partition(":")
    own: dict[str, Any] = {
        "none": "none",
        "shard": {"dp": {"size": int(ranks or 1), "shard": True}},
        "pp": {"pp": {"size": int(ranks or 1), "microbatches": int(ranks or 1)}},
    }.get(kind, {"tp": int(ranks or 1)})
    what = {"model": str(folder), "data": {"path": str(folder / "rows.jsonl")}, "task": "causal"}
    how = {"method": method, "batch_size": 4, "epochs": 1, "device": "cpu", "dtype": "bf16"}
    return {**what, **how, "parallel": own, "out": str(folder / "run")}


def anonymous() -> tuple[int, int]:
    """This process' own memory now, and at the most since it was told to forget; bytes."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("RssAnon", "RssFile", "RssShmem", "VmHWM"):
            found[name] = int(rest.split()[0]) * 1024
    return found["RssAnon"], found["VmHWM"] - found["RssFile"] - found["RssShmem"]


def peak(act: Callable[[], Any], base: int) -> tuple[Any, int]:
    """What `act` returns, and memory above `base` at the most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")
    found = act()
    return found, anonymous()[1] - base


def rank(number: int, world: int, store: str, recipe: dict[str, Any], pipe: Any) -> None:
    """One process: its figures by phase go into `pipe`."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=world)
    loaded = load_recipe(recipe)
    prepared, plan = prepare(loaded), plan_of(loaded, world)
    cpu = torch.device("cpu")
    mesh = make_mesh(plan, cpu) if world > 1 else alone(cpu)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    base, began = anonymous()[0], time.perf_counter()
    model, built = peak(lambda: build(prepared), base)
    where, placed = peak(lambda: parallelize(model, family_of(model), plan, mesh, tuned_parameters), base)
    held = {id(value): value for one in where.modules for value in (*one.parameters(), *one.buffers())}
    share = sum(local(value).nbytes for value in held.values())
    pipe.send({"build": built, "place": placed, "share": share, "s": time.perf_counter() - began})


def in_a_run(number: int, world: int, port: str, recipe: dict[str, Any], pipe: Any) -> None:
    """One process of a run that takes one step: its figures by phase go into `pipe`."""
    torch.set_num_threads(1)
    named = {"RANK": number, "WORLD_SIZE": world, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": world}
    os.environ |= {name: str(value) for name, value in named.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    loaded, out = load_recipe(recipe), Path(recipe["out"])
    plan = plan_of(loaded)
    with distributed.among(plan):
        mesh = distributed.join(loaded, plan)
        step = OptimizerStep(prepare(loaded), mesh)
        step.audit = step.make_audit()
        step.take()
        step.optimizer.zero_grad()
        own, runner = (step.runner, step.optimizer, step.make_optimizer), step.runner

        def save() -> Path:
            held = state.held_state(*own)
            ends = {"fill": held.fill, "crew": runner.crew}
            return checkpoint.commit(out, 1, held.begin, run_id="run", facts={}, **ends)

        def beside() -> None:
            saves = Saves(torch.device("cpu"), 30)
            crew = saves.crew(runner.crew)

            def write(copied: state.HeldState) -> None:
                ends = {"fill": copied.fill, "crew": crew}
                checkpoint.commit(out, 2, copied.begin, run_id="run", facts={}, **ends)

            saves.begin(state.held_state(*own), write)
            saves.drain()

        def end() -> None:
            files = TunedFiles(step, Silent())
            files.write(out / "tuned") if mesh.main else files.take_part()

        found: dict[str, float] = {}
        for name, act in (
            ("save", save),
            ("beside", beside),
            ("end", end),
            ("resume", lambda: state.restore_parts(out / "step-1", *own)),
        ):
            runner.barrier()
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            base, began = anonymous()[0], time.perf_counter()
            _, found[name] = peak(act, base)
            runner.barrier()
            found[f"{name} s"] = time.perf_counter() - began
        moments = [local(one) for kept in step.optimizer.state.values() for one in kept.values()]
        held = [*moments, *(local(value) for value in step.tuned.values())]
        pipe.send(found | {"state": sum(value.nbytes for value in held)})


def measure(folder: Path, plan: str, method: str, act: Callable[..., None] = rank) -> list[dict[str, float]]:
    """The figures of every rank."""
    world = int(plan.partition(":")[2] or 1)
    with tempfile.TemporaryDirectory() as place:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meets = f"{place}/store" if act is rank else str(free.getsockname()[1])
        pipes = [_FORK.Pipe(duplex=False) for _ in range(world)]
        recipe = settings(folder, plan, method)
        ends = [
            _FORK.Process(target=act, args=(at, world, meets, recipe, pipes[at][1])) for at in range(world)
        ]
        for process in ends:
            process.start()
        found = [mine.recv() for mine, _ in pipes]
        for process in ends:
            process.join()
        return found


def tell(plan: str, found: list[dict[str, float]]) -> None:
    """A row for the first rank and one for all others."""
    names = ("save", "beside", "end", "resume")
    for label, ranks in (("first", found[:1]), ("others", found[1:])):
        cells = [f"{max(one[name] for one in ranks) / MIB:.0f}" for name in ("state", *names)]
        seconds = ", ".join(f"{max(one[f'{name} s'] for one in ranks):.1f}" for name in names)
        print(f"| {plan} | {label} | {' | '.join(cells)} | {seconds} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, default=11)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--method", choices=("full", "lora"), default="full", help="with --run")
    given = parser.parse_args()
    too_much = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        if not (folder / "config.json").is_file():
            write(folder, given.blocks)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{size / MIB:.0f} MiB in bfloat16, {os.cpu_count()} cores, torch {torch.__version__}\n")
        if given.run:
            print("| plan | rank | state | save | beside | end | resume | s |")
            print("|---|---|---|---|---|---|---|---|")
            for plan in given.plans.split(","):
                tell(plan, measure(folder, plan, given.method, in_a_run))
            return 0
        print("| plan | method | share | build | place | s |\n|---|---|---|---|---|---|")
        for plan in given.plans.split(","):
            for method in ("lora", "full"):
                found = measure(folder, plan, method)
                most = {key: max(one[key] for one in found) for key in found[0]}
                cells = " | ".join(f"{most[key] / MIB:.0f}" for key in ("share", "build", "place"))
                print(f"| {plan} | {method} | {cells} | {most['s']:.1f} |", flush=True)
                too_much |= max(most["build"], most["place"]) > 1.1 * most["share"] + (1 << 30)
    return int(too_much)


if __name__ == "__main__":
    sys.exit(main())
