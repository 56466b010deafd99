"""Where this process stands among those that were started with it, and the store through which they find each
other.

torchrun, srun and petune's own launcher say it in the environment. Where every rank runs on this machine,
nothing listens to others.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports them

from petune.errors import DistributedError, MachineError
from petune.parallel.launch import orders
from petune.parallel.launch.seal import Sealed, secret_of

LAUNCHER = "PETUNE_LAUNCHER"  # set by petune.parallel.launch.launcher: the process id of the launcher
# set by every elastic launcher; torchrun reads the first failing rank's message from it
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
# set by petune.parallel.launch.launcher: a file that is there until all ranks have met
UNMET = "PETUNE_UNMET"
CONNECTIONS = 4  # of a rank to the store, at the most: meetings, beats, torch, meetings of a second thread
ROOM = 64  # files for everything else that a process has open
SPARE_FILES = 16  # what a store, its clients and the groups behind it open at the least
NO_MORE_FILES = (errno.EMFILE, errno.ENFILE)
# torch's store and gloo say it in text alone
_NO_MORE_FILES = re.compile("too many open files", re.IGNORECASE)


@dataclass(frozen=True)
class Membership:
    """This process among those that were started. `hosted`: the launcher holds the store, else rank 0 does.
    local_world 0: not known."""

    rank: int
    world: int
    local_rank: int
    local_world: int
    host: str
    port: int
    hosted: bool = False

    @property
    def one_machine(self) -> bool:
        """Whether all ranks are known to run on this machine."""
        loops_back = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return self.local_world == self.world or loops_back

    @property
    def holds(self) -> bool:
        """Whether this rank holds the store."""
        return self.rank == 0 and not self.hosted

    @property
    def holder(self) -> str:
        """Who holds the store."""
        return "the launcher" if self.hosted else "rank 0"


def place(env: Mapping[str, str] | None = None) -> Membership | None:
    """This process's place by the environment of torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) or
    srun; None alone.

    Raises DistributedError when the environment makes no sense.
    """
    env = os.environ if env is None else env
    try:
        if all(env.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
            found = _by_torchrun(env)
        elif env.get("SLURM_STEP_NUM_TASKS") and env.get(
            "SLURM_PROCID"
        ):  # a batch script outside srun has no step
            found = _by_slurm(env)
        else:
            return None
    except ValueError as error:
        raise DistributedError("the launcher's environment makes no sense", found=str(error)) from None
    if not (0 <= found.rank < found.world and 0 < found.port < 2**16):
        told = f"rank {found.rank} of {found.world}, port {found.port}"
        raise DistributedError("the launcher's environment makes no sense", found=told)
    # rank 0 listens on the loopback interface, whatever name its machine has
    if found.one_machine and not found.hosted:
        found = replace(found, host="127.0.0.1")
    return found if found.world > 1 else None


def _by_torchrun(env: Mapping[str, str]) -> Membership:
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    local = int(env.get("LOCAL_RANK", rank)), int(env.get("LOCAL_WORLD_SIZE", 0))
    hosted = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Membership(rank, world, *local, env["MASTER_ADDR"], int(env["MASTER_PORT"]), hosted)


def _by_slurm(env: Mapping[str, str]) -> Membership:
    """One task of an srun step: the first node is host, the port follows from job and step."""
    rank, world = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or "localhost"
    job, step = (re.sub(r"\D", "", env.get(name, "")) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    port = int(env.get("MASTER_PORT") or 20000 + (int(job) * 31 + int(step)) % 10000)
    local_world = world if env.get("SLURM_STEP_NUM_NODES") == "1" else 0
    local, host = int(env.get("SLURM_LOCALID", rank)), env.get("MASTER_ADDR") or first_node(nodes)
    return Membership(rank, world, local, local_world, host, port)


def first_node(nodes: str) -> str:
    """The first host of a Slurm list: `gpu[03-05,09],big1` -> gpu03."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group() if first else nodes)


def joined() -> bool:
    """Whether this process was started as one of several ranks: by torchrun, srun or petune."""
    return place() is not None


def started() -> tuple[int, int]:
    """This process's rank and the number of ranks it was started among; (0, 1) for a process of its own."""
    here = place()
    return (here.rank, here.world) if here else (0, 1)


def launched() -> bool:
    """Whether petune's own launcher started this rank and tells the user how it ended."""
    return LAUNCHER in os.environ


def restarted() -> int:
    """How often a launcher has started the ranks anew, or replaced some; above 0 a run goes on from its
    newest checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) + orders.generation()


def note_meeting() -> None:
    """Tell petune's launcher that all ranks have met; from here on each hears of the others' end."""
    if path := os.environ.get(UNMET):
        Path(path).unlink(missing_ok=True)


def own_gpu(here: Membership) -> torch.device:
    """The GPU of this rank, which becomes torch's current one. Raises MachineError if there is none."""
    count = torch.cuda.device_count()
    index = (
        here.local_rank if here.local_world or here.local_rank < count else here.local_rank % max(count, 1)
    )
    if index >= count:
        what, expected = f"there is no GPU for rank {here.rank}", f"at least {index + 1} on this machine"
        raise MachineError(what, expected=expected, found=str(count))
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def write_error_file(path: Path, rank: int, code: int, kind: str, text: str, trace: str) -> None:
    """torch elastic's form of an error file, which torchrun reads, and what petune's launcher wants."""
    now = time.time()
    message = {"message": text, "extraInfo": {"py_callstack": trace, "timestamp": str(int(now))}}
    own = {"rank": rank, "code": code, "kind": kind, "text": text, "trace": trace, "time": now}
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({"message": message, "petune": own}), encoding="utf-8")
    partial.rename(path)


