"""The pictures of docs/concepts, as SVG for light and dark pages: `python -m benchmarks.pictures` writes them
to docs/pictures.

A method is boxes and arrows, plans are what `petune plan --svg` draws, and the memory ladder has the bytes
that the cost model counts. A test compares.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

import torch
from petune_cli.drawing import STYLE, as_svg

from petune.estimate.forecast import forecast
from petune.estimate.timeline import charts
from petune.kernels.configs import KEEPS
from petune.kernels.memory.buffers import kept_sizes
from petune.kernels.memory.shape import Ranks
from petune.models import fp8, int8, nf4
from petune.recipe import load_recipe
from tests.kernels.shapes import LLAMA

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
UNIT = 10  # pixels of a step of the grid that boxes are placed on
LETTER, LINE = 6.7, 16  # pixels
COLOURS = """
.frozen { fill: #e3e5e8 } .trains { fill: #f5c992 } .value { fill: none; stroke: none }
.arrow { stroke: #57606a; opacity: 1 } .dashes { stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
.frozen { fill: #3a4048 } .trains { fill: #8a5a14 } .arrow { stroke: #9198a1 } }
"""
HEAD = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
HEAD += '<path d="M0,0 8,4 0,8z" style="fill:#808890;stroke:none;opacity:1"/></marker>'


@dataclass(frozen=True)
class Box:
    """A box with lines of text around its middle, in steps of the grid. kind: frozen, trains or value."""

    name: str
    x: float
    y: float
    kind: str = "frozen"
    text: str = ""
    wide: float = 9
    high: float = 4

    def drawn(self) -> Iterator[str]:
        """The box and its text."""
        left, top = UNIT * (self.x - self.wide / 2), UNIT * (self.y - self.high / 2)
        size = f'width="{UNIT * self.wide:g}" height="{UNIT * self.high:g}"'
        yield f'<rect class="{self.kind}" x="{left:g}" y="{top:g}" {size} rx="3"/>'
        lines = (self.text or self.name).split("\n")
        for at, line in enumerate(lines):
            y = UNIT * self.y + LINE * (at - (len(lines) - 1) / 2) + 4
            yield f'<text x="{UNIT * self.x:g}" y="{y:g}" text-anchor="middle">{escape(line)}</text>'


def diagram(title: str, boxes: Sequence[Box], arrows: Sequence[str], dashed: Sequence[str] = ()) -> str:
    """Boxes and the arrows between them, `from > to`, which go across and then up or down. dashed: where no
    gradient flows back."""
    named = {box.name: box for box in boxes}
    wide = UNIT * max(box.x + box.wide / 2 for box in boxes) + UNIT
    high = UNIT * max(box.y + box.high / 2 for box in boxes) + UNIT
    body = [one for box in boxes for one in box.drawn()]
    for arrow in (*arrows, *dashed):
        first, last = (named[name.strip()] for name in arrow.split(">"))
        body.append(_arrow(first, last, arrow in dashed))
    return _svg(title, wide, high, body)


def _arrow(one: Box, other: Box, dashed: bool) -> str:
    """A line from the side of a box to the nearer side of another."""
    if one.y == other.y:
        x, end = one.x + one.wide / 2, other.x - other.wide / 2
        path = f"M{UNIT * x:g},{UNIT * one.y:g}H{UNIT * end:g}"
    elif one.x == other.x:
        down = 1 if other.y > one.y else -1
        y, end = one.y + down * one.high / 2, other.y - down * other.high / 2
        path = f"M{UNIT * one.x:g},{UNIT * y:g}V{UNIT * end:g}"
    elif other.high <= 3:  # a sum: reached from above or below
        down = 1 if other.y > one.y else -1
        x, end = one.x + one.wide / 2, other.y - down * other.high / 2
        path = f"M{UNIT * x:g},{UNIT * one.y:g}H{UNIT * other.x:g}V{UNIT * end:g}"
    else:
        x, end = one.x + one.wide / 2, other.x - other.wide / 2
        turn = min(x + 1.5, (x + end) / 2)
        path = f"M{UNIT * x:g},{UNIT * one.y:g}H{UNIT * turn:g}V{UNIT * other.y:g}H{UNIT * end:g}"
    return f'<path class="arrow{" dashes" * dashed}" marker-end="url(#tip)" d="{path}"/>'


def _svg(title: str, wide: float, high: float, body: Sequence[str]) -> str:
    size = f'width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    page = f'<rect class="page" width="{wide:g}" height="{high:g}" style="stroke:none"/>'
    parts = [head, f"<title>{escape(title)}</title>", f"<style>{STYLE}{COLOURS}</style>", HEAD, page, *body]
    return "\n".join([*parts, "</svg>", ""])


# ---------------------------------------------------------------- methods

X, Y = Box("x", 3, 3, "value", wide=3), Box("y", 50, 3, "value", wide=3)
SUM = Box("+", 43, 3, "value", "+", 3, 3)
FAR = Box("y", 52, 3, "value", wide=3)


def methods() -> Iterator[tuple[str, str]]:
    """A picture for each method, by its name."""
    weight = Box("W", 22, 3, text="W\nfrozen", wide=12)
    yield (
        "full",
        diagram(
            "full fine-tuning: every weight trains",
            [X, Box("W", 22, 3, "trains", "W\ntrains", 12), Y],
            ["x > W", "W > y"],
        ),
    )
    down, up = Box("A", 17, 9, "trains", "A\n[r, in]"), Box("B", 29, 9, "trains", "B\n[out, r]")
    yield (
        "lora",
        diagram(
            "LoRA: y = W x + s B A x",
            [X, weight, down, up, Box("s", 37, 9, "value", "· s", 4), SUM, Y],
            ["x > W", "W > +", "x > A", "A > B", "B > s", "s > +", "+ > y"],
        ),
    )
    lengths = Box("m", 38, 3, "trains", "· m / ‖V‖\nm trains", 11)
    turned = Box("V", 22, 3, text="V = W + s B A\nB and A train", wide=16)
    yield (
        "dora",
        diagram("DoRA: y = (m / |V|) V x", [X, turned, lengths, Y], ["x > V", "V > m", "m > y"]),
    )
    yield (
        "ia3",
        diagram(
            "(IA)3: y = l * (W x)",
            [X, weight, Box("l", 38, 3, "trains", "· l [out]\ntrains", 11), Y],
            ["x > W", "W > l", "l > y"],
        ),
    )
    shards = Box("k", 16, 9, text="Σ of shards\nof r features", wide=13)
    one = Box("D", 32, 9, "trains", "Dᵀ\n[out, r], trains", 13)
    yield (
        "miss",
        diagram(
            "MiSS: y = W x + D^T (the sum of the shards of x)",
            [X, weight, shards, one, SUM, Y],
            ["x > W", "W > +", "x > k", "k > D", "D > +", "+ > y"],
        ),
    )
    rest = Box("W", 22, 3, text="W - s B A\nfrozen", wide=14)
    parts = [Box("A", 17, 9, "trains", "A = √(S/s) Vᵀ", 13), Box("B", 33, 9, "trains", "B = U √(S/s)", 13)]
    yield (
        "pissa",
        diagram(
            "PiSSA: the principal components of W train, the rest is frozen",
            [X, rest, *parts, Box("s", 42, 9, "value", "· s", 3), Box("+", 46, 3, "value", "+", 3, 3), FAR],
            ["x > W", "W > +", "x > A", "A > B", "B > s", "s > +", "+ > y"],
        ),
    )
    layer = Box("W", 11, 3, text="attention, MLP\nfrozen", wide=13)
    parts = [
        Box("down", 25, 9, "trains", wide=6),
        Box("act", 32, 9, wide=5),
        Box("up", 38, 9, "trains", wide=4),
    ]
    yield (
        "adapter",
        diagram(
            "bottleneck adapter: out = y + up(act(down(y)))",
            [Box("x", 2, 3, "value", wide=2), layer, *parts, SUM, Box("y", 50, 3, "value", "out", 4)],
            ["x > W", "W > +", "W > down", "down > act", "act > up", "up > +", "+ > y"],
        ),
    )
    yield "side", _ladder()


def _ladder() -> str:
    """The backbone below, the ladder above."""
    boxes, arrows, dashed = [Box("h0", 6, 13, text="embeddings", wide=10)], [], []
    boxes.append(Box("s0", 6, 3, "trains", "down", 10))
    dashed.append("h0 > s0")
    for at in (1, 2, 3):
        boxes += [
            Box(f"h{at}", 6 + 15 * at, 13, text=f"block {at}\nno gradients", wide=12),
            Box(f"s{at}", 6 + 15 * at, 3, "trains", f"side block {at}\nwidth / reduction", 13),
        ]
        arrows += [f"s{at - 1} > s{at}"]
        dashed += [f"h{at - 1} > h{at}", f"h{at} > s{at}"]
    boxes += [Box("up", 65, 3, "trains", "up", 6), Box("+", 73, 13, "value", "+", 3, 3)]
    boxes += [Box("head", 80, 13, text="head", wide=6)]
    return diagram(
        "ladder side-tuning: a narrow network beside a frozen backbone",
        boxes,
        [*arrows, "s3 > up", "up > +", "+ > head"],
        [*dashed, "h3 > +"],
    )


# ---------------------------------------------------------------- plans and memory

PLANS = {
    "dp": ["parallel=dp:2"],
    "tp": ["parallel=tp:2"],
    "sp": ["parallel=sp:2"],
    "galaxy": ["parallel=galaxy:2"],
    "pp": ["parallel={pp: {stages: [4, 4], microbatches: 4}}"],
}


def plans() -> Iterator[tuple[str, str]]:
    """What `petune plan llama_lora parallel=... --svg` draws, by the name of the backend."""
    for name, settings in PLANS.items():
        found = forecast(load_recipe("llama_lora", settings))
        yield name, as_svg(charts(found), [f"llama_lora under {settings[0]}"])


BLOCK = replace(LLAMA, ranks=Ranks())
SCALE = 6  # pixels a KiB
VALUES = {"x": "input", "qkv": "q, k, v", "a": "attn", "r": "sum", "u": "gate and up"}


def memory() -> str:
    """What a block of an 8B Llama keeps for each token on each rung, as bars of its values."""
    body, top, left = [], 12.0, 100
    for keep in (one for one in KEEPS if one != "auto"):
        sizes = {name: size / 1024 for name, size in kept_sizes(BLOCK, keep).items() if size >= 512}
        body.append(f'<text x="10" y="{top + 20:g}">{keep}</text>')
        x = float(left)
        for at, (name, size) in enumerate(sizes.items()):
            kind, name = ("forward", "weights")[at % 2], VALUES[name.rpartition(".")[2]]
            body.append(f'<g><title>{name}: {size:g} KiB</title><rect class="{kind}" x="{x:g}" y="{top:g}"')
            body[-1] += f' width="{SCALE * size:g}" height="30"/></g>'
            if SCALE * size > LETTER * len(name) + 8:
                body.append(f'<text x="{x + 4:g}" y="{top + 20:g}">{name}</text>')
            x += SCALE * size
        body.append(f'<text x="{x + 8:g}" y="{top + 20:g}">{sum(sizes.values()):g} KiB</text>')
        top += 40
    return _svg("bytes that a block keeps for each token, by rung", left + 92 * SCALE + 80, top, body)


LINE_AT, LINE_LONG = 80.0, 520.0  # pixels: where the line from -1 to 1 begins, and its length


def fewer_bytes() -> str:
    """The values that a number of a frozen weight can have in each form, the largest of its block or row
    being 1."""
    bytes_ = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()
    held = {
        "nf4": (nf4.levels(torch.device("cpu")), "4.13 bits"),
        "int8": (torch.arange(-int8.LARGEST, int8.LARGEST + 1) / int8.LARGEST, "8 bits"),
        "fp8": (bytes_[bytes_.isfinite()].unique() / fp8.LARGEST, "8 bits"),
    }
    body, top = [], 10.0
    for name, (levels, bits) in held.items():
        body.append(f'<text x="10" y="{top + 20:g}">{name}</text>')
        places = sorted({round(LINE_AT + LINE_LONG * (float(one) + 1) / 2, 1) for one in levels})
        path = "".join(f"M{x:g},{top:g}v28" for x in places)
        body.append(f'<path class="arrow" style="stroke-width:.6" d="{path}"/>')
        body.append(
            f'<text x="{LINE_AT + LINE_LONG + 12:g}" y="{top + 20:g}">{len(levels)} values, {bits}</text>'
        )
        top += 42
    for x, text in ((0.0, "-1"), (0.5, "0"), (1.0, "1")):
        x = LINE_AT + x * LINE_LONG
        body.append(f'<text x="{x:g}" y="{top + 6:g}" text-anchor="middle">{text}</text>')
    return _svg("the values of a number in nf4, int8 and fp8", LINE_AT + LINE_LONG + 160, top + 16, body)


# ---------------------------------------------------------------- methods, compared

NUMBER = r"([\d.]+)"
TABLE = re.compile(rf"^\| (\w+) \| [\d.]+ \| {NUMBER} \({NUMBER} to {NUMBER}\) \| {NUMBER} \|", re.MULTILINE)
PLOT_WIDE, PLOT_HIGH, MARGIN = 460, 240, 46
DECADES = (0.1, 1, 10, 100)


def compared() -> str:
    """The loss of each method on the tiny Llama over the share that trains, as the table of docs/methods.md
    has them: a mark for the mean, a line over the seeds."""
    page = (FOLDER.parent / "methods.md").read_text(encoding="utf-8")
    rows = TABLE.findall(page.partition("## Side by side")[2].partition("| bert")[0])
    found = {name: tuple(map(float, numbers)) for name, *numbers in rows}
    low, high = (edge(one[at] for one in found.values()) for edge, at in ((min, 1), (max, 2)))
    low, high = low - 0.1 * (high - low), high + 0.1 * (high - low)

    def across(share: float) -> float:
        return MARGIN + (PLOT_WIDE - 2 * MARGIN) * (math.log10(share) + 1) / 3

    def up(loss: float) -> float:
        return PLOT_HIGH - MARGIN - (PLOT_HIGH - 1.5 * MARGIN) * (loss - low) / (high - low)

    floor = up(low)
    body = [f'<path d="M{MARGIN},{up(high):.1f}V{floor:.1f}H{PLOT_WIDE - MARGIN}"/>']
    for share in DECADES:
        label = (
            f'<text x="{across(share):.1f}" y="{floor + LINE:.1f}" text-anchor="middle">{share:g} %</text>'
        )
        body += [f'<path d="M{across(share):.1f},{floor:.1f}v4"/>', label]
    for loss in (4.0, 4.1, 4.2, 4.3, 4.4):
        y = f'y="{up(loss) + 4:.1f}"'
        body.append(f'<text x="{MARGIN - 6}" {y} text-anchor="end">{loss:.1f}</text>')
    for name, (mean, least, most, share) in found.items():
        place = across(share)
        body.append(f'<path class="arrow" d="M{place:.1f},{up(least):.1f}V{up(most):.1f}"/>')
        body.append(f'<rect class="trains" x="{place - 3:.1f}" y="{up(mean) - 3:.1f}" width="6" height="6"/>')
        over = 22 if name == "lora" else 4  # of which dora is the near neighbour
        body.append(
            f'<text x="{place - 8:.1f}" y="{up(mean) + over - 8:.1f}" text-anchor="end">{name}</text>'
        )
    middle = f'<text x="{PLOT_WIDE / 2:g}" y="{PLOT_HIGH - 8}" text-anchor="middle">'
    body.append(f"{middle}share of the parameters that trains; upwards: held-out loss</text>")
    return _svg("loss of each method over the share that trains", PLOT_WIDE, PLOT_HIGH, body)


def pictures() -> dict[str, str]:
    """Every picture by the name of its file."""
    found = {f"{name}.svg": text for name, text in methods()}
    found |= {f"plan-{name}.svg": text for name, text in plans()}
    own = {"memory.svg": memory(), "fewer-bytes.svg": fewer_bytes(), "methods.svg": compared()}
    return found | own


if __name__ == "__main__":
    for file, text in pictures().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
