"""The run folder: what lies where, and the writing of everything in it but checkpoints and tuned weights.

recipe.yaml  resolved.yaml  env.json  metrics.jsonl  loss.png  run.log  summary.json  checkpoints/step-N/  best  tuned/  README.md
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast

from petune import checkpoint
from petune.assemble import choose_place
from petune.errors import MachineError, Problem, RecipeError, UsageError, nearest
from petune.json_fields import sealed
from petune.models.load import AUTO, Head
from petune.models.source import resolve_model
from petune.plot import draw_loss
from petune.recipe import Recipe, differences, load_recipe
from petune.run_lock import RunLock
from petune.tasks import TASKS
from petune.tensorfile import write_file, writing

_PACKAGES = ("petune", "torch", "transformers", "safetensors", "datasets", "accelerate", "pydantic")
_FILES = (
    *("recipe.yaml", "resolved.yaml", "env.json", "metrics.jsonl", "loss.png", "run.log"),
    *("summary.json", "eval.json", "README.md", "best"),
)
RANK_LOGS = "ranks"  # what processes other than the first have printed
_FOLDERS = ("checkpoints", "tuned", "merged", "hf", "peft")  # not RANK_LOGS, to which this run's processes are writing


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run, and the writing of everything in it but checkpoints."""

    path: Path
    recipe: Recipe

    @staticmethod
    def of(recipe: Recipe) -> RunFolder:
        """The folder a recipe writes to, from the working directory; without `out`, runs/<recipe>-<time>."""
        out = recipe.out or f"runs/{recipe.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        return RunFolder(Path(out).expanduser(), recipe)

    @property
    def checkpoints(self) -> Path:
        """Where step-N folders are committed."""
        return self.path / "checkpoints"

    @property
    def tuned(self) -> Path:
        """The tuned weights, as others read them."""
        return self.path / "tuned"

    @property
    def metrics(self) -> Path:
        """One JSON object per step and per evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def log(self) -> Path:
        """Every line the run said, with the time, and the traceback of what ended it."""
        return self.path / "run.log"

    @property
    def picture(self) -> Path:
        """The loss curve, when the plot extra is installed."""
        return self.path / "loss.png"

    def refuse_occupied(self, *, resume: bool, overwrite: bool) -> None:
        """Raise UsageError unless the folder is free or the caller said what to do with it."""
        if resume and not self.has_resolved():
            raise UsageError("there is no run to resume", where=str(self.path), remedy="start it without --resume, or check `out`")
        if resume or not self.path.exists() or (self.path.is_dir() and all(entry.name == RANK_LOGS for entry in self.path.iterdir())):
            return
        if not self.path.is_dir():
            raise UsageError("out is a file", where=str(self.path), remedy="choose another `out`")
        if not overwrite:
            raise UsageError("this folder is occupied", where=str(self.path), remedy="use --resume, --overwrite, or another out=...")
        if not self.has_resolved():
            raise UsageError(
                "--overwrite only replaces a run of petune, and this folder is none", where=str(self.path), remedy="choose another out"
            )

    def refuse_changes(self, recipe: Recipe, allow_change: Collection[str]) -> None:
        """Raise RecipeError with every setting of `recipe` that would change the numbers of this run and is not in `allow_change`."""
        changed = differences(self.resolved(), recipe.resolved(), tuple(allow_change))
        if changed:
            problems = [
                Problem(f"{key} has changed since the run began", where=recipe.where(key), expected=str(old), found=str(new))
                for key, old, new in changed
            ]
            keys = " ".join(f"--allow-change {key}" for key, _, _ in changed)
            raise RecipeError([*problems, Problem("these keys change the numbers", remedy=f"put them back, start anew, or say {keys}")])

    def has_resolved(self) -> bool:
        """Whether a run began here."""
        return (self.path / "resolved.yaml").is_file()

    def resolved(self) -> dict[str, Any]:
        """Every setting the run began with."""
        return load_recipe(self.path / "resolved.yaml").resolved()

    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "summary.json").is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and hold its lock; if nothing was written inside the block, the folder goes again. Raises MachineError."""
        made = [place for place in (self.path, *self.path.parents) if not place.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise MachineError(f"the run folder cannot be made: {error.strerror}", where=str(self.path)) from None
        try:
            with RunLock(self.path):
                yield
        finally:
            with suppress(OSError):
                for place in made:
                    place.rmdir()  # refused, as it should be, where there is anything

    def begin(self, *, overwrite: bool = False) -> None:
        """Write what is known before the first step; a run that is resumed counts as unfinished from here on."""
        source = self.recipe.source  # it may lie in this very folder, so it is read before anything is cleared
        written = source.read_bytes() if source is not None else self.recipe.to_yaml().encode()
        if overwrite:
            self._clear()
        with writing(self.path):
            (self.path / "summary.json").unlink(missing_ok=True)
            if not (self.path / "recipe.yaml").exists():
                write_file(self.path / "recipe.yaml", [written])
            write_file(self.path / "resolved.yaml", [self.recipe.to_yaml().encode()])
            checkpoint.write_json(self.path / "env.json", environment())

    def _clear(self) -> None:
        for name in _FILES:
            (self.path / name).unlink(missing_ok=True)
        for folder in (self.path / name for name in _FOLDERS):
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)

    def point_best(self, step: int, metric: str, value: float | None) -> None:
        """Say in `best` which checkpoint is the best so far."""
        write_file(self.path / "best", [f"checkpoints/step-{step}\n{metric} {value}\n".encode()], sync=True)

    def cut_metrics(self, step: int) -> None:
        """Drop records after `step`: the resumed run writes them again."""
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if _step_of(line) <= step]
            write_file(self.metrics, ["".join(f"{line}\n" for line in kept).encode()])

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write loss.png (with the plot extra), README.md and, last, summary.json, which marks the run as finished."""
        draw_loss(self.metrics, self.picture)
        (self.path / "README.md").write_text(_readme(self.recipe, self.path, summary), encoding="utf-8")
        checkpoint.write_json(self.path / "summary.json", sealed(summary))


def refuse_unknown(keys: Collection[str]) -> None:
    """Raise UsageError for a name in `--allow-change` that is no setting."""
    for key in keys:
        if key.split(".")[0] not in Recipe.model_fields:
            near = nearest(key, Recipe.model_fields)
            remedy = f"did you mean: {near[0]}" if near else None
            raise UsageError(f"{key!r} is not a setting", where="--allow-change", remedy=remedy)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 2**62  # a line cut off by a crash


@cache
def environment() -> dict[str, Any]:
    """Versions and machine, without names of users or hosts."""
    import torch

    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    devices = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    system = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    return {"packages": found, **system, "threads": torch.get_num_threads(), "cuda_devices": devices}


_LOADING = {
    "lora": 'base = {auto}.from_pretrained({base})\nmodel = petune.load(base, "{out}/tuned")   # peft.PeftModel reads it too',
    "full": 'model = {auto}.from_pretrained("{out}/tuned")',
    "other": 'base = {auto}.from_pretrained({base})\nmodel = petune.load(base, "{out}/tuned")',
    "object": '# base: the model that petune.train was given, untouched\nmodel = petune.load(base, "{out}/tuned")',
    "random": '# the base is random weights, made again from the recipe and its seed\nmodel = petune.load_run("{out}").speaker.model',
}


def _readme(recipe: Recipe, out: Path, summary: Mapping[str, Any]) -> str:
    method, source = recipe.method_name, resolve_model(recipe.model, recipe.folder)
    options = {"revision": source.revision, "dtype": str(choose_place(recipe).dtype).removeprefix("torch.")}
    options |= {"num_labels": summary.get("num_labels")}
    base = ", ".join([json.dumps(source.place), *(f"{name}={json.dumps(value)}" for name, value in options.items() if value)])
    auto = f"transformers.{AUTO[cast(Head, TASKS[str(summary['task'])].head)].__name__}"
    form = (
        {"config": "random", "object": "object"}.get(source.kind, method if method == "lora" else "other") if method != "full" else "full"
    )
    code = _LOADING[form].format(auto=auto, out=out, base=base)
    metric = summary["metric"]
    before, after = summary["before"].get(metric), summary["after"].get(metric)
    warned = "".join(f"\n**Warning:** {line}.\n" for line in summary["warnings"])
    return f"""# {recipe.name}: {recipe.model} tuned with {method}

{metric}: {before:.4f} on the untouched base, {after:.4f} tuned ({summary["steps"]} steps, {summary["seconds"]} s).
{warned}
```python
import petune, transformers
{code}
```

| file | what it is |
|---|---|
| tuned/ | the tuned weights with tokenizer, chat template and head ({_layout(method)}); the best evaluated state |
| recipe.yaml, resolved.yaml | the recipe as it was written; every setting it meant |
| metrics.jsonl, loss.png | one line per step and per evaluation; the curve |
| run.log, env.json | everything the run said; versions and machine |
| checkpoints/step-N/, best | resumable states, whole or absent; which is the best |
| summary.json | scores before and after, warnings, time, tokens, memory |
"""


def _layout(method: str) -> str:
    return {"lora": "peft's layout", "full": "a Hugging Face folder"}.get(method, "petune's layout")
