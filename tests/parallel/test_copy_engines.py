"""What ranks say by copy engines is what their group says, in whatever order their streams come: the
driver is one of threads here, whose copies and numbers in memory are those of the process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from petune.kernels.block.turns import InTurns, Turns, _leaving
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.cuda_driver import CopySpan
from petune.parallel.link import Link
from tests.parallel import linked_processes
from tests.parallel.linked_processes import PATIENCE, HostDriver


class LateDriver(HostDriver):
    """One that is late now and then."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def copy(self, piece: CopySpan, stream: int) -> None:
        if self.draw.random() < 0.3:
            time.sleep(self.draw.random() * 2e-3)
        super().copy(piece, stream)


class Host:
    """The ranks of one process, each a thread."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.made = ranks, dict[Any, Tensor]()
        self.met = threading.Barrier(ranks, timeout=PATIENCE)
        self.driver: Callable[[int], HostDriver] = LateDriver

    def run(self, work: Callable[[CopyEngines], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(lambda rank: work(self.engines(rank)), range(self.ranks)))

    def engines(self, rank: int) -> CopyEngines:
        host, asked = self, [0]

        class OfThreads(CopyEngines):
            def _driver(self) -> Any:
                return host.driver(rank)

            def _shared(self, size: int) -> tuple[Tensor, Sequence[Tensor]]:
                asked[0] += 1
                host.made[asked[0], rank] = torch.full((size,), 255, dtype=torch.uint8)
                self._together()
                every = [host.made[asked[0], other] for other in range(host.ranks)]
                return every[rank], every

            def _together(self) -> None:
                host.met.wait()

        group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: host.ranks)
        return OfThreads(group, torch.device("cpu"))


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


SIZES: dict[int, list[tuple[int, ...]]] = {
    2: [(3, 3), (5, 1), (0, 4)],
    3: [(2, 2, 2), (4, 0, 3)],
    4: [(1, 2, 3, 4)],
}
RANKED = [(ranks, sizes) for ranks, every in SIZES.items() for sizes in every]


@pytest.mark.parametrize(("ranks", "sizes"), RANKED)
def test_gathers_and_sums_of_tokens_are_those_of_all_ranks(ranks: int, sizes: tuple[int, ...]) -> None:
    def work(engines: CopyEngines) -> None:
        for turn in range(12):
            batch = 1 + turn // 4  # the rooms grow
            owns = [drawn(10 * turn + rank, batch, size, 6) for rank, size in enumerate(sizes)]
            terms = [drawn(10 * turn + 5 + rank, batch, sum(sizes), 6) for rank in range(ranks)]
            assert torch.equal(engines.gather(owns[engines.rank], sizes), torch.cat(owns, 1))
            expected = torch.stack(terms).sum(0).split(sizes, 1)[engines.rank]
            torch.testing.assert_close(engines.reduce_scatter(terms[engines.rank], sizes), expected)

    Host(ranks).run(work)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("own", [False, True])
def test_a_sum_is_rounded_once_and_the_same_on_every_rank(ranks: int, own: bool) -> None:
    def work(engines: CopyEngines) -> None:
        for turn in range(12):
            terms = [drawn(10 * turn + rank, 5, 7, dtype=torch.bfloat16) for rank in range(ranks)]
            given = terms[engines.rank].clone()
            found = engines.all_reduce(given, own)
            assert (found is given) == own and torch.equal(given, found if own else terms[engines.rank])
            assert torch.equal(found, torch.stack(terms).float().sum(0).bfloat16())

    Host(ranks).run(work)


@pytest.mark.parametrize("ranks", SIZES)
def test_every_rank_gets_what_each_other_one_has_for_it(ranks: int) -> None:
    def part(source: int, to: int, turn: int) -> Tensor:
        return drawn(1000 * turn + 10 * source + to, 1 + source, 1 + to)

    def work(engines: CopyEngines) -> None:
        for turn in range(12):
            silent = turn % 3 == 1  # the first rank has nothing for anybody
            sent = {to: part(engines.rank, to, turn) for to in engines.others if not silent or engines.rank}
            if turn % 2:  # rows that are dense, but do not lie one behind the other
                sent = {to: torch.cat([one, one], -1)[:, : one.shape[1]] for to, one in sent.items()}
            shapes = {of: (1 + of, 1 + engines.rank) for of in engines.others if not silent or of}
            found = engines.swap(sent, shapes, torch.float32, 4 * ranks**2)
            assert found.keys() == shapes.keys()
            for of, value in found.items():
                assert torch.equal(value, part(of, engines.rank, turn))

    Host(ranks).run(work)


@pytest.mark.parametrize(("ranks", "sizes"), RANKED)
def test_every_rank_fetches_its_columns_of_all_tokens(ranks: int, sizes: tuple[int, ...]) -> None:
    def work(engines: CopyEngines) -> None:
        for turn in range(12):
            batch = 1 + turn // 4
            every = [drawn(100 * turn + rank, batch, size, 6 * ranks) for rank, size in enumerate(sizes)]
            # of two matrices that lie side by side each rank gets 4 and 2 columns
            x = every[engines.rank]
            parts = [
                [x[:, :, 4 * to :][..., :4], x[:, :, 4 * ranks + 2 * to :][..., :2]] for to in range(ranks)
            ]
            whole, at = torch.empty(batch, sum(sizes), 6), engines.rank
            engines.fetch(parts, whole, sizes, 4 * batch * max(sizes) * 6)
            columns = [*range(4 * at, 4 * at + 4), *range(4 * ranks + 2 * at, 4 * ranks + 2 * at + 2)]
            assert torch.equal(whole, torch.cat(every, 1)[:, :, columns])

    Host(ranks).run(work)


def _left(engines: CopyEngines, turn: int, sizes: tuple[int, ...], comes_back: str) -> None:
    """Two passes that go in turns leave their sums; who of them comes back, and when."""
    parts = [drawn(10 * turn + rank, 1, sum(sizes), 6) for rank in range(engines.ranks)]
    wholes = [drawn(10 * turn + rank, 5, 7) for rank in range(engines.ranks)]
    sums, found, end = list[Callable[[], object]](), list[Tensor](), engines.end

    def ended(work: Callable[[], object], after: Callable[[], None] | None = None) -> None:
        def counted() -> None:
            sums.append(work)
            work()

        end(counted, after)

    def steps(say: Callable[[], Tensor]) -> InTurns[None]:
        yield from Turns(torch.device("cpu")).talk(lambda: found.append(say()))

    # of this rank's engines alone, which end with the test
    engines.end = ended  # type: ignore[method-assign]
    one = steps(lambda: engines.reduce_scatter(parts[engines.rank], sizes))
    two = steps(lambda: engines.all_reduce(wholes[engines.rank].clone(), own=True))
    next(one)
    assert not sums, "nobody has come back"
    if comes_back == "first":
        assert next(one, None) is None and len(sums) == 1
    next(two)
    assert len(sums) == 1, "the first ends before more is said"
    for steps_left in (two, one) if comes_back == "last" else ():
        assert not list(steps_left) or steps_left is two, "the sum of two is said yet"
    engines.gather(parts[engines.rank][:, : sizes[engines.rank]], sizes)
    assert len(sums) == 2, "which ends all that is left"
    expected = [torch.stack(parts).sum(0).split(sizes, 1)[engines.rank], torch.stack(wholes).sum(0)]
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right)


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("comes_back", ["first", "last", "never"])
def test_a_sum_that_is_left_ends_when_asked_for_or_before_more_is_said(ranks: int, comes_back: str) -> None:
    def work(engines: CopyEngines) -> None:
        for turn in range(12):
            _left(engines, turn, SIZES[ranks][0], comes_back)

    Host(ranks).run(work)


@pytest.mark.parametrize("meeting", [1, 2])
def test_a_sum_without_a_meeting_is_found_out(meeting: int) -> None:
    """The test can fail: a rank that does not wait reads what is not there yet."""

    def work(engines: CopyEngines) -> bool:
        meet, met = engines._meet, [0]

        def missed() -> None:
            met[0] += 1
            if met[0] % 2 == meeting % 2:
                meet()

        engines._meet = missed  # type: ignore[method-assign]  # of this one rank
        right = True
        for turn in range(30):
            terms = [drawn(10 * turn + rank, 64) for rank in range(3)]
            right &= torch.equal(engines.all_reduce(terms[engines.rank]), torch.stack(terms).sum(0))
        return right

    assert not all(Host(3).run(work))


class Tape(LateDriver):
    """A driver that can write down what it would do, as a CUDA graph does."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.runs: list[Callable[[], object]] | None = None

    def capturing(self) -> bool:
        return self.runs is not None

    def copy(self, piece: CopySpan, stream: int) -> None:
        self.do(partial(super().copy, piece, stream))

    def meeting(
        self, writes: Sequence[int], waits: Sequence[int], back: bool = False
    ) -> Callable[[int, int], None]:
        meet = super().meeting(writes, waits, back)
        return lambda stream, number: self.do(partial(meet, stream, number))

    def do(self, work: Callable[[], object]) -> None:
        if self.runs is None:
            work()
        else:
            self.runs.append(work)


