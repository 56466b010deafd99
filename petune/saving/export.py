"""What a tuning leaves behind: a folder others can read, or a merged model. The way back is `load`'s.

lora is laid out as peft does, a full tuning as a Hugging Face folder, adapter and side as tuned.safetensors;
petune.json beside them says what was tuned and on which base.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import logging

from petune.errors import PetuneError, UsageError
from petune.files.atomic import commit_folder
from petune.files.given import path_of
from petune.files.hashes import FileHashes
from petune.files.manifest import MANIFEST, RECORD, check_folder
from petune.files.ranges import TensorSource
from petune.files.safetensors import read_json, write_json, write_tensors
from petune.log import warn
from petune.methods import merged_weights, tuned_parameters, tuned_state, tuning
from petune.methods.configs import METHODS, MethodConfig, method_of, name_of
from petune.methods.merging import (
    refuse_merged,
    refuse_unmergeable,
    rounded_whole,
    tuned_together,
    warn_of_quantised,
)
from petune.methods.rounding import RoundingCost, cost_of, refuse_unrounded
from petune.methods.saving import plain_class
from petune.methods.trainable import base_dtype, bias_changes, refuse_tied_heads
from petune.methods.wrapped import bare, sole_tuning
from petune.models import family_of
from petune.models.frozen_weight import dense_of
from petune.models.loading import quiet
from petune.models.multimodal import whole_of
from petune.models.read_plan import names_in_model, plan_reads
from petune.models.tuned_linear import TunedLayer, tuned_layers
from petune.saving.adapters import to_adapters
from petune.saving.fingerprint import fingerprint, full_hash, plain_name
from petune.saving.load import TUNED, kinds_of
from petune.saving.multimodal import in_whole, read_again, refuse_apart, refuse_part, write_whole
from petune.saving.one_tensor import LAYOUTS, to_one_tensor
from petune.saving.peft import (
    CONFIG,
    TENSORS,
    in_file_form,
    settings_in_files,
    to_peft,
)
from petune.saving.peft_experts import warn_of_conversion
from petune.saving.several import save_each
from petune.saving.tuning_record import facts_of, origin, write_record

__all__ = ["MergeReport", "fingerprint", "full_hash", "save", "save_merged", "write_adapters", "write_peft"]

OURS = (RECORD, CONFIG, MANIFEST, "config.json")  # a folder with one of them may be overwritten


class Processor(Protocol):
    """What makes a model's inputs: transformers' tokenizer or image processor."""

    def save_pretrained(self, folder: Path, /) -> Any:
        """Write what it is made from into a folder."""


# by file and name there: the tensor of the model, and where in it what is written there begins
Rooms = Mapping[str, Mapping[str, tuple[str, Sequence[int]]]]
Share = Callable[[Path, Rooms], None]


# ---------------------------------------------------------------- saving


def _refuse_rooms(work: Path, rooms: Rooms) -> None:
    if rooms:
        raise PetuneError("tensors of this model are nowhere; this is a fault of petune", where=str(work))


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Processor | None = None,
    base_name: str | None = None,
    base_sha256: str | None = None,
    base_files: Mapping[str, Mapping[str, Any]] | None = None,
    overwrite: bool = False,
    share: Share = _refuse_rooms,
) -> Path:
    """Write what was tuned, and the tokenizer (or image processor) if given, as `folder`, which appears whole
    or not at all. Returns its path. Tensors are written as `tuned_state` has them, in their dtypes: LoRA's
    A [r, in] and B [out, r] in float32 or wider. Several adapters on one base have a sub-folder each, named
    as they are.

        >>> folder = petune.save(model, "tuned", overwrite=True)

    `base_name` (default: where the model was loaded from) is stored, and for `load` to compare `base_files`,
    {name: {"size", "sha256"}} of the base's files, or `base_sha256`, the SHA-256 of its tensors from
    `full_hash`, for `verify_base` alone. `share` is for a full tuning that has left tensors on the meta
    device: it is told the folder that is being written, and there, by file and name, the rooms of model
    tensors by name, and fills them. Raises UsageError for a model that is not wrapped, is inside
    merged_weights, an occupied folder without `overwrite`, or the base's own; TrainingFault for a NaN or
    infinity; MachineError.
    """
    model = bare(model)
    record = tuning(model)
    refuse_merged(model)
    _warn_of_unsaved(model)
    base = origin(model)
    name = base_name or base
    if (
        base
        and not method_of(record.config).trains_base
        and Path(base).resolve() == path_of(folder).resolve()
    ):
        what = "the base of this tuning was loaded from here"
        raise UsageError(what, where=str(folder), remedy="give another folder")

    def fill(work: Path) -> None:
        own = tuning(model)
        written = replace(own, config=settings_in_files(model, own.config))
        facts = facts_of(model, written, name, base_sha256, base_files)
        write_record(work / RECORD, facts, _write_model(model, own.config, name, work, share))
        if tokenizer is not None:
            tokenizer.save_pretrained(work)

    fill_all = partial(save_each, model, fill=fill) if record.adapters else fill
    return commit_folder(folder, fill_all, overwrite, OURS)


def _warn_of_unsaved(model: nn.Module) -> None:
    """Say which tensors were let train by hand, beside what the method trains: no file has them."""
    own = {id(value) for value in tuned_parameters(model).values()}
    named = model.named_parameters()
    if extra := [name for name, value in named if value.requires_grad and id(value) not in own]:
        what = f"{len(extra)} tensors that require gradients are no part of {tuning(model).method}, nor saved"
        remedy = "name their modules in also_train, or freeze them: petune.mark_only_trainable(model)"
        warn(f"{what}: {extra[0]}; {remedy}")


def in_peft() -> str:
    """The methods that peft has too, and a file for."""
    return ", ".join(name for name, method in METHODS.items() if method.files == "peft")


def write_peft(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Processor | None = None,
    base_name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a tuning by lora or its kin as peft's two files, and the manifest of the folder beside them,
    which peft ignores.

    Raises as `save`, and UsageError for another method.
    """
    model = bare(model)
    record = sole_tuning(model)
    refuse_merged(model)
    _warn_of_unsaved(model)
    if method_of(record.config).files != "peft":
        remedy = "use petune.save, and petune.load to read it"
        raise UsageError(f"peft has no file for {record.method}", expected=in_peft(), remedy=remedy)

    def fill(work: Path) -> None:
        _write_model(model, record.config, base_name or origin(model), work, _refuse_rooms)
        if tokenizer is not None:
            tokenizer.save_pretrained(work)

    return commit_folder(folder, fill, overwrite, OURS)


