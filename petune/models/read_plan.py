"""Which tensor of a checkpoint's files each tensor of a model is, by the names alone.

transformers renames on the way (older names, the prefix of the base model, ties), by functions of its own;
they are asked here with the headers of the files and a model on the meta device, and nothing is read. They
are no documented interface: tests hold the answers against `from_pretrained`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from petune.files.ranges import Piece, TensorSource


@dataclass(frozen=True)
class ReadPlan:
    """Where a model's tensors lie in files.

    pieces: by every name of every tensor that the files hold, buffers included; of experts, which files have
    one by one, several. stored: the names under which
    they hold it themselves, of several that are tied. info: what was missing, unexpected and of another
    shape, as transformers tells it. renamings: those of transformers that were used, which it undoes when it
    saves.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    stored: frozenset[str]
    info: Mapping[str, set[Any]]
    renamings: list[Any]


def plan_reads(model: PreTrainedModel, files: Mapping[str, TensorSource]) -> ReadPlan | None:
    """The plan for `model`, untouched and on the meta device; None where transformers computes tensors of
    several in the files in another way than to lay them beside one another, so that it has to read them."""
    mapping, wanted = get_model_conversion_mapping(model), model.state_dict(keep_vars=True)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    pieces: dict[str, tuple[Piece, ...]] = {}
    several: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    unexpected, mismatched = set[str](), set[Any]()
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name.endswith("_extra_state"):
            return None
        if pattern is not None and name in wanted:
            several[name].append((pattern, key))
            continue
        shape = files[key].shape
        if name not in wanted:
            unexpected.add(name)
        elif shape != tuple(wanted[name].shape):
            mismatched.add((name, shape, tuple(wanted[name].shape)))
        else:
            pieces[name] = (Piece(key, (0,) * len(shape), shape),)
    for name, parts in several.items():
        if (found := _beside(parts, converters, files)) is None:
            return None
        corners = [[at + size for at, size in zip(one.at, one.size, strict=True)] for one in found]
        end = tuple(map(max, *corners)) if len(corners) > 1 else tuple(corners[0])
        whole = math.prod(end) == sum(math.prod(one.size) for one in found)
        if whole and end == tuple(wanted[name].shape):
            pieces[name] = found
        else:
            mismatched.add((name, end, tuple(wanted[name].shape)))
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


def _beside(
    parts: Sequence[tuple[str, str]], converters: Sequence[WeightConverter], files: Mapping[str, TensorSource]
) -> tuple[Piece, ...] | None:
    """The pieces [1, rows, columns] of a tensor [E, rows, columns] whose matrices files have one by one, in
    their order, by pattern; those of a converter's patterns lie below one another. None where a converter
    does anything else."""
    converter = next(one for one in converters if parts[0][0] in one.source_patterns)
    how = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
    if how not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return None
    found, below = [], 0
    for pattern in converter.source_patterns:
        shapes = [(key, files[key].shape) for own, key in parts if own == pattern]
        if any(len(shape) != 2 for _, shape in shapes):
            return None
        found += [Piece(key, (at, below, 0), (1, *shape)) for at, (key, shape) in enumerate(shapes)]
        below += max((shape[0] for _, shape in shapes), default=0)
    return tuple(found)


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
