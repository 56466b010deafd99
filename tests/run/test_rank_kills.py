"""Runs of two processes of which one is killed at random moments, again and again: nothing that was committed
is lost, no bit differs.

The long form, of other plans and with other plans to go on by, is in tests/run/test_rank.py.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from petune.parallel.launch import beats, process_group
from petune.saving import checkpoint
from tests.group_pool import ends
from tests.kills import arm
from tests.planned_runs import PLANS, killed, small, trained
from tests.small_runs import assert_same_run, run, state_of

KILLS = {"dp": 9, "pp": 8, "galaxy": 4}  # 21
# In the short suite a kill is in a save, above, or before a step, in tests/parallel/launch/test_replacing.py.
CASES = [pytest.param(*kills, marks=pytest.mark.long) for kills in KILLS.items()]
LONGEST = 0.2  # seconds after training began


def assert_same_bits(found: Path, expected: Path) -> None:
    """Two checkpoints of one step."""
    (tensors, facts), (others, other_facts) = state_of(found), state_of(expected)
    assert tensors.keys() == others.keys() and facts["optimizer"] == other_facts["optimizer"]
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(
    ("plan", "rank", "calls"),
    [
        pytest.param("dp", 0, (5, 11), marks=pytest.mark.long),
        # that of a rank 0 is in tests/run/test_snapshot_of_ranks.py too
        pytest.param("tp", 0, (8,), marks=pytest.mark.long),
        ("tp", 1, (9,)),
        pytest.param("tp", 0, (8, 12), marks=pytest.mark.long),
        pytest.param("tp", 1, (3, 9), marks=pytest.mark.long),
    ],
)
def test_a_rank_killed_in_its_save_leaves_the_checkpoint_before_and_ends_the_other(
    plan: str, rank: int, calls: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(beats, "BEAT_S", 0.02)
    monkeypatch.setattr(beats, "SILENT_S", 0.1)
    shape: dict[str, Any] = {
        "save_every": 1,
        "eval_every": 50,
        "max_steps": 2 + len(calls),
        "timeout": 2,
        "parallel": PLANS[plan],
    }
    straight = trained(small(tmp_path, "llama", "lora", **shape, keep=1000, out="straight"))
    recipe = small(tmp_path, "llama", "lora", **shape)

    def train(recipe: dict[str, Any], step: int, call: int, resume: bool) -> None:
        commit = checkpoint.commit

        def armed(root: Path, at: int, *arguments: Any, **named: Any) -> Path:
            if at == step and process_group.started()[0] == rank:
                arm(call)
            return commit(root, at, *arguments, **named)

        checkpoint.commit = armed
        run(recipe, resume=resume)

    for step, call in enumerate(calls, 2):  # in the midst of a file, once its files are there
        found = ends(2, train, recipe, step, call, step > 2, timeout=30)
        assert (found[rank].code, found[1 - rank].code) == (-signal.SIGKILL, 6), (step, call, found)
        assert found[1 - rank].seconds - found[rank].seconds < 5, (step, call, found)
        path, _, damaged = checkpoint.newest_good(tmp_path / "run" / "checkpoints")
        assert path.name == f"step-{step - 1}" and not damaged, (step, call)
        assert_same_bits(path, straight / "checkpoints" / path.name)
    trained(recipe, resume=True)
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize(("plan", "kills"), CASES)
def test_a_run_killed_again_and_again_ends_bit_by_bit_as_one_that_was_not(
    plan: str, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every kill may come in a step, an evaluation, a save or a rotation; after each the newest checkpoint is
    whole and the right one."""
    monkeypatch.setattr(beats, "BEAT_S", 0.02)
    monkeypatch.setattr(beats, "SILENT_S", 0.1)
    draw, hits, runs = random.Random(plan), 0, 0
    shape: dict[str, Any] = {
        "save_every": 1,
        "eval_every": 3,
        "max_steps": 6,
        "epochs": 10,
        "timeout": 2,
        "parallel": PLANS[plan],
    }
    straight = trained(small(tmp_path, "llama", "lora", **shape, keep=1000, out="straight"))
    while hits < kills:
        recipe, resume = small(tmp_path, "llama", "lora", **shape, keep=2, out=f"run-{runs}"), False
        folder = Path(recipe["out"])
        while hits < kills:
            rank, after_s = draw.randrange(2), draw.uniform(0, LONGEST)
            found = killed(recipe, rank, after_s, resume=resume)
            if found[rank].code != -signal.SIGKILL:
                break  # it had ended before
            hits, resume = hits + 1, True
            what = (hits, rank, after_s, found[1 - rank])
            assert found[1 - rank].code in (0, 6), what
            assert found[1 - rank].code == 0 or found[1 - rank].seconds - found[rank].seconds < 10, what
            if checkpoint.candidates(folder / "checkpoints"):
                path, _, damaged = checkpoint.newest_good(folder / "checkpoints")
                assert not damaged, (what, damaged)
                assert_same_bits(path, straight / "checkpoints" / path.name)
        trained(recipe, resume=resume)
        assert_same_run(folder, straight)
        runs += 1
