"""What the launcher and its ranks tell each other when one of them is replaced, as files of a folder that
only the user can enter.

The launcher writes `order`, rank N writes `rank-N` and a spare process waits for `place`; each file appears
whole. They are files because a read of the rendezvous can block, and because a rank must hear of a loss while
its main thread waits in a collective.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = "PETUNE_ORDERS"  # set by petune.parallel.launch.launcher where ranks may be replaced: the folder
GENERATION = "PETUNE_GENERATION"  # how many orders a rank has followed, or come after
SPARE = "PETUNE_SPARE"  # set for a spare process: the file in which it will find its place
POLL_S = 0.02


@dataclass(frozen=True)
class Order:
    """The launcher's last word. generation: how often ranks were replaced. ends: none is any more."""

    generation: int = 0
    ends: bool = False


@dataclass(frozen=True)
class Standing:
    """What a rank says of itself.

    settled: the generation in which it last had its model and all others met it, -1 before; a rank that is
    not settled has nothing to keep. silent: who has not answered it, and for how long. whole: why all ranks
    of this plan must start anew when one is lost, if so.
    """

    settled: int = -1
    silent: Mapping[str, str] | None = None
    whole: str | None = None


def given() -> Order:
    """The launcher's last word, as a rank reads it."""
    folder = os.environ.get(FOLDER)
    return Order(**_read(Path(folder) / "order")) if folder else Order()


def give(folder: Path, order: Order) -> None:
    """Say it to every rank."""
    write(folder / "order", asdict(order))


def generation() -> int:
    """How many orders this rank has followed."""
    return int(os.environ.get(GENERATION) or 0)


def newer() -> bool:
    """Whether ranks have been replaced since this one met the others."""
    return given().generation > generation()


def replaces() -> bool:
    """Whether petune's launcher may replace ranks of this run one by one."""
    return FOLDER in os.environ


def stand(rank: int, standing: Standing) -> None:
    """Say to the launcher how this rank stands."""
    write(Path(os.environ[FOLDER]) / f"rank-{rank}", asdict(standing))


def standing(folder: Path, rank: int) -> Standing:
    """What a rank has said last."""
    return Standing(**_read(folder / f"rank-{rank}"))


def write(path: Path, facts: Mapping[str, Any]) -> None:
    """A file that appears whole."""
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}")  # two threads of a rank may write
    partial.write_text(json.dumps(facts), encoding="utf-8")
    partial.rename(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return found


# ------------------------------------------------------------ a spare process


def take_place() -> None:
    """Wait, in a spare process, for a place among the ranks, and take it: its environment and where its
    output goes."""
    path, outputs = Path(os.environ.pop(SPARE)), os.environ.pop("PETUNE_SPARE_OUTPUT").split(",")
    while not (found := _read(path)):
        time.sleep(POLL_S)
    os.environ |= found
    log = os.environ.pop("PETUNE_RANK_LOG", None)
    for number, kept in zip((1, 2), map(int, outputs), strict=True):
        file = kept if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
