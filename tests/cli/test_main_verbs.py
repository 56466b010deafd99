"""What each verb hands to the library and shows of its answer; the models behind are fakes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from petune_cli import doctor
from petune_cli.generate import read_prompts

from petune.errors import DataError, UsageError
from petune.recipe import json_schema, shipped_recipes
from tests.cli.conftest import FakeRun, Type

# ------------------------------------------------------------------ Start


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(recipe, options) of each training; the folder of each run whose page is completed."""
    found: list[Any] = []

    def train(recipe: Any, **options: Any) -> SimpleNamespace:
        found.append((recipe, options))
        return SimpleNamespace(folder="runs/mine")

    monkeypatch.setattr("petune.run.train.train", train)
    monkeypatch.setattr("petune_cli.report.complete", found.append)
    return found


def test_train_hands_over_the_recipe_and_the_options(type_: Type, seen: list[Any]) -> None:
    assert (
        type_(
            "train",
            "llama_lora",
            "method.r=4",
            "--resume",
            "--allow-change",
            "epochs",
            "--allow-change",
            "lr",
        ).code
        == 0
    )
    recipe, options = seen[0]
    assert (recipe.method_name, recipe.method.r) == ("lora", 4)
    assert (options["resume"], options["overwrite"], options["allow_change"]) == (
        True,
        False,
        ("epochs", "lr"),
    )
    assert seen[1:] == ["runs/mine"]


def test_train_from_a_checkpoint_names_it(type_: Type, seen: list[Any]) -> None:
    type_("train", "llama_lora", "report=false", "--from", "runs/x/checkpoints/step-3")
    assert [options["resume"] for _, options in seen] == ["runs/x/checkpoints/step-3"]


def test_overwrite_and_resume_exclude_each_other(type_: Type) -> None:
    assert type_("train", "llama_lora", "--resume", "--overwrite").code == 2


def test_ls_lists_every_shipped_recipe(type_: Type) -> None:
    lines = type_("ls").out.splitlines()
    assert lines[0].split() == ["recipe", "model", "method", "parallel", "task", "offline"]
    assert [line.split()[0] for line in lines[1:-1]] == [file.stem for file in shipped_recipes()]


def test_cp_copies_once_and_never_over(type_: Type, tmp_path: Path) -> None:
    assert type_("cp", "llama_lora").code == 0
    copied = (tmp_path / "llama_lora.yaml").read_text()
    assert copied == next(file for file in shipped_recipes() if file.stem == "llama_lora").read_text()
    assert type_("cp", "llama_lora").code == 2
    assert type_("cp", "llama_lora", "mine.yaml").code == 0
    assert type_("cp", "llama_lora", "nowhere/").code == 2
    assert "give DEST such a name" in type_("cp", "llama_lora", "mine.txt").err
    assert type_("cp", "bert_lora", "mine.yaml", "--overwrite").code == 0
    assert (tmp_path / "mine.yaml").read_text() != copied
    assert "the recipe itself" in type_("cp", "mine.yaml", "--overwrite").err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama_lora.yaml", "mine.yaml"]


