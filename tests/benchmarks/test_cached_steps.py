"""Steps of a cache are measured from end to end, and the numbers of its passes are those without one."""

from __future__ import annotations

import pytest

from benchmarks.cached_steps import HEADS, measure


@pytest.mark.long
def test_a_line_has_a_cell_for_each_head_and_no_loss_differs() -> None:
    cells = [cell.strip() for cell in measure("tiny", 1).strip("|").split("|")]
    assert len(cells) == len(HEADS)
    assert dict(zip(HEADS, cells, strict=True))["loss differs"] == "0.0e+00"
