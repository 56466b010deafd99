"""Runs that train a head alone: what a cache changes of them, what they say, what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from petune.errors import RecipeError, Stopped, UsageError
from petune.log import human
from petune.models.stack import Stack
from petune.recipe import load_recipe
from petune.run.summary import ways_out
from tests.picture_runs import write_pictures, write_vit
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import (
    Listener,
    assert_same_run,
    brief,
    newest,
    numbers,
    run,
    settings,
    state_of,
    terminate_at,
    training,
)

pytestmark = pytest.mark.usefixtures("no_picture")
long = pytest.mark.long
HEAD: dict[str, Any] = {"name": "head"}
# rows are padded alike in every epoch
ALIKE: dict[str, Any] = {
    "batch_size": 24,
    "accumulate": 1,
    "eval_batch_size": 9,
    "epochs": 3,
    "save_every": 3,
}


@pytest.mark.parametrize(
    ("family", "task", "rows"),
    [
        ("bert", "classify", 33),
        *(pytest.param(*one, marks=long) for one in (("llama", "classify", 33), ("bert", "tokens", 33))),
        pytest.param("bert", "rerank", 99, marks=long),
    ],
)
def test_a_run_with_a_cache_ends_bit_by_bit_as_without_and_runs_each_row_once(
    family: str, task: str, rows: int, tmp_path: Path
) -> None:
    """Though the base has dropout, which is off while a head trains alone."""
    listener = Listener()
    recipe = settings(tmp_path, family, HEAD, task=task, **ALIKE)
    cached = recipe | {"cache": True, "out": str(tmp_path / "cached"), "head_only": True}
    found = run(cached, listener)
    assert_same_run(found.folder, run(recipe).folder)
    (told,) = (line for line in listener.notes if "blocks ran for" in line)
    assert f"blocks ran for {rows} rows" in told
    (asked,) = (line.partition("at most ")[2] for line in listener.notes if "at most" in line)
    width = 32 if task != "tokens" else 0  # a vector for each row; of tokens as many as there are
    assert not width or asked.startswith(f"{human(rows * width * 4)} in ")
    distinct = human(59 * width * 4) if task == "rerank" else asked.partition(" in ")[0]
    assert told.startswith(f"cache: {distinct};"), "the room that is asked for is what all rows take"
    assert any("of the backbone's blocks leave memory" in line for line in listener.notes)
    assert found.summary["head_only"] is None, "the control would be the run itself"
    (head,) = {name.partition(".")[0] for name in load_file(found.folder / "tuned/tuned.safetensors")}
    assert head in ("classifier", "score")


def test_a_stopped_run_goes_on_and_computes_no_row_twice(tmp_path: Path) -> None:
    recipe = settings(tmp_path, "bert", HEAD, **ALIKE, cache=True)
    with pytest.raises(Stopped):
        run(recipe, terminate_at(2))
    listener = Listener()
    found = run(recipe, listener, resume=True).folder
    assert any("blocks ran for 0 rows" in line for line in listener.notes)
    plain = recipe | {"cache": False, "out": str(tmp_path / "plain")}
    for one, other in zip(numbers(found), numbers(run(plain).folder), strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("pp", "llama"),
        *(pytest.param(*one, marks=long) for one in (("tp", "bert"), ("dp", "llama"), ("sp", "bert"))),
        *(pytest.param(*one, marks=long) for one in (("galaxy", "llama"), ("pp", "bert"))),
    ],
)
def test_ranks_train_a_cached_head_as_one_process_trains_it(plan: str, family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"task": "classify", "max_steps": 4}
    expected = trained(small(tmp_path, family, HEAD, **changes))
    more = {"parallel": PLANS[plan], "cache": True, "out": str(tmp_path / "ranks")}
    found = trained(small(tmp_path, family, HEAD, **changes, **more))
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    (tensors, _), (others, _) = state_of(newest(found)), state_of(newest(expected))
    names = [name for name in others if name.startswith("tuned/")]
    assert names and all(name in tensors for name in names)
    for name in names:
        torch.testing.assert_close(tensors[name], others[name], rtol=1e-4, atol=1e-5)
    assert "and were read for 0" not in (found / "run.log").read_text()


def test_a_base_beside_a_cache_is_not_told_its_mode_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To go through all its modules twice is a good part of a step that runs no block."""
    told, train = list[bool](), Stack.train

    def counted(self: Stack, mode: bool = True) -> Stack:
        told.append(mode)
        return train(self, mode)

    recipe = settings(tmp_path, "bert", HEAD, cache=True, batch_size=2, accumulate=1, max_steps=9)
    monkeypatch.setattr(Stack, "train", counted)
    run(recipe | {"save_every": 9, "warmup": 0})
    assert told.count(True) == 2, "before the first step, and as the last evaluation has found it"


