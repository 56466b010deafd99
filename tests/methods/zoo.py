"""Tiny random models of every family and head, with a batch for each: what the tests of methods, models,
sites and stacks share.

Hidden 64, two blocks per stack, 8 heads (4 key and value heads where grouped), so that side widths divide.
Every model comes from a seed, in eval mode, with dropout 0 unless asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma3TextForSequenceClassification,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    MistralForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    T5ForSequenceClassification,
)

from petune.models import FAMILIES
from petune.models.copied import copied
from petune.models.spec import Family
from tests.methods.more_models import BART, BERT, DECODER, GATED, MIXERS, MORE, T5, VOCAB

# One block of each type of attention, a window shorter than a batch's texts, a scale of its own
_GEMMA: dict[str, Any] = {
    **DECODER,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 4,
    "sliding_window_pattern": 2,
    "final_logit_softcapping": 5.0,
}

ZOO: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert-classify": (BertForSequenceClassification, BertConfig, BERT),
    "bert-tokens": (BertForTokenClassification, BertConfig, BERT),
    "bert-mlm": (BertForMaskedLM, BertConfig, BERT),
    "bart-seq2seq": (BartForConditionalGeneration, BartConfig, BART),
    "bart-classify": (BartForSequenceClassification, BartConfig, BART),
    "t5-seq2seq": (T5ForConditionalGeneration, T5Config, T5),
    "t5-gated": (T5ForConditionalGeneration, T5Config, GATED),
    "t5-classify": (T5ForSequenceClassification, T5Config, T5),
    "llama-causal": (LlamaForCausalLM, LlamaConfig, DECODER),
    "llama-classify": (LlamaForSequenceClassification, LlamaConfig, DECODER),
    "mistral-causal": (MistralForCausalLM, MistralConfig, DECODER),
    "mistral-classify": (MistralForSequenceClassification, MistralConfig, DECODER),
    "qwen2-causal": (Qwen2ForCausalLM, Qwen2Config, DECODER),
    "qwen2-classify": (Qwen2ForSequenceClassification, Qwen2Config, DECODER),
    "qwen3-causal": (Qwen3ForCausalLM, Qwen3Config, {**DECODER, "head_dim": 16}),
    "qwen3-classify": (Qwen3ForSequenceClassification, Qwen3Config, {**DECODER, "head_dim": 16}),
    "gemma3-causal": (Gemma3ForCausalLM, Gemma3TextConfig, _GEMMA),
    "gemma3-classify": (Gemma3TextForSequenceClassification, Gemma3TextConfig, _GEMMA),
    **MORE,
}
_MOE: dict[str, Any] = {**DECODER, "hidden_size": 32, "intermediate_size": 24, "num_experts_per_tok": 2}
_QWEN: dict[str, Any] = {**_MOE, "num_experts": 5, "moe_intermediate_size": 16}
_SHARED: dict[str, Any] = {**_QWEN, "shared_expert_intermediate_size": 24}
MOE: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # routed experts; the first has a dense block too
    "qwen3moe-causal": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_QWEN, "head_dim": 8, "mlp_only_layers": [0]},
    ),
    "qwen2moe-causal": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        _SHARED,
    ),
    "mixtral-causal": (MixtralForCausalLM, MixtralConfig, {**_MOE, "num_local_experts": 4}),
    "gptoss-causal": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            **_MOE,
            "num_local_experts": 4,
            "head_dim": 8,
            "sliding_window": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3next-causal": (Qwen3NextForCausalLM, Qwen3NextConfig, {**_SHARED, **MIXERS}),
    "qwen3_5moe-causal": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, {**_SHARED, **MIXERS}),
}
FOUR = ("bert-classify", "bart-seq2seq", "t5-seq2seq", "llama-causal")  # one model of each family
# No token twice: a random model with tied embeddings would otherwise repeat one, and hide what the test is
# about.
GENERATE: dict[str, Any] = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "no_repeat_ngram_size": 1,
}
# an adapter stands behind torch's own linears alone
ADAPTED = tuple(name for name in ZOO if name != "gpt2-causal")
# no ladder is made of blocks that are sized by their numbers
LADDERED = tuple(name for name in ZOO if not name.startswith("gemma4"))
GENERATING = ("bart-seq2seq", "t5-seq2seq", "llama-causal")
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"r": 4},
    "adapter": {"reduction": 4},
    "side": {"reduction": 4},
}


def tiny(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """The model `name` of the zoo, random by `seed`, in eval mode; `changes` go over its config.

    One that is asked for again is copied, which takes half the time; torch's generator is left as by making
    it.
    """
    model_type, config_type, settings = (ZOO | MOE)[name]
    settings = {**settings, **changes}
    if "layer_types" in settings:  # which go round
        settings["layer_types"] = (settings["layer_types"] * 9)[: settings["num_hidden_layers"]]
    # what a test may set or patch, and a model is made by
    made_by = (torch.get_default_dtype(), torch.get_default_device(), torch.Tensor.float)
    key = repr((model_type, config_type, settings, seed, made_by))
    if key not in _MADE:
        torch.manual_seed(seed)
        model = model_type(config_type(**settings)).eval()
        if key in _ASKED and len(_MADE) < 64:
            _MADE[key] = copied(model), torch.get_rng_state()
        _ASKED.add(key)
        return model
    model, state = _MADE[key]
    torch.manual_seed(seed)  # of all devices
    torch.set_rng_state(state)
    return copied(model)


_ASKED: set[str] = set()
_MADE: dict[str, tuple[Any, Tensor]] = {}


def table(name: str) -> Family:
    """The family of the model `name`."""
    return FAMILIES[(ZOO | MOE)[name][1].model_type]


# The first model of each family, by its model_type, in the order of the tables.
EACH: dict[str, str] = {
    kind: next(name for name, (_, config, _) in (ZOO | MOE).items() if config.model_type == kind)
    for kind in FAMILIES
}
_OF_64 = {
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 128),
    **dict.fromkeys(("hidden_dim", "ffn_dim", "n_inner"), 128),
    **dict.fromkeys(("hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    "linear_value_head_dim": 16,
}


def of_64(name: str) -> dict[str, Any]:
    """Changes to the config of the model `name` that make the inputs of all weights in its blocks fill blocks
    of 64, which NF4 has."""

    def own(settings: dict[str, Any]) -> dict[str, Any]:
        both = {
            side: {**settings[side], **own(settings[side])}
            for side in ("encoder", "decoder")
            if side in settings
        }
        return {key: value for key, value in _OF_64.items() if key in settings} | both

    return own((ZOO | MOE)[name][2])


def writes_beside(name: str) -> bool:
    """Whether the model `name` has an encoder and a decoder."""
    return table(name).kind == "encoder-decoder"


def signalled(name: str, seed: int) -> Tensor:
    """A random picture [3, height, width] or sound [features, frames] for the model `name`."""
    signal, (_, config, settings) = table(name).signal, ZOO[name]
    assert signal is not None
    shape = signal.shape(config(**settings))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(name: str, *, seed: int = 1, rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    """Inputs and labels for the model `name`: rows of unequal length, padded on the right."""
    torch.manual_seed(seed)
    if (signal := table(name).signal) is not None:
        given = torch.stack([signalled(name, seed + row) for row in range(rows)])
        classes = torch.randint(0, 3, (rows,))
        words = torch.randint(3, VOCAB, (rows, 6))
        return {signal.argument: given, "labels": classes if signal.kind == "image" else words}
    ids = torch.randint(3, VOCAB, (rows, length))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, length - 2 * row :] = 0
        ids[row, length - 2 * row :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name.endswith("classify") and writes_beside(name):
        ends = mask.sum(1) - 1
        ids[torch.arange(rows), ends] = 2  # these heads read the state of the end token, one in each row
    if name.endswith("classify"):
        return inputs | {"labels": torch.randint(0, 3, (rows,))}
    if name.endswith("tokens"):
        return inputs | {"labels": torch.where(mask.bool(), torch.randint(0, 3, ids.shape), -100)}
    if writes_beside(name):
        return inputs | {"labels": torch.randint(3, VOCAB, (rows, 6))}
    return inputs | {"labels": torch.where(mask.bool(), ids, -100)}


def prompt(name: str) -> dict[str, Tensor]:
    """Inputs of `generate`: for a decoder padded on the left."""
    inputs = batch(name)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return (
        {"input_ids": ids, "attention_mask": mask}
        if writes_beside(name)
        else {"input_ids": ids.flip(1), "attention_mask": mask.flip(1)}
    )


def frozen(model: nn.Module) -> Any:
    """`model` with no parameter asking for a gradient: torch picks kernels by that, and bit-equality needs
    the same ones."""
    return model.requires_grad_(False)


def stir(model: nn.Module, *, seed: int = 2, std: float = 0.3) -> None:
    """Move every trainable parameter away from its start, so that nothing is an identity any more."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += (
                    std * torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                ).to(parameter)


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradient of everything that got one, by name."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }


def assert_same_gradients(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-6
) -> None:
    """Same names, and each tensor equal within `tolerance` of its own largest entry or of 1."""
    assert found.keys() == expected.keys()
    assert found, "nothing had a gradient"
    for name, value in expected.items():
        scale = max(1.0, float(value.abs().max()))
        assert float((found[name] - value).abs().max()) <= tolerance * scale, name
