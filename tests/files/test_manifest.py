"""Every file of what petune writes is under one manifest: a flipped bit is found wherever it lies, and a
missing manifest is an error."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import petune
from petune.errors import FileError
from petune.files import manifest as folder_manifest
from petune.files.manifest import MANIFEST, check_folder, seal_folder
from petune.methods import is_wrapped
from petune.models.loading import load_tokenizer, read_config
from petune.models.source import resolve_model
from petune.run.finished import load_run
from tests.small_runs import run, settings


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with a base `llama`, a finished lora run `run`, and its exports `run/peft` and `run/merged`."""
    place = tmp_path_factory.mktemp("shipped")
    finished = run(settings(place, max_steps=1, warmup=0))
    finished.export("peft")
    finished.merge()
    return place


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def as_run(place: Path) -> None:
    _ = load_run(place / "run").speaker


def as_adapter(place: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(place / "llama"))
    try:
        petune.load(model, place / "run" / "peft")
    finally:
        assert not is_wrapped(model)


def as_base(place: Path) -> None:
    source = resolve_model(str(place / "run" / "merged"), place)
    read_config(source)
    load_tokenizer(source)


READERS: dict[str, Callable[[Path], Any]] = {"tuned": as_run, "peft": as_adapter, "merged": as_base}


@pytest.mark.parametrize("count", [10, pytest.param(400, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_in_any_file_is_found(name: str, count: int, shipped: Path) -> None:
    folder, read, drawn = shipped / "run" / name, READERS[name], random.Random(count)
    files = files_of(folder)
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", MANIFEST} <= {
        path.name for path in files
    }
    for path in files:
        whole = path.read_bytes()
        for _ in range(count):
            changed, at = bytearray(whole), drawn.randrange(len(whole))
            changed[at] ^= 1 << drawn.randrange(8)
            path.write_bytes(changed)
            with pytest.raises(FileError, match=folder.name):
                read(shipped)
        path.write_bytes(whole)
    if name != "peft":
        read(shipped)


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_is_missing_cut_or_empty_is_named(name: str, shipped: Path) -> None:
    for path in files_of(shipped / "run" / name):
        if path.name == MANIFEST:
            continue
        whole = path.read_bytes()
        for content in (None, whole[:-1], b""):
            path.unlink() if content is None else path.write_bytes(content)
            with pytest.raises(FileError, match=path.name):
                READERS[name](shipped)
        path.write_bytes(whole)


def test_a_folder_that_says_it_is_ours_needs_its_manifest(shipped: Path, tmp_path: Path) -> None:
    shutil.copytree(shipped / "run" / "tuned", tmp_path / "tuned")
    (tmp_path / "tuned" / MANIFEST).unlink()
    model = transformers.LlamaForCausalLM.from_pretrained(shipped / "llama")
    with pytest.raises(FileError, match=r"petune\.manifest\.json  is missing"):
        petune.load(model, tmp_path / "tuned")
    with pytest.raises(FileError, match=r"petune\.manifest\.json  is missing"):
        check_folder(tmp_path / "tuned")
    shutil.copytree(shipped / "run" / "peft", tmp_path / "peft")
    (tmp_path / "peft" / MANIFEST).unlink()  # then it is peft's, and says nothing of us
    assert is_wrapped(petune.load(model, tmp_path / "peft"))


def test_files_of_the_users_own_are_kept_and_those_a_loader_could_read_are_named(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(folder_manifest, "warn", said.append)
    folder = tmp_path / "tuned"
    shutil.copytree(shipped / "run" / "tuned", folder)
    for name in ("README.md", "LICENSE", ".gitattributes", ".cache/of/a.metadata"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    check_folder(folder)
    assert said == []
    (folder / "added_tokens.json").write_text("{}")
    check_folder(folder)
    assert len(said) == 1 and "'added_tokens.json'" in said[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda found: found | {"version": 2}, r"newer petune[\s\S]*expected 1, found 2"),
        (lambda found: found | {"version": None}, "another version"),
        (lambda found: found | {"files": {}}, "files  does not fit"),
        (
            lambda found: found | {"files": {"../x": {"size": 1, "sha256": "0" * 64}}},
            "leads out of its folder",
        ),
        (
            lambda found: found | {"files": {"/etc/passwd": {"size": 1, "sha256": "0" * 64}}},
            "leads out of its folder",
        ),
        (lambda found: found | {"files": {".": {"size": 1, "sha256": "0" * 64}}}, "leads out of its folder"),
        (lambda found: found | {"files": {"a\nb": {"size": 1, "sha256": "0" * 64}}}, "control character"),
        (lambda found: found | {"files": {"a\0b": {"size": 1, "sha256": "0" * 64}}}, "control character"),
        (lambda found: found | {"files": {"\ud800": {"size": 1, "sha256": "0" * 64}}}, "control character"),
        (lambda found: found | {"files": {"a" * 300: {"size": 1, "sha256": "0" * 64}}}, "too long"),
        (lambda found: found | {"files": {"․․/x": {"size": 1, "sha256": "0" * 64}}}, "is missing"),  # noqa: RUF001 - dots of Unicode
    ],
)
def test_a_manifest_that_was_edited_is_refused(
    change: Callable[[Any], Any], says: str, shipped: Path, tmp_path: Path
) -> None:
    shutil.copytree(shipped / "run" / "peft", tmp_path / "peft")
    file = tmp_path / "peft" / MANIFEST
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(FileError, match=says):
        check_folder(tmp_path / "peft")


def test_digests_that_differ_late_are_shown_as_far_as_they_do(shipped: Path, tmp_path: Path) -> None:
    shutil.copytree(shipped / "run" / "peft", tmp_path / "peft")
    file = tmp_path / "peft" / MANIFEST
    noted = json.loads(file.read_text())["files"]["adapter_config.json"]["sha256"]
    other = noted[:40] + ("1" if noted[40] == "0" else "0") + noted[41:]
    file.write_text(file.read_text().replace(noted, other))
    with pytest.raises(FileError, match=rf"sha256 {other[:41]}…, found {noted[:41]}…"):
        check_folder(tmp_path / "peft")


def test_a_sealed_folder_verifies_with_folders_in_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.json").write_text("{}")
    seal_folder(tmp_path)
    check_folder(tmp_path)
    (tmp_path / "a" / "b" / "c.json").write_text("[]")
    with pytest.raises(FileError, match=r"c\.json"):
        check_folder(tmp_path)
