"""What a score must beat before it shows anything: the most frequent label, naive Bayes over words, and tags
by neighbouring words.

Pure Python on purpose: a demo prints both beside its own figure without another package, and a reader can
check them on one screen.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence

Labelled = Sequence[tuple[str, str]]  # (text, label)


def majority(train_labels: Sequence[str], eval_labels: Sequence[str]) -> float:
    """Accuracy, 0 to 1, of always answering the most frequent training label (ties: the first in alphabetical
    order).

    ValueError when either side is empty.
    """
    if not train_labels or not eval_labels:
        raise ValueError("a baseline needs at least one training and one evaluation row")
    counts = Counter(train_labels)
    answer = min(counts, key=lambda label: (-counts[label], label))
    return sum(label == answer for label in eval_labels) / len(eval_labels)


def naive_bayes(train: Labelled, evaluation: Labelled, *, uniform_prior: bool = False) -> float:
    """Accuracy, 0 to 1, of multinomial naive Bayes over lower-case words with add-one smoothing.

    The answer for a text of words w is argmax_y log p(y) + sum_w log (n(w, y) + 1) / (n(y) + V), where n(w,
    y) counts w in training texts of label y, n(y) all their words and V the distinct words of training; a
    word never seen in training says nothing and is passed over (McCallum and Nigam 1998). `uniform_prior`
    leaves log p(y) out, which suits a balanced evaluation set after unbalanced training. Ties go to the first
    label in alphabetical order. ValueError when either side is empty.
    """
    if not train or not evaluation:
        raise ValueError("a baseline needs at least one training and one evaluation row")
    rows = Counter(label for _, label in train)
    counts: dict[str, Counter[str]] = {label: Counter() for label in sorted(rows)}
    for text, label in train:
        counts[label].update(words(text))
    vocabulary = set().union(*counts.values())
    totals = {label: seen.total() + len(vocabulary) for label, seen in counts.items()}
    priors = {label: 0.0 if uniform_prior else math.log(rows[label]) for label in counts}

    def answer(text: str) -> str:
        known = [word for word in words(text) if word in vocabulary]
        evidence = {
            label: sum(math.log((seen[word] + 1) / totals[label]) for word in known)
            for label, seen in counts.items()
        }
        return max(counts, key=lambda label: priors[label] + evidence[label])

    return sum(answer(text) == label for text, label in evaluation) / len(evaluation)


def tag_by_neighbours(
    train: Sequence[tuple[Sequence[str], Sequence[str]]], rows: Sequence[Sequence[str]]
) -> list[list[str]]:
    """A tag for each word of `rows`: in `train` (words, tags) that seen most for the word before the same
    next one, else before that one.

    The end of a row counts as a word; where the next word was never seen the tag is O. Ties go to the first
    tag in alphabetical order.
    """
    both: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    after: dict[str, Counter[str]] = defaultdict(Counter)
    for row, tags in train:
        for pair, tag in zip(_neighbours(row), tags, strict=True):
            both[pair][tag] += 1
            after[pair[1]][tag] += 1
    best = {
        pair: min(counts, key=lambda tag: (-counts[tag], tag))
        for pair, counts in (*both.items(), *after.items())
    }
    return [[best.get(pair) or best.get(pair[1], "O") for pair in _neighbours(row)] for row in rows]


def _neighbours(row: Sequence[str]) -> list[tuple[str, str]]:
    """Each word with the next."""
    return list(zip(row, [*row[1:], ""], strict=True))


def words(text: str) -> list[str]:
    """The runs of letters, digits and underscores, in lower case."""
    return re.findall(r"\w+", text.lower())
