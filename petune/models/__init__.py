"""The families petune knows, by the `model_type` of their config. A family costs one table and one line
here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from petune.models import (
    bart,
    bert,
    cohere,
    deberta,
    distilbert,
    eurobert,
    gemma3,
    glm4,
    gpt2,
    llama,
    modernbert,
    moe,
    olmo2,
    opt,
    phi3,
    t5,
    t5gemma,
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
        "gemma2": gemma3.FAMILY,
        "gemma3_text": gemma3.FAMILY,
        "qwen3_moe": moe.QWEN3_MOE,
        "qwen2_moe": moe.QWEN2_MOE,
        "mixtral": moe.MIXTRAL,
        "gpt_oss": moe.GPT_OSS,
    }
)


def family_of(model: nn.Module) -> Family | None:
    """The family of a transformers model by its config, or None for a model petune has no table for."""
    return FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