def refuse_unwritable(model: nn.Module) -> None:
    """Raise UsageError for a tuning that the files of its method cannot say, before anything is trained."""
    record = tuning(model)
    if method_of(record.config).files == "peft":
        refuse_tied_heads(model, record.also_train)


def write_adapters(
    model: nn.Module,
    folder: str | Path,
    *,
    name: str = "petune",
    tokenizer: Processor | None = None,
    base_name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write bottleneck adapters as AdapterHub's library `adapters` lays them out, under a name.

    Raises as `save`, and UsageError for another method and for what that layout has no place for.
    """
    model = bare(model)
    sole_tuning(model)
    refuse_merged(model)
    refuse_part(model, "AdapterHub's layout has no names of it")
    state = {plain_name(own): value for own, value in tuned_state(model).items()}
    files = to_adapters(model, state, base_name or origin(model), name)

    def fill(work: Path) -> None:
        for file, own in files.items():
            if file.endswith(".json"):
                write_json(work / file, own)
            else:
                write_tensors(work / file, own, {"format": "pt"})
        if tokenizer is not None:
            tokenizer.save_pretrained(work)

    return commit_folder(folder, fill, overwrite, OURS)


def _write_model(
    model: nn.Module, config: MethodConfig, name: str | None, work: Path, share: Share
) -> Mapping[str, Tensor]:
    """Write the method's own files; returns the tensors in them by base-model name."""
    method = method_of(config)
    if method.files == "transformers" and isinstance(model, PreTrainedModel):
        share(work, write_hugging_face(model, model.state_dict(keep_vars=True), work))
        return kinds_of(work)
    tensors = _whole(model) if method.trains_base else in_file_form(model)
    tensors = {plain_name(name): value for name, value in tensors.items()}
    if method.files == "peft":
        to_files = to_one_tensor if name_of(config) in LAYOUTS else to_peft
        fields, keyed = in_whole(model, *to_files(model, tensors, name))
        write_tensors(work / TENSORS, keyed, {"format": "pt"})
        write_json(work / CONFIG, fields)
        warn_of_conversion(model)
    else:
        write_tensors(work / TUNED, tensors)
    return tensors


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers, a tied one once."""
    seen: dict[int, tuple[str, Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(value), (name, value.detach()))
    return dict(seen.values())


def write_hugging_face(model: PreTrainedModel, state: Mapping[str, Tensor], work: Path) -> Rooms:
    """Write a model's folder as transformers does, which names and parts its files, with tensors in ours.
    Returns the rooms that were left for what is on the meta device."""
    left: dict[str, dict[str, Tensor]] = {}

    def write(tensors: Mapping[str, Tensor], filename: str, metadata: Mapping[str, str]) -> None:
        write_tensors(Path(filename), tensors, metadata)
        left[Path(filename).name] = {key: value for key, value in tensors.items() if value.is_meta}

    library: Any = modeling_utils
    bar, theirs = logging.is_progress_bar_enabled(), library.safe_save_file
    logging.disable_progress_bar()
    library.safe_save_file = write
    try:
        with quiet():
            plain_class(model).save_pretrained(model, work, state_dict=dict(state))
    finally:
        library.safe_save_file = theirs
        if bar:
            logging.enable_progress_bar()
    places = _places(model, state, {key: value for one in left.values() for key, value in one.items()})
    return {file: {key: places[key] for key in keys} for file, keys in left.items() if keys}


def _places(
    model: PreTrainedModel, state: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> dict[str, tuple[str, Sequence[int]]]:
    """For each tensor of files that is yet to be written the one of the model that it is, or is a part of, as
    experts are that files have one by one, and where it begins there."""
    names = {id(value): name for name, value in state.items()}
    found: dict[str, tuple[str, Sequence[int]]] = {
        key: (names[id(value)], [0] * value.dim()) for key, value in left.items() if id(value) in names
    }
    if len(found) == len(left):
        return found
    files = {key: TensorSource(Path(), value.dtype, tuple(value.shape), 0, 0) for key, value in left.items()}
    plan = plan_reads(model, files)
    assert plan is not None, "the same files were read in pieces"
    return found | {
        piece.source: (name, list(piece.at))
        for name, pieces in plan.pieces.items()
        for piece in pieces
        if piece.source not in found
    }


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


# ---------------------------------------------------------------- merging


@dataclass(frozen=True)
class MergeReport(RoundingCost):
    """What merging did, and what rounding cost; everything is 0 for a full tuning and for a head alone, which
    have nothing to merge.

    `dtype`: that was written. `layers`: how many were merged. `logits`: greatest absolute difference of
    logits before and after on the batch that was given, else None. `seed`: of stochastic rounding, else None.
    """

    folder: Path
    dtype: str
    layers: int
    logits: float | None
    seed: int | None = None

    def __str__(self) -> str:
        text = f"merged {self.layers} layers into {self.dtype}"
        if not self.layers:
            text = f"written in {self.dtype}: what trained lies in the model's own weights, nothing is summed"
        else:
            how, nearest = "", ""
            if self.seed is not None:
                how = f", rounded stochastically by seed {self.seed}"
                nearest = f" ({100 * self.nearest:.3g} % to nearest)"
            text += f"{how}: {100 * self.kept:.3g} % of the update survives{nearest}, beside rounding noise"
            text += f" of {100 * self.noise:.3g} % of its norm"
        return text if self.logits is None else f"{text}, logits {self.logits:.3g} from the unmerged ones"


def save_merged(
    model: nn.Module,
    folder: str | Path,
    tokenizer: Processor | None = None,
    *,
    batch: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    beside: Mapping[str, Any] = {},
) -> MergeReport:
    """Write the merged model as a plain Hugging Face folder, the text model of a checkpoint of several
    modalities with the rest of it, copied; `model` itself stays tuned, bit by bit as it was.

    dtype: of every floating tensor that is written, each rounded once; None: the base's own. seed: rounds
    stochastically, by it and by their names, the bfloat16 weights and biases that the tuning has changed; the
    rest, and without a seed everything, is rounded to nearest. beside: JSON files that lie there too, by
    path. Raises UsageError for adapter and side, which cannot be merged, for a model that is no transformers'
    one, for a tied weight the model class would tie again on loading, for a seed where nothing is rounded by
    it, and as `write_whole`; otherwise as `save`.
    """
    model = bare(model)
    refuse_unmergeable(model)
    refuse_merged(model)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"{type(model).__name__} is not a transformers model",
            remedy="use petune.merge and save it your own way",
        )
    firsts: dict[tuple[int, ...], str] = {}  # layers that are tied are merged once, by the first name
    named = [(firsts.setdefault(tuned_together(layer), name), layer) for name, layer in tuned_layers(model)]
    layers = [layer for _, layer in named]
    if seed is not None:
        refuse_unrounded(layers, dtype)
    warn_of_quantised(model)
    own_dtype = base_dtype(model)
    written = dtype or own_dtype
    cost = cost_of(named, bias_changes(model), dtype, seed)
    before = logits_of(model, batch) if batch is not None else None
    unties, whole = _unties(model, layers), whole_of(model)
    refuse_apart(whole, unties)
    kept = written is own_dtype
    with merged_weights(model, dtype, seed=seed), rounded_whole(model, written, seed=seed):
        after = logits_of(model, batch) if batch is not None and kept else None
        factors = {id(value) for layer in layers for value in layer.tuned().values()}
        state = {
            plain_name(name): value
            for name, value in model.state_dict(keep_vars=True).items()
            if id(value) not in factors
        }

        def fill(work: Path) -> None:
            _write_merged(model, state, (own_dtype, written), unties, work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
            for path, facts in beside.items():
                (work / path).parent.mkdir(exist_ok=True)
                write_json(work / path, facts)

        with _untied(model.config) if unties else nullcontext():
            place = commit_folder(folder, fill, overwrite, OURS)
    if batch is not None and after is None:
        after = _logits_there(model, place, written, batch)
    logits = (
        None if before is None or after is None else float((before.double() - after.double()).abs().max())
    )
    return _report(place, written, len(layers), cost, logits, seed)


@contextmanager
def _untied(config: Any) -> Iterator[None]:
    """A config that ties nothing: it is read without tying anything."""
    tied = getattr(config, "tie_word_embeddings", None)
    config.tie_word_embeddings = False
    try:
        yield
    finally:
        config.tie_word_embeddings = tied


def _write_merged(
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    dtypes: tuple[torch.dtype, torch.dtype],
    unties: bool,
    work: Path,
) -> None:
    """Write the tensors of a merged model, each under its own name where it `unties`, with its config or, if
    it is a part of a whole, with the rest of that. dtypes: the base's own, and that which is written."""
    kept, dtype = dtypes[0] is dtypes[1], dtypes[1]
    # what lies in the one tensor of a fused block, with room behind its rows, is copied out of it:
    # transformers reads the ends of those that share one
    own = {name: dense_of(value.detach()).contiguous() for name, value in state.items()}
    own = {name: value.clone() for name, value in own.items()} if unties else own
    written = own if kept else _cast(own, dtype)
    if (whole := whole_of(model)) is not None:
        write_whole(model, whole, written, dtype, work)
        return
    write_hugging_face(model, written, work)
    if not kept:
        fields = read_json(work / "config.json") | {"dtype": str(dtype).removeprefix("torch.")}
        write_json(work / "config.json", fields)
    check_complete(model, own, kinds_of(work))


def _logits_there(
    model: PreTrainedModel, place: Path, dtype: torch.dtype, batch: Mapping[str, Tensor]
) -> Tensor:
    """Logits of what was written, read again where `model` lies."""
    part = whole_of(model) is not None
    read: Any = read_again(place, dtype) if part else plain_class(model).from_pretrained(place, dtype=dtype)
    return logits_of(read.to(model.device), batch)


def _report(
    place: Path, dtype: torch.dtype, layers: int, cost: RoundingCost, logits: float | None, seed: int | None
) -> MergeReport:
    """The report of a merge; warns where rounding took much of the update."""
    report = MergeReport(
        **vars(cost),
        folder=place,
        dtype=str(dtype).removeprefix("torch."),
        layers=layers,
        logits=logits,
        seed=seed,
    )
    if seed is None and cost.lost > 0.05:
        other = "; stochastic rounding keeps it in the mean" if report.dtype == "bfloat16" else ""
        warn(
            f"{report.dtype} is too coarse for this update: what rounding changes is {100 * cost.lost:.0f} %"
            f" of it; a float32 base keeps it{other}"
        )
    return report


def _cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The floating tensors of `state` in `dtype`; what is one tensor under two names stays one."""
    made = {value.data_ptr(): value.to(dtype) for value in state.values() if value.is_floating_point()}
    return {name: made.get(value.data_ptr(), value) for name, value in state.items()}


def probe(model: PreTrainedModel) -> dict[str, Tensor]:
    """Sixteen tokens from all over the vocabulary as a batch, to compare logits on: ids [1, 16]; for a model
    that reads pictures, one that grows brighter: [1, channels, height, width]."""
    config: Any = model.config
    family = family_of(model)
    if family is not None and (signal := family.signal) is not None:
        shape = signal.shape(config)
        values = torch.linspace(-1, 1, math.prod(shape), device=model.device)
        begins = getattr(config, "decoder_start_token_id", None)
        asked = {} if begins is None else {"decoder_input_ids": torch.tensor([[begins]], device=model.device)}
        return {signal.argument: values.view(1, *shape).to(model.dtype), **asked}
    ids = torch.linspace(1, config.vocab_size - 1, 16, device=model.device).long()[None]
    if (end := getattr(config, "eos_token_id", None)) is not None:  # heads that read the end token's state
        end = end[0] if isinstance(end, list) else end
        ids = torch.where(ids == end, (ids + 1) % config.vocab_size, ids)
        ids[0, -1] = end
    targets = getattr(config, "is_encoder_decoder", False) and model.get_output_embeddings() is not None
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if targets else {})


def logits_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Logits of a batch, of a model without a head its last hidden states, in eval mode and without
    gradients; under autocast where weights are bfloat16."""
    training, kind = model.training, next(model.parameters()).device.type
    narrow = any(value.dtype is torch.bfloat16 for value in model.parameters())  # beside heads in float32
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16, enabled=narrow):
            found = model(**batch)
            return cast("Tensor", found.logits if "logits" in found else found.last_hidden_state)
    finally:
        model.train(training)


def _unties(model: PreTrainedModel, layers: list[TunedLayer]) -> bool:
    """Whether merging parts a tied weight. Raises UsageError when the class would tie it again on loading, as
    T5's does."""
    tuned = {id(getattr(layer, name)) for layer in layers for name in layer.weights}
    names: dict[int, dict[object, list[str]]] = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) in tuned:
            holder = model.get_submodule(name.rpartition(".")[0])
            key = tuned_together(holder) if isinstance(holder, TunedLayer) else ()
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


def check_complete(
    model: PreTrainedModel, state: Mapping[str, Tensor], written: Mapping[str, Tensor]
) -> None:
    """Every tensor must be among those that were written, whole or in parts, or share its memory with one
    that is: the model class decides what it leaves out."""
    there = Counter[str]()
    for key, name in names_in_model(model, written).items():
        there[name] += written[key].numel()
    kept = {value.data_ptr() for name, value in state.items() if there[name] == value.numel()}
    lost = [name for name, value in state.items() if value.data_ptr() not in kept]
    if lost:
        raise PetuneError("the model class left out tensors that are its own", where=", ".join(lost[:10]))
