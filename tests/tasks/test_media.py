"""Pictures of rows: how they are found, told when they are none, known, and made into tensors."""

from __future__ import annotations

import builtins
import io
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

from petune.errors import DataError, MachineError, UsageError
from petune.tasks import DataConfig, collate, encode, load_rows, render, take_rows
from petune.tasks.media import Media, Reader, Reading, picture_of, png
from petune.tasks.rows import Pictured, content
from tests.picture_runs import CLASSES, SIZE, picture, write_pictures

PROCESSOR = ViTImageProcessorPil(size=SIZE)
READER = Reader("image", PROCESSOR, "pixel_values", (3, 12, 12), 10)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_pictures(tmp_path)


def loaded(place: Path, **settings: Any) -> list[Pictured]:
    found = load_rows(DataConfig(str(place), **settings), "classify", place.parent)
    assert found.format == "image-label"
    return [row for row in (*found.train, *found.eval) if isinstance(row, Pictured)]


def pixels(row: Pictured) -> bytes:
    return picture_of(row.picture, row.where).tobytes()


def test_a_path_starts_at_the_folder_of_its_file(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    found = loaded(rows)
    assert len(found) == 24
    assert {row.picture.file for row in found} == set((rows.parent / "pictures").iterdir())


def test_the_same_pictures_come_from_files_tables_and_python(rows: Path, tmp_path: Path) -> None:
    pictures = [{"image": picture(number), "label": CLASSES[number % 2]} for number in range(6)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])})
    table = datasets.Dataset.from_list(
        [{"image": one["image"], "label": at % 2} for at, one in enumerate(pictures)], features
    )
    table.to_parquet(tmp_path / "table.parquet")
    table.save_to_disk(tmp_path / "saved")
    arrays = [{"image": np.asarray(one["image"]), "label": one["label"]} for one in pictures]
    files = [{"image": {"path": None, "bytes": png(one["image"])}, "label": one["label"]} for one in pictures]
    wanted = {pixels(row) for row in loaded(rows) if int(row.picture.file.stem) < 6}  # type: ignore[union-attr]
    for given in (table, pictures, arrays, files, tmp_path / "table.parquet", tmp_path / "saved"):
        objects, path = {}, str(given)
        if not isinstance(given, Path):
            data = take_rows(given, "data")
            objects, path = {data.spec: data}, data.spec
        found = load_rows(DataConfig(path), "classify", tmp_path, objects=objects)
        own = [row for row in (*found.train, *found.eval) if isinstance(row, Pictured)]
        assert {pixels(row) for row in own} == wanted
        assert found.labels == ("blue", "red") and {row.label for row in own} == set(CLASSES)


def test_rows_given_as_pictures_are_known_by_their_pixels() -> None:
    specs = {take_rows([{"image": picture(at), "label": "red"}], "data").spec for at in (0, 0, 2)}
    assert len(specs) == 2


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("gone.png", "No such file"),
        ("rows.jsonl", "is no picture"),
        ("", "is null or empty"),
        (None, "is null or empty"),
        (7, "the path of a picture"),
    ],
)
def test_what_is_no_picture_is_a_bad_row_with_its_line(rows: Path, cell: Any, words: str) -> None:
    lines = rows.read_text().splitlines()
    lines[4] = json.dumps({"image": cell, "label": "red"})
    rows.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=words) as caught:
        loaded(rows)
    assert caught.value.problems[0].where == f"{rows}:5"
    assert len(loaded(rows, on_bad_line="skip")) == 23


def test_the_same_picture_is_on_one_side_and_its_name_is_no_content(rows: Path) -> None:
    file = rows.parent / "pictures" / "copy.png"
    file.write_bytes((rows.parent / "pictures" / "0.png").read_bytes())
    first, copy = (
        Pictured("here", Media.at(rows.parent / "pictures" / name), "red") for name in ("0.png", "copy.png")
    )
    assert content(first) == content(copy)
    with rows.open("a") as lines:
        lines.write(json.dumps({"image": "pictures/copy.png", "label": "red"}) + "\n")
    found = load_rows(DataConfig(str(rows), split=0.4), "classify", rows.parent)
    sides = [
        {row.picture.sha256 for row in side if isinstance(row, Pictured)}
        for side in (found.train, found.eval)
    ]
    assert not sides[0] & sides[1]