def test_cp_takes_no_rows_for_a_recipe(type_: Type, tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text('{"text": "red sun"}\n')
    assert "petune init" in type_("cp", "rows/train.jsonl").err
    assert type_("cp", "rows").err.startswith("rows  is a folder, not a recipe file\n")
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_cp_of_an_unknown_name_suggests_one(type_: Type) -> None:
    shown = type_("cp", "lama_lora")
    assert shown.code == 2
    assert "llama_lora" in shown.err


def test_doctor_passes_here_without_a_network(type_: Type, no_network: None) -> None:
    shown = type_("doctor")
    assert shown.code == 0
    assert "offline, by HF_HUB_OFFLINE" in shown.out
    assert "one step of LoRA" in shown.out


def test_doctor_tells_programs_what_it_tells_people(type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda: "it moved")
    told = type_("doctor", "--json")
    found = json.loads(told.out)
    assert told.code == 5 and found["facts"][-1] == {"name": "self-test", "state": "it moved"}
    assert found["facts"][0]["name"] == "petune" and found["problems"] == ["it moved"]
    assert type_("doctor", "--json", "--report").code == 2


def test_doctor_fails_when_the_self_test_does(type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "petune.methods.tune",
        lambda model, config: [value.requires_grad_(True) for value in model.parameters()],
    )
    assert "frozen weights moved" in str(doctor.self_test())
    assert type_("doctor").code == 5


def test_doctor_says_when_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in doctor.hub()[1]


def test_a_report_holds_machine_run_and_log_but_no_path_and_no_name(
    type_: Type, run_folder: FakeRun, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = run_folder.folder / "run.log"
    log.write_text("step 3: 1,200 tokens/s of /srv/ada/secret/rows.csv\nreads ada/patients and notes.jsonl\n")
    monkeypatch.setenv("LOGNAME", "ada")
    shown = type_("doctor", "runs/mine", "--report")
    assert shown.code == 0
    for fact in ("torch", "self-test", "verdict", "1,200 tokens/s of PATH", "reads PATH and FILE.jsonl"):
        assert fact in shown.out
    for secret in ("ada", "secret", "patients", "notes", "runs/mine", str(run_folder.folder)):
        assert secret not in shown.out


def test_doctor_of_a_run_shows_its_state_and_ends_with_4_when_it_is_damaged(
    type_: Type, run_folder: FakeRun
) -> None:
    shown = type_("doctor", "runs/mine")
    assert (
        shown.code == 0
        and "whole" in shown.out
        and "starts from the beginning" in shown.out
        and "self-test" not in shown.out
    )
    (run_folder.folder / "checkpoints" / "step-3").mkdir(parents=True)
    told = type_("doctor", "runs/mine", "--json")
    found = json.loads(told.out)
    assert told.code == 4 and {"name": "checkpoint", "state": "step-3 IS DAMAGED"} in found["facts"]
    assert "has no manifest" in found["problems"][0]
    shown = type_("doctor", "runs/mine")
    assert shown.code == 4 and "step-3 IS DAMAGED" in shown.out and "has no manifest" in shown.err
    assert type_("doctor", "nowhere").code == 4


def test_init_writes_a_recipe_once(type_: Type, tmp_path: Path) -> None:
    assert (
        type_(
            "init",
            "model=demo:tiny-llama",
            "data=demo:docstrings-domain",
            "task=causal",
            "max_steps=2",
            "mine.yaml",
        ).code
        == 0
    )
    text = (tmp_path / "mine.yaml").read_text()
    assert (
        "lr: 0.0008" in text  # that of its width
        and "task: causal" in text
        and "max_steps: 2" in text
        and "# usual for lora" in text
    )
    shown = type_("init", "model=demo:tiny-llama", "data=demo:docstrings", "mine.yaml")
    assert shown.code == 2 and "there already" in shown.err and "--overwrite" in shown.err
    assert (tmp_path / "mine.yaml").read_text() == text
    again = (
        "init",
        "model=demo:tiny-llama",
        "data=demo:docstrings",
        "max_steps=3",
        "mine.yaml",
        "--overwrite",
    )
    assert type_(*again).code == 0 and "max_steps: 3" in (tmp_path / "mine.yaml").read_text()
    (tmp_path / "folder.yaml").mkdir()
    assert "a folder" in type_(*again[:-2], "folder.yaml", "--overwrite").err


def test_script_prints_a_job(type_: Type) -> None:
    shown = type_("script", "llama_lora", "parallel=dp", "--slurm", "nodes=2")
    assert shown.out.startswith("#!/bin/bash\n#SBATCH --job-name=llama_lora\n#SBATCH --nodes=2\n")
    assert type_("script", "llama_lora", "nodes=2").code == 2
    assert type_("script", "--slurm", "nodes=2").code == 2


def test_convert_writes_a_recipe_and_lists_what_is_not_in_it(type_: Type, tmp_path: Path) -> None:
    Path("axolotl.yml").write_text("base_model: org/m\nadapter: lora\nload_in_8bit: true\n")
    assert "data=rows.csv" in type_("convert", "axolotl.yml").err
    shown = type_("convert", "axolotl.yml", "data=org/rows", "--out", "mine.yaml")
    assert "not in it: load_in_8bit: True" in shown.out
    assert "not looked at" in type_("check", "mine.yaml").out
    assert (
        type_("convert", "axolotl.yml", "data=org/rows", "-o", "mine.yaml")
        .err.strip()
        .endswith("petune convert FILE -o NAME.yaml")
    )
    assert type_("convert", "axolotl.yml", "data=other/rows", "-o", "mine.yaml", "--overwrite").code == 0
    assert "other/rows" in (tmp_path / "mine.yaml").read_text()
    shown = type_("convert", "axolotl.yml", "data=org/rows", "--json", "--from", "axolotl")
    assert json.loads(shown.out)["left"][0]["key"] == "load_in_8bit"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("model=demo:tiny-llama",), "data must be given"),
        ((), "model and data must be given"),
        (("model=m", "data=d", "mine.txt"), "a .yaml file"),
        (("model=m", "data=d", "no/mine.yaml"), "no such folder"),
        (("model=./m", "data=d"), "no model at"),
    ],
)
def test_init_refuses_before_it_writes(
    words: tuple[str, ...], said: str, type_: Type, tmp_path: Path
) -> None:
    shown = type_("init", *words)
    assert shown.code in (2, 4) and said in shown.err
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ Check


