"""Fused blocks over DoRA, (IA)^3 and MiSS against peft: logits, every gradient, three steps of AdamW, and
files both ways, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.kernels.fused_pairs import blocks
from tests.methods import peft_twins
from tests.methods.peft_twins import assert_trains_as_peft

NAMES = ("llama-causal", "bert-classify", "t5-seq2seq", "bart-seq2seq", "gemma3-causal")
METHODS: dict[str, dict[str, Any]] = {"dora": {"r": 4}, "ia3": {}, "miss": {"r": 12}}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("method", METHODS)
def test_fused_blocks_train_as_peft_does(
    method: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_twins, "CLOSE", 1e-6)
    tuned = assert_trains_as_peft(name, tmp_path, method, kernels="reference", **METHODS[method])
    assert blocks(tuned), "nothing was fused"
