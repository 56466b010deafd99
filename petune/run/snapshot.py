"""Snapshots: what a step changes, copied to host memory beside the next step's compute and written to disk by
a thread.

    device   update N | forward and backward N + 1 ........... | update N + 1, which waits for the copy of N
    copies              | N to the host |                      |                | N + 1 to the host |
    disk     N - 3, committed as every checkpoint is, then the newest whole copy; those between are skipped

What the host does for a copy, it does while the device computes: `take` notes what is to be copied, and
`begin`, called when the next step is on its way, sends it off on another stream. Of two copies in host memory
one is written while the other takes the newest step: nothing is allocated per step, a step never waits for
the disk, and what is written cannot change. A state that lies over ranks is written by all of them, as
their checkpoints are (petune.run.saves); `put` says where.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from petune.errors import FileError, MachineError, PetuneError
from petune.files.safetensors import writing
from petune.log import human
from petune.run.host_copy import BufferLayout, HostCopy
from petune.saving import checkpoint
from petune.saving.manifest import MANIFEST

if TYPE_CHECKING:
    from pathlib import Path

# into a folder: tensors, JSON
WriteTensors = Callable[["Path", Mapping[str, Tensor], Mapping[str, Any]], None]
KEPT = 2


def age(manifest: checkpoint.Manifest, path: Path) -> str:
    """What to say of the age of the checkpoint at `path`; nothing where it is no snapshot. Raises FileError
    for a fact that is no step."""
    said = manifest.facts.get("snapshot")
    if said is None:
        return ""
    step = said.get("run_step") if isinstance(said, dict) else None
    if type(step) is not int:
        where = f"{path / MANIFEST}  facts.snapshot.run_step"
        what = "is not a step"
        remedy = "use another checkpoint"
        raise FileError(what, where=where, expected="a whole number", found=repr(said)[:80], remedy=remedy)
    return f", a snapshot that was committed at step {step}"


class QueuedCopy(HostCopy):
    """A copy that waits for its turn. step, state, facts, run_id: what it is of, as `Snapshots.take` says."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        super().__init__(stream)
        self.step, self.run_id = -1, ""
        self.state: Mapping[str, Any] = {}
        self.facts: Mapping[str, Any] = {}

    def _unpinned(self, size: int, error: MachineError) -> None:
        what, remedy = (
            f"snapshots need {human(size)} of host memory twice",
            "set snapshot_every: null, or free some memory",
        )
        raise MachineError(what, found=error.problems[0].what, remedy=remedy) from None


