"""Which tensor of a checkpoint's files each tensor of a model is, by the names alone.

transformers renames on the way (older names, the prefix of the base model, ties), by functions of its own;
they are asked here with the headers of the files and a model on the meta device, and nothing is read. They
are no documented interface: tests hold the answers against `from_pretrained`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from petune.files.ranges import Piece, Source


@dataclass(frozen=True)
class ReadPlan:
    """Where a model's tensors lie in files.

    pieces: by every name of every tensor that the files hold, buffers included. stored: the names under which
    they hold it themselves, of several that are tied. info: what was missing, unexpected and of another
    shape, as transformers tells it. renamings: those of transformers that were used, which it undoes when it
    saves.
    """

    pieces: Mapping[str, Piece]
    stored: frozenset[str]
    info: Mapping[str, set[Any]]
    renamings: list[Any]


def plan_reads(model: PreTrainedModel, files: Mapping[str, Source]) -> ReadPlan | None:
    """The plan for `model`, untouched and on the meta device; None where transformers computes tensors of
    several in the files, so that it has to read them itself."""
    mapping, wanted = get_model_conversion_mapping(model), model.state_dict(keep_vars=True)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    pieces: dict[str, Piece] = {}
    unexpected, mismatched = set[str](), set[Any]()
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if pattern is not None or name.endswith("_extra_state"):
            return None
        shape = files[key].shape
        if name not in wanted:
            unexpected.add(name)
        elif shape != tuple(wanted[name].shape):
            mismatched.add((name, shape, tuple(wanted[name].shape)))
        else:
            pieces[name] = Piece(key, (0,) * len(shape), shape)
    stored = frozenset(pieces)
    missing = set(wanted) - stored - {name for name, *_ in mismatched}
    for names in _tied(model):
        if there := [name for name in names if name in stored]:
            pieces |= {name: pieces[there[0]] for name in names if name not in stored}
            missing -= set(names)
    keys: Any = SimpleNamespace(missing_keys=missing, unexpected_keys=unexpected)
    model._adjust_missing_and_unexpected_keys(keys)  # names that a class says may be missing, or too many
    info = {
        "missing_keys": keys.missing_keys,
        "unexpected_keys": keys.unexpected_keys,
        "mismatched_keys": mismatched,
    }
    return ReadPlan(pieces, stored, info, [one for one in mapping if one.was_used()])


def names_in_model(model: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """For each tensor of files the name, in the model, of the tensor that it is or is a part of."""
    mapping, wanted = get_model_conversion_mapping(model), model.state_dict(keep_vars=True)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    return {
        key: rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)[0]
        if key not in wanted
        else key
        for key in keys
    }


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each tensor that has several."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    every: list[tuple[str, Tensor]] = list(model.state_dict(keep_vars=True).items())
    for name, value in every:
        names[id(value)].append(name)
    return [found for found in names.values() if len(found) > 1]
