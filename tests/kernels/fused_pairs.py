"""Tiny models tuned twice, with fused blocks and without, and the comparison of their losses and
gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import petune
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse
from petune.models import family_of
from petune.models.copied import copied

SIZES: dict[str, Any] = dict(
    vocab_size=50, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4
)
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=8)
# Sliding and full attention in turn, a window shorter than the texts, a scale that is not of the width of a
# head
GEMMA = GROUPED | dict(
    query_pre_attn_scalar=12, sliding_window=4, sliding_window_pattern=2, initializer_range=0.1
)
BERT = SIZES | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**GROUPED, "head_dim": 8})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GEMMA)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**BERT)),
}

METHODS: dict[str, dict[str, Any]] = {
    "lora": dict(method="lora", r=4),
    "lora of a rank too large to fold": dict(method="lora", r=40),
    "lora on q and v": dict(method="lora", r=4, targets=["q", "v"]),
    "lora on the mlp": dict(method="lora", r=3, targets=["gate", "up", "down"]),
    "full": dict(method="full"),
    "adapter": dict(method="adapter", reduction=4),
    "adapter beside": dict(method="adapter", kind="parallel", reduction=4, scale=3.0),
    "adapter of sums": dict(method="adapter", kind="pfeiffer", reduction=4, scale=2.0),
    "dora": dict(method="dora", r=4),
    "dora on q and v": dict(method="dora", r=4, targets=["q", "v"]),
    "ia3": dict(method="ia3"),
    "miss": dict(method="miss", r=12),
}
# what begins as zero, or as what changes nothing
MOVED = ("lora_B", "adapter_", "magnitude", "ia3_l", "miss_block")

# what a batch of texts is made of
BATCHES: dict[str, Callable[[dict[str, Tensor]], dict[str, Any]]] = {
    "padded": lambda inputs: inputs,
    "padded on the left": lambda inputs: {
        name: value.flip(1) if value.dim() > 1 else value for name, value in inputs.items()
    },
    "whole rows": lambda inputs: inputs | {"attention_mask": torch.ones_like(inputs["attention_mask"])},
    "packed": lambda inputs: {
        "input_ids": inputs["input_ids"],
        "labels": inputs["input_ids"],
        "position_ids": torch.tensor([[*range(6), *range(3)]] * 3),
        "use_cache": False,
    },
}


_made: dict[str, tuple[nn.Module, Tensor]] = {}


def fresh(name: str, settings: dict[str, Any]) -> nn.Module:
    """A tuned model with updates that are not zero, and the random stream as its making leaves it: a copy,
    for a test asks the same one again and again, and to make it takes five times as long."""
    key = f"{name} {settings} {torch.get_default_dtype()}"
    if key not in _made:
        if len(_made) == 16:
            del _made[next(iter(_made))]
        _made[key] = _tuned(name, settings), torch.get_rng_state()
    made, stream = _made[key]
    torch.set_rng_state(stream)
    return copied(made)


def _tuned(name: str, settings: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    plain = MODELS[name]()
    targets = settings.get("targets")
    if name == "bert" and targets and "gate" in targets:
        settings = settings | {"targets": [role for role in targets if role != "gate"]}
    petune.wrap(plain, **settings, kernels="off")
    with torch.no_grad():
        for path, value in plain.named_parameters():
            if any(part in path for part in MOVED):
                value.add_(torch.randn_like(value), alpha=0.1)
            if name == "gemma3" and path.endswith("norm.weight"):  # which begin at zero: a scale of one
                value.normal_(std=0.3)
    return plain


def pair(name: str, settings: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """The same tuned model twice: fused, with updates that are not zero, and not."""
    plain = fresh(name, settings)
    fused = copied(plain)
    assert fuse(fused, family_of(fused), "reference")
    return fused.train(), plain.train()


def blocks(model: nn.Module) -> list[FusedBlock]:
    return [module for module in model.modules() if isinstance(module, FusedBlock)]


def stand_on(model: nn.Module, rung: Rung, tile: int | None = None) -> None:
    """Let every block keep the same, whatever the governor says."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if type(hook).__name__ == "Governor":
                del module._forward_pre_hooks[key]
    for block in blocks(model):
        block.spec.rung, block.spec.tile = rung, tile


def batch(name: str, padded: bool = True) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 6:] = 0
    labels = torch.tensor([0, 2]) if name == "bert" else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    extra = {} if isinstance(model, BertForSequenceClassification) else {"use_cache": False}
    model.zero_grad()
    loss = model(**inputs, **extra).loss
    loss.backward()
    return loss.detach(), {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }


@contextmanager
def terms_of_zeros(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """By name: the terms [tokens, width] of the gradients that are zero in exact arithmetic, once a backward
    pass has run.

    BERT's key bias is one: it adds the same to every score of a query, which softmax does not see. (Rotary
    keys do see theirs.)
    """
    found: dict[str, Tensor] = {}
    hooks = [
        module.register_full_backward_hook(
            lambda module, into, out, name=f"{name}.bias": found.__setitem__(
                name, out[0].detach().flatten(0, -2)
            )
        )
        for name, module in model.named_modules()
        if name.endswith("attention.self.key")
    ]
    yield found
    for hook in hooks:
        hook.remove()


def assert_alike(fused: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], tolerance: float) -> None:
    (loss, found) = gradients(fused, inputs)
    with terms_of_zeros(plain) as terms:
        expected, wanted = gradients(plain, inputs)
    torch.testing.assert_close(loss.float(), expected.float(), rtol=tolerance, atol=0)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if name in terms:  # a sum of n terms is off by less than n eps times the sum of their magnitudes
            rounding = len(terms[name]) * torch.finfo(value.dtype).eps * terms[name].abs().sum(0)
            assert bool((found[name].abs() <= rounding).all()) and bool((value.abs() <= rounding).all()), name
        else:
            assert float((found[name] - value).abs().max()) <= tolerance * float(value.abs().max()), name
