"""Finding and reading recipes: a file, a shipped name, a mapping or a Recipe, with overrides laid over it."""

from __future__ import annotations

import copy
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from petune.demo import default_model
from petune.errors import Problem, RecipeError, nearest
from petune.recipe.aliases import accept_classic_keys, in_classic_words
from petune.recipe.check import validate
from petune.recipe.neutral import demo_note, neutral_note, neutral_settings
from petune.recipe.raw import FoundProblem, Written, show
from petune.recipe.schema import Recipe
from petune.recipe.yaml_lines import (
    MAX_BYTES,
    MAX_PROBLEMS,
    KeyPath,
    YamlDocument,
    dotted,
    read,
    scalar,
    short,
)

Overrides = Sequence[str] | Mapping[str, Any]


def load_recipe(
    source: str | Path | Recipe | Mapping[str, Any] | None = None, *overrides: Overrides
) -> Recipe:
    """Read and check a recipe.

        >>> recipe = petune.load_recipe("llama_lora", ["method.r=8"], {"epochs": 2})
        >>> recipe.epochs, recipe.method.r, recipe.learning_rate
        (2.0, 8, 0.005)

    `source`: a file, the name of a shipped recipe (`bert_lora`), a mapping, or a Recipe to change. None:
    where `overrides` name a model or data, these with neutral settings, else the demo recipe. Each of
    `overrides`: `key.sub=value` texts, or a mapping of key path to value; later ones win. Raises RecipeError
    with every problem found.
    """
    neutral = source is None and _names_inputs(overrides)
    written, problems, file = (_neutral(), [], None) if neutral else _open_source(source)
    problems += accept_classic_keys(written)
    before, fresh = copy.deepcopy(written.tree), set[KeyPath]()
    for layer in overrides:
        paths, more = _override(written, layer)
        problems += more + accept_classic_keys(written, paths)
        fresh |= paths
    recipe = checked(written, file.stem if file else "run", problems)
    recipe._source = file
    recipe._folder = source.folder if isinstance(source, Recipe) else file.parent if file else Path()
    note = (
        neutral_note(recipe) if neutral else demo_note(written, before, {path[0] for path in fresh}, recipe)
    )
    recipe._notes = (*(source.notes if isinstance(source, Recipe) else ()), *([note] if note else []))
    return recipe


def checked(written: Written, name: str, problems: Sequence[FoundProblem] = ()) -> Recipe:
    """The recipe of what is written, called `name` unless that says a name. Raises RecipeError with every
    problem found."""
    values, found = validate(written)
    more = [
        (path, in_classic_words(problem, written)) for path, problem in found if not _explained(path, written)
    ]
    if every := [problem for _, problem in (*problems, *more)]:
        raise RecipeError(_shown(every, written.name))
    values.setdefault("name", name)
    recipe = Recipe(**values)
    recipe._written = written
    return recipe


def _names_inputs(overrides: Sequence[Overrides]) -> bool:
    """Whether any of `overrides` sets `model` or `data`, or a setting of data."""
    keys = [
        key if isinstance(layer, Mapping) else str(key).partition("=")[0]
        for layer in overrides
        for key in layer
    ]
    return any(str(key).strip().split(".")[0] in ("model", "data") for key in keys)


def _neutral() -> Written:
    written = Written("no recipe")
    for key, value in neutral_settings().items():
        written.put((key,), value, "default")
    return written


def _explained(path: KeyPath, written: Written) -> bool:
    """Whether the value at `path` is already reported as unreadable."""
    return any(path[:end] in written.refused for end in range(1, len(path) + 1))


def _shown(problems: Sequence[Problem], name: str) -> list[Problem]:
    rest = len(problems) - MAX_PROBLEMS
    return (
        [*problems[:MAX_PROBLEMS], Problem(f"and {rest} more problems", name)] if rest > 0 else list(problems)
    )


def _open_source(
    source: str | Path | Recipe | Mapping[str, Any] | None,
) -> tuple[Written, list[FoundProblem], Path | None]:
    if isinstance(source, Recipe):
        return copy.deepcopy(source._written), [], source.source
    if isinstance(source, Mapping):
        written = Written("argument")
        for key, value in source.items():
            written.put((str(key),), _plain(value), "argument")
        return written, [], None
    file = find_recipe(demo_recipe() if source is None else source)
    name = short(os.fspath(file), 300)
    document = read(_bytes(file, name), name)
    problems: list[FoundProblem] = [((), problem) for problem in document.problems]
    return _written(document, name, problems), problems, file


