"""How long a checkpoint stops training: full fine-tuning of a Llama of random weights, in one process or
sharded over several (FSDP2), with saves beside training.

    PYTHONPATH=.:cli python benchmarks/saves.py --compare       91 million parameters: a state of 1.02 GiB
    PYTHONPATH=.:cli python benchmarks/saves.py --compare --blocks 2 --world 2        a smaller one, two ranks
    PYTHONPATH=.:cli python benchmarks/saves.py --device cuda --world 4 --shape 8b --every 30 --saves 2

`stall` is what a save keeps training from its next step, the longest of all ranks, `computing` how long the
process has a core meanwhile, which a busy machine changes little, `waited` what it waited before for the save
before it, `next` the step after it, in which a GPU may wait for copies, and `in all` what both took beyond a
step. `committed` is when the checkpoint has its name, from the moment at which it was asked for, and the rate
that of its bytes from the end of the stall on. `step` is a step while nothing is written, `beside` one while
something is, the next one left out. The median of each, and the most.

--compare runs twice, with saves that all wait for and with saves beside training, and compares their files;
of several ranks also with what the first writes by itself of the same state, put together. Exits 1 where a
file differs. Without it a run keeps one state beside the one that is written; whether the disk holds more is
not checked, nor whether all ranks draw the same weights. A run ends when its last save is committed. Ranks
are started as `petune train` starts them. The first save needs room in host memory that is made from the
second step on, and waits for it where --every is small.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, LlamaConfig

import petune
import petune.run.saver
from benchmarks.startup import SHAPES as LIKE
from petune import demo
from petune.errors import PetuneError
from petune.log import human
from petune.models.contents import Contents
from petune.parallel.launch import process_group
from petune.parallel.launch.launcher import launch
from petune.run import state
from petune.run.reporting import Silent
from petune.run.saver import Saver
from petune.run.step import OptimizerStep
from petune.saving import checkpoint

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
}
SHAPES: dict[str, dict[str, Any]] = {"small": SMALL, "8b": LIKE["8b"]}
TOKENS = {"small": 16, "8b": 2048}  # of a row
WORDS = ("red sun", "blue sea", "green hill", "one cat")
WAYS = ("all wait", "beside")
# NVLink multicast can put GPUs that others share out of service
QUIET = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def write(folder: Path, shape: str, blocks: int | None) -> None:
    """A model's config, whose weights are drawn, its tokenizer, and rows of text."""
    own = SHAPES[shape] | ({} if blocks is None else {"num_hidden_layers": blocks})
    LlamaConfig(**own, max_position_embeddings=8192, architectures=["LlamaForCausalLM"]).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(demo.model_path("tiny-llama")).save_pretrained(folder)
    texts = [" ".join([words] * (1 if shape == "small" else TOKENS[shape])) for words in WORDS]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 16))


# ------------------------------------------------------------------ on a rank


class _Enough(Exception):
    """Ends a run whose last save is committed."""


@dataclass
class Asked:
    """What a rank is told. alone: a folder for what the first rank writes by itself."""

    recipe: dict[str, Any]
    way: str
    saves: int
    answers: str
    alone: str = ""
    lean: bool = False


