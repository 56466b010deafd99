"""The ranks of one run as a process group: joining and leaving it, outliving a rank, and saying who failed.

Everything but tensors goes through the rendezvous store as text, so nothing is pickled. Ranks meet there
(petune.parallel.launch.meeting) and beat there (petune.parallel.launch.beats): a rank that is killed or
frozen is named, whatever the main thread waits for, and a process whose peers or launcher are gone does not
outlive them for long.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not say that it exports them

from petune.errors import DistributedError, MachineError, PetuneError, Stopped
from petune.log import printable, warn
from petune.parallel.launch import beats, lasting, orders
from petune.parallel.launch.beats import Health, PeerLost, Pulse, replaced
from petune.parallel.launch.meeting import Meetings, check_in
from petune.parallel.launch.orders import Standing, replaces
from petune.parallel.launch.rendezvous import (
    ERROR_FILE,
    Membership,
    client,
    connect,
    first_line,
    joined,
    lacks_files,
    launched,
    own_gpu,
    place,
    restarted,
    started,
    stay_on_this_machine,
    too_many_files,
    write_error_file,
)
from petune.parallel.launch.seal import Sealed, refused

# what others have, and is known by this module's name too
__all__ = ["PeerLost", "joined", "launched", "place", "replaces", "restarted", "started"]

FORMING_S = 3.0  # how long a rank may take to leave a group that is only being formed and has lost another

DeviceType = Literal["cpu", "cuda"]


# ------------------------------------------------------------ joining and leaving


@dataclass
class _Session:
    """What this module remembers while the process is in a group. `server` keeps the store alive on the rank
    that holds it."""

    place: Membership
    store: Sealed
    for_torch: Sealed  # which torch holds the C++ side of alone
    server: Store | None
    pulse: Pulse
    meetings: Meetings
    device_type: DeviceType
    timeout_s: float
    start_timeout_s: float
    beside: Meetings | None = None


_session: _Session | None = None
_reported: int | None = None


def join(device_type: DeviceType, timeout_s: float = 60, start_timeout_s: float = 300) -> tuple[int, int]:
    """Join the group this process was started for: (rank, number of ranks), with torch's default group made
    (gloo, or nccl for cuda).

    `timeout_s`: how long a collective may wait and a rank be silent; `start_timeout_s`: how long to wait for
    every rank to start. Raises DistributedError naming who is missing or what cannot be reached, MachineError
    without a GPU for this rank.
    """
    here = place()
    if here is None:
        raise DistributedError(
            "this process is not one of several ranks", remedy="start it with petune train, torchrun or srun"
        )
    if _session is not None:
        raise DistributedError("this process has joined a group already")
    _enter(here, device_type, timeout_s, start_timeout_s)
    return here.rank, here.world


def _enter(here: Membership, device_type: DeviceType, timeout_s: float, start_timeout_s: float) -> None:
    """Meet the others and make torch's default group, those of this generation."""
    global _session
    stay_on_this_machine(here)
    device = own_gpu(here) if device_type == "cuda" else None
    server, store = connect(here, start_timeout_s)
    beating = client(here, start_timeout_s)  # before: who has checked in must beat at once
    check_in(here, store, start_timeout_s)
    pulse = Pulse(here, beating, timeout_s, _give_up, _follow)
    meetings = Meetings(here, store, pulse, timeout_s)
    # NCCL's threads must not wait until a meeting is over
    for_torch = store.within(timeout_s) if device_type == "cpu" else client(here, timeout_s)
    _session = _Session(
        here, store, for_torch, server, pulse, meetings, device_type, timeout_s, start_timeout_s
    )
    pulse.start()
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=PrefixStore("torch", for_torch) if device_type == "cpu" else for_torch.beneath("torch"),
            rank=here.rank,
            world_size=here.world,
            timeout=timedelta(seconds=timeout_s),
            # bound to it, NCCL splits groups off, which ends in a crash after an abort
            device_id=None if orders.generation() else device,
        )
    except Exception as error:
        raise explain(error) from None


def inside() -> bool:
    """Whether this process is in a group now."""
    return _session is not None


def replacement() -> bool:
    """Whether this process came in the place of a lost rank, or has met one that did."""
    return orders.generation() > 0


def leave() -> None:
    """End a good run: wait for all ranks, then take the group down. See `quit_process` for a failure."""
    global _session
    if _session is None:
        return
    barrier()
    session = _session
    # or one would wait for what rank 0, which does not beat any more, said at the last meeting
    session.meetings.part("met", 5)
    session.pulse.stop()
    dist.destroy_process_group()
    session.meetings.part("gone", 5 if session.server is not None else 0)  # whoever holds the store goes last
    _tell_refused()
    _session = None


def _tell_refused() -> None:
    """Say how many values of somebody else were met."""
    if number := refused():
        warn(
            f"the rendezvous held {number} values that are not of this run; they were ignored: who else"
            " writes to its port?"
        )