def _written(document: YamlDocument, name: str, problems: list[FoundProblem]) -> Written:
    tree = document.tree
    if not isinstance(tree, dict):
        what = "the recipe is empty" if tree is None else "a recipe is a mapping of keys to values"
        remedy = "model, data and method suffice; see `petune ls` for examples"
        found = None if tree is None else show(tree)
        last = Problem(what, f"{name}:1", found=found, remedy=remedy)
        raise RecipeError([*(problem for _, problem in problems), last])
    return Written(
        name,
        tree,
        document.lines,
        {(): f"{name}:1", **{path: f"{name}:{line}" for path, line in document.lines.items()}},
        document.refused,
    )


def _bytes(file: Path, name: str) -> bytes:
    """At most one byte more than a recipe may have. Only regular files: a pipe would block, a device would
    never end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RecipeError("is not a regular file", where=name, remedy="give a .yaml file")
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        what, remedy = f"cannot be read: {error.strerror}", f"chmod u+r {name}, or give another file"
        raise RecipeError(what, where=name, remedy=remedy) from None


def recipe_folder() -> Path:
    """Where the shipped recipes lie: inside the installed package, or `recipes/` of a clone."""
    package = Path(__file__).parent.parent
    places = (package / "recipes", package.parent / "recipes")
    return next((folder for folder in places if (folder / "README.md").is_file()), places[0])


def shipped_recipes() -> list[Path]:
    """The shipped recipe files, by name."""
    return sorted(recipe_folder().glob("*.yaml"))


def demo_recipe() -> Path:
    """The recipe of `petune train` without arguments: real MiniLM when its package is there, else the tiny
    Llama that ships."""
    return recipe_folder() / ("bert_lora.yaml" if default_model().endswith("minilm") else "llama_lora.yaml")


def find_recipe(text: str | Path) -> Path:
    """The recipe file `text` means: a path, else the shipped recipe of that name. Raises RecipeError naming
    the nearest shipped ones."""
    path = Path(os.path.expanduser(os.fspath(text)))
    shown = short(os.fspath(text), 300)
    try:
        there, folder = path.exists(), path.is_dir()
    except (OSError, ValueError) as error:
        what = f"cannot be a recipe file: {error.strerror if isinstance(error, OSError) else error}"
        raise RecipeError(what, where=shown, remedy="give the path of a .yaml file") from None
    if folder:
        remedy = "give the .yaml file; a run folder holds recipe.yaml"
        raise RecipeError("is a folder, not a recipe file", where=shown, remedy=remedy)
    if there:
        return path
    shipped = {file.stem: file for file in shipped_recipes()}
    beside = path.parent in (Path(), Path("recipes")) and path.suffix in ("", ".yaml", ".yml")
    if beside and path.stem in shipped:
        return shipped[path.stem]
    near = nearest(path.stem[:64], shipped)
    remedy = (
        f"did you mean: {' or '.join(near)}   " if near else ""
    ) + "(`petune ls` lists the shipped recipes)"
    raise RecipeError("no such file or folder, nor a shipped recipe of that name", where=shown, remedy=remedy)


def _override(written: Written, overrides: Overrides) -> tuple[set[KeyPath], list[FoundProblem]]:
    """Lay `overrides` over what is written; the key paths they set, and what is wrong with them."""
    problems: list[FoundProblem] = []
    fresh: set[KeyPath] = set()
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            fresh.add(path := tuple(str(key).split(".")))
            written.put(path, _plain(value), "argument")
        return fresh, problems
    for text in overrides:
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            problems.append(
                (
                    (),
                    Problem(
                        f"{short(text)!r} is not an override",
                        "command line",
                        remedy="write key=value or key.sub=value",
                    ),
                )
            )
            continue
        try:
            written.put(path, _command_line_value(path, value), "command line")
            fresh.add(path)
        except RecipeError as error:
            what = f"{dotted(path)}: {error.problems[0].what}"
            problems.append(
                (path, Problem(what, "command line", found=show(value), remedy=error.problems[0].remedy))
            )
    return fresh, problems


AS_TYPED = (("data", "prefix"), ("data", "separator"))  # texts whose white space becomes tokens


def _command_line_value(path: KeyPath, text: str) -> Any:
    """A list, mapping or quoted text is YAML; anything else is one word, so that paths and patterns need no
    quoting. A shell takes the quotes from `data.prefix="summarize: "`, whose blank is meant."""
    if not (word := text.strip()).startswith(("[", "{", '"', "'")):
        value = scalar(word)
        return text if path in AS_TYPED and isinstance(value, str) else value
    document = read(word, "command line")
    if document.problems:
        raise RecipeError(document.problems)
    return document.tree


def _plain(value: Any) -> Any:
    """A Python argument as YAML would have given it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    return os.fspath(value) if isinstance(value, PurePath) else value
