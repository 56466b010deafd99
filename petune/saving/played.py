"""An exported adapter as its server would load it: names looked up in the class that is served, a scale of
alpha / r whatever trained it, and the update that this gives each module.

Nothing here knows how the adapter was trained: what the files do not say, the server cannot know either.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import FileError
from petune.files.safetensors import read_json, read_tensors
from petune.methods import without_tuning
from petune.models.frozen_weight import dense_of
from petune.saving.gguf import ADAPTER, read_gguf
from petune.saving.peft import CONFIG, PREFIX, TENSORS
from petune.saving.served_experts import DOWN, GATE, UP
from petune.saving.servers import Server

_ENDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
}


@dataclass(frozen=True)
class Served:
    """What a server adds to a linear: scale * B A. a [r, in], b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float

    def delta(self) -> Tensor:
        """The update of the weight, [out, in]."""
        return self.scale * (self.b @ self.a)

    def of(self, x: Tensor) -> Tensor:
        """What it adds for inputs x [..., in], on their device."""
        a, b = self.a.to(x.device), self.b.to(x.device)
        return F.linear(F.linear(x.to(a.dtype), a), b) * self.scale


def play(
    folder: Path, server: Server, modules: Mapping[str, nn.Module], config: Any
) -> tuple[dict[str, Served], dict[str, Tensor]]:
    """What `server` makes of a folder: updates by the served class's names of `modules`, and tensors of
    modules that replace the base's.

    Raises FileError for what the server would drop or could not place.
    """
    if (folder / ADAPTER).exists():
        factors, alpha = read_gguf(folder / ADAPTER, modules, config)
        return {name: Served(a, b, alpha / b.shape[1]) for name, (a, b) in factors.items()}, {}
    fields, tensors = read_json(folder / CONFIG), read_tensors(folder / TENSORS)
    if not isinstance(fields["lora_alpha"], int) or (server.ranks and fields["r"] not in server.ranks):
        what = f"alpha {fields['lora_alpha']} and rank {fields['r']} are not both whole and legal"
        raise FileError(what, where=str(folder / CONFIG))
    scale = fields["lora_alpha"] / fields["r"]
    halves: dict[str, dict[str, Tensor]] = {}
    whole = {}
    for key, value in tensors.items():
        name = key.removeprefix(PREFIX)
        end = next((end for end in _ENDS if name.endswith(end)), None)
        module = name.removesuffix(end or f".{name.rpartition('.')[2]}")
        if module not in modules or (end is None and module.rpartition(".")[2] not in server.heads):
            raise FileError(f"{server.title} has no place for {key}", where=str(folder / TENSORS))
        if end is None:
            whole[name] = value
        else:
            halves.setdefault(module, {})[_ENDS[end]] = value
    if ranks := {len(half["a"]) for half in halves.values()} - {fields["r"]}:
        what = f"the config says rank {fields['r']}, a tensor has {ranks.pop()}"
        raise FileError(what, where=str(folder / TENSORS))
    _look_for_partners(folder, server, modules, halves)
    _look_for_experts(folder, server, modules, halves)
    return {name: Served(half["a"], half["b"], scale) for name, half in halves.items()}, whole


def _look_for_partners(
    folder: Path, server: Server, modules: Mapping[str, nn.Module], found: Collection[str]
) -> None:
    """Raise FileError for a module whose partners in one product are not in the file: the server asks for
    them by name."""
    for name in found:
        parent, _, leaf = name.rpartition(".")
        for other in next((group for group in server.together if leaf in group), ()):
            if (partner := f"{parent}.{other}") in modules and partner not in found:
                raise FileError(
                    f"{server.title} looks for {partner} beside {leaf}", where=str(folder / TENSORS)
                )


def _look_for_experts(
    folder: Path, server: Server, modules: Mapping[str, nn.Module], found: Collection[str]
) -> None:
    """Raise FileError for a linear of an expert that is not in the file where others of its block are: they
    are packed as one tensor, all of them."""
    tuned = {above for name in found if (above := _experts_of(name, server)) is not None}
    for name in modules:
        if _experts_of(name, server) in tuned and name not in found:
            what = f"{server.title} packs all experts of a block, and finds none of {name}"
            raise FileError(what, where=str(folder / TENSORS))


def _experts_of(name: str, server: Server) -> str | None:
    """The experts that a linear is one of, by its name in the class that is served; None for others."""
    above, _, _ = name.rpartition(".")
    experts, _, number = above.rpartition(".")
    known = number.isdigit() and any(experts.endswith(f".{names.at}") for names in server.experts.values())
    return experts if known else None


@contextmanager
def serving(
    model: nn.Module, updates: Mapping[str, Served], experts: Mapping[str, Mapping[str, Served]]
) -> Iterator[None]:
    """The model as the server computes it: the base without its tuning, and the updates by name of a module,
    for as long as the block lasts. experts: those of linears of experts, "3.gate_proj", by module."""
    with without_tuning(model):
        hooks = {name: _adding(update) for name, update in updates.items()}
        hooks |= {name: _mixing(own) for name, own in experts.items()}
        handles = [model.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _adding(update: Served) -> Any:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if isinstance(module, nn.Embedding):
            a, b = update.a.to(output.device), update.b.to(output.device)
            added = F.linear(F.embedding(inputs[0], a.T), b) * update.scale
        else:
            added = update.of(inputs[0])
        return (output + added).to(output.dtype)

    return add


def _mixing(updates: Mapping[str, Served]) -> Any:
    """A hook that computes experts one after the other, each as three linears with an update."""

    def mix(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        hidden, index, weights = inputs
        made = torch.zeros_like(output, dtype=torch.promote_types(output.dtype, torch.float32))
        for expert in range(module.num_experts):
            tokens, chosen = torch.where(index == expert)
            x, up_weight = hidden[tokens], dense_of(module.gate_up_proj[expert])
            gate, up = (
                F.linear(x, half) + updates[f"{expert}.{leaf}"].of(x)
                for half, leaf in zip(up_weight.chunk(2), (GATE, UP), strict=True)
            )
            inner = (module.act_fn(gate) * up).to(output.dtype)
            y = F.linear(inner, dense_of(module.down_proj[expert])) + updates[f"{expert}.{DOWN}"].of(inner)
            made.index_add_(0, tokens, (y * weights[tokens, chosen, None]).to(made.dtype))
        return made.to(output.dtype)

    return mix
