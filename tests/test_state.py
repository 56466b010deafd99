"""A saved state fills what trains exactly or is refused by the tensor's name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from petune.errors import FileError
from petune.state import fill


@pytest.mark.parametrize(
    ("dtype", "message"),
    [(torch.int64, "holds int64, not weights"), (torch.bool, "bool"), (torch.float8_e5m2, "float8"), (None, "rounded")],
)
def test_a_tensor_of_another_kind_is_refused_and_nothing_is_filled(dtype: torch.dtype | None, message: str) -> None:
    tuned = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b")}
    saved = {"a": torch.zeros(2), "b": torch.zeros(2, dtype=dtype or torch.float64)}
    with pytest.raises(FileError, match=message) as caught:
        fill(tuned, saved, "step-3")
    assert "step-3  b" in str(caught.value)
    assert all(bool((value == 1).all()) for value in tuned.values())
    fill(tuned, saved | {"b": torch.zeros(2, dtype=torch.bfloat16)}, "step-3")  # every bfloat16 is a float32
    assert not tuned["b"].any()