def _recorded(engines: CopyEngines, say: Callable[[], Tensor]) -> tuple[list[Callable[[], object]], Tensor]:
    """What a recording of a message does, and what it gives."""
    driver: Any = engines.driver
    driver.runs = []
    with engines.recorded():
        found = say()
    runs, driver.runs = driver.runs, None
    return runs, found


def _replays(engines: CopyEngines, missed: int | None) -> bool:
    """Whether replays of recordings with odd and even numbers of meetings, between messages that are none,
    give what ranks say; missed: which meeting is left out."""
    end, driver, rank = engines.end, cast("Any", engines.driver), engines.rank

    def ended(work: Callable[[], object], after: Callable[[], None] | None = None) -> None:
        end(lambda: driver.do(work), after)

    # of this rank's engines alone, which end with the test
    engines.end = ended  # type: ignore[method-assign]
    pack = engines._pack
    engines._pack = lambda *given: driver.do(partial(pack, *given))  # type: ignore[method-assign]
    sizes = tuple(range(2, 2 + engines.ranks))
    x, y, term = torch.zeros(2, sizes[rank], 6), torch.zeros(5, 7), torch.zeros(2, sum(sizes), 6)
    parts = torch.zeros(engines.ranks, 9)  # for each rank one
    engines.gather(torch.zeros(1, 30, 6), (30,) * engines.ranks)  # rooms that are large enough
    messages: list[tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[list[Tensor]], Tensor]]] = [
        (lambda: x, lambda: engines.gather(x, sizes), lambda every: torch.cat(every, 1)),
        (lambda: y, lambda: engines.all_reduce(y), lambda every: torch.stack(every).sum(0)),
        (
            lambda: parts,
            lambda: _swapped(engines, parts, driver),
            lambda every: torch.stack([one[rank] for one in every]),
        ),
        (
            lambda: parts,
            lambda: _fetched(engines, parts),
            lambda every: torch.stack([one[rank] for one in every]),
        ),
        (
            lambda: term,
            lambda: engines.reduce_scatter(term, sizes),
            lambda every: torch.stack(every).sum(0).split(sizes, 1)[rank],
        ),
    ]
    made = [_recorded(engines, say) for _, say, _ in messages]
    if missed is not None:
        for runs, _ in made:
            del runs[[at for at, run in enumerate(runs) if _meets(run)][missed]]
    right = True
    for turn in range(40):
        at = random.Random(turn).randrange(len(messages))
        given, say, expected = messages[at]
        every = [drawn(100 * turn + of, *_shape(given(), sizes, of)) for of in range(engines.ranks)]
        given().copy_(every[rank])
        if turn % 4 == 3:
            found = say()
        else:
            runs, found = made[at]
            for run in runs:
                run()
        right &= torch.allclose(found, expected(every), rtol=1e-5, atol=1e-5)
    return right


