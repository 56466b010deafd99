"""Sharded training against one process: the same loss, gradients and steps, with a share of the memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from petune.errors import PetuneError
from petune.kernels.configs import MemoryConfig
from petune.methods import tuned_parameters, wrap
from petune.models import family_of
from petune.models.sharded import class_of
from petune.models.stack import own_stacks
from petune.parallel import fsdp, in_place
from petune.parallel.collectives import gather_dim
from petune.parallel.fsdp import (
    chunks,
    copies,
    first_row,
    is_light,
    is_sharded,
    local,
    shard,
    weighed,
    wholes,
)
from petune.parallel.mesh import Mesh, make_mesh
from petune.parallel.plan import Cut, ParallelPlan, Sharding, Stage, apportion
from petune.parallel.tensor import hooks, shard_params
from petune.parallel.tensor.vocabulary import cut_vocabulary, hook_vocabulary, vocabulary_losses
from petune.run.evaluate import forward
from petune.tasks.loss import loss_sum, trained_positions
from tests.methods.zoo import FOUR, GENERATE, SETTINGS, assert_same_gradients, batch, prompt, stir, tiny
from tests.parallel import harness
from tests.parallel.harness import Case, check
from tests.pool import run

PLAIN = Sharding(replicas=1, reshard=True, offload=False, frozen=True)
Tensors = dict[str, Tensor]


def plan_of(world: int, sharding: Sharding = PLAIN, **changes: Any) -> ParallelPlan:
    return ParallelPlan(dp=world, shares=(1,) * world, sharding=sharding, **changes)


def model_of(
    name: str,
    method: str,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    tied: bool | None = None,
    **settings: Any,
) -> Any:
    """A tuned model whose tuning is no longer an identity, with its stacks owned; the same in every
    process."""
    model = tiny(name, **({} if tied is None else {"tie_word_embeddings": tied})).to(dtype)
    wrap(model, method, **{**SETTINGS[method], **settings})
    for stack in own_stacks(model, family_of(model)).values():
        stack.recompute = recompute
    stir(model, std=0.05)
    return model.train()


def task_of(name: str) -> str:
    return {"causal": "causal", "classify": "classify", "seq2seq": "seq2seq", "tokens": "seq2seq"}[
        name.split("-")[1]
    ]


def data_of(name: str, rows: int = 5) -> Tensors:
    return batch(name, rows=rows, length=12)


def loss_of(model: nn.Module, name: str, rows: Tensors, total: float) -> Tensor:
    return loss_sum(forward(model, rows), rows, task_of(name))[0] / total


def total_of(name: str, rows: Tensors) -> float:
    labels = rows["labels"]
    return (
        float(len(labels))
        if labels.dim() == 1
        else float((labels[:, 1:] if task_of(name) == "causal" else labels).ne(-100).sum())
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """A large epsilon, as some gradients are zero but for rounding (a key's bias) and Adam would blow the
    rounding up."""
    return torch.optim.AdamW(tuned_parameters(model).values(), lr=1e-2, eps=1e-3)


def alone(model: nn.Module, name: str, rows: Tensors, steps: int = 2) -> dict[str, Any]:
    """What one process makes of it: loss and gradients of the first step, tensors after `steps` of AdamW
    under clipping."""
    optimizer = adamw(model)
    found: dict[str, Any] = {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, name, rows, total_of(name, rows))
        loss.backward()
        grads = {
            key: value.grad.clone()
            for key, value in tuned_parameters(model).items()
            if value.grad is not None
        }
        norm = float(nn.utils.clip_grad_norm_(tuned_parameters(model).values(), 0.5))
        optimizer.step()
        found = found or {"loss": float(loss.detach()), "grads": grads, "norm": norm}
    return found | {"after": {key: value.detach() for key, value in tuned_parameters(model).items()}}


def mine(rows: Tensors, mesh: Mesh) -> Tensors:
    """This replica's rows."""
    sizes = apportion(len(rows["labels"]), mesh.plan.shares)
    start = sum(sizes[: mesh.at.dp])
    return {key: value[start : start + sizes[mesh.at.dp]] for key, value in rows.items()}


def complete(model: nn.Module) -> None:
    """The sums that FSDP leaves to others."""
    for value in tuned_parameters(model).values():
        if value.grad is not None and not is_sharded(value):
            dist.all_reduce(value.grad)


def clip(model: nn.Module, plan: ParallelPlan, bound: float) -> float:
    squares = torch.zeros((), dtype=torch.float64)
    grads = [value.grad for value in tuned_parameters(model).values() if value.grad is not None]
    for grad in grads:
        squares += local(grad).double().pow(2).sum() / copies(grad, plan)
    dist.all_reduce(squares)
    norm = float(squares.sqrt())
    for grad in grads:
        local(grad).mul_(min(1.0, bound / (norm + 1e-6)))
    return norm


def whole(tensors: Tensors) -> Tensors:
    return {key: value.clone() for key, value in zip(tensors, wholes(list(tensors.values())), strict=True)}


def together(
    build: Callable[[], Any], name: str, rows: Tensors, plan: ParallelPlan, steps: int = 2
) -> dict[str, Any]:
    """The same on one rank of several."""
    model, mesh = build(), make_mesh(plan, torch.device("cpu"))
    light = is_light(weighed(model), plan)
    before = list(model.state_dict()), sum(value.numel() for value in model.parameters())
    shard(model, plan, mesh, tuned_parameters(model).values(), light)
    found: dict[str, Any] = {
        "names": list(model.state_dict()) == before[0],
        "held": sum(local(value).numel() for value in model.parameters()) / before[1],
        "sharded": {key: is_sharded(value) for key, value in model.named_parameters()},
    }
    own = mine(rows, mesh)
    optimizer = adamw(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, name, own, total_of(name, rows))
        loss.backward()
        complete(model)
        if "loss" not in found:
            share = loss.detach().clone()
            dist.all_reduce(share)
            grads = {
                key: value.grad for key, value in tuned_parameters(model).items() if value.grad is not None
            }
            found |= {"loss": float(share), "grads": whole(grads)}
            found["norm"] = clip(model, plan, 0.5)
        else:
            clip(model, plan, 0.5)
        optimizer.step()
    return found | {"after": whole(tuned_parameters(model))}


def assert_as_alone(
    name: str, build: Callable[[], Any], plan: ParallelPlan, tolerance: float = 1e-6, steps: int = 2
) -> list[dict[str, Any]]:
    rows = data_of(name)
    expected = alone(build(), name, rows, steps)
    results = run(plan.world, together, build, name, rows, plan, steps)
    for found in results:
        assert found["names"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert found["norm"] == pytest.approx(expected["norm"], rel=10 * tolerance)
        assert_same_gradients(found["grads"], expected["grads"], tolerance)
        assert_same_gradients(found["after"], expected["after"], 10 * tolerance)  # steps add up
    return results


# ------------------------------------------------------------------ against one process


# tests/test_matrix.py has the numbers of every cell; what is held is the same for all families. BART and
# Llama are here; BERT and T5 are sharded in tests below.
HALVES = [
    pytest.param(name, method, marks=() if row == column and row in (1, 3) else pytest.mark.long)
    for row, name in enumerate(FOUR)
    for column, method in enumerate(sorted(SETTINGS))
]


@pytest.mark.parametrize(("name", "method"), HALVES)
def test_a_sharded_model_trains_as_one_process_does_and_holds_half(name: str, method: str) -> None:
    for found in assert_as_alone(name, lambda: model_of(name, method), plan_of(2)):
        assert found["held"] == pytest.approx(0.5, abs=0.01)
        whole = {key for key, sharded in found["sharded"].items() if not sharded}
        assert all(".side.gates." in key for key in whole)  # scalars


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "side"])
@pytest.mark.parametrize("changes", [{"reshard": False}, {"offload": True}, {"frozen": False}], ids=str)
def test_every_setting_computes_the_same(changes: dict[str, bool], method: str) -> None:
    results = assert_as_alone(
        "llama-causal", lambda: model_of("llama-causal", method), plan_of(2, replace(PLAIN, **changes))
    )
    if "frozen" in changes:
        trains = {
            key
            for key, value in model_of("llama-causal", method).named_parameters()
            if value.requires_grad and value.dim()
        }
        assert {key for key, sharded in results[0]["sharded"].items() if sharded} == trains


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama-causal", "lora"), pytest.param("bart-seq2seq", "side", marks=pytest.mark.long)],
)
def test_groups_of_replicas_hold_a_copy_each(name: str, method: str) -> None:
    for found in assert_as_alone(
        name, lambda: model_of(name, method), plan_of(4, replace(PLAIN, replicas=2))
    ):
        assert found["held"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("name", "method", "reshard"),
    [
        ("llama-causal", "full", True),
        pytest.param("t5-seq2seq", "lora", False, marks=pytest.mark.long),
        pytest.param("bart-seq2seq", "side", True, marks=pytest.mark.long),
    ],
)
def test_recomputed_blocks_compute_the_same(name: str, method: str, reshard: bool) -> None:
    assert_as_alone(
        name, lambda: model_of(name, method, recompute=True), plan_of(2, replace(PLAIN, reshard=reshard))
    )


