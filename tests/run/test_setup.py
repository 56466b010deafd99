"""setup.json says what a run knows before its first step, and what each rank of a plan holds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from petune.models import FAMILIES
from petune.parallel.configs import CutConfig, DpConfig, ParallelConfig, PpConfig
from petune.parallel.planning import make_plan
from petune.run.setup import blocks_of, holding
from tests.small_runs import run, settings

pytestmark = pytest.mark.usefixtures("no_picture")


def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "setup.json").read_text())
    return found


def test_a_classifier_notes_its_classes_lengths_and_confusion(tmp_path: Path) -> None:
    finished = run(settings(tmp_path, "bert", eval_every=3))
    found = facts(finished.folder)
    assert found["labels"] == ["blue", "green", "red"] and found["steps"]["total"] == 6
    assert found["data"]["classes"] == {
        "rows to train on": dict.fromkeys(found["labels"], 8),
        "rows held out": dict.fromkeys(found["labels"], 3),
    }
    assert sum(rows for _, _, rows in found["data"]["lengths"]) == found["data"]["rows"] == 24
    tables = {one["step"]: one["confusion"] for one in finished.metrics() if "confusion" in one}
    assert list(tables) == [0, 3, 6]
    for step, table in tables.items():
        scores = next(one for one in finished.metrics() if one["step"] == step and "confusion" in one)
        assert [sum(row) for row in table] == [3, 3, 3]
        assert scores["eval_accuracy"] == pytest.approx(sum(table[at][at] for at in range(3)) / 9)


def test_tags_are_counted_by_word(tmp_path: Path) -> None:
    found = facts(run(settings(tmp_path, "bert", task="tokens")).folder)
    counts = found["data"]["classes"]["words to train on"]
    assert counts["B-COLOR"] == 24 and list(counts) == found["labels"]


def test_a_run_that_goes_on_began_when_it_began(tmp_path: Path) -> None:
    recipe = settings(tmp_path)
    folder = run(recipe | {"max_steps": 3}).folder
    noted = facts(folder)
    assert abs(noted["began"] - (folder / "resolved.yaml").stat().st_mtime) < 60
    (folder / "setup.json").write_text(json.dumps(noted | {"began": 1000.0}))
    again = run(recipe, resume=True, allow_change=["max_steps"])
    assert facts(folder)["began"] == 1000.0 and facts(folder)["steps"]["total"] == 6
    assert again.summary["run_id"] == noted["run_id"]


def test_a_run_says_what_rests_in_memory(tmp_path: Path) -> None:
    finished = run(settings(tmp_path))
    (memory,) = finished.summary["memory"]
    trained, total = facts(finished.folder)["parameters"].values()
    assert memory["tuned"] == 4 * trained and memory["frozen"] >= 4 * (total - trained)
    assert memory["optimizer"] >= 2 * memory["tuned"]
    assert memory["peak"] == finished.summary["peak_memory_bytes"]


def test_the_page_of_a_run_is_there_unless_it_was_not_asked_for(tmp_path: Path) -> None:
    with_page = run(settings(tmp_path, "bert", out="with"))
    text = (with_page.folder / "report.html").read_text()
    assert "cannot be shown" not in text and "finished" in text and "Confusion of classes" in text
    assert not (run(settings(tmp_path, "bert", out="without", report=False)).folder / "report.html").exists()


def plan_of(**axes: Any) -> Any:
    """A plan over a Llama of eight blocks, four heads and 48 columns."""
    config = SimpleNamespace(
        model_type="llama",
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        head_dim=8,
        intermediate_size=48,
        attention_dropout=0.0,
        vocab_size=64,
    )
    return make_plan(ParallelConfig(**axes), FAMILIES["llama"], config, None, 4, 8), config


def test_a_stage_holds_its_blocks_and_a_replica_its_rows() -> None:
    plan, config = plan_of(pp=PpConfig(size=2), dp=DpConfig(size=2))
    held = [holding(plan, FAMILIES["llama"], config, rank) for rank in range(plan.world)]
    assert [one["blocks"] for one in held] == ["decoder 0-3"] * 2 + ["decoder 4-7"] * 2
    assert [one["rows"] for one in held] == ["50%"] * 4
    assert blocks_of(plan, None, config, 0) == "all"


def test_a_rank_of_a_cut_holds_its_heads_columns_and_tokens() -> None:
    plan, config = plan_of(galaxy=CutConfig(size=2, heads=(2, 2), columns=(32, 16), sequence=(3, 1)))
    held = [dict(holding(plan, FAMILIES["llama"], config, rank)) for rank in range(2)]
    assert [(one["heads"], one["columns"], one["tokens"]) for one in held] == [(2, 32, "75%"), (2, 16, "25%")]
    assert held[0]["blocks"] == "decoder 0-7" and "rows" not in held[0]
