"""BERT: post-norm encoder. The MLP is two modules, `intermediate` and `output`, so the region is entered by one and left by the other."""

from __future__ import annotations

from copy import deepcopy

from petune.models.spec import Config, Family, Norms, Region, Shape, StackName, StackRule

ATTENTION = Region(
    kind="attention",
    enter="attention.self",
    leave="attention.output.dense",
    sites={"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value", "o": "attention.output.dense"},
    head_counts=("num_attention_heads",),
)
CROSS = Region(  # of a BERT used as a decoder
    kind="attention",
    enter="crossattention.self",
    leave="crossattention.output.dense",
    sites={
        "q": "crossattention.self.query",
        "k": "crossattention.self.key",
        "v": "crossattention.self.value",
        "o": "crossattention.output.dense",
    },
    inputs=("hidden_states", "encoder_hidden_states"),
    head_counts=("num_attention_heads",),
    cross=True,
)
MLP = Region(kind="mlp", enter="intermediate", leave="output.dense", sites={"up": "intermediate.dense", "down": "output.dense"})

NORMS = Norms(
    first="attention.output.LayerNorm",
    second="output.LayerNorm",
    post=True,
    drops=("attention.output.dropout", "output.dropout"),
    attention_drop="attention.self.dropout",
)


def shape(config: Config) -> Shape:
    """Sizes of a BERT config; every head has its own keys and values."""
    heads, width = config.num_attention_heads, config.hidden_size
    return Shape(heads, heads, width // heads, config.intermediate_size, width)


def narrow(config: Config, reduction: int) -> Config:
    """`config` with hidden and MLP widths divided by `reduction`."""
    small = deepcopy(config)
    small.hidden_size = config.hidden_size // reduction
    small.intermediate_size = config.intermediate_size // reduction
    return small


def depth(config: Config) -> dict[StackName, int]:
    """Blocks of the one stack."""
    return {"encoder": config.num_hidden_layers}


FAMILY = Family(
    name="bert",
    kind="encoder",
    stacks={"encoder": StackRule(blocks="encoder.layer", regions=(ATTENTION, CROSS, MLP), norms=NORMS)},
    heads=("classifier",),
    shape=shape,
    narrow=narrow,
    depth=depth,
    fresh=("pooler", "transform"),  # the second of the head of masked words, whose table of words is the embedding
)
