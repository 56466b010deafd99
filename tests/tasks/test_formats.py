from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from petune.errors import DataError, UsageError
from petune.tasks import Conversation, DataConfig, Message, Pair, detect_format, infer_task, load_rows
from petune.tasks.formats import detect
from petune.tasks.lines import RowRecord

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
GPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]


@pytest.mark.parametrize(
    ("columns", "task", "format_"),
    [
        ({"text": "x", "label": "a"}, None, "text-label"),
        ({"sentence1": "x", "sentence2": "y", "label": 1}, None, "text-label"),
        ({"prompt": "x", "completion": "y"}, None, "pairs"),
        ({"article": "x", "summary": "y"}, None, "pairs"),
        ({"document": "x", "summary": "y", "id": "1"}, None, "pairs"),
        ({"instruction": "x", "input": "", "output": "y"}, None, "alpaca"),
        ({"messages": CHAT}, None, "messages"),
        ({"conversations": GPT}, None, "sharegpt"),
        ({"text": "x"}, None, "text"),
        ({"text": "x", "label": "a"}, "causal", "text"),
        ({"text": "x", "label": "a", "prompt": "p", "completion": "c"}, "seq2seq", "pairs"),
    ],
)
def test_the_format_is_found_from_the_columns(columns: dict, task: str | None, format_: str) -> None:
    assert detect(RowRecord("d:1", columns), "auto", {}, task).format == format_


def test_two_possible_readings_are_an_error_not_a_guess() -> None:
    with pytest.raises(DataError, match="text-label, pairs"):
        detect(
            RowRecord("d:1", {"text": "x", "label": "a", "prompt": "p", "completion": "c"}), "auto", {}, None
        )


def test_a_column_may_be_named() -> None:
    layout = detect(
        RowRecord("d:1", {"review": "x", "text": "no", "stars": 5}),
        "auto",
        {"text": "review", "label": "stars"},
        "classify",
    )
    assert layout.columns == {"text": "review", "label": "stars"}


def test_a_named_column_that_is_missing_is_an_error_with_the_nearest() -> None:
    with pytest.raises(
        DataError, match=r"no column 'reveiw'[\s\S]*columns review, stars[\s\S]*did you mean: review"
    ):
        detect(RowRecord("d:1", {"review": "x", "stars": 5}), "auto", {"text": "reveiw"}, "classify")


def test_a_role_that_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean: label"):
        detect(RowRecord("d:1", {"text": "x"}), "auto", {"labl": "text"}, None)


def test_a_format_that_the_task_cannot_use_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="format messages does not fit task classify"):
        detect(RowRecord("d:1", {"messages": CHAT}), "messages", {}, "classify")


@pytest.mark.parametrize(
    ("format_", "kind", "task"),
    [
        ("text-label", "encoder", "classify"),
        ("pairs", "encoder-decoder", "seq2seq"),
        ("pairs", "decoder", "causal"),
        ("messages", "decoder", "chat"),
        ("text", "decoder", "causal"),
        ("text", "encoder", "mlm"),
        ("docstrings", "encoder", "classify"),
        ("docstrings", "encoder-decoder", "seq2seq"),
        ("docstrings", "decoder", "causal"),
    ],
)
def test_the_task_follows_from_format_and_model(format_: str, kind: str, task: str) -> None:
    assert infer_task(format_, kind) == task


@pytest.mark.parametrize(
    ("format_", "kind"),
    [
        ("messages", "encoder"),
        ("pairs", "encoder"),
        ("text", "encoder-decoder"),
        ("tokens", "encoder-decoder"),
    ],
)
def test_rows_that_a_model_cannot_learn_from_are_a_usage_error(format_: str, kind: str) -> None:
    with pytest.raises(UsageError, match=format_):
        infer_task(format_, kind)


def test_the_demo_corpus_has_a_format_of_its_own(tmp_path: Path) -> None:
    assert detect_format(DataConfig("demo:docstrings"), tmp_path) == "docstrings"


