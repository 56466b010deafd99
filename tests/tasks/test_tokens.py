"""Token classification: tags at the first token of each word, entities counted as conlleval does, files of
words with tags."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.demo_baselines import tag_by_neighbours
from petune.demo import model_path
from petune.demo.punctuation import punctuated
from petune.errors import DataError, UsageError
from petune.tasks import DataConfig, Rows, Scorer, Tagged, encode, infer_task, load_rows, make_coder, render
from petune.tasks.examples import MASKED
from petune.tasks.metrics import entities
from petune.tasks.tokens import encode_words

WORDS, TAGS = (
    ("Überraschung", "in", "readfile", "x", "New", "York"),
    ("O", "O", "B-NAME", "O", "B-LOC", "I-LOC"),
)
CONFIG = DataConfig("unused")
CONLL = "-DOCSTART- -X- O\n\nNew NNP B-LOC\nYork NNP I-LOC\nis VB O\n\nAnn NNP B-PER\n"


@pytest.fixture(scope="module", params=["minilm", "tiny-bart"])
def real(request) -> Any:
    """A word-piece tokenizer, and a byte-level one whose offsets may begin with the blank before a word."""
    return AutoTokenizer.from_pretrained(model_path(request.param))


def coded(tokenizer: Any, *rows: Tagged, config: DataConfig = CONFIG) -> Any:
    labels = tuple(sorted({tag for row in rows for tag in row.tags}))
    return encode(
        Rows(list(rows), [], labels, "tokens", (), ""), "tokens", tokenizer, config, model_kind="encoder"
    )


def test_tokens_and_labels_are_those_of_transformers_word_numbers(real) -> None:
    (example,) = coded(real, Tagged("d:1", WORDS, TAGS)).train
    theirs = real([WORDS[0], *(f" {word}" for word in WORDS[1:])], is_split_into_words=True)
    blank = {real.convert_tokens_to_ids("Ġ")}  # a token of its own before a rare word: not the word's first
    names = sorted(set(TAGS))
    numbers = [
        None if token in blank else word
        for token, word in zip(theirs["input_ids"], theirs.word_ids(), strict=True)
    ]
    firsts = [
        number if number is not None and number not in numbers[:place] else None
        for place, number in enumerate(numbers)
    ]
    assert example.input_ids == theirs["input_ids"]
    assert example.labels == [MASKED if word is None else names.index(TAGS[word]) for word in firsts]


@pytest.mark.parametrize(
    ("side", "kept", "firsts"),
    [("right", "<s>abcdef g", [1, 8, None]), ("left", "<s>f ghi jk", [None, 3, 7])],
)
def test_of_a_word_whose_beginning_is_cut_off_nothing_is_trained(
    side: str, kept: str, firsts: list, tokenizer
) -> None:
    coder = make_coder(tokenizer, replace(CONFIG, max_length=9, truncation=side))
    found = encode_words(("abcdef", "ghi", "jk"), coder)
    assert (tokenizer.decode(found.input_ids), found.firsts, found.length) == (kept, firsts, 14)


def test_a_row_is_shown_with_its_tags(tokenizer) -> None:
    (example,) = coded(tokenizer, Tagged("d:1", ("ab", "c"), ("O", "B-X"))).train
    assert render(example, tokenizer, ("B-X", "O")) == "<s> [[a O]] b   [[c B-X]]"


def test_the_tags_of_a_run_are_those_of_both_sides_and_are_counted(jsonl, tmp_path: Path) -> None:
    rows = [
        {"tokens": ["a", f"{n}"], "ner_tags": ["O", "B-X" if n else "B-RARE"], "id": n} for n in range(20)
    ]
    found = load_rows(DataConfig(jsonl(*rows)), "tokens", tmp_path)
    assert found.labels == ("B-RARE", "B-X", "O")
    assert "columns not used: id" in found.notes
    assert any(note.startswith("words per tag, to train on + held out: O 18 + 2") for note in found.notes)
    assert infer_task(found.format, "encoder") == "tokens"


def test_numbers_of_a_class_label_in_parquet_are_named(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        tokens=datasets.List(datasets.Value("string")),
        ner_tags=datasets.List(datasets.ClassLabel(names=["O", "B-X"])),
    )
    rows = [{"tokens": ["a", str(n)], "ner_tags": [0, 1]} for n in range(10)]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "d.parquet")
    assert load_rows(DataConfig("d.parquet"), "tokens", tmp_path).labels == ("B-X", "O")


@pytest.mark.parametrize(
    ("name", "text"), [("d.conll", CONLL), ("d.txt", CONLL), ("d.bio", CONLL.replace(" ", "\t"))]
)
def test_a_file_of_words_with_tags_gives_its_sentences_with_their_lines(
    name: str, text: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    rows = load_rows(DataConfig(name, split=0.5), "tokens", tmp_path)
    found = sorted((*rows.train, *rows.eval), key=lambda row: row.where)
    assert found == [
        Tagged(f"{name}:3", ("New", "York", "is"), ("B-LOC", "I-LOC", "O")),
        Tagged(f"{name}:7", ("Ann",), ("B-PER",)),
    ]
    assert "columns not used: column 2" in rows.notes


BAD = [
    ("d.conll", "a O\rb B-X\r", "d.conll  this file has no line ends but carriage returns"),
    ("d.txt", "one\rtwo\r", r"d.txt  .*carriage returns[\s\S]*found 1 of them[\s\S]*tr "),
    ("d.conll", "a O\nb B-X\nc\n\nd O\n", r"d.conll:3 .*another width[\s\S]*2 cells"),
    ("d.jsonl", '{"tokens": ["a", "b"], "tags": ["O"]}\n', "d.jsonl:1  not as many tags as words"),
    (
        "d.jsonl",
        '{"tokens": ["a", 3], "tags": ["O", "O"]}\n',
        r"d.jsonl:1 .*'tokens' is not a list of strings",
    ),
    (
        "d.jsonl",
        '{"tokens": ["a", "b"], "tags": ["O", null]}\n',
        r"d.jsonl:1 .*'tags' is not a list of the names",
    ),
    ("d.jsonl", '{"tokens": [], "tags": []}\n', r"d.jsonl:1 .*no words"),
    (
        "d.jsonl",
        '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["b"], "tags": ["O"]}\n',
        "every word has the same tag",
    ),
]


@pytest.mark.parametrize(("name", "text", "says"), BAD)
def test_wrong_rows_are_named_with_their_line(
    name: str, text: str, says: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    with pytest.raises(DataError, match=says):
        load_rows(DataConfig(name), "tokens", tmp_path)


def test_a_model_that_writes_its_answer_has_no_tags() -> None:
    with pytest.raises(UsageError, match="format tokens"):
        infer_task("tokens", "encoder-decoder")


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("B-A I-A O B-A", {("A", 0, 1), ("A", 3, 3)}),
        ("I-A I-A B-A I-B", {("A", 0, 1), ("A", 2, 2), ("B", 3, 3)}),
        ("B-A E-A S-A S-B I-B", {("A", 0, 1), ("A", 2, 2), ("B", 3, 3), ("B", 4, 4)}),
        ("B-A L-A U-B O I-A", {("A", 0, 1), ("B", 2, 2), ("A", 4, 4)}),
        ("E-A I-A E-A", {("A", 0, 0), ("A", 1, 2)}),
        ("NN NN O VB", {("NN", 0, 1), ("VB", 3, 3)}),
        ("B-A-B I-A-B I-A", {("A-B", 0, 1), ("A", 2, 2)}),
        ("O O", set()),
    ],
)
def test_entities_are_those_of_conlleval(tags: str, found: set) -> None:
    assert entities(tags.split()) == found


def test_entities_are_scored_over_rows_and_over_processes() -> None:
    labels = ("B-A", "I-A", "O")
    gold = torch.tensor([[MASKED, 0, 1, 2, MASKED], [MASKED, 0, MASKED, 2, 0]])
    # row 1: one right, one too many; row 2: one right, one missed
    said = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 2, 2]])
    logits = torch.nn.functional.one_hot(said, 3).float()
    parts = []
    for row in (0, 1):
        scorer = Scorer("tokens", labels)
        scorer.add(logits[row : row + 1], gold[row : row + 1], 1.5, 3)
        parts.append(scorer.numbers())
    scores = Scorer.of("tokens", labels, [sum(pair) for pair in zip(*parts, strict=True)]).result()
    assert scores == {"loss": 0.5, "precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "accuracy": 4 / 6}


def test_the_demo_task_takes_punctuation_away_and_asks_for_it() -> None:
    words, tags = punctuated("Call os.read_file('a path'), or None (e.g. in Python). Returns: a value; why?")
    assert (
        " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))
        == "call/O a/O path/S-COMMA or/O none/O e.g/S-STOP in/O python/S-STOP returns/S-COLON a/O"
        " value/S-COLON why/S-STOP"
    )


def test_the_baseline_of_tags_knows_two_words_else_the_second_of_them() -> None:
    trained = [(("a", "b", "c"), ("X", "O", "Y")), (("a", "b"), ("X", "O")), (("d", "b"), ("Z", "O"))]
    # before b: X, X, Z
    assert tag_by_neighbours(trained, [["a", "b", "c"], ["new", "b", "new"]]) == [
        ["X", "O", "Y"],
        ["X", "O", "O"],
    ]
