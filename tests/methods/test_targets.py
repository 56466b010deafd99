"""Which layers LoRA takes: auto per family, all-linear, roles, suffixes, a regex, exclude, and what is said
when nothing matches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MPNetConfig,
    MPNetForSequenceClassification,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.methods import tuned_state, wrap
from petune.methods.targets import LINEAR
from petune.models.spec import stack_paths
from tests.methods.zoo import ZOO, table, tiny

BART = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2"}
BART_CROSS = {f"encoder_attn.{part}_proj" for part in ("q", "k", "v", "out")}
T5_SELF, T5_CROSS = (
    {f"layer.0.SelfAttention.{part}" for part in "qkvo"},
    {f"layer.1.EncDecAttention.{part}" for part in "qkvo"},
)
BERT = {f"attention.self.{part}" for part in ("query", "key", "value")} | {
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
}
LLAMA = {f"self_attn.{part}_proj" for part in "qkvo"} | {
    f"mlp.{part}_proj" for part in ("gate", "up", "down")
}


def per_block(stacks: dict[str, set[str]]) -> set[str]:
    return {
        f"{stack}.{index}.{name}" for stack, names in stacks.items() for index in range(2) for name in names
    }


def t5(*linears: str) -> set[str]:
    encoder = T5_SELF | {f"layer.1.DenseReluDense.{name}" for name in linears}
    decoder = T5_SELF | T5_CROSS | {f"layer.2.DenseReluDense.{name}" for name in linears}
    return per_block({"encoder.block": encoder, "decoder.block": decoder})


AUTO = {
    **dict.fromkeys(("bert-classify", "bert-tokens", "bert-mlm"), per_block({"bert.encoder.layer": BERT})),
    **dict.fromkeys(
        ("bart-seq2seq", "bart-classify"),
        per_block({"model.encoder.layers": BART, "model.decoder.layers": BART | BART_CROSS}),
    ),
    "t5-seq2seq": t5("wi", "wo"),
    "t5-gated": t5("wi_0", "wi_1", "wo"),
    "t5-classify": {f"transformer.{name}" for name in t5("wi", "wo")},
    **{
        name: per_block({"model.layers": LLAMA})
        for name in ZOO
        if name.split("-")[0] in ("llama", "mistral", "qwen2", "qwen3", "gemma3")
    },
}


def lora_layers(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[0] for name in tuned_state(model) if name.endswith("lora_A")}


def in_blocks(name: str) -> set[str]:
    """Every linear of every block."""
    model = tiny(name)
    return {
        f"{path}.{key}"
        for path in stack_paths(model, table(name)).values()
        for key, module in model.get_submodule(path).named_modules()
        if type(module) in LINEAR and not key.rpartition(".")[2].startswith("per_layer_")  # Gemma 4's
    }


def targets(name: str, **settings: Any) -> set[str]:
    return lora_layers(wrap(tiny(name), "lora", r=2, **settings))


@pytest.mark.parametrize("name", ZOO)
def test_auto_is_every_attention_and_mlp_projection_cross_attention_included(name: str) -> None:
    assert targets(name) == (AUTO[name] if name in AUTO else in_blocks(name))


@pytest.mark.parametrize(
    "name", ["bert-classify", "bert-mlm", "bart-classify", "t5-gated", "llama-causal", "llama-classify"]
)
def test_all_linear_is_every_linear_but_the_output_head_and_the_trained_heads(name: str) -> None:
    model = tiny(name)
    out = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    heads = ("classifier", "classification_head", "score")
    linears = {
        key
        for key, module in model.named_modules()
        if type(module) is nn.Linear and module is not out and not key.startswith(heads)
    }
    assert targets(name, targets="all-linear") == linears


def test_on_an_unknown_family_auto_is_every_linear_but_the_output_head() -> None:
    config = OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    found = lora_layers(wrap(OpenAIGPTLMHeadModel(config), "lora", r=2))
    model = OpenAIGPTLMHeadModel(config)
    assert found == {name for name, module in model.named_modules() if isinstance(module, Conv1D)}
    assert len(found) == 8


def test_on_an_unknown_family_the_output_head_of_a_classifier_is_left_out() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = MPNetConfig(vocab_size=97, num_labels=3, **sizes)
    found = lora_layers(wrap(MPNetForSequenceClassification(config), "lora", r=2))
    assert "mpnet.encoder.layer.0.attention.attn.q" in found
    assert "classifier" not in found


def test_a_plain_module_is_tuned_in_every_linear() -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2))), "lora", r=2)
    assert lora_layers(model) == {"0", "2.0"}


@pytest.mark.parametrize("name", ["bert-classify", "bart-seq2seq", "t5-gated", "llama-causal"])
def test_roles_mean_the_same_in_every_family(name: str) -> None:
    by_role = {
        "bert": {"q": "query", "v": "value", "down": "output.dense"},
        "bart": {"q": "q_proj", "v": "v_proj", "down": "fc2"},
        "t5": {"q": "q", "v": "v", "down": "wo"},
        "llama": {"q": "q_proj", "v": "v_proj", "down": "down_proj"},
    }[name.split("-")[0]]
    expected = {
        site
        for site in AUTO[name]
        if site.endswith(tuple("." + end for end in by_role.values())) and "attention.output" not in site
    }
    assert targets(name, targets=["q", "v", "down"]) == expected
    assert len(expected) in (6, 16)


def test_suffixes_match_after_a_dot_only() -> None:
    assert targets("llama-causal", targets=["self_attn.q_proj"]) == {
        f"model.layers.{index}.self_attn.q_proj" for index in range(2)
    }
    assert targets("llama-causal", targets=["layers.1.mlp.up_proj"]) == {"model.layers.1.mlp.up_proj"}
    with pytest.raises(UsageError, match="matches no module"):
        targets("llama-causal", targets=["_proj"])


def test_one_text_is_a_regex_over_whole_names() -> None:
    assert targets("llama-causal", targets=r".*\.1\..*(q|v)_proj") == {
        f"model.layers.1.self_attn.{part}_proj" for part in "qv"
    }
    with pytest.raises(UsageError, match="whole module names"):
        targets("llama-causal", targets="q_proj")
    with pytest.raises(UsageError, match="regular expression"):
        targets("llama-causal", targets="(")


def test_exclude_takes_roles_and_suffixes_and_wins() -> None:
    assert targets("llama-causal", targets=["q", "v"], exclude=["layers.0.self_attn.q_proj", "v"]) == {
        "model.layers.1.self_attn.q_proj"
    }
    assert targets("llama-causal", exclude=["q", "k", "v", "o", "gate", "up"]) == {
        f"model.layers.{i}.mlp.down_proj" for i in range(2)
    }
    with pytest.raises(UsageError, match="nothing to tune"):
        targets("llama-causal", targets=["q"], exclude=["q"])


@pytest.mark.parametrize("setting", ["targets", "exclude", "also_train"])
def test_a_pattern_that_matches_nothing_is_named_with_the_nearest_names_and_counts(setting: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrap(tiny("llama-causal"), "lora", r=2, **{setting: ["qproj"]})
    text = str(caught.value)
    assert f"{setting}: 'qproj' matches no module" in text
    assert "q_proj (2)" in text


def test_every_pattern_that_matches_nothing_is_named_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        targets("llama-causal", targets=["q", "kproj", "vproj"])
    assert [problem.what for problem in caught.value.problems] == [
        f"targets: '{name}' matches no module" for name in ("kproj", "vproj")
    ]


def test_a_refused_pattern_leaves_the_model_as_it_was() -> None:
    model = tiny("bert-classify")
    before = [(name, type(module)) for name, module in model.named_modules()]
    for settings in ({"targets": ["q", "nothing"]}, {"targets": ["LayerNorm"]}, {"exclude": ["nothing"]}):
        with pytest.raises(UsageError):
            wrap(model, "lora", r=2, **settings)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_target_that_lora_cannot_tune_is_an_error_naming_it() -> None:
    with pytest.raises(UsageError) as caught:
        targets("bert-classify", targets=["LayerNorm"])
    assert "not LayerNorm" in str(caught.value)
    assert caught.value.problems[0].where == "bert.embeddings.LayerNorm"


def test_the_output_projection_of_multihead_attention_is_never_tuned_in_silence() -> None:
    """nn.MultiheadAttention reads out_proj.weight and never calls out_proj: a LoRA there would train
    nothing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    assert lora_layers(wrap(Block(), "lora", r=2)) == {"linear"}
    with pytest.raises(UsageError, match="NonDynamicallyQuantizableLinear"):
        wrap(Block(), "lora", r=2, targets=["out_proj"])