def _shape(given: Tensor, sizes: Sequence[int], of: int) -> tuple[int, ...]:
    """That of what a rank gives: `given`, or its own tokens where that is cut."""
    return (2, sizes[of], 6) if given.shape[1] in sizes and given.dim() == 3 else tuple(given.shape)


def _swapped(engines: CopyEngines, parts: Tensor, driver: Any) -> Tensor:
    """What every rank has for this one, of its `parts`, [ranks, m]."""
    sent = {to: parts[to] for to in engines.others}
    found = engines.swap(sent, {of: (9,) for of in engines.others}, torch.float32, 36)
    whole = torch.zeros_like(parts)
    driver.do(partial(whole[engines.rank].copy_, parts[engines.rank]))
    for of, part in found.items():
        driver.do(partial(whole[of].copy_, part))
    return whole


def _fetched(engines: CopyEngines, parts: Tensor) -> Tensor:
    """The same, read from where the other ranks have laid it."""
    whole = torch.zeros_like(parts)
    engines.fetch([[part.view(1, 1, 9)] for part in parts], whole[None], (1,) * engines.ranks, 36)
    return whole


@pytest.mark.parametrize("left", [False, True])
def test_a_capture_that_fails_on_one_rank_leaves_the_rooms_in_turn(left: bool) -> None:
    """left: a sum waits for the half that has said it when the capture fails."""

    def work(engines: CopyEngines) -> None:
        driver: Any = engines.driver
        for turn in range(6):
            driver.runs = []
            with pytest.raises(ZeroDivisionError), engines.recorded():
                for _ in range(1 + engines.rank):  # one of them comes further
                    engines.gather(torch.zeros(1, 3, 6), (3, 3))
                if left and engines.rank:
                    _leaving(partial(engines.all_reduce, torch.ones(36)), [])
                    assert engines.open is not None
                raise ZeroDivisionError
            driver.runs = None
            assert engines.open is None
            every = [drawn(10 * turn + rank, 1, 3, 6) for rank in range(2)]
            assert torch.equal(engines.gather(every[engines.rank], (3, 3)), torch.cat(every, 1))

    host = _on_tape(2)
    host.run(lambda engines: (engines.gather(torch.zeros(1, 3, 6), (3, 3)), work(engines)))


