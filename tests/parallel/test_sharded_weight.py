"""A quantised base whose weights are spread over ranks: the numbers of one process, a part of its bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from petune.kernels.configs import MemoryConfig
from petune.kernels.fuse import fused_blocks
from petune.kernels.memory.policy_hook import shape_of
from petune.models import family_of
from petune.models.form import Form
from petune.models.fp8 import Fp8
from petune.models.frozen_weight import QuantisedWeight, bytes_in, quantised_in
from petune.models.quantise import quantise_blocks
from petune.parallel import in_place
from petune.parallel.fsdp import gathered, local
from petune.parallel.plan import ParallelPlan, Sharding
from petune.parallel.sharded_weight import ShardedWeight
from tests.parallel import harness
from tests.parallel.harness import WIDE, Case, check, collate, rows, total
from tests.pool import run

PLAIN = Sharding(replicas=1, reshard=True, offload=False, frozen=True)
LESS = MemoryConfig("attention", "input", tile=5)


def plan_of(world: int, **changes: Any) -> ParallelPlan:
    """Shares are uneven."""
    return ParallelPlan(dp=world, shares=(2, *(1,) * (world - 1)), sharding=replace(PLAIN, **changes))


def case(name: str, method: str, form: str, world: int, **changes: Any) -> Case:
    """A case of shards over as many ranks."""
    settings = WIDE[name.partition("-")[0]] if form != "int8" else ()
    return Case(name, method, plan_of(world), **{"base_dtype": form, "settings": settings, **changes})


@pytest.mark.parametrize(
    ("name", "method", "form", "world", "blocks", "steps"),
    [
        ("llama-causal", "lora", "nf4", 3, LESS, 1),
        ("t5-seq2seq", "side", "nf4", 2, None, 2),
        ("bert-classify", "adapter", "int8", 3, None, 1),
        pytest.param("t5-seq2seq", "lora", "int8", 2, LESS, 2, marks=pytest.mark.long),
    ],
)
def test_steps_over_shards_are_those_of_one_process(
    name: str, method: str, form: str, world: int, blocks: MemoryConfig | None, steps: int
) -> None:
    check(case(name, method, form, world, blocks=blocks, steps=steps))


def test_replicas_of_shards_and_whole_frozen_weights_train_as_one_process() -> None:
    narrow = (("hidden_size", 64), ("intermediate_size", 128))
    both = {"blocks": LESS, "passes": (6,), "steps": 1, "settings": narrow}
    check(replace(case("llama-causal", "lora", "nf4", 4, **both), plan=plan_of(4, replicas=2)))
    check(replace(case("llama-causal", "lora", "nf4", 2, **both), plan=plan_of(2, frozen=False)))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("form", ["nf4", "int8", "fp8"])
def test_what_is_gathered_is_the_quantised_whole_bit_by_bit(
    form: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FSDP2's message where ranks have unequally many rows, else in place."""
    monkeypatch.setattr(in_place, "LARGE", 1)
    one = case("llama-causal", "lora", form, world, settings=WIDE["llama"])
    whole = harness.build(one)
    quantise_blocks(whole, family_of(whole), form)
    expected = _held(cast("Any", whole).model.layers[0])

    def part() -> tuple[bool, set[bool]]:
        block = cast("Any", harness.place(one, one.plan).model).model.layers[0]
        every = {
            name: value for name, value in block.named_parameters() if isinstance(local(value), ShardedWeight)
        }
        shards = {name: _values(local(value)) for name, value in every.items()}
        beside = {"fsdp_pre_all_gather" in value._local_tensor.__dict__ for value in every.values()}
        block.unshard()
        same = all(
            torch.equal(shards[name], _values(value)[_rows_of(len(value), world)])
            for name, value in block.named_parameters()
            if name in shards
        )
        found = _held(block)
        return same and all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), beside

    assert run(world, part) == [(True, {world == 2})] * world


def _rows_of(rows: int, ranks: int) -> slice:
    size = -(-rows // ranks)
    return slice(size * dist.get_rank(), min(rows, size * (dist.get_rank() + 1)))


def _values(weight: Tensor) -> Tensor:
    assert isinstance(weight, QuantisedWeight)
    return weight.form.dense()


def _held(block: Any) -> list[Tensor]:
    found = [
        value.view(torch.uint8)
        for _, _, one in quantised_in(block)
        for value in (*bytes_in(one), one.form.dense())
    ]
    assert found
    return found


@pytest.mark.parametrize("form", ["nf4", "int8", "fp8"])
def test_fused_blocks_multiply_gathered_weights_by_their_kernels(form: str) -> None:
    """Not by the products of the weight itself, which plain torch makes dense."""
    one = case("llama-causal", "lora", form, 2, blocks=LESS, settings=WIDE["llama"])

    def part() -> float:
        runner = harness.place(one, one.plan)
        batches = [collate(runner.share(chosen), one) for chosen in rows(one, 0)]
        with pytest.MonkeyPatch.context() as patch:
            for kind in (Form, Fp8):
                for product in ("linear", "dlinear"):
                    patch.setattr(kind, product, _unfused)
            return float(runner.backward(batches, total(one, 0), one.key))

    losses = run(2, part)
    assert losses[0] == losses[1]


def _unfused(*_: Any) -> Tensor:
    raise AssertionError("a block went past the kernels")


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_holds_its_part_of_the_quantised_bytes_and_nothing_dense(world: int) -> None:
    one = case("llama-causal", "lora", "nf4", world, blocks=LESS)
    whole = harness.build(one)
    quantise_blocks(whole, family_of(whole), "nf4")
    full = sum(value.nbytes for _, _, value in quantised_in(whole))
    beside = sum(value.form.nested.nbytes + 4 for _, _, value in quantised_in(whole))
    blocks = [list(block.parameters()) for block in cast("Any", whole).model.layers]

    def part() -> tuple[int, int, float]:
        model = harness.place(one, one.plan).model
        layers = cast("Any", model).model.layers
        own = [local(value) for value in model.parameters()]
        cut = [list(block.parameters()) for block in layers]
        held = sum(value.nbytes for value in own if isinstance(value, ShardedWeight))
        return held, gathered(cut, [], PLAIN), shape_of(fused_blocks(model)[0].spec).made

    found = run(world, part)
    assert sum(held for held, *_ in found) == full + beside * (world - 1)
    assert all(held <= full / world * 1.02 + beside for held, *_ in found)
    for _, together, made in found:
        assert abs(together - gathered(blocks, [], PLAIN)) <= 2 * beside
        assert made == pytest.approx(0.5 + 1 / 64)
