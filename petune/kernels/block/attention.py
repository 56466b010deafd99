"""Attention forward and backward as plain functions without autograd, in the fastest form that the device
has.

        out = softmax(cap(scale q k^T) + bias) v        q [m, heads, d], k and v [n, kv_heads, d] -> out [m,
                                                        heads, d]

m queries are `batch` rows of equal length, or segments one after the other (petune.kernels.block.varlen);
keys are the same tokens, or those of another sequence (cross-attention), a row or segment for each of the
queries'. Rows and heads may be strided, as views of one q | k | v matrix are; the last dim is dense. Where
kv_heads < heads, each serves heads / kv_heads of them in a row. Six forms, chosen once per device and kind
of call by `choose`:

    cudnn    rows of equal length; about twice as fast as flash on Hopper. cuDNN plans each new (batch,
             length) for tens of ms
    flash    rows of equal length (Dao 2023, arXiv:2307.08691), sliding windows too
    varlen   segments, the same kernels
    triton   kernels of our own: segments of narrow heads on Hopper, in 0.50 to 0.94 of flash's time there
             (benchmarks/RESULTS.md), and what no library does: dropout of the probabilities by index, a bias
             by distance and its gradient, a soft cap, sinks
    sdpa     whatever else, and what the others mean: torch's scaled_dot_product_attention or its formula, its
             backward by computing the forward again; dense masks and biases are its alone
    ring     of a sequence that is cut across ranks, by whose exchange its keys and values travel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.kernels.block.distance import by_distance, longest_of
from petune.kernels.block.part import AttentionPart
from petune.kernels.block.varlen import Segments, of_rows, paired
from petune.kernels.dispatch import refusal
from petune.log import say
from petune.models.attention import probabilities
from petune.rng.dropout import Drop, dropped_attention

Backend = Literal["cudnn", "flash", "varlen", "triton", "sdpa", "ring"]
# what a forward leaves for its backward: log-sum-exp, random state; nothing where `sdpa` computes again
KeptTensors = tuple[Any, ...]
QkvGradients = tuple[Tensor, Tensor, Tensor]  # of q, k, v
# columns of a head and tokens of a segment up to which our kernels were measured to be ahead of flash
NARROW, SHORT = 64, 1024
# columns of a head that flash has a backward pass for, on devices of these compute capabilities
WIDEST_FLASH = 256
WIDEST = ((8, 0), (9, 0), (10, 0))

aten: Any = torch.ops.aten


@dataclass(frozen=True, eq=False)
class How:
    """One call's attention.

    causal: no query sees a later key of its row or segment; self-attention only, of whose tokens, the keys,
    queries may be the last few. scale: of q k^T. batch: rows of equal length, of queries and of keys; not
    read for a side that has segments. segments: of the queries, and of the keys too where there is no memory.
    memory: segments of the keys of cross-attention, the i-th seen by the queries of the i-th segment or row;
    None where both sides are rows, those of keys of any length.
    mask: [batch, 1 | heads, 1 | q, k], bool (True: attend) or added to the scores, rows of equal length only;
    it says who attends to whom, and `causal` and `window` are not read. It gets no gradient.
    drop: what of the probabilities drops out, by the places [m] of the queries in the whole batch.
    window: a query sees the keys with query - key < window alone and, where attention is not causal, key -
    query < window; self-attention only, and not causal of whole rows or segments of queries.
    bias: added to the scores, float: [heads, 2 L - 1] by distance, `bias[h, key - query + L - 1]` with L at
    least the longest row or segment, self-attention only; or dense, [1 | batch, 1 | heads, 1 | q, k], rows
    only. A head is one of q. `backward` has its gradient on demand.
    softcap: the scores before bias and mask are softcap * tanh(scale q k^T / softcap); None or 0 for none.
    sinks: [heads], the score of one more key, which every query sees and which has no value; None for none.
    `backward` has their gradient on demand.
    part: what all this is of attention on a sequence that is cut across ranks; None where it is all.
    """

    causal: bool
    scale: float
    batch: int
    segments: Segments | None = None
    mask: Tensor | None = None
    backend: Backend = "sdpa"
    drop: Drop | None = None
    memory: Segments | None = None
    window: int | None = None
    bias: Tensor | None = None
    softcap: float | None = None
    part: AttentionPart | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0, "a query sees itself"
        assert self.window is None or self.causal or self.memory is None, (
            "a window to both sides is one of whole segments"
        )
        assert self.memory is None or not self.distant, "distances within cross-attention mean nothing"

    @property
    def ragged(self) -> bool:
        """Whether queries or keys lie in segments."""
        return self.segments is not None or self.memory is not None

    @property
    def distant(self) -> bool:
        """Whether the bias is one by distance."""
        return self.bias is not None and self.bias.dim() == 2

    def sides(self, q: Tensor, k: Tensor) -> tuple[Segments, Segments]:
        """(segments of the queries, of the keys), rows of equal length as such; one object for
        self-attention."""
        queries = self.segments or of_rows(self.batch, len(q), q.device)
        if self.memory is not None:
            return queries, self.memory
        return queries, queries if self.segments or len(k) == len(q) else of_rows(
            self.batch, len(k), k.device
        )


class AttentionPass(NamedTuple):
    """What a form has attended to and given, of which it makes the gradients; see `backward`."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    kept: KeptTensors
    how: How


