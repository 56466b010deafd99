"""Metrics of generated answers: by hand, by sacrebleu, and by a function of the user's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petune.errors import MachineError, UsageError
from petune.tasks.answer_metrics import exact_match, metric_named, rouge_l, scores

WORDS = st.lists(st.sampled_from(["a", "b", "c"]), max_size=7)


def test_exact_match_looks_past_white_space_at_the_ends_alone() -> None:
    assert exact_match(" yes\n", "yes") == 1.0
    assert exact_match("Yes", "yes") == exact_match("y es", "yes") == 0.0


def test_rouge_l_is_the_f1_of_the_longest_common_subsequence() -> None:
    # the example of Lin (2004): 3 of 4 words in order, and 2 of 4
    assert rouge_l("police kill the gunman", "Police killed the gunman.") == pytest.approx(3 / 4)
    assert rouge_l("the gunman kill police", "police killed the gunman") == pytest.approx(2 / 4)
    assert rouge_l("a b", "a b c d") == pytest.approx(2 * 2 / 6)
    assert rouge_l("", "a") == rouge_l("?", "a") == rouge_l("a", "") == 0.0


@given(WORDS, WORDS)
def test_rouge_l_equals_a_search_over_all_subsequences(left: list[str], right: list[str]) -> None:
    def longest(one: list[str], other: list[str]) -> int:
        if not one or not other:
            return 0
        if one[-1] == other[-1]:
            return 1 + longest(one[:-1], other[:-1])
        return max(longest(one[:-1], other), longest(one, other[:-1]))

    both = len(left) + len(right)
    common = longest(left, right)
    assert rouge_l(" ".join(left), " ".join(right)) == pytest.approx(2 * common / both if common else 0.0)


def test_chrf_is_that_of_the_whole_corpus() -> None:
    found = scores(["the cat", "dog"], ["the cat", "dig"], ["chrf"])["chrf"]
    assert scores(["same"], ["same"], ["chrf"]) == {"chrf": pytest.approx(1.0)}
    assert 0 < found < 1
    # a mean of rows would be another number
    rows = [
        scores([one], [other], ["chrf"])["chrf"] for one, other in (("the cat", "the cat"), ("dog", "dig"))
    ]
    assert found != pytest.approx(sum(rows) / 2, abs=1e-3)


def test_chrf_without_its_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(MachineError, match=r"pip install 'petune\[scores\]'"):
        scores(["a"], ["a"], ["chrf"])


def test_a_function_of_the_users_is_averaged_over_rows(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def shorter(answer, wanted):\n    return len(answer) < len(wanted)\n")
    assert scores(["a", "bbb"], ["bb", "a"], [f"{file}:shorter"]) == {f"{file}:shorter": 0.5}


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("", "rouge", "did you mean: rouge_l"),
        ("", "nowhere.py:f", "no such Python file"),
        ("def g(a, b): return 1.0", "mine.py:f", "no such function"),
        ("def f(a, b): return 1 /", "mine.py:f", "SyntaxError"),
        ("def f(a): return 1.0", "mine.py:f", "has failed"),
        ("def f(a, b): return a", "mine.py:f", "gives no number"),
    ],
)
def test_a_metric_that_does_not_work_is_named(
    text: str, name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match=said):
        metric_named(name)(["a"], ["b"])
