"""LoRA on a Llama-3.1-8B shape beside the peers: how fast, in how much memory, at which loss. Every
measurement has a process of its own.

    PYTHONPATH=.:SITE python3 benchmarks/peers.py petune:4x2048 unsloth:4x2048 peft-compile:4x2048
    peft-liger:4x2048 peft:4x2048 PYTHONPATH=.:SITE python3 benchmarks/peers.py petune:1x131072:cap=80:steps=3
    unsloth:1x131072:cap=80:ckpt:steps=3
    PYTHONPATH=. python benchmarks/peers.py --tiny petune:2x16 peft:2x16:ckpt      every path of these two
                                                                                   without a GPU

A SPEC is VARIANT:ROWSxTOKENS and settings after further colons. Of all variants: ckpt (recompute whole
blocks; of petune keep=input), cap=GiB (the most memory the process may take), r=RANK, steps=N (timed),
warm=SECONDS (0 where a step takes half a minute), cold (the very first step is timed, for where a step takes
minutes), layers=N (blocks), limit=SECONDS (of the whole measurement). Of petune alone: keep, offload, tile,
budget, host (the fields of its `memory`; budget is `cap` unless given), kernels, fp8.

All train the same random weights on the same random tokens: LoRA on all seven projections, dropout 0, bf16
under autocast, float32 factors, fused AdamW at 1e-4. `peft` is transformers + peft; `peft-liger` with Liger's
kernels; `peft-compile` with each block compiled and Liger's fused loss; `unsloth` by its own loader. A card
that is limited by power slows down while it warms, so steps are timed after `warm` seconds of steps, the
first one (which compiles) not counted; a step ends when the device is idle. Losses are of the first, the
middle and the last of the first `steps` steps, which are the same steps whatever the warm-up. The host's
resident memory is that after the last step, pinned memory and the device's are peaks. Results go to
peers.jsonl, logs of failures to *.log, in the folder $OUT where there is one.

torch is imported in functions only: Unsloth has to be imported first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

GIB = 2**30
LEARNING_RATE = 1e-4
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ROLES = ("q", "k", "v", "o", "gate", "up", "down")
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 2**20,
    },
    "tiny": {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    },
}
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
PACKAGES = ("torch", "triton", "transformers", "peft", "liger-kernel", "unsloth")
MEMORY = ("keep", "offload", "tile", "budget", "host")
ONLY_PETUNE = (*MEMORY, "kernels", "fp8")
RESULT = "RESULT "  # begins the line in which a worker answers


# ------------------------------------------------------------------ what is asked


@dataclass(frozen=True)
class Spec:
    """One measurement. warm: seconds of steps before those that count; limit: seconds of all; cap, budget,
    host: GiB; the rest as in `petune.wrap`."""

    variant: str
    rows: int
    tokens: int
    ckpt: bool = False
    cap: float | None = None
    r: int = 16
    steps: int = 8
    warm: float = 3.0
    cold: bool = False
    layers: int | None = None
    limit: float = 200.0
    keep: str | None = None
    offload: str | None = None
    tile: int | None = None
    budget: float | None = None
    host: float | None = None
    kernels: str = "auto"
    fp8: bool = False

    @classmethod
    def parse(cls, text: str, **defaults: Any) -> Spec:
        """`VARIANT:ROWSxTOKENS:key=value:flag`. Raises ValueError that says what is wrong with it."""
        variant, shape, *settings = text.split(":") if ":" in text else (text, "")
        if variant not in VARIANTS:
            raise ValueError(f"{text}: no variant {variant!r}; there are {', '.join(VARIANTS)}")
        rows, _, tokens = shape.partition("x")
        if not (rows.isdigit() and tokens.isdigit()):
            raise ValueError(f"{text}: expected ROWSxTOKENS after the variant, found {shape!r}")
        kinds = {entry.name: str(entry.type) for entry in fields(cls)[3:]}
        values: dict[str, Any] = {}
        for setting in settings:
            name, given, value = setting.partition("=")
            if name not in kinds or bool(given) == (kinds[name] == "bool"):
                raise ValueError(f"{text}: {setting!r} is no setting; there are {', '.join(kinds)}")
            if name in ONLY_PETUNE and variant != "petune":
                raise ValueError(f"{text}: {name} is a setting of petune alone")
            if name == "layers" and variant == "unsloth":
                raise ValueError(f"{text}: Unsloth's loader takes whole checkpoints")
            values[name] = True if kinds[name] == "bool" else _CONVERT[kinds[name].partition(" ")[0]](value)
        return cls(variant, int(rows), int(tokens), **{**defaults, **values})

    @property
    def memory(self) -> str | dict[str, Any]:
        """petune's memory policy: the fields that are given, else auto."""
        given = {name: value for name in MEMORY if (value := getattr(self, name)) is not None}
        if self.ckpt:
            given = {"keep": "input", "offload": "none", **given}
        if self.cap is not None:
            given = {"budget": self.cap, **given}
        return given or "auto"

    @property
    def settings(self) -> str:
        """What differs from the defaults, as on the command line."""
        given = {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)[3:]
            if getattr(self, entry.name) != entry.default
        }
        shown = (
            name if value is True else f"{name}={value}"
            for name, value in given.items()
            if name not in ("steps", "warm", "limit")
        )
        return " ".join(shown) or "-"


