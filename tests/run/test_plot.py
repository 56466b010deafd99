"""The loss curve without matplotlib: every step and every evaluation in its place, and nothing that is not a
number."""

from __future__ import annotations

import math
import re
import warnings
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from petune.run.plot import BOTTOM, HEIGHT, LEFT, WIDTH, draw_loss, loss_svg, run_html
from tests.made_runs import write_run

STEPS = [{"step": step, "loss": 4.0 / step} for step in range(1, 5)]
SCORES = [{"step": 0, "eval_loss": 5.0}, {"step": 4, "eval_loss": 2.0}]


def lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line of the picture."""
    found = [
        one.get("points", "").split() for one in ET.fromstring(svg).iter() if one.tag.endswith("polyline")
    ]
    return [[(float(x), float(y)) for x, y in (point.split(",") for point in points)] for points in found]


def test_the_curve_goes_through_every_step_and_the_scores_over_all_of_them():
    steps, smooth, scores = lines(loss_svg([*STEPS, *SCORES]))
    assert len(steps) == len(smooth) == 4 and len(scores) == 2
    # step 0 on the left, the greatest loss on top
    assert scores[0] == (LEFT, 8.0) and scores[1][0] == steps[-1][0] == WIDTH - 8
    assert steps[-1][1] == HEIGHT - BOTTOM  # the least loss at the bottom
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    "records",
    [[], SCORES, [{"step": 1, "loss": math.nan}], [{"step": 1, "loss": math.inf}]],
    ids=["none", "scores", "nan", "inf"],
)
def test_without_a_finite_loss_there_is_no_picture(records: list[dict[str, Any]]):
    assert loss_svg(records) == ""


@pytest.mark.parametrize(
    "records",
    [
        STEPS[:1],
        [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}],
        [*STEPS, {"step": 5, "loss": math.nan}],
    ],
)
def test_a_flat_a_short_and_a_broken_curve_have_finite_coordinates(records: list[dict[str, Any]]):
    svg = loss_svg(records)
    ET.fromstring(svg)
    assert "nan" not in svg and "inf" not in svg and re.search(r'points="\d', svg)


def test_a_run_shows_its_name_as_text_and_scores_of_base_and_tuned():
    shown = run_html("Run('<a>')", {"before": {"loss": 3.0, "other": 1.0}, "after": {"loss": 2.0}}, STEPS)
    assert (
        "&lt;a&gt;" in shown
        and "<td>loss</td><td>3.0000</td><td>2.0000</td>" in shown
        and "other" not in shown
    )
    assert "<table>" not in run_html("x", {}, STEPS)


def test_the_picture_of_a_run_has_its_title_metric_learning_rate_and_whole_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    run = write_run(tmp_path / "a $run$ \\frac", 3)
    assert draw_loss(run / "metrics.jsonl", run / "loss.png")
    (figure,) = drawn
    figure.canvas.draw()
    assert figure.get_suptitle() == "a $run$ \\frac: lora on demo:minilm"
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats)", "accuracy", "learning rate"]
    assert all(step == round(step) for step in figure.axes[-1].get_xticks())


def test_a_name_in_letters_that_the_font_lacks_is_no_warning(tmp_path: Path):
    pytest.importorskip("matplotlib")
    folder = write_run(tmp_path / "\u4e2d")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert draw_loss(folder / "metrics.jsonl", folder / "loss.png")
