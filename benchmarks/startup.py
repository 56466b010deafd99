"""How long a person waits for the first step, and after the last one: `python benchmarks/startup.py`. Phases
of the real `petune train`.

    python benchmarks/startup.py --shape 8b --device cuda                   the 8B shape twice: the second run
                                                                            finds the caches warm
    python benchmarks/startup.py --shape 8b --blocks 2 --device cuda        two blocks of it
    python benchmarks/startup.py --shape tiny --device cpu                  every path without a GPU
    python benchmarks/startup.py --micro                                    checksum and finiteness in GB/s,
                                                                            per dtype and device

A process of its own makes a folder of random bf16 weights in safetensors shards, with the tokenizer of
demo:tiny-llama and rows of text, in
--folder (default: a temporary one); then `petune train` (LoRA, r=16) runs on it, --runs times. Its phases are
the debug records of `petune.phases`; step lines are timed as they arrive. --cold drops the files of packages
and weights from the page cache before the first run, as far as no other process holds them. Exits 1 if a run
fails, or with --check if the last one misses a goal. Nothing is downloaded. Packages that are not installed
may lie on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIKE_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"num_hidden_layers": 32, "rope_theta": 500000.0, **LIKE_8B},
    "70b": {
        "num_hidden_layers": 80,
        "rope_theta": 500000.0,
        **LIKE_8B,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    },
    "1b": {
        "num_hidden_layers": 16,
        **LIKE_8B,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "num_hidden_layers": 2,
        **LIKE_8B,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_attention_heads": 8,
    },
}
GOALS = {
    "from the command to step 1": 25.0,
    "of which imports": 10.0,
    "of which neither evaluation nor writing": 5.0,
}
IMPORTS = "loading torch and transformers"
SHARD = 5 << 30  # bytes, as on the hub
_TRAIN = """
import logging, sys
handler = logging.FileHandler(sys.argv.pop(1))
handler.setFormatter(logging.Formatter("%(created).6f %(message)s"))
phases = logging.getLogger("petune.phases")
phases.setLevel(logging.DEBUG), phases.addHandler(handler)
phases.propagate = False
from petune_cli.main import app
app()
"""


# ------------------------------------------------------------------ what is trained


def make(shape: dict[str, Any], folder: Path) -> None:
    """Write the model's folder, with a tokenizer, rows to train on, and the recipe."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from petune import demo
    from petune.files.safetensors import write_tensors

    model = folder / "model"
    shutil.copytree(
        demo.model_path("tiny-llama"), model, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
    )
    config = LlamaConfig(
        **shape, max_position_embeddings=8192, dtype="bfloat16", architectures=["LlamaForCausalLM"]
    )
    config.save_pretrained(model)
    with torch.device("meta"):
        state = LlamaForCausalLM(config).state_dict()
    names = [name for name in state if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    pool = torch.empty(max(state[name].numel() for name in names), dtype=torch.bfloat16).normal_(std=0.02)
    ones = torch.ones(config.hidden_size, dtype=torch.bfloat16)
    shards: list[dict[str, Any]] = [{}]
    for name in names:
        if sum(value.nbytes for value in shards[-1].values()) > SHARD:
            shards.append({})
        shape_of = state[name].shape
        shards[-1][name] = ones if len(shape_of) == 1 else pool[: shape_of.numel()].view(shape_of)
    places = {}
    for at, tensors in enumerate(shards, 1):
        file = f"model-{at:05}-of-{len(shards):05}.safetensors"
        write_tensors(model / file, tensors, {"format": "pt"}, sync=True)
        places |= dict.fromkeys(tensors, file)
    size = sum(value.nbytes for tensors in shards for value in tensors.values())
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": places})
    )
    rows = [
        json.loads(row)["text"]
        for row in (demo.data_path("docstrings") / "train.jsonl").read_text().splitlines()[:72]
    ]
    for name, texts in (("train", rows[8:]), ("eval", rows[:8])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"path": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 256}
    recipe = {
        "model": str(model),
        "task": "causal",
        "method": {"name": "lora", "r": 16},
        "data": data,
        "batch_size": 2,
        "lr": 1e-4,
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))


# ------------------------------------------------------------------ one run


def train(folder: Path, device: str, steps: int) -> list[tuple[str, float]]:
    """Run `petune train`; its phases in their order, then sums, in seconds. Raises RuntimeError with the end
    of its output if it fails."""
    log, out = folder / "phases.log", folder / "run"
    log.unlink(missing_ok=True)
    words = [
        "recipe.yaml",
        f"out={out}",
        f"device={device}",
        f"max_steps={steps}",
        *(["--overwrite"] if out.exists() else []),
    ]
    command = [sys.executable, "-c", _TRAIN, str(log), "train", *words]
    began = time.time()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment()
    )
    assert process.stdout is not None
    lines, first, last = [], began, began
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step "):
            last = time.time()
            first = first if first > began else last
    code, ended = process.wait(), time.time()
    if code or last == began:
        raise RuntimeError(f"petune train ended with {code}:\n" + "".join(lines[-30:]))
    phases = list(read_phases(log))
    imports = sum(seconds for name, seconds, _ in phases if name == IMPORTS)
    starting = next(at - seconds for name, seconds, at in phases if name == IMPORTS) - began
    work = sum(
        seconds for name, seconds, at in phases if at > last and name.startswith(("evaluating", "writing"))
    )
    totals = [("from the command to step 1", first - began), ("of which imports", starting + imports)]
    totals += [("from step 1 to the last", last - first), ("after the last step", ended - last)]
    totals += [("of which neither evaluation nor writing", ended - last - work), ("in all", ended - began)]
    return [
        ("starting Python and the command", starting),
        *((name, seconds) for name, seconds, _ in phases),
        *totals,
    ]


