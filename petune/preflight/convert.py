"""A configuration of another program as a recipe: what its keys mean here, by the tables of `foreign`, and a
list of those that mean nothing here. Torch-free.

Every key of the file is either in the recipe, or asks for what petune does anyway, or is listed with a
reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from petune.errors import FileError, RecipeError, UsageError
from petune.preflight.foreign import PROGRAMS, ForeignProgram
from petune.preflight.meanings import KeyTable, single
from petune.preflight.reasons import WHY
from petune.recipe import Recipe, load_recipe
from petune.recipe.yaml_lines import write_scalar

_APART = ("data.config", "data.split_of", "data.files", "method.also")
_SECTIONS = {"data": "path", "method": "name", "prefer": "loss"}  # and the setting that stands first
_OF_ROWS = ("data.path", "data.format", "data.columns", "data.eval")  # which are others by `data=PATH`
_BARE: dict[str, Any] = {"model": "org/model", "data.path": "org/data"}


@dataclass(frozen=True)
class Left:
    """A key of the file that is not in the recipe, and why."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Converted:
    """A recipe made of another program's file. `defaults`: key paths that the file leaves to that program."""

    program: ForeignProgram
    recipe: Recipe
    defaults: frozenset[str]
    left: tuple[Left, ...]


def convert(file: Path, overrides: Sequence[str] = (), program: str | None = None) -> Converted:
    """Read `file`, YAML or JSON of `program` (None: told by its keys), with a recipe's settings laid over it;
    `data=PATH` leaves what the file says of lengths and packing.

    Raises FileError for a file that cannot be read, UsageError for one of no program that is known or without
    a model or data, RecipeError as `load_recipe`.
    """
    tree = _read(file)
    known = PROGRAMS[program] if program else _told(tree, file)
    leaves = _named(dict(_resolved(flat(tree, known.table))), file)
    values, left = _meanings(leaves, known)
    used = known.defaults | (known.prefer if values.get("task") == "prefer" else {})
    used = {key: value for key, value in used.items() if key not in values}
    sound = [key for key in used if key == "method.name" or _fault(key, used[key], values | used) is None]
    used = {key: used[key] for key in sound}
    whole = used | values
    given = {override.partition("=")[0].split(".")[0] for override in overrides}
    needed = {"model": "model", "data": "data.path"}
    if missing := [key for key, path in needed.items() if path not in whole and key not in given]:
        example = " ".join(f"{key}={'rows.csv' if key == 'data' else 'MODEL'}" for key in missing)
        what = f"{known.title}'s file names no {' and no '.join(missing)} that petune can read"
        raise UsageError(what, where=str(file), remedy=f"petune convert {file} {example}")
    laid = [re.sub(r"^data=(?=[^{])", "data.path=", one) for one in overrides]  # else it is all of `data`
    if laid != list(overrides):
        whole = {key: value for key, value in whole.items() if not key.startswith(_OF_ROWS)}
    recipe = load_recipe({}, whole, laid)
    return Converted(known, recipe, frozenset(used), tuple(left))


class _Once(yaml.SafeLoader):
    """Reads YAML, but no key that a mapping has twice, of which the last would be taken."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """As the base."""
        lines: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            line = key.start_mark.line + 1
            if key.value in lines:
                what = f"{key.value} is set on line {lines[key.value]} and again on line {line}"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            lines[key.value] = line
        return super().construct_mapping(node, deep)


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = _Once(file.read_text(encoding="utf-8")).get_single_data()
        dict(flat(tree, {}))  # a mapping may hold itself by an alias
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        if isinstance(error, OSError):
            why, remedy = f"cannot be read: {error.strerror}", "give the file of another program's settings"
            raise FileError(why, where=str(file), remedy=remedy) from None
        what, why = "cannot be read as YAML or JSON", str(error).splitlines()[0]
        raise FileError(what, where=str(file), found=why, remedy="check the file") from None
    if not isinstance(tree, dict):
        raise FileError("holds no settings", where=str(file), expected="keys and values")
    return tree


def _told(tree: Mapping[str, Any], file: Path) -> ForeignProgram:
    """The program whose marks the file has."""
    keys = dict(flat(tree, {}))
    found = next((one for one in PROGRAMS.values() if any(mark in keys for mark in one.marks)), None)
    if found is None:
        expected = ", ".join(program.title for program in PROGRAMS.values())
        what, remedy = "is of no program known here", "say which: --from"
        raise UsageError(what, where=str(file), expected=expected, remedy=remedy)
    return found


def flat(tree: Any, table: KeyTable, path: str = "") -> Iterator[tuple[str, Any]]:
    """{a.0.b: value} of every leaf. A key with a rule is a leaf, and so is a list of plain values."""
    inner: Any = ()
    if path not in table and isinstance(tree, dict):
        inner = tree.items()
    elif path not in table and isinstance(tree, list) and any(isinstance(item, dict) for item in tree):
        inner = enumerate(tree)
    if not inner:
        yield path, tree
    for key, value in inner:
        yield from flat(value, table, f"{path}.{key}" if path else str(key))


def _resolved(leaves: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The leaves with ${other.key} replaced by its value, which may refer to others."""
    found = dict(leaves)
    for key, value in found.items():
        for _ in range(4 if isinstance(value, str) else 0):
            value = re.sub(r"\$\{([\w.]+)\}", lambda match: str(found.get(match[1], match[0])), value)
        yield key, value


