"""The charts of a plan as text and as a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from petune_cli.drawing import WIDTH, as_svg, as_text

from petune.estimate.timeline import Arrow, Box, Chart, TimelineRow
from tests.cli.conftest import Type

PIPELINE = """\
a step by 1f1b, 4 micro-batches, 2 stages: a rank waits 20% of it
rank 0  |F0|F1...|B0 |F2|B1|F3|B2 ...|B3|
rank 1  ...|F0|B0|F1|B1 |F2|B2|F3|B3 ...|
unit      a block's forward pass, 0.75 columns wide; 42.9 in all
letters   F forward, B backward of a micro-batch
sent      stage 0 to 1: 256 KiB a micro-batch forward, 256 KiB back
"""
GALAXY = """\
a block of the decoder, 8 times, on ranks 0-1
forward   all-gather 768 KiB > attention > reduce-scatter 768 KiB > all-gather 768 KiB > mlp >
          reduce-scatter 768 KiB
backward  all-gather 768 KiB > mlp > reduce-scatter 768 KiB > all-gather 768 KiB > attention >
          reduce-scatter 768 KiB

a step
ranks 0-1  forward > all-gather 768 KiB (decoder exit) > backward >
           all-gather 768 KiB (decoder entry) >
           all-reduce 448 KiB (gradients over the cut, once a step)
"""
HOSTILE = "</title><script>alert('1')</script>&\"\x00\x1b[31m"


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        (("llama_lora_pp", "parallel.pp.stages=[4,4]"), PIPELINE),
        (("llama_lora", "parallel={galaxy: {shares: [3, 1]}}"), GALAXY),
    ],
)
def test_the_terminal_shows_who_does_what_and_when(type_: Type, words: tuple[str, ...], drawn: str) -> None:
    assert f"\n\n{drawn}\n" in type_("plan", *words).out


def test_the_documentation_shows_the_same(type_: Type) -> None:
    page = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text()
    command = "$ petune plan recipes/llama_lora_pp.yaml parallel.pp.stages=[4,4]\n"
    assert f"```\n{command}{PIPELINE}```\n" in page


def test_one_process_has_nothing_to_draw(type_: Type, tmp_path: Path) -> None:
    assert "forward >" not in type_("plan", "llama_lora").out
    shown = type_("plan", "llama_lora", "--svg", "step.svg")
    assert shown.code == 2 and "one process has no schedule" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_picture_is_written_and_nothing_is_written_over(type_: Type, tmp_path: Path) -> None:
    shown = type_("plan", "llama_lora_pp", "--svg", "step.svg")
    assert shown.code == 0 and "drawn    step.svg" in shown.out
    root = ElementTree.fromstring((tmp_path / "step.svg").read_text())
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles[0].startswith("model ") and any(
        one.startswith("backward of micro-batch 3 through stage 1") for one in titles
    )
    assert len(root.findall(".//{*}rect[@class='forward']")) == 2 * 4
    assert len(root.findall(".//{*}path")) == 2 * 4
    assert type_("plan", "llama_lora_pp", "--svg", "step.svg").code == 2
    assert type_("plan", "llama_lora_pp", "--svg", "step.svg", "--overwrite").code == 0
    assert "no such folder" in type_("plan", "llama_lora_pp", "--svg", "no/step.svg").err


# ------------------------------------------------------------------ charts made by hand


def chart(length: int) -> Chart:
    """Rows of `length` passes, one behind the other."""
    made = (
        TimelineRow(
            f"rank {row}",
            tuple(
                Box("forward", f"F{at}", f"pass {at}", float(at + row), at + row + 1.0)
                for at in range(length)
            ),
        )
        for row in range(2)
    )
    return Chart("a step", tuple(made), "a pass")


def test_long_rows_leave_out_their_middle_and_fit() -> None:
    lines = as_text([chart(200)])
    assert max(map(len, lines)) == WIDTH
    assert lines[1].startswith("rank 0  |F0 ") and lines[1].endswith("|F199.....|")
    assert " ~ " in lines[1] and lines[1].index(" ~ ") == lines[2].index(" ~ ")
    assert "~ leaves out the middle" in lines[3]


def test_what_is_too_short_for_its_letters_has_none_of_its_neighbours_room() -> None:
    boxes = (Box("forward", "F0", "", 0.0, 10.0), Box("weights", "W0", "", 10.0, 10.1))
    line = as_text([Chart("a step", (TimelineRow("rank 0", boxes),), "a pass")])[1]
    assert line == "rank 0  |F0|"


def test_words_mean_nothing_to_a_picture() -> None:
    boxes = (Box("forward", HOSTILE, HOSTILE, 0.0, 1.0),)
    one = Chart(
        HOSTILE, (TimelineRow(HOSTILE, boxes),), HOSTILE, (Arrow(0, 0, 0.0, 1.0, HOSTILE),), (HOSTILE,)
    )
    for drawn in (one, Chart(HOSTILE, one.rows)):
        root = ElementTree.fromstring(as_svg([drawn], [HOSTILE, "two"]))
        assert not root.findall(".//{*}script")
        titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
        assert all("<script>" in (title or "") and "\\x1b" in (title or "") for title in titles)


def test_a_picture_is_readable_on_light_and_dark_pages() -> None:
    text = as_svg([chart(3)], ["a model"])
    light, _, dark = text.partition("@media (prefers-color-scheme: dark)")
    for kind in ("page", "forward", "backward", "weights", "compute", "send"):
        assert f".{kind} {{" in light and f".{kind} {{" in dark
