"""From what a recipe calls a model to a plain Hugging Face model in memory, with nothing half loaded.

Only safetensors are read. Keys that are missing from a checkpoint are allowed for a fresh task head alone:
those modules are reported, so that they are trained; anything else missing, surplus inside the blocks, or
mis-shaped is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from petune.errors import FileError, UsageError
from petune.files.manifest import check_folder
from petune.files.ranges import sources
from petune.files.safetensors import Header, read_header, read_json
from petune.log import say
from petune.models import FAMILIES
from petune.models.bitsandbytes_files import FourBit, beside, four_bit_weights
from petune.models.contents import NO_PLAN, Contents, fill_whole, make_buffers
from petune.models.damage import (
    check_filled,
    check_finite,
    check_stored,
    check_tied,
    check_ties,
    refuse_not_finite,
)
from petune.models.heads import AUTO as AUTO
from petune.models.heads import Head as Head
from petune.models.heads import model_class
from petune.models.known_names import of_known_names
from petune.models.load_errors import asking, first_line, hub_errors, room_for
from petune.models.moe import refuse_llama_moe
from petune.models.multimodal import (
    OUTSIDE,
    as_text,
    note_of,
    read_part,
    refuse_other_head,
    remember_whole,
    settle_ties,
    whole_at,
)
from petune.models.mxfp4_files import Mxfp4, held_in, mxfp4_weights
from petune.models.read_plan import ReadPlan, plan_reads
from petune.models.source import ModelSource, check_weights, local_folder, weight_files
from petune.models.spec import Family, ModelKind
from petune.models.trust import refuse_adapter, refuse_links_out, refuse_settings, wanted_code


@dataclass(frozen=True)
class Loaded:
    """A model, its family if petune has a table for it, and the modules the checkpoint had no weights for.

    `note` says in one line what the checkpoint lacked for the task and what of it the task does not use;
    empty if it fits exactly. contents: of its parameters, which are on the meta device; None for a model that
    is in memory.
    """

    model: PreTrainedModel
    family: Family | None
    new: tuple[str, ...]
    note: str
    contents: Contents | None = None

    def read(self) -> PreTrainedModel:
        """The model, with all of it in memory, on the CPU. Raises FileError for values that are not finite,
        and MachineError when memory runs out."""
        if self.contents is not None:
            read_whole(self.model, self.contents)
        return self.model


def read_whole(model: nn.Module, contents: Contents) -> None:
    """Fill a model on the meta device with what it holds, on the CPU. Raises as `Loaded.read`."""
    with room_for(contents.place):
        bad = fill_whole(model, contents)
    refuse_not_finite(bad, contents.place)


def read_config(source: ModelSource) -> Any:
    """The transformers config of `source`, of several modalities that of the text model. Raises FileError
    when it is missing or unreadable, and for an object, which no file holds."""
    if source.kind == "object":
        remedy = "give it again: petune.load_run(folder, base=model), petune.train(..., model=model)"
        raise FileError(
            "the model was an object given from Python, which no file holds", where=source.spec, remedy=remedy
        )
    if source.kind == "config":
        fields = read_json(Path(source.place), links=True)
        refuse_settings(fields, str(Path(source.place).parent))
        refuse_llama_moe(fields, source.place)
        try:
            config = read_part(AutoConfig.for_model(**fields), fields)
        except Exception as error:  # classes of configs have errors of their own
            what = f"not a model config: {first_line(error)}"
            remedy = "write it as transformers' class has it"
            raise FileError(what, where=source.place, remedy=remedy) from None
        return of_known_names(config, source.place)
    _check_folder(source)
    with hub_errors(source), asking(source):
        fields, _ = PreTrainedConfig.get_config_dict(source.place, revision=source.revision)
        refuse_settings(fields, source.place)
        refuse_llama_moe(fields, f"{source.place}/config.json")
        config = AutoConfig.from_pretrained(source.place, revision=source.revision, trust_remote_code=False)
    vars(config).pop("quantization_config", None)  # of the files: how the model is held a recipe says
    return of_known_names(read_part(config, fields), f"{source.place}/config.json")


def _check_folder(source: ModelSource) -> None:
    """Raise FileError for a folder that petune wrote and somebody changed, and for one with an adapter in
    it."""
    folder = local_folder(source.place, source.revision)
    if folder is not None:
        refuse_adapter(folder)
        refuse_links_out(folder)
        check_folder(folder)


def kind_of(config: Any) -> ModelKind:
    """Encoder, encoder-decoder or decoder, by the family's table or, without one, by what the config says."""
    family = FAMILIES.get(config.model_type)
    if family:
        return family.kind
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder"
    causal = config.model_type in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = config.model_type in transformers.models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "decoder" if causal and not masked else "encoder"


