"""Whatever bytes a file holds, reading it ends in rows or in an error of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from petune.errors import PetuneError
from petune.tasks import DataConfig, load_rows
from petune.tasks.formats import USUAL

NAMES = sorted({name for names in USUAL.values() for name in names})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "user", "assistant"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4) | VALUES, max_size=6)
TASKS = st.sampled_from(["classify", "seq2seq", "causal", "chat"])
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path, task: str, skip: bool) -> None:
    try:
        rows = load_rows(DataConfig(str(path), on_bad_line="skip" if skip else "error"), task, path.parent)
    except PetuneError as error:
        assert error.code in (2, 3) and str(error)
    else:
        assert rows.train and rows.eval


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "txt", "parquet"])
@FUZZ
@given(raw=st.binary(max_size=200), task=TASKS, skip=st.booleans())
def test_any_bytes(suffix: str, raw: bytes, task: str, skip: bool, tmp_path: Path) -> None:
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(raw)
    read(path, task, skip)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@FUZZ
@given(rows=ROWS, task=TASKS, skip=st.booleans(), cut=st.integers(0, 20))
def test_any_rows_whole_or_cut(suffix: str, rows: list, task: str, skip: bool, cut: int, tmp_path: Path) -> None:
    path = tmp_path / f"d.{suffix}"
    text = json.dumps(rows) if suffix == "json" else "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text[: max(0, len(text) - cut)])
    read(path, task, skip)
