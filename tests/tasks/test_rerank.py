"""Reranking: its rows, its losses beside formulas written out, and the metrics of ranked passages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.errors import DataError, UsageError
from petune.tasks import collate, encode, load_rows, render
from petune.tasks.configs import DataConfig, RerankConfig
from petune.tasks.rerank import refuse_single
from petune.tasks.rerank_loss import RankingScorer, passage_scores, ranking_losses
from petune.tasks.rows import Anchored, Labelled

LISTED = {"query": "ab", "positive": "c", "negative": ["d", "efg"]}
JUDGED = {"query": "ab", "passage": "c", "label": 1}


def rows(jsonl: Any, folder: Path, *records: dict[str, Any]) -> list[Any]:
    """The rows of a file of these records, whichever side they are on."""
    found = load_rows(DataConfig(jsonl(*records)), "rerank", folder)
    return [*found.train, *found.eval]


@pytest.mark.parametrize("label", [1, 0, True, False, 1.0, "0", "true"])
def test_a_label_says_whether_the_passage_answers(label: Any, jsonl: Any, tmp_path: Path) -> None:
    found = rows(jsonl, tmp_path, *({**JUDGED, "query": f"q {at}", "label": label} for at in range(2)))
    first = next(row for row in found if row.text == "q 0")
    assert isinstance(first, Labelled) and first.pair == "c"
    assert first.label == str(int(str(label).lower() in ("1", "1.0", "true")))


def test_columns_with_a_label_are_judged_and_those_with_negatives_compared(
    jsonl: Any, tmp_path: Path
) -> None:
    for record, kind in ((LISTED, Anchored), (JUDGED, Labelled), ({**JUDGED, "answer": "x"}, Labelled)):
        assert {type(row) for row in rows(jsonl, tmp_path, record, {**record, "query": "z"})} == {kind}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({**JUDGED, "label": 2}, "column 'label' says neither yes nor no"),
        ({**JUDGED, "passage": ""}, "column 'passage' is empty"),
        ({"query": "a", "positive": "b", "negative": ["b"]}, "a negative is the positive"),
        ({"query": "a", "passage2": "b"}, "the columns do not fit task rerank"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(
    record: dict[str, Any], words: str, jsonl: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        rows(jsonl, tmp_path, record)


def test_passages_stand_behind_their_query_the_right_one_first(
    jsonl: Any, tmp_path: Path, tokenizer: Any
) -> None:
    def coded(*records: dict[str, Any], **more: Any) -> Any:
        found = load_rows(DataConfig(jsonl(*records)), "rerank", tmp_path)
        return encode(found, "rerank", tokenizer, DataConfig("x", **more), model_kind="encoder").train

    (example,) = coded(LISTED, {**LISTED, "query": "xy"})
    batch = collate([example], "rerank", 2)
    assert batch["labels"].tolist() == [1, 0, 0]
    assert batch["attention_mask"].sum(1).tolist() == [5, 5, 7]  # two beginnings, the query, the passage
    assert [line[0] for line in render(example, tokenizer).splitlines()] == ["+", "-", "-"]
    (cut,) = coded({**LISTED, "positive": "c" * 30}, {**LISTED, "query": "xy"}, max_length=8)
    assert tokenizer.decode(cut.input_ids).count("c") == 4 and cut.cut
    (judged,) = coded({**JUDGED, "label": 0}, {**JUDGED, "query": "xy", "label": 0})
    assert render(judged, tokenizer).endswith("-> [[0]]")
    with pytest.raises(DataError, match="different numbers of negatives"):
        coded(LISTED, *({**LISTED, "query": f"{n}", "negative": ["d"]} for n in range(3)))
    with pytest.raises(DataError, match="no passage that does not answer the query"):
        coded(*({"query": f"{n}", "positive": "c"} for n in range(3)))
    refuse_single(RerankConfig("softmax"), [example], "r:1")
    with pytest.raises(UsageError, match=r"rerank\s.*softmax compares the passages of one query"):
        refuse_single(RerankConfig("softmax"), [judged], "rerank")


# ---------------------------------------------------------------- loss and metrics


@pytest.mark.parametrize(("loss", "texts"), [("bce", 1), ("bce", 3), ("softmax", 3)])
def test_loss_and_gradient_are_those_of_the_formula(loss: str, texts: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4 * texts, 1, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 0, 0] * 4) if texts > 1 else torch.tensor([1, 0, 0, 1])
    found = ranking_losses(passage_scores(logits), labels, texts, RerankConfig(loss))
    expected = []
    for row in range(4):
        own = logits[row * texts : (row + 1) * texts, 0]
        if loss == "softmax":
            expected.append(-torch.log(own[0].exp() / own.exp().sum()))
            continue
        right = [1 / (1 + torch.exp(-score)) for score in own]
        gold = labels[row * texts : (row + 1) * texts].tolist()
        losses = [-torch.log(p if y else 1 - p) for p, y in zip(right, gold, strict=True)]
        expected.append(torch.stack(losses).mean())
    wanted = torch.stack(expected)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    grads = (torch.autograd.grad(one.sum(), logits)[0] for one in (found, wanted))
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12)


def test_places_beyond_the_tenth_count_for_nothing_and_equal_scores_for_no_place() -> None:
    scores = torch.zeros(4, 12, dtype=torch.float64)
    scores[0, 0] = 1  # first
    scores[1] = torch.tensor([0, 2, 1, *[-1] * 9])  # third
    scores[2] = torch.arange(12.0)  # last
    whole, parts = RankingScorer(RerankConfig("softmax"), 12), []
    labels = torch.tensor([1, *[0] * 11] * 4)
    whole.look(scores.view(-1, 1), {"labels": labels})
    for at in (slice(0, 24), slice(24, 48)):
        parts.append(RankingScorer(RerankConfig("softmax"), 12))
        parts[-1].look(scores.view(-1, 1)[at], {"labels": labels[at]})
    found = whole.result()
    assert found["mrr_at_10"] == pytest.approx((1 + 1 / 3) / 4)
    assert found["ndcg_at_10"] == pytest.approx((1 + 1 / math.log2(4)) / 4)
    sums = [one + other for one, other in zip(parts[0].numbers(), parts[1].numbers(), strict=True)]
    assert whole.whole(sums).result() == pytest.approx(found)


def test_a_single_passage_is_right_on_the_side_of_zero_that_its_label_says() -> None:
    scorer = RankingScorer(RerankConfig(), 1)
    logits = torch.tensor([[2.0], [-1.0], [0.5], [0.0]])
    scorer.look(logits, {"labels": torch.tensor([1, 1, 0, 0])})
    found = scorer.result()
    assert found.keys() == {"accuracy", "loss"} and found["accuracy"] == 0.5
    with pytest.raises(DataError, match="no passage was scored"):
        RankingScorer(RerankConfig(), 1).result()
