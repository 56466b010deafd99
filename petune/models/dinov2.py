"""DINOv2: ViT's pre-norm encoder with a learned scale for each feature behind every sub-layer (LayerScale),
and in its largest size a gated MLP (Oquab et al. 2023, arXiv:2304.07193)."""

from __future__ import annotations

from dataclasses import replace

from petune.models import vit
from petune.models.by_fields import narrowing
from petune.models.spec import Config, Mlp, Norm, Shape, StackRule, SubLayer, linears

# in transformers 5.17 its attention is a module of modules, as BERT's is
OLDER = "attention.attention"
ATTENTION = replace(
    vit.ATTENTION,
    groups=(
        linears(
            q=f"attention.q_proj|{OLDER}.query",
            k=f"attention.k_proj|{OLDER}.key",
            v=f"attention.v_proj|{OLDER}.value",
        ),
    ),
    out="attention.o_proj|attention.output.dense",
)
MLP = Mlp(
    at="mlp",
    up=linears(gate="mlp.gate_proj", up="mlp.up_proj|mlp.fc1"),
    down="mlp.down_proj|mlp.fc2",
    gated_act="silu",  # whatever the config says
)
BLOCK = (
    SubLayer(ATTENTION, norm_in=Norm("norm1", "layer"), vector="layer_scale1.lambda1"),
    SubLayer(MLP, norm_in=Norm("norm2", "layer"), vector="layer_scale2.lambda1"),
)


def shape(config: Config) -> Shape:
    """Sizes of a DINOv2 config, whose MLP is so many times as wide; a gated one has two thirds of that."""
    heads, width = config.num_attention_heads, config.hidden_size
    columns = int(width * config.mlp_ratio)
    if config.use_swiglu_ffn:
        columns = (int(columns * 2 / 3) + 7) // 8 * 8
    return Shape(heads, heads, width // heads, columns, width)


FAMILY = replace(
    vit.FAMILY,
    name="dinov2",
    stacks={"encoder": StackRule("encoder.layer", BLOCK)},
    shape=shape,
    narrow=narrowing("hidden_size"),  # which the MLP's width follows
    # positions are interpolated for pictures of another size
    signal=replace(vit.SIGNAL, fixed=False),
    pools=lambda config: "first and mean",
)