def quit_process(code: int) -> NoReturn:
    """End this process at once with `code`: torch's threads hang or abort an ordinary exit while a collective
    is under way."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def limit(groups: Iterable[dist.ProcessGroup]) -> None:
    """Give `groups` the timeout of the default group; torch gives every new group half an hour."""
    if _session is not None:
        for group in groups:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=_session.timeout_s), group)


# ------------------------------------------------------------ meeting


def gather(text: str) -> list[str]:
    """What every rank gives, by rank; see `Meetings.gather`."""
    return _required().meetings.gather(text)


def beside() -> Meetings:
    """The meetings of a second thread of every rank, which are on a connection of their own."""
    session = _required()
    if session.beside is None:
        store = client(session.place, session.start_timeout_s)
        session.beside = Meetings(session.place, store, session.pulse, session.timeout_s, "beside")
    return session.beside


def barrier() -> None:
    """Wait, however long it takes, until every rank is here: for what rank 0 does alone. Raises PeerLost as
    `gather` does."""
    gather("")


def read_by_all() -> None:
    """Call it before every rank raises what they have just gathered; see `Meetings.read_by_all`."""
    _required().meetings.read_by_all()


def agree(facts: Mapping[str, str]) -> None:
    """Raise DistributedError, the same on every rank, unless all ranks have the same facts: recipe, data,
    versions, model."""
    _required().meetings.agree(facts)


def at_step(step: int) -> None:
    """Note the step this rank is at: others name it should this rank fall silent."""
    if _session is not None:
        _session.pulse.own.step = step


def worked(seconds: float, peak: Callable[[], int], device: str) -> None:
    """Note what the last step took here, and the most bytes held: rank 0 shows it, where ranks are few."""
    if _session is not None and _session.place.world <= beats.SHOWN:
        _session.pulse.own.work = round(seconds, 3), peak(), device


def health() -> list[Health]:
    """How the ranks that this one hears of are; none outside a group."""
    return [] if _session is None else _session.pulse.health()


# ------------------------------------------------------------ outliving another rank


_standing = Standing()


def settle(whole: str | None) -> None:
    """From here on this rank can wait, with its model where it is, until a rank that is lost has been
    replaced.

    whole: why all ranks of this plan must be started anew instead, if so. Without petune's launcher and
    --restarts nothing happens.
    """
    _stand(Standing(orders.generation(), whole=whole))


def unsettle() -> None:
    """From here on the loss of a rank is the end of this one."""
    _stand(Standing())


def _stand(standing: Standing) -> None:
    global _standing
    if replaces() and _session is not None:
        orders.stand(_session.place.rank, standing)
        _standing = standing


def check() -> None:
    """Raise PeerLost if a rank has been replaced: what collectives gave since then is worth nothing, as
    NCCL's were aborted."""
    if orders.newer():
        raise replaced()


def survives(error: Exception) -> bool:
    """Whether `error` comes of the loss of a rank that petune's launcher has replaced, which is waited for.
    Then `rejoin`."""
    if not replaces():
        return False
    if not orders.newer() and not isinstance(explain(error), PeerLost):
        return False
    return _await_order(_required().pulse)


def _await_order(pulse: Pulse) -> bool:
    """Tell the launcher who is silent, and is killed; wait for its word whether ranks were replaced."""
    if silent := pulse.silent(beats.SILENT_S):
        _stand(replace(_standing, silent={str(rank): text for rank, text in silent.items()}))
    until = time.monotonic() + beats.SILENT_S + 2 * beats.BEAT_S
    while not (ordered := orders.newer()) and not orders.given().ends and time.monotonic() < until:
        time.sleep(orders.POLL_S)
    return ordered


# the whole group, from when this rank has aborted it until it forgets it
_aborted: dist.ProcessGroup | None = None


def _free_main_thread() -> None:
    """Abort NCCL's collectives, in which the main thread may wait for a rank that is gone; gloo's end when
    its connections close.

    Once freed, the main thread finds no group to begin another collective on: it would make a connection of
    one that is being ended.
    """
    global _aborted
    if _session is None or _session.device_type != "cuda" or not dist.is_initialized():
        return
    torchs = dist.distributed_c10d
    lasting.refuse()
    _aborted = torchs.GroupMember.WORLD
    torchs._update_default_pg(None)
    _abort_at_once(list(torchs._world.pg_names))


def _forget_groups() -> None:
    """Have torch forget its groups, so that others can be made."""
    global _aborted
    torchs = dist.distributed_c10d
    if _aborted is not None:
        torchs._world.pg_names.clear()  # torch would abort them once more
        torchs._update_default_pg(_aborted)
        torchs._abort_process_group()
        _aborted = None
    elif dist.is_initialized():
        dist.destroy_process_group()
    torchs._world.group_count = 0  # torch names groups by it, and counts one that was only half made


