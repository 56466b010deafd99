"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464), on rows of one sample or of several, and the
causal convolution before it on rows of several. At token t of a sample, for each head with a state S [key
features, value features]:

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   y_t = S^T q_t

S is zero before a sample's first token. `samples` [1 | rows, tokens] has the number of each token's sample,
from 0 on; without it a row is one. Computed chunk by chunk: inside a chunk the rule is a triangular system,
and only the state goes from one chunk to the next. Sums are made in float32 (float64 for float64), outside
autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64  # tokens
EPS = 1e-6  # of the lengths that queries and keys are divided by
WIDEST = 128  # key features of a head that kernels compute: a program holds the states of all
WIDE = 4  # bytes of what it is computed in


class MixedHeads(NamedTuple):
    """How q, k and v lie side by side: key heads, key features of each, heads and value features of each."""

    key_heads: int
    keys: int
    heads: int
    values: int


class MixerKernels(NamedTuple):
    """What computes parts of mixers on a device, or gives None where it cannot: `mixed_rule`; a convolution
    with SiLU of x, its weight and samples; a gated norm's module of heads and gates."""

    rule: Callable[..., Tensor | None]
    convolution: Callable[..., Tensor | None]
    norm: Callable[..., Tensor | None]


KERNELS: dict[str, MixerKernels] = {}  # by type of device: see petune.kernels.delta


def kernels_at(x: Tensor) -> MixerKernels | None:
    """Those where x is, unless torch.compile reads, which cannot look into them."""
    return None if torch.compiler.is_compiling() else KERNELS.get(x.device.type)


def keys_of(features: int) -> int:
    """The keys that attention sees at as many FLOP a token as the rule has with states of so many key
    features: 6 for each number of a state, where a key has 4 for each feature."""
    return 3 * features // 2


def by_kernels(mixer: Any, itemsize: int, gpu: bool = True) -> bool:
    """Whether kernels compute a mixer where activations have so many bytes. gpu: one without memory is to be
    on a GPU."""
    on = mixer.A_log.device.type
    return itemsize == 2 and mixer.head_k_dim <= WIDEST and (gpu if on == "meta" else on in KERNELS)


def state_bytes(mixer: Any, itemsize: int, gpu: bool = True) -> float:
    """Bytes per token that autograd keeps of a mixer inside its linears, what goes into the last of them too:
    of the rule, chunk by chunk, with a state for each chunk; of the convolution and the norm; and without
    kernels, of queries and keys before they are repeated and divided. itemsize: of activations; gpu: see
    `by_kernels`."""
    heads, keys, values = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    if by_kernels(mixer, itemsize, gpu):
        of_head = 2 * CHUNK + keys * values / CHUNK + 3 * values + 1  # pairs of tokens, state, heads, beta
        wide = 4 * heads + 2 * mixer.num_k_heads  # decays and what they are made of, lengths
        return float(WIDE * wide + itemsize * (heads * of_head + 2 * mixer.conv_dim))
    rule = 6 * keys + 3 * values + 5 * CHUNK + keys * values / CHUNK  # of a head: q and k, v, chunks, state
    wide = heads * (rule + 3 * values) + 2 * mixer.key_dim
    return float(WIDE * wide + 2 * itemsize * (heads * values + mixer.conv_dim))


def causal_convolution(x: Tensor, weight: Tensor, samples: Tensor) -> Tensor:
    """Each feature of x [rows, tokens, features] convolved with its own weight [features, taps], the last of
    which is the token's own; taps that would reach into the sample before are left out."""
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).unbind(1)
    y = x.to(wide) * taps[-1]
    for back, tap in enumerate(reversed(taps[:-1]), 1):
        if back < x.shape[1]:
            same = samples[:, back:] == samples[:, :-back]
            y = y + F.pad(x[:, :-back].to(wide) * tap * same[..., None], (0, 0, back, 0))
    return y.to(x.dtype)


