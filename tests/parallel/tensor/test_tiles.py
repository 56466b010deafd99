"""Tiles that travel between ranks against what they are by definition, by both routes and in both directions,
tiles without tokens too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petune.parallel.collectives import Transfer
from petune.parallel.tensor import tiles
from petune.parallel.tensor.tiles import ROUTES, Gathering, TileRoute, Tiles, choose, receiving, sending
from tests.pool import run

CUTS = [(3, 2), (0, 4), (3, 2, 1), (2, 0, 3), (0, 0, 0), (1, 0, 2, 1)]


def drawn(seed: int, length: int) -> Tensor:
    return torch.randn(2, length, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def order(ranks: int, turn: int, leaving: bool) -> tuple[int, ...]:
    """Round the ranks from here, the own tile first; or last."""
    return tuple((dist.get_rank() - (step + leaving) * turn) % ranks for step in range(ranks))


def sent_round(sizes: tuple[int, ...]) -> list[list[Tensor]]:
    """For each route and direction: what was gathered, in the order of tokens, and the own tile of the
    sum."""
    rank, ranks, found = dist.get_rank(), len(sizes), []
    for route in ROUTES:
        for turn in (1, -1):
            here = Tiles(sizes, order(ranks, turn, False), dist.group.WORLD, rank, route)
            gathering = receiving(drawn(rank, sizes[rank]), here)
            gathered = here.joined([gathering.tile(step) for step in range(ranks)])
            there = Tiles(sizes, order(ranks, turn, True), dist.group.WORLD, rank, route)
            parts = drawn(10 + rank, sum(sizes)).split(sizes, 1)
            scattering = sending(there)
            for tile in there.order[:-1]:
                scattering.put(parts[tile])
            assert there.order[-1] == rank
            found.append([gathered, scattering.finish(parts[rank])])
    return found


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_gathering_and_scattering_do_what_their_names_say(sizes: tuple[int, ...]) -> None:
    whole = torch.cat([drawn(rank, size) for rank, size in enumerate(sizes)], 1)
    total = sum(drawn(10 + rank, sum(sizes)) for rank in range(len(sizes))).split(sizes, 1)
    for rank, found in enumerate(run(len(sizes), sent_round, sizes)):
        assert len(found) == 4
        for gathered, own in found:
            assert torch.equal(gathered, whole)
            torch.testing.assert_close(own, total[rank], atol=1e-14, rtol=0)


def sent_for_nothing() -> list[int]:
    transfer = Transfer(drawn(0, 0), (2, 0, 3), dist.group.WORLD, 1 - dist.get_rank(), 1 - dist.get_rank())
    return [transfer.sent.numel(), transfer.wait().numel()]


def test_a_tile_without_tokens_travels_as_one_number_so_that_every_rank_takes_part() -> None:
    assert run(2, sent_for_nothing) == [[1, 0]] * 2


def summed_up() -> list[Tensor]:
    here = Tiles((2, 0, 1), (0, 1, 2), dist.group.WORLD, dist.get_rank(), None)
    x = drawn(dist.get_rank(), 3)
    incoming, outgoing = receiving(x, here), sending(here)
    for step in range(2):
        outgoing.put(incoming.tile(step))
    return [x, outgoing.finish(incoming.tile(2))]


def test_what_every_rank_has_is_summed_tile_by_tile() -> None:
    found = run(2, summed_up)
    for part, total in found:
        torch.testing.assert_close(total, found[0][0] + found[1][0], atol=1e-14, rtol=0)
        assert not torch.equal(part, total)


def refused() -> str:
    here = Tiles((2, 1), order(2, 1, False), dist.group.WORLD, dist.get_rank(), "ring")
    with pytest.raises(ValueError, match="does not have this rank's") as caught:
        Gathering(drawn(0, 3), here)
    return str(caught.value)


def test_a_tile_of_another_length_is_refused() -> None:
    assert run(2, refused)[1] == "dim 1 of (2, 3, 3) does not have this rank's 1 of (2, 1)"


def chosen(seconds: list[dict[TileRoute, float]]) -> list[Any]:
    """The route where each rank measures what `seconds` says of it, asked for twice; what was said, and how
    often was measured."""
    said: list[str] = []
    asked: list[TileRoute] = []

    def measured(route: TileRoute, *_: Any) -> float:
        asked.append(route)
        return seconds[dist.get_rank()][route]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "say", said.append)
        patch.setattr(tiles, "_seconds", measured)
        routes = [choose(dist.group.WORLD, torch.device("cpu")) for _ in range(2)]
    return [routes, said, asked]


def test_every_rank_takes_the_route_that_is_faster_on_the_slowest_and_one_says_so() -> None:
    fast_ring: dict[TileRoute, float] = {"ring": 0.001, "star": 0.002}
    slow_ring: dict[TileRoute, float] = {"ring": 0.004, "star": 0.003}
    ranks = run(3, chosen, [fast_ring, fast_ring, slow_ring])
    assert [one[0] for one in ranks] == [["star", "star"]] * 3
    assert ranks[0][1] == ["overlap: tiles travel by the star (3 ranks; ring 4 ms, star 3 ms)"]
    assert [one[1] for one in ranks[1:]] == [[], []]
    assert all(one[2] == ["ring", "star"] for one in ranks)
    assert [one[0] for one in run(3, chosen, [fast_ring] * 3)] == [["ring", "ring"]] * 3


def measured_in_earnest() -> str:
    return choose(dist.group.WORLD, torch.device("cpu"))


def test_routes_are_measured_on_the_group_that_is_there() -> None:
    assert len(set(run(3, measured_in_earnest))) == 1


def test_two_ranks_have_one_route_and_measure_nothing() -> None:
    for routes, said, asked in run(2, chosen, [{}, {}]):
        assert (routes, asked) == (["ring", "ring"], [])
        assert len(said) <= 1