def test_tensors_with_fewer_rows_than_ranks_and_ties_are_sharded_too() -> None:
    assert_as_alone("llama-causal", lambda: model_of("llama-causal", "lora", r=1), plan_of(2))
    for found in assert_as_alone(
        "llama-causal", lambda: model_of("llama-causal", "full", tied=True), plan_of(2)
    ):
        assert found["sharded"]["model.embed_tokens.weight"]


@pytest.mark.long  # tests/parallel/test_fsdp_fused.py compares in float64, too
def test_float64_agrees_to_the_last_digits() -> None:
    assert_as_alone(
        "llama-causal", lambda: model_of("llama-causal", "lora", torch.float64), plan_of(2), 1e-12
    )


def test_half_precision_weights_stay_so_beside_float32_tuning() -> None:
    """The ladder is float32 and the head bfloat16, in one unit, which reduces in one dtype: the smaller part
    stays whole."""
    build = partial(model_of, "llama-classify", "side", torch.bfloat16)
    for found in assert_as_alone("llama-classify", build, plan_of(2), 2e-2):
        assert not found["sharded"]["score.weight"] and found["sharded"]["model.layers.side.up.weight"]


@pytest.mark.long  # a fault that is planted
def test_an_average_in_place_of_the_sum_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDPModule, "set_gradient_divide_factor", lambda unit, factor: None)
    with pytest.raises(AssertionError):
        assert_as_alone("llama-causal", lambda: model_of("llama-causal", "lora"), plan_of(2), steps=1)


