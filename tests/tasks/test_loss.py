from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from petune.errors import UsageError
from petune.rng.context import bound, twins
from petune.run.evaluate import real_rows
from petune.tasks import class_weights, collate, count, loss_sum, trained_positions
from petune.tasks.examples import MASKED, Example
from petune.tasks.loss import cross_entropy_sum


def example(size: int, prompt: int, seed: int) -> Example:
    ids = torch.randint(5, 261, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example(ids, [MASKED] * prompt + ids[prompt:], f"d:{seed}", size)


def gradients(batches: list[list[Example]], make_llama) -> list[torch.Tensor]:
    """What accumulating these batches leaves, divided by the trained tokens of all of them."""
    model = make_llama(dtype=torch.float64)
    made = [collate(batch, "causal", 2) for batch in batches]
    total = sum(count(batch) for batch in made)
    for batch in made:
        loss, _ = loss_sum(model(**batch, use_cache=False).logits, batch, "causal")
        (loss / total).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_one_batch_of_sixteen_and_sixteen_of_one_have_the_same_gradient(make_llama) -> None:
    rows = [example(4 + 3 * (n % 5), 1 + n % 3, n) for n in range(16)]
    for whole, piecewise in zip(
        gradients([rows], make_llama), gradients([[row] for row in rows], make_llama), strict=True
    ):
        torch.testing.assert_close(whole, piecewise, atol=1e-12, rtol=0)


def test_a_decoders_loss_is_that_of_transformers(make_llama) -> None:
    batch = collate([example(9, 3, 1), example(5, 1, 2)], "causal", 2)
    out = make_llama()(**batch, use_cache=False)
    total, trained = loss_sum(out.logits, batch, "causal")
    assert trained == count(batch) == 6 + 4
    assert (total / trained).item() == pytest.approx(out.loss.item(), rel=1e-5)


def test_a_batch_with_nothing_to_train_changes_nothing(make_llama) -> None:
    model = make_llama()
    batch = collate([Example([5, 6, 7], [MASKED] * 3, "d:1", 3)], "causal", 2)
    loss, trained = loss_sum(model(**batch, use_cache=False).logits, batch, "causal")
    loss.backward()
    assert (loss.item(), trained) == (0.0, 0.0)
    assert all(not parameter.grad.any() for parameter in model.parameters() if parameter.grad is not None)


def test_targets_are_not_shifted() -> None:
    logits, labels = torch.randn(2, 3, 7), torch.tensor([[1, 2, MASKED], [3, MASKED, MASKED]])
    total, trained = loss_sum(logits, {"labels": labels}, "seq2seq")
    assert trained == 3
    assert total.item() == pytest.approx(
        cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item(), rel=1e-6
    )


def test_low_precision_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(1, 1000, 50, dtype=torch.bfloat16)
    total, _ = loss_sum(logits, {"labels": torch.ones(1, 1000, dtype=torch.int64)}, "seq2seq")
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(1000 * math.log(50), rel=1e-5)


def test_class_weights_weigh_the_sum_and_the_count() -> None:
    logits, batch = torch.randn(4, 2), {"labels": torch.tensor([0, 0, 0, 1])}
    weights = torch.tensor([0.5, 3.0])
    total, weight = cross_entropy_sum(logits, batch, "classify", weights), count(batch, weights)
    assert weight == 4.5
    assert (total / weight).item() == pytest.approx(
        cross_entropy(logits, batch["labels"], weight=weights).item(), rel=1e-6
    )


def test_balanced_weights_give_each_class_the_same_say() -> None:
    rows = [Example([5], label, "d:1", 1) for label in (0, 0, 0, 1)]
    assert class_weights("balanced", rows, ("a", "b")) == [4 / 6, 2.0]
    assert class_weights("none", rows, ("a", "b")) is None
    assert class_weights({"b": 5}, rows, ("a", "b")) == [1.0, 5.0]
    with pytest.raises(UsageError, match="only classes have weights"):
        class_weights("balanced", [Example([5], [0], "d:1", 1)], ("a", "b"))
    with pytest.raises(UsageError, match=r"class_weights\.bee"):
        class_weights({"bee": 5}, rows, ("a", "b"))


@pytest.mark.parametrize("task", ["causal", "seq2seq", "classify"])
def test_a_loss_asks_the_host_alone_where_it_knows_the_labels(task: str) -> None:
    """A meta device has no values to ask for."""
    labels = torch.tensor([1, 0]) if task == "classify" else torch.tensor([[1, -100, 2], [-100, 2, -100]])
    there = {"labels": labels.to("meta")}
    logits = torch.empty(*labels.shape, 5, device="meta")
    with bound(host=twins(there, {"labels": labels})):
        total, trained = loss_sum(logits, there, task)
        chosen, gold = trained_positions(logits, there["labels"], task)
    assert total.shape == () and trained == {"classify": 2}.get(task, 3)
    assert len(chosen) == len(gold) == {"causal": 2, "seq2seq": 3, "classify": 2}[task]


def test_rows_that_fill_a_batch_are_left_out_without_asking_the_device() -> None:
    rows = torch.tensor([4, -1, 2])
    there = {"rows": rows.to("meta"), "labels": torch.empty(3, device="meta")}
    with bound(host=twins(there, {"rows": rows})):
        logits, kept = real_rows(torch.empty(3, 5, device="meta"), there)
    assert [len(value) for value in (logits, *kept.values())] == [2, 2, 2]
