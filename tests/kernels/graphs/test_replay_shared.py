"""Blocks that ranks share, cut by heads and columns, are replayed from recordings and train as one process
does."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import petune
from petune.kernels import fuse
from petune.kernels.block.varlen import from_mask
from petune.kernels.configs import MemoryConfig
from petune.kernels.graphs import bucket as buckets
from petune.kernels.graphs import replay, ways
from petune.kernels.graphs.bucket import Bucket
from petune.kernels.graphs.recorder import NotRecorded
from petune.kernels.graphs.replay import Graphs
from petune.kernels.graphs.ways import Lanes
from petune.kernels.memory import block_cost
from petune.models import family_of
from petune.parallel.collectives import Sizes
from petune.parallel.tensor.stack_edges import StackEdges
from petune.rng.context import Running
from tests.kernels.replays import Again, stacks
from tests.kernels.replays import replayed as replayed_anew
from tests.methods.zoo import VOCAB, tiny
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, compare, on_ranks, oracle
from tests.parallel.plans import BACKENDS, COMPOSED, Plan, overlapping
from tests.pool import run

pytestmark = pytest.mark.usefixtures("standing")
WHOLE = MemoryConfig("all", offload="none")
FAMILIES = ["bert-classify", "t5-seq2seq", "bart-seq2seq", "llama-causal"]


class Rank:
    """This process as a rank whose blocks are replayed where they take less than `bound` seconds."""

    def __init__(self, patched: pytest.MonkeyPatch, quantum: int, bound: float) -> None:
        self.recorder, self.said = Again(), list[str]()
        self.graphs: list[Graphs] = []
        self.cuts: set[tuple[int | None, Sizes, Sizes]] = set()
        recordable, sizes, fast = fuse._recordable, StackEdges._sizes, SimpleNamespace(name="triton")

        def asked(model: Any, specs: Any, plan: Any) -> bool:
            return recordable(model, specs, cast("Any", SimpleNamespace(ops=fast, memory=plan.memory)))

        def cut(edges: StackEdges, length: int, room: int | None) -> tuple[Sizes, Sizes]:
            self.cuts.add((room, *(found := sizes(edges, length, room))))
            return found

        changes: dict[tuple[Any, str], Any] = {
            (block_cost, "LAUNCH_BOUND"): bound,
            (buckets, "QUANTUM"): quantum,  # which tiny batches can tell apart
            (replay, "RECORDING"): 0,
            (replay, "say"): self.said.append,
            (fuse, "_recordable"): asked,
            (ways, "recorded"): self._made,
            (StackEdges, "_sizes"): cut,
        }
        for (place, name), value in changes.items():
            patched.setattr(place, name, value)

    def _made(self, most: int, staged: bool) -> Any:
        def one() -> Graphs:
            self.graphs.append(Graphs(lambda device: self.recorder, staged=staged))
            return self.graphs[-1]

        return one() if most == 1 else Lanes(most, one)


def replayed(one: Case, limit: float, quantum: int = 4, bound: float = 1.0) -> dict[str, Any]:
    """The trace of steps on a rank, and what was replayed there."""
    with pytest.MonkeyPatch.context() as patched:
        rank = Rank(patched, quantum, bound)
        trace = harness._steps(one, limit)
    return {
        "trace": trace,
        "replays": (rank.recorder.forwards, rank.recorder.backwards),
        "said": rank.said,
        "cuts": rank.cuts,
        "long": any(graphs.long for graphs in rank.graphs),
        "buckets": [bucket for graphs in rank.graphs for bucket in graphs.graphs],
        "halved": [graph.halved for graphs in rank.graphs for graph in graphs.graphs.values()],
    }


def checked(one: Case, *how: Any) -> list[dict[str, Any]]:
    """Compare with one process; what each rank has replayed."""
    expected = oracle(one)
    found = on_ranks(one.plan.world, replayed, one, expected.norms[0] / 2, *how, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    return found


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("backend", ["tp", "galaxy", "galaxy2"])
@pytest.mark.parametrize("method", ["lora", "full", "adapter"])
def test_shared_blocks_train_replayed_as_in_one_process(method: str, backend: str, name: str) -> None:
    one = case(name, method, BACKENDS[backend](name, 2), passes=(5, 5), blocks=WHOLE)
    for rank in checked(one):
        passes = len(one.passes) * one.steps * (2 if "seq2seq" in name else 1)
        assert rank["replays"] == (passes, passes)
        assert any("runs as CUDA graphs" in line for line in rank["said"])


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", ["bert-classify", "llama-causal"])
@pytest.mark.parametrize(
    ("backend", "replays"), [("sp-ulysses", 2), ("sp-gather", 1), ("cut", 1), ("sp-ring", 0)]
)
def test_tokens_that_ranks_exchange_are_replayed_where_the_recording_says_which(
    backend: str, replays: int, name: str
) -> None:
    """Which keys a rank gathers of segments depends on their lengths; those of a ring travel."""
    one = case(name, "lora", BACKENDS[backend](name, 2), passes=(5, 5), dropout=0.1, steps=1, blocks=WHOLE)
    if backend == "sp-ring":
        one = replace(one, dropout=0.0)
    assert [rank["replays"] for rank in checked(one)] == [(replays, replays)] * 2


@pytest.mark.parametrize(
    "name",  # BART's kinds of dropout are replayed in test_replay_encoder_decoder
    [pytest.param(one, marks=pytest.mark.long if one == "bart-seq2seq" else ()) for one in FAMILIES],
)
def test_what_drops_out_of_shared_blocks_is_drawn_as_in_one_process(name: str) -> None:
    one = case(name, "lora", BACKENDS["galaxy"](name, 2), dropout=0.1, steps=1, blocks=WHOLE)
    assert all(min(rank["replays"]) > 0 for rank in checked(one))


# halves of stages, below, are of galaxy x pp
@pytest.mark.parametrize(
    "composed", ["tp x pp", pytest.param("galaxy x pp", marks=pytest.mark.long), "dp x galaxy"]
)
def test_shared_blocks_of_stages_and_replicas_are_replayed(composed: str) -> None:
    one = case("bert-classify", "lora", COMPOSED[composed]("bert-classify"), steps=1, blocks=WHOLE)
    assert all(min(rank["replays"]) > 0 for rank in checked(one))


def test_tokens_are_cut_where_those_of_the_recording_are() -> None:
    """So that ranks gather them in one piece; the last rank gets fewer."""
    one = case("bert-classify", "lora", BACKENDS["galaxy"]("bert-classify", 2), steps=1, blocks=WHOLE)
    for rank in checked(one):
        cuts = [(sizes, laid) for _, sizes, laid in rank["cuts"] if laid]
        assert cuts
        assert {laid for _, laid in cuts} == {
            bucket.kind[-2] for bucket in rank["buckets"] if bucket.segmented
        }
        assert all(first == room and 0 < last < most for (first, last), (room, most) in cuts)


@pytest.mark.parametrize(
    ("shares", "length", "room", "expected"),
    [
        ((3, 2, 1), 50, 60, ((25, 17, 8), ())),  # the last would get none
        ((3, 2, 1), 57, 60, ((30, 20, 7), (30, 20, 10))),
        ((1, 1), 60, 60, ((30, 30), (30, 30))),
        ((1, 1), 61, None, ((31, 30), ())),
    ],
)
def test_ranks_are_filled_from_the_first_on(
    shares: Sizes, length: int, room: int | None, expected: tuple[Sizes, Sizes]
) -> None:
    edges = StackEdges(cast("Any", SimpleNamespace(sequence=shares)), cast("Any", None), 0)
    assert edges._sizes(length, room) == expected


def test_ranks_that_would_get_no_tokens_go_block_by_block() -> None:
    one = case(
        "bert-classify", "lora", BACKENDS["galaxy"]("bert-classify", 2), passes=(3, 5), steps=1, blocks=WHOLE
    )
    for rank in checked(one, 512):
        assert not any(bucket.segmented for bucket in rank["buckets"])
        assert any(room is not None for room, _, _ in rank["cuts"])
        assert not any(laid for _, _, laid in rank["cuts"])


def test_long_rows_are_cut_evenly_and_run_block_by_block() -> None:
    one = case("bert-classify", "lora", BACKENDS["galaxy"]("bert-classify", 2), steps=1, blocks=WHOLE)
    for rank in checked(one, 4, 0.0):
        assert rank["replays"] == (0, 0)
        assert not any(room is not None for room, _, _ in rank["cuts"])
        assert not rank["long"], "as many own tokens may be those of rows that are not"


def one_fails(one: Case, limit: float) -> dict[str, Any]:
    """On the second rank nothing can be recorded."""
    with pytest.MonkeyPatch.context() as patched:
        if torch.distributed.get_rank() == 1:
            patched.setattr(Again, "error", NotRecorded("no room"))
        return replayed(one, limit)


def trial_fails(one: Case, limit: float) -> str:
    """On both ranks, which end soon, blocks cannot even be tried."""
    Again.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError) as raised:
        replayed(one, limit)
    return str(raised.value)


def test_a_trial_that_fails_ends_the_run_as_others_wait_for_its_answer() -> None:
    one = case("bert-classify", "lora", BACKENDS["tp"]("bert-classify", 2), blocks=WHOLE)
    assert run(2, trial_fails, one, oracle(one).norms[0] / 2) == ["out of memory"] * 2


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("bert-classify", BACKENDS["tp"], marks=pytest.mark.long),
        ("bert-classify", BACKENDS["galaxy"]),
        ("llama-causal", overlapping("galaxy")),
    ],
)
def test_a_recording_that_fails_on_one_rank_is_made_on_none(name: str, plan: Plan) -> None:
    one = case(name, "lora", plan(name, 2), passes=(4,), blocks=WHOLE)
    expected = oracle(one)
    found = on_ranks(2, one_fails, one, expected.norms[0] / 2, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert [rank["buckets"] for rank in found] == [[], []]
    reasons = [{line.rpartition(": ")[2] for line in rank["said"]} for rank in found]
    assert reasons == [{"see the message of another rank"}, {"no room"}]


IN_TURNS = [("tp", "lora", 4), ("galaxy", "full", 5), ("cut", "adapter", 4), ("sp-ulysses", "lora", 5)]
HALVED = product(
    ("tp", "galaxy", "galaxy2", "cut", "sp-gather", "sp-ulysses"), ("lora", "full", "adapter"), (4, 5)
)


@pytest.mark.parametrize(
    ("backend", "method", "rows"),
    [pytest.param(*one, marks=() if one in IN_TURNS else pytest.mark.long) for one in HALVED],
)
def test_halves_of_a_batch_are_replayed_in_turns(backend: str, method: str, rows: int) -> None:
    plan = overlapping(backend)("llama-causal", 2)
    one = case("llama-causal", method, plan, passes=(rows,), blocks=WHOLE, dropout=0.1)
    for rank in checked(one):
        assert rank["halved"] == [True]
        assert min(rank["replays"]) > 1


def test_halves_of_stages_are_replayed() -> None:
    plan = COMPOSED["galaxy x pp"]("llama-causal")
    assert plan.cut is not None
    plan = replace(plan, cut=replace(plan.cut, overlap=True))
    one = case("llama-causal", "lora", plan, passes=(4, 4), steps=1, blocks=WHOLE, dropout=0.1)
    for rank in checked(one):
        assert rank["halved"] == [bucket.rows > 1 for bucket in rank["buckets"]]
        assert any(rank["halved"]) and min(rank["replays"]) > 0


def timed(one: Case, limit: float, seconds: float, spare: int) -> dict[str, Any]:
    """On a rank whose blocks take so many seconds, where those of less than one are launched too slowly."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(block_cost.Rates, "seconds", lambda *given: seconds)
        patched.setattr(replay, "SPARE", spare)
        return replayed(one, limit)


