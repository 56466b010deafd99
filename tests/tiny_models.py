"""Tiny models of four families, tuned and stirred, for tests of the folders that tunings are saved to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.bart import BartConfig, BartForConditionalGeneration, BartForSequenceClassification
from transformers.models.bert import BertConfig, BertForSequenceClassification
from transformers.models.llama import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.t5 import T5Config, T5ForConditionalGeneration
from transformers.models.t5gemma import T5GemmaForConditionalGeneration

from petune.methods import tuned_state, wrap

SMALL = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 11, 12, 2]])
_DECODES = T5ForConditionalGeneration | BartForConditionalGeneration | T5GemmaForConditionalGeneration


def bert(seed: int = 0, labels: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(**SMALL, **sizes, num_labels=labels)).eval()


def bart_config() -> BartConfig:
    sizes = {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 64))
    }
    return BartConfig(**SMALL, **sizes, d_model=32, decoder_start_token_id=2, forced_eos_token_id=None)


def bart(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BartForConditionalGeneration(bart_config()).eval()


def bart_classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return BartForSequenceClassification(bart_config()).eval()


def t5(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**SMALL, **sizes, decoder_start_token_id=0)).eval()


def llama_config(tie: bool = False) -> LlamaConfig:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaConfig(**SMALL, **sizes, tie_word_embeddings=tie, num_labels=3)


def llama(seed: int = 0, tie: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(tie)).eval()


def llama_classifier(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return LlamaForSequenceClassification(llama_config()).eval()


MODELS = {f.__name__: f for f in (bert, bart, bart_classifier, t5, llama, llama_classifier)}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"r": 4},
    "adapter": {"reduction": 4},
    "side": {"reduction": 2},
}


def logits(model: nn.Module, tuned: bool = True) -> Tensor:
    extra = {"decoder_input_ids": IDS} if isinstance(model, _DECODES) else {}
    with torch.no_grad():
        return model(input_ids=IDS, **extra).logits


def stir(model: nn.Module) -> nn.Module:
    """Give every tuned tensor a value no initialisation has."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in tuned_state(model).values():
            value += 0.1 * torch.randn(value.shape, generator=generator)
    return model.eval()


def tuned(make: Any, method: str = "lora", **settings: Any) -> nn.Module:
    return stir(wrap(make(), method=method, **(METHODS[method] | settings)))


def edit(folder: Path, change: Any, file: str) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
