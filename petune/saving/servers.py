"""What each server accepts of an adapter, as one table: the releases that were read stand beside it.

`serve` writes by it, `played` reads by it, docs/serving.md is it in words. A server that changes its mind
changes a row here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

_DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_BLOCK = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NO_TENSORS = {
    "adapter": "no server reads bottleneck adapters",
    "side": "ladders are read by petune alone",
}


@dataclass(frozen=True)
class ExpertNames:
    """What a served class calls the experts of a block, which are `mlp.experts` here, and the linears of each
    of them, which follow its number."""

    at: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True)
class Server:
    """The rules of one server.

    `refuses`: what it does not take, by petune's word for it, in the words of the server where it has some.
    """

    title: str
    version: str
    layout: Literal["peft", "gguf"]
    models: tuple[str, ...]  # model_type of a base whose LoRA it loads
    serve: str  # what to type; {base}, {folder} and {rank} are filled in
    refuses: Mapping[str, str]
    ranks: tuple[int, ...] = ()  # legal ones, rising; none: every rank
    heads: tuple[str, ...] = ()  # modules trained whole that it loads
    only: tuple[str, ...] = ()  # last names of the modules that it tunes; none: every linear
    whole: bool = False  # a last name that is tuned in one block is in the file for all
    together: tuple[tuple[str, ...], ...] = ()  # modules it computes as one: all are in the file, or none
    embeddings: bool = False  # LoRA of the table of tokens
    experts: Mapping[str, ExpertNames] = field(default_factory=dict)  # by model_type
    architectures: Mapping[str, str] = field(default_factory=dict)  # gguf's name, by model_type
    peft_for: tuple[str, ...] = ()  # of these it reads peft's two files though others come as GGUF
    wholes: tuple[str, ...] = ()  # checkpoints of several modalities whose text model it loads LoRA for


_GGUF = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}

SERVERS: Mapping[str, Server] = {
    "vllm": Server(
        "vLLM",
        "0.33",
        "peft",
        (*_DECODERS, "qwen3_moe", "mixtral"),
        "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned={folder}",
        _NO_TENSORS
        | {
            "dora": "vLLM does not yet support DoRA.",
            "ia3": "its PEFTHelper reads LoRA alone",
            "bias": "Adapter bias is not supported.",
            "heads": "modules_to_save is taken for classifier and score alone, of a base that has them",
            "token_rows": "tensors of trainable tokens are no LoRA weights",
            "Conv1D": "unsupported LoRA weight: the layer is none of its linears",
            "experts": "its class has is_3d_moe_weight, or no get_expert_mapping one by one",
        },
        ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
        heads=("classifier", "score"),
        embeddings=True,
        experts={
            "qwen3_moe": ExpertNames("mlp.experts", "gate_proj", "up_proj", "down_proj"),
            "mixtral": ExpertNames("block_sparse_moe.experts", "w1", "w3", "w2"),
        },
        wholes=("gemma3", "mistral3"),
    ),
    "sglang": Server(
        "SGLang",
        "0.5.23",
        "peft",
        _DECODERS,
        "python -m sglang.launch_server --model-path {base} --max-lora-rank {rank}"
        " --lora-paths tuned={folder}",
        _NO_TENSORS
        | {
            "dora": "the flag use_dora is refused",
            "ia3": "peft_type must be lora",
            "bias": "biases in the file are ignored",
            "heads": "modules_to_save is ignored",
            "token_rows": "added tokens are refused",
            "Conv1D": "the layer is none of its linears",
            "experts": "petune writes no LoRA of experts for it, whose names of peft's it drops unsaid",
        },
        whole=True,
        together=_FUSED,
        embeddings=True,
    ),
    "llamacpp": Server(
        "llama.cpp",
        "convert_lora_to_gguf of November 2026",
        "gguf",
        _DECODERS,
        "llama-server -m BASE.gguf --lora {folder}/adapter.gguf",
        _NO_TENSORS
        | {
            "dora": "Not a lora_A or lora_B tensor: lora_magnitude_vector",
            "ia3": "Not a lora_A or lora_B tensor: ia3_l",
            "bias": "Not a lora_A or lora_B tensor: bias",
            "heads": "Embeddings is present in the adapter, or another module that is saved whole",
            "token_rows": "Embeddings is present in the adapter: new tokens",
            "embedding": "petune writes no LoRA of the table of tokens as GGUF",
            "tied": "the base in GGUF has no output.weight where the head is tied (#9065)",
            "Conv1D": "petune writes LoRA of linears alone as GGUF",
            "experts": "petune writes LoRA of linears alone as GGUF",
        },
        architectures=_GGUF,
        wholes=("gemma3",),
    ),
    "ollama": Server(
        "Ollama",
        "August 2026",
        "gguf",
        _DECODERS,
        "ollama create tuned -f {folder}/Modelfile",
        _NO_TENSORS
        | {
            "dora": "unsupported tensor: lora_magnitude_vector",
            "ia3": "unsupported tensor: ia3_l",
            "bias": "biases are no part of an ADAPTER",
            "heads": "modules_to_save is no part of an ADAPTER",
            "token_rows": "added tokens are no part of an ADAPTER",
            "embedding": "the table of tokens is no part of an ADAPTER",
            "only": "an ADAPTER tunes the linears of blocks alone",
            "Conv1D": "an ADAPTER tunes the linears of blocks alone",
            "experts": "an ADAPTER tunes the linears of blocks alone",
        },
        only=_BLOCK,
        architectures=_GGUF,
        peft_for=("llama",),
    ),
}
ALIASES = {"gguf": "llamacpp"}  # other words for a server
