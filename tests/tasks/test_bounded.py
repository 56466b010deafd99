"""Templates that never end, ask for all memory or end the process: FileError with the template's name, within
its limits."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from petune.errors import DataError, FileError
from petune.tasks import DataConfig, encode_prompt, make_coder
from petune.tasks.bounded import bounded
from petune.tasks.chat import encode_chat, render
from petune.tasks.rows import Conversation, Message
from tests.tasks.conftest import CHATML

TALK = Conversation("d.jsonl:1", (Message("user", "hello"), Message("assistant", "good day")))
LOOP = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor"
    " %}{% endfor %}"
)
BOMBS = {
    "an endless loop": (LOOP, "takes too much time"),
    "a power": ("{{ 7 ** (10 ** 9) }}", "takes too much (time|memory)"),
    "a text of 10 GB": ("{{ 'x' * 10000000000 }}", "takes too much memory"),
    "a wide field": ("{{ '%10000000000d' % 1 }}", "takes too much memory"),
    "a list without end": ("{{ ([1] * 10000000000) | length }}", "takes too much memory"),
    "a long text": ("{{ 'x' * 100000 }}", "takes too much room"),
}


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petune.tasks.bounded.SECONDS", 0)
    monkeypatch.setattr("petune.tasks.bounded.OUTPUT", 2**16)


# processor time is counted in whole seconds
LONG = {"a power"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in BOMBS]
)
def test_a_template_that_takes_too_much_is_refused_with_its_name(
    name: str, chat_tokenizer: Any, no_room: None
):
    bomb, says = BOMBS[name]
    chat_tokenizer.chat_template = bomb + CHATML
    chat_tokenizer.name_or_path = "folder/of/mine"
    with pytest.raises(FileError, match=says) as caught:
        encode_chat([TALK], make_coder(chat_tokenizer, DataConfig("d.jsonl")))
    assert caught.value.code == 4 and "the chat template of folder/of/mine" in str(caught.value)
    if name == "a wide field":
        with pytest.raises(FileError, match=says):
            encode_prompt("hello", "chat", chat_tokenizer, DataConfig("d.jsonl"))


@pytest.mark.forks
def test_what_a_good_template_renders_is_transformers_own_text(chat_tokenizer: Any):
    coder = make_coder(chat_tokenizer, DataConfig("d.jsonl"))
    turns = [{"role": message.role, "content": message.content} for message in TALK.messages]
    text = chat_tokenizer.apply_chat_template(turns, tokenize=False)
    assert render(TALK.messages, coder, "here") == text
    rows = [TALK] * 50
    assert [chat_tokenizer.decode(one.input_ids) for one in encode_chat(rows, coder)] == [text] * 50
    asked = chat_tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert (
        chat_tokenizer.decode(encode_prompt("hello", "chat", chat_tokenizer, DataConfig("d.jsonl"))) == asked
    )
    assert chat_tokenizer.chat_template == CHATML


def test_errors_come_out_as_they_are_and_no_process_is_left():
    def work(number: int) -> int:
        if number == 3:
            raise DataError("bad", where="d.jsonl:3", found="this")
        return number

    found = bounded(work, range(5), "it")
    assert [next(found) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError) as caught:
        next(found)
    assert str(caught.value) == str(DataError("bad", where="d.jsonl:3", found="this"))
    half_read = bounded(work, range(3), "it")
    next(half_read)
    half_read.close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize(
    ("end", "says"),
    [(lambda: os.kill(os.getpid(), signal.SIGSEGV), "SIGSEGV"), (lambda: os._exit(9), "exit code 9")],
)
def test_a_process_that_dies_is_told(end: Callable[[], None], says: str):
    with pytest.raises(FileError, match=says):
        list(bounded(lambda item: end(), [1], "the template"))


def test_a_signal_to_the_group_leaves_the_work_to_its_reader():
    def work(number: int) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        return number

    began = time.monotonic()
    assert list(bounded(work, range(3), "it")) == [0, 1, 2]
    assert time.monotonic() - began < 30


@pytest.mark.forks
def test_a_signal_that_another_thread_gets_ends_the_wait_for_a_result() -> None:
    def heed(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def send() -> None:
        time.sleep(0.3)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before, began = signal.signal(signal.SIGUSR1, heed), time.monotonic()
    try:
        threading.Thread(target=send).start()
        with pytest.raises(KeyboardInterrupt):
            list(bounded(lambda item: time.sleep(30), [1], "the template"))
        assert time.monotonic() - began < 15
    finally:
        signal.signal(signal.SIGUSR1, before)
