"""What petune.saving.export writes comes back bit by bit, is refused when it does not fit, and is read by
transformers."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from petune.errors import FileError, TrainingFault, UsageError
from petune.files import atomic
from petune.files.manifest import seal_folder
from petune.methods import is_wrapped, mark_only_trainable, merge, merged_weights, tuned_state, wrap
from petune.saving import export
from petune.saving.load import load
from tests.tiny_models import IDS, METHODS, MODELS, bart, bert, edit, llama, logits, stir, t5, tuned


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bit_exact(name: str, method: str, tmp_path: Path) -> None:
    model = tuned(MODELS[name], method)
    export.save(model, tmp_path / "a")
    base = MODELS[name]()
    before = torch.get_rng_state()
    again = load(base, tmp_path / "a").eval()
    assert torch.equal(before, torch.get_rng_state()), "loading must not draw"
    one, two = tuned_state(model), tuned_state(again)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) and one[key].dtype == two[key].dtype for key in one)
    assert torch.equal(logits(model), logits(again))
    trains = {key for key, value in again.named_parameters() if value.requires_grad}
    assert trains == {key for key, value in model.named_parameters() if value.requires_grad}
    assert again.petune_tuning == model.petune_tuning
    export.save(again, tmp_path / "b")
    assert all(
        (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes()
        for f in os.listdir(tmp_path / "a")
    )


def test_a_model_of_no_family_round_trips(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    for method, settings in (("lora", {"also_train": ["2"], "r": 2}), ("full", {})):
        model = stir(wrap(make(), method=method, **settings))
        with torch.no_grad():
            model[1].running_mean += method == "full"
        export.save(model, tmp_path / method)
        x = torch.randn(5, 8)
        assert torch.equal(model(x), load(make(), tmp_path / method).eval()(x))


def test_low_precision_bases_keep_wide_factors(tmp_path: Path) -> None:
    model = tuned(lambda: llama().bfloat16())
    export.save(model, tmp_path / "a")
    again = load(llama().bfloat16(), tmp_path / "a")
    assert all(
        torch.equal(value, tuned_state(again)[key]) and value.dtype == torch.float32
        for key, value in tuned_state(model).items()
    )


def test_a_base_in_another_dtype_is_the_same_base(tmp_path: Path) -> None:
    export.save(tuned(llama), tmp_path / "a")
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        load(llama().to(dtype), tmp_path / "a")


@pytest.mark.parametrize("method", METHODS)
def test_another_base_is_refused(method: str, tmp_path: Path) -> None:
    export.save(tuned(bert, method), tmp_path / "a")
    with pytest.raises(FileError, match="another kind of model"):
        load(llama(), tmp_path / "a")
    if method != "full":  # which replaces every value
        with pytest.raises(
            FileError,
            match=(
                r"another base model[\s\S]*bert\.embeddings\.word_embeddings\.weight[\s\S]*holds other values"
            ),
        ):
            load(bert(seed=1), tmp_path / "a")
    other = bert()
    with torch.no_grad():
        other.bert.encoder.layer[0].output.dense = nn.Linear(64, 40)
    with pytest.raises(FileError, match=r"layer\.0\.output\.dense\.weight[\s\S]*another shape"):
        load(other, tmp_path / "a")


def test_at_most_ten_differences_are_named(tmp_path: Path) -> None:
    export.save(tuned(bert), tmp_path / "a")
    with pytest.raises(FileError) as caught:
        load(bert(seed=1), tmp_path / "a")
    assert len(caught.value.problems) == 11
    assert "tensors differ" in str(caught.value)


def test_a_change_of_one_row_needs_the_hash(tmp_path: Path) -> None:
    model = tuned(llama)
    export.save(model, tmp_path / "a", base_sha256=export.full_hash(model))
    export.save(model, tmp_path / "unhashed")
    load(llama(), tmp_path / "a", verify_base=True)
    other = llama()
    with torch.no_grad():
        other.model.embed_tokens.weight[3, 3] += 1
    load(copy.deepcopy(other), tmp_path / "a")
    with pytest.raises(FileError, match="SHA-256 differs"):
        load(other, tmp_path / "a", verify_base=True)
    with pytest.raises(FileError, match="stores no hash"):
        load(llama(), tmp_path / "unhashed", verify_base=True)
    export.save(tuned(bert), tmp_path / "before", base_sha256=export.full_hash(bert()))  # with its head
    load(bert(), tmp_path / "before", verify_base=True)


def test_another_number_of_labels_says_so(tmp_path: Path) -> None:
    export.save(tuned(bert), tmp_path / "a")
    with pytest.raises(FileError, match=r"classifier\.weight[\s\S]*num_labels"):
        load(bert(labels=5), tmp_path / "a")


def test_label_names_come_back(tmp_path: Path) -> None:
    model = tuned(bert)
    model.config.id2label = {0: "class", 1: "function", 2: "module"}
    export.save(model, tmp_path / "a")
    config = load(bert(), tmp_path / "a").config
    assert config.id2label == {0: "class", 1: "function", 2: "module"}
    assert config.label2id["module"] == 2


FILES = {
    "lora": "adapter_model.safetensors",
    "adapter": "tuned.safetensors",
    "side": "tuned.safetensors",
    "full": "model.safetensors",
}


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_do_not_fit_are_refused_and_the_base_is_untouched(method: str, tmp_path: Path) -> None:
    file = FILES[method]
    export.save(tuned(bert, method), tmp_path / "a")
    original = (tmp_path / "a" / file).read_bytes()
    key = sorted(load_file(tmp_path / "a" / file))[3]

    def renamed(tensors: dict[str, Tensor]) -> None:
        tensors["stranger.weight"] = tensors.pop(key)

    def bad(tensors: dict[str, Tensor]) -> None:
        tensors[key].view(-1)[0] = float("nan")

    cases = [
        (lambda tensors: tensors.pop(key), "is missing"),
        (lambda tensors: tensors.update({"stranger": torch.ones(2)}), "stranger[^\n]*unexpected"),
        (renamed, "1 missing, 1 unexpected"),
        (lambda tensors: tensors.update({key: torch.ones(3)}), "another shape"),
        (bad, "NaN or an infinity"),
    ]
    for change, message in cases:
        (tmp_path / "a" / file).write_bytes(original)
        edit(tmp_path / "a", change, file)
        seal_folder(tmp_path / "a")  # the old hashes would find every one of these by themselves
        base = bert()
        with pytest.raises(FileError, match=message):
            load(base, tmp_path / "a")
        assert not hasattr(base, "petune_tuning")
        assert torch.equal(logits(base), logits(bert()))
    (tmp_path / "a" / file).write_bytes(original[:-100])
    seal_folder(tmp_path / "a")
    with pytest.raises(FileError, match="cut short"):
        load(bert(), tmp_path / "a")


def test_folders_that_are_no_tuning_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a folder"):
        load(bert(), tmp_path / "nowhere")
    with pytest.raises(FileError, match="holds no tuning"):
        load(bert(), tmp_path)
    bert().save_pretrained(tmp_path / "whole")
    with pytest.raises(FileError, match="whole model"):
        load(bert(), tmp_path / "whole")
    export.save(tuned(bert), tmp_path / "run" / "mine")
    with pytest.raises(FileError, match=r"give .*run/mine"):
        load(bert(), tmp_path / "run")
    (tmp_path / "run" / "mine").rename(tmp_path / "run" / "tuned")
    # as a run and a checkpoint of the Trainer keep it
    assert is_wrapped(load(bert(), tmp_path / "run"))


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not wrapped"):
        export.save(bert(), tmp_path / "a")
    for method, error in (("lora", TrainingFault), ("full", TrainingFault), ("side", TrainingFault)):
        model = tuned(bert, method)
        with torch.no_grad():
            next(iter(tuned_state(model).values())).view(-1)[0] = float("inf")
        with pytest.raises(error, match="NaN or an infinity"):
            export.save(model, tmp_path / "a")
    model = tuned(bert)
    with merged_weights(model), pytest.raises(UsageError, match="merged_weights"):
        export.save(model, tmp_path / "a")
    assert os.listdir(tmp_path) == []


def test_a_wrapped_model_takes_no_second_tuning(tmp_path: Path) -> None:
    model = tuned(bert)
    export.save(model, tmp_path / "a")
    with pytest.raises(UsageError, match="wrapped already"):
        load(model, tmp_path / "a")


def test_an_occupied_folder_is_kept_unless_asked(tmp_path: Path) -> None:
    model = tuned(bert)
    export.save(model, tmp_path / "a")
    with pytest.raises(UsageError, match="occupied"):
        export.save(model, tmp_path / "a")
    (tmp_path / "a" / "stale").touch()
    export.save(model, tmp_path / "a", overwrite=True)
    assert sorted(os.listdir(tmp_path / "a")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "petune.json",
        "petune.manifest.json",
    ]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(UsageError, match="not overwritten"):
        export.save(model, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    model.config._name_or_path = str(tmp_path / "a")
    with pytest.raises(UsageError, match="the base of this tuning was loaded from here"):
        export.save(model, tmp_path / "a", overwrite=True)


@pytest.mark.parametrize(
    "stage", ["export.write_tensors", "export.write_json", "folders.flush", "folders.sync_folder"]
)
def test_a_save_that_fails_leaves_the_old_folder_whole(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export.save(tuned(bert), tmp_path / "a")
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    replaced = stage == "folders.sync_folder"  # the new folder has its name by then, or none has changed
    room, name = stage.split(".")
    holder = {"export": export, "folders": atomic}[room]
    real, calls = getattr(holder, name), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if replaced and len(calls) == 1:
            return real(*args, **kwargs)
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(holder, name, fail)
    with pytest.raises(Exception, match="No space left"):
        export.save(tuned(llama), tmp_path / "a", overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["a"] or replaced
    if not replaced:
        assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    else:
        load(llama(), tmp_path / "a")


def test_files_are_as_private_as_the_umask_says(tmp_path: Path) -> None:
    for method in METHODS:
        export.save(tuned(bert, method), tmp_path / method)
        modes = {file.stat().st_mode & 0o777 for file in (tmp_path / method).iterdir()}
        assert modes == {tmp_path.joinpath(method).stat().st_mode & 0o666}


def test_an_adapter_that_changes_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.saving.load.warn", said.append)
    export.save(wrap(llama(), r=2), tmp_path / "a")
    load(llama(), tmp_path / "a")
    export.save(tuned(llama), tmp_path / "b")
    load(llama(), tmp_path / "b")
    assert len(said) == 1
    assert "every update is zero" in said[0]


def test_a_compiled_model_saves_plain_names(tmp_path: Path) -> None:
    model = tuned(llama)
    export.save(model, tmp_path / "plain")
    export.save(torch.compile(model, backend="eager"), tmp_path / "compiled")
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    export.save(model, tmp_path / "partly")
    names = {
        tuple(sorted(load_file(tmp_path / name / FILES["lora"]))) for name in ("plain", "compiled", "partly")
    }
    assert len(names) == 1
    assert torch.equal(logits(load(llama(), tmp_path / "partly")), logits(load(llama(), tmp_path / "plain")))


def test_a_compiled_model_is_marked_and_merged_as_the_one_inside() -> None:
    model = wrap(llama(), r=2, also_train=("norm",), kernels="reference")
    compiled, names = torch.compile(model, backend="eager"), tuned_state(model).keys()
    assert tuned_state(compiled).keys() == names
    mark_only_trainable(compiled)
    assert model.model.norm.weight.requires_grad
    plain = merge(compiled)
    assert type(plain) is type(llama()) and plain is model
    assert torch.isfinite(logits(plain)).all()


def test_what_was_let_train_by_hand_is_not_saved_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.saving.export.warn", said.append)
    model = tuned(llama)
    export.save(model, tmp_path / "a")
    assert not said
    model.model.norm.weight.requires_grad_()
    export.save(model, tmp_path / "b")
    export.write_peft(model, tmp_path / "c")
    assert len(said) == 2 and "1 tensors that require gradients" in said[0] and "model.norm.weight" in said[1]


# ---------------------------------------------------------------- merged folders


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_merged_folder_is_plain_and_equal(name: str, method: str, tmp_path: Path) -> None:
    model = tuned(MODELS[name], method)
    before, config = logits(model), copy.deepcopy(model.config.to_dict())
    extra = {"decoder_input_ids": IDS} if name in ("bart", "t5") else {}
    report = export.save_merged(model, tmp_path / "m", batch={"input_ids": IDS} | extra)
    assert torch.equal(logits(model), before), "the model in memory stays as it was"
    assert {**model.config.to_dict(), "architectures": None, "dtype": None} == {
        **config,
        "architectures": None,
        "dtype": None,
    }
    again = type(model).from_pretrained(tmp_path / "m")
    assert torch.allclose(logits(again), before, atol=1e-5)
    assert report.logits is not None
    assert report.logits < 1e-5
    assert (report.update > 0) == (method == "lora")
    # of the manifest too, but for its name
    text = "".join(file.read_text() for file in (tmp_path / "m").glob("*.json"))
    assert "petune" not in text
    assert "lora" not in text
    assert not any(
        "lora" in key or "petune" in key for key in load_file(tmp_path / "m" / "model.safetensors")
    )
    assert {key for key, value in again.state_dict().items()} == set(MODELS[name]().state_dict())


def test_a_model_with_fused_blocks_is_merged_where_one_linear_of_three_is_tuned(tmp_path: Path) -> None:
    """The other two lie in the fused block's one tensor, whose rows have room for factors behind them."""
    model = stir(wrap(llama(), method="lora", r=4, targets=["q"], kernels="reference"))
    export.save_merged(model, tmp_path / "m")
    assert torch.allclose(logits(type(model).from_pretrained(tmp_path / "m")), logits(model), atol=1e-5)


