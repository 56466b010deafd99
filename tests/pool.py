"""Several ranks in one test: `run(2, function, ...)` calls the function in two forked processes of one gloo
group and gathers the results.

Every call forks fresh processes from this one, which costs a tenth of a second and has three virtues: torch
and transformers are imported already, the function and its arguments need no pickling (closures and
monkeypatches are simply there), and nothing is left over from an earlier test, least of all a hung one. A
rank that fails hangs its peers, so the first failure ends all of them.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

_FORK = multiprocessing.get_context("fork")
_END = 5.0  # seconds a rank has to die once it is told to
_NOTICED = 0.3  # seconds in which the system tells of a death


class RankError(RuntimeError):
    """A rank raised something other than an AssertionError, died or did not finish; the message names the
    rank and quotes its traceback."""


def run(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """What `function(*args)` returned on each of `world` ranks, by rank; `torch.distributed` is initialised
    inside (gloo, loopback).

    Results are plain data and CPU tensors in lists, tuples and dictionaries; what autograd knows of a tensor
    stays behind. Each rank has one thread and a random stream of its own. The first failure stops every rank:
    an AssertionError comes out as one, anything else, a dead process and a rank that has not finished after
    `timeout` seconds as RankError.
    """
    with tempfile.TemporaryDirectory(prefix="petune-ranks-") as folder:
        ends = [_FORK.Pipe() for _ in range(world)]
        ranks = [
            _FORK.Process(
                target=_rank, args=(rank, world, folder, ends, timeout, function, args), daemon=True
            )
            for rank in range(world)
        ]
        try:
            for process in ranks:
                process.start()
            for _, theirs in ends:
                theirs.close()
            return _gather([mine for mine, _ in ends], ranks, timeout, folder)
        finally:
            for mine, _ in ends:
                mine.close()  # a rank that has reported waits for this
            for process in ranks:
                _end(process)


class Standing:
    """Ranks that stay for one call after another, each call in a group of its own. To fork a rank, to copy
    the pages that it writes to and what torch does at its first step takes a third of a small case's time.

    What is called and its arguments are pickled, and patches made since the first call of a world are not
    seen: what needs those calls `run`. A failure ends the ranks of that world; the next call forks others.
    """

    def __init__(self) -> None:
        self._worlds: dict[int, tuple[list[Connection], list[Any], tempfile.TemporaryDirectory[str]]] = {}

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """As `run`."""
        ends, ranks, folder = self._worlds.get(world) or self._start(world)
        try:
            for end in ends:
                end.send((timeout, function, args))
            results = _gather(ends, ranks, timeout, folder.name)
            for end in ends:
                end.send("every rank has reported")
        except BaseException:
            self._stop(world)
            raise
        return results

    def end(self) -> None:
        """Let every rank go."""
        for world in [*self._worlds]:
            self._stop(world)

    def _start(self, world: int) -> tuple[list[Connection], list[Any], tempfile.TemporaryDirectory[str]]:
        folder = tempfile.TemporaryDirectory(prefix="petune-ranks-")
        pipes = [_FORK.Pipe() for _ in range(world)]
        others = [end for ends, _, _ in self._worlds.values() for end in ends]
        given = [(rank, world, folder.name, pipes, others) for rank in range(world)]
        ranks = [_FORK.Process(target=_stay, args=one, daemon=True) for one in given]
        self._worlds[world] = [mine for mine, _ in pipes], ranks, folder
        for process in ranks:
            process.start()
        for _, theirs in pipes:
            theirs.close()
        return self._worlds[world]

    def _stop(self, world: int) -> None:
        ends, ranks, folder = self._worlds.pop(world)
        for process in ranks:
            process.kill()
            _end(process)
        for end in ends:
            end.close()
        folder.cleanup()


def _gather(ends: list[Connection], ranks: list[Any], timeout: float, folder: str) -> list[Any]:
    """The results by rank, or the earliest failure raised."""
    deadline = time.monotonic() + timeout
    waiting, results = dict(enumerate(ends)), dict[int, Any]()
    while waiting:
        ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            late = (
                f"after {timeout:g} s these ranks had not finished: {', '.join(map(str, waiting))} of"
                f" {len(ends)}"
            )
            raise RankError("\n".join([late, *(_whereabouts(rank, ranks[rank], folder) for rank in waiting)]))
        reports = [(rank, *_report(end, ranks[rank])) for rank, end in waiting.items() if end in ready]
        if failed := [report for report in reports if report[2] != "returned"]:
            # a rank's death is seen by its peers first
            late = wait([end for end in waiting.values() if end not in ready], _NOTICED)
            failed += [(rank, *_report(end, ranks[rank])) for rank, end in waiting.items() if end in late]
            _raise(min(failed, key=lambda report: (report[2] != "died", report[2] == "returned", report[1])))
        for rank, _, _, value in reports:
            results[rank] = _unpacked(value)
            del waiting[rank]
    return [results[rank] for rank in range(len(ends))]


def _report(end: Connection, process: Any) -> tuple[float, str, Any]:
    """(when, "returned" | "failed" | "assertion" | "died", value or text) from one rank."""
    try:
        when, kind, value = end.recv()
    except (EOFError, ConnectionResetError):
        process.join(_END)
        return time.monotonic(), "died", f"exit code {process.exitcode}"
    return when, kind, value


def _raise(report: tuple[int, float, str, str]) -> NoReturn:
    rank, _, kind, text = report
    if kind == "assertion":
        raise AssertionError(f"rank {rank}: {text}")
    raise RankError(f"rank {rank} {kind}: {text}")


def _whereabouts(rank: int, process: Any, folder: str) -> str:
    """The stack of a rank that hangs, as it writes it on SIGUSR1."""
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.1)
    stack = Path(folder, f"stack-{rank}")
    return f"rank {rank} stands at\n{stack.read_text() if stack.exists() else 'an unknown place'}"


def _end(process: Any) -> None:
    """Let a rank that has reported go, and kill one that hangs."""
    if process.pid is None:
        return
    process.join(0.5)
    if process.is_alive():
        process.kill()
    process.join(_END)
    process.close()


# ------------------------------------------------------------------ inside a rank


def _rank(
    rank: int,
    world: int,
    folder: str,
    ends: list[tuple[Connection, Connection]],
    timeout: float,
    function: Any,
    args: Any,
) -> None:
    """Join the group, call, report, and stay until the parent has heard of every rank: a closed socket would
    upset the slower ones."""
    gc.freeze()  # what came from the parent is not searched for garbage, which would copy every page of it
    for other, (theirs, mine) in enumerate(ends):
        theirs.close()
        if other != rank:
            mine.close()
    end = ends[rank][1]
    with open(f"{folder}/stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        message = _outcome(rank, world, f"{folder}/store", timeout, function, args)
        # the parent closes its end when every rank has reported or one has failed
        with suppress(EOFError, OSError):
            end.send((time.monotonic(), *message))
            end.recv()
    os._exit(0)


def _stay(
    rank: int,
    world: int,
    folder: str,
    ends: list[tuple[Connection, Connection]],
    others: list[Connection],
) -> None:
    """Join a group, call, report, and leave the group when every rank has reported; again and again."""
    gc.freeze()
    for other, (theirs, mine) in enumerate(ends):
        theirs.close()
        if other != rank:
            mine.close()
    for other_worlds in others:
        other_worlds.close()
    end = ends[rank][1]
    with open(f"{folder}/stack-{rank}", "w") as stack, suppress(EOFError, OSError):
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        for number in count():
            timeout, function, args = end.recv()
            message = _outcome(rank, world, f"{folder}/{number}", timeout, function, args)
            end.send((time.monotonic(), *message))
            end.recv()
            dist.destroy_process_group()
    os._exit(0)


def _outcome(rank: int, world: int, store: str, timeout: float, function: Any, args: Any) -> tuple[str, Any]:
    """What happened to the call, and what came out."""
    try:
        _join(rank, world, store, timeout)
        return "returned", _packed(function(*args))
    except AssertionError as error:
        return "assertion", f"{error}\n{traceback.format_exc()}"
    except BaseException:
        return "failed", traceback.format_exc()


def _join(rank: int, world: int, store: str, timeout: float) -> None:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    # what should be equal on all ranks must not be so by the accident of a fork
    torch.default_generator.manual_seed(1000 + rank)  # torch's own formats a stack for each kind of device
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=max(timeout, 1.0)),
    )


# A tensor sent as such goes by a file descriptor of shared memory, and a hundred of them are too many: so it
# goes as bytes.


def _packed(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.detach().to("cpu").contiguous()
        return _Bytes(
            str(plain.dtype).removeprefix("torch."),
            tuple(plain.shape),
            plain.reshape(-1).view(torch.uint8).numpy().tobytes(),
        )
    if isinstance(value, dict):
        return {key: _packed(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_packed(part) for part in value)
    return value


def _unpacked(value: Any) -> Any:
    if isinstance(value, _Bytes):
        dtype = getattr(torch, value.dtype)
        plain = (
            torch.frombuffer(bytearray(value.content), dtype=dtype)
            if value.content
            else torch.empty(0, dtype=dtype)
        )
        return plain.reshape(value.shape)
    if isinstance(value, dict):
        return {key: _unpacked(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unpacked(part) for part in value)
    return value


class _Bytes:
    def __init__(self, dtype: str, shape: tuple[int, ...], content: bytes) -> None:
        self.dtype, self.shape, self.content = dtype, shape, content
