"""What a snapshot of every step costs: steps of LoRA on a Llama of random weights, without and with, in turn.

    PYTHONPATH=. python3 benchmarks/snapshot.py --device cuda --shape 8b --batch 4 --length 2048 --rank 16
    PYTHONPATH=. python3 benchmarks/snapshot.py --device cpu --shape tiny --batch 2 --length 64          a
                                                                                                         rehearsal

A step is what the training loop does: forward, backward, norm of the gradient, AdamW. "host" copies what it
changed to host memory and writes nothing; "disk" also writes the newest copy to `--folder` again and again.
At the end a snapshot is taken, the next update follows at once, and what is then read back from disk must be
the state before it, bit by bit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import petune
from petune.files.safetensors import read_tensors, write_json, write_tensors
from petune.log import human
from petune.methods import tuned_parameters
from petune.rng.generators import rng_state
from petune.run.snapshot import Snapshots
from petune.saving.optimizer_state import OptimizerPacker

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    },
}
GOAL = 0.01  # of a step, to host memory


class Trainer:
    """A model with LoRA, its optimizer and one batch; `step` trains, with or without a snapshot."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device = torch.device(given.device)
        config = LlamaConfig(
            **SHAPES[given.shape],
            num_key_value_heads=8,
            max_position_embeddings=given.length,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        with self.device:
            self.model = LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
        petune.wrap(self.model, method="lora", r=given.rank, targets="all-linear")
        self.tuned: dict[str, nn.Parameter] = dict(tuned_parameters(self.model))
        for value in self.tuned.values():
            value.data = value.data.float()
        self.model.train()
        self.optimizer = torch.optim.AdamW(self.tuned.values(), lr=1e-4, fused=self.device.type == "cuda")
        self.ids = torch.randint(4, config.vocab_size, (given.batch, given.length), device=self.device)
        self.steps = 0
        self.packer = OptimizerPacker()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `petune.run.state.pack_state`, which needs the rest of the toolkit."""
        moments, facts = self.packer(self.optimizer, self.tuned)
        rng, rng_facts = rng_state()
        return {f"tuned/{name}": value.detach() for name, value in self.tuned.items()} | moments | rng, {
            "optimizer": facts,
            "rng": rng_facts,
        }

    def step(self, snapshots: Snapshots | None) -> float:
        """One step; its loss."""
        loss = self.model(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        if snapshots is not None:
            snapshots.begin()
        found = float(loss)
        float(nn.utils.clip_grad_norm_(self.tuned.values(), 1.0))
        if snapshots is not None:
            snapshots.settle()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        if snapshots is not None:
            tensors, state = self.state()
            snapshots.take(self.steps, tensors, state, run_id="benchmark", facts={})
        return found

    def seconds(self, number: int, snapshots: Snapshots | None) -> float:
        """Of a step, over `number` of them."""
        self.wait()
        began = time.perf_counter()
        for _ in range(number):
            self.step(snapshots)
        self.wait()
        return (time.perf_counter() - began) / number

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def write(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """As `petune.run.state.write_packed`."""
    write_tensors(folder / "state.safetensors", tensors)
    write_json(folder / "state.json", state)


def forget(folder: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write nothing."""


def is_exact(trainer: Trainer, snapshots: Snapshots, root: Path) -> bool:
    """Whether a snapshot read back from disk is the state it was taken of, though the next update followed at
    once."""
    trainer.step(snapshots)
    expected = {name: value.clone() for name, value in trainer.state()[0].items()}
    trainer.optimizer.zero_grad()
    for value in trainer.tuned.values():
        value.grad = torch.ones_like(value)
    snapshots.settle()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    snapshots.drain()
    found = read_tensors(root / "snapshots" / f"step-{trainer.steps}" / "state.safetensors")
    moved = any(
        not torch.equal(value.detach().cpu(), found[f"tuned/{name}"]) for name, value in trainer.tuned.items()
    )
    return (
        moved
        and found.keys() == expected.keys()
        and all(torch.equal(value.cpu(), found[name]) for name, value in expected.items())
    )


def main() -> int:
    """Print the table; 1 when the goal is missed or a snapshot is not exact."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=6, help="in a turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to write (default: a temporary folder)"
    )
    given = parser.parse_args()
    trainer = Trainer(given)
    size = None
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        disk_root = Path(folder) / "disk"
        with (
            Snapshots(Path(folder) / "host", trainer.device, forget, lambda: trainer.steps) as host,
            Snapshots(disk_root, trainer.device, write, lambda: trainer.steps) as disk,
        ):
            ways: dict[str, Snapshots | None] = {"without": None, "host": host, "disk": disk}
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            for name in ways:  # warms up, and makes the room on the host
                trainer.seconds(3, ways[name])
            size = sum(value.nbytes for value in trainer.state()[0].values())
            disk.drain()
            disk.written, disk.oldest = 0, 0
            for _ in range(given.turns):
                for name, snapshots in ways.items():
                    seconds[name].append(trainer.seconds(given.steps, snapshots))
                disk.drain()
            written, oldest = disk.written, disk.oldest
            exact = is_exact(trainer, disk, disk_root)
    base = statistics.median(seconds["without"])
    machine = (
        torch.cuda.get_device_name()
        if trainer.device.type == "cuda"
        else f"{torch.get_num_threads()} threads"
    )
    tokens = given.batch * given.length
    print(
        f"{machine}, torch {torch.__version__}; {given.shape}, rank {given.rank}, {tokens:,} tokens a step;"
        f" state {human(size)}"
    )
    for name, found in seconds.items():
        share = [one / other - 1 for one, other in zip(found, seconds["without"], strict=True)]
        low, high = min(share), max(share)
        shown = (
            f"{statistics.median(found) / base - 1:+.2%} of a step (turns {low:+.2%} to {high:+.2%})"
            if name != "without"
            else ""
        )
        print(f"{name:8} {1e3 * statistics.median(found):9.1f} ms a step   {shown}")
    print(
        f"disk     {written} of {given.turns * given.steps} snapshots written, at most {oldest} steps old"
        " when committed"
    )
    print(f"read back: {'bit-identical' if exact else 'NOT the state it was taken of'}")
    missed = statistics.median(seconds["host"]) / base - 1 > GOAL
    print(f"goal     {GOAL:.0%} of a step to host memory: {'MISSED' if missed else 'holds'}")
    return int(missed or not exact)


if __name__ == "__main__":
    sys.exit(main())