@pytest.mark.long  # tests/parallel/test_in_place.py and tensor/test_overlap.py train shards of slices, too
def test_sharded_slices_of_a_cut_model_train_as_one_process_does() -> None:
    """dp 2 x tp 2, heads, columns and vocabulary cut unevenly."""
    name, rows = "llama-causal", data_of("llama-causal")
    cut = Cut("heads", "heads", "whole", "gather", (6, 2), (3, 1), (60, 36), (1, 1), (50, 47), overlap=False)
    plan = ParallelPlan(dp=2, tp=2, shares=(2, 1), sharding=PLAIN, cut=cut)
    expected = alone(model_of(name, "lora"), name, rows, steps=1)

    def part() -> dict[str, Any]:
        model, mesh, family = (
            model_of(name, "lora"),
            make_mesh(plan, torch.device("cpu")),
            family_of(model_of(name, "lora")),
        )
        assert family is not None
        placed, sizes = shard_params.cut(model, family, plan, mesh.at), (50, 47)
        placed.slices |= cut_vocabulary(model, sizes, mesh.at.tp).slices
        hooks.cross(model, family, mesh)
        hook_vocabulary(model, sizes, mesh.groups["tp"], mesh.at.tp)
        shard(model, plan, mesh, tuned_parameters(model).values())
        own = mine(rows, mesh)
        logits, gold = trained_positions(forward(model, own), own["labels"], "causal")
        losses = vocabulary_losses(logits, gold, mesh.groups["tp"], sum(sizes[: mesh.at.tp]))
        loss = losses.sum() / total_of(name, rows)
        loss.backward()
        grads = {}
        for key, value in tuned_parameters(model).items():
            assert value.grad is not None
            grads[key] = wholes([value.grad])[0]
            if key in placed.partial:
                dist.all_reduce(grads[key], group=mesh.groups["tp"])
            elif (found := placed.slices.get(key)) is not None:
                grads[key] = gather_dim(grads[key], found.sizes, int(found.dim), mesh.groups["tp"])
        total = loss.detach()
        dist.all_reduce(total, group=mesh.groups["dp"])
        return {"loss": float(total), "grads": grads}

    for found in run(4, part):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert_same_gradients(found["grads"], expected["grads"])


