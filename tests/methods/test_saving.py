"""A wrapped model under transformers' own Trainer: its checkpoints are small, read back the same numbers, and
are never the bare base."""

from __future__ import annotations

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import petune
from petune.errors import FileError, UsageError
from petune.methods import tuned_state
from petune.saving import export
from tests.methods.zoo import SETTINGS, batch, stir, tiny

torch.set_num_threads(1)


def wrapped(method: str, kernels: Any = "off", name: str = "llama-causal", **settings: Any) -> Any:
    """Tuned layers draw from the global generator, so the seed makes two of them equal."""
    model = tiny(name)
    torch.manual_seed(3)
    return petune.wrap(model, method, kernels=kernels, **{**SETTINGS[method], **settings})


def logits(model: nn.Module, name: str = "llama-causal") -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(**batch(name)).logits
    return found


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Twelve rows of the zoo's batches, one by one."""

    def __init__(self, seed: int) -> None:
        made = batch("llama-causal", seed=seed, rows=4)
        self.rows = [{key: value[row] for key, value in made.items()} for row in range(4)] * 3

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class StopAt(TrainerCallback):
    """As a machine that is switched off after a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def trainer(model: nn.Module, out: Path, *, stop: int = 10**6, lr: float = 1e-2, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": lr,
    }
    settings |= {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "seed": 5,
    }
    settings |= {
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(output_dir=str(out), **(settings | changes))
    return Trainer(
        model=model, args=arguments, train_dataset=Rows(1), eval_dataset=Rows(1), callbacks=[StopAt(stop)]
    )


def evaluations(of: Trainer) -> dict[int, float]:
    return {record["step"]: record["eval_loss"] for record in of.state.log_history if "eval_loss" in record}


# what the method saves and whether blocks are fused do not meet in a file: a value of each is enough
@pytest.mark.crossed(1)
@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.long if name == "adapter" else ()) for name in SETTINGS]
)
def test_a_trainer_resumes_and_ends_with_its_best_as_one_that_was_not_interrupted(
    method: str, kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss falls, so the best by the greatest loss is the first: neither the last nor a matter of
    rounding."""
    settings = {} if method == "full" else {"dropout": 0.1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    whole = trainer(wrapped(method, kernels, **settings), tmp_path / "whole", **best)
    whole.train()
    trainer(wrapped(method, kernels, **settings), tmp_path / "run", stop=2, **best).train()
    again = trainer(wrapped(method, kernels, **settings), tmp_path / "run", **best)
    again.train(resume_from_checkpoint=True)
    scores = evaluations(whole)
    assert evaluations(again) == scores and scores[2] > scores[4]
    assert "missing keys" not in caplog.text
    tuned = [load_file(tmp_path / run / "checkpoint-4" / "model.safetensors") for run in ("whole", "run")]
    assert tuned[0].keys() == tuned[1].keys() and all(
        torch.equal(tuned[0][name], tuned[1][name]) for name in tuned[0]
    )
    assert [run.evaluate()["eval_loss"] for run in (whole, again)] == [
        pytest.approx(max(scores.values()), rel=1e-6)
    ] * 2
    for step in (2, 4):
        place = tmp_path / "whole" / f"checkpoint-{step}"
        read = (
            AutoModelForCausalLM.from_pretrained(place)
            if method == "full"
            else petune.load(tiny("llama-causal"), place)
        )
        assert trainer(read, tmp_path / "scored").evaluate()["eval_loss"] == pytest.approx(
            scores[step], rel=1e-5
        )


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", ["bert-classify", "t5-seq2seq", "llama-causal"])
@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
def test_save_pretrained_writes_what_loads_again_and_never_reads_as_the_untuned_base(
    method: str, name: str, tmp_path: Path
) -> None:
    model = wrapped(method, name=name)
    stir(model)
    expected, place = logits(model, name), tmp_path / "saved"
    for _ in range(2):  # the second replaces the first
        model.save_pretrained(place)
    assert {file.name for file in place.iterdir()} == {"tuned", "model.safetensors", "config.json"}
    read = petune.load(tiny(name), place)
    assert torch.equal(logits(read, name), expected)
    again = wrapped(method, name=name)
    found = again.load_state_dict(load_file(place / "model.safetensors"), strict=True)
    assert torch.equal(logits(again, name), expected) and not found.missing_keys and not found.unexpected_keys
    for kind in (type(tiny(name)), AutoModel):
        with pytest.raises(ValueError, match=r"read it with petune\.load\(base, folder\)"):
            kind.from_pretrained(place)
    read.save_pretrained(tmp_path / "read", is_main_process=False)
    assert not (tmp_path / "read").exists()


def test_a_wrapped_model_is_still_of_its_class_and_its_copies_save_as_it_does(tmp_path: Path) -> None:
    model = wrapped("lora")
    stir(model)
    assert isinstance(model, LlamaForCausalLM) and str(type(model)) == str(LlamaForCausalLM)
    other = copy.deepcopy(model)  # by __reduce__, as a pickle
    assert type(other) is type(model) and torch.equal(logits(other), logits(model))
    other.save_pretrained(tmp_path / "copy")
    assert torch.equal(logits(petune.load(tiny("llama-causal"), tmp_path / "copy")), logits(model))
    expected = logits(model)
    petune.merge(model)
    assert type(model) is LlamaForCausalLM
    model.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        logits(LlamaForCausalLM.from_pretrained(tmp_path / "merged")), expected, rtol=1e-4, atol=1e-4
    )


