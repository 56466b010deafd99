"""The loss of reranking: how well a passage answers its query, by the one output s of the model.

        bce       -mean over passages of y log sigmoid(s) + (1 - y) log(1 - sigmoid(s))
        softmax   -log softmax(s)_0 over the passages of a query, of which the first is the right one

A sum over examples, which the step divides by their number; in float32 at least. The scores of an example
stand one behind the other, so any plan and any batch gives the loss of its own rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax

from petune.errors import DataError
from petune.tasks.configs import RerankConfig
from petune.tasks.metrics import Scores

AT = 10  # places that count
LISTED = ("mrr_at_10", "ndcg_at_10", "loss")  # of rows with several passages, the usual one first
JUDGED = ("accuracy", "loss")  # of rows with one passage and a label


def passage_scores(logits: Tensor) -> Tensor:
    """The scores [rows] of a head with one output, in float32 at least."""
    return (logits if logits.dtype == torch.float64 else logits.float()).squeeze(-1)


def ranking_losses(scores: Tensor, labels: Tensor, texts: int, config: RerankConfig) -> Tensor:
    """The loss of each example [examples], of the scores and labels of its texts [examples * texts]."""
    if config.loss == "softmax":
        right: Tensor = log_softmax(scores.unflatten(0, (-1, texts)), -1)[:, 0]
        return -right
    wanted = labels.to(scores)
    each: Tensor = binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    mean: Tensor = each.unflatten(0, (-1, texts)).mean(-1)
    return mean


class RankingScorer(Scores):
    """The metrics of reranking over many batches.

    Of examples of several `texts`, 1 / place of the right passage (mrr_at_10) and 1 / log2(1 + place)
    (ndcg_at_10), both 0 beyond the tenth place; a passage with the same score stands before the right one.
    Of one text, the share whose score is on the side of 0 that its label says (accuracy).
    """

    def __init__(
        self, config: RerankConfig, texts: int, numbers: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    ) -> None:
        self.config, self.texts, self.sums = config, texts, list(numbers)

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        scores = passage_scores(logits.detach()).double()
        labels = batch["labels"].to(scores.device)
        losses = ranking_losses(scores, labels, self.texts, self.config)
        if self.texts > 1:
            places = _places(scores.unflatten(0, (-1, self.texts)))
            near = (places <= AT).double()
            found = [near / places, near / torch.log2(1 + places)]
        else:
            found = [(scores > 0) == labels.bool()]
        sums = [losses.sum(), *(one.sum() for one in found)]
        new = [float(len(losses)), *map(float, sums), 0.0]
        self.sums = [before + more for before, more in zip(self.sums, new, strict=False)]

    def numbers(self) -> list[float]:
        return self.sums

    def whole(self, numbers: Sequence[float]) -> RankingScorer:
        return RankingScorer(self.config, self.texts, numbers)

    def result(self) -> dict[str, float]:
        examples, loss, *rest = self.sums
        if not examples:
            raise DataError("no passage was scored", remedy="petune data shows the rows")
        names = [name for name in (LISTED if self.texts > 1 else JUDGED) if name != "loss"]
        found = {name: value / examples for name, value in zip(names, rest, strict=False)}
        return {**found, "loss": loss / examples}


def _places(scores: Tensor) -> Tensor:
    """The place of the first of each row of scores among all of them, from 1."""
    return 1 + (scores[:, 1:] >= scores[:, :1]).sum(-1).double()
