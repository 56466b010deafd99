"""Whole runs on a checkpoint of several modalities: trained under a plan as in one process, gone on with,
asked, merged and written by the names of the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file

import petune
from petune.errors import Stopped
from petune.estimate.forecast import sketch
from petune.preflight.inputs import check_inputs
from petune.recipe import load_recipe
from petune.run.finished import load_run
from petune.run.readme import class_of
from tests.planned_runs import trained
from tests.small_runs import brief, run, terminate_at, tokenizer
from tests.wholes import logits, text, whole, write_whole

pytestmark = pytest.mark.usefixtures("no_picture", "no_network")

LORA = {"name": "lora", "r": 2}
FULL = {"name": "full"}


def recipe(place: Path, kind: str, method: Any = "lora", **changes: Any) -> dict[str, Any]:
    """Two steps, in a folder named after the whole."""
    write_whole(place / kind, kind)
    return brief(place, "llama", method, **{"model": str(place / kind), **changes})


@pytest.mark.parametrize(
    ("kind", "method", "plan"),
    [
        ("gemma3", LORA, {"pp": {"size": 2}}),
        pytest.param("mistral3", FULL, {"tp": {"size": 2}}, marks=pytest.mark.long),
        pytest.param("mistral3", LORA, {"tp": {"size": 2}}, marks=pytest.mark.long),
        pytest.param("gemma3", FULL, {"dp": {"size": 2, "shard": True}}, marks=pytest.mark.long),
        pytest.param("gemma4", LORA, {"pp": {"size": 2}}, marks=pytest.mark.long),
    ],
)
def test_a_plan_reads_its_ranges_of_the_whole_and_trains_as_one_process(
    kind: str, method: Any, plan: Any, tmp_path: Path
) -> None:
    one, other = (
        recipe(tmp_path, kind, method, out=out, parallel=parallel, lr=1e-3)
        for out, parallel in (("one", "none"), ("other", plan))
    )
    expected, found = run(one).folder, trained(other)
    (file,) = (expected / "tuned").glob("*.safetensors")
    tensors, others = load_file(file), load_file(found / "tuned" / file.name)
    assert tensors.keys() == others.keys()
    apart = {name: float((value - others[name]).abs().max()) for name, value in tensors.items()}
    assert max(apart.values()) < 1e-5, apart
    assert torch.allclose(logits(load_run(found).model), logits(load_run(expected).model), atol=1e-4)


def test_a_run_tunes_the_text_model_of_a_whole_from_check_to_merge(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = recipe(tmp_path, "gemma3", LORA, lr=1e-2, max_steps=4, save_every=1, keep=4)
    assert check_inputs(load_recipe(made)).task == "causal"
    assert sketch(load_recipe(made)).note.endswith("local folder, its text model (of a gemma3)")
    with pytest.raises(Stopped), caplog.at_level("INFO"):
        run(made, terminate_at(2))
    assert "the text model of a gemma3: multi_modal_projector, vision_tower (7,088 parameters)" in caplog.text
    finished = run(made, resume=True)
    straight = run({**made, "out": str(tmp_path / "straight")})
    assert torch.equal(logits(straight.model), logits(finished.model))
    expected = logits(load_run(finished.folder).model)
    assert not torch.equal(expected, logits(text(tmp_path / "gemma3")))

    by_peft = PeftModel.from_pretrained(whole(tmp_path / "gemma3", "gemma3"), finished.folder / "tuned")
    assert torch.allclose(logits(by_peft), expected, atol=1e-5)
    page = (finished.folder / "README.md").read_text()
    assert "base = transformers.AutoModelForImageTextToText.from_pretrained(" in page
    assert f'model = petune.load(petune.text_model(base), "{finished.folder}/tuned")' in page
    base = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "gemma3")
    assert torch.equal(logits(petune.load(petune.text_model(base), finished.folder / "tuned")), expected)

    assert finished.generate("red sun", max_new_tokens=3) is not None
    merged = finished.merge()
    assert class_of(merged, finished.summary) == "transformers.AutoModelForImageTextToText"
    assert torch.allclose(logits(whole(merged, "gemma3")), expected, atol=1e-5)
    assert (merged / "preprocessor_config.json").is_file() and (merged / "tokenizer.json").is_file()
    written = json.loads((finished.export("vllm") / "adapter_config.json").read_text())
    assert all("language_model" in name or "." not in name for name in written["target_modules"])


@pytest.mark.long
def test_a_full_run_is_merged_into_the_whole(tmp_path: Path) -> None:
    finished = run(recipe(tmp_path, "mistral3", FULL))
    merged = finished.export("hf")
    assert torch.equal(logits(whole(merged, "mistral3")), logits(finished.model))


@pytest.mark.long
def test_a_text_model_in_memory_is_trained_as_one_of_files(tmp_path: Path) -> None:
    made = recipe(tmp_path, "mistral3", LORA)
    outer = whole(tmp_path / "mistral3", "mistral3")
    given: Any = petune.text_model(outer)
    own = {key: value for key, value in made.items() if key != "model"}
    finished = petune.train(model=given, tokenizer=tokenizer(), **own, overwrite=True)
    expected = logits(run({**made, "out": str(tmp_path / "files")}).model)
    assert torch.allclose(logits(finished.model), expected, atol=1e-6)
    assert torch.equal(logits(outer), logits(finished.model))
    by_peft = PeftModel.from_pretrained(whole(tmp_path / "mistral3", "mistral3"), finished.folder / "tuned")
    assert torch.allclose(logits(by_peft), expected, atol=1e-6)