_CONVERT: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}


# ----------------------------------------------------------- the variants, each built in a process of its own


def base_model(spec: Spec, folder: Path, device: str) -> Any:
    """The checkpoint in bf16 as transformers gives it, on the device, cut to its first blocks where `layers`
    says so."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    config.num_hidden_layers = spec.layers or config.num_hidden_layers
    model = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    return model


def petune_model(spec: Spec, folder: Path, device: str) -> Any:
    """Our own."""
    import petune

    settings = {"base_dtype": "fp8"} if spec.fp8 else {}
    model = base_model(spec, folder, device)
    return petune.wrap(
        model, method="lora", r=spec.r, targets=ROLES, kernels=spec.kernels, memory=spec.memory, **settings
    )


def peft_model(spec: Spec, folder: Path, device: str) -> Any:
    """transformers + peft."""
    import peft

    config = peft.LoraConfig(
        r=spec.r, lora_alpha=2 * spec.r, lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base_model(spec, folder, device), config)
    if spec.ckpt:
        base = model.get_base_model()
        # the second is the older transformers'
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        next(getattr(base, name) for name in names if hasattr(base, name))({"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def peft_liger_model(spec: Spec, folder: Path, device: str) -> Any:
    """The same with Liger's norms, rotations, activations and fused loss."""
    _liger(True)
    return peft_model(spec, folder, device)


def peft_compile_model(spec: Spec, folder: Path, device: str) -> Any:
    """The same with each block compiled by itself and Liger's fused loss."""
    _liger(False)
    model = peft_model(spec, folder, device)
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            module.compile(dynamic=False)
    return model


def _liger(blocks: bool) -> None:
    """Put Liger's fused loss into transformers' Llama, and its kernels into the blocks."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=blocks, swiglu=blocks, rms_norm=blocks, cross_entropy=False, fused_linear_cross_entropy=True
    )


def unsloth_model(spec: Spec, folder: Path, device: str) -> Any:
    """Unsloth's own loader and wrapper; `ckpt` is its offloaded checkpointing, as it recommends."""
    import torch
    from unsloth import FastLanguageModel

    length = max(spec.tokens, 2048)
    model, _ = FastLanguageModel.from_pretrained(
        str(folder), max_seq_length=length, dtype=torch.bfloat16, load_in_4bit=False
    )
    return FastLanguageModel.get_peft_model(
        model,
        r=spec.r,
        lora_alpha=2 * spec.r,
        lora_dropout=0,
        bias="none",
        target_modules=TARGETS,
        use_gradient_checkpointing="unsloth" if spec.ckpt else False,
        random_state=0,
        max_seq_length=length,
    )


VARIANTS: dict[str, Callable[[Spec, Path, str], Any]] = {
    "petune": petune_model,
    "peft": peft_model,
    "peft-liger": peft_liger_model,
    "peft-compile": peft_compile_model,
    "unsloth": unsloth_model,
}


# ------------------------------------------------------------------ in the process of one measurement


