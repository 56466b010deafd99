"""Tensors parked on the host: the values come back whatever the order, one block ahead at most, through
buffers that later steps use again.

A CPU has no streams, so what they may do is played out: a copy that a stream was given happens only when
somebody waits for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.configs import Rung
from petune.kernels.memory import offload
from petune.kernels.memory.offload import Parked, Passing, Store
from petune.rng.context import bound
from tests.kernels.fused_pairs import METHODS, assert_alike, batch, blocks, gradients, pair, stand_on

CPU = torch.device("cpu")
RUNGS = [
    Rung("all", "input"),
    Rung("projections", "input"),
    Rung("input", "input"),
    Rung("attention", "attention"),
]


def tensors(number: int, rows: int = 3) -> dict[str, Tensor]:
    """What block `number` parks: of two dtypes, one strided."""
    return {
        "x": torch.full((rows, 4), float(number)),
        "a": torch.arange(2 * rows * 3, dtype=torch.bfloat16).view(rows, 6)[:, ::2] + number,
    }


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name


@pytest.fixture
def brought(monkeypatch: pytest.MonkeyPatch) -> list[Parked]:
    """The blocks whose tensors were brought back, in order."""
    seen: list[Parked] = []
    bring = Store._bring

    def record(self: Store, parked: Parked) -> None:
        if parked.back is None:
            seen.append(parked)
        bring(self, parked)

    monkeypatch.setattr(Store, "_bring", record)
    return seen


# ------------------------------------------------------------------ the store


def test_tensors_come_back_with_their_values_shapes_and_dtypes() -> None:
    store, sent = Store(CPU), tensors(7)
    assert_same(store.fetch(store.park(sent)), sent)


def test_tensors_without_rows_come_back() -> None:
    store, sent = Store(CPU), {"x": torch.empty(0, 4)}
    assert_same(store.fetch(store.park(sent)), sent)


def test_the_parked_copy_does_not_follow_the_original() -> None:
    store, x = Store(CPU), torch.ones(3, 4)
    parked = store.park({"x": x})
    x.zero_()
    assert torch.equal(store.fetch(parked)["x"], torch.ones(3, 4))


def test_fetching_backwards_brings_one_block_ahead_and_no_more(brought: list[Parked]) -> None:
    store = Store(CPU)
    parked = [store.park(tensors(number)) for number in range(4)]
    assert not brought
    for at in (3, 2, 1, 0):
        assert_same(store.fetch(parked[at]), tensors(at))
        assert brought == parked[max(at - 1, 0) :][::-1]
        assert [one.back is not None for one in parked] == [one == at - 1 for one in range(4)]


def test_any_order_gives_the_right_values() -> None:
    store = Store(CPU)
    parked = [store.park(tensors(number, rows=number + 1)) for number in range(5)]
    for at in (2, 4, 0, 1, 3):
        assert_same(store.fetch(parked[at]), tensors(at, rows=at + 1))
    assert not store.waiting


def test_in_the_order_of_a_pipeline_the_copy_ahead_is_of_the_same_pass(brought: list[Parked]) -> None:
    store = Store(CPU)
    first, second = ([store.park(tensors(number)) for number in range(3)] for _ in range(2))
    store.fetch(first[2])
    assert brought == [first[2], first[1]]
    assert second[2].back is None


def test_at_the_first_block_of_a_pass_the_last_one_of_its_follower_is_brought(brought: list[Parked]) -> None:
    store, last = Store(CPU), Passing()
    passes, parked = [Passing(last), last], []
    for passing in passes:
        with bound(passing=passing):
            parked.append([store.park(tensors(number)) for number in range(2)])
    for own in parked:
        while own:
            store.fetch(own.pop())
    assert [list(map(brought.index, brought)), len(brought)] == [[0, 1, 2, 3], 4]
    assert not store.waiting


def test_a_follower_that_has_not_begun_is_not_waited_for(brought: list[Parked]) -> None:
    store = Store(CPU)
    with bound(passing=Passing(Passing())):
        parked = store.park(tensors(1))
    store.fetch(parked)
    assert brought == [parked]


def test_buffers_of_one_step_serve_the_next() -> None:
    store = Store(CPU)
    sizes = []
    for _ in range(4):
        parked = [store.park(tensors(number)) for number in range(3)]
        while parked:
            store.fetch(parked.pop())
        sizes.append(store.pinned)
    assert sizes == [3 * sum(value.nbytes for value in tensors(0).values())] * 4


def test_buffers_in_use_are_nobody_elses() -> None:
    store = Store(CPU)
    parked = [store.park(tensors(number)) for number in range(6)]
    addresses = [buffer.data_ptr() for one in parked for buffer in one.host.values()]
    assert len(set(addresses)) == len(addresses)


def test_unequal_batches_share_their_buffers() -> None:
    store = Store(CPU)
    for rows in (16, 15, 14, 13, 12, 16, 11):
        parked = [store.park({"x": torch.ones(rows, 8)}) for _ in range(3)]
        while parked:
            store.fetch(parked.pop())
    assert store.pinned <= 2 * 3 * 16 * 8 * 4


@pytest.mark.slow
def test_what_is_never_fetched_gives_its_buffers_back() -> None:
    store = Store(CPU)
    for _ in range(2):
        parked = [store.park(tensors(number)) for number in range(3)]
        del parked
        gc.collect()
    assert store.pinned == 3 * sum(value.nbytes for value in tensors(0).values())


@pytest.mark.slow
def test_what_is_never_fetched_leaves_the_queue() -> None:
    store = Store(CPU)
    for _ in range(2):
        store.park(tensors(0))
        gc.collect()
    assert len(store.waiting) <= 1


def test_what_is_never_fetched_does_not_disturb_the_order_of_what_is(brought: list[Parked]) -> None:
    store = Store(CPU)
    lost = [store.park(tensors(9)) for _ in range(2)]
    parked = [store.park(tensors(number)) for number in range(2)]
    del lost
    gc.collect()
    assert_same(store.fetch(parked[1]), tensors(1))
    assert brought == [parked[1], parked[0]]
    assert_same(store.fetch(parked[0]), tensors(0))
    assert len(brought) == 2 and not store.waiting


# ------------------------------------------------------------------ streams


class Later:
    """A stream on which nothing happens until somebody waits for it; `done` is how much has."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0

    def add(self, action: Callable[[], object]) -> None:
        self.queue.append(action)

    def run(self, until: int) -> None:
        while self.done < until:
            action, self.done = self.queue[self.done], self.done + 1
            action()

    def record_event(self) -> tuple[Later, int]:
        return self, len(self.queue)

    def wait_event(self, event: tuple[Later, int]) -> None:
        self.add(lambda: event[0].run(event[1]))

    def wait_stream(self, other: Later) -> None:
        self.wait_event(other.record_event())


