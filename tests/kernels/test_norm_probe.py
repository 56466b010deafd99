"""A norm is known by what it computes, whatever its class and its attributes say."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from petune.kernels.norm_probe import computes, rms_offset


class Halved(Gemma3RMSNorm):
    """What its parent computes, halved."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class OtherEpsilon(LlamaRMSNorm):
    """Reads another epsilon than the one it shows."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 2 * self.variance_epsilon))


PROBED = {
    "Llama's": (LlamaRMSNorm(8), 0.0),
    "Gemma's": (Gemma3RMSNorm(8), 1.0),
    "Gemma's, of a single column": (Gemma3RMSNorm(1), 1.0),
    "in bf16 on no device": (Gemma3RMSNorm(8).to("meta", torch.bfloat16), 1.0),
    "torch's": (nn.RMSNorm(8, eps=1e-6), 0.0),
    "torch's without an epsilon": (nn.RMSNorm(8), None),
    "without a weight": (nn.RMSNorm(8, eps=1e-6, elementwise_affine=False), None),
    "another epsilon": (OtherEpsilon(8), None),
    "halved": (Halved(8), None),
    "a LayerNorm": (nn.LayerNorm(8), None),
    "a LayerNorm without a bias": (nn.LayerNorm(8, bias=False), None),
    "a LayerNorm without a weight": (nn.LayerNorm(8, elementwise_affine=False), None),
    "Command R+'s, of heads": (CohereLayerNorm((3, 8)), None),
    "a linear": (nn.Linear(8, 8, bias=False), None),
}


@pytest.mark.parametrize("what", PROBED)
def test_a_norm_is_known_by_what_it_computes(what: str) -> None:
    module, offset = PROBED[what]
    before = [value.clone() for value in module.parameters() if not value.is_meta]
    assert rms_offset(module) == offset
    assert computes(module, "layer") == (what in ("a LayerNorm", "a LayerNorm without a bias"))
    assert all(torch.equal(*both) for both in zip(before, module.parameters(), strict=False))


class Scaled(LlamaRMSNorm):
    """Multiplies by what its attributes say; one of them is no plain value."""

    def __init__(self, times: float, more: list[float]) -> None:
        super().__init__(8)
        self.times, self.more = times, more

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.times * (self.more or [1.0])[0] * (1 if self.training else 2)


def test_what_was_found_of_a_norm_is_not_said_of_one_with_other_attributes() -> None:
    for more in ([], [2.0], []):  # which are never remembered
        assert computes(Scaled(1.0, more), "rms") == (not more)
    plain = [LlamaRMSNorm(8, eps=eps) for eps in (1e-6, 1e-6, 1e-3)]
    assert all(computes(one, "rms") for one in plain)

    class Plain(Scaled):
        more = cast("Any", None)

        def __init__(self, times: float) -> None:
            LlamaRMSNorm.__init__(self, 8)  # type: ignore[no-untyped-call]  # transformers'
            self.times = times

    assert [computes(Plain(times), "rms") for times in (1.0, 3.0, 1.0)] == [True, False, True]
    assert not computes(Plain(1.0).eval(), "rms")


class OneRow(CohereLayerNorm):
    """Scales all heads by the weights of the first."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = nn.functional.layer_norm(x, x.shape[-1:], self.weight[0], eps=self.variance_epsilon)
        return normed


def test_a_norm_with_weights_for_each_head_is_known_by_what_it_computes() -> None:
    asked = [CohereLayerNorm((3, 8)), CohereLayerNorm((1, 8)), OneRow((3, 8)), CohereLayerNorm(8)]
    assert [computes(module, "layer", each=True) for module in asked] == [True, True, False, False]
    assert not computes(asked[0], "rms", each=True)
