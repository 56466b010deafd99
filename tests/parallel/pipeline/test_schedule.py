"""A pipeline gives the loss, the gradients and the logits of one process, whatever the family, the method,
the cut and the schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from petune.errors import DistributedError, UsageError
from petune.methods import tuned_parameters
from petune.methods.configs import make_config
from petune.methods.registry import tune
from petune.models import attention, family_of
from petune.models.spec import Family
from petune.models.stack import own_stacks
from petune.parallel.mesh import Coordinate, make_mesh
from petune.parallel.objective import Batch, Objective, Outputs
from petune.parallel.pipeline.schedule import Pipeline, cut_stages
from petune.parallel.pipeline.stage_module import SELECTIVE
from petune.parallel.pipeline.stages import ends_of
from petune.parallel.plan import ParallelPlan, Stage
from petune.rng.context import Running
from petune.rng.dropout import drawing
from petune.run.evaluate import outputs_of
from petune.tasks import count, loss_sum
from tests.methods.zoo import SETTINGS, VOCAB, stir, tiny
from tests.pool import run

CPU = torch.device("cpu")
ROWS = 5  # does not divide into 2, 3 or 4 pieces
DEEP = {"num_hidden_layers": 4}
METHODS = tuple(SETTINGS)


@dataclass(frozen=True)
class Case:
    """A tiny tuned model and what is asked of it. `changes` go over its config; `key` is what dropout is
    drawn from."""

    name: str
    method: str
    changes: dict[str, Any] = field(default_factory=dict)
    key: int | None = None
    dtype: torch.dtype = torch.float32
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    recompute: bool = False
    frozen: str = ""  # tuned tensors whose name has this in it do not train after all


def build(case: Case) -> nn.Module:
    """The model, nothing in it at identity any more, in training mode. Equal on every call."""
    model = tiny(case.name, **case.changes).to(case.dtype).train()
    torch.manual_seed(3)
    tune(
        model,
        make_config(
            case.method,
            SETTINGS[case.method] | ({"dropout": 0.1} if case.key and case.method != "full" else {}),
        ),
    )
    stir(model, std=0.1)
    for name, value in model.named_parameters():
        if case.frozen and case.frozen in name:
            value.requires_grad_(False)
    for stack in own_stacks(model, family(model)).values():
        stack.recompute = case.recompute
    if case.key is not None:
        attention.use(model)  # type: ignore[arg-type]
    return model


def family(model: nn.Module) -> Family:
    """The model's family, which it has."""
    found = family_of(model)
    assert found is not None
    return found


def batch(name: str, *, rows: int = ROWS, length: int = 9, seed: int = 1) -> Batch:
    """Rows padded on the right by 2, 4, ... tokens, with as unequal numbers of trained tokens."""
    torch.manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length))
    places, ends = torch.arange(length), length - (2 * torch.arange(rows)) % (length - 1)
    mask = (places < ends[:, None]).long()
    ids = ids * mask
    found = {"input_ids": ids, "attention_mask": mask}
    if name.startswith(("bart-classify", "t5-classify")):
        ids[torch.arange(rows), ends - 1] = 2
    if name.endswith("classify"):
        found["labels"] = torch.randint(0, 3, (rows,))
    elif name.startswith(("bart", "t5")):
        wanted = torch.randint(3, VOCAB, (rows, length - 3))
        found["labels"] = torch.where(
            torch.arange(length - 3) < 1 + torch.arange(rows)[:, None], wanted, -100
        )
    else:
        found["labels"] = torch.where(mask.bool(), ids % 3 if name.endswith("tokens") else ids, -100)
    return found | {"rows": torch.arange(rows) + 10}


def objective(case: Case, ask: Callable[[nn.Module, Batch], Outputs] = outputs_of) -> Objective:
    """How a task asks the model, and what an answer costs."""
    task = case.name.partition("-")[2]

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        return loss_sum(outputs.logits, batch, task)[0]

    return Objective(ask, loss, tuned=tuned_parameters, autocast=case.autocast)


def stages(*spans: str) -> tuple[Stage, ...]:
    """Stages as "e0-2 d0-1": blocks [0, 2) of the encoder and [0, 1) of the decoder."""
    stacks = {"e": "encoder", "d": "decoder"}
    found = []
    for span in spans:
        parts = [(stacks[part[0]], part[1:].split("-")) for part in span.split()]
        found.append(Stage({stack: (int(start), int(end)) for stack, (start, end) in parts}))  # type: ignore[misc]
    return tuple(found)


