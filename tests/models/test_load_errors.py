"""What goes wrong while a model is read."""

from __future__ import annotations

import time
from typing import Literal

import pytest

from petune.errors import MachineError
from petune.models.load_errors import asking, first_line, room_for
from petune.models.source import Source


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore")]
)
def test_a_want_of_memory_names_the_model_and_the_ways_out(error: Exception) -> None:
    with pytest.raises(MachineError) as caught, room_for("runs/big"):
        raise error
    said = str(caught.value)
    assert said.startswith("runs/big") and "not enough memory" in said and "more" not in said
    assert all(way in said for way in ("parallel: tp or pp", "base_dtype", "petune plan"))


def test_another_error_is_not_called_a_want_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"), room_for("runs/big"):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(("kind", "told"), [("hub", True), ("folder", False)])
def test_waiting_for_the_hub_is_told(
    kind: Literal["hub", "folder"],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("petune.log.PATIENCE", 0.01)
    with caplog.at_level("INFO", "petune"), asking(Source("org/name", kind, "org/name", None, "")):
        time.sleep(0.1)
    assert any("asking the hub for org/name ..." in line for line in caplog.messages) == told


def test_a_line_that_only_announces_the_fault_brings_the_next() -> None:
    assert first_line(ValueError("field 'hidden_size':\n    expected int\nmore")) == (
        "field 'hidden_size': expected int"
    )
