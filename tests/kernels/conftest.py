"""Kernels run in Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interpreter

    interpreter.apply()