def plan_of(
    spans: Sequence[Stage], schedule: str = "1f1b", pieces: int | None = None, world: int | None = None
) -> ParallelPlan:
    """A plan of a pipeline alone."""
    world = world or len(spans)
    return ParallelPlan(pp=world, stages=tuple(spans), schedule=schedule, microbatches=pieces or len(spans))


def place(
    case: Case, plan: ParallelPlan, ask: Callable[[nn.Module, Batch], Outputs] = outputs_of
) -> Pipeline:
    """This rank's part of the case."""
    model, mesh = build(case), make_mesh(plan, CPU)
    return Pipeline(
        cut_stages(model, family(model), plan, mesh.at), family(model), plan, mesh, objective(case, ask)
    )


def on_stage(case: Case, plan: ParallelPlan, batches: Sequence[Batch]) -> dict[str, Any]:
    """What one rank has after logits in eval mode, and then a forward and a backward pass over each batch."""
    names = all_names(build(case))
    pipeline = place(case, plan)
    for module in pipeline.modules:
        module.eval()
    logits = pipeline.logits(batches[0])
    for module in pipeline.modules:
        module.train()
    total = sum(count(one) for one in batches)
    losses = [pipeline.backward(one, plan.microbatches, total, case.key) for one in batches]
    tuned = {
        names[own]: value for module in pipeline.modules for own, value in tuned_parameters(module).items()
    }
    return {"losses": losses, "logits": logits, "grads": {own: value.grad for own, value in tuned.items()}}


def all_names(model: nn.Module) -> dict[str, str]:
    """Every name of every tuned tensor -> the first of them; a stage may hold only the other end of a tie."""
    first = {id(value): name for name, value in tuned_parameters(model).items()}
    return {
        name: first[id(value)]
        for name, value in model.named_parameters(remove_duplicate=False)
        if id(value) in first
    }


def alone(case: Case, batches: Sequence[Batch]) -> dict[str, Any]:
    """The same in one process, by the model's own forward."""
    model, task, total = build(case), objective(case), sum(count(one) for one in batches)
    plain = [{name: value for name, value in one.items() if name != "rows"} for one in batches]
    with torch.no_grad(), case.autocast():
        logits = task.forward(model.eval(), plain[0]).logits
    model.train()
    losses = []
    for one, asked in zip(batches, plain, strict=True):
        with drawing(Running(rows=one["rows"], key=case.key)), case.autocast():
            answer = task.forward(model, asked)
        loss = task.loss(answer, asked) / total
        loss.backward()
        losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "logits": logits,
        "grads": {name: value.grad for name, value in tuned_parameters(model).items()},
    }


def check(
    case: Case, plan: ParallelPlan, *, batches: Sequence[Batch] | None = None, close: float = 1e-6
) -> None:
    """Compare the ranks with one process. Gradients of a tensor on several stages are added."""
    batches = batches or [batch(case.name)]
    expected = alone(case, batches)
    found = run(plan.pp, on_stage, case, plan, batches)
    for rank in found:
        assert rank["losses"] == pytest.approx(expected["losses"], abs=10 * close)
    speaking = [at for at, rank in enumerate(found) if rank["logits"] is not None]
    assert speaking == [(len(plan.stages) - 1) % plan.pp]
    torch.testing.assert_close(
        found[speaking[0]]["logits"], expected["logits"], atol=100 * close, rtol=10 * close
    )
    assert {name for rank in found for name in rank["grads"]} == set(expected["grads"])
    for name, wanted in expected["grads"].items():
        parts = [rank["grads"][name] for rank in found if rank["grads"].get(name) is not None]
        if wanted is None:
            assert not any(part.any() for part in parts), f"{name} has a gradient"
            continue
        assert parts, f"no stage has a gradient of {name}"
        difference = float((sum(parts) - wanted).abs().max())
        assert difference <= close + 10 * close * float(wanted.abs().max()), (
            f"{name} differs by {difference:.1e}"
        )


# ------------------------------------------------------------------ as one process


