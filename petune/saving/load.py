"""The way back from a saved tuning to a tuned model, strict in both directions: nothing is filled before
everything fits.

A folder of peft's is read beside petune's own; a Hugging Face folder is what a full tuning leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from petune import methods
from petune.errors import FileError
from petune.files.given import path_of
from petune.files.manifest import RECORD, check_folder
from petune.files.safetensors import check_dtypes, read_json, read_tensors, tensor_kinds
from petune.log import warn
from petune.methods import Tuning, lora, token_rows, tuned_names, tuning
from petune.methods.configs import METHODS, LoraConfig, name_of
from petune.methods.saving import TUNED as TUNED_FOLDER
from petune.methods.saving import check_tensors, plain_class, remember, shapes_of
from petune.methods.trainable import base_biases, fill, widen
from petune.methods.wrapped import bare, refuse_no_model, refuse_replicas, refuse_wrapped
from petune.models.loading import quiet
from petune.models.read_plan import names_in_model
from petune.saving.adapters import check_adapters, is_of_adapters, load_adapters, refuse_pickle
from petune.saving.fingerprint import plain_name
from petune.saving.multimodal import in_text
from petune.saving.one_tensor import BY_TYPE, check_one_tensor, load_one_tensor
from petune.saving.peft import CONFIG, TENSORS, check_config, from_peft
from petune.saving.peft_parts import in_parts, parts_named
from petune.saving.several import holds_several, load_each
from petune.saving.tuning_record import Record, family_name, origin_files, read_record

TUNED = "tuned.safetensors"

Model = TypeVar("Model", bound=nn.Module)


def load(
    base_model: Model,
    folder: str | Path,
    *,
    verify_base: bool = False,
    base_files: Mapping[str, Path] | None = None,
    wide: bool = False,
) -> Model:
    """Tune `base_model`, in place, as the folder, or the `tuned/` in it, says: one that `save`, peft's LoRA
    or AdapterHub's `adapters` wrote; one of several adapters gives them all, by their names (`add` takes one
    of them).

        >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> model = petune.load(base, "tuned")

    What was trained requires gradients again. A module trained whole, and a bias, takes the dtype it has in
    `base_model`: saved in float32 it is rounded on a bf16 base, with a warning, unless it is float32 there.
    `wide` keeps what was saved in float32 so; a model of two dtypes computes under autocast alone.

    Every file of the folder is compared with its hash, and so are `base_files`, those the base was loaded
    from (default: of the folder it names), with the hashes a run stored; of large ones that have not changed
    the hash is remembered. `verify_base` reads them all, or compares the SHA-256 of the base's tensors with
    the one given to `save`. Raises FileError for a file that differs, a tensor that is missing, unexpected,
    mis-shaped, not finite or no weight, for another base, and for a setting petune lacks; UsageError for a
    wrapped model, and for one inside DistributedDataParallel.
    """
    refuse_no_model(base_model)
    refuse_replicas(base_model, "petune.load(model, folder)")
    folder, model = _tuned_folder(path_of(folder)), bare(base_model)
    refuse_wrapped(model)
    if holds_several(folder):
        load_each(model, folder, verify_base=verify_base, base_files=base_files)
        return base_model
    if not (folder / RECORD).is_file():
        _explain(folder)
        check_folder(folder)
        if verify_base:
            raise FileError(
                "stores no hash of its base: files of other libraries do not",
                where=str(folder),
                remedy="load without verify_base",
            )
        _load_peft(model, folder, None, wide)
        return base_model
    return _load_recorded(base_model, read_record(folder), verify_base, base_files, wide)


def load_recorded(
    base_model: Model, record: Record, *, verify_base: bool, base_files: Mapping[str, Path] | None
) -> Model:
    """`load`, wide, of the folder whose `record` was read already; its files are compared with their hashes
    once more. Raises as `load`."""
    refuse_wrapped(bare(base_model))
    record.check_again()
    return _load_recorded(base_model, record, verify_base, base_files, wide=True)


def _load_recorded(
    base_model: Model,
    record: Record,
    verify_base: bool,
    base_files: Mapping[str, Path] | None,
    wide: bool,
) -> Model:
    folder, model = record.file.parent, bare(base_model)
    record.check_base(
        model, origin_files(model, verify_base) if base_files is None else base_files, verify_base
    )
    fill = {"peft": _load_peft, "transformers": _load_full, "petune": _load_tuned}[
        METHODS[record.method].files
    ]
    fill(model, folder, record, wide)
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
        fields = read_json(folder / CONFIG, links=True)
        if is_of_adapters(fields):
            check_adapters(fields, folder / CONFIG)
            refuse_pickle(folder)
            return
        _check_peft(fields, folder / CONFIG)
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


def _is_one_tensor(fields: Mapping[str, Any]) -> bool:
    """Whether peft's config is of a method with one tensor a layer."""
    kind = fields.get("peft_type")
    return isinstance(kind, str) and kind in BY_TYPE