def test_auto_classes_load_a_merged_folder(tmp_path: Path) -> None:
    model = tuned(bert)
    export.save_merged(model, tmp_path / "bert")
    assert torch.allclose(
        logits(AutoModelForSequenceClassification.from_pretrained(tmp_path / "bert")),
        logits(model),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("name", "target"), [("llama", "embed_tokens"), ("llama", "lm_head"), ("bart", "lm_head")]
)
def test_merging_one_end_of_a_tied_pair_unties_the_saved_model(
    name: str, target: str, tmp_path: Path
) -> None:
    model = tuned(lambda: llama(tie=True) if name == "llama" else bart(), targets=[target])
    export.save_merged(model, tmp_path / "m")
    assert model.config.tie_word_embeddings is True
    again = type(model).from_pretrained(tmp_path / "m")
    assert again.config.tie_word_embeddings is False
    assert torch.allclose(logits(again), logits(model), atol=1e-5)


def test_t5_ties_again_so_merging_its_head_is_refused(tmp_path: Path) -> None:
    model = tuned(t5, targets=["lm_head"])
    with pytest.raises(UsageError, match="ties again"):
        export.save_merged(model, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_adapter_and_side_cannot_be_merged(tmp_path: Path) -> None:
    for method in ("adapter", "side"):
        with pytest.raises(UsageError, match=r"petune\.load"):
            export.save_merged(tuned(bert, method), tmp_path / "m")


def test_rounding_away_an_update_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(export, "warn", said.append)
    model = wrap(llama().bfloat16(), r=4)
    with torch.no_grad():
        for name, value in tuned_state(model).items():
            if name.endswith("lora_B"):
                value.normal_(std=1e-4)
    report = export.save_merged(model, tmp_path / "m")
    assert report.ulps < 1
    assert report.lost > 0.05
    assert f"what rounding changes is {100 * report.lost:.0f} % of it" in said[0]
    noise = f"beside rounding noise of {100 * report.noise:.3g} % of its norm"
    assert f"into bfloat16: {100 * report.kept:.3g} % of the update survives, {noise}" in str(report)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    assert export.save_merged(tuned(llama), tmp_path / "n").lost < 1e-5


@pytest.mark.parametrize("method", METHODS)
def test_a_flipped_bit_in_a_number_is_found(method: str, tmp_path: Path) -> None:
    export.save(tuned(bert, method), tmp_path / "a")
    file = next((tmp_path / "a").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(FileError, match="changed or damaged"):
        load(bert(), tmp_path / "a")


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float8_e4m3fn])
def test_a_tensor_that_holds_no_weights_is_refused_by_name_and_the_base_is_untouched(
    method: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """As it would be in a file that somebody quantised: its numbers mean nothing without their scales."""
    folder = export.save(tuned(bert, method), tmp_path / "a")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name, value in tensors.items() if value.dim() == 2 and value.any())
    save_file({**tensors, name: tensors[name].to(dtype)}, file, {"format": "pt"})
    seal_folder(folder)
    base = bert()
    with pytest.raises(FileError, match=f"holds {str(dtype).removeprefix('torch.')}, not weights") as caught:
        load(base, folder)
    assert name.removeprefix("base_model.model.").removesuffix(".weight") in str(caught.value)
    assert not is_wrapped(base) and torch.equal(logits(base), logits(bert()))
    if method == "lora":
        (folder / "petune.json").unlink()  # as peft writes it
        (folder / "petune.manifest.json").unlink()
        with pytest.raises(FileError, match="not weights"):
            load(base, folder)


def test_rounding_what_was_trained_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.saving.load.warn", said.append)
    folder = export.save(tuned(bert, "lora"), tmp_path / "a")
    load(bert(), folder)
    assert said == []
    load(bert().to(torch.bfloat16), folder)  # the factors stay float32, the head does not
    assert len(said) == 1 and "classifier" in said[0] and "rounded to torch.bfloat16" in said[0]
