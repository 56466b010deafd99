"""Runs on sounds, from wave files to what is written: what is trained, saved, read by others, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

import petune
from petune.errors import DataError, UsageError
from petune.models.loading import load_tokenizer, read_config
from petune.models.source import resolve_model
from petune.preflight.inputs import check_inputs
from petune.recipe import load_recipe
from petune.run.build import prepare
from petune.run.evaluate import outputs_of
from petune.run.finished import Run
from petune.run.readers import reader_of
from petune.tasks import DataConfig, collate, encode, load_rows, render, take_rows
from petune.tasks.media import Reader
from petune.tasks.sounds import samples_of, wav
from tests.planned_runs import trained
from tests.sound_runs import RATE, TEXTS, tone, write_sounds, write_whisper

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    write_whisper(folder / "whisper")
    write_sounds(folder)
    return folder


def settings(place: Path, **more: Any) -> dict[str, Any]:
    own = {"model": str(place / "whisper"), "data": str(place / "rows.jsonl"), "method": "lora", "lr": 0.02}
    return own | {"max_steps": 12, "out": str(place / "run")} | more


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return petune.train(**settings(place, method={"name": "lora", "r": 8}))


def test_a_table_that_does_not_train_is_in_the_files_of_full_tuning_under_a_plan(place: Path) -> None:
    """No rank has a part of it to write: the first reads it from the base."""
    short = {"method": "full", "max_steps": 1, "head_only": False, "parallel": "dp", "out": str(place / "dp")}
    found, base = (
        WhisperForConditionalGeneration.from_pretrained(folder).model.encoder.embed_positions.weight
        for folder in (trained(settings(place, **short)) / "tuned", place / "whisper")
    )
    assert bool(found.any()) and torch.equal(found, base)


def reader(place: Path) -> Reader:
    source = resolve_model(str(place / "whisper"), place)
    found = reader_of(source, read_config(source))
    assert found is not None
    return found


def encoded(place: Path, file: Path) -> Any:
    source = resolve_model(str(place / "whisper"), place)
    config = DataConfig(str(file))
    rows = load_rows(config, "seq2seq", file.parent)
    assert rows.format == "audio-text"
    kind = {"model_kind": "encoder-decoder", "max_positions": 16}
    return encode(rows, "seq2seq", load_tokenizer(source), config, reader=reader(place), **kind)


def test_a_run_learns_sounds_and_is_asked_by_path(run: Run, place: Path) -> None:
    assert run.summary["task"] == "seq2seq" and run.summary["format"] == "audio-text"
    assert run.summary["after"]["token_accuracy"] == 1.0 > run.summary["before"]["token_accuracy"]
    asked = [str(place / "sounds" / f"{number}.wav") for number in range(4)]
    assert run.generate(asked, max_new_tokens=6) == [*TEXTS, *TEXTS]
    with pytest.raises(UsageError, match="the path of a sound: No such file"):
        run.generate("red sun")
    with pytest.raises(DataError, match="the sound cannot be read"):
        run.generate(str(place / "rows.jsonl"))
    (place / "slow.wav").write_bytes(wav(tone(0), RATE // 2))
    with pytest.raises(DataError, match="another rate"):
        run.generate(str(place / "slow.wav"))


def test_samples_in_memory_are_scaled_or_refused() -> None:
    loud = np.array([0, 16384, -32768], np.int16)
    assert samples_of(wav(loud, RATE)) == pytest.approx([0, 0.5, -1], abs=1e-3)
    for other in (np.zeros((2, 3), np.float32), np.array([0.0, 2.0]), np.array([3], np.uint8)):
        with pytest.raises(DataError, match="an array that is no sound"):
            wav(other, RATE)


def test_a_run_is_scored_again_and_merged_with_what_makes_its_inputs(run: Run, place: Path) -> None:
    assert petune.load_run(run.folder).eval()["tuned"] == pytest.approx(run.summary["after"])
    folder = run.merge(overwrite=True)
    extractor, words = AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    heard = extractor([tone(0), tone(1)], sampling_rate=RATE, return_tensors="pt")
    said = model.generate(heard["input_features"], max_new_tokens=6)
    assert [words.decode(one, skip_special_tokens=True).strip() for one in said] == [*TEXTS]


def test_peft_reads_the_adapter_and_its_own_is_read_back(run: Run, place: Path, tmp_path: Path) -> None:
    folder = run.export("peft", tmp_path / "peft")
    theirs = peft.PeftModel.from_pretrained(
        WhisperForConditionalGeneration.from_pretrained(place / "whisper"), folder
    ).eval()
    given = {"input_features": torch.randn(2, 8, 100), "decoder_input_ids": torch.tensor([[1, 9], [1, 10]])}
    with torch.no_grad():
        expected = run.model(**given).logits
        torch.testing.assert_close(theirs(**given).logits, expected, atol=1e-6, rtol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        again = WhisperForConditionalGeneration.from_pretrained(place / "whisper")
        back = petune.load(again, tmp_path / "theirs").eval()
        torch.testing.assert_close(back(**given).logits, expected, atol=1e-6, rtol=1e-5)


def test_a_batch_is_what_transformers_makes_of_sounds_and_its_loss_is_the_model_s(place: Path) -> None:
    batch = collate(encoded(place, place / "rows.jsonl").train[:4], "seq2seq", 0)
    assert set(batch) == {"input_features", "labels"}
    model = WhisperForConditionalGeneration.from_pretrained(place / "whisper").eval()
    with torch.no_grad():
        theirs = model(input_features=batch["input_features"], labels=batch["labels"])
        ours = outputs_of(model, batch)
    torch.testing.assert_close(ours.logits, theirs.logits)
    extractor = AutoFeatureExtractor.from_pretrained(place / "whisper")
    row = encoded(place, place / "rows.jsonl").train[0]
    own = samples_of(row.reading.media.read())
    wanted = extractor(own, sampling_rate=RATE, return_tensors="pt")["input_features"]
    assert torch.equal(batch["input_features"][:1], wanted)


def test_all_of_it_trains_but_its_sinusoids_as_in_transformers_own(place: Path) -> None:
    model = WhisperForConditionalGeneration.from_pretrained(place / "whisper")
    made = WhisperForConditionalGeneration(model.config)  # loading forgets it
    theirs = {name for name, value in made.named_parameters() if value.requires_grad}
    ours = set(petune.tuned_state(petune.wrap(model, method="full"))) - {"proj_out.weight"}  # tied
    assert ours == theirs and "model.encoder.embed_positions.weight" not in ours
    assert not model.model.encoder.embed_positions.weight.requires_grad


def test_the_token_that_a_decoder_begins_with_is_no_label(place: Path) -> None:
    source = resolve_model(str(place / "whisper"), place)
    words, row = load_tokenizer(source), encoded(place, place / "rows.jsonl").train[0]
    assert reader(place).begins == words.bos_token_id
    assert row.labels[0] != words.bos_token_id and row.labels[-1] == words.eos_token_id
    assert render(row, words).partition(" -> ")[0].endswith(".wav")


def test_a_sound_longer_than_the_window_counts_as_cut(place: Path, tmp_path: Path) -> None:
    file = write_sounds(tmp_path, 4)
    (tmp_path / "sounds" / "0.wav").write_bytes(wav(tone(0, 2.0), RATE))
    found = encoded(place, file)
    sides = [*found.train, *found.eval]
    assert sum(one.cut for one in sides) == 1
    assert sorted(one.length for one in sides)[-1] == 100  # tokens of two seconds
    assert all(one.size == 50 for one in sides)


def test_a_sound_of_another_rate_is_refused_with_what_to_do(place: Path, tmp_path: Path) -> None:
    file = write_sounds(tmp_path, 4)
    (tmp_path / "sounds" / "2.wav").write_bytes(wav(tone(0), 8000))
    with pytest.raises(DataError, match="ffmpeg") as caught:
        encoded(place, file)
    assert str(caught.value.problems[0].where).endswith("rows.jsonl:3")


def test_a_sound_of_another_rate_is_a_bad_row_that_is_skipped_and_counted(
    place: Path, tmp_path: Path
) -> None:
    file = write_sounds(tmp_path, 24)
    (tmp_path / "sounds" / "2.wav").write_bytes(wav(tone(0), 8000))
    recipe = settings(place, data={"path": str(file)})
    with pytest.raises(DataError, match="another rate than the model reads") as caught:
        prepare(load_recipe(recipe))
    assert str(caught.value.problems[0].where).endswith("rows.jsonl:3")
    recipe["data"] |= {"on_bad_line": "skip"}
    found = prepare(load_recipe(recipe))
    assert len(found.encoded.train) + len(found.encoded.eval) == 23
    assert any(note.startswith("skipped 1 bad rows (4.2%)") for note in found.rows.notes)


@pytest.mark.parametrize(("cell", "words"), [("gone.wav", "No such file"), ("rows.jsonl", "is no sound")])
def test_what_is_no_sound_is_a_bad_row_with_its_line(cell: str, words: str, tmp_path: Path) -> None:
    file = write_sounds(tmp_path, 4)
    lines = file.read_text().splitlines()
    lines[1] = json.dumps({"audio": cell, "text": "red"})
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=words):
        load_rows(DataConfig(str(file)), "seq2seq", tmp_path)


def test_sounds_given_as_arrays_are_those_of_files(place: Path, tmp_path: Path) -> None:
    file = write_sounds(tmp_path, 6)
    rows = [
        {"audio": {"array": tone(at), "sampling_rate": RATE, "path": None}, "text": TEXTS[at % 2]}
        for at in range(6)
    ]
    data = take_rows(rows, "data")
    found = load_rows(DataConfig(data.spec), "seq2seq", tmp_path, objects={data.spec: data})
    assert found.sha256 == load_rows(DataConfig(str(file)), "seq2seq", tmp_path).sha256


@pytest.mark.parametrize(("depth", "kind"), [(1, "u1"), (2, "<i2"), (4, "<i4")])
def test_samples_of_every_depth_and_of_two_channels_are_read(depth: int, kind: str) -> None:
    import io
    import wave

    held, most = io.BytesIO(), 1 << (8 * depth - 1)
    values = np.array([[0.5, -0.5], [0.25, 0.25]]) * most + (most if depth == 1 else 0)
    with wave.open(held, "wb") as file:
        file.setnchannels(2)
        file.setsampwidth(depth)
        file.setframerate(RATE)
        file.writeframes(values.astype(kind).tobytes())
    assert samples_of(held.getvalue()).tolist() == [0.0, 0.25]


def test_check_says_what_means_nothing_for_sounds(place: Path) -> None:
    assert check_inputs(load_recipe(settings(place))).task == "seq2seq"
    data = {"path": str(place / "rows.jsonl"), "prefix": "write: "}
    with pytest.raises(UsageError, match="it means nothing for a model that reads sounds"):
        check_inputs(load_recipe(settings(place, data=data)))


def test_check_finds_a_sound_of_another_rate(place: Path, tmp_path: Path) -> None:
    file = write_sounds(tmp_path, 24)
    (tmp_path / "sounds" / "2.wav").write_bytes(wav(tone(0), 8000))
    with pytest.raises(DataError, match="another rate than the model reads") as caught:
        check_inputs(load_recipe(settings(place, data=str(file))))
    assert str(caught.value.problems[0].where).endswith("rows.jsonl:3")
    skipping = {"path": str(file), "on_bad_line": "skip"}
    assert check_inputs(load_recipe(settings(place, data=skipping))).task == "seq2seq"


@pytest.mark.parametrize("name", ["encoder_layerdrop", "decoder_layerdrop", "apply_spec_augment"])
def test_what_is_left_out_at_random_is_refused(name: str, tmp_path: Path) -> None:
    folder = write_whisper(tmp_path / "whisper", **{name: True if name.startswith("apply") else 0.1})
    source = resolve_model(str(folder), tmp_path)
    with pytest.raises(UsageError, match=name):
        reader_of(source, read_config(source))
