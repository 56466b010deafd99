"""The ranks of a plan on a terminal: who is shown, what of each, and a run in a pseudo-terminal: of forks,
and of processes as a user has them."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import rich
from petune_cli.display import Live
from petune_cli.main import app
from petune_cli.ranks import ROWS, panel, share
from rich.console import Console

from petune.parallel.launch import process_group
from petune.parallel.launch.beats import Health
from petune.run.step import OptimizerStep
from tests.forked_launch import Forks, say_to
from tests.forked_launch import forks as forks
from tests.small_runs import as_yaml, settings

STYLE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def lines(health: Sequence[Health], world: int) -> list[str]:
    """The panel of so many ranks as text."""
    screen = io.StringIO()
    ranks = [{"blocks": f"layers {at}", "rows": "50%"} for at in range(world)]
    Console(file=screen, width=110).print(panel(health, ranks))
    return [line.strip() for line in screen.getvalue().splitlines() if line.strip()]


def test_a_line_says_where_a_rank_is_what_it_holds_and_when_it_was_heard() -> None:
    shown = lines([Health(0, 0.0, 6, (0.256, 3 << 30, "cuda:0")), Health(1, 0.42, 6)], 2)
    assert shown[0].split() == ["rank", "device", "holds", "step", "s/step", "peak", "memory", "heard"]
    first, second = (re.split(r"  +", line) for line in shown[2:])
    assert first == ["0", "cuda:0", "layers 0; 50% of rows", "7", "0.26", "3 GiB", "here"]
    assert second == ["1", "-", "layers 1; 50% of rows", "7", "-", "-", "0.4 s ago"]


def test_of_many_ranks_those_that_are_late_are_shown_whatever_their_number() -> None:
    health = [Health(rank, 20.0 if rank == 90 else 0.1, 3) for rank in range(91)]
    shown = lines(health, 128)
    assert [int(line.split()[0]) for line in shown[2:-1]] == [*range(ROWS - 1), 90]
    assert shown[-1] == f"and {128 - ROWS} more, of whom none is late"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLORTERM", "truecolor")
        screen = io.StringIO()
        Console(file=screen, width=110, force_terminal=True).print(panel(health, [{}] * 128))
    red = [line for line in screen.getvalue().splitlines() if "\x1b[31m" in line]
    assert len(red) == 1 and "20.0 s ago" in red[0]


def test_a_share_is_said_in_words() -> None:
    assert (
        share({"blocks": "layers 0-3", "heads": 2, "tokens": "50%"}) == "layers 0-3; 2 heads; 50% of tokens"
    )
    assert share({}) == ""


def test_the_bar_has_ranks_below_it_where_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    live = Live(Console(file=screen, force_terminal=True, width=120))
    live.header(["x"], 3)
    live.bar.refresh()
    assert "heard" not in screen.getvalue()
    monkeypatch.setattr(process_group, "health", lambda: [Health(0, 0.0, 1), Health(1, 7.5, 1)])
    live.ranks([{"rows": "50%"}] * 2)
    live.bar.refresh()
    live.close()
    assert "7.5 s ago" in screen.getvalue()


@pytest.mark.forks
def test_a_plan_of_forked_ranks_shows_them_on_a_terminal(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the test below, but for what Python takes to start and to import torch, three times over, and for
    steps that last long enough to be seen."""
    take = OptimizerStep.take

    def slowly(self: OptimizerStep, *args: Any, **named: Any) -> Any:
        time.sleep(0.25)
        return take(self, *args, **named)

    monkeypatch.setattr(OptimizerStep, "take", slowly)
    monkeypatch.setattr("petune.parallel.launch.beats.BEAT_S", 0.1)
    recipe = _written(tmp_path, 8)
    ours, theirs = _terminal()
    if (pid := os.fork()) == 0:
        _typed_in_a_fork(["train", str(recipe)], theirs)
    os.close(theirs)
    said = _read(ours)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said
    _assert_ranks_are_shown(said, 8)


@pytest.mark.long
@pytest.mark.forks
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "pipe"])
def test_a_plan_shows_its_ranks_on_a_terminal_and_lines_in_a_pipe(tmp_path: Path, terminal: bool) -> None:
    steps = 60 if terminal else 4  # the bar is drawn ten times a second
    recipe = _written(tmp_path, steps)
    ours, theirs = _terminal() if terminal else os.pipe()
    words = [sys.executable, "-c", "from petune_cli.main import app; app()", "train", str(recipe)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):  # of another terminal
        environment.pop(name, None)
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        said = _read(ours)
    assert running.returncode == 0, said
    if terminal:
        _assert_ranks_are_shown(said, steps)
        return
    shown = STYLE.sub("", said)
    assert f"{steps}/{steps}" in shown and "━" not in shown and "grad" in shown
    assert not ROW.findall(shown) and "\x1b" not in said


ROW = re.compile(r"(?m)^ *([01]) +cpu .*?of rows +(\d+) +(\d+\.\d\d) +(\S+ \wiB) +(here|\d+\.\d s ago)")


def _assert_ranks_are_shown(said: str, steps: int) -> None:
    shown = STYLE.sub("", said)
    rows = ROW.findall(shown)
    assert f"{steps}/{steps}" in shown and "━" in shown and "grad" not in shown
    assert {row[0] for row in rows} == {"0", "1"}, shown
    assert {row[4] == "here" for row in rows if row[0] == "0"} == {True}
    assert all(row[4] != "here" for row in rows if row[0] == "1")
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is back"


def _written(place: Path, steps: int) -> Path:
    """A recipe of two replicas."""
    changes = {"epochs": 100, "max_steps": steps, "save_every": 500, "eval_every": 500, "report": False}
    return as_yaml(place / "mine.yaml", settings(place, parallel="dp", **changes))


def _terminal() -> tuple[int, int]:
    """Both ends of a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    return ours, theirs


def _typed_in_a_fork(words: list[str], terminal: int) -> NoReturn:
    """Be the command, at a terminal."""
    code = 1
    try:
        os.dup2(terminal, 0)
        say_to(terminal, terminal)
        os.environ["TERM"] = "xterm"
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
        rich.reconfigure()  # an earlier test may have made the console, with a width of its own
        app(words)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _read(end: int) -> str:
    """All that is written until the other end closes, which a terminal tells by an error."""
    found = bytearray()
    while True:
        try:
            more = os.read(end, 1 << 16)
        except OSError:
            more = b""
        if not more:
            os.close(end)
            return found.decode(errors="replace").replace("\r\n", "\n")
        found += more
