"""Halves of a batch through all blocks of a stack are one autograd node, or go block by block where somebody
looks in between."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels.block import halves
from petune.kernels.block.call import Call
from petune.kernels.block.halved_stack import HalvedStack
from petune.kernels.block.halves import Halves
from petune.kernels.configs import MemoryConfig
from petune.models.stack import Stack
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, compare, on_ranks, oracle
from tests.parallel.plans import COMPOSED, overlapping

pytestmark = pytest.mark.usefixtures("standing")
ALL = MemoryConfig("all", offload="none")
PARKED = MemoryConfig("input", offload="input")


def _case(backend: str, method: str, blocks: MemoryConfig = ALL, **more: Any) -> Case:
    plan = overlapping(backend)("llama-causal", 2)
    return case("llama-causal", method, plan, blocks=blocks, steps=1, **({"passes": (4,)} | more))


def _counted(patched: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each node has that is made while this is patched."""
    nodes, made = list[int](), Halves.forward

    def forward(ctx: Any, blocks: Any, *given: Any) -> Tensor:
        nodes.append(len(blocks))
        return made(ctx, blocks, *given)

    patched.setattr(Halves, "forward", staticmethod(forward))
    return nodes


def _gradients(one: Case, hooked: bool, autocast: bool = False) -> tuple[list[int], dict[str, Tensor]]:
    """How many blocks each node has, and the gradients on this rank."""
    runner = harness.place(one, one.plan)
    (stack,) = (module for module in runner.model.modules() if isinstance(module, Stack))
    assert isinstance(stack.whole, HalvedStack)
    if hooked:
        stack.blocks[-1].register_forward_hook(lambda *given: None)
    batches = [harness.collate(runner.share(chosen), one) for chosen in harness.rows(one, 0)]
    with torch.autocast("cpu", torch.bfloat16, autocast), pytest.MonkeyPatch.context() as patched:
        nodes = _counted(patched)
        runner.backward(batches, harness.total(one, 0))
    found = {name: value.grad for name, value in runner.tuned.items() if value.grad is not None}
    return nodes, found


def _each(one: Case, *ways: tuple[bool, ...]) -> list[Any]:
    """`_gradients` in each of these ways, one after the other in the same ranks."""
    harness.build(one)  # remembered, as making it draws
    stream, found = torch.get_rng_state(), []
    for way in ways:
        torch.set_rng_state(stream)  # the same drops out in each
        found.append(_gradients(one, *way))
    return found


def _by_way(one: Case, *ways: tuple[bool, ...]) -> list[tuple[Any, ...]]:
    """What each rank found in each of these ways, by way."""
    return list(zip(*on_ranks(2, _each, one, *ways), strict=True))


@pytest.mark.parametrize(
    ("backend", "method", "blocks"),
    [
        *((backend, "lora", ALL) for backend in ("galaxy", "cut", "sp-ulysses")),
        # all are held against one process in test_halves
        *(
            pytest.param(backend, "lora", ALL, marks=pytest.mark.long)
            for backend in ("tp", "galaxy2", "sp-gather")
        ),
        ("galaxy", "full", PARKED),
        *(pytest.param(backend, "full", PARKED, marks=pytest.mark.long) for backend in ("tp", "sp-gather")),
    ],
)
def test_one_node_gives_what_a_node_a_block_does(backend: str, method: str, blocks: MemoryConfig) -> None:
    one = _case(backend, method, blocks, dropout=0.1, passes=(5,))
    whole, apart = _by_way(one, (False,), (True,))
    for (nodes, found), (several, expected) in zip(whole, apart, strict=True):
        assert nodes == [2] and several == [1, 1]
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("trained", [0, 1])
def test_blocks_below_and_above_what_trains_are_passed_as_block_by_block(trained: int) -> None:
    one = _case("galaxy", "lora", tuning=(("layers", (trained,)),))
    whole, apart = _by_way(one, (False,), (True,))
    for (nodes, found), (_, expected) in zip(whole, apart, strict=True):
        assert nodes == [2] and found.keys() == expected.keys()
        assert found and all(f".{trained}." in name for name in found)
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def _entered(hooked: bool) -> list[bool]:
    """Whether what entered each block but the first is there as the backward pass begins, though the host has
    it."""
    one = _case("tp", "lora", PARKED)
    runner = harness.place(one, one.plan)
    (stack,) = (module for module in runner.model.modules() if isinstance(module, Stack))
    if hooked:
        stack.blocks[-1].register_forward_hook(lambda *given: None)
    entered: list[weakref.ref[Tensor]] = []
    found: list[bool] = []
    park, held = halves.park, halves._held

    def parked(call: Call, kept: Any) -> Any:
        half = kept["x"]
        entered.append(weakref.ref(half if half._base is None else half._base))
        return park(call, kept)

    def noted(*given: Any) -> Any:
        found.extend(ref() is not None for ref in entered)
        entered.clear()
        return held(*given)

    batches = [harness.collate(runner.share(chosen), one) for chosen in harness.rows(one, 0)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(halves, "park", parked)
        patched.setattr(halves, "_held", noted)
        runner.backward(batches, harness.total(one, 0))
    return found


@pytest.mark.parametrize("hooked", [False, True])
def test_what_is_parked_is_not_held_beside(hooked: bool) -> None:
    for found in on_ranks(2, _entered, hooked):
        assert len(found) == 4 and not any(found)


def test_blocks_compute_in_what_autocast_says() -> None:
    one = _case("tp", "full")
    whole, apart, plain = _by_way(one, (False, True), (True, True), (False,))
    for (_, found), (_, expected), (_, exact) in zip(whole, apart, plain, strict=True):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)
        assert any(not torch.equal(value, exact[name]) for name, value in found.items()), "rounded"


