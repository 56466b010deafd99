"""EuroBERT: Llama's blocks as an encoder, which sees all of a text."""

from __future__ import annotations

from dataclasses import replace

from petune.models import bert, llama, modernbert

ATTENTION = replace(llama.BLOCK[0], core=replace(llama.ATTENTION, causal=False))
FAMILY = replace(
    bert.FAMILY,
    name="eurobert",
    stacks={"encoder": replace(llama.RULE, sublayers=(ATTENTION, llama.BLOCK[1]))},
    heads=("dense", "classifier"),
    shape=llama.shape,
    narrow=llama.narrow,
    fresh=(),
    pools=modernbert.pools,
)
