"""Every problem of a written recipe at once, in the user's words: place, key path, expected against found,
and what to write instead."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from petune.errors import Problem
from petune.kernels.configs import KEEPS, MemoryConfig
from petune.methods.configs import METHODS
from petune.parallel.configs import BACKENDS, ParallelConfig
from petune.recipe.raw import (
    AUTO,
    MEMORY,
    PARALLEL,
    SECTIONS,
    FoundProblem,
    Written,
    as_mapping,
    show,
)
from petune.recipe.rules import broken_rules
from petune.recipe.schema import Recipe, section_model
from petune.recipe.suggest import meant_value, suggest
from petune.recipe.yaml_lines import MAX_PROBLEMS, KeyPath, dotted, scalar, short, write_scalar
from petune.tasks.configs import OF_TASKS, DataConfig, choices_of


def validate(written: Written) -> tuple[dict[str, Any], list[FoundProblem]]:
    """The values of a Recipe, and all that is wrong with them in the order of the file: names, types and
    ranges, rules between keys."""
    tree = written.tree
    if isinstance(tree.get("version", 1), int) and tree.get("version", 1) != 1:
        return {}, [_other_version(written)]
    method = tree.get("method")
    method_name = method.get("name") if isinstance(method, dict) else method
    method_name = method_name if isinstance(method_name, str) else None
    values = {key: value for key, value in tree.items() if key not in (*SECTIONS, PARALLEL)}
    data, problems = _section(written, "data", DataConfig, "", method_name)
    if method_name in METHODS:
        values["method"], more = _section(
            written, "method", METHODS[method_name].config, method_name, method_name
        )
        problems += more
    else:
        values["method"] = None
        problems.append(_no_method(written, method_name))
    values["data"] = data
    for key, config in {MEMORY: MemoryConfig, **OF_TASKS}.items():
        values[key], more = _section(written, key, config, "", method_name)
        problems += more
    values["parallel"], more = _parallel(written)
    problems += more
    problems = _check(Recipe, values, written, (), method_name) + problems
    problems += broken_rules(written, values, [path for path, _ in problems])
    order = {path: index for index, path in enumerate(written.places)}
    return values, sorted(
        problems, key=lambda one: next((order[up] for up in _upwards(one[0]) if up in order), -1)
    )


def _upwards(path: KeyPath) -> Iterator[KeyPath]:
    return (path[:end] for end in range(len(path), 0, -1))


def _section(
    written: Written, key: str, config: type, name: str, method_name: str | None
) -> tuple[Any, list[FoundProblem]]:
    """The config dataclass written under `key`, None when it cannot be made."""
    given = as_mapping((key,), written.tree.get(key))
    if given is None:
        missing = key not in written.tree
        what = f"{key} is missing" if missing else f"{key} does not take this value"
        found = None if missing else show(written.tree[key])
        return None, [
            (
                (key,),
                Problem(what, written.where((key,)), _FORMS[key], found, f"for example  {_EXAMPLES[key]}"),
            )
        ]
    problems = _check(section_model(config, name), given, written, (key,), method_name)
    if problems:
        return None, problems
    return config(
        **{setting: value for setting, value in given.items() if not (name and setting == "name")}
    ), []


def _parallel(written: Written) -> tuple[ParallelConfig, list[FoundProblem]]:
    """The axes written under `parallel` that are right by themselves, and what is wrong with the others."""
    value = written.tree.get(PARALLEL)
    if value == AUTO:
        return ParallelConfig(auto=True), []
    section = as_mapping((PARALLEL,), value)
    if section is None:
        what, place = "parallel does not take this value", written.where((PARALLEL,))
        expected = f"none, auto, {', '.join(BACKENDS)}, or a mapping of these to settings"
        remedy = "for example  parallel: {dp: 2}, or parallel=dp:2 on a command line"
        return ParallelConfig(), [((PARALLEL,), Problem(what, place, expected, show(value), remedy))]
    axes: dict[str, Any] = {}
    problems: list[FoundProblem] = []
    for name, given in section.items():
        wrong = (
            _axis(written, name, BACKENDS[name], given)
            if name in BACKENDS
            else [_no_backend(written, name, len(problems))]
        )
        problems += wrong
        if not wrong:
            axes[name] = BACKENDS[name](**as_mapping((PARALLEL, name), given) or {})
    return ParallelConfig(**axes), problems


def _axis(written: Written, name: str, config: type, given: Any) -> list[FoundProblem]:
    path = (PARALLEL, name)
    settings = as_mapping(path, given)
    if settings is not None:
        return _check(section_model(config), settings, written, path, None)
    expected = "a whole number of processes, or a mapping of settings, or null"
    remedy = f"for example  parallel: {{{name}: 2}}"
    return [
        (
            path,
            Problem(
                f"{dotted(path)} does not take this value", written.where(path), expected, show(given), remedy
            ),
        )
    ]


def _no_backend(written: Written, name: str, before: int) -> FoundProblem:
    path = (PARALLEL, name)
    alone = not isinstance(written.tree[PARALLEL], dict)  # the short form: parallel: NAME
    what = f"{'parallel' if alone else dotted(path)}: no such backend"
    # beyond what is shown, time spent for nobody
    meant = suggest(path, None) if before < MAX_PROBLEMS else None
    return path, Problem(
        what,
        written.where(path),
        f"one of none, auto, {', '.join(BACKENDS)}",
        show(name) if alone else None,
        meant,
    )


_EXAMPLES = {
    "model": "model: demo:minilm",
    "data": "data: demo:docstrings",
    "method": "method: lora",
    "memory": "memory: input",
    **{key: f"{key}: {getattr(config(), SECTIONS[key])}" for key, config in OF_TASKS.items()},
}
_FORMS = {
    "data": "a file, folder, glob, demo:NAME or hub id, or a mapping with path",
    "memory": f"one of {', '.join(KEEPS)}, or a mapping of settings",
    **{
        key: f"one of {', '.join(choices_of(config))}, or a mapping of settings"
        for key, config in OF_TASKS.items()
    },
}


def _no_method(written: Written, name: str | None) -> FoundProblem:
    given = written.tree.get("method")
    path: KeyPath = ("method", "name") if isinstance(given, dict) and "name" in given else ("method",)
    if "method" not in written.tree:
        return path, Problem(
            "method is missing",
            written.where(path),
            ", ".join(METHODS),
            remedy=f"for example  {_EXAMPLES['method']}",
        )
    if isinstance(given, dict) and "name" not in given:
        remedy = "for example  method: {name: lora, r: 16}"
        return path, Problem("method.name is missing", written.where(path), ", ".join(METHODS), remedy=remedy)
    meant = _perhaps(meant_value(name or "", tuple(METHODS)))
    found = show(name or (given.get("name") if isinstance(given, dict) else given))
    return path, Problem(
        f"{dotted(path)}: no such method", written.where(path), "one of " + ", ".join(METHODS), found, meant
    )


def _other_version(written: Written) -> FoundProblem:
    found = show(written.tree["version"])
    remedy = "set version: 1 and check the keys, or use the petune release that reads it"
    return ("version",), Problem(
        "the recipe is of another version of the format", written.where(("version",)), "1", found, remedy
    )


def _check(
    model: type[BaseModel], values: Mapping[str, Any], written: Written, at: KeyPath, method_name: str | None
) -> list[FoundProblem]:
    """One problem per wrong key of a section, in the user's words."""
    try:
        model.model_validate(dict(values))
    except ValidationError as error:
        wrong: dict[str, list[Any]] = {}
        for one in error.errors(include_url=False, include_context=False):
            wrong.setdefault(str(one["loc"][0]), []).append(one)
        # beyond what is shown, a suggestion would be time spent for nobody
        shown = dict(list(wrong.items())[:MAX_PROBLEMS])
        rest = [
            ((*at, key), Problem(f"{dotted((*at, key))} is wrong", written.where((*at, key))))
            for key in wrong
            if key not in shown
        ]
        return [
            _problem(model, key, faults, written, at, method_name) for key, faults in shown.items()
        ] + rest
    return []


