"""Sixty-four simulated ranks, each with its connections, its meetings and its heartbeat: what they ask of the
store, and who is named when one, a watcher, a host or rank 0 falls silent."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.thousand_ranks import Rank, together
from petune.errors import DistributedError, Stopped
from petune.parallel.launch import beats, seal
from petune.parallel.launch.beats import Beat, Health, PeerLost
from petune.parallel.launch.meeting import named, runs_of
from petune.parallel.launch.rendezvous import Membership, serve

WORLD = 64
TIMEOUT_S = 1.0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Rank]:
    """Ranks that have met; their beats are faster than in life."""
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    monkeypatch.setattr(beats, "BEAT_S", 0.3)
    monkeypatch.setattr(beats, "SILENT_S", 1.5)
    server = serve("127.0.0.1")
    made = [
        Rank(Membership(rank, WORLD, rank, WORLD, "127.0.0.1", server.port, True), 60)
        for rank in range(WORLD)
    ]
    together([rank.join for rank in made])
    for rank in made:
        rank.pulse.silence_s = TIMEOUT_S + 1

    def end() -> None:
        for rank in made:
            rank.pulse.ended.set()
        for rank in made:
            rank.pulse.threads[0].join(5)

    request.addfinalizer(end)
    request.addfinalizer(lambda: server.num_keys() and None)
    return made


def until(found: Callable[[], bool], limit_s: float = 30) -> bool:
    """Whether something comes about in time."""
    end = time.monotonic() + limit_s
    while not found() and time.monotonic() < end:
        time.sleep(0.02)
    return found()


def test_a_meeting_gives_everyone_everything_in_a_few_requests_a_rank(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: Counter[str] = Counter()

    def counting(name: str, plain: Callable[..., Any], self: Any, *given: Any) -> Any:
        asked[name] += self is not ranks[0].meetings.store and self in stores
        return plain(self, *given)

    stores = [rank.meetings.store for rank in ranks]
    for name in ("set", "texts", "delete_key"):
        plain = getattr(seal.Sealed, name)
        monkeypatch.setattr(
            seal.Sealed,
            name,
            lambda self, *given, name=name, plain=plain: counting(name, plain, self, *given),
        )
    said = together([partial(rank.meetings.gather, f"rank {rank.here.rank}") for rank in ranks])
    assert said == [[f"rank {rank}" for rank in range(WORLD)]] * WORLD
    assert asked == dict.fromkeys(("set", "texts", "delete_key"), WORLD - 1), "once each, whoever gives what"


def test_ranks_that_agree_say_nothing_and_those_that_differ_are_named_by_all(ranks: list[Rank]) -> None:
    together([partial(rank.meetings.agree, {"data": "one"}) for rank in ranks])

    def differ(rank: Rank) -> str:
        with pytest.raises(DistributedError) as caught:
            rank.meetings.agree({"data": "two" if rank.here.rank in (5, 40) else "one"})
        return str(caught.value).splitlines()[1]

    said = together([partial(differ, rank) for rank in ranks])
    assert set(said) == {"   expected one (ranks 0 to 4, 6 to 39, 41 to 63), found two (ranks 5, 40)"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost",
    [
        pytest.param({61}, id="a rank", marks=pytest.mark.long),
        pytest.param({0}, id="rank 0"),
        pytest.param({8, 13}, id="a watcher and a rank of its own"),
        pytest.param({8}, id="a watcher", marks=pytest.mark.long),
        pytest.param(set(range(16, 24)), id="a host", marks=pytest.mark.long),
    ],
)
def test_whoever_falls_silent_is_named_by_all_others_and_nobody_else_is(
    lost: set[int], ranks: list[Rank]
) -> None:
    time.sleep(0.5)
    for rank in lost:
        ranks[rank].pulse.ended.set()
    others = [rank for rank in ranks if rank.here.rank not in lost]
    assert until(lambda: all(len(rank.pulse.silent(TIMEOUT_S)) >= len(lost) for rank in others))
    assert {tuple(rank.pulse.silent(TIMEOUT_S)) for rank in others} == {tuple(sorted(lost))}
    assert until(lambda: all(rank.verdict for rank in others)), "the watching thread says so too"


def test_rank_0_knows_how_the_ranks_are_that_it_hears_of(ranks: list[Rank]) -> None:
    for rank in (0, 3, 8, 9):
        ranks[rank].pulse.own.step, ranks[rank].pulse.own.work = 5, (0.25, 1 << 20, f"cuda:{rank}")
    ranks[20].pulse.ended.set()
    pulse = ranks[0].pulse
    expected = {*range(8), *range(8, WORLD, 8), 20}  # its watch, the watchers, and who is silent
    assert until(lambda: {one.rank for one in pulse.health()} == expected)
    found = {one.rank: one for one in pulse.health()}
    assert found[0] == Health(0, 0.0, 5, (0.25, 1 << 20, "cuda:0"))
    assert found[3].step == 5 and tuple(found[3].work or ()) == (0.25, 1 << 20, "cuda:3")
    assert tuple(found[8].work or ()) == (0.25, 1 << 20, "cuda:8") and found[4].work is None
    assert found[20].age_s > 2 * beats.BEAT_S > found[3].age_s


def test_a_rank_that_fails_or_was_stopped_tells_all_others(ranks: list[Rank]) -> None:
    ranks[21].pulse.fail("the row is no object", False, ranks[21].meetings.store)
    others = [rank for rank in ranks if rank.here.rank != 21]
    assert until(lambda: all(isinstance(rank.pulse.lost(60), PeerLost) for rank in others))
    assert {str(rank.pulse.lost(60)) for rank in others} == {"rank 21 failed: the row is no object"}


def test_rank_0_that_was_stopped_tells_all_others(ranks: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petune.parallel.launch.beats.os.kill", lambda pid, number: None)
    ranks[0].pulse.fail("stopped by SIGTERM", True, ranks[0].meetings.store)
    assert until(lambda: all(isinstance(rank.pulse.lost(60), Stopped) for rank in ranks[1:]))


def test_a_process_that_was_frozen_judges_nobody(ranks: list[Rank]) -> None:
    pulse = ranks[0].pulse
    pulse.answered -= 100
    pulse.heard = {rank: (beat, at - 100) for rank, (beat, at) in pulse.heard.items()}
    pulse._listen()
    late = [age for age, _ in pulse._told().values()]  # of a busy machine some are a little
    assert max(late, default=0) < 50 and not pulse.silent(50)


def test_ranks_are_named_by_their_rows() -> None:
    assert runs_of([3, 1, 2, 7]) == [(1, 3), (7, 7)]
    assert named([4]) == "rank 4" and named([0, 1, 2]) == "ranks 0, 1, 2"
    assert named([*range(512), 600]) == "ranks 0 to 511, 600"
    assert named(range(0, 200, 2)).endswith("60, 62 and more, 100 in all")


def test_a_beat_carries_no_more_than_it_has_to() -> None:
    assert len(Beat(10**6, 10**6).text) < 90
