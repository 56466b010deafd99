"""Wrong recipes and wrong data files, typed: the exit code, the place, no traceback, nothing written and no weight loaded.

The tables are those of the tests of the reader and of the rows; here each file goes through `petune train` as a user would meet it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Type
from tests.tasks.test_bad_data import WRONG as WRONG_DATA
from tests.test_recipe import GOOD
from tests.test_recipe import WRONG as WRONG_RECIPES


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petune.loop.build", lambda prepared: pytest.fail("weights were loaded"))


def test_the_tables_are_as_long_as_promised() -> None:
    assert len(WRONG_RECIPES) >= 40
    assert len(WRONG_DATA) >= 20


@pytest.mark.parametrize("name", WRONG_RECIPES)
def test_training_a_wrong_recipe_is_exit_2_with_its_place(type_: Type, tmp_path: Path, name: str) -> None:
    text, line, phrases = WRONG_RECIPES[name]
    (tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else (GOOD + text).encode())
    shown = type_("train", "r.yaml")
    assert shown.code == 2, shown.err
    assert any(begins.startswith((f"r.yaml:{line}  ", f"r.yaml:{line}:")) for begins in shown.err.splitlines())
    assert all(phrase in shown.err for phrase in phrases)
    assert "Traceback" not in shown.out + shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(("file", "raw", "task", "says"), [row[1:] for row in WRONG_DATA], ids=[row[0] for row in WRONG_DATA])
def test_training_on_a_wrong_data_file_is_exit_3_with_its_place(
    type_: Type, tmp_path: Path, file: str, raw: bytes, task: str, says: list[str]
) -> None:
    (tmp_path / file).write_bytes(raw)
    (tmp_path / "r.yaml").write_text(f"model: demo:tiny-llama\ndata: {file}\ntask: {task}\nmethod: lora\nout: runs/x\n")
    shown = type_("train", "r.yaml")
    assert shown.code == 3, shown.err
    assert all(part in shown.err for part in (file, *says)), shown.err
    assert "Traceback" not in shown.out + shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([file, "r.yaml"])