class Snapshots:
    """Takes copies of a run's state and commits the newest whole one again and again beside `checkpoints`;
    the last two are kept.

    device: where the state lives. write: puts tensors and JSON into an empty folder. run_step: says, when a
    snapshot is committed, which step the run has reached; lost: whether the folder is no longer that run's,
    where nothing is written then. Use it as a context: an end by an error still writes what was taken last,
    an interrupt only ends what is being written.
    """

    def __init__(
        self,
        checkpoints: Path,
        device: torch.device,
        write: WriteTensors,
        run_step: Callable[[], int],
        lost: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.checkpoints, self.root = checkpoints, checkpoints / checkpoint.SNAPSHOTS
        self.device, self.write, self.run_step, self.lost = device, write, run_step, lost
        # `oldest`: the most steps that a snapshot was behind when it was committed
        self.taken, self.written, self.oldest = 0, 0, 0
        self._layout: BufferLayout | None = None
        self._noted: tuple[QueuedCopy, Mapping[str, Tensor], torch.cuda.Event | None] | None = None
        self._turns: tuple[QueuedCopy, ...] = ()
        self._waiting: QueuedCopy | None = None
        self._writing: QueuedCopy | None = None
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
    ) -> None:
        """Note `tensors`, which must not change before `settle`, to be copied by `begin` and written with
        `state` (JSON) in their turn.

        facts: of the manifest.
        """
        self.begin()
        if not self._turns:
            stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            self._turns = QueuedCopy(stream), QueuedCopy(stream)
            self._make_folder()
            self._thread = Thread(target=self._work, name="petune-snapshot", daemon=True)
            self._thread.start()
        with self._changed:
            turn = next((turn for turn in self._turns if turn not in (self._writing, self._waiting)), None)
            if turn is None:  # one is being written, and the other has waited in vain
                assert self._waiting is not None
                turn, self._waiting = self._waiting, None
        turn.step, turn.state, turn.facts, turn.run_id = step, state, facts, run_id
        self.taken += 1
        ready = None if turn.stream is None else torch.cuda.current_stream(self.device).record_event()
        self._noted = turn, tensors, ready

    def put(
        self, step: int, facts: Mapping[str, Any], main: bool, commit: Callable[[Path, Any], Any]
    ) -> None:
        """Let `commit` put the state of `step`, of which every rank writes its parts, into the folder and
        under the facts that it is given. What is done once, the `main` one does."""
        if not main:
            commit(self.root, facts)
            return
        self._make_folder()
        self.taken += 1
        commit(self.root, lambda: self._aged(facts, step))
        self._tidy()

    def _make_folder(self) -> None:
        """Make the folder of snapshots, but not the run's, which is there or gone."""
        with writing(self.root):
            self.checkpoints.mkdir(exist_ok=True)
            self.root.mkdir(exist_ok=True)

    def begin(self) -> None:
        """Begin to copy what `take` has noted, if that has not begun; the host is busy with it for some
        milliseconds."""
        if self._noted is not None:
            (turn, tensors, ready), self._noted = self._noted, None
            if self._layout is None or not self._layout.fits(tensors):
                self._layout = BufferLayout(tensors, self.device)
            turn.fill(tensors, self._layout, ready)
            self._hand_over(turn)

    def _hand_over(self, turn: QueuedCopy) -> None:
        """Let the writing thread have a copy; it waits until that is whole."""
        with self._changed:
            self._waiting = turn
            self._changed.notify_all()

    def settle(self) -> None:
        """Let the device wait, before it changes the state, until that is copied."""
        self.begin()
        for turn in self._turns:
            turn.settle()

    def check(self) -> None:
        """Raise what the writing thread has met: a PetuneError as it is, any other error as MachineError."""
        if self._fault is None:
            return
        if isinstance(self._fault, PetuneError):
            raise self._fault
        raise MachineError(
            f"a snapshot could not be written: {self._fault!r}"[:300], where=str(self.root)
        ) from self._fault

    def drain(self) -> None:
        """Wait until the newest copy is on disk. Raises what the writing thread has met."""
        self.begin()
        with self._changed:
            self._changed.wait_for(
                lambda: self._fault is not None or (self._waiting is None and self._writing is None)
            )
        self.check()

    def distrust(self, after: int) -> None:
        """Set aside the snapshots of steps beyond `after`: a run that goes on must not take them up."""
        self._end(write=False)
        checkpoint.set_aside(self.checkpoints, after)

    def summary(self) -> str | None:
        """How many were taken and written, for a person; None where none was."""
        if not self.taken:
            return None
        return (
            f"snapshots: {self.taken:,} taken, {self.written:,} of them written, at most {self.oldest} steps"
            " old when committed"
        )

    def __enter__(self) -> Snapshots:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(write=kind is None or issubclass(kind, Exception))
        if kind is None:
            self.check()

    def _end(self, *, write: bool) -> None:
        if write:
            self.begin()
        self._noted = None
        with self._changed:
            self._ending = True
            self._waiting = self._waiting if write else None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

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

    def _commit(self, turn: QueuedCopy) -> None:
        turn.wait()
        if self.lost(turn.run_id):
            return
        self._make_folder()

        checkpoint.commit(
            self.root,
            turn.step,
            lambda folder: self.write(folder, turn.tensors, turn.state),
            run_id=turn.run_id,
            facts=lambda: self._aged(turn.facts, turn.step),
        )
        self._tidy()

    # ------------------------------------------------------------ either

    def _aged(self, facts: Mapping[str, Any], step: int) -> dict[str, Any]:
        """The facts of a snapshot that is about to be committed: how old it is by then."""
        reached = self.run_step()
        self.oldest = max(self.oldest, reached - step)
        return {**facts, "snapshot": {"step": step, "run_step": reached}}

    def _tidy(self) -> None:
        checkpoint.rotate(self.root, KEPT)
        self.written += 1