UNEVEN: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "llama-causal": (("d0-3", "d3-4"), DEEP),
    "bert-classify": (("e0-1", "e1-2"), {}),
    "bart-seq2seq": (("e0-2 d0-1", "d1-2"), {}),
    "t5-seq2seq": (("e0-1", "e1-2 d0-2"), {}),
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", UNEVEN)
def test_two_stages_train_as_one_process(name: str, method: str) -> None:
    spans, changes = UNEVEN[name]
    check(Case(name, method, changes), plan_of(stages(*spans)))


CUTS = {
    "inside the encoder": ("e0-1", "e1-2 d0-2"),
    "at the border": ("e0-2", "d0-2"),
    "inside the decoder": ("e0-2 d0-1", "d1-2"),
    "inside both": ("e0-1", "e1-2 d0-1", "d1-2"),
    "twice in the decoder": ("e0-2", "d0-1", "d1-2"),
    "twice in the encoder": ("e0-1", "e1-2", "d0-2"),
}


# the other places are cut in tests above and below: of T5 and BART in two stages, with dropout, in batches
ONLY_HERE = {("t5-seq2seq", "at the border"), ("bart-seq2seq", "twice in the encoder")}


@pytest.mark.parametrize(
    ("name", "method", "where"),
    [
        pytest.param(name, method, where, marks=() if (name, where) in ONLY_HERE else pytest.mark.long)
        for name, method in (("t5-seq2seq", "side"), ("bart-seq2seq", "full"))
        for where in CUTS
    ],
)
def test_an_encoder_and_decoder_are_cut_anywhere(name: str, method: str, where: str) -> None:
    check(Case(name, method), plan_of(stages(*CUTS[where])))


FOUR = ("d0-1", "d1-2", "d2-3", "d3-4")
SCHEDULES = {"gpipe": ("d0-3", "d3-4"), "1f1b": ("d0-1", "d1-4"), "interleaved": FOUR, "zero-bubble": FOUR}
# zero-bubble, which makes gradients of inputs and of weights apart, with most methods
TRAINED = [("gpipe", "lora"), ("1f1b", "full"), ("interleaved", "lora")]
TRAINED += [("zero-bubble", method) for method in ("full", "lora", "side")]


@pytest.mark.parametrize(
    ("schedule", "method"),
    [
        pytest.param(schedule, method, marks=() if (schedule, method) in TRAINED else pytest.mark.long)
        for schedule in SCHEDULES
        for method in METHODS
        if method in ("lora", "full") or schedule == "zero-bubble"
    ],
)
def test_every_schedule_trains_as_one_process(schedule: str, method: str) -> None:
    check(Case("llama-causal", method, DEEP), plan_of(stages(*SCHEDULES[schedule]), schedule, 4, world=2))


def test_a_stage_trains_to_which_nothing_comes_that_asks_for_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What trains begins on the third of four stages, which torch's zero-bubble cannot split."""
    monkeypatch.setitem(SETTINGS, "lora", {"r": 4, "layers": [2, 3]})
    check(Case("llama-causal", "lora", DEEP), plan_of(stages(*FOUR), "zero-bubble", 4, world=2))


@pytest.mark.parametrize(
    ("name", "method", "schedule"),
    [
        ("t5-seq2seq", "full", "zero-bubble"),
        pytest.param("bart-seq2seq", "side", "zero-bubble", marks=pytest.mark.long),
        ("bart-seq2seq", "lora", "interleaved"),
    ],
)
def test_an_encoder_and_decoder_lie_in_several_stages_on_a_rank(
    name: str, method: str, schedule: str
) -> None:
    check(Case(name, method), plan_of(stages("e0-1", "e1-2", "d0-1", "d1-2"), schedule, 2, world=2))


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("bert-mlm", ("e0-1", "e1-2")),
        ("bert-tokens", ("e0-1", "e1-2")),
        ("bart-classify", ("e0-1", "e1-2 d0-2")),
        ("t5-classify", ("e0-1", "e1-2 d0-2")),
        ("llama-classify", ("d0-1", "d1-2")),
        ("qwen3-causal", ("d0-1", "d1-2")),
    ],
)
def test_every_head_works_on_the_last_stage(name: str, spans: tuple[str, ...]) -> None:
    check(Case(name, "full"), plan_of(stages(*spans)))


def test_batches_of_several_shapes_and_fewer_rows_than_pieces() -> None:
    name = "t5-seq2seq"
    batches = [
        batch(name),
        batch(name, rows=3, length=12, seed=2),
        batch(name, rows=1, seed=3),
        batch(name, rows=3, seed=4),
    ]
    check(Case(name, "lora"), plan_of(stages(*CUTS["inside both"])), batches=batches)


