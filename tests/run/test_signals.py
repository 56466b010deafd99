"""SIGTERM and Ctrl-C in every phase of a run: heeded within two seconds; before training nothing is left
behind, after it the state is.

Each phase is made to last half a minute, in steps as its own Python makes them, and the signal comes as it
begins.
"""

from __future__ import annotations

import errno
import os
import pkgutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import petune.files.atomic
import petune.run.build
import petune.tasks.kept
from petune.errors import Stopped
from petune.files.manifest import check_folder
from petune.parallel.launch import beats, process_group
from petune.run.finished import load_run
from petune.run.job import Job
from petune.run.signals import StopNow, StopRequest
from petune.run.train import train as train_all
from petune.saving import checkpoint
from tests.forked_launch import Forks
from tests.forked_launch import forks as forks
from tests.group_pool import ends
from tests.planned_runs import PLANS, small
from tests.small_runs import Listener, assert_same_run, newest, run, settings

pytestmark = pytest.mark.usefixtures("no_picture")

PREPARING = {  # what is called in each phase before training
    "reading the rows": "petune.tasks.sources.read_file",
    "splitting": "petune.tasks.load.split_off",
    "loading the tokenizer": "petune.models.loading.AutoTokenizer.from_pretrained",
    "tokenizing": "petune.tasks.examples.Coder._all_ids",
    "rendering a template": "petune.tasks.chat.render",
    "reading the weights": "petune.models.contents.is_finite",
    "adding the method": "petune.run.build.tune",
    "placing the model": "petune.run.step.run_on",
}


def long(what: str, number: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let a function last half a minute; this process gets the signal as it is called. When it was."""
    original, called, here = pkgutil.resolve_name(what), list[float](), os.getpid()

    def lasting(*arguments: Any, **named: Any) -> Any:
        if not called:
            called.append(time.monotonic())
            os.kill(here, number)
            until = time.monotonic() + 30
            while time.monotonic() < until:
                time.sleep(0.001)
        return original(*arguments, **named)

    monkeypatch.setattr(what, lasting)
    return called


@pytest.mark.forks
@pytest.mark.parametrize(
    ("phase", "number"), [*((phase, signal.SIGTERM) for phase in PREPARING), ("tokenizing", signal.SIGINT)]
)
def test_a_signal_before_training_ends_the_run_at_once_and_leaves_nothing(
    phase: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    task = "chat" if phase == "rendering a template" else "causal"
    recipe = settings(tmp_path, task=task)
    recipe["data"] = {"path": recipe["data"]["path"]}
    before, handlers = (
        sorted(tmp_path.rglob("*")),
        [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)],
    )
    called = long(PREPARING[phase], number, monkeypatch)
    began = time.monotonic()
    with pytest.raises(
        Stopped, match=f"stopped by {signal.Signals(number).name} before training began; nothing was written"
    ) as caught:
        run(recipe)
    assert time.monotonic() - (called or [began])[0] < 2
    assert caught.value.code == 75
    assert sorted(tmp_path.rglob("*")) == before
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_a_library_that_swallows_everything_does_not_swallow_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def swallowing(*arguments: Any, **named: Any) -> Any:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        except BaseException:
            pass
        return tune(*arguments, **named)

    tune = petune.run.build.tune
    monkeypatch.setattr("petune.run.build.tune", swallowing)
    with pytest.raises(Stopped, match="before training began"):
        run(settings(tmp_path))
    assert not (tmp_path / "run").exists()


# what is called in each phase of training; at which step the run stops, the same or the next where another
# thread calls it
TRAINING: dict[str, tuple[str, int]] = {
    "the checksums": ("petune.run.step.OptimizerStep.make_audit", 0),
    "the score of the base": ("petune.run.loop.Loop.score", 0),
    "the first batch": ("petune.run.step.OptimizerStep.micro_batches", 1),
    "a save": ("petune.run.state.write_packed", 1),
    "an evaluation": ("petune.run.loop.Loop._evaluate_and_compare", 2),
}


TRAINED: dict[str, Any] = {"eval_every": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that got no signal, beside its model and its rows."""
    return run(settings(tmp_path_factory.mktemp("straight"), **TRAINED, out="straight")).folder


@pytest.mark.parametrize("phase", TRAINING)
def test_a_signal_in_training_is_heeded_at_the_next_safe_place_and_nothing_is_lost(
    phase: str, straight: Path, monkeypatch: pytest.MonkeyPatch
):
    what, step = TRAINING[phase]
    original, called = pkgutil.resolve_name(what), list[float]()

    def signalled(*arguments: Any, **named: Any) -> Any:
        if not called:
            called.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments, **named)

    recipe = settings(straight.parent, **TRAINED, out=phase.replace(" ", "-"))
    folder = Path(recipe["out"])
    monkeypatch.setattr(what, signalled)
    with pytest.raises(Stopped, match=r"stopped by SIGTERM at step \d of 4; saved") as stopped:
        run(recipe)
    assert called and time.monotonic() - called[0] < 2
    if phase == "a save" and f"at step {step + 1}" in str(stopped.value):
        step += 1
    assert f"at step {step} of 4" in str(stopped.value)
    assert newest(folder).name == f"step-{step}"
    checkpoint.verify(newest(folder))
    run(recipe, resume=True)
    assert_same_run(folder, straight)