def prepare(shape: str, folder: Path, device: str) -> dict[str, Any]:
    """Write random weights of the shape and a tokenizer of as many words; the folder appears when it is
    whole."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = SHAPES[shape]
    config = LlamaConfig(
        **sizes,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        dtype=torch.bfloat16,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    words = [*SPECIAL, *(f"w{at}" for at in range(len(SPECIAL), sizes["vocab_size"]))]
    core = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=core, **names).save_pretrained(partial)
    partial.rename(folder)
    return {"parameters": sum(value.numel() for value in model.parameters())}


def measure(spec: Spec, shape: str, folder: Path, device: str) -> dict[str, Any]:
    """Train, and say how fast it was and what it took; see the head of this file."""
    if spec.variant == "unsloth":
        import unsloth  # noqa: F401 - before torch
    import torch

    if spec.cap is not None and device == "cuda":
        torch.cuda.set_per_process_memory_fraction(
            min(1.0, spec.cap * GIB / torch.cuda.get_device_properties(0).total_memory)
        )
    torch.manual_seed(0)
    model = VARIANTS[spec.variant](spec, folder, device).train()
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(
        len(SPECIAL), SHAPES[shape]["vocab_size"], (spec.rows, spec.tokens), generator=draw
    ).to(device)

    def step() -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    steps = Steps(device)
    if not spec.cold:
        steps.warm_up(step, spec.warm)
    seconds = [steps.take(step) for _ in range(spec.steps)]
    losses = [float(steps.losses[at]) for at in (0, spec.steps // 2, spec.steps - 1)]
    numbers = {
        "trained": sum(value.numel() for value in trained),
        "losses": losses,
        "first_step_s": steps.first,
    }
    return timings(seconds, spec.rows * spec.tokens * len(seconds)) | memory_of(device) | numbers


class Steps:
    """Steps taken one after another on a device, each over when the device is idle. first: seconds of the
    very first."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.losses: list[torch.Tensor] = []
        self.first = 0.0

    def take(self, step: Callable[[], torch.Tensor]) -> float:
        """One step; its seconds."""
        self._wait()
        began = time.perf_counter()
        self.losses.append(step())
        self._wait()
        seconds = time.perf_counter() - began
        self.first = self.first or seconds
        return seconds

    def warm_up(self, step: Callable[[], torch.Tensor], seconds: float) -> None:
        """One step that may compile, then steps for `seconds`."""
        self.take(step)
        spent = 0.0
        while spent < seconds:
            spent += self.take(step)

    def _wait(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def timings(seconds: Sequence[float], tokens: int) -> dict[str, Any]:
    """Of steps that took `seconds` each for `tokens` in all: the median, the quartiles, and tokens/s as if
    every step took the median."""
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
    speed = tokens / len(seconds) / median
    return {
        "tokens_per_s": speed,
        "step_s": median,
        "quartiles_s": [quartiles[0], quartiles[2]],
        "steps": len(seconds),
    }


def memory_of(device: str) -> dict[str, Any]:
    """GiB of this process: the peak allocated and reserved on the device and pinned on the host, and what is
    resident there now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if platform.system() == "Linux" else 0
    found = {
        "rss_GiB": pages * os.sysconf("SC_PAGE_SIZE") / GIB,
        "device": platform.processor() or platform.machine(),
    }
    if device != "cuda":
        return found
    import torch

    allocated, reserved = torch.cuda.max_memory_allocated() / GIB, torch.cuda.max_memory_reserved() / GIB
    pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / GIB
    return found | {
        "peak_GiB": allocated,
        "reserved_GiB": reserved,
        "pinned_GiB": pinned,
        "device": torch.cuda.get_device_name(),
    }


# ------------------------------------------------------------------ one process per measurement


def in_own_process(
    script: str, request: Mapping[str, Any], limit: float, log: Path | None = None
) -> dict[str, Any]:
    """What `script --worker REQUEST` answers, or {"error": its last line}. After `limit` seconds it is ended
    with all it started."""
    worker = subprocess.Popen(
        [sys.executable, script, "--worker", json.dumps(request)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT | os.environ,
        start_new_session=True,
    )
    try:
        out, err = worker.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(worker.pid, signal.SIGKILL)
        out, err = worker.communicate()
        err += f"\nnot done after {limit:.0f} s"
    answers = [line for line in out.splitlines() if line.startswith(RESULT)]
    if answers and worker.returncode == 0:
        return dict(json.loads(answers[-1].removeprefix(RESULT)))
    if log is not None:
        log.write_text(out + err, encoding="utf-8")
    return {"error": last_error(err or out) or f"ended with exit code {worker.returncode}"}


def last_error(text: str) -> str:
    """The last exception of a program's output, in one line; its last line where there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    named = [at for at, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception|Fault)\b", line)]
    return " ".join(line.strip() for line in lines[named[-1] if named else -1 :])


ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "UNSLOTH_DISABLE_STATISTICS": "1",
    "UNSLOTH_COMPILE_LOCATION": str(Path(tempfile.gettempdir(), "unsloth-compiled")),
    "TOKENIZERS_PARALLELISM": "false",
    # of all alike: long rows come in blocks of every size
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}


