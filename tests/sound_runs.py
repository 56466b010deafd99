"""A tiny random model of sounds with its tokenizer and feature extractor, and tones of two pitches to tell
apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from petune.tasks.sounds import wav
from tests.small_runs import tokenizer

RATE, TEXTS = 16000, ("red sun", "blue sea")


def write_whisper(folder: Path, **changes: Any) -> Path:
    """A model whose window is one second, of 8 features."""
    torch.manual_seed(0)
    words = tokenizer()
    words.save_pretrained(folder)
    config = WhisperConfig(
        vocab_size=len(words),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=50,
        max_target_positions=16,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        decoder_start_token_id=words.bos_token_id,
        begin_suppress_tokens=None,
        init_std=0.1,
        **changes,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    return folder


def tone(number: int, seconds: float = 0.5) -> np.ndarray[Any, Any]:
    """A tone with noise, high for odd numbers."""
    at = np.arange(int(RATE * seconds)) / RATE
    noise = np.random.default_rng(number).normal(0, 0.02, len(at))
    return (0.5 * np.sin(2 * np.pi * (300, 2400)[number % 2] * at) + noise).astype(np.float32)


def write_sounds(folder: Path, count: int = 24) -> Path:
    """Tones as wave files, and rows.jsonl with the path and the text of each."""
    (folder / "sounds").mkdir(parents=True)
    rows = []
    for number in range(count):
        (folder / "sounds" / f"{number}.wav").write_bytes(wav(tone(number), RATE))
        rows.append({"audio": f"sounds/{number}.wav", "text": TEXTS[number % 2]})
    place = folder / "rows.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return place