def test_alpaca_becomes_its_prompt_a_plain_source_or_a_conversation(jsonl, tmp_path: Path) -> None:
    path = jsonl(
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Greet.", "input": "", "output": "Hi"},
    )
    config = DataConfig(path, eval=path.replace("data", "other"))
    jsonl({"instruction": "Z", "output": "z"}, name="other.jsonl")
    causal, seq2seq, chat = (
        load_rows(config, task, tmp_path).train for task in ("causal", "seq2seq", "chat")
    )
    assert isinstance(causal[0], Pair)
    assert causal[0].source.endswith("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:")
    assert "### Input" not in causal[1].source
    assert seq2seq[0].source == "Add.\n\n1 2"
    assert isinstance(chat[0], Conversation)
    assert chat[0].messages == (Message("user", "Add.\n\n1 2"), Message("assistant", "3"))


def test_sharegpt_and_messages_give_the_same_conversation(jsonl, tmp_path: Path) -> None:
    one = load_rows(
        DataConfig(jsonl({"messages": CHAT}, {"messages": [CHAT[0], {"role": "assistant", "content": "2"}]})),
        "chat",
        tmp_path,
    )
    path = jsonl(
        {"conversations": GPT}, {"conversations": [GPT[0], {"from": "gpt", "value": "2"}]}, name="b.jsonl"
    )
    assert load_rows(DataConfig(path), "chat", tmp_path).sha256 == one.sha256


def test_number_labels_keep_the_order_of_numbers_and_may_be_flags(jsonl, tmp_path: Path) -> None:
    numbers = jsonl(*({"text": f"t{n}", "label": n % 11} for n in range(44)))
    assert load_rows(DataConfig(numbers), "classify", tmp_path).labels == tuple(str(n) for n in range(11))
    flags = jsonl(*({"text": f"t{n}", "label": n % 2 == 0} for n in range(8)), name="flags.jsonl")
    assert load_rows(DataConfig(flags), "classify", tmp_path).labels == ("false", "true")


PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        (PAIR, "data.columns.target=chosen"),
        ({"chosen": CHAT, "rejected": CHAT, "score": 1.0}, "data.columns.messages=chosen"),
        ({"prompt": "q", "completion": "a", "label": False}, "keep the rows whose label is true"),
    ],
)
def test_preferences_are_refused_as_such(columns: dict, remedy: str) -> None:
    with pytest.raises(DataError, match=rf"preferences between answers[\s\S]*{remedy}"):
        detect(RowRecord("d:1", columns), "auto", {}, "chat" if "score" in columns else "causal")


def test_the_preferred_answers_alone_may_be_asked_for() -> None:
    assert detect(RowRecord("d:1", PAIR), "auto", {"target": "chosen"}, None).columns == {
        "source": "prompt",
        "target": "chosen",
    }


@pytest.mark.parametrize(
    ("columns", "task", "remedy"),
    [
        ({"review": "x", "stars": 5}, "classify", r"data\.columns\.label=stars"),
        ({"txt": "x", "id": 5, "labels": "a"}, "classify", r"data\.columns\.text=txt"),
        ({"turns": [1, 2], "ids": [3]}, None, r"data\.columns\.text=COLUMN data\.columns\.label=COLUMN"),
        ({"a": "x", "b": "y"}, None, r"data\.columns\.text=COLUMN data\.columns\.label=COLUMN"),
    ],
)
def test_a_column_is_offered_for_a_role_only_if_its_values_could_play_it(
    columns: dict, task: str | None, remedy: str
) -> None:
    with pytest.raises(DataError, match=remedy):
        detect(RowRecord("d:1", columns), "auto", {}, task)


# ------------------------------------------------------------------ a label must not be lost without a word


def table(path: Path, header: str, rows: int = 20) -> DataConfig:
    cells = {
        "text": "seen {at} times",
        "few": "{few}",
        "own": "row {at}",
        "long": "a note of more than forty characters, as nobody labels",
    }
    roles = dict(part.split("=") for part in header.split(","))
    lines = [
        ",".join(f'"{cells[role]}"'.format(at=at, few=at % 5) for role in roles.values())
        for at in range(rows)
    ]
    path.write_text("\n".join([",".join(roles), *lines]) + "\n")
    return DataConfig(str(path))


@pytest.mark.parametrize(
    "names",
    [{"Text": "x", "Label": "a"}, {"TEXT": "x", "Class": 1}, {"Review": "x", "Sentiment": "a", "text_": "y"}],
)
def test_column_names_are_found_in_any_case(names: dict) -> None:
    text, label, *_ = names
    layout = detect(RowRecord("d:1", names), "auto", {}, None)
    assert (layout.format, layout.columns) == ("text-label", {"text": text, "label": label})


