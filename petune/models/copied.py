"""Copies of models, three times as fast as by copy.deepcopy: nearly all that modules hold are empty tables of
hooks, plain values and other modules."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)
_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size))
_TABLES, _EMPTIED = frozenset((dict, OrderedDict)), frozenset((dict, OrderedDict, set, list))


def copied(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """What `copy.deepcopy(module, memo)` gives: what is there twice stays one, and what says itself how it is
    copied is copied so. memo: by id, what stands for what."""
    found: Module = _value(module, {} if memo is None else memo)
    return found


def _value(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    number = id(value)
    if number in memo:
        return memo[number]
    if kind in _EMPTIED and not value:
        made = kind()
    elif kind in _TABLES:
        made = memo[number] = kind()
        for key, part in value.items():
            made[key if type(key) is str else deepcopy(key, memo)] = _value(part, memo)
    elif (by_itself := getattr(kind, "__deepcopy__", None)) is not None:
        made = by_itself(value, memo)
    elif isinstance(value, nn.Module) or kind.__module__.startswith("petune."):
        made = _object(value, memo)
    else:
        made = deepcopy(value, memo)
    memo[number] = made
    return made


def _object(value: Any, memo: dict[int, Any]) -> Any:
    """The copy of a module, or of what holds some, such as a stack."""
    make, given, *state = value.__reduce_ex__(4)
    if not (state and type(state[0]) is dict) or any(part is not None for part in state[1:]):
        return deepcopy(value, memo)
    made = memo[id(value)] = make(*(one if isinstance(one, type) else deepcopy(one, memo) for one in given))
    own = {name: part if type(part) in _PLAIN else _value(part, memo) for name, part in state[0].items()}
    made.__setstate__(own) if hasattr(made, "__setstate__") else made.__dict__.update(own)
    return made