def _check_peft(fields: Mapping[str, Any], file: Path) -> None:
    """Raise FileError for a config of peft's that asks for what petune does not compute."""
    check = check_one_tensor if _is_one_tensor(fields) else check_config
    check(fields, file)


def _load_peft(model: nn.Module, folder: Path, record: Record | None, wide: bool) -> None:
    """Build each saved layer around its saved factors: nothing is drawn only to be overwritten. A folder of
    another library may be AdapterHub's."""
    fields = read_json(folder / CONFIG, links=True)
    if record is None and is_of_adapters(fields):
        load_adapters(model, fields, folder)
        return
    _check_peft(fields, folder / CONFIG)
    fields, tensors = in_text(model, fields, read_tensors(folder / TENSORS, links=True), folder)
    if _is_one_tensor(fields):
        load_one_tensor(model, fields, tensors, folder)
        if record is not None:
            remember(model, replace(tuning(model), config=record.config))
        return
    adapter = from_peft(model, fields, tensors, folder)
    plain = {plain_name(name): (name, module) for name, module in model.named_modules()}
    also_train = tuple(plain[name][0] for name in (record.also_train if record else adapter.also_train))
    if record is not None:
        check_tensors(record.shapes, adapter.state, str(folder / TENSORS), record.also_train)
        parts = parts_named(model, record.config, also_train)
        adapter = in_parts(model, adapter, parts, str(folder / TENSORS))
    state = adapter.state
    layers = {_in_model(name, plain): own for name, own in adapter.layers.items()}
    shapes = {name: lora.shapes_at(model, name, own.r, adapter.forms) for name, own in layers.items()}
    wanted = {
        plain_name(own): lora.factor_dtype(lora.layer_at(model, name))
        for name, found in shapes.items()
        for own in found
    }
    wanted |= {name: lora.factor_dtype(token_rows.table_of(model)) for name in adapter.token_rows}
    heads = {name: value for head in also_train for name, value in _named(model, head).items()}
    heads |= {name: plain[name.removesuffix(".bias")][1]._parameters["bias"] for name in adapter.biases}
    kinds = {name: value.dtype for name, value in heads.items()}
    if wide:
        _widen(model, heads, state)
    _check_dtypes(state, wanted | {name: value.dtype for name, value in heads.items()}, folder / TENSORS)
    saved = {name: {own: state[plain_name(own)] for own in found} for name, found in shapes.items()}
    if not any(all(value.any() for value in own.values()) for own in saved.values()):
        warn(f"{folder}: every update is zero, so this adapter changes nothing; was it trained?")
    factors = {own: value for found in saved.values() for own, value in found.items()}
    lora.put(model, layers, adapter.forms, factors)
    config = cast("LoraConfig", record.config if record else adapter.config)
    if config.token_rows:
        token_rows.apply(model, config.token_rows, also_train)
        heads |= {name: value for name, value in model.named_parameters() if name in adapter.token_rows}
    found = base_biases(model, config.bias, also_train)
    biases = {
        name: value.to(kinds[plain_name(name)]) for name, value in found.items()
    }  # as the base has them
    remember(model, Tuning(name_of(config), config, family_name(model), also_train, biases))
    fill(heads, state)