def test_save_pretrained_refuses_what_it_would_ignore_or_destroy(tmp_path: Path) -> None:
    model = wrapped("lora")
    tiny("llama-causal").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tuned").mkdir()
    before = (tmp_path / "base" / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="whole model"):
        model.save_pretrained(tmp_path / "base")
    assert (tmp_path / "base" / "model.safetensors").read_bytes() == before
    for option in (
        {"push_to_hub": True},
        {"variant": "fp16"},
        {"state_dict": {}},
        {"state_dict": copy.deepcopy(model).state_dict()},
    ):
        with pytest.raises(UsageError, match=f"{next(iter(option))}"):
            model.save_pretrained(tmp_path / "new", **option)
    with petune.merged_weights(model), pytest.raises(UsageError, match="leave the block"):
        model.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    model.save_pretrained(
        tmp_path / "new", state_dict=model.state_dict(), max_shard_size="5GB", push_to_hub=False
    )
    assert (tmp_path / "new" / "tuned").is_dir()


def test_a_checkpoint_of_another_tuning_is_refused_though_loading_is_not_strict(tmp_path: Path) -> None:
    wrapped("lora", targets=["q", "v"]).save_pretrained(tmp_path / "few")
    wrapped("lora", r=2).save_pretrained(tmp_path / "narrow")
    model = wrapped("lora")
    before = {name: value.clone() for name, value in tuned_state(model).items()}
    for place, message in (("few", "k_proj.lora_A  is missing"), ("narrow", "another shape")):
        with pytest.raises(FileError, match=message):
            model.load_state_dict(load_file(tmp_path / place / "model.safetensors"), strict=False)
    with pytest.raises(FileError, match="is unexpected"):
        wrapped("lora", targets=["q"]).load_state_dict(
            load_file(tmp_path / "few" / "model.safetensors"), strict=False
        )
    whole = {
        name: value.to(torch.int8)
        for name, value in load_file(tmp_path / "few" / "model.safetensors").items()
    }
    with pytest.raises(FileError, match="holds int8, not weights"):
        wrapped("lora", targets=["q", "v"]).load_state_dict(whole, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in tuned_state(model).items())
    state = copy.deepcopy(model.state_dict())
    assert not model.load_state_dict(state).missing_keys  # a whole state is torch's own affair


def test_the_documents_lines_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    (lines,) = re.findall(
        r"```python\n(.*?)```",
        text.partition("### Checkpoints of transformers' Trainer")[2].partition("\n### ")[0],
        re.S,
    )
    monkeypatch.chdir(tmp_path)
    tiny("llama-causal").save_pretrained("base")
    Path("shown.py").write_text(lines.replace("100", "2").replace("50", "1"), encoding="utf-8")
    shown = runpy.run_path("shown.py", init_globals={"rows": Rows(1)})
    assert torch.equal(logits(shown["model"]), logits(shown["tuned"]))


@pytest.mark.parametrize("name", ["bert-classify", "llama-causal"])
def test_weights_that_lie_in_banks_are_saved_copied_and_merged_as_their_own(
    name: str, tmp_path: Path
) -> None:
    """Fused blocks move frozen weights into one tensor with room between the rows."""
    model = wrapped("lora", "reference", name)
    stir(model)
    assert not all(value.is_contiguous() for value in model.parameters())
    state, expected = model.state_dict(), logits(model, name)
    assert all(value.is_contiguous() for value in state.values())
    save_file(state, tmp_path / "state.safetensors")  # which refuses tensors that share memory
    merged = petune.merge(copy.deepcopy(model))
    export.save_merged(model, tmp_path / "merged")
    read = type(merged).from_pretrained(tmp_path / "merged")
    with petune.merged_weights(model):
        inside = logits(model, name)
    for found in (logits(merged, name), logits(read, name), inside, logits(copy.deepcopy(model), name)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(model, name), expected)
