"""Models of the demo with their heads, columns, blocks and tokenizers, and a part of their width: what trains
on them is as it is on the real ones, in a tenth of the time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, BertModel

from petune.demo import minilm_folder


def write_narrow_minilm(folder: Path, **changes: Any) -> Path:
    """A random BERT with the heads, columns and blocks of MiniLM, so that its recipes' lists fit, and a
    quarter of its width. `changes` go over its config."""
    real = minilm_folder()
    assert real is not None, "the recipes of BERT need the package of requirements/demo.txt"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(real, **changes)
    config.hidden_size = 8 * config.num_attention_heads
    BertModel(config).save_pretrained(folder)
    for file in real.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(real / "vocab.txt", folder)
    return folder
