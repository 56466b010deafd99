"""The run folder: every file the README promises, what others can read of it, and what a finished run can
do."""

from __future__ import annotations

import ast
import getpass
import hashlib
import json
import math
import os
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import petune
from petune.errors import FileError, TrainingFault, UsageError
from petune.files.hashes import FileHashes
from petune.recipe import load_recipe
from petune.run.evaluate import outputs_of
from petune.run.folder import environment
from petune.run.train import load_run
from tests.small_runs import (
    METHODS,
    TASK,
    Listener,
    as_yaml,
    brief,
    newest,
    run,
    settings,
    terminate_at,
    tokenizer,
    write_model,
)

AUTO = {
    "bert": "AutoModelForSequenceClassification",
    "bart": "AutoModelForSeq2SeqLM",
    "t5": "AutoModelForSeq2SeqLM",
}
pictureless = pytest.mark.usefixtures("no_picture")


def auto(family: str) -> Any:
    return getattr(transformers, AUTO.get(family, "AutoModelForCausalLM"))


def inputs(family: str) -> dict[str, torch.Tensor]:
    ids = tokenizer()(["red sun moon star", "blue sea hill dog"], return_tensors="pt")["input_ids"]
    return {"input_ids": ids} | ({"decoder_input_ids": ids[:, :3]} if family in ("bart", "t5") else {})


def logits(model: Any, family: str) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**inputs(family)).logits
        return found


# ---------------------------------------------------------------- the folder


