"""The language of a model of sounds that knows several: what it writes begins with tokens that say which one
it is, in training as when it is asked."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any, cast

from transformers import PreTrainedTokenizerBase
from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS, TO_LANGUAGE_CODE
from transformers.utils.hub import cached_file

from petune.errors import UsageError, did_you_mean
from petune.files.safetensors import read_json
from petune.models.load_errors import hub_errors
from petune.models.source import ModelSource

_SHOWN = 10  # names of languages in a message


def is_multilingual(source: ModelSource, given: Any = None) -> bool | None:
    """Whether the model of `source` writes several languages, by the file that says how it generates; None
    where nothing says so. given: the model, where it is in memory. Raises FileError for a damaged file."""
    if source.kind == "object":
        found = getattr(getattr(given, "generation_config", None), "is_multilingual", None)
    else:
        how = {"revision": source.revision, "_raise_exceptions_for_missing_entries": False}
        with hub_errors(source):  # a file that is missing is none, any other error is one
            file = cached_file(source.beside, "generation_config.json", **how)
        found = None if file is None else read_json(Path(file), links=True).get("is_multilingual")
    return found if isinstance(found, bool) else None


def in_language(
    words: PreTrainedTokenizerBase, wanted: str | None, several: bool | None
) -> PreTrainedTokenizerBase:
    """A tokenizer whose targets begin with the tokens of the language that is `wanted`, or else of its own;
    `words` as it is where there is neither. several: whether the model writes several languages, None where
    that is not known.

    Raises UsageError for a model of several languages without one, for a language beside a model of one, and
    for one that the tokenizer has no token of.
    """
    language, task = wanted, "transcribe"
    if wanted is None:
        language, task = getattr(words, "language", None), getattr(words, "task", None) or task
    if language is None:
        if several:
            _refuse_none()
        return words
    if several is False:
        _refuse_any(language, wanted is None)
    if language.lower() not in (known := _known(words)):
        _refuse_unknown(language, known)
    found: Any = deepcopy(words)  # one that was given from Python stays as it is
    found.set_prefix_tokens(language=language.lower(), task=task)
    found.init_kwargs.update(language=found.language, task=found.task)  # what is saved
    return cast("PreTrainedTokenizerBase", found)


def speak(model: Any, words: Any) -> None:
    """Let the model write in the language of its tokenizer, where that has one: here, and from every folder
    that it is saved in. Ids that the model's files do not give are the tokenizer's."""
    known, generation = _known(words), getattr(model, "generation_config", None)
    if not known or words.language is None or generation is None:
        return
    if getattr(generation, "is_multilingual", None) is False:  # transformers would refuse to be asked
        return
    tokens = {name: words.convert_tokens_to_ids(f"<|{name}|>") for name in (*known.values(), *TASK_IDS)}
    languages = {f"<|{code}|>": tokens[code] for code in known.values()}
    generation.lang_to_id = (getattr(generation, "lang_to_id", None) or {}) | languages
    generation.task_to_id = {name: tokens[name] for name in TASK_IDS}
    generation.no_timestamps_token_id = words.convert_tokens_to_ids("<|notimestamps|>")
    generation.is_multilingual, generation.language, generation.task = True, words.language, words.task


def begun(words: Any) -> int:
    """How many tokens come before what a decoder writes: the first one, and those of its language."""
    return len(words.prefix_tokens) if _known(words) else 1


def _known(words: Any) -> dict[str, str]:
    """Names and codes of the languages that the tokenizer has tokens of, with their codes. transformers
    counts on from the first token, and would take another token for a language that is missing."""
    if not hasattr(words, "set_prefix_tokens"):
        return {}
    first = words.convert_tokens_to_ids("<|startoftranscript|>")
    codes = [
        code
        for at, code in enumerate(LANGUAGES, 1)
        if words.convert_tokens_to_ids(f"<|{code}|>") == first + at
    ]
    names = {name: code for name, code in TO_LANGUAGE_CODE.items() if code in codes}
    return names | {code: code for code in codes}


def _refuse_none() -> None:
    what = "the model writes several languages, and nothing says which one its sounds are in"
    expected = "the name or the code of a language"
    found = "none, and none in the model's tokenizer"
    remedy = "say which, for example data.language: english"
    raise UsageError(what, where="data.language", expected=expected, found=found, remedy=remedy)


def _refuse_any(language: str, of_tokenizer: bool) -> None:
    what = "the model writes one language alone, by is_multilingual in its generation_config.json"
    found = f"{language}, in the model's tokenizer" if of_tokenizer else language
    remedy = (
        "remove language and task from the model's tokenizer_config.json"
        if of_tokenizer
        else "remove data.language, or take a model of several languages"
    )
    raise UsageError(what, where="data.language", found=found, remedy=remedy)


def _refuse_unknown(language: str, known: dict[str, str]) -> None:
    names = [LANGUAGES[code] for code in dict.fromkeys(known.values())]
    more = f", ... ({len(names)} in all, or their codes)" if len(names) > _SHOWN else ", or their codes"
    remedy = did_you_mean(language.lower(), known)
    what = "the model's tokenizer does not know this language"
    expected = ", ".join(names[:_SHOWN]) + more if names else "a tokenizer with tokens of languages"
    remedy = remedy if names else "remove data.language, or take a model of several languages"
    raise UsageError(what, where="data.language", expected=expected, found=language, remedy=remedy)