class Now(Later):
    """The computing stream: what it is told to wait for has happened then."""

    def wait_event(self, event: tuple[Later, int]) -> None:
        event[0].run(event[1])


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A store with streams, and how many tensors were told that a stream other than their own uses them."""
    made = SimpleNamespace(store=Store(CPU), compute=Now(), recorded=[])
    made.store.out, made.store.into = Later(), Later()
    inside: list[Later] = []

    @contextmanager
    def stream(one: Later) -> Iterator[None]:
        inside.append(one)
        yield
        inside.pop()

    copy = Tensor.copy_

    def copy_later(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if inside and non_blocking:
            inside[-1].add(partial(copy, self, source))
            return self
        return copy(self, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", copy_later)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda self, one: made.recorded.append((self.data_ptr(), one))
    )
    monkeypatch.setattr(offload.torch.cuda, "stream", stream)
    monkeypatch.setattr(offload.torch.cuda, "current_stream", lambda device: made.compute)
    yield made


def test_what_is_fetched_has_been_waited_for(lazy: SimpleNamespace) -> None:
    parked = [lazy.store.park(tensors(number)) for number in range(3)]
    for at in (2, 1, 0):
        assert_same(lazy.store.fetch(parked[at]), tensors(at))


def test_a_fetch_that_does_not_wait_is_seen(lazy: SimpleNamespace) -> None:
    lazy.compute.wait_event = lambda event: None  # the fault
    parked = [lazy.store.park(tensors(number)) for number in range(3)]
    assert not torch.equal(lazy.store.fetch(parked[2])["x"], tensors(2)["x"])


def test_a_copy_back_that_does_not_wait_for_the_copy_out_is_seen(lazy: SimpleNamespace) -> None:
    lazy.store.into.wait_event = lambda event: None  # the fault
    parked = lazy.store.park(tensors(5))
    for buffer in parked.host.values():
        buffer.zero_()
    assert not torch.equal(lazy.store.fetch(parked)["x"], tensors(5)["x"])


def test_the_next_steps_copies_wait_for_the_last_of_this_one(lazy: SimpleNamespace) -> None:
    first = [lazy.store.park(tensors(number)) for number in range(3)]
    kept = [lazy.store.fetch(first[2])]  # brings block 1 back too, which is not waited for
    del first
    gc.collect()
    second = [lazy.store.park(tensors(10 + number)) for number in range(3)]
    assert_same(kept[0], tensors(2))
    for at in (2, 1, 0):
        assert_same(lazy.store.fetch(second[at]), tensors(10 + at))


def test_memory_of_what_is_parked_is_not_given_away_before_it_is_copied(lazy: SimpleNamespace) -> None:
    sent = tensors(1)
    lazy.store.park(sent)
    assert {(value.data_ptr(), lazy.store.out) for value in sent.values()} <= set(lazy.recorded)


def test_memory_of_a_dropped_prefetch_is_not_given_away_before_its_copy_has_ended(
    lazy: SimpleNamespace,
) -> None:
    parked = [lazy.store.park(tensors(number)) for number in range(2)]
    lazy.store.fetch(parked[1])
    ahead = parked[0].back
    assert ahead is not None
    addresses, before = {value.data_ptr() for value in ahead.values()}, lazy.store.into.done
    parked.clear()
    del ahead
    gc.collect()
    waited = lazy.store.into.done > before
    assert waited or addresses <= {address for address, _ in lazy.recorded}


# ------------------------------------------------------------------ pinning


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The CUDA runtime's two calls, which note what they were given; `result` is what locking returns."""
    made = SimpleNamespace(locked=[], freed=[], result=0)

    def lock(address: int, size: int, flags: int) -> int:
        made.locked.append((address, size))
        return made.result

    made.cudaHostRegister, made.cudaHostUnregister = lock, made.freed.append
    monkeypatch.setattr(offload.torch.cuda, "cudart", lambda: made)
    return made