def _problem(
    model: type[BaseModel],
    key: str,
    faults: list[Any],
    written: Written,
    at: KeyPath,
    method_name: str | None,
) -> FoundProblem:
    path = (*at, key)
    kind = faults[0]["type"]
    if kind == "extra_forbidden":
        of = f" of {method_name if at[0] == 'method' else at[-1]}" if at else ""
        return path, Problem(
            f"{dotted(path)} is not a setting{of}", written.where(path), remedy=suggest(path, method_name)
        )
    if kind == "missing":
        example = _EXAMPLES.get(key if not at else at[0])
        return path, Problem(
            f"{dotted(path)} is missing", written.where(path), remedy=example and f"for example  {example}"
        )
    info = model.model_fields[key]
    deepest = max((_inside(path, fault["loc"][1:], written) for fault in faults), key=len)
    # a name that is none of those the mapping may hold
    if any(fault["loc"][-1] == "[key]" for fault in faults):
        names = _choices(get_args(info.annotation)[0])
        return path, Problem(
            f"{dotted(path)} does not take the name {deepest[-1]!r}",
            written.where(deepest),
            ", ".join(names),
            None,
            _perhaps(meant_value(deepest[-1], names)),
        )
    value = functools.reduce(_item, deepest, written.tree)
    what = f"{dotted(deepest)} {_fault(faults)}"
    expected = _expected(info.annotation, info.metadata)
    return path, Problem(
        what, written.where(deepest), expected, show(value), _value_remedy(info.annotation, value)
    )