def test_a_run_leaves_every_file_it_promises(tmp_path: Path, pictures: None):
    pytest.importorskip("matplotlib")
    recipe = as_yaml(tmp_path / "mine.yaml", settings(tmp_path, eval_every=3))
    finished = run(recipe)
    names = {path.name for path in finished.folder.iterdir()}
    promised = {
        "recipe.yaml",
        "resolved.yaml",
        "env.json",
        "metrics.jsonl",
        "loss.png",
        "run.log",
        "summary.json",
        "README.md",
        "best",
        "setup.json",
        "report.html",
    }
    assert names == promised | {"checkpoints", "tuned"}
    assert (finished.folder / "recipe.yaml").read_bytes() == recipe.read_bytes()
    assert (finished.folder / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    readme = (finished.folder / "README.md").read_text()
    assert all(name in readme for name in names - {"README.md", "checkpoints", "tuned"})
    assert "mine" in readme


@pictureless
def test_the_resolved_recipe_holds_every_setting_and_means_the_same(tmp_path: Path):
    finished = run(brief(tmp_path))
    text = (finished.folder / "resolved.yaml").read_text()
    assert set(yaml.safe_load(text)) >= {
        "lr",
        "seed",
        "clip",
        "schedule",
        "weight_decay",
        "keep",
        "method",
        "data",
    }
    assert (
        load_recipe(finished.folder / "resolved.yaml").resolved() == load_recipe(brief(tmp_path)).resolved()
    )


@pictureless
def test_the_environment_names_versions_and_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    finished = run(brief(tmp_path))
    text = (finished.folder / "env.json").read_text()
    assert json.loads(text)["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert {"python", "system", "machine"} <= json.loads(text).keys()
    for private in (socket.gethostname(), os.path.expanduser("~"), "verysecret"):
        assert private not in text
    assert getpass.getuser() not in json.dumps(environment())
    for path in finished.folder.rglob("*"):
        if path.is_file():
            assert b"verysecret" not in path.read_bytes(), path


@pictureless
def test_records_have_their_fields_and_the_evaluations_theirs(tmp_path: Path):
    finished = run(settings(tmp_path, "bert", eval_every=3))
    steps = [record for record in finished.metrics() if "loss" in record]
    scores = [record for record in finished.metrics() if "loss" not in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all(
        set(record) == {"step", "epoch", "loss", "lr", "grad_norm", "tokens", "tokens_per_s"}
        for record in steps
    )
    assert all(math.isfinite(value) for record in steps for value in record.values())
    assert [record["lr"] for record in steps] == pytest.approx([5e-4, 1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    assert [record["step"] for record in scores] == [0, 3, 6]
    names = {"step", "epoch", "eval_loss", "eval_accuracy", "eval_f1_macro", "eval_matthews", "confusion"}
    assert all(set(record) == names for record in scores)


@pictureless
def test_the_history_has_one_mapping_per_step_with_its_scores(tmp_path: Path):
    finished = run(settings(tmp_path, eval_every=3))
    history = finished.history
    assert [record["step"] for record in history] == list(range(7))
    assert [record["step"] for record in history if "eval_loss" in record] == [0, 3, 6]
    assert "loss" not in history[0] and all(
        {"loss", "lr", "grad_norm", "tokens_per_s"} <= record.keys() for record in history[1:]
    )
    with (finished.folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # as a crash leaves it
    assert load_run(finished.folder).history == history
    (finished.folder / "metrics.jsonl").unlink()
    assert load_run(finished.folder).history == []


@pictureless
def test_the_log_keeps_what_was_said_and_the_traceback_of_what_ended_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    listener = Listener()
    finished = run(settings(tmp_path, out="good"), listener)
    log = (finished.folder / "run.log").read_text()
    assert all(line in log for line in [*listener.lines, *listener.notes, *listener.closing])
    assert "Traceback" not in log

    def spoilt(model: torch.nn.Module, batch: Any) -> Any:
        outputs = outputs_of(model, batch)
        outputs.logits = outputs.logits * (math.nan if model.training else 1)
        return outputs

    monkeypatch.setattr("petune.run.objective.outputs_of", spoilt)
    with pytest.raises(TrainingFault):
        run(settings(tmp_path, out="bad"))
    log = (tmp_path / "bad" / "run.log").read_text()
    assert (
        "Traceback (most recent call last)" in log and "TrainingFault" in log and "refuse_non_finite" in log
    )


@pictureless
def test_the_header_and_the_end_say_what_a_reader_wants_to_know(tmp_path: Path):
    listener = Listener()
    finished = run(settings(tmp_path, "bert", head_only=True), listener)
    header = "\n".join(listener.lines)
    for said in ("trainable", "to train on", "fp32 on cpu", str(finished.folder), "tokens"):
        assert said in header, said
    summary = finished.summary
    end = "\n".join(listener.closing)
    assert (
        f"accuracy {summary['before']['accuracy']:.4f} (untouched base) -> {summary['after']['accuracy']:.4f}"
        in end
    )
    assert f"head only: {summary['head_only']:.4f}" in end
    for said in ("tokens/s", "peak memory", "README.md", "petune eval", "petune merge"):
        assert said in end, said
    assert summary["peak_memory_bytes"] > 10**7


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    """A run of a family by a method, trained when it is first asked for."""
    return cache(lambda family, method: run(brief(tmp_path_factory.mktemp(method), family, method, lr=0.01)))


@pictureless
@pytest.mark.parametrize("method", METHODS)
def test_nothing_in_the_folder_is_a_pickle(method: str, two_steps: Callable[[str, str], Any]):
    folder = two_steps("llama", method).folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {
        ".json",
        ".jsonl",
        ".yaml",
        ".safetensors",
        ".md",
        ".log",
        ".jinja",
        ".txt",
        ".html",
        "",
    }
    for path in files:
        start = path.read_bytes()[:4]
        assert not start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")), path


@pytest.mark.forks
@pictureless
def test_tuned_has_the_tokenizer_and_the_chat_template(tmp_path: Path):
    folder = run(brief(tmp_path, task="chat")).folder / "tuned"
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded.chat_template == tokenizer().chat_template
    assert loaded("red sun")["input_ids"] == tokenizer()("red sun")["input_ids"]


@pytest.mark.crossed(1)
@pictureless
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TASK)
def test_the_lines_of_the_readme_load_what_was_trained(
    family: str, method: str, two_steps: Callable[[str, str], Any]
):
    """Without executing them: the lines are read as Python, and each call in them is made by hand."""
    finished = two_steps(family, method)
    code = (finished.folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    lines = ast.parse(code).body
    assert len(lines) <= 3
    assert ast.unparse(lines[0]) == "import petune, transformers"
    values: dict[str, Any] = {"petune": petune, "transformers": transformers}
    for line in lines[1:]:
        assert (
            isinstance(line, ast.Assign)
            and isinstance(line.value, ast.Call)
            and isinstance(line.targets[0], ast.Name)
        )
        values[line.targets[0].id] = called(line.value, values)
    assert torch.allclose(logits(values["model"], family), logits(finished.speaker.model, family), atol=1e-5)


def called(call: ast.Call, values: dict[str, Any]) -> Any:
    function: Any = values[ast.unparse(call.func).split(".")[0]]
    for name in ast.unparse(call.func).split(".")[1:]:
        function = getattr(function, name)
    positional = [
        values[part.id] if isinstance(part, ast.Name) else ast.literal_eval(part) for part in call.args
    ]
    return function(*positional, **{str(part.arg): ast.literal_eval(part.value) for part in call.keywords})


@pictureless
def test_a_run_without_out_gets_a_folder_of_its_own_and_the_readme_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    recipe = settings(tmp_path, max_steps=1, warmup=0)
    del recipe["out"]
    finished = run(as_yaml(tmp_path / "mine.yaml", recipe))
    assert finished.folder.parent == Path("runs") and finished.folder.name.startswith("mine-")
    assert f'"{finished.folder}/tuned"' in (finished.folder / "README.md").read_text()


# ---------------------------------------------------------------- a run taken up again


@pictureless
def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileError, match="not a run folder") as caught:
            load_run(place)
        assert caught.value.code == 4


@pictureless
def test_a_folder_called_nearly_as_a_run_is_led_to_it(tmp_path: Path):
    for name in ("reviews", "tickets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.yaml").touch()
    (tmp_path / "ticket-notes").mkdir()
    with pytest.raises(FileError, match="did you mean") as caught:
        load_run(tmp_path / "ticket")
    assert caught.value.problems[0].remedy == f"did you mean: {tmp_path / 'tickets'}"


@pictureless
def test_a_run_that_has_not_finished_says_how_to_go_on(tmp_path: Path):
    with pytest.raises(petune.errors.Stopped):
        run(settings(tmp_path), terminate_at(2))
    loaded = load_run(tmp_path / "run")
    assert [record["step"] for record in loaded.metrics() if "loss" in record] == [1, 2]
    for use in (lambda: loaded.summary, lambda: loaded.generate("red"), loaded.eval, loaded.merge):
        with pytest.raises(FileError, match="has not finished") as caught:
            use()
        assert "--resume" in str(caught.value)


@pytest.mark.crossed(1)
@pictureless
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("family", TASK)
def test_a_merged_run_is_a_plain_checkpoint_with_equal_logits(family: str, method: str, tmp_path: Path):
    finished = load_run(run(brief(tmp_path, family, method, lr=0.02)).folder)
    expected = logits(finished.speaker.model, family)
    merged = finished.merge(tmp_path / "merged")
    assert merged == tmp_path / "merged"
    loaded = auto(family).from_pretrained(merged)
    assert not any("lora" in name for name in loaded.state_dict())
    assert torch.allclose(logits(loaded, family), expected, atol=1e-5)
    assert torch.equal(logits(finished.speaker.model, family), expected)  # the tuned model is as it was
    assert (
        transformers.AutoTokenizer.from_pretrained(merged)("red sun")["input_ids"]
        == tokenizer()("red sun")["input_ids"]
    )
    if family == "bert":
        assert loaded.config.id2label == {0: "blue", 1: "green", 2: "red"}
    base = auto(family).from_pretrained(tmp_path / family)
    if family != "bert":
        assert not torch.allclose(logits(base, family), expected, atol=1e-3)
    again = finished.export("hf", tmp_path / "again")
    assert torch.equal(logits(auto(family).from_pretrained(again), family), logits(loaded, family))
    with pytest.raises(UsageError, match="occupied"):
        finished.merge(tmp_path / "merged")
    for own in (tmp_path / family, finished.folder / "tuned", finished.folder / "tuned" / "inside"):
        with pytest.raises(UsageError, match="read from here"):
            finished.merge(own, overwrite=True)
    if family == "bert" and method == "lora":
        rounded_by_the_seed_of_the_run(finished, tmp_path)


def rounded_by_the_seed_of_the_run(finished: Any, tmp_path: Path) -> None:
    made = [finished.merge(tmp_path / "drawn", dtype="bf16", rounding="stochastic", overwrite=True)]
    said, seed = finished.merge_report, finished.recipe.seed
    assert said is not None and f"into bfloat16, rounded stochastically by seed {seed}" in said
    made += [
        finished.merge(tmp_path / str(more), dtype="bf16", rounding="stochastic", seed=seed + more)
        for more in (0, 1)
    ]
    own, same, other = ((place / "model.safetensors").read_bytes() for place in made)
    assert own == same != other
    for words, match in (
        ({"rounding": "stochastic"}, "written in bfloat16"),
        ({"rounding": "up"}, "rounding is unknown"),
        ({"seed": 3}, "--rounding stochastic"),
    ):
        with pytest.raises(UsageError, match=match):
            finished.merge(tmp_path / "refused", **words)


@pictureless
@pytest.mark.parametrize("family", TASK)
def test_peft_reads_an_exported_lora_run_with_equal_logits(family: str, tmp_path: Path):
    peft = pytest.importorskip("peft")
    finished = run(brief(tmp_path, family, "lora", lr=0.02))
    place = finished.export("peft", tmp_path / "peft")
    kwargs = {"num_labels": 3} if family == "bert" else {}
    base = auto(family).from_pretrained(tmp_path / family, **kwargs)
    loaded = peft.PeftModel.from_pretrained(base, place)
    assert torch.allclose(logits(loaded, family), logits(finished.speaker.model, family), atol=1e-5)


@pictureless
def test_adapters_exported_in_adapterhubs_layout_are_where_another_run_begins(tmp_path: Path):
    finished = run(brief(tmp_path, method="adapter", lr=0.02))
    place = finished.export("adapters")
    base = auto("llama").from_pretrained(tmp_path / "llama")
    expected = logits(finished.speaker.model, "llama")
    untuned = logits(base, "llama")
    assert torch.equal(logits(petune.load(base, place), "llama"), expected)
    begun = {"init_adapter": str(place), "lr": 1e-5, "out": str(tmp_path / "more")}
    more = logits(run({**brief(tmp_path, method="adapter"), **begun}).speaker.model, "llama")
    assert float((more - expected).abs().max()) < 0.02 * float((untuned - expected).abs().max())
    with pytest.raises(UsageError, match=r"peft has no file for adapter\n   expected lora, dora, ia3, miss"):
        finished.export("peft")


@pictureless
@pytest.mark.parametrize("bias", ["all", pytest.param("lora", marks=pytest.mark.long)])
def test_biases_of_a_bf16_run_are_read_back_as_they_were_trained(tmp_path: Path, bias: str):
    method = {"name": "lora", "r": 2, "bias": bias}
    recipe = {**brief(tmp_path, "bart", method, lr=0.02), "dtype": "bf16"}
    finished = run(recipe)
    again = petune.load_run(finished.folder)
    found, scores = petune.tuned_state(again.model), again.eval()
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert scores["tuned"] == finished.summary["after"] and scores["base"] == finished.summary["before"]
    more = run({**recipe, "init_adapter": str(finished.folder / "tuned"), "out": str(tmp_path / "more")})
    assert more.summary["before"] == finished.summary["before"]  # the base's own biases
    facts = [json.loads((one.folder / "tuned/petune.json").read_text()) for one in (finished, more)]
    assert facts[0]["base"]["fingerprint"] == facts[1]["base"]["fingerprint"]
    base = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "bart", dtype="bfloat16")
    narrow = petune.tuned_state(petune.load(base, finished.folder))
    assert {value.dtype for value in narrow.values()} == {torch.bfloat16, torch.float32}


@pictureless
def test_an_export_to_a_server_says_what_to_type(tmp_path: Path):
    finished = run(brief(tmp_path, "llama", {"name": "lora", "r": 3}, lr=0.02))
    with pytest.raises(UsageError, match=r"layout is for bottleneck adapters, not lora\n   use --to peft"):
        finished.export("adapters")
    place = finished.export("vllm")
    assert place == finished.folder / "vllm"
    assert json.loads((place / "adapter_config.json").read_text())["r"] == 8
    assert "--max-lora-rank 8" in str(finished.serve_report)
    text = (finished.export("ollama", tmp_path / "o") / "Modelfile").read_text()
    assert text.startswith(f"FROM {tmp_path / 'llama'}\nADAPTER .\n")


@pictureless
@pytest.mark.parametrize("method", ["adapter", "side"])
def test_what_cannot_merge_names_petune_load(method: str, tmp_path: Path):
    finished = run(brief(tmp_path, method=method))
    before = sorted(tmp_path.rglob("*"))
    for use in (finished.merge, lambda: finished.export("hf"), lambda: finished.export("peft")):
        with pytest.raises(UsageError, match=r"petune\.load") as caught:
            use()
        assert caught.value.code == 2
    assert sorted(tmp_path.rglob("*")) == before


@pictureless
def test_an_export_nobody_knows_is_refused(tmp_path: Path):
    full = run(brief(tmp_path, method="full"))
    with pytest.raises(UsageError, match="tgi") as caught:
        full.export("tgi")
    assert "peft, adapters, hf, bitsandbytes, vllm" in str(caught.value)
    with pytest.raises(UsageError, match="--to hf"):
        full.export("peft")


@pictureless
def test_a_run_is_taken_up_from_another_working_directory_and_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    recipe = brief(tmp_path) | {
        "model": "llama",
        "data": {"path": "causal.jsonl", "eval": "causal-held.jsonl"},
        "out": "run",
    }
    finished = run(recipe)
    expected = finished.generate("red sun", max_new_tokens=4)
    (tmp_path / "run").rename(tmp_path / "moved")
    monkeypatch.chdir("/")
    loaded = load_run(tmp_path / "moved")
    assert loaded.generate("red sun", max_new_tokens=4) == expected
    assert loaded.eval()["tuned"] == pytest.approx(loaded.summary["after"], abs=1e-6)


@pictureless
def test_a_damaged_tuned_folder_is_refused(tmp_path: Path):
    finished = run(brief(tmp_path))
    file = finished.folder / "tuned" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(FileError) as caught:
        load_run(finished.folder).generate("red")
    assert caught.value.code == 4


@pictureless
def test_another_base_under_a_finished_run_is_refused(tmp_path: Path):
    finished = run(brief(tmp_path))
    write_model(tmp_path / "llama", "llama", seed=1)
    with pytest.raises(FileError):
        load_run(finished.folder).generate("red")


def test_a_picture_needs_matplotlib_and_a_run_does_not(
    tmp_path: Path, pictures: None, monkeypatch: pytest.MonkeyPatch
):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    finished = run(brief(tmp_path))
    assert not (finished.folder / "loss.png").exists()
    assert newest(finished.folder).name == "step-2"


@pictureless
@pytest.mark.parametrize("method", ["lora", "full"])
def test_other_rows_are_scored_by_the_models_labels_and_the_base_is_scored_anew(method: str, tmp_path: Path):
    finished = run(brief(tmp_path, "bert", method))
    same = finished.eval()
    names = finished.speaker.model.config.id2label
    rows = [json.loads(line) for line in Path(finished.recipe.data.path).read_text().splitlines()]
    kept = [row for row in rows if row["label"] in (names[1], names[2])]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in kept))
    shifted = load_run(finished.folder)
    shifted.recipe = load_recipe(shifted.recipe, {"data.eval": str(other)})
    scores = shifted.eval()
    right = sum(shifted.generate(row["text"]) == row["label"] for row in kept)
    assert scores["tuned"]["accuracy"] == pytest.approx(right / len(kept))
    assert scores["base"] != same["base"]


@pictureless
@pytest.mark.parametrize(
    ("family", "method"),
    [("bert", "lora"), ("bert", "full"), ("llama", {"name": "lora", "r": 2, "also_train": ["lm_head"]})],
)
def test_the_base_has_nothing_of_what_trained_whole_beside_the_method(
    family: str, method: Any, tmp_path: Path
):
    finished = run(brief(tmp_path, family, method, max_steps=20, lr=0.02))
    before = finished.summary["before"]
    assert finished.summary["after"]["loss"] < before["loss"] - 0.05
    rows = Path(finished.recipe.data.path)
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))  # the held-out rows stay
    again = load_run(finished.folder)
    assert again.eval()["base"] == pytest.approx(before, rel=1e-5)
    assert again.chat().base() is not None  # what /base answers