@pytest.mark.parametrize(
    ("seconds", "spare", "halved"),
    [
        pytest.param(0.9, 2**30, [True], marks=pytest.mark.long),  # as what takes longer
        (replay.HALVED - 0.1, 2**30, [True]),
        (replay.HALVED + 0.1, 2**30, []),
        (1.1, 0, []),  # gradients have no room beside themselves
        (0.9, 0, [True]),
    ],
)
def test_halves_are_recorded_where_launches_bind_them(seconds: float, spare: int, halved: list[bool]) -> None:
    plan = overlapping("galaxy")("llama-causal", 2)
    one = case("llama-causal", "lora", plan, passes=(4,), steps=1, blocks=WHOLE)
    expected = oracle(one)
    found = on_ranks(2, timed, one, expected.norms[0] / 2, seconds, spare, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert [rank["halved"] for rank in found] == [halved] * 2


def test_padded_rows_are_recorded_whole() -> None:
    plan = overlapping("tp")("bert-classify", 2)
    one = case("bert-classify", "lora", plan, passes=(5, 3), steps=1, blocks=WHOLE)
    for rank in checked(one):
        assert rank["halved"] and not any(
            halved for halved, bucket in zip(rank["halved"], rank["buckets"], strict=True) if bucket.segmented
        )


def test_a_bucket_of_rows_that_are_cut_is_of_all_their_tokens() -> None:
    whole = Bucket.of((2, 8), None, ((5, 3),))
    assert (whole.own.tokens, whole.own.longest, whole.rows) == (16, 8, 2)


def test_there_is_no_room_for_sizes_that_were_declined_until_they_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_cost, "LAUNCH_BOUND", 1.0)
    model = tiny("bert-classify").train()
    petune.wrap(model, method="lora", r=2, kernels="off")
    assert fuse.fuse(model, family_of(model), "reference")
    replayed_anew(model)
    (stack,) = stacks(model)
    lengths = torch.tensor([9, 4, 7])
    mask = (torch.arange(9)[None] < lengths[:, None]).long()
    ids = torch.randint(3, VOCAB, (3, 9))
    hidden, here = torch.empty(1, 20, 32), Running(segments=from_mask(mask))

    def room() -> int | None:
        model(input_ids=ids * mask, attention_mask=mask, labels=torch.zeros(3, dtype=torch.long))
        return stack.room_for(hidden, here)

    expected = room()
    assert expected is not None and expected > 20
    with monkeypatch.context() as patched:
        patched.setattr(Graphs, "_reason", lambda *given: "for a test")
        assert room() is None
    assert room() == expected


