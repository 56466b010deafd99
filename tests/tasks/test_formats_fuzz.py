"""Whatever bytes a file holds, reading it ends in rows or in an error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petune.errors import PetuneError
from petune.tasks import DataConfig, load_rows
from petune.tasks.formats import USUAL

NAMES = sorted({name for names in USUAL.values() for name in names})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "user", "assistant"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4) | VALUES, max_size=6)
TASKS = st.sampled_from(["classify", "seq2seq", "causal", "chat"])
COUNTS = pytest.mark.parametrize(
    "count", [60, pytest.param(800, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)


def fuzz(count: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Call `check` with `count` drawn examples."""
    settings(max_examples=count, deadline=None, database=None)(given(**drawn)(check))()


def read(path: Path, task: str, skip: bool) -> None:
    try:
        rows = load_rows(DataConfig(str(path), on_bad_line="skip" if skip else "error"), task, path.parent)
    except PetuneError as error:
        assert error.code in (2, 3) and str(error)
    else:
        assert rows.train and rows.eval


@COUNTS
@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt", "parquet"])
def test_any_bytes(suffix: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / f"d.{suffix}"

    def check(raw: bytes, task: str, skip: bool) -> None:
        path.write_bytes(raw)
        read(path, task, skip)

    fuzz(count, check, raw=st.binary(max_size=200), task=TASKS, skip=st.booleans())


@pytest.mark.slow
@COUNTS
@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_any_rows_whole_or_cut(suffix: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / f"d.{suffix}"

    def check(rows: list[Any], task: str, skip: bool, cut: int) -> None:
        text = json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text[: max(0, len(text) - cut)])
        read(path, task, skip)

    fuzz(count, check, rows=ROWS, task=TASKS, skip=st.booleans(), cut=st.integers(0, 20))