def test_a_batch_is_what_the_processor_makes_of_the_pictures(rows: Path) -> None:
    found = load_rows(DataConfig(str(rows)), "classify", rows.parent)
    encoded = encode(found, "classify", None, DataConfig(str(rows)), model_kind="encoder", reader=READER)
    batch = collate(encoded.train[:5], "classify", 0)
    own = [row for row in found.train[:5] if isinstance(row, Pictured)]
    shown = [Image.open(row.picture.file) for row in own if row.picture.file]
    assert torch.equal(batch["pixel_values"], PROCESSOR(shown, return_tensors="pt")["pixel_values"])
    assert [("blue", "red")[label] for label in batch["labels"].tolist()] == [row.label for row in own]
    assert set(batch) == {"pixel_values", "labels"}
    assert (encoded.report.rows, encoded.report.tokens) == (len(encoded.train), 10 * len(encoded.train))
    assert render(encoded.train[0], None, found.labels).endswith(f".png -> [[{own[0].label}]]")


def test_a_picture_that_is_damaged_later_names_its_row(rows: Path) -> None:
    file = rows.parent / "pictures" / "0.png"
    media = Media.at(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DataError, match="cannot be read") as caught:
        Reading(media, READER).tensor("rows.jsonl:1")
    assert caught.value.problems[0].where == "rows.jsonl:1"


def test_a_photograph_is_turned_as_its_camera_was_held() -> None:
    held, file = Image.new("RGB", (4, 2)), io.BytesIO()
    tags = held.getexif()
    tags[274] = 6  # orientation: a quarter to the right
    held.save(file, format="JPEG", exif=tags)
    assert picture_of(Media.of(file.getvalue()), "row").size == (2, 4)


def test_a_picture_in_memory_of_any_colours_becomes_a_file() -> None:
    found = png(Image.new("CMYK", (3, 2)))
    assert picture_of(Media.of(found), "row").size == (3, 2)


def test_grey_and_transparent_pictures_have_three_colours() -> None:
    for mode in ("L", "RGBA", "P"):
        file = io.BytesIO()
        picture(0).convert(mode).save(file, format="PNG")
        assert Reading(Media.of(file.getvalue()), READER).tensor("here").shape == (3, 12, 12)


def test_settings_of_texts_are_refused_by_name(rows: Path) -> None:
    found = load_rows(DataConfig(str(rows)), "classify", rows.parent)
    settings: dict[str, Any] = {"max_length": 64, "truncation": "left", "prefix": "see: "}
    with pytest.raises(UsageError) as caught:
        encode(
            found, "classify", None, DataConfig(str(rows), **settings), model_kind="encoder", reader=READER
        )
    assert [problem.where for problem in caught.value.problems] == [f"data.{name}" for name in settings]


def test_texts_are_refused_for_a_model_of_pictures_and_the_other_way(rows: Path, tmp_path: Path) -> None:
    place = tmp_path / "texts.jsonl"
    place.write_text("".join(f'{{"text": "red {at}", "label": "{at % 2}"}}\n' for at in range(8)))
    texts = load_rows(DataConfig(str(place)), "classify", tmp_path)
    with pytest.raises(UsageError, match="reads pictures, and the rows are of format text-label"):
        encode(texts, "classify", None, DataConfig(str(place)), model_kind="encoder", reader=READER)
    pictures = load_rows(DataConfig(str(rows)), "classify", rows.parent)
    with pytest.raises(UsageError, match="reads texts, and the rows are of format image-label"):
        encode(pictures, "classify", None, DataConfig(str(rows)), model_kind="encoder")


def test_a_picture_beside_a_labelled_text_leaves_the_text_telling(rows: Path) -> None:
    lines = [
        json.loads(line) | {"text": f"red {at}"} for at, line in enumerate(rows.read_text().splitlines())
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert load_rows(DataConfig(str(rows)), "classify", rows.parent).format == "text-label"
    assert len(loaded(rows, format="image-label")) == 24


def test_without_pillow_the_error_says_what_to_install(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError(name)
        return own(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "PIL")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MachineError, match="pip install pillow"):
        loaded(rows)
