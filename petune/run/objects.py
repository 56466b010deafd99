"""A model, a tokenizer and rows that `petune.train` was given as Python objects.

In the recipe, `object:CLASS@FINGERPRINT` stands in place of each path: the run folder records what was given,
and a resumed run compares.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import BaseImageProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from petune.errors import UsageError
from petune.methods.registry import refuse_tuned
from petune.models.heads import reads
from petune.models.multimodal import refuse_whole
from petune.recipe import Recipe
from petune.saving.fingerprint import fingerprint
from petune.tasks import OBJECT, DataObject, take_rows

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of a model, as a recipe names them


@dataclass(frozen=True)
class Objects:
    """What a run was given in memory. `data` holds rows by the spec that names them in the recipe."""

    model: PreTrainedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    data: Mapping[str, DataObject] = field(default_factory=dict)
    processor: Any = None  # of a model that reads pictures or sounds

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The classes of the model in the order of their ids; None where it has transformers' LABEL_0,
        LABEL_1, ... or is not given."""
        names = (
            [str(name) for name in (self.model.config.id2label or {}).values()]
            if self.model is not None
            else []
        )
        return None if all(re.fullmatch(r"LABEL_\d+", name) for name in names) else tuple(names)

    @property
    def dtype(self) -> str:
        """The dtype of most of the model's weights, as a recipe names it. Raises UsageError for one that
        petune does not compute in."""
        assert self.model is not None
        sizes: dict[torch.dtype, int] = {}
        for value in self.model.parameters():
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
        found = max(sizes, key=lambda dtype: sizes[dtype])
        if found not in DTYPES:
            remedy = "dtype='fp32' or dtype='bf16' casts the model"
            raise UsageError(
                "petune computes in float32 or bfloat16", where="model", found=str(found), remedy=remedy
            )
        return DTYPES[found]


NO_OBJECTS = Objects()


def base_name(recipe: Recipe) -> str | None:
    """What tuned files name as their base: the recipe's model; None, the origin that the model itself knows,
    for one given in memory."""
    return None if recipe.model.startswith(OBJECT) else recipe.model


def take_objects(arguments: Mapping[str, Any], tokenizer: Any = None) -> tuple[dict[str, Any], Objects]:
    """`arguments` of a recipe with a spec in place of each object, and the objects.

    A model is an nn.Module under `model`; rows stand under `data`, or under `path` and `eval` of a mapping
    there. Raises UsageError for a model that cannot be trained as it is, a model without a tokenizer or a
    tokenizer without a model; for rows as `take_rows`.
    """
    left, data = dict(arguments), {}
    model = left.get("model") if isinstance(left.get("model"), nn.Module) else None
    if model is not None:
        _refuse_other(model)
        processor = _as_processor(tokenizer, reads(model.config))
        left["model"] = f"{OBJECT}{type(model).__name__}@{_identity(model, processor)}"
    elif tokenizer is not None:
        what = "a tokenizer goes with a model in memory; a folder or hub id brings its own"
        raise UsageError(
            what, where="tokenizer", remedy="leave it out, or give model=AutoModel...from_pretrained(...)"
        )

    def spec(value: Any, name: str) -> Any:
        if value is None or isinstance(value, str | os.PathLike):
            return value
        rows = take_rows(value, name)
        data[rows.spec] = rows
        return rows.spec

    for key in left.keys() & {"data", "data.path", "data.eval"}:
        if _is_config(left[key]):
            left[key] = {
                inner: spec(value, _name(inner)) if inner in ("path", "eval") else value
                for inner, value in left[key].items()
            }
        else:
            left[key] = spec(left[key], _name(key.rpartition(".")[2]))
    if isinstance(tokenizer, ProcessorMixin):
        both: Any = tokenizer
        return left, Objects(model, both.tokenizer, data, both.feature_extractor)
    words = isinstance(tokenizer, PreTrainedTokenizerBase)
    return left, Objects(model, tokenizer if words else None, data, None if words else tokenizer)


def _name(key: str) -> str:
    return "data.eval" if key == "eval" else "data"


def _is_config(value: Any) -> bool:
    """Whether a value of `data` is its settings (path, columns, ...) and not a mapping of splits to rows."""
    return isinstance(value, Mapping) and (
        "path" in value or all(isinstance(one, str | Mapping) for one in value.values())
    )


def _as_processor(given: Any, reads: str) -> Any:
    """What was given as a tokenizer: of a model that reads pictures its image processor."""
    kind, called, auto = {
        "text": (PreTrainedTokenizerBase, "tokenizer", "AutoTokenizer"),
        "image": (BaseImageProcessor, "image processor", "AutoImageProcessor"),
        "audio": (ProcessorMixin, "processor", "AutoProcessor"),
    }[reads]
    if not isinstance(given, kind):
        what = f"a model in memory needs its {called}"
        expected = f"{'an' if called[0] == 'i' else 'a'} {called}"
        found = None if given is None else type(given).__name__
        remedy = f"give tokenizer={auto}.from_pretrained(...)"
        raise UsageError(what, where="tokenizer", expected=expected, found=found, remedy=remedy)
    return given


def _refuse_other(model: nn.Module) -> None:
    """Raise UsageError for a model in memory that cannot be trained as it is."""
    if not isinstance(model, PreTrainedModel):
        remedy = "petune.wrap takes any module, for a loop of your own"
        what = "petune.train takes a model of transformers"
        raise UsageError(what, where="model", found=type(model).__name__, remedy=remedy)
    refuse_tuned(model)
    refuse_whole(model, "give model=petune.text_model(model), which shares its modules")
    if getattr(model, "is_quantized", False):
        raise UsageError("this model is quantised", where="model", remedy="load it in float32 or bfloat16")
    devices = {str(value.device) for value in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        remedy = "load it on one device: without device_map"
        what = "the model's weights must lie on one device"
        raise UsageError(what, where="model", found=", ".join(sorted(devices)), remedy=remedy)


def _identity(model: PreTrainedModel, tokenizer: Any) -> str:
    """What tells this model and tokenizer, or image processor, from others: names, shapes, dtypes and samples
    of the weights; vocabulary and templates, or settings."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return _hash([fingerprint(model), tokenizer.to_dict()])
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = json.loads(backend.to_str()) if backend is not None else tokenizer.get_vocab()
    words |= dict.fromkeys(("truncation", "padding"))  # settings of the last call
    # which petune may have set
    marks = {name: str(value) for name, value in tokenizer.special_tokens_map.items() if name != "pad_token"}
    return _hash([fingerprint(model), words, marks, tokenizer.chat_template])


def _hash(facts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]
