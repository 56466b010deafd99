"""The ledger counts a storage while it lives; the parts of a step's memory sum to its peak."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from petune.profiling.memory import Ledger, MemoryUse, _Arrivals, measure
from petune.profiling.repeat_step import Rehearsal
from tests.profiling.conftest import Rehearse

KB = 4 * 256  # bytes of 256 floats
CPU = torch.device("cpu")


def measured(rehearsal: Rehearsal) -> MemoryUse:
    rehearsal.passes(rehearsal.batches())
    rehearsal.update()
    return measure(rehearsal)


def test_the_ledger_counts_what_operations_make_until_it_is_freed() -> None:
    given = torch.ones(256)
    with Ledger(CPU) as ledger:
        one = given + 1
        two = one * 2
        assert ledger.live == 2 * KB
        del one
        assert (ledger.live, ledger.peak) == (KB, 2 * KB)
        ledger.rest()
        assert ledger.peak == KB
    del two
    assert ledger.live == 0


def test_views_and_results_written_in_place_are_nothing_new() -> None:
    given = torch.ones(256)
    with Ledger(CPU) as ledger:
        seen = given.view(16, 16).t()[1:]
        given.add_(1)
        torch.add(given, 1, out=given)
        assert ledger.peak == 0
        part = (given + 1)[:3]  # keeps the whole storage
        assert ledger.live == KB
    del seen, part


def test_the_ledger_holds_what_autograd_keeps() -> None:
    weight = nn.Parameter(torch.ones(256))
    with Ledger(CPU) as ledger:
        loss = weight.exp().sin().sum()  # exp keeps its result, sin its input: the same storage
        assert ledger.live == KB + 4
        loss.backward()
        del loss
        assert ledger.live == KB  # the gradient
    assert weight.grad is not None


def test_gradients_that_come_after_the_peak_are_not_in_it() -> None:
    peak = 100
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    arrivals = _Arrivals([first, second], lambda: peak)
    first.sum().backward()
    peak = 120
    second.sum().backward()
    assert arrivals.done() == 16  # the first gradient was there when it rose, the second was not
    first.sum().backward()
    assert arrivals.done() == 16  # nobody listens any more


@pytest.mark.parametrize("method", ["lora", "adapter", "side", "full"])
def test_the_parts_sum_to_the_peak(method: str, rehearse: Rehearse) -> None:
    rehearsal = rehearse("llama", method)
    found = measured(rehearsal)
    trained = sum(value.numel() for value in rehearsal.tuned.values())
    assert (
        found.frozen + found.tuned + found.at_peak + found.optimizer + found.activations + found.other
        == found.peak
    )
    assert found.tuned == found.gradients == 4 * trained
    # two moments, and the number of the step
    assert found.optimizer == 2 * 4 * trained + 4 * len(rehearsal.tuned)
    frozen = sum(value.numel() for value in rehearsal.runner.model.parameters() if not value.requires_grad)
    buffers = sum(value.numel() * value.element_size() for value in rehearsal.runner.model.buffers())
    assert found.frozen == 4 * frozen + buffers
    assert found.update >= found.frozen + found.tuned + found.gradients + found.optimizer
    assert found.reserved == 0


def test_with_several_batches_a_step_gradients_of_the_first_are_there_at_the_peak(rehearse: Rehearse) -> None:
    once, twice = (
        measured(rehearse("llama", "full", batch_size=8 // times, accumulate=times, out=str(times)))
        for times in (1, 2)
    )
    assert once.at_peak < once.gradients
    assert twice.at_peak == twice.gradients


def test_activations_shrink_when_they_are_recomputed_and_with_fewer_rows(rehearse: Rehearse) -> None:
    kept = measured(rehearse(batch_size=8, accumulate=1, out="kept")).activations
    again = measured(
        rehearse(batch_size=8, accumulate=1, gradient_checkpointing=True, out="again")
    ).activations
    fewer = measured(rehearse(batch_size=2, accumulate=4, out="fewer")).activations
    assert again < 0.8 * kept
    assert fewer < 0.5 * kept
