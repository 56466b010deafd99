"""The tensors of a resumable state: what is tuned, the optimizer's moments, the generators. Written into and read from one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from petune import checkpoint
from petune.errors import FileError, Problem

TENSORS, FACTS = "state.safetensors", "state.json"


def write_state(folder: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write everything that a step changes, beside the progress, into `folder`."""
    moments, optimizer_facts = checkpoint.pack_optimizer(optimizer, tuned)
    rng, rng_facts = checkpoint.rng_state()
    tensors = {f"tuned/{name}": value.detach() for name, value in tuned.items()}
    checkpoint.write_tensors(folder / TENSORS, tensors | moments | rng)
    checkpoint.write_json(folder / FACTS, {"optimizer": optimizer_facts, "rng": rng_facts})


def restore_state(folder: Path, tuned: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Put a written state back, bit for bit. Raises FileError when it is of other tensors than these."""
    tensors, facts = checkpoint.read_tensors(folder / TENSORS), checkpoint.read_json(folder / FACTS)
    fill(tuned, tensors, folder)
    checkpoint.restore_optimizer(optimizer, tuned, tensors, facts["optimizer"], str(folder))
    checkpoint.set_rng_state(tensors, facts["rng"], str(folder))


def fill(tuned: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copy the tuned tensors of a state into the model's. Raises FileError naming up to ten that do not fit."""
    saved = {name.removeprefix("tuned/"): value for name, value in tensors.items() if name.startswith("tuned/")}
    wrong = sorted(set(saved) ^ set(tuned)) or [name for name in saved if saved[name].shape != tuned[name].shape]
    if wrong:
        raise FileError([Problem("is not the tensor this recipe trains", where=f"{folder}: {name}") for name in wrong[:10]])
    with torch.no_grad():
        for name, value in saved.items():
            tuned[name].copy_(value)


def refuse_tuned_folder(folder: Path) -> None:
    """Raise FileError for a folder of tuned weights, from which nothing can be resumed: it has no optimizer and no step."""
    if any((folder / name).is_file() for name in ("petune.json", "adapter_config.json")):
        raise FileError(
            "holds tuned weights, not a state to resume from", where=str(folder), remedy=f"start a new run from them: init_adapter={folder}"
        )