@pytest.mark.parametrize(
    ("method", "reshard", "blocks"),
    [
        ("full", True, None),
        ("lora", True, MemoryConfig("input")),
        pytest.param("side", False, None, marks=pytest.mark.long),
        pytest.param("full", False, MemoryConfig("projections"), marks=pytest.mark.long),
    ],
)
def test_sharded_stages_of_a_pipeline_train_as_one_process_does(
    method: str, reshard: bool, blocks: MemoryConfig | None
) -> None:
    """pp 2 x dp 2, two forward passes of different shape a step: torch clears gradients of FSDP whenever a
    schedule begins."""
    stages = (Stage({"encoder": (0, 1)}), Stage({"encoder": (1, 2), "decoder": (0, 2)}))
    sharding = replace(PLAIN, reshard=reshard)
    check(
        Case(
            "t5-seq2seq",
            method,
            ParallelPlan(dp=2, pp=2, shares=(2, 1), sharding=sharding, stages=stages, microbatches=2),
            steps=1,
            blocks=blocks,
        )
    )


# ------------------------------------------------------------------ passes


def sharded(name: str, method: str, plan: ParallelPlan, **settings: Any) -> tuple[Any, Mesh]:
    model, mesh = model_of(name, method, **settings), make_mesh(plan, torch.device("cpu"))
    shard(model, plan, mesh, tuned_parameters(model).values())
    return model, mesh


@pytest.mark.crossed(1)
@pytest.mark.parametrize(("name", "method"), [("llama-causal", "lora"), ("t5-seq2seq", "full")])
@pytest.mark.parametrize(("reshard", "recompute"), [(True, False), (False, True)])
def test_two_micro_batches_may_be_on_their_way_at_once(
    name: str, method: str, reshard: bool, recompute: bool
) -> None:
    """As in a pipeline: forward, forward, backward, forward, backward, backward."""
    rows, plan = data_of(name, rows=6), plan_of(2, replace(PLAIN, reshard=reshard))
    expected = alone(model_of(name, method), name, rows, steps=1)["grads"]

    def part() -> Tensors:
        model, mesh = sharded(name, method, plan, recompute=recompute)
        pieces = [{key: value[at : at + 1] for key, value in mine(rows, mesh).items()} for at in range(3)]
        first, second = (loss_of(model, name, piece, total_of(name, rows)) for piece in pieces[:2])
        first.backward()
        third = loss_of(model, name, pieces[2], total_of(name, rows))
        second.backward()
        third.backward()
        return whole(
            {key: value.grad for key, value in tuned_parameters(model).items() if value.grad is not None}
        )

    for found in run(2, part):
        assert_same_gradients(found, expected)


@pytest.mark.parametrize("reshard", [True, False])
def test_what_is_written_into_shards_between_two_evaluations_is_seen(reshard: bool) -> None:
    name = "bert-classify"
    other = {key: value.detach() + 1 for key, value in tuned_parameters(model_of(name, "lora")).items()}
    expected = model_of(name, "lora")
    with torch.no_grad():
        before = forward(expected, data_of(name))
        for key, value in tuned_parameters(expected).items():
            value.copy_(other[key])
        after = forward(expected, data_of(name))

    def part() -> tuple[Tensor, Tensor]:
        model, _ = sharded(name, "lora", plan_of(2, replace(PLAIN, reshard=reshard)))
        parameters = tuned_parameters(model)
        with torch.no_grad():
            first = forward(model, data_of(name))
            for key, value in parameters.items():
                local(value).copy_(own_rows(value, other[key]))
            return first, forward(model, data_of(name))

    for found in run(2, part):
        torch.testing.assert_close(found[0], before)
        torch.testing.assert_close(found[1], after)


@pytest.mark.parametrize("name", ["llama-causal", pytest.param("t5-seq2seq", marks=pytest.mark.long)])
def test_a_sharded_model_generates_what_a_whole_one_does(name: str) -> None:
    expected = model_of(name, "side").eval().generate(**prompt(name), **GENERATE)
    for found in run(
        2, lambda: sharded(name, "side", plan_of(2))[0].eval().generate(**prompt(name), **GENERATE)
    ):
        assert torch.equal(found, expected)


# ------------------------------------------------------------------ shards and wholes


def own_rows(value: Tensor, whole: Tensor) -> Tensor:
    """The rows of `whole` that this rank holds of `value`."""
    return whole.narrow(0, first_row(value), len(local(value))) if is_sharded(value) else whole


