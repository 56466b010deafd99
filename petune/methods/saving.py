"""What `save_pretrained` and `load_state_dict` mean for a wrapped transformers model: what was tuned, without
the base.

The model's own class would write the base's weights and the tuning beside them, and `from_pretrained` would
read the base and leave the tuning out. As a tuned layer is of a subclass of the layer it tunes, so a wrapped
model is of a subclass of its model's class, with the same name. transformers' Trainer saves and loads by
these two methods: its checkpoints need no callback that could be forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from transformers import PreTrainedModel

from petune.errors import FileError, Problem, UsageError, nearest
from petune.files.safetensors import check_dtypes, read_json, write_json, write_tensors
from petune.methods.configs import method_of
from petune.methods.pissa import started
from petune.methods.targets import within
from petune.methods.trainable import frozen_tensors, mark_only_trainable, tied_ends, tuned_names, tuned_state
from petune.methods.wrapped import Tuning

TUNED = "tuned"  # the folder, inside the one that `save_pretrained` is given, that `petune.load` reads
WEIGHTS = "model.safetensors"  # what the Trainer looks for and hands to `load_state_dict`
CONFIG = "config.json"
# no such file
NO_WEIGHTS = {
    "transformers_weights": (
        "none, as this is a tuning without its base: read it with petune.load(base, folder)"
    )
}
# nothing to do for small files
_IDLE = {"max_shard_size", "safe_serialization", "save_original_format", "save_peft_format", "token"}


class TunedModel(nn.Module):
    """A wrapped transformers model, of any method but full. Mixed into the model's own class by
    `remember`."""

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        **others: Any,
    ) -> None:
        """Write `save_directory`/tuned as `petune.save` does, and model.safetensors, the same tensors for
        transformers' Trainer.

        `petune.load(base, save_directory)` reads it; config.json names no file of weights, so
        `from_pretrained` raises. Raises UsageError for a folder that holds a whole model, a `state_dict` that
        is not this model's own, `push_to_hub` and `variant`; otherwise as `petune.save`.
        """
        from petune import save  # the public verb: to the user this method is another spelling of it

        if not is_main_process:
            return
        folder = Path(save_directory)
        self._refuse(folder, state_dict, others)
        save(self, folder / TUNED, overwrite=True)
        write_tensors(folder / WEIGHTS, tuned_state(self), {"format": "petune"})
        config = json.loads(cast("Any", self).config.to_json_string())
        write_json(folder / CONFIG, config | {"architectures": [type(self).__name__]} | NO_WEIGHTS)

    def _refuse(
        self, folder: Path, state_dict: Mapping[str, Tensor] | None, others: Mapping[str, Any]
    ) -> None:
        """Raise UsageError for what would be ignored, or would destroy something."""
        if components := next(iter(started(self)), None):
            remedy = "train it by a recipe, whose checkpoints do, or write it with petune.save"
            what = "save_pretrained keeps no weights, of which init: pissa has changed the base's"
            raise UsageError(what, where=components, remedy=remedy)
        asked = [name for name, value in others.items() if value and name not in _IDLE]
        if asked:
            remedy = (
                "petune.merge(model) first, then save_pretrained writes a plain model with every option of"
                " transformers"
            )
            raise UsageError(f"a wrapped model has no {asked[0]}", where="save_pretrained", remedy=remedy)
        if (folder / CONFIG).exists() and not NO_WEIGHTS.items() <= read_json(folder / CONFIG).items():
            remedy = "give another: the tuning would take the place of its weights"
            raise UsageError("this folder holds a whole model", where=str(folder), remedy=remedy)
        given = {} if state_dict is None else dict(state_dict)
        for name, value in tuned_names(self).items() if state_dict is not None else ():
            if name not in given or given[name].data_ptr() != value.data_ptr():
                remedy = "leave state_dict out: the model itself is what is written"
                raise UsageError(
                    "state_dict is not this model's own", where=f"save_pretrained  {name}", remedy=remedy
                )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's. What `save_pretrained` wrote, which holds nothing of the base, must fit to the last
        tensor, whatever `strict` says.

        Raises FileError naming the first ten tensors that are missing, unexpected, mis-shaped or not of
        floating point.
        """
        tuned = tuned_names(self)
        if tuned.keys().isdisjoint(state_dict) or not frozen_tensors(self).keys().isdisjoint(state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        check_tensors(
            shapes_of(tuned),
            state_dict,
            "load_state_dict",
            remedy="wrap the model as it was when it was saved",
        )
        check_dtypes(state_dict, {name: value.dtype for name, value in tuned.items()}, "load_state_dict")
        super().load_state_dict(state_dict, strict=False, assign=assign)
        return _IncompatibleKeys([], [])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles name the model's own class: this one is made when it is needed."""
        return _blank, (plain_class(self),), self.__dict__


@cache
def _tuned_class(kind: Any) -> Any:
    """The tuned subclass of a model's class, of the same name: transformers finds some things by it."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (TunedModel, kind), names)


def _blank(kind: Any) -> Any:
    made = _tuned_class(kind)
    return made.__new__(made)


def remember(model: nn.Module, record: Tuning) -> None:
    """Note on a model how it is tuned, let exactly that train, and give a transformers model its way of
    saving."""
    ends = tied_ends(model, record.also_train)
    record = record if ends == record.ends else replace(record, ends=ends)
    setattr(model, "petune_tuning", record)  # noqa: B010 - mypy's Module has no such attribute
    kind: Any = type(model)
    if (
        issubclass(kind, PreTrainedModel)
        and not issubclass(kind, TunedModel)
        and not method_of(record.config).trains_base
    ):
        model.__class__ = _tuned_class(kind)
    mark_only_trainable(model)


def forget(model: nn.Module) -> None:
    """Undo `remember`, but for what trains."""
    del model.petune_tuning
    if isinstance(model, TunedModel):
        model.__class__ = plain_class(model)


def plain_class(model: nn.Module) -> Any:
    """The class the model had before it was wrapped, whatever class others (FSDP) have put over it since."""
    order = type(model).__mro__
    return order[order.index(TunedModel) + 1] if TunedModel in order else order[0]


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def check_tensors(
    expected: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Tensor],
    where: str,
    heads: Iterable[str] = (),
    remedy: str | None = None,
) -> None:
    """Raise FileError naming the first ten `tensors` that are missing, unexpected or mis-shaped.

    heads: of the model, trained whole; remedy: for all of them.
    """
    found = shapes_of(tensors)
    missing = [name for name in expected if name not in found]
    surplus = [name for name in found if name not in expected]
    wrong = [name for name in expected if name in found and expected[name] != found[name]]
    problems = [
        Problem("is missing", name, found=", ".join(nearest(name, surplus, 1)) or None) for name in missing
    ]
    problems += [Problem("is unexpected: it belongs to nothing in this model", name) for name in surplus]
    for name in wrong:
        more = "load the base with the same number of labels (num_labels)" if within(name, heads) else None
        sides = str(list(expected[name])), str(list(found[name]))
        problems.append(Problem("has another shape", name, *sides, remedy=more))
    if problems:
        summary = (
            f"{len(missing)} missing, {len(surplus)} unexpected, {len(wrong)} mis-shaped, of {len(expected)}"
        )
        first = Problem("these tensors do not fit this model", where, found=summary, remedy=remedy)
        raise FileError([first, *problems[:10]])
