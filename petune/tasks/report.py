"""What became of the rows: lengths, cuts, drops, the share of trained tokens, and examples with the trained
part marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from petune.tasks.examples import MASKED, Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BARS = 12  # of a histogram, at most


@dataclass(frozen=True)
class DataReport:
    """Figures of the rows to train on; lengths are tokens of one example before cutting. `bins` counts packed
    sequences.

    `trained` is None for classify, where rows are trained, not tokens, and for mlm, where they change.
    `truncation` is the side that is cut, None for pictures, of which none is. `lengths` counts the rows of
    each stretch of lengths: (first, last, rows).
    """

    rows: int
    eval_rows: int
    p50: int
    p95: int
    longest: int
    limit: int
    tokens: int
    truncated: int = 0
    dropped: int = 0
    eval_dropped: int = 0
    trained: int | None = None
    target_p50: int | None = None
    target_longest: int | None = None
    bins: int | None = None
    truncation: str | None = None
    notes: tuple[str, ...] = ()
    lengths: tuple[tuple[int, int, int], ...] = ()

    @property
    def trained_share(self) -> float:
        """Trained tokens per token; 1 for classify."""
        return 1.0 if self.trained is None else self.trained / max(1, self.tokens)

    @property
    def truncated_share(self) -> float:
        """Cut rows per row."""
        return self.truncated / max(1, self.rows + self.dropped)

    def lines(self) -> list[str]:
        """The report, one fact a line."""
        said = [f"rows {self.rows:,} to train on, {self.eval_rows:,} held out"]
        if self.dropped or self.eval_dropped:
            said.append(
                f"dropped {self.dropped:,} and {self.eval_dropped:,} rows: nothing to train was left after"
                " cutting"
            )
        if self.truncation is not None:
            share = f"{self.truncated_share:.1%} cut on the {self.truncation}"
            said.append(
                f"tokens per row p50 {self.p50:,}, p95 {self.p95:,}, longest {self.longest:,}; limit"
                f" {self.limit:,}, {share}"
            )
        if self.target_p50 is not None:
            said.append(f"tokens per target p50 {self.target_p50:,}, longest {self.target_longest:,}")
        if self.trained is not None:
            said.append(f"trained tokens {self.trained:,} of {self.tokens:,} ({self.trained_share:.1%})")
        if self.bins is not None:
            said.append(
                f"packed into {self.bins:,} sequences, {self.tokens / (self.bins * self.limit):.1%} full; a"
                " batch counts sequences"
            )
        return [*said, *self.notes]

    def chart(self, width: int = 50) -> list[str]:
        """Rows by their tokens before cutting, one bar for each stretch of lengths, at most `width` wide."""
        tallest = max((count for _, _, count in self.lengths), default=0)
        names = [f"{first}-{last}" if last > first else str(first) for first, last, _ in self.lengths]
        room = max(map(len, names), default=0)
        return [
            f"{name:>{room}}  {'#' * -(-width * count // tallest):{width}} {count:,}"
            for name, (_, _, count) in zip(names, self.lengths, strict=True)
        ]


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0


def histogram(values: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """How many of the values lie in each of at most BARS stretches of equal width: (first, last, count)."""
    if not values:
        return ()
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // BARS)
    found = Counter((value - low) // width for value in values)
    return tuple(
        (at, min(at + width - 1, high), found[(at - low) // width]) for at in range(low, high + 1, width)
    )


def spans(example: Example, tokenizer: PreTrainedTokenizerBase | None) -> list[tuple[str, bool]]:
    """The example as pieces of text, each with whether it is trained. For seq2seq the source comes first,
    then the target."""
    if isinstance(example.labels, int):
        return [(_text(tokenizer, example.input_ids), False)]
    if example.has_target:
        return [(_input(example, tokenizer), False), (_text(tokenizer, example.labels), True)]
    pieces: list[tuple[list[int], bool]] = []
    for token, label in zip(example.input_ids, example.labels, strict=True):
        trained = label != MASKED
        if not pieces or pieces[-1][1] != trained:
            pieces.append(([], trained))
        pieces[-1][0].append(token)
    return [(_text(tokenizer, ids), trained) for ids, trained in pieces]


def _input(example: Example, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """What the model reads, for people."""
    return _text(tokenizer, example.input_ids) if example.reading is None else str(example.reading.media)


def _text(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int]) -> str:
    assert tokenizer is not None, "texts are made of tokens by a tokenizer"
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _marks(example: Example) -> str:
    """A sign for each text that is compared: + better or good, - worse or bad, ~ the answer to another
    prompt."""
    if example.good is None:
        return "+" + "-" * len(example.others)
    return ("+" if example.good else "-") + "~" * len(example.others)


def render(
    example: Example, tokenizer: PreTrainedTokenizerBase | None, labels: Sequence[str] | None = None
) -> str:
    """The example as text with what is trained in [[...]]: a class after the text, or after the place of the
    picture, a tag after its token, by name if `labels` is given. Texts that are compared stand below one
    another, the better one first."""
    if example.others and isinstance(example.labels, int):
        texts = [_text(tokenizer, text.input_ids) for text in example.texts]
        marks = ["+", *"-" * len(texts[1:])] if example.labels else ["=", "+", *"-" * len(texts[2:])]
        return "\n".join(f"{mark} {text}" for mark, text in zip(marks, texts, strict=True))
    if example.others:
        return "\n".join(
            f"{mark} {render(text, tokenizer, labels)}"
            for mark, text in zip(_marks(example), example.texts, strict=True)
        )
    if isinstance(example.labels, int):
        name = labels[example.labels] if labels else str(example.labels)
        return f"{_input(example, tokenizer)} -> [[{name}]]"
    if labels:
        tokens = (
            (_text(tokenizer, [token]), label)
            for token, label in zip(example.input_ids, example.labels, strict=True)
        )
        return " ".join(text if label == MASKED else f"[[{text} {labels[label]}]]" for text, label in tokens)
    arrow = " -> " if example.has_target else ""
    return arrow.join(f"[[{text}]]" if trained else text for text, trained in spans(example, tokenizer))
