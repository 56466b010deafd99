"""The families petune knows, by the `model_type` of their config. A family costs one table and one line
here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from petune.models import (
    bart,
    bert,
    cohere,
    deberta,
    dinov2,
    distilbert,
    eurobert,
    gemma3,
    gemma4,
    glm4,
    gpt2,
    llama,
    modernbert,
    moe,
    olmo2,
    opt,
    phi3,
    qwen3_next,
    t5,
    t5gemma,
    vit,
    whisper,
)
from petune.models.spec import Family

# Read alone: its order is that of pages and messages.
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "bert": bert.FAMILY,
        "roberta": bert.ROBERTA,
        "xlm-roberta": bert.ROBERTA,
        "camembert": bert.ROBERTA,
        "distilbert": distilbert.FAMILY,
        "deberta-v2": deberta.FAMILY,
        "eurobert": eurobert.FAMILY,
        "modernbert": modernbert.FAMILY,
        "bart": bart.FAMILY,
        "mbart": bart.MBART,
        "t5": t5.FAMILY,
        "mt5": t5.FAMILY,
        "t5gemma": t5gemma.FAMILY,
        "opt": opt.FAMILY,
        "gpt2": gpt2.FAMILY,
        "llama": llama.FAMILY,
        "mistral": llama.FAMILY,
        "qwen2": llama.FAMILY,
        "qwen3": llama.FAMILY,
        "ministral": llama.FAMILY,
        "ministral3": llama.MINISTRAL3,
        "smollm3": llama.SMOLLM3,
        "granite": llama.GRANITE,
        "olmo2": olmo2.FAMILY,
        "olmo3": olmo2.FAMILY,
        "phi3": phi3.FAMILY,
        "glm4": glm4.FAMILY,
        "cohere": cohere.FAMILY,
        "cohere2": cohere.COHERE2,
        "gemma2": gemma3.FAMILY,
        "gemma3_text": gemma3.FAMILY,
        "gemma4_text": gemma4.FAMILY,
        "qwen3_5_text": qwen3_next.QWEN3_5,
        "qwen3_moe": moe.QWEN3_MOE,
        "qwen2_moe": moe.QWEN2_MOE,
        "mixtral": moe.MIXTRAL,
        "gpt_oss": moe.GPT_OSS,
        "vit": vit.FAMILY,
        "dinov2": dinov2.FAMILY,
        "whisper": whisper.FAMILY,
        "qwen3_next": qwen3_next.QWEN3_NEXT,
        "qwen3_5_moe_text": qwen3_next.QWEN3_5_MOE,
    }
)


def family_of(model: nn.Module) -> Family | None:
    """The family of a transformers model by its config, or None for a model petune has no table for."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))


# arguments of models by what they read: ids of tokens, a picture's pixels, a sound's features
INPUTS = ("input_ids", "pixel_values", "input_features")


def input_of(batch: Mapping[str, Any]) -> Tensor:
    """What a model reads of a batch, [rows, ...]."""
    found: Tensor = next(batch[name] for name in INPUTS if batch.get(name) is not None)
    return found


def tokens_of(model: nn.Module, given: Tensor) -> int:
    """Tokens that the first stack of `model` has for each row of its input."""
    family = family_of(model)
    if family is None or family.signal is None:
        return given.shape[1]
    return family.signal.tokens(model.config, given.shape)
