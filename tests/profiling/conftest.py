"""A first step of a tiny model that can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.parallel import alone
from petune.profiling.repeat_step import Rehearsal
from petune.recipe import load_recipe
from petune.run.build import prepare
from tests.small_runs import settings

Rehearse = Callable[..., Rehearsal]


@pytest.fixture
def rehearse(tmp_path: Path) -> Rehearse:
    """Set up a run of tests.small_runs, which is not begun."""

    def make(
        family: str = "llama", method: Any = "lora", kind: type[Rehearsal] = Rehearsal, **changes: Any
    ) -> Rehearsal:
        return kind(
            prepare(load_recipe(settings(tmp_path, family, method, **changes))), alone(torch.device("cpu"))
        )

    return make
