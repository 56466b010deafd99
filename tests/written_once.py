"""Folders that a function writes alike on every call: what it has written once in this process is written
again as it was."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch


def written_once(write: Callable[..., Path]) -> Callable[..., Path]:
    """`write(folder, ...)` that does its work once for the same arguments, and leaves torch's generator each
    time where that work has left it."""
    made: dict[str, tuple[dict[str, bytes], torch.Tensor]] = {}

    @wraps(write)
    def written(folder: Path, *given: Any, **named: Any) -> Path:
        key = repr((given, sorted(named.items())))
        if key not in made:
            with tempfile.TemporaryDirectory() as place:
                write(Path(place), *given, **named)
                contents = {path.name: path.read_bytes() for path in Path(place).iterdir()}
            made[key] = contents, torch.get_rng_state()
        contents, generator = made[key]
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            folder.joinpath(name).write_bytes(content)
        torch.set_rng_state(generator)
        return folder

    return written
