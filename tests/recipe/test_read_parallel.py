"""`parallel` in a recipe: its forms, its rules, the classic names, and what a wrong one is told."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petune.errors import RecipeError
from petune.parallel.configs import (
    BACKENDS,
    CUTS,
    ROWS,
    CutConfig,
    DpConfig,
    ParallelConfig,
    PpConfig,
    layouts,
    size_of,
)
from petune.parallel.contradictions import contradictions
from petune.recipe import KEYS_THAT_CHANGE_NUMBERS, Recipe, differences, load_recipe
from petune.recipe.aliases import CLASSIC
from petune.recipe.yaml_lines import write_scalar
from tests.recipe.examples import drawn
from tests.written_recipes import GOOD, problems_of, write

NEEDED = {"model": "m", "data": "d", "method": "lora"}
ALONE = ParallelConfig()


def parallel(value: Any, overrides: Any = ()) -> ParallelConfig:
    return load_recipe({**NEEDED, "parallel": value}, overrides).parallel


def of_text(folder: Path, text: str, overrides: Any = ()) -> Recipe:
    """The recipe of GOOD and `text`, whose first line is 4."""
    return load_recipe(write(folder, GOOD + text), overrides)


# ------------------------------------------------------------------------------------------------------ forms

FORMS: dict[str, tuple[str, ParallelConfig, str]] = {  # what is written: (text, config, its name)
    "nothing": ("", ALONE, "none"),
    "none": ("parallel: none", ALONE, "none"),
    "an empty value": ("parallel:", ALONE, "none"),
    "an empty mapping": ("parallel: {}", ALONE, "none"),
    "as a shell takes it": (
        "parallel: dp:2,pp",
        ParallelConfig(dp=DpConfig(size=2), pp=PpConfig()),
        "dp 2 x pp",
    ),
    "a backend": ("parallel: pp", ParallelConfig(pp=PpConfig()), "pp"),
    "a backend in quotes": ('parallel: "galaxy"', ParallelConfig(galaxy=CutConfig()), "galaxy"),
    "a number": ("parallel: {dp: 2}", ParallelConfig(dp=DpConfig(size=2)), "dp 2"),
    "null and empty": ("parallel: {dp: , tp: {}}", ParallelConfig(dp=DpConfig(), tp=CutConfig()), "dp x tp"),
    "three axes": (
        (
            "parallel: {dp: 2, tp: {size: 2, heads: [6, 2], columns: [40, 24]}, pp: {stages: [3, 1],"
            " schedule: 1f1b, microbatches: 4}}"
        ),
        ParallelConfig(
            dp=DpConfig(size=2),
            tp=CutConfig(size=2, heads=(6, 2), columns=(40, 24)),
            pp=PpConfig(stages=(3, 1), microbatches=4),
        ),
        "dp 2 x tp 2 x pp 2",
    ),
    "galaxy": (
        "parallel: {galaxy: {heads: [6, 2], columns: [40, 24], sequence: [11, 5]}}",
        ParallelConfig(galaxy=CutConfig(heads=(6, 2), columns=(40, 24), sequence=(11, 5))),
        "galaxy 2",
    ),
    "free choice": (
        "parallel: {cut: {size: 2, attention: sequence, mlp: heads, connection: sequence}}",
        ParallelConfig(cut=CutConfig(size=2, attention="sequence", mlp="heads", connection="sequence")),
        "cut 2",
    ),
    "shares": ("parallel: {dp: {shares: [3, 1, 1]}}", ParallelConfig(dp=DpConfig(shares=(3, 1, 1))), "dp 3"),
    "sharded": (
        (
            "parallel: {dp: {size: 4, shard: true, replicas: 2, reshard: false, offload: cpu, frozen:"
            " replicated}}"
        ),
        ParallelConfig(
            dp=DpConfig(size=4, shard=True, replicas=2, reshard=False, offload="cpu", frozen="replicated")
        ),
        "dp 4",
    ),
    "several stages per rank": (
        "parallel: {pp: {size: 2, stages: [2, 2, 2, 2], schedule: interleaved}}",
        ParallelConfig(pp=PpConfig(size=2, stages=(2, 2, 2, 2), schedule="interleaved")),
        "pp 2",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_means_its_config_and_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    text, config, words = FORMS[name]
    recipe = of_text(tmp_path, text)
    assert recipe.parallel == config
    assert str(recipe.parallel) == words
    again = load_recipe(write(tmp_path, recipe.to_yaml(), "resolved.yaml"))
    assert again.parallel == config and again.resolved() == recipe.resolved()
    assert load_recipe(recipe.resolved()).parallel == config
    assert all("  # " in line for line in recipe.to_yaml().splitlines()[1:])


def test_the_plain_form_names_the_axes_that_are_there_with_every_setting() -> None:
    assert load_recipe(NEEDED).resolved()["parallel"] == "none"
    plain = load_recipe({**NEEDED, "parallel": {"pp": {"stages": [3, 1]}, "dp": 2}}).resolved()["parallel"]
    assert list(plain) == ["dp", "pp"]
    assert plain["pp"] == {"size": None, "stages": [3, 1], "schedule": "1f1b", "microbatches": None}
    assert set(plain["dp"]) == {entry.name for entry in dataclasses.fields(DpConfig)}


def test_every_line_is_kept_two_levels_down(tmp_path: Path) -> None:
    recipe = of_text(tmp_path, "parallel:\n  dp: 2\n  tp:\n    heads:\n    - 6\n    - 2\n")
    assert {
        "parallel": 4,
        "parallel.dp": 5,
        "parallel.tp.heads": 7,
        "parallel.tp.heads[1]": 9,
    }.items() <= recipe.lines.items()
    assert recipe.where("parallel.tp.heads").endswith(":7") and recipe.where("parallel.tp.columns").endswith(
        ":6"
    )


@pytest.mark.parametrize(
    ("text", "overrides", "config"),
    [
        ("parallel: {tp: 2, dp: 2}", ["parallel=none"], ALONE),
        ("parallel: {tp: 2, dp: 2}", ["parallel="], ALONE),
        ("parallel: {tp: 2, dp: 2}", ["parallel=pp"], ParallelConfig(pp=PpConfig())),
        ("parallel: {tp: 2, dp: 2}", ["parallel={dp: 3}"], ParallelConfig(dp=DpConfig(size=3))),
        (
            "parallel: {tp: 2, dp: 2}",
            ["parallel.tp=4"],
            ParallelConfig(tp=CutConfig(size=4), dp=DpConfig(size=2)),
        ),
        (
            "parallel: {tp: 2}",
            ["parallel.tp.heads=[6,2]"],
            ParallelConfig(tp=CutConfig(size=2, heads=(6, 2))),
        ),
        (
            "parallel: {tp: {heads: [6, 2]}}",
            ["parallel.tp.heads=[5,3]"],
            ParallelConfig(tp=CutConfig(heads=(5, 3))),
        ),
        ("parallel: {tp: {heads: [6, 2]}}", ["parallel.tp=null"], ParallelConfig(tp=CutConfig())),
        (
            "parallel: tp",
            ["parallel.pp.stages=[3,1]"],
            ParallelConfig(tp=CutConfig(), pp=PpConfig(stages=(3, 1))),
        ),
        ("parallel: none", ["parallel.pp.stages=[3,1]"], ParallelConfig(pp=PpConfig(stages=(3, 1)))),
        (
            "",
            ["parallel.pp.stages=[3,1]", "parallel.tp=2"],
            ParallelConfig(pp=PpConfig(stages=(3, 1)), tp=CutConfig(size=2)),
        ),
        ("", ["parallel.tp=2", "parallel=none"], ALONE),
        ("", ["parallel=none", "parallel.tp=2"], ParallelConfig(tp=CutConfig(size=2))),
        ("parallel: {tp: 2}", {"parallel": "none"}, ALONE),
        ("parallel: {tp: 2}", {"parallel": None}, ALONE),
        ("parallel: {tp: 2}", {"parallel": {"dp": 2}}, ParallelConfig(dp=DpConfig(size=2))),
        (
            "parallel: {tp: 2}",
            {"parallel.tp.heads": [6, 2]},
            ParallelConfig(tp=CutConfig(size=2, heads=(6, 2))),
        ),
    ],
)
def test_overrides_set_one_setting_or_replace_the_plan(
    tmp_path: Path, text: str, overrides: Any, config: ParallelConfig
) -> None:
    assert of_text(tmp_path, text, overrides).parallel == config


def test_a_plan_changes_no_numbers_so_a_run_resumes_under_another(tmp_path: Path) -> None:
    assert "parallel" not in KEYS_THAT_CHANGE_NUMBERS
    one, two = (
        of_text(tmp_path, text).resolved()
        for text in ("parallel: {tp: 2}", "parallel: {pp: {stages: [3, 1]}}")
    )
    assert differences(one, two) == []


def test_a_settled_recipe_takes_another_plan(tmp_path: Path) -> None:
    recipe = of_text(tmp_path, "tp_num_attention_heads_list: [6, 2]\n")
    assert load_recipe(recipe, {"parallel": "none"}).parallel == ALONE
    assert load_recipe(recipe, ["tp_num_attention_heads_list=[5,3]"]).parallel == ParallelConfig(
        tp=CutConfig(heads=(5, 3))
    )
    assert recipe.parallel == ParallelConfig(tp=CutConfig(heads=(6, 2)))


def test_the_size_of_an_axis_is_given_or_counted() -> None:
    sizes = [
        size_of(axis)
        for axis in (DpConfig(), DpConfig(size=3), CutConfig(sequence=(1, 2)), PpConfig(stages=(1, 1, 1)))
    ]
    assert sizes == [None, 3, 2, 3]
    assert size_of(PpConfig(stages=(1, 1, 1, 1), schedule="interleaved")) is None


# ------------------------------------------------------------------------------------------------------ rules

# Rule: (a plan that keeps it, one that breaks it, the key path the problem is placed at, what it says).
RULES: dict[str, tuple[Any, Any, str, tuple[str, ...]]] = {
    **{
        f"{one} beside {other}": (
            {one: 2},
            {one: 2, other: 2},
            f"parallel.{other}",
            (f"{one} and {other} both say", "tp, sp, galaxy"),
        )
        for one, other in (
            ("tp", "sp"),
            ("tp", "galaxy"),
            ("sp", "galaxy"),
            ("galaxy", "galaxy2"),
            ("galaxy2", "tp"),
        )
    },
    **{
        f"ep beside {other}": (
            {"ep": 2, "dp": 2},
            {"ep": 2, other: 2},
            f"parallel.{other}",
            ("the ranks of ep hold all but the experts whole", f"or {other} without ep"),
        )
        for other in ("tp", "sp", "pp")
    },
    "ep beside shards": (
        {"ep": 1, "dp": {"size": 2, "shard": True}},
        {"ep": 2, "dp": {"size": 2, "shard": True}},
        "parallel.dp.shard",
        ("the ranks of ep hold all but the experts whole",),
    ),
    "experts agree with shares": (
        {"ep": {"shares": [3, 1], "experts": [5, 3]}},
        {"ep": {"shares": [3, 1], "experts": [5, 2, 1]}},
        "parallel.ep.experts",
        ("one entry per rank", "expected 2, as parallel.ep.shares has, found 3"),
    ),
    "tp beside cut": (
        {"tp": 2, "dp": 2, "pp": 2},
        {"tp": 2, "cut": {"attention": "heads", "mlp": "heads", "connection": "whole"}},
        "parallel.cut",
        ("tp and cut both say",),
    ),
    "lists agree": (
        {"tp": {"heads": [6, 2], "columns": [3, 1]}},
        {"tp": {"heads": [6, 2], "columns": [3, 1, 1]}},
        "parallel.tp.columns",
        ("one entry per rank", "expected 2, as parallel.tp.heads has, found 3"),
    ),
    "lists agree with size": (
        {"galaxy": {"size": 2, "heads": [6, 2], "sequence": [1, 1]}},
        {"galaxy": {"size": 3, "heads": [6, 2], "sequence": [1, 1, 1]}},
        "parallel.galaxy.heads",
        ("expected 3, as size says, found 2",),
    ),
    "shares agree with size": (
        {"sp": {"size": 2, "shares": [3, 1]}},
        {"sp": {"size": 2, "shares": [3, 1, 1]}},
        "parallel.sp.shares",
        ("as size says, found 3",),
    ),
    "replicas' shares agree with size": (
        {"dp": {"size": 2, "shares": [3, 1]}},
        {"dp": {"size": 2, "shares": [3]}},
        "parallel.dp.shares",
        ("expected 2, as size says, found 1",),
    ),
    "no heads under sp": (
        {"sp": {"sequence": [1, 1]}},
        {"sp": {"heads": [1, 1]}},
        "parallel.sp.heads",
        ("attention is not cut by heads", "heads belongs to tp, galaxy, galaxy2 and cut"),
    ),
    "no columns under sp": (
        {"sp": {"exchange": "ring"}},
        {"sp": {"columns": [1, 1]}},
        "parallel.sp.columns",
        ("mlp is not cut by columns", "tp, galaxy and cut"),
    ),
    "no columns under galaxy2": (
        {"galaxy2": {"heads": [1, 1], "sequence": [1, 1]}},
        {"galaxy2": {"columns": [1, 1]}},
        "parallel.galaxy2.columns",
        ("mlp is not cut by columns",),
    ),
    "no sequence under tp": (
        {"tp": {"heads": [1, 1]}},
        {"tp": {"sequence": [1, 1]}},
        "parallel.tp.sequence",
        ("nothing is cut by tokens", "sp, galaxy, galaxy2 and cut"),
    ),
    "no heads in a cut by sequence": (
        {
            "cut": {
                "attention": "sequence",
                "mlp": "heads",
                "connection": "sequence",
                "columns": [1, 1],
                "sequence": [1, 1],
            }
        },
        {"cut": {"attention": "sequence", "mlp": "heads", "connection": "sequence", "heads": [1, 1]}},
        "parallel.cut.heads",
        ("attention is not cut by heads", "set attention: heads"),
    ),
    "no sequence in a cut by heads": (
        {
            "cut": {
                "attention": "heads",
                "mlp": "heads",
                "connection": "whole",
                "heads": [1, 1],
                "columns": [1, 1],
            }
        },
        {"cut": {"attention": "heads", "mlp": "heads", "connection": "whole", "sequence": [1, 1]}},
        "parallel.cut.sequence",
        ("nothing is cut by tokens", "set connection: sequence"),
    ),
    "tp's attention": (
        {"tp": {"attention": "heads", "mlp": "heads", "connection": "whole"}},
        {"tp": {"attention": "sequence"}},
        "parallel.tp.attention",
        (
            "expected heads, found sequence",
            "that is `cut`: {attention: sequence, mlp: heads, connection: whole}",
        ),
    ),
    "tp's connection": (
        {"tp": {"connection": "whole"}},
        {"tp": {"connection": "sequence"}},
        "parallel.tp.connection",
        ("expected whole, found sequence", "that is `cut`", "or galaxy"),
    ),
    "galaxy's mlp": (
        {"galaxy": {"mlp": "heads"}},
        {"galaxy": {"mlp": "sequence"}},
        "parallel.galaxy.mlp",
        ("or galaxy2",),
    ),
    "sp's connection": (
        {"sp": {"connection": "sequence"}},
        {"sp": {"connection": "whole"}},
        "parallel.sp.connection",
        ("expected sequence, found whole",),
    ),
    "cut says all three": (
        {"cut": {"attention": "heads", "mlp": "heads", "connection": "sequence"}},
        {"cut": {"attention": "heads"}},
        "parallel.cut",
        ("mlp and connection are missing", "expected attention, mlp and connection"),
    ),
    "cut says the last": (
        {"cut": {"attention": "heads", "mlp": "sequence", "connection": "sequence"}},
        {"cut": {"attention": "heads", "mlp": "sequence"}},
        "parallel.cut",
        ("connection is missing",),
    ),
    "whole beside attention by sequence": (
        {"cut": {"attention": "sequence", "mlp": "heads", "connection": "sequence"}},
        {"cut": {"attention": "sequence", "mlp": "heads", "connection": "whole"}},
        "parallel.cut.connection",
        ("attention by sequence", "an all-reduce would sum different tokens"),
    ),
    "whole beside an MLP by sequence": (
        {"cut": {"attention": "heads", "mlp": "heads", "connection": "whole"}},
        {"cut": {"attention": "heads", "mlp": "sequence", "connection": "whole"}},
        "parallel.cut.connection",
        ("mlp by sequence", "an all-reduce would sum different tokens"),
    ),
    "exchange under sp": (
        {"sp": {"exchange": "ulysses"}},
        {"tp": {"exchange": "ulysses"}},
        "parallel.tp.exchange",
        ("cut by heads",),
    ),
    "exchange in a cut": (
        {"cut": {"attention": "sequence", "mlp": "heads", "connection": "sequence", "exchange": "ring"}},
        {"cut": {"attention": "heads", "mlp": "heads", "connection": "sequence", "exchange": "ring"}},
        "parallel.cut.exchange",
        ("every key and value", "found ring"),
    ),
    "overlap": (
        {"sp": {"overlap": True}},
        {"sp": {"overlap": True, "exchange": "ring"}},
        "parallel.sp.overlap",
        ("in a ring", "while attention is computed"),
    ),
    "shares or lists": (
        {"galaxy": {"shares": [3, 1]}},
        {"galaxy": {"shares": [3, 1], "heads": [6, 2], "sequence": [1, 1]}},
        "parallel.galaxy.shares",
        ("heads, sequence are given too",),
    ),
    **{
        f"{one} without shard": (
            {"dp": {"size": 4, "shard": True, one: value}},
            {"dp": {"size": 4, one: value}},
            f"parallel.dp.{one}",
            ("only with shard", "set shard: true"),
        )
        for one, value in {"replicas": 2, "reshard": False, "offload": "cpu", "frozen": "replicated"}.items()
    },
    "replicas divide size": (
        {"dp": {"size": 6, "shard": True, "replicas": 3}},
        {"dp": {"size": 6, "shard": True, "replicas": 4}},
        "parallel.dp.replicas",
        ("a divisor of size, 6", "found 4"),
    ),
    "replicas leave something to shard": (
        {"dp": {"shard": True, "replicas": 2}},
        {"dp": {"shares": [1, 1], "shard": True, "replicas": 2}},
        "parallel.dp.replicas",
        ("a divisor of size, 2, and below it",),
    ),
    "one stage per rank": (
        {"pp": {"size": 2, "stages": [3, 1]}},
        {"pp": {"size": 2, "stages": [1, 1, 1, 1]}},
        "parallel.pp.stages",
        ("1f1b has one stage per rank", "expected 2, as size says, found 4", "interleaved or zero-bubble"),
    ),
    "one stage per rank of gpipe": (
        {"pp": {"size": 3, "stages": [1, 2, 1], "schedule": "gpipe"}},
        {"pp": {"size": 3, "stages": [3, 1], "schedule": "gpipe"}},
        "parallel.pp.stages",
        ("gpipe has one stage per rank", "expected 3"),
    ),
    **{
        f"as many stages per rank with {schedule}": (
            {"pp": {"size": 2, "stages": [1, 1, 1, 1], "schedule": schedule}},
            {"pp": {"size": 2, "stages": [1, 1, 1], "schedule": schedule}},
            "parallel.pp.stages",
            (schedule, "a multiple of size, 2", "found 3"),
        )
        for schedule in ("interleaved", "zero-bubble")
    },
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_kept_by_one_plan_and_broken_by_another(name: str, tmp_path: Path) -> None:
    kept, broken, path, phrases = RULES[name]
    parallel(kept)
    file = write(tmp_path, GOOD + f"parallel: {write_scalar(broken)}\n")
    found = problems_of(file)
    here = [problem for problem in found if problem.startswith(f"{file}:4  {path}")]
    assert len(here) == 1 and all(phrase in here[0] for phrase in phrases), found
    assert len(found) == 1, found


def test_the_rules_stand_where_a_plan_made_in_python_meets_them_too() -> None:
    assert [
        path for path, _ in contradictions(ParallelConfig(tp=CutConfig(exchange="ring"), sp=CutConfig()))
    ] == [
        ("sp",),
        ("tp", "exchange"),
    ]
    assert list(contradictions(ParallelConfig(dp=DpConfig(), galaxy=CutConfig(), pp=PpConfig()))) == []
    assert layouts("galaxy2", CutConfig()) == {
        "attention": "heads",
        "mlp": "sequence",
        "connection": "sequence",
    }


# ------------------------------------------------------------------------------------------- names and values

# name: (text, line of the problem, what the message says); the first line is 4.
WRONG: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "a list": (
        "parallel: [dp, tp]",
        4,
        ("parallel does not take this value", "none, auto, dp, tp", "found a list", "parallel: {dp: 2}"),
    ),
    "a number": ("parallel: 2", 4, ("parallel does not take this value", "found 2")),
    "a truth": ("parallel: true", 4, ("parallel does not take this value", "found true")),
    "another name": (
        "parallel: tensor",
        4,
        ("parallel: no such backend", "found the text 'tensor'", "did you mean: parallel.tp "),
    ),
    "a nearly right name": ("parallel: galaxi", 4, ("did you mean: parallel.galaxy ",)),
    "FSDP": ("parallel: fsdp", 4, ("did you mean: parallel.dp.shard ",)),
    "an unknown backend": (
        "parallel:\n  pipeline: 2",
        5,
        ("parallel.pipeline: no such backend", "did you mean: parallel.pp "),
    ),
    "none inside": ("parallel:\n  none: 1", 5, ("parallel.none: no such backend",)),
    "a setting for a backend": (
        "parallel:\n  stages: [3, 1]",
        5,
        ("parallel.stages: no such backend", "did you mean: parallel.pp.stages "),
    ),
    "a setting of another axis": (
        "parallel:\n  tp:\n    stages: [3]",
        6,
        ("not a setting of tp", "did you mean: parallel.pp.stages "),
    ),
    "a typing error": (
        "parallel:\n  pp:\n    microbatch: 3",
        6,
        ("not a setting of pp", "did you mean: parallel.pp.microbatches "),
    ),
    "a classic name inside": (
        "parallel:\n  sp:\n    seq_scatter_list: [1]",
        6,
        ("did you mean: parallel.sp.sequence ",),
    ),
    "dots in a file": ("parallel.tp.heads: [6, 2]", 4, ("nest it:  parallel: {tp: {heads: ...}}",)),
    "dots inside": ("parallel:\n  tp.heads: [6, 2]", 5, ("nest it:  tp: {heads: ...}",)),
    "a backend at the top": ("tp: 2", 4, ("tp is not a setting", "did you mean: parallel.tp ")),
    "a setting at the top": ("stages: [3, 1]", 4, ("did you mean: parallel.pp.stages ",)),
    "a name of another toolkit": ("tensor_parallel_size: 2", 4, ("did you mean: parallel.tp ",)),
    "nearly a classic name": (
        "tp_num_attention_heads: [6, 2]",
        4,
        ("did you mean: tp_num_attention_heads_list ",),
    ),
    "a truth for an axis": (
        "parallel: {dp: 2,\n  tp: yes}",
        5,
        ("parallel.tp does not take this value", "found the text 'yes'"),
    ),
    "a fraction for an axis": (
        "parallel: {tp: 2.0}",
        4,
        ("parallel.tp does not take", "a whole number of processes", "parallel: {tp: 2}"),
    ),
    "a list for an axis": (
        "parallel: {tp: [6, 2]}",
        4,
        ("parallel.tp does not take this value", "found a list"),
    ),
    "true for an axis": ("parallel: {tp: true}", 4, ("parallel.tp does not take this value", "found true")),
    "no process": (
        "parallel: {tp: 0}",
        4,
        ("parallel.tp.size is out of range", "at least 1, at most 4096", "found 0"),
    ),
    "too many": ("parallel: {dp: {size: 5000}}", 4, ("parallel.dp.size is out of range", "found 5000")),
    "a quoted size": (
        'parallel: {dp: {size: "2"}}',
        4,
        ("parallel.dp.size does not take", "write the number plainly"),
    ),
    "an empty share": (
        "parallel:\n  tp:\n    heads:\n    - 6\n    - 0",
        8,
        ("parallel.tp.heads[1] is out of range", "at least 1", "found 0"),
    ),
    "a number for a list": (
        "parallel: {tp: {heads: 6}}",
        4,
        ("parallel.tp.heads does not take", "a list [...] of whole number"),
    ),
    "a text for a list": ('parallel: {tp: {heads: "6,2"}}', 4, ("write [6, 2]",)),
    "a fraction in a list": (
        "parallel: {sp: {sequence: [0.5, 0.5]}}",
        4,
        ("parallel.sp.sequence[0]", "found 0.5"),
    ),
    "another layout": (
        "parallel: {cut: {attention: tokens}}",
        4,
        ("one of heads, sequence", "did you mean: sequence"),
    ),
    "another exchange": (
        "parallel: {sp: {exchange: rings}}",
        4,
        ("one of gather, ulysses, ring", "did you mean: ring"),
    ),
    "another schedule": (
        "parallel: {pp: {schedule: zero_bubble}}",
        4,
        ("gpipe, 1f1b, interleaved, zero-bubble", "did you mean: zero-bubble"),
    ),
    "text for a truth": ("parallel: {dp: {shard: yes}}", 4, ("true or false", "write true")),
    "no pieces": ("parallel: {pp: {microbatches: 0}}", 4, ("parallel.pp.microbatches is out of range",)),
    "set twice": ("parallel:\n  tp: 2\n  tp: 4", 6, ("parallel.tp is set twice",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_told_where_what_and_how(name: str, tmp_path: Path) -> None:
    text, line, phrases = WRONG[name]
    file = write(tmp_path, GOOD + text + "\n")
    found = problems_of(file)
    here = [problem for problem in found if problem.startswith((f"{file}:{line}  ", f"{file}:{line}:"))]
    assert any(all(phrase in problem for phrase in phrases) for problem in here), found


def test_all_problems_of_a_plan_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "epochs: ten\nparallel:\n  dp: {size: 0}\n  tp:\n    head: [6]\n    heads: [6, x]\n  galaxy:\n   "
        " heads: [6, 2]\n    columns: [1]\n    exchange: ring\n  pp:\n    size: 2\n    stages: [1, 1, 1]\n "
        " ddp: 3\nlr: x\n"
    )
    found = problems_of(write(tmp_path, GOOD + text))
    assert [int(problem.split("yaml:")[1].split()[0]) for problem in found] == [
        4,
        6,
        8,
        9,
        10,
        12,
        13,
        16,
        17,
        18,
    ]
    keys = [problem.split("  ")[1].split()[0].rstrip(":").partition("[")[0] for problem in found]
    assert keys[1:5] == ["parallel.dp.size", "parallel.tp.head", "parallel.tp.heads", "parallel.galaxy"]
    assert keys[5:9] == [
        "parallel.galaxy.columns",
        "parallel.galaxy.exchange",
        "parallel.pp.stages",
        "parallel.ddp",
    ]


@pytest.mark.parametrize("value", ["[tp]", "3", "true"])
def test_an_override_inside_a_wrong_plan_does_not_hide_it(value: str, tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, GOOD + f"parallel: {value}\n"), ["parallel.tp.heads=[6,2]"])
    assert len(found) == 1 and found[0].startswith(
        f"{tmp_path / 'r.yaml'}:4  parallel does not take this value"
    )
    found = problems_of(write(tmp_path, GOOD + "parallel: {tp: x}\n"), ["parallel.tp.heads=[6,2]"])
    assert len(found) == 1 and "parallel.tp does not take this value" in found[0]


def test_a_wrong_override_says_command_line() -> None:
    found = "\n".join(
        problems_of(
            NEEDED,
            ["parallel.tp.heads=[6,x]", "parallel.pp.stage=[1]", "parallel.dp=0", "parallel.tp.size.x=1"],
        )
    )
    assert "command line  parallel.tp.heads[1] does not take this value" in found
    assert (
        "command line  parallel.pp.stage is not a setting of pp\n   did you mean: parallel.pp.stages" in found
    )
    assert "command line  parallel.dp.size is out of range" in found
    assert "command line  parallel.tp.size does not take this value" in found
    assert problems_of(NEEDED, {"parallel": "tq"})[0].startswith("argument  parallel: no such backend")
    assert "the text 'dp:2,dp:3'" in problems_of(NEEDED, {"parallel": "dp:2,dp:3"})[0], (
        "one size would be lost"
    )


# ----------------------------------------------------------------------------------------------- classic keys

METHODS = "con_parallel_method: {}\natt_parallel_method: {}\nmlp_parallel_method: {}\n"
HEADS, COLUMNS = "tp_num_attention_heads_list: [6, 2]\n", "tp_intermediate_size_list: [40, 24]\n"
TOKENS, STAGES = "seq_scatter_list: [11, 5]\n", "stage_num_hidden_layers_list: [3, 1]\n"
SHARED = {"heads": [6, 2], "columns": [40, 24], "sequence": [11, 5]}

CLASSIC_FORMS: dict[str, tuple[str, Any]] = {  # what is written -> the modern form
    "heads": (HEADS, {"tp": {"heads": [6, 2]}}),
    "columns": (COLUMNS, {"tp": {"columns": [40, 24]}}),
    "heads and columns": (HEADS + COLUMNS, {"tp": {"heads": [6, 2], "columns": [40, 24]}}),
    "tokens": (TOKENS, {"sp": {"sequence": [11, 5]}}),
    "stages": (STAGES, {"pp": {"stages": [3, 1]}}),
    "all three": (HEADS + COLUMNS + TOKENS, {"galaxy": SHARED}),
    "stages and heads": (STAGES + HEADS, {"pp": {"stages": [3, 1]}, "tp": {"heads": [6, 2]}}),
    "None TP TP": (METHODS.format("None", "TP", "TP"), "tp"),
    "null TP TP": (METHODS.format("", "TP", "TP"), "tp"),
    "SP TP TP": (METHODS.format("SP", "TP", "TP"), "galaxy"),
    "SP TP SP": (METHODS.format("SP", "TP", "SP"), "galaxy2"),
    "SP SP SP": (METHODS.format("SP", "SP", "SP"), "sp"),
    "SP SP TP": (
        METHODS.format("SP", "SP", "TP"),
        {"cut": {"attention": "sequence", "mlp": "heads", "connection": "sequence"}},
    ),
    "SP TP TP and lists": (METHODS.format("SP", "TP", "TP") + HEADS + COLUMNS + TOKENS, {"galaxy": SHARED}),
    "lists before the methods": (
        TOKENS + HEADS + METHODS.format("SP", "TP", "SP"),
        {"galaxy2": {"heads": [6, 2], "sequence": [11, 5]}},
    ),
    "SP SP TP and lists": (
        METHODS.format("SP", "SP", "TP") + COLUMNS + TOKENS,
        {
            "cut": {
                "attention": "sequence",
                "mlp": "heads",
                "connection": "sequence",
                "columns": [40, 24],
                "sequence": [11, 5],
            }
        },
    ),
    "beside a modern size": (
        HEADS + "parallel: {tp: 2, dp: 2}\n",
        {"tp": {"size": 2, "heads": [6, 2]}, "dp": 2},
    ),
    "beside a modern name": ("parallel: galaxy2\n" + HEADS, {"galaxy2": {"heads": [6, 2]}}),
    "methods beside other axes": (
        METHODS.format("SP", "TP", "TP") + "parallel: {pp: 2}\n",
        {"galaxy": {}, "pp": 2},
    ),
}


@pytest.mark.parametrize("name", CLASSIC_FORMS)
def test_classic_keys_mean_their_modern_ones(name: str, tmp_path: Path) -> None:
    text, modern = CLASSIC_FORMS[name]
    recipe = of_text(tmp_path, text)
    assert recipe.parallel == parallel(modern)
    assert load_recipe(write(tmp_path, recipe.to_yaml(), "again.yaml")).parallel == recipe.parallel
    if "parallel:" not in text:
        words = [f"{key}={value}" for key, _, value in (line.partition(": ") for line in text.splitlines())]
        typed = load_recipe(NEEDED, words)
        assert typed.parallel == recipe.parallel
        assert load_recipe(typed, ["parallel=none"]).parallel == ALONE


def test_a_classic_key_keeps_its_line(tmp_path: Path) -> None:
    recipe = of_text(
        tmp_path, "lr: 1e-3\n" + METHODS.format("SP", "SP", "TP") + COLUMNS + "seq_scatter_list:\n- 11\n- 5\n"
    )
    lines = {
        "parallel.cut.connection": 5,
        "parallel.cut.mlp": 7,
        "parallel.cut.columns": 8,
        "parallel.cut.sequence[1]": 11,
    }
    assert lines.items() <= recipe.lines.items()
    assert recipe.where("parallel.cut.columns").endswith(":8")


# What is written: (text, line of the problem, what the message says).
WRONG_CLASSIC: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "unknown word": (
        METHODS.format("SP", "TPP", "TP"),
        5,
        ("att_parallel_method does not take this value", "TP or SP", "did you mean: TP"),
    ),
    "lower case": (
        METHODS.format("sp", "TP", "TP"),
        4,
        ("con_parallel_method does not take this value", "None or SP", "did you mean: SP"),
    ),
    "TP for the connection": (
        METHODS.format("TP", "TP", "TP"),
        4,
        ("con_parallel_method does not take", "None or SP"),
    ),
    "None for a block": (
        METHODS.format("SP", "None", "TP"),
        5,
        ("att_parallel_method does not take", "TP or SP"),
    ),
    "a number": (
        METHODS.format("SP", "TP", 3),
        6,
        ("mlp_parallel_method does not take this value", "found 3"),
    ),
    "None with attention SP": (
        METHODS.format("None", "SP", "TP"),
        4,
        ("att_parallel_method SP", "sum different tokens"),
    ),
    "None with MLP SP": (
        METHODS.format("None", "TP", "SP"),
        4,
        ("mlp_parallel_method SP", "sum different tokens"),
    ),
    "null with both": (
        METHODS.format("", "SP", "SP"),
        4,
        ("att_parallel_method and mlp_parallel_method SP",),
    ),
    "one method": ("att_parallel_method: TP\n", 4, ("without con_parallel_method and mlp_parallel_method",)),
    "heads and tokens": (HEADS + TOKENS, 4, ("seq_scatter_list", "several backends", "con_parallel_method")),
    "list and modern key": (
        HEADS + "parallel: {tp: {heads: [6, 2]}}\n",
        4,
        ("beside parallel.tp.heads", "r.yaml:5", "keep one of them"),
    ),
    "stages and modern key": (
        "parallel: {pp: {stages: [3, 1]}}\n" + STAGES,
        5,
        ("beside parallel.pp.stages",),
    ),
    "methods and modern key": (
        "parallel: tp\n" + METHODS.format("None", "TP", "TP"),
        5,
        ("con_parallel_method beside parallel.tp",),
    ),
    "beside none": ("parallel: none\n" + HEADS, 5, ("beside a parallel it cannot be put in",)),
    "beside a number": ("parallel: 3\n" + HEADS, 4, ("parallel does not take this value",)),
    "no list for this row": (
        METHODS.format("None", "TP", "TP") + TOKENS,
        7,
        ("seq_scatter_list: under tp nothing is cut by tokens",),
    ),
    "lists of two lengths": (
        HEADS + "tp_intermediate_size_list: [1, 1, 1]\n",
        5,
        ("tp_intermediate_size_list has one entry per rank", "2, as tp_num_attention_heads_list has"),
    ),
    "wrong entry": (
        "stage_num_hidden_layers_list:\n- 3\n- x\n",
        6,
        ("stage_num_hidden_layers_list[1] does not take",),
    ),
    "not a list": ("seq_scatter_list: 4\n", 4, ("seq_scatter_list does not take this value",)),
    "set twice": (HEADS + HEADS, 5, ("tp_num_attention_heads_list is set twice",)),
}


@pytest.mark.parametrize("name", WRONG_CLASSIC)
def test_a_wrong_classic_key_is_told_in_the_words_that_were_written(name: str, tmp_path: Path) -> None:
    text, line, phrases = WRONG_CLASSIC[name]
    file = write(tmp_path, GOOD + text)
    found = problems_of(file)
    here = [problem for problem in found if problem.startswith((f"{file}:{line}  ", f"{file}:{line}:"))]
    assert any(all(phrase in problem for phrase in phrases) for problem in here), found


def test_wrong_methods_do_not_hide_wrong_lists(tmp_path: Path) -> None:
    text = (
        METHODS.format("tp", "SP", "TP") + "seq_scatter_list: [1, x]\ntp_num_attention_heads_list: 3\nlr: x\n"
    )
    found = problems_of(write(tmp_path, GOOD + text))
    assert sorted(int(problem.split("yaml:")[1].split()[0]) for problem in found) == [4, 7, 8, 9]


def test_a_classic_override_wins_over_an_older_plan(tmp_path: Path) -> None:
    modern = "parallel: {tp: {heads: [6, 2], columns: [40, 24]}, pp: 2}\n"
    heads = of_text(tmp_path, modern, ["tp_num_attention_heads_list=[5,3]"])
    assert heads.parallel == parallel({"tp": {"heads": [5, 3], "columns": [40, 24]}, "pp": 2})
    assert heads.where("parallel.tp.heads") == "command line" and "parallel.tp.heads" not in heads.lines
    methods = ["con_parallel_method=SP", "att_parallel_method=TP", "mlp_parallel_method=TP"]
    galaxy = of_text(tmp_path, modern, methods)
    assert galaxy.parallel == parallel({"galaxy": {"heads": [6, 2], "columns": [40, 24]}, "pp": 2})
    assert galaxy.lines["parallel.galaxy.heads"] == 4
    again = of_text(tmp_path, METHODS.format("SP", "SP", "TP") + COLUMNS, methods)
    assert again.parallel == parallel({"galaxy": {"columns": [40, 24]}})
    assert of_text(tmp_path, "parallel: none\n", methods).parallel == parallel("galaxy")
    assert (
        "tp and galaxy both say"
        in problems_of(write(tmp_path, GOOD + "parallel: {tp: 2, galaxy: 2}\n"), methods)[0]
    )
    assert of_text(tmp_path, HEADS, ["parallel=none"]).parallel == ALONE
    assert of_text(tmp_path, HEADS, ["parallel.tp.heads=[5,3]"]).parallel == parallel(
        {"tp": {"heads": [5, 3]}}
    )


def test_a_classic_and_a_modern_override_together_are_an_error() -> None:
    assert (
        "beside parallel.tp.heads"
        in problems_of(NEEDED, ["parallel.tp.heads=[1,1]", "tp_num_attention_heads_list=[5,3]"])[0]
    )
    assert (
        "cannot be put in" in problems_of(NEEDED, ["tp_num_attention_heads_list=[5,3]", "parallel=none"])[0]
    )
    methods = ["con_parallel_method=SP", "att_parallel_method=TP", "mlp_parallel_method=TP"]
    assert "beside parallel.tp" in problems_of(NEEDED, [*methods, "parallel.tp.heads=[1,1]"])[0]
    assert (
        "beside parallel.tp.heads"
        in problems_of(
            NEEDED, {"parallel": {"tp": {"heads": [1, 1]}}, "tp_num_attention_heads_list": [1, 1]}
        )[0]
    )


def test_classic_keys_belong_to_settings_that_exist() -> None:
    for path in CLASSIC.values():
        _, backend, setting = path.split(".")
        assert setting in {entry.name for entry in dataclasses.fields(BACKENDS[backend])}
    assert (
        {"auto", *BACKENDS}
        == {entry.name for entry in dataclasses.fields(ParallelConfig)}
        == {"auto", "dp", "pp", "ep", *ROWS, "cut"}
    )


# -------------------------------------------------------------------------------------------------- any value

_WORDS = st.sampled_from(
    [
        "none",
        "dp",
        "tp",
        "sp",
        "cut",
        "pp",
        "heads",
        "sequence",
        "whole",
        "1f1b",
        "interleaved",
        "ring",
        "cpu",
        "TP",
        "SP",
        "None",
        "",
    ]
)
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | _WORDS
    | st.text(max_size=5)
)
_LISTS = st.lists(st.integers(0, 9) | _LEAVES, max_size=3)
_SETTINGS = st.sampled_from(
    sorted(
        {entry.name for config in BACKENDS.values() for entry in dataclasses.fields(config)} | set(CLASSIC)
    )
)
_AXES = st.dictionaries(_SETTINGS | st.text(max_size=5), _LEAVES | _LISTS, max_size=4)
_PLANS = st.dictionaries(
    st.sampled_from(sorted(BACKENDS)) | _SETTINGS | st.text(max_size=5), _AXES | _LEAVES | _LISTS, max_size=4
)
_CLASSIC = st.dictionaries(
    st.sampled_from(sorted(CLASSIC)),
    _WORDS | _LISTS | st.lists(st.integers(1, 9), max_size=3) | _AXES,
    max_size=7,
)
_PAIRS = st.just([3, 1]) | st.lists(st.integers(1, 5), min_size=1, max_size=3)
_CLASSIC_TYPED = st.fixed_dictionaries(
    {},
    optional={
        **{key: st.sampled_from(["TP", "SP", "None"]) for key in CLASSIC if key.endswith("method")},
        **{key: _PAIRS for key in CLASSIC if key.endswith("list")},
    },
)
# Right by its types, so that the rules are reached.
_SHARES = st.lists(st.integers(1, 5), max_size=3)
_CUT = st.fixed_dictionaries(
    {},
    optional={
        "size": st.none() | st.integers(1, 3),
        "attention": st.sampled_from([None, "heads", "sequence"]),
        "mlp": st.sampled_from([None, "heads", "sequence"]),
        "connection": st.sampled_from([None, "whole", "sequence"]),
        **dict.fromkeys(("shares", "heads", "columns", "sequence"), _SHARES),
        "exchange": st.sampled_from(["gather", "ulysses", "ring"]),
        "overlap": st.booleans(),
    },
)
_PP = st.fixed_dictionaries(
    {},
    optional={
        "size": st.none() | st.integers(1, 3),
        "stages": _SHARES,
        "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    },
)
_DP = st.fixed_dictionaries(
    {},
    optional={
        "size": st.none() | st.integers(1, 4),
        "shares": _SHARES,
        "shard": st.booleans(),
        "replicas": st.integers(1, 3),
    },
)
_EP = st.fixed_dictionaries(
    {}, optional={"size": st.none() | st.integers(1, 3), "shares": _SHARES, "experts": _SHARES}
)
_TYPED = st.fixed_dictionaries({}, optional={"dp": _DP, **dict.fromkeys(CUTS, _CUT), "pp": _PP, "ep": _EP})


def judge(source: dict[str, Any], overrides: Any = ()) -> ParallelConfig | None:
    """The plan, None where it is refused with exit code 2. Anything else is a fault of the reader."""
    began = time.process_time()
    try:
        recipe = load_recipe(source, overrides)
    except RecipeError as error:
        assert error.code == 2 and error.problems and str(error)
        return None
    finally:
        assert time.process_time() - began < 2
    assert load_recipe(recipe.resolved()).parallel == recipe.parallel
    return recipe.parallel


@given(_PLANS | _TYPED | _LEAVES | _LISTS)
@drawn(300)
def test_any_plan_is_taken_or_refused_and_never_anything_else(value: Any) -> None:
    judge({**NEEDED, "parallel": value})
    judge(NEEDED, {"parallel": value})


@pytest.mark.slow
@given(_TYPED)
@drawn(300)
def test_a_plan_that_is_taken_keeps_every_rule(value: dict[str, Any]) -> None:
    config = judge({**NEEDED, "parallel": value})
    if config is None:
        return
    assert list(contradictions(config)) == [] and sum(name in CUTS for name in config.axes) <= 1
    for name, axis in config.axes.items():
        lists = [
            getattr(axis, one) for one in ("shares", "heads", "columns", "sequence") if getattr(axis, one, ())
        ]
        assert len({len(one) for one in lists} | ({axis.size} - {None} if lists else set())) <= 1
        if isinstance(axis, CutConfig):
            found = layouts(name, axis)
            assert None not in found.values()
            assert found["connection"] == "sequence" or "sequence" not in found.values()
            assert not axis.heads or found["attention"] == "heads"
            assert not axis.columns or found["mlp"] == "heads"
            assert not axis.sequence or found["connection"] == "sequence"


@given(
    _CLASSIC | _CLASSIC_TYPED,
    st.just({}) | _PLANS.map(lambda plan: {"parallel": plan}) | _WORDS.map(lambda word: {"parallel": word}),
    st.booleans(),
)
@drawn(300)
def test_any_classic_keys_are_taken_or_refused_too(
    classic: dict[str, Any], modern: dict[str, Any], apart: bool
) -> None:
    judge({**NEEDED, **modern, **({} if apart else classic)}, classic if apart else {})


@given(
    st.lists(
        st.builds(
            "{}={}".format,
            st.builds("parallel.{}.{}".format, st.sampled_from(sorted(BACKENDS)), _SETTINGS)
            | st.sampled_from(["parallel", *CLASSIC]),
            (_LEAVES | _LISTS).map(write_scalar) | st.text(max_size=8),
        ),
        max_size=4,
    )
)
@drawn(200)
def test_any_overrides_of_a_plan_are_taken_or_refused_too(overrides: list[str]) -> None:
    judge({**NEEDED, "parallel": {"tp": 2, "pp": {"stages": [3, 1]}}}, overrides)


# ------------------------------------------------------------------------------------------------------- cost


def test_a_plan_is_checked_without_torch() -> None:
    code = (
        "import sys; from petune.recipe import load_recipe; load_recipe('llama_lora_dp_tp_pp',"
        " ['tp_num_attention_heads_list=[5,3]']);print({'torch', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "set()"


def test_a_large_plan_is_refused_quickly(tmp_path: Path) -> None:
    for inner in (
        "".join(f"  b{n}: 1\n" for n in range(4900)),
        "  tp:\n" + "".join(f"    s{n}: 1\n" for n in range(4900)),
    ):
        began = time.process_time()
        assert len(problems_of(write(tmp_path, GOOD + "parallel:\n" + inner))) <= 101
        assert time.process_time() - began < 3
