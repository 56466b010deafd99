"""Charts of curves as SVG: axes with round numbers, lines, marks. Colours are those of the page, by number.

Drawn at the size they are read at, so that labels keep their size on a phone and on paper. What lies under
the pointer is shown by page.js, which finds the values in `data-lines`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petune.report.curves import Curve, Point, thinned
from petune.report.markup import Markup, element, join
from petune.report.words import tick

# in pixels; the last four are the margins around the lines
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 230, 54, 12, 10, 26
POINTS = 480  # of a line, at most
COLOURS = 8
_WIDE = 100.0  # from this ratio of largest to smallest a scale of powers is easier to read


@dataclass(frozen=True)
class DrawnLine:
    """A curve, the number of its colour, and its style: plain, faint (behind another), dotted (a value at
    each point). hover: whether its values are shown beside the pointer."""

    curve: Curve
    colour: int = 0
    style: str = "plain"
    hover: bool = True


@dataclass(frozen=True)
class ChartAxis:
    """The values from `low` to `high` on `length` pixels; by powers where `log`."""

    low: float
    high: float
    length: float
    log: bool = False

    def at(self, value: float) -> float:
        """Pixels from the low end."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = map(math.log10, (low, high, value))
        return self.length * ((value - low) / (high - low) if high > low else 0.5)

    def ticks(self) -> list[float]:
        """Round values within, three or more of them."""
        if not self.high > self.low:
            return [self.low]
        if self.log:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            stride = max(1, -(-(last - first + 1) // 5))
            return [10.0**power for power in range(first, last + 1, stride)]
        raw = (self.high - self.low) / 4
        power = 10.0 ** math.floor(math.log10(raw))
        steps = (power, 2 * power, 5 * power, 10 * power)
        usual = next(at for at, step in enumerate(steps) if step >= raw * 0.999)
        found = self._multiples(steps[usual])
        return found if len(found) > 2 else self._multiples(steps[usual - 1])

    def _multiples(self, step: float) -> list[float]:
        """Those of `step` within."""
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [at * step for at in range(first, last + 1)]


def chart(
    title: str,
    lines: Sequence[DrawnLine],
    *,
    marks: Sequence[int] = (),
    most: int = POINTS,
    log: bool = False,
) -> Markup:
    """A figure with its title, the lines over the steps, upright marks at some steps, and, in words, what the
    lines say. `log`: large ratios go on a scale of powers. Empty where no line has a finite value."""
    drawn = [line for line in lines if line.curve.points]
    if not drawn:
        return Markup()
    across, up = _scales([point for line in drawn for point in line.curve.points], log)
    said = [line.curve.said() for line in drawn if line.hover]
    dashes = [
        element("path", class_="mark", d=f"M{LEFT + across.at(step):.1f},{TOP}v{up.length:.0f}")
        for step in marks
        if across.low <= step <= across.high
    ]
    picture = element(
        "svg",
        element("title", f"{title}: {' | '.join(said[:8])}"),
        *_axes(across, up),
        *dashes,
        *(part for line in drawn for part in _drawn(line, across, up, most)),
        element("path", class_="at", d=""),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        data_box=f"{LEFT} {TOP} {across.length:.0f} {up.length:.0f} {across.low:.0f} {across.high:.0f}",
        data_lines=_values([line for line in drawn if line.hover], most),
    )
    power = " (powers of ten)" if up.log else ""
    words = said[0] if len(said) == 1 else Markup("&nbsp;")
    return element(
        "figure",
        element("figcaption", f"{title}{power}"),
        picture,
        element("output", words),
    )


def _scales(points: Sequence[Point], log: bool) -> tuple[ChartAxis, ChartAxis]:
    values = [value for _, value in points]
    low, high = min(values), max(values)
    log = log and low > 0 and high / low >= _WIDE
    room = 0.0 if log else (high - low) * 0.04 or abs(high) * 0.1 or 1.0
    bottom = low if log else low - (min(room, low) if low >= 0 else room)
    steps = [step for step, _ in points]
    across = ChartAxis(min(steps), max(steps), WIDTH - LEFT - RIGHT)
    return across, ChartAxis(bottom, high if log else high + room, HEIGHT - TOP - BOTTOM, log)


def _axes(across: ChartAxis, up: ChartAxis) -> Iterator[Markup]:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    for value in up.ticks():
        y = floor - up.at(value)
        yield element("path", class_="grid", d=f"M{LEFT},{y:.1f}H{right}")
        yield element("text", tick(value), x=LEFT - 6, y=f"{y + 4:.1f}", text_anchor="end")
    steps = sorted({round(value) for value in across.ticks()})
    for value in steps:
        x = LEFT + across.at(value)
        anchor = "end" if x > right - 14 else "middle"
        yield element("text", f"{value:,}", x=f"{x:.1f}", y=floor + 17, text_anchor=anchor)
    yield element("text", "step", x=LEFT - 14, y=floor + 17, text_anchor="end")
    yield element("path", class_="axis", d=f"M{LEFT},{floor}H{right}")


def _drawn(line: DrawnLine, across: ChartAxis, up: ChartAxis, most: int) -> Iterator[Markup]:
    """A path for the line; single points, and those of a dotted line, as circles."""
    parts, dots = [], []
    for stretch in line.curve.stretches(most):
        places = [
            f"{LEFT + across.at(step):.1f},{HEIGHT - BOTTOM - up.at(value):.1f}" for step, value in stretch
        ]
        parts.append(f"M{places[0]}" + (f"L{' '.join(places[1:])}" if len(places) > 1 else ""))
        if len(places) == 1 or (line.style == "dotted" and len(line.curve.points) <= 60):
            dots += [place.split(",") for place in places]
    kind = f"line c{line.colour % COLOURS} {line.style}" + (" dashed" if line.colour >= COLOURS else "")
    yield element("path", class_=kind, d="".join(parts))
    yield from (element("circle", class_=kind, cx=x, cy=y, r=3) for x, y in dots)


def _values(lines: Sequence[DrawnLine], most: int) -> str:
    """What page.js reads: for each line its name and its steps and values, in turn."""
    found = []
    for line in lines:
        points = thinned(line.curve.points, most)
        found.append(
            [line.curve.name, line.colour % COLOURS, [_short(number) for point in points for number in point]]
        )
    return json.dumps(found, separators=(",", ":"))


def _short(number: float) -> float:
    return number if isinstance(number, int) else float(f"{number:.5g}")


def legend(names: Sequence[tuple[str, int]]) -> Markup:
    """The colours of lines by name."""
    items = [
        element(
            "li",
            element("span", class_=f"key c{colour % COLOURS}" + (" dashed" if colour >= COLOURS else "")),
            " ",
            name,
        )
        for name, colour in names
    ]
    return element("ul", join(items), class_="legend")
