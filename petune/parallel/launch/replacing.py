"""The launcher's side of replacing one rank while the others keep their process and their model.

torch's agent can only end all ranks and start them anew, which it still does when this cannot help. Here a
rank that died gets a successor in its place, and an order tells the others to leave the broken group and meet
it in a new one; see petune.parallel.launch.orders.

A spare process has imported everything already and waits for a place: it is started when all ranks train, so
that it slows no start, and touches no GPU. On a machine with CPUs to spare it costs its imports in host
memory and nothing else.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import (
    SubprocessHandler,
    get_subprocess_handler,
)

from petune.parallel.launch.orders import FOLDER, GENERATION, SPARE, Order, Standing, give, standing, write

Codes = Mapping[int, int | None]  # the exit code of every rank; None while it runs


class Replacing:
    """What the launcher knows of its ranks beside their exit codes, and the spare process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.folder.mkdir()
        self.generation = 0
        self.spare: SubprocessHandler | None = None
        self.lost_spare = False
        self.since: float | None = None  # when a loss was noticed that is not made good yet

    def environment(self) -> dict[str, str]:
        """What ranks need beside what every rank finds. NCCL's watchdog must not end a process whose peer is
        gone: it aborts, no more."""
        return {
            FOLDER: str(self.folder),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"),
        }

    def begin(self) -> None:
        """All ranks start, and nothing has been said."""
        self.close()
        self.generation, self.lost_spare, self.since = 0, False, None
        for path in self.folder.iterdir():
            path.unlink()

    def standings(self, codes: Codes) -> dict[int, Standing]:
        """What each rank that runs has said of itself."""
        return {rank: standing(self.folder, rank) for rank, code in codes.items() if code is None}

    def silent(self, codes: Codes) -> dict[int, str]:
        """Ranks that run but have not answered one that trains with them, and what that one says."""
        said = [own.silent or {} for own in self.standings(codes).values() if own.settled == self.generation]
        return {int(rank): text for own in said for rank, text in own.items() if codes[int(rank)] is None}

    def lost(self, codes: Codes) -> list[int]:
        """The ranks to start: those that died, and those that have nothing to keep. Empty where no rank would
        be left, or one has ended."""
        standings = self.standings(codes)
        kept = [rank for rank, own in standings.items() if own.settled >= 0 and own.whole is None]
        lost = [rank for rank in codes if rank not in kept]
        ended = any(code is not None and code >= 0 for rank, code in codes.items())
        return [] if ended or not kept else lost

    def whole(self, codes: Codes) -> str | None:
        """Why all ranks must start anew, as one of them has said."""
        return next((own.whole for own in self.standings(codes).values() if own.whole), None)

    def all_train(self, codes: Codes) -> str | None:
        """A line once all ranks train again after one was replaced."""
        if self.since is None or not self._settled(codes):
            return None
        seconds, self.since = time.monotonic() - self.since, None
        return f"all ranks train again, {seconds:.1f} s after the loss was noticed"

    def keep_spare(self, context: SubprocessContext, codes: Codes) -> str | None:
        """Have a spare process once all ranks train; a line to say where it has died."""
        if self.spare is not None and (code := self.spare.proc.poll()) is not None:
            self.spare, self.lost_spare = None, True
            return (
                f"the spare process has ended (code {code}): a rank that is lost now is replaced by one that"
                " has to import everything"
            )
        if self.spare is None and not self.lost_spare and self._settled(codes) and self.whole(codes) is None:
            self.place = self.folder / f"place-{self.generation}"
            self.spare = self._started(context, 0, {SPARE: str(self.place)}, output=None)
        return None

    def _settled(self, codes: Codes) -> bool:
        standings = self.standings(codes)
        return len(standings) == len(codes) and all(
            own.settled == self.generation for own in standings.values()
        )

    def replace(self, context: SubprocessContext, lost: list[int]) -> dict[int, SubprocessHandler]:
        """Tell the others that `lost` are being replaced, and start those; the process of each."""
        self.generation += 1
        self.since = self.since or time.monotonic()
        give(self.folder, Order(self.generation))
        found: dict[int, SubprocessHandler] = {}
        for rank in lost:
            (self.folder / f"rank-{rank}").unlink(missing_ok=True)
            more = {GENERATION: str(self.generation)}
            if self.spare is not None and self.spare.proc.poll() is None:
                write(self.place, context.envs[rank] | more)
                found[rank] = self.spare
            else:
                found[rank] = self._started(context, rank, more, output=context.stdouts[rank])
            self.spare, self.lost_spare = None, False
        return found

    def end(self) -> None:
        """Tell the ranks that nobody is replaced any more."""
        give(self.folder, Order(self.generation, ends=True))

    def close(self) -> None:
        """End the spare process."""
        if self.spare is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.spare.proc.pid, signal.SIGKILL)
            self.spare.proc.wait()
            self.spare = None

    def _started(
        self, context: SubprocessContext, rank: int, more: dict[str, str], output: str | None
    ) -> SubprocessHandler:
        return get_subprocess_handler(
            entrypoint=str(context.entrypoint),
            args=context.args[rank],
            env=context.envs[rank] | more,
            stdout=output or "",
            stderr=output or "",
            local_rank_id=rank,
            numa_options=None,
        )
