"""Batches: examples become tensors, padded to the longest of them and no further."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petune.tasks.examples import MASKED, Example


def collate(
    examples: Sequence[Example],
    task: str,
    pad_token_id: int,
    packed: bool = False,
    shortest: int = 1,
) -> dict[str, Tensor]:
    """A batch for `model(**batch)`, all int64: input_ids [batch, longest], labels [batch, longest] (classify:
    [batch]); of pictures and sounds their values and labels alone.

    Unpacked: attention_mask, and token_type_ids if the examples have them. Packed: position_ids instead,
    restarting at every sample, the padding being a sample of its own; the caller must pass use_cache=False,
    or transformers lets samples see each other. No text is shorter than `shortest` tokens: ranks that share a
    sequence need one each. An example of several texts is as many rows, one behind the other; `reference`
    [batch] and `good` [batch] are there if examples have one.
    """
    known = [value for example in examples for value in example.reference or ()]
    examples = [text for example in examples for text in example.texts]
    if examples[0].reading is not None:
        return _of_readings(examples)
    inputs = [example.input_ids for example in examples]
    batch = {"input_ids": _stack(inputs, pad_token_id, shortest)}
    width = batch["input_ids"].shape[1]
    if packed:
        positions = [example.positions or list(range(len(example.input_ids))) for example in examples]
        rows = [row + list(range(width - len(row))) for row in positions]
        batch["position_ids"] = torch.tensor(rows)
    else:
        batch["attention_mask"] = _stack([[1] * len(row) for row in inputs], 0, shortest)
    if all(example.token_types is not None for example in examples):
        batch["token_type_ids"] = _stack([example.token_types or [] for example in examples], 0, shortest)
    if task in ("classify", "embed", "rerank"):
        batch["labels"] = torch.tensor([example.labels for example in examples])
    else:
        labels = [example.labels for example in examples if isinstance(example.labels, list)]
        batch["labels"] = _stack(labels, MASKED, shortest)
    if all(example.good is not None for example in examples):
        batch["good"] = torch.tensor([bool(example.good) for example in examples])
    if known:
        batch["reference"] = torch.tensor(known, dtype=torch.float64)
    return batch


def _of_readings(examples: Sequence[Example]) -> dict[str, Tensor]:
    """The batch of examples that are pictures or sounds: float32 [batch, channels, height, width] or [batch,
    features, frames], and their classes [batch] or targets [batch, longest]."""
    read = [(one.reading, one) for one in examples if one.reading is not None]
    tensors = [torch.from_numpy(reading.tensor(one.where)) for reading, one in read]
    targets = [one.labels for one in examples if isinstance(one.labels, list)]
    labels = _stack(targets, MASKED, 1) if targets else torch.tensor([one.labels for one in examples])
    return {read[0][0].reader.argument: torch.stack(tensors), "labels": labels}


def _stack(rows: Sequence[list[int]], fill: int, shortest: int) -> Tensor:
    """[rows, longest], the shorter filled up at their ends."""
    width = max(shortest, *(len(row) for row in rows))
    return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.int64)
