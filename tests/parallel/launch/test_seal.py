"""The rendezvous under the hands of another user of the machine: what he writes is ignored and counted, and
no run dies of it."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from torch.distributed import TCPStore

from petune.errors import DistributedError
from petune.parallel.launch import beats, process_group, rendezvous, seal
from petune.parallel.launch.beats import beat_of
from petune.parallel.launch.seal import SECRET, Sealed, secret_of
from tests.group_pool import assert_same_records, ends
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import run


def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))


def test_only_what_was_sealed_for_this_key_with_this_secret_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seal, "_refused", set())
    raw = server()
    store, other = Sealed(raw, "mine", "run/0", 5), Sealed(raw, "his", "run/0", 5)
    assert store.read("a") is None and seal.refused() == 0
    store.set("a", "first")
    store.set("b", b"second \xf0\x9f\x8c\x9e")
    assert (store.read("a"), store.get("b").decode()) == ("first", "second \N{SUN WITH FACE}")
    sealed = raw.get("run/0/a")
    for number, forged in enumerate(
        (b"", b"garbage", b"{}", sealed[:-1] + b"x", b"\0" * 32 + b"first", raw.get("run/0/b")), start=1
    ):
        raw.set("run/0/a", forged)
        assert store.read("a") is None and store.read("a") is None
        assert seal.refused() == number, forged
    other.set("a", "third")
    assert store.read("a") is None
    raw.set("run/1/a", sealed)  # of an earlier start
    assert Sealed(raw, "mine", "run/1", 5).read("a") is None
    raw.set("run/0/a", sealed)
    assert store.read("a") == "first"
    store.beneath("torch").set("a", "plain")
    assert (store.beneath("torch").get("a"), other.beneath("torch").check(["a"])) == (b"plain", False)


def test_waiting_for_a_value_ends_when_nobody_but_somebody_else_has_written_it():
    raw = server()
    raw.set("run/torch/0", "garbage")
    with pytest.raises(DistributedError, match="somebody else writes to the rendezvous"):
        Sealed(raw, "mine", "run", 0.05).get("torch/0")


def test_the_secret_is_the_runs_own_or_the_users_in_a_file_of_his_alone(tmp_path: Path):
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    assert secret_of({SECRET: "given", **home}, one_machine=False) == "given"
    assert secret_of(home, one_machine=False) is None
    found = secret_of(home, one_machine=True)
    file = tmp_path / "petune" / "rendezvous-secret"
    assert (
        found is not None
        and len(found) == 64
        and secret_of(home, one_machine=True) == found == file.read_text()
    )
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and [path.name for path in file.parent.iterdir()] == [
        file.name
    ]
    file.chmod(0o640)
    with pytest.raises(DistributedError, match="others may know this secret"):
        secret_of(home, one_machine=True)
    (tmp_path / "file").touch()
    assert secret_of({"XDG_CACHE_HOME": str(tmp_path / "file")}, one_machine=True) is None


def test_threads_that_ask_at_once_where_there_is_no_secret_yet_share_one(tmp_path: Path):
    asked: dict[str, str] = {"XDG_CACHE_HOME": str(tmp_path)}
    gate = Barrier(16)

    def ask(_: int) -> str | None:
        gate.wait()
        return secret_of(asked, one_machine=True)

    with ThreadPoolExecutor(16) as pool:
        found = set(pool.map(ask, range(16)))
    assert len(found) == 1 and None not in found
    assert [one.name for one in (tmp_path / "petune").iterdir()] == ["rendezvous-secret"]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "7", '{"count": 1, "more": 2}', None])
def test_a_beat_that_is_none_is_none(text: str | None):
    assert beat_of(text) is None


def vandal(ended: threading.Event) -> None:
    """Write garbage, forged beats and forged answers to every key of the next meetings, as fast as it
    goes."""
    here = rendezvous.place()
    assert here is not None
    raw = TCPStore(here.host, here.port, is_master=False, timeout=timedelta(seconds=5))
    prefix = f"petune/{here.host}:{here.port} of {here.world} /0"
    forged = [
        b"garbage \xff",
        json.dumps({"count": 10**9, "failed": "he says so"}).encode(),
        b"",
        json.dumps({"recipe": "his"}).encode(),
    ]
    number = 0
    while not ended.wait(0.001):
        number += 1
        for rank in range(here.world):
            meetings = range(number % 40, number % 40 + 3)
            texts = [f"meet/{at}/{who}" for at in meetings for who in (rank, "all")]
            for key in (f"beat/{rank}", "failed", "here", *texts):
                raw.set(f"{prefix}/{key}", forged[number % len(forged)])


@pytest.mark.usefixtures("no_picture")
def test_a_run_of_two_processes_ends_well_while_a_stranger_writes_to_its_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(beats, "BEAT_S", 0.05)

    def train(recipe: dict[str, Any]) -> list[str]:
        warned: list[str] = []
        process_group.warn = warned.append
        os.environ[SECRET] = "of this run"
        ended = threading.Event()
        if process_group.started()[0] == 1:
            join = process_group.join

            def joined(*arguments: Any) -> tuple[int, int]:
                found = join(*arguments)
                threading.Thread(target=vandal, args=(ended,), daemon=True).start()
                return found

            process_group.join = joined
        run(recipe)
        ended.set()
        assert seal.refused() > 0
        return warned

    shape = {"parallel": PLANS["dp"], "max_steps": 2, "warmup": 0}
    expected = trained(small(tmp_path, "bert", "lora", **shape, out="undisturbed"))
    began = time.monotonic()
    found = ends(2, train, small(tmp_path, "bert", "lora", **shape, out="run"))
    assert [end.code for end in found] == [0, 0], found
    for end in found:
        assert len(end.value) == 1 and "values that are not of this run; they were ignored" in end.value[0]
    assert_same_records(tmp_path / "run", expected)
    assert time.monotonic() - began < 60
