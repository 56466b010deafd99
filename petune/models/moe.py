"""Decoders of Llama's kin with routed experts: Qwen3-MoE (dense MLPs in some blocks), Qwen2-MoE (besides, an
expert that every token goes through), Mixtral and gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from petune.errors import FileError, UsageError
from petune.models import llama
from petune.models.spec import Config, Family, Mlp, Norm, RoutedMlp, Shape, SubLayer, linears

ROUTED = RoutedMlp(
    at="mlp",
    experts="mlp.experts",
    router="mlp.gate",
    dense=replace(llama.MLP, columns="dense"),
    normed="norm_topk_prob",
)
SHARED = Mlp(
    at="mlp.shared_expert",
    up=linears(gate="mlp.shared_expert.gate_proj", up="mlp.shared_expert.up_proj"),
    down="mlp.shared_expert.down_proj",
    columns="shared",
)


def shape(config: Config, columns: str) -> Shape:
    """Sizes of a config; `columns` is the field with those of an expert."""
    shared = getattr(config, "shared_expert_intermediate_size", 0)
    dense = getattr(config, "intermediate_size", 0) * (columns != "intermediate_size")
    return replace(llama.shape(config, columns), experts=config.num_experts, dense=dense, shared=shared)


def narrow(config: Config, reduction: int) -> Config:
    """`config` with every width divided by `reduction`, and in the place of experts dense MLPs as wide as
    those that a token goes through."""
    small = llama.narrow(config, reduction)
    small.intermediate_size = config.num_experts_per_tok * config.moe_intermediate_size // reduction
    small.mlp_only_layers = list(
        range(2 * config.num_hidden_layers)
    )  # a ladder's come behind the model's own
    small._experts_implementation = "eager"  # as there are none, which transformers cannot know
    return small


def cannot_narrow(config: Config, reduction: int) -> Config:
    """Raises UsageError: blocks of this family have experts always."""
    what = (
        f"blocks of {config.model_type} have no form without experts, which a side network would be made of"
    )
    raise UsageError(what, where="method", remedy="use lora or full")


def refuse_llama_moe(fields: Mapping[str, Any], place: str) -> None:
    """Raise FileError for a config of LLaMA-MoE (Zhu et al. 2024, arXiv:2406.16554), whose class transformers
    does not have; experts made of Llamas in Mixtral's class are a Mixtral."""
    if fields.get("model_type") == LLAMA_MOE:
        raise FileError(
            "LLaMA-MoE has a class of its own, which transformers has not; mixtures of Llamas in Mixtral's"
            " class are read as Mixtral",
            where=f"{place}  model_type",
            expected="mixtral (MixtralForCausalLM)",
            found=f"{LLAMA_MOE} ({', '.join(map(str, fields.get('architectures') or ['no class']))})"[:200],
            remedy="use such a mixture; load one whose code you trust yourself, and give it to petune.train",
        )


def table(name: str, core: RoutedMlp, columns: str, attention: SubLayer = llama.BLOCK[0]) -> Family:
    """The table of a decoder with attention as Llama's and, behind it, this mixture of experts."""
    routed = SubLayer(core, norm_in=Norm("post_attention_layernorm"))
    return replace(
        llama.like(name, attention, routed),
        shape=partial(shape, columns=columns),
        narrow=narrow if core.dense else cannot_narrow,
    )


QWEN3_MOE = table("qwen3_moe", ROUTED, "moe_intermediate_size")
QWEN2_MOE = table(
    "qwen2_moe", replace(ROUTED, shared=SHARED, gate="mlp.shared_expert_gate"), "moe_intermediate_size"
)
LLAMA_MOE = "llama_moe"
ALWAYS = replace(ROUTED, dense=None, normed=True)  # experts in every block, shares of sum 1
MIXTRAL = table("mixtral", replace(ALWAYS, rounded=False), "intermediate_size")
SINKS = replace(llama.BLOCK[0], core=replace(llama.ATTENTION, sinks="sinks"))
OF_GPT_OSS = replace(ALWAYS, router="mlp.router", act="clamped")
GPT_OSS = replace(table("gpt_oss", OF_GPT_OSS, "intermediate_size", SINKS), packs=False)
