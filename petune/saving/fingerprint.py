"""Is this the base a tuning was made on? Names, shapes, dtypes and a few sampled values answer in
milliseconds, a SHA-256 for certain.

Tuned tensors, heads and whatever is tied to them are left out: they move. Names are those of the plain base
model, whatever wraps it. A base loaded in another dtype is the same base as long as its samples agree within
bfloat16's rounding.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from petune.errors import FileError, Problem, UsageError, nearest
from petune.files.safetensors import bytes_of
from petune.methods import is_wrapped, pissa, tuned_parameters, tuning
from petune.methods.configs import method_of
from petune.methods.merging import refuse_merged
from petune.methods.wrapped import bare
from petune.models.contents import contents_of
from petune.models.damage import refuse_absent
from petune.models.frozen_weight import QuantisedWeight, sampled
from petune.models.tuned_linear import tuned_layers

VERSION = 1
MOST = 10  # of the differences are named
_ROUNDING = 2.0**-8  # two bfloat16 roundings of half an ulp, relative
_TINY = 1e-7  # float16 has no smaller numbers than this

_WRAPPER = re.compile(r"(^|\.)_orig_mod(?=\.)")


def plain_name(name: str) -> str:
    """`name` without the parts that torch.compile puts into it."""
    return _WRAPPER.sub("", name).removeprefix(".") if "_orig_mod" in name else name


def base_tensors(model: nn.Module, heads: Collection[str] = ()) -> dict[str, Tensor]:
    """Every parameter and persistent buffer of the base by base name: what is tuned, in `heads`, or tied to
    either is left out; a bias that trains has the value it had in the base, and its norm the dtype."""
    model = bare(model)
    moving = {id(value) for head in heads for value in model.get_submodule(head).parameters()}
    if is_wrapped(model):
        moving |= {id(value) for value in tuned_parameters(model).values()}
        moving |= {id(value) for value in pissa.starts(model).values()}
    own = model.state_dict(keep_vars=True)
    # a bias that is tied trains by one of its names and is the base's under all of them
    trained = tuning(model).biases if is_wrapped(model) else {}
    before = {id(own[name]): value for name, value in trained.items() if name in own}
    for name, value in trained.items():  # a norm was widened whole for its bias
        weight = own.get(f"{name.removesuffix('bias')}weight")
        if weight is not None and weight.dim() == 1 and id(weight) not in moving:
            before[id(weight)] = weight.detach().to(value.dtype)
    return {
        plain_name(name): before.get(id(value), value)
        for name, value in own.items()
        if id(value) in before or id(value) not in moving
    }


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """{"version", "tensors": {base name: [dtype, shape, samples]}} as JSON, for a plain or a wrapped model.

    Of a quantised base it is that of the weights it was made of. Of a fully tuned model, whose base is gone,
    names, shapes and dtypes remain. Raises UsageError inside merged_weights.
    """
    model = bare(model)
    refuse_merged(model)
    if is_wrapped(model) and method_of(tuning(model).config).trains_base:
        rows = {
            plain_name(name): [*_build(value), None]
            for name, value in model.state_dict(keep_vars=True).items()
        }
        return {"version": VERSION, "tensors": rows}
    tensors = base_tensors(model)
    origins = {f"{name}.weight": layer.origin for name, layer in tuned_layers(model)}
    given = {plain_name(name): value for name, value in origins.items() if value is not None}
    samples = _samples(tensors | given, model)
    return {
        "version": VERSION,
        "tensors": {name: [*_build(value), samples[name]] for name, value in tensors.items()},
    }


def _build(value: Tensor) -> tuple[str, list[int]]:
    return str(value.dtype).removeprefix("torch."), list(value.shape)


def _samples(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, list[float | str]]:
    """A few values of each tensor of `model`, gathered by one copy per device: enough to tell two trainings
    apart, while a change of single rows needs the hash. Numbers JSON has no word for become text."""
    contents = contents_of(model)
    picked: dict[torch.device, list[tuple[str, Tensor]]] = {}
    with torch.no_grad():
        for name, value in tensors.items():
            if contents is None:
                refuse_absent(name, value)
            few = contents.sampled(name) if contents is not None and value.is_meta else sampled(value)
            picked.setdefault(few.device, []).append((name, few))
        found: dict[str, list[float | str]] = {}
        for chosen in picked.values():
            numbers = torch.cat([values for _, values in chosen]).tolist()
            at = 0
            for name, values in chosen:
                found[name] = [
                    number if math.isfinite(number) else str(number)
                    for number in numbers[at : at + len(values)]
                ]
                at += len(values)
    return found


def compare(saved: Mapping[str, Any], model: nn.Module, where: str, heads: Collection[str] = ()) -> None:
    """Raise FileError naming the first ten differences unless `model` is the base of the fingerprint `saved`,
    stored in the file `where`.

    `heads` are modules of a plain `model` that the tuning replaces and that are therefore not compared.
    """
    if saved.get("version") != VERSION or not isinstance(saved.get("tensors"), dict):
        raise FileError(
            "another version of fingerprint",
            where=where,
            expected=str(VERSION),
            remedy="use the petune that wrote it",
        )
    rows, tensors = saved["tensors"], base_tensors(model, heads)
    # of a full tuning: all tensors are compared, by build alone
    if any(len(row) == 3 and row[2] is None for row in rows.values()):
        tensors = {plain_name(name): value for name, value in bare(model).state_dict(keep_vars=True).items()}
    lost = [name for name in rows if name not in tensors]
    problems = [
        Problem("is not in this model", name, found=", ".join(nearest(name, tensors, 1)) or None)
        for name in lost[:MOST]
    ]
    problems += [Problem("is not in the saved base", name) for name in tensors if name not in rows]
    samples = _samples({name: tensors[name] for name in rows if name in tensors}, bare(model))
    for name in samples:
        row = _of_norm(rows[name], rows.get(f"{name.removesuffix('weight')}bias"))
        if problem := _difference(name, row, _build(tensors[name]), samples[name]):
            problems.append(problem)
    if problems:
        summary = f"{len(problems) + len(lost[MOST:])} of {len(rows)} tensors differ"
        first = Problem(
            "this tuning was made on another base model", where, found=summary, remedy=_remedy(rows, tensors)
        )
        raise FileError([first, *problems[:MOST]])


def _of_norm(row: Any, bias: Any) -> Any:
    """The row of a norm, whose own dtype is its bias's where that trained in float32 beside a narrower base:
    files of older versions have the wider one that it trained in."""
    rows = isinstance(row, list) and isinstance(bias, list) and len(row) == len(bias) == 3
    wide = rows and row[0] == "float32" and bias[0] in ("bfloat16", "float16") and row[1] == bias[1]
    return [bias[0], *row[1:]] if wide else row


def _difference(
    name: str, row: Any, build: tuple[str, list[int]], found: list[float | str]
) -> Problem | None:
    if not isinstance(row, list) or len(row) != 3:
        return Problem("the fingerprint's row is not dtype, shape and samples", name, found=repr(row)[:80])
    dtype, shape, expected = row
    if shape != build[1]:
        return Problem("has another shape", name, expected=str(shape), found=str(build[1]))
    if expected is None or expected == found:
        return None
    if dtype == build[0] or len(expected) != len(found) or not all(map(_near, expected, found)):
        return Problem(
            "holds other values",
            name,
            expected=f"{dtype} {_short(expected)}",
            found=f"{build[0]} {_short(found)}",
        )
    return None


def _near(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return abs(a - b) <= _ROUNDING * abs(a) + _TINY


def _short(values: list[float | str]) -> str:
    return "[" + ", ".join(value if isinstance(value, str) else f"{value:.6g}" for value in values) + "]"


def _remedy(rows: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    grown = [
        name
        for name, value in tensors.items()
        if name in rows and value.dim() == 2 and rows[name][1] != list(value.shape)
    ]
    for name in grown:
        if "embed" in name and rows[name][1][1:] == list(tensors[name].shape[1:]):
            return (
                f"the vocabulary had {rows[name][1][0]} rows:"
                f" model.resize_token_embeddings({rows[name][1][0]}), or load its own base"
            )
    return "load the base it was made on, at the same revision"


def base_is_changed(model: nn.Module) -> str | None:
    """The name of a weight of the base that is held in another form or in parts, or None."""
    changed = (name for name, value in base_tensors(model).items() if isinstance(value, QuantisedWeight))
    return next(changed, None) or next(iter(pissa.started(bare(model))), None)


def full_hash(model: nn.Module, heads: Collection[str] = ()) -> str:
    """SHA-256 over name, dtype, shape and every byte of the base's tensors, sorted by name; one tensor at a
    time visits the CPU.

    Raises UsageError for a fully tuned model, for a quantised base and for one that init: pissa has taken
    components from, whose own weights are gone, and inside merged_weights.
    """
    refuse_merged(bare(model))
    if is_wrapped(bare(model)) and method_of(tuning(bare(model)).config).trains_base:
        raise UsageError(
            "full fine-tuning keeps no untouched base to hash", remedy="hash the base before wrapping it"
        )
    tensors, digest = base_tensors(model, heads), hashlib.sha256()
    if changed := base_is_changed(model):
        remedy = "hash the base before wrapping it"
        raise UsageError("the weights of this base are gone", where=changed, remedy=remedy)
    for name, value in sorted(tensors.items()):
        dtype, shape = _build(value)
        digest.update(f"{name} {dtype} {shape}\n".encode())
        digest.update(bytes_of(value.detach().cpu().contiguous()))
    return digest.hexdigest()
