"""The loss curve of a run: a PNG by matplotlib where it is installed, an SVG without it, and what a notebook
shows of a run."""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from petune.files.safetensors import writing
from petune.log import printable
from petune.report.curves import Point, curve, smoothed
from petune.report.files import RunFiles
from petune.report.results import read_metrics

Points = tuple[Point, ...]
# of the SVG, in pixels; the last two are the margins that hold the labels
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 56, 28


def draw_loss(metrics: Path, picture: Path) -> bool:
    """Draw a run over its steps as a PNG: training and evaluation loss, the metric where it is another, the
    learning rate; False without matplotlib or records. Raises MachineError."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return False
    records, run = read_metrics(metrics), RunFiles(metrics.parent)
    steps, scores = _points(records, "loss"), _points(records, "eval_loss")
    if not steps:
        return False
    below = [(run.metric, _points(records, f"eval_{run.metric}"), "o")] if run.metric != "loss" else []
    below = [one for one in (*below, ("learning rate", _points(records, "lr"), "")) if one[1]]
    figure = Figure(figsize=(7, 4 + 1.3 * len(below)), layout="constrained")
    title = f"{run.name}: {run.method} on {run.settings.get('model', '?')}"
    figure.suptitle(printable(title)[:90], parse_math=False)
    axes, *others = figure.subplots(
        1 + len(below), sharex=True, squeeze=False, height_ratios=[3, *([1] * len(below))]
    )[:, 0]
    axes.plot(
        *zip(*steps, strict=True),
        linewidth=0.8,
        alpha=0.4,
        color="tab:blue",
        label="training loss, each step",
    )
    smooth = zip(*_smoothed(records), strict=True)
    axes.plot(*smooth, linewidth=1.8, color="tab:blue", label="training loss, smoothed")
    if scores:
        axes.plot(*zip(*scores, strict=True), marker="o", color="tab:orange", label="evaluation loss")
    axes.set(ylabel="loss (nats)")
    axes.legend()
    for one, (name, points, marker) in zip(others, below, strict=True):
        one.plot(*zip(*points, strict=True), marker=marker, color="tab:orange" if marker else "tab:blue")
        one.set(ylabel=name)
    for one in figure.axes:
        one.grid(alpha=0.3)
    figure.axes[-1].set(xlabel="step")
    figure.axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # of a name in other letters: boxes
        with writing(picture):
            figure.savefig(picture, dpi=120)
    return True


def loss_svg(records: Sequence[Mapping[str, Any]]) -> str:
    """Training loss (each step, faint; smoothed) and evaluation loss (orange) over steps; empty before the
    first finite loss."""
    steps, scores = _points(records, "loss"), _points(records, "eval_loss")
    if not steps:
        return ""
    values = [value for _, value in (*steps, *scores)]
    low, high, last = min(values), max(values), max(step for step, _ in (*steps, *scores))

    def place(step: int, value: float) -> tuple[float, float]:
        share = (value - low) / (high - low) if high > low else 0.5
        return LEFT + (WIDTH - LEFT - 8) * step / last, 8 + (HEIGHT - BOTTOM - 8) * (1 - share)

    def line(points: Points, style: str) -> str:
        return (
            f'<polyline fill="none" {style}'
            f' points="{" ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)}"/>'
        )

    dots = "".join(
        '<circle fill="#ff7f0e" r="3" cx="{:.1f}" cy="{:.1f}"/>'.format(*place(*point)) for point in scores
    )
    floor = HEIGHT - BOTTOM
    words = [
        (2, 14, f"{high:.4g}"),
        (2, floor, f"{low:.4g}"),
        (LEFT, HEIGHT - 8, "0"),
        (WIDTH - 64, HEIGHT - 8, f"step {last:,}"),
    ]
    words.append((LEFT + 80, HEIGHT - 8, "loss in nats: blue training, orange evaluation"))
    return "".join(
        (
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"'
                ' font-family="sans-serif" font-size="12">'
            ),
            f'<path fill="none" stroke="#999" d="M{LEFT},8V{floor}H{WIDTH - 8}"/>',
            line(steps, 'stroke="#1f77b4" stroke-opacity="0.35"')
            + line(_smoothed(records), 'stroke="#1f77b4" stroke-width="2"'),
            line(scores, 'stroke="#ff7f0e"') + dots if scores else "",
            "".join(f'<text fill="#777" x="{x}" y="{y}">{text}</text>' for x, y, text in words),
            "</svg>",
        )
    )


def run_html(title: str, summary: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """A run as a notebook shows it: its name, the scores of base and tuned model where it has finished, the
    loss curve."""
    rows = [
        f"<tr><td>{html.escape(name)}</td><td>{value:.4f}</td><td>{summary['after'][name]:.4f}</td></tr>"
        for name, value in summary.get("before", {}).items()
        if name in summary["after"]
    ]
    table = f"<table><tr><th></th><th>base</th><th>tuned</th></tr>{''.join(rows)}</table>" if rows else ""
    return f"<div><code>{html.escape(title)}</code>{table}{loss_svg(records)}</div>"


def _points(records: Sequence[Mapping[str, Any]], key: str) -> Points:
    return curve(records, key, key).points


def _smoothed(records: Sequence[Mapping[str, Any]]) -> Points:
    """The training loss, as smooth as pages of the run draw it, at each of its steps."""
    loss = curve(records, "loss", "loss")
    return smoothed(loss, len(loss.points)).points
