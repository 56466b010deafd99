"""Every field of a conversation is rendered by the chat template, decides what is trained, or is refused by
name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petune.errors import DataError
from petune.tasks import Conversation, DataConfig, Message, encode, load_rows
from petune.tasks.examples import MASKED

# After Hermes and Qwen: tools, tool calls, results and reasoning; {% generation %} lets transformers mark
# what the assistant says.
TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else '') + '\\n# Tools' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endgeneration %}
{%- elif not (m.role == 'system' and loop.first) %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
TURNS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Bonn?"},
    {"role": "assistant", "content": "", "reasoning_content": "I must look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "sun", "tool_call_id": "c1", "name": "weather"},
    {"role": "assistant", "content": "Sunny."},
]


@pytest.fixture
def tool_tokenizer(chat_tokenizer):
    chat_tokenizer.chat_template = TOOLS
    return chat_tokenizer


def read(row: dict[str, Any], tmp_path: Path, task: str = "chat") -> Any:
    """The row as the readers give it, from a file."""
    other = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "d.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "held.jsonl").write_text(
        json.dumps(other if "messages" in row else {**row, "output": "else"}) + "\n"
    )
    return load_rows(DataConfig("d.jsonl", eval="held.jsonl"), task, tmp_path).train[0]


def coded(conversation: Conversation, tokenizer: Any) -> Any:
    from petune.tasks import Rows

    rows = Rows([conversation], [], None, "messages", (), "")
    return encode(rows, "chat", tokenizer, DataConfig("unused"), model_kind="decoder").train[0]


def theirs(
    turns: list[dict[str, Any]], tokenizer: Any, tools: list[Any] | None
) -> tuple[list[int], list[int]]:
    """Token ids and labels by transformers itself."""
    out = tokenizer.apply_chat_template(
        turns, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return out["input_ids"], [
        token if kept else MASKED
        for token, kept in zip(out["input_ids"], out["assistant_masks"], strict=True)
    ]


@pytest.mark.forks
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
def test_tokens_and_labels_are_those_of_transformers(
    tools: list[Any] | None, tool_tokenizer, tmp_path: Path
) -> None:
    example = coded(read({"messages": TURNS, "tools": tools}, tmp_path), tool_tokenizer)
    ids, labels = theirs(TURNS, tool_tokenizer, tools)
    assert example.input_ids == ids
    assert example.labels == labels
    for said in ("I must look.", "weather", "Bonn", "Sunny."):
        assert said in tool_tokenizer.decode([label for label in labels if label != MASKED])


def test_openais_arguments_as_json_text_and_tools_as_json_text_are_the_same_row(
    tool_tokenizer, tmp_path: Path
) -> None:
    text = json.loads(json.dumps(TURNS))
    text[2]["tool_calls"][0]["function"]["arguments"] = '{"city": "Bonn"}'
    text[2]["content"] = None
    assert read({"messages": text, "tools": json.dumps([WEATHER])}, tmp_path) == read(
        {"messages": TURNS, "tools": [WEATHER]}, tmp_path
    )


@pytest.mark.forks
def test_a_turn_of_weight_zero_is_read_and_not_trained(tool_tokenizer, tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "wrong", "weight": 0},
        {"role": "user", "content": "2", "weight": 0},
        {"role": "assistant", "content": "right", "weight": 1},
    ]
    example = coded(read({"messages": turns}, tmp_path), tool_tokenizer)
    assert (
        example.input_ids
        == theirs([{k: v for k, v in turn.items() if k != "weight"} for turn in turns], tool_tokenizer, None)[
            0
        ]
    )
    assert (
        tool_tokenizer.decode([label for label in example.labels if label != MASKED]) == "right<|im_end|>\n"
    )


@pytest.mark.forks
def test_a_last_turn_of_weight_zero_gets_no_end_token(chat_tokenizer) -> None:
    chat_tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    turns = (Message("user", "1"), Message("assistant", "yes"), Message("assistant", "no", trained=False))
    example = coded(Conversation("d:1", turns), chat_tokenizer)
    assert chat_tokenizer.decode([label for label in example.labels if label != MASKED]) == "assistant: yes\n"


def test_text_parts_are_joined_as_they_stand(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]
    row = read(
        {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "Go."}]}, tmp_path
    )
    assert row.messages[0] == Message("user", "What now?")


def test_a_system_text_in_a_column_of_its_own_becomes_the_first_turn(jsonl, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    # only a later row has it
    path = jsonl({"conversations": turns}, {"conversations": turns, "system": "Be rude.", "id": 7})
    rows = load_rows(DataConfig(path), "chat", tmp_path)
    found = [row.messages[0].content for row in (*rows.train, *rows.eval)]
    assert sorted(found) == ["Be rude.", "hi"]
    assert "columns not used: id" in rows.notes
    assert any("system is column 'system'" in note for note in rows.notes)


def test_alpacas_system_and_history_become_turns(tmp_path: Path) -> None:
    row = {"instruction": "And 2?", "input": "", "output": "4", "system": "Square.", "history": [["1?", "1"]]}
    said = [(message.role, message.content) for message in read(row, tmp_path).messages]
    assert said == [
        ("system", "Square."),
        ("user", "1?"),
        ("assistant", "1"),
        ("user", "And 2?"),
        ("assistant", "4"),
    ]


@pytest.mark.parametrize("name", ["system", "history", "tools"])
@pytest.mark.parametrize("task", ["causal", "seq2seq"])
def test_what_only_a_conversation_has_a_place_for_is_refused_elsewhere(
    name: str, task: str, tmp_path: Path
) -> None:
    row = {"instruction": "And 2?", "output": "4", name: [["1?", "1"]] if name != "system" else "Square."}
    with pytest.raises(
        DataError, match=rf"d.jsonl:1  task {task} has no place for column '{name}'[\s\S]*task: chat"
    ):
        read(row, tmp_path, task)
    assert read({**row, name: []}, tmp_path, task).target == "4", "an empty one says nothing"


USER, YO = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
BAD = [
    (
        [{**USER, "content": [{"type": "image_url", "image_url": "x"}]}, YO],
        "turn 1 has a part of type 'image_url'",
    ),
    ([USER, {**YO, "weight": 0.5}], "turn 2: weight is neither 0 nor 1"),
    ([{**USER, "weight": 1}, YO], "turn 1: weight 1 on a turn of the user"),
    ([USER, {**YO, "weight": 0}], "every turn of the assistant has weight 0"),
    ([USER, {"role": "assistant", "content": None}], "turn 2 has no content"),
    ([USER, {**YO, "tool_calls": [{"function": {"arguments": "{}"}}]}], "turn 2: a tool call has no name"),
    (
        [USER, {**YO, "tool_calls": [{"function": {"name": "f", "arguments": "{1"}}]}],
        "turn 2: the arguments of f is not JSON",
    ),
    ([USER, {**YO, "tool_calls": {"name": "f"}}], "turn 2: tool_calls is not a list"),
]


@pytest.mark.parametrize(("turns", "says"), BAD, ids=[says for _, says in BAD])
def test_a_turn_that_cannot_be_used_is_named_with_its_line(
    turns: list[Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=rf"d.jsonl:1  {says}"):
        read({"messages": turns}, tmp_path)


def test_tools_that_are_no_list_and_a_second_system_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"d.jsonl:1  tools is not a list of objects"):
        read({"messages": [USER, YO], "tools": {"name": "f"}}, tmp_path)
    with pytest.raises(DataError, match=r"d.jsonl:1  the row has two system texts"):
        read({"messages": [{"role": "system", "content": "a"}, USER, YO], "system": "b"}, tmp_path)


LOST = [
    (
        (Message("user", "hi"), Message("assistant", "yo", {"reasoning_content": "hm"})),
        (),
        "reasoning_content of turn 2",
    ),
    ((Message("user", "hi"), Message("assistant", "", {"tool_calls": [CALL]})), (), "tool_calls of turn 2"),
    ((Message("user", "hi", {"name": "Ann"}), Message("assistant", "yo")), (), "name of turn 1"),
    ((Message("user", "hi"), Message("assistant", "yo")), (WEATHER,), "tools"),
    ((Message("user", "hi"), Message("tool", "sun"), Message("assistant", "yo")), (), "content of turn 2"),
]


@pytest.mark.forks
@pytest.mark.parametrize(("turns", "tools", "what"), LOST, ids=[what for *_, what in LOST])
def test_what_a_template_leaves_out_is_refused_by_name(
    turns: Any, tools: Any, what: str, chat_tokenizer
) -> None:
    chat_tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%"
        " endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(DataError, match=rf"d:1  the chat template does not render {what}"):
        coded(Conversation("d:1", turns, tools), chat_tokenizer)


@pytest.mark.forks
def test_reasoning_that_the_template_drops_from_earlier_turns_needs_weight_zero(tool_tokenizer) -> None:
    dropping = "{%- if m.reasoning_content and loop.last %}"
    tool_tokenizer.chat_template = TOOLS.replace("{%- if m.reasoning_content %}", dropping)
    thought = {"reasoning_content": "hm"}

    def turns(trained: bool) -> tuple[Message, ...]:
        first = Message("assistant", "one", thought, trained)
        return (Message("user", "a"), first, Message("user", "b"), Message("assistant", "two", thought))

    with pytest.raises(DataError, match=r'turn 2 differently[\s\S]*"weight": 0'):
        coded(Conversation("d:1", turns(True)), tool_tokenizer)
    example = coded(Conversation("d:1", turns(False)), tool_tokenizer)
    assert (
        tool_tokenizer.decode([label for label in example.labels if label != MASKED])
        == "<think>hm</think>two<|im_end|>\n"
    )


def test_a_plain_conversation_keeps_its_fingerprint() -> None:
    from petune.tasks.rows import content

    row = Conversation("d:1", (Message("user", "hi"), Message("assistant", "yo")))
    assert (
        content(row)
        == '{"messages": [{"content": "hi", "role": "user"}, {"content": "yo", "role": "assistant"}]}'
    )