@pytest.mark.parametrize("how", ["its terminal is closed", "who reads it has gone"])
def test_a_run_whose_output_is_lost_saves_and_goes_on_bit_by_bit(how: str, straight: Path):
    def lose(step: int) -> None:
        if step == 1 and how == "its terminal is closed":
            os.kill(os.getpid(), signal.SIGHUP)
        elif step == 1:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    recipe, listener = settings(straight.parent, **TRAINED, out=how.replace(" ", "-")), Listener(lose)
    folder, handler = Path(recipe["out"]), signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup
    try:
        with pytest.raises(Stopped, match=r"stopped by .* at step 1 of 4; saved(.|\n)*--resume") as stopped:
            run(recipe, listener)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, handler)
    assert isinstance(stopped.value.__cause__, BrokenPipeError) == (how == "who reads it has gone")
    assert newest(folder).name == "step-1" and len(listener.steps) == 1
    run(recipe, resume=True)
    assert_same_run(folder, straight)


def test_a_run_under_nohup_does_not_hear_of_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest().listening():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "left"), [(signal.SIGTERM, 1), (signal.SIGINT, 0)])
def test_a_signal_in_a_merge_ends_it_at_once_and_the_next_one_is_whole(
    number: int, left: int, tmp_path: Path
):
    run(settings(tmp_path, max_steps=1, warmup=0))

    def merge(folder: Path) -> None:
        seal = petune.files.atomic.seal_folder
        # all is written, nothing has its name
        petune.files.atomic.seal_folder = lambda work: [os.kill(os.getpid(), number), seal(work)]
        load_run(folder).merge()

    folder = tmp_path / "run"
    assert ends(1, merge, folder)[0].code != 0
    assert not (folder / "merged").exists() and len(list(folder.glob(".merged.*"))) == left
    check_folder(load_run(folder).merge())
    assert list(folder.glob(".merged.*")) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_while_it_prepares_stops_the_others(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Long before their next beat: the bound is below the time of one."""
    monkeypatch.setattr(beats, "BEAT_S", 12.0)
    monkeypatch.setattr(beats, "LOOKS", 48)

    def train(recipe: dict[str, Any]) -> None:
        load = petune.tasks.kept.load_rows

        def lasting(*arguments: Any, **named: Any) -> Any:
            if process_group.started()[0] == rank:
                time.sleep(0.3)
                os.kill(os.getpid(), signal.SIGTERM)
            until = time.monotonic() + 30
            while time.monotonic() < until:
                time.sleep(0.001)
            return load(*arguments, **named)

        petune.tasks.kept.load_rows = lasting
        run(recipe)

    recipe = small(tmp_path, "bert", "lora", parallel=PLANS["dp"])
    began = time.monotonic()
    found = ends(2, train, recipe)
    assert [end.code for end in found] == [75, 75], found
    assert all("before training began" in str(end.error) for end in found)
    assert time.monotonic() - began < 10
    assert not (tmp_path / "run").exists()


def before(owner: Any, name: str, act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a function of `owner` begin with `act`."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: (act(), original(*given, **named))[1])


@pytest.mark.parametrize(
    ("rank", "where", "number"),
    [
        ("0", "joining", signal.SIGINT),
        pytest.param("1", "joining", signal.SIGTERM, marks=pytest.mark.long),
        ("1", "imports", signal.SIGTERM),
    ],
)
def test_a_stop_that_meets_one_rank_before_it_meets_the_others_ends_them_all(
    rank: str, where: str, number: int, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
):
    """The others wait for it where nobody tells them; by themselves they would end with another error."""

    def stop() -> None:
        if os.environ["RANK"] == rank:
            os.kill(os.getpid(), number)

    join = process_group.join
    monkeypatch.setattr(process_group, "join", lambda device, _: join(device, 20, 20))
    owner, name = {"joining": (process_group, "join"), "imports": (Job, "read")}[where]
    before(owner, name, stop, monkeypatch)
    recipe = small(tmp_path, "bert", "lora", parallel=PLANS["dp"])
    with pytest.raises(
        Stopped, match=r"^stopped by SIG\w+ before training began; nothing was written"
    ) as told:
        train_all(recipe, restarts=1)
    assert "start it again" in str(told.value)
    assert forks.pids(0) and len(forks.started) == 2, "nothing was started anew"
    assert not (tmp_path / "run" / "resolved.yaml").exists()


def test_ctrl_c_while_ranks_import_says_that_nothing_was_written(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
):
    def wait() -> None:
        (tmp_path / f"here-{os.environ['RANK']}").touch()
        time.sleep(60)

    def interrupt() -> None:
        while len(list(tmp_path.glob("here-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before(Job, "read", wait, monkeypatch)
    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Stopped, match=r"^stopped by SIGINT before training began; nothing was written"):
        train_all(small(tmp_path, "bert", "lora", parallel=PLANS["dp"]))


def test_a_second_ctrl_c_interrupts():
    stop = StopRequest()
    with stop.listening():
        stop.save_first()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    stop = StopRequest()
    stop.name = "SIGTERM"
    with pytest.raises(StopNow):
        stop.save_first()
