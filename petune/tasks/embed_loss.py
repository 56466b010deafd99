"""The loss of embeddings: which of all texts of a batch belongs to an anchor.

An embedding is pooled from the last hidden states of a text, e. With c(i, j) the cosine of anchor i and
candidate j, where candidates are the positives of all rows, then their negatives,

        loss = -sum_i log softmax_j(scale c(i, j))_i

a sum over anchors, which the step divides by their number. With `dims` the losses of the first so many
features are added. Candidates are those of one forward pass, over all replicas: `meet` gathers them, and the
gradient of a candidate is the sum of what all anchors make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from petune.errors import DataError, UsageError
from petune.tasks.configs import EmbedConfig
from petune.tasks.metrics import Scores

# this process' rows [n, ...] -> those of all, and the place of its first among them
Meet = Callable[[Tensor], tuple[Tensor, int]]
AT_A_TIME = 1024  # anchors whose cosines with every candidate are in memory


def alone(rows: Tensor) -> tuple[Tensor, int]:
    """The only process' rows are all."""
    return rows, 0


def pooled(hidden: Tensor, batch: Mapping[str, Tensor], config: EmbedConfig) -> Tensor:
    """Embeddings [rows, width] of last hidden states [rows, tokens, width], float32 at least."""
    wide = hidden if hidden.dtype == torch.float64 else hidden.float()
    mask = batch["attention_mask"].to(wide.device)
    if config.pooling == "cls":
        return wide[torch.arange(len(wide), device=wide.device), mask.argmax(-1)]
    kept = mask.to(wide.dtype)[..., None]
    return (wide * kept).sum(1) / kept.sum(1)


def contrastive(texts: Tensor, config: EmbedConfig, meet: Meet = alone) -> Tensor:
    """The summed loss of embeddings [examples, texts, width]: anchor, positive and negatives of each. Raises
    UsageError for `dims` that are no part of the width."""
    if max(config.dims, default=0) > (width := texts.shape[-1]):
        what, found = "an embedding has fewer features", ", ".join(map(str, config.dims))
        raise UsageError(what, where="embed.dims", expected=f"at most {width}", found=found)
    return torch.stack([_loss(texts[..., :size], config, meet) for size in (None, *config.dims)]).sum()


def _loss(texts: Tensor, config: EmbedConfig, meet: Meet) -> Tensor:
    unit = normalize(texts, dim=-1)
    every, first = meet(unit[:, 1:])
    candidates = every.transpose(0, 1).flatten(0, 1)
    right = torch.arange(first, first + len(unit), device=unit.device)
    return cross_entropy(config.scale * unit[:, 0] @ candidates.T, right, reduction="sum")


class EmbeddingScorer(Scores):
    """The metrics of embeddings over all held-out rows: for each anchor, the place of its own positive among
    the positives and negatives of all. The loss is that of batches of `size` rows, as in training.

    examples, texts: how many there are, and texts of each.
    """

    def __init__(self, config: EmbedConfig, examples: int, texts: int, size: int) -> None:
        self.config, self.examples, self.texts, self.size = config, examples, texts, size
        self.found: Tensor | None = None
        self.begun = 0

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        new = pooled(logits.detach(), batch, self.config).double()
        if self.found is None:
            self.found = new.new_zeros(self.examples * self.texts, new.shape[1])
        places = batch.get("rows", torch.arange(self.begun, self.begun + len(new)))
        self.begun += len(new)
        self.found[places.to(new.device)] = new

    def numbers(self) -> Any:
        """All embeddings, flat; zeros where another process has looked."""
        return torch.zeros(0) if self.found is None else self.found.flatten()

    def whole(self, numbers: Sequence[float]) -> EmbeddingScorer:
        """The scorer that has all embeddings."""
        scorer = EmbeddingScorer(self.config, self.examples, self.texts, self.size)
        scorer.found = torch.as_tensor(numbers, dtype=torch.float64).unflatten(
            0, (self.examples * self.texts, -1)
        )
        return scorer

    def result(self) -> dict[str, float]:
        if self.found is None:
            raise DataError("no text was scored", remedy="petune data shows the rows")
        texts = self.found.unflatten(0, (self.examples, self.texts))
        loss = sum(float(contrastive(part, self.config)) for part in texts.split(self.size))
        places = _places(normalize(texts, dim=-1)).double()
        return {
            "mrr": float((1 / places).mean()),
            "recall_at_1": float((places == 1).double().mean()),
            "loss": loss / self.examples,
        }


def _places(unit: Tensor) -> Tensor:
    """Of each anchor, the place of its positive among all candidates, from 1: one more than are nearer."""
    candidates = unit[:, 1:].transpose(0, 1).flatten(0, 1)
    found = []
    for part in unit.split(AT_A_TIME):
        own = (part[:, 0] * part[:, 1]).sum(-1, keepdim=True)
        found.append(1 + (part[:, 0] @ candidates.T > own + 1e-9).sum(-1))
    return torch.cat(found)
