"""A table gives back the very examples that were put in, from memory and from a mapped file, at 8 bytes a
token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from petune.tasks import table
from petune.tasks.examples import MASKED, Example
from petune.tasks.table import Examples

KINDS = {
    "labels of tokens": lambda n: Example([5] * n, [MASKED] + [7] * (n - 1), f"d:{n}", n + 3),
    "a class": lambda n: Example([n, 2], n % 3, f"d:{n}", 2, token_types=[0, 1]),
    "a target": lambda n: Example([1] * n, [4, 2], "d:ü", n, has_target=True),
    "several texts": lambda n: Example(
        [1] * n,
        [MASKED] + [2] * (n - 1),
        f"d:{n}",
        n,
        others=(Example([3] * (n + 1), [MASKED] * n + [4], f"d:{n}", n + 9), Example([5], [6], f"d:{n}", 1)),
    ),
    "some that are judged": lambda n: Example([n], [2], "d", 1, good=(None, True, False)[n % 3]),
    "packed": lambda n: Example([3] * n, [MASKED] * n, "d:1", n, positions=list(range(n))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_holds_the_examples_that_were_put_in(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "AT_ONCE", 3)
    monkeypatch.setattr(pa, "array", None)  # it imports pandas
    given = [KINDS[kind](n) for n in range(1, 9)]
    held = Examples.of(given)
    held.write(tmp_path / "t.arrow")
    mapped = Examples.map(tmp_path / "t.arrow")
    for found in (held, mapped):
        assert list(found) == given
        assert [found[at] for at in range(-8, 8)] == given * 2
        assert found[2:7:2] == given[2:7:2]
        assert len(found) == 8
        assert found.sizes() == [sum(len(text.input_ids) for text in one.texts) for one in given]
        with pytest.raises(IndexError):
            found[8]


def test_no_examples_are_a_table_too(tmp_path: Path) -> None:
    Examples.of([]).write(tmp_path / "t.arrow")
    assert list(Examples.map(tmp_path / "t.arrow")) == []


def test_a_token_takes_8_bytes_and_a_mapped_one_none_of_this_process(tmp_path: Path) -> None:
    held = Examples.of([Example([7] * 1000, [7] * 1000, "d", 1000)] * 1000)
    assert held.nbytes / 1_000_000 < 8.1
    held.write(tmp_path / "t.arrow")
    del held
    before = pa.total_allocated_bytes()
    mapped = Examples.map(tmp_path / "t.arrow")
    assert mapped[999].input_ids[-1] == 7
    assert pa.total_allocated_bytes() - before < 1000


def test_a_part_of_a_column_is_read_as_it_is_and_unknown_numbers_are_refused() -> None:
    column = pa.array([3, 1, 4, 1, 5], pa.int32())
    assert table._numbers(column.slice(1, 3)).tolist() == [1, 4, 1]
    assert table._numbers(column.slice(5)).dtype == table._numbers(column).dtype == "int32"
    with pytest.raises(ValueError, match="1 numbers"):
        table._numbers(pa.array([3, None], pa.int32()))


@pytest.mark.long
@pytest.mark.forks
def test_a_table_is_made_and_read_without_pandas() -> None:
    """Of which pyarrow remembers once it was asked for, so in a process of its own."""
    code = (
        "import sys; from petune.tasks.table import Examples; from petune.tasks.examples import Example;"
        " one = Example([5, 6], 1, 'd:1', 2); assert list(Examples.of([one])) == [one];"
        " assert 'pyarrow' in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
