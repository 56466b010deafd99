"""Whisper: mBART's pre-norm encoder and decoder, behind two convolutions over the features of a sound, which
leave half as many tokens as there are frames (Radford et al. 2022, arXiv:2212.04356)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from petune.models import bart
from petune.models.spec import Config, Signal


def sound(config: Config) -> tuple[int, ...]:
    """Features and frames of a sound; there are no shorter ones."""
    return (config.num_mel_bins, 2 * config.max_source_positions)


def tokens(config: Config, shape: Sequence[int]) -> int:
    """Tokens of a sound."""
    return (shape[-1] + 1) // 2


FAMILY = replace(
    bart.MBART,
    name="whisper",
    heads=(),
    fixed=("encoder.embed_positions.weight",),  # sinusoids
    signal=Signal("audio", "input_features", ("conv1", "conv2"), sound, tokens),
)
