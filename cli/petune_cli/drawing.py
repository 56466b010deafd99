"""The charts of a plan as text that fits a terminal, and as an SVG picture for light and dark pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from petune.estimate.timeline import Box, Chart, TimelineRow
from petune.log import printable

WIDTH = 100  # columns of text
SHORTEST = 0.2  # of the longest box: what is shorter is not given room for its letters
CUT = " ~ "  # the middle of a row that is too long
JOINED = "\N{NO-BREAK SPACE}"

# ---------------------------------------------------------------- text


def as_text(charts: Sequence[Chart]) -> list[str]:
    """Lines of at most WIDTH columns."""
    lines: list[str] = []
    for chart in charts:
        lines += [*([""] if lines else []), *(_to_scale(chart) if chart.unit else _in_order(chart))]
    return lines


def _in_order(chart: Chart) -> Iterator[str]:
    yield chart.title
    margin = max(len(row.label) for row in chart.rows) + 2
    for row in chart.rows:
        whole = [box.text.replace(" ", JOINED) for box in row.boxes]
        lines = textwrap.wrap(
            row.label.ljust(margin) + " > ".join(whole),
            WIDTH,
            subsequent_indent=" " * margin,
            break_on_hyphens=False,
        )
        yield from (line.replace(JOINED, " ") for line in lines)
    yield from chart.notes


def _to_scale(chart: Chart) -> Iterator[str]:
    yield f"{chart.title}: a rank waits {chart.idle:.0%} of it"
    margin = max(len(row.label) for row in chart.rows) + 2
    columns, room = _columns(chart), WIDTH - margin
    for row in chart.rows:
        line = _line(row, columns, round(chart.end * columns))
        if len(line) > room:
            kept = room - len(CUT)
            line = line[: kept // 2] + CUT + line[len(line) - (kept - kept // 2) :]
        yield row.label.ljust(margin) + line
    left_out = f"; {CUT.strip()} leaves out the middle" if round(chart.end * columns) + 1 > room else ""
    wide = f"{columns:.3g} column{'s' * (columns != 1)}"
    yield f"unit      {chart.unit}, {wide} wide; {chart.end:.4g} in all{left_out}"
    yield "letters   " + _legend(chart)
    for note in chart.notes:
        yield f"sent      {note}"


def _columns(chart: Chart) -> float:
    """Columns of a unit of time, so that every box but the shortest has room for its letters."""
    boxes = [box for row in chart.rows for box in row.boxes]
    longest = max(box.end - box.start for box in boxes)
    shortest = min(length for box in boxes if (length := box.end - box.start) >= SHORTEST * longest)
    return (1 + max(len(box.text) for box in boxes)) / shortest


def _line(row: TimelineRow, columns: float, width: int) -> str:
    """A bar where a box begins, its letters behind; dots where nothing is done."""
    line = ["."] * width + ["|"]
    for box in row.boxes:
        start, end = round(box.start * columns), round(box.end * columns)
        line[start:end] = f"|{box.text}"[: end - start].ljust(end - start)
    return "".join(line)


def _legend(chart: Chart) -> str:
    kinds = {box.kind for row in chart.rows for box in row.boxes}
    whole = not any("I" in box.text for row in chart.rows for box in row.boxes)
    parts = ["F forward", "B backward" if whole else "I backward for inputs"]
    parts += ["W backward for weights"] if "weights" in kinds else []
    several = any(box.text[0].isdigit() for row in chart.rows for box in row.boxes)
    return ", ".join(parts) + ("; stage before, micro-batch behind" if several else " of a micro-batch")


# ---------------------------------------------------------------- SVG

HEIGHT, GAP, LINE = 24, 10, 18.0  # pixels: of a box, between rows, of a line of text
LEFT, LETTER = 110, 7.0  # of labels, of a letter
STYLE = """
text { font: 11px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
.page { fill: #ffffff } .forward { fill: #a8d1f0 } .backward { fill: #f5c992 } .weights { fill: #c9dfa7 }
.compute { fill: #e3e5e8 } .send { fill: #dcc6ec } rect { stroke: #57606a; stroke-width: 0.5 }
path { stroke: #8250a8; stroke-width: 1; fill: none; opacity: 0.6 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .page { fill: #0d1117 } .forward { fill: #1f5b86 } .backward { fill: #8a5a14 }
.weights { fill: #4d6b22 } .compute { fill: #3a4048 } .send { fill: #5f3f7c } rect { stroke: #9198a1 }
path { stroke: #c297e0 }
}"""


def as_svg(charts: Sequence[Chart], facts: Sequence[str]) -> str:
    """A picture of its own, every box with its title. facts: lines above it, whatever they hold."""
    body = [_text(GAP, LINE * (at + 1), fact) for at, fact in enumerate(facts)]
    top, right = LINE * (len(facts) + 1), LETTER * max(map(len, facts), default=0)
    for chart in charts:
        places = [_places(chart, row) for row in chart.rows]
        right = max(
            [right, GAP + LETTER * len(_heading(chart)), *(LEFT + LETTER * len(one) for one in chart.notes)]
        )
        body.append(_text(GAP, top + 0.7 * HEIGHT, _heading(chart)))
        top += HEIGHT
        rows = [top + at * (HEIGHT + GAP) for at in range(len(places))]
        for row, place, y in zip(chart.rows, places, rows, strict=True):
            body.append(_text(GAP, y + 0.65 * HEIGHT, row.label))
            body += [_rect(box, x, y, width) for box, x, width in place]
            right = max([right, *(x + width for _, x, width in place)])
        body += _arrows(chart, rows)
        top = rows[-1] + HEIGHT + GAP
        for note in chart.notes:
            body.append(_text(LEFT, top + 0.5 * HEIGHT, note))
            top += LINE
        top += GAP
    width, height = round(right + 2 * GAP), round(top + GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img">'
    )
    page = f'<rect class="page" width="{width}" height="{height}"/>'
    title = f"<title>{_safe('; '.join(facts))}</title>"
    parts = [head, title, f"<style>{STYLE}</style>", page, *body, "</svg>"]
    return "\n".join(parts) + "\n"


def _heading(chart: Chart) -> str:
    scale = f", to scale; unit: {chart.unit}; a rank waits {chart.idle:.0%}" if chart.unit else ", in order"
    return chart.title + scale


def _places(chart: Chart, row: TimelineRow) -> list[tuple[Box, float, float]]:
    """Left end and width of each box: by its time, or, where the order alone counts, by its letters."""
    if chart.unit:
        pixels = LETTER * _columns(chart)
        return [(box, LEFT + pixels * box.start, pixels * (box.end - box.start)) for box in row.boxes]
    found, x = [], float(LEFT)
    for box in row.boxes:
        width = LETTER * (len(box.text) + 2)
        found.append((box, x, width))
        x += width + GAP / 2
    return found


def _rect(box: Box, x: float, y: float, width: float) -> str:
    letters = box.text if width >= LETTER * len(box.text) else ""
    return (
        f'<g><title>{_safe(box.title)}</title><rect class="{box.kind}" x="{x:.1f}" y="{y:.1f}"'
        f' width="{width:.1f}" height="{HEIGHT}" rx="2"/>{_text(x + 4, y + 0.65 * HEIGHT, letters)}</g>'
    )


def _arrows(chart: Chart, rows: Sequence[float]) -> Iterable[str]:
    pixels = LETTER * _columns(chart) if chart.arrows else 0.0
    for one in chart.arrows:
        down = one.target > one.source
        here, there = rows[one.source] + HEIGHT * down, rows[one.target] + HEIGHT * (not down)
        yield (
            f"<g><title>{_safe(one.title)}</title>"
            f'<path d="M{LEFT + pixels * one.start:.1f} {here:.1f}L{LEFT + pixels * one.end:.1f} {there:.1f}"'
            "/></g>"
        )


def _text(x: float, y: float, words: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}">{_safe(words)}</text>' if words else ""


def _safe(words: str) -> str:
    """Words that mean nothing to XML, without control characters."""
    return escape(printable(words))