@pytest.mark.parametrize(
    ("replicas", "offload"),
    [(1, True), (2, False), *(pytest.param(*one, marks=pytest.mark.long) for one in ((1, False), (2, True)))],
)
def test_parameters_and_optimizer_states_go_whole_and_back(replicas: int, offload: bool) -> None:
    world = 2 * replicas
    plan = plan_of(world, replace(PLAIN, replicas=replicas, offload=offload))

    def part() -> bool:
        model, _ = sharded("llama-causal", "side", plan)
        optimizer = adamw(model)
        loss_of(model, "llama-causal", data_of("llama-causal"), 1.0).backward()
        optimizer.step()
        for parameter, state in optimizer.state.items():
            for value in (parameter.detach(), *state.values()):
                whole = wholes([value])[0]
                assert whole.shape == value.shape and whole.dtype == value.dtype
                assert torch.equal(own_rows(value, whole).to(local(value).device), local(value))
                assert copies(value, plan) == (replicas if is_sharded(value) else world)
        held = sum(local(value).numel() for value in optimizer.state_dict()["state"][1].values())
        return bool(held)

    assert all(run(world, part))


def test_replicas_of_a_group_hold_equal_shards_and_their_neighbours_others() -> None:
    def part() -> Tensor:
        model, _ = sharded("llama-causal", "full", plan_of(4, replace(PLAIN, replicas=2)))
        return (
            local(model.model.norm.weight).detach() + local(model.model.embed_tokens.weight).detach()[:32, 0]
        )

    found = run(4, part)
    assert (
        torch.equal(found[0], found[2])
        and torch.equal(found[1], found[3])
        and not torch.equal(found[0], found[1])
    )


def test_units_are_the_blocks_and_the_rest_is_the_models() -> None:
    def part() -> list[str]:
        model, _ = sharded("bart-seq2seq", "side", plan_of(2))
        return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]

    stacks = ("model.encoder.layers", "model.decoder.layers")
    assert run(2, part)[0] == ["", *(f"{stack}.{number}" for stack in stacks for number in range(2))]


# ------------------------------------------------------------------ refusals


def test_sharding_refuses_to_train_other_tensors_than_announced() -> None:
    def part() -> None:
        model, mesh = model_of("llama-causal", "lora"), make_mesh(plan_of(2), torch.device("cpu"))
        with pytest.raises(PetuneError, match="disagree on what trains"):
            shard(model, plan_of(2), mesh, list(tuned_parameters(model).values())[1:])

    run(2, part)


def test_messages_name_the_models_own_class_not_fsdps() -> None:
    def part() -> list[str]:
        case = Case("llama-causal", "lora", plan_of(2))
        model = harness.place(case, case.plan).model
        return [kind.__name__ for kind in (class_of(model), type(model), class_of(nn.Linear(1, 1)))]

    assert run(2, part) == [["LlamaForCausalLM", "FSDPLlamaForCausalLM", "Linear"]] * 2


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 4, 7, 12])
def test_chunks_are_those_of_torchs_rule(length: int, count: int) -> None:
    found = chunks(length, count)
    parts = [len(part) for part in torch.empty(length).chunk(count)] if length else []
    assert len(found) == count and sum(found) == length
    assert [size for size in found if size] == [size for size in parts if size]


# ------------------------------------------------------------------ light methods


@pytest.mark.parametrize(
    "changes",
    [*(pytest.param(one, marks=pytest.mark.long) for one in ({}, {"replicas": 2})), {"reshard": False}],
    ids=str,
)
def test_a_light_method_stays_whole_and_trains_as_one_process_does(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsdp, "LARGE", 1024)
    monkeypatch.setattr(in_place, "LARGE", 1024)
    plan = plan_of(4 if changes.get("replicas") else 2, replace(PLAIN, **changes))
    build = partial(model_of, "llama-causal", "lora", r=1)
    for found in assert_as_alone("llama-causal", build, plan):
        whole = {name for name, cut in found["sharded"].items() if not cut}
        assert any("lora" in name for name in whole)
        assert {name for name in found["sharded"] if "lora" in name or "norm" in name} <= whole
        assert found["sharded"]["model.layers.0.mlp.up_proj.weight"]


def test_what_is_light_takes_no_more_than_a_shard() -> None:
    def light(trained: int, others: int, world: int = 2, **changes: Any) -> bool:
        model = nn.Module()
        model.tuned = nn.Parameter(torch.empty(trained, device="meta"))
        model.base = nn.Parameter(torch.empty(others, device="meta"), requires_grad=False)
        return is_light(weighed(model), plan_of(world, replace(PLAIN, **changes)))

    large = 2**20
    assert light(large // 8, large) and not light(large // 8 + 1, large)
    assert not light(large // 8, large, 4) and light(large // 8, large, 4, replicas=2)
    assert not light(1, large, offload=True) and not light(1, large, frozen=False)
    assert not light(0, large // 8)  # nothing is large
