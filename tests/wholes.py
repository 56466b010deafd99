"""Tiny checkpoints of several modalities, of which petune tunes the text model: a text model of two blocks, a
vision tower of one, a tokenizer of words and a processor's settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from petune.files.safetensors import write_json
from petune.models.loading import load_model
from petune.models.source import resolve_model
from tests.small_runs import tokenizer
from tests.written_once import written_once

TEXT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SEES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_LOOKS: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
}
_MIXES: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_ROUTES: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_QWEN: dict[str, Any] = {
    "image_token_id": 28,
    "video_token_id": 29,
    "vision_start_token_id": 30,
    "vision_end_token_id": 31,
}
# by model_type: the classes' first word and the text model's, and what the three configs have beside sizes
KINDS: Mapping[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", "Gemma3Text", {"query_pre_attn_scalar": 8}, _SEES, {"image_token_index": 28}),
    "mistral3": ("Mistral3", "Ministral3", {}, {**_SEES, "model_type": "pixtral"}, {"image_token_index": 28}),
    "qwen3_5": ("Qwen3_5", "Qwen3_5Text", _MIXES, _LOOKS, _QWEN),
    "gemma4": (
        "Gemma4",
        "Gemma4Text",
        {"global_head_dim": 8, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {**_SEES, "head_dim": 8, "num_key_value_heads": 2},
        {"audio_config": None},
    ),
    "llava": ("Llava", "Llama", {}, {**_SEES, "model_type": "clip_vision_model"}, {"image_token_index": 28}),
    "qwen3_5_moe": ("Qwen3_5Moe", "Qwen3_5MoeText", {**_MIXES, **_ROUTES}, _LOOKS, _QWEN),
}


def some(names: Iterable[str], *short: str) -> list[Any]:
    """Parameters of a test, of which the short suite has these alone."""
    return [name if name in short else pytest.param(name, marks=pytest.mark.long) for name in names]


EACH = some(KINDS, "gemma3", "mistral3", "qwen3_5")
IDS = torch.tensor([[5, 6, 7, 8, 9, 2, 0, 0], [9, 10, 11, 12, 25, 24, 3, 2]])
BATCH = {"input_ids": IDS, "attention_mask": (IDS != 0).long()}


def class_of(kind: str) -> Any:
    return getattr(transformers, f"{KINDS[kind][0]}ForConditionalGeneration")


def config_of(kind: str, **changes: Any) -> Any:
    whole, text, own, vision, more = KINDS[kind]
    inner = getattr(transformers, f"{text}Config")(**{**TEXT, **own, **changes})
    made: Any = getattr(transformers, f"{whole}Config")
    return made(text_config=inner.to_dict(), vision_config=vision, **more)


@written_once
def write_whole(folder: Path, kind: str, shard: str = "5GB", **changes: Any) -> Path:
    """A random checkpoint with its tokenizer. changes: of the text model's config."""
    torch.manual_seed(0)
    class_of(kind)(config_of(kind, **changes)).save_pretrained(folder, max_shard_size=shard)
    tokenizer().save_pretrained(folder)
    write_json(folder / "preprocessor_config.json", {"image_processor_type": "none", "size": 16})
    return folder


def whole(folder: Path, kind: str) -> Any:
    """transformers' own model of several modalities."""
    return class_of(kind).from_pretrained(folder).eval()


def text(folder: Path) -> PreTrainedModel:
    """The text model as petune reads it."""
    return load_model(resolve_model(str(folder), folder), "causal", None, torch.float32).read()


def logits(model: Any) -> torch.Tensor:
    """Of both rows, those of padding left out."""
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**BATCH).logits
    return found[BATCH["attention_mask"].bool()]
