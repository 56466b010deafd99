"""A run with an activation cache ends as one without, bit by bit, also when it is stopped, under plans, and
again in another run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petune.errors import MachineError, RecipeError, Stopped
from petune.files.lock import RunLock
from petune.methods import activation_cache, held_levels
from petune.methods.held_levels import CacheRoom
from petune.parallel.launch import process_group
from petune.run import activations
from petune.run.activations import find_room
from petune.saving import checkpoint
from tests.planned_runs import PLANS, small, trained
from tests.small_runs import Listener, assert_same_run, newest, numbers, run, settings, state_of, terminate_at

pytestmark = pytest.mark.usefixtures("no_picture")
EPOCHS: dict[str, Any] = {"epochs": 2, "save_every": 3, "batch_size": 8, "accumulate": 1}


def cached(place: Path, family: str, **changes: Any) -> dict[str, Any]:
    """A recipe of two epochs over 24 rows, by a ladder."""
    return settings(place, family, "side", **{**EPOCHS, "cache": True, "out": "cached", **changes})


def uncached(place: Path, family: str, **changes: Any) -> Path:
    return run(settings(place, family, "side", **{**EPOCHS, **changes})).folder


def told(listener: Listener) -> str:
    """What a run said of its cache at its end."""
    (line,) = (line for line in listener.notes if "blocks ran for" in line)
    return line


@pytest.mark.parametrize(
    "family", ["t5", *(pytest.param(name, marks=pytest.mark.long) for name in ("llama", "bert", "bart"))]
)
def test_a_run_with_a_cache_ends_as_one_without(family: str, tmp_path: Path) -> None:
    listener = Listener()
    found = run(cached(tmp_path, family), listener).folder
    expected = uncached(tmp_path, family)
    # rows of another length stand beside a row in every epoch, and float32 rounds by the width of a batch
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    stacks = 2 if family in ("bart", "t5") else 1
    assert f"blocks ran for {stacks * (24 + 9)} rows" in told(listener)
    assert not (found / "activations").exists()


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_rows_that_are_padded_alike_end_bit_by_bit_as_without_a_cache(family: str, tmp_path: Path) -> None:
    alike = {"batch_size": 24, "eval_batch_size": 9, "save_every": 2}
    found = run(cached(tmp_path, family, **alike)).folder
    assert_same_run(found, uncached(tmp_path, family, **alike))


@pytest.mark.parametrize(
    ("family", "room", "words"),
    [
        ("bert", 0.5, "rows stay on the device"),
        pytest.param("t5", 0.5, "rows stay on the device", marks=pytest.mark.long),
        ("t5", 1e-9, "read from files, a step ahead of the device"),
        pytest.param("t5", 0.0, "and cache_room is 0", marks=pytest.mark.long),
    ],
)
def test_rows_on_a_device_or_ahead_of_it_end_bit_by_bit_as_without_a_cache(
    family: str, room: float, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (held_levels, activations):
        monkeypatch.setattr(module, "free_bytes", lambda device: 2**30)
    monkeypatch.setattr(activations, "passing_bytes", lambda device: 2**20)
    monkeypatch.setattr(activation_cache, "waits_for_files", lambda device: True)
    # stored in the first epoch, kept on the device in the second, read there in the third
    alike = {"batch_size": 24, "eval_batch_size": 9, "epochs": 3, "save_every": 3}
    listener = Listener()
    one_length = {"data": {**settings(tmp_path, family, "side")["data"], "max_length": 8}}
    found = run(cached(tmp_path, family, cache_room=room, **alike, **one_length), listener).folder
    assert any(words in line for line in listener.notes)
    assert ("of it on the device" in told(listener)) is (room == 0.5)
    assert_same_run(found, uncached(tmp_path, family, **alike, **one_length))


@pytest.mark.parametrize(("passing", "fits"), [(50, True), (110, False)])
def test_rows_wait_for_a_step_and_leave_it_its_memory(
    passing: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 bytes of rows, half of 400 that are free: what a step takes counts twice, as other rows are twice
    as long."""
    monkeypatch.setattr(activations, "free_bytes", lambda device: 400)
    monkeypatch.setattr(activations, "passing_bytes", lambda device: passing)
    cache: Any = SimpleNamespace(room=CacheRoom(0.5), own_bytes=lambda *_: 100, reads_ahead=True)
    rows = [SimpleNamespace(size=size, has_target=False, others=()) for size in (4, 8)]
    step: Any = SimpleNamespace(
        place=SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32),
        progress=SimpleNamespace(step=1),
        rows_of=lambda number: rows[:1],
        prepared=SimpleNamespace(encoded=SimpleNamespace(train=rows, eval=rows)),
        model=torch.nn.Linear(1, 1),
    )
    assert find_room(step, cache, stepped=False) is None and not cache.room.on(step.place.device)
    said = find_room(step, cache, stepped=True)
    assert said is not None and ("stay on the device" in said) is fits is cache.room.on(step.place.device)
    assert cache.room.most == (150 if fits else None)
    assert find_room(step, cache, stepped=True) is None


