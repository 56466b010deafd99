"""What a recipe calls a model: where it lies, and which files hold its weights. Nothing is loaded here.

A local folder always wins and never touches the network; `demo:` names ship with petune; `config:` gives
random weights and says so; `object:` stands for a model that was given from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from petune import demo
from petune.errors import FileError
from petune.files.manifest import RECORD, name_fault
from petune.files.safetensors import read_json
from petune.models.trust import refuse_adapter, refuse_outside

# Organisations of the hub, and how well-known names of theirs begin that once were whole ids.
_ORGS = {
    "google-bert": ("bert-base-", "bert-large-"),
    "google-t5": ("t5-",),
    "google": ("flan-t5-",),
    "facebook": ("bart-",),
    "distilbert": ("distilbert-",),
    "FacebookAI": ("roberta-", "xlm-roberta-"),
    "openai-community": ("gpt2",),
}
_CONFIGS = ("config.json", "generation_config.json")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `place` is a folder, a config file, a hub id or an object's class; `note` one
    line for the user."""

    spec: str
    kind: Literal["folder", "hub", "demo", "config", "object"]
    place: str
    revision: str | None
    note: str

    @property
    def beside(self) -> str:
        """Where the files beside the weights are: tokenizer, processor, how it generates."""
        return str(Path(self.place).parent) if self.kind == "config" else self.place


def resolve_model(spec: str, folder: Path) -> ModelSource:
    """What `spec` (folder | demo:NAME | config:FILE | hub id[@revision] | object:CLASS@FINGERPRINT) means,
    seen from a recipe in `folder`.

    Raises FileError for a path that is not there, naming every place that was tried.
    """
    if spec.startswith("demo:"):
        name = spec.removeprefix("demo:")
        place = demo.model_path(name)
        return ModelSource(spec, "demo", str(place), None, f"{spec}: {demo.MODELS[name]}")
    if spec.startswith("object:"):
        name, _, mark = spec.removeprefix("object:").partition("@")
        return ModelSource(spec, "object", name, None, f"a {name} given from Python, fingerprint {mark}")
    if spec.startswith("config:"):
        place = _find(spec.removeprefix("config:"), folder)
        return ModelSource(
            spec,
            "config",
            str(place),
            None,
            f"{spec}: RANDOM WEIGHTS, for checks of speed and correctness, not of quality",
        )
    tried = [base / spec for base in (folder, Path.cwd())]
    if (
        not spec.isprintable()
        or len(spec.encode()) > 4000
        or any(len(part.encode()) > 255 for part in spec.split("/"))
    ):
        remedy = "give a folder, a hub id such as org/name, or demo:NAME"
        raise FileError("no model has a name like this", found=repr(spec)[:200], remedy=remedy)
    for place in tried:
        if place.is_dir():
            _refuse_no_model(place)
            return ModelSource(spec, "folder", str(place.resolve()), None, f"{spec}: local folder")
        if place.is_file():
            remedy = "give the folder that holds config.json"
            raise FileError("the model is a file, not a folder", where=str(place), remedy=remedy)
    name, _, revision = spec.partition("@")
    if spec.startswith((".", "/")) or name.count("/") != 1:
        raise _not_there(spec, tried)
    return ModelSource(spec, "hub", name, revision or None, f"{spec}: from the hub or its local cache")


def _refuse_no_model(folder: Path) -> None:
    """Raise FileError for the folder of a run and for that of an adapter, in the place of a model's."""
    if (folder / "config.json").is_file():
        return
    refuse_adapter(folder)
    if (folder / RECORD).is_file():
        remedy = "give the base as `model` and this folder as init_adapter"
        raise FileError("is a tuning, not a model", where=str(folder), remedy=remedy)
    if (folder / "resolved.yaml").is_file():
        tuned = folder / "tuned"
        remedy = f"give its base as `model` and {tuned} as init_adapter"
        if (tuned / "config.json").is_file():
            remedy = f"give {tuned}, the model that it tuned"
        raise FileError("is the folder of a run, not a model", where=str(folder), remedy=remedy)


def _find(text: str, folder: Path) -> Path:
    tried = [base / text for base in (folder, Path.cwd())]
    for place in tried:
        if place.is_file():
            return place.resolve()
    raise _not_there(text, tried)


