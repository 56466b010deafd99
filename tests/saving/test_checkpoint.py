"""Checkpoints: whatever kills a save, the last committed one verifies; whatever is damaged is found; what
resumes is bit-identical."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from petune.errors import FileError, MachineError, UsageError
from petune.files.range_writer import Crew, RangeWriter
from petune.files.safetensors import read_json, read_tensors, write_json, write_tensors
from petune.saving.checkpoint import (
    candidates,
    commit,
    newest_good,
    require_free,
    rotate,
    set_aside,
    sweep,
    verify,
)
from petune.saving.manifest import MANIFEST, render


def filler(mark: int) -> Callable[[Path], None]:
    """A save whose every file carries `mark`."""

    def write(folder: Path) -> None:
        write_tensors(
            folder / "state.safetensors", {"w": torch.full((64,), float(mark)), "step": torch.tensor(mark)}
        )
        (folder / "tuned").mkdir()
        write_json(folder / "tuned" / "config.json", {"mark": mark})

    return write


def save(root: Path, step: int, mark: int | None = None) -> Path:
    mark = step if mark is None else mark
    return commit(root, step, filler(mark), run_id="run", facts={"mark": mark})


def mark_of(path: Path) -> int:
    """Verify a checkpoint and read its mark, the same in all its files."""
    manifest = verify(path)
    config, state = read_json(path / "tuned" / "config.json"), read_tensors(path / "state.safetensors")
    marks = {manifest.facts["mark"], config["mark"], int(state["step"]), int(state["w"][0])}
    assert len(marks) == 1
    return int(marks.pop())


def names(root: Path) -> list[str]:
    return sorted(os.listdir(root))


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill loses no more there than on a disk, and a flush takes no
    time."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


# ---------------------------------------------------------------- commit and verify


def test_a_committed_checkpoint_verifies_and_says_what_it_holds(tmp_path: Path) -> None:
    path = save(tmp_path / "new", 7)
    manifest = verify(path)
    assert path.name == "step-7" and (manifest.run_id, manifest.step, manifest.facts) == (
        "run",
        7,
        {"mark": 7},
    )
    assert set(manifest.files) == {"state.safetensors", "tuned/config.json"}
    assert names(path.parent) == ["latest", "step-7"] and (path.parent / "latest").read_text() == "step-7\n"


def test_a_run_folder_that_is_gone_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="No such file or directory"):
        save(tmp_path / "gone" / "checkpoints", 7)
    assert not (tmp_path / "gone").exists()


def test_files_are_readable_by_the_group_whatever_wrote_them(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        os.close(os.open(folder / "sub" / "a", os.O_CREAT | os.O_WRONLY, 0o600))

    before = os.umask(0o022)
    try:
        path = commit(tmp_path, 1, write, run_id="run", facts={})
    finally:
        os.umask(before)
    assert {
        stat.S_IMODE(file.stat().st_mode)
        for file in (path / "sub" / "a", path / MANIFEST, tmp_path / "latest")
    } == {0o644}


def test_everything_is_flushed_before_the_rename_and_the_parent_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def spy_fsync(fd: int) -> None:
        done.append("fsync " + Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def spy_rename(old: Any, new: Any) -> None:
        done.append("rename " + Path(new).name)
        rename(old, new)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "rename", spy_rename)
    path = save(tmp_path, 3)
    work = f"step-3.tmp-{os.getpid()}"
    at = done.index("rename step-3")
    flushed = {
        f"fsync {name}"
        for name in ("state.safetensors", "config.json", "tuned", work, f".{MANIFEST}.tmp-{os.getpid()}")
    }
    assert flushed <= set(done[:at])
    assert done.index("rename " + MANIFEST) > max(
        done.index("fsync state.safetensors"), done.index("fsync config.json")
    )
    assert done[at - 1] == f"fsync {work}"
    assert done[at + 1] == f"fsync {path.parent.name}"
    assert done.index("rename latest") > at + 1


def test_a_failing_save_leaves_nothing_and_its_error_passes(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def write(folder: Path) -> None:
        filler(2)(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        commit(tmp_path, 2, write, run_id="run", facts={})
    with pytest.raises(ValueError):
        commit(tmp_path, 2, filler(2), run_id="run", facts={"x": float("nan")})
    with pytest.raises(ValueError):
        commit(tmp_path, -1, filler(2), run_id="run", facts={})
    assert names(tmp_path) == ["latest", "step-1"] and mark_of(tmp_path / "step-1") == 1


def test_saving_a_step_again_replaces_it_even_when_damaged(tmp_path: Path) -> None:
    save(tmp_path, 5, mark=1)
    save(tmp_path, 5, mark=2)
    (tmp_path / "step-5" / "state.safetensors").write_bytes(b"x")
    save(tmp_path, 5, mark=3)
    assert mark_of(tmp_path / "step-5") == 3 and names(tmp_path) == ["latest", "step-5"]


def test_a_pointer_that_cannot_be_written_does_not_undo_a_save(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    save(tmp_path, 1)
    assert newest_good(tmp_path)[0].name == "step-1"


def test_links_and_pipes_are_not_committed(tmp_path: Path) -> None:
    for make in (lambda path: os.mkfifo(path), lambda path: path.symlink_to("/etc/hostname")):
        with pytest.raises(FileError, match="odd"):
            commit(tmp_path, 1, lambda folder, make=make: make(folder / "odd"), run_id="run", facts={})  # type: ignore[misc]
    assert names(tmp_path) == []


# ---------------------------------------------------------------- kills and refusals at every call


class Killed(BaseException):
    """Stands for SIGKILL: from the k-th call on the process does nothing any more."""


CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "fchmod")


@contextmanager
def crash_at(k: int, error: Callable[[], BaseException], *, for_good: bool) -> Iterator[list[str]]:
    """Let the k-th changing call fail; with `for_good` every later one too. Yields the calls made so far."""
    made: list[str] = []
    kept = {call: getattr(os, call) for call in CALLS}

    def wrap(call: str) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if call == "open" and not (args[1] & os.O_CREAT):  # opening to read or to flush changes nothing
                return kept[call](*args, **kwargs)
            made.append(call)
            if len(made) == k or (for_good and len(made) > k):
                if call == "write":
                    kept[call](args[0], args[1][: len(args[1]) // 2])  # half of it reaches the disk
                raise error()
            return kept[call](*args, **kwargs)

        return guarded

    for call in CALLS:
        setattr(os, call, wrap(call))
    try:
        yield made
    finally:
        for call in CALLS:
            setattr(os, call, kept[call])


def step_of_a_run(root: Path) -> None:
    """A new step, a step saved again, and a rotation that deletes."""
    save(root, 3)
    save(root, 3, mark=33)
    rotate(root, 2)


@pytest.mark.slow
def test_a_kill_at_every_call_leaves_the_last_commit_whole(fast: Path) -> None:
    start, root = fast / "start", fast / "root"
    save(start, 1)
    save(start, 2)
    k, seen = 0, set()
    while True:
        k += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        try:
            with crash_at(k, Killed, for_good=True):
                step_of_a_run(root)
            break
        except Killed:
            pass
        path, _, problems = newest_good(root)
        assert not problems, f"call {k}: a damaged checkpoint has a name"
        seen.add(mark := mark_of(path))
        assert all(mark_of(path) in (1, 2, 3, 33) for path in candidates(root)) and len(candidates(root)) >= 2
        sweep(root)
        assert mark_of(newest_good(root)[0]) == mark
        assert all(name in ("latest", "step-1", "step-2", "step-3") for name in names(root)), (
            f"call {k}: {names(root)}"
        )
        save(root, 4)
        assert mark_of(newest_good(root)[0]) == 4
    assert k > 60 and seen == {2, 3, 33}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES])
def test_a_refusal_at_every_call_is_told_and_leaves_no_torso(fast: Path, code: int) -> None:
    start, root = fast / "start", fast / "root"
    save(start, 1)
    save(start, 2)
    k, told = 0, 0
    while True:
        k += 1
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(start, root)
        try:
            with crash_at(k, lambda: OSError(code, os.strerror(code)), for_good=False) as made:
                save(root, 3)
            if len(made) < k:
                break
        except MachineError as error:
            told += 1
            assert errno.errorcode[code] in str(error) and str(root) in str(error)
            left = names(root)
            assert left in (["latest", "step-1", "step-2"], ["latest", "step-1", "step-2", "step-3"]), (
                f"call {k}: {left}"
            )
        path, _, problems = newest_good(root)
        assert not problems and mark_of(path) == int(path.name[5:]) >= 2
    assert told > 15


def test_a_full_disk_that_stays_full_keeps_what_was_committed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        crash_at(9, lambda: OSError(errno.ENOSPC, "No space left on device"), for_good=True),
        pytest.raises(MachineError, match="ENOSPC"),
    ):
        save(tmp_path, 2)
    assert mark_of(newest_good(tmp_path)[0]) == 1


def save_until_killed(root: Path, report: int) -> None:
    step = max((int(path.name.split("-")[1].split(".")[0]) for path in candidates(root)), default=0)
    sweep(root)
    while True:
        step += 1
        save(root, step)
        os.write(report, step.to_bytes(8, "big"))
        if step % 3 == 0:
            save(root, step)
        rotate(root, 2, protect=[root / "step-1"])


@pytest.mark.forks
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [30, pytest.param(2000, marks=pytest.mark.long)])
def test_kills_at_random_moments_of_save_and_rotation_lose_nothing(kills: int, fast: Path) -> None:
    chance = random.Random(kills)
    last = 0
    for _ in range(kills):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                save_until_killed(fast, write)
            finally:
                os._exit(1)  # only an error ends the loop
        os.close(write)
        time.sleep(chance.uniform(0.005, 0.08))
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child failed by itself"
        with os.fdopen(read, "rb") as pipe:
            reported = pipe.read()
        last = int.from_bytes(reported[-8:], "big") if reported else last
        if last:
            path, manifest, problems = newest_good(fast)
            assert not problems and manifest.step >= last and mark_of(path) == manifest.step
            assert (
                mark_of(
                    next(
                        path
                        for path in candidates(fast)
                        if path.name.startswith("step-1") and verify(path).step == 1
                    )
                )
                == 1
            )
    assert last >= 10


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("count", [350, pytest.param(3000, marks=pytest.mark.long)])
def test_every_flipped_bit_is_found(count: int, fast: Path) -> None:
    path = save(fast, 1)
    files = [file for file in path.rglob("*") if file.is_file()]
    chance = random.Random(1)
    for file in files:
        raw = file.read_bytes()
        places = [(at, bit) for at in range(len(raw)) for bit in range(8)]
        for at, bit in (
            places
            if file.name == MANIFEST and len(places) < 2000
            else chance.sample(places, min(count, len(places)))
        ):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << bit
            file.write_bytes(flipped)
            with pytest.raises(FileError):
                verify(path)
        file.write_bytes(raw)
    assert len(files) == 3 and mark_of(path) == 1


def test_a_file_cut_short_missing_added_or_exchanged_is_named(tmp_path: Path) -> None:
    path, other = save(tmp_path, 1), save(tmp_path, 2)
    state = path / "state.safetensors"
    raw = state.read_bytes()
    state.write_bytes(raw[:-1])
    with pytest.raises(
        FileError, match=rf"state\.safetensors .*size\n.*{len(raw)} bytes, found {len(raw) - 1}"
    ):
        verify(path)
    state.write_bytes((other / "state.safetensors").read_bytes())
    with pytest.raises(FileError, match=r"state\.safetensors .*changed"):
        verify(path)
    state.unlink()
    (path / "tuned" / "extra").write_bytes(b"")
    with pytest.raises(FileError) as raised:
        verify(path)
    assert "state.safetensors  is missing" in str(raised.value) and "extra  is not in the manifest" in str(
        raised.value
    )
    shutil.rmtree(path)
    other.rename(path)
    with pytest.raises(FileError, match="another step"):
        verify(path)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a manifest as someone who can also seal it."""
    content = json.loads((path / MANIFEST).read_bytes())
    del content["seal"]
    change(content)
    (path / MANIFEST).write_bytes(render(content))


