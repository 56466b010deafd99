"""What the host knows of a piece's tensors without asking the device: each is the rows that the stage
computes on. A device is played by copies on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from petune.kernels.block import unpad
from petune.kernels.configs import MemoryConfig
from petune.parallel import runner
from petune.parallel.objective import Batch, Outputs
from petune.parallel.pipeline import schedule
from petune.parallel.plan import ALONE
from petune.rng.context import running
from petune.run.evaluate import outputs_of
from tests.parallel import harness
from tests.parallel.cells import case, in_part
from tests.parallel.harness import Case, Trace, collate, compare, oracle, place, rows
from tests.parallel.plans import BACKENDS, LOOPED
from tests.pool import run


def copied(batch: Mapping[str, Tensor], device: torch.device) -> tuple[Batch, Batch]:
    """As petune.rng.context.moved gives it where the device is another."""
    return {name: value.to(device, copy=True) for name, value in batch.items()}, dict(batch)


def _seen(one: Case, batches: list[Batch]) -> list[dict[str, bool]]:
    """For each call of a stage on this rank, whether the twin of each tensor in its batch has the same
    values; of an evaluation and two steps."""
    seen: list[dict[str, bool]] = []

    def ask(model: nn.Module, batch: Batch) -> Outputs:
        pairs, found = running().host, {}
        for name, value in batch.items():
            twins = [host for given, host, _ in pairs if given is value]
            if twins:
                assert len(twins) == 1 and twins[0].untyped_storage() is not value.untyped_storage()
                found[name] = twins[0].shape == value.shape and bool((twins[0] == value).all())
        seen.append(found)
        return outputs_of(model, batch)

    schedule.moved = copied  # type: ignore[attr-defined]  # in this very process, which ends soon
    pipeline = place(one, one.plan).pipeline
    assert pipeline is not None
    for chunk in pipeline.chunks:
        chunk.objective = replace(chunk.objective, forward=ask)
    pipeline.logits(batches[0])
    for own in batches:
        pipeline.backward(own, one.plan.microbatches, 1.0)
    assert not pipeline.now.host, "a batch is kept"
    return seen


@pytest.mark.crossed(1)
@pytest.mark.parametrize("kind", ["pp-1f1b", "pp-interleaved"])
@pytest.mark.parametrize("number", [4, 5])
def test_each_piece_has_its_own_rows_on_the_host(kind: str, number: int) -> None:
    """Of 5 rows in 4 pieces three are filled up."""
    name = "llama-causal"
    plan = replace((BACKENDS | LOOPED)[kind](name, 2), microbatches=4)
    one = case(name, "lora", plan)
    batches = [collate(rows(one, 0)[0][start:][:number], one) for start in (0, 1)]
    expected = dict.fromkeys(("input_ids", "attention_mask", "labels"), True)
    for at, seen in enumerate(run(2, _seen, one, batches)):
        chunks = len(plan.stages) // 2
        tried = [found for found in seen if not found]  # a row that is sent ahead
        assert len(tried) == 2 * (chunks - at), "the last stage, on rank 1, sends none"
        assert [found for found in seen if found] == [expected] * (3 * 4 * chunks)


def _steps(one: Case, limit: float) -> dict[str, Any]:
    """The trace of steps, and of each mask whether it was read on the host."""
    read: list[bool] = []
    plain = unpad.from_mask

    def reading(mask: Tensor, wanted: Tensor | None = None) -> Any:
        read.append(any(host is mask for _, host, _ in running().host))
        return plain(mask, wanted)

    schedule.moved = runner.moved = copied  # type: ignore[attr-defined]  # in this very process, which ends soon
    unpad.from_mask = reading  # type: ignore[assignment]  # in this process, too
    return {"trace": harness._steps(one, limit), "read": read}


# every model and every backend; four stages of T5 cost as much as all others
SHORT = [("llama-causal", "pp-interleaved"), ("bert-classify", "alone"), ("t5-seq2seq", "pp-1f1b")]


@pytest.mark.parametrize(
    ("model", "backend"),
    in_part(
        list(
            product(("llama-causal", "bert-classify", "t5-seq2seq"), ("alone", "pp-1f1b", "pp-interleaved"))
        ),
        SHORT,
    ),
)
def test_masks_are_read_on_the_host_and_training_is_that_of_one_process(backend: str, model: str) -> None:
    plan = ALONE if backend == "alone" else (BACKENDS | LOOPED)[backend](model, 2)
    one = case(model, "lora", plan, blocks=MemoryConfig("input"), steps=1)
    expected = oracle(one)
    found = run(plan.world, _steps, one, expected.norms[0] / 2)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    for rank in found:
        stages_here = len(plan.stages) // plan.pp
        assert rank["read"].count(False) <= 2 * stages_here, "more than rows that are sent ahead"
        assert rank["read"].count(True) > 2 * stages_here
