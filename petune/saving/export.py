"""What a tuning leaves behind: a folder others can read, and the way back into a base model, strict in both
directions.

lora is laid out as peft does, a full tuning as a Hugging Face folder, adapter and side as tuned.safetensors;
petune.json beside them says what was tuned and on which base. Nothing is filled before everything fits. The
file is long as saving, loading and merging share the folder's layout and are read together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from petune import methods
from petune.errors import FileError, MachineError, PetuneError, TrainingFault, UsageError
from petune.files.atomic import commit_folder
from petune.files.hashes import FileHashes
from petune.files.manifest import MANIFEST, RECORD, check_folder
from petune.files.safetensors import (
    check_dtypes,
    is_finite,
    read_json,
    read_tensors,
    write_json,
    write_tensors,
)
from petune.log import warn
from petune.methods import (
    Tuning,
    is_wrapped,
    lora,
    merged_weights,
    token_rows,
    tuned_names,
    tuned_state,
    tuning,
)
from petune.methods.configs import METHODS, LoraConfig, MethodConfig, method_of, name_of
from petune.methods.merging import tuned_together, warn_of_quantised
from petune.methods.pissa import in_difference_form
from petune.methods.saving import TUNED as TUNED_FOLDER
from petune.methods.saving import plain_class, remember
from petune.methods.trainable import base_biases
from petune.methods.wrapped import sole_tuning
from petune.models.frozen_weight import dense_of
from petune.models.loading import quiet
from petune.models.tuned_linear import TunedLinear, tuned_layers
from petune.saving.fingerprint import bare, fingerprint, full_hash, plain_name, refuse_merged
from petune.saving.one_tensor import BY_TYPE, LAYOUTS, check_one_tensor, load_one_tensor, to_one_tensor
from petune.saving.peft import (
    CONFIG,
    TENSORS,
    check_config,
    check_tensors,
    from_peft,
    settings_in_files,
    to_peft,
)
from petune.saving.several import holds_several, load_each, save_each
from petune.saving.tuning_record import (
    Record,
    facts_of,
    family_name,
    origin,
    origin_files,
    read_record,
    write_record,
)

__all__ = ["MergeReport", "fingerprint", "full_hash", "load", "save", "save_merged", "write_peft"]

TUNED = "tuned.safetensors"
_OURS = (RECORD, CONFIG, MANIFEST, "config.json")  # a folder with one of them may be overwritten

Model = TypeVar("Model", bound=nn.Module)


# ---------------------------------------------------------------- saving


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_name: str | None = None,
    base_sha256: str | None = None,
    base_files: Mapping[str, Mapping[str, Any]] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write what was tuned, and the tokenizer if given, as `folder`, which appears whole or not at all.
    Returns its path. Several adapters on one base have a sub-folder each, named as they are.

        >>> folder = petune.save(model, "tuned", overwrite=True)

    `base_name` (default: where the model was loaded from) is stored, and for `load` to compare `base_files`,
    {name: {"size", "sha256"}} of the base's files, or `base_sha256`, the SHA-256 of its tensors from
    `full_hash`, for `verify_base` alone. Raises UsageError for a model that is not wrapped, is inside
    merged_weights, or an occupied folder without `overwrite`; TrainingFault for a NaN or infinity;
    MachineError.
    """
    model = bare(model)
    record = tuning(model)
    refuse_merged(model)
    name = base_name or origin(model)

    def fill(work: Path) -> None:
        own = tuning(model)
        written = replace(own, config=settings_in_files(model, own.config))
        facts = facts_of(model, written, name, base_sha256, base_files)
        write_record(work / RECORD, facts, _write_model(model, own.config, name, work))
        if tokenizer is not None:
            tokenizer.save_pretrained(work)

    fill_all = partial(save_each, model, fill=fill) if record.adapters else fill
    return commit_folder(Path(folder), fill_all, overwrite, _OURS)