def test_an_edited_fact_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    text = (path / MANIFEST).read_text()
    for old, new in (('"run_id": "run"', '"run_id": "ran"'), ('"mark": 1', '"mark": 2'), ("\n}", "\n} ")):
        assert old in text
        (path / MANIFEST).write_text(text.replace(old, new))
        with pytest.raises(FileError, match=r"manifest\.json"):
            verify(path)


@pytest.mark.parametrize("version", [0, 1, 3, 2.0, True, "2", None])
def test_another_version_says_found_and_supported(tmp_path: Path, version: object) -> None:
    path = save(tmp_path, 1)
    edit(path, lambda content: content.update(version=version))
    what = "a newer version" if version == 3 else "another version"
    with pytest.raises(FileError, match=rf"{what} of manifest\n +expected 2, found {version!r}") as raised:
        verify(path)
    assert raised.value.code == 4


def test_every_block_of_a_file_has_a_hash_of_its_own_and_damage_is_said_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.files.hashes.BLOCK", 1000)
    monkeypatch.setattr("petune.files.hashes._PORTION", 300)
    raw = random.Random(0).randbytes(3500)

    def write(folder: Path) -> None:
        for name, size in (("large", 3500), ("exact", 2000), ("one", 1000), ("small", 5), ("empty", 0)):
            (folder / name).write_bytes(raw[:size])

    path = commit(tmp_path, 1, write, run_id="run", facts={})
    for name, fields in verify(path).files.items():
        content = (path / name).read_bytes()
        blocks = [hashlib.sha256(content[at : at + 1000]).hexdigest() for at in range(0, len(content), 1000)]
        assert fields == {"size": len(content), "blocks": blocks}, name
    for at in (0, 999, 1000, 2999, 3000, 3499):
        (path / "large").write_bytes(raw[:at] + bytes([raw[at] ^ 64]) + raw[at + 1 :])
        with pytest.raises(
            FileError, match=rf"large  has been changed or damaged, in block {at // 1000 + 1} of 4"
        ):
            verify(path)
    (path / "large").write_bytes(raw)
    verify(path)
    edit(path, lambda content: content["files"]["large"]["blocks"].pop())
    with pytest.raises(FileError, match="not size and as many blocks"):
        verify(path)


