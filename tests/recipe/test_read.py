"""What a recipe file may say, what it becomes, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petune.errors import RecipeError
from petune.kernels.configs import KEEPS, MemoryConfig
from petune.methods.configs import METHODS, AdapterConfig, FullConfig, LoraConfig, SideConfig
from petune.parallel.configs import BACKENDS
from petune.recipe import (
    KEYS_THAT_CHANGE_NUMBERS,
    Recipe,
    demo_recipe,
    differences,
    find_recipe,
    json_schema,
    load_recipe,
    recipe_folder,
    shipped_recipes,
)
from petune.recipe.check import _EXAMPLES
from petune.recipe.rules import METRICS
from petune.recipe.suggest import ALIASES
from petune.recipe.yaml_lines import _read, _read_fast, read, scalar, write_scalar
from petune.tasks.configs import DataConfig
from tests.recipe.examples import drawn
from tests.written_recipes import GOOD, problems_of, write
from tests.wrong_recipes import WRONG

# ----------------------------------------------------------------------------------------------- good recipes


def test_model_data_and_method_suffice(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD))
    assert (recipe.model, recipe.data.path, recipe.method, recipe.method_name) == (
        "demo:minilm",
        "demo:docstrings",
        LoraConfig(),
        "lora",
    )
    assert (recipe.version, recipe.task, recipe.epochs, recipe.source, recipe.folder) == (
        1,
        None,
        1.0,
        tmp_path / "r.yaml",
        tmp_path,
    )
    assert recipe.lines == {"model": 1, "data": 2, "method": 3}


def test_sections_may_be_mappings_and_every_line_is_kept(tmp_path: Path) -> None:
    text = (
        "model: m\ndata:\n  path: a.jsonl\n  columns: {text: body}\nmethod:\n  name: lora\n  r: 8\n "
        " targets:\n  - q\n  - v\nlr: 1e-4\n"
    )
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.method == LoraConfig(r=8, targets=("q", "v"))
    assert recipe.data.columns == {"text": "body"}
    assert {
        "data.path": 3,
        "data.columns.text": 4,
        "method.r": 7,
        "method.targets[1]": 10,
        "lr": 11,
    }.items() <= recipe.lines.items()
    assert recipe.where("method.r").endswith("r.yaml:7")
    assert recipe.where("method.alpha").endswith("r.yaml:5")


@pytest.mark.parametrize("config", [FullConfig, LoraConfig, AdapterConfig, SideConfig])
def test_every_method_has_its_config_and_usual_learning_rate(tmp_path: Path, config: type) -> None:
    name = config.__name__.removesuffix("Config").lower()
    recipe = load_recipe(write(tmp_path, GOOD), [f"method={name}"])
    assert isinstance(recipe.method, config) and recipe.method_name == name
    assert recipe.learning_rate == METHODS[name].usual_lr
    assert load_recipe(recipe, ["lr=3e-3"]).learning_rate == 3e-3


def test_a_recipe_is_frozen_and_its_folder_and_lines_are_no_keys(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, GOOD))
    with pytest.raises(ValueError, match="frozen"):
        recipe.epochs = 3
    assert any(
        "source is not a setting" in problem for problem in problems_of(write(tmp_path, GOOD + "source: x\n"))
    )


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *[("1e-4", 1e-4), ("012", 12), ("-7", -7), ("+7", 7), (".5", 0.5), ("2.", 2.0), ("1E3", 1000.0)],
        *[("no", "no"), ("on", "on"), ("yes", "yes"), ("off", "off"), ("true", True), ("False", False)],
        *[
            ("12:30:45", "12:30:45"),
            ("1_000", "1_000"),
            ("0x1f", "0x1f"),
            ("2024-01-01", "2024-01-01"),
            ("nan", "nan"),
            ("inf", "inf"),
        ],
        *[("null", None), ("~", None), ("", None), ("=", "="), ("1e", "1e"), ("9" * 301, float("9" * 301))],
    ],
)
def test_plain_words_mean_what_yaml_1_2_says(word: str, value: object) -> None:
    found = scalar(word)
    assert found == value and type(found) is type(value)
    if word and word != "=":
        assert read(f"a: {word}", "r").tree == {"a": value}
        assert read(f"a: '{word}'", "r").tree == {"a": word}


@pytest.mark.parametrize(
    "text",
    [b"\xef\xbb\xbf" + GOOD.encode(), GOOD.replace("\n", "\r\n").encode(), GOOD.replace("\n", "\r").encode()],
)
def test_byte_order_mark_and_foreign_line_ends_are_read(tmp_path: Path, text: bytes) -> None:
    assert load_recipe(write(tmp_path, text)).lines == {"model": 1, "data": 2, "method": 3}


# -------------------------------------------------------------------------------------------------- overrides


def test_overrides_follow_the_same_rules_and_later_ones_win(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    recipe = load_recipe(
        file,
        [
            "lr=1e-4",
            "method.r=4",
            "method.r=8",
            "method.targets=[q, v]",
            "data=*.jsonl",
            "compile=true",
            "out=",
        ],
    )
    assert (recipe.lr, recipe.method, recipe.data.path) == (
        1e-4,
        LoraConfig(r=8, targets=("q", "v")),
        "*.jsonl",
    )
    assert (recipe.compile, recipe.out, recipe.where("method.r"), recipe.lines) == (
        True,
        None,
        "command line",
        {"model": 1, "method": 3},
    )


def test_a_method_setting_keeps_the_method_and_a_method_replaces_it(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD.replace("method: lora", "method: {name: lora, r: 4, alpha: 2}"))
    assert load_recipe(file, ["method.r=8"]).method == LoraConfig(r=8, alpha=2)
    assert load_recipe(file, ["method=adapter"]).method == AdapterConfig()
    assert load_recipe(file, ["method=lora"]).method == LoraConfig()
    assert load_recipe(file, ["method=side", "method.reduction=4"]).method == SideConfig(reduction=4)


def test_prefix_and_separator_on_the_command_line_keep_their_white_space(tmp_path: Path) -> None:
    given = ["data.prefix=summarize: ", "data.separator=\nAnswer: ", "lr= 1e-4 ", "method= lora "]
    recipe = load_recipe(write(tmp_path, GOOD), given)
    assert (recipe.data.prefix, recipe.data.separator) == ("summarize: ", "\nAnswer: ")
    assert (recipe.lr, recipe.method) == (1e-4, LoraConfig())


def test_python_arguments_are_overrides_too(tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, GOOD),
        {"epochs": 2, "method": {"name": "lora", "targets": ["q"]}, "out": tmp_path, "data.max_length": 9},
    )
    assert (recipe.epochs, recipe.method, recipe.out) == (2.0, LoraConfig(targets=("q",)), str(tmp_path))
    assert recipe.data.max_length == 9
    assert problems_of(recipe, {"epochs": 10**5000})[0].startswith("argument  epochs")
    assert load_recipe({"model": "m", "data": "d", "method": "full"}).source is None
    assert problems_of({"model": "m", "data": "d"})[0].startswith("argument  method is missing")


def test_wrong_overrides_say_command_line_and_suggest(tmp_path: Path) -> None:
    found = problems_of(
        write(tmp_path, GOOD),
        ["method.rank=8", "epochs=ten", "nonsense", "lr.x=1", "=3", "method.targets=[q"],
    )
    text = "\n".join(found)
    assert "command line  method.rank is not a setting of lora\n   did you mean: method.r" in text
    assert "command line  epochs does not take this value\n   expected a number" in text
    assert (
        "command line  'nonsense' is not an override" in text
        and "command line  '=3' is not an override" in text
    )
    assert "command line  lr does not take this value" in text
    assert "command line  method.targets: not YAML" in text


# -------------------------------------------------------------------------------------------- paths and names


def test_inputs_are_found_beside_the_recipe_then_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    for folder, name in ((there, "both"), (here, "both"), (here, "mine")):
        (folder / name).write_text("")
    monkeypatch.chdir(here)
    recipe = load_recipe(write(there, GOOD), ["data=both", "data.eval=mine", "model=org/name"])
    assert recipe.resolve_path("both") == there / "both"
    assert recipe.resolve_path("mine") == Path("mine")
    assert (
        recipe.resolve_path("neither") is recipe.resolve_path("x" * 9999) is recipe.resolve_path("\0") is None
    )
    values = recipe.resolved()
    assert (values["data"]["path"], values["data"]["eval"], values["model"]) == (
        str(there / "both"),
        str(here / "mine"),
        "org/name",
    )


def test_every_path_of_a_recipe_may_begin_with_a_home_that_is_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = ["model", "data.path", "data.eval", "init_adapter", "cache_folder", "rows_cache", "out"]
    written = {"method": {"name": "side"}, "cache": True, "data": {"path": "", "eval": ""}, "model": ""}
    recipe = load_recipe(written, {key: "~/here" for key in keys}, {"model": "config:~/c.json"})
    places = [recipe.model, recipe.data.path, recipe.data.eval, recipe.init_adapter, recipe.cache_folder]
    assert places[0] == f"config:{tmp_path}/c.json"
    assert {*places[1:], recipe.rows_cache, recipe.out} == {f"{tmp_path}/here"}
    assert load_recipe(recipe).out == f"{tmp_path}/here"
    problems = problems_of({**written, "data": "rows.csv"}, {key: "~nobody-at-all/x" for key in keys})
    assert [problem.partition(":")[0] for problem in problems] == [f"argument  {key}" for key in keys]


def test_a_shipped_recipe_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bert_lora", "bert_lora.yaml", "recipes/bert_lora.yaml"):
        assert find_recipe(name) == recipe_folder() / "bert_lora.yaml"
    assert {"bert_lora", "bert_lora_tp"} <= {file.stem for file in shipped_recipes()}
    with pytest.raises(RecipeError, match="did you mean: bert_lora"):
        find_recipe("bert_lore")
    with pytest.raises(RecipeError, match="is a folder"):
        find_recipe(tmp_path)
    write(tmp_path, GOOD, "bert_lora.yaml")
    assert find_recipe("bert_lora.yaml") == Path("bert_lora.yaml")


@pytest.mark.parametrize(
    ("default", "recipe"), [("minilm", "bert_lora.yaml"), ("tiny-llama", "llama_lora.yaml")]
)
def test_no_recipe_means_the_demo_recipe(monkeypatch: pytest.MonkeyPatch, default: str, recipe: str) -> None:
    monkeypatch.setattr("petune.recipe.read.default_model", lambda: default)
    assert demo_recipe().name == recipe
    assert load_recipe(None).source == demo_recipe()


# --------------------------------------------------------------------------------------- writing and resuming


def test_what_a_recipe_writes_reads_back_as_itself(tmp_path: Path) -> None:
    overrides = [
        "method.targets=[q, v]",
        "class_weights={no: 2, 'a: b': 1.5}",
        "task=classify",
        "data.prefix='x: \\n'",
        "trackers=[tensorboard]",
    ]
    recipe = load_recipe(write(tmp_path, GOOD), overrides)
    text = recipe.to_yaml()
    again = load_recipe(write(tmp_path, text, "resolved.yaml"))
    assert again.resolved() == recipe.resolved()
    assert again.to_yaml().partition("\n")[2] == text.partition("\n")[2]
    assert all("  # " in line for line in text.splitlines()[1:])


@pytest.mark.slow
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        st.lists,
        max_leaves=5,
    )
)
@drawn(150)
def test_any_value_survives_being_written(value: object) -> None:
    def as_tuple(item: object) -> object:
        return tuple(as_tuple(one) for one in item) if isinstance(item, list) else item

    document = read(f"a: {write_scalar(value)}  # comment", "r")
    assert not document.problems and document.tree == {"a": as_tuple(value)}


@given(
    st.lists(
        st.sampled_from(
            ["a: ", "\nb: ", "\n  ", "\n- ", "\n", " ", ":", ",", "# c", "---\n", "...", "%", "? ", "~"]
        )
        | st.sampled_from(
            [*"[]{}'\"\\&*!@`-1xk", "''", "\\x41", "\\n", "1e-4", "x:y", "{a: 1}", "[b, 2]", '"q": ']
        ),
        max_size=12,
    ).map("".join)
)
@drawn(300)
def test_both_parsers_of_yaml_read_the_same(text: str) -> None:
    fast = _read_fast(text, "r")
    assert fast is None or fast == _read(text, "r")


def test_a_recipe_is_read_by_the_fast_parser() -> None:
    text = load_recipe("bert_lora").to_yaml()
    assert _read_fast(text, "r") == _read(text, "r")
    assert _read_fast("a: |\n b", "r") is None  # block texts are where the two differ
    assert _read_fast("a: é", "r") is None and read("a: é", "r").tree == {"a": "é"}


def test_resume_compares_what_changes_the_numbers(tmp_path: Path) -> None:
    old = load_recipe(write(tmp_path, GOOD)).resolved()
    new = load_recipe(
        write(tmp_path, GOOD),
        [
            "lr=1e-3",
            "method.r=8",
            "out=x",
            "keep=5",
            "trackers=[wandb]",
            "device=cpu",
            "parallel.tp=2",
            "kernels=off",
        ],
    ).resolved()
    assert differences(old, new) == [("method.r", 16, 8), ("lr", None, 1e-3)]
    assert differences(old, new, allow=["method"]) == [("lr", None, 1e-3)]
    assert differences(old, old) == []
    assert (
        {"lr", "seed", "batch_size", "data", "method"}
        <= set(KEYS_THAT_CHANGE_NUMBERS)
        <= set(Recipe.model_fields)
    )


def test_a_moved_folder_is_no_change_but_another_file_is() -> None:
    def at(path: str) -> dict[str, Any]:
        return load_recipe({"model": "m", "data": path, "method": "lora"}).resolved()

    assert differences(at("/a/rows.jsonl"), at("/b/rows.jsonl")) == []
    assert differences(at("/a/rows.jsonl"), at("/a/other.jsonl")) == [
        ("data.path", "/a/rows.jsonl", "/a/other.jsonl")
    ]


def test_the_json_schema_names_every_setting() -> None:
    schema = json_schema()
    assert set(schema["properties"]) == set(Recipe.model_fields)
    assert schema["required"] == ["model", "data", "method"]
    short, *methods = schema["properties"]["method"]["anyOf"]
    assert (
        short["enum"]
        == [one["properties"]["name"]["const"] for one in methods]
        == ["full", "lora", "dora", "ia3", "miss", "adapter", "side", "head"]
    )
    assert schema["properties"]["data"]["anyOf"][1]["required"] == ["path"]
    keeps, memory = schema["properties"]["memory"]["anyOf"]
    assert keeps["enum"] == [*KEEPS, None] and set(memory["properties"]) == {
        entry.name for entry in dataclasses.fields(MemoryConfig)
    }
    names, axes = schema["properties"]["parallel"]["anyOf"]
    assert names["enum"] == ["none", "auto", *BACKENDS, None] and set(axes["properties"]) == set(BACKENDS)
    for name, config in BACKENDS.items():
        size, settings = axes["properties"][name]["anyOf"]
        assert size["type"] == ["integer", "null"]
        assert set(settings["properties"]) == {entry.name for entry in dataclasses.fields(config)}
    assert methods[1]["properties"]["r"] | {"minimum": 1, "default": 16} == methods[1]["properties"]["r"]


def test_every_example_of_documents_and_messages_is_accepted() -> None:
    root = Path(__file__).parents[2]
    pages = [root / name for name in ("README.md", "docs/recipes.md", "docs/data.md", "docs/parallel.md")]
    blocks = [
        block for page in pages for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    ]
    lines = [line for block in (*blocks, *_EXAMPLES.values()) for line in block.splitlines()]
    alone = [line for line in lines if re.match(r"(parallel|memory|data|method): ", line)]
    assert len(alone) > 15
    for line in alone:
        clip = {"clip": None} if "stream" in line else {}
        load_recipe({"model": "m", "data": "d", "method": "full"}, read(line, "example").tree | clip)


def test_aliases_lead_to_settings_that_exist() -> None:
    for target in ALIASES.values():
        assert " " in target or target in {*_every_key(), "data", "method"}, target


def test_the_metric_table_is_that_of_the_tasks() -> None:
    from petune import tasks

    assert METRICS.keys() == tasks.TASKS.keys()


def _every_key() -> set[str]:
    inner = {f"data.{entry.name}" for entry in dataclasses.fields(DataConfig)}
    inner |= {f"memory.{entry.name}" for entry in dataclasses.fields(MemoryConfig)}
    for method in METHODS.values():
        inner |= {f"method.{entry.name}" for entry in dataclasses.fields(method.config)}
    for name, axis in BACKENDS.items():
        inner |= {
            f"parallel.{name}",
            *(f"parallel.{name}.{entry.name}" for entry in dataclasses.fields(axis)),
        }
    return {*Recipe.model_fields, *inner}


# ---------------------------------------------------------------------------------------------- wrong recipes


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_recipe_is_told_where_what_and_how(name: str, tmp_path: Path) -> None:
    text, line, phrases = WRONG[name]
    file = write(tmp_path, text if isinstance(text, bytes) else GOOD + text)
    found = problems_of(file)
    here = [problem for problem in found if problem.startswith((f"{file}:{line}  ", f"{file}:{line}:"))]
    assert any(all(phrase in problem for phrase in phrases) for problem in here), found
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "model: 3\nepochs: ten\nlr: .nan\nbs: 4\ndata: {path: d, max_len: 8, split: 2}\nmethod: {name: lora,"
        " rank: 4, dropout: 2}\n"
    )
    file = write(tmp_path, text + "warmup: 1.5\n")
    found = problems_of(file)
    assert [int(problem.split(":")[1].split()[0]) for problem in found] == [1, 2, 3, 4, 5, 5, 6, 6, 7]
    keys = (
        "model",
        "epochs",
        "lr",
        "bs",
        "data.max_len",
        "data.split",
        "method.rank",
        "method.dropout",
        "warmup",
    )
    assert [problem.split("  ")[1].split()[0].rstrip(":") for problem in found] == list(keys)


def test_a_repeated_key_hides_no_other_problem(tmp_path: Path) -> None:
    assert len(problems_of(write(tmp_path, GOOD + "lr: x\nlr: 1e-4\nbs: 3\n"))) == 3


def test_a_value_that_could_not_be_read_is_reported_once(tmp_path: Path) -> None:
    assert len(problems_of(write(tmp_path, "model: *m\ndata: d\nmethod: lora\n"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [b"k: 1\n" * 180_000, b"".join(b"k%d: 1\n" % i for i in range(4900)), b"- " * 400_000, b"x" * 1_000_001],
)
def test_a_large_file_is_refused_quickly(tmp_path: Path, text: bytes) -> None:
    file = write(tmp_path, text)
    start = time.process_time()
    assert len(problems_of(file)) <= 101
    assert time.process_time() - start < 3


def test_what_is_no_regular_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert "not a regular file" in problems_of(tmp_path / "pipe.yaml")[0]
    assert "not a regular file" in problems_of("/dev/zero")[0]
    assert "no such file or folder" in problems_of(tmp_path / "missing.yaml")[0]
    for text in ("a\0b", "x" * 5000, "\udce9.yaml"):
        assert len(problems_of(text)) == 1


FRAGMENTS = (
    *(
        "[",
        "{",
        "}",
        "]",
        ":",
        ",",
        "-",
        "&a",
        "*a",
        "!!python/object:os.system",
        "'",
        '"',
        "|",
        ">",
        "%",
        "@",
        "?",
        "<<",
        "#",
        "---",
        "...",
    ),
    *(".nan", "1e999", "null", "~", "method", "lora", "data", "r", "\\ud800"),
)
NASTY = [
    *(one.encode() + b" " for one in FRAGMENTS),
    b"\n",
    b"\t",
    b"\0",
    b"\xff",
    b"\r",
    b"\xe2\x80\xa8",
    b"\n  ",
    b"9" * 400,
    b"a" * 2000,
]


@pytest.mark.parametrize(
    "count", [100, pytest.param(4000, marks=[pytest.mark.long, pytest.mark.timeout(600)])]
)
def test_no_bytes_whatsoever_give_anything_but_a_recipe_or_a_recipe_error(count: int, tmp_path: Path) -> None:
    whole = [file.read_bytes() for file in shipped_recipes()] + [
        GOOD.encode() + text.encode() for text, *_ in WRONG.values() if isinstance(text, str)
    ]
    rng = random.Random(count)
    for _ in range(count):
        data = bytearray(rng.choice(whole)[:2000])
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(data) + 1)
            data[place : place + rng.choice((0, 0, 1, 9))] = rng.choice(NASTY) * rng.choice((1, 1, 40))
        _judge(tmp_path, bytes(data))


@given(
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@drawn(100)
def test_random_bytes_are_judged_too(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    _judge(tmp_path_factory.getbasetemp(), data)


@given(
    st.lists(
        st.text(max_size=30)
        | st.builds("{}={}".format, st.sampled_from(sorted(_every_key())), st.text(max_size=12)),
        max_size=4,
    )
)
@drawn(100)
def test_random_overrides_are_judged_too(overrides: list[str]) -> None:
    try:
        load_recipe({"model": "m", "data": "d", "method": "lora"}, overrides)
    except RecipeError as error:
        assert str(error)


def _judge(folder: Path, data: bytes) -> None:
    file = write(folder, data, "fuzz.yaml")
    start = time.process_time()
    try:
        recipe = load_recipe(file)
    except RecipeError as error:
        assert str(error).encode() and error.problems
    else:
        assert load_recipe(write(folder, recipe.to_yaml(), "again.yaml")).resolved() == recipe.resolved()
    assert time.process_time() - start < 1


# ------------------------------------------------------------------------------------------------------- cost


def test_a_recipe_is_checked_without_torch() -> None:
    code = (
        "import sys; from petune.recipe import load_recipe; load_recipe('bert_lora'); print({'torch',"
        " 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "set()"
