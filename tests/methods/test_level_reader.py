"""Rows that are read ahead of their passes: to the bit those of the passes themselves, by other threads, and
never more than two passes of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.errors import FileError
from petune.files.row_store import RowStore
from petune.methods import activation_cache
from petune.methods.activation_cache import ActivationCache
from petune.methods.level_reader import AHEAD
from petune.methods.row_keys import sources_of
from tests.methods.sided import assert_equal, sided
from tests.methods.zoo import batch, gradients

NAME = "bart-seq2seq"


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each row that is read, as if the CPU did not have to read for itself."""
    seen: list[str] = []
    read = RowStore.read

    def noted(self: RowStore, place: Any, into: Any) -> None:
        seen.append(threading.current_thread().name)
        read(self, place, into)

    monkeypatch.setattr(RowStore, "read", noted)
    monkeypatch.setattr(activation_cache, "waits_for_files", lambda device: True)
    return seen


@pytest.fixture
def known(tmp_path: Path) -> Iterator[Any]:
    """A model, its cache, and batches that the cache knows."""
    model, batches = sided(NAME), [batch(NAME, seed=seed) for seed in (1, 2, 3, 4)]
    with ActivationCache(model, tmp_path, room=0) as cache:
        for one in batches:
            model(**one)
        cache.look()
        yield model, cache, batches


def coming(cache: ActivationCache) -> list[int]:
    """How many batches are on their way, of each stack."""
    return [len(level.reader._coming) for levels in cache.levels.values() for level in levels.values()]


def test_a_loop_that_goes_ahead_learns_as_one_that_does_not(readers: list[str], known: Any) -> None:
    model, cache, batches = known
    expected = [gradients(model, one) for one in batches]
    assert set(readers) == {threading.current_thread().name}
    readers.clear()
    found = []
    for one in cache.ahead(batches):
        assert all(number <= AHEAD for number in coming(cache))
        found.append(gradients(model, one))
    for one, right in zip(found, expected, strict=True):
        assert_equal(one, right)
    assert readers and all(name.startswith("petune") for name in readers)


def test_a_batch_that_was_handed_on_is_known_by_its_tensors_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, known: Any
) -> None:
    model, cache, batches = known
    seen: list[bool] = []

    def asked(model: Any, call: Any, cast_to: str) -> Any:
        seen.append(any(value is call["input_ids"] for value in (one["input_ids"] for one in batches)))
        return sources_of(model, call, cast_to)

    monkeypatch.setattr(activation_cache, "sources_of", asked)
    # on the CPU, moving makes no copy
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *args, **kwargs: self.clone())
    handed = list(zip(cache.ahead(batches, "cpu"), batches, strict=True))
    monkeypatch.undo()
    monkeypatch.setattr(activation_cache, "sources_of", asked)
    last, own = handed[-1]
    expected = gradients(model, own)
    seen.clear()
    assert_equal(gradients(model, last), expected)
    assert seen == [True]
    last["input_ids"][0, 0] += 1  # is another row now
    assert not torch.equal(gradients(model, last)[0], expected[0])
    assert seen == [True, False]


def test_every_expected_call_is_read_ahead_however_many_follow(readers: list[str], known: Any) -> None:
    model, cache, batches = known
    cache.expect(batches)
    for one in batches:
        assert coming(cache) == [min(AHEAD, len(cache._next))] * 2
        gradients(model, one)
    assert coming(cache) == [0, 0] and all(name.startswith("petune") for name in readers)


def test_a_call_that_nobody_expected_is_read_and_the_expected_ones_stay(
    readers: list[str], known: Any
) -> None:
    """So evaluation between two steps reads no row again. What never comes does not stay for ever."""
    model, cache, batches = known
    right = gradients(model, batches[3])
    readers.clear()
    cache.expect(batches[:2])
    assert_equal(gradients(model, batches[3]), right)
    assert coming(cache) == [2, 2]
    cache.expect(batches[:3])  # as the next step says it
    gradients(model, batches[1])
    assert coming(cache) == [1, 1]
    gradients(model, batches[2])
    assert coming(cache) == [0, 0]
    assert len(readers) == 2 * sum(len(one["input_ids"]) for one in batches)  # of two stacks, each once


def test_rows_that_are_new_are_not_read_ahead(readers: list[str], known: Any) -> None:
    model, cache, _ = known
    fresh = batch(NAME, seed=9)
    cache.expect([fresh])
    assert coming(cache) == [0, 0]
    gradients(model, fresh)
    assert cache.counts.read == 0


def test_a_file_that_ends_early_is_an_error_of_the_pass(readers: list[str], known: Any) -> None:
    model, cache, batches = known
    for path in cache.folder.glob("*.safetensors"):
        with open(path, "r+b") as file:
            file.truncate(200)
    cache.expect(batches[:1])
    with pytest.raises(FileError, match="ends before a row"):
        gradients(model, batches[0])


def test_the_end_of_a_cache_ends_its_threads(readers: list[str], known: Any) -> None:
    _, cache, batches = known
    before = torch.get_num_threads()
    cache.expect(batches)
    cache.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("petune levels")]
    assert torch.get_num_threads() == before
