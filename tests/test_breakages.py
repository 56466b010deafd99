"""The ways in which cut, staged and laddered models have broken before, each with a test of its own name.

Half of them gave wrong numbers or dead gradients without any error, with a loss that was right. Cells of the
matrix catch most of them too; here stands the smallest case that shows each.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from petune.errors import UsageError
from petune.methods import tuned_parameters
from petune.models.stack import Stack
from petune.parallel.placement import parallelize
from petune.parallel.runner import Runner
from tests.methods.zoo import FOUR
from tests.parallel.harness import (
    Answer,
    Batch,
    Case,
    assert_same,
    build,
    check,
    collate,
    gradient,
    logits_of,
    oracle,
    place,
    rows,
    total,
)
from tests.parallel.harness import objective as plain_objective
from tests.parallel.plans import BACKENDS, COMPOSED, OVERLAPPED, settings_of
from tests.pool import RankError, run

SEQUENCE = ("sp-gather", "sp-ulysses", "sp-ring", "galaxy", "galaxy2", "cut")


def case(name: str, method: str, backend: str, **changes: Any) -> Case:
    plans = {**BACKENDS, "galaxy overlapped": OVERLAPPED["galaxy"]}
    plan = COMPOSED[backend](name) if " x " in backend else plans[backend](name, 2)
    settings = changes.pop("settings", ()) + settings_of(name, plan)
    return Case(name, method, plan, settings=settings, steps=1, **changes)


# ---------------------------------------------------------- an argument looked up by a name that is not there


@pytest.mark.parametrize("backend", ["tp", pytest.param("galaxy", marks=pytest.mark.long)])
def test_a_region_whose_way_in_calls_its_input_something_else_is_entered(backend: str) -> None:
    """The parameter of BART's fc1 is `input` in a plain linear and `x` in a tuned one; a copy that is skipped
    leaves the loss right."""
    for method in ("lora", "full"):
        check(case("bart-seq2seq", method, backend))


def test_a_region_entered_without_hidden_states_is_an_error() -> None:
    def enter() -> str:
        this = case("llama-causal", "lora", "tp")
        block = place(this, this.plan).model.model.layers[0]  # type: ignore[union-attr]
        try:
            block.mlp(states=torch.zeros(1, 2, 64))
        except RuntimeError as error:
            return str(error)
        return "nothing was raised"

    assert all("without hidden states" in found for found in run(2, enter))


# ------------------------------------------------------------------ the order of receive and enter


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name[:2] == "t5" else pytest.mark.long) for name in FOUR]
)
def test_a_stage_takes_its_part_of_what_it_received_and_not_of_what_it_made_up(name: str) -> None:
    check(case(name, "lora", "galaxy x pp"))


# ------------------------------------------------------------------ sizes remembered by a module


def _two_lengths_at_once(model: nn.Module, batch: Batch) -> Tensor:
    """Logits from two forward passes, the shortest row's and the others', before either has been
    differentiated."""
    lengths = batch["attention_mask"].sum(1)
    order = lengths.argsort()
    found = []
    for own in (order[:1], order[1:]):
        part = {name: value[own] for name, value in batch.items() if name != "rows"}
        long = int(lengths[own].max())
        labelled = int((part["labels"] != -100).sum(1).max()) if model.config.is_encoder_decoder else long
        logits = logits_of(
            model, {name: value[:, : labelled if name == "labels" else long] for name, value in part.items()}
        )
        found.append(pad(logits, (0, 0, 0, batch["labels"].shape[1] - logits.shape[1])))
    return torch.cat(found)[order.argsort()]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", SEQUENCE)
@pytest.mark.parametrize("name", ["llama-causal", "t5-seq2seq"])
def test_recomputing_a_micro_batch_after_one_of_another_length_sees_its_own_length(
    name: str, backend: str
) -> None:
    this = case(name, "lora", backend, recompute=True)

    def both() -> dict[str, Tensor]:
        model = build(this)
        runner = _runner(model, this, forward=_two_lengths_at_once)
        runner.backward([collate(chosen, this) for chosen in rows(this, 0)], total(this, 0))
        return runner.whole({name: gradient(value) for name, value in runner.tuned.items()})

    assert len({len(row["input_ids"]) for row in rows(this, 0)[0]}) > 1, (
        "the rows do not show what they should"
    )
    assert_same(run(2, both)[0], oracle(this).gradients, 1e-6, "gradients", relative=1e-5)


def _runner(
    model: nn.Module, this: Case, forward: Callable[[nn.Module, Batch], Tensor] = logits_of
) -> Runner:
    from petune.models import family_of
    from petune.parallel.mesh import make_mesh

    mesh = make_mesh(this.plan, torch.device("cpu"))
    asked = replace(plain_objective(this), forward=lambda model, batch: Answer(forward(model, batch)))
    where = parallelize(model, family_of(model), this.plan, mesh, asked.tuned, recompute=this.recompute)
    return Runner(where, asked)


# ------------------------------------------------------------ generation guessed from the presence of a cache


def _with_cache(model: nn.Module, batch: Batch) -> Tensor:
    """A forward pass that leaves use_cache as the config has it: on."""
    assert model.config.use_cache
    inputs = {name: value for name, value in batch.items() if name not in ("rows", "labels")}
    logits = model(**inputs).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize(
    "backend",
    [
        *("sp-gather", "sp-ulysses", "sp-ring", "galaxy", "tp"),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("galaxy2", "cut", "galaxy x pp", "sp x pp")
        ),
    ],
)
def test_a_cache_in_training_is_not_taken_for_generation(backend: str) -> None:
    this = case("llama-causal", "lora", backend)

    def gradients() -> dict[str, Tensor]:
        runner = _runner(build(this), this, forward=_with_cache)
        runner.backward([collate(chosen, this) for chosen in rows(this, 0)], total(this, 0))
        return runner.whole({name: gradient(value) for name, value in runner.tuned.items()})

    assert_same(run(this.plan.world, gradients)[0], oracle(this).gradients, 1e-6, "gradients", relative=1e-5)


# ------------------------------------------------------------------ reentrant checkpointing


def _with_theirs(this: Case, before: bool) -> dict[str, Tensor]:
    """Whole gradients where Hugging Face's reentrant checkpointing was turned on before the model was placed,
    or after."""
    model = build(this)
    settings = {"use_reentrant": True}
    if before:
        model.gradient_checkpointing_enable(settings)  # type: ignore[operator]
    runner = _runner(model, this)
    if not before:
        runner.model.gradient_checkpointing_enable(settings)  # type: ignore[operator]
    runner.backward([collate(chosen, this) for chosen in rows(this, 0)], total(this, 0))
    return runner.whole({name: gradient(value) for name, value in runner.tuned.items()})


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", ["tp", "sp-gather"])
@pytest.mark.parametrize("name", FOUR)
def test_reentrant_checkpointing_becomes_the_stacks_own(name: str, backend: str) -> None:
    """With it T5 hung under tp."""
    this = case(name, "lora", backend)
    assert_same(
        run(2, _with_theirs, this, True, timeout=20)[0],
        oracle(this).gradients,
        1e-6,
        "gradients",
        relative=1e-5,
    )


def test_checkpointing_turned_on_behind_the_runners_back_is_refused() -> None:
    this = case("t5-seq2seq", "lora", "tp")
    with pytest.raises(RankError, match=r"UsageError(.|\n)*checkpointing"):
        run(2, _with_theirs, this, False, timeout=20)


# ------------------------------------------------------------------ state in closures


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", ["tp", "galaxy", "galaxy overlapped", "sp-gather", "sp-ring"])
@pytest.mark.parametrize(("name", "method"), [("t5-seq2seq", "side"), ("llama-causal", "lora")])
def test_a_copy_of_a_placed_model_shares_nothing_with_it(name: str, method: str, backend: str) -> None:
    """A copy with other weights computes other things, and the original what it did before."""
    this = case(name, method, backend)

    def copied() -> tuple[Tensor, Tensor, Tensor, bool]:
        runner = place(this, this.plan)
        batch = collate(rows(this, 0)[0], this)
        before = runner.logits(batch)
        twin = copy.deepcopy(runner.model)
        with torch.no_grad():
            same = logits_of(twin, batch)
            for value in tuned_parameters(twin).values():
                value.zero_()
            logits_of(twin, batch)
        after = runner.logits(batch)
        logits_of(twin, batch).sum().backward()
        assert before is not None and after is not None
        return before, same, after, all(value.grad is None for value in runner.tuned.values())

    for before, same, after, untouched in run(2, copied):
        assert torch.equal(before, same), "the copy computes something else"
        assert torch.equal(before, after), "the copy reaches into the original"
        assert untouched, "gradients of the copy arrived in the original"


# ------------------------------------------------------------------ a method's own modules that cross layouts
# A ladder that looks across at the encoder is the cell of `side` of tests/test_matrix.py, for BART and T5
# under every backend.


# ------------------------------------------------------------------ layer drop


@pytest.mark.parametrize("setting", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layer_drop_is_refused_before_anything_is_cut(setting: str) -> None:
    """Hugging Face would drop the whole stack."""
    this = case("bart-seq2seq", "full", "tp", settings=((setting, 0.5),))
    with pytest.raises(RankError, match=rf"UsageError(.|\n)*config\.{setting} = 0\.5"):
        run(2, lambda: place(this, this.plan))


@pytest.mark.parametrize("setting", ["encoder_layerdrop", "decoder_layerdrop"])
def test_a_ladder_refuses_layer_drop_in_one_process_too(setting: str) -> None:
    with pytest.raises(UsageError, match=setting):
        build(Case("bart-seq2seq", "side", settings=((setting, 0.5),)))


# ------------------------------------------------------------------ recorded shards


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    ("backend", "what"), [("galaxy", "output_attentions"), ("sp-gather", "output_hidden_states")]
)
@pytest.mark.parametrize("name", FOUR)
def test_recording_what_is_only_a_shard_is_refused(name: str, backend: str, what: str) -> None:
    this = case(name, "lora", backend)

    def ask(model: nn.Module, batch: Batch) -> Tensor:
        return logits_of(model, {**batch, what: True})  # type: ignore[dict-item]

    def record() -> str:
        runner = _runner(build(this), this, forward=ask)
        try:
            runner.logits(collate(rows(this, 0)[0], this))
        except UsageError as error:
            return str(error)
        return "nothing was raised"

    assert all(what in found for found in run(2, record))


def test_hidden_states_that_are_whole_are_those_of_one_process() -> None:
    this = case("llama-causal", "lora", "tp")
    batch = {
        name: value
        for name, value in collate(rows(this, 0)[0], this).items()
        if name in ("input_ids", "attention_mask")
    }

    def record() -> list[Tensor]:
        with torch.no_grad():
            return list(place(this, this.plan).model(**batch, output_hidden_states=True).hidden_states)

    expected = build(this)(**batch, output_hidden_states=True).hidden_states
    for found in run(2, record):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-5)


# ------------------------------------------------------------------ what an exception leaves behind


@pytest.mark.crossed(1)
@pytest.mark.parametrize("backend", ["tp", "galaxy", "sp-gather"])
@pytest.mark.parametrize("method", ["side", "lora"])
def test_after_an_exception_inside_a_stack_training_goes_on_as_before(method: str, backend: str) -> None:
    """A ladder's backbone runs without gradients; left so, all later training is dead without a word."""
    this = case("llama-causal", method, backend)
    expected = oracle(this)

    def interrupted() -> dict[str, Any]:
        runner = place(this, this.plan)
        stack = next(module for module in runner.model.modules() if isinstance(module, Stack))
        handle = stack.blocks[1].register_forward_hook(_raise)
        with pytest.raises(KeyboardInterrupt):
            runner.backward([collate(rows(this, 0)[0], this)], 1.0)
        handle.remove()
        assert torch.is_grad_enabled()
        dist.barrier()
        for value in runner.tuned.values():
            value.grad = None
        runner.backward([collate(chosen, this) for chosen in rows(this, 0)], total(this, 0))
        return runner.whole({name: gradient(value) for name, value in runner.tuned.items()})

    assert_same(run(2, interrupted)[0], expected.gradients, 1e-6, "gradients", relative=1e-5)


def _raise(*_: Any) -> None:
    raise KeyboardInterrupt
