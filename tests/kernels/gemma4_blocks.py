"""What tests of fused blocks of Gemma 4 share: methods, a norm in any dtype, factors, batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.memory.buffers import kept_bytes
from petune.kernels.memory.policy_hook import shape_of
from petune.methods import wrap
from petune.models import family_of
from tests.kernels import own_blocks
from tests.kernels.fused_pairs import stand_on
from tests.methods.zoo import batch, tiny

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full", {}),
    "lora": ("lora", {"r": 4, "dropout": 0.3}),
    "lora of a rank too large to fold": ("lora", {"r": 40}),
    "q and down": ("lora", {"r": 4, "targets": ["q", "down"]}),
    "dora": ("dora", {"r": 4}),
    "ia3": ("ia3", {"targets": ["q", "k", "o", "down"]}),
    "miss": ("miss", {"r": 4, "dropout": 0.3}),
    "adapter": ("adapter", {"reduction": 4, "dropout": 0.3}),
    "pfeiffer": ("adapter", {"reduction": 4, "kind": "pfeiffer"}),
    "parallel": ("adapter", {"reduction": 4, "kind": "parallel"}),
}


def wide_norm(self: Any, x: Tensor) -> Tensor:
    """Gemma's norm in the dtype of its input; its own goes through float32."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return y * self.weight if self.with_scale else y


wide_norm.__module__ = Gemma4RMSNorm.__module__  # or a block with it is a stranger's


def blocks_of(model: Any) -> Any:
    """The blocks of a model, fused or not."""
    return getattr(model.model.layers, "blocks", model.model.layers)


def set_factors(*models: Any, by: float = 1.0) -> None:
    """Have every block end with a number of its own."""
    for model in models:
        for at, block in enumerate(blocks_of(model)):
            block.layer_scalar.fill_(by * (0.6 + at))


def rows_of(name: str, kind: str) -> dict[str, Any]:
    """A batch of padded rows, of two samples each, of one row, or of equal length without a mask."""
    if kind == "packed":
        return own_blocks.packed(name)
    inputs = batch(name, length=9, rows=1 if kind == "one row" else 3)
    return inputs if kind == "padded" else {key: inputs[key] for key in inputs if key != "attention_mask"}


def assert_bytes_are_foretold(name: str, method: str, held: Callable[[Any, int], float]) -> None:
    """What blocks keep of a token, which `held` measures of a model's block of a number, is what is foretold
    on every rung."""
    kind, settings = METHODS[method]
    undropped = {key: value for key, value in settings.items() if key != "dropout"}
    model = wrap(tiny(name, max_position_embeddings=512), kind, **undropped)
    fuse(model, family_of(model), "reference")
    for keep in own_blocks.LEVELS:
        stand_on(model, Rung(keep))
        for number, block in enumerate(fused_blocks(model.train())):
            shape = shape_of(block.spec)
            sums = 0 if keep == "input" else 4 * shape.heads  # which attention of torch's does not keep
            assert kept_bytes(shape, keep) - sums == pytest.approx(held(model, number), rel=0.02), keep


def assert_weights_are_counted(name: str) -> None:
    """The cost model has as many numbers of each block as its matrices."""
    model = wrap(tiny(name), "full")
    fuse(model, family_of(model), "reference")
    for block in fused_blocks(model):
        expected = sum(value.numel() for value in block.parameters() if value.dim() == 2)
        assert shape_of(block.spec).parameters == expected
