"""How rows of the activation cache come from their files to a device: on a GPU by several threads, through
pinned memory, and ahead of the pass that wants them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from petune.files.row_store import RowPlace, RowStore
from petune.methods.held_levels import blank_padding_
from petune.methods.row_keys import BatchRow

AHEAD = 2  # passes that are read before they begin, at most
HANDS = 4  # threads that read rows: one alone copies slower than a GPU takes

Wanted = tuple[tuple[BatchRow, ...], tuple[int, int]]  # rows and [batch, seq] of a pass


@dataclass(frozen=True)
class Request:
    """What a pass wants of one stack: rows [batch, seq] = `shape`, where they lie in `store`. sizes: bytes of
    a token of a level, of its values and of its scale; levels: how many."""

    store: RowStore
    rows: tuple[BatchRow, ...]
    places: Sequence[RowPlace]
    shape: tuple[int, int]
    levels: int
    sizes: tuple[int, ...]
    device: torch.device

    @property
    def wanted(self) -> Wanted:
        """What it is known by."""
        return self.rows, self.shape


class Threads:
    """The threads that read for all stacks of a cache: `conductor` goes batch by batch, `hands` row by row.
    They begin when they are first asked."""

    @cached_property
    def conductor(self) -> ThreadPoolExecutor:
        """One thread."""
        return ThreadPoolExecutor(1, "petune levels")

    @cached_property
    def hands(self) -> ThreadPoolExecutor:
        """Several."""
        return ThreadPoolExecutor(HANDS, "petune rows")

    def close(self) -> None:
        """Wait for those that have begun, and end them."""
        for name in ("conductor", "hands"):
            if name in self.__dict__:
                self.__dict__.pop(name).shutdown(cancel_futures=True)


class LevelReader:
    """The batches of one stack, each read when it is asked for or, on a device that does not wait for the
    host, before."""

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self._coming: dict[Wanted, Future[Any]] = {}
        self._stream: torch.cuda.Stream | None = None

    def take(self, request: Request) -> list[Tensor]:
        """Values and scales of a batch on its device, uint8 [levels, batch, seq, bytes], zeros for padding.
        Raises FileError as `RowStore.read` does."""
        coming = self._coming.pop(request.wanted, None)
        if coming is None:
            return self._read(request)
        parts, arrived = coming.result()
        if arrived is not None:
            stream = torch.cuda.current_stream(request.device)
            stream.wait_event(arrived)
            for part in parts:
                part.record_stream(stream)
        found: list[Tensor] = parts
        return found

    def expect(self, request: Request) -> bool:
        """Begin to read a batch, unless as many as may are on their way; whether it is on its way now."""
        if request.wanted not in self._coming and len(self._coming) < AHEAD:
            self._coming[request.wanted] = self.threads.conductor.submit(self._read_aside, request)
        return request.wanted in self._coming

    def forget_others(self, wanted: Iterable[Wanted]) -> None:
        """Drop batches that were expected and are not among these."""
        kept = set(wanted)
        for one in [one for one in self._coming if one not in kept]:
            self._coming.pop(one).cancel()

    def _read_aside(self, request: Request) -> tuple[list[Tensor], torch.cuda.Event | None]:
        """`_read` on a stream of its own, and what tells when all of it has arrived."""
        if request.device.type != "cuda":
            return self._read(request), None
        stream = self._stream = self._stream or torch.cuda.Stream(request.device)
        with torch.cuda.stream(stream):
            return self._read(request), stream.record_event()

    def _read(self, request: Request) -> list[Tensor]:
        pinned, shape = request.device.type == "cuda", (request.levels, *request.shape)
        parts = [torch.empty((*shape, size), dtype=torch.uint8, pin_memory=pinned) for size in request.sizes]
        for part in parts:
            blank_padding_(part, request.rows)

        def read(at: int) -> None:
            row = request.rows[at]
            here = slice(row.first, row.first + row.tokens)
            views = [memoryview(level[at, here].numpy().reshape(-1)) for part in parts for level in part]
            request.store.read(request.places[at], views)

        if pinned:
            list(self.threads.hands.map(read, range(len(request.rows))))
        else:
            for at in range(len(request.rows)):
                read(at)
        return [part.to(request.device, non_blocking=True) for part in parts]