def _widen(model: nn.Module, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Let what was saved in float32 be so in the model, too."""
    saved = [name for name, value in state.items() if value.dtype is torch.float32 and name in parameters]
    widen(model, [cast("nn.Parameter", parameters[name]) for name in saved])


def _in_model(name: str, plain: Mapping[str, tuple[str, nn.Module]]) -> str:
    """The name in a model of the layer, or the weight of experts, that goes by a plain name."""
    path, _, leaf = name.rpartition(".")
    return plain[name][0] if name in plain else f"{plain[path][0]}.{leaf}"


def _check_dtypes(state: Mapping[str, Tensor], wanted: Mapping[str, torch.dtype], file: Path) -> None:
    """Raise FileError for tensors that cannot be weights; say which are rounded."""
    if rounded := check_dtypes(state, wanted, str(file)):
        more = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        warn(
            f"{file}: {rounded[0]}{more} is rounded to {wanted[rounded[0]]}; a base that is loaded in"
            f" {state[rounded[0]].dtype} keeps it"
        )


def _named(model: nn.Module, head: str) -> dict[str, Tensor]:
    return {plain_name(f"{head}.{own}"): value for own, value in model.get_submodule(head).named_parameters()}


def _load_tuned(model: nn.Module, folder: Path, record: Record, wide: bool) -> None:
    """Wrap anew, on generators put back afterwards, with exactly the saved heads, then overwrite every tuned
    tensor."""
    state = read_tensors(folder / TUNED)
    check_tensors(record.shapes, state, str(folder / TUNED), record.also_train)
    # before the model is changed
    check_dtypes(state, dict.fromkeys(state, torch.float32), str(folder / TUNED))
    devices = {value.device for value in model.parameters() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        methods.tune(model, replace(cast("Any", record.config.filled), also_train=record.also_train))
    wanted = {plain_name(name): value for name, value in tuned_names(model).items()}
    check_tensors(shapes_of(wanted), state, str(folder / TUNED), record.also_train)
    if wide:
        _widen(model, wanted, state)
    _check_dtypes(state, {name: value.dtype for name, value in wanted.items()}, folder / TUNED)
    remember(model, replace(tuning(model), config=record.config))
    fill(wanted, state)


def _weights(folder: Path) -> list[Path]:
    """The tensor files of a Hugging Face folder, one or several."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise FileError("holds no model.safetensors", where=str(folder), remedy="use another copy")
    return files


def kinds_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a Hugging Face folder, on the meta device."""
    return {
        name: value for file in _weights(folder) for name, value in tensor_kinds(file, links=True).items()
    }


def _load_full(model: nn.Module, folder: Path, record: Record, wide: bool) -> None:
    alone = (folder / TUNED).is_file()
    files = [folder / TUNED] if alone else _weights(folder)
    state = {name: value for file in files for name, value in read_tensors(file, links=not alone).items()}
    check_tensors(record.shapes, state, str(folder))
    if isinstance(model, PreTrainedModel) and any(a != b for a, b in names_in_model(model, state).items()):
        with quiet():  # experts, say, which files have one by one
            state = dict(plain_class(model).from_pretrained(folder, dtype="auto").state_dict(keep_vars=True))
    own = {plain_name(name): value for name, value in model.state_dict(keep_vars=True).items()}
    given = {id(own[name]) for name in state if name in own}
    # written once, under its other name
    tied = {name for name, value in own.items() if name not in state and id(value) in given}
    check_tensors(shapes_of({name: own[name] for name in own if name not in tied}), state, str(folder))
    if wide:
        _widen(model, own, state)
    _check_dtypes(state, {name: own[name].dtype for name in state}, folder)
    fill({name: own[name] for name in state}, state)
    remember(model, Tuning(record.method, record.config, family_name(model), ()))