@pytest.mark.parametrize(
    "name",
    ["../step-2/state.safetensors", "/etc/hostname", "a/../b", "a\0b", "a//b", "./a", "", "a\\b", MANIFEST],
)
def test_a_name_in_the_manifest_may_not_escape(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, 1)
    save(tmp_path, 2)
    edit(path, lambda content: content["files"].update({name: {"size": 0, "blocks": []}}))
    with pytest.raises(FileError, match=r"manifest\.json"):
        verify(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("facts"),
        lambda content: content.update(more=1),
        lambda content: content.update(step="1"),
        lambda content: content.update(step=True),
        lambda content: content.update(files=[]),
        lambda content: content.update(files={}),
        lambda content: content["files"].update(a=3),
        lambda content: content["files"].update(a={"size": True, "blocks": [""]}),
        lambda content: content["files"].update(a={"size": 1}),
        lambda content: content["files"].update(a={"size": 1, "sha256": ""}),
        lambda content: content["files"].update(a={"size": 1, "blocks": [1]}),
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = save(tmp_path, 1)
    edit(path, change)
    with pytest.raises(FileError, match=r"manifest\.json"):
        verify(path)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"[" * 100_000, b'{"version":1,"x":' + b"[" * 400 + b"]" * 400 + b"}", b"\xff"]
)
def test_a_manifest_that_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    path = save(tmp_path, 1)
    (path / MANIFEST).write_bytes(text)
    with pytest.raises(FileError, match=r"manifest\.json"):
        verify(path)


