"""How peft lays out the factors of experts: by `target_parameters`, where it wraps a module once for each of
its weights that is tuned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from petune.errors import FileError
from petune.log import warn
from petune.methods import lora_experts
from petune.models.experts import is_experts, weights_of
from petune.models.tuned_linear import tuned_layers

_CONVERTS = "0.21.2"
# Of the families with a table, those that transformers' list of conversions counts as Qwen2-MoE's kin. It has
# no entry for Qwen2-MoE itself, whose files peft therefore reads as they are.
_CONVERTED = ("qwen3_moe", "qwen3_next")
_OLDER = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class FactorPlace:
    """Where a file has the factors A [E, r, in] or B [E, out, r] of a weight of experts: as [E r, in] and
    [out, r E], as if they were of one layer.

    shape: in petune.
    """

    key: str
    shape: tuple[int, ...]

    @property
    def in_file(self) -> tuple[int, ...]:
        """The shape there."""
        experts, first, last = self.shape
        return (experts * first, last) if self._is_a else (first, last * experts)

    @property
    def _is_a(self) -> bool:
        return self.key.endswith("lora_A.weight")

    def to_file(self, factors: Tensor) -> Tensor:
        """The factors as a file has them."""
        return (factors if self._is_a else factors.permute(1, 2, 0)).reshape(self.in_file).contiguous()

    def from_file(self, value: Tensor) -> Tensor:
        """The factors that a file has."""
        experts, first, last = self.shape
        found = value.reshape(self.shape) if self._is_a else value.view(first, last, experts).permute(2, 0, 1)
        return found.contiguous()


def places(module: nn.Module, path: str, ranks: Mapping[str, int]) -> dict[str, FactorPlace]:
    """{name in petune: where it is in a file} of the factors beside weights of experts at `path`, by their
    ranks. Of several wrappers that of the last weight is the outermost."""
    weights = [name for name, _ in module.named_parameters(recurse=False) if name in ranks]
    found = {}
    for depth, weight in enumerate(reversed(weights)):
        for own, shape in lora_experts.shapes(module, weight, ranks[weight]).items():
            side = own.removeprefix(f"{weight}_")
            found[f"{path}.{own}"] = FactorPlace(f"{path}.{'base_layer.' * depth}{side}.weight", shape)
    return found


def warn_of_conversion(model: nn.Module) -> None:
    """Say of a tuning of dense MLPs in a model with experts that peft cannot read it, or computes something
    else: of these families it takes their names for older ones of experts (its issue 3711)."""
    family = str(getattr(getattr(model, "config", None), "model_type", ""))
    mlp = next((name for name, _ in tuned_layers(model) if name.rpartition(".")[2] in _OLDER), None)
    if family in _CONVERTED and mlp is not None and any(is_experts(module) for module in model.modules()):
        warn(
            f"peft {_CONVERTS} takes {mlp} for an expert's, as it does every {mlp.rpartition('.')[2]} of"
            f" {family}: it does not read this folder right, petune does; for peft, exclude such linears"
        )


def weights_named(
    modules: Mapping[str, nn.Module], entries: Iterable[str], file: Path
) -> dict[str, tuple[str, ...]]:
    """The weights of experts that `target_parameters` name, by the path of their module.

    Raises FileError for an entry that names another parameter, or none.
    """
    experts = {path: weights_of(module) for path, module in modules.items() if is_experts(module)}
    names = {f".{path}.{weight}": (path, weight) for path, own in experts.items() for weight in own}
    found: dict[str, tuple[str, ...]] = {}
    for entry in sorted(set(entries)):
        hits = [place for name, place in names.items() if name.endswith(f".{entry}")]
        if not hits:
            raise FileError(
                "tunes a parameter that is no weight of experts",
                where=f"{file}  target_parameters",
                expected=", ".join(sorted({weight for own in experts.values() for weight in own})) or "none",
                found=entry,
                remedy="load it with peft, merge it into its base (merge_and_unload) and save that",
            )
        for path, weight in hits:
            found[path] = (*found.get(path, ()), weight)
    return found
