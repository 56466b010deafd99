"""Rows that stay on the device: to the bit what files give, all of them or none, and no file is read for
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from petune.errors import UsageError
from petune.files.row_store import RowStore
from petune.methods import held_levels
from petune.methods.activation_cache import ActivationCache
from tests.methods.sided import assert_equal, sided
from tests.methods.zoo import batch, gradients

GIB = 2**30


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says how many bytes are free, as if the CPU were a device with memory of its own."""
    return lambda size: monkeypatch.setattr(held_levels, "free_bytes", lambda device: size)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with each row that is read from a file."""
    seen: list[int] = []
    read = RowStore.read

    def counted(self: RowStore, place: Any, into: Any) -> None:
        seen.append(place.tokens)
        read(self, place, into)

    monkeypatch.setattr(RowStore, "read", counted)
    return seen


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("t5-seq2seq", "auto"),
        ("llama-causal", "fp8"),
        pytest.param("bert-mlm", "bf16", marks=pytest.mark.long),
    ],
)
def test_rows_that_stay_are_those_of_the_files_to_the_bit(
    name: str, dtype: Any, free: Any, reads: list[int], tmp_path: Path
) -> None:
    model = sided(name)
    batches = [batch(name, rows=rows, seed=seed) for rows, seed in ((3, 1), (2, 2))]
    mixed = {key: torch.cat([one[key][:1] for one in batches]) for key in batches[0]}
    found = []
    for size in (0, GIB):
        free(size)
        with ActivationCache(model, tmp_path / str(size), dtype) as cache:
            for one in batches:
                model(**one)
            asked = [gradients(model, one) for one in (*batches, mixed)]
            found.append(asked)
            # every row once for each stack, in the batches and in the one of both
            assert cache.counts.read == 7 * len(cache.levels[model])
            assert (cache.held_bytes == cache.nbytes > 0) is (size > 0)
            assert len(reads) == (0 if size else cache.counts.read)
            reads.clear()
    for one, other in zip(*found, strict=True):
        assert_equal(one, other)


def test_rows_of_an_earlier_process_are_read_once(free: Any, reads: list[int], tmp_path: Path) -> None:
    free(GIB)
    model, inputs = sided("bert-classify"), batch("bert-classify")
    with ActivationCache(model, tmp_path):
        expected = gradients(model, inputs)
    with ActivationCache(model, tmp_path) as cache:
        for _ in range(3):
            assert_equal(gradients(model, inputs), expected)
        assert cache.counts.computed == 0 and len(reads) == len(inputs["input_ids"])


def test_where_not_all_rows_fit_none_stay(free: Any, reads: list[int], tmp_path: Path) -> None:
    model = sided("bart-seq2seq")
    batches = [batch("bart-seq2seq", seed=seed) for seed in (1, 2)]
    expected = [gradients(model, one) for one in batches]
    with ActivationCache(model, tmp_path / "sizes") as cache:
        model(**batches[0])
        cache.look()
        size = cache.nbytes
    free(2 * size + 2)  # half of it is taken
    with ActivationCache(model, tmp_path) as cache:
        gradients(model, batches[0])
        assert cache.held_bytes == size
        for one, right in zip(batches, expected, strict=True):
            gradients(model, one)
            assert_equal(gradients(model, one), right)
        assert cache.held_bytes == 0 and len(reads) > 0
        assert not any(level.held._rows for level in cache.levels[model].values())


def test_a_room_of_nothing_keeps_no_row(free: Any, tmp_path: Path) -> None:
    free(GIB)
    model, inputs = sided("bert-classify"), batch("bert-classify")
    with ActivationCache(model, tmp_path, room=0) as cache:
        model(**inputs), model(**inputs)
        assert cache.held_bytes == 0 and cache.counts.read > 0


def test_a_room_that_is_no_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="share"):
        ActivationCache(sided("bert-classify"), tmp_path, room=2.0)