def _named(leaves: dict[str, Any], file: Path) -> dict[str, Any]:
    """`leaves` with what LLaMA-Factory's dataset_info.json says in the place of its name of a data set."""
    name = single(leaves.get("dataset"))
    for folder in (Path(), file.parent):
        info = folder / str(leaves.get("dataset_dir", "data")) / "dataset_info.json"
        entry = _read(info).get(name or "") if info.is_file() else None
        if isinstance(entry, dict):
            if "file_name" in entry:
                entry["file_name"] = str(info.parent / str(entry["file_name"]))
            kept = {key: value for key, value in leaves.items() if key not in ("dataset", "dataset_dir")}
            return kept | dict(flat(entry, {}, "dataset"))
    return leaves


def _meanings(leaves: Mapping[str, Any], program: ForeignProgram) -> tuple[dict[str, Any], list[Left]]:
    """Values of the recipe by key path, and what is left."""
    values: dict[str, Any] = {}
    by: dict[str, str] = {}
    left: list[Left] = []
    for key, value in sorted(leaves.items(), key=lambda leaf: _first(leaf[0])):
        rule = program.table.get(key)
        meaning = rule(value) if rule else None
        for path, wanted in (meaning or {}).items():
            if path == "method.also":
                values[path] = [*values.get(path, ()), *wanted]
            elif path in values and values[path] != wanted and values[path] != "dora":
                left.append(Left(key, value, f"{path} is said by {by[path]} already"))
            elif path not in values:
                values[path], by[path] = wanted, key
        if meaning is None:
            unknown = "no counterpart for this value" if rule else "no counterpart"
            why = WHY.get(key, WHY.get(key.rpartition(".")[2], unknown))
            left.append(Left(key, value, why))
    _put_together(values)
    for path in [path for path in values if path not in ("model", "data.path", "method.name")]:
        if fault := _fault(path, values[path], program.defaults | values):
            left.append(Left(by.get(path, path), values.pop(path), fault))
    return values, left


def _first(key: str) -> int:
    """What decides between two keys for one setting comes first: dora over lora, steps over a share, and over
    both a constant schedule, which warms nothing up."""
    order = (("use_dora", "lr_scheduler", "lr_scheduler_type"), ("warmup_steps",))
    return next((at for at, names in enumerate(order) if key.endswith(names)), len(order))


def _put_together(values: dict[str, Any]) -> None:
    """Make data.path of its parts, and one list of targets."""
    config, split, files, also = (values.pop(key, None) for key in _APART)
    if files:
        values["data.path"] = files
    elif "data.path" in values:
        values["data.path"] += f":{config}" if config else ""
        values["data.path"] += f"@{split}" if split not in (None, "train") else ""
    if also:
        values["method.targets"] = also


def _fault(path: str, value: Any, values: Mapping[str, Any]) -> str | None:
    """Why a recipe does not take `value` at `path`; None where it does."""
    beside = _BARE | {"method.name": values.get("method.name", "lora")}
    if path.startswith("prefer."):
        if values.get("task") != "prefer":
            return "is of task prefer, which the file does not ask for"
        beside["prefer.loss"] = values.get("prefer.loss", "dpo")
    try:
        load_recipe({}, beside | {path: value})
    except RecipeError as error:
        return error.problems[0].what
    return None


def recipe_text(converted: Converted, source: Path, file: Path) -> str:
    """The recipe as YAML: what the file says, what its program takes where it says nothing, and what is
    left."""
    recipe, title = converted.recipe, converted.program.title
    values = recipe.resolved()
    lines = [
        f"# {title}'s {source.name}, by petune convert.",
        f"# petune check {file}    every mistake at once",
    ]
    lines.append(f"# petune train {file}")
    for key in values:
        paths = [path for path in sorted(recipe.given) if path[0] == key]
        if key in _SECTIONS and paths:
            names = dict.fromkeys([_SECTIONS[key], *(path[1] for path in paths if path[1:])])
            lines.append(f"{key}:")
            lines += [_line(f"{key}.{name}", values[key][name], converted, "  ") for name in names]
        elif paths:
            lines.append(_line(key, values[key], converted))
    if converted.left:
        lines += ["", "# Not in this recipe:"]
        lines += [f"#   {left.key}: {write_scalar(left.value)[:60]}    {left.why}" for left in converted.left]
    return "\n".join(lines) + "\n"


def _line(path: str, value: Any, converted: Converted, indent: str = "") -> str:
    text = f"{indent}{path.rpartition('.')[2]}: {write_scalar(value)}"
    return f"{text.ljust(38)}  # {converted.program.title}'s default" if path in converted.defaults else text
