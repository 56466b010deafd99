"""Probes of a norm, and of what gates experts: a module is tried on a few rows, and is what the kernels
compute or is not."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from inspect import signature
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from petune.kernels import grouped_reference, reference

OFFSETS = (0.0, 1.0)  # what RMS norms add to their weights: nothing, or 1 as Gemma's do


def eps_of(norm: Any) -> float | None:
    """The epsilon of a norm, by either of its names; None where it has none."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return float(found) if isinstance(found, float | int) else None


def rms_offset(module: nn.Module) -> float | None:
    """What an RMS norm adds to its weight before it multiplies by it; None for any other module."""
    return next((offset for offset in OFFSETS if computes(module, "rms", offset)), None)


def computes(
    module: nn.Module,
    kind: Literal["rms", "layer"],
    offset: float = 0.0,
    scales: bool = True,
    each: bool = False,
) -> bool:
    """Whether a module's own forward is `reference.rms_norm` or `reference.layer_norm` with its epsilon and
    its weight + offset, and its bias if it has one: tried in float32, on the CPU, with weights of the probe's
    own. scales: it has a weight; else it is the norm alone, of heads of any width. each: with a row of
    weights [heads, n] for each head of [..., heads, n], and no bias.

    One of the rows is so small that half of what its square is added to is the epsilon; another is far from
    centred. How a norm rounds in a narrower dtype is not asked.
    """
    eps, forward = eps_of(module), cast("Callable[..., Tensor]", type(module).forward)
    bare = not (module._parameters or module._modules or module._buffers)
    held = _is_scale(module, kind == "layer", each) if scales else bare
    if eps is None or not held or len(signature(forward).parameters) != 2:
        return False
    shape = cast("Tensor", module.weight).shape if scales else torch.Size([16])
    own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES}
    how = kind, offset, scales, each, shape, module._parameters.get("bias") is not None
    key = type(module), forward, how, eps, tuple(own), tuple(own.values())
    if any(type(value) not in _PLAIN for value in own.values()):
        return _tried(module, eps, *how)
    if key not in _known:  # the norms of all blocks are most often alike
        _known[key] = _tried(module, eps, *how)
    return _known[key]


_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = frozenset((bool, int, float, str, type(None), torch.Size))
_known: dict[object, bool] = {}  # of probes, by all that they depend on


def _tried(
    module: nn.Module,
    eps: float,
    kind: Literal["rms", "layer"],
    offset: float,
    scales: bool,
    each: bool,
    shape: torch.Size,
    biased: bool,
) -> bool:
    """The probe of `computes`, of a weight of such a shape."""
    forward = cast("Callable[..., Tensor]", type(module).forward)
    numbers = torch.arange(3 * shape[-1], dtype=torch.float32, device="cpu").view(3, -1)
    weight = (1 + torch.arange(shape.numel(), dtype=torch.float32, device="cpu").view(shape)).sin()
    weight, rows = weight if scales else torch.ones_like(weight), (0.7 * numbers).cos()
    bias = numbers[1].sin() if biased else None
    x = torch.stack([rows[0], rows[1] * max(eps, 1e-12) ** 0.5, rows[2] * 30 + 20])
    own = {"weight": weight} if scales else {}
    own |= {} if bias is None else {"bias": bias}
    probe = copy(module)
    probe.__dict__["_parameters"] = dict.fromkeys(module._parameters) | {
        name: nn.Parameter(value) for name, value in own.items()
    }
    x = x[:, None].expand(-1, len(weight), -1) if each else x
    with torch.no_grad():
        found = forward(probe, x)
        heads = zip(x.unbind(1), weight, strict=True) if each else [(x, weight)]
        if kind == "layer":
            made = [reference.layer_norm(one, own + offset, bias, eps)[0] for one, own in heads]
        else:
            made = [reference.rms_norm(one, own + offset, eps)[0] for one, own in heads]
    expected = torch.stack(made, 1).view(x.shape)
    return found.shape == x.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def clamps(experts: nn.Module) -> bool:
    """Whether what gates experts is what `grouped_reference.gated` makes of act "clamped": tried in float32
    on both sides of its limit."""
    x = torch.linspace(-12, 12, 60, device="cpu").view(3, 20)[:, torch.arange(19, -1, -1)] * 1.01
    with torch.no_grad():
        found = cast("Any", experts)._apply_gate(x)
    expected = grouped_reference.gated(x, torch.ones(3), "clamped")
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _is_scale(module: nn.Module, biased: bool, each: bool) -> bool:
    """Whether a module holds a weight [n], where `biased` a bias [n] or none too, and nothing else; `each`: a
    weight [heads, n] alone."""
    own = module._parameters
    if not {"weight"} <= set(own) <= {"weight", *(["bias"] if biased and not each else [])}:
        return False
    if module._modules or module._buffers:
        return False
    return own["weight"] is not None and all(one.dim() == 1 + each for one in own.values() if one is not None)
