"""What callers from Python give as folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import petune
from petune.errors import UsageError
from petune.files.given import path_of
from tests.tiny_models import llama


def test_a_path_is_a_path_however_it_is_given(tmp_path: Path) -> None:
    assert path_of(tmp_path) == path_of(str(tmp_path)) == tmp_path


def test_a_path_may_begin_with_a_home_that_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("~/runs") == tmp_path / "runs"
    with pytest.raises(UsageError, match="a user whose home is not known"):
        path_of("~nobody-at-all/runs")


@pytest.mark.parametrize("call", ["load", "save", "load_run", "add"])
def test_what_names_no_folder_is_refused_in_words(call: str) -> None:
    wrong: Any = 7 if call == "add" else None
    with pytest.raises(UsageError, match="folder  this is no folder"):
        if call == "load":
            petune.load(llama(), wrong)
        elif call == "save":
            petune.save(petune.wrap(llama(), "lora", r=2), wrong)
        elif call == "add":
            petune.add(llama(), "one", folder=wrong)
        else:
            petune.load_run(wrong)
