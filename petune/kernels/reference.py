"""The operations of petune.kernels in plain torch: what each of them means, and what runs where there is no
faster form.

Every operation has the same signature here and in petune/kernels/triton/. They take and give plain tensors
and know no autograd: a forward returns what its backward wants, and petune.kernels.block.module, .head and
.library string them into autograd nodes. Matrices are [rows, columns] with the last dim dense; rows may be
strided. Arithmetic is float32 (float64 for float64 tensors), and a result is rounded once, to the dtype of
the input.

A low-rank update is `low = (s, b)` with s [rows, r] and b [columns, r], both in the matrix's dtype: it stands
for `+ s b^T`. LoRA's forward is then x W^T + s b^T with s = x a^T, where a carries the scale. Rounded once:
product and update meet in float32, as an update smaller than half a unit in the last place of x W^T would be
lost if that were rounded first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from petune.models import fp8
from petune.models.form import Form
from petune.models.row_lengths import lengths_of
from petune.rng.dropout import Drop, dropped

LowFactors = tuple[Tensor, Tensor]  # s [rows, r], b [columns, r]: + s b^T
QueriesAndKeys = tuple[Tensor, Tensor]  # of queries, and of keys
Added = tuple[Tensor, Tensor | None]  # the same, b None where the matrix has the update in it already
# clamped: of experts alone, whose gate and up take turns (petune.kernels.grouped_reference.gated)
Act = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped"]


class Scale(NamedTuple):
    """columns * (x - own) + own in the place of x [m, n]: what trains and scales a matrix, and the part of it
    that is not scaled, None for nothing; both [n], float32 or wider."""

    columns: Tensor
    own: Tensor | None


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype sums are made in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def written(values: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`values` rounded to `dtype`, in `out` if it is given."""
    return values.to(dtype) if out is None else out.copy_(values)


