"""Jobs for Slurm and torchrun say what was asked for and are whole shell scripts."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from petune.errors import UsageError
from petune.preflight.job_script import ClusterJob, job_of, script
from petune.recipe import load_recipe

KINDS = ("slurm", "torchrun")
FAR = ClusterJob(4, 8, "1-02:00:00", 120)


def written(kind: str, job: ClusterJob = FAR, **more: Any) -> str:
    recipe = load_recipe("llama_lora", {"parallel": "dp", **more})
    return script(kind, "my recipe.yaml", recipe, ["lr=1e-3"], job, Path("a folder"))


def test_a_job_of_slurm_says_machines_time_signal_and_requeue() -> None:
    text = written("slurm")
    for line in (
        "nodes=4",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "time=1-02:00:00",
        "signal=TERM@120",
        "requeue",
    ):
        assert f"\n#SBATCH --{line}\n" in text
    assert "--chdir='a folder'" in text
    assert "--output=runs/llama_lora-logs/rank-%t.log" in text
    assert "-m petune 'my recipe.yaml' lr=1e-3 \"${resume[@]}\"\n" in text
    assert "if [ -e runs/llama_lora/resolved.yaml ]; then resume=(--resume); fi\n" in text
    assert 'if [ "$code" -eq 75 ]; then\n    scontrol requeue "$SLURM_JOB_ID"' in text
    assert "gpus" not in written("slurm", device="cpu")
    assert "#SBATCH --signal" not in written("slurm", ClusterJob(2, 1))


def test_a_job_of_torchrun_says_machines_ranks_and_a_stop_before_the_end() -> None:
    text = written("torchrun")
    assert "--nnodes 4 --nproc-per-node 8" in text
    assert f"timeout --signal=TERM {26 * 3600 - 120} " in text
    assert "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120 " in text, "ranks have as long to save"
    assert "PETUNE_SECRET:?" in text and "PETUNE_SECRET" not in written("torchrun", ClusterJob(1, 2))
    assert "timeout" not in written("torchrun", ClusterJob(2, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_is_a_whole_shell_script_and_goes_to_one_folder(kind: str) -> None:
    for text in (written(kind), written(kind, ClusterJob(2, 1), out=None)):
        assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    assert 'out=runs/llama_lora "${resume' in written(kind, out=None), "a run that goes on needs a name"


def test_words_of_the_job_are_told_from_settings() -> None:
    assert job_of(["r.yaml", "nodes=2", "lr=1", "time=0:10:00"]) == (
        ClusterJob(2, 1, "0:10:00"),
        ["r.yaml", "lr=1"],
    )
    with pytest.raises(UsageError, match=r"(?s)nodes is a whole number.*time is") as caught:
        job_of(["nodes=0", "time=soon"])
    assert len(caught.value.problems) == 2
    with pytest.raises(UsageError, match="before they begin"):
        job_of(["time=0:05:00"])
    with pytest.raises(UsageError, match="no plan for several"):
        script("slurm", "r.yaml", load_recipe("llama_lora"), [], ClusterJob(2, 1), Path())
