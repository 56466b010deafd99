"""`petune check` looks at everything that needs no weights; `petune init` writes a recipe that check accepts
and train runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petune.errors import DataError, FileError, MachineError, PetuneError, RecipeError, UsageError
from petune.methods.configs import METHODS
from petune.models.loading import read_config
from petune.models.source import resolve_model
from petune.preflight.draft import draft
from petune.preflight.inputs import check_inputs
from petune.recipe import load_recipe
from petune.run.build import prepare
from tests.picture_runs import write_pictures, write_vit
from tests.small_runs import Scripted, run, settings, write_model
from tests.sound_runs import write_sounds, write_whisper


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tiny BERT and labelled rows."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", "bert")
    (tmp_path / "rows.csv").write_text(
        "text,label\n" + "".join(f"red sun {at},{'good' if at % 2 else 'bad'}\n" for at in range(20))
    )
    return tmp_path


def refused(**changes: Any) -> PetuneError:
    with pytest.raises(PetuneError) as caught:
        check_inputs(load_recipe(None, {"model": "model", "data": "rows.csv"}, changes))
    return caught.value


def test_what_is_there_is_accepted_and_no_value_of_a_weight_is_read(mine: Path) -> None:
    place = mine / "model" / "model.safetensors"
    whole = place.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    place.write_bytes(whole[:header] + b"\xff" * (len(whole) - header))  # which no run would begin with
    assert (
        check_inputs(
            load_recipe(None, {"model": "model", "data": "rows.csv", "data.eval": "rows.csv"})
        ).distant
        == ()
    )


def test_everything_that_is_wrong_is_said_at_once_with_its_place(mine: Path) -> None:
    (mine / "r.yaml").write_text("model: ./nix\ndata: ./nope.csv\nmethod: lora\n")
    with pytest.raises(RecipeError) as caught:
        check_inputs(load_recipe("r.yaml"))
    assert "r.yaml:1  no model at './nix'" in str(
        caught.value
    ) and "r.yaml:2  no data at './nope.csv'" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"model": "config:nix.json"}, FileError, "no model at 'nix.json'"),
        ({"model": "bert-base-uncased"}, FileError, "on the hub it is google-bert/bert-base-uncased"),
        ({"model": "t5-small"}, FileError, "on the hub it is google-t5/t5-small"),
        ({"model": "my-model"}, FileError, "a hub id, which has the form org/name"),
        ({"data.eval": "nope.csv"}, DataError, "no data at 'nope.csv'\n   found no such file or folder in "),
        ({"data.columns": {"text": "body"}}, DataError, "body"),
        ({"task": "seq2seq"}, PetuneError, "seq2seq"),
        ({"init_adapter": "nix"}, FileError, "init_adapter is not there"),
        ({"parallel": "tp:5"}, PetuneError, "parallel.tp"),
        ({"method.targets": ["quary"]}, UsageError, "targets: 'quary' matches no module"),
        ({"method.targets": ["query"], "method.also_train": "nix"}, UsageError, "'nix' matches no module"),
        ({"data.max_length": 9000}, UsageError, "data.max_length is more than the model's positions"),
        ({"data.max_length": 9000, "method.exclude": ["nix"]}, UsageError, "'nix' matches no module"),
    ],
)
def test_what_a_recipe_names_wrongly_is_found(
    changes: dict[str, Any], kind: type[PetuneError], said: str, mine: Path
) -> None:
    error = refused(**changes)
    assert isinstance(error, kind) and said in str(error)


@pytest.mark.parametrize(
    ("model", "data", "said"),
    [
        ("vit", "rows.csv", "the model reads pictures, and the rows are of format text-label"),
        ("vit", "demo:docstrings", "the model reads pictures, and the rows are of format text-label"),
        ("whisper", "pairs.jsonl", "the model reads sounds, and the rows are of format pairs"),
        ("whisper", "demo:docstrings", "the model reads sounds, and the rows are of format pairs"),
        ("model", "pictures/rows.jsonl", "the model reads texts, and the rows are of format image-label"),
        ("t5", "sounds/rows.jsonl", "the model reads texts, and the rows are of format audio-text"),
    ],
)
def test_rows_of_another_kind_than_the_model_reads_are_refused_as_train_does(
    model: str, data: str, said: str, mine: Path
) -> None:
    made = {
        "vit": lambda: write_vit(mine / "vit"),
        "whisper": lambda: write_whisper(mine / "whisper"),
        "t5": lambda: write_model(mine / "t5", "t5"),
    }
    made.get(model, lambda: None)()
    if data.startswith("pictures"):
        write_pictures(mine / "pictures")
    elif data.startswith("sounds"):
        write_sounds(mine / "sounds", 4)
    lines = [json.dumps({"source": f"red {at}", "target": f"sun {at}"}) + "\n" for at in range(8)]
    (mine / "pairs.jsonl").write_text("".join(lines))
    error = refused(model=model, data=data)
    assert said in str(error)
    with pytest.raises(UsageError) as caught:
        prepare(load_recipe(None, {"model": model, "data": data}))
    assert error.problems == caught.value.problems


def test_a_task_that_is_not_for_what_the_model_reads_is_not_refused_for_its_rows_too(mine: Path) -> None:
    write_vit(mine / "vit")
    error = refused(model="vit", task="mlm")
    assert "task mlm is not for a model that reads pictures" in str(error)
    assert all(problem.where != "data.format" for problem in error.problems)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_a_model_lacks_is_found(file: str, mine: Path) -> None:
    (mine / "model" / file).unlink()
    assert isinstance(refused(), FileError)


def test_weights_that_do_not_fill_the_model_are_found(mine: Path) -> None:
    """By their headers, without their values."""
    weights, config = (mine / "model" / name for name in ("model.safetensors", "config.json"))
    whole, fields = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[:-100])
    assert "model.safetensors  cut short" in str(refused())
    weights.write_bytes(whole)
    config.write_text(json.dumps(fields | {"num_hidden_layers": fields["num_hidden_layers"] + 1}))
    assert "the checkpoint does not fill the model it describes" in str(refused())


def test_a_shard_that_its_index_names_is_missed(mine: Path) -> None:
    (mine / "model" / "model.safetensors").rename(mine / "model" / "part-2.safetensors")
    (mine / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "part-1.safetensors"}})
    )
    assert "part-1.safetensors is not there" in str(refused())


def test_a_whole_file_is_read_and_not_the_index_beside_it(mine: Path) -> None:
    (mine / "model" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "part-1.safetensors"}})
    )
    assert check_inputs(load_recipe(None, {"model": "model", "data": "rows.csv"})).distant == ()


def test_bad_first_rows_are_named_by_line(mine: Path) -> None:
    with (mine / "rows.csv").open("a") as stream:
        stream.write('"",good\n')
    assert "rows.csv:22" in str(refused())


@pytest.mark.parametrize("key", ["model", "data", "data.eval", "init_adapter", "out"])
@pytest.mark.parametrize("text", ["${MODEL}", "/base/$MODEL", "<MODEL>/x"])
def test_a_placeholder_is_no_value(key: str, text: str) -> None:
    with pytest.raises(RecipeError, match=r"a recipe fills in no \$\{NAME\}"):
        load_recipe({"model": "m", "data": "d", "method": "lora"}, {key: text})


def test_a_pattern_that_is_no_regular_expression_is_found() -> None:
    with pytest.raises(RecipeError, match=r"method.targets: .* this is none.*\n   .* \[q, v\]"):
        load_recipe("llama_lora", ["method.targets=*_proj"])
    assert load_recipe("llama_lora", [r"method.targets=.*\.q_proj"])


def test_what_is_on_the_hub_is_left_alone_and_said(mine: Path, no_network: None) -> None:
    assert check_inputs(load_recipe(None, {"model": "org/name", "data": "rows.csv"})).distant == (
        "model org/name",
    )
    assert check_inputs(load_recipe(None, {"model": "model", "data": "org/rows"})).distant == (
        "data org/rows",
    )


def test_a_model_on_a_hub_that_cannot_be_reached_is_the_environments_fault(
    tmp_path: Path, no_network: None
) -> None:
    with pytest.raises(MachineError, match="cannot reach the hub for the model 'org/never-seen'"):
        read_config(resolve_model("org/never-seen", tmp_path))


# ------------------------------------------------------------------ init


def test_a_drafted_recipe_means_what_was_asked_for_and_passes_check(mine: Path) -> None:
    asked = load_recipe(
        None, {"model": "model", "data": "rows.csv", "seed": 3, "method.dropout": 0.1, "data.split": 0.2}
    )
    (mine / "own.yaml").write_text(draft(prepare(asked), Path("own.yaml")))
    written = load_recipe("own.yaml")
    assert check_inputs(written).distant == () and written.notes == ()
    different = {key for key, value in written.resolved().items() if value != asked.resolved()[key]}
    assert different == {"name", "task", "lr", "data", "out"}
    width = prepare(asked).config.hidden_size
    assert (written.task, written.lr, written.out) == ("classify", METHODS["lora"].lr_at(width), "runs/own")
    assert (written.data.max_length, written.data.split, written.data.path) == (64, 0.2, "rows.csv")


def test_a_recipe_drafted_elsewhere_finds_its_inputs_from_anywhere(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine / "there").mkdir()
    file = mine / "there" / "own.yaml"
    file.write_text(draft(prepare(load_recipe(None, {"model": "model", "data": "rows.csv"})), file))
    monkeypatch.chdir("/")
    assert check_inputs(load_recipe(file)).distant == ()


@pytest.mark.usefixtures("no_picture")
def test_the_readme_of_a_run_says_what_few_rows_show_and_resume_keeps_its_name(mine: Path) -> None:
    asked = load_recipe(None, {"model": "model", "data": "rows.csv", "max_steps": 2})
    (mine / "own.yaml").write_text(draft(prepare(asked), Path("own.yaml")))
    from petune.run.train import train

    finished = train("own.yaml", max_steps=1, head_only=False)
    (few,) = finished.summary["notes"]
    assert few.startswith("2 rows held out cannot show a difference") and finished.summary["warnings"] == []
    assert f"note     {few}\n" in (finished.folder / "run.log").read_text()
    readme = (finished.folder / "README.md").read_text()
    assert (
        readme.startswith("# own: ") and f"**Note:** {few}.\n" in readme and finished.eval()["notes"] == [few]
    )
    train(finished.folder, resume=True, max_steps=2, allow_change=("max_steps",))
    assert (finished.folder / "README.md").read_text().startswith("# own: ")


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(
    ("losses", "best"), [([9.0, 1.0, 0.5, 0.7, 0.4, 0.4, 0.6], 4), ([9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 1)]
)
def test_of_equal_scores_the_one_of_lower_loss_is_the_best(
    losses: list[float], best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    left = iter(losses)
    monkeypatch.setattr(
        "petune.run.loop.scored", lambda *args, **kwargs: Scripted(accuracy=0.5, loss=next(left))
    )
    recipe = settings(tmp_path, "bert", "adapter", metric="accuracy", eval_every=1, head_only=False)
    assert run(recipe).summary["best_step"] == best


@pytest.mark.forks
@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for m in messages %}{{ m['content'] }}",
            "template refuses the conversation: Unexpected",
        ),
        ("{% for m in messages %}{{ loop.length }}{{ m['content'] }}{% endfor %}", "once more turns follow"),
    ],
)
def test_a_chat_template_that_fails_is_found(template: str, said: str, mine: Path) -> None:
    write_model(mine / "talks", "llama")
    turns = [{"role": one, "content": "red sun"} for one in ("user", "assistant") * 2]
    (mine / "talks.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 4)
    chat = {"model": "talks", "data": "talks.jsonl", "task": "chat"}
    check_inputs(load_recipe(None, chat))
    (mine / "talks" / "chat_template.jinja").write_text(template)
    assert said in str(refused(**chat))


def test_the_held_out_rows_of_a_saved_data_set_are_looked_at(mine: Path) -> None:
    import datasets

    rows = [{"text": f"red sun {at}", "label": "ab"[at % 2]} for at in range(8)]
    for name, held_out in (("good", rows[:2]), ("bad", [{"body": "red sun"}])):
        splits = {
            "train": datasets.Dataset.from_list(rows),
            "validation": datasets.Dataset.from_list(held_out),
        }
        datasets.DatasetDict(splits).save_to_disk(mine / name)
    assert check_inputs(load_recipe(None, {"model": "model", "data": "good"})).distant == ()
    assert "bad/validation:1  there is no column 'text'" in str(refused(data="bad"))


def test_the_own_held_out_rows_of_a_folder_are_left_alone_where_others_are_named(mine: Path) -> None:
    (mine / "folder").mkdir()
    (mine / "folder" / "train.csv").write_text((mine / "rows.csv").read_text())
    (mine / "folder" / "validation.csv").write_text("body\nred sun\n")
    assert "validation.csv:2  there is no column 'text'" in str(refused(data="folder"))
    assert (
        check_inputs(load_recipe(None, {"model": "model", "data": "folder", "data.eval": "rows.csv"})).distant
        == ()
    )