def write_peft(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a lora tuning as peft's two files, and the manifest of the folder beside them, which peft
    ignores.

    Raises as `save`, and UsageError for another method.
    """
    model = bare(model)
    record = sole_tuning(model)
    refuse_merged(model)
    if method_of(record.config).files != "peft":
        known = ", ".join(name for name, method in METHODS.items() if method.files == "peft")
        raise UsageError(
            f"peft has no file for {record.method}",
            expected=known,
            remedy="use petune.save, and petune.load to read it",
        )

    def fill(work: Path) -> None:
        _write_model(model, record.config, base_name or origin(model), work)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)

    return commit_folder(Path(folder), fill, overwrite, _OURS)


def _write_model(
    model: nn.Module, config: MethodConfig, name: str | None, work: Path
) -> Mapping[str, Tensor]:
    """Write the method's own files; returns the tensors in them by base-model name."""
    method = method_of(config)
    if method.files == "transformers" and isinstance(model, PreTrainedModel):
        _write_hugging_face(model, model.state_dict(), work)
        return _read_whole(work)
    tensors = _whole(model) if method.trains_base else in_difference_form(model, tuned_state(model))
    tensors = {plain_name(name): value for name, value in tensors.items()}
    if method.files == "peft":
        to_files = to_one_tensor if name_of(config) in LAYOUTS else to_peft
        fields, keyed = to_files(model, tensors, name)
        write_tensors(work / TENSORS, keyed, {"format": "pt"})
        write_json(work / CONFIG, fields)
    else:
        write_tensors(work / TUNED, tensors)
    return tensors


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, a tied one once."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(value), (name, value.detach()))
    return dict(seen.values())


def _write_hugging_face(model: PreTrainedModel, state: Mapping[str, Tensor], work: Path) -> None:
    for name, value in state.items():
        if not is_finite(value):
            raise TrainingFault(
                "holds a NaN or an infinity: not written", where=name, remedy="see the last steps' losses"
            )
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet():
            plain_class(model).save_pretrained(model, work, state_dict=dict(state))
    except SafetensorError as error:
        raise MachineError(
            f"cannot write: {error}", where=str(work), remedy="check the disk's free space"
        ) from error
    finally:
        if bar:
            logging.enable_progress_bar()


# ---------------------------------------------------------------- loading


def load(
    base_model: Model,
    folder: str | Path,
    *,
    verify_base: bool = False,
    base_files: Mapping[str, Path] | None = None,
) -> Model:
    """Tune `base_model`, in place, as the folder, or the `tuned/` in it, says: one that `save` or peft's LoRA
    wrote; one of several adapters gives them all, by their names (`add` takes one of them).

        >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> model = petune.load(base, "tuned")

    What was trained requires gradients again. A module trained whole takes the dtype it has in `base_model`:
    a head saved in float32 is rounded on a bf16 base, with a warning, unless it is float32 there.

    Every file of the folder is compared with its hash, and so are `base_files`, those the base was loaded
    from (default: of the folder it names), with the hashes a run stored; of large ones that have not changed
    the hash is remembered. `verify_base` reads them all, or compares the SHA-256 of the base's tensors with
    the one given to `save`. Raises FileError for a file that differs, a tensor that is missing, unexpected,
    mis-shaped, not finite or no weight, for another base, and for a setting petune lacks; UsageError for a
    wrapped model.
    """
    folder, model = _tuned_folder(Path(folder)), bare(base_model)
    _refuse_wrapped(model)
    if holds_several(folder):
        load_each(model, folder, verify_base=verify_base, base_files=base_files)
        return base_model
    if not (folder / RECORD).is_file():
        _explain(folder)
        check_folder(folder)
        if verify_base:
            raise FileError(
                "stores no hash of its base: peft's files do not",
                where=str(folder),
                remedy="load without verify_base",
            )
        _load_peft(model, folder, None)
        return base_model
    return _load_recorded(base_model, read_record(folder), verify_base, base_files)


def load_recorded(
    base_model: Model, record: Record, *, verify_base: bool, base_files: Mapping[str, Path] | None
) -> Model:
    """`load` of the folder whose `record` was read already; its files are compared with their hashes once
    more. Raises as `load`."""
    _refuse_wrapped(bare(base_model))
    record.check_again()
    return _load_recorded(base_model, record, verify_base, base_files)


def _refuse_wrapped(model: nn.Module) -> None:
    if is_wrapped(model):
        raise UsageError(
            f"this model is wrapped already, with {tuning(model).method}",
            remedy="merge it, or load the base model again",
        )


def _load_recorded(
    base_model: Model, record: Record, verify_base: bool, base_files: Mapping[str, Path] | None
) -> Model:
    folder, model = record.file.parent, bare(base_model)
    record.check_base(
        model, origin_files(model, verify_base) if base_files is None else base_files, verify_base
    )
    fill = {"peft": _load_peft, "transformers": _load_full, "petune": _load_tuned}[
        METHODS[record.method].files
    ]
    fill(model, folder, record)
    labels = record.facts["id2label"]
    if labels and record.also_train and hasattr(model, "config"):
        config = cast("Any", model.config)
        config.id2label = {int(index): label for index, label in labels.items()}
        config.label2id = {label: int(index) for index, label in labels.items()}
    return base_model


def _tuned_folder(folder: Path) -> Path:
    """`folder`, or the `tuned/` in it: a run and a checkpoint of the Trainer keep what was tuned there."""
    inside = folder / TUNED_FOLDER
    found = (inside / RECORD).is_file() or holds_several(inside)
    return inside if found and not (folder / RECORD).exists() else folder


def _explain(folder: Path) -> None:
    """Return for a folder with peft's two files; say what any other is and what to do with it."""
    where = str(folder)
    if not folder.is_dir():
        raise FileError(
            "is not a folder",
            where=where,
            expected="a folder that petune.save or peft wrote",
            remedy="check the path",
        )
    if (folder / CONFIG).is_file():
        _check_peft(read_json(folder / CONFIG, links=True), folder / CONFIG)
        if not (folder / TENSORS).exists() and list(folder.glob("adapter_model*.bin")):
            remedy = (
                "where you trust it, load it with peft and save it again: save_pretrained writes safetensors"
            )
            raise FileError(
                "holds a .bin file, a pickle, which can run code",
                where=where,
                expected=TENSORS,
                remedy=remedy,
            )
        return
    inside = sorted(path.parent.name for name in (RECORD, CONFIG) for path in folder.glob(f"*/{name}"))
    if inside:
        raise FileError(
            "holds no adapter itself, but its sub-folders do",
            where=where,
            remedy=f"give {folder / inside[0]}",
        )
    if (folder / "config.json").is_file():
        remedy = "load it with AutoModel...from_pretrained, or as the recipe's `model`"
        raise FileError("is a whole model, not a tuning of one", where=where, remedy=remedy)
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise FileError(
        "holds no tuning", where=where, expected=f"{RECORD} or {CONFIG}", found=found, remedy="check the path"
    )


def identity(folder: Path) -> str:
    """The SHA-256 of the manifest of a tuned folder, which holds those of its files: what a run notes of the
    folder it wrote."""
    with FileHashes({MANIFEST: folder / MANIFEST}) as hashes:
        return hashes.result()[MANIFEST]


def verify(folder: Path) -> str:
    """Compare the files of a folder that `save`, a merge or an export wrote with its manifest; in words, what
    was compared.

    Raises FileError for a file that is missing, changed or damaged.
    """
    if not (folder / MANIFEST).exists() and not (folder / RECORD).exists():
        return "not verified: it has no manifest"
    check_folder(folder)
    return "whole, its files compared with their hashes"


def _check_peft(fields: Mapping[str, Any], file: Path) -> None:
    """Raise FileError for a config of peft's that asks for what petune does not compute."""
    check = check_one_tensor if fields.get("peft_type") in BY_TYPE else check_config
    check(fields, file)


def _load_peft(model: nn.Module, folder: Path, record: Record | None) -> None:
    """Build each saved layer around its saved factors: nothing is drawn only to be overwritten."""
    fields = read_json(folder / CONFIG, links=True)
    _check_peft(fields, folder / CONFIG)
    tensors = read_tensors(folder / TENSORS, links=True)
    if fields["peft_type"] in BY_TYPE:
        load_one_tensor(model, fields, tensors, folder)
        if record is not None:
            remember(model, replace(tuning(model), config=record.config))
        return
    adapter = from_peft(model, fields, tensors, folder)
    state = adapter.state
    if record is not None:
        check_tensors(
            record.shapes,
            {name: tuple(value.shape) for name, value in state.items()},
            folder / TENSORS,
            record.also_train,
        )
    plain = {plain_name(name): (name, module) for name, module in model.named_modules()}
    forms = {name: adapter.forms[type(plain[name][1])] for name in adapter.layers}
    own_names = {
        name: tuple(forms[name].shapes(plain[name][1], own.r)) for name, own in adapter.layers.items()
    }
    wanted = {
        f"{name}.{leaf}": lora.factor_dtype(plain[name][1])
        for name, leaves in own_names.items()
        for leaf in leaves
    }
    wanted |= {name: lora.factor_dtype(token_rows.table_of(model)) for name in adapter.token_rows}
    also_train = tuple(plain[name][0] for name in (record.also_train if record else adapter.also_train))
    heads = {name: value for head in also_train for name, value in _named(model, head).items()}
    heads |= {name: plain[name.removesuffix(".bias")][1]._parameters["bias"] for name in adapter.biases}
    _check_dtypes(state, wanted | {name: value.dtype for name, value in heads.items()}, folder / TENSORS)
    if not any(state[f"{name}.lora_A"].any() and state[f"{name}.lora_B"].any() for name in adapter.layers):
        warn(f"{folder}: every update is zero, so this adapter changes nothing; was it trained?")
    for name, own in adapter.layers.items():
        full, layer = plain[name]
        model.set_submodule(
            full, forms[name].around(layer, own, {leaf: state[f"{name}.{leaf}"] for leaf in own_names[name]})
        )
    config = cast("LoraConfig", record.config if record else adapter.config)
    if config.token_rows:
        token_rows.apply(model, config.token_rows, also_train)
        heads |= {name: value for name, value in model.named_parameters() if name in adapter.token_rows}
    biases = base_biases(model, config.bias, also_train)
    remember(model, Tuning(name_of(config), config, family_name(model), also_train, biases))
    _fill(heads, state)


def _check_dtypes(state: Mapping[str, Tensor], wanted: Mapping[str, torch.dtype], file: Path) -> None:
    """Raise FileError for tensors that cannot be weights; say which are rounded."""
    if rounded := check_dtypes(state, wanted, str(file)):
        more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        warn(
            f"{file}: {rounded[0]}{more} is rounded to {wanted[rounded[0]]}; to keep it, load the base in the"
            " dtype it was tuned in"
        )


def _named(model: nn.Module, head: str) -> dict[str, Tensor]:
    return {plain_name(f"{head}.{own}"): value for own, value in model.get_submodule(head).named_parameters()}


def _fill(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(state[name])


def _load_tuned(model: nn.Module, folder: Path, record: Record) -> None:
    """Wrap anew, on generators put back afterwards, with exactly the saved heads, then overwrite every tuned
    tensor."""
    state = read_tensors(folder / TUNED)
    check_tensors(
        record.shapes,
        {name: tuple(value.shape) for name, value in state.items()},
        folder / TUNED,
        record.also_train,
    )
    # before the model is changed
    check_dtypes(state, dict.fromkeys(state, torch.float32), str(folder / TUNED))
    devices = {value.device for value in model.parameters() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        methods.tune(model, replace(cast("Any", record.config), also_train=record.also_train))
    wanted = {plain_name(name): value for name, value in tuned_names(model).items()}
    shapes = {name: tuple(value.shape) for name, value in wanted.items()}
    check_tensors(
        shapes, {name: tuple(value.shape) for name, value in state.items()}, folder / TUNED, record.also_train
    )
    _check_dtypes(state, {name: value.dtype for name, value in wanted.items()}, folder / TUNED)
    remember(model, replace(tuning(model), config=record.config))
    _fill(wanted, state)


def _read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder, from one file or several."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileError("holds no model.safetensors", where=str(folder), remedy="use another copy")
    return {name: value for file in files for name, value in read_tensors(file, links=True).items()}


def _load_full(model: nn.Module, folder: Path, record: Record) -> None:
    alone = (folder / TUNED).is_file()
    state = read_tensors(folder / TUNED) if alone else _read_whole(folder)
    found = {name: tuple(value.shape) for name, value in state.items()}
    check_tensors(record.shapes, found, folder)
    own = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    given = {id(own[name]) for name in state if name in own}
    # written once, under its other name
    tied = {name for name, value in own.items() if name not in state and id(value) in given}
    check_tensors(
        {name: tuple(value.shape) for name, value in own.items() if name not in tied}, found, folder
    )
    _check_dtypes(state, {name: own[name].dtype for name in state}, folder)
    _fill({name: own[name] for name in state}, state)
    remember(model, Tuning(record.method, record.config, family_name(model), ()))


# ---------------------------------------------------------------- merging


@dataclass(frozen=True)
class MergeReport:
    """What merging did. Norms are over all merged layers together; everything is 0 for a full tuning, which
    has nothing to merge.

    `dtype`: that was written. `update`: norm of the updates. `ulps`: root mean square of an update's entry
    over the spacing of numbers at the weights' own root mean square: below 1, most entries move to a
    neighbour or not at all. `lost`: share of the update that rounding to the dtype changed; the rest
    survives. `logits`: greatest absolute difference of logits before and after on the batch that was given,
    else None.
    """

    folder: Path
    dtype: str
    layers: int
    update: float
    ulps: float
    lost: float
    logits: float | None

    def __str__(self) -> str:
        text = (
            f"merged {self.layers} layers into {self.dtype}: ||update|| {self.update:.4g},"
            f" {self.ulps:.3g} ulp"
        )
        text += f", {100 * self.lost:.3g} % rounded away"
        return text if self.logits is None else f"{text}, logits within {self.logits:.3g}"


def save_merged(
    model: nn.Module,
    folder: str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> MergeReport:
    """Write the merged model as a plain Hugging Face folder; `model` itself stays tuned, bit by bit as it
    was.

    dtype: of every floating tensor that is written, each rounded once; None: the model's own.
    Raises UsageError for adapter and side, which cannot be merged, for a model that is not transformers', and
    for a tied weight the model class would tie again on loading; otherwise as `save`.
    """
    model = bare(model)
    record = sole_tuning(model)
    refuse_merged(model)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{type(model).__name__} is not a transformers model",
            remedy="use petune.merge and save it your own way",
        )
    layers = [layer for _, layer in tuned_layers(model)] if method_of(record.config).mergeable else []
    warn_of_quantised(model)
    update, ulps, lost = _rounding(layers, dtype)
    before = _logits(model, batch) if batch is not None else None
    config, unties = model.config, _unties(model, layers)
    tied = getattr(config, "tie_word_embeddings", None)
    kept = dtype in (None, model.dtype)
    with merged_weights(model, dtype):
        after = _logits(model, batch) if batch is not None and kept else None
        factors = {id(value) for layer in layers for value in layer.tuned().values()}
        state = {
            plain_name(name): value
            for name, value in model.state_dict(keep_vars=True).items()
            if id(value) not in factors
        }

        def fill(work: Path) -> None:
            # a config that ties nothing is read without tying anything: whatever is still shared is then
            # written under each of its names
            whole = {name: dense_of(value.detach()) for name, value in state.items()}
            own = {name: value.clone() for name, value in whole.items()} if unties else whole
            _write_hugging_face(model, own if kept else _cast(own, cast("torch.dtype", dtype)), work)
            if not kept:
                written = read_json(work / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
                write_json(work / "config.json", written)
            _check_complete(own, work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)

        try:
            if unties:
                config.tie_word_embeddings = False
            place = commit_folder(Path(folder), fill, overwrite, _OURS)
        finally:
            if unties:
                config.tie_word_embeddings = tied
    if before is not None and after is None:
        written_model = plain_class(model).from_pretrained(place, dtype=dtype).to(model.device)
        after = _logits(written_model, cast("Mapping[str, Tensor]", batch))
    logits = (
        float((before.double() - after.double()).abs().max())
        if before is not None and after is not None
        else None
    )
    report = MergeReport(
        place, str(dtype or model.dtype).removeprefix("torch."), len(layers), update, ulps, lost, logits
    )
    if lost > 0.05:
        warn(
            f"{report.dtype} is too coarse for this update: {100 * lost:.0f} % of it is rounded away; a"
            " float32 base keeps it"
        )
    return report


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating tensors of `state` in `dtype`; what is one tensor under two names stays one."""
    made = {value.data_ptr(): value.to(dtype) for value in state.values() if value.is_floating_point()}
    return {name: made.get(value.data_ptr(), value) for name, value in state.items()}


def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """Sixteen tokens from all over the vocabulary as a batch, to compare logits on: ids [1, 16]."""
    config: Any = model.config
    ids = torch.linspace(1, config.vocab_size - 1, 16, device=model.device).long()[None]
    if (end := getattr(config, "eos_token_id", None)) is not None:  # heads that read the end token's state
        end = end[0] if isinstance(end, list) else end
        ids = torch.where(ids == end, (ids + 1) % config.vocab_size, ids)
        ids[0, -1] = end
    targets = getattr(config, "is_encoder_decoder", False) and model.get_output_embeddings() is not None
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if targets else {})


def _rounding(layers: list[TunedLinear], dtype: torch.dtype | None) -> tuple[float, float, float]:
    """(norm of the update, its root mean square in ulps of the weights, share lost to rounding to a dtype),
    over all layers."""
    update = missed = weights = spacing = 0.0
    with torch.no_grad():
        for layer in layers:
            wide = torch.promote_types(layer.weight.dtype, torch.float32)
            weight, delta = layer.weight.to(wide), layer.delta().to(wide)
            update += float(layer.change().norm()) ** 2
            rounded = weight.to(dtype or layer.weight.dtype).to(wide)
            missed += float((layer.merged_weight(dtype).to(wide) - rounded - delta).norm()) ** 2
            weights += float(weight.norm()) ** 2
            spacing = torch.finfo(dtype or layer.weight.dtype).eps
    ulps = math.sqrt(update / weights) / spacing if weights else 0.0
    return math.sqrt(update), ulps, math.sqrt(missed / update) if update else 0.0


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    training, kind = model.training, next(model.parameters()).device.type
    narrow = any(value.dtype is torch.bfloat16 for value in model.parameters())  # beside heads in float32
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=narrow):
            return cast("Tensor", model(**batch).logits)
    finally:
        model.train(training)


def _unties(model: PreTrainedModel, layers: list[TunedLinear]) -> bool:
    """Whether merging parts a tied weight. Raises UsageError when the class would tie it again on loading, as
    T5's does."""
    tuned = {id(layer.weight) for layer in layers}
    names: dict[int, dict[object, list[str]]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) in tuned:
            holder = model.get_submodule(name.rpartition(".")[0])
            key = tuned_together(holder) if isinstance(holder, TunedLinear) else ()
            names.setdefault(id(value), {}).setdefault(key, []).append(name)
    parted = next((ends for ends in names.values() if len(ends) > 1), {})
    shared = [group[0] for group in parted.values()]
    if not shared:
        return False
    fields = model.config.to_dict() | {"tie_word_embeddings": False}
    if type(model.config).from_dict(fields).tie_word_embeddings:
        what = (
            f"merging parts {' and '.join(shared)}, which {type(model).__name__} ties again when it is loaded"
        )
        raise UsageError(what, remedy="keep the base model and load the adapter with petune.load")
    return True


def _check_complete(state: Mapping[str, Tensor], work: Path) -> None:
    """Every tensor must be in the file, or share its memory with one that is: the model class decides what it
    leaves out."""
    written = _read_whole(work)
    kept = {value.data_ptr() for name, value in state.items() if name in written}
    lost = [name for name, value in state.items() if name not in written and value.data_ptr() not in kept]
    if lost:
        raise PetuneError("the model class left out tensors that are its own", where=", ".join(lost[:10]))
