"""Numbers, times and settings as people read them. What is no finite number is said in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeGuard

from petune.log import human

NONE = "-"
_ABBREVIATED = {"mrr": "MRR", "ndcg": "nDCG"}


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300  # false of NaN too


def figure(value: object) -> str:
    """A measured number: 4 digits after the point below 100, small and large ones with a power of ten."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) < 1e15 else f"{value:.3e}" if is_number(value) else "beyond measure"
    if isinstance(value, float):
        if math.isnan(value):
            return "not a number"
        if not is_number(value):
            return "infinite"
        if value and not 1e-3 <= abs(value) < 1e6:
            return f"{value:.2e}"
        return f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"
    return NONE if value is None else str(value)


def tick(value: float) -> str:
    """A number beside an axis: as few digits as it has, three at most."""
    if value and not 1e-3 <= abs(value) < 1e5:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(power)}"
    return f"{value:,.4f}".rstrip("0").rstrip(".") or "0"


def titled(metric: str) -> str:
    """The name of a metric as a title: mrr_at_10 is MRR@10, f1_macro is F1 macro."""
    head, at, rest = metric.partition("_at_")
    return _ABBREVIATED.get(head, head.replace("_", " ").capitalize()) + ("@" if at else "") + rest


def size(value: object) -> str:
    """Bytes in powers of 1024."""
    return human(float(value)) if is_number(value) else NONE


def share(part: float, whole: float) -> str:
    """`part` of `whole` in percent."""
    return f"{part / whole:.1%}" if whole else NONE


def duration(seconds: object) -> str:
    """Seconds as one or two units: 4.2 s, 3 min 20 s, 2 h 05 min."""
    if not is_number(seconds):
        return NONE
    left = float(seconds)
    if left < 60:
        return f"{left:.1f} s"
    minutes, rest = divmod(round(left), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(stamp: object) -> str:
    """Seconds since the epoch as a date and time of UTC, to the minute."""
    if not is_number(stamp) or not 0 < float(stamp) < 2**35:
        return NONE
    return datetime.fromtimestamp(float(stamp), UTC).strftime("%Y-%m-%d %H:%M UTC")


def setting(value: object) -> str:
    """A value of a recipe as it would stand on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return ", ".join(map(setting, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """Settings by their key paths (`method.r`), each as `setting` says it."""
    found: dict[str, str] = {}
    for key, value in values.items():
        path = f"{before}{key}"
        if isinstance(value, Mapping) and value and len(path) < 200:
            found |= flat(value, f"{path}.")
        else:
            found[path] = setting(value)
    return found
