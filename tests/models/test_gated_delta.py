"""The gated delta rule in chunks beside the rule itself, token by token, and beside transformers', and the
convolution beside torch's, in float64: values and gradients, of each sample of a row as of it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from petune.models.gated_delta import CHUNK, causal_convolution, gated_delta_rule

ROWS, HEADS, KEY_HEADS, KEYS, VALUES = 2, 4, 2, 3, 5
# lengths of the samples of a row: ends inside chunks of 4, at their ends, several in one, one over several
SPLITS = {"one": (11,), "inside": (3, 6, 2), "at ends": (4, 4, 3), "short": (1, 1, 1, 2, 6), "long": (9, 2)}


def numbered(lengths: tuple[int, ...]) -> Tensor:
    """The number of each token's sample, [1, tokens]."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]


def drawn(tokens: int) -> list[Tensor]:
    """q, k, v, g and beta, whose gradients are asked for."""
    draw = torch.Generator().manual_seed(tokens)
    shapes = [(KEY_HEADS, KEYS), (KEY_HEADS, KEYS), (HEADS, VALUES), (HEADS,), (HEADS,)]
    found = [torch.randn(ROWS, tokens, *one, generator=draw, dtype=torch.float64) for one in shapes]
    found[3], found[4] = -F.softplus(found[3]), found[4].sigmoid()
    return [one.requires_grad_() for one in found]


def by_tokens(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule as it is written, from a state of zeros; lengths as transformers has them."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(HEADS // KEY_HEADS, 2) for x in (q, k))
    state, found = q.new_zeros(ROWS, HEADS, KEYS, VALUES), []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * KEYS**-0.5)
    return torch.stack(found, 1)


def gradients(y: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=y.dtype)
    return torch.autograd.grad((y * weights).sum(), inputs)


@pytest.mark.parametrize("chunk", [4, CHUNK])
@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
def test_chunks_give_what_the_rule_gives_for_each_sample_alone(lengths: tuple[int, ...], chunk: int) -> None:
    inputs = drawn(sum(lengths))
    parts = zip(*(one.split(lengths, 1) for one in inputs), strict=True)
    expected = torch.cat([by_tokens(*part) for part in parts], 1)
    found = gated_delta_rule(*inputs, numbered(lengths), chunk)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for own, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert torch.allclose(own, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [70, 2 * CHUNK])
def test_of_one_sample_it_is_transformers_rule(
    tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [one.detach().to(dtype).requires_grad_() for one in drawn(tokens)]
    found, told = gated_delta_rule(*inputs), gated_delta_rule(*inputs, numbered((tokens,)))
    monkeypatch.setattr(torch, "float32", dtype)  # in which transformers computes, whatever it is given
    expected, _ = torch_chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True)
    near = 1e-6 if dtype is not torch.float64 else 1e-12
    assert torch.allclose(found, expected, rtol=0, atol=near) and torch.equal(found, told)
    for own, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert float((own - other).abs().max()) < near * max(1.0, float(other.abs().max()))


class Written(TorchDispatchMode):
    """Counts bytes that operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        values = made if isinstance(made, tuple) else (made,)
        for value, returns in zip(values, function._schema.returns, strict=False):
            views = returns.alias_info is not None and not returns.alias_info.is_write
            self.bytes += 0 if views or not isinstance(value, Tensor) else value.nbytes
        return made


@pytest.mark.parametrize("packed", [False, True])
def test_a_backward_pass_moves_twice_the_bytes_of_half_the_tokens(packed: bool) -> None:
    def moved(tokens: int) -> int:
        samples = (numbered((tokens // 4, tokens // 4 * 3)),) if packed else ()
        y = gated_delta_rule(*drawn(tokens), *samples, chunk=8)
        with Written() as written:
            y.sum().backward()
        return written.bytes

    assert moved(512) == pytest.approx(2 * moved(256), rel=0.01)


@pytest.mark.parametrize("lengths", SPLITS.values(), ids=SPLITS)
def test_convolution_is_torchs_of_each_sample_alone(lengths: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, sum(lengths), 6, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    alone = [F.conv1d(F.pad(part.mT, (3, 0)), weight[:, None], groups=6).mT for part in x.split(lengths, 1)]
    expected = torch.cat(alone, 1)
    found = causal_convolution(x, weight, numbered(lengths))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    for own, other in zip(gradients(found, [x, weight]), gradients(expected, [x, weight]), strict=True):
        assert torch.allclose(own, other, rtol=0, atol=1e-12)