def test_a_table_tied_to_the_head_has_a_gradient_on_both_its_stages() -> None:
    check(Case("llama-causal", "full", {"tie_word_embeddings": True}), plan_of(stages("d0-1", "d1-2")))


@pytest.mark.parametrize(
    ("case", "spans", "schedule"),
    [
        (
            Case("llama-causal", "lora", DEEP | {"attention_dropout": 0.1}, key=5, recompute=True),
            FOUR,
            "zero-bubble",
        ),
        (
            Case("t5-seq2seq", "side", {"dropout_rate": 0.1}, key=5, recompute=True),
            CUTS["twice in the decoder"],
            "1f1b",
        ),
        (
            Case("bart-classify", "full", {"dropout": 0.1, "classifier_dropout": 0.1}, key=5),
            CUTS["inside both"],
            "gpipe",
        ),
    ],
)
def test_dropout_is_drawn_as_in_one_process(case: Case, spans: tuple[str, ...], schedule: str) -> None:
    pieces, world = (2, 2) if schedule == "zero-bubble" else (4, None)
    check(case, plan_of(stages(*spans), schedule, pieces, world))


@pytest.mark.parametrize(
    "case",
    [
        Case("bert-classify", "lora", autocast=lambda: torch.autocast("cpu", torch.bfloat16)),
        Case("bert-classify", "side", dtype=torch.bfloat16),
    ],
)
def test_hidden_states_travel_in_the_dtype_that_they_have(case: Case) -> None:
    check(case, plan_of(stages("e0-1", "e1-2")), close=3e-3)


def test_a_withheld_mask_would_be_noticed() -> None:
    case, plan = Case("bert-classify", "lora"), plan_of(stages("e0-1", "e1-2"))
    expected = alone(case, [batch(case.name)])["losses"][0]

    def forgetful(model: nn.Module, asked: Batch) -> Outputs:
        return outputs_of(
            model,
            {
                name: value
                for name, value in asked.items()
                if name != "attention_mask" or not ends_of(model).incoming
            },
        )

    def loss() -> float:
        pipeline = place(case, plan, forgetful)
        return pipeline.backward(batch(case.name), 2, count(batch(case.name)))

    assert all(math.isfinite(found) and abs(found - expected) > 1e-3 for found in run(2, loss))


# ------------------------------------------------------------------ what travels


