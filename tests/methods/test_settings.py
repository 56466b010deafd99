"""The settings that editors see are those of the configs."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import reduce
from operator import or_
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_overloads, get_type_hints

import pytest

from petune.methods import METHODS, wrap
from petune.methods.settings import SharedSettings


def overload_of(method: str) -> type:
    """The settings that `wrap`'s overload for the method unpacks."""
    for one in get_overloads(wrap):
        hints = get_type_hints(one, include_extras=True)
        if get_origin(hints["method"]) is Literal and method in get_args(hints["method"]):
            return get_args(hints["settings"])[0]
    raise AssertionError(f"wrap has no overload for {method}")


@pytest.mark.parametrize("method", METHODS)
def test_an_overload_of_wrap_names_every_setting_with_its_type(method: str) -> None:
    hints, shared = get_type_hints(overload_of(method)), get_type_hints(SharedSettings)
    own = {name: as_given(kind) for name, kind in get_type_hints(METHODS[method].config).items()}
    assert {name: kind for name, kind in hints.items() if name not in shared} == own
    general = inspect.signature(wrap).parameters
    assert list(shared) == [name for name in general if general[name].kind is inspect.Parameter.KEYWORD_ONLY]


def as_given(kind: Any) -> Any:
    """The type of a setting as `wrap` takes it: any sequence where the frozen config holds a tuple."""
    if isinstance(kind, UnionType):
        return reduce(or_, map(as_given, get_args(kind)))
    return Sequence[get_args(kind)[0]] if get_origin(kind) is tuple else kind
