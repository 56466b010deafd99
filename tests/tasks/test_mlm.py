"""Masked words, and documents cut into windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from petune.demo import model_path
from petune.errors import DataError, FileError, UsageError
from petune.tasks import DataConfig, Rows, Text, encode, load_rows, render
from petune.tasks.examples import MASKED

CONFIG = DataConfig("unused")
TEXT = "the quick brown fox jumps over the lazy dog and runs into the wood " * 3


@pytest.fixture(scope="module")
def bert() -> Any:
    return AutoTokenizer.from_pretrained(model_path("minilm"))


def coded(tokenizer: Any, task: str, *texts: str, **settings: Any) -> Any:
    rows = [Text(f"d:{line}", text) for line, text in enumerate(texts, start=1)]
    kind = "encoder" if task == "mlm" else "decoder"
    return encode(
        Rows(rows, rows[:1], None, "text", (), ""),
        task,
        tokenizer,
        replace(CONFIG, **settings),
        model_kind=kind,
    )


# --- masks ---


def test_three_in_twenty_tokens_are_trained_in_the_shares_of_the_paper(bert) -> None:
    encoded = coded(bert, "mlm", TEXT)
    (whole,) = encoded.train
    chosen = hidden = kept = 0
    for step in range(300):
        (drawn,) = encoded.drawn(encoded.train, f"seed 0 step {step}")
        places = [place for place, label in enumerate(drawn.labels) if label != MASKED]
        assert len(places) == round(0.15 * (len(whole.input_ids) - 2))
        assert [drawn.labels[place] for place in places] == [whole.input_ids[place] for place in places]
        assert not {drawn.labels[place] for place in places} & set(bert.all_special_ids)
        assert all(
            drawn.input_ids[place] == whole.input_ids[place]
            for place in range(len(whole.input_ids))
            if place not in places
        )
        chosen += len(places)
        hidden += sum(drawn.input_ids[place] == bert.mask_token_id for place in places)
        kept += sum(drawn.input_ids[place] == whole.input_ids[place] for place in places)
    assert hidden / chosen == pytest.approx(0.8, abs=0.04)
    assert kept / chosen == pytest.approx(0.1, abs=0.03)


def test_masks_follow_from_seed_step_and_row_alone(bert) -> None:
    encoded = coded(bert, "mlm", TEXT, TEXT + "again")
    first, second = encoded.drawn(encoded.train, "seed 0 step 3")
    assert encoded.drawn([encoded.train[0]], "seed 0 step 3") == [first]
    assert [one.labels for one in encoded.drawn(encoded.train, "seed 0 step 4")] != [
        first.labels,
        second.labels,
    ]
    assert [one.labels for one in encoded.drawn(encoded.train, "seed 1 step 3")] != [
        first.labels,
        second.labels,
    ]


def test_held_out_rows_have_one_choice_of_masks(bert) -> None:
    assert coded(bert, "mlm", TEXT).eval == coded(bert, "mlm", TEXT).eval
    assert bert.mask_token_id in coded(bert, "mlm", TEXT).eval[0].input_ids


def test_a_row_of_one_word_has_a_mask_and_one_without_words_is_dropped(bert) -> None:
    encoded = coded(bert, "mlm", "word", "[SEP]", "more")
    assert [example.where for example in encoded.train] == ["d:1", "d:3"]
    assert encoded.drawn(encoded.train, "x")[0].trained == 1


def test_a_tokenizer_without_mask_token_is_refused(tokenizer) -> None:
    with pytest.raises(FileError, match="no mask token"):
        coded(tokenizer, "mlm", TEXT)


# --- windows ---


def test_windows_of_a_decoder_hold_every_token_once_with_an_end_after_each_document(tokenizer) -> None:
    encoded = coded(tokenizer, "causal", "abcdefghij", "klmno", chunk=True, max_length=8)
    assert [tokenizer.decode(example.input_ids) for example in encoded.train] == [
        "<s>abcdefg",
        "hij</s><s>klm",
        "no</s>",
    ]
    assert [render(example, tokenizer) for example in encoded.train] == [
        "<s>[[abcdefg]]",
        "h[[ij</s>]]<s>[[klm]]",
        "n[[o</s>]]",
    ]
    assert [example.where for example in encoded.train] == ["d:1", "d:1", "d:2"]
    assert encoded.report.truncated == 0
    assert any(
        "documents joined and cut into windows: 2 into 3, held out 1 into 2" in line
        for line in encoded.report.lines()
    )


def test_windows_train_ends_and_words_that_are_the_token_a_text_begins_with(make_tokenizer) -> None:
    same = make_tokenizer(bos=False)
    same.bos_token = "</s>"  # one token for both, as GPT-2, OPT and Pythia have it
    made = coded(same, "causal", "abcde", "fg", chunk=True, max_length=12).train
    assert [render(one, same) for one in made] == ["a[[bcde</s>fg</s>]]"]
    said = coded(make_tokenizer(), "causal", "ab<s>c", "d", chunk=True, max_length=12).train
    assert [render(one, make_tokenizer()) for one in said] == ["<s>[[ab<s>c</s>]]<s>[[d</s>]]"]


def test_windows_of_an_encoder_are_framed_by_its_special_tokens(bert) -> None:
    encoded = coded(bert, "mlm", "a b c d e f g", "h i", chunk=True, max_length=8)
    assert [bert.decode(example.input_ids) for example in encoded.train] == [
        "[CLS] a b c d e f [SEP]",
        "[CLS] g [SEP] h i [SEP]",
    ]
    assert all(
        label == MASKED
        for one in encoded.train
        for token, label in zip(one.input_ids, one.labels, strict=True)
        if token == 102
    )


def test_a_text_file_is_one_document_and_its_end_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one two\n\nthree four five six seven eight nine ten\n")
    rows = load_rows(DataConfig("book.txt", chunk=True, split=0.25), "causal", tmp_path)
    assert (rows.train[0].text, rows.eval[0].text) == (
        "one two\n\nthree four five six seven eight",
        "nine ten\n",
    )
    assert "held out the last 25% of the document" in rows.notes


def test_of_many_documents_some_are_held_out_whole(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"text {number}\nof two lines")
    rows = load_rows(DataConfig(str(tmp_path), chunk=True), "causal", tmp_path)
    assert (len(rows.train), len(rows.eval)) == (7, 1)
    assert rows.eval[0].text.endswith("\nof two lines")


def test_rows_that_are_no_plain_text_are_not_cut_into_windows(jsonl, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data\.chunk[\s\S]*found pairs"):
        load_rows(DataConfig(jsonl({"source": "a", "target": "b"}), chunk=True), "causal", tmp_path)


def test_a_document_of_one_word_cannot_be_parted(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("word")
    with pytest.raises(DataError, match=r"one word[\s\S]*data\.eval"):
        load_rows(DataConfig("d.txt", chunk=True), "causal", tmp_path)
