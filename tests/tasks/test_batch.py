from __future__ import annotations

import torch

from petune.tasks import collate, count
from petune.tasks.examples import MASKED, Example

SHORT, LONG = Example([5, 6], [MASKED, 6], "d:1", 2), Example([7, 8, 9], [MASKED, MASKED, 9], "d:2", 3)


def test_a_batch_is_as_wide_as_its_longest_row() -> None:
    batch = collate([SHORT, LONG], "causal", 0)
    assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[MASKED, 6, MASKED], [MASKED, MASKED, 9]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_targets_are_padded_by_themselves() -> None:
    rows = [Example([5], [6, 7], "d:1", 1), Example([5, 6, 7], [8], "d:2", 3)]
    batch = collate(rows, "seq2seq", 0)
    assert batch["labels"].tolist() == [[6, 7], [8, MASKED]]
    assert count(batch) == 3


def test_classes_are_a_vector_and_segments_come_along() -> None:
    rows = [Example([5, 6], 1, "d:1", 2, [0, 1]), Example([5], 0, "d:2", 1, [0])]
    batch = collate(rows, "classify", 0)
    assert batch["labels"].tolist() == [1, 0]
    assert batch["token_type_ids"].tolist() == [[0, 1], [0, 0]]
    assert count(batch) == 2


def test_the_padding_of_a_packed_batch_is_a_sample_of_its_own() -> None:
    rows = [
        Example([5, 6], [MASKED, 6], "d:1", 2, positions=[0, 1]),
        Example([5, 6, 7, 8], [MASKED] * 4, "d:2", 4, positions=[0, 1, 2, 0]),
    ]
    batch = collate(rows, "causal", 0, packed=True)
    assert "attention_mask" not in batch
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
