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

import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import FileError
from petune.files.safetensors import read_json, read_tensors
from petune.methods import without_tuning
from petune.saving.gguf import ADAPTER, read_gguf
from petune.saving.peft import CONFIG, PREFIX, TENSORS
from petune.saving.servers import Server

_ENDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
}


@dataclass(frozen=True)
class Served:
    """What a server adds to a module: scale * B A. a [r, in], b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float

    def delta(self) -> Tensor:
        """The update of the weight, [out, in]."""
        return self.scale * (self.b @ self.a)


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


@contextmanager
def serving(model: nn.Module, updates: Mapping[str, Served]) -> Iterator[None]:
    """The model as the server computes it: the base without its tuning, and the updates by name of a module,
    for as long as the block lasts."""
    with without_tuning(model):
        handles = [
            model.get_submodule(name).register_forward_hook(_adding(update))
            for name, update in updates.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _adding(update: Served) -> Any:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        a, b = update.a.to(output.device), update.b.to(output.device)
        if isinstance(module, nn.Embedding):
            inner = F.embedding(inputs[0], a.T)
        else:
            inner = F.linear(inputs[0].to(a.dtype), a)
        return (output + F.linear(inner, b) * update.scale).to(output.dtype)

    return add
