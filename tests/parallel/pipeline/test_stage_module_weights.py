"""The pass for weights of zero-bubble: fused blocks leave the products of weights for it, each is made once,
and what they have kept is no more than is planned with. Beside a frozen base there is none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petune.kernels.block.rows import Sink
from petune.kernels.configs import MemoryConfig
from petune.kernels.dispatch import select
from petune.kernels.fuse import fused_blocks
from petune.kernels.head.hooks import fuse_head
from petune.kernels.memory.buffers import waiting_bytes
from petune.kernels.memory.policy_hook import shape_of
from petune.methods import lora_node
from petune.parallel.pipeline.stage_module import Chunk
from petune.parallel.runner import Runner
from tests.methods.zoo import FOUR
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, check, collate, compare, oracle, place, rows, total
from tests.parallel.plans import BACKENDS, LOOPED
from tests.pool import run

long = pytest.mark.long
ZERO = LOOPED["pp-zero-bubble"]
KEPT = [
    MemoryConfig("all"),
    MemoryConfig("projections", tile=7),
    MemoryConfig("attention", offload="attention"),
    MemoryConfig("input", tile=5, offload="input"),
]


def in_backward() -> bool:
    """Whether autograd is going back at this moment."""
    return torch._C._current_graph_task_id() != -1


def storages(values: Any) -> dict[int, int]:
    """Bytes of the tensors among these, by where they lie."""
    found = (value.untyped_storage() for value in values if isinstance(value, Tensor))
    return {one.data_ptr(): one.nbytes() for one in found}


def _watched(one: Case, limit: float) -> dict[str, Any]:
    """The trace of steps, how many products of weights there were, and how many of these in which pass, and
    for each backward pass the bytes that waited and those that are planned with."""
    count, waited = Counter[str](), list[tuple[int, int]]()
    learn, weights = Sink.learn, Chunk.weights

    def learning(self: Sink, at: int, product: Callable[..., Tensor], *matrices: Any) -> None:
        count["asked"] += 1
        versions = [own._version for own in matrices if isinstance(own, Tensor)]

        def counted(*held: Any) -> Tensor:
            count["within" if in_backward() else "later"] += 1
            assert versions == [own._version for own in held if isinstance(own, Tensor)], "changed meanwhile"
            return product(*held)

        learn(self, at, counted, *matrices)

    def leaving(self: Chunk) -> Callable[[], None]:
        held: dict[int, int] = {}
        for _, products in self.late:
            for product in products:
                held |= storages(product.args)  # type: ignore[attr-defined]  # a partial
        tokens = sum(len(product.args[1]) for product in self.late[0][1])  # type: ignore[attr-defined]
        planned = sum(waiting_bytes(shape_of(block.spec)) for block in fused_blocks(self.model))
        waited.append((sum(held.values()), tokens * planned))
        return weights(self)

    Sink.learn, Chunk.weights = learning, leaving  # type: ignore[method-assign]  # this process ends soon
    return {"trace": harness._steps(one, limit), "count": count, "waited": waited}


CASES = [
    pytest.param(name, at, {}, marks=() if (name, at) == ("llama-causal", 3) else long)
    for name in (*FOUR, "gpt2-causal", "mixtral-causal")
    for at in range(4)
]


@pytest.mark.parametrize(
    ("name", "kept", "settings"),
    [*CASES, pytest.param("llama-causal", 0, {"tie_word_embeddings": True}, marks=long)],
)
def test_products_of_weights_wait_for_their_pass_and_are_made_once(
    name: str, kept: int, settings: dict[str, Any]
) -> None:
    one = case(name, "full", ZERO(name, 2), steps=1, blocks=KEPT[kept])
    one = replace(one, settings=one.settings + tuple(settings.items()))
    expected = oracle(one)
    found = run(2, _watched, one, expected.norms[0] / 2)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for rank in found:
        assert rank["count"].keys() == {"asked", "later"}
        assert rank["count"]["later"] == rank["count"]["asked"] > 0
        if name == "llama-causal":  # one length of all that blocks read
            assert all(held == planned for held, planned in rank["waited"])


@long
@pytest.mark.parametrize("axis", ["tp", "galaxy", "sp-gather", "sp-ulysses"])
def test_what_waits_is_what_it_was_where_ranks_share_blocks(axis: str) -> None:
    """Ranks sum in place what they hold of hidden states and gradients."""
    name, plan = "llama-causal", BACKENDS[axis]("llama-causal", 2)
    plan = replace(ZERO(name, 2), tp=plan.tp, cut=plan.cut)
    one = case(name, "full", plan, steps=1, blocks=KEPT[2])
    expected = oracle(one)
    found = run(4, _watched, one, expected.norms[0] / 2)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert all(rank["count"].keys() == {"asked", "later"} for rank in found)


@long
def test_a_forgotten_pass_for_weights_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunk, "weights", lambda chunk: chunk.late.clear)
    with pytest.raises(AssertionError, match="gradients of the first step"):
        check(case("llama-causal", "full", ZERO("llama-causal", 2), steps=1, blocks=KEPT[0]))


# ------------------------------------------------------------------ where nothing waits


def _nodes(one: Case) -> dict[str, Any]:
    """How many nodes of LoRA went back in one step, how many of these again, and whether stages split."""
    count, back = {"nodes": 0, "again": 0}, lora_node._Node.backward

    def counting(ctx: Any, *grads: Any) -> Any:
        count["again" if hasattr(ctx, "gone") else "nodes"] += 1
        ctx.gone = True
        return back(ctx, *grads)

    lora_node._Node.backward = staticmethod(counting)  # type: ignore[method-assign]  # this process ends soon
    runner = place(one, one.plan)
    runner.backward([collate(rows(one, 0)[0], one)], total(one, 0))
    assert runner.pipeline is not None
    return count | {"split": any(chunk.splits or chunk.leaves for chunk in runner.pipeline.chunks)}


@pytest.mark.parametrize("blocks", [None, pytest.param(KEPT[0], marks=long)])
def test_beside_a_frozen_base_the_backward_pass_is_one(blocks: MemoryConfig | None) -> None:
    name = "llama-causal"
    for rank in run(2, _nodes, case(name, "lora", ZERO(name, 2), blocks=blocks)):
        assert not rank["split"] and rank["again"] == 0 and (rank["nodes"] > 0) == (blocks is None)


def test_a_loss_without_logits_behind_unfused_blocks_goes_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own = harness.place

    def placed(one: Case, plan: Any, model: nn.Module | None = None) -> Runner:
        runner = own(one, plan, model)
        if runner.pipeline is not None and runner.pipeline.chunks[-1].last:
            ops = select("reference", torch.device("cpu"), torch.float32)
            assert ops is not None and fuse_head(runner.modules[-1], ops)
        return runner

    monkeypatch.setattr(harness, "place", placed)
    check(case("llama-causal", "full", ZERO("llama-causal", 2), steps=1))
