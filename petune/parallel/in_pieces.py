"""A batch whose rows the loss compares with one another, through the model in pieces (Gao et al. 2021,
arXiv:2101.06983).

What the loss compares is made of all pieces without a graph; the loss gives the gradient of it; each piece
goes through the model again with a graph, which takes its part of that gradient. Memory is that of one piece,
and gradients are those of the batch: dropout is drawn by index, so both passes have the same masks, and where
torch draws it, its generators are put back between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from petune.parallel.objective import Batch, Objective, RowChunks
from petune.rng.context import Running
from petune.rng.dropout import drawing
from petune.rng.generators import rng_state, set_rng_state


def backward_in_pieces(
    model: nn.Module, batch: Batch, objective: Objective, pieces: RowChunks, total: float, key: int | None
) -> Tensor:
    """Forward and backward of one batch on the device; its summed loss, detached. The gradients are those of
    the loss divided by `total`; key: what dropout is drawn from, None where torch draws it."""
    parts = list(_parts(batch, pieces.rows))

    def give(part: Batch) -> Tensor:
        with drawing(Running(rows=part.get("rows"), key=key)), objective.autocast():
            return pieces.give(objective.forward(model, part), part)

    states, found = [], []
    with torch.no_grad():
        for part in parts:
            states.append(rng_state() if key is None else None)
            found.append(give(part))
    compared = torch.cat(found).requires_grad_()
    loss = pieces.loss(compared, batch)
    (loss / total).backward()
    assert compared.grad is not None
    for part, state, grad in zip(parts, states, compared.grad.split(pieces.rows), strict=True):
        if state is not None:
            set_rng_state(*state, "before this piece")
        give(part).backward(grad)
    return loss.detach()


def _parts(batch: Batch, rows: int) -> Iterator[Batch]:
    """So many rows of the batch at a time."""
    for start in range(0, len(batch["input_ids"]), rows):
        yield {name: value[start : start + rows] for name, value in batch.items()}