def read_phases(log: Path) -> Iterator[tuple[str, float, float]]:
    """Name, seconds and the time of its end of each phase."""
    for line in log.read_text().splitlines():
        at, _, rest = line.partition(" ")
        name, _, seconds = rest.removesuffix(" s").rpartition(": ")
        yield name, float(seconds), float(at)


def environment() -> dict[str, str]:
    """This process's, with petune's sources first and no way to the hub."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "cli"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def drop_caches(folder: Path) -> None:
    """Ask the system to forget the files of the packages and of the model."""
    import site

    places = [
        folder,
        *map(Path, site.getsitepackages()),
        *(Path(place) for place in sys.path if place.endswith("site-packages")),
    ]
    for file in (file for place in places for file in place.rglob("*") if file.is_file()):
        number = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(number)


# ------------------------------------------------------------------ rates


def micro(size: int, repeats: int) -> None:
    """Print GB/s of the checksum and of the check for finite values, the best of `repeats`: of a core, of all
    of them, of the GPU.

    What a core does is measured by the time it spent, so that other processes do not count; the rest by the
    clock.
    """
    import torch

    from petune.files.safetensors import is_finite
    from petune.models.checksums import checksums

    def all_checksums(values: list[torch.Tensor]) -> object:
        return checksums({str(at): value for at, value in enumerate(values)})

    def all_finite(values: list[torch.Tensor]) -> object:
        return [is_finite(value) for value in values]

    places = [("cpu", 1), ("cpu", torch.get_num_threads())] + (
        [("cuda", 1)] if torch.cuda.is_available() else []
    )
    print(
        f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()}"
        f" threads, {size} MiB a tensor"
    )
    print("| device | threads | dtype | checksum, GB/s | finite, GB/s |\n|---|---|---|---|---|")
    for device, threads in dict.fromkeys(places):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            values = [
                torch.ones((size << 20) // dtype.itemsize // threads, dtype=dtype, device=device)
                for _ in range(threads)
            ]
            clock = time.process_time if (device, threads) == ("cpu", 1) else time.perf_counter
            rates = [rate(look, values, repeats, clock) for look in (all_checksums, all_finite)]
            print(
                f"| {device} | {threads} | {str(dtype).removeprefix('torch.')} | {rates[0]:.1f} |"
                f" {rates[1]:.1f} |",
                flush=True,
            )


def rate(
    look: Callable[[list[Any]], object], values: list[Any], repeats: int, clock: Callable[[], float]
) -> float:
    """GB/s of `look`, which waits for its result, at its best."""
    best = float("inf")
    for _ in range(repeats + 1):
        began = clock()
        look(values)
        best = min(best, clock() - began)
    return sum(value.nbytes for value in values) / best / 1e9


# ------------------------------------------------------------------ the command


def main() -> int:
    """Print the tables; 1 when a run fails or, with --check, misses a goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--blocks", type=int, help="of the shape (default: all)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the model is made (default: a temporary folder)")
    parser.add_argument(
        "--cold", action="store_true", help="drop files from the page cache before the first run"
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if the last run misses a goal")
    parser.add_argument(
        "--micro", action="store_true", help="rates of checksum and finiteness, and nothing else"
    )
    parser.add_argument("--size", type=int, default=1024, help="MiB of a tensor of --micro")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = SHAPES[options.shape] | ({"num_hidden_layers": options.blocks} if options.blocks else {})
    sys.path[:0] = [str(ROOT), str(ROOT / "cli")]
    if options.micro:
        micro(options.size, 5)
        return 0
    if options.make:
        make(shape, options.make)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        again = [sys.executable, __file__, "--shape", options.shape, "--make", str(folder)]
        subprocess.run(
            again + (["--blocks", str(options.blocks)] if options.blocks else []),
            check=True,
            env=environment(),
        )
        size = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        print(
            f"torch {version('torch')}, transformers {version('transformers')}, Python"
            f" {platform.python_version()}, {os.cpu_count()} cores"
        )
        print(
            f"{options.shape}, {shape['num_hidden_layers']} blocks, {size / 1e9:.1f} GB of bf16,"
            f" {options.device}",
            flush=True,
        )
        found = []
        for number in range(options.runs):
            if options.cold and not number:
                drop_caches(folder)
            try:
                found.append(train(folder, options.device, options.steps))
            except RuntimeError as error:
                print(error, file=sys.stderr)
                return 1
    print_table(found)
    last = dict(found[-1])
    missed = [name for name, goal in GOALS.items() if last[name] > goal]
    print("goals: " + ("met by the last run" if not missed else "MISSED: " + ", ".join(missed)))
    return int(options.check and bool(missed))


def print_table(found: list[list[tuple[str, float]]]) -> None:
    """One row a phase, one column a run; a phase that came more than once is added up."""
    sums: list[dict[str, float]] = [{} for _ in found]
    for column, run in zip(sums, found, strict=True):
        for name, seconds in run:
            column[name] = column.get(name, 0.0) + seconds
    print(
        "| phase | "
        + " | ".join(f"run {at}, s" for at in range(1, len(found) + 1))
        + " |\n|---"
        + "|---" * len(found)
        + "|"
    )
    for name in dict.fromkeys(name for column in sums for name in column):
        print(f"| {name} | " + " | ".join(f"{column.get(name, 0.0):.2f}" for column in sums) + " |")


if __name__ == "__main__":
    sys.exit(main())