def test_the_usual_case_wins_over_another() -> None:
    assert (
        detect(RowRecord("d:1", {"Text": "x", "text": "y", "Label": 1}), "auto", {}, None).columns["text"]
        == "text"
    )


def test_preferences_are_refused_in_any_case() -> None:
    with pytest.raises(DataError, match="preferences"):
        detect(RowRecord("d:1", {"Prompt": "x", "Completion": "y", "Label": "True"}), "auto", {}, None)
    with pytest.raises(DataError, match=r"data\.columns\.target=Chosen"):
        detect(RowRecord("d:1", {"Prompt": "x", "Chosen": "y", "Rejected": "z"}), "auto", {}, "causal")


@pytest.mark.parametrize(
    ("header", "columns", "named"),
    [
        ("review=text,stars=few", {}, "data.columns.text=review data.columns.label=stars"),
        ("id=own,review=text,stars=few", {}, "data.columns.text=review data.columns.label=stars"),
        ("Comment=text,Labl=few", {"text": "Comment"}, "data.columns.text=Comment data.columns.label=Labl"),
        ("text=text,rating=few,lables=few", {}, "data.columns.text=text data.columns.label=lables"),
    ],
)
def test_text_beside_what_looks_like_a_label_is_a_question_not_a_guess(
    header: str, columns: dict, named: str, tmp_path: Path
) -> None:
    config = replace(table(tmp_path / "d.csv", header), columns=columns)
    with pytest.raises(DataError) as caught:
        detect_format(config, tmp_path)
    said = str(caught.value)
    assert named in said and "task=mlm" in said and "5 different values in 20 rows" in said
    named_columns = dict(part.removeprefix("data.columns.").split("=") for part in named.split())
    assert detect_format(replace(config, columns=named_columns), tmp_path) == "text-label"
    assert load_rows(config, "mlm", tmp_path).format == "text"  # which a recipe asks for by its task


@pytest.mark.parametrize(
    "header", ["text=text", "text=text,id=own", "text=text,note=long", "id=own,text=text,note=long"]
)
def test_text_beside_what_is_no_label_is_text(header: str, tmp_path: Path) -> None:
    assert detect_format(table(tmp_path / "d.csv", header), tmp_path) == "text"


def test_text_that_is_asked_for_is_text_whatever_is_beside_it(tmp_path: Path) -> None:
    config = table(tmp_path / "d.csv", "text=text,stars=few")
    assert (
        detect_format(replace(config, format="text"), tmp_path)
        == detect_format(replace(config, chunk=True), tmp_path)
        == "text"
    )


def test_classes_alike_but_for_case_or_never_held_out_are_warned_of(tmp_path: Path) -> None:
    rows = [f"seen {at} times,{'good' if at % 2 else 'bad'}" for at in range(20)]
    (tmp_path / "held.csv").write_text("text,label\n" + "\n".join(rows[:10]) + "\n")
    config = DataConfig(str(tmp_path / "d.csv"), eval=str(tmp_path / "held.csv"))
    (tmp_path / "d.csv").write_text("text,label\n" + "\n".join(rows[10:]) + "\n")
    assert not [note for note in load_rows(config, "classify", tmp_path).notes if "warning" in note]
    (tmp_path / "d.csv").write_text("text,label\n" + "\n".join([*rows[10:], "never seen, Good "]) + "\n")
    case, unseen = [note for note in load_rows(config, "classify", tmp_path).notes if "warning" in note][::-1]
    assert "differ in case alone" in case and "Good and good" in case
    assert "without a held-out row" in unseen and ": Good;" in unseen


def test_columns_that_fit_no_format_are_shown_what_each_needs_a_line_each(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("foo,bar\n1,2\n")
    with pytest.raises(DataError) as found:
        detect_format(DataConfig(str(tmp_path / "rows.csv")), tmp_path)
    lines = str(found.value).splitlines()
    assert lines[1:3] == ["   found columns foo, bar", "   expected one of these"]
    assert "      alpaca: instruction + output" in lines and "      text: text" in lines