def _meets(run: Callable[[], object]) -> bool:
    return cast("Any", run).func.__name__ == "meet"


def test_a_recording_ends_on_the_stream_where_it_began() -> None:
    """Though halves say their messages on another one, which would be left unjoined."""

    def work(engines: CopyEngines) -> None:
        driver: Any = engines.driver
        own = driver.current()

        def say() -> Tensor:
            driver.current = lambda: own + 7
            found = engines.gather(torch.zeros(1, 3, 6), (3, 3))
            driver.current = lambda: own
            return found

        streams = [cast("Any", run).args[0] for run in _recorded(engines, say)[0] if _meets(run)]
        assert own + 7 in streams and streams[0] == streams[-1] == own

    host = _on_tape(2)
    host.run(lambda engines: (engines.gather(torch.zeros(1, 3, 6), (3, 3)), work(engines)))


def _on_tape(ranks: int) -> Host:
    host = Host(ranks)
    host.driver = Tape
    return host


@pytest.mark.parametrize("ranks", SIZES)
def test_what_is_recorded_is_said_anew_at_every_replay(ranks: int) -> None:
    assert all(_on_tape(ranks).run(partial(_replays, missed=None)))


@pytest.mark.parametrize("missed", [0, 1, -1])
def test_a_recording_without_one_of_its_meetings_is_found_out(
    missed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test can fail: flags are met out of turn then, or rooms written while they are read, as a rule."""
    monkeypatch.setattr(linked_processes, "PATIENCE", 0.3)

    def found_out() -> bool:
        try:
            return not all(_on_tape(3).run(partial(_replays, missed=missed)))
        except AssertionError as error:
            return "nobody came" in str(error)

    assert any(found_out() for _ in range(8))


def test_rooms_of_a_recording_stay_though_larger_ones_are_made() -> None:
    def work(engines: CopyEngines) -> None:
        engines.gather(torch.zeros(1, 3, 6), (3, 3))
        rooms = engines.every
        _recorded(engines, lambda: engines.gather(torch.zeros(1, 3, 6), (3, 3)))
        engines.gather(torch.zeros(1, 2**19, 6), (2**19, 2**19))
        assert engines.every is not rooms and any(kept is rooms for kept in engines.recordings)

    _on_tape(2).run(work)


@pytest.mark.parametrize(
    ("ranks", "hidden", "size", "by"),
    [
        (2, False, 2**18, True),
        (4, False, 2**18, False),  # rings of NCCL's are as fast where nothing is hidden
        (4, True, 2**18, True),
        (2, True, 2**17, False),  # too small
    ],
)
def test_a_link_takes_the_engines_where_they_pay(
    ranks: int, hidden: bool, size: int, by: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    engines: Any = SimpleNamespace(
        ranks=ranks,
        all_reduce=lambda x, own: said.append("sum"),
        gather=lambda x, sizes: said.append("gather"),
        reduce_scatter=lambda x, sizes: said.append("scatter"),
        swap=lambda sent, shapes, dtype, most: said.append("swap"),
        end=lambda work: said.append("end"),
    )
    for name in ("REDUCE", "GATHER_SEQ", "REDUCE_SCATTER_SEQ"):
        monkeypatch.setattr(f"petune.parallel.link.{name}", SimpleNamespace(ahead=lambda *given: None))
    link, x = Link(None, engines, hidden), torch.empty(1, size)
    sizes = (size // ranks,) * ranks
    link.all_reduce(x)
    link.gather(torch.empty(1, sizes[0]), sizes)
    link.reduce_scatter(x, sizes)
    assert said == (["sum", "gather", "scatter"] if by else [])
    if 4 * size >= 2**20:
        link.swap({}, {}, torch.float32, torch.empty, 4 * size, said.append)
        assert said[-2:] == ["swap", "end"]
