"""Runs on rows that are kept: the bits of a run without, tokenized once by all ranks of a host and not by the
next run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petune.recipe import load_recipe
from petune.run.build import prepare
from petune.run.rows import shelf_of
from petune.tasks.kept import Asked
from tests.group_pool import assert_same_but_for_rounding, ranks
from tests.planned_runs import PLANS, small
from tests.small_runs import assert_same_run, run

pytestmark = pytest.mark.usefixtures("no_picture")
TWO: dict[str, Any] = {"max_steps": 2, "warmup": 0}


def noting(log: Path) -> Any:
    """`Asked.make` that adds a line to a file whenever a process makes rows."""
    make = Asked.make

    def noted(self: Asked) -> Any:
        with log.open("a") as file:
            file.write("made\n")
        return make(self)

    return noted


def train_noting(recipe: dict[str, Any], log: Path) -> None:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(Asked, "make", noting(log))
        run(recipe)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"data": {"packing": True}}),
        ("t5", {}),
        ("bert", {}),
    ],
    ids=["packed", "seq2seq", "classify"],
)
def test_a_run_on_kept_rows_has_the_bits_of_one_without(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    method, shelf, log = "lora", str(tmp_path / "shelf"), tmp_path / "log"
    plain = run(small(tmp_path, family, method, **TWO, **changes, rows_cache="off", out="plain")).folder
    for out in ("first", "second"):
        recipe = small(tmp_path, family, method, **TWO, **changes, rows_cache=shelf, out=out)
        train_noting(recipe, log)
        assert_same_run(Path(recipe["out"]), plain)
    assert log.read_text() == "made\n"


def test_of_the_ranks_of_a_host_one_tokenizes(tmp_path: Path) -> None:
    shelf, log = str(tmp_path / "shelf"), tmp_path / "log"
    plain = run(small(tmp_path, "llama", "lora", **TWO, rows_cache="off", out="plain")).folder
    recipe = small(tmp_path, "llama", "lora", **TWO, rows_cache=shelf, parallel=PLANS["dp"])
    ranks(2, train_noting, recipe, log, timeout=60)
    assert log.read_text() == "made\n"
    assert_same_but_for_rounding(Path(recipe["out"]), plain)


def test_a_recipe_says_where_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe = small(tmp_path, "llama", "lora")
    given = shelf_of(load_recipe(recipe, {"rows_cache": str(tmp_path / "mine"), "rows_cache_gib": 0.5}))
    assert given is not None
    assert (given.folder, given.most, given.all) == (tmp_path / "mine", 2**29, True)
    auto = shelf_of(load_recipe(recipe))
    assert auto is not None
    assert (auto.folder, auto.all) == (tmp_path / "cache" / "petune" / "rows", False)
    assert shelf_of(load_recipe(recipe, {"rows_cache": "off"})) is None
    assert prepare(load_recipe(recipe)).encoded.kept is None
    assert not (tmp_path / "cache").exists()
