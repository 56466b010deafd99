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


def refuse_unfit(name: str, layer: nn.Module) -> None:
    """Raise UsageError for a convolution whose update is no update of its weight in peft's layout: one of
    several groups, which peft cannot merge, or that is dilated or pads with other than zeros, which peft's A
    does not know."""
    if not isinstance(layer, nn.Conv2d):
        return
    found = {"groups": layer.groups, "dilation": layer.dilation, "padding_mode": layer.padding_mode}
    fit = {"groups": 1, "dilation": (1, 1), "padding_mode": "zeros"}
    for setting, value in found.items():
        if value != fit[setting]:
            raise UsageError(
                f"LoRA beside a convolution wants {setting} {fit[setting]}",
                where=name,
                found=f"{setting} {value}",
                remedy="narrow `targets` or name it in `exclude`",
            )
