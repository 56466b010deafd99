"""Memory that ranks read from one another; where there are no GPUs, a copy that each makes when it first
reads stands for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petune.kernels.configs import MemoryConfig
from petune.parallel import in_place, peer_memory
from petune.parallel.collectives import gather_rows_
from petune.parallel.peer_memory import PeerMemory, _linked, reachable
from petune.parallel.plan import ParallelPlan, Sharding
from tests.parallel import harness
from tests.parallel.harness import WIDE, Case, check
from tests.pool import run

CPU = torch.device("cpu")
PLAN = ParallelPlan(dp=2, shares=(2, 1), sharding=Sharding(1, reshard=True, offload=False, frozen=True))


class Copies(Sequence[Tensor]):
    """What every rank holds in `own` when it is first asked for, by all ranks together."""

    def __init__(self, own: Tensor, group: dist.ProcessGroup) -> None:
        self.own, self.group = own, group
        self.found: list[Tensor] = []

    def __len__(self) -> int:
        return self.group.size()

    def __getitem__(self, rank: Any) -> Any:
        if not self.found:
            self.found = [torch.empty_like(self.own) for _ in range(len(self))]
            dist.all_gather(self.found, self.own, group=self.group)
        return self.found[rank]


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ranks that are said to read one another's memory; the bytes of each part that is made."""
    made: list[int] = []

    def mapped(size: int, device: torch.device, group: dist.ProcessGroup) -> tuple[Tensor, Copies]:
        made.append(size)
        own = torch.full((size,), 255, dtype=torch.uint8)
        return own, Copies(own, group)

    monkeypatch.setattr(peer_memory, "mapped", mapped)
    monkeypatch.setattr(in_place, "reachable", lambda device, group: True)
    monkeypatch.setattr(in_place, "LARGE", 1)
    yield made


