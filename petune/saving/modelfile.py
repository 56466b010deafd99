"""Ollama's Modelfile of an adapter: the base, the adapter, the chat template in Go's words, the tokens that
end an answer.

A chat template is a program; what of it Ollama needs is, for most, what stands before the first turn, between
one role's words and the next one's, and before the answer. That is asked of the template with marked turns,
written as a Go template, and compared with it on a hundred dialogues: one that does anything else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from petune.errors import UsageError

MODELFILE = "Modelfile"
ROLES = ("system", "user", "assistant")
Turn = tuple[str, str]  # role, content
TurnPieces = Mapping[tuple[str, str], str]  # what stands between two roles; "" is the start, and the answer

_CONTENTS = (
    "Why is the sky blue?",
    "a b\nc",
    'say "no"',
    "{x: [1, 2]}",
    "Ünïcode ☂ 漢字",
    "1 < 2 & 3 > 2",
    "{{ x }}",
)


def write_modelfile(
    file: Path,
    tokenizer: PreTrainedTokenizerBase | None,
    base: str | None,
    adapter: str,
    model: PreTrainedModel,
) -> None:
    """Write a Modelfile; without a chat template it has no TEMPLATE, and Ollama takes the base's.

    Raises UsageError for a chat template that is no sequence of turns.
    """
    lines = [f"FROM {base or 'BASE'}", f"ADAPTER {adapter}"]
    if tokenizer is not None and tokenizer.chat_template:
        pieces = pieces_of(tokenizer)
        lines.append(f'TEMPLATE """{go_template(pieces)}"""')
        lines += [
            f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}"
            for stop in stops(tokenizer, pieces, model)
        ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> TurnPieces:
    """What the chat template puts between turns, without the token that the tokenizer itself puts first.

    Raises UsageError for a template that says a dialogue in another way.
    """
    first = leading(tokenizer)
    pieces: dict[tuple[str, str], str] = {}
    for roles in (("user", "assistant", "user"), ("system", "user", "assistant", "user")):
        turns = [(role, f"Qzx{place}") for place, role in enumerate(roles)]
        rest = _rendered(tokenizer, turns, first)
        for last, (role, content) in zip(("", *roles), turns, strict=False):
            piece, found, rest = (rest or "").partition(content)
            if rest is not None and found:
                pieces.setdefault((last, role), piece)
        if rest:
            pieces.setdefault(("user", ""), rest)
    for talk in dialogues("system" in {role for _, role in pieces}):
        if said(pieces, talk) != _rendered(tokenizer, talk, first):
            remedy = "write TEMPLATE yourself: petune export RUN --to llamacpp, or merge: petune merge RUN"
            raise UsageError(
                "the chat template is no sequence of turns, so it is no TEMPLATE of Ollama's",
                where="tokenizer",
                found=repr(_rendered(tokenizer, talk, first))[:200],
                remedy=remedy,
            )
    return pieces


def leading(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that the tokenizer, and so Ollama, puts before every text."""
    ids, bos = tokenizer("x")["input_ids"], tokenizer.bos_token_id
    return str(tokenizer.bos_token) if bos is not None and ids[:1] == [bos] else ""


def dialogues(system: bool) -> Iterator[Sequence[Turn]]:
    """A hundred dialogues that end with a question, of one to nine turns; half of them begin with a system's
    words where there are such."""
    for number in range(100):
        turns: list[Turn] = [("system", f"Be brief, {number}.")] if system and number % 2 else []
        for place in range(1 + 2 * (number % 5)):
            content = _CONTENTS[(number + 3 * place) % len(_CONTENTS)]
            turns.append((ROLES[1 + place % 2], f"{content} {number}"))
        yield turns


def said(pieces: TurnPieces, turns: Sequence[Turn]) -> str | None:
    """A dialogue as the pieces say it, up to where the answer begins; None where a piece is missing."""
    text, last = "", ""
    for role, content in turns:
        if (last, role) not in pieces:
            return None
        text, last = text + pieces[last, role] + content, role
    return text + pieces.get((last, ""), "")


def _rendered(tokenizer: PreTrainedTokenizerBase, turns: Sequence[Turn], first: str) -> str | None:
    """A dialogue as the chat template says it; None where it refuses the roles."""
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except MemoryError:
        raise
    except Exception:  # a template is a program: what it raises is its own affair
        return None
    return text.removeprefix(first)


def go_template(pieces: TurnPieces) -> str:
    """The pieces in the words of Go's text/template, over Ollama's .Messages."""
    text, word = '{{ $last := "" }}{{ range .Messages }}', "if"
    for role in ROLES:
        before = {last: piece for (last, other), piece in pieces.items() if other == role}
        if not before:
            continue
        text += f'{{{{ {word} eq .Role "{role}" }}}}{_choice(before)}{{{{ .Content }}}}'
        word = "else if"
    answer = f'{{{{ if eq $last "user" }}}}{_literal(pieces.get(("user", ""), ""))}{{{{ end }}}}'
    return text + "{{ end }}{{ $last = .Role }}{{ end }}" + answer


def _choice(before: Mapping[str, str]) -> str:
    """A text by the role of the turn before."""
    *others, (_, rest) = before.items()
    if all(piece == rest for _, piece in others):
        return _literal(rest)
    text, word = "", "if"
    for last, piece in others:
        text, word = f'{text}{{{{ {word} eq $last "{last}" }}}}{_literal(piece)}', "else if"
    return f"{text}{{{{ else }}}}{_literal(rest)}{{{{ end }}}}"


def _literal(text: str) -> str:
    """Text as it is, or as a Go string where it holds what a template or a Modelfile would read."""
    special = (
        any(mark in text for mark in ("{{", "}}", '"""')) or text.startswith("}") or text.endswith(("{", '"'))
    )
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if special else text


def stops(tokenizer: PreTrainedTokenizerBase, pieces: TurnPieces, model: PreTrainedModel) -> list[str]:
    """The tokens that end an answer: those of the model's generation, and the first special token that the
    template puts behind one."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    ids = [tokenizer.eos_token_id] if ids is None else ids if isinstance(ids, list) else [ids]
    found = [str(tokenizer.convert_ids_to_tokens(one)) for one in ids if one is not None]
    behind = pieces.get(("assistant", "user"), "")
    special = [entry.content for entry in tokenizer.added_tokens_decoder.values() if entry.content in behind]
    return list(dict.fromkeys([*found, *sorted(special, key=behind.index)[:1]]))
