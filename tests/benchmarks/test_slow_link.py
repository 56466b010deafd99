"""A link that is slowed: what is said is the same, and takes as long as a ring over such a link."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.slow_link import slow_link
from petune.parallel.collectives import GATHER_SEQ, REDUCE, REDUCE_SCATTER_SEQ, Transfer
from tests.pool import run

BANDWIDTH, LATENCY = 20e6, 5e-3
TOKENS, UNEVEN = 2**8, (3 * 2**6, 2**6)
WHOLE = 4 * TOKENS * 2**8  # bytes


def took(what: Callable[[], object]) -> float:
    dist.barrier()
    began = time.monotonic()
    what()
    return time.monotonic() - began


def said(slow: bool) -> dict[str, tuple[float, float]]:
    """Seconds and the sum of what was heard, of each kind of message."""
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = torch.full((1, TOKENS, 2**8), rank + 1.0)
    found: dict[str, torch.Tensor] = {}

    def both_at_once() -> None:
        works = [dist.all_reduce(found.setdefault(name, whole.clone()), async_op=True) for name in "ab"]
        while not all(work.is_completed() for work in works if work is not None):
            time.sleep(1e-3)  # it is on its way though nobody waits for it

    ways: dict[str, Callable[[], object]] = {
        "sum": lambda: found.update(sum=REDUCE.ahead(whole, group)),
        "gather": lambda: found.update(gather=GATHER_SEQ.ahead(whole[:, : UNEVEN[rank]], UNEVEN, group)),
        "scatter": lambda: found.update(scatter=REDUCE_SCATTER_SEQ.ahead(whole, UNEVEN, group)),
        "send": lambda: found.update(
            send=Transfer(whole, tuple(whole.shape), group, 1 - rank, 1 - rank).wait()
        ),
        "b": both_at_once,
    }
    if not slow:
        return {name: (took(way), float(found[name].sum())) for name, way in ways.items()}
    with slow_link(BANDWIDTH, LATENCY):
        return {name: (took(way), float(found[name].sum())) for name, way in ways.items()}


def test_what_is_said_is_the_same_and_late() -> None:
    plain, slow = run(2, said, False), run(2, said, True)
    sends = {"sum": (2, 1.0), "gather": (1, 0.75), "scatter": (1, 0.75), "send": (1, 1.0), "b": (2, 2.0)}
    for rank in (0, 1):
        for name, (messages, parts) in sends.items():
            least = messages * LATENCY + parts * WHOLE / BANDWIDTH
            late, heard = slow[rank][name]
            assert heard == plain[rank][name][1]
            assert least <= late < least + plain[rank][name][0] + 1.0, name  # other programs slow, too


def test_a_link_is_itself_again_afterwards() -> None:
    before = dict(vars(dist.ProcessGroup))
    with slow_link(1.0):
        assert dict(vars(dist.ProcessGroup)) != before
    assert dict(vars(dist.ProcessGroup)) == before
