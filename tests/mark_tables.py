"""Tables of what the code can, made by asking it: for the documents that tests write."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from petune.errors import PetuneError
from petune.kernels.fuse import fuse, fused_blocks
from petune.methods import tune
from petune.methods.configs import make_config
from petune.models import family_of
from petune.models.copied import copied
from petune.models.quantise import quantise_blocks
from tests.methods.zoo import SETTINGS, tiny

MODELS = {
    "BERT": "bert-mlm",
    "BART": "bart-seq2seq",
    "T5": "t5-seq2seq",
    "Llama": "llama-causal",
    "Qwen3": "qwen3-causal",
    "Gemma 3": "gemma3-causal",
}


class Notes:
    """Reasons, each told once under a number."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def __call__(self, reason: str) -> str:
        if reason not in self.told:
            self.told.append(reason)
        return f"no ({self.told.index(reason) + 1})"

    def lines(self) -> Iterator[str]:
        """The reasons as a numbered list."""
        return (f"{number}. {reason}" for number, reason in enumerate(self.told, 1))


@lru_cache(maxsize=1)
def built(model: str, **changes: Any) -> Any:
    """A model of the zoo that stays as it is."""
    return tiny(model, **changes)


def fresh(model: str, **changes: Any) -> Any:
    """A model of the zoo that may be tuned: a copy, for a row asks the same one again and again, and to make
    it takes twice as long."""
    return copied(built(model, **changes))


def of_blocks(
    model: str,
    method: str,
    base: str | None,
    notes: Notes,
    targets: Sequence[str] | None = None,
    **changes: Any,
) -> str:
    """Whether the blocks of a model are fused under a method, on one device; `changes` go over its config. A
    method may be followed by a comma and its kind."""
    made = fresh(model, **changes)
    name, _, kind = method.partition(", ")
    settings = ({"kind": kind} if kind else {}) | ({"targets": targets} if targets else {})
    try:
        tune(made, make_config(name, SETTINGS.get(name, {}) | settings))
        if base is not None:
            quantise_blocks(made, family_of(made), base)
        done = fuse(made, family_of(made), "reference")
    except PetuneError as error:
        found = error.problems[0]
        reason = shortened(found.found or found.what)
        return notes(reason if base is None else reason.replace(base, "base_dtype"))
    assert done.blocks == bool(fused_blocks(made))
    return "yes" if done.blocks else notes(shortened(done.reasons[0]))


def shortened(reason: str) -> str:
    """A reason without the names of a module and of its stack."""
    return re.sub(r"^\S+ is a (\w+)$", r"a layer is a \1", reason.partition("; ")[0].rpartition(": ")[2])


def rows(names: Iterable[str], columns: Iterable[str], cell: Callable[[str, str], str]) -> Iterator[str]:
    """A table in Markdown."""
    heads = list(columns)
    yield f"| | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    for name in names:
        yield f"| {name} | {' | '.join(cell(name, column) for column in heads)} |"
