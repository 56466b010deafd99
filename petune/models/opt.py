"""OPT: BART's decoder alone, its norms before each sub-layer or, where the config says so, behind the sum."""

from __future__ import annotations

from dataclasses import replace

from petune.models import bart, llama
from petune.models.by_fields import narrowing, sized
from petune.models.spec import StackRule

BLOCK = tuple(
    replace(one, norm_first="do_layer_norm_before")
    for one in (
        bart.attention("self_attn", causal=True),
        replace(bart.MLP, core=replace(bart.PLAIN, drop=None)),
    )
)


FAMILY = replace(
    llama.FAMILY,
    name="opt",
    stacks={"decoder": StackRule("decoder.layers", BLOCK, tail="final_layer_norm", counted=True)},
    heads=("score",),
    shape=sized("num_attention_heads", "hidden_size", "ffn_dim"),
    narrow=narrowing("hidden_size", "ffn_dim"),
    packs=False,
)
