"""chat: conversations through the tokenizer's own template; only what the assistant says is trained, its end
of turn included.

Templates rarely mark the assistant's part, so it is found by rendering prefixes: the conversation up to a
turn (with its prompt), and up to and including it. What lies between is what a model would generate there. A
template that rewrites an earlier trained turn is refused, and one that leaves out what a row says: a
rendering that stays the same without a field has lost it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from petune.errors import DataError, FileError
from petune.tasks.bounded import bounded
from petune.tasks.examples import MASKED, Coder, Example, causal_example
from petune.tasks.rows import Conversation, Message, Row


def encode_chat(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Conversation. FileError if the tokenizer has no chat template, DataError if it cannot
    render a conversation."""
    need_template(coder)
    talks = [row for row in rows if isinstance(row, Conversation)]
    rendered = bounded(lambda row: _rendered(row, coder), talks, _name(coder))
    return [_example(row, coder, *found) for row, found in zip(talks, rendered, strict=True)]


def prompt_of(turns: Sequence[Message], coder: Coder) -> str:
    """The conversation up to where the assistant speaks next, as text. FileError as `encode_chat`, and for a
    template without end."""
    need_template(coder)
    return str(next(bounded(lambda said: render(said, coder, "prompt", prompt=True), [turns], _name(coder))))


def _name(coder: Coder) -> str:
    return f"the chat template of {coder.tokenizer.name_or_path or 'the tokenizer'}"


def need_template(coder: Coder) -> None:
    """FileError unless the tokenizer can render a conversation and say where each token came from."""
    if not coder.tokenizer.chat_template:
        remedy = (
            "take the instruct variant of the model, put its chat_template.jinja into the model folder, or"
            " use task: causal"
        )
        raise FileError("the tokenizer has no chat template", remedy=remedy)
    if not coder.tokenizer.is_fast:
        what = "the tokenizer cannot tell where its tokens lie in the text"
        raise FileError(what, expected="tokenizer.json", remedy="take a model with one")


# which call a result answers: the order of turns says it too
LINKS = (("assistant", "id"), ("tool", "tool_call_id"), ("tool", "name"))


def render(
    messages: Sequence[Message],
    coder: Coder,
    where: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    prompt: bool = False,
) -> str:
    """The conversation as text; with `prompt` also the words that make the assistant speak next. DataError if
    the template refuses it."""
    turns = [{"role": message.role, "content": message.content, **message.more} for message in messages]
    schemas: list[Any] | None = [dict(tool) for tool in tools] or None
    try:
        return str(
            coder.tokenizer.apply_chat_template(
                turns, tokenize=False, add_generation_prompt=prompt, tools=schemas
            )
        )
    except MemoryError:
        raise
    except Exception as error:  # a template is a program: what it raises is its own affair
        what, found = f"the chat template refuses the conversation: {error}", _roles(messages)
        remedy = "change the order of roles, or take a model whose template renders it"
        raise DataError(what, where=where, found=found, remedy=remedy) from error


def _roles(messages: Sequence[Message]) -> str:
    return "roles " + ", ".join(message.role for message in messages)


def spans(row: Conversation, coder: Coder) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and the character spans that are trained. DataError if a rendering is no
    prefix of the next."""
    whole = render(row.messages, coder, row.where, tools=row.tools)
    _refuse_lost(row, whole, coder)
    found = []
    for index, message in enumerate(row.messages):
        if message.role != "assistant" or not message.trained:
            continue
        before = render(row.messages[:index], coder, row.where, tools=row.tools, prompt=True) if index else ""
        upto = render(row.messages[: index + 1], coder, row.where, tools=row.tools)
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise DataError(
                f"the chat template renders turn {index + 1} differently once more turns follow",
                where=row.where,
                expected="each rendering to begin with the one before",
                remedy=(
                    'write one row per assistant turn, ending with it, the earlier ones with "weight": 0, or'
                    " change the template"
                ),
            )
        found.append((len(before), len(upto)))
    return whole, found


def _refuse_lost(row: Conversation, whole: str, coder: Coder) -> None:
    """DataError for the first part of a conversation that the template does not render."""

    def lost(messages: Sequence[Message], shown: str, tools: Sequence[Mapping[str, Any]] = row.tools) -> bool:
        try:
            return render(messages, coder, row.where, tools=tools) == shown
        except DataError:
            return False  # it is read, or its absence would not be noticed

    missing = "tools" if row.tools and lost(row.messages, whole, ()) else None
    for index, message in enumerate(row.messages):
        if missing or not (message.more or message.content.strip() not in whole):
            continue
        earlier = row.messages[:index]
        shown = render((*earlier, message), coder, row.where, tools=row.tools)
        others = {}
        if message.content.strip():
            others["content"] = replace(message, content=f"{message.content} again")
        for name in message.more:
            if (message.role, name) not in LINKS:
                others[name] = replace(
                    message, more={key: value for key, value in message.more.items() if key != name}
                )
        missing = next(
            (
                f"{name} of turn {index + 1} ({message.role})"
                for name, other in others.items()
                if lost((*earlier, other), shown)
            ),
            None,
        )
    if missing:
        remedy = "take a model whose chat template has a place for it, or remove it from the rows"
        raise DataError(
            f"the chat template does not render {missing}: it would be lost", where=row.where, remedy=remedy
        )


def _rendered(row: Conversation, coder: Coder) -> tuple[str, list[tuple[int, int]], bool]:
    """The rendered conversation, what of it is trained, and whether the end token must follow."""
    text, trained = spans(row, coder)
    last = row.messages[-1]
    unended = last.role == "assistant" and last.trained and not _ends(text, trained[-1], row, coder)
    return text, trained, unended


def _example(
    row: Conversation, coder: Coder, text: str, trained: Sequence[tuple[int, int]], unended: bool
) -> Example:
    coded = coder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = list(coded["input_ids"]), coded["offset_mapping"]
    labels = [
        token if any(start <= begin < end for start, end in trained) else MASKED
        for token, (begin, _) in zip(ids, places, strict=True)
    ]
    if unended:
        ids, labels = [*ids, coder.eos()], [*labels, coder.eos()]
    return causal_example(ids, labels, row.where, coder)


def _ends(text: str, span: tuple[int, int], row: Conversation, coder: Coder) -> bool:
    """Whether the template says anything after the last turn's last word: an end-of-turn token. If not, the
    end token is added."""
    *earlier, last = row.messages
    said, spoken = last.content.strip(), text[slice(*span)]
    # its last word may be any of its fields', or also be what ends it (">"): asked of a turn of words alone
    if last.more or spoken.count(said) != 1:
        said = "Yes."
        spoken = render([*earlier, Message(last.role, said)], coder, row.where, tools=row.tools)
    return bool(spoken[spoken.rfind(said) + len(said) :].strip())
