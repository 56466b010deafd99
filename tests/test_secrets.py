"""Secrets of the environment and in a recipe's comments: in no checkpoint, no tuned file, no record and no
log, however a run ends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from petune.errors import TrainingFault
from petune.parallel.launch.seal import SECRET
from tests.group_pool import ends
from tests.planned_runs import PLANS, infinite_loss, small, spoilt
from tests.small_runs import as_yaml, run, settings

pytestmark = pytest.mark.usefixtures("no_picture")
NAMES = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", SECRET)
TEXT = "verysecret"


def holders(folder: Path) -> set[str]:
    """The files below a folder that hold a secret, or have one in their name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    return {path.name for path in files if TEXT.encode() in path.read_bytes() or TEXT in str(path)}


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, f"{TEXT}-{name}")


def test_a_comment_of_the_recipe_stays_in_its_copy_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    recipe = as_yaml(tmp_path / "recipe.yaml", settings(tmp_path))
    recipe.write_text(f"# HF_TOKEN={TEXT}\n{recipe.read_text()}")
    finished = run(recipe)
    finished.eval()
    finished.export("peft")
    assert holders(finished.folder) == {"recipe.yaml"}
    assert TEXT not in "".join(capfd.readouterr())


def test_neither_a_run_of_two_processes_nor_a_failed_ones_traceback_holds_a_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    train = spoilt(1, 3, infinite_loss)

    def with_secrets(recipe: dict[str, Any]) -> None:
        os.environ |= {name: f"{TEXT}-{name}" for name in NAMES}
        train(recipe, {})

    found = ends(2, with_secrets, small(tmp_path, "llama", "lora", parallel=PLANS["dp"], save_every=1))
    assert [end.code for end in found] == [TrainingFault.code] * 2, found
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert holders(tmp_path / "run") == set()
    assert TEXT not in "".join(capfd.readouterr())
