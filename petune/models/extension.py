"""Classes of a model's own modules, extended in place: a module gets a subclass of its class, with a mixin
before it, and its names, state and hooks stay. `restore` gives every module its own class back."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

_EXTENDS = "petune_extends"  # attribute of a class: the one that it extends


def extend(module: nn.Module, by: type[nn.Module]) -> None:
    """Put `by` before the class of `module`; nothing where its class is extended already."""
    if not hasattr(type(module), _EXTENDS):
        # mypy takes the hash of a class for that of its objects
        module.__class__ = _extended(type(module), by)  # type: ignore[arg-type]  # a subclass of its own class


def restore(model: nn.Module) -> None:
    """Give the modules of `model` the classes that they had before `extend`."""
    for module in model.modules():
        if (base := getattr(type(module), _EXTENDS, None)) is not None:
            module.__class__ = base


@cache
def _extended(kind: type[nn.Module], by: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (by, kind), {_EXTENDS: kind, "__reduce__": _reduced})


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    """How a copy is made, in this process or another, which knows no class that is made at run time."""
    made: Any = type(module)
    return _blank, (getattr(made, _EXTENDS), made.__mro__[1]), module.__dict__


def _blank(kind: Any, by: Any) -> nn.Module:
    made = _extended(kind, by)
    return made.__new__(made)
