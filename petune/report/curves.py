"""Curves over the steps of a run: read from its records, smoothed, and thinned so that no extreme is lost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from petune.report.words import figure, is_number

Point = tuple[int, float]
STEPS_SAID = 5  # of several; of others the number is said
_LAST_STEP = 2**53


@dataclass(frozen=True)
class Curve:
    """Values over steps, in order. broken: steps whose value is no finite number; a line is interrupted
    there."""

    name: str
    points: tuple[Point, ...]
    broken: tuple[int, ...] = ()

    def stretches(self, most: int) -> Iterator[list[Point]]:
        """The points in stretches without a broken step between them, thinned to about `most` in all."""
        found: list[Point] = []
        for point in thinned(self.points, most):
            if found and bisect_right(self.broken, found[-1][0]) != bisect_right(self.broken, point[0]):
                yield found
                found = []
            found.append(point)
        if found:
            yield found

    def said(self) -> str:
        """The curve in a line of words: its ends and its extremes, and where it is no number."""
        if not self.points:
            return f"{self.name}: no finite value" if self.broken else f"{self.name}: no value yet"
        values = [value for _, value in self.points]
        low = min(self.points, key=lambda point: point[1])
        high = max(self.points, key=lambda point: point[1])
        words = f"{self.name} {figure(values[0])} to {figure(values[-1])}"
        if len(values) > 2:
            words += (
                f"; lowest {figure(low[1])} at step {low[0]:,}, highest {figure(high[1])} at step {high[0]:,}"
            )
        return words + (f"; no finite number at {steps_said(self.broken)}" if self.broken else "")


def curve(records: Sequence[Mapping[str, Any]], key: str, name: str) -> Curve:
    """The curve of a key of metrics.jsonl. Of a step that has several records, as where a run was resumed,
    the last counts."""
    found: dict[int, object] = {}
    for record in records:
        if key in record and 0 <= record["step"] < _LAST_STEP:
            found[record["step"]] = record[key]
    steps = sorted(found)
    points = tuple((step, float(value)) for step in steps if is_number(value := found[step]))
    return Curve(name, points, tuple(step for step in steps if not is_number(found[step])))


def smoothed(line: Curve, most: int) -> Curve:
    """The mean over the last twentieth of the points, at no more than about `most` of them."""
    count = len(line.points)
    window, stride, points = max(1, count // 20), max(1, -(-count // most)), []
    for end in sorted({*range(stride, count, stride), *([1, count] if count else [])}):
        values = [value for _, value in line.points[max(0, end - window) : end]]
        points.append((line.points[end - 1][0], sum(values) / len(values)))
    return Curve(line.name, tuple(points), line.broken)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` (4 or more) of the points, or all where they are no more: the first, the lowest, the
    highest and the last of each of many stretches of equal length."""
    if len(points) <= most:
        return list(points)
    parts, kept = max(1, most // 4), set[int]()
    for part in range(parts):
        first, end = part * len(points) // parts, (part + 1) * len(points) // parts
        inside = range(first, end)
        kept |= {first, end - 1, min(inside, key=_value(points)), max(inside, key=_value(points))}
    return [points[at] for at in sorted(kept)]


def _value(points: Sequence[Point]) -> Any:
    return lambda at: points[at][1]


def steps_said(steps: Sequence[int]) -> str:
    """Steps as words: the first few of them and how many more."""
    shown = ", ".join(f"{step:,}" for step in steps[:STEPS_SAID])
    more = f" and {len(steps) - STEPS_SAID:,} more" if len(steps) > STEPS_SAID else ""
    return f"step{'s' * (len(steps) > 1)} {shown}{more}"
