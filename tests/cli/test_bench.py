"""`petune bench`: what it prints, draws and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Type
from tests.small_runs import as_yaml, settings, write_model


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of matmuls is not what is tested."""
    monkeypatch.setattr("petune.profiling.throughput.probe", lambda recipe: 1e12)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """A file whose run takes a fraction of a second."""
    return str(as_yaml(tmp_path / "small.yaml", settings(tmp_path, "llama")))


def test_bench_prints_a_row_a_method_and_writes_nothing(type_: Type, recipe: str, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    shown = type_("bench", recipe, "--methods", "lora,full", "--steps", "2")
    rows = [line.split() for line in shown.out.splitlines() if line.startswith(("lora", "full"))]
    assert shown.code == 0 and [row[0] for row in rows] == ["lora", "full"]
    assert "against 1 TFLOP/s" in shown.out and "6 for one that trains" in " ".join(shown.out.split())
    assert all("%" in " ".join(row) for row in rows)
    assert sorted(tmp_path.rglob("*")) == before


def test_bench_takes_settings_and_draws(type_: Type, recipe: str, tmp_path: Path) -> None:
    shown = type_("bench", recipe, "batch_size=1", "--steps", "1", "--plot", "speed.png")
    assert shown.code == 0 and "drawn    speed.png" in shown.out
    assert (tmp_path / "speed.png").stat().st_size > 1000


@pytest.mark.slow
def test_bench_measures_memory_policies(type_: Type, tmp_path: Path) -> None:
    write_model(tmp_path / "llama", "llama")  # attention that drops out would run unfused
    recipe = as_yaml(tmp_path / "small.yaml", settings(tmp_path, "llama"))
    shown = type_("bench", str(recipe), "kernels=reference", "--memory", "all,input", "--steps", "1")
    rows = [line.split() for line in shown.out.splitlines() if line.startswith("lora")]
    assert [row[1:3] for row in rows] == [["all", "all"], ["input", "input"]]


def test_what_bench_cannot_measure_is_exit_2(type_: Type, recipe: str) -> None:
    assert type_("bench", recipe, "--methods", "lore").code == 2
    assert "--memory" in type_("bench", recipe, "--memory", "everything").err
    assert type_("bench", recipe, "parallel=dp").code == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_lora", pytest.param("bert_lora", marks=pytest.mark.long)])
def test_a_shipped_recipe_is_measured(type_: Type, name: str) -> None:
    shown = type_("bench", name, "data.max_rows=64", "batch_size=4", "--steps", "1")
    assert shown.code == 0 and shown.out.splitlines()[1].startswith("lora")
