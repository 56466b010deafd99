"""The verb to run when something does not work: of a run, whether its folder is whole; else this machine, and
LoRA as a self-test. Both, without names, as text for a bug report."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from petune.errors import FileError, MachineError, UsageError
from petune_cli.arguments import Json
from petune_cli.display import show_json
from petune_cli.echo import echo

PACKAGES = (
    "torch",
    "transformers",
    "safetensors",
    "datasets",
    "accelerate",
    "pydantic",
    "typer",
    "matplotlib",
    "peft",
)
HUB_TIMEOUT_S = 2.0
PASSED = "one step of LoRA: loss falls, frozen weights stay, merged equals unmerged"
SHOWN_OF_LOG = 40  # lines
_PATH = re.compile(r"""[^\s'"`,;()<>=]*[/\\][^\s'"`,;()<>]*""")
_RATE = re.compile(r"[\w.,%]*/(s|step|steps|token|row|[\d.,]+)")  # tokens/s, 25/100
_FILE = re.compile(r"[\w.-]+\.(csv|tsv|jsonl?|parquet|arrow|txt|ya?ml|py|safetensors|bin|gguf)\b")


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run folder; without one, this machine.", show_default=False),
    ] = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Text for a bug report: this machine, and the RUN, without paths and names."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Test this machine; of a RUN, say whether it is whole."""
    if report and json:
        raise UsageError("--report is a text for people", where="--json", remedy="leave one of the two out")
    if report:
        for line in _for_strangers(run):
            echo(line)
        return
    if run is not None:
        return _check_up(run, json=json)

    if json:
        problem = self_test()
        _show_json([*machine(), ("self-test", problem or PASSED)], [problem] if problem else [])
    else:
        for name, state in machine():
            echo(f"{name:14}{state}")
        problem = self_test()
        echo(f"{'self-test':14}{problem or PASSED}")
    if problem:
        raise MachineError(
            f"the self-test failed: {problem}", remedy="install petune anew in a clean environment"
        )


def machine() -> list[tuple[str, str]]:
    """What this machine has and reaches."""
    return [*versions(), *devices(), disk(), *demo_models(), hub()]


def _for_strangers(run: Path | None) -> Iterator[str]:
    """What a bug report needs, line by line; a damaged run is shown, not raised."""
    for name, state in (*machine(), ("self-test", self_test() or PASSED)):
        yield anonymous(f"{name:14}{state}")
    if run is None:
        return
    from petune.run.checkup import check_up

    found = check_up(run)
    yield ""
    yield from (anonymous(f"{name:14}{state}") for name, state in found.facts)
    yield from (anonymous(str(problem)) for problem in found.problems)
    log = run / "run.log"
    if log.is_file():
        yield f"\nthe last lines of its log, {SHOWN_OF_LOG} at most"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        yield from map(anonymous, lines[-SHOWN_OF_LOG:])


def anonymous(text: str) -> str:
    """The text without paths, names of files that petune does not name itself, of the user, of this machine
    and of the hub. What holds a slash and is no rate counts as a path, so that too much is left out, not too
    little."""
    import getpass
    import socket
    from urllib.parse import urlsplit

    from petune.run.folder import FILES

    def path(match: re.Match[str]) -> str:
        return match[0] if _RATE.fullmatch(match[0].rstrip(".:")) else "PATH"

    def file(match: re.Match[str]) -> str:
        return match[0] if match[0] in FILES else f"FILE.{match[1]}"

    text = _FILE.sub(file, _PATH.sub(path, text))
    hub_name = urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname
    for name, word in ((getpass.getuser(), "USER"), (socket.gethostname(), "HOST"), (hub_name, "HUB")):
        if name:
            text = re.sub(rf"\b{re.escape(name)}\b", word, text)
    return text


def _show_json(facts: Sequence[tuple[str, str]], problems: Sequence[str]) -> None:
    """What was found, for programs."""
    lines = [{"name": name, "state": state} for name, state in facts]  # a run may have several checkpoints
    show_json({"facts": lines, "problems": list(problems)})


def _check_up(run: Path, *, json: bool) -> None:
    """Show what a run folder holds. Raises FileError with every problem of one that is not whole."""
    from petune.run.checkup import check_up

    found = check_up(run)
    if json:
        _show_json(found.facts, [str(problem) for problem in found.problems])
    else:
        for name, state in found.facts:
            echo(f"{name:14}{state}")
    if found.problems:
        raise FileError(found.problems)


def versions() -> list[tuple[str, str]]:
    """Python and the packages petune stands on, with their versions."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    from petune import __version__

    found = [
        ("petune", __version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]
    for name in PACKAGES:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def devices() -> list[tuple[str, str]]:
    """The CPU and every CUDA device with its memory."""
    import torch

    counts = ((os.cpu_count() or 1, "core"), (torch.get_num_threads(), "thread"))
    words = (f"{number} {what}" + ("s" if number > 1 else "") for number, what in counts)
    found = [("cpu", ", ".join(words))]
    for at in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(at)
        found.append((f"cuda:{at}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"))
    return found if len(found) > 1 else [*found, ("cuda", "none: everything runs on the CPU")]


def disk() -> tuple[str, str]:
    """Free space where runs would be written."""
    return "disk", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB free in the working directory"


def demo_models() -> list[tuple[str, str]]:
    """Which demo checkpoints are there."""
    from petune.demo import MINILM_INSTALL, MODELS, minilm_folder

    found = {name: f"demo:{name} is here" for name in MODELS}
    if minilm_folder() is None:
        found["minilm"] = f"not installed: {MINILM_INSTALL}"
    return list(found.items())


def hub() -> tuple[str, str]:
    """Whether models could be fetched; what is on this machine never needs it."""
    import socket
    from urllib.parse import urlsplit

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "hub", "offline, by HF_HUB_OFFLINE; folders and demo: work"
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        why = error.strerror or error
        return "hub", f"{address.hostname} cannot be reached directly ({why}); folders and demo: work"
    return "hub", f"{address.hostname} answers"


def self_test() -> str | None:
    """Tune a tiny network for one step; what went wrong, or None. The generator of the process is left as it
    was."""
    import torch
    from torch import nn

    from petune.methods import merge, tune
    from petune.methods.configs import LoraConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        x, y = torch.randn(32, 8), torch.randn(32, 4)
        frozen = {name: value.clone() for name, value in model.state_dict().items()}
        tune(model, LoraConfig(r=4, targets="all-linear"))
        optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1)
        before = nn.functional.mse_loss(model(x), y)
        before.backward()
        optimizer.step()
        after = nn.functional.mse_loss(model(x), y)
        moved = [
            name
            for name, value in model.state_dict().items()
            if name in frozen and not torch.equal(value, frozen[name])
        ]
        if not after < before:
            return f"the loss did not fall ({before:.4f} -> {after:.4f})"
        if moved:
            return f"frozen weights moved: {', '.join(moved)}"
        tuned = model(x)
        same = torch.allclose(merge(model)(x), tuned, atol=1e-5)
        return None if same else "the merged model computes something else"
