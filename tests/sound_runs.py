"""A tiny random model of sounds with its tokenizer and feature extractor, and tones of two pitches to tell
apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS

from petune.tasks.sounds import wav
from tests.small_runs import tokenizer

RATE, TEXTS = 16000, ("red sun", "blue sea")


def write_whisper(folder: Path, words: Any = None, **changes: Any) -> Path:
    """A model whose window is one second, of 8 features. words: its tokenizer, if not the one of words."""
    torch.manual_seed(0)
    words = words or tokenizer()
    words.save_pretrained(folder)
    settings = dict(
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
    )
    model = WhisperForConditionalGeneration(WhisperConfig(**(settings | changes)))
    if words.eos_token_id == words.pad_token_id:  # torch makes a row of zeros of a token that pads
        model.model.decoder.embed_tokens.weight.data[words.eos_token_id].normal_(std=model.config.init_std)
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    return folder


def whisper_tokenizer() -> WhisperTokenizer:
    """Whisper's own tokenizer, with a token of every language but the last, as most checkpoints have them,
    and one for each word of the texts."""
    tokens, merges = sorted(ByteLevel.alphabet()), []
    for word in ("red", "\u0120sun", "blue", "\u0120sea"):
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
            tokens.append(word[: end + 1])
    languages = [f"<|{code}|>" for code in list(LANGUAGES)[:-1]]
    tasks = [f"<|{name}|>" for name in TASK_IDS]
    return WhisperTokenizer(
        vocab={token: at for at, token in enumerate(dict.fromkeys(tokens))},
        merges=list(dict.fromkeys(merges)),
        extra_special_tokens=["<|startoftranscript|>", *languages, *tasks, "<|notimestamps|>"],
        pad_token="<|endoftext|>",
    )


def write_multilingual(folder: Path, several: bool | None = True) -> Path:
    """A model like Whisper's of many languages. several: what it says of itself; None: nothing."""
    words = whisper_tokenizer()
    begins = words.convert_tokens_to_ids("<|startoftranscript|>")
    write_whisper(folder, words, decoder_start_token_id=begins, init_std=0.4)
    (folder / "generation_config.json").unlink()
    if several is not None:
        GenerationConfig(
            is_multilingual=several,
            lang_to_id={f"<|{code}|>": begins + at for at, code in enumerate(list(LANGUAGES)[:-1], 1)},
            task_to_id={name: words.convert_tokens_to_ids(f"<|{name}|>") for name in TASK_IDS},
            no_timestamps_token_id=words.convert_tokens_to_ids("<|notimestamps|>"),
            decoder_start_token_id=begins,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        ).save_pretrained(folder)
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