def test_links_and_pipes_in_a_checkpoint_are_refused_without_blocking(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    for name in ("state.safetensors", MANIFEST, "more", "tuned"):
        for make in (lambda file: file.symlink_to(tmp_path / "kept"), lambda file: os.mkfifo(file)):
            if (path / name).exists():
                (path / name).rename(tmp_path / "kept")
            make(path / name)
            with pytest.raises(FileError, match=name):
                verify(path)
            (path / name).unlink()
            if (tmp_path / "kept").exists():
                (tmp_path / "kept").rename(path / name)
    assert mark_of(path) == 1
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="step-1"):
        verify(path)


def test_what_is_no_checkpoint_is_a_file_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("absent", "file", "empty"):
        with pytest.raises(FileError, match=name):
            verify(tmp_path / name)


# ---------------------------------------------------------------- which one


def test_checkpoints_are_ordered_by_number(tmp_path: Path) -> None:
    for step in (10, 9, 100, 0):
        save(tmp_path, step)
        os.utime(tmp_path / f"step-{step}", (0, 0))
    for name in ("step-07", "step-", "step-1x", "step-11.tmp-3", "aside-step-200", "step-¹"):
        (tmp_path / name).mkdir()
    assert [path.name for path in candidates(tmp_path)] == ["step-100", "step-10", "step-9", "step-0"]
    assert candidates(tmp_path / "absent") == []