@pytest.mark.long
def test_the_control_reads_what_the_blocks_gave_and_fits_the_same_head(tmp_path: Path) -> None:
    alike = {"batch_size": 24, "eval_batch_size": 9, "epochs": 1, "save_every": 9, "head_only": True}
    listener, other = Listener(), Listener()
    run(cached(tmp_path, "bert", **alike), listener)
    run(settings(tmp_path, "bert", "side", **{**EPOCHS, **alike}), other)
    # run for the base's 9 rows and the control's 24; read for its other 9, the epoch, the last evaluation
    assert "blocks ran for 33 rows and were read for 42" in told(listener)
    assert [line for line in listener.notes if "control:" in line] == [
        line for line in other.notes if "control:" in line
    ]


@pytest.mark.long
@pytest.mark.parametrize("way", ["cached and resumed", "in stages"])
def test_a_pruned_ladder_is_the_same_however_it_is_trained(way: str, tmp_path: Path) -> None:
    own: dict[str, Any] = {"name": "side", "reduction": 4, "start": "pruned"}
    short: dict[str, Any] = {"method": own, "max_steps": 3, "save_every": 2}
    expected = run({**settings(tmp_path, "bert", "side"), **short}).folder
    if way == "in stages":
        found = trained({**settings(tmp_path, "bert", "side", parallel=PLANS["pp"], out="staged"), **short})
    else:
        again = {**settings(tmp_path, "bert", "side", cache=True, out="again"), **short}
        with pytest.raises(Stopped):
            run(again, terminate_at(2))
        found = run(again, resume=True).folder
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_run_that_is_stopped_and_resumed_computes_no_row_twice(tmp_path: Path) -> None:
    recipe = cached(tmp_path, "bert")
    with pytest.raises(Stopped):
        run(recipe, terminate_at(4))
    assert (tmp_path / "cached" / "activations").is_dir()
    listener = Listener()
    found = run(recipe, listener, resume=True).folder
    assert "blocks ran for 0 rows" in told(listener)
    for one, other in zip(numbers(found), numbers(uncached(tmp_path, "bert")), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_a_folder_of_ones_own_serves_the_next_run(tmp_path: Path) -> None:
    recipe = cached(tmp_path, "llama", cache_folder=str(tmp_path / "kept"), epochs=1)
    run(recipe)
    listener = Listener()
    run(recipe | {"out": str(tmp_path / "second"), "lr": 2e-3, "seed": 3}, listener)
    assert "blocks ran for 0 rows" in told(listener)
    assert list((tmp_path / "kept").glob("*/*.index"))


def test_a_folder_that_another_run_writes_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    with RunLock(tmp_path / "kept"), pytest.raises(MachineError):
        run(cached(tmp_path, "llama", cache_folder=str(tmp_path / "kept")))


def test_a_disk_without_room_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def require(path: Path, needed: int) -> None:
        asked.append(needed)
        if "activations" in str(path):
            raise MachineError("not enough disk space", where=str(path))

    monkeypatch.setattr(checkpoint, "require_free", require)
    listener = Listener()
    with pytest.raises(MachineError, match="not enough disk space"):
        run(cached(tmp_path, "llama"), listener)
    assert listener.steps == [] and asked[-1] > 0


@pytest.mark.usefixtures("no_picture")
def test_ranks_that_opened_a_cache_say_that_a_lost_one_starts_all_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in its place would open the cache with ranks that are past that, and wait for them in vain."""
    said: list[str | None] = []
    monkeypatch.setattr(process_group, "settle", said.append)
    short = {"max_steps": 1, "warmup": 0, "save_every": 50, "report": False}
    run(settings(tmp_path, "bert", "side", cache=True, **short))
    assert said == ["the activation cache is opened by all ranks together"]


@pytest.mark.parametrize(
    ("plan", "family", "layers"),
    [
        ("pp", "llama", [1]),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for pair in (("pp", "bart"), ("tp", "t5"), ("sp", "bert"), ("dp", "llama"), ("galaxy", "llama"))
            for one in ((*pair, None), (*pair, [1]))
        ),
        pytest.param("pp", "llama", None, marks=pytest.mark.long),
    ],
)
def test_ranks_share_a_cache_and_train_as_without(
    plan: str, family: str, layers: list[int] | None, tmp_path: Path
) -> None:
    method = {"name": "side", "reduction": 4, "layers": layers}
    changes: dict[str, Any] = {"max_steps": 4, "epochs": 2}
    expected = trained(small(tmp_path, family, method, **changes))
    changes |= {"parallel": PLANS[plan], "cache": True, "out": str(tmp_path / "cached")}
    found = trained(small(tmp_path, family, method, **changes))
    for one, other in zip(numbers(found), numbers(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    (tensors, _), (others, _) = state_of(newest(found)), state_of(newest(expected))
    for name, value in others.items():
        if name.startswith("tuned/"):
            torch.testing.assert_close(tensors[name], value, rtol=1e-3, atol=1e-4)
    log = (found / "run.log").read_text()
    assert "blocks ran for" in log and "and were read for 0" not in log


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": "lora"}, "frozen blocks"),
        ({"parallel": {"dp": {"size": 2, "shard": True}}}, "sharded weights"),
        ({"compile": True}, "runs its blocks"),
        ({"cache": False, "cache_folder": "x"}, "is off"),
        ({"cache": "fp16"}, "cache"),
    ],
    ids=["method", "sharded", "compiled", "folder alone", "dtype"],
)
def test_what_does_not_go_with_a_cache_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=words):
        run(cached(tmp_path, "llama") | changes)


def test_masks_that_are_drawn_anew_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="other masks in every epoch"):
        run(cached(tmp_path, "bert") | {"task": "mlm"})
