"""The loss of preferences: what a model says of two answers, beside what it said before it was trained.

        z = (log p(chosen) - log p'(chosen)) - (log p(rejected) - log p'(rejected))
        dpo    -(1 - e) log sigmoid(beta z) - e log sigmoid(-beta z)
        ipo    (z - 1 / (2 beta))^2, with log p a token's mean, so that long answers do not weigh more
        orpo   -mean log p(chosen) - beta log sigmoid(log odds(chosen) - log odds(rejected)), of means too
        kto    w (1 - sigmoid(+-beta (log p - log p' - k))), + and the weight of a good answer, - of a bad one

k is how far the model has moved: the mean of log p - log p' of answers to other prompts than they stand
behind, over the rows of all replicas, at least 0, and a constant to the gradient. p' is the reference, of
which a batch has `reference` [rows]: the summed log-probabilities of each of its texts. They are computed
once, before the first step, as the reference does not change: a step then costs what it costs elsewhere, and
any plan under which logits can be scored can give them. Everything is in float32 at least, and a sum over
pairs, which the step divides by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from petune.errors import DataError
from petune.tasks.configs import PreferConfig
from petune.tasks.examples import MASKED
from petune.tasks.loss import trained_positions
from petune.tasks.metrics import Scores

Mean = Callable[[Tensor], Tensor]  # of some numbers, those of all replicas


class Judged(NamedTuple):
    """Of each pair: its loss, and the rewards of its two answers, all [pairs]; of a single answer, its own
    and what it is held against."""

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


def judged(
    losses: Tensor, batch: Mapping[str, Tensor], config: PreferConfig, mean: Mean = torch.mean
) -> Judged:
    """The pairs of a batch by the losses [n] of its trained tokens; its rows are chosen, rejected, ...; or
    answer, answer to another prompt, ..."""
    return judged_texts(*text_scores(losses, batch["labels"]), batch, config, mean)


def judged_texts(
    scores: Tensor,
    tokens: Tensor,
    batch: Mapping[str, Tensor],
    config: PreferConfig,
    mean: Mean = torch.mean,
) -> Judged:
    """The same by log p [rows] and the trained tokens [rows] of its texts."""
    if config.loss == "kto":
        gained = (scores - batch["reference"].to(scores.device, scores.dtype)).unflatten(0, (-1, 2))
        return _rated(gained, batch["good"].to(scores.device)[::2], config, mean)
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


def _rated(gained: Tensor, good: Tensor, config: PreferConfig, mean: Mean) -> Judged:
    """Of log ratios [rows, 2], of answers and of answers to other prompts."""
    own, moved = gained[:, 0], mean(gained[:, 1].detach()).clamp(min=0)
    weights = own.new_tensor([config.desirable_weight, config.undesirable_weight])
    held = torch.where(good, moved - own, own - moved)
    loss = torch.where(good, weights[0], weights[1]) * torch.sigmoid(config.beta * held)
    return Judged(loss, config.beta * own.detach(), (config.beta * moved).expand_as(own))


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


class PreferenceScorer(Scores):
    """The metrics of preferences over many batches: the mean loss, the share of pairs whose chosen answer has
    the larger reward, and by how much on average. A reward is beta times a score, as above."""

    def __init__(self, config: PreferConfig, numbers: Sequence[float] = (0.0, 0.0, 0.0, 0.0)) -> None:
        self.config, self.sums = config, list(numbers)

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        found = judged(token_losses(logits.detach(), batch), batch, self.config)
        margins = (found.chosen - found.rejected).double()
        right, loss = (margins > 0).sum(), found.loss.double().sum()
        new = (float(loss), float(len(margins)), float(right), float(margins.sum()))
        self.sums = [before + more for before, more in zip(self.sums, new, strict=True)]

    def numbers(self) -> list[float]:
        return self.sums

    def whole(self, numbers: Sequence[float]) -> PreferenceScorer:
        return PreferenceScorer(self.config, numbers)

    def result(self) -> dict[str, float]:
        loss, pairs, right, margin = self.sums
        if not pairs:
            raise DataError("no pair was scored", remedy="petune data shows the rows")
        return {"loss": loss / pairs, "accuracy": right / pairs, "margin": margin / pairs}


class JudgementScorer(Scores):
    """The metrics of good and bad answers over all held-out rows: the mean loss, of batches of `size` rows as
    in training; the share of rows whose reward is on the right side of what it is held against; how much more
    good answers have gained than bad ones, the mean of each, times beta.

    examples: how many there are.
    """

    def __init__(self, config: PreferConfig, examples: int, size: int) -> None:
        self.config, self.examples, self.size = config, examples, size
        # what texts have gained; 1: good, -1: bad
        self.found = torch.zeros(2, 2 * examples, dtype=torch.float64)
        self.begun = 0

    def look(self, logits: Tensor, batch: Mapping[str, Tensor]) -> None:
        scores, _ = text_scores(token_losses(logits.detach(), batch), batch["labels"])
        places = batch.get("rows", torch.arange(self.begun, self.begun + len(scores))).cpu()
        self.begun += len(scores)
        self.found[0, places] = scores.double().cpu() - batch["reference"].cpu()
        self.found[1, places] = 2.0 * batch["good"].double().cpu() - 1

    def numbers(self) -> list[float]:
        return [float(one) for one in self.found.flatten()]

    def whole(self, numbers: Sequence[float]) -> JudgementScorer:
        scorer = JudgementScorer(self.config, self.examples, self.size)
        scorer.found = torch.tensor(list(numbers), dtype=torch.float64).view(2, -1)
        return scorer

    def result(self) -> dict[str, float]:
        if not self.examples:
            raise DataError("no answer was scored", remedy="petune data shows the rows")
        gained, good = self.found[0].unflatten(0, (-1, 2)), self.found[1, ::2] > 0
        parts = zip(gained.split(self.size), good.split(self.size), strict=True)
        found = [_rated(some, which, self.config, torch.mean) for some, which in parts]
        loss, rewards, held = (torch.cat(each) for each in zip(*found, strict=True))
        sides = [
            rewards[which].mean() if bool(which.any()) else rewards.new_zeros(()) for which in (good, ~good)
        ]
        return {
            "loss": float(loss.mean()),
            "accuracy": float(((rewards > held) == good).double().mean()),
            "margin": float(sides[0] - sides[1]),
        }
