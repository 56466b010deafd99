"""What a verb is given: a recipe or a run folder, then `key.sub=value`. Every verb understands the same
words.

A recipe given to a verb that needs a run means the run the recipe made: its `out`, or the newest
runs/<recipe>-<time>.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from petune.errors import UsageError

if TYPE_CHECKING:
    from petune.recipe import Recipe
    from petune.run.finished import Run

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE|RUN KEY=VALUE",
        help="A recipe file or name, or a run folder; then settings.",
        show_default=False,
    ),
]

VerifyBase = Annotated[
    bool, typer.Option("--verify-base", help="Read the whole base again, not what was hashed before.")
]

Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        help="With --answers: exact_match, rouge_l, chrf or FILE.py:FUNCTION; several times for several.",
        show_default=False,
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")]

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write over the file that is there.")]

_SETTING = re.compile(r"[A-Za-z_][\w.-]*=")


@dataclass(frozen=True)
class Given:
    """The words of a command line, sorted. `target` None means the demo recipe."""

    target: str | None
    overrides: tuple[str, ...]

    @classmethod
    def of(cls, words: Sequence[str] | None) -> Given:
        """Sort the words. Raises UsageError when more than one is not a setting."""
        targets = [word for word in words or () if not is_setting(word)]
        if len(targets) > 1:
            raise UsageError(
                "one recipe or run folder at a time",
                where="command line",
                found=" ".join(targets),
                remedy="settings are written key=value",
            )
        target = os.path.expanduser(targets[0]) if targets else None
        return cls(target, tuple(word for word in words or () if is_setting(word)))

    @property
    def folder(self) -> Path | None:
        """The folder that was named, None when a recipe was."""
        path = Path(self.target) if self.target is not None else None
        return path if path is not None and path.is_dir() else None

    def recipe(self) -> Recipe:
        """The recipe, or the one the run folder was made with, settings applied.

        Raises RecipeError, UsageError for a data file in its place, FileError for a folder that is no run's
        or whose settings were cut or edited.
        """
        from petune.recipe import load_recipe, load_resolved

        if self.folder is None:
            self._refuse_data_file()
            self._refuse_run_as_model()
            return load_recipe(self.target, self.overrides)
        # as petune.run.train.settle does, but `petune check` must not wait for torch
        resolved = self.folder / "resolved.yaml"
        if not resolved.is_file():
            from petune.run.train import load_run

            load_run(self.folder)  # refuses, in the words of every verb
        return load_recipe(load_resolved(resolved, {"out": str(self.folder)}), self.overrides)

    def _refuse_data_file(self) -> None:
        from petune.tasks.read import READERS

        path = Path(self.target or "")
        if path.suffix.lower() in READERS and path.is_file():
            remedy = (
                f"name the data beside a recipe: petune data RECIPE data={self.target}   (`petune ls` lists"
                " the recipes)"
            )
            raise UsageError(
                "this is a data file",
                where=self.target,
                expected="a .yaml recipe or a run folder",
                remedy=remedy,
            )

    def _refuse_run_as_model(self) -> None:
        """A run is no model, and with neither a recipe nor data it is what is meant."""
        settings = dict(word.split("=", 1) for word in self.overrides)
        model = Path(settings.get("model", ""))
        if self.target is None and "data" not in settings and (model / "resolved.yaml").is_file():
            raise UsageError(
                "is the folder of a run, not a model",
                where=str(model),
                remedy=f"name it alone, without model=: {model}",
            )

    def run(self, *, verify_base: bool = False) -> Run:
        """The run, settings applied to what it does from now on. Raises UsageError for a recipe that has not
        been trained, and for settings of the method."""
        from petune.recipe import load_recipe
        from petune.run.train import load_run

        run = load_run(
            self.folder or self._absent_folder() or self._made_by_recipe(), verify_base=verify_base
        )
        if self.overrides:
            settled = load_recipe(run.recipe, self.overrides)
            if settled.method != run.recipe.method:
                raise UsageError(
                    "a run keeps the method that it was trained with",
                    where="method",
                    found=" ".join(word for word in self.overrides if word.startswith("method")),
                    remedy="leave it out, or train another run: petune train RECIPE",
                )
            run.recipe = settled
        return run

    def _absent_folder(self) -> Path | None:
        """A target that can only mean a run folder, though there is none: `load_run` says so better than the
        recipe reader would."""
        path = Path(self.target or "")
        named = len(path.parts) > 1 and not path.suffix and path.parent != Path("recipes")
        return path if named and not path.exists() else None

    def _made_by_recipe(self) -> Path:
        recipe = self.recipe()
        found = [Path(recipe.out)] if recipe.out else sorted(Path("runs").glob(f"{recipe.name}-*"))
        found = [folder for folder in found if (folder / "resolved.yaml").is_file()]
        if not found:
            words = " ".join(word for word in ("petune train", self.target) if word)
            raise UsageError(
                "this recipe has no run yet",
                where=self.target,
                expected=recipe.out or f"runs/{recipe.name}-*",
                remedy=words,
            )
        return found[-1]


def refuse_place(file: Path, overwrite: bool, another: str) -> None:
    """Raise UsageError, before any work, for a place where no file can be written, or shall not be. another:
    how the command names one."""
    if file.is_dir():
        raise UsageError(
            "this is a folder", where=str(file), expected="a file", remedy=f"give another name: {another}"
        )
    if file.is_file() and not overwrite:
        raise UsageError(
            "this file is there already",
            where=str(file),
            remedy=f"say --overwrite, or give another name: {another}",
        )
    if not file.parent.is_dir():
        raise UsageError(
            "there is no such folder", where=str(file.parent), remedy=f"make it first: mkdir -p {file.parent}"
        )


def is_setting(word: str) -> bool:
    """Whether `word` is `key.sub=value` and not the name of something that exists."""
    return _SETTING.match(word) is not None and not _exists(word)


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # longer than any name
        return False


def refuse_no_folder(folder: Path, verb: str) -> None:
    """Raise UsageError where this is no folder that may hold runs, as `petune VERB FOLDER` needs."""
    if not folder.is_dir():
        what = "this is a file, not a folder of runs" if folder.exists() else "there is no such folder"
        raise UsageError(what, where=str(folder), remedy=f"petune {verb} FOLDER")
