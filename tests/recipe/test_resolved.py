"""The settings of a run are read as it wrote them or refused: cut anywhere or edited."""

from __future__ import annotations

from pathlib import Path

import pytest

from petune.errors import FileError
from petune.recipe import load_recipe, load_resolved, sealed_settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    recipe = load_recipe("llama_lora", {"lr": 0.5, "out": str(tmp_path), "schedule": "constant"})
    (tmp_path / "resolved.yaml").write_bytes(sealed_settings(recipe, "0" * 32))
    return tmp_path / "resolved.yaml"


def test_what_was_written_is_read_and_may_be_overridden(file: Path) -> None:
    again = load_resolved(file, {"out": "elsewhere"}, ["lr=0.25"])
    assert (again.out, again.lr, again.schedule) == ("elsewhere", 0.25, "constant")
    assert load_resolved(file).resolved() == load_recipe(file).resolved()


def test_settings_cut_at_any_line_or_byte_are_refused(file: Path) -> None:
    whole = file.read_bytes()
    ends = [at for at, byte in enumerate(whole) if byte == 10][:-1]
    for end in (0, 41, 60, 90, ends[0], *ends[2::9], ends[-1]):
        file.write_bytes(whole[:end])
        with pytest.raises(FileError, match=r"resolved\.yaml  was cut or edited"):
            load_resolved(file)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("lr: 0.5", "lr: 0.6"),
        ("\nseed: 0", ""),
        ("# sha256 ", "# sha256 0"),
        ("# sha256 ", "# "),
        ("# sha256 ", "# sha255 "),
        ("# run ", "# rum "),
        ("below\n", "below\r\n"),
    ],
)
def test_an_edited_setting_is_refused_with_what_to_do(old: str, new: str, file: Path) -> None:
    text = file.read_bytes().decode()
    assert old in text
    file.write_bytes(text.replace(old, new, 1).encode())
    with pytest.raises(FileError, match=r"was cut or edited(.|\n)*--resume KEY=VALUE"):
        load_resolved(file, {"out": "elsewhere"})