def _not_there(spec: str, tried: Sequence[Path]) -> FileError:
    places = ", ".join(dict.fromkeys(str(place) for place in tried))
    names = ", ".join(f"demo:{name}" for name in demo.MODELS)
    org = next((org for org, starts in _ORGS.items() if spec.startswith(starts) and "/" not in spec), None)
    remedy = f"give a folder, a hub id, which has the form org/name, or one of {names}"
    remedy = f"on the hub it is {org}/{spec}" if org else remedy
    return FileError(f"no model at {spec!r}", found=f"nothing at {places}", remedy=remedy)


def local_folder(place: str, revision: str | None = None) -> Path | None:
    """The folder at `place`, or that of a hub id in the local cache; None where there is neither."""
    folder = Path(place)
    if folder.is_dir():
        return folder
    try:
        return Path(
            cast("str", cached_file(place, "config.json", revision=revision, local_files_only=True))
        ).parent
    except (OSError, ValueError):
        return None


def model_files(place: str, revision: str | None = None) -> dict[str, Path]:
    """The files that decide what a model in a folder, or of a hub id in the local cache, computes: configs,
    index, safetensors, by name.

    Raises FileError for an index that leads out of the folder, and for links that do.
    """
    folder = local_folder(place, revision)
    weights = [] if folder is None else _weight_names(folder)
    if folder is None or not weights:
        return {}
    configs = [name for name in _CONFIGS if (folder / name).is_file()]
    if weights != [SAFE_WEIGHTS_NAME]:
        configs.append(SAFE_WEIGHTS_INDEX_NAME)
    return {name: folder / name for name in (*configs, *weights)}


def weight_files(source: ModelSource) -> list[Path]:
    """The safetensors files with the weights of a model, in the order of their names; those of a hub id are
    fetched where the cache lacks them.

    Raises FileError as `model_files`, and OSError as transformers does for what cannot be fetched.
    """
    place, revision = source.place, source.revision
    if source.kind == "hub":
        index = None
        found = cached_file(
            place, SAFE_WEIGHTS_NAME, revision=revision, _raise_exceptions_for_missing_entries=False
        )
        if found is None:
            index = cached_file(place, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
        if index is not None:
            get_checkpoint_shard_files(place, index, revision=revision)
    return [path for name, path in model_files(place, revision).items() if is_weights(name)]


def is_weights(name: str) -> bool:
    """Whether a file of `model_files` holds weights."""
    return name.endswith(".safetensors")


def _weight_names(folder: Path) -> list[str]:
    """The names of the safetensors files that transformers reads in a folder, there or not: the one file,
    else the index's. Or none."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        names = [SAFE_WEIGHTS_NAME]
    elif index.is_file():
        names = _names_in(index)
    else:
        return []
    for name in names:
        refuse_outside(folder, name)
    return names


def _names_in(index: Path) -> list[str]:
    """The names of the weight files in an index, each once."""
    found = read_json(index, links=True).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(name, str) for name in found.values()):
        raise FileError(
            "is not an index of weights", where=str(index), expected='a "weight_map" from tensors to files'
        )
    for tensor, name in found.items():
        fault = name_fault(name) or (None if is_weights(name) else "is no safetensors file")
        if fault:
            where = f"{index}  weight_map: {tensor!r}"[:300]
            remedy = "use a copy of the model you trust"
            raise FileError(f"a file's name {fault}", where=where, found=repr(name)[:200], remedy=remedy)
    return sorted(set(found.values()))


def check_weights(source: ModelSource) -> None:
    """Whether the files with the weights of a local model are there; they are not read. Raises FileError
    naming those that are not."""
    if source.kind not in ("folder", "demo"):
        return
    folder = Path(source.place)
    names = _weight_names(folder) or [SAFE_WEIGHTS_NAME]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:3]) or None
        convert = "only safetensors are read: convert the weights with save_pretrained"
        remedy = convert if found else "use a complete copy of the model"
        what = f"{missing[0]} is not there"
        raise FileError(what, where=str(folder), expected=", ".join(names[:3]), found=found, remedy=remedy)