def mixed_rule(x: Tensor, g: Tensor, beta: Tensor, samples: Tensor | None, heads: MixedHeads) -> Tensor:
    """`gated_delta_rule` of q, k and v that lie side by side in x [rows, tokens, features], by kernels where
    these can."""
    kernels = kernels_at(x)
    if kernels is not None and (found := kernels.rule(x, g, beta, samples, heads)) is not None:
        return found
    of_keys = heads.key_heads * heads.keys
    parts = x.split([of_keys, of_keys, heads.heads * heads.values], -1)
    q, k, v = (
        part.unflatten(-1, (-1, size))
        for part, size in zip(parts, (heads.keys, heads.keys, heads.values), strict=True)
    )
    return gated_delta_rule(q, k, v, g, beta, samples)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    samples: Tensor | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """q, k [rows, tokens, key heads, key features], v [rows, tokens, heads, value features], g <= 0 and beta
    [rows, tokens, heads] -> y, shaped as v and of its dtype. Key heads serve as many heads in a row each;
    queries and keys are divided by their lengths, queries by the root of their features too."""
    with torch.autocast(v.device.type, enabled=False):
        return _in_chunks(q, k, v, g, beta, samples, chunk).to(v.dtype)


def _in_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, samples: Tensor | None, chunk: int
) -> Tensor:
    wide, tokens, groups = torch.promote_types(v.dtype, torch.float32), v.shape[1], v.shape[2] // k.shape[2]

    def chunks(x: Tensor) -> Tensor:
        """[rows, tokens, heads, ...] -> [rows, heads, chunks, chunk, ...], filled up with zeros."""
        if tokens % chunk:
            x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -tokens % chunk))
        apart: Tensor = x.unflatten(1, (-1, chunk))
        return apart.movedim(3, 1).contiguous().to(wide)

    q, k = (chunks(_unit(x.contiguous().to(wide)).repeat_interleave(groups, 2)) for x in (q, k))
    q, v, g, beta = q * q.shape[-1] ** -0.5, chunks(v), chunks(g), chunks(beta)[..., None]
    decay = g.cumsum(-1)  # since the chunk began
    seen, goes_on, stays = _meeting(samples, tokens, chunk, v.device)
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~seen, -torch.inf).exp()
    since = (decay.exp() * goes_on)[..., None]  # what is left of the state before the chunk
    until = ((decay[..., -1:] - decay).exp() * stays)[..., None]

    changed = k * beta
    system = changed @ k.mT * between
    given = torch.cat([v * beta, changed * since], -1)
    solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
    written, read = solved.split([v.shape[-1], k.shape[-1]], -1)
    scores, reading, writing = q @ k.mT * between, q * since, (k * until).mT

    # taken apart at once: what is indexed chunk by chunk gets a gradient of the whole length for each
    taken = (x.unbind(2) for x in (written, read, scores, reading, writing, since[..., -1:, :]))
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1])
    found = []
    for writes, reads, scored, asks, stores, left in zip(*taken, strict=True):
        new = writes - reads @ state
        found.append(asks @ state + scored @ new)
        state = state * left + stores @ new
    return torch.cat(found, 2)[:, :, :tokens].transpose(1, 2)


def _meeting(
    samples: Tensor | None, tokens: int, chunk: int, device: torch.device
) -> tuple[Tensor, Tensor | int, Tensor | int]:
    """Which token of a chunk sees which [..., chunk, chunk]; 1 at the tokens of the sample that the chunk
    before ended in, and at those of the one that this ends in [..., chunk], or for all."""
    if samples is None:
        return torch.ones(chunk, chunk, dtype=torch.bool, device=device).tril(), 1, 1
    number = F.pad(samples, (0, -tokens % chunk), value=-1).unflatten(1, (-1, chunk))[:, None]
    before = F.pad(number[..., :-1, -1:], (0, 0, 1, 0), value=-1)
    seen = (number[..., :, None] == number[..., None, :]).tril()
    return seen, number == before, number == number[..., -1:]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
