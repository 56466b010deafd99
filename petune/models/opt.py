"""OPT: BART's decoder alone, its norms before each sub-layer or, where the config says so, behind the sum."""

from __future__ import annotations

from dataclasses import replace

from petune.models import bart, llama
from petune.models.narrowed import narrowing
from petune.models.spec import Config, Shape, StackRule

BLOCK = tuple(
    replace(one, norm_first="do_layer_norm_before")
    for one in (
        bart.attention("self_attn", causal=True),
        replace(bart.MLP, core=replace(bart.PLAIN, drop=None)),
    )
)


def shape(config: Config) -> Shape:
    """Sizes of an OPT config; every head has its own keys and values."""
    heads, width = config.num_attention_heads, config.hidden_size
    return Shape(heads, heads, width // heads, config.ffn_dim, width)


FAMILY = replace(
    llama.FAMILY,
    name="opt",
    stacks={"decoder": StackRule("decoder.layers", BLOCK, tail="final_layer_norm", counted=True)},
    heads=("score",),
    shape=shape,
    narrow=narrowing("hidden_size", "ffn_dim"),
    packs=False,
)