def sent(case: Case, plan: ParallelPlan, pieces: int) -> list[list[int]]:
    """The shapes of what this rank's schedule sends in one step."""
    pipeline, shapes, make = place(case, plan), [], dist.P2POp

    def record(op: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if op is dist.isend:
            shapes.append(list(tensor.shape))
        return make(op, tensor, *args, **kwargs)

    pipeline.backward(batch(case.name, rows=4), pieces, 1.0)
    dist.P2POp = record  # type: ignore[assignment, misc]  # this process ends with the test
    pipeline.backward(batch(case.name, rows=4), pieces, 1.0)
    return shapes


answers = pytest.mark.skipif(not SELECTIVE, reason="this torch answers every tensor")


@answers
def test_under_a_ladder_only_the_gradient_of_the_side_state_comes_back() -> None:
    plan = plan_of(stages("d0-1", "d1-2"))
    first, second = run(2, sent, Case("llama-causal", "side"), plan, 2)
    assert first == [[2, 9, 64], [2, 9, 16]] * 2
    assert second == [[2, 9, 16]] * 2


@answers
def test_a_frozen_stage_gets_no_gradient() -> None:
    case, plan = Case("llama-causal", "lora", frozen="layers.0."), plan_of(stages("d0-1", "d1-2"))
    first, second = run(2, sent, case, plan, 2)
    assert first == [[2, 9, 64]] * 2
    assert second == []


@answers
def test_a_position_bias_that_does_not_train_is_sent_once_and_not_answered() -> None:
    first, second = run(2, sent, Case("t5-seq2seq", "lora"), plan_of(stages("e0-1", "e1-2 d0-2")), 2)
    assert first == [[2, 9, 64], [1, 8, 9, 9]] * 2
    assert second == [[2, 9, 64]] * 2


def test_a_stage_that_would_send_what_nobody_expects_says_so() -> None:
    case, plan = Case("llama-causal", "lora"), plan_of(stages("d0-1", "d1-2"))

    def message() -> str:
        pipeline = place(case, plan)
        pipeline.backward(batch(case.name), 2, 1.0)
        if pipeline.chunks[0].last:
            return ""

        def shorter(model: nn.Module, asked: Batch) -> Outputs:
            return outputs_of(model, {name: value[:, 1:] for name, value in asked.items()})

        pipeline.chunks[0].objective = objective(case, shorter)
        with pytest.raises(DistributedError) as caught:
            pipeline.backward(batch(case.name), 2, 1.0)
        return str(caught.value)

    assert "expected [3, 9, 64], found [3, 8, 64]" in run(2, message)[0]


# ------------------------------------------------------------------ what a stage holds


def three(name: str) -> ParallelPlan:
    """A pipeline of any model of the zoo."""
    if name.startswith(("bart", "t5")):
        return plan_of(stages("e0-1", "e1-2 d0-1", "d1-2"))
    return plan_of(stages("e0-1", "e1-2") if name.startswith("bert") else stages("d0-1", "d1-2"))


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, "full") for name in ("bert-mlm", "bart-seq2seq", "t5-gated", "t5-classify", "llama-classify")]
    + [(name, method) for name in ("bart-seq2seq", "llama-causal") for method in ("side", "adapter")],
)
def test_every_tensor_lies_on_one_stage_but_for_tied_tables(name: str, method: str) -> None:
    whole, plan = build(Case(name, method)), three(name)
    every = {own: id(value) for own, value in whole.named_parameters(remove_duplicate=False)}
    tied = {own for own, number in every.items() if list(every.values()).count(number) > 1}
    cut = [
        cut_stages(copy.deepcopy(whole), family(whole), plan, Coordinate(pp=at))[0] for at in range(plan.pp)
    ]
    held = [own for module in cut for own, _ in module.named_parameters(remove_duplicate=False)]
    assert set(held) | tied == set(every)
    assert {own for own in held if held.count(own) > 1} <= tied
    for at, module in enumerate(cut):
        wanted = {
            (stack, number)
            for stack, (start, end) in plan.stages[at].blocks.items()
            for number in range(start, end)
        }
        assert {
            (name, number)
            for name, stack in own_stacks(module, family(whole)).items()
            for number, _ in stack.numbered
        } == wanted


def test_a_stage_can_be_cut_out_of_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = build(Case("t5-seq2seq", "side"))
    sizes = []
    for at in range(3):
        plan = three("t5-seq2seq")
        (module,) = cut_stages(copy.deepcopy(model), family(model), plan, Coordinate(pp=at))
        assert all(value.is_meta for value in module.parameters())
        sizes.append(sum(value.numel() for value in module.parameters()))
    assert max(sizes) < 0.7 * sum(value.numel() for value in model.parameters())


def test_the_stages_of_a_rank_share_their_tensors_and_no_blocks() -> None:
    model = build(Case("t5-seq2seq", "full"))
    every = {id(value) for value in model.parameters()}
    plan = plan_of(stages("e0-1", "e1-2", "d0-1", "d1-2"), "interleaved", 2, world=2)
    first, second = cut_stages(model, family(model), plan, Coordinate(pp=0))
    assert first is model
    ours, theirs = (
        {id(value): name for name, value in module.named_parameters()} for module in (first, second)
    )
    assert set(ours) | set(theirs) <= every
    assert {ours[number] for number in set(ours) & set(theirs)} == {"shared.weight"}


def test_a_module_of_which_it_cannot_be_told_where_it_works_is_refused() -> None:
    model = build(Case("bart-seq2seq", "lora"))
    # as mBART has one, after the blocks
    model.get_submodule("model.encoder").add_module("layer_norm", nn.LayerNorm(64))
    with pytest.raises(UsageError, match=r"model\.encoder\.layer_norm"):
        cut_stages(model, family(model), three("bart-seq2seq"), Coordinate())


@pytest.mark.parametrize("spans", [("d0-1", "d1-3"), ("d0-1", "d0-2"), ("d1-2", "d0-1")])
def test_stages_that_do_not_fit_are_refused(spans: tuple[str, ...]) -> None:
    for at in range(2):  # on every rank, or the others would wait
        model = build(Case("llama-causal", "lora"))
        with pytest.raises(UsageError, match="2 blocks"):
            cut_stages(model, family(model), plan_of(stages(*spans), "1f1b", 2, world=2), Coordinate(pp=at))
