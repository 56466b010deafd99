"""What makes a model's input of pictures, where it reads any: transformers' processor beside the weights, and
what the model makes of the tensors that come out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor, PreTrainedTokenizerBase

from petune.errors import FileError, UsageError
from petune.models import FAMILIES
from petune.models.load_errors import hub_errors
from petune.models.loading import load_tokenizer, with_padding
from petune.models.source import Source
from petune.tasks.media import Media, Reader, Reading, blank, made

_ASKED = ((40, 60), (60, 40))  # height and width of the pictures that a processor is asked about


def inputs_of(
    source: Source, config: Any, tokenizer: Any = None, processor: Any = None
) -> tuple[PreTrainedTokenizerBase | None, Reader | None]:
    """What makes the inputs of a model of `config`: its tokenizer, or the reader of one that reads pictures.
    tokenizer, processor: of a model in memory, else they are read beside the weights. Raises as
    `load_tokenizer` and `reader_of`."""
    if (reader := reader_of(source, config, processor)) is not None:
        return None, reader
    return load_tokenizer(source) if tokenizer is None else with_padding(tokenizer, "tokenizer"), None


def reader_of(source: Source, config: Any, given: Any = None) -> Reader | None:
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
    if rate := getattr(config, "drop_path_rate", 0.0):
        raise UsageError(
            "sub-layers that are left out at random are not drawn by index, as dropout is",
            where="model",
            expected="drop_path_rate 0",
            found=str(rate),
            remedy="set drop_path_rate: 0.0 in the model's config.json",
        )
    processor = load_image_processor(source) if given is None else given
    shapes = {made(processor, signal.argument, blank(*size)).shape for size in _ASKED}
    shape = next(iter(shapes))
    if len(shapes) > 1:
        raise FileError(
            "the image processor makes tensors of several shapes, which are no batch",
            where=source.place,
            found=", ".join(sorted(map(str, shapes))),
            remedy="set do_resize, or do_center_crop, in preprocessor_config.json",
        )
    if signal.fixed and shape != signal.shape(config):
        raise FileError(
            "the image processor makes pictures of another size than the model takes",
            where=source.place,
            expected=str(signal.shape(config)),
            found=str(shape),
            remedy="set size in preprocessor_config.json",
        )
    return Reader(signal.kind, processor, signal.argument, shape, signal.tokens(config, shape))


def load_image_processor(source: Source) -> Any:
    """What makes pixels of pictures for a model, from its preprocessor_config.json; transformers' form that
    works with Pillow alone, so that the same pixels come out on every machine. Raises FileError where there
    is none."""
    place = str(Path(source.place).parent) if source.kind == "config" else source.place
    with hub_errors(source):
        return AutoImageProcessor.from_pretrained(
            place, revision=source.revision, trust_remote_code=False, backend="pil"
        )


def asked_with(path: str, reader: Reader, device: torch.device) -> dict[str, Tensor]:
    """The inputs of the picture at a path, a batch of one. Raises UsageError where there is none."""
    try:
        media = Media.at(Path(path.strip()).expanduser())
    except OSError as error:
        raise UsageError(
            f"this model is asked with the path of a picture: {error.strerror or error}",
            where="generate",
            found=path[:80],
        ) from error
    tensor = torch.from_numpy(Reading(media, reader).tensor("generate"))
    return {reader.argument: tensor[None].to(device)}
