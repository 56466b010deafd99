"""`petune profile`: the tables a person reads, the JSON a program reads, and what is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from petune_cli.profile import _number, _seconds

from tests.cli.conftest import Type
from tests.small_runs import as_yaml, settings


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A tiny run."""
    place = tmp_path.parent / f"{tmp_path.name}-made"
    place.mkdir()
    return str(as_yaml(place / "tiny.yaml", settings(place)))


@pytest.mark.slow
def test_a_profile_is_a_tree_of_modules_and_what_a_step_is_made_of(
    type_: Type, recipe: str, tmp_path: Path, no_network: None
) -> None:
    words = ("gradient_checkpointing=true", "--steps", "1", "--depth", "2", "--trace", "trace.json")
    shown = type_("profile", recipe, *words)
    assert shown.code == 0, shown.err
    lines = shown.out.splitlines()
    tree = next(at for at, line in enumerate(lines) if line.startswith("module "))
    assert [line.split()[0] for line in lines[tree + 1 : tree + 9]] == [
        *("(model)", "model", "embed_tokens", "layers", "norm", "rotary_emb", "lm_head", "(outside)")
    ]
    assert "recomputed" in lines[tree]
    for start in (
        "in all",
        "time ",
        "speed ",
        "waits    0.0% ",
        "weights, frozen",
        "activations",
        "matrix products",
        "aten::",  # which operators take longest is the processor's to say
        "trace ",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.slow
def test_json_has_every_module_and_sums_that_agree(type_: Type, recipe: str, tmp_path: Path) -> None:
    shown = type_("profile", recipe, "--steps", "1", "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    modules = {part["path"]: part for part in found["modules"]}
    assert modules["model.layers.1.mlp.down_proj"]["kind"] == "LoraLinear"
    assert found["flop"]["backward"] == modules[""]["backward"] + found["outside"]["backward"]
    assert modules[""]["macs"] * 2 == modules[""]["forward"] == found["flop"]["forward"]
    assert found["memory"]["peak"] > found["memory"]["frozen"]
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_profiled_is_exit_2(type_: Type, recipe: str) -> None:
    assert "torchrun --nproc-per-node 2" in type_("profile", recipe, "parallel=pp").err
    assert type_("profile", recipe, "compile=true").code == 2
    assert type_("profile", recipe, "--steps", "0").code == 2


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (1234, "1.23 K"),
        (6.98e9, "6.98 G"),
        (2.5e15, "2.5 P"),
        (1.5, "1.5"),
        (22.7e9, "22.7 G"),
    ],
)
def test_counts_are_written_with_a_prefix(number: float, text: str) -> None:
    assert _number(number) == text


def test_times_are_milliseconds_below_a_second() -> None:
    assert (_seconds(0.0123), _seconds(2.5)) == ("12.30 ms", "2.50 s")
