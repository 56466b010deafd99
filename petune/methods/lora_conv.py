"""LoRA beside a convolution, in peft's layout: A [r, in, height, width] is a convolution of r outputs with
the stride and padding of the base's, B [out, r, 1, 1] one of a single place. What both add to the weight is

        dW[o, c, i, j] = s sum_r B[o, r] A[r, c, i, j]
"""

from __future__ import annotations

from torch import Tensor, nn

from petune.errors import UsageError


def shapes(weight: Tensor, r: int) -> dict[str, tuple[int, ...]]:
    """The shape of each factor beside a weight [out, in, height, width]."""
    outputs, *inside = weight.shape
    return {"lora_A": (r, *inside), "lora_B": (outputs, r, 1, 1)}


def unfit(layer: nn.Module) -> tuple[str, str] | None:
    """Which setting of a convolution its update needs, to be one of its weight in peft's layout, and which it
    has; None where it fits. It does not in several groups, which peft cannot merge, nor dilated or padded
    with other than zeros, which peft's A does not know."""
    if not isinstance(layer, nn.Conv2d):
        return None
    found = {"groups": layer.groups, "dilation": layer.dilation, "padding_mode": layer.padding_mode}
    fit = {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}
    wrong = next((setting for setting, value in found.items() if value != fit[setting]), None)
    if wrong is None:
        return None
    return f"{wrong} {fit[wrong]}", f"{wrong} {found[wrong]}"


def refuse_unfit(name: str, layer: nn.Module) -> None:
    """Raise UsageError for a convolution that is `unfit`."""
    if (wrong := unfit(layer)) is not None:
        what = f"LoRA beside a convolution wants {wrong[0]}"
        raise UsageError(what, where=name, found=wrong[1], remedy="narrow `targets` or name it in `exclude`")
