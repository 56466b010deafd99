"""Embeddings: their rows, their loss beside a formula written out, and the metrics of retrieval."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import DataError, UsageError
from petune.tasks import collate, encode, load_rows, render
from petune.tasks.configs import DataConfig, EmbedConfig
from petune.tasks.embed import refuse_alone
from petune.tasks.embed_loss import EmbeddingScorer, alone, contrastive, pooled
from petune.tasks.examples import Example


def rows(jsonl: Any, folder: Path, *records: dict[str, Any]) -> list[Any]:
    """The rows of a file of these records, whichever side they are on."""
    found = load_rows(DataConfig(jsonl(*records)), "embed", folder)
    return [*found.train, *found.eval]


@pytest.mark.parametrize(
    ("names", "negative"),
    [
        (("anchor", "positive", None), ()),
        (("text1", "text2", None), ()),
        (("query", "positive", "negative"), ("no 0",)),
    ],
)
def test_columns_are_found_by_their_usual_names(
    names: tuple[str, ...], negative: tuple[str, ...], jsonl: Any, tmp_path: Path
) -> None:
    records = [
        {name: f"{('a', 'p', 'no')[at]} {number}" for at, name in enumerate(names) if name}
        for number in (0, 1)
    ]
    found = rows(jsonl, tmp_path, *records)
    first = next(row for row in found if row.anchor == "a 0")
    assert (first.positive, first.negatives) == ("p 0", negative)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"anchor": "a", "positive": "a"}, "anchor and positive are equal"),
        ({"anchor": "a", "positive": ""}, "column 'positive' is empty"),
        ({"anchor": "a", "positive": "b", "negative": "b"}, "a negative is the positive"),
        ({"anchor": "a", "positive": "b", "negative": [3]}, "column 'negative' is a whole number"),
    ],
)
def test_a_row_that_cannot_be_learned_is_named(
    record: dict[str, Any], words: str, jsonl: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf":1 [\s\S]*{words}"):
        rows(jsonl, tmp_path, record)


def test_texts_stand_one_behind_the_other_and_their_number_is_the_same(
    jsonl: Any, tmp_path: Path, tokenizer: Any
) -> None:
    record = {"anchor": "ab", "positive": "c", "negative": ["d", "efg"]}
    found = load_rows(DataConfig(jsonl(record, record | {"anchor": "xy"})), "embed", tmp_path)
    coded = encode(found, "embed", tokenizer, DataConfig("x"), model_kind="encoder")
    (example,) = coded.train
    batch = collate([example], "embed", 2)
    assert batch["input_ids"].shape == (4, 4) and batch["labels"].shape == (4,)
    assert batch["attention_mask"].sum(1).tolist() == [3, 2, 2, 4]
    assert [line[0] for line in render(example, tokenizer).splitlines()] == ["=", "+", "-", "-"]
    uneven = DataConfig(jsonl(record, *({**record, "anchor": f"{n}", "negative": ["d"]} for n in range(3))))
    with pytest.raises(DataError, match="different numbers of negatives"):
        encode(
            load_rows(uneven, "embed", tmp_path), "embed", tokenizer, DataConfig("x"), model_kind="encoder"
        )


# ---------------------------------------------------------------- loss and metrics


def by_hand(texts: Tensor, config: EmbedConfig) -> Tensor:
    """-log of the softmax of cosines, one anchor after the other."""
    total = torch.zeros((), dtype=texts.dtype)
    for size in (texts.shape[-1], *config.dims):
        part = texts[..., :size]
        for row, own in enumerate(part):
            every = [*part[:, 1], *(text for at in range(2, part.shape[1]) for text in part[:, at])]
            scores = [config.scale * (own[0] @ text) / (own[0].norm() * text.norm()) for text in every]
            weights = [torch.exp(score) for score in scores]
            total = total - torch.log(weights[row] / sum(weights))  # type: ignore[arg-type]
    return total


@pytest.mark.parametrize("texts", [2, 3])
@pytest.mark.parametrize(
    "config", [EmbedConfig(), EmbedConfig(scale=5.0, dims=(4, 2))], ids=["plain", "dims"]
)
def test_loss_and_gradient_are_those_of_the_formula(texts: int, config: EmbedConfig) -> None:
    torch.manual_seed(0)
    found = torch.randn(5, texts, 6, dtype=torch.float64, requires_grad=True)
    loss, expected = contrastive(found, config), by_hand(found, config)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    own, theirs = (torch.autograd.grad(one, found)[0] for one in (loss, expected))
    torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def test_more_features_than_there_are_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match=r"embed\.dims"):
        contrastive(torch.randn(2, 2, 6), EmbedConfig(dims=(8,)))


def test_a_pass_of_one_row_needs_a_negative() -> None:
    alone_there, with_one = (
        [Example([5], 0, "f:1", 1, others=(Example([6], 0, "f:1", 1),) * count)] * 3 for count in (1, 2)
    )
    refuse_alone(with_one, 1, "batch_size")
    refuse_alone(alone_there, 2, "batch_size")
    for rows, size in ((alone_there, 1), (alone_there[:1], 8)):
        with pytest.raises(UsageError, match="there is one row"):
            refuse_alone(rows, size, "batch_size")


def test_rows_of_two_processes_give_the_loss_of_one() -> None:
    torch.manual_seed(0)
    found = torch.randn(5, 3, 6, dtype=torch.float64)
    unit = torch.nn.functional.normalize(found, dim=-1)
    sides = ((found[:2], 0), (found[2:], 2))
    parts = [contrastive(side, EmbedConfig(), lambda _, at=at: (unit[:, 1:], at)) for side, at in sides]  # type: ignore[misc]
    torch.testing.assert_close(sum(parts), contrastive(found, EmbedConfig(), alone))


@pytest.mark.parametrize("side", ["right", "left"])
def test_pooling_sees_no_padding(side: str) -> None:
    hidden = torch.arange(24, dtype=torch.float64).view(2, 4, 3)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    mask = mask if side == "right" else mask.flip(-1)
    first = 0 if side == "right" else 2
    batch = {"attention_mask": mask}
    mean, cls = (pooled(hidden, batch, EmbedConfig(pooling)) for pooling in ("mean", "cls"))
    torch.testing.assert_close(mean, torch.stack([hidden[0, first : first + 2].mean(0), hidden[1].mean(0)]))
    torch.testing.assert_close(cls, torch.stack([hidden[0, first], hidden[1, 0]]))


def test_metrics_are_of_all_rows_whatever_the_batches() -> None:
    # anchors 0 and 1 lie at their positives, anchor 2 nearer to another's
    texts = torch.eye(4, dtype=torch.float64)[:3, None].repeat(1, 2, 1)
    texts[2, 0] = torch.tensor([1.0, 0.5, 0.2, 0.0])
    hidden, mask = texts.flatten(0, 1)[:, None], torch.ones(6, 1, dtype=torch.int64)
    whole, parts = (EmbeddingScorer(EmbedConfig(), 3, 2, 2) for _ in range(2))
    whole.look(hidden, {"attention_mask": mask})
    for at in (slice(4, 6), slice(0, 4)):
        parts.look(hidden[at], {"attention_mask": mask[at], "rows": torch.arange(6)[at]})
    found = whole.result()
    assert found["recall_at_1"] == pytest.approx(2 / 3) and found["mrr"] == pytest.approx((1 + 1 + 1 / 3) / 3)
    expected = (by_hand(texts[:2], EmbedConfig()) + by_hand(texts[2:], EmbedConfig())) / 3
    assert found["loss"] == pytest.approx(float(expected))
    assert parts.whole(parts.numbers()).result() == pytest.approx(found)
    with pytest.raises(DataError, match="no text was scored"):
        EmbeddingScorer(EmbedConfig(), 3, 2, 2).result()
