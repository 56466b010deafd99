"""Checksums: every changed bit is seen, on views too, and a tensor is read once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from petune.files.safetensors import is_finite
from petune.models.checksums import RankShare, _weighted_sum, _weights, checksum, checksums, read_checksums


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_any_changed_element_changes_the_checksum(dtype: torch.dtype):
    value = torch.arange(60).remainder(2).reshape(5, 12).to(dtype)
    before = checksum(value)
    assert checksum(value.clone()) == before
    for index in range(60):
        other = value.clone()
        other.view(-1)[index] = 1 - other.view(-1)[index].int()
        assert checksum(other) != before, index


def test_the_checksum_sees_signs_of_zero_and_exchanged_elements_and_works_on_views():
    value = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    exchanged = value.clone()
    exchanged[0, 0], exchanged[6, 4] = value[6, 4], value[0, 0]
    assert checksum(value) != checksum(exchanged)
    assert checksum(torch.zeros(3)) != checksum(torch.tensor([0.0, -0.0, 0.0]))
    assert checksum(value.T) == checksum(value.T.contiguous()) != checksum(value)
    assert isinstance(checksum(torch.empty(0)), int)
    assert isinstance(checksum(torch.tensor(3.5)), int)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("number", [0, 1, 1023, 1024, 4096, 5001])
def test_the_checksum_is_the_weighted_sum_of_32_bit_words_modulo_2_to_64(number: int, dtype: torch.dtype):
    # at an odd place in memory
    value = (100 * torch.randn(number + 1, generator=torch.Generator().manual_seed(number))).to(dtype)[1:]
    content = bytes(value.clone().view(torch.uint8).tolist())
    words = [
        int.from_bytes(content[at : at + 4].ljust(4, b"\0"), "little", signed=True)
        for at in range(0, len(content), 4)
    ]
    weights = _weights(1024 + 1 + len(words) // 1024, torch.device("cpu")).tolist()
    assert (
        checksum(value)
        == sum(word * weights[at % 1024] * weights[1024 + at // 1024] for at, word in enumerate(words))
        % 2**64
    )


def test_weights_are_odd_and_differ_so_that_every_changed_or_exchanged_word_is_seen():
    weights = _weights(100_000, torch.device("cpu"))
    assert bool((weights % 2 != 0).all()) and len(weights.unique()) == len(weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_checksum_sees_an_even_number_of_changed_signs(dtype: torch.dtype):
    value = torch.randn(6, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = {checksum(value)}
    for columns in (slice(None), slice(0, None, 2), slice(1, None, 2), slice(1, 4, 2), slice(2, 6, 2)):
        other = value.clone()
        other[:, columns].neg_()
        found.add(checksum(other))
    assert len(found) == 6


def counted(started: list[int], threads: int) -> ThreadPoolExecutor:
    """A pool, and a note of it."""
    started.append(threads)
    return ThreadPoolExecutor(threads)


@pytest.mark.parametrize("worth", [0, 1 << 20])
def test_checksums_of_many_tensors_are_those_of_each_with_any_number_of_threads(
    worth: int, monkeypatch: pytest.MonkeyPatch
):
    started: list[int] = []
    monkeypatch.setattr("petune.models.checksums._WORTH_THREADS", worth)
    monkeypatch.setattr("petune.models.checksums.ThreadPoolExecutor", partial(counted, started))
    values = {
        str(size): torch.randn(size, generator=torch.Generator().manual_seed(size))
        for size in (1, 5000, 30, 3000)
    }
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert list(checksums(values).items()) == [
                (name, checksum(value)) for name, value in values.items()
            ]
    finally:
        torch.set_num_threads(1)
    assert checksums({}) == {} and bool(started) is (worth == 0)


@pytest.mark.parametrize("portion", [4096, 10_000, 1 << 24])
def test_checksums_of_tensors_read_in_portions_are_those_of_the_whole(
    portion: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("petune.models.checksums._READ", portion)
    shapes = (40, 512), (33, 3, 7), (5000,), (1, 9000), (0, 4), ()
    draw = torch.Generator().manual_seed(0)
    values = {str(shape): torch.randn(shape, generator=draw).bfloat16() for shape in shapes}
    asked: list[int] = []

    def read(name: str, part: range) -> torch.Tensor:
        value = values[name]
        asked.append(len(part))
        return value[part.start : part.stop] if value.dim() else value

    likes = {name: value.to("meta") for name, value in values.items()}
    assert read_checksums(likes, read) == checksums(values)
    assert len(asked) > len(shapes) or portion == 1 << 24
    assert read_checksums({}, read) == {}


@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_shares_of_checksums_add_up_and_each_portion_is_read_by_one_rank(
    ranks: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("petune.models.checksums._READ", 4096)
    draw = torch.Generator().manual_seed(0)
    shapes = (0, 4), (), (64, 512), (33, 3, 7), (5000,), (1, 9000), (40, 512)
    values = {str(shape): torch.randn(shape, generator=draw) for shape in shapes}
    likes = {name: value.to("meta") for name, value in values.items()}
    parts, read, bytes_read = list[str](), list[tuple[str, int]](), [0] * ranks

    def entries(name: str, part: range) -> torch.Tensor:
        read.append((name, part.start))
        own = values[name][part.start : part.stop] if values[name].dim() else values[name]
        bytes_read[len(parts)] += own.nbytes
        return own

    for rank in range(ranks):
        share = RankShare(rank, ranks, lambda text: parts.append(text) or [text])
        share.add_up(read_checksums(likes, entries, share))
    assert RankShare(0, ranks, lambda _: parts).add_up({}) == checksums(values)
    assert len(read) == len(set(read)) > len(shapes)
    assert max(bytes_read) - sum(bytes_read) / ranks <= 36_000  # a portion, of which none is cut


class Results(TorchDispatchMode):
    """How many operations have run, and the bytes of the largest result that is not a view."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.mark.parametrize(
    "look",
    [lambda value: _weighted_sum(value, _weights(4096, value.device)), is_finite],
    ids=["checksum", "finite"],
)
def test_a_tensor_is_read_once_without_a_loop_or_a_copy_of_it(look: Callable[[torch.Tensor], Any]):
    seen = []
    for number in (2**18, 2**21):
        value = torch.ones(number)
        with Results() as results:
            look(value)
        seen.append(results.calls)
        assert results.largest < value.nbytes / 8
    assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn]
)
def test_one_value_that_is_not_finite_is_found_wherever_it_lies(dtype: torch.dtype):
    value = torch.linspace(-400, 400, 5001).to(dtype)
    assert is_finite(value) and is_finite(value[:0]) and is_finite(torch.tensor(3))
    for bad in (torch.nan, torch.inf, -torch.inf) if dtype is not torch.float8_e4m3fn else (torch.nan,):
        for at in (0, 2500, 5000):
            other = value.clone()
            other[at] = bad
            assert not is_finite(other), (bad, at)