def test_the_newest_good_one_is_found_with_the_reasons_for_skipping(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step)
    (tmp_path / "step-11" / MANIFEST).unlink()
    (tmp_path / "step-10" / "state.safetensors").write_bytes(b"")
    (tmp_path / "latest").write_text("step-11\n")
    path, manifest, problems = newest_good(tmp_path)
    assert path.name == "step-9" and manifest.step == 9
    assert ["step-11" in str(problem) for problem in problems] == [True, False] and "step-10" in str(
        problems[1]
    )


def test_no_good_checkpoint_is_a_file_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no checkpoint here"):
        newest_good(tmp_path)
    (save(tmp_path, 1) / MANIFEST).unlink()
    with pytest.raises(FileError, match=r"(?s)no checkpoint is whole.*step-1"):
        newest_good(tmp_path)


def test_a_replacement_cut_off_between_its_renames_is_found_and_finished(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2).rename(tmp_path / "step-2.old-77")
    assert mark_of(newest_good(tmp_path)[0]) == 2
    assert sweep(tmp_path) == ["step-2.old-77"]
    assert mark_of(tmp_path / "step-2") == 2


# ---------------------------------------------------------------- tidying


def test_sweep_removes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    for name in ("step-2.tmp-5", "step-1.gone-6", "step-1.old-7"):
        shutil.copytree(tmp_path / "step-1", tmp_path / name)
    (tmp_path / "step-3.tmp-9").symlink_to(outside)
    (tmp_path / ".latest.tmp-4").write_text("x")
    (tmp_path / "step-4.tmp-x").mkdir()
    assert sweep(tmp_path) == [
        ".latest.tmp-4",
        "step-1.gone-6",
        "step-1.old-7",
        "step-2.tmp-5",
        "step-3.tmp-9",
    ]
    assert (
        names(tmp_path) == ["latest", "outside", "step-1", "step-4.tmp-x"] and (outside / "precious").exists()
    )
    assert sweep(tmp_path / "absent") == []


