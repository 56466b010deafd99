"""Runs whose folder lies on a disk that fails or is slow, a real mount (`make test-system`): they end with 5
in words, nothing that was saved is lost, and `--resume` ends as a run that met no fault."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from petune.errors import MachineError
from tests.small_runs import Listener, as_yaml, assert_same_run, run, settings

MISSING = importlib.util.find_spec("mfusepy") is None or shutil.which("fusermount3") is None
pytestmark = [
    pytest.mark.system,
    pytest.mark.forks,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        MISSING or not os.access("/dev/fuse", os.W_OK),
        reason="needs /dev/fuse, Debian's fuse3 and mfusepy",
    ),
]
CHANGING = ("create", "write", "fsync", "rename", "mkdir", "unlink", "rmdir", "chmod", "truncate")
FLUSH = os.fsync  # which tests leave out elsewhere
READING = ("getattr", "readdir", "open", "read")


@dataclass
class Mount:
    """A folder on the disk, what lies behind it, and what the disk is told to do."""

    folder: Path
    source: Path
    orders: Path

    def order(self, **wanted: Any) -> None:
        """From now on."""
        (new := self.orders.with_suffix(".new")).write_text(json.dumps(wanted))
        new.rename(self.orders)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mount]:
    """A disk without a fault, to which runs flush what they write."""
    monkeypatch.setattr(os, "fsync", FLUSH)
    found = Mount(tmp_path / "mount", tmp_path / "source", tmp_path / "orders.json")
    found.folder.mkdir()
    found.source.mkdir()
    found.order()
    words = [sys.executable, "-m", "tests.failing_mount", found.source, found.folder, found.orders]
    with subprocess.Popen(words, cwd=Path(__file__).parent.parent.parent) as disk:
        try:
            ends = time.monotonic() + 60
            while not found.folder.is_mount():
                assert disk.poll() is None and time.monotonic() < ends
                time.sleep(0.05)
            yield found
        finally:
            found.order()
            subprocess.run(["fusermount3", "-uz", found.folder], check=True)


def saved(mount: Mount) -> dict[str, bytes]:
    """Every file of every checkpoint that has its name, as it lies behind the mount."""
    place = mount.source / "run" / "checkpoints"
    return {
        str(file.relative_to(place)): file.read_bytes()
        for file in place.glob("step-*/**/*")
        if file.is_file() and ".tmp-" not in str(file)
    }


@pytest.mark.parametrize(
    ("calls", "begins"),
    [
        pytest.param(["write"], "metrics.jsonl", id="a record is not written"),
        pytest.param(["write"], "checkpoints", id="a checkpoint is not written"),
        pytest.param(["fsync"], "checkpoints", id="a checkpoint is not flushed"),
        pytest.param(["rename"], "checkpoints", id="a checkpoint gets no name"),
        pytest.param(["mkdir"], "checkpoints", id="a checkpoint gets no folder"),
        pytest.param(["write"], "tuned", id="tuned is not written"),
        pytest.param(["rename"], "tuned", id="tuned gets no name"),
        pytest.param(CHANGING, "", id="nothing can be changed"),
        pytest.param((*CHANGING, *READING), "", id="nothing answers"),
    ],
)
@pytest.mark.usefixtures("no_picture")
def test_a_disk_that_fails_ends_the_run_in_words_and_loses_nothing(
    calls: Sequence[str], begins: str, mount: Mount, tmp_path: Path
) -> None:
    recipe = settings(tmp_path, keep=100, report=False)
    run(recipe | {"out": str(tmp_path / "straight")})
    before: dict[str, bytes] = {}

    def fail(step: int) -> None:
        if step == 4:
            ends = time.monotonic() + 60  # that of step 3 is written beside training
            while not (mount.source / "run" / "checkpoints" / "step-3").is_dir():
                assert time.monotonic() < ends
                time.sleep(0.01)
            before.update(saved(mount))
            mount.order(calls=list(calls), **{"from": begins})

    recipe["out"] = str(mount.folder / "run")
    with pytest.raises(MachineError) as caught:
        run(recipe, Listener(fail))
    assert caught.value.code == 5 and "(EIO)" in str(caught.value) and str(mount.folder) in str(caught.value)
    assert "look at the system's log" in str(caught.value)
    mount.order()
    assert {name.split("/")[0] for name in before} >= {"step-1", "step-2", "step-3"}
    assert before.items() <= saved(mount).items()
    listener = Listener()
    run(recipe, listener, resume=True)
    assert any(note.startswith("resumed from") for note in listener.notes)
    assert_same_run(mount.folder / "run", tmp_path / "straight")


@pytest.mark.usefixtures("no_picture")
def test_a_disk_that_is_slow_makes_a_run_slow_and_nothing_else(mount: Mount, tmp_path: Path) -> None:
    recipe = settings(tmp_path, keep=100, report=False)
    run(recipe | {"out": str(tmp_path / "straight")})
    mount.order(delay=0.005)
    run(recipe | {"out": str(mount.folder / "run")})
    mount.order()
    assert_same_run(mount.folder / "run", tmp_path / "straight")


@pytest.mark.usefixtures("no_picture")
def test_the_command_ends_with_5_and_the_way_on(mount: Mount, tmp_path: Path) -> None:
    recipe = as_yaml(tmp_path / "mine.yaml", settings(tmp_path) | {"out": str(mount.folder / "run")})
    mount.order(calls=["fsync"], **{"from": "step-2"})
    words = [sys.executable, "-m", "petune", str(recipe)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert "cannot write: Input/output error (EIO)" in done.stderr
