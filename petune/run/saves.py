"""Checkpoints, and snapshots of a state that lies over ranks, that are written beside training, from copies
in host memory.

    training  | save N: agree, copy | steps ... | step, told if a write has failed | save M, which waits for N
    a thread  |                     | write | flush | hash with the other ranks' threads | commit | rotate

What is written, in which order and what ranks say to one another meanwhile is what they do in a save that all
wait for: only the thread is another, and what the ranks say goes over a connection of its own. At most one
checkpoint is on its way. Until it is committed, the one before it is the newest.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from petune.errors import DistributedError, PetuneError
from petune.files.range_writer import Crew
from petune.log import human
from petune.parallel.launch import process_group
from petune.parallel.launch.host_memory import HostMemory
from petune.run.host_copy import BufferLayout, HostCopy, aligned
from petune.run.state import HeldState
from petune.saving import checkpoint

WriteState = Callable[[HeldState], None]  # of a copied state
# of a manifest, or what says them when it is written
Facts = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
Commit = Callable[[Path, Facts], Any]  # of a state, in a folder
_OTHERS = 1 << 20  # bytes for what a state has beside weights and moments: generators, counts
SHARE = 2  # of the free host memory a copy may take one part in so many


class _GivenUp(Exception):
    """Ends the thread that writes: nobody waits for it any more."""


class Saves:
    """Writes one state at a time beside training; a context, which an error leaves only when the state on its
    way is written or cannot be.

    device: where the state lives. patience_s: how long an error waits for threads of other ranks, which may
    wait for this one in a collective. fault: what the thread has met, told by `check` and `drain`.
    """

    def __init__(self, device: torch.device, patience_s: float) -> None:
        self.device, self.patience_s = device, patience_s
        self.fault: BaseException | None = None
        self._copy: HostCopy | None = None
        self._layout: BufferLayout | None = None
        self._thread: Thread | None = None
        self._reserving: Thread | None = None
        self._ended = Event()

    # ------------------------------------------------------------ the training thread

    def needs(self, tensors: Mapping[str, Tensor]) -> int:
        """Bytes of host memory that a copy takes beyond those that are held for it already."""
        self._reserved()
        size = sum(map(aligned, tensors.values()))
        buffer = None if self._copy is None else self._copy.buffer
        return size if buffer is None or len(buffer) < size else 0

    def reserve(self, tensors: Iterable[Tensor], alone: bool) -> None:
        """Begin to make room for copies of `tensors` in another thread, where there is any for each rank of
        this host, or for this one `alone`: the first save need not wait until the host gives memory out."""
        here, size = process_group.place(), sum(map(aligned, tensors)) + _OTHERS
        ranks = 1 if alone or here is None else here.local_world or here.world
        if shortage([("", size * ranks, HostMemory().free())]) is None:
            copy = self._copy = self._new_copy()
            self._reserving = Thread(target=copy.reserve, args=(size,), name="petune-room", daemon=True)
            self._reserving.start()

    def _reserved(self) -> None:
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    def _new_copy(self) -> HostCopy:
        return HostCopy(torch.cuda.Stream(self.device) if self.device.type == "cuda" else None)

    def begin(self, held: HeldState, write: WriteState) -> None:
        """Copy `held`, of live tensors, which must not change before `settle`, and let `write` have the copy
        in another thread. What was begun before has ended."""
        tensors, cuda = held.here, self.device.type == "cuda"
        self._reserved()
        if self._copy is None:
            self._copy = self._new_copy()
        if self._layout is None or not self._layout.fits(tensors):
            self._layout = BufferLayout(tensors, self.device)
            self._layout.forget()
        ready = torch.cuda.current_stream(self.device).record_event() if cuda else None
        self._copy.fill(tensors, self._layout, ready)
        copied, copy = held.of(self._copy.tensors), self._copy

        def work() -> None:
            try:
                copy.wait()
                write(copied)
            except BaseException as error:  # told by the training thread at its next step
                self.fault = error

        self._ended.clear()
        self._thread = Thread(target=work, name="petune-save", daemon=True)
        self._thread.start()

    def commit(
        self, held: HeldState, step: int, run_id: str, crew: Crew, put: Callable[[Commit], None]
    ) -> None:
        """Copy `held`, the state of `step`, as `begin` does, and let `put` commit the copy in another thread,
        by what it is given. crew: the ranks that write it together, which all call this."""
        beside = self.crew(crew)

        def write(copied: HeldState) -> None:
            fill = partial(copied.fill, check=self.refuse_if_ended)

            def commit(root: Path, facts: Facts) -> Path:
                return checkpoint.commit(
                    root, step, copied.begin, run_id=run_id, facts=facts, fill=fill, crew=beside
                )

            put(commit)

        self.begin(held, write)

    @property
    def busy(self) -> bool:
        """Whether this rank still writes what was begun."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self) -> None:
        """Let the device wait, before it changes the state, until that is copied."""
        if self._copy is not None and self._thread is not None:
            self._copy.settle()

    def check(self) -> None:
        """Raise what the thread has met, in its own words."""
        if self.fault is not None:
            raise self.fault

    def drain(self) -> None:
        """Wait until what was begun is written by this rank. Raises what the thread has met."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def give_up(self) -> None:
        """End what can be ended of what was begun, and forget what of it has failed."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._thread = self.fault = None

    def release(self) -> None:
        """Give back the room for copies; nothing is on its way."""
        self._reserved()
        self._copy = self._layout = None

    def __enter__(self) -> Saves:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return self.drain()
        # a group that broke, or a person, waits for nothing more
        if self._thread is not None and issubclass(kind, PetuneError):
            self._thread.join(0 if issubclass(kind, DistributedError) else self.patience_s)
        self.give_up()

    # ------------------------------------------------------------ the thread that writes

    def refuse_if_ended(self) -> None:
        """Raise where nobody waits for this save any more."""
        if self._ended.is_set():
            raise _GivenUp

    def crew(self, crew: Crew) -> Crew:
        """The same ranks, meeting in this thread of each. The training thread makes it, as the others' do."""
        if crew.world == 1:
            return crew
        beside = process_group.beside()
        return Crew(crew.rank, crew.world, lambda text: beside.gather(text, self.refuse_if_ended))


# ------------------------------------------------------------ whether there is room


def lacks_room(needed: int) -> str | None:
    """What forbids copies beside training of which this rank needs `needed` bytes of host memory, in words,
    the same on every rank; None where nothing does. Every rank of a group must ask."""
    own = json.dumps([socket.gethostname(), needed, HostMemory().free()])
    told = process_group.gather(own) if process_group.inside() else [own]
    return shortage([json.loads(text) for text in told])


def shortage(ranks: Sequence[tuple[str, int, int | None]]) -> str | None:
    """The first host on which copies would take too much. ranks: of each its host, the bytes it needs, and
    those that are free there."""
    for host in dict.fromkeys(host for host, *_ in ranks):
        needed = sum(own for name, own, _ in ranks if name == host)
        free = min((own for name, _, own in ranks if name == host and own is not None), default=None)
        if free is not None and needed * SHARE > free:
            where = f" of {host}" if len(ranks) > 1 else ""
            return f"copies take {human(needed)} of host memory, and {human(free)}{where} are free"
    return None
