"""Attention forward and backward as plain functions without autograd, in the fastest form that the device has.

        out = softmax(scale q k^T) v        q [m, heads, d], k and v [m, kv_heads, d] -> out [m, heads, d]

m tokens are `batch` rows of equal length, or segments one after the other (petune.kernels.segments). Rows and heads may be strided, as
views of one q | k | v matrix are; the last dim is dense. Where kv_heads < heads, each serves heads / kv_heads of them in a row. Five forms,
chosen once per device and kind of call by `choose`:

    cudnn    rows of equal length; about twice as fast as flash on Hopper. cuDNN plans each new (batch, length) for tens of ms
    flash    rows of equal length (Dao 2023, arXiv:2307.08691)
    varlen   segments, the same kernels
    triton   kernels of our own: segments of narrow heads on Hopper, in 0.50 to 0.94 of flash's time there (benchmarks/RESULTS.md), and
             dropout of the probabilities by index, which no library draws, for rows and segments
    sdpa     whatever else: torch's scaled_dot_product_attention, its backward by computing the forward again

The file is a little over 300 lines long because the forms and the choice between them rest on the same few facts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.attention import probabilities
from petune.dropout import Drop, dropped_attention
from petune.kernels.ops import refusal
from petune.kernels.segments import Segments
from petune.log import say

Backend = Literal["cudnn", "flash", "varlen", "triton", "sdpa"]
Kept = tuple[Any, ...]  # what a forward leaves for its backward: log-sum-exp, random state; nothing where `sdpa` computes again
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v
NARROW, SHORT = 64, 1024  # columns of a head and tokens of a segment up to which our kernels were measured to be ahead of flash

aten: Any = torch.ops.aten


@dataclass(frozen=True, eq=False)
class How:
    """One call's attention. batch: rows of equal length; not read with segments. causal: no query sees a later key of its row or segment.

    mask: [batch, 1 | heads, 1 | q, k], bool (True: attend) or added to the scaled scores; it says all, and `causal` is not read. It gets
    no gradient. drop: what of the probabilities drops out, by the places [m] of the tokens in the whole batch.
    """

    causal: bool
    scale: float
    batch: int
    segments: Segments | None = None
    mask: Tensor | None = None
    backend: Backend = "sdpa"
    drop: Drop | None = None


# ------------------------------------------------------------------ which form


@dataclass(frozen=True)
class Choice:
    """A form and, in words, why it is this one."""

    backend: Backend
    reason: str


def choose(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    tokens: int,
    *,
    segmented: bool = False,
    masked: bool = False,
    drops: bool = False,
    plain: bool = False,
) -> Choice:
    """The form for rows of `tokens` tokens, or segments of at most so many, on `device`; asking again for the same kind costs a look-up.

    drops: probabilities drop out. plain: no kernel of our own. On a CUDA device each form is told of when it is first chosen.
    """
    if drops:
        refused = "plain torch is asked for" if plain else _no_triton(device, dtype, head_dim, masked)
        found = Choice("triton", "dropout of attention") if refused is None else Choice("sdpa", refused)
    else:
        ours, deterministic = segmented and tokens <= SHORT and not plain, torch.are_deterministic_algorithms_enabled()
        found = _chosen(device, dtype, head_dim, tokens == 1, segmented, ours, masked, deterministic)
    if device.type == "cuda":
        _tell(found)
    return found


@cache
def _tell(choice: Choice) -> None:
    """Once in a process."""
    say(f"kernels: attention by {choice.backend}: {choice.reason}")


@cache
def _chosen(
    device: torch.device, dtype: torch.dtype, head_dim: int, single: bool, segmented: bool, ours: bool, masked: bool, deterministic: bool
) -> Choice:
    refused = _no_flash(device, dtype, head_dim, masked)
    if refused is not None:
        return Choice("sdpa", refused)
    if segmented:
        fast = ours and head_dim <= NARROW and torch.cuda.get_device_capability(device)[0] == 9
        if fast and _no_triton(device, dtype, head_dim, masked) is None:
            return Choice("triton", "short segments of narrow heads on Hopper")
        return Choice("varlen", "segments of unequal length")
    refused = _no_cudnn(device, head_dim, single, deterministic)
    return Choice("cudnn", "rows of equal length on a device that cuDNN is best on") if refused is None else Choice("flash", refused)


def _no_flash(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    """Why neither flash attention nor cuDNN can be used, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no CUDA device: {device.type}"
    if masked:
        return "a mask"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} has no fused kernel"
    if head_dim % 8 or head_dim > 192:  # past 192 some devices lack a backward
        return f"head dim {head_dim} is no multiple of 8 up to 192"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the device is older than sm_80"
    return None if torch.backends.cuda.is_flash_attention_available() else "torch was built without flash attention"


@cache
def _no_triton(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    """Why our kernels cannot be used here, or None."""
    if masked:
        return "a mask"
    if head_dim % 8 or head_dim > 128:
        return f"head dim {head_dim} is no multiple of 8 up to 128"
    return refusal(device, dtype)


def _no_cudnn(device: torch.device, head_dim: int, single: bool, deterministic: bool) -> str | None:
    """Why flash attention is used and not cuDNN, or None."""
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "cuDNN is no faster on this device"
    if head_dim > 128:
        return f"cuDNN takes head dims up to 128, not {head_dim}"
    if single:
        return "cuDNN takes no rows of one token"
    if deterministic:
        return "cuDNN's backward pass is not deterministic"
    return None if torch.backends.cudnn.is_available() else "torch was built without cuDNN"


# ------------------------------------------------------------------ the two functions


def forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Kept]:
    """(out [m, heads, d], dense; what `backward` needs beside it)."""
    if not len(q):
        return torch.empty_like(q, memory_format=torch.contiguous_format), ()
    return _FORMS[how.backend][0](q, k, v, how)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept, how: How) -> Gradients:
    """(dq [m, heads, d], dk, dv [m, kv_heads, d]) for dout [m, heads, d]; `out` and `kept` as `forward` gave them."""
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    return _FORMS[how.backend][1](dout, q, k, v, out, kept, how)