def own_positions(one: Case, rank: bool) -> tuple[list[bool], dict[str, torch.Tensor]]:
    """What is recorded of rows that begin at positions of their own, in halves or not, and the gradients;
    replayed where this is such a `rank`."""
    patched = pytest.MonkeyPatch()
    made = Rank(patched, 4, 1.0) if rank else None
    runner = harness.place(one, one.plan)
    model: Any = runner.model
    positions = torch.tensor([0, 3, 5, 9, 2])[:, None] + torch.arange(7)
    for _ in range(2):
        for value in runner.tuned.values():
            value.grad = None
        out = model.model(input_ids=torch.arange(35).view(5, 7), position_ids=positions)
        out.last_hidden_state.square().sum().backward()
    patched.undo()
    halved = [graph.halved for graphs in (made.graphs if made else ()) for graph in graphs.graphs.values()]
    return halved, {name: cast("Any", value.grad) for name, value in runner.tuned.items()}


def test_rows_of_a_half_keep_their_own_positions() -> None:
    one = case("llama-causal", "lora", BACKENDS["tp"]("llama-causal", 2), blocks=WHOLE)
    halved = replace(one, plan=overlapping("tp")("llama-causal", 2))
    expected, found = on_ranks(2, own_positions, one, False), on_ranks(2, own_positions, halved, True)
    for (_, whole), (recorded, parts) in zip(expected, found, strict=True):
        assert recorded == [True] and parts.keys() == whole.keys()
        for name, value in parts.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5)
