"""The driver is called with what each of its functions takes, and its errors have names."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from petune.errors import PetuneError
from petune.parallel.cuda_driver import CopySpan, CudaDriver

STREAM, EVENT = 5, 7


class Library:
    """A driver that writes its calls down; `status` is what it answers."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.status = 0

    def __getattr__(self, name: str) -> Any:
        def called(*given: Any) -> int:
            self.calls.append((name, *map(_plain, given)))
            if name == "cuEventCreate":
                given[0]._obj.value = EVENT
            if name == "cuGetErrorName":
                given[1]._obj.value = b"CUDA_ERROR_INVALID_VALUE"
            return self.status

        call: Any = called
        call.argtypes = ()
        setattr(self, name, call)
        return call


def _plain(given: Any) -> Any:
    if not hasattr(given, "_obj"):
        return given
    copied = given._obj
    return {name: getattr(copied, name) for name, _ in getattr(copied, "_fields_", ())}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def test_streams_meet_by_numbers_and_events(library: Library) -> None:
    driver = CudaDriver(torch.device("cuda", 0))
    assert driver.event() == EVENT
    driver.record(EVENT, STREAM)
    driver.follow(STREAM, EVENT)
    driver.write(STREAM, 1024, 2**32 + 3)
    driver.wait(STREAM, 1024, 3)
    assert library.calls[1:] == [
        ("cuEventRecord", EVENT, STREAM),
        ("cuStreamWaitEvent", STREAM, EVENT, 0),
        ("cuStreamWriteValue32_v2", STREAM, 1024, 3, 0),
        ("cuStreamWaitValue32_v2", STREAM, 1024, 3, 0),
    ]


def test_a_meeting_is_one_call_that_writes_and_then_waits(library: Library) -> None:
    meet = CudaDriver(torch.device("cuda", 0)).meeting([64, 96], [128])
    for number in (1, 2**32 + 5):
        meet(STREAM, number)
        name, stream, count, words, flags = library.calls[-1]
        assert (name, stream, count, flags) == ("cuStreamBatchMemOp_v2", STREAM, 3, 0)
        # 2: CU_STREAM_MEM_OP_WRITE_VALUE_32, 1: CU_STREAM_MEM_OP_WAIT_VALUE_32, whose flag 0 is "or later"
        found = [(word.operation, word.address, word.value, word.flags) for word in words]
        assert found == [(2, 64, number % 2**32, 0), (2, 96, number % 2**32, 0), (1, 128, number % 2**32, 0)]
        assert ctypes.sizeof(words) == 3 * 48, "a union of six numbers of 64 bits"


def test_a_meeting_that_comes_again_puts_back_what_it_has_waited_for(library: Library) -> None:
    meet = CudaDriver(torch.device("cuda", 0)).meeting([64], [128, 132], back=True)
    meet(STREAM, 1)
    words = library.calls[-1][3]
    found = [(word.operation, word.address, word.value) for word in words]
    assert found == [(2, 64, 1), (1, 128, 1), (1, 132, 1), (2, 128, 0), (2, 132, 0)]


def test_a_copy_is_one_call_where_rows_lie_side_by_side_or_not_too_far_apart(library: Library) -> None:
    driver = CudaDriver(torch.device("cuda", 0))
    driver.copy(CopySpan(100, 200, 0), STREAM)  # nothing
    driver.copy(CopySpan(100, 200, 64), STREAM)
    driver.copy(CopySpan(100, 200, 64, 3, 64, 64), STREAM)
    assert library.calls == [
        ("cuMemcpyAsync", 100, 200, 64, STREAM),
        ("cuMemcpyAsync", 100, 200, 192, STREAM),
    ]
    driver.copy(CopySpan(100, 200, 64, 3, 64, 640), STREAM)
    name, rows, stream = library.calls[-1]
    assert (name, stream) == ("cuMemcpy2DAsync_v2", STREAM)
    assert {key: value for key, value in rows.items() if value} == {
        **{"srcMemoryType": 4, "srcDevice": 200, "srcPitch": 640},
        **{"dstMemoryType": 4, "dstDevice": 100, "dstPitch": 64},
        **{"WidthInBytes": 64, "Height": 3},
    }
    del library.calls[:]
    driver.copy(CopySpan(100, 200, 64, 2, 64, 2**31), STREAM)
    assert library.calls == [
        ("cuMemcpyAsync", 100, 200, 64, STREAM),
        ("cuMemcpyAsync", 164, 200 + 2**31, 64, STREAM),
    ]


def test_what_the_driver_refuses_is_told_by_its_name(library: Library) -> None:
    driver = CudaDriver(torch.device("cuda", 0))
    library.status = 1
    with pytest.raises(PetuneError, match="CUDA_ERROR_INVALID_VALUE"):
        driver.record(EVENT, STREAM)