# ------------------------------------------------------------------ cudnn


def _cudnn(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Kept]:
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *_by_head(how.batch, q, k, v), None, True, 0.0, how.causal, False, scale=how.scale
    )
    return _by_token(out), (lse, seed, offset)


def _cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept, how: How) -> Gradients:
    length = len(q) // how.batch
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *_by_head(how.batch, dout, q, k, v, out), *kept, None, None, None, length, length, 0.0, how.causal, scale=how.scale
    )
    return _by_token(dq), _by_token(dk), _by_token(dv)


def _by_head(batch: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[m, heads, d] as views [batch, heads, length, d]."""
    return tuple(x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in tensors)


def _by_token(x: Tensor) -> Tensor:
    """[batch, heads, length, d] as [m, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)


# ------------------------------------------------------------------ flash and varlen


def _flash(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Kept]:
    tensors, starts, longest = _laid_out(how, q, k, v)
    out, lse, state, unused, _ = aten._flash_attention_forward(
        *tensors, starts, starts, longest, longest, 0.0, how.causal, False, scale=how.scale
    )
    return out.view_as(q), (lse, state, unused)


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept, how: How) -> Gradients:
    tensors, starts, longest = _laid_out(how, dout, q, k, v, out)
    lse, state, unused = kept
    dq, dk, dv = aten._flash_attention_backward(
        *tensors, lse, starts, starts, longest, longest, 0.0, how.causal, state, unused, scale=how.scale
    )
    return dq.view_as(q), dk.view_as(k), dv.view_as(v)


def _laid_out(how: How, *tensors: Tensor) -> tuple[Sequence[Tensor], Tensor | None, int]:
    """[m, heads, d] as the kernels take them: as they are beside the segments' starts, else [batch, length, heads, d]; the longest row."""
    if how.segments is not None:
        return tensors, how.segments.starts, how.segments.longest
    return [x.view(how.batch, -1, *x.shape[1:]) for x in tensors], None, len(tensors[0]) // how.batch


# ------------------------------------------------------------------ triton


def _triton(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Kept]:
    out, lse = _kernels().forward(q, k, v, *_starts(how, q), how.causal, how.scale, how.drop)
    return out, (lse,)


def _triton_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept, how: How) -> Gradients:
    found: Gradients = _kernels().backward(dout, q, k, v, out, kept[0], *_starts(how, q), how.causal, how.scale, how.drop)
    return found


@cache
def _kernels() -> Any:
    """Ours, imported where they can run."""
    return import_module("petune.kernels.triton.attention")


def _starts(how: How, q: Tensor) -> tuple[Tensor, int]:
    """(where rows or segments begin, the longest of them)."""
    if how.segments is not None:
        return how.segments.starts, how.segments.longest
    length = len(q) // how.batch
    return torch.arange(0, len(q) + 1, length, dtype=torch.int32, device=q.device), length


# ------------------------------------------------------------------ sdpa


def _sdpa(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, Kept]:
    with torch.no_grad():
        return _attended(q, k, v, how).contiguous(), ()


def _sdpa_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept, how: How) -> Gradients:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        again = _attended(q, k, v, how)
    return cast("Gradients", torch.autograd.grad(again, (q, k, v), dout))


def _attended(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """out [m, heads, d] of differentiable operations: all rows at once, or all segments of one length."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if how.segments is None:
        return _rows_attended(q, k, v, how)
    assert how.mask is None, "segments say who attends to whom"
    places = [of_one_length.flatten() for of_one_length in how.segments.by_length]
    outs = [
        _rows_attended(q[own], k[own], v[own], replace(how, batch=len(of_one_length), drop=_at(how.drop, own)))
        for own, of_one_length in zip(places, how.segments.by_length, strict=True)
    ]
    return torch.cat(outs)[torch.cat(places).argsort()]


def _at(drop: Drop | None, own: Tensor) -> Drop | None:
    """The draw for some of the tokens."""
    return None if drop is None else drop._replace(numbers=drop.numbers[own])


def _rows_attended(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """Of `how.batch` rows of equal length, [m, heads, d] each."""
    q, k, v = _by_head(how.batch, q, k, v)
    causal = how.causal and how.mask is None
    if how.drop is None:
        return _by_token(F.scaled_dot_product_attention(q, k, v, attn_mask=how.mask, is_causal=causal, scale=how.scale))
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril() if causal else how.mask
    every = probabilities(q @ k.transpose(-1, -2) * how.scale, mask, None).to(v.dtype)
    draws = [how.drop._replace(numbers=row) for row in how.drop.numbers.view(how.batch, -1)]
    return _by_token(torch.stack([dropped_attention(one, draw) for one, draw in zip(every, draws, strict=True)]) @ v)


_FORMS: dict[Backend, tuple[Callable[..., tuple[Tensor, Kept]], Callable[..., Gradients]]] = {
    "cudnn": (_cudnn, _cudnn_backward),
    "flash": (_flash, _flash_backward),
    "varlen": (_flash, _flash_backward),
    "triton": (_triton, _triton_backward),
    "sdpa": (_sdpa, _sdpa_backward),
}