@pictureless
def test_a_run_on_a_quantised_base_is_scored_beside_its_dense_base(tmp_path: Path):
    values = brief(tmp_path, kernels="reference")
    plain = run(values | {"out": str(tmp_path / "plain")})
    held = run(values | {"out": str(tmp_path / "held"), "base_dtype": "int8"})
    scored = load_run(held.folder).eval()
    base = scored["base"]
    assert base == pytest.approx(plain.summary["before"], rel=1e-6)
    assert "trained beside a base in int8, and scored beside the dense one" in scored["notes"][0]
    assert not any("scored beside" in line for line in plain.eval()["notes"])
    assert base["loss"] != pytest.approx(held.summary["before"]["loss"], rel=1e-6)


@pictureless
def test_the_base_of_a_run_in_four_bits_is_written_as_it_was_held(tmp_path: Path):
    write_model(tmp_path / "llama", "llama", hidden_size=64, intermediate_size=64)
    values = brief(tmp_path, kernels="reference", base_dtype="nf4", dtype="bf16")
    finished = run(values)
    finished.recipe = load_recipe(finished.recipe, {"dtype": "auto"})  # float32 here, bfloat16 where it ran
    place = finished.export("bitsandbytes")
    assert place == finished.folder / "bitsandbytes"
    assert transformers.AutoTokenizer.from_pretrained(place)("red sun") == tokenizer()("red sun")
    again = run(values | {"model": str(place), "out": str(tmp_path / "again")})
    assert again.summary["after"] == finished.summary["after"]  # on the very bits: the same run
    other = load_run(again.folder).export("bitsandbytes")
    assert (other / "model.safetensors").read_bytes() == (place / "model.safetensors").read_bytes()
    for changes, match in (
        ({"base_dtype": "int8"}, r"not held in four bits(.|\n)*int8"),
        ({"model": "object:Llama@0"}, "given in memory"),
    ):
        finished.recipe = load_recipe(finished.recipe, {"base_dtype": "nf4", **changes})
        with pytest.raises(UsageError, match=match):
            finished.export("bitsandbytes", tmp_path / "refused")


