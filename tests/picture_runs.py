"""A tiny random model of pictures with its image processor, and red and blue pictures to tell apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

SIZE = {"height": 12, "width": 12}
WIDTHS: dict[str, Any] = {
    "image_size": 12,
    "patch_size": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CLASSES = ("red", "blue")


def write_vit(folder: Path, **processor: Any) -> Path:
    """A backbone without a head, as pretrained ones are, with the settings of its processor."""
    torch.manual_seed(0)
    ViTModel(ViTConfig(**WIDTHS), add_pooling_layer=False).save_pretrained(folder)
    ViTImageProcessorPil(**({"size": SIZE} | processor)).save_pretrained(folder)
    return folder


def picture(number: int) -> Any:
    """Noise with one strong colour, of a size that varies; even numbers are red."""
    draw = np.random.default_rng(number)
    pixels = draw.integers(0, 80, (16 + number % 3, 20, 3), dtype=np.uint8)
    pixels[..., 2 * (number % 2)] += 150
    return Image.fromarray(pixels)


def write_pictures(folder: Path, count: int = 24) -> Path:
    """Pictures as files, and rows.jsonl with the path and the class of each."""
    (folder / "pictures").mkdir(parents=True)
    rows = []
    for number in range(count):
        picture(number).save(folder / "pictures" / f"{number}.png")
        rows.append({"image": f"pictures/{number}.png", "label": CLASSES[number % 2]})
    place = folder / "rows.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return place
