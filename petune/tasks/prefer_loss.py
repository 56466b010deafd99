"""The loss of preferences: what a model says of two answers, beside what it said before it was trained.

        z = (log p(chosen) - log p'(chosen)) - (log p(rejected) - log p'(rejected))
        dpo    -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z)
        ipo    (z - 1 / (2 beta))^2, with log p a token's mean, so that long answers do not weigh more
        orpo   -mean log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), of means too

p' is the reference, of which a batch has `reference` [rows]: the summed log-probabilities of each of its
texts. They are computed once, before the first step, as the reference does not change: a step then costs what
it costs elsewhere, and any plan under which logits can be scored can give them. Everything is in float32 at
least, and a sum over pairs, which the step divides by their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from petune.errors import DataError
from petune.tasks.configs import PreferConfig
from petune.tasks.examples import MASKED
from petune.tasks.loss import trained_positions


class Judged(NamedTuple):
    """Of each pair: its loss, and the rewards of its two answers, all [pairs]."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor


def token_losses(logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """-log p of every trained token of a batch, in order, [n]."""
    chosen, gold = trained_positions(logits, batch["labels"].to(logits.device), "prefer")
    return cross_entropy(chosen if chosen.dtype == torch.float64 else chosen.float(), gold, reduction="none")


def text_scores(losses: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log p [rows] and the trained tokens [rows] of every text, of the losses [n] of their tokens."""
    trained = labels[:, 1:].to(losses.device) != MASKED
    table = losses.new_zeros(trained.shape).masked_scatter(trained, losses)
    return -table.sum(-1), trained_tokens(labels)


def trained_tokens(labels: Tensor) -> Tensor:
    """The trained tokens [rows] of every text."""
    return (labels[:, 1:] != MASKED).sum(-1)


def judged(losses: Tensor, batch: Mapping[str, Tensor], config: PreferConfig) -> Judged:
    """The pairs of a batch by the losses [n] of its trained tokens; its rows are chosen, rejected, ..."""
    return judged_texts(*text_scores(losses, batch["labels"]), batch, config)


def judged_texts(scores: Tensor, tokens: Tensor, batch: Mapping[str, Tensor], config: PreferConfig) -> Judged:
    """The same by log p [rows] and the trained tokens [rows] of its texts."""
    if config.loss != "dpo":
        tokens = tokens.to(scores.device)
        scores = scores / tokens
    if config.refers:
        known = batch["reference"].to(scores.device)
        scores = scores - (known if config.loss == "dpo" else known / tokens).to(scores.dtype)
    chosen, rejected = scores.unflatten(0, (-1, 2)).unbind(-1)
    return Judged(
        _loss(chosen, rejected, config), config.beta * chosen.detach(), config.beta * rejected.detach()
    )


def _loss(chosen: Tensor, rejected: Tensor, config: PreferConfig) -> Tensor:
    """Of scores of two answers [pairs]: log ratios, of which those of ipo are means, or means of log p."""
    if config.loss == "ipo":
        return (chosen - rejected - 1 / (2 * config.beta)).square()
    if config.loss == "orpo":
        return -chosen - config.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))
    z, smoothing = config.beta * (chosen - rejected), config.label_smoothing
    return -(1 - smoothing) * logsigmoid(z) - smoothing * logsigmoid(-z)


def _log_odds(score: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, which is kept off 0, where it has no end."""
    score = score.clamp(max=-torch.finfo(score.dtype).eps)
    return score - torch.log(-torch.expm1(score))


class PreferenceScorer:
    """The metrics of preferences over many batches: the mean loss, the share of pairs whose chosen answer has
    the larger reward, and by how much on average. A reward is beta times a score, as above."""

    def __init__(self, config: PreferConfig, numbers: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        self.config, self.sums = config, list(numbers)

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count one batch in."""
        found = judged(token_losses(logits.detach(), batch), batch, self.config)
        margins = (found.chosen - found.rejected).double()
        right, loss = (margins > 0).sum(), found.loss.double().sum()
        new = (float(loss), float(len(margins)), float(right), float(margins.sum()))
        self.sums = [before + more for before, more in zip(self.sums, new, strict=True)]

    def numbers(self) -> list[float]:
        """All it has gathered, as numbers that may be added to another scorer's."""
        return self.sums

    def whole(self, numbers: Sequence[float]) -> PreferenceScorer:
        """The scorer that has gathered `numbers`."""
        return PreferenceScorer(self.config, numbers)

    def confusion(self) -> None:
        """None: there are no classes."""

    def result(self) -> dict[str, float]:
        """Every metric. Raises DataError if nothing was scored."""
        loss, pairs, right, margin = self.sums
        if not pairs:
            raise DataError("no pair was scored", remedy="petune data shows the rows")
        return {"loss": loss / pairs, "accuracy": right / pairs, "margin": margin / pairs}