def _staged(one: Case, limit: float) -> tuple[dict[str, Any], list[int]]:
    """The trace of steps, and how many blocks each node has."""
    with pytest.MonkeyPatch.context() as patched:
        nodes = _counted(patched)
        return harness._steps(one, limit), nodes


def test_stages_whose_blocks_ranks_share_go_in_halves_too() -> None:
    plan = COMPOSED["galaxy x pp"]("llama-causal")
    assert plan.cut is not None
    plan = replace(plan, cut=replace(plan.cut, overlap=True))
    one = case("llama-causal", "lora", plan, passes=(4,), blocks=ALL, steps=1, dropout=0.1)
    expected = oracle(one)
    found = on_ranks(4, _staged, one, expected.norms[0] / 2, timeout=90)
    compare([Trace(**trace) for trace, _ in found], expected, one)
    assert [set(nodes) for _, nodes in found] == [{2}, {2}, {1}, {1}]


def _twice() -> list[bool]:
    """Whether each gradient doubles when a graph that is kept is gone back through again."""
    one = _case("tp", "lora")
    runner = harness.place(one, one.plan)
    model: Any = runner.model
    loss = model.model(input_ids=torch.arange(28).view(4, 7)).last_hidden_state.square().sum()
    loss.backward(retain_graph=True)
    first = {name: value.grad.clone() for name, value in runner.tuned.items() if value.grad is not None}
    loss.backward()
    return [torch.allclose(grad(runner.tuned[name]), 2 * value) for name, value in first.items()]


def grad(value: Any) -> Tensor:
    assert isinstance(value.grad, Tensor)
    return value.grad


def test_a_graph_that_is_kept_is_gone_back_through_twice() -> None:
    for found in on_ranks(2, _twice):
        assert found and all(found)


def _freed() -> list[tuple[int, int]]:
    """(blocks behind it, tensors that they hold still) as each half's backward pass of a block begins."""
    one = _case("tp", "lora")
    runner = harness.place(one, one.plan)
    kept: list[list[weakref.ref[Tensor]]] = []
    found: list[tuple[int, int]] = []
    held, back = halves._held, Call.backward

    def noted(blocks: Any, saved: Any) -> Any:
        given = held(blocks, saved)
        for number, block in enumerate(given):
            kept.append([weakref.ref(value) for part in block.kept for value in part if value is not None])
            for call in set(map(id, blocks[number].calls)):
                numbers[call] = number
        return given

    numbers: dict[int, int] = {}

    def backward(self: Call, *given: Any) -> Any:
        behind = range(numbers[id(self)] + 1, len(kept))
        found.append((len(behind), sum(ref() is not None for at in behind for ref in kept[at])))
        return back(self, *given)

    batches = [harness.collate(runner.share(chosen), one) for chosen in harness.rows(one, 0)]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(halves, "_held", noted)
        patched.setattr(Call, "backward", backward)
        runner.backward(batches, harness.total(one, 0))
    return found


def test_what_a_block_has_kept_is_freed_behind_it() -> None:
    for found in on_ranks(2, _freed):
        assert [behind for behind, _ in found] == [0, 0, 1, 1]
        assert found[-1] == (1, 0), "both halves are through"
