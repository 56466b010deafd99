from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers
from tokenizers.processors import Sequence
from transformers import PreTrainedTokenizerFast

from petune.errors import DataError, FileError, UsageError
from petune.tasks import (
    Conversation,
    DataConfig,
    Labelled,
    Message,
    Pair,
    Rows,
    Text,
    encode,
    encode_prompt,
    pad_token_id,
    render,
    spans,
)
from petune.tasks.examples import MASKED, Example

CONFIG = DataConfig("unused", separator=" ")
DIALOGUE = Conversation(
    "d:1",
    tuple(
        Message(role, content)
        for role, content in [
            ("system", "Be brief."),
            ("user", "1+1"),
            ("assistant", "two"),
            ("user", "2+2"),
            ("assistant", "four"),
        ]
    ),
)


def rows(*train: object, labels: tuple[str, ...] | None = None) -> Rows:
    return Rows(list(train), [], labels, "text", (), "")


def coded(
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    *train: object,
    config: DataConfig = CONFIG,
    **given: object,
) -> list[Example]:
    kind = {"classify": "encoder", "seq2seq": "encoder-decoder"}.get(task, "decoder")
    labels = ("a", "b") if task == "classify" else None
    return encode(rows(*train, labels=labels), task, tokenizer, config, model_kind=kind, **given).train


def trained(example: Example, tokenizer: PreTrainedTokenizerFast) -> str:
    return tokenizer.decode([label for label in example.labels if label != MASKED])


# --- causal ---


def test_only_the_completion_and_the_end_are_trained(tokenizer) -> None:
    (example,) = coded(tokenizer, "causal", Pair("d:1", "ask", "reply"))
    assert tokenizer.decode(example.input_ids) == "<s>ask reply</s>"
    assert trained(example, tokenizer) == "reply</s>"
    assert render(example, tokenizer) == "<s>ask [[reply</s>]]"


def test_the_prompt_is_masked_by_position_where_it_repeats_the_completion(tokenizer) -> None:
    (example,) = coded(tokenizer, "causal", Pair("d:1", "reply", "reply"))
    assert render(example, tokenizer) == "<s>reply [[reply</s>]]"


def test_of_plain_text_everything_but_the_first_token_is_trained(tokenizer) -> None:
    (example,) = coded(tokenizer, "causal", Text("d:1", "words"))
    assert render(example, tokenizer) == "<s>[[words</s>]]"


def test_a_pad_token_equal_to_the_end_token_leaves_the_end_trained(make_tokenizer) -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    (example,) = coded(tokenizer, "causal", Pair("d:1", "ask", "reply"))
    assert example.labels[-1] == tokenizer.eos_token_id


def test_a_tokenizer_that_adds_the_end_itself_has_it_once(make_tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    pair, text = coded(tokenizer, "causal", Pair("d:1", "ask", "reply"), Text("d:2", "words"))
    assert tokenizer.decode(pair.input_ids) == "<s>ask reply</s>"
    assert tokenizer.decode(text.input_ids) == "<s>words</s>"


def test_a_tokenizer_without_end_token_is_refused(make_tokenizer) -> None:
    with pytest.raises(FileError, match="no end-of-sequence token"):
        coded(make_tokenizer(eos=False), "causal", Text("d:1", "words"))


def test_a_tokenizer_without_pad_token_gets_its_end_token_and_says_so(make_tokenizer) -> None:
    tokenizer = make_tokenizer(pad=False)
    assert pad_token_id(tokenizer) == tokenizer.eos_token_id
    report = encode(rows(Text("d:1", "words")), "causal", tokenizer, CONFIG, model_kind="decoder").report
    assert any("no pad token" in line for line in report.lines())


# --- chat ---


@pytest.mark.forks
def test_only_the_assistant_is_trained_with_its_end_of_turn(chat_tokenizer) -> None:
    (example,) = coded(chat_tokenizer, "chat", DIALOGUE)
    assert [text for text, marked in spans(example, chat_tokenizer) if marked] == [
        "two<|im_end|>\n",
        "four<|im_end|>\n",
    ]


@pytest.mark.forks
def test_words_of_the_user_that_the_assistant_repeats_stay_untrained(chat_tokenizer) -> None:
    echo = Conversation("d:1", (Message("user", "two"), Message("assistant", "two")))
    (example,) = coded(chat_tokenizer, "chat", echo)
    assert trained(example, chat_tokenizer) == "two<|im_end|>\n"


@pytest.mark.forks
def test_a_template_that_ends_no_turn_gets_an_end_token(chat_tokenizer) -> None:
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (example,) = coded(chat_tokenizer, "chat", DIALOGUE)
    assert example.labels[-1] == chat_tokenizer.eos_token_id


@pytest.mark.forks
def test_an_answer_that_is_the_last_sign_of_its_end_gets_no_second_end(chat_tokenizer) -> None:
    (example,) = coded(
        chat_tokenizer, "chat", Conversation("d:1", (Message("user", "a"), Message("assistant", ">")))
    )
    assert trained(example, chat_tokenizer) == "><|im_end|>\n"


@pytest.mark.forks
def test_a_template_that_rewrites_earlier_turns_is_refused(chat_tokenizer) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] if loop.last else 'x' }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match=r"d:1 .*turn 3 differently"):
        coded(chat_tokenizer, "chat", DIALOGUE)


