"""Metrics of generated answers, held against the wanted ones: exact match, ROUGE-L, chrF, and a function of
the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from petune.errors import MachineError, UsageError, did_you_mean

_WORD = re.compile(r"\w+")


def exact_match(answer: str, wanted: str) -> float:
    """1.0 where both are the same but for white space at the ends, else 0.0."""
    return float(answer.strip() == wanted.strip())


def rouge_l(answer: str, wanted: str) -> float:
    """The F1 of the longest common subsequence of words, in lower case and without punctuation (ROUGE-L, Lin
    2004); 0.0 where either has no word."""
    left, right = _WORD.findall(answer.lower()), _WORD.findall(wanted.lower())
    # longest[j]: of the words of `left` so far and the first j of `right`
    longest = [0] * (len(right) + 1)
    for word in left:
        diagonal = 0
        for at, other in enumerate(right, 1):
            diagonal, longest[at] = (
                longest[at],
                diagonal + 1 if word == other else max(longest[at], longest[at - 1]),
            )
    return 2 * longest[-1] / (len(left) + len(right)) if longest[-1] else 0.0


def _chrf(answers: Sequence[str], wanted: Sequence[str]) -> float:
    """chrF of the whole corpus (Popovic 2015), 0 to 1, as sacrebleu computes it."""
    try:
        from sacrebleu import corpus_chrf
    except ImportError:
        what = "chrf needs sacrebleu, which is not installed"
        raise MachineError(what, where="--metric chrf", remedy="pip install 'petune[scores]'") from None
    return float(corpus_chrf(list(answers), [list(wanted)]).score) / 100


def _mean(of_row: Callable[[str, str], float], name: str) -> Callable[[Sequence[str], Sequence[str]], float]:
    """The mean of a metric of one row over all rows."""

    def metric(answers: Sequence[str], wanted: Sequence[str]) -> float:
        found = [_of_row(of_row, name, pair) for pair in zip(answers, wanted, strict=True)]
        return sum(found) / len(found)

    return metric


METRICS: dict[str, Callable[[Sequence[str], Sequence[str]], float]] = {
    "exact_match": _mean(exact_match, "exact_match"),
    "rouge_l": _mean(rouge_l, "rouge_l"),
    "chrf": _chrf,
}


def scores(answers: Sequence[str], wanted: Sequence[str], metrics: Sequence[str]) -> dict[str, float]:
    """Each metric of the answers, at least one. metrics: names in METRICS, or FILE.py:FUNCTION, a function of
    an answer and the wanted one that gives a number, of which the mean is taken.

    Raises UsageError for a metric that is not there, or a function that fails or gives no number;
    MachineError for one whose library is not installed.
    """
    return {name: metric_named(name)(answers, wanted) for name in metrics}


def metric_named(name: str) -> Callable[[Sequence[str], Sequence[str]], float]:
    """The metric of a whole corpus that a name means. Raises UsageError where there is none."""
    if name in METRICS:
        return METRICS[name]
    file, colon, function = name.rpartition(":")
    if not colon:
        what = f"no metric of answers named {name!r}"
        expected = f"{', '.join(METRICS)}, or FILE.py:FUNCTION"
        raise UsageError(what, where="--metric", expected=expected, remedy=did_you_mean(name, METRICS))
    return _mean(_function(Path(file).expanduser(), function, name), name)


def _function(file: Path, function: str, name: str) -> Callable[[str, str], Any]:
    spec = spec_from_file_location(file.stem, file) if file.is_file() else None
    if spec is None or spec.loader is None:
        what, where = "there is no such Python file", f"--metric {name}"
        raise UsageError(what, where=where, found=str(file), remedy="--metric FILE.py:FUNCTION")
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            "this file cannot be run", where=f"--metric {name}", found=f"{type(error).__name__}: {error}"
        ) from error
    if not callable(found := getattr(module, function, None)):
        there = [key for key, value in vars(module).items() if callable(value) and key[0] != "_"]
        known, remedy = ", ".join(there) or "none", "name a function of it: --metric FILE.py:FUNCTION"
        raise UsageError(
            "the file has no such function", where=f"--metric {name}", found=known, remedy=remedy
        )
    return found  # type: ignore[no-any-return]  # what it gives is checked where it is asked


def _of_row(of_row: Callable[[str, str], Any], name: str, pair: tuple[str, str]) -> float:
    """What a metric says of one answer and the wanted one."""
    try:
        found = of_row(*pair)
    except Exception as error:
        raise UsageError(
            "this metric has failed",
            where=f"--metric {name}",
            found=f"{type(error).__name__}: {error}, for the answer {pair[0]!r}",
        ) from error
    if not isinstance(found, bool | int | float):
        what, said = "this metric gives no number", f"{found!r} for the answer {pair[0]!r}"
        raise UsageError(what, where=f"--metric {name}", found=said, remedy="return a number or a bool")
    return float(found)
