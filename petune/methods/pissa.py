"""PiSSA (Meng et al. 2024, arXiv:2404.02948): LoRA that starts from the principal components of a weight.

        W = U S V^T;    A = sqrt(S_r / s) V_r^T,    B = U_r sqrt(S_r / s),    W <- W - s B A

The frozen weight is what the components leave, so at the start the layer computes what the base did, but for
rounding to the weight's dtype. The layer keeps A and B as they were at the start: with them the base can be
computed again, and a file says the tuning as plain LoRA of twice the rank on the base itself,
s (B A - B_0 A_0).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models import family_of
from petune.models.joined import part_at
from petune.models.tuned_linear import TunedLinear, tuned_layers

START = ("start_A", "start_B")  # A and B as they were before anything trained


def principal(weight: Tensor, r: int, iterations: int | None) -> tuple[Tensor, Tensor]:
    """sqrt(S_r) V_r^T [r, in] and U_r sqrt(S_r) [out, r] of `weight` [out, in], float32 or wider.

    iterations: None for the exact components, to rounding; else as many steps of subspace iteration (Halko et
    al. 2011, arXiv:0909.4061, algorithm 4.4) from a start that torch's global generator draws.
    """
    if weight.is_meta:  # of a model that is only planned
        return weight.new_empty(r, weight.shape[1]), weight.new_empty(weight.shape[0], r)
    if iterations is None:
        spanned, iterations = _dominant(weight, r), 1  # the step takes back what the square has cost
    else:
        spanned = torch.randn(weight.shape[1], r, dtype=weight.dtype, device=weight.device)
    for _ in range(iterations):
        spanned = torch.linalg.qr(weight.T @ (weight @ spanned)).Q
    u, s, vh = torch.linalg.svd(weight @ spanned, full_matrices=False)
    root = s.sqrt()
    return root[:, None] * (vh @ spanned.T), (u * root).contiguous()  # U comes column by column


def _dominant(weight: Tensor, r: int) -> Tensor:
    """What spans the r right singular vectors of the largest values, [in, r]: eigenvectors of the smaller of
    W^T W and W W^T, which cost a fraction of a singular value decomposition."""
    tall = weight.shape[0] >= weight.shape[1]
    vectors: Tensor = torch.linalg.eigh(weight.T @ weight if tall else weight @ weight.T).eigenvectors[:, -r:]
    return vectors if tall else weight.T @ vectors


def refuse_unfit(layers: Mapping[str, nn.Module], ranks: Mapping[str, int], model: nn.Module) -> None:
    """Raise UsageError for a layer whose weight cannot be split into its components and the rest. ranks: by
    name of the layer."""
    held = Counter(id(module._parameters.get("weight")) for module in model.modules())
    for name, layer in layers.items():
        weight, reason = cast("Tensor", layer.weight), None
        if part_at(model, family_of(model), name) is not None:
            reason = "a part of a linear does not start from components: name the whole in `targets`"
        elif isinstance(layer, nn.Embedding):
            reason = "an embedding has no components to start from"
        elif isinstance(layer, nn.Conv2d):
            reason = "a convolution has no components to start from"
        elif held[id(weight)] > 1:
            reason = "its weight is tied to another module's, which would lose the components"
        elif ranks[name] > min(weight.shape):
            reason = f"r {ranks[name]} is more than the {min(weight.shape)} components it has"
        if reason is not None:
            raise UsageError(
                f"init: pissa: {reason}", where=name, remedy="name it in `exclude`, or init: auto"
            )


def has_start(layer: nn.Module) -> bool:
    """Whether a layer started from components of its weight."""
    return START[0] in layer._parameters


def started(model: nn.Module) -> dict[str, TunedLinear]:
    """The layers that started from components of their weights, by full name."""
    found = ((name, layer) for name, layer in tuned_layers(model) if isinstance(layer, TunedLinear))
    return {name: layer for name, layer in found if has_start(layer)}


def starts(model: nn.Module) -> dict[str, Tensor]:
    """The factors that layers started from, by full name."""
    return {f"{name}.{own}": getattr(layer, own) for name, layer in started(model).items() for own in START}


def in_difference_form(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tuned `state` of a model as plain LoRA on its base: A over A_0 [2 r, in], B beside -B_0
    [out, 2 r]."""
    found = dict(state)
    for name, layer in started(model).items():
        a, b = (getattr(layer, start).detach() for start in START)
        found[f"{name}.lora_A"] = torch.cat([state[f"{name}.lora_A"], a])
        found[f"{name}.lora_B"] = torch.cat([state[f"{name}.lora_B"], -b], dim=1)
    return found
