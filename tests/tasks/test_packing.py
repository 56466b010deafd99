from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.tasks import collate, loss_sum
from petune.tasks.examples import MASKED, Example
from petune.tasks.packing import packed


def example(size: int, seed: int = 0) -> Example:
    ids = torch.randint(5, 261, (size,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Example(ids, [MASKED, *ids[1:]], f"d:{seed}", size)


def pack(samples: list[Example], limit: int) -> list[Example]:
    return list(packed(samples, [len(one.input_ids) for one in samples], limit))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40))
def test_every_sample_is_in_one_bin_and_no_bin_is_over_full(sizes: list[int]) -> None:
    samples = [example(size, seed) for seed, size in enumerate(sizes)]
    bins = pack(samples, 20)
    assert all(len(one.input_ids) == len(one.labels) == len(one.positions) <= 20 for one in bins)
    assert sorted(token for one in bins for token in one.input_ids) == sorted(
        token for one in samples for token in one.input_ids
    )
    assert sum(one.trained for one in bins) == sum(one.trained for one in samples)
    assert len(bins) < 2 * sum(sizes) / 20 + 1, "no two bins could be one"


def test_the_first_label_of_every_sample_is_masked_and_positions_restart() -> None:
    (one,) = pack([example(3), example(2)], 8)
    assert one.positions == [0, 1, 2, 0, 1]
    assert [label == MASKED for label in one.labels] == [True, False, False, True, False]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_samples_train_as_if_each_were_alone(attention: str, make_llama) -> None:
    samples = [example(size, seed) for seed, size in enumerate((7, 1, 12, 5, 2, 9, 3))]
    bins = pack(samples, 16)
    assert len(bins) > 1 and {len(one.input_ids) for one in bins} != {16}, "several bins, some padded"
    losses, gradients = [], []
    for batches in (
        [collate(bins, "causal", 2, packed=True)],
        [collate([one], "causal", 2) for one in samples],
    ):
        model = make_llama(attention)
        total = 0.0
        for batch in batches:
            loss, _ = loss_sum(model(**batch, use_cache=False).logits, batch, "causal")
            loss.backward()
            total += loss.item()
        losses.append(total)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for together, alone in zip(*gradients, strict=True):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_without_positions_packed_samples_would_see_each_other(make_llama) -> None:
    """The parity above can fail: the same batch without its positions gives another loss."""
    batch = collate(pack([example(7), example(8, 1)], 16), "causal", 2, packed=True)
    model = make_llama()
    apart = loss_sum(model(**batch, use_cache=False).logits, batch, "causal")[0]
    batch.pop("position_ids")
    together = loss_sum(model(**batch, use_cache=False).logits, batch, "causal")[0]
    assert abs(apart - together) > 1e-3
