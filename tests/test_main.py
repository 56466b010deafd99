"""`python -m petune`, what a launcher starts: the same training, plain lines, the same exit codes."""

from __future__ import annotations

from typing import Any

import pytest

from petune.__main__ import main
from petune.errors import Stopped


def test_it_trains_what_the_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("petune.run.train.train", lambda recipe, **options: seen.append((recipe, options)))
    assert main(["x.yaml", "method.r=4", "--resume"]) == 0
    assert seen == [
        ("x.yaml", {"overrides": ["method.r=4"], "resume": True, "overwrite": False, "allow_change": []})
    ]


def test_an_error_is_a_message_and_a_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["no-such-recipe"]) == 2
    assert "no such file or folder" in capsys.readouterr().err

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped("stopped")

    monkeypatch.setattr("petune.run.train.train", stop)
    assert main(["x.yaml"]) == 75
