"""petune.json, the record beside tuned weights: what was tuned, how, on which base; written, read strictly,
compared with a base."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from petune.errors import FileError, Problem, UsageError, told_apart
from petune.files.hashes import differing
from petune.files.json_fields import (
    Anything,
    Digest,
    Fields,
    IntegerValue,
    Kind,
    ListOf,
    MapOf,
    Number,
    OneOf,
    TextValue,
    TupleValue,
    check_fields,
    check_version,
)
from petune.files.manifest import RECORD, check_folder
from petune.files.safetensors import read_json, reading, write_file
from petune.log import say
from petune.methods import Tuning
from petune.methods.configs import METHODS, MethodConfig, make_config
from petune.models import family_of
from petune.models.multimodal import is_whole
from petune.models.source import is_weights, model_files
from petune.saving.fingerprint import compare, fingerprint, full_hash, plain_name

FORMAT = 2

_SAMPLED = TupleValue(TextValue(), ListOf(IntegerValue()), OneOf(ListOf(OneOf(Number(), TextValue())), None))
_BASE: Mapping[str, Kind] = {
    "name": OneOf(TextValue(), None),
    "fingerprint": Fields({"version": IntegerValue(), "tensors": MapOf(_SAMPLED)}),
    "sha256": OneOf(Digest(), None),
    "files": OneOf(MapOf(Fields({"size": IntegerValue(), "sha256": Digest()}), least=1), None),
}
_FIELDS: Mapping[str, Kind] = {
    "format": IntegerValue(1),
    "petune": TextValue(),
    "method": TextValue(METHODS),  # with those that were added since
    "config": MapOf(Anything()),  # make_config knows each method's settings
    "family": OneOf(TextValue(), None),
    "also_train": ListOf(TextValue()),
    "model": Fields({"class": TextValue(), "type": OneOf(TextValue(), None)}),
    "id2label": OneOf(MapOf(OneOf(TextValue(), IntegerValue()), numbered=True), None),
    "vocabulary": OneOf(IntegerValue(), None),
    "base": Fields(_BASE),
    "tensors": MapOf(TupleValue(ListOf(IntegerValue()), TextValue()), least=1),
}


@dataclass(frozen=True)
class Record:
    """A petune.json: `shapes` by tensor name, `facts` all of it."""

    file: Path
    method: str
    config: MethodConfig
    also_train: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    facts: Mapping[str, Any]

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The names of the classes in the order of their ids; None for a model without."""
        labels = self.facts["id2label"]
        return None if labels is None else tuple(labels[str(index)] for index in range(len(labels)))

    def check_again(self) -> None:
        """Raise FileError where the folder is not what it was when this was read: call it right before its
        tensors are."""
        if read_json(self.file, links=True) != self.facts:
            raise FileError("has been changed since it was read", where=str(self.file), remedy="start again")
        check_folder(self.file.parent)

    def check_base(self, model: nn.Module, files: Mapping[str, Path], verify: bool) -> None:
        """Raise FileError unless `model` is the base this was tuned on: its build, sampled values, and the
        `files` it was loaded from.

        `verify` demands hashes, of the files read afresh or else of every tensor.
        """
        self._check_build(model)
        base = self.facts["base"]
        compare(base["fingerprint"], model, str(self.file), self.also_train)
        if METHODS[self.method].trains_base:
            return  # every value of the base is replaced
        if base["files"] and (files or verify):
            self.check_files(files, afresh=verify)
        elif verify and base["sha256"] is None:
            raise FileError(
                "stores no hash of its base",
                where=str(self.file),
                remedy="save with base_sha256=petune.saving.export.full_hash(model)",
            )
        elif (
            verify
            and (digest := full_hash(model, self.also_train)) != base["sha256"]
            and full_hash(model) != base["sha256"]  # taken before the model was wrapped
        ):
            expected, found = told_apart(base["sha256"], digest)
            raise FileError(
                "the base's SHA-256 differs",
                where=str(self.file),
                expected=expected,
                found=found,
                remedy="load the base it was made on, in the dtype it was hashed in",
            )

    def _check_build(self, model: nn.Module) -> None:
        made_on, family = self.facts["model"], family_name(model)
        if (expected := made_on["class"]) != (found := type(model).__name__) or self.facts[
            "family"
        ] != family:
            sides = {
                "expected": f"{expected} (family {self.facts['family']})",
                "found": f"{found} (family {family})",
            }
            remedy = "petune.load(petune.text_model(model), folder)" if is_whole(model) else None
            what = f"this {self.method} tuning is of another kind of model"
            raise FileError(what, where=str(self.file), remedy=remedy, **sides)
        names = {name for name, _ in model.named_modules()}
        if lost := [head for head in self.also_train if head not in names]:
            remedy = "load the base with the head of the same task"
            raise FileError(
                f"the model has no {lost[0]}, which was trained", where=str(self.file), remedy=remedy
            )

    def check_files(self, files: Mapping[str, Path], *, weights: bool = True, afresh: bool = False) -> None:
        """Raise FileError naming those of the base's `files` that are not what they were when this was tuned;
        `weights`: all of them.

        Weights in files of other names or sizes are the base saved anew, in other shards or another dtype:
        that is said, and, unless `afresh`, left to the fingerprint.
        """
        stored = self.facts["base"]["files"] or {}
        expected = {name: entry["sha256"] for name, entry in stored.items()}
        sizes = {name: entry["size"] for name, entry in stored.items() if is_weights(name)}
        if not afresh and sizes != {name: _size(path) for name, path in files.items() if is_weights(name)}:
            if weights:
                say(
                    f"{self.file}: the base was saved anew since, in other files: compared by sampled values"
                    " alone"
                )
            return
        names = [name for name in expected if name in files and (weights or not is_weights(name))]
        found: dict[str, str | None] = dict(
            differing({name: files[name] for name in names}, expected, afresh=afresh)
        )
        found |= dict.fromkeys(name for name in expected if name not in files)
        surplus = [name for name in files if name not in expected and is_weights(name)]
        if found or surplus:
            remedy = (
                "load the base with from_pretrained from the files it was made on: another copy, or the same"
                " revision"
            )
            problems = [Problem("the files of the base differ", where=str(self.file), remedy=remedy)]
            for name in sorted((*found, *surplus)):
                one, other = expected.get(name), found.get(name)
                shown = told_apart(one or "", other or "")
                sides = [
                    "no such file" if value is None else f"sha256 {text}"
                    for value, text in zip((one, other), shown, strict=True)
                ]
                problems.append(
                    Problem(
                        "has another content",
                        where=str(files.get(name, name)),
                        expected=sides[0],
                        found=sides[1],
                    )
                )
            raise FileError(problems[:11])