def test_a_pooler_that_the_checkpoint_lacks_trains_with_the_head(tmp_path: Path) -> None:
    recipe = settings(tmp_path, "bert", HEAD, cache=True, **ALIKE)
    file = tmp_path / "bert" / "model.safetensors"
    values = {name: value for name, value in load_file(file).items() if "pooler" not in name}
    save_file(values, file, {"format": "pt"})
    found = run(recipe)
    assert {name.rpartition(".")[0] for name in load_file(found.folder / "tuned/tuned.safetensors")} == {
        *("bert.pooler.dense", "classifier"),
    }


def test_a_merged_run_and_a_new_one_from_its_head_begin_where_it_ended(tmp_path: Path) -> None:
    first = run(brief(tmp_path, "bert", HEAD))
    again = training(brief(tmp_path, "bert", HEAD, init_adapter=str(first.folder / "tuned"), out="again"))
    head = load_file(first.folder / "tuned/tuned.safetensors")
    assert {name: value.tolist() for name, value in again.tuned.items()} == {
        name: value.tolist() for name, value in head.items()
    }
    merged = load_file(first.merge() / "model.safetensors")
    assert "nothing is summed, logits 0 from" in first.merge_report
    base = load_file(tmp_path / "bert" / "model.safetensors")
    assert all(torch.equal(merged[name], value) for name, value in head.items())
    assert all(torch.equal(merged[f"bert.{name}"], value) for name, value in base.items())
    with pytest.raises(UsageError, match=r"no file for head[\s\S]*use --to hf"):
        first.export("peft")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gradient_checkpointing": True}, "under this method they have none"),
        ({"memory": "input"}, "under this method they have none"),
        ({"cache": True, "parallel": {"dp": {"size": 2, "shard": True}}}, "sharded weights"),
        ({"method": {"name": "head", "r": 4}}, "r"),
        ({"method": "linear-probe"}, "head"),
    ],
    ids=["recomputed", "kept", "sharded cache", "a setting of another", "another's word"],
)
def test_what_means_nothing_for_a_head_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        run(brief(tmp_path, "bert", HEAD) | changes)


@long
def test_classes_of_pictures_train_as_without_a_cache(tmp_path: Path) -> None:
    write_vit(tmp_path / "vit")
    data = str(write_pictures(tmp_path))
    recipe = {"model": str(tmp_path / "vit"), "data": data, "method": "head", "lr": 0.01, "epochs": 3}
    recipe |= {"out": str(tmp_path / "plain"), "device": "cpu", "batch_size": 4}
    listener = Listener()
    found = run(recipe | {"cache": True, "out": str(tmp_path / "cached")}, listener).folder
    for one, other in zip(numbers(found), numbers(run(recipe).folder), strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert any("blocks ran for 24 rows" in line for line in listener.notes)


def test_who_runs_out_of_memory_is_not_told_what_would_be_refused(tmp_path: Path) -> None:
    told = ways_out(load_recipe(brief(tmp_path, "bert", HEAD)), "forward and backward pass")
    assert "batch_size=1 accumulate=4 (the same numbers)" in told
    assert "gradient_checkpointing=true" not in told


@pytest.mark.parametrize(("family", "task"), [("llama", "causal"), ("bert", "embed")])
def test_a_task_without_a_head_of_its_own_is_refused_before_the_first_step(
    family: str, task: str, tmp_path: Path
) -> None:
    listener = Listener()
    with pytest.raises(UsageError, match="head trains what a task puts behind the blocks"):
        run(brief(tmp_path, family, HEAD, task=task), listener)
    assert not listener.steps
