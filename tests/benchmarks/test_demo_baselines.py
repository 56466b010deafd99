"""Majority and naive Bayes on data small enough to work out by hand."""

from __future__ import annotations

import pytest

from benchmarks.demo_baselines import majority, naive_bayes, words


def test_majority_answers_the_most_frequent_training_label() -> None:
    assert majority(["a", "b", "b"], ["b", "a", "b", "b"]) == 0.75


def test_majority_breaks_ties_by_the_alphabet() -> None:
    assert majority(["b", "a"], ["a", "a", "b", "b", "b"]) == 0.4


def test_naive_bayes_follows_the_words() -> None:
    train = [("red apple", "fruit"), ("green apple", "fruit"), ("fast car", "vehicle")]
    assert (
        naive_bayes(train, [("an apple", "fruit"), ("a car", "vehicle"), ("fast apple apple", "fruit")])
        == 1.0
    )


def test_naive_bayes_smooths_by_one() -> None:
    # p(x|a) = (1+1)/(1+2) = 2/3 and p(x|b) = (2+1)/(4+2) = 1/2, with equal priors; unsmoothed the order is
    # the same, so look at y as well: p(y|a) = 1/3, p(y|b) = 3/6. For "x y": a has 2/9, b has 1/4. Without
    # smoothing a would have 0.
    train = [("x", "a"), ("x x y y", "b")]
    assert naive_bayes(train, [("x", "a"), ("x y", "b"), ("x x x y", "a")]) == 1.0


def test_prior_counts_unless_told_otherwise() -> None:
    train = [("x", "rare"), ("y", "often"), ("y", "often"), ("y", "often")]
    assert naive_bayes(train, [("unseen words", "often")]) == 1.0
    assert naive_bayes([("x", "rare"), ("x", "often"), ("x", "often")], [("x", "often")]) == 1.0
    # With the prior "often" wins by 3 to 1 against x's likelihood 2/3 to 1/5; without it "rare" does.
    assert naive_bayes(train, [("x", "rare")], uniform_prior=True) == 1.0


def test_words_are_lower_case_and_leave_punctuation() -> None:
    assert words("Return `self._value`, as-is.") == ["return", "self", "_value", "as", "is"]


@pytest.mark.parametrize(
    "baseline",
    [lambda: majority([], ["a"]), lambda: majority(["a"], []), lambda: naive_bayes([], [("x", "a")])],
)
def test_an_empty_side_is_refused(baseline: object) -> None:
    with pytest.raises(ValueError, match="at least one"):
        baseline()  # type: ignore[operator]