def _size(path: Path) -> int:
    with reading(path):
        return path.stat().st_size


def family_name(model: nn.Module) -> str | None:
    """The name of a model's family, None without a table."""
    family = family_of(model)
    return family.name if family else None


def origin(model: nn.Module) -> str | None:
    """Where transformers loaded the model from, if it did."""
    return getattr(getattr(model, "config", None), "_name_or_path", None) or None


def origin_files(model: nn.Module, verify: bool) -> dict[str, Path]:
    """The files a model in memory was loaded from: of a folder, and, where they must be known, of the newest
    copy of a hub id."""
    place = origin(model)
    if not place or not (verify or Path(place).is_dir()):
        return {}  # which revision of a hub id it was cannot be seen
    return model_files(place, getattr(getattr(model, "config", None), "_commit_hash", None))


def facts_of(
    model: nn.Module,
    record: Tuning,
    base_name: str | None,
    sha256: str | None,
    files: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What petune.json says of a wrapped model, but for its tensors."""
    config = getattr(model, "config", None)
    embeddings = model.get_input_embeddings() if isinstance(model, PreTrainedModel) else None
    labels = getattr(config, "id2label", None)
    return {
        "format": FORMAT,
        "petune": _version(),
        "method": record.method,
        "config": asdict(record.config),
        "family": record.family,
        "also_train": [plain_name(name) for name in record.also_train],
        "model": {"class": type(model).__name__, "type": getattr(config, "model_type", None)},
        "id2label": {str(index): label for index, label in labels.items()} if labels else None,
        "vocabulary": getattr(embeddings, "num_embeddings", None),
        "base": {
            "name": base_name,
            "fingerprint": fingerprint(model),
            "sha256": sha256,
            "files": dict(files or {}) or None,
        },
    }


def _version() -> str:
    try:
        return version("petune")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def write_record(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """One line per fact: indenting the thousands of numbers of a fingerprint would take longer than saving
    the tensors."""
    rows = {
        key: [list(value.shape), str(value.dtype).removeprefix("torch.")] for key, value in tensors.items()
    }
    lines = (
        f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
        for key, value in {**facts, "tensors": rows}.items()
    )
    write_file(path, [b"{\n", ",\n".join(lines).encode(), b"\n}\n"])


def read_record(folder: Path) -> Record:
    """The petune.json of a folder whose every file was compared with its hash first. Raises FileError."""
    file = folder / RECORD
    facts = read_json(file, links=True)
    check_version(facts, "format", FORMAT, file)
    check_folder(folder)
    check_fields(facts, _FIELDS, file)
    try:
        config = make_config(facts["method"], facts["config"])
    except UsageError as error:
        raise FileError(
            f"petune.json is damaged: {error}", where=f"{file}  config", remedy="use another copy"
        ) from error
    shapes = {name: tuple(shape) for name, (shape, _) in facts["tensors"].items()}
    return Record(file, facts["method"], config, tuple(facts["also_train"]), shapes, facts)
