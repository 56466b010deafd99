"""A commented recipe for a model and data: both are looked at, nothing is trained, and every choice says why
it was made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from petune.methods.configs import METHODS, method_of
from petune.recipe import Recipe, usual_rate
from petune.recipe.yaml_lines import write_scalar
from petune.run.build import Prepared

_WORDS = {  # settings of a method that a recipe names even where they have their default
    "r": "rank; more rows can use a larger one",
    "targets": "auto: every linear of the blocks, attention and MLP",
}
_WIDTH = 40  # column of the comments


def draft(prepared: Prepared, file: Path) -> str:
    """The text of a recipe `file` that means what the prepared one says, with the task, lengths and usual
    rate found written out."""
    recipe = prepared.recipe
    values = recipe.resolved()
    given = {path[0] for path in recipe.given}
    lines = [
        (
            f"# {Path(recipe.data.path).name} with {Path(recipe.model).name}: {recipe.method_name}, task"
            f" {prepared.task.name}."
        ),
        f"# petune check {file}    every mistake at once",
        f"# petune train {file}    the run goes to `out`",
        "",
        "# what",
        _line(
            "model",
            _as_found(values["model"], recipe.model, file),
            prepared.source.note.rpartition(": ")[2],
        ),
        *_data(prepared, values["data"], file),
        _line(
            "task",
            prepared.task.name,
            "given" if recipe.task else f"by the data, of format {prepared.rows.format}, and the model",
        ),
        "",
        "# how",
        *_method(recipe, values["method"]),
        _line("lr", recipe.learning_rate, _why_rate(prepared)),
        _line(
            "epochs",
            int(recipe.epochs) if recipe.epochs.is_integer() else recipe.epochs,
            "passes over the rows",
        ),
        _line(
            "batch_size",
            recipe.batch_size,
            "rows per forward pass; accumulate: N multiplies it without more memory",
        ),
    ]
    said = ("model", "data", "task", "method", "lr", "epochs", "batch_size", "out", "name")
    lines += [_line(key, values[key]) for key in values if key in given and key not in said]
    return "\n".join([*lines, "", "# where", _line("out", recipe.out or f"runs/{file.stem}")]) + "\n"


def _line(key: str, value: Any, comment: str = "", indent: str = "") -> str:
    text = f"{indent}{key}: {write_scalar(value)}"
    return f"{text.ljust(_WIDTH - 2)}  # {comment}" if comment else text


def _as_found(absolute: str, written: str, file: Path) -> str:
    """An input as it was written, where the recipe lies in the working directory; else so that it is found
    from any."""
    return written if file.resolve().parent == Path.cwd() else absolute


def _data(prepared: Prepared, values: dict[str, Any], file: Path) -> Iterator[str]:
    recipe, report = prepared.recipe, prepared.encoded.report
    yield "data:"
    for note in (*prepared.rows.notes, *report.lines()):
        yield f"  # {note}"
    yield _line("path", _as_found(values["path"], recipe.data.path, file), indent="  ")
    if recipe.data.eval:
        yield _line("eval", _as_found(values["eval"], recipe.data.eval, file), indent="  ")
    if prepared.reader is None:
        yield _line("max_length", report.limit, "tokens; longer rows are cut", indent="  ")
    given = {path[1] for path in recipe.given if path[0] == "data" and len(path) > 1}
    yield from (
        _line(key, values[key], indent="  ")
        for key in values
        if key in given - {"path", "eval", "max_length"}
    )


def _method(recipe: Recipe, values: dict[str, Any]) -> Iterator[str]:
    yield "method:"
    yield _line("name", values["name"], ", ".join(METHODS), "  ")
    yield from (_line(key, values[key], words, "  ") for key, words in _WORDS.items() if key in values)
    given = {path[1] for path in recipe.given if path[0] == "method" and len(path) > 1}
    yield from (_line(key, values[key], indent="  ") for key in values if key in given - {"name", *_WORDS})


def _why_rate(prepared: Prepared) -> str:
    recipe = prepared.recipe
    name, usual = recipe.method_name, usual_rate(recipe, prepared.config)
    if recipe.lr != usual:
        return f"given; usual for {name}: {usual:g}"
    how = " at this width" if method_of(recipe.method).lr_power else ""
    return f"usual for {name}{how}" + (", whatever the rank" if hasattr(recipe.method, "r") else "")