def packs(config: Any) -> bool:
    """Whether a model of this config tells samples that are packed in a row apart; one without a table is
    taken to."""
    family = FAMILIES.get(config.model_type)
    return family is None or (family.packs and "packing" not in family.refused(config))


def load_tokenizer(source: ModelSource) -> PreTrainedTokenizerBase:
    """The tokenizer beside the weights. Without a padding token the end token pads, which is said; labels are
    masked by position anyway.

    Raises FileError when there is none, or when it has neither a padding nor an end token.
    """
    place = source.beside
    with hub_errors(source):
        tokenizer = AutoTokenizer.from_pretrained(place, revision=source.revision, trust_remote_code=False)
    return with_padding(tokenizer, place)


def with_padding(tokenizer: Any, place: str) -> PreTrainedTokenizerBase:
    """`tokenizer` with a padding token; `place` is where it comes from. Raises as `load_tokenizer`."""
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float) or limit < 1:
        what = "model_max_length is no length"
        raise FileError(what, where=place, expected="a number, at least 1", found=repr(limit)[:80])
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            what = "the tokenizer has neither a padding nor an end token"
            raise FileError(what, where=place, remedy="set pad_token and eos_token in it")
        tokenizer.pad_token = tokenizer.eos_token
        say(f"the tokenizer has no padding token: {tokenizer.eos_token} pads")
    return cast("PreTrainedTokenizerBase", tokenizer)


def load_model(
    source: ModelSource,
    head: Head,
    labels: Sequence[str] | None,
    dtype: torch.dtype,
    config: Any = None,
    seed: int = 0,
) -> Loaded:
    """The model of `source` with the task's head, in `dtype`, in eval mode, before its weights are read.

    `labels` become id2label. `config`: the model's, which becomes this model's own; None: read here. What no
    file holds is drawn from `seed`. Raises UsageError for a model that transformers has no such head for,
    FileError for a checkpoint that does not fill the model it describes (first ten names), and MachineError
    when memory runs out. A model whose tensors transformers computes of several in the files is read at once,
    whole.
    """
    config = read_config(source) if config is None else config
    refuse_other_head(source, config, head)
    _name_classes(config, labels)
    family = FAMILIES.get(config.model_type)
    if source.kind == "config":
        return _of_config(source, head, dtype, config, seed)
    check_weights(source)
    if code := wanted_code(local_folder(source.place, source.revision) or Path(source.place)):
        say(f"{code[0]}: not run; {config.model_type} is read with transformers' own classes")
    with hub_errors(source):
        files = weight_files(source)
        headers = {path: read_header(path, links=True) for path in files}
        config.name_or_path = source.place
        if (whole := whole_at(source)) is not None:
            headers = as_text(headers)
            settle_ties(whole, config, sources(headers))
        model = outline(source, config, head, dtype)
        found, four_bit = four_bit_weights(sources(headers))
        found, packed = mxfp4_weights(found)
        apart = {name for name in found if beside(four_bit, name) or held_in(packed, name)}
        named = {key: one for key, one in found.items() if key not in apart and not key.startswith(OUTSIDE)}
        # where a class keeps tensors in float32 whatever the dtype, transformers is asked
        plan = None if model._get_dtype_plan(dtype) else plan_reads(model, named)
    held: dict[str, FourBit | Mxfp4] = {**four_bit, **packed}
    if held:
        say(f"{source.place}: {len(held)} weights are held in four bits there, and so have those values")
    if plan is None and (held or whole):
        why = "in four bits" if held else "inside another model"
        remedy = (
            "give the model as it was before it was quantised" if held else "give its text model by itself"
        )
        what = f"transformers computes tensors of this model of several, which {why} cannot be"
        raise FileError(what, where=source.place, remedy=remedy)
    if plan is None:
        return _load_whole(source, head, dtype, config, headers, seed)
    contents = Contents(model, found, plan, seed, source.place, held)
    new, note = check_filled(model, family, plan.info, source, contents)
    check_stored(model, headers, four_bit)
    check_ties(model, contents)
    make_buffers(model, contents)
    with hub_errors(source):
        _as_transformers_leaves_it(model, source, plan)
    if whole is not None:
        remember_whole(model, whole)
        own = note_of(whole, {name: one for name, one in found.items() if name not in apart})
        note = "; ".join(filter(None, (own, note)))
    return Loaded(model.eval(), family, new, note, contents)