@pytest.mark.forks
def test_a_template_that_refuses_a_conversation_is_blamed_with_the_row(chat_tokenizer) -> None:
    chat_tokenizer.chat_template = "{{ raise_exception('no system turn, please') }}"
    with pytest.raises(DataError, match=r"d:1 .*no system turn, please"):
        coded(chat_tokenizer, "chat", DIALOGUE)


def test_no_template_is_an_error_with_a_remedy(tokenizer) -> None:
    with pytest.raises(FileError, match=r"no chat template[\s\S]*instruct variant"):
        coded(tokenizer, "chat", DIALOGUE)


# --- classify and seq2seq ---


def test_a_class_is_its_place_among_the_labels(tokenizer) -> None:
    tokenizer.model_input_names = [*tokenizer.model_input_names, "token_type_ids"]  # as BERT's has it
    first, second = coded(
        tokenizer, "classify", Labelled("d:1", "x", None, "b"), Labelled("d:2", "x", "y", "a")
    )
    assert (first.labels, second.labels) == (1, 0)
    assert tokenizer.decode(second.input_ids) == "<s>x<s>y"
    assert second.token_types == [0, 0, 0, 1]
    assert render(first, tokenizer, ("a", "b")) == "<s>x -> [[b]]"


@pytest.mark.parametrize(("side", "kept"), [("right", "<s>abcdefg"), ("left", "<s>defghij")])
def test_a_text_is_cut_on_the_side_named_and_keeps_its_special_tokens(
    side: str, kept: str, tokenizer
) -> None:
    config = replace(CONFIG, max_length=8, truncation=side)
    (example,) = coded(tokenizer, "classify", Labelled("d:1", "abcdefghij", None, "a"), config=config)
    assert tokenizer.decode(example.input_ids) == kept
    assert tokenizer.truncation_side == "right", "the user's tokenizer is left as it was"


def test_the_whole_target_is_trained_with_its_end(tokenizer) -> None:
    (example,) = coded(
        tokenizer, "seq2seq", Pair("d:1", "long", "short"), config=replace(CONFIG, prefix="sum: ")
    )
    assert tokenizer.decode(example.input_ids) == "<s>sum: long"
    assert tokenizer.decode(example.labels) == "<s>short</s>"
    assert render(example, tokenizer) == "<s>sum: long -> [[<s>short</s>]]"


# --- lengths ---


@pytest.mark.parametrize(
    ("side", "seen"),
    [("right", "<s>abcdef [[ghi]]"), ("left", "<s>bcdef [[ghijk</s>]]")],
    ids=["right loses the end", "left keeps it"],
)
def test_an_over_long_pair_is_cut_on_the_side_named(side: str, seen: str, tokenizer) -> None:
    limit = 11 if side == "right" else 13
    (example,) = coded(
        tokenizer,
        "causal",
        Pair("d:1", "abcdef", "ghijk"),
        config=replace(CONFIG, max_length=limit, truncation=side),
    )
    assert render(example, tokenizer) == seen


def test_rows_without_a_trained_token_are_dropped_and_counted(tokenizer) -> None:
    config = replace(CONFIG, max_length=10)
    given = rows(Pair("d:1", "a" * 20, "b"), Pair("d:2", "a", "b"), Pair("d:3", "a", "c"))
    encoded = encode(given, "causal", tokenizer, config, model_kind="decoder")
    assert [example.where for example in encoded.train] == ["d:2", "d:3"]
    assert (encoded.report.dropped, encoded.report.truncated) == (1, 1)


def test_losing_more_than_half_of_the_rows_is_an_error(tokenizer) -> None:
    given = [Pair("d:1", "a" * 20, "b"), Pair("d:2", "a" * 20, "c"), Pair("d:3", "a", "c")]
    with pytest.raises(DataError, match=r"d:1 .*2 of 3 rows[\s\S]*truncation=left"):
        coded(tokenizer, "causal", *given, config=replace(CONFIG, max_length=10))