def _abort_at_once(groups: Sequence[dist.ProcessGroup]) -> None:
    """Abort groups side by side: freeing one waits for the device, and so for the collective of another that
    nobody has aborted."""
    threads = [threading.Thread(target=group.abort, name="petune-abort", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def rejoin() -> None:
    """Leave the broken group and join the one of the newest order in the same place. Raises as `join`;
    PeerLost on yet another loss."""
    session = _required()
    session.pulse.ended.set()
    session.pulse.threads[1].join()  # it may be about to abort
    _free_main_thread()
    lasting.release()
    _forget_groups()
    gc.collect()  # whoever waits for this rank is freed when the last reference to the old connections goes
    os.environ[orders.GENERATION] = str(orders.given().generation)
    _enter(session.place, session.device_type, session.timeout_s, session.start_timeout_s)


# ------------------------------------------------------------ what the watching thread does


def _follow() -> None:
    """See that the main thread leaves a broken group. Where it cannot, as gloo may wait long for a dead rank,
    this one is replaced.

    That is soon where groups are being formed, which takes no time: gloo waits for the connection of a dead
    rank as long as for any answer, and for those of a mesh, which have no limit yet, half an hour. One that
    has its groups may compute or save meanwhile.
    """
    pulse = _required().pulse
    _free_main_thread()
    if not pulse.ended.wait(pulse.silence_s if pulse.formed else FORMING_S):
        os.kill(os.getpid(), signal.SIGKILL)


def _give_up(error: PeerLost) -> None:
    """End the process, unless whoever is lost is replaced: the main thread waits in a collective that no
    exception reaches."""
    if error.kind == "lost" and replaces() and _await_order(_required().pulse):
        return
    code = report(error) if _reported is None else _reported
    quit_process(code)


# ------------------------------------------------------------ saying who failed


_SIGNS = re.compile(
    r"gloo|pair closure|Connection (closed|reset|refused)|Broken pipe|NCCL|ProcessGroup|Socket", re.IGNORECASE
)


def explain(error: BaseException) -> BaseException:
    """What a failed collective means: which rank is frozen, has failed or is gone. Any other error is given
    back as it is."""
    if isinstance(error, PetuneError):
        return error
    if lacks_files(error):
        return too_many_files()
    if not isinstance(error, RuntimeError):
        return error
    if not isinstance(error, dist.DistError) and not _SIGNS.search(str(error)):
        return error
    if _session is None:
        return DistributedError("the process group failed", found=first_line(error))
    session, late = _session, "timed out" in str(error).lower()
    # The silence of a rank that froze a moment ago is not long enough yet, and comes by way of others; of one
    # that died, petune's launcher knows at once.
    enough = beats.SILENT_S + beats.BEAT_S + 3 * session.pulse.beat_s
    until = time.monotonic() + (enough if late or not launched() else 0)
    while not (lost := session.pulse.lost(beats.SILENT_S)) and time.monotonic() < until:
        time.sleep(0.1)
    if lost:
        return lost
    if late:
        what = f"the ranks are alive but did not meet within {session.timeout_s:.0f} s"
        return DistributedError(what, found=session.meetings.steps())
    return PeerLost(f"the connection to another rank broke: {first_line(error)}", "consequence")


def report(error: BaseException) -> int:
    """Tell the launcher, and the other ranks, how this rank failed; its exit code.

    The first report counts. Under torchrun and srun, where nobody else speaks for it, the rank prints its
    error itself.
    """
    global _reported
    error = explain(error)
    code, text = _spoken(error)
    if _reported is not None:
        return _reported
    _reported = code
    here = place()
    kind = error.kind if isinstance(error, PeerLost) else "own"
    trace = "".join(traceback.format_exception(error)) if code == 1 else ""
    if path := os.environ.get(ERROR_FILE):
        with suppress(OSError):
            write_error_file(Path(path), here.rank if here else 0, code, kind, text, trace)
    if not launched():
        with suppress(OSError):  # its terminal may be gone
            print(printable(f"rank {here.rank}: {text}" if here else text), file=sys.stderr, flush=True)
    if _session is not None and kind == "own":
        _session.pulse.fail(text, code == Stopped.code, _session.store)
        if code == Stopped.code and _session.server is not None:
            time.sleep(2 * _session.pulse.beat_s)  # the others read it in this process
    _tell_refused()
    return code


def _spoken(error: BaseException) -> tuple[int, str]:
    """The exit code and the words for any error."""
    if isinstance(error, PetuneError):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return MachineError.code, f"out of memory: {first_line(error)}"
    return 1, f"internal error: {type(error).__name__}: {first_line(error)}"


def _required() -> _Session:
    if _session is None:
        raise DistributedError("this process has not joined a group")
    return _session
