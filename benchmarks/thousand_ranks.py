"""Meetings and beats of a thousand simulated ranks: how long a meeting lasts, what all beats cost, and after
how long a lost rank is named.

    python benchmarks/thousand_ranks.py --ranks 1024 --processes 128

A simulated rank is a connection to a real rendezvous and what petune has of a rank beside its process group:
the check-in, the meetings and the two threads of its heartbeat. They live as threads of processes, a few in
each: hundreds under one interpreter's lock wait for it, not for the store. The store has a process of its
own. Then ranks fall silent, as one that freezes does: their threads stop without a word.
Figures are in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from petune.parallel.launch import beats
from petune.parallel.launch.beats import PeerLost, Pulse
from petune.parallel.launch.meeting import Meetings, check_in
from petune.parallel.launch.rendezvous import Membership, client, make_room, serve

HOST = "127.0.0.1"
WAIT_S = 300.0  # for ranks to start
WORTH_S = 60.0  # the longest that is waited for a verdict


@dataclass
class Rank:
    """A simulated rank. verdict: what its heartbeat has said of another, and when (monotonic)."""

    here: Membership
    silence_s: float
    verdict: tuple[str, float] | None = None
    pulse: Pulse = field(init=False)
    meetings: Meetings = field(init=False)

    def join(self) -> None:
        """Meet all others."""
        store, beating = client(self.here, WAIT_S), client(self.here, WAIT_S)
        check_in(self.here, store, WAIT_S)
        self.pulse = Pulse(self.here, beating, self.silence_s, self.note, lambda: None)
        self.meetings = Meetings(self.here, store, self.pulse, WAIT_S)
        self.pulse.start()

    def note(self, error: PeerLost) -> None:
        """Keep the first verdict."""
        self.verdict = self.verdict or (str(error).splitlines()[0], time.monotonic())


def together(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns, called in threads of their own. Raises what one of them raises."""
    found: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def call(at: int) -> None:
        try:
            found.put((at, work[at](), None))
        except BaseException as error:
            found.put((at, None, error))

    for at in range(len(work)):
        threading.Thread(target=call, args=(at,), daemon=True).start()
    said = sorted((found.get() for _ in work), key=lambda one: one[0])
    for _, _, error in said:
        if error is not None:
            raise error
    return [value for _, value, _ in said]


def hold(ranks: Sequence[int], world: int, silence_s: float, pipe: Connection) -> None:
    """A process of some ranks, which does what comes through the pipe and answers."""
    threading.stack_size(256 << 10)
    mine: list[Rank] = []
    while True:
        word, given = pipe.recv()
        answer: Any = None
        if word == "join":
            mine = [
                Rank(Membership(rank, world, rank, world, HOST, given, True), silence_s) for rank in ranks
            ]
            together([rank.join for rank in mine])
        elif word == "gather":
            together([partial(rank.meetings.gather, f"{given} of {rank.here.rank}") for rank in mine])
        elif word == "agree":
            together([partial(rank.meetings.agree, {"recipe": given}) for rank in mine])
        elif word == "cpu":
            answer = time.process_time()
        elif word == "silence":
            for rank in mine:
                if rank.here.rank in given:
                    rank.pulse.ended.set()
        elif word == "verdicts":
            answer = {rank.here.rank: rank.verdict for rank in mine}
        elif word == "end":
            os._exit(0)
        pipe.send(answer)


class Hosts:
    """The processes that hold the simulated ranks, and their store."""

    def __init__(self, world: int, processes: int, silence_s: float) -> None:
        fork = multiprocessing.get_context("fork")
        gc.freeze()  # a collection in a fork would copy every page of this process's objects
        pipes = [fork.Pipe() for _ in range(processes)]
        self.pipes = [mine for mine, _ in pipes]
        for at, (_, theirs) in enumerate(pipes):
            ranks = range(at, world, processes)
            fork.Process(target=hold, args=(ranks, world, silence_s, theirs), daemon=True).start()
        self.store = serve(HOST)
        self.ask("join", self.store.port)

    def ask(self, word: str, given: Any = None) -> list[Any]:
        """What every process answers."""
        for pipe in self.pipes:
            pipe.send((word, given))
        return [pipe.recv() for pipe in self.pipes]

    def seconds(self, word: str, given: Any = None) -> float:
        """Until the slowest rank has done it."""
        began = time.monotonic()
        self.ask(word, given)
        return time.monotonic() - began

    def cpu(self) -> tuple[float, float]:
        """Processor seconds of the ranks, and of the store."""
        return sum(self.ask("cpu")), time.process_time()

    def named(self, lost: set[int]) -> tuple[float, set[str]]:
        """Seconds from the silence of `lost` until all others have said who is lost, and what they say."""
        began = time.monotonic()
        self.ask("silence", lost)
        while time.monotonic() - began < WORTH_S:
            verdicts = {rank: said for part in self.ask("verdicts") for rank, said in part.items()}
            said = [value for rank, value in verdicts.items() if rank not in lost]
            if all(said):
                break
            time.sleep(0.25)
        late = sum(value is None for value in said)
        assert not late, f"{late} ranks have noticed nothing"
        return max(value[1] for value in said) - began, {value[0] for value in said}

    def end(self) -> None:
        """No process is left."""
        for pipe in self.pipes:
            pipe.send(("end", None))


def main() -> None:
    """Print the figures."""
    parse = argparse.ArgumentParser(description=__doc__)
    parse.add_argument("--ranks", type=int, default=1024)
    parse.add_argument("--processes", type=int, default=128)
    parse.add_argument("--timeout", type=float, default=10, help="how long a rank may be silent, in seconds")
    parse.add_argument("--watch", type=float, default=20, help="seconds over which beats are measured")
    asked = parse.parse_args()
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # no thread may set it while another looks up
    make_room(2 * asked.ranks)
    print(f"{asked.ranks} ranks in {asked.processes} processes, load {os.getloadavg()[0]:.1f}")
    losses = {"a rank": {asked.ranks - 3}, "a watcher": {beats.HOST}, "rank 0": {0}}
    losses["a host with its watcher"] = set(range(beats.HOST, 2 * beats.HOST))
    for number, (name, lost) in enumerate(losses.items()):
        began = time.monotonic()
        hosts = Hosts(asked.ranks, asked.processes, asked.timeout)
        print(f"join {time.monotonic() - began:.1f} s", flush=True)
        if number == 0:
            for word in ("gather", "agree"):
                took = [hosts.seconds(word, f"text {at}") for at in range(5)]
                print(f"{word}: {min(took):.2f} to {max(took):.2f} s a meeting", flush=True)
            before, began = hosts.cpu(), time.monotonic()
            time.sleep(asked.watch)
            after, seconds = hosts.cpu(), time.monotonic() - began
            shares = [100 * (b - a) / seconds for a, b in zip(before, after, strict=True)]
            print(
                f"beats: {shares[0]:.1f} % of a core for all ranks, {shares[1]:.1f} % for the store",
                flush=True,
            )
        time.sleep(3 * beats.BEAT_S)
        verdicts = [said for part in hosts.ask("verdicts") for said in part.values() if said]
        assert not verdicts, f"somebody was lost before: {verdicts[0]}"
        took, said = hosts.named(lost)
        print(f"{name} is silent: all others say so after {took:.1f} s: {sorted(said)[0][:160]}", flush=True)
        hosts.end()


if __name__ == "__main__":
    main()