@pictureless
def test_a_label_the_model_does_not_know_is_an_error(tmp_path: Path):
    finished = run(brief(tmp_path, "bert"))
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "red fox", "label": "nonsense"}\n{"text": "blue fox", "label": "nonsense"}\n')
    finished.recipe = load_recipe(finished.recipe, {"data.path": str(other), "data.eval": None})
    with pytest.raises(petune.errors.DataError, match="not one the model knows"):
        finished.eval()


@pictureless
def test_the_commands_that_come_next_can_be_typed_where_the_folder_has_a_space(tmp_path: Path):
    listener = Listener()
    finished = run(brief(tmp_path, out="my run"), listener)
    next_ = next(line for line in listener.closing if line.startswith("next"))
    assert f"petune eval '{finished.folder}'   |" in next_


@pictureless
def test_a_run_folder_trained_over_itself_keeps_its_recipe(tmp_path: Path):
    finished = run(brief(tmp_path))
    again = run(str(finished.folder), overwrite=True)
    assert again.summary["steps"] == finished.summary["steps"]
    assert (finished.folder / "recipe.yaml").exists()


def test_allowing_a_change_of_what_is_no_setting_is_an_error(tmp_path: Path):
    with pytest.raises(UsageError, match="'bogus' is not a setting"):
        run(settings(tmp_path), allow_change=["bogus"])
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- the identity of the base


