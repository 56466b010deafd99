"""How the ranks of a run in progress are, as `ranks.json`, which pages of the run read.

The first rank writes it from a thread of its own, so that it goes on being written while a step hangs on
another rank. It is removed as the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread

from petune.errors import PetuneError
from petune.files.safetensors import write_json
from petune.parallel.launch import process_group

EVERY_S = 2.0
FILE = "ranks.json"


@contextmanager
def told(folder: Path, lost: Callable[[], bool]) -> Iterator[None]:
    """Keep the file in `folder` fresh while the block runs. lost: whether the folder is another run's now."""
    over = Event()
    thread = Thread(target=_tell, args=(folder / FILE, lost, over), name="petune-ranks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(EVERY_S)  # no longer, where the disk does not answer
        with suppress(PetuneError, OSError):
            if not lost():
                (folder / FILE).unlink(missing_ok=True)


def _tell(path: Path, lost: Callable[[], bool], over: Event) -> None:
    """Write the file until it is over; what cannot be written is the run's own to tell."""
    while not over.wait(EVERY_S):
        with suppress(PetuneError, OSError):
            if (ranks := process_group.health()) and not lost():
                write_json(path, {"at": time.time(), "ranks": [asdict(one) for one in ranks]})