def test_a_buffer_is_locked_at_its_exact_size_and_unlocked_when_it_goes(runtime: SimpleNamespace) -> None:
    buffer = torch.empty(1000, dtype=torch.uint8)
    address = buffer.data_ptr()
    offload.pin(buffer)
    assert runtime.locked == [(address, 1000)] and not runtime.freed
    view = buffer[:10]
    del buffer
    gc.collect()
    assert not runtime.freed
    del view
    gc.collect()
    assert runtime.freed == [address]


def test_a_host_that_has_no_more_to_lock_says_what_to_set(runtime: SimpleNamespace) -> None:
    runtime.result = 2
    with pytest.raises(offload.MachineError, match=r"memory\.host"):
        offload.pin(torch.empty(8, dtype=torch.uint8))


# ------------------------------------------------------------------ in a model


@pytest.fixture(autouse=True)
def _float64(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models are float64; the store's own tests bring their dtypes."""
    torch.set_default_dtype(
        torch.float64 if "rung" in request.fixturenames or "model" in request.node.name else torch.float32
    )
    yield
    torch.set_default_dtype(torch.float32)


def body(model: Any, ids: Tensor) -> Tensor:
    """A number of the last hidden states, whose graph may be gone through twice."""
    return model.model(input_ids=ids, use_cache=False)[0].square().sum()


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.keep}-{rung.offload}")
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first in first out", "last in first out"])
def test_two_forwards_before_two_backwards_of_unequal_batches_in_a_model(
    order: tuple[int, int], rung: Rung
) -> None:
    fused, plain = pair("llama", METHODS["lora"])
    stand_on(fused, rung)
    inputs = batch("llama")
    found = []
    for model in (fused, plain):
        losses = [
            model(**{name: value[:, :length] for name, value in inputs.items()}, use_cache=False).loss
            for length in (9, 7)
        ]
        for at in order:
            losses[at].backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, rtol=2e-5, atol=2e-6 * float(value.abs().max()))
    assert not blocks(fused)[0].spec.store.waiting


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.keep}-{rung.offload}")
def test_a_model_that_fails_half_way_or_whose_loss_is_dropped_goes_on_as_before(rung: Rung) -> None:
    fused, plain = pair("llama", METHODS["lora"])
    stand_on(fused, rung)
    gradients(fused, batch("llama"))
    store = blocks(fused)[0].spec.store
    pinned = store.pinned
    assert pinned > 0

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    handle = fused.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        gradients(fused, batch("llama"))
    handle.remove()
    for _ in range(3):
        fused(**batch("llama"), use_cache=False)
    gc.collect()
    assert_alike(fused, plain, batch("llama"), 2e-6)
    assert store.pinned == pinned


