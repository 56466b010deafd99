"""Wrong recipes and wrong data files, typed: the exit code, the place, no traceback, nothing written and no
weight loaded.

The tables are those of the tests of the reader and of the rows, which go through the whole of them; here a
file goes through `petune train` as a user would meet it, one of SOME in the short suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Type
from tests.tasks.wrong_data import WRONG as WRONG_DATA
from tests.written_recipes import GOOD
from tests.wrong_recipes import WRONG as WRONG_RECIPES

SOME = 5


def some(cases: Sequence[Any], ids: Iterable[str]) -> list[Any]:
    """One of SOME, the others left to the long suite."""
    marks: list[Any] = [() if at % SOME == 0 else pytest.mark.long for at in range(len(cases))]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), id=name, marks=mark)
        for case, name, mark in zip(cases, ids, marks, strict=True)
    ]


@pytest.fixture(autouse=True)
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petune.run.step.build", lambda prepared: pytest.fail("weights were loaded"))


def test_the_tables_are_as_long_as_promised() -> None:
    assert len(WRONG_RECIPES) >= 40
    assert len(WRONG_DATA) >= 20


@pytest.mark.parametrize("name", some([*WRONG_RECIPES], WRONG_RECIPES))
def test_training_a_wrong_recipe_is_exit_2_with_its_place(type_: Type, tmp_path: Path, name: str) -> None:
    text, line, phrases = WRONG_RECIPES[name]
    (tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else (GOOD + text).encode())
    shown = type_("train", "r.yaml")
    assert shown.code == 2, shown.err
    assert any(
        begins.startswith((f"r.yaml:{line}  ", f"r.yaml:{line}:")) for begins in shown.err.splitlines()
    )
    assert all(phrase in shown.err for phrase in phrases)
    assert "Traceback" not in shown.out + shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    ("file", "raw", "task", "says"), some([row[1:] for row in WRONG_DATA], [row[0] for row in WRONG_DATA])
)
def test_training_on_a_wrong_data_file_is_exit_3_with_its_place(
    type_: Type, tmp_path: Path, file: str, raw: bytes, task: str, says: list[str]
) -> None:
    (tmp_path / file).write_bytes(raw)
    (tmp_path / "r.yaml").write_text(
        f"model: demo:tiny-llama\ndata: {file}\ntask: {task}\nmethod: lora\nout: runs/x\n"
    )
    shown = type_("train", "r.yaml")
    assert shown.code == 3, shown.err
    assert all(part in shown.err for part in (file, *says)), shown.err
    assert "Traceback" not in shown.out + shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([file, "r.yaml"])


NAMES = {
    "out of the folder": "../x",
    "absolute": "/nonexistent/x",
    "a NUL": "a\0b",
    "300 characters": "x" * 300,
    "a long path": "a/" * 3000,
    "a line break": "a\nb",
    "dots of Unicode": "․․/x",  # noqa: RUF001
    "the folder itself": ".",
    "a device of another system": "CON",
    "the home of nobody": "~no-such-user/x",
}
USES: dict[str, tuple[str, ...]] = {
    "a run": ("eval", "{}"),
    "a recipe": ("check", "{}"),
    "a run to go on": ("train", "{}", "--resume"),
    "data": ("data", "r.yaml", "data={}"),
    "held-out data": ("data", "r.yaml", "data.eval={}"),
    "an adapter": ("check", "r.yaml", "init_adapter={}"),
    "a recipe to write": ("init", "model=demo:tiny-llama", "data=rows.jsonl", "{}"),
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("use", USES)
def test_a_name_that_no_file_can_have_or_that_leads_out_is_an_error_of_the_user(
    type_: Type, tmp_path: Path, use: str, name: str
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "red sun"}\n' * 8)
    (tmp_path / "r.yaml").write_text(
        "model: demo:tiny-llama\ndata: rows.jsonl\ntask: causal\nmethod: lora\nout: runs/x\n"
    )
    shown = type_(*(word.format(NAMES[name]) for word in USES[use]))
    assert shown.code in (2, 3, 4) or (use, name) == ("an adapter", "the folder itself"), shown.err
    assert "Traceback" not in shown.err and "internal error" not in shown.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.yaml", "rows.jsonl"]


def test_a_setting_may_be_longer_than_a_name(type_: Type, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "model: demo:tiny-llama\ndata: rows.jsonl\ntask: causal\nmethod: lora\nout: runs/x\n"
    )
    targets = ", ".join(["q_proj"] * 60)
    assert type_("check", "r.yaml", f"method.targets=[{targets}]").code != 1
