"""What travels between ranks, counted: only what has to, and nothing back from where nothing trains.

torch's collectives are wrapped inside the ranks; `Sent` notes the bytes of every tensor that this rank gives
to one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from petune.methods.configs import make_config
from petune.models import family_of
from petune.parallel import collectives
from petune.parallel.mesh import make_mesh
from petune.parallel.pipeline.stage_module import SELECTIVE
from petune.parallel.placement import parallelize
from petune.parallel.runner import Runner
from tests.methods.zoo import stir, tiny
from tests.parallel.harness import CPU, Case, build, collate, objective, rows, total, tune
from tests.parallel.plans import BACKENDS, settings_of
from tests.pool import run

# where among the arguments it stands
GIVEN = {"all_reduce": 0, "broadcast": 0, "send": 0, "reduce_scatter": 1, "all_to_all_single": 1}
Notes = list[tuple[str, int]]


class Sent:
    """What this rank has given to collectives and sent to peers since it was made, as (name, bytes)."""

    def __init__(self) -> None:
        self.notes: Notes = []
        for name, place in GIVEN.items():
            setattr(dist, name, self._noted(name, place, getattr(dist, name)))
        collectives._all_gather = self._noted("all_gather", 1, collectives._all_gather)
        plain = dist.P2POp.__init__

        def noted(operation: Any, op: Any, tensor: Tensor, *args: Any, **settings: Any) -> None:
            if op is dist.isend:
                self.notes.append(("isend", tensor.nbytes))
            plain(operation, op, tensor, *args, **settings)

        dist.P2POp.__init__ = noted  # type: ignore[method-assign]

    def _noted(self, name: str, place: int, plain: Any) -> Any:
        def noted(*args: Any, **settings: Any) -> Any:
            given = args[place]
            self.notes.append(
                (name, given.nbytes if isinstance(given, Tensor) else sum(part.nbytes for part in given))
            )
            return plain(*args, **settings)

        return noted


def _case(name: str, method: str, backend: str) -> Case:
    plan = BACKENDS[backend](name, 2)
    return Case(name, method, plan, settings=settings_of(name, plan), passes=(4,))


def _backward(case: Case, model: Any = None) -> tuple[Notes, Notes, int, int]:
    """Notes of the forward and of the backward pass of a second step, bytes of this rank's tuned tensors, and
    tokens of the batch."""
    model = build(case) if model is None else model
    sent = Sent()
    forward: Notes = []

    def loss(outputs: Any, batch: Any) -> Tensor:
        forward.extend(sent.notes)
        sent.notes.clear()
        return plain.loss(outputs, batch)

    plain = objective(case)
    where = parallelize(model, family_of(model), case.plan, make_mesh(case.plan, CPU), plain.tuned)
    runner = Runner(where, replace(plain, loss=loss))
    batch = collate(runner.share(rows(case, 0)[0]), case)
    for _ in range(2):  # the first step of a pipeline finds out what will travel
        forward.clear()
        sent.notes.clear()
        runner.backward([batch], total(case, 0))
    return (
        forward,
        sent.notes,
        sum(value.nbytes for value in runner.tuned.values()),
        batch["input_ids"].numel(),
    )


WIDTH, FLOAT = 64, 4  # hidden states, and the bytes of a number
LOSS = 8  # bytes of the loss, which replicas sum


@pytest.mark.parametrize("method", ["full", "lora", "adapter", "side"])
def test_replicas_send_the_gradients_of_what_trains_and_nothing_else(method: str) -> None:
    for forward, backward, tuned, _ in run(2, _backward, _case("llama-causal", method, "dp")):
        assert not forward
        assert sum(count for _, count in backward) == tuned + LOSS
        assert {name for name, _ in backward} == {"all_reduce"}


@pytest.mark.parametrize("backend", ["tp-whole-vocabulary", "galaxy"])
def test_nothing_travels_backward_through_a_ladders_backbone(backend: str) -> None:
    """tp: the ladder is whole on every rank, and its gradient complete. galaxy: its own keys and values, and
    its partial gradients."""
    for forward, backward, tuned, tokens in run(2, _backward, _case("llama-causal", "side", backend)):
        assert len(forward) >= 4  # two regions in each of two blocks
        if backend == "tp-whole-vocabulary":
            assert not backward
        else:
            widest = max(count for name, count in backward if name != "all_reduce")
            assert widest < tokens * WIDTH * FLOAT  # never as wide as hidden states
            assert sum(count for name, count in backward if name == "all_reduce") == tuned


def _tuned_above(case: Case) -> Any:
    """Llama with LoRA in its last block only."""
    model = tiny("llama-causal", **dict(case.settings))
    last = model.config.num_hidden_layers - 1
    tune(model, make_config("lora", {"r": 4, "targets": rf".*layers\.{last}\..*_proj"}))
    stir(model, std=0.1)
    return model.train()


def test_no_collective_runs_backward_below_the_lowest_layer_that_trains() -> None:
    """Each block has two entries; below the first one of the lowest block that trains there is nothing to
    tell."""
    case = _case("llama-causal", "lora", "tp-whole-vocabulary")
    for model, entries in ((_tuned_above(case), 1), (build(case), 3)):
        for forward, backward, _, tokens in run(2, _backward, case, model):
            hidden = tokens * WIDTH * FLOAT
            assert forward == [("all_reduce", hidden)] * 4
            assert backward.count(("all_reduce", hidden)) == entries


def _sent(notes: Notes) -> int:
    """Bytes sent to a neighbouring stage."""
    return sum(count for name, count in notes if name == "isend")


@pytest.mark.skipif(not SELECTIVE, reason="before torch 2.13 every tensor that was sent is answered")
@pytest.mark.parametrize("schedule", ["pp-1f1b", "pp-gpipe"])
def test_a_stage_answers_with_the_side_gradient_alone(schedule: str) -> None:
    case = _case("llama-causal", "side", schedule)
    (first, more, _, tokens), (last, rest, _, _) = run(2, _backward, case)
    assert _sent(first + more) == tokens * (WIDTH + WIDTH // 4) * FLOAT
    assert _sent(last + rest) == tokens * WIDTH // 4 * FLOAT


@pytest.mark.skipif(not SELECTIVE, reason="before torch 2.13 every tensor that was sent is answered")
def test_a_stage_below_which_nothing_trains_does_not_answer() -> None:
    case = _case("llama-causal", "lora", "pp-1f1b")
    (first, more, _, tokens), (last, rest, _, _) = run(2, _backward, case, _tuned_above(case))
    assert _sent(first + more) == tokens * WIDTH * FLOAT
    assert _sent(last + rest) == 0
