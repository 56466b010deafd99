"""Somebody's program (a chat template), run in a forked process whose time, memory and output are limited,
and whose results are JSON.

A template can loop for ever or ask for all memory in one operation, which no sandbox of Python notices. The
process inherits what it works on, so that nothing is pickled, and works ahead of whoever reads the results.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

from petune.errors import DataError, FileError, PetuneError, Problem, UsageError
from petune.log import human

SECONDS = 10  # of computing, for one item
MEMORY = 2**30  # beside what this process has, bytes
OUTPUT = 2**26  # of one item, bytes
WAIT_S = 0.5  # after which the parent heeds signals
_KINDS = {kind.__name__: kind for kind in (DataError, FileError, UsageError)}
_REMEDY = "mend it, or take another model"
_T = TypeVar("_T")


def bounded(function: Callable[[_T], Any], items: Sequence[_T], what: str) -> Iterator[Any]:
    """What `function` makes of each item, as JSON has it. PetuneErrors come out as they are.

    Raises FileError, which begins with `what`, for an item that takes more than SECONDS, MEMORY or OUTPUT.
    Where a system cannot fork, the function is called here.
    """
    if not items:
        return
    if not hasattr(os, "fork"):
        yield from map(function, items)
        return
    mine, theirs = Pipe(duplex=False)
    with warnings.catch_warnings():
        # of forking beside threads: the child calls none of theirs
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _work(function, items, mine, theirs)
    theirs.close()
    try:
        for _ in items:
            yield _result(mine, child, what)
    finally:
        mine.close()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


def _result(end: Connection, child: int, what: str) -> Any:
    """The next result. Raises what the child says has gone wrong, or what it must have died of."""
    try:
        while not end.poll(WAIT_S):  # a signal that comes just before a read would not end it
            pass
        answer = json.loads(end.recv_bytes())
    except (EOFError, OSError):
        raise _died(child, what) from None
    if "over" in answer:
        raise FileError(f"{what} takes too much {answer['over']}", expected=answer["limit"], remedy=_REMEDY)
    if "problems" in answer:
        raise _KINDS.get(answer["kind"], PetuneError)([Problem(**problem) for problem in answer["problems"]])
    if "crash" in answer:
        raise RuntimeError(answer["crash"])
    return answer["value"]


def _died(child: int, what: str) -> PetuneError:
    """What the end of the child means."""
    _, status = os.waitpid(child, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGXCPU:
        return FileError(
            f"{what} takes too much time", expected=f"at most {SECONDS} s of computing", remedy=_REMEDY
        )
    ended = signal.Signals(number).name if number else f"exit code {os.waitstatus_to_exitcode(status)}"
    return FileError(f"{what} ended the process that renders it", found=ended, remedy=_REMEDY)


# ------------------------------------------------------------ in the child


def _work(
    function: Callable[[Any], Any], items: Sequence[Any], mine: Connection, theirs: Connection
) -> NoReturn:
    """Send the result of each item, and end without a word to what was inherited."""
    try:
        # what came from the parent is not searched for garbage, which would copy every page of it
        gc.freeze()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        mine.close()
        _close_others(theirs.fileno())
        _limit_memory()
        for item in items:
            _limit_time()
            answer = json.dumps(_answer(function, item)).encode()
            if len(answer) > OUTPUT:
                answer = json.dumps({"over": "room", "limit": f"at most {human(OUTPUT)} of text"}).encode()
            theirs.send_bytes(answer)
    except BaseException:
        os._exit(1)
    os._exit(0)


def _answer(function: Callable[[Any], Any], item: Any) -> dict[str, Any]:
    try:
        return {"value": function(item)}
    except MemoryError:
        return {"over": "memory", "limit": f"at most {human(MEMORY)}"}
    except PetuneError as error:
        return {"kind": type(error).__name__, "problems": [asdict(problem) for problem in error.problems]}
    except Exception as error:
        return {"crash": f"{type(error).__name__}: {error}"}


def _close_others(kept: int) -> None:
    """Keep no file of the parent but one: whoever waits for its end must not wait for this process."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    os.closerange(3, kept)
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))


def _limit_memory() -> None:
    import resource  # not on every system

    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # which is Linux'
        _lower(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + MEMORY)


def _limit_time() -> None:
    import resource

    _lower(resource.RLIMIT_CPU, int(time.process_time()) + 1 + SECONDS)


def _lower(limit: int, size: int) -> None:
    """Set a limit of this process, which has perhaps a lower one."""
    import resource

    most = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (size if most == resource.RLIM_INFINITY else min(size, most), most))