@pytest.mark.parametrize("task", ["classify", "seq2seq"])
def test_texts_of_which_the_tokenizer_makes_nothing_are_dropped_and_counted(task: str, tokenizer) -> None:
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.normalizer, core.post_processor = normalizers.Replace("x", ""), Sequence([])
    deaf = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", pad_token="<pad>")
    nothing, something = (
        Labelled(f"d:{at}", text, None, "a") if task == "classify" else Pair(f"d:{at}", text, "b")
        for at, text in enumerate(("xx", "axa"))
    )
    (left,) = coded(deaf, task, nothing, something)
    assert left.where == "d:1"
    with pytest.raises(DataError, match=r"d:0 .*1 of 1 rows[\s\S]*0 tokens[\s\S]*what the tokenizer makes"):
        coded(deaf, task, nothing)
    with pytest.raises(DataError, match=r"1 of 1 rows[\s\S]*1 tokens[\s\S]*what the tokenizer makes"):
        coded(deaf, "causal", Text("d:0", "xx"))  # its end alone


def test_a_length_beyond_the_model_is_a_usage_error(tokenizer) -> None:
    with pytest.raises(UsageError, match=r"data\.max_length[\s\S]*at most 64, found 100"):
        coded(tokenizer, "causal", Text("d:1", "x"), config=replace(CONFIG, max_length=100), max_positions=64)


def test_without_a_length_the_model_decides(tokenizer) -> None:
    (example,) = coded(tokenizer, "causal", Text("d:1", "x" * 99), max_positions=64)
    assert len(example.input_ids) == 64


def test_a_token_beyond_the_embedding_is_an_error(tokenizer) -> None:
    with pytest.raises(FileError, match=r"d:1 .*does not belong[\s\S]*ids below 50"):
        coded(tokenizer, "causal", Text("d:1", "zzz"), vocab_size=50)


def test_the_report_has_the_figures(tokenizer) -> None:
    given = rows(*(Pair(f"d:{n}", "a" * n, "b") for n in range(1, 21)))
    report = encode(given, "causal", tokenizer, CONFIG, model_kind="decoder").report
    assert (report.p50, report.p95, report.longest) == (14, 23, 24)  # <s>, n letters, a space, b, </s>
    assert report.trained == 40
    assert report.trained_share == pytest.approx(40 / sum(n + 4 for n in range(1, 21)))
    lines = [line.split() for line in report.chart(width=4)]
    assert [first for first, *_ in lines] == [f"{n}-{n + 1}" for n in range(5, 25, 2)]
    assert all(bar == "####" and count == "2" for _, bar, count in lines)
    assert replace(report, lengths=((1, 2, 8), (3, 4, 1), (5, 5, 0))).chart(width=4) == [
        "1-2  #### 8",
        "3-4  #    1",
        "  5       0",
    ]


# --- what does not fit ---


@pytest.mark.parametrize(
    ("task", "kind", "packing"),
    [
        ("chat", "encoder", False),
        ("causal", "encoder", False),
        ("seq2seq", "decoder", False),
        ("classify", "encoder", True),
        ("seq2seq", "encoder-decoder", True),
    ],
)
def test_a_task_or_packing_that_does_not_fit_the_model_is_a_usage_error(
    task: str, kind: str, packing: bool, tokenizer
) -> None:
    with pytest.raises(UsageError) as caught:
        encode(rows(Text("d:1", "x")), task, tokenizer, replace(CONFIG, packing=packing), model_kind=kind)
    assert caught.value.code == 2


# --- generation ---


@pytest.mark.forks
def test_a_prompt_is_written_as_the_trained_rows_were(tokenizer, chat_tokenizer) -> None:
    (pair,) = coded(tokenizer, "causal", Pair("d:1", "ask", "reply"))
    prompt = encode_prompt("ask", "causal", tokenizer, CONFIG, format="pairs")
    assert pair.input_ids[: len(prompt)] == prompt and pair.labels[len(prompt)] != MASKED
    (chat,) = coded(chat_tokenizer, "chat", DIALOGUE)
    prompt = encode_prompt(DIALOGUE.messages[:2], "chat", chat_tokenizer, CONFIG)
    assert chat.input_ids[: len(prompt)] == prompt and chat.labels[len(prompt)] != MASKED
    assert tokenizer.decode(encode_prompt("ask", "causal", tokenizer, CONFIG)) == "<s>ask"


def test_a_pattern_of_the_tokenizer_that_never_ends_is_a_fault_of_the_models_files(tokenizer) -> None:
    splitter = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    splitter.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    hostile = PreTrainedTokenizerFast(tokenizer_object=splitter, eos_token="</s>", pad_token="<pad>")
    with pytest.raises(FileError, match=r"the tokenizer breaks down: .*retry-limit") as caught:
        coded(hostile, "causal", Text("d:1", "a" * 40 + "b"))
    assert caught.value.code == 4