@pytest.mark.parametrize(
    ("name", "method", "changes"),
    [
        ("llama-causal", "lora", {"blocks": MemoryConfig("attention", "input", tile=5)}),
        ("t5-seq2seq", "side", {}),
        ("llama-causal", "lora", {"base_dtype": "nf4", "settings": WIDE["llama"]}),
        pytest.param("bert-classify", "adapter", {}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_frozen_shards_that_others_read_train_as_one_process_does(
    name: str, method: str, changes: dict[str, Any], mapped: list[int]
) -> None:
    check(Case(name, method, PLAN, steps=2, **changes))


def sent(case: Case, monkeypatch: pytest.MonkeyPatch, mapped: list[int]) -> tuple[int, list[tuple[int, ...]]]:
    """How many memories are made, and the shapes that are sent all the same."""
    found: list[tuple[int, ...]] = []

    def noted(wholes: list[Tensor], parts: list[Tensor], group: Any) -> None:
        found.extend(tuple(whole.shape) for whole in wholes)
        gather_rows_(wholes, parts, group)

    monkeypatch.setattr(in_place, "gather_rows_", noted)
    runner = harness.place(case, case.plan)
    batches = [harness.collate(runner.share(chosen), case) for chosen in harness.rows(case, 0)]
    runner.backward(batches, harness.total(case, 0))
    return len(mapped), found


def test_every_block_has_a_memory_and_none_of_its_frozen_shards_is_sent(
    mapped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("llama-causal", "lora", PLAN)
    model: Any = harness.build(case)
    block = {tuple(value.shape) for value in model.model.layers[0].parameters() if not value.requires_grad}
    tuned = {tuple(value.shape) for value in model.parameters() if value.requires_grad}
    for memories, shapes in run(2, sent, case, monkeypatch, mapped):
        assert memories == len(model.model.layers)
        assert shapes and not {shape for shape in shapes if len(shape) > 1} & (block - tuned)


def _read() -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    rank, ranks = group.rank(), group.size()
    parts = [torch.arange(6.0).view(2, 3) + 10 * rank, torch.full((1, 5), rank, dtype=torch.bfloat16)]
    own = [part.clone() for part in parts]
    memory = PeerMemory(own, group)
    assert all(value.data_ptr() >= memory.own.data_ptr() for value in own)
    assert all(map(torch.equal, own, parts))
    wholes = [own[1].new_empty(ranks, 5), own[0].new_empty(2 * ranks, 3)]
    places = [
        place for whole, number in zip(wholes, (1, 0), strict=True) for place in memory.places(whole, number)
    ]
    for whole in wholes:  # freed and taken again, as FSDP2 does
        whole.untyped_storage().resize_(0)
        whole.untyped_storage().resize_(whole.nbytes)
    for place, part in places:
        place.copy_(part)
    return wholes


@pytest.mark.usefixtures("mapped")
@pytest.mark.parametrize("ranks", [2, 3])
def test_wholes_are_the_rows_of_every_rank_in_order(ranks: int) -> None:
    for narrow, wide in run(ranks, _read):
        assert torch.equal(narrow, torch.arange(ranks).bfloat16()[:, None].expand(-1, 5))
        assert torch.equal(wide, torch.cat([torch.arange(6.0).view(2, 3) + 10 * at for at in range(ranks)]))


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """The names of groups whose ranks meet in torch's symmetric memory, each with the pool that was used."""
    symmetric = import_module("torch.distributed._symmetric_memory")
    used: list[Any] = []
    found: list[tuple[str, Any]] = []

    class Pool:
        def __init__(self, allocator: str, no_split: bool) -> None:
            assert allocator == "of cpu" and no_split

    @contextmanager
    def using(pool: Pool, device: torch.device) -> Iterator[None]:
        used.append(ref(pool))
        yield

    def exchanged(own: Tensor, group: str) -> Any:
        found.append((group, used[-1]))
        return SimpleNamespace(get_buffer=lambda rank, size, dtype: own)

    monkeypatch.setattr(symmetric, "get_mempool_allocator", lambda device: f"of {device}")
    monkeypatch.setattr(symmetric, "rendezvous", exchanged)
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", using)
    monkeypatch.setattr(peer_memory, "_alone", lambda world: "nobody")
    monkeypatch.setattr(peer_memory, "_made", 0)
    yield found


def mapped_beside(others: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Sequence[Tensor]]:
    """64 bytes of a group whose other rank has met others so often."""
    monkeypatch.setattr(
        peer_memory, "gather_dim", lambda own, sizes, dim, group: torch.cat([own, torch.tensor([others])])
    )
    group: Any = SimpleNamespace(size=lambda: 2, group_name="both")
    return peer_memory.mapped(64, CPU, group)


def test_memory_that_a_rank_has_freed_is_not_taken_again(
    met: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that rank alone: others may free it later, as garbage is collected when it likes."""
    first, every = mapped_beside(0, monkeypatch)
    second = mapped_beside(1, monkeypatch)
    one, two = (pool for _, pool in met)
    assert len(every) == 2 and one() is not two(), "a pool each"
    del first, every
    assert one() is None and two() is not None, "which lives as long as its memory"
    assert second[0].shape == (64,)


def test_a_rank_that_has_met_others_less_often_meets_nobody_until_it_is_as_far(
    met: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch looks for the ranks of a group where its own count of meetings, of whatever groups, stands."""
    for others in (0, 4, 2):
        mapped_beside(others, monkeypatch)
    assert [name for name, _ in met] == ["both", *["nobody"] * 3, "both", "both"]


def test_memory_is_read_on_one_host_between_linked_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 3 not in (one, other))
    assert _linked([[7, 0], [7, 1], [7, 2]])
    assert not _linked([[7, 0], [8, 1]]), "two hosts"
    assert not _linked([[7, 0], [7, 0]]), "each sees one GPU, or both have the same"
    assert not _linked([[7, 0], [7, 1], [7, 3]]), "one has no link"
    assert run(2, lambda: reachable(CPU, dist.group.WORLD)) == [False, False]  # type: ignore[arg-type]


def _tried(forbidden: int) -> tuple[bool, list[str]]:
    """Whether ranks reach one another that are told to be linked, of which one may not map memory."""
    said: list[str] = []
    rank = dist.get_rank()

    def mapped(size: int, device: torch.device, group: dist.ProcessGroup) -> None:
        if rank == forbidden:
            raise RuntimeError("pidfd_getfd: Operation not permitted")

    stand_ins: dict[tuple[Any, str], Any] = {
        (peer_memory, "_linked"): lambda ranks: True,
        (peer_memory, "mapped"): mapped,
        (peer_memory, "say"): said.append,
        (torch.cuda, "current_device"): lambda: rank,
    }
    for (place, name), value in stand_ins.items():  # in this very process, which ends soon
        setattr(place, name, value)
    group = dist.group.WORLD
    assert group is not None
    return peer_memory._reach(CPU, group), said


def test_gpus_that_may_not_map_memory_send_and_say_why() -> None:
    assert run(2, _tried, -1) == [(True, []), (True, [])]
    (one, said), (other, silent) = run(2, _tried, 0)
    assert (one, other) == (False, False), "all ranks alike"
    assert "Operation not permitted" in said[0] and not silent
