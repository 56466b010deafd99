"""Options of an answer: what may be asked of transformers' generate, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn

from torch import Tensor
from transformers import GenerationConfig

from petune.errors import Problem, UsageError, did_you_mean

_WHOLE = {
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "max_length": 1,
    "min_length": 0,
    "num_beams": 1,
    "top_k": 0,
    "no_repeat_ngram_size": 0,
}
_NUMBERS = {"temperature": math.inf, "top_p": 1.0, "min_p": 1.0}  # from 0 to
_TRUTHS = ("do_sample", "use_cache")
# idle without do_sample
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff")
# of generate itself
_CALLED = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "streamer")
_OTHER_ANSWERS = {
    "num_return_sequences",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
}
_NOT_OPTIONS = _OTHER_ANSWERS | {"output_hidden_states", "transformers_version"}


def settle_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """transformers' generation options, completed: an option of sampling turns sampling on, temperature 0
    turns it off, 128 new tokens.

    Raises UsageError naming the options that are unknown, of another type or out of range, or that contradict
    each other.
    """
    known = [
        name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in _NOT_OPTIONS
    ]
    problems = [_unknown(name, (*known, *_CALLED)) for name in options if name not in (*known, *_CALLED)]
    said = {name: value for name, value in options.items() if value is not None}
    problems += [problem for name, value in said.items() if (problem := _misfit(name, value)) is not None]
    if problems:
        raise UsageError(problems)
    sampling, greedy = [name for name in _SAMPLING if name in said], said.get("temperature") == 0
    if greedy and (said.get("do_sample") or len(sampling) > 1):
        other = (
            "do_sample=True"
            if said.get("do_sample")
            else next(name for name in sampling if name != "temperature")
        )
        raise UsageError(
            f"temperature=0 is greedy and {other} samples", where="generate", remedy="give one of the two"
        )
    if said.get("do_sample") is False and sampling and not greedy:
        what = f"{sampling[0]} samples and do_sample=False does not"
        raise UsageError(what, where="generate", remedy="give one of the two")
    if "max_new_tokens" in said and "max_length" in said:
        what = "max_new_tokens and max_length are two limits"
        raise UsageError(what, where="generate", remedy="give max_new_tokens alone")
    least, most = said.get("min_new_tokens", 0), said.get("max_new_tokens", math.inf)
    if least > most:
        what = "min_new_tokens is above max_new_tokens"
        raise UsageError(what, where="generate", expected=f"at most {most}", found=str(least))
    if greedy:
        del said["temperature"]
    # transformers takes no whole number there
    said |= {name: float(said[name]) for name in _NUMBERS if name in said}
    limit = {} if "max_length" in said else {"max_new_tokens": max(128, said.get("min_new_tokens", 0))}
    return {**limit, "do_sample": bool(sampling) and not greedy, **said}


def _unknown(name: str, known: Sequence[str]) -> Problem:
    if name in _NOT_OPTIONS:
        return Problem(
            f"{name} asks for more than one text",
            "generate",
            remedy="use the model's own generate: run.speaker.model.generate(...)",
        )
    return Problem(f"{name!r} is no generation option", "generate", remedy=did_you_mean(name, known))


def _misfit(name: str, value: Any) -> Problem | None:
    """What is wrong with the value of one option, or None."""
    truth = isinstance(value, bool)
    if name in _TRUTHS:
        wanted, fits = "true or false", truth
    elif name in _WHOLE:
        wanted, fits = (
            f"a whole number, at least {_WHOLE[name]}",
            isinstance(value, Integral) and not truth and int(value) >= _WHOLE[name],
        )
    elif name in _NUMBERS:
        most = _NUMBERS[name]
        wanted = "a number, at least 0" + (f" and at most {most:g}" if most < math.inf else "")
        fits = isinstance(value, Real) and not truth and 0 <= float(value) <= most and float(value) < math.inf
    else:
        return None
    return None if fits else Problem(f"{name} does not fit", "generate", wanted, repr(value)[:80])


def within(settings: Mapping[str, Any], room: float, taken: int) -> dict[str, Any]:
    """The settings with no more new tokens than there is room for behind those that are `taken`, as a table
    of positions has no row behind its last. Raises UsageError where they ask for more at the least."""
    if (least := max(settings.get("min_new_tokens", 0), settings.get("min_length", 0) - taken)) > room:
        _refuse_long(room, f"at least {least}")
    if "max_length" in settings:
        return {**settings, "max_length": min(settings["max_length"], taken + room)}
    return {**settings, "max_new_tokens": min(settings["max_new_tokens"], room)}


def refuse_cut(found: Tensor, settings: Mapping[str, Any], room: float, taken: int, end: int | None) -> None:
    """Raise UsageError for an answer that the model's positions have cut short of what was asked for. found:
    its tokens, behind those that were taken; end: the token that it would end with."""
    asked = settings.get("max_new_tokens", settings.get("max_length", 0) - taken)
    if asked > room and len(found) >= taken + room and int(found[-1]) != end:
        _refuse_long(room, f"more, of {asked} at the most")


def _refuse_long(room: float, found: str) -> NoReturn:
    what = "the answer is longer than the model's positions"
    expected = f"at most {room:g} tokens behind this prompt"
    remedy = "ask for fewer, or with a shorter prompt"
    raise UsageError(what, where="generate", expected=expected, found=found, remedy=remedy)
