"""What goes wrong while a model is read."""

from __future__ import annotations

import pytest

from petune.errors import MachineError
from petune.models.load_errors import room_for


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
