"""Preferences: their rows, what of them is trained, and their losses beside the papers' formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import DataError, UsageError
from petune.tasks import collate, detect_format, encode, infer_task, load_rows, render
from petune.tasks.configs import DataConfig, PreferConfig
from petune.tasks.prefer_loss import PreferenceScorer, judged, text_scores, token_losses
from petune.tasks.rows import Conversation

ASK = {"role": "user", "content": "Two?"}
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "3"}
FORMS: dict[str, dict[str, Any]] = {
    "turns": {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "prompt of turns": {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
    "prompt said twice": {"prompt": "Two?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
    "prompt a text": {"prompt": "Two?", "chosen": [GOOD], "rejected": [BAD]},
    "sharegpt": {
        "prompt": "Two?",
        "chosen": [{"from": "gpt", "value": "2"}],
        "rejected": [{"from": "gpt", "value": "3"}],
    },
}


def rows(jsonl: Any, folder: Path, *records: dict[str, Any], task: str = "prefer") -> list[Any]:
    """The rows of a file of these records, whichever side they are on."""
    found = load_rows(DataConfig(jsonl(*records)), task, folder)
    return [*found.train, *found.eval]


def other(record: dict[str, Any], number: int) -> dict[str, Any]:
    """The record with another prompt, so that one can be held out."""
    return dict(json.loads(json.dumps(record).replace("Two?", f"Two{number}?")))


@pytest.mark.parametrize("form", FORMS)
def test_every_way_to_write_turns_gives_the_same_conversation(form: str, jsonl: Any, tmp_path: Path) -> None:
    found = rows(jsonl, tmp_path, *(other(FORMS[form], number) for number in range(2)))
    assert {type(row.chosen) for row in found} == {Conversation}
    for row in found:
        assert [turn.role for turn in row.chosen.messages] == ["user", "assistant"]
        assert (row.chosen.messages[-1].content, row.rejected.messages[-1].content) == ("2", "3")
        assert row.chosen.messages[:-1] == row.rejected.messages[:-1]


def test_texts_are_found_by_their_usual_names_and_the_task_follows(jsonl: Any, tmp_path: Path) -> None:
    record = {"question": "q", "chosen": "good", "rejected": "bad"}
    file = jsonl(record, record | {"question": "other"})
    assert infer_task(detect_format(DataConfig(file), tmp_path), "decoder") == "prefer"
    found = rows(jsonl, tmp_path, record, record | {"question": "other"})
    assert sorted((row.chosen.source, row.chosen.target, row.rejected.target) for row in found) == [
        ("other", "good", "bad"),
        ("q", "good", "bad"),
    ]
    with pytest.raises(UsageError, match="have no task for a model of kind encoder"):
        infer_task("preferences", "encoder")


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "the chosen and the rejected answer are equal"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "column 'rejected' is empty"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "system": "s"},
            "'system' has no place beside texts",
        ),
        ({"chosen": [ASK, GOOD], "rejected": [{**ASK, "content": "Three?"}, BAD]}, "follow different turns"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "an answer follows no prompt"),
        ({"chosen": [ASK, GOOD, ASK], "rejected": [ASK, BAD]}, "does not end with a turn of the assistant"),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [BAD]}, "neither a text nor a list of turns"),
    ],
)
def test_a_row_that_cannot_be_compared_is_named(
    record: dict[str, Any], words: str, jsonl: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf":1 [\s\S]*{words}"):
        rows(jsonl, tmp_path, record)


def test_rows_of_one_prompt_are_on_one_side(jsonl: Any, tmp_path: Path) -> None:
    records = [
        {"prompt": f"q{number % 5}", "chosen": f"good {number}", "rejected": "bad"} for number in range(40)
    ]
    found = load_rows(DataConfig(jsonl(*records), split=0.4), "prefer", tmp_path)
    sides = [{row.chosen.source for row in side} for side in (found.train, found.eval)]  # type: ignore[union-attr]
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_only_the_answers_are_trained_and_stand_one_behind_the_other(
    jsonl: Any, tmp_path: Path, tokenizer: Any
) -> None:
    record = {"prompt": "ab", "chosen": "cd", "rejected": "efg"}
    found = load_rows(DataConfig(jsonl(record, record | {"prompt": "xy"})), "prefer", tmp_path)
    coded = encode(found, "prefer", tokenizer, DataConfig("x", separator=""), model_kind="decoder")
    (example,) = coded.train
    assert (example.others[0].trained, example.trained) == (4, 7)
    assert example.tokens == sum(len(text.input_ids) for text in example.texts)
    batch = collate([example], "prefer", 2)
    assert batch["input_ids"].shape == (2, 7) and "reference" not in batch
    assert tokenizer.decode(batch["input_ids"][0][batch["labels"][0] >= 0]) == "cd</s>"
    assert tokenizer.decode(batch["input_ids"][1][batch["labels"][1] >= 0]) == "efg</s>"
    assert render(example, tokenizer).splitlines() == ["+ <s>xy[[cd</s>]]", "- <s>xy[[efg</s>]]"] or render(
        example, tokenizer
    ).splitlines() == ["+ <s>ab[[cd</s>]]", "- <s>ab[[efg</s>]]"]
    assert "answers: chosen p50 3 tokens, rejected p50 4" in coded.report.notes


def test_a_pair_of_which_one_text_has_nothing_left_is_dropped(
    jsonl: Any, tmp_path: Path, tokenizer: Any
) -> None:
    short = [{"prompt": f"p{number}", "chosen": "ab", "rejected": "c"} for number in range(9)]
    long = {"prompt": "p" * 30, "chosen": "ab", "rejected": "c"}
    found = load_rows(DataConfig(jsonl(*short, long), split=0.2), "prefer", tmp_path)
    coded = encode(found, "prefer", tokenizer, DataConfig("x", max_length=20), model_kind="decoder")
    assert coded.report.dropped + coded.report.eval_dropped == 1


# ---------------------------------------------------------------- the losses


def a_batch(pairs: int = 3) -> tuple[Tensor, dict[str, Tensor]]:
    """Random logits of texts of uneven lengths, in float64, and their batch."""
    torch.manual_seed(0)
    logits = torch.randn(2 * pairs, 9, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 7, (2 * pairs, 9))
    for row in range(2 * pairs):
        labels[row, : 2 + row % 3] = -100
        labels[row, 9 - row % 4 :] = -100
    return logits, {"labels": labels, "reference": -10 * torch.rand(2 * pairs, dtype=torch.float64)}


def by_hand(logits: Tensor, batch: dict[str, Tensor], config: PreferConfig) -> list[Tensor]:
    """The loss of each pair, token by token, from the papers."""
    sums, counts = [], []
    for row, labels in zip(logits, batch["labels"], strict=True):
        places = [at for at in range(1, 9) if labels[at] >= 0]
        sums.append(sum((row[at - 1].log_softmax(-1)[labels[at]] for at in places), torch.zeros(())))
        counts.append(len(places))
    found = []
    for at in range(0, len(logits), 2):
        (pw, pl), (nw, nl) = sums[at : at + 2], counts[at : at + 2]
        rw, rl = batch["reference"][at : at + 2]
        if config.loss == "dpo":
            z = config.beta * ((pw - rw) - (pl - rl))
            right, wrong = 1 / (1 + torch.exp(-z)), 1 / (1 + torch.exp(z))
            found.append(
                -(1 - config.label_smoothing) * torch.log(right) - config.label_smoothing * torch.log(wrong)
            )
        elif config.loss == "ipo":
            found.append(((pw - rw) / nw - (pl - rl) / nl - 1 / (2 * config.beta)) ** 2)
        else:
            (cw, cl) = (torch.exp(pw / nw), torch.exp(pl / nl))
            odds = (cw / (1 - cw)) / (cl / (1 - cl))
            found.append(-pw / nw - config.beta * torch.log(1 / (1 + 1 / odds)))
    return found


@pytest.mark.parametrize(
    "config",
    [
        PreferConfig(),
        PreferConfig(beta=0.5, label_smoothing=0.1),
        PreferConfig("ipo", beta=0.3),
        PreferConfig("orpo", beta=0.7),
    ],
    ids=lambda config: f"{config.loss} {config.label_smoothing}",
)
def test_loss_and_gradient_are_those_of_the_paper(config: PreferConfig) -> None:
    logits, batch = a_batch()
    found = judged(token_losses(logits, batch), batch, config).loss
    expected = by_hand(logits, batch, config)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)
    own, theirs = (
        torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (found, sum(expected))
    )  # type: ignore[union-attr]
    torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)


def test_scores_of_texts_are_sums_over_their_own_tokens() -> None:
    logits, batch = a_batch(1)
    scores, tokens = text_scores(token_losses(logits, batch), batch["labels"])
    assert tokens.tolist() == [(row[1:] >= 0).sum().item() for row in batch["labels"]]
    for row, score in zip(range(2), scores, strict=True):
        alone = {"labels": batch["labels"][row : row + 1]}
        torch.testing.assert_close(
            text_scores(token_losses(logits[row : row + 1], alone), alone["labels"])[0][0], score
        )


def test_metrics_count_pairs_and_add_over_batches() -> None:
    logits, batch = a_batch(4)
    config = PreferConfig(beta=0.5)
    whole, first, second = (PreferenceScorer(config) for _ in range(3))
    whole.look(logits, batch)
    first.look(logits[:2], {name: value[:2] for name, value in batch.items()})
    second.look(logits[2:], {name: value[2:] for name, value in batch.items()})
    together = whole.whole([one + two for one, two in zip(first.numbers(), second.numbers(), strict=True)])
    assert together.result() == pytest.approx(whole.result())
    found = judged(token_losses(logits, batch), batch, config)
    margins = [float(one - two) for one, two in zip(found.chosen, found.rejected, strict=True)]
    assert whole.result()["accuracy"] == sum(margin > 0 for margin in margins) / 4
    assert whole.result()["margin"] == pytest.approx(sum(margins) / 4)
    with pytest.raises(DataError, match="no pair was scored"):
        PreferenceScorer(config).result()


def test_a_model_that_has_not_moved_has_a_loss_of_log_two() -> None:
    logits, batch = a_batch()
    batch["reference"] = text_scores(token_losses(logits, batch), batch["labels"])[0].detach()
    found = judged(token_losses(logits, batch), batch, PreferConfig())
    assert found.loss.tolist() == pytest.approx([math.log(2)] * 3)
    assert torch.equal(found.chosen, torch.zeros_like(found.chosen))