# ------------------------------------------------------------------ which form


@dataclass(frozen=True)
class ChosenForm:
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
    keys: int | None = None,
    window: int | None = None,
    distant: bool = False,
    capped: bool = False,
    last: bool = False,
    folded: bool = False,
    sinks: bool = False,
) -> ChosenForm:
    """The form for rows of `tokens` tokens, or segments of at most so many, on `device`; again it costs a
    look-up.

    segmented: of queries or of keys. masked: a dense mask or bias. drops: probabilities drop out. plain: no
    kernel of our own. keys: of cross-attention, the most tokens that a row or segment of keys has. window,
    distant (a bias by distance), capped (a soft cap), sinks: see `How`. last: of causal attention, queries
    that are the last few of their keys' tokens; folded: of two pieces of a row (pieces.py). On a CUDA device
    each form is told of when it is first chosen.
    """
    own = {"dropout of attention": drops, "a bias by distance": distant, "a soft cap": capped, "sinks": sinks}
    if ours := next((words for words, there in own.items() if there), None):
        refused = "plain torch is asked for" if plain else _no_triton(device, dtype, head_dim, masked, last)
        found = ChosenForm("triton", ours) if refused is None else ChosenForm("sdpa", refused)
    else:
        windowed, single = window is not None and window < tokens, 1 in (tokens, keys)
        kind = _Kind(segmented, masked, keys is not None, windowed, single, last, folded)
        deterministic = torch.are_deterministic_algorithms_enabled()
        found = _chosen(device, dtype, head_dim, kind, tokens <= SHORT, plain, deterministic)
    if device.type == "cuda":
        _tell(found)
    return found


@cache
def _tell(choice: ChosenForm) -> None:
    """Once in a process."""
    say(f"kernels: attention by {choice.backend}: {choice.reason}")


class _Kind(NamedTuple):
    """What libraries have forms for. single: rows of one token. last, folded: see `choose`."""

    segmented: bool
    masked: bool
    crosses: bool
    windowed: bool
    single: bool
    last: bool
    folded: bool


@cache
def _chosen(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    kind: _Kind,
    short: bool,
    plain: bool,
    deterministic: bool,
) -> ChosenForm:
    refused = _no_flash(device, dtype, head_dim, kind.masked)
    ours = not plain and _no_triton(device, dtype, head_dim, kind.masked, kind.last) is None
    if refused is not None:
        # of heads that no library's flash takes, torch's backward pass takes twice as long as ours
        wide = head_dim > WIDEST_FLASH and dtype != torch.float32
        if ours and (wide or (kind.segmented and (kind.crosses or kind.windowed))):
            return ChosenForm("triton", f"segments, and {refused}" if kind.segmented else refused)
        return ChosenForm("sdpa", refused)
    if kind.segmented:
        narrow = short and head_dim <= NARROW and not kind.crosses
        if ours and narrow and torch.cuda.get_device_capability(device)[0] == 9:
            return ChosenForm("triton", "short segments of narrow heads on Hopper")
        return ChosenForm("varlen", "segments of unequal length")
    refused = _no_cudnn(device, head_dim, kind, deterministic)
    if refused is not None:
        return ChosenForm("flash", refused)
    return ChosenForm("cudnn", "rows of equal length on a device that cuDNN is best on")


