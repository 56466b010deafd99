"""LoRA of experts as a server has it: one linear for each expert's gate, up and down.

        W_e = [gate_e | up_e],  B_e = [B_gate | B_up]:      both of A_e       (experts are one weight here)

All experts of a block are in the file or none, with all three linears: a server packs them as one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from petune.methods.lora_experts import LoraExperts
from petune.models.experts import is_experts, sizes_of, weights_of
from petune.saving.fingerprint import plain_name
from petune.saving.servers import ExpertNames

GATE, UP, DOWN = LINEARS = ("gate_proj", "up_proj", "down_proj")  # here, behind an expert's number
_HERE = "mlp.experts"  # of a block
Factors3 = tuple[Tensor, Tensor, float]  # A [r, in], B [out, r] and the scale of B A


class ExpertLinear(NamedTuple):
    """One linear of one expert: those outputs `rows` of a weight of a module of experts, at `path`."""

    path: str
    weight: str
    expert: int
    rows: slice

    def of(self, value: Tensor) -> Tensor:
        """That part of a weight [E, out, in] or of what is added to it, or of B [E, out, r]."""
        return value[self.expert][self.rows]


def parts(model: nn.Module) -> dict[str, ExpertLinear]:
    """{name of a linear of an expert: where it is} of all experts, tuned or not."""
    found: dict[str, ExpertLinear] = {}
    for own, module in model.named_modules():
        if not is_experts(module) or weights_of(module)[0] != "gate_up_proj":
            continue
        path = plain_name(own)
        count, outputs, _ = sizes_of(module, "gate_up_proj")
        half = outputs // 2
        places = {GATE: slice(half), UP: slice(half, None), DOWN: slice(None)}
        for expert in range(count):
            for leaf, rows in places.items():
                weight = DOWN if leaf == DOWN else "gate_up_proj"
                found[f"{path}.{expert}.{leaf}"] = ExpertLinear(path, weight, expert, rows)
    return found


def renamed(
    found: Mapping[str, ExpertLinear], names: ExpertNames, renames: Mapping[str, str]
) -> dict[str, str]:
    """{name of a linear of an expert: its name in the class that is served}. renames: of modules."""
    leaves = dict(zip(LINEARS, (names.gate, names.up, names.down), strict=True))
    assert all(renames[part.path].endswith(_HERE) for part in found.values())
    return {
        name: f"{renames[part.path].removesuffix(_HERE)}{names.at}.{part.expert}"
        f".{leaves[name.rpartition('.')[2]]}"
        for name, part in found.items()
    }


def factors_of(experts: Mapping[str, LoraExperts], found: Mapping[str, ExpertLinear]) -> dict[str, Factors3]:
    """The factors of every linear of tuned experts; of a weight without an update they have no rank."""
    made: dict[str, Factors3] = {}
    for name, part in found.items():
        if (module := experts.get(part.path)) is None:
            continue
        if part.weight in module.scales:
            a, b = module.factors(part.weight)
            made[name] = a[part.expert].detach(), part.of(b.detach()), module.scales[part.weight]
        else:
            _, outputs, inputs = sizes_of(module, part.weight)
            a, b = torch.zeros(0, inputs), torch.zeros(outputs, 0)[part.rows]
            made[name] = a, b, next(iter(module.scales.values()))
    return made


def changes_of(
    experts: Mapping[str, LoraExperts], found: Mapping[str, ExpertLinear]
) -> Iterator[tuple[str, Tensor]]:
    """What was trained, linear by linear: [out, in], a zero for a weight without an update."""
    for path, module in experts.items():
        changes = {name: one.change for name, one in module.weight_changes().items()}
        for name, part in found.items():
            if part.path != path:
                continue
            own = changes.get(part.weight)
            yield name, torch.zeros(()) if own is None else part.of(own)
