"""Good and bad answers: their rows, the answers that stand beside them, and their loss beside the formula of
arXiv:2402.01306 in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import DataError
from petune.tasks import collate, encode, load_rows, render
from petune.tasks.configs import DataConfig, PreferConfig
from petune.tasks.prefer_loss import JudgementScorer, judged, token_losses


def records(count: int = 12) -> list[dict[str, Any]]:
    return [{"prompt": f"p{at}", "completion": f"c{at}", "label": at % 3 == 0} for at in range(count)]


def loaded(jsonl: Any, folder: Path, rows: list[dict[str, Any]], **config: Any) -> Any:
    return load_rows(DataConfig(jsonl(*rows), **config), "prefer", folder)


def test_each_answer_has_that_of_another_row_of_its_side_beside_it(jsonl: Any, tmp_path: Path) -> None:
    found = loaded(jsonl, tmp_path, records())
    assert found.format == "judgements"
    sides = [[row.answer.target for row in side] for side in (found.train, found.eval)]
    for row in (*found.train, *found.eval):
        assert row.good == (int(row.answer.source[1:]) % 3 == 0)
        assert row.other != row.answer.target
    assert {row.other for row in found.train} == set(sides[0])
    assert all(row.other in sides[0] + sides[1] for row in found.eval)


def test_both_texts_begin_with_the_prompt_of_the_row(jsonl: Any, tmp_path: Path, tokenizer: Any) -> None:
    found = loaded(jsonl, tmp_path, records())
    coded = encode(found, "prefer", tokenizer, DataConfig("x", separator=""), model_kind="decoder")
    for row, example in zip(found.train, coded.train, strict=True):
        sign, prompt = "+" if row.good else "-", row.answer.source
        assert render(example, tokenizer).splitlines() == [
            f"{sign} <s>{prompt}[[{row.answer.target}</s>]]",
            f"~ <s>{prompt}[[{row.other}</s>]]",
        ]
    batch = collate(coded.train, "prefer", 2)
    assert batch["good"].tolist() == [row.good for row in found.train for _ in range(2)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{**one, "label": True} for one in records()], "every row has the same label"),
        ([{**one, "completion": "c"} for one in records()], "no row has another answer"),
        (
            [{"prompt": one["prompt"], "completion": "c"} for one in records()],
            r"prompt \+ completion \+ label",
        ),
        ([{**one, "label": "maybe"} for one in records()], "says neither yes nor no"),
    ],
)
def test_rows_that_cannot_be_learned_from_are_refused(
    rows: list[dict[str, Any]], words: str, jsonl: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        loaded(jsonl, tmp_path, rows)


# ---------------------------------------------------------------- the loss


def a_batch(rows: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    """Random logits of texts of uneven lengths, in float64, and their batch."""
    torch.manual_seed(0)
    logits = torch.randn(2 * rows, 9, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (2 * rows, 9))
    for row in range(2 * rows):
        labels[row, : 2 + row % 3] = -100
    good = torch.tensor([True, False, False, True, True]).repeat_interleave(2)
    return logits, {"labels": labels, "reference": -20 * torch.rand(2 * rows).double(), "good": good}


def by_hand(logits: Tensor, batch: dict[str, Tensor], config: PreferConfig) -> list[Tensor]:
    """Equations 7 and 8 of the paper, text by text."""
    ratios = []
    for row, labels, known in zip(logits, batch["labels"], batch["reference"], strict=True):
        places = [at for at in range(1, 9) if labels[at] >= 0]
        ratios.append(sum(row[at - 1].log_softmax(-1)[labels[at]] for at in places) - known)
    z0 = max(0.0, sum(float(ratio.detach()) for ratio in ratios[1::2]) / len(ratios[1::2]))
    found = []
    for r, good in zip(ratios[::2], batch["good"][::2], strict=True):
        if good:
            found.append(config.desirable_weight * (1 - 1 / (1 + torch.exp(-config.beta * (r - z0)))))
        else:
            found.append(config.undesirable_weight * (1 - 1 / (1 + torch.exp(-config.beta * (z0 - r)))))
    return found


@pytest.mark.parametrize("far", [True, False], ids=["moved", "estimate below 0"])
def test_loss_and_gradient_are_those_of_the_paper(far: bool) -> None:
    config = PreferConfig("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    logits, batch = a_batch()
    batch["reference"][1::2] += -30.0 if far else 30.0
    found = judged(token_losses(logits, batch), batch, config).loss
    expected = by_hand(logits, batch, config)
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
    own, theirs = (
        torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (found.sum(), sum(expected))
    )
    torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)
    assert not own[1::2].any() and bool(own[::2].any())


def test_scores_are_of_all_rows_in_batches_as_in_training() -> None:
    """However they are looked at: in two processes, in other batches."""
    config = PreferConfig("kto", beta=0.3, undesirable_weight=0.7)
    logits, batch = a_batch()
    batch["rows"] = torch.arange(10)
    losses = [
        judged(token_losses(logits[rows], part), part, config).loss
        for rows in (slice(0, 6), slice(6, 10))
        for part in [{name: value[rows] for name, value in batch.items()}]
    ]
    ranks = [JudgementScorer(config, 5, 3) for _ in range(2)]
    for at, scorer in enumerate(ranks):
        rows = [row for row in range(10) if row // 2 % 2 == at]
        scorer.look(logits[rows], {name: value[rows] for name, value in batch.items()})
    total = [a + b for a, b in zip(*(scorer.numbers() for scorer in ranks), strict=True)]
    found = ranks[0].whole(total).result()
    assert found["loss"] == pytest.approx(float(torch.cat(losses).detach().mean()), abs=1e-12)
    assert 0 <= found["accuracy"] <= 1
