"""`kernels`, `memory` and `base_dtype` in a recipe: their forms, their rules, and what a wrong one is
told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petune.errors import RecipeError, UsageError
from petune.kernels.configs import KEEPS, OFFLOADS, MemoryConfig, make_memory
from petune.recipe import KEYS_THAT_CHANGE_NUMBERS, Recipe, differences, json_schema, load_recipe
from petune.recipe.yaml_lines import write_scalar
from tests.recipe.examples import drawn
from tests.written_recipes import GOOD, problems_of, write

NEEDED = {"model": "m", "data": "d", "method": "lora"}
AUTO = MemoryConfig()


def of_text(folder: Path, text: str, overrides: Any = ()) -> Recipe:
    """The recipe of GOOD and `text`, whose first line is 4."""
    return load_recipe(write(folder, GOOD + text), overrides)


# ------------------------------------------------------------------------------------------------------ forms

FORMS: dict[str, tuple[str, MemoryConfig]] = {
    "nothing": ("", AUTO),
    "auto": ("memory: auto", AUTO),
    "an empty value": ("memory:", AUTO),
    "an empty mapping": ("memory: {}", AUTO),
    **{f"the keep {keep}": (f"memory: {keep}", MemoryConfig(keep=keep)) for keep in KEEPS},  # type: ignore[arg-type]
    "one setting": ("memory: {tile: 2048}", MemoryConfig(tile=2048)),
    "every setting": (
        (
            "memory:\n  keep: attention\n  offload: attention\n  tile: 2048\n  budget: 60\n  host: 200.5\n "
            " stream: none"
        ),
        MemoryConfig("attention", "attention", 2048, 60, 200.5, "none"),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_memory_means_its_config_and_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    text, config = FORMS[name]
    recipe = of_text(tmp_path, text)
    assert recipe.memory == config and recipe.resolved()["memory"] == asdict(config)
    again = load_recipe(write(tmp_path, recipe.to_yaml(), "resolved.yaml"))
    assert again.memory == config and again.resolved() == recipe.resolved()
    assert load_recipe(recipe.resolved()).memory == config
    assert all("  # " in line for line in recipe.to_yaml().splitlines()[1:])


def test_the_section_of_a_recipe_is_what_wrap_takes() -> None:
    for value in ("auto", "attention", {"keep": "input", "tile": 2048}, {"offload": "none", "budget": 20.0}):
        assert load_recipe({**NEEDED, "memory": value}).memory == make_memory(value)


def test_a_recipe_that_says_nothing_leaves_it_to_the_machine() -> None:
    recipe = load_recipe(NEEDED)
    assert (recipe.kernels, recipe.memory, recipe.base_dtype) == ("auto", AUTO, None)


@pytest.mark.parametrize("kernels", ["auto", "reference", "triton", "off"])
def test_kernels_and_base_dtype_read_back_as_themselves(kernels: str, tmp_path: Path) -> None:
    text = f"kernels: {kernels}\n" + ("base_dtype: fp8\n" if kernels != "off" else "")
    recipe = of_text(tmp_path, text)
    assert (recipe.kernels, recipe.base_dtype) == (kernels, None if kernels == "off" else "fp8")
    assert load_recipe(write(tmp_path, recipe.to_yaml(), "again.yaml")).resolved() == recipe.resolved()


def test_every_line_of_memory_is_kept(tmp_path: Path) -> None:
    recipe = of_text(tmp_path, "kernels: auto\nmemory:\n  keep: input\n  tile: 2048\nbase_dtype: fp8\n")
    assert {
        "kernels": 4,
        "memory": 5,
        "memory.keep": 6,
        "memory.tile": 7,
        "base_dtype": 8,
    }.items() <= recipe.lines.items()
    assert recipe.where("memory.tile").endswith(":7") and recipe.where("memory.host").endswith(":5")


@pytest.mark.parametrize(
    ("text", "overrides", "config"),
    [
        ("memory: input", ["memory=auto"], AUTO),
        ("memory: input", ["memory="], AUTO),
        ("memory: {keep: input, tile: 2048}", ["memory=attention"], MemoryConfig(keep="attention")),
        (
            "memory: {keep: input, tile: 2048}",
            ["memory.keep=attention"],
            MemoryConfig(keep="attention", tile=2048),
        ),
        ("memory: {keep: input, tile: 2048}", ["memory.tile="], MemoryConfig(keep="input")),
        ("memory: {keep: input, tile: 2048}", ["memory={budget: 20}"], MemoryConfig(budget=20)),
        ("memory: input", ["memory.offload=none"], MemoryConfig(keep="input", offload="none")),
        ("memory:", ["memory.keep=input"], MemoryConfig(keep="input")),
        ("", ["memory.keep=input", "memory.budget=20"], MemoryConfig(keep="input", budget=20)),
        ("", ["memory=input", "memory.keep=all"], MemoryConfig(keep="all")),
        ("", ["memory.tile=2048", "memory=input"], MemoryConfig(keep="input")),
        ("memory: input", {"memory": {"keep": "all"}}, MemoryConfig(keep="all")),
        ("memory: input", {"memory.budget": 20}, MemoryConfig(keep="input", budget=20)),
    ],
)
def test_overrides_set_one_setting_of_memory_or_replace_the_section(
    tmp_path: Path, text: str, overrides: Any, config: MemoryConfig
) -> None:
    assert of_text(tmp_path, text, overrides).memory == config


def test_a_run_resumes_on_other_kernels_and_memory_but_not_on_another_base() -> None:
    old = load_recipe(NEEDED).resolved()
    assert differences(old, load_recipe(NEEDED, ["kernels=off"]).resolved()) == []
    assert (
        differences(old, load_recipe(NEEDED, ["memory={keep: input, offload: input, budget: 8}"]).resolved())
        == []
    )
    assert differences(old, load_recipe(NEEDED, ["base_dtype=fp8"]).resolved()) == [
        ("base_dtype", None, "fp8")
    ]
    assert "base_dtype" in KEYS_THAT_CHANGE_NUMBERS
    full = {**NEEDED, "method": "full", "clip": None}
    old, new = (
        load_recipe({**full, "memory": memory}).resolved() for memory in ("input", {"stream": "fp32"})
    )
    assert differences(old, new) == [("memory.stream", "none", "fp32")]
    assert differences(old, new, ["memory"]) == differences(old, new, ["memory.stream"]) == []


def test_a_run_from_before_these_keys_resumes() -> None:
    new = load_recipe(NEEDED).resolved()
    old = {key: value for key, value in new.items() if key not in ("kernels", "memory", "base_dtype")}
    assert differences(old, new) == []
    assert load_recipe(old).resolved() == new
    old["memory"] = {key: value for key, value in new["memory"].items() if key != "stream"}
    assert differences(old, new) == []


def test_the_schema_takes_the_short_form_and_the_settings_with_their_ranges() -> None:
    short, section = json_schema()["properties"]["memory"]["anyOf"]
    assert short["enum"] == [*KEEPS, None]
    assert section["properties"]["offload"]["enum"] == list(OFFLOADS)
    assert {"minimum": 128, "type": "integer"}.items() <= section["properties"]["tile"]["anyOf"][0].items()
    assert not section["additionalProperties"] and "required" not in section
    assert json_schema()["properties"]["memory"]["default"] == "auto"


# ------------------------------------------------------------------------------------------------------ rules

CUTTING = (
    "tp",
    {"tp": {"size": 2, "overlap": True}},
    "galaxy",
    "galaxy2",
    {"tp": 2, "dp": 2},
    {"dp": {"size": 2, "shard": True}},
    {"dp": {"size": 2, "shard": True}, "pp": 2},
    {"tp": 2, "pp": 2},
    {"cut": {"attention": "heads", "mlp": "heads", "connection": "whole"}},
    {"cut": {"attention": "sequence", "mlp": "heads", "connection": "sequence"}},
)
ASKING = (
    {"kernels": "triton"},
    {"kernels": "reference"},
    {"memory": "input"},
    {"memory": {"budget": 20}},
    {"base_dtype": "fp8"},
)


@pytest.mark.parametrize("asking", ASKING, ids=str)
@pytest.mark.parametrize("plan", CUTTING, ids=str)
def test_a_plan_that_cuts_fused_blocks_takes_their_settings(asking: dict[str, Any], plan: Any) -> None:
    load_recipe({**NEEDED, "parallel": plan, **asking})


def test_quantised_shards_in_host_memory_are_refused() -> None:
    plan = {"dp": {"size": 2, "shard": True, "offload": "cpu"}}
    (found,) = problems_of({**NEEDED, "parallel": plan, "base_dtype": "nf4"})
    assert found.startswith("argument  base_dtype: shards of quantised weights do not rest in host memory")


@pytest.mark.parametrize("asking", ASKING, ids=str)
@pytest.mark.parametrize(
    "plan",
    [
        *("none", "dp", {"dp": {"shares": [3, 1]}}, {"dp": 2, "tp": 1}, {"pp": {"size": 1}}),
        *("sp", {"sp": {"exchange": "ring"}}, {"dp": 2, "sp": {"size": 2, "exchange": "ulysses"}}),
        {"dp": 2, "pp": {"stages": [3, 1]}},
    ],
    ids=str,
)
def test_fused_blocks_go_with_replicas_cut_sequences_and_axes_of_one_process(
    asking: dict[str, Any], plan: Any
) -> None:
    load_recipe({**NEEDED, "parallel": plan, **asking})


# Rule: (what keeps it, what breaks it, the key the problem is placed at, what it says).
RULES: dict[str, tuple[dict[str, Any], dict[str, Any], str, tuple[str, ...]]] = {
    "memory without fused blocks": (
        {"kernels": "off", "memory": {"keep": "auto", "offload": "auto"}},
        {"kernels": "off", "memory": {"budget": 20}},
        "memory",
        ("kernels: off leaves none", "remove memory, or set kernels: auto"),
    ),
    **{
        f"compile beside kernels {kernels}": (
            {"kernels": "off", "compile": True},
            {"kernels": kernels, "compile": True},
            "kernels",
            ("do not go with compile", "set kernels: off, or set compile: false"),
        )
        for kernels in ("reference", "triton")
    },
    "compile beside memory": (
        {"memory": "auto", "compile": True},
        {"memory": "input", "compile": True},
        "memory",
        ("do not go with compile", "remove memory, or set compile: false"),
    ),
    "compile beside base_dtype": (
        {"base_dtype": None, "compile": True},
        {"base_dtype": "fp8", "compile": True},
        "base_dtype",
        ("compile reads dense weights", "remove base_dtype, or set compile: false"),
    ),
    **{
        f"base_dtype under full, not under {kept}": (
            {"method": kept, "base_dtype": "fp8"},
            {"method": "full", "base_dtype": "fp8"},
            "base_dtype",
            ("weights that do not train, and here all do", "set another method"),
        )
        for kept in ("lora", "dora", "ia3", "miss", "adapter", "side")
    },
    **{
        f"checkpointing beside {keep}": (
            {"gradient_checkpointing": True, "memory": {"keep": "input", "tile": 2048}},
            {"gradient_checkpointing": True, "memory": keep},
            "gradient_checkpointing",
            ("memory.keep says more", "remove gradient_checkpointing, or memory.keep"),
        )
        for keep in ("all", "projections", "attention")
    },
    "checkpointing beside a choice": (
        {"gradient_checkpointing": True, "memory": {"budget": 20}},
        {"gradient_checkpointing": True, "memory": {"budget": 20, "keep": "all"}},
        "gradient_checkpointing",
        ("memory.keep says more",),
    ),
    "tiles of what is kept": (
        {"memory": {"keep": "projections", "tile": 2048}},
        {"memory": {"keep": "all", "tile": 2048}},
        "memory.tile",
        ("not tiled", "keep: projections, or less"),
    ),
    "offloading what is not kept": (
        {"memory": {"keep": "attention", "offload": "attention"}},
        {"memory": {"keep": "input", "offload": "attention"}},
        "memory.offload",
        ("no attention output to offload", "input, none or auto", "or keep: attention"),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_kept_by_one_recipe_and_broken_by_another(name: str, tmp_path: Path) -> None:
    kept, broken, key, phrases = RULES[name]
    load_recipe({**NEEDED, **kept})
    lines = [f"{one}: {write_scalar(value)}" for one, value in ({**NEEDED, **broken}).items()]
    file = write(tmp_path, "\n".join(lines) + "\n")
    line = next(
        number for number, text in enumerate(lines, 1) if text.startswith(key.partition(".")[0] + ":")
    )
    found = problems_of(file)
    assert len(found) == 1, found
    assert found[0].startswith(f"{file}:{line}  {key}: ") and all(phrase in found[0] for phrase in phrases), (
        found
    )


@pytest.mark.parametrize(
    "config", [MemoryConfig(keep="all", tile=2048), MemoryConfig(keep="input", offload="attention")]
)
def test_what_memory_contradicts_in_itself_is_said_in_the_words_of_the_policy(config: MemoryConfig) -> None:
    from petune.kernels.memory import block_cost, policy
    from petune.kernels.memory.block_step import BlockStep
    from petune.kernels.memory.shape import BlockShape

    # never looked at: the config is judged first
    shape, rates = (object.__new__(kind) for kind in (BlockShape, block_cost.Rates))
    with pytest.raises(UsageError) as caught:
        policy.choose(BlockStep(shape, 1, 1, 1, 0, rates), config, 0, 0)
    (theirs,) = caught.value.problems
    (ours,) = problems_of({**NEEDED, "memory": asdict(config)})
    assert ours.startswith(f"argument  {theirs.where}: {theirs.what}\n")


def test_a_wrong_key_hides_no_other_problem_and_breaks_no_rule(tmp_path: Path) -> None:
    found = problems_of(
        write(
            tmp_path, GOOD + "kernels: tritn\nmemory: {keep: all, tile: 2}\nbase_dtype: fp4\ncompile: true\n"
        )
    )
    assert [problem.split("  ")[1].split()[0] for problem in found] == [
        "kernels",
        "memory.tile",
        "base_dtype",
    ]


# ------------------------------------------------------------------------------------------- names and values

# name: (text, line of the problem, what the message says); the first line is 4.
WRONG: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "other kernels": (
        "kernels: tritn",
        4,
        ("kernels does not take this value", "auto, reference, triton, off", "did you mean: triton"),
    ),
    "kernels of another toolkit": ("kernels: liger", 4, ("did you mean: triton",)),
    "a truth for kernels": ("kernels: true", 4, ("kernels does not take this value", "found true")),
    "no kernels": ("kernels:", 4, ("kernels does not take this value", "found nothing")),
    "another base": (
        "base_dtype: int4",
        4,
        (
            "base_dtype does not take this value",
            "expected one of fp8, int8, nf4, or null",
            "did you mean: nf4",
        ),
    ),
    "another keep": (
        "memory: inptu",
        4,
        ("memory.keep does not take this value", "auto, all, projections", "did you mean: input"),
    ),
    "a list": (
        "memory: [input]",
        4,
        ("memory does not take this value", "a mapping of settings", "found a list", "memory: input"),
    ),
    "a number": ("memory: 20", 4, ("memory does not take this value", "found 20")),
    "a truth": ("memory: true", 4, ("memory does not take this value", "found true")),
    "another keep inside": (
        "memory:\n  keep: recompute",
        5,
        ("memory.keep does not take", "did you mean: input"),
    ),
    "another place": (
        "memory:\n  offload: attn",
        5,
        ("memory.offload does not take", "auto, none, input, attention", "mean: attention"),
    ),
    "a small tile": ("memory:\n  tile: 64", 5, ("memory.tile is out of range", "at least 128", "found 64")),
    "half a token": (
        "memory:\n  tile: 2048.5",
        5,
        ("memory.tile does not take", "a whole number", "found 2048.5"),
    ),
    "no budget at all": ("memory:\n  budget: 0", 5, ("memory.budget is out of range", "above 0")),
    "a budget with its unit": (
        "memory:\n  budget: 20GiB",
        5,
        ("memory.budget does not take", "a number, above 0", "the text '20GiB'"),
    ),
    "a typing error": (
        "memory:\n  ofload: input",
        5,
        ("memory.ofload is not a setting of memory", "did you mean: memory.offload "),
    ),
    "a setting of elsewhere": (
        "memory:\n  lr: 1",
        5,
        ("memory.lr is not a setting of memory", "did you mean: lr "),
    ),
    "a setting at the top": ("tile: 2048", 4, ("tile is not a setting", "did you mean: memory.tile ")),
    "a setting of two sections": (
        "offload: input",
        4,
        ("did you mean: memory.offload or parallel.dp.offload ",),
    ),
    "dots in a file": ("memory.keep: input", 4, ("nest it:  memory: {keep: ...}",)),
    "kernels in a name of another toolkit": ("use_liger_kernel: true", 4, ("did you mean: kernels ",)),
    "8 bit": ("load_in_8bit: true", 4, ("did you mean: base_dtype ",)),
    "quantization": ("quantization: 4", 4, ("did you mean: base_dtype ",)),
    "set twice": ("memory:\n  keep: input\n  keep: all", 6, ("memory.keep is set twice",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_told_where_what_and_how(name: str, tmp_path: Path) -> None:
    text, line, phrases = WRONG[name]
    file = write(tmp_path, GOOD + text + "\n")
    found = problems_of(file)
    here = [problem for problem in found if problem.startswith((f"{file}:{line}  ", f"{file}:{line}:"))]
    assert any(all(phrase in problem for phrase in phrases) for problem in here), found


def test_a_wrong_override_says_command_line() -> None:
    found = "\n".join(
        problems_of(NEEDED, ["memory.tile=3", "memory.kep=input", "kernels=tritn", "base_dtype=fp16"])
    )
    assert "command line  memory.tile is out of range" in found
    assert "command line  memory.kep is not a setting of memory\n   did you mean: memory.keep" in found
    assert (
        "command line  kernels does not take this value" in found
        and "command line  base_dtype does not take this value" in found
    )
    assert (
        "command line  memory.keep does not take this value"
        in problems_of(NEEDED, ["memory=input", "memory.keep.x=1"])[0]
    )


# -------------------------------------------------------------------------------------------------- any value

_WORDS = st.sampled_from([*KEEPS, *OFFLOADS, "reference", "triton", "off", "fp8", ""])
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | _WORDS
    | st.text(max_size=5)
)
_SECTION = st.dictionaries(
    st.sampled_from([entry.name for entry in fields(MemoryConfig)]) | st.text(max_size=5), _LEAVES, max_size=4
)
_TYPED = st.fixed_dictionaries(
    {},
    optional={
        "keep": st.sampled_from(KEEPS),
        "offload": st.sampled_from(OFFLOADS),
        "tile": st.none() | st.integers(128, 4096),
        "budget": st.none() | st.floats(0.5, 100),
        "host": st.none() | st.integers(1, 100),
    },
)
_RECIPES = st.fixed_dictionaries(
    {},
    optional={
        "kernels": st.sampled_from(["auto", "reference", "triton", "off"]) | _LEAVES,
        "memory": _TYPED | _SECTION | _LEAVES | st.lists(_LEAVES, max_size=2),
        "base_dtype": st.sampled_from([None, "fp8", "nf4"]) | _LEAVES,
        "compile": st.booleans(),
        "gradient_checkpointing": st.booleans(),
        "parallel": st.sampled_from(["none", "dp", "tp", "sp", "pp"]),
    },
)


@given(_RECIPES, st.booleans())
@drawn(300)
def test_any_settings_are_taken_or_refused_and_never_anything_else(
    values: dict[str, Any], apart: bool
) -> None:
    try:
        recipe = load_recipe(NEEDED if apart else {**NEEDED, **values}, values if apart else {})
    except RecipeError as error:
        assert error.code == 2 and str(error)
        return
    assert load_recipe(recipe.resolved()).resolved() == recipe.resolved()
    kernels = recipe.kernels != "off" and not recipe.compile
    assert kernels or recipe.kernels in ("auto", "off")
    assert kernels or recipe.memory == AUTO
    assert kernels or recipe.base_dtype is None
    assert not (recipe.gradient_checkpointing and recipe.memory.keep in ("all", "projections", "attention"))
    assert (recipe.memory.keep, recipe.memory.offload) != ("input", "attention")
    assert recipe.memory.keep != "all" or recipe.memory.tile is None


# ------------------------------------------------------------------------------------------------------- cost


def test_kernels_and_memory_are_checked_without_torch() -> None:
    code = (
        "import sys; from petune.recipe import load_recipe; load_recipe('llama_lora', ['kernels=triton',"
        " 'memory.keep=input']);print({'torch', 'transformers', 'triton'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "set()"
