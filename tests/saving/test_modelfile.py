"""Ollama's Modelfile: its template, rendered as Go renders it, says a hundred dialogues as the chat template
does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from petune.demo import model_path
from petune.errors import UsageError
from petune.models.loading import load_tokenizer
from petune.models.source import resolve_model
from petune.saving.modelfile import dialogues, go_template, leading, pieces_of, write_modelfile
from tests.tiny_models import llama

TURN = "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}"
    f"{TURN} + message['content'] | trim + '<|eot_id|>' }}}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{% set first = messages[0]['content'] + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}{% for message in rest %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n'"
    " + (first if loop.first else '') + message['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
BRACED = QWEN.replace("<|im_start|>", "{% raw %}{{{% endraw %}").replace("<|im_end|>", '}}"""')
LONGER = LLAMA3.replace("message['role'] +", "message['role'] + loop.index | string +")


def tokenizer(template: str | None = None) -> Any:
    found = load_tokenizer(resolve_model(f"{model_path('tiny-llama')}", Path()))
    if template is not None:
        found.chat_template = template
    return found


def rendered(template: str, turns: Sequence[tuple[str, str]]) -> str:
    """A Go template of text, {{ "text" }}, if/else if/else/end over eq, range over .Messages, $last."""
    tokens = iter(re.split(r"(\{\{ (?:\"(?:\\.|[^\"\\])*\"|[^\"{}]|\"[^\"]*\")* \}\})", template))
    return "".join(run(parse(tokens)[0], {"$last": ""}, turns))


def parse(tokens: Iterator[str]) -> tuple[list[Any], str]:
    """Nodes up to an else or an end, and which of them it was."""
    nodes: list[Any] = []
    for token in tokens:
        if not token.startswith("{{ "):
            nodes.append(("text", token))
            continue
        word = token[3:-3]
        if word == "end" or word.startswith("else"):
            return nodes, word
        if word.startswith(("if ", "range ")):
            arms, condition = [], word
            while True:
                body, closed = parse(tokens)
                arms.append((condition, body))
                if closed == "end":
                    break
                condition = closed.removeprefix("else").strip()
            nodes.append(("arms", arms))
        else:
            nodes.append(("do", word))
    return nodes, "end"


def run(nodes: Sequence[Any], names: dict[str, str], turns: Sequence[tuple[str, str]]) -> Iterator[str]:
    for kind, what in nodes:
        if kind == "text":
            yield what
        elif kind == "arms" and what[0][0] == "range .Messages":
            for role, content in turns:
                names.update({".Role": role, ".Content": content})
                yield from run(what[0][1], names, turns)
        elif kind == "arms":
            for condition, body in what:
                if not condition or names[condition.split()[2]] == json.loads(condition.split()[3]):
                    yield from run(body, names, turns)
                    break
        elif "=" in what and what.startswith("$"):
            name, _, value = what.partition(" ")
            value = value.split(" ", 1)[1]
            names[name] = names[value] if value in names else json.loads(value)
        else:
            yield names[what] if what in names else json.loads(what)


@pytest.mark.parametrize("template", [None, LLAMA3, QWEN, GEMMA, MISTRAL, BRACED])
def test_a_hundred_dialogues_are_said_as_the_chat_template_says_them(template: str | None) -> None:
    coder = tokenizer(template)
    go = go_template(pieces_of(coder))
    talks = list(dialogues(template != MISTRAL))
    assert len(talks) == 100
    for turns in talks:
        messages = [{"role": role, "content": content} for role, content in turns]
        said = coder.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert rendered(go, turns) == said.removeprefix(leading(coder))


def test_a_template_that_counts_its_turns_is_refused() -> None:
    with pytest.raises(UsageError, match="no sequence of turns"):
        pieces_of(tokenizer(LONGER))


def test_the_modelfile_names_base_adapter_template_and_ends(tmp_path: Path) -> None:
    coder = tokenizer(LLAMA3)
    coder.add_special_tokens({"additional_special_tokens": ["<|eot_id|>"]})
    model: Any = llama()
    write_modelfile(tmp_path / "Modelfile", coder, "/base", "./adapter.gguf", model)
    text = (tmp_path / "Modelfile").read_text()
    assert text.startswith(
        'FROM /base\nADAPTER ./adapter.gguf\nTEMPLATE """{{ $last := "" }}{{ range .Messages }}'
    )
    assert text.endswith('PARAMETER stop "<|eot_id|>"\n')
    assert coder.convert_ids_to_tokens(model.generation_config.eos_token_id) in text
    coder.chat_template = None
    write_modelfile(tmp_path / "Modelfile", coder, "/base", ".", model)
    assert (tmp_path / "Modelfile").read_text() == "FROM /base\nADAPTER .\n"
