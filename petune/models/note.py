"""What petune says of a module, on the module itself: no state dict holds it, and a copy has it too."""

from __future__ import annotations

from typing import Generic, TypeVar, cast

from torch import nn

T = TypeVar("T")


class Note(Generic[T]):
    """One thing that may be said of a module, under the name of the attribute that it is."""

    def __init__(self, name: str) -> None:
        self.name = name

    def put(self, module: nn.Module, value: T) -> None:
        """Say it."""
        module.__dict__[self.name] = value

    def of(self, module: nn.Module) -> T | None:
        """What was said; None where nothing was."""
        return cast("T | None", module.__dict__.get(self.name))

    def taken(self, module: nn.Module) -> T | None:
        """The same, which the module forgets."""
        return cast("T | None", module.__dict__.pop(self.name, None))
