"""What a tuned text model leaves of the checkpoint of several modalities that it came from: peft's files with
the names of the whole's class, and the whole checkpoint again, merged.

Servers and peft load the whole, in which the text model's modules have other names (models/multimodal.py). A
folder of peft's is read with either: what was trained on the whole, by petune or by peft, tunes the text
model by itself too.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import cached_file

from petune.errors import FileError, PetuneError, UsageError
from petune.files.ranges import Piece, RangeReader, TensorSource, sources
from petune.files.safetensors import (
    read_header,
    read_json,
    refuse_not_finite,
    write_json,
    write_tensors,
)
from petune.methods import tuning
from petune.methods.targets import within
from petune.models.bitsandbytes_files import four_bit_weights
from petune.models.fresh import box_of
from petune.models.loading import load_model
from petune.models.multimodal import (
    INSIDE,
    OUTSIDE,
    Composite,
    as_text,
    name_in_text,
    name_in_whole,
    whole_of,
)
from petune.models.mxfp4_files import mxfp4_weights
from petune.models.read_plan import plan_reads
from petune.models.source import ModelSource, local_folder, weight_files
from petune.saving.fingerprint import plain_name
from petune.saving.peft import PREFIX, by_pattern, is_named, is_saved_whole, is_target, strip_wrappers

# what lies beside the weights of a whole, and that no tokenizer writes
_BESIDE = (
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
_RULES = ("exclude_modules", "layers_to_transform", "layers_pattern")
_PATTERNS = ("rank_pattern", "alpha_pattern")


# ---------------------------------------------------------------- peft's files


def in_whole(
    model: nn.Module, fields: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The two files of peft's for a tuned text model, by the names in the class of its whole; as they are for
    a model by itself.

    Modules of one kind are named by a pattern: the whole has others of that name, in its vision tower.
    """
    if whole_of(model) is None:
        return dict(fields), dict(tensors)
    heads = tuple(map(plain_name, tuning(model).also_train))
    names = [plain_name(name) for name, _ in model.named_modules() if name]
    names = [name for name in names if not within(name, heads)]
    found = dict(fields)
    for field in ("target_modules", "feedforward_modules"):
        if found.get(field):
            found[field] = _named(names, found[field])
    found["modules_to_save"] = sorted(map(name_in_whole, heads)) or None
    if found.get("target_parameters"):
        found["target_parameters"] = [name_in_whole(name) for name in found["target_parameters"]]
    for field in _PATTERNS:
        if found.get(field):
            found[field] = {name_in_whole(name): value for name, value in found[field].items()}
    return found, {PREFIX + name_in_whole(key.removeprefix(PREFIX)): one for key, one in tensors.items()}


def _named(names: Sequence[str], entries: Sequence[str]) -> str | list[str]:
    """What finds in the whole, by peft's rule, the modules of the text model that `entries` find in it: a
    pattern of the ends of their names, else the names."""
    wanted = [name for name in names if is_named(name, entries)]
    leaves = sorted({name.rpartition(".")[2] for name in wanted})
    alike = [name for name in names if name.rpartition(".")[2] in leaves]
    if alike != wanted or not all(name.startswith("model.") for name in wanted):
        return sorted(map(name_in_whole, wanted))
    return rf"{re.escape(INSIDE)}\.(?:.*\.)?(?:{'|'.join(leaves)})"


