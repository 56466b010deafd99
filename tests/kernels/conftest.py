"""Kernels run in Triton's interpreter where there is no CUDA device; a test may ask for models in float64."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interpreter

    interpreter.apply()


@pytest.fixture
def float64() -> Iterator[None]:
    """What a test makes is of float64 unless it says otherwise."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
