"""The ranks of a plan on a terminal: who is shown, what of each, and the real thing in a pseudo-terminal."""

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
from collections.abc import Sequence
from pathlib import Path

import pytest
from petune_cli.display import Live
from petune_cli.ranks import ROWS, panel, share
from rich.console import Console

from petune.parallel.launch import process_group
from petune.parallel.launch.beats import Health
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
@pytest.mark.parametrize(
    "terminal", [True, pytest.param(False, marks=pytest.mark.long)], ids=["terminal", "pipe"]
)
def test_a_plan_shows_its_ranks_on_a_terminal_and_lines_in_a_pipe(tmp_path: Path, terminal: bool) -> None:
    steps = 60 if terminal else 4  # the bar is drawn ten times a second
    changes = {"epochs": 100, "max_steps": steps, "save_every": 500, "eval_every": 500, "report": False}
    recipe = as_yaml(tmp_path / "mine.yaml", settings(tmp_path, parallel="dp", **changes))
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    words = [sys.executable, "-c", "from petune_cli.main import app; app()", "train", str(recipe)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):  # of another terminal
        environment.pop(name, None)
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        said = _read(ours)
    assert running.returncode == 0, said
    shown = STYLE.sub("", said)
    rows = re.findall(
        r"(?m)^ *([01]) +cpu .*?of rows +(\d+) +(\d+\.\d\d) +(\S+ \wiB) +(here|\d+\.\d s ago)", shown
    )
    assert f"{steps}/{steps}" in shown and ("━" in shown) == terminal and ("grad" in shown) != terminal
    if not terminal:
        assert not rows and "\x1b" not in said
        return
    assert {row[0] for row in rows} == {"0", "1"}
    assert {row[4] == "here" for row in rows if row[0] == "0"} == {True}
    assert all(row[4] != "here" for row in rows if row[0] == "1")
    assert said.rindex("\x1b[?25h") > said.rindex("\x1b[?25l"), "the cursor is back"


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
