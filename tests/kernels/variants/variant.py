"""What describes a kernel that is launched: itself, its signature, constants, warps and stages."""

from __future__ import annotations

from typing import Any

Variant = tuple[Any, dict[str, str], dict[str, Any], int, int]