def test_init_and_check_say_the_task_and_the_columns_that_are_not_used(type_: Type, tmp_path: Path) -> None:
    rows = "".join(f"{at},red sun {at},{'good' if at % 2 else 'bad'}\n" for at in range(20))
    (tmp_path / "rows.csv").write_text(f"id,Text,Label\n{rows}")
    drafted, checked = (
        type_("init", "model=demo:tiny-llama", "data=rows.csv"),
        type_("check", "model=demo:tiny-llama", "data=rows.csv"),
    )
    assert drafted.code == checked.code == 0
    for shown in (drafted.out, checked.out):
        assert "for task classify" in shown and "columns not used: id\n" in shown


@pytest.mark.parametrize(("more", "told"), [((), True), (("task=mlm",), False)])
def test_init_says_what_texts_without_labels_are_for(
    more: tuple[str, ...], told: bool, type_: Type, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"red sun {at}\n" for at in range(20)))
    shown = type_("init", "model=demo:minilm", "data=rows.csv", *more)
    assert shown.code == 0 and "for task mlm" in shown.out
    assert ("no column is a label" in shown.out) == told


def test_check_of_a_good_recipe_is_one_line(type_: Type) -> None:
    shown = type_("check", "llama_lora")
    assert (shown.code, shown.out.count("\n")) == (0, 1)