def test_rotation_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    for step in (2, 9, 10, 11, 30):
        save(tmp_path, step)
    deleted = rotate(tmp_path, 2, protect=[tmp_path / "nowhere" / ".." / "step-9"])
    assert [path.name for path in deleted] == ["step-10", "step-2"]
    assert [path.name for path in candidates(tmp_path)] == ["step-30", "step-11", "step-9"]
    assert rotate(tmp_path, 2, protect=[tmp_path / "step-9"]) == []


@pytest.mark.parametrize("keep", [1, 0, -3])
def test_rotation_to_fewer_than_two_is_refused(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 1)
    with pytest.raises(UsageError, match="at least 2"):
        rotate(tmp_path, keep)
    assert mark_of(tmp_path / "step-1") == 1


def test_a_damaged_checkpoint_never_pushes_out_a_good_one(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    (tmp_path / "step-5" / "state.safetensors").unlink()
    (tmp_path / "step-4" / MANIFEST).write_text("{}")
    rotate(tmp_path, 2)
    assert [path.name for path in candidates(tmp_path)] == ["step-5", "step-4", "step-3", "step-2"]


def test_a_future_that_was_left_is_set_aside_and_kept(tmp_path: Path) -> None:
    for step in (9, 10, 20):
        save(tmp_path, step)
    assert [path.name for path in set_aside(tmp_path, after=9)] == ["aside-step-20", "aside-step-10"]
    assert newest_good(tmp_path)[0].name == "step-9"
    sweep(tmp_path)
    save(tmp_path, 11)
    save(tmp_path, 12)
    rotate(tmp_path, 2)
    assert names(tmp_path) == ["aside-step-10", "aside-step-20", "latest", "step-11", "step-12"]


# ---------------------------------------------------------------- several ranks


def in_a_crew(world: int, act: Callable[[Crew], Path]) -> list[Path]:
    """What `act` returns in each of some threads that meet as ranks do."""
    told, gate = [""] * world, Barrier(world, timeout=20)

    def meet(rank: int, text: str) -> list[str]:
        told[rank] = text
        gate.wait()
        found = list(told)
        gate.wait()
        return found

    def rank(number: int) -> Path:
        return act(Crew(number, world, partial(meet, number)))

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(rank, range(world)))


def test_nothing_is_committed_before_the_slowest_rank_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.files.hashes.BLOCK", 100)
    values = torch.arange(120.0).view(12, 10)

    def write(folder: Path) -> None:
        write_tensors(folder / "state.safetensors", {"w": values.to("meta")})
        write_json(folder / "state.json", {"a": "b" * 300})

    def act(crew: Crew) -> Path:
        def fill(folder: Path) -> None:
            time.sleep(0.1 * crew.rank)
            with RangeWriter(folder / "state.safetensors") as writer:
                writer.write("w", values[4 * crew.rank : 4 * crew.rank + 4], [4 * crew.rank, 0])
            assert [path.name for path in candidates(tmp_path)] == ["step-1"]

        root = tmp_path if crew.rank == 0 else tmp_path / "no-root-of-another-rank-counts"
        return commit(root, 2, write, run_id="run", facts={}, fill=fill, crew=crew)

    save(tmp_path, 1)
    assert in_a_crew(3, act) == [tmp_path / "step-2"] * 3
    assert torch.equal(read_tensors(tmp_path / "step-2" / "state.safetensors")["w"], values)

    def alone(folder: Path) -> None:
        write_tensors(folder / "state.safetensors", {"w": values})
        write_json(folder / "state.json", {"a": "b" * 300})

    one = commit(tmp_path, 3, alone, run_id="run", facts={})
    assert verify(tmp_path / "step-2").files == verify(one).files, "the manifest knows of no ranks"


# ---------------------------------------------------------------- space


def test_too_little_space_names_needed_and_free(tmp_path: Path) -> None:
    require_free(tmp_path / "not" / "yet", 1)
    with pytest.raises(MachineError, match=r"expected 9.09e\+05 TiB free, found .* [GT]iB"):
        require_free(tmp_path / "not" / "yet", 10**18)
    assert names(tmp_path) == []
