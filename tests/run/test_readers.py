"""Runs on pictures, from files to an answer: what is trained, saved, read by others, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessorPil

import petune
from petune.errors import FileError, UsageError
from petune.models.loading import read_config
from petune.models.source import resolve_model
from petune.preflight.inputs import check_inputs
from petune.recipe import load_recipe
from petune.run.finished import Run
from petune.run.readers import reader_of
from tests.picture_runs import CLASSES, write_pictures, write_vit

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    write_vit(folder / "vit")
    write_pictures(folder)
    return folder


def settings(place: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": str(place / "vit"),
        "data": str(place / "rows.jsonl"),
        "method": "lora",
        "lr": 0.01,
        "max_steps": 8,
        "out": str(place / "run"),
        **more,
    }


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return petune.train(**settings(place))


def red_or_blue(model: Any, processor: Any, place: Path) -> list[str]:
    """What transformers' own classes say of the first pictures."""
    from PIL import Image

    shown = [Image.open(place / "pictures" / f"{number}.png") for number in range(4)]
    with torch.no_grad():
        best = model(**processor(shown, return_tensors="pt")).logits.argmax(-1)
    return [model.config.id2label[int(one)] for one in best]


def test_a_run_learns_pictures_and_is_asked_by_path(run: Run, place: Path) -> None:
    assert run.summary["task"] == "classify" and run.summary["format"] == "image-label"
    assert run.summary["after"]["accuracy"] == 1.0
    asked = [str(place / "pictures" / f"{number}.png") for number in range(4)]
    assert run.generate(asked) == [*CLASSES, *CLASSES]
    with pytest.raises(UsageError, match="the path of a picture: No such file"):
        run.generate("red sun")


def test_a_run_is_scored_again_from_its_files(run: Run) -> None:
    scores = petune.load_run(run.folder).eval()
    assert scores["tuned"] == pytest.approx(run.summary["after"])


@pytest.mark.parametrize("where", ["merged", "tuned"])
def test_the_processor_lies_beside_what_is_written(run: Run, place: Path, where: str) -> None:
    folder = run.merge(overwrite=True) if where == "merged" else run.folder / "tuned"
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert processor.size == {"height": 12, "width": 12}
    if where == "merged":
        model = AutoModelForImageClassification.from_pretrained(folder)
        assert red_or_blue(model, processor, place) == [*CLASSES, *CLASSES]


def test_peft_reads_the_adapter_and_its_own_is_read_back(run: Run, place: Path, tmp_path: Path) -> None:
    folder = run.export("peft", tmp_path / "peft")
    base = AutoModelForImageClassification.from_pretrained(place / "vit", num_labels=2)
    theirs = peft.PeftModel.from_pretrained(base, folder).eval()
    given = {"pixel_values": torch.randn(2, 3, 12, 12)}
    with torch.no_grad():
        expected = run.model(**given).logits
        torch.testing.assert_close(theirs(**given).logits, expected, atol=1e-6, rtol=1e-5)
        theirs.save_pretrained(tmp_path / "theirs")
        again = AutoModelForImageClassification.from_pretrained(place / "vit", num_labels=2)
        back = petune.load(again, tmp_path / "theirs").eval()
        torch.testing.assert_close(back(**given).logits, expected, atol=1e-6, rtol=1e-5)


def test_a_model_in_memory_brings_its_processor(place: Path, tmp_path: Path) -> None:
    model = AutoModelForImageClassification.from_pretrained(place / "vit", num_labels=2)
    processor = AutoImageProcessor.from_pretrained(place / "vit", backend="pil")
    own = settings(place, model=model, out=str(tmp_path / "run"), max_steps=2)
    with pytest.raises(UsageError, match="needs its image processor"):
        petune.train(**own)
    found = petune.train(**own, tokenizer=processor)
    assert found.eval()["tuned"] == pytest.approx(found.summary["after"])


def test_check_and_data_say_what_is_true_of_pictures(place: Path) -> None:
    assert check_inputs(load_recipe(settings(place))).task == "classify"
    with pytest.raises(UsageError, match="it means nothing for a model that reads pictures"):
        check_inputs(load_recipe(settings(place, data={"path": str(place / "rows.jsonl"), "max_length": 32})))
    with pytest.raises(UsageError, match="task mlm is not for a model that reads pictures"):
        check_inputs(load_recipe(settings(place, task="mlm")))


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        ({"size": {"height": 16, "width": 16}}, "another shape than the model takes"),
        ({"do_resize": False}, "tensors of several shapes"),
    ],
)
def test_a_processor_that_does_not_fit_the_model_is_refused(
    processor: dict[str, Any], words: str, place: Path, tmp_path: Path
) -> None:
    write_vit(tmp_path / "vit", **processor)
    source = resolve_model(str(tmp_path / "vit"), tmp_path)
    with pytest.raises(FileError, match=words):
        reader_of(source, read_config(source))


def test_a_model_without_a_processor_says_which_file_is_missing(place: Path, tmp_path: Path) -> None:
    write_vit(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    source = resolve_model(str(tmp_path / "vit"), tmp_path)
    with pytest.raises(FileError, match=r"preprocessor_config\.json"):
        reader_of(source, read_config(source))


def test_a_processor_is_read_in_the_form_that_needs_no_torchvision(place: Path) -> None:
    source = resolve_model(str(place / "vit"), place)
    found = reader_of(source, read_config(source))
    assert found is not None and type(found.processor) is ViTImageProcessorPil
    assert (found.shape, found.tokens) == ((3, 12, 12), 10)