@pictureless
def test_a_run_stores_hashes_of_its_bases_files_and_verify_base_names_the_wrong_one(tmp_path: Path):
    recipe = settings(tmp_path, max_steps=1, warmup=0)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    weights = tmp_path / "llama" / "model.safetensors"
    weights.unlink()
    model.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    shards = sorted((tmp_path / "llama").glob("*.safetensors"))
    assert len(shards) > 1
    finished = run(recipe)
    base = json.loads((finished.folder / "tuned" / "petune.json").read_text())["base"]
    names = (
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        *(path.name for path in shards),
    )
    for name, entry in base["files"].items():
        content = (tmp_path / "llama" / name).read_bytes()
        assert entry == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert sorted(base["files"]) == sorted(names)
    assert load_run(finished.folder, verify_base=True).speaker
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    for verify in (False, True):
        with pytest.raises(
            FileError, match=rf"the files of the base differ[\s\S]*{shards[1].name}  has another content"
        ) as caught:
            _ = load_run(finished.folder, verify_base=verify).speaker
        assert len(caught.value.problems) == 2


@pictureless
def test_a_run_without_files_under_it_stores_no_hash(tmp_path: Path):
    recipe = settings(tmp_path, max_steps=1, warmup=0)
    finished = run(recipe | {"model": f"config:{tmp_path / 'llama' / 'config.json'}"})
    assert json.loads((finished.folder / "tuned" / "petune.json").read_text())["base"]["files"] is None


@pictureless
def test_a_base_that_cannot_be_hashed_costs_the_hash_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Failing(FileHashes):
        def result(self) -> dict[str, str]:
            raise FileError("has changed while it was hashed", where="model.safetensors")

    monkeypatch.setattr("petune.run.tuned_files.FileHashes", Failing)
    listener = Listener()
    finished = run(settings(tmp_path, max_steps=1, warmup=0), listener)
    assert any("STORES NO HASH" in line and "model.safetensors" in line for line in listener.notes)
    assert json.loads((finished.folder / "tuned" / "petune.json").read_text())["base"]["files"] is None