def test_accumulating_over_a_model_pins_no_more_than_one_batch() -> None:
    fused, _ = pair("llama", METHODS["lora"])
    stand_on(fused, Rung("input", "input"))
    for _ in range(4):
        fused(**batch("llama"), use_cache=False).loss.backward()
    # blocks, tokens without padding, width, float64
    assert blocks(fused)[0].spec.store.pinned == 3 * 15 * 32 * 8


def test_a_model_parks_nothing_without_gradients() -> None:
    fused, _ = pair("llama", METHODS["lora"])
    stand_on(fused, Rung("attention", "attention"))
    with torch.no_grad():
        fused(**batch("llama"))
    assert blocks(fused)[0].spec.store.pinned == 0


@pytest.mark.parametrize("rung", [Rung("all"), Rung("input")], ids=lambda rung: f"{rung.keep}-{rung.offload}")
def test_a_graph_of_a_model_that_is_kept_can_be_gone_through_twice(rung: Rung) -> None:
    fused, _ = pair("llama", METHODS["lora"])
    stand_on(fused, rung)
    value = body(fused, batch("llama")["input_ids"])
    value.backward(retain_graph=True)
    once = {name: one.grad.clone() for name, one in fused.named_parameters() if one.grad is not None}
    value.backward()
    for name, one in fused.named_parameters():
        if name in once:
            assert torch.equal(one.grad, 2 * once[name]), name


@pytest.mark.parametrize(
    "rung",
    [Rung("input", "input"), Rung("attention", "attention")],
    ids=lambda rung: f"{rung.keep}-{rung.offload}",
)
def test_a_second_pass_through_what_a_model_had_parked_is_refused_in_words(rung: Rung) -> None:
    fused, plain = pair("llama", METHODS["lora"])
    stand_on(fused, rung)
    value = body(fused, batch("llama")["input_ids"])
    value.backward(retain_graph=True)
    with pytest.raises(UsageError, match="gone after the first backward pass"):
        value.backward()
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_what_a_model_keeps_on_the_device_is_seen_by_hooks_on_saved_tensors() -> None:
    sizes = {}
    for rung in (Rung("all"), Rung("projections"), Rung("attention"), Rung("input"), Rung("input", "input")):
        fused, _ = pair("llama", METHODS["lora"])
        stand_on(fused, rung)
        own = {value.untyped_storage().data_ptr() for value in fused.parameters()}
        seen: dict[int, int] = {}

        def pack(value: Tensor, own: set[int] = own, seen: dict[int, int] = seen) -> Tensor:
            if value.untyped_storage().data_ptr() not in own:
                seen[value.data_ptr()] = value.nbytes
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            body(fused, batch("llama")["input_ids"])
        sizes[rung] = sum(seen.values())
    row = 3 * 18 * 8  # bytes of a column of all blocks
    # gate | up and its s
    assert sizes[Rung("all")] - sizes[Rung("projections")] == pytest.approx(row * (2 * 56 + 8), rel=0.01)
    assert sizes[Rung("projections")] - sizes[Rung("attention")] > row * (64 + 32)  # q | k | v and r
    assert sizes[Rung("attention")] - sizes[Rung("input")] >= 0
    assert sizes[Rung("input")] - sizes[Rung("input", "input")] == row * 32
