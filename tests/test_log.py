"""What the library says while a person waits."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
from pathlib import Path

import pytest

import petune.log
from petune.log import lines_once, phase, say
from tests.small_runs import run, settings


def test_a_long_phase_is_named_and_its_time_told_and_a_short_one_is_not(monkeypatch: pytest.MonkeyPatch):
    said, heard = [], threading.Event()
    monkeypatch.setattr(petune.log, "say", lambda line: (said.append(line), heard.set()))
    monkeypatch.setattr(petune.log, "PATIENCE", 0.001)
    with phase("reading the weights"):
        assert heard.wait(60)
    heard.clear()
    with pytest.raises(ZeroDivisionError), phase("multiplying"):
        assert heard.wait(60)
        _ = 1 / 0
    monkeypatch.setattr(petune.log, "PATIENCE", 3600.0)
    with pytest.raises(ZeroDivisionError), phase("dividing"):
        _ = 1 / 0
    assert [line for line in said if not line.startswith("reading the weights: ")] == [
        "reading the weights ...",
        "multiplying ...",
    ]
    assert re.fullmatch(r"reading the weights: \d+\.\d s", said[1])
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.usefixtures("no_picture")
def test_every_part_of_a_run_that_may_take_long_is_a_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG, "petune.phases"):
        run(settings(tmp_path, max_steps=2, warmup=0, save_every=2))
    named = [
        record.getMessage().rpartition(":")[0] for record in caplog.records if record.name == "petune.phases"
    ]
    saved = [
        "evaluating on 9 rows",
        "comparing the frozen weights with their checksums",
        "writing the checkpoint",
    ]
    assert named == [
        *(
            "reading config, data and tokenizer",
            "building the model",
            "adding lora to the model",
            "reading the weights",
        ),
        *("fusing the blocks", "taking checksums of the frozen weights", "evaluating on 9 rows"),
        *("first step, which prepares the kernels", *saved),
        *("waiting for the hashes of the base's files", "writing tuned/", "drawing the loss"),
    ]


def test_lines_are_told_once_in_a_block_that_asks_for_it(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "petune")
    with lines_once():
        for line in ("one", "two", "one"):
            say(line)
    say("one")
    assert caplog.messages == ["one", "two", "one"]


def test_lines_go_to_the_stderr_of_the_moment(monkeypatch: pytest.MonkeyPatch):
    handler, taken = petune.log._Stderr(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", taken)
    handler.emit(logging.makeLogRecord({"msg": "above the bar"}))
    assert taken.getvalue() == "above the bar\n"