def in_text(
    base: nn.Module, fields: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The two files of peft's in `folder` by the names that `base` has, a text model by itself, where they
    have those of a whole's class; tensors by plain names in any case. Raises as `strip_wrappers`."""
    modules = {plain_name(name): module for name, module in base.named_modules() if name}
    given, names = strip_wrappers(tensors, modules, folder), list(modules)
    if INSIDE in modules or not any(key.startswith(f"{INSIDE}.") for key in given):
        return dict(fields), given
    here = {name_in_whole(name): name for name in names}
    weights = {name_in_whole(plain_name(name)): plain_name(name) for name, _ in base.named_parameters()}
    heads = tuple(there for there in here if is_saved_whole(there, fields))
    found = {**fields, "modules_to_save": [here[there] for there in heads] or None}
    # by name, once peft's rules have been asked
    found["target_modules"] = [here[there] for there in here if is_target(there, fields, heads)]
    found |= {rule: None for rule in _RULES if rule in found}
    for field, known in (("feedforward_modules", here), ("target_parameters", weights)):
        if found.get(field):
            found[field] = [known[there] for there in known if is_named(there, found[field])]
    for field in _PATTERNS:
        if own := found.get(field):
            values = {name: by_pattern(there, own, None) for there, name in (here | weights).items()}
            found[field] = {name: value for name, value in values.items() if value is not None}
    if isinstance(rows := found.get("trainable_token_indices"), Mapping):
        found["trainable_token_indices"] = {_inside(name): ids for name, ids in rows.items()}
    return found, {_inside(key): value for key, value in given.items()}


def _inside(name: str) -> str:
    """A name as the text model has it, where it has such a one."""
    return name_in_text(name) or name


# ---------------------------------------------------------------- the whole again


def refuse_apart(whole: Composite | None, unties: bool) -> None:
    """Raise UsageError for a whole whose files cannot be written again: it is in memory alone, or the merge
    parts a head that its config ties."""
    if whole is not None and whole.source is None:
        what = (
            f"this text model is part of a {whole.kind} in memory, whose other parts no file is known to hold"
        )
        remedy = "petune.merge(text), then save_pretrained of the model that it was taken from"
        raise UsageError(what, where="model", remedy=remedy)
    if whole is not None and unties:
        what = f"merging parts a head that the config of this {whole.kind} ties"
        raise UsageError(what, where="lm_head", remedy="keep the base model and load the adapter")


def refuse_part(model: nn.Module, why: str) -> None:
    """Raise UsageError for the text model of a whole, which a layout of files cannot say."""
    if (whole := whole_of(model)) is not None:
        what = f"this is the text model of a {whole.kind}: {why}"
        raise UsageError(what, where="model", remedy="petune.load reads what petune.save wrote")


def write_whole(
    model: PreTrainedModel, whole: Composite, state: Mapping[str, Tensor], dtype: torch.dtype, work: Path
) -> None:
    """Write the files of `whole` again into `work`, under the names that they have, with `state` in the place
    of its text model's tensors; all else is copied byte by byte, its config but for `dtype`, that of `state`.

    Raises UsageError for a whole whose files hold weights in four bits, FileError as for reading them.
    """
    source = whole.source
    assert source is not None, "refuse_apart was asked"
    files = weight_files(source)
    headers = {path: read_header(path, links=True) for path in files}
    texts = as_text(headers)
    found = sources(texts)
    places = _places(model, whole, found, state)
    with RangeReader(found) as reader:
        for path, header in texts.items():
            tensors = {}
            for (key, entry), name in zip(headers[path].tensors.items(), header.tensors, strict=True):
                if name in places:
                    own, piece = places[name]
                    tensors[key] = _part(state[own], piece, entry.shape)
                    refuse_not_finite(tensors[key], f"{path.name}  {key}")
                else:
                    tensors[key] = torch.empty(entry.shape, dtype=entry.dtype)
                    reader.read(name, tensors[key], (0,) * len(entry.shape))
            write_tensors(work / path.name, tensors, header.metadata, finite=False)
    _write_index(work, [path.name for path in files])
    _write_beside(source, dtype, work)


def _places(
    model: PreTrainedModel, whole: Composite, found: Mapping[str, TensorSource], state: Mapping[str, Tensor]
) -> dict[str, tuple[str, Piece]]:
    """By the name of each tensor of files in the text model, that of `state` which it is, or a part of."""
    if held := {**four_bit_weights(found)[1], **mxfp4_weights(found)[1]}:
        remedy = "keep the adapter: petune export RUN --to peft; or tune the model as it was before"
        what = f"the files of this {whole.kind} hold weights in four bits, and no dense ones can stand there"
        raise UsageError(what, where=next(iter(held)).removeprefix(OUTSIDE), remedy=remedy)
    plan = plan_reads(model, {name: one for name, one in found.items() if not name.startswith(OUTSIDE)})
    pieces = {} if plan is None else plan.pieces
    if lost := [name for name in state if name not in pieces]:
        what = "the files of the whole have no place for these tensors; this is a fault of petune"
        raise PetuneError(what, where=", ".join(lost[:10]))
    return {one.source: (name, one) for name, several in pieces.items() for one in several}


def _part(value: Tensor, piece: Piece, shape: Sequence[int]) -> Tensor:
    """What a file holds of a tensor: it whole, or one of several experts."""
    if math.prod(piece.size) != math.prod(shape):
        raise PetuneError("a tensor of the whole has another shape", where=piece.source)
    return box_of(value.detach(), piece.at, piece.size).reshape(tuple(shape)).contiguous()


def _write_index(work: Path, names: Sequence[str]) -> None:
    """The index of several files, which transformers reads."""
    if len(names) == 1:
        return
    headers = {name: read_header(work / name).tensors for name in names}
    size = sum(one.end - one.begin for tensors in headers.values() for one in tensors.values())
    table = {key: name for name, tensors in headers.items() for key in tensors}
    facts = {"metadata": {"total_size": size}, "weight_map": dict(sorted(table.items()))}
    write_json(work / SAFE_WEIGHTS_INDEX_NAME, facts)


def _write_beside(source: ModelSource, dtype: torch.dtype, work: Path) -> None:
    """The whole's config, which says the dtype of its text model, and what makes its other inputs."""
    folder = local_folder(source.place, source.revision)
    if folder is None:
        raise FileError("is not there any more", where=source.place)
    fields, said = read_json(folder / "config.json", links=True), str(dtype).removeprefix("torch.")
    for part in (fields, fields.get("text_config")):
        for name in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and name in part:
                part[name] = said
    write_json(work / "config.json", fields)
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    for name in _BESIDE:
        path = cached_file(source.place, name, revision=source.revision, **quiet)
        if path is not None:
            shutil.copyfile(path, work / name)


def read_again(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """The text model of a whole that was written to `folder`."""
    source = ModelSource(str(folder), "folder", str(folder), None, "")
    return load_model(source, "causal", None, dtype or torch.float32).read()