@dataclass
class Clock:
    """Notes of one process: of every save by its step, when it was asked for, what it took, and when it was
    committed; of every step what it took, and whether something was written meanwhile. petune's functions
    have no hook for that, so they are replaced in this process, and put back at the end."""

    asked: Asked
    saves: dict[int, dict[str, float]] = field(default_factory=dict)
    steps: dict[int, tuple[float, bool]] = field(default_factory=dict)

    def __enter__(self) -> Clock:
        self.before = (
            Saver.save,
            OptimizerStep.take,
            checkpoint.commit,
            checkpoint.rotate,
            checkpoint.require_free,
        )
        self.room, self.fingerprint = petune.run.saver.lacks_room, Contents.fingerprint
        save, take, commit = self.before[:3]

        def saved(saver: Saver, *, beside: bool = False) -> Path:
            return self._saved(saver, save, beside)

        def taken(step: OptimizerStep) -> dict[str, Any]:
            busy = any(thread.name == "petune-save" for thread in threading.enumerate())
            began = time.perf_counter()
            record = take(step)
            _wait(step)
            self.steps[step.progress.step] = time.perf_counter() - began, busy
            return record

        def committed(root: Path, step: int, *given: Any, **named: Any) -> Path:
            path = commit(root, step, *given, **named)
            if step in self.saves:
                self.saves[step]["committed"] = time.perf_counter() - self.saves[step]["began"]
            return path

        Saver.save, OptimizerStep.take, checkpoint.commit = saved, taken, committed  # type: ignore[method-assign]
        if self.asked.lean:
            checkpoint.rotate = _only_newest
            checkpoint.require_free = lambda path, needed: None
            Contents.fingerprint = lambda contents: "drawn"  # type: ignore[method-assign]
        petune.run.saver.lacks_room = self._lacks_room
        return self

    def __exit__(self, *_: object) -> None:
        Saver.save, OptimizerStep.take, checkpoint.commit = self.before[:3]  # type: ignore[method-assign]
        checkpoint.rotate, checkpoint.require_free = self.before[3:]
        petune.run.saver.lacks_room, Contents.fingerprint = self.room, self.fingerprint  # type: ignore[method-assign]

    def _lacks_room(self, needed: int) -> str | None:
        """Why a save cannot go beside training: it may not, or what petune has found, which is told."""
        if self.asked.way == "all wait":
            return self.asked.way
        lack: str | None = self.room(needed)
        if lack is not None:
            print(f"NOT BESIDE TRAINING: {lack}", flush=True)
        return lack

    def _saved(self, saver: Saver, save: Any, beside: bool) -> Path:
        """A save, once the one before is committed."""
        began = time.perf_counter()
        saver._land()
        waited = time.perf_counter() - began
        if len(self.saves) == self.asked.saves:
            raise _Enough
        step = saver.progress.step
        if self.asked.alone:
            write_alone(saver, Path(self.asked.alone, f"step-{step}"))
        saver.runner.barrier()
        began, computed = time.perf_counter(), time.thread_time()
        self.saves[step] = {"began": began, "waited": waited}
        path: Path = save(saver, beside=beside)
        self.saves[step] |= {
            "stall": time.perf_counter() - began,
            "computing": time.thread_time() - computed,
        }
        return path