def test_an_embedding_that_no_forward_calls_is_not_tuned_in_silence() -> None:
    """T5's `shared` lends its table to both embed_tokens and is never called itself."""
    inputs = {"input_ids": torch.arange(3, 12)[None], "decoder_input_ids": torch.arange(3, 8)[None]}
    base = tiny("t5-seq2seq")(**inputs).logits
    try:
        model = wrap(tiny("t5-seq2seq"), "lora", r=2, targets=["shared"])
    except UsageError:
        return
    with torch.no_grad():
        for value in tuned_state(model).values():
            value.normal_()
    assert float((model(**inputs).logits - base).abs().max()) > 1e-3


HEADS = {
    "bert-classify": "classifier",
    "bert-tokens": "classifier",
    "bart-classify": "classification_head",
    "t5-classify": "classification_head",
}
HEADS |= {f"{name}-classify": "score" for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3")}


@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
@pytest.mark.parametrize("name", HEADS)
def test_the_task_head_trains_whole_beside_the_method(name: str, method: str) -> None:
    model = wrap(tiny(name), method, **({"r": 2} if method == "lora" else {"reduction": 4}))
    head = {key for key, _ in model.named_parameters() if key.startswith(HEADS[name] + ".")}
    assert head
    assert head <= tuned_state(model).keys()
    assert all(model.get_parameter(key).requires_grad for key in head)


# the last names a module inside another, which peft would not read twice
@pytest.mark.parametrize("given", ["pooler", ["pooler"], ("bert.pooler",), ("pooler.dense", "pooler")])
def test_modules_to_train_whole_are_named_by_suffix(given: Any) -> None:
    model = wrap(tiny("bert-classify"), "lora", r=2, also_train=given)
    whole = {name for name in tuned_state(model) if "lora" not in name}
    assert whole == {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert model.petune_tuning.also_train == ("bert.pooler",)


def test_a_single_unknown_module_to_train_is_an_error_too() -> None:
    with pytest.raises(UsageError, match="also_train: 'poler' matches no module"):
        wrap(tiny("bert-classify"), "lora", r=2, also_train="poler")


def test_a_module_trained_whole_is_never_a_target_too() -> None:
    model = wrap(
        tiny("bert-classify"), "lora", r=2, targets="all-linear", also_train=["pooler", "classifier"]
    )
    assert not {name for name in lora_layers(model) if "pooler" in name or "classifier" in name}


# ------------------------------------------------------------------ what is left alone


EXPERTS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
QWEN = Qwen3MoeConfig(**EXPERTS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LLAMA4: dict[str, Any] = {**EXPERTS, "num_local_experts": 4, "intermediate_size_mlp": 48}


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_experts_that_lora_does_not_reach_are_said_in_one_line(
    targets: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.methods.registry.warn", said.append)
    model = wrap(Llama4ForCausalLM(Llama4TextConfig(**LLAMA4)), "lora", r=2, targets=targets)
    missed = [value for name, value in model.named_parameters() if ".experts." in name or "router" in name]
    number, total = sum(value.numel() for value in missed), sum(value.numel() for value in model.parameters())
    (line,) = said
    assert f"leaves {len(missed)} tensors with {number:,} of {total:,} parameters alone" in line
    assert "parameters of 3 dims and more (model.layers.*.feed_forward.experts.gate_up_proj of " in line
    assert "no table of llama4_text" in line


def test_experts_of_a_family_without_a_table_are_reached_and_its_routers_are_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.methods.registry.warn", said.append)
    monkeypatch.setattr("petune.methods.registry.say", said.append)
    model = Qwen3MoeForCausalLM(QWEN)
    monkeypatch.setattr(model.config, "model_type", "unknown_moe")
    wrap(model, "lora", r=2)
    assert "2 linears (model.layers.*.mlp.gate.weight of Qwen3MoeTopKRouter)" in said[1]
    assert "of 3 dims" not in said[1] and said[2] == "experts 4/4"


@pytest.mark.parametrize(
    ("name", "settings", "line"),
    [
        ("qwen2moe-causal", {}, "experts 5/5, shared 1/1, router frozen, attention 4/4"),
        ("mixtral-causal", {"also_train": ["gate"]}, "experts 4/4, router trains, attention 4/4"),
        ("qwen3moe-causal", {}, "experts 5/5, dense 3/3, router frozen, attention 4/4"),
        ("gptoss-causal", {"targets": ["q", "v"]}, "experts 0/4, router frozen, attention 2/4"),
        (
            "mixtral-causal",
            {"targets": ["down"]},
            "experts 4/4 (down_proj alone), router frozen, attention 0/4",
        ),
        (
            "qwen2moe-causal",
            {"layers": [1], "exclude": ["shared_expert.up_proj"]},
            "experts 0/5 in 1 blocks, experts 5/5 in 1 blocks, shared 0/1 in 1 blocks,"
            " shared 2/3 linears in 1 blocks, router frozen, attention 0/4 in 1 blocks, attention 4/4 in"
            " 1 blocks",
        ),
    ],
)
def test_what_a_tuning_of_experts_reaches_is_said_in_one_line(
    name: str, settings: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.methods.registry.say", said.append)
    model = wrap(tiny(name), "lora", r=2, **settings)
    assert said[1] == line
    assert sum(value.requires_grad for value in model.parameters()) > 0


def test_nothing_is_said_where_nothing_is_left_or_targets_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.methods.registry.warn", said.append)
    wrap(GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2)), "lora", r=2)
    wrap(Qwen3MoeForCausalLM(QWEN), "lora", r=2, targets=["q_proj"])
    wrap(Qwen3MoeForCausalLM(QWEN), "full")
    wrap(tiny("llama-causal"), "lora", r=2)
    assert said == []
