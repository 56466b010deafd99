"""ViT: pre-norm encoder of a picture's patches, behind one learned token that its classifier reads
(Dosovitskiy et al. 2021, arXiv:2010.11929)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.models import bert
from petune.models.spec import Attention, Config, Mlp, Norm, Signal, StackRule, SubLayer, linears

ATTENTION = Attention(
    at="attention",
    groups=(linears(q="attention.q_proj", k="attention.k_proj", v="attention.v_proj"),),
    out="attention.o_proj",
    drop="attention.attention_dropout",
)
MLP = Mlp(at="mlp", up=linears(up="mlp.fc1"), down="mlp.fc2")
BLOCK = (
    SubLayer(ATTENTION, norm_in=Norm("layernorm_before", "layer"), drop="dropout"),
    SubLayer(MLP, norm_in=Norm("layernorm_after", "layer"), drop="dropout"),
)


def picture(config: Config) -> tuple[int, ...]:
    """Channels, height and width of a picture."""
    return (config.num_channels, *_sides(config.image_size))


def tokens(config: Config, shape: Sequence[int]) -> int:
    """Tokens of a picture: its patches, and the one before them."""
    high, wide = _sides(config.patch_size)
    return 1 + (shape[-2] // high) * (shape[-1] // wide)


def _sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, where a config says one number for both."""
    high, wide = (size, size) if isinstance(size, int) else size
    return high, wide


SIGNAL = Signal("image", "pixel_values", ("embeddings",), picture, tokens, idle=("mask_token",))
FAMILY = replace(
    bert.FAMILY,
    name="vit",
    signal=SIGNAL,
    stacks={"encoder": StackRule("layers", BLOCK, tail="layernorm")},
    fresh=(),
    bounded=False,
)