def test_check_shows_every_mistake_and_writes_nothing(type_: Type, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(
        "model: demo:tiny-llama\ndata: demo:docstrings\nmethod: {name: lora, rank: 4}\nepoch: 2\n"
    )
    shown = type_("check", "bad.yaml")
    assert shown.code == 2
    assert "bad.yaml:3" in shown.err
    assert "bad.yaml:4" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.yaml"]


def test_check_full_prints_a_recipe_that_checks(type_: Type, tmp_path: Path) -> None:
    (tmp_path / "full.yaml").write_text(type_("check", "llama_side", "--full").out)
    assert type_("check", "full.yaml").code == 0


def test_check_schema_prints_the_schema(type_: Type) -> None:
    assert json.loads(type_("check", "--schema").out) == json_schema()


def test_data_shows_the_lines_it_gets(type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "petune.preflight.inputs.preview",
        lambda recipe, n: SimpleNamespace(facts=(recipe.model,), examples=(str(n),)),
    )
    assert type_("data", "llama_lora", "-n", "5").out == "demo:tiny-llama\n\n5\n"


def test_data_marks_what_is_trained_in_the_real_rows(type_: Type) -> None:
    shown = type_("data", "llama_lora", "-n", "1").out
    assert "trained tokens" in shown and "[[" in shown and "domain_train.jsonl:" in shown


def test_data_for_programs_has_the_counts_and_the_rows(type_: Type) -> None:
    found = json.loads(type_("data", "llama_lora", "data.max_rows=40", "-n", "1", "--json").out)
    assert found["rows"] > 0 and 0 < found["trained"] <= found["tokens"]
    assert found["task"] == "causal" and len(found["examples"]) == 1 and "[[" in found["examples"][0]


def test_eval_sets_the_run_beside_its_base(type_: Type, run_folder: FakeRun) -> None:
    lines = type_("eval", "runs/mine").out.splitlines()
    assert [line.split() for line in lines[:2]] == [
        ["metric", "base", "tuned"],
        ["accuracy", "0.5000", "0.8750"],
    ]
    assert lines[-2:] == ["note     too few", "WARNING  too good"]


def test_eval_scores_generated_answers_and_keeps_them(
    type_: Type, run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def answer(run: Any, count: int, metrics: Any) -> dict[str, Any]:
        asked.append((count, metrics))
        return {"rows": [{}] * count, "scores": {"base": {"chrf": 0.25}, "tuned": {"chrf": 0.5}}}

    monkeypatch.setattr("petune.run.answers.before_and_after", answer)
    lines = type_("eval", "runs/mine", "--answers", "3", "--metric", "chrf").out.splitlines()
    assert [line.split() for line in lines[:2]] == [["metric", "base", "tuned"], ["chrf", "0.2500", "0.5000"]]
    assert asked == [(3, ["chrf"])] and lines[2].startswith("3 held-out rows")
    assert json.loads((run_folder.folder / "answers.json").read_text())["scores"]["tuned"] == {"chrf": 0.5}
    shown = type_("eval", "runs/mine", "--metric", "chrf")
    assert shown.code == 2 and "add --answers N" in shown.err


# ------------------------------------------------------------------ Ship


@pytest.mark.parametrize("verb", [["merge"], ["export", "--to", "peft"], ["eval"]])
def test_a_runs_method_stands_and_a_setting_of_it_is_refused(
    type_: Type, run_folder: FakeRun, verb: list[str]
) -> None:
    found = type_(*verb, str(run_folder.folder), "method.r=99")
    assert found.code == 2 and "a run keeps the method that it was trained with" in found.err
    assert "method.r=99" in found.err and "petune train" in found.err


def test_merge_and_export_say_where_they_wrote(type_: Type, run_folder: FakeRun) -> None:
    assert type_("merge", "runs/mine").out.startswith(str(run_folder.folder / "merged"))
    assert type_("merge", "runs/mine", "--out", "there").out.startswith("there\n")
    assert (
        "load it with transformers.AutoModelForCausalLM.from_pretrained('there')"
        in type_("merge", "runs/mine", "--out", "there").out
    )
    assert "peft.PeftModel" in type_("export", "runs/mine", "--to", "peft").out
    assert "use_safetensors=True" in type_("export", "runs/mine", "--to", "adapters").out
    four = type_("export", "runs/mine", "--to", "bitsandbytes").out
    assert four.startswith(str(run_folder.folder / "bitsandbytes")) and "ForCausalLM.from_pretrained(" in four
    assert type_("export", "runs/mine", "--to", "hf").out.startswith(str(run_folder.folder / "hf"))
    assert "vllm serve" in type_("export", "runs/mine", "--to", "vllm").out


def test_generate_answers_one_prompt_whatever_it_looks_like(type_: Type, run_folder: FakeRun) -> None:
    assert type_("generate", "runs/mine", "a=b", "batch_size=2").out == "b=a\n"
    assert run_folder.calls == [("a=b", {})]
    assert run_folder.recipe.batch_size == 2


def test_generate_passes_only_the_options_that_were_given(type_: Type, run_folder: FakeRun) -> None:
    type_("generate", "runs/mine", "x", "--max-new-tokens", "7", "--temperature", "0.5")
    type_("generate", "runs/mine", "x", "--temperature", "0")
    assert [options for _, options in run_folder.calls] == [
        {"max_new_tokens": 7, "temperature": 0.5},
        {"temperature": 0.0},
    ]


def test_generate_reads_a_prompt_from_a_pipe(
    type_: Type, run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert type_("generate", "runs/mine").out == "senil\nowt\n"


def test_merge_and_export_replace_only_when_told(type_: Type, run_folder: FakeRun) -> None:
    shown = type_("merge", "runs/mine", "--overwrite")
    assert "merged 8 layers" in shown.out.splitlines()[1]
    type_("export", "runs/mine", "--to", "peft", "--out", "there", "--overwrite")
    type_("export", "runs/mine", "--to", "hf")
    assert run_folder.calls == [("merge", None, True), ("peft", Path("there"), True), ("hf", None, False)]


def test_merge_passes_how_it_rounds_on(type_: Type, run_folder: FakeRun) -> None:
    type_("merge", "runs/mine", "--dtype", "bf16", "--rounding", "stochastic", "--seed", "7")
    type_("merge", "runs/mine", "--rounding", "stochastic")
    assert run_folder.calls == [
        ("merge bf16", None, False),
        ("stochastic", 7),
        ("merge", None, False),
        ("stochastic", None),
    ]


@pytest.mark.parametrize(
    "words", [("eval",), ("merge",), ("export", "--to", "hf"), ("generate", "x"), ("chat",)]
)
def test_every_verb_that_loads_a_run_can_verify_its_base(
    type_: Type, run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/quit\n/quit\n"))
    verb, *rest = words
    assert type_(verb, "runs/mine", *rest).code == 0
    assert not run_folder.verify_base
    assert type_(verb, "runs/mine", *rest, "--verify-base").code == 0
    assert run_folder.verify_base


def test_generate_writes_a_file_of_answers_once(type_: Type, run_folder: FakeRun, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab"}\n"cd"\n\n{"text": "ü", "label": 1}\n')
    words = ("generate", "runs/mine", "--file", "in.jsonl", "--out", "out.jsonl")
    assert type_(*words).code == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert rows == [
        {"prompt": "ab", "output": "ba"},
        {"prompt": "cd", "output": "dc"},
        {"prompt": "ü", "output": "ü"},
    ]
    again = type_(*words)
    assert again.code == 2 and "--overwrite" in again.err
    assert type_("generate", "runs/mine", "x", "--out", "other.jsonl").code == 2
    (tmp_path / "in.jsonl").write_text('"new"\n')
    assert type_(*words, "--overwrite").code == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["output"] == "wen"


@pytest.mark.parametrize(
    ("out", "says"),
    [("nodir/x.jsonl", "no such folder"), ("here", "a folder"), ("in.txt", "replace the prompts")],
)
def test_generate_refuses_a_place_it_cannot_write_before_it_answers(
    type_: Type, run_folder: FakeRun, tmp_path: Path, out: str, says: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "in.txt").write_text("one\n")
    shown = type_("generate", "runs/mine", "--file", "in.txt", "--out", out, "--overwrite")
    assert shown.code == 2 and says in shown.err
    assert run_folder.calls == [] and (tmp_path / "in.txt").read_text() == "one\n"


def test_answers_are_kept_when_a_later_prompt_fails(
    type_: Type, run_folder: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(prompt: str, **_: Any) -> str:
        if prompt == "bad":
            raise UsageError("too long")
        return prompt.upper()

    monkeypatch.setattr(run_folder, "generate", ask)
    (tmp_path / "in.txt").write_text("one\nbad\nthree\n")
    (tmp_path / "old.jsonl").write_text("old\n")
    assert type_("generate", "runs/mine", "--file", "in.txt", "--out", "out.jsonl").code == 2
    assert (tmp_path / "out.jsonl").read_text() == '{"prompt": "one", "output": "ONE"}\n'
    (tmp_path / "in.txt").write_text("bad\n")
    assert type_("generate", "runs/mine", "--file", "in.txt", "--out", "old.jsonl", "--overwrite").code == 2
    assert (tmp_path / "old.jsonl").read_text() == "old\n"


def test_a_bad_file_of_prompts_names_its_first_ten_lines(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "fine"}\n' + '{"nothing": 1}\n' * 6 + "{broken\n" * 6)
    with pytest.raises(DataError) as caught:
        read_prompts(file)
    places = [problem.where for problem in caught.value.problems]
    assert places == [*(f"{file}:{line}" for line in range(2, 12)), str(file)]
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    file.write_text("\n \n")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(file)


@pytest.mark.parametrize("name", ["ask.csv", "ask.TSV", "ask.parquet"])
def test_a_table_is_no_file_of_prompts(name: str, type_: Type, run_folder: FakeRun, tmp_path: Path) -> None:
    (tmp_path / name).write_text('text,label\n"good, or not",a\n')
    shown = type_("generate", "runs/mine", "--file", name)
    assert shown.code == 2 and "one prompt a line, or JSONL" in shown.err and run_folder.calls == []


def test_an_empty_prompt_is_refused(
    type_: Type, run_folder: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type_("generate", "runs/mine", "").code == type_("generate", "runs/mine", " \n").code == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert "the prompt is empty" in type_("generate", "runs/mine").err and run_folder.calls == []
    (tmp_path / "in.jsonl").write_text('{"prompt": "fine"}\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"in.jsonl:2  has an empty prompt"):
        read_prompts(tmp_path / "in.jsonl")


def test_plain_text_is_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    assert read_prompts(tmp_path / "in.txt") == ["one", "two"]


def test_chat_obeys_its_commands_through_a_pipe(
    type_: Type, run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "abc\n/base\nabc\n\n/base\n/nonsense\n/reset\nxy\n/quit\nunheard\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    shown = type_("chat", "runs/mine", "--max-new-tokens", "5")
    assert shown.out.splitlines() == [
        "cba",
        "(the untouched base answers)",
        "ABC",
        "(the tuned model answers)",
        "(/nonsense is no command: /base, /reset, /quit)",
        "(forgotten)",
        "yx",
    ]
    assert run_folder.session.heard == ["xy"]
    assert run_folder.calls == [("chat", {"max_new_tokens": 5})]


def test_a_line_that_cannot_be_answered_does_not_end_a_chat(
    type_: Type, run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(line: str) -> Iterator[str]:
        if "\udcff" in line:
            raise UsageError("the prompt is not UTF-8", remedy="convert it")
        yield line.upper()

    monkeypatch.setattr(run_folder.session, "ask", ask, raising=False)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ab\n\xff\ncd\n"), encoding="utf-8"))
    shown = type_("chat", "runs/mine")
    assert (shown.out, shown.code) == (
        "AB\nCD\n",
        2,
    ) and shown.err == "the prompt is not UTF-8\n   convert it\n"


def test_chat_ends_with_its_input(type_: Type, run_folder: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("abc"))
    assert type_("chat", "runs/mine").code == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    shown = type_("chat", "runs/mine")
    assert (shown.code, shown.out) == (2, "") and "nobody has said anything" in shown.err