def _wait(step: OptimizerStep) -> None:
    """Until the device has done what was asked of it, but for copies."""
    if step.place.device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _only_newest(root: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """In the place of `checkpoint.rotate`, which keeps two at least."""
    places = {path.name.removeprefix("step-"): path for path in root.glob("step-*")}
    *old, _ = (places[number] for number in sorted(filter(str.isdigit, places), key=int))
    for path in old:
        shutil.rmtree(path)
    return old


def write_alone(saver: Saver, folder: Path) -> None:
    """Let the first rank write the state that is saved next, put together, as one process writes its own."""
    runner, optimizer = saver.runner, saver.step.optimizer
    kinds = {"tuned": {name: value.detach() for name, value in runner.tuned.items()}}
    for key in state.MOMENTS:
        kinds[key] = {name: optimizer.state[value][key] for name, value in runner.tuned.items()}
    wholes = {key: runner.whole(values) for key, values in kinds.items()}
    if not saver.main:
        return
    tuned = {name: nn.Parameter(value) for name, value in wholes["tuned"].items()}
    made = saver.step.make_optimizer(tuned)
    state.set_rate(made, optimizer.param_groups[0]["lr"])
    for name, value in tuned.items():
        moments = {key: wholes[key][name] for key in state.MOMENTS}
        made.state[value] = {"step": torch.tensor(float(saver.progress.step)), **moments}
    folder.mkdir(parents=True)
    state.write_packed(folder, *state.pack_state(tuned, made))


def train(asked: Asked) -> None:
    """Train in this process, alone or as a rank, and write down what was seen."""
    with Clock(asked) as clock:
        try:
            petune.train(asked.recipe, reporter=Silent())
            raise RuntimeError("the run ended before its last save was committed")
        except _Enough:
            if process_group.inside():
                process_group.leave()
    cuda = torch.cuda.is_initialized()
    found = {
        "saves": clock.saves,
        "steps": clock.steps,
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "peak": torch.cuda.max_memory_allocated() if cuda else 0,
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    Path(asked.answers, f"rank-{process_group.started()[0]}.json").write_text(json.dumps(found))


def rank(file: Path) -> int:
    """What each of several processes does; a failure is told in full, and to the launcher."""
    try:
        train(Asked(**json.loads(file.read_text())))
    except BaseException as error:
        print(f"rank {process_group.started()[0]}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        process_group.quit_process(process_group.report(error))
    return 0


# ------------------------------------------------------------------ all ranks


def run(asked: Asked, world: int) -> list[dict[str, Any]]:
    """What all ranks have seen of a run."""
    answers = Path(asked.answers)
    answers.mkdir()
    if world == 1:
        train(asked)
    else:
        (answers / "asked.json").write_text(json.dumps(asdict(asked)))
        command = [sys.executable, str(Path(__file__).resolve()), "--rank", str(answers / "asked.json")]
        try:
            launch(command, world, log_folder=answers, on_line=print)
        except PetuneError:
            for log in sorted(answers.glob("*.log")):
                print(f"{log.name}:\n{log.read_text(errors='replace')[-20000:]}", file=sys.stderr, flush=True)
            raise
    return [json.loads((answers / f"rank-{number}.json").read_text()) for number in range(world)]


HEADS = (
    *("saves", "stall, s (most)", "computing", "waited", "next", "in all", "step", "beside"),
    *("committed", "GB/s"),
)


def row(way: str, ranks: Sequence[Mapping[str, Any]], size: int) -> str:
    """Of each save and step the longest of all ranks."""
    saves = [
        {key: max(one["saves"][step][key] for one in ranks) for key in first if key != "began"}
        for step, first in ranks[0]["saves"].items()
    ]
    steps = {
        int(step): (max(one["steps"][step][0] for one in ranks), any(one["steps"][step][1] for one in ranks))
        for step in ranks[0]["steps"]
    }
    numbers = {int(step) + 1 for step in ranks[0]["saves"]}
    after = [steps[number][0] for number in sorted(numbers)]
    others = [one for step, one in steps.items() if step not in numbers and step > 1]
    plain, beside = ([took for took, busy in others if busy == wanted] for wanted in (False, True))
    usual = statistics.median(plain) if plain else 0.0
    lost = [one["stall"] + took - usual for one, took in zip(saves, after, strict=True)]
    rates = [size / 1e9 / max(1e-9, one["committed"] - one["stall"]) for one in saves if way == "beside"]
    called = ([one[key] for one in saves] for key in ("stall", "computing", "waited"))
    committed = [one["committed"] for one in saves]
    return " | ".join([way, *map(_middle, (*called, after, lost, plain, beside, committed, rates))])


def _middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})" if values else ""


def digests(folder: Path) -> dict[str, Mapping[str, Any]]:
    """What is known of each file of each checkpoint, but for when it was written."""
    places = sorted((folder / "checkpoints").glob("step-*"))
    return {path.name: checkpoint.verify(path).files for path in places}


def alike(folder: Path, alone: Path) -> bool:
    """Whether the files of all checkpoints are, byte by byte, those that one process wrote."""
    pairs = [
        (one, folder / "checkpoints" / one.parent.name / one.name) for one in sorted(alone.glob("step-*/*"))
    ]
    return bool(pairs) and all(filecmp.cmp(one, other, shallow=False) for one, other in pairs)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="small")
    parser.add_argument("--blocks", type=int, help="of the shape (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world", type=int, default=1, help="ranks over which all is sharded")
    parser.add_argument("--every", type=int, default=8)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--folder", type=Path, help="where states are written (default: a temporary folder)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def recipe_of(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What is trained, but for where it goes to."""
    data = {"path": str(folder / "base" / "rows.jsonl"), "max_length": TOKENS[given.shape]}
    recipe = {"model": f"config:{folder / 'base' / 'config.json'}", "data": data, "task": "causal"}
    recipe |= {"method": "full", "device": given.device, "batch_size": max(2, given.world), "epochs": 1000}
    recipe |= {"max_steps": given.every * (given.saves + 1) + 1, "save_every": given.every, "lr": 1e-5}
    recipe |= {"eval_every": 1000000, "keep": given.saves + 1}
    return recipe | ({"parallel": {"dp": {"size": given.world, "shard": True}}} if given.world > 1 else {})


def main() -> int:
    given = parsed()
    if given.rank:
        return rank(given.rank)
    os.environ |= QUIET
    same = True
    with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
        folder = Path(scratch)
        write(folder / "base", given.shape, given.blocks)
        print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}", flush=True)
        for way in WAYS if given.compare else WAYS[1:]:
            out, alone = folder / way.replace(" ", "-"), folder / "alone"
            recipe = recipe_of(given, folder) | {"out": str(out)}
            checked = str(alone) if given.compare and given.world > 1 and way == "beside" else ""
            asked = Asked(recipe, way, given.saves, f"{out}-ranks", checked, lean=not given.compare)
            ranks = run(asked, given.world)
            places = sorted((out / "checkpoints").glob("step-*"))
            size = sum(file.stat().st_size for file in places[-1].iterdir())
            print(f"| {row(way, ranks, size)} |", flush=True)
            if checked:
                same = alike(out, alone)
                print(f"files {'equal' if same else 'NOT EQUAL'} to those of one process")
        if given.compare:
            equal = digests(folder / "all-wait") == digests(folder / "beside")
            print(f"files {'equal' if equal else 'NOT EQUAL'} to those of saves that all wait for")
            same = same and equal
        held = (
            f"{human(max(one['peak'] for one in ranks))} of a GPU at most, " if given.device == "cuda" else ""
        )
        print(
            f"{human(size)} a state, {given.world} x {ranks[0]['device']}, {held}"
            f"{human(sum(one['host'] for one in ranks))} of host memory in all; torch {torch.__version__}"
        )
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