# ------------------------------------------------------------ the store


def stay_on_this_machine(here: Membership) -> None:
    """Bind to the loopback interface where every rank is on this machine: no port is open to others."""
    if here.one_machine:
        loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
        for library in ("GLOO", "NCCL"):
            if loopback:
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def connect(here: Membership, limit_s: float) -> tuple[Store | None, Sealed]:
    """The store's server, on the rank that holds it, and a client."""
    server = None
    if here.holds:
        server = serve("127.0.0.1" if here.one_machine else "", here.port)
        make_room(CONNECTIONS * here.world)
    _reach(here, limit_s)
    return server, client(here, limit_s)


def client(here: Membership, limit_s: float) -> Sealed:
    """A connection to the store of its own; every restart finds keys of its own. Raises DistributedError,
    MachineError."""
    secret = secret_of(os.environ, here.one_machine)
    # the store would try for long, aloud, and say nothing of it in the end
    _refuse_full_table()
    made: list[TCPStore] = []

    def attempt() -> None:
        with suppress(RuntimeError):
            made.append(TCPStore(here.host, here.port, is_master=False, timeout=timedelta(seconds=limit_s)))

    # it would wait forever for an answer of something that is no store
    thread = threading.Thread(target=attempt, daemon=True)
    with _short_look_ups():
        thread.start()
        thread.join(min(limit_s, 30))
    if not made:
        raise DistributedError(
            f"what answers at {here.host}:{here.port} is no rendezvous", remedy="choose another MASTER_PORT"
        )
    run = f"{here.host}:{here.port} of {here.world} {os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    return Sealed(made[0], secret, f"petune/{run}/{restarted()}", limit_s)


@contextmanager
def _short_look_ups() -> Iterator[None]:
    """Inside the block, a thread that begins gives up on a name server after a second, unless RES_OPTIONS is
    set.

    torch's client asks for the name of whoever it connects to, if only to log it: where no server answers,
    every other dozen of connections took 5 s.
    """
    ours = "RES_OPTIONS" not in os.environ
    if ours:
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"
    try:
        yield
    finally:
        if ours:
            os.environ.pop("RES_OPTIONS", None)


def make_room(files: int) -> None:
    """Let this process open so many files more; a socket is one. Raises MachineError where it may not, with
    the number that is needed."""
    import resource  # not on every system

    needed = len(os.listdir("/dev/fd")) + files + ROOM
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    except (ValueError, OSError):  # above the hard limit
        what = "too few files may be open at once: each rank's connections count"
        expected = f"a limit of {needed} or more"
        remedy = f"raise the limit where it is started: ulimit -n {needed}   (or start fewer processes)"
        raise MachineError(what, expected=expected, found=str(hard), remedy=remedy) from None


def serve(host: str, port: int = 0) -> TCPStore:
    """A store that listens on `host` ("": everywhere) alone; torch's own would listen on every interface.

    Raises DistributedError for a port that cannot be used, MachineError where too few files may be opened.
    """
    _refuse_full_table()
    listener = socket.socket(
        socket.AF_INET6 if host == "" and socket.has_dualstack_ipv6() else socket.AF_INET
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        what = f"port {port} of this machine cannot be used: {(error.strerror or str(error)).lower()}"
        raise DistributedError(what, remedy="choose another MASTER_PORT") from None
    port = listener.getsockname()[1]
    return TCPStore(
        host or "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def lacks_files(error: BaseException | None) -> bool:
    """Whether `error` says that this process, or the machine, may open no more files; a socket is one."""
    return (isinstance(error, OSError) and error.errno in NO_MORE_FILES) or _NO_MORE_FILES.search(
        str(error)
    ) is not None


def _refuse_full_table() -> None:
    """Raise MachineError where this process cannot open SPARE_FILES sockets more."""
    opened: list[socket.socket] = []
    try:
        opened += (socket.socket() for _ in range(SPARE_FILES))
    except OSError as error:
        if lacks_files(error):
            raise too_many_files() from None
    finally:
        for one in opened:
            one.close()


def too_many_files() -> MachineError:
    """The error of a process that may open no more files."""
    import resource  # not on every system

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    remedy = "raise the limit where it is started: ulimit -n 4096   (or start fewer processes)"
    what = "too many open files: no further socket or file can be opened"
    return MachineError(what, found=f"a limit of {limit}", remedy=remedy)


def _reach(here: Membership, limit_s: float) -> None:
    """Wait until the rendezvous answers; torch's own attempts would fill the terminal."""
    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection((here.host, here.port), timeout=5).close()
            return
        except OSError as error:
            if lacks_files(error):
                raise too_many_files() from None
            if time.monotonic() > until:
                raise DistributedError(
                    f"rank {here.rank} cannot reach {here.holder} at {here.host}:{here.port}",
                    found=f"{(error.strerror or str(error)).lower()}, tried for {limit_s:.0f} s",
                    remedy=f"start {here.holder}, and check MASTER_ADDR and MASTER_PORT",
                ) from None
        time.sleep(0.2)


def first_line(error: BaseException) -> str:
    """What an error says first, without another library's source file in front and advice behind."""
    line = (str(error).splitlines() or [""])[0]
    return re.sub(r"^\[[^\]]*\.(?:cc|cpp|hpp|h):\d+\]\s*", "", line).split(". This is typically")[0]