def _inside(path: KeyPath, location: Sequence[str | int], written: Written) -> KeyPath:
    """The part of a list or mapping pydantic complains of; its names for union members are no part of the
    path."""
    for part in location:
        value = functools.reduce(_item, path, written.tree)
        if (isinstance(part, int) and isinstance(value, tuple)) or (
            isinstance(value, dict) and part in value
        ):
            path = (*path, str(part))
    return path


def _item(value: Any, key: str) -> Any:
    if isinstance(value, tuple):
        return value[int(key)]
    # the short form of a section: its text stands for the setting inside
    return value.get(key) if isinstance(value, dict) else value


def _fault(faults: Sequence[Any]) -> str:
    kinds = {fault["type"] for fault in faults}
    if "finite_number" in kinds:
        return "is not a finite number"
    if kinds & {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        return "is out of range"
    return "does not take this value"


def _expected(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """What a setting takes, in words: `a whole number, at least 1, or null`."""
    if get_origin(kind) is Annotated:
        inner, *more = get_args(kind)
        return _expected(inner, [entry for one in more for entry in getattr(one, "metadata", [one])])
    if get_origin(kind) in (Union, types.UnionType):
        return ", or ".join(_expected(one, metadata) for one in get_args(kind))
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return ("one of " if len(choices) > 1 else "") + ", ".join(str(one) for one in choices)
    if get_origin(kind) is tuple:
        return f"a list [...] of {_expected(get_args(kind)[0]).removeprefix('a ')}"
    if get_origin(kind) is dict:
        key, value = (_expected(one).removeprefix("a ") for one in get_args(kind))
        return f"a mapping {{...}} of {key} to {value}"
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    return ", ".join(
        [
            words.get(kind, str(kind)),
            *filter(None, (_range(entry) for entry in metadata if kind in (int, float))),
        ]
    )


def _range(entry: Any) -> str | None:
    for name, words in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
        limit = getattr(entry, name, None)
        if limit is not None:
            return f"{words} {limit:.12g}" if isinstance(limit, float) else f"{words} {limit}"
    return None


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return tuple(str(one) for one in get_args(kind))
    return tuple(choice for one in get_args(kind) for choice in _choices(one))


def _perhaps(meant: str | None) -> str | None:
    return f"did you mean: {meant}" if meant else None


def _value_remedy(kind: Any, value: Any) -> str | None:
    """What to write instead of a value of the wrong kind."""
    words = _expected(kind)
    meant = meant_value(value, _choices(kind)) if isinstance(value, str) else None
    if isinstance(value, str) and "a list" in words:
        choices = _choices(kind)
        items = [meant_value(part, choices) or part for part in re.split(r"[\s,;]+", value) if part]
        return None if choices and set(items) - set(choices) else f"write [{short(', '.join(items), 60)}]"
    if meant:
        return _perhaps(meant)
    if isinstance(value, str) and "number" in words:
        plain = value.strip().replace("_", "").replace(",", "")
        if not isinstance(scalar(plain), str | None | bool):
            return f"write the number plainly, without quotes or separators: {plain}"
    if (
        isinstance(value, str)
        and "true or false" in words
        and value.lower() in ("yes", "no", "on", "off", "y", "n")
    ):
        return f"write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
    if isinstance(value, bool | int | float) and "text" in words and not _choices(kind):
        return f'put it in quotes: "{short(write_scalar(value), 60)}"'
    return None
