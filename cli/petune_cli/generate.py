"""`petune generate`: answer one prompt, or a file of prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petune.errors import DataError, Problem, UsageError
from petune_cli.arguments import Given, Overwrite, VerifyBase, refuse_place
from petune_cli.echo import echo, echo_answer

if TYPE_CHECKING:
    from petune.run.finished import Run

Tokens = Annotated[
    int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer, tokens.", show_default=False)
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="Sample; 0 or unset: greedy.", show_default=False),
]

PROMPT_KEYS = ("prompt", "text", "source", "instruction", "input", "body")


def generate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE", help="A run folder, or the recipe it was made with.")
    ],
    words: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT KEY=VALUE", help="Default: standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", metavar="IN", help="Prompts: JSONL, or one a line.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="OUT", help="JSONL of prompt and output; default: the terminal."),
    ] = None,
    overwrite: Overwrite = False,
    max_new_tokens: Tokens = None,
    temperature: Temperature = None,
    verify_base: VerifyBase = False,
) -> None:
    """Answer one prompt, or a file of them."""
    prompt, settings = _prompt_and_settings(words or [], file is not None)
    _check_out(file, out, overwrite)
    options = sampling(max_new_tokens, temperature)
    if file is None:
        prompt = _not_empty(_read_standard_input() if prompt is None else prompt)
        echo_answer(Given.of([target, *settings]).run(verify_base=verify_base).generate(prompt, **options))
        return
    prompts = read_prompts(file)
    _answer_all(Given.of([target, *settings]).run(verify_base=verify_base), prompts, options, out)


def _prompt_and_settings(words: Sequence[str], from_file: bool) -> tuple[str | None, Sequence[str]]:
    """The prompt is the first word after the target, whatever it looks like; with --file there is none."""
    return (None, words) if from_file or not words else (words[0], words[1:])


def _check_out(file: Path | None, out: Path | None, overwrite: bool) -> None:
    """Raise UsageError now for what would be refused only after the first answer."""
    if out is None:
        return
    if file is None:
        raise UsageError("--out goes with --file", where="command line", remedy="redirect one answer with >")
    if out.exists() and file.exists() and out.samefile(file):
        raise UsageError(
            "the answers would replace the prompts", where=str(out), remedy="choose another --out"
        )
    refuse_place(out, overwrite, "--out OUT")


def sampling(max_new_tokens: int | None, temperature: float | None) -> dict[str, Any]:
    """Only what was asked for."""
    given = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    return {name: value for name, value in given.items() if value is not None}


def _read_standard_input() -> str:
    if sys.stdin.isatty():
        raise UsageError(
            "there is no prompt",
            where="command line",
            remedy='petune generate RUN "a prompt", --file, or a pipe',
        )
    take_any_bytes()
    return sys.stdin.read().rstrip("\n")


def take_any_bytes() -> None:
    """Let standard input hand over bytes that are no UTF-8, which the model's side refuses with a reason."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _not_empty(prompt: str) -> str:
    if not prompt.strip():
        raise UsageError("the prompt is empty", where="command line", remedy='petune generate RUN "a prompt"')
    return prompt


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: of .jsonl the first of PROMPT_KEYS in each object (or the string itself), of
    others each line.

    Raises UsageError for a table, DataError naming file and line, the first ten at once.
    """
    if file.suffix.lower() in (".csv", ".tsv", ".parquet"):
        remedy = f"write the column of the prompts into a file of its own: {file.with_suffix('.txt')}"
        raise UsageError(
            "a table is no file of prompts",
            where=str(file),
            expected="one prompt a line, or JSONL",
            remedy=remedy,
        )
    try:
        lines = [
            (number, line)
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', None) or 'is not UTF-8 text'}"
        remedy = "give a readable file of UTF-8 text, a prompt a line"
        raise DataError(what, where=str(file), remedy=remedy) from None
    if not lines:
        raise DataError("holds no prompt", where=str(file), expected="one a line")
    if file.suffix != ".jsonl":
        return [line for _, line in lines]
    prompts, problems = [], []
    for number, line in lines:
        try:
            row = json.loads(line)
        except ValueError as error:
            problems.append(
                Problem(f"is not JSON: {error}", f"{file}:{number}", '{"prompt": "..."} or "..."')
            )
            continue
        given = row if isinstance(row, dict) else {PROMPT_KEYS[0]: row} if isinstance(row, str) else {}
        found = [given[key] for key in PROMPT_KEYS if key in given]
        if found and isinstance(found[0], str) and found[0].strip():
            prompts.append(found[0])
        else:
            what = "has an empty prompt" if found and isinstance(found[0], str) else "has no prompt"
            problems.append(
                Problem(what, where=f"{file}:{number}", expected="one of the keys " + ", ".join(PROMPT_KEYS))
            )
    if problems:
        if len(problems) > 10:
            problems[10:] = [Problem(f"and {len(problems) - 10} more lines", where=str(file))]
        raise DataError(problems)
    return prompts


def _answer_all(run: Run, prompts: Sequence[str], options: dict[str, Any], out: Path | None) -> None:
    """Write each answer as it comes. A file that is replaced stays as it was until the first answer is
    there."""
    for at, prompt in enumerate(prompts):
        line = json.dumps({"prompt": prompt, "output": run.generate(prompt, **options)}, ensure_ascii=False)
        if out is None:
            echo_answer(line)
        else:
            with out.open("a" if at else "w", encoding="utf-8") as stream:
                stream.write(f"{line}\n")
    if out is not None:
        echo(f"{out}: {len(prompts)} answers")
