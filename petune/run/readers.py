"""What makes a model's input of pictures or sounds, where it reads any: transformers' processor beside the
weights, and what the model makes of the tensors that come out of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoFeatureExtractor, AutoImageProcessor, PreTrainedTokenizerBase

from petune.errors import FileError, UsageError
from petune.models import FAMILIES
from petune.models.languages import in_language, is_multilingual
from petune.models.load_errors import hub_errors
from petune.models.loading import load_tokenizer, with_padding
from petune.models.parts import Signal
from petune.models.source import ModelSource
from petune.tasks.configs import DataConfig
from petune.tasks.media import ONE, Media, MediaKind, Reader, Reading, blank, made, made_of_sound

# settings of a config by which blocks, or parts of an input, are left out at random
_AT_RANDOM = ("drop_path_rate", "encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment")
_ASKED = ((40, 60), (60, 40))  # height and width of the pictures that a processor is asked about
_SECONDS = (1, 40)  # of the sounds


@dataclass(frozen=True)
class Processors:
    """What makes the inputs of a model: its tokenizer and its reader, as far as it has them."""

    tokenizer: PreTrainedTokenizerBase | None
    reader: Reader | None

    def save_pretrained(self, folder: Path) -> None:
        """Write both."""
        for one in (self.tokenizer, self.reader):
            if one is not None:
                one.save_pretrained(folder)


def inputs_of(
    source: ModelSource, config: Any, tokenizer: Any = None, processor: Any = None
) -> tuple[PreTrainedTokenizerBase | None, Reader | None]:
    """What makes the inputs of a model of `config`: its tokenizer, the reader of one that reads pictures, or
    both for sounds, of which it writes what is said. tokenizer, processor: of a model in memory, else they
    are read beside the weights. Raises as `load_tokenizer` and `reader_of`."""
    reader = reader_of(source, config, processor)
    if reader is not None and reader.kind == "image":
        return None, reader
    return load_tokenizer(source) if tokenizer is None else with_padding(tokenizer, "tokenizer"), reader


def with_language(
    tokenizer: PreTrainedTokenizerBase | None,
    reader: Reader | None,
    data: DataConfig,
    source: ModelSource,
    given: Any = None,
) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model of sounds, set to the language of the data; any other as it is. given: the
    model, where it is in memory. Raises as `in_language` and `is_multilingual`."""
    if tokenizer is None or reader is None or reader.kind != "audio":
        return tokenizer
    return in_language(tokenizer, data.language, is_multilingual(source, given))


def reader_of(source: ModelSource, config: Any, given: Any = None) -> Reader | None:
    """The reader of a model of `config`; None for one that reads text. given: the processor of a model in
    memory, else it is read beside the weights.

    Raises FileError for a processor whose pictures are of several sizes, or of one that the model does not
    take; UsageError for a model that leaves sub-layers out at random, as ranks and recomputations would not
    leave out the same.
    """
    family = FAMILIES.get(config.model_type)
    if family is None or family.signal is None:
        return None
    signal = family.signal
    if name := next((name for name in _AT_RANDOM if getattr(config, name, 0)), None):
        what = "what this leaves out at random is not drawn by index, as dropout is"
        found = str(getattr(config, name))
        remedy = f"set {name}: 0 in the model's config.json"
        raise UsageError(what, where="model", expected=f"{name} 0", found=found, remedy=remedy)
    processor = load_processor(source, signal.kind) if given is None else given
    shapes = set(_shapes(processor, signal))
    shape = next(iter(shapes))
    if len(shapes) > 1:
        what = "the processor makes tensors of several shapes, which are no batch"
        remedy = "see do_resize, do_center_crop and size in preprocessor_config.json"
        raise FileError(what, where=source.place, found=", ".join(sorted(map(str, shapes))), remedy=remedy)
    if signal.fixed and shape != signal.shape(config):
        what = "the processor makes tensors of another shape than the model takes"
        expected = str(signal.shape(config))
        remedy = "take the preprocessor_config.json of this model"
        raise FileError(what, where=source.place, expected=expected, found=str(shape), remedy=remedy)
    begins = getattr(config, "decoder_start_token_id", None)
    return Reader(signal.kind, processor, signal.argument, shape, signal.tokens(config, shape), begins)


def _shapes(processor: Any, signal: Signal) -> Iterator[tuple[int, ...]]:
    """The shapes that the processor makes of unlike pictures, or sounds."""
    if signal.kind == "image":
        yield from (made(processor, signal.argument, blank(*size)).shape for size in _ASKED)
        return
    for seconds in _SECONDS:
        silence = np.zeros(seconds * processor.sampling_rate, np.float32)
        yield made_of_sound(processor, signal.argument, silence).shape


def load_processor(source: ModelSource, kind: MediaKind) -> Any:
    """What makes tensors of pictures or sounds for a model, from its preprocessor_config.json; of pictures in
    transformers' form that works with Pillow alone, so that the same pixels come out on every machine. Raises
    FileError where there is none."""
    place = source.beside
    how = {"revision": source.revision, "trust_remote_code": False}
    with hub_errors(source):
        if kind == "audio":
            return AutoFeatureExtractor.from_pretrained(place, **how)
        return AutoImageProcessor.from_pretrained(place, backend="pil", **how)


def asked_with(path: str, reader: Reader, device: torch.device) -> dict[str, Tensor]:
    """The inputs of the picture or sound at a path, a batch of one. Raises UsageError where there is none,
    and DataError where there is something else."""
    try:
        media = Media.at(Path(path.strip()).expanduser())
    except OSError as error:
        what = f"this model is asked with the path of a {ONE[reader.kind]}: {error.strerror or error}"
        remedy = f"give the path of a {ONE[reader.kind]} that is there"
        raise UsageError(what, where="generate", found=path[:80], remedy=remedy) from error
    tensor = torch.from_numpy(Reading(media, reader).tensor("generate"))
    return {reader.argument: tensor[None].to(device)}