def _of_config(source: ModelSource, head: Head, dtype: torch.dtype, config: Any, seed: int) -> Loaded:
    """The model of a config that has no weights: all are drawn."""
    say(source.note)
    model, family = outline(source, config, head, dtype), FAMILIES.get(config.model_type)
    contents = Contents(model, {}, NO_PLAN, seed, source.place)
    make_buffers(model, contents)
    heads = family.heads if family else ()
    new = tuple(name for name, _ in model.named_modules() if name in heads)
    return Loaded(model.eval(), family, new, "", contents)


def _as_transformers_leaves_it(model: Any, source: ModelSource, plan: ReadPlan) -> None:
    """What `from_pretrained` does to a model beside filling it: how it generates, and what saving undoes."""
    model._weight_conversions = plan.renamings
    if not model.can_generate():
        return
    revision = source.revision or "main"
    with quiet():
        try:
            found = GenerationConfig.from_pretrained(source.place, revision=revision)
        except OSError:  # of an older model it is part of the model's own
            found = GenerationConfig.from_pretrained(
                source.place, config_file_name="config.json", _from_model_config=True, revision=revision
            )
    model.generation_config = found


def _load_whole(
    source: ModelSource,
    head: Head,
    dtype: torch.dtype,
    config: Any,
    headers: Mapping[Path, Header],
    seed: int,
) -> Loaded:
    """The model as transformers reads it, all of it in memory."""
    torch.manual_seed(seed)
    with hub_errors(source), quiet():
        model, info = model_class(config, head).from_pretrained(
            source.place,
            revision=source.revision,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    family = FAMILIES.get(config.model_type)
    model = _unpooled(model) if head == "embed" else model
    new, note = check_filled(model, family, info, source)
    check_stored(model, headers)
    check_tied(model, source)
    check_finite(model, source)
    return Loaded(model.eval(), family, new, note)


def outline(
    source: ModelSource, config: Any, head: Head, dtype: torch.dtype, device: str = "meta"
) -> PreTrainedModel:
    """The model of a config with the task's head on the meta device: its modules and shapes without a weight;
    on another its weights are drawn. Raises as `load_model`."""
    refuse_other_head(source, config, head)
    with hub_errors(source), torch.device(device), quiet():
        made = model_class(config, head).from_config(config, dtype=dtype, trust_remote_code=False)
        return cast("PreTrainedModel", _unpooled(made) if head == "embed" else made)


def _unpooled(model: Any) -> Any:
    """A model without a head, and without the pooler of a classifier, which embeddings never ask."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def _name_classes(config: Any, labels: Sequence[str] | None) -> None:
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}


def adopt_model(
    model: PreTrainedModel, source: ModelSource, head: Head, labels: Sequence[str] | None, dtype: torch.dtype
) -> Loaded:
    """A model that is in memory already, as `load_model` would have given it: in `dtype`, on the CPU, in eval
    mode, changed in place.

    Raises UsageError for a class without the head of the task or another number of classes, FileError for
    non-finite values. Which of its modules are fresh cannot be seen, so none is reported; the note names
    those that often are.
    """
    known: Any = AUTO[head]._model_mapping
    wanted = known[type(model.config)] if type(model.config) in known.keys() else type(model)  # noqa: SIM118 - a lazy mapping
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    if not isinstance(model, wanted):
        names = " or ".join(one.__name__ for one in wanted)
        remedy = f"load it with {AUTO[head].__name__}.from_pretrained"
        found = type(model).__name__
        what = f"this model has not the head for {head}"
        raise UsageError(what, where="model", expected=names, found=found, remedy=remedy)
    if labels is not None and model.config.num_labels != len(labels):
        sides = {
            "expected": f"num_labels={len(labels)}: {', '.join(labels[:10])}",
            "found": f"num_labels={model.config.num_labels}",
        }
        raise UsageError("the model has another number of classes than the rows", where="model", **sides)
    _name_classes(model.config, labels)
    check_finite(model, source)
    if head == "embed":
        _unpooled(model)
    family = FAMILIES.get(model.config.model_type)
    fresh = [name for name, _ in model.named_modules() if family and name.rpartition(".")[2] in family.fresh]
    note = "stays frozen: if it is new and not pretrained, name it in method.also_train"
    note = f"{', '.join(fresh)} {note}" if fresh else ""
    return Loaded(cast("PreTrainedModel", model.to(dtype).cpu().eval()), family, (), note)


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says in paragraphs and progress bars what petune says in a line."""
    logging = transformers.utils.logging
    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()
