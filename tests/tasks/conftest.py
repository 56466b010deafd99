"""A byte-level tokenizer and a tiny Llama, made here so that these tests need nothing shipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(*, eos: bool = True, pad: bool = True, bos: bool = True) -> PreTrainedTokenizerFast:
    """One token per byte, after five special ones; the beginning token is put before every text."""
    special = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({token: number for number, token in enumerate([*special, *letters])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(special)
    if bos:
        core.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B:1", special_tokens=[("<s>", 0)]
        )
    names = {"bos_token": "<s>", "eos_token": "</s>" if eos else None, "pad_token": "<pad>" if pad else None}
    return PreTrainedTokenizerFast(
        tokenizer_object=core, **{name: token for name, token in names.items() if token}
    )


@pytest.fixture
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_tokenizer


@pytest.fixture
def make_llama() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    made = byte_tokenizer(bos=False)
    made.chat_template = CHATML
    return made


def tiny_llama(attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=261,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a file of this name and gives its path as text."""

    def write(*rows: object, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write
