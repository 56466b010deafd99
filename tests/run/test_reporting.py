"""Every line is kept, whoever listens; a tracker gets the numbers; a full disk is the machine's fault and is
said so."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from petune.errors import MachineError, RecipeError
from petune.log import human
from petune.run.reporting import Logged, PlainReporter, Trackers, score_line, step_line
from tests.small_runs import Listener, run, settings

pytestmark = pytest.mark.usefixtures("no_picture")


def record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step / 10,
        "loss": 1.5,
        "lr": 1e-3,
        "grad_norm": 0.25,
        "tokens": 9 * step,
        "tokens_per_s": 1234.5,
    }


def test_a_line_of_a_step_has_its_numbers():
    assert (
        step_line(record(3), 40)
        == "step 3/40  epoch 0.30  loss 1.5000  lr 1.00e-03  grad 0.250  1,234 tokens/s"
    )


def test_a_line_of_scores_has_each_by_its_name():
    assert (
        score_line({"step": 4, "epoch": 1.0, "eval_loss": 2.0, "eval_f1_macro": 0.5})
        == "evaluation at step 4  loss 2.0000  f1_macro 0.5000"
    )


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.5 KiB"),
        (2.5 * 2**20, "2.5 MiB"),
        (3 * 2**30, "3 GiB"),
        (4 * 2**40, "4 TiB"),
    ],
)
def test_sizes_are_for_people(size: float, text: str):
    assert human(size) == text


@pytest.mark.parametrize(("total", "most"), [(1, 1), (7, 7), (100, 22), (1000, 22)])
def test_a_long_run_shows_about_twenty_steps_the_first_and_the_last_among_them(total: int, most: int):
    lines: list[str] = []
    reporter = PlainReporter(lines.append)
    reporter.header(["model  tiny"], total)
    for step in range(1, total + 1):
        reporter.step(record(step))
    assert lines[0] == "model  tiny"
    shown = [line for line in lines if line.startswith("step ")]
    assert len(shown) <= most
    assert shown[0].startswith("step 1/") and shown[-1].startswith(f"step {total}/")


def test_everything_is_logged_with_the_time_kept_and_passed_on(tmp_path: Path):
    listener = Listener()
    logged = Logged(listener, tmp_path / "run.log", tmp_path / "metrics.jsonl")
    logged.header(["one", "two"], 2)
    logged.step(record(1))
    logged.evaluated({"step": 1, "epoch": 0.1, "eval_loss": 2.0})
    logged.note("noted")
    logged.done(["bye"])
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert [line[20:] for line in lines] == [
        "one",
        "two",
        step_line(record(1), 2),
        "evaluation at step 1  loss 2.0000",
        "noted",
        "bye",
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", line) for line in lines)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        record(1),
        {"step": 1, "epoch": 0.1, "eval_loss": 2.0},
    ]
    assert (listener.lines, listener.notes, listener.closing) == (["one", "two"], ["noted"], ["bye"])
    assert len(listener.steps) == len(listener.scores) == 1


def test_a_disk_that_fills_up_while_logging_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plain = os.write

    def full(fd: int, content: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("run.log"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(fd, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(MachineError, match="No space left") as caught:
        run(settings(tmp_path))
    assert caught.value.code == 5
    assert "run.log" in str(caught.value)


def test_no_tracker_imports_nothing(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "accelerate", None)
    trackers = Trackers(())
    trackers.start(Path("nowhere"), {})
    trackers.log(record(1))
    trackers.finish()
    assert not Path("nowhere").exists()


def test_tensorboard_gets_every_step_and_every_score(tmp_path: Path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finished = run(settings(tmp_path, trackers=["tensorboard"], eval_every=3))
    files = list(finished.folder.rglob("events.out.tfevents*"))
    assert files
    values: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            values.setdefault(name, {}).update({event.step: event.value for event in events.Scalars(name)})
    wanted = {one["step"]: one["loss"] for one in finished.metrics() if "loss" in one}
    assert values["loss"] == pytest.approx(wanted, abs=1e-6)
    assert set(values["eval_loss"]) == {0, 3, 6}
    assert {"lr", "grad_norm"} <= values.keys()
    assert f"tracker tensorboard: {files[0].parent}" in (finished.folder / "run.log").read_text()


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (SimpleNamespace(url="https://w.ai/run"), "https://w.ai/run"),
        (SimpleNamespace(get_url=lambda: "https://comet/run"), "https://comet/run"),
        (SimpleNamespace(url=None, dir="wandb/offline-run-1/files"), "wandb/offline-run-1/files"),
        (SimpleNamespace(info=SimpleNamespace(artifact_uri="mlruns/0/1/artifacts")), "mlruns/0/1/artifacts"),
        (SimpleNamespace(), "started; it says no address"),
    ],
)
def test_a_tracker_says_where_it_shows_the_run(own: Any, said: str):
    trackers = Trackers(())
    trackers.active = [SimpleNamespace(name="mine", tracker=own)]
    assert trackers.places() == [f"tracker mine: {said}"]


def test_a_tracker_that_is_not_installed_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("accelerate.tracking.get_available_trackers", lambda: ["tensorboard"])
    recipe = settings(tmp_path, trackers=["wandb"])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(MachineError, match="wandb is not installed") as caught:
        run(recipe)
    assert caught.value.code == 5 and "tensorboard" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_tracker_nobody_knows_is_refused_by_the_recipe(tmp_path: Path):
    with pytest.raises(RecipeError, match="trackers") as caught:
        run(settings(tmp_path, trackers=["tensorbord"]))
    assert "tensorboard" in str(caught.value)