def _no_flash(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    """Why neither flash attention nor cuDNN can be used, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"no CUDA device: {device.type}"
    if masked:
        return "a mask"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} has no fused kernel"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return "the device is older than sm_80"
    widest = WIDEST_FLASH if capability in WIDEST else 192
    if head_dim % 8 or head_dim > widest:
        return f"head dim {head_dim} is no multiple of 8 up to {widest}"
    if torch.backends.cuda.is_flash_attention_available():
        return None
    return "torch was built without flash attention"


@cache
def _no_triton(
    device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool, last: bool
) -> str | None:
    """Why our kernels cannot be used here, or None."""
    if masked:
        return "a mask"
    if last:
        return "queries on one rank of keys on several"
    return unfit(device, head_dim) or refusal(device, dtype)


def unfit(device: torch.device, head_dim: int) -> str | None:
    """Why our kernels take no heads of this width on a device, or None."""
    # a tile of wider heads fits into the shared memory of these alone
    hopper = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)
    widest = 512 if hopper else 128
    if head_dim % 8 or head_dim > widest:
        return f"head dim {head_dim} is no multiple of 8 up to {widest}"
    return None


def _no_cudnn(device: torch.device, head_dim: int, kind: _Kind, deterministic: bool) -> str | None:
    """Why flash attention is used and not cuDNN, or None."""
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "cuDNN is no faster on this device"
    if head_dim > 128:
        return f"cuDNN takes head dims up to 128, not {head_dim}"
    if kind.windowed:
        return "cuDNN knows no sliding window here"
    if kind.single:
        return "cuDNN takes no rows of one token"
    if kind.last and not kind.folded:
        return "cuDNN takes queries to be the first of the keys' tokens"
    if deterministic:
        return "cuDNN's backward pass is not deterministic"
    return None if torch.backends.cudnn.is_available() else "torch was built without cuDNN"


# ------------------------------------------------------------------ the two functions


def forward(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    """(out [m, heads, d], dense; what `backward` needs beside it). A query without keys gets zeros."""
    if not len(q) or not len(k):
        return torch.zeros_like(q, memory_format=torch.contiguous_format), ()
    assert len(q) == len(k) or not how.distant, "queries and keys have to be the same tokens here"
    if how.bias is not None and how.distant:
        longest = len(q) // how.batch if how.segments is None else how.segments.longest
        assert longest <= longest_of(how.bias), (
            f"a bias up to {longest_of(how.bias)} tokens, but {longest} attend"
        )
    return _FORMS[how.backend][0](q, k, v, how)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kept: KeptTensors,
    how: How,
    dbias: Tensor | None = None,
    dsinks: Tensor | None = None,
) -> QkvGradients:
    """(dq [m, heads, d], dk, dv [n, kv_heads, d]) for dout [m, heads, d]; `out` and `kept` as `forward` gave
    them.

    dbias, dsinks: shaped like `how.bias` and `how.sinks`, float32 or wider, dense; the gradient of each is
    added to it.
    """
    if not len(q) or not len(k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    asked = {name: one for name, one in (("dbias", dbias), ("dsinks", dsinks)) if one is not None}
    return _FORMS[how.backend][1](dout, AttentionPass(q, k, v, out, kept, how), **asked)


# ------------------------------------------------------------------ cudnn


def _cudnn(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    out, lse, *_, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *_by_head(how.batch, q, k, v), None, True, 0.0, how.causal, False, scale=how.scale
    )
    return _by_token(out), (lse, seed, offset)


def _cudnn_backward(dout: Tensor, done: AttentionPass) -> QkvGradients:
    q, k, v, out, kept, how = done
    rest = (None, None, None, _length(how, q), _length(how, k), 0.0, how.causal)
    dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
        *_by_head(how.batch, dout, q, k, v, out), *kept, *rest, scale=how.scale
    )
    return _by_token(dq), _by_token(dk), _by_token(dv)


def _by_head(batch: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """[m, heads, d], or [batch, length, heads, d], as views [batch, heads, length, d]."""
    return tuple(in_rows(x, batch).transpose(1, 2) for x in tensors)


def in_rows(x: Tensor, batch: int) -> Tensor:
    """[m, heads, d], if not so already, as a view [batch, length, heads, d]."""
    return x if x.dim() > 3 else x.view(batch, -1, *x.shape[1:])


def _length(how: How, x: Tensor) -> int:
    """Tokens of each row."""
    return x.shape[1] if x.dim() > 3 else len(x) // how.batch


def _by_token(x: Tensor) -> Tensor:
    """[batch, heads, length, d] as [m, heads, d]."""
    return x.transpose(1, 2).flatten(0, 1)


# ------------------------------------------------------------------ flash and varlen


def _flash(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    out, lse, state, unused, _ = aten._flash_attention_forward(
        *_laid_out(how, q, k, v), *_starts(how, q, k), 0.0, how.causal, False, scale=how.scale, **_window(how)
    )
    return out.view_as(q), (lse, state, unused)


def _flash_backward(dout: Tensor, done: AttentionPass) -> QkvGradients:
    q, k, v, out, (lse, state, unused), how = done
    rest = (*_starts(how, q, k), 0.0, how.causal, state, unused)
    dq, dk, dv = aten._flash_attention_backward(
        *_laid_out(how, dout, q, k, v, out), lse, *rest, scale=how.scale, **_window(how)
    )
    return dq.view_as(q), dk.view_as(k), dv.view_as(v)


def _laid_out(how: How, *tensors: Tensor) -> Sequence[Tensor]:
    """[m, heads, d] as the kernels take them: as they are where there are segments, else [batch, length,
    heads, d]."""
    return tensors if how.ragged else [in_rows(x, how.batch) for x in tensors]


def _starts(how: How, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """(where segments of queries and of keys begin, None for rows; the longest of queries, of keys)."""
    if not how.ragged:
        return None, None, _length(how, q), _length(how, k)
    queries, keys = how.sides(q, k)
    return queries.starts, keys.starts, queries.longest, keys.longest


def _window(how: How) -> dict[str, int]:
    """What flash attention is told of a window: how many earlier keys a query sees, and later ones."""
    if how.window is None:
        return {}
    return {"window_size_left": how.window - 1, "window_size_right": 0 if how.causal else how.window - 1}


# ------------------------------------------------------------------ triton


@cache
def _kernels() -> Any:
    """Ours, imported where they can run."""
    return import_module("petune.kernels.triton.attention")


def _triton(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    sides, more = _more(how, q, k)
    out, lse = _kernels().forward(q, k, v, *sides, how.causal, how.scale, how.drop, more)
    return out, (lse,)


def _triton_backward(
    dout: Tensor, done: AttentionPass, dbias: Tensor | None = None, dsinks: Tensor | None = None
) -> QkvGradients:
    q, k, v, out, (lse,), how = done
    sides, more = _more(how, q, k)
    given = (dout, q, k, v, out, lse, *sides, how.causal, how.scale, how.drop, more, dbias, dsinks)
    found: QkvGradients = _kernels().backward(*given)
    return found


def _more(how: How, q: Tensor, k: Tensor) -> tuple[tuple[Tensor, int], Any]:
    """((where the queries' rows or segments begin, the longest of them), what our kernels take beside)."""
    assert how.mask is None and (how.bias is None or how.distant), "our kernels take no dense mask"
    queries, keys = how.sides(q, k)
    more = {"window": how.window or 0, "bias": how.bias, "cap": how.softcap or 0.0, "sinks": how.sinks}
    if keys is not queries:
        more |= {"starts": keys.starts, "longest": keys.longest, "tokens": _key_tokens(how, q, k)}
    return (queries.starts, queries.longest), _kernels().More(**more)


# ------------------------------------------------------------------ sdpa


def _sdpa(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    with torch.no_grad():
        return _attended(q, k, v, how).contiguous(), ()


def _sdpa_backward(
    dout: Tensor, done: AttentionPass, dbias: Tensor | None = None, dsinks: Tensor | None = None
) -> QkvGradients:
    q, k, v = (x.detach().requires_grad_() for x in done[:3])
    asked = {name: one for name, one in (("bias", dbias), ("sinks", dsinks)) if one is not None}
    added = {name: getattr(done.how, name).detach().requires_grad_() for name in asked}
    with torch.enable_grad():
        again = _attended(q, k, v, replace(done.how, **added))
    dq, dk, dv, *found = torch.autograd.grad(again, [q, k, v, *added.values()], dout)
    for total, own in zip(asked.values(), found, strict=True):
        total.add_(own)
    return dq, dk, dv


def _attended(q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
    """out [m, heads, d] of differentiable operations: all rows at once, or all segments of the same
    lengths."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    tokens = _key_tokens(how, q, k)
    if not how.ragged:
        return _rows_attended(q, k, v, how, tokens)
    assert how.mask is None and (how.bias is None or how.distant), "segments say who attends to whom"
    outs, places = [], []
    for rows, others in paired(*how.sides(q, k)):
        own, other = rows.flatten(), others.flatten()
        drop = None if how.drop is None else how.drop._replace(numbers=how.drop.numbers[own])
        one = replace(how, batch=len(rows), segments=None, memory=None, drop=drop)
        outs.append(
            _rows_attended(q[own], k[other], v[other], one, None if tokens is None else tokens[other])
        )
        places.append(own)
    return torch.cat(outs)[torch.cat(places).argsort()]


def _key_tokens(how: How, q: Tensor, k: Tensor) -> Tensor | None:
    """The tokens of the keys in their rows [n] int64, which dropout numbers them by; None where the draw
    itself has them."""
    queries, keys = (None, None) if how.drop is None else how.sides(q, k)
    return None if keys is None or keys is queries else keys.tokens


def _rows_attended(q: Tensor, k: Tensor, v: Tensor, how: How, tokens: Tensor | None) -> Tensor:
    """Of `how.batch` rows of equal length, [m, heads, d] each."""
    q, k, v = _by_head(how.batch, q, k, v)
    mask, bias = _seen(how, q.shape[2], k.shape[2], q.device), how.bias
    if bias is not None and how.distant:
        bias = by_distance(bias, q.shape[2])[None]
    if how.drop is None and not how.softcap and how.sinks is None:
        causal = how.causal and mask is None
        if bias is not None:
            mask = _added(bias.to(q.dtype), mask)
        return _by_token(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=how.scale)
        )
    scores = q @ k.transpose(-1, -2) * how.scale
    if how.softcap:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    every = probabilities(scores, mask, bias, how.sinks).to(v.dtype)
    if how.drop is not None:
        draws = [how.drop._replace(numbers=row) for row in how.drop.numbers.view(how.batch, -1)]
        others = [None] * how.batch if tokens is None else tokens.view(how.batch, -1)
        every = torch.stack([dropped_attention(*one) for one in zip(every, draws, others, strict=True)])
    return _by_token(every @ v)


def _seen(how: How, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """The mask of rows of equal length, of whose keys the queries are the last; None where all keys are seen,
    or where torch is told `is_causal` alone, which takes them to be the first."""
    windowed, before = how.window is not None and how.window < keys, keys - queries
    if how.mask is not None or not (how.causal or windowed):
        return how.mask
    plain = how.bias is None and how.drop is None and not how.softcap and how.sinks is None
    if plain and not (windowed or before):
        return None
    reach = cast("int", how.window) - 1 if windowed else 0
    assert how.causal or not before, "a window to both sides is one of whole rows"
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before if how.causal else reach)
    return (seen.triu(before - reach) if windowed else seen)[None, None]


def _added(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Bias and mask as one mask that is added."""
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype is torch.bool else bias + mask


# ------------------------------------------------------------------ ring


def _ring(q: Tensor, k: Tensor, v: Tensor, how: How) -> tuple[Tensor, KeptTensors]:
    out, kept = _part(how).travelling.attend(_three(q, k, v, how), how.bias, how.mask, *_hides(how, q))
    return _by_token(out).contiguous(), kept


def _ring_backward(dout: Tensor, done: AttentionPass, dbias: Tensor | None = None) -> QkvGradients:
    q, k, v, out, kept, how = done
    dout, out = _by_head(how.batch, dout, out)
    given = (dout, _three(q, k, v, how), how.bias, how.mask, *_hides(how, q), out, kept, dbias)
    dq, dk, dv = _part(how).travelling.attend_backward(*given)
    return _by_token(dq), _by_token(dk), _by_token(dv)


def _part(how: How) -> AttentionPart:
    assert how.part is not None and not how.ragged and how.drop is None, "a ring goes round with equal rows"
    return how.part


def _three(q: Tensor, k: Tensor, v: Tensor, how: How) -> QkvGradients:
    q, k, v = _by_head(how.batch, q, k, v)
    return q, k, v


def _hides(how: How, q: Tensor) -> tuple[bool, float]:
    """(whether later keys are hidden though no mask says so; the scale)."""
    hidden = how.causal and how.mask is None
    said = how.mask is not None or how.window is None or how.window >= _part(how).rows.whole
    assert said, "a mask says the window"
    return hidden, how.scale


_FORMS: dict[Backend, tuple[Callable[..., tuple[Tensor, KeptTensors]], Callable[..., QkvGradients]]] = {
    "cudnn": (_cudnn, _cudnn_backward),
    "flash": (_flash, _flash_backward),
    "varlen": (_flash, _flash_backward),
    "triton": (_triton, _triton_backward),
    "sdpa": (_sdpa, _sdpa_backward),
    "ring": (_ring, _ring_backward),
}