def answer(result: Mapping[str, Any]) -> None:
    """A worker's answer, in one line."""
    print(RESULT + json.dumps(result), flush=True)


def work(request: Mapping[str, Any]) -> None:
    """What a worker is asked to do."""
    folder, device = Path(request["folder"]), request["device"]
    if request["spec"] is None:
        answer(prepare(request["shape"], folder, device))
    else:
        answer(measure(Spec(**request["spec"]), request["shape"], folder, device))


# ------------------------------------------------------------------ what is printed


def heading(names: Sequence[str] = PACKAGES) -> str:
    """The date and the versions that count."""
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{time.strftime('%Y-%m-%d')}: {', '.join(found)}, Python {platform.python_version()}"


def markdown(
    rows: Sequence[Mapping[str, Any]],
    heads: Sequence[str],
    cells: Callable[[Mapping[str, Any]], Sequence[str]],
) -> str:
    """A table of what was measured, then every failure with its last line."""
    done, failed = [row for row in rows if "error" not in row], [row for row in rows if "error" in row]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in done]
    return "\n".join(
        [
            *lines,
            *([""] if failed else []),
            *(f"- failed: {row['spec']}: {row['error'][:300]}" for row in failed),
        ]
    )


SIZES = {"peak_GiB": "peak GiB", "reserved_GiB": "reserved", "pinned_GiB": "pinned", "rss_GiB": "resident"}
HEADS = (
    "variant",
    "rows x tokens",
    "settings",
    "tokens/s",
    "step, ms (quartiles)",
    *SIZES.values(),
    "losses",
    "trained",
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A measurement as a row of the table."""
    low, high = (1e3 * value for value in row["quartiles_s"])
    sizes = [f"{row[name]:.1f}" if name in row else "-" for name in SIZES]
    losses = " ".join(f"{value:.4f}" for value in row["losses"])
    step = f"{1e3 * row['step_s']:.1f} ({low:.1f} to {high:.1f})"
    return [
        row["variant"],
        row["shape"],
        row["settings"],
        f"{row['tokens_per_s']:,.0f}",
        step,
        *sizes,
        losses,
        f"{row['trained']:,}",
    ]


def main() -> int:
    """Measure every SPEC; 1 when one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", nargs="*", metavar="SPEC")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument(
        "--model",
        type=Path,
        default=None,
        help="where the checkpoint lies or is written (default: a temporary folder)",
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(json.loads(given.worker))
        return 0
    shape, device = ("tiny", "cpu") if given.tiny else ("8b", "cuda")
    defaults = {"warm": 0.0, "steps": 3} if given.tiny else {}
    try:
        specs = [Spec.parse(text, **defaults) for text in given.specs]
    except ValueError as error:
        parser.error(str(error))
    out = Path(os.environ["OUT"]) if "OUT" in os.environ else None
    folder = given.model or Path(tempfile.gettempdir(), f"petune-peers-{shape}")
    request = {"shape": shape, "folder": str(folder), "device": device, "spec": None}
    if not folder.exists() and "error" in (made := in_own_process(__file__, request, 300)):
        print(f"no checkpoint: {made['error']}")
        return 1
    rows = []
    for text, spec in zip(given.specs, specs, strict=True):
        log = out / f"{text.replace(':', '_')}.log" if out else None
        found = in_own_process(__file__, request | {"spec": asdict(spec)}, spec.limit, log)
        facts = {
            "spec": text,
            "variant": spec.variant,
            "shape": f"{spec.rows} x {spec.tokens}",
            "settings": spec.settings,
        }
        rows.append(facts | found)
        print(json.dumps(rows[-1]), flush=True)
        if out:
            (out / "peers.jsonl").open("a", encoding="utf-8").write(json.dumps(rows[-1]) + "\n")
    print(
        f"\n{heading()}; {next((row['device'] for row in rows if 'device' in row), device)}\n\n"
        f"{markdown(rows, HEADS, cells)}"
    )
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
