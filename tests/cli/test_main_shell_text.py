"""Text that a shell would run, in every string of a recipe, in paths, names, rows and prompts: nothing runs
it or starts a process."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petune.errors import RecipeError
from petune.recipe import Recipe, load_recipe
from tests.cli.conftest import Type
from tests.small_runs import as_yaml, settings, write_model

SHELL = (
    "$(touch OWNED)",
    "`touch OWNED`",
    "; touch OWNED",
    "| sh -c 'touch OWNED'",
    "&& touch OWNED #",
    "\ntouch OWNED\n",
    "%(x)s{0}",
)
ALL = "x" + "".join(SHELL).replace("\n", " ")


@pytest.fixture(autouse=True)
def _nothing_starts(tmp_path: Path, started: list[str]) -> Iterator[None]:
    """No program is started, which a fork of this process is not, and no file of that name is made."""
    yield
    assert [one for one in started if "fork" not in one.partition(" ")[0]] == []
    assert list(tmp_path.rglob("OWNED*")) == [] and not Path("OWNED").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("no_picture")
def test_a_run_whose_every_name_is_shell_text_only_trains(type_: Type, tmp_path: Path):
    name = ALL.replace("/", "")
    model, rows, out = (
        write_model(tmp_path / f"m {name}", "bert"),
        tmp_path / f"d {name}.jsonl",
        f"run {name}",
    )
    texts = [
        json.loads(line)["text"]
        for line in Path(settings(tmp_path, "bert")["data"]["path"]).read_text().splitlines()
    ]
    columns = {"text": f"t {ALL}", "label": f"l {ALL}"}
    lines = (
        {columns["text"]: f"{text} {ALL}", columns["label"]: f"{number % 2} {ALL}"}
        for number, text in enumerate(texts)
    )
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "name": name,
        "model": str(model),
        "task": "classify",
        "out": out,
        "max_steps": 2,
        "warmup": 0,
        "device": "cpu",
    }
    recipe |= {
        "method": {"name": "lora", "r": 2, "targets": ["query"]},
        "data": {"path": str(rows), "columns": columns, "prefix": ALL},
    }
    file = as_yaml(tmp_path / f"r {name}.yaml", recipe | {"lr": 1e-3})
    for words in (
        ["check", str(file)],
        ["plan", str(file)],
        ["data", str(file)],
        ["train", str(file)],
        ["eval", out],
        ["merge", out],
    ):
        shown = type_(*words)
        assert shown.code == 0, (words[0], shown.err)
    assert type_("export", out, "--to", "peft").code == 0
    for text in SHELL:
        assert type_("generate", out, text).out.strip()[2:] == ALL


def strings(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every setting that may hold a text."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from strings(inner, (*path, key))
        elif not isinstance(inner, bool | int | float):
            yield (*path, key)


FIELDS = [".".join(path) for path in strings(load_recipe("llama_lora").resolved())]


def test_the_fields_are_those_of_the_schema():
    assert {field.partition(".")[0] for field in FIELDS} <= set(Recipe.model_fields) and len(FIELDS) > 25


def test_shell_text_in_a_setting_is_a_text_or_refused(type_: Type):
    """What is refused as it is read goes no further; the other settings are checked as a user would."""
    taken = []
    for field in FIELDS:
        setting = f"{field}={json.dumps(ALL)}"
        try:
            load_recipe("llama_lora", [setting])
        except RecipeError:
            continue
        taken.append(field)
        shown = type_("check", "llama_lora", setting)
        assert shown.code in (0, 2, 3, 4) and "Traceback" not in shown.err + shown.out, (field, shown.err)
    assert {
        "name",
        "model",
        "out",
        "data.path",
        "data.eval",
        "data.prefix",
        "data.separator",
        "init_adapter",
    } <= set(taken)


def test_a_process_would_be_noticed(started: list[str]):
    subprocess.run(["true"], check=True)
    assert started and started[0].startswith("subprocess.Popen")
    started.clear()
