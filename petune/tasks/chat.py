"""chat: conversations through the tokenizer's own template; only what the assistant says is trained, its end of turn included.

Templates rarely mark the assistant's part, so it is found by rendering prefixes: the conversation up to a turn (with its prompt),
and up to and including it. What lies between is what a model would generate there. One that rewrites earlier turns is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from petune.errors import DataError, FileError
from petune.tasks.examples import MASKED, Coder, Example, causal_example
from petune.tasks.rows import Conversation, Message, Row


def encode_chat(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Conversation. FileError if the tokenizer has no chat template, DataError if it cannot render a conversation."""
    need_template(coder)
    return [_example(row, coder) for row in rows if isinstance(row, Conversation)]


def need_template(coder: Coder) -> None:
    """FileError unless the tokenizer can render a conversation and say where each token came from."""
    if not coder.tokenizer.chat_template:
        remedy = "take the instruct variant of the model, put its chat_template.jinja into the model folder, or use task: causal"
        raise FileError("the tokenizer has no chat template", remedy=remedy)
    if not coder.tokenizer.is_fast:
        raise FileError(
            "the tokenizer cannot tell where its tokens lie in the text", expected="tokenizer.json", remedy="take a model with one"
        )


def render(messages: Sequence[Message], coder: Coder, where: str, *, prompt: bool = False) -> str:
    """The conversation as text; with `prompt` also the words that make the assistant speak next. DataError if the template refuses it."""
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(coder.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=prompt))
    except Exception as error:  # a template is a program: what it raises is its own affair
        raise DataError(f"the chat template refuses the conversation: {error}", where=where, found=_roles(messages)) from error


def _roles(messages: Sequence[Message]) -> str:
    return "roles " + ", ".join(message.role for message in messages)


def spans(row: Conversation, coder: Coder) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and the character spans that the assistant speaks. DataError if a rendering is no prefix of the next."""
    whole = render(row.messages, coder, row.where)
    found = []
    for index, message in enumerate(row.messages):
        if message.role != "assistant":
            continue
        before = render(row.messages[:index], coder, row.where, prompt=True) if index else ""
        upto = render(row.messages[: index + 1], coder, row.where)
        if not (whole.startswith(upto) and upto.startswith(before)):
            raise DataError(
                f"the chat template renders turn {index + 1} differently once more turns follow",
                where=row.where,
                expected="each rendering to begin with the one before",
                remedy="write one row per assistant turn, ending with it, or change the chat template",
            )
        found.append((len(before), len(upto)))
    return whole, found


def _example(row: Conversation, coder: Coder) -> Example:
    text, trained = spans(row, coder)
    coded = coder.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, places = list(coded["input_ids"]), coded["offset_mapping"]
    labels = [
        token if any(start <= begin < end for start, end in trained) else MASKED for token, (begin, _) in zip(ids, places, strict=True)
    ]
    if row.messages[-1].role == "assistant" and not _ends(text, trained[-1], row.messages[-1]):
        ids, labels = [*ids, coder.eos()], [*labels, coder.eos()]
    return causal_example(ids, labels, row.where, coder)


def _ends(text: str, span: tuple[int, int], message: Message) -> bool:
    """Whether the template says anything after the turn's last word: an end-of-turn token. If not, the end token is added."""
    said = message.content.strip()
    spoken = text[slice(*span)]
    return bool(spoken[spoken.rfind(said) + len(said) :].strip())
