"""Snapshots: what a step changes, copied to host memory beside the next step's compute and written to disk by a thread.

    device   update N | forward and backward N + 1 ........... | update N + 1, which waits for the copy of N
    copies            | N to the host |                        |              | N + 1 to the host |
    disk     N - 3, committed as every checkpoint is, then the newest whole copy; those between are skipped

Two copies in host memory take turns: one is written, the other takes the newest step. So nothing is allocated per step, a step never
waits for the disk, and what is written cannot change meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Condition, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from petune import checkpoint
from petune.errors import MachineError, PetuneError
from petune.kernels.offload import pin
from petune.log import human
from petune.state import write_packed

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "snapshots"  # inside the folder of checkpoints, so that neither's rotation sees the other
KEPT = 2
_ALIGN = 64  # bytes: where a tensor begins in a host buffer


class HostCopy:
    """Room in host memory for the tensors of one state, made when it is first filled; pinned where they come from a GPU."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream
        self.tensors: dict[str, Tensor] = {}
        self.copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy; on a GPU this returns at once, and `tensors` must stay as they are until `copied` has happened."""
        if tensors.keys() != self.tensors.keys() or any(value.shape != self.tensors[name].shape for name, value in tensors.items()):
            self.tensors = self._room(tensors)
        targets, sources = list(self.tensors.values()), [tensors[name].detach() for name in self.tensors]
        if self.stream is None:
            torch._foreach_copy_(targets, sources)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
        self.copied = self.stream.record_event()

    def _room(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tensor like each of `tensors` on the host, all in one buffer: torch pins memory in powers of two."""
        begins, end = {}, 0
        for name, value in tensors.items():
            begins[name] = end
            end += -(-value.nbytes // _ALIGN) * _ALIGN
        buffer = torch.empty(end, dtype=torch.uint8)
        if self.stream is not None:
            try:
                pin(buffer)
            except MachineError as error:
                remedy = "set snapshot_every: null, or free some of this machine's memory"
                raise MachineError(
                    f"a snapshot needs {human(end)} of host memory twice", found=str(error.problems[0].what), remedy=remedy
                ) from None
        return {
            name: buffer[begins[name] : begins[name] + value.nbytes].view(value.dtype).view(value.shape) for name, value in tensors.items()
        }


class _Turn:
    """One of the two copies and what it is of."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.room = HostCopy(stream)
        self.step = -1
        self.tensors: Mapping[str, Tensor] = {}
        self.state: Mapping[str, Any] = {}
        self.facts: Mapping[str, Any] = {}
        self.run_id = ""


class Snapshots:
    """Takes copies of a run's state and commits the newest whole one again and again to `root`, which keeps the last two.

    device: where the state lives. run_step: says, when a snapshot is committed, which step the run has reached. Use it as a context: an
    end by an error still writes what was taken last, an interrupt only ends what is being written.
    """

    def __init__(self, root: Path, device: torch.device, run_step: Callable[[], int]) -> None:
        self.root, self.device, self.run_step = root, device, run_step
        self.taken, self.written, self.oldest = 0, 0, 0  # `oldest`: the most steps that a snapshot was behind when it was committed
        self._turns: tuple[_Turn, ...] = ()
        self._waiting: _Turn | None = None
        self._writing: _Turn | None = None
        self._ending = False
        self._fault: BaseException | None = None
        self._changed = Condition()
        self._thread: Thread | None = None

    # ------------------------------------------------------------ the training thread

    def take(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        run_id: str,
        facts: Mapping[str, Any],
        own: bool = False,
    ) -> None:
        """Begin to copy `tensors`, which must not change before `settle`, and have them written with `state` (JSON) when their turn comes.

        facts: of the manifest. own: the tensors are on the CPU and nobody else's, so they need no copy.
        """
        if not self._turns:
            stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            self._turns = _Turn(stream), _Turn(stream)
            self._thread = Thread(target=self._work, name="petune-snapshot", daemon=True)
            self._thread.start()
        with self._changed:
            turn = next((turn for turn in self._turns if turn is not self._writing and turn is not self._waiting), None)
            if turn is None:  # one is being written, and the other has waited in vain
                assert self._waiting is not None
                turn, self._waiting = self._waiting, None
        turn.step, turn.state, turn.facts, turn.run_id = step, state, facts, run_id
        if own:
            turn.tensors, turn.room.copied = tensors, None
        else:
            turn.room.fill(tensors)
            turn.tensors = turn.room.tensors
        with self._changed:
            self._waiting = turn
            self.taken += 1
            self._changed.notify_all()

    def settle(self) -> None:
        """Let the device wait, before it changes the state, until that is copied. Raises what the writing thread has met."""
        self._raise()
        for turn in self._turns:
            if turn.room.copied is not None:
                torch.cuda.current_stream(self.device).wait_event(turn.room.copied)

    def drain(self) -> None:
        """Wait until the newest copy is on disk. Raises what the writing thread has met."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault is not None or (self._waiting is None and self._writing is None))
        self._raise()

    def distrust(self, after: int) -> None:
        """Set aside the snapshots of steps beyond `after`: a run that goes on must not take them up."""
        self._end(write=False)
        checkpoint.set_aside(self.root, after)

    def summary(self) -> str | None:
        """How many were taken and written, for a person; None where none was."""
        if not self.taken:
            return None
        return (
            f"snapshots: {self.taken:,} taken, {self.written:,} of them written, at most {self.oldest} steps old when they were committed"
        )

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(write=kind is None or issubclass(kind, Exception))
        if kind is None:
            self._raise()

    def _end(self, *, write: bool) -> None:
        with self._changed:
            self._ending = True
            self._waiting = self._waiting if write else None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise(self) -> None:
        if self._fault is None:
            return
        if isinstance(self._fault, PetuneError):
            raise self._fault
        raise MachineError(f"a snapshot could not be written: {self._fault!r}"[:300], where=str(self.root)) from self._fault

    # ------------------------------------------------------------ the writing thread

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._ending)
                if self._waiting is None:
                    return
                turn, self._waiting = self._waiting, None
                self._writing = turn
            try:
                self._commit(turn)
            except BaseException as error:  # told by the training thread at its next step
                self._fault = error
            with self._changed:
                self._writing = None
                self._changed.notify_all()
            if self._fault is not None:
                return

    def _commit(self, turn: _Turn) -> None:
        if turn.room.copied is not None:
            turn.room.copied.synchronize()

        def facts() -> dict[str, Any]:
            age = {"step": turn.step, "run_step": self.run_step()}
            self.oldest = max(self.oldest, age["run_step"] - age["step"])
            return {**turn.facts, "snapshot": age}

        checkpoint.commit(
            self.root, turn.step, lambda folder: write_packed(folder, turn.tensors, turn.state), run_id=turn.run_id, facts=facts
        )
        checkpoint.rotate(self.root, KEPT)
        self.written += 1
