"""What can be wrong with a checkpoint that transformers has read: half filled, no weights, broken ties,
values that are not finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from petune.errors import FileError, Problem, UsageError
from petune.files.safetensors import WEIGHTS, Header, is_finite
from petune.models.behind import output_head
from petune.models.contents import Contents
from petune.models.source import ModelSource
from petune.models.spec import Family


def check_filled(
    model: nn.Module, family: Family | None, info: Any, source: ModelSource, contents: Contents | None = None
) -> tuple[tuple[str, ...], str]:
    """(modules that are new, a line about them), by transformers' `info` on what a checkpoint filled.

    contents: of a model on the meta device. Raises FileError naming the first ten tensors that are missing or
    mis-shaped outside a new head, and ten that are surplus in the blocks.
    """
    mismatched = {str(key if isinstance(key, str) else key[0]) for key in info["mismatched_keys"]}
    missing = {str(key) for key in info["missing_keys"]} | mismatched
    backbone = getattr(model, "base_model_prefix", "")
    # of a model without a table, all but the backbone is head
    outside = [name for name, _ in model.named_children() if name != backbone]
    heads = (*family.heads, *family.fresh) if family else (*outside, "pooler")
    names = [name for name, _ in model.named_modules() if name]
    new = tuple(
        name
        for name in names
        if name.rpartition(".")[2] in heads and any(key.startswith(name + ".") for key in missing)
    )
    lost = sorted(
        key
        for key in missing - _zero_biases(model, new, contents)
        if not key.startswith(tuple(f"{name}." for name in new))
    )
    blocks = tuple(rule.blocks + "." for rule in family.stacks.values()) if family else ()
    surplus = sorted(
        str(key) for key in info["unexpected_keys"] if any(f".{block}" in f".{key}" for block in blocks)
    )
    faults = {True: "has another shape in the checkpoint", False: "is in the model but not in the checkpoint"}
    problems = [Problem(faults[key in mismatched], where=key) for key in lost[:10]]
    problems += [Problem("is in the checkpoint but not in the model", where=key) for key in surplus[:10]]
    if problems:
        summary = f"{len(lost)} missing or mis-shaped, {len(surplus)} surplus"
        what = "the checkpoint does not fill the model it describes"
        remedy = "use another copy of the model, or the config that it was saved with"
        raise FileError([Problem(what, where=source.place, found=summary, remedy=remedy), *problems])
    dropped = sorted(
        {str(key).split(".")[0] for key in info["unexpected_keys"]}
        - {str(key).split(".")[0] for key in surplus}
    )
    parts = [f"{', '.join(new)} is new and will be trained"] if new else []
    parts += [f"{', '.join(dropped)} of the checkpoint is not used by this task"] if dropped else []
    return new, "; ".join(parts)


def _zero_biases(model: nn.Module, new: Sequence[str], contents: Contents | None) -> set[str]:
    """Every name of the bias of a vocabulary head that is new: zero until it trains, so that nothing random
    stays."""
    bias = getattr(output_head(model) if new else None, "bias", None)
    if bias is None:
        return set()
    names = {name for name, value in model.named_parameters(remove_duplicate=False) if value is bias}
    value = bias if contents is None else contents.whole(min(names))
    return set() if bool(value.any()) else names


def check_finite(model: nn.Module, source: ModelSource) -> None:
    """Raise FileError naming the first ten parameters that hold a NaN or an infinity."""
    bad = [name for name, value in model.named_parameters() if not is_finite(value.detach())]
    refuse_not_finite(bad, source.place)


def refuse_not_finite(names: Sequence[str], place: str) -> None:
    """Raise FileError naming the first ten of these parameters, if any, which hold a NaN or an infinity."""
    if names:
        what, remedy = "holds a value that is not finite", "use another copy of the model"
        raise FileError([Problem(what, where=f"{place}: {name}", remedy=remedy) for name in names[:10]])


def refuse_absent(name: str, value: Tensor) -> None:
    """Raise UsageError for a tensor on the meta device, of which something is to be read or written."""
    if value.is_meta:
        remedy = "load the whole model, without offloading (device_map)"
        raise UsageError("this tensor has no values: it is on the meta device", where=name, remedy=remedy)


def check_stored(model: nn.Module, headers: Mapping[Path, Header], four_bit: Collection[str] = ()) -> None:
    """Raise FileError naming the first ten parameters stored as integers, truth values or 8-bit floats, which
    would be cast unasked. four_bit: those that are read as what they are."""
    parameters = [
        name for name, value in model.named_parameters(remove_duplicate=False) if value.is_floating_point()
    ]
    problems = []
    for path, header in headers.items():
        for key, entry in header.tensors.items():
            if entry.dtype in WEIGHTS or key in four_bit:
                continue
            # with or without a prefix
            if any(f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}") for name in parameters):
                found = str(entry.dtype).removeprefix("torch.")
                remedy = "use the model as it was before it was quantised or converted"
                problems.append(Problem(f"holds {found}, not weights", f"{path}  {key}", remedy=remedy))
    if problems:
        raise FileError(problems[:10])


def check_ties(model: Any, contents: Contents) -> None:
    """Raise FileError naming the first ten parameters that the config ties and that differ in the files."""
    wanted, stored = model.get_expanded_tied_weights_keys(all_submodels=True), contents.plan.stored
    broken = {
        one: two
        for one, two in wanted.items()
        if one in stored and two in stored and not contents.same(one, two)
    }
    _refuse_broken(broken, contents.place)


def check_tied(model: Any, source: ModelSource) -> None:
    """The same for a model in memory, where such parameters have stayed untied."""
    wanted = model.get_expanded_tied_weights_keys(all_submodels=True)
    get = model.get_parameter_or_buffer
    _refuse_broken({one: two for one, two in wanted.items() if get(one) is not get(two)}, source.place)


def _refuse_broken(ties: Mapping[str, str], place: str) -> None:
    if ties:
        broken = [
            Problem(
                f"is tied to {two} by the config, and differs from it in the checkpoint", f"{place}: {one}"
            )
            for one, two in ties.items()
        ]
        remedy = (
            'use another copy; if they are meant to differ, set "tie_word_embeddings": false in config.json'
        )
        first = Problem("the checkpoint breaks ties of its config", place, remedy=remedy)
        raise FileError([first, *broken[:10]])