# ------------------------------------------------------------------ norms


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(total / rms(total) * weight, 1 / rms, total), where total = residual + x, rounded, or x itself.

    x, residual [m, n]; weight [n], any float dtype; the second result is float32 [m] (float64 for float64).
    out: where the first result is written, [m, n] with any row stride. Zhang and Sennrich 2019
    (arXiv:1910.07467): rms(v) = sqrt(mean(v^2) + eps).
    """
    total = x if residual is None else (wide(residual) + wide(x)).to(x.dtype)
    values = wide(total)
    rstd = torch.rsqrt(values.square().mean(-1) + eps)
    return written(values * rstd[:, None] * wide(weight), x.dtype, out), rstd, total


def rms_norm_backward(
    dy: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None = None,
    weight_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(gradient of total, gradient of weight in float32 or None). `dresidual` [m, n] is what reaches total by
    another way and is added."""
    normed, grad = wide(total) * rstd[:, None], wide(dy)
    scaled = grad * wide(weight)
    dtotal = rstd[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if dresidual is not None:
        dtotal = dtotal + wide(dresidual)
    return dtotal.to(dy.dtype), (grad * normed).sum(0) if weight_grad else None


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """((total - mean) / std * weight + bias, or without one, mean, 1 / std, total); total and out as for
    `rms_norm` (Ba et al. 2016, arXiv:1607.06450)."""
    total = x if residual is None else (wide(residual) + wide(x)).to(x.dtype)
    values = wide(total)
    mean = values.mean(-1)
    centred = values - mean[:, None]
    rstd = torch.rsqrt(centred.square().mean(-1) + eps)
    scaled = centred * rstd[:, None] * wide(weight)
    return written(scaled if bias is None else scaled + wide(bias), x.dtype, out), mean, rstd, total


def layer_norm_backward(
    dy: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dresidual: Tensor | None = None,
    weight_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(gradient of total, of weight, of bias); the last two in float32, or None without `weight_grad`."""
    normed, grad = (wide(total) - mean[:, None]) * rstd[:, None], wide(dy)
    scaled = grad * wide(weight)
    dtotal = rstd[:, None] * (
        scaled - scaled.mean(-1, keepdim=True) - normed * (scaled * normed).mean(-1, keepdim=True)
    )
    if dresidual is not None:
        dtotal = dtotal + wide(dresidual)
    sums = ((grad * normed).sum(0), grad.sum(0)) if weight_grad else (None, None)
    return dtotal.to(dy.dtype), *sums


# ------------------------------------------------------------------ rotary positions


def rope_(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, neighbours: bool = False, width: int | None = None
) -> Tensor:
    """Turn the first d columns of the first `heads` heads of `qkv` by their positions, in place; returns it.

    qkv [m, n] with n a multiple of the head's `width`, d without one: query and key heads first, values after
    them. cos, sin [p, d], d even, p dividing m: row i has position i % p, and both halves of a row are alike.
    Su et al. 2021 (arXiv:2104.09864) in Hugging Face's layout: the halves of the d columns are the parts of
    their complex numbers; with `neighbours` in the paper's own: two columns side by side are, and number i
    has the angle i.
    """
    turned = qkv.unflatten(1, (-1, width or cos.shape[-1]))[:, :heads, : cos.shape[-1]]
    turned.copy_(_turned(wide(turned), cos, sin, neighbours))
    return qkv


def rope_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False
) -> Tensor:
    """The gradient of `qkv` before it was turned, [m, n] dense. dq, dk, dv [m, heads of each, width], any
    strides but a dense last dim."""
    turned = [_turned(wide(part), cos, -sin, neighbours) for part in (dq, dk)]
    return torch.cat([*turned, wide(dv)], 1).to(dq.dtype).flatten(1)


def rope_unscale(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Scale,
    neighbours: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the gradient of what became qkv by `scale` and then by `rope_`, sums as of `activate_backward`).

    qkv [m, n], turned. What it was before is made again of it: turned back, over cos^2 + sin^2, which is not
    1 where the angles are rounded or carry a factor of attention; a row without angles, a recording's spare
    one, has no part in anything.
    """
    grad = rope_backward(wide(dq), wide(dk), wide(dv), cos, sin, neighbours)
    parts = _parts(wide(qkv), dq.shape[2], dq.shape[1], dk.shape[1])
    size = (wide(cos).square() + wide(sin).square()).to(grad.dtype).repeat(len(dq) // max(1, len(cos)), 1)
    size = _side_by_side(size) if neighbours else size
    size = F.pad(size, (0, dq.shape[2] - size.shape[1]), value=1.0)
    q, k = (part / torch.where(size == 0, 1, size)[:, None] for part in parts[:2])
    values = rope_backward(q, k, parts[2], cos, sin, neighbours)
    values = values if scale.own is None else values - scale.own
    sums = torch.stack([(grad * values).sum(0), *(() if scale.own is None else (grad.sum(0),))])
    return (grad * scale.columns).to(dq.dtype), sums


def norm_rope(
    raw: Tensor,
    weights: QueriesAndKeys,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    kv_heads: int,
    values: bool = False,
    layer: bool = False,
    neighbours: bool = False,
) -> Tensor:
    """RMSNorm of every head of queries and keys, or LayerNorm without a bias (`layer`), then rotary
    positions: q | k | v [m, n] dense, beside the original.

    raw [m, n], rows may be strided: `heads` query heads as wide as cos and sin, `kv_heads` key heads, then
    values, which stay as they are. weights of q's norm and of k's, any float dtype: [d], or [heads, d] and
    [kv_heads, d], a row for each head. A normed head is rounded to the dtype of `raw` before it is turned, as
    between `rms_norm` and `rope_` (Qwen3, Gemma 3, Command R+). values: their heads are normed too, without a
    weight, and where raw ends with the keys they are made of these (Gemma 4). neighbours: see `rope_`.
    """
    *parts, own = _parts(raw, cos.shape[-1], heads, kv_heads)
    normed = [
        (_normed(part, eps, layer)[0] * wide(weight)).to(raw.dtype)
        for part, weight in zip(parts, weights, strict=True)
    ]
    if values:
        own = own if own.shape[1] else parts[1]
        own = rms_norm(own.flatten(0, 1), cos.new_ones(cos.shape[1]), eps)[0].view(own.shape)
    turned = [_turned(wide(part), cos, sin, neighbours) for part in normed]
    return torch.cat([*turned, wide(own)], 1).to(raw.dtype).flatten(1)


def norm_rope_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    raw: Tensor,
    weights: QueriesAndKeys,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    weight_grad: bool = False,
    values: bool = False,
    layer: bool = False,
    neighbours: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(gradient of raw [m, n] dense, of q's weight, of k's); the last two in float32 and of the weights'
    shapes, or None without `weight_grad`.

    dq, dk, dv as for `rope_backward`; values as for `norm_rope`. Statistics are made again from `raw`;
    nothing is rounded on the way.
    """
    found, sums = [], list[Tensor | None]()
    *parts, own = _parts(raw, dq.shape[2], dq.shape[1], dk.shape[1])
    for grad, part, weight in zip((dq, dk), parts, weights, strict=True):
        turned, (normed, rstd) = _turned(wide(grad), cos, -sin, neighbours), _normed(part, eps, layer)
        scaled = turned * wide(weight)
        if layer:
            scaled = scaled - scaled.mean(-1, keepdim=True)
        found.append(rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True)))
        over = (0, 1) if weight.dim() == 1 else (0,)
        sums.append((turned * normed).sum(over) if weight_grad else None)
    found.append(wide(dv))
    if values:
        rows, scale = (own if own.shape[1] else parts[1]).flatten(0, 1), cos.new_ones(cos.shape[1])
        back = rms_norm_backward(wide(dv).flatten(0, 1), rows, scale, rms_norm(rows, scale, eps)[1])[0]
        found[2] = back.view(dv.shape)
        found = found if own.shape[1] else [found[0], found[1] + found[2]]
    return torch.cat(found, 1).to(dq.dtype).flatten(1), sums[0], sums[1]


def _normed(heads: Tensor, eps: float, layer: bool) -> tuple[Tensor, Tensor]:
    """(each row of [m, heads, d] over its root mean square, centred first of a LayerNorm; one over that)."""
    values = wide(heads)
    if layer:
        values = values - values.mean(-1, keepdim=True)
    rstd = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return values * rstd, rstd


def _parts(raw: Tensor, width: int, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """Queries, keys and values [m, heads of each, width] of q | k | v."""
    every = raw.unflatten(1, (-1, width))
    found: tuple[Tensor, ...] = every.split([heads, kv_heads, every.shape[1] - heads - kv_heads], 1)
    return found


def _turned(heads: Tensor, cos: Tensor, sin: Tensor, neighbours: bool = False) -> Tensor:
    """[m, heads, width], the first d columns turned by the angles of [p, d]; m is a multiple of p."""
    if (own := cos.shape[-1]) < heads.shape[-1]:
        return torch.cat([_turned(heads[..., :own], cos, sin, neighbours), heads[..., own:]], -1)
    times = len(heads) // max(1, len(cos))
    cos, sin = (wide(part).to(heads.dtype).repeat(times, 1)[:, None] for part in (cos, sin))
    if neighbours:
        apart = torch.cat([heads[..., ::2], heads[..., 1::2]], -1)
        return _side_by_side(_turned_halves(apart, cos, sin))
    return _turned_halves(heads, cos, sin)


def _turned_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat([-second, first], -1) * sin


def _side_by_side(x: Tensor) -> Tensor:
    """[..., d] with the columns of its halves in turns."""
    halves: Tensor = x.unflatten(-1, (2, -1))
    return halves.transpose(-1, -2).flatten(-2)


# ------------------------------------------------------------------ activations


def activate(
    u: Tensor,
    act: Act,
    gated: bool,
    low: LowFactors | None = None,
    a: Tensor | None = None,
    paired: bool = False,
    out: Tensor | None = None,
    how: Drop | None = None,
    scale: Scale | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(h, s): the activation between two linears, and the down projection's low-rank input.

    gated: u [m, 2 f] is gate | up and h = act(gate) * up [m, f] (Shazeer 2020, arXiv:2002.05202); else u [m,
    f] and h = act(u). `low` is added to u first, and `scale` scales the sum; u itself is not changed. a [r,
    f]: s = h a^T [m, r] in the dtype of u, from h as rounded; None without `a`. paired, of gated ones: b is
    block-diagonal, the first half of low's ranks is gate's and the second up's. out: as for `rms_norm`. how:
    the dropout of h that `a` alone reads.
    """
    values, _ = _activated(u, low, scale)
    if gated:
        gate, up = values.chunk(2, -1)
        h = written(_act(gate, act) * up, u.dtype, out)
    else:
        h = written(_act(values, act), u.dtype, out)
    return h, None if a is None else dropped_low(h, a, [len(a)], [how])


def activate_backward(
    dh: Tensor,
    u: Tensor,
    act: Act,
    gated: bool,
    low: Added | None = None,
    below: LowFactors | None = None,
    paired: bool = False,
    how: Drop | None = None,
    scale: Scale | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """(du, db, da, sums): gradients of u, of low's b and of `a`, and what those of `scale` are made of.

    dh [m, f] is the gradient of h but for the low-rank part: below = (ds [m, r], a [r, f]) adds ds a, of
    which `how` drops what it dropped of h. du is shaped like u, its dtype. db [columns of u, r of low] = du^T
    s and da [r of below, f] = ds^T h, float32; None where `low` or `below` is. Without its b, `low` is not
    added to u, which has it already. paired as for `activate`: db has the blocks alone then, one below the
    other, [columns of u, r of low / 2]. sums, of the gradient dv of what `scale` gave, v: over rows of
    dv * (v - own), and behind that, where there is an `own`, of dv; [1 or 2, columns of u], float32.
    """
    values, scaled = _activated(u, low, scale)
    grad = wide(dh) if below is None else wide(dh) + drop(wide(below[0]) @ wide(below[1]), how)
    if gated:
        gate, up = values.chunk(2, -1)
        active, slope = _act(gate, act), _slope(gate, act)
        h, du = active * up, torch.cat([grad * up * slope, grad * active], -1)
    else:
        h, du = _act(values, act), grad * _slope(values, act)
    sums = None
    if scale is not None:
        sums = torch.stack([(du * scaled).sum(0), *(() if scale.own is None else (du.sum(0),))])
        du = du * scale.columns
    du = du.to(u.dtype)
    db = None if low is None else _blocks(du, low[0], paired)
    da = None if below is None else wide(below[0]).T @ drop(wide(h.to(u.dtype)), how)
    return du, db, da, sums


def _activated(u: Tensor, low: Added | None, scale: Scale | None) -> tuple[Tensor, Tensor]:
    """What an activation acts on, and that without its part that is not scaled."""
    values = wide(u) if low is None or low[1] is None else wide(u) + wide(low[0]) @ wide(low[1]).T
    if scale is None:
        return values, values
    if scale.own is None:
        return values * scale.columns, values * scale.columns
    scaled = (values - scale.own) * scale.columns
    return scaled + scale.own, scaled


def _blocks(du: Tensor, s: Tensor, paired: bool) -> Tensor:
    if not paired:
        return wide(du).T @ wide(s)
    return torch.cat(
        [wide(one).T @ wide(own) for one, own in zip(du.chunk(2, -1), s.chunk(2, -1), strict=True)]
    )


def _act(x: Tensor, act: Act) -> Tensor:
    if act == "silu":
        return F.silu(x)
    return F.relu(x) if act == "relu" else F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def _slope(x: Tensor, act: Act) -> Tensor:
    """The derivative of the activation."""
    slope: Tensor
    if act == "silu":
        gate = torch.sigmoid(x)
        slope = gate * (1 + x * (1 - gate))
        return slope
    if act == "relu":
        return (x > 0).to(x.dtype)
    if act == "gelu":
        slope = 0.5 * (1 + torch.erf(x * 0.5**0.5)) + x * torch.exp(-0.5 * x * x) * (2 * torch.pi) ** -0.5
        return slope
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    tanh = torch.tanh(inner)
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * (2 / torch.pi) ** 0.5 * (1 + 3 * 0.044715 * x**2)
    return slope


# ------------------------------------------------------------------ sums


def add_low(
    x: Tensor | None, y: Tensor, low: LowFactors, columns: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """x + y + low, rounded once to the dtype of `low`; x, y [m, n] in any float dtype, x with any row stride
    or None. columns [n], float32 or wider: y is multiplied by it first. out: where it is written, of that
    dtype and with any row stride."""
    total = (wide(y) if columns is None else wide(y) * columns) + wide(low[0]) @ wide(low[1]).T
    found = (total if x is None else total + wide(x)).to(low[0].dtype)
    return found if out is None else out.copy_(found)


def unscale(dy: Tensor, y: Tensor, columns: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(dy * columns in the dtype of dy, the sums over rows of dy * (y - own) in float32); dy, y [m, n],
    columns and own [n] float32 or wider."""
    grad, values = wide(dy), wide(y) if own is None else wide(y) - own
    return (grad * columns).to(dy.dtype), (grad * values).sum(0)


def over_lengths(by: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """by / ||weight + b a|| [n], the norms those of rows, float32 or wider; by [n], weight [n, k], a [r, k],
    b [n, r]. A row of zeros counts as the smallest of normal numbers."""
    lengths = lengths_of(weight, a, b)
    return wide(by) / lengths.clamp_min(torch.finfo(lengths.dtype).tiny)


def mix(state: Tensor, below: Tensor, gate: Tensor, temperature: float) -> Tensor:
    """g * state + (1 - g) * below with g = sigmoid(gate / temperature), rounded once; state and below [m, n]
    of one dtype, gate [] (Sung et al. 2022, arXiv:2206.06522, equation 2)."""
    g = torch.sigmoid(wide(gate) / temperature)
    return (g * wide(state) + (1 - g) * wide(below)).to(below.dtype)


def mix_backward(
    dy: Tensor, state: Tensor, below: Tensor, gate: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of state, of below, and of gate in float32, for dy [m, n]."""
    g, grad = torch.sigmoid(wide(gate) / temperature), wide(dy)
    slope = g * (1 - g) / temperature
    dgate = slope * (grad * (wide(state) - wide(below))).sum()
    return (g * grad).to(dy.dtype), ((1 - g) * grad).to(dy.dtype), dgate


def total(parts: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The sum of parts [k, ...], each of which is dense, over k, rounded once to `dtype`; in `out`, of that
    dtype, where it is given."""
    found = wide(parts).sum(0).to(dtype)
    return found if out is None else out.copy_(found)


def linear_low(
    x: Tensor, weight: Tensor, bias: Tensor | None, low: LowFactors, out: Tensor | None = None
) -> Tensor:
    """x W^T + bias + low, rounded once; x [m, k], weight [n, k], bias [n]. out: see `add_low`."""
    product = wide(x) @ wide(weight).T
    return add_low(None if bias is None else bias.expand_as(product), product, low, out=out)


# ------------------------------------------------------------------ loss


def cross_entropy_(
    logits: Tensor, labels: Tensor, softcap: float = 0.0, smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(loss [n], log of the partition sum [n]), both float32, of logits [n, v]; `logits` become their own
    gradient.

    labels [n] int64 within the vocabulary, or negative: such a row counts nothing, and its loss, log and
    gradient are 0. A label beyond the vocabulary is an error here and a loss of NaN in a kernel. With a
    softcap the scores are softcap * tanh(logits / softcap) (Gemma 2). smoothing spreads that share of the
    target over all classes alike (Szegedy et al. 2016).
    """
    scores = wide(logits)
    ignored, target = labels < 0, labels.clamp(min=0)[:, None]
    capped = softcap * torch.tanh(scores / softcap) if softcap else scores
    lse = torch.logsumexp(capped, -1)
    hit = capped.gather(1, target)[:, 0]
    loss = lse - (1 - smoothing) * hit
    grad = torch.exp(capped - lse[:, None])
    if smoothing:  # else a score of minus infinity would make 0 times infinity of it
        loss, grad = loss - smoothing * capped.mean(-1), grad - smoothing / capped.shape[-1]
    grad.scatter_add_(1, target, torch.full_like(grad[:, :1], smoothing - 1))
    if softcap:
        grad = grad * (1 - (capped / softcap).square())
    logits.copy_(grad.masked_fill(ignored[:, None], 0))
    return loss.masked_fill(ignored, 0), lse.masked_fill(ignored, 0)


# ------------------------------------------------------------------ eight-bit floats


quantise = fp8.quantise
transposed = fp8.transposed


# ------------------------------------------------------------------ weights that are made dense


def dense_into(form: Form, out: Tensor) -> None:
    """Write a quantised weight [n, k] into `out`, whose rows may lie apart, rounded to its dtype."""
    form.dense_into(out)


# ------------------------------------------------------------------ dropout


def drop(x: Tensor, how: Drop | None) -> Tensor:
    """x [m, n] with the elements that `how` drops set to zero and the others over 1 - p:
    `petune.rng.dropout.drop` of what x stands for.

    how.numbers [m], how.feature the number of the first column. The gradient of x is drop(dy, how). x itself
    for p = 0 and without a draw.
    """
    return x if how is None or not how.p else dropped(x, how)


def dropped_low(x: Tensor, a: Tensor, ranks: Sequence[int], hows: Sequence[Drop | None]) -> Tensor:
    """s [m, sum of ranks] = drop_i(x) a_i^T side by side: the low-rank inputs of updates that each drop
    elements of x [m, k] of their own.

    a [sum of ranks, k]: the factors a_i of `ranks` rows, one below the other; hows: how each drops, None for
    not at all.
    """
    return torch.cat(
        [drop(wide(x), how) @ wide(own).T for own, how in zip(a.split(list(ranks)), hows, strict=True)], 1
    ).to(x.dtype)


def dropped_low_backward(
    ds: Tensor, x: Tensor, ranks: Sequence[int], hows: Sequence[Drop | None], scales: Sequence[float]
) -> Tensor:
    """The gradients scale_i * ds_i^T drop_i(x) of the factors a_i of `dropped_low`, [sum of ranks, k] in
    float32; ds [m, sum of ranks]."""
    pieces = zip(ds.split(list(ranks), 1), hows, scales, strict=True)
    return torch.cat([scale * (wide(own).T @ drop(wide(x), how)) for own, how, scale in pieces])


def add_dropped_low_(
    dx: Tensor, ds: Tensor, a: Tensor, ranks: Sequence[int], hows: Sequence[Drop | None]
) -> Tensor:
    """dx [m, k] + the sum of drop_i(ds_i a_i), rounded once, in place of dx, which is returned; ds, a, ranks
    and hows as above."""
    total = wide(dx)
    for own, factor, how in zip(ds.split(list(ranks), 1), a.split(list(ranks)), hows, strict=True):
        total = total + drop(wide(own) @ wide(factor), how)
    return dx.copy_(total)
