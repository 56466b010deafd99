"""The frozen corpus keeps its promises: no leak between splits, balance, the counts and hashes of
PROVENANCE."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from benchmarks.demo_corpus import (
    DOMAIN,
    FILES,
    KINDS,
    NEAR,
    docstrings,
    jaccard,
    main,
    shingles,
    split_summary,
    take,
    without_near_duplicates,
)
from petune.demo import data_path

FULL = {"kind", "module", "name", "summary", "body", "text"}
HELD_OUT = {"eval", "domain_eval"}


@pytest.fixture(scope="module")
def corpus() -> dict[str, list[dict[str, str]]]:
    files = {name: (data_path("docstrings") / f"{name}.jsonl").read_text("utf-8") for name in FILES}
    return {name: [json.loads(line) for line in text.splitlines()] for name, text in files.items()}


@pytest.fixture(scope="module")
def modules(corpus: dict[str, list[dict[str, str]]]) -> dict[str, set[str]]:
    return {name: {row["module"] for row in rows} for name, rows in corpus.items()}


def test_rows_have_their_keys(corpus: dict[str, list[dict[str, str]]]) -> None:
    for name, rows in corpus.items():
        keys = FULL - {"summary", "body"} if name == "extra" else FULL
        assert all(set(row) == keys and row["kind"] in KINDS and row["text"] for row in rows), name


def test_summary_and_body_make_the_text(corpus: dict[str, list[dict[str, str]]]) -> None:
    for row in corpus["train"] + corpus["eval"]:
        assert f"{row['summary']} {row['body']}".split() == row["text"].split()


def test_eval_is_balanced(corpus: dict[str, list[dict[str, str]]]) -> None:
    counts = Counter(row["kind"] for row in corpus["eval"])
    assert set(counts) == set(KINDS) and len(set(counts.values())) == 1


def test_a_module_lies_in_one_split(modules: dict[str, set[str]]) -> None:
    for left, right in combinations(FILES, 2):
        if {left, right} != {"train", "extra"}:
            assert not modules[left] & modules[right], (left, right)


def test_the_domain_is_in_no_general_file(modules: dict[str, set[str]]) -> None:
    for name, names in modules.items():
        tops = {module.partition(".")[0] for module in names}
        assert tops <= DOMAIN if name.startswith("domain") else not tops & DOMAIN, name


@pytest.mark.slow
def test_nothing_near_a_held_out_text_is_trained_on(corpus: dict[str, list[dict[str, str]]]) -> None:
    rows = [(name, shingles(row["text"])) for name in FILES for row in corpus[name]]
    holders: dict[tuple[str, ...], list[int]] = {}
    for at, (_, mine) in enumerate(rows):
        for shingle in mine:
            holders.setdefault(shingle, []).append(at)
    for name, mine in rows:
        if name in HELD_OUT:
            near = {other for shingle in mine for other in holders[shingle] if rows[other][0] != name}
            assert all(jaccard(mine, rows[other][1]) < NEAR for other in near)


def test_provenance_states_counts_and_hashes() -> None:
    folder = data_path("docstrings")
    notice = (folder / "PROVENANCE").read_text("utf-8")
    assert (
        "PSF-2.0" in notice and "Python Software Foundation" in notice and "benchmarks.demo_corpus" in notice
    )
    table = dict(re.findall(r"^(\w+)\.jsonl +(.*)$", notice, re.MULTILINE))
    assert set(table) == set(FILES) == {path.stem for path in folder.glob("*.jsonl")}
    for name, line in table.items():
        data = (folder / f"{name}.jsonl").read_bytes()
        rows = [json.loads(text) for text in data.splitlines()]
        kinds = Counter(row["kind"] for row in rows)
        found = [
            len(rows),
            *(kinds[kind] for kind in KINDS),
            sum(len(row["text"]) for row in rows),
            hashlib.sha256(data).hexdigest(),
        ]
        assert line.split() == [str(value) for value in found], name


@pytest.mark.long
@pytest.mark.skipif(sys.version_info[:3] != (3, 11, 7), reason="the corpus is frozen from Python 3.11.7")
def test_the_script_makes_the_frozen_files_again(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    for path in data_path("docstrings").iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_docstrings_gives_each_definition_its_kind_and_name() -> None:
    inner = (
        'class A:\n  """A class that is there to be seen."""\n  def f(self):\n    """A function that does it'
        ' all.\n\n    Or so."""\n'
    )
    source = '"""What the module is about, said."""\n' + inner
    rows = {row["name"]: row for row in docstrings("pkg.mod", source)}
    assert {name: row["kind"] for name, row in rows.items()} == {
        "pkg.mod": "module",
        "A": "class",
        "A.f": "function",
    }
    assert rows["A.f"]["summary"] == "A function that does it all." and rows["A.f"]["body"] == "Or so."


def test_texts_under_other_terms_are_left_out() -> None:
    assert not list(docstrings("m", '"""A fine module.\n\nCopyright 1999 by somebody, all rights."""'))


def test_a_long_first_paragraph_is_cut_at_its_first_sentence() -> None:
    summary, body = split_summary(
        "Does one thing, and\ndoes it well. " + "More words follow here. " * 10 + "\n\nEnd."
    )
    assert (
        summary == "Does one thing, and does it well."
        and body.startswith("More words")
        and body.endswith("End.")
    )


def test_near_duplicates_fall_and_neighbours_stay() -> None:
    texts = [
        "Return the width of the widget.",
        "return the WIDTH of the widget",
        "Return the height of the window.",
    ]
    texts += ["Codec cp037 for Python.", "Codec cp850 for Python."]
    kept = without_near_duplicates({"text": text} for text in texts)
    assert [row["text"] for row in kept] == [texts[0], texts[2], texts[3]]


def test_take_does_not_depend_on_the_order_of_rows() -> None:
    rows = [{"kind": "class", "module": "m", "name": str(at), "text": str(at)} for at in range(9)]
    assert take(rows, 3) == take(rows[::-1], 3) and len(take(rows, 3)) == 3


def test_wrong_arguments_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2 and "usage" in capsys.readouterr().err
