"""Gemma 4 (text): Gemma 3's norms, which scale by their weights alone, and one of values. Blocks with full
attention have heads of another width than those with sliding attention and, by the config, other numbers of
keys and values, or values made of the keys' product. By the config, the last blocks read the keys and values
of earlier ones, and each block a vector of its own for every token (per-layer embeddings)."""

from __future__ import annotations

from dataclasses import replace

from petune.errors import UsageError
from petune.models import llama
from petune.models.spec import Config, Lending, Norm, PerToken, Shape, SubLayer

# without v where keys are values, without both where they are another block's
ATTENTION = replace(
    llama.ATTENTION,
    v_norm=Norm("self_attn.v_norm", over="head", scales=False),
    lacks=("k", "v"),
    lending=Lending("shared_kv_states", "layer_type", "store_full_length_kv", "is_kv_shared_layer"),
)
BLOCK = (
    SubLayer(ATTENTION, norm_in=Norm("input_layernorm"), norm_out=Norm("post_attention_layernorm")),
    SubLayer(
        llama.MLP,
        norm_in=Norm("pre_feedforward_layernorm"),
        norm_out=Norm("post_feedforward_layernorm"),
        factor="layer_scalar",
        per_token=PerToken(
            "per_layer_input",
            "per_layer_input_gate",
            "per_layer_projection",
            Norm("post_per_layer_input_norm"),
        ),
    ),
)
EXPERTS = "its blocks have experts beside a dense MLP (enable_moe_block), for which petune has no table"


def shape(config: Config) -> Shape:
    """Sizes of a Gemma 4 config: heads as wide as those of sliding attention, where there is any, and as many
    of keys and values as every block has."""
    kinds = tuple(llama.shape(config.per_layer_config[one]) for one in sorted(set(config.layer_types)))
    return replace(kinds[-1], kv_heads=min(one.kv_heads for one in kinds), kinds=kinds)


def narrow(config: Config, reduction: int) -> Config:
    """Raises UsageError: no block can be made that is not one of the model's own."""
    what = (
        f"a block of {config.model_type} takes its sizes from its number in the model, and a side network's"
        " stand behind the model's own"
    )
    raise UsageError(what, where="method", remedy="use lora, adapter or full")


def refused(config: Config) -> dict[str, str]:
    """See Family."""
    found: dict[str, str] = {}
    if config.enable_moe_block:
        found["tuning"] = EXPERTS
    if config.use_bidirectional_attention == "all":
        found["packing"] = "a mask by which tokens see later ones does not tell samples apart"
    across = []
    if size := config.hidden_size_per_layer_input:
        across.append(f"every block reads embeddings of its own (hidden_size_per_layer_input = {size})")
    if shared := config.num_kv_shared_layers:
        across.append(f"its last blocks read keys and values of others (num_kv_shared_layers = {shared})")
    return found | ({"pp": "; ".join(across)} if across else {})


LIKE = llama.like(
    "gemma4",
    *BLOCK,
    uncut="heads of its blocks with full attention have another width, and one list cuts all",
)
FAMILY = replace(LIKE, shape=shape, narrow=narrow, refused=refused)
