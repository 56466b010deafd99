"""The charts of a step: times that follow from an order, and what is sent in the order in which ranks send
it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from petune.estimate import timeline
from petune.estimate.comm_cost import bubble
from petune.estimate.forecast import Forecast, forecast
from petune.estimate.timeline import Chart, charts, timed
from petune.parallel import collectives
from petune.parallel.pipeline.order import StageStep, order_of
from petune.parallel.pipeline.stage_module import SELECTIVE
from petune.parallel.plan import ParallelPlan, Stage
from petune.recipe import load_recipe
from tests.parallel.cells import case
from tests.parallel.harness import Case, collate, place, rows, total
from tests.parallel.plans import BACKENDS
from tests.pool import run
from tests.written_recipes import recipe_of


def plan_of(schedule: str, ranks: int, stages: int, pieces: int) -> ParallelPlan:
    one = Stage({"decoder": (0, 1)})
    return ParallelPlan(pp=ranks, stages=(one,) * stages, schedule=schedule, microbatches=pieces)


def told(tmp_path: Path, name: str = "llama-causal", **settings: Any) -> Forecast:
    return forecast(recipe_of(name, tmp_path, **settings))


def texts(chart: Chart) -> list[list[str]]:
    return [[box.text for box in row.boxes] for row in chart.rows]


# ------------------------------------------------------------------ times


@pytest.mark.parametrize(
    ("schedule", "ranks", "stages", "pieces"),
    [("gpipe", 3, 3, 5), ("1f1b", 2, 2, 2), ("1f1b", 4, 4, 9), ("interleaved", 2, 4, 8)],
)
@pytest.mark.parametrize("back", [1.0, 1.5, 2.0])
def test_equal_stages_wait_as_long_as_the_formula_says(
    schedule: str, ranks: int, stages: int, pieces: int, back: float
) -> None:
    plan = plan_of(schedule, ranks, stages, pieces)
    found = timed(order_of(plan), stages - 1, lambda step: 1.0 if step.kind == "F" else back)
    end = max(end for of_rank in found for _, _, end in of_rank)
    busy = sum(end - start for of_rank in found for _, start, end in of_rank)
    assert 1 - busy / (ranks * end) == pytest.approx(bubble(plan))
    if schedule != "interleaved":
        assert bubble(plan) == pytest.approx((stages - 1) / (pieces + stages - 1))


def test_a_pass_begins_when_what_it_reads_is_there() -> None:
    order = [
        [StageStep("F", 0, 0), StageStep("I", 0, 0), StageStep("W", 0, 0)],
        [StageStep("F", 1, 0), StageStep("B", 1, 0)],
    ]
    lengths = {("F", 0): 2.0, ("F", 1): 3.0, ("B", 1): 5.0, ("I", 0): 1.0, ("W", 0): 4.0}
    found = timed(order, 1, lambda step: lengths[step.kind, step.stage])
    assert [(start, end) for _, start, end in found[0]] == [(0, 2), (10, 11), (11, 15)]
    assert [(start, end) for _, start, end in found[1]] == [(2, 5), (5, 10)]


def test_a_message_is_on_its_way_once_its_reader_is_free() -> None:
    order = [[StageStep("F", 0, 0), StageStep("F", 0, 1)], [StageStep("F", 1, 0), StageStep("F", 1, 1)]]
    found = timed(order, 1, lambda step: (2.0, 3.0)[step.stage], lambda source, target: 0.5)
    assert [(start, end) for _, start, end in found[1]] == [(2.5, 5.5), (6, 9)]


def test_an_order_in_which_ranks_wait_for_one_another_is_told() -> None:
    with pytest.raises(RuntimeError, match="for ever"):
        timed([[StageStep("B", 0, 0)], [StageStep("F", 1, 0)]], 1, lambda step: 1.0)


# ------------------------------------------------------------------ charts


def test_one_process_has_no_charts(tmp_path: Path) -> None:
    assert charts(told(tmp_path)) == ()


def test_passes_and_what_they_send_have_the_blocks_and_bytes_of_the_plan(tmp_path: Path) -> None:
    found = told(tmp_path, parallel={"pp": {"size": 2, "microbatches": 4}})
    (chart,) = charts(found)
    (sent,) = found.transitions
    first = chart.rows[0].boxes[0]
    assert (first.text, first.start, first.end) == ("F0", 0, 1)
    assert first.title.startswith("forward of micro-batch 0 through stage 0 (decoder 0-0); sends hidden")
    assert len(chart.arrows) == 2 * 4 and {one.source for one in chart.arrows} == {0, 1}
    assert all(one.end >= one.start for one in chart.arrows)
    assert sent.forward % 4 == 0 and chart.notes[0].startswith("stage 0 to 1: ")


def test_replicas_share_a_row_and_sum_at_the_end(tmp_path: Path) -> None:
    pipeline, step = charts(told(tmp_path, parallel={"dp": 2, "pp": 2}))
    assert [row.label for row in pipeline.rows] == ["ranks 0-1", "ranks 2-3"]
    assert step.rows[0].boxes[-1].title.startswith("all-reduce, gradients over replicas")


def test_a_ladder_says_what_it_exchanges_beside_a_block() -> None:
    block, _ = charts(forecast(load_recipe("llama_side", ["parallel={galaxy: {size: 2}}"])))
    (note,) = block.notes
    assert note.startswith("beside it, ladder, decoder attention: all-gather / reduce-scatter, ")


def test_shards_are_gathered_ahead_of_both_passes(tmp_path: Path) -> None:
    (step,) = charts(told(tmp_path, parallel={"dp": {"size": 2, "shard": True}}))
    assert [text.split()[0] for text in texts(step)[0]] == [
        *("all-gather", "forward", "all-gather", "backward", "reduce-scatter")
    ]
    assert "block by block" in step.notes[0]


@pytest.mark.parametrize(
    ("name", "method", "device", "lengths"),
    [
        ("llama", "full", "cpu", {"F": 2.0, "I": 2.0, "W": 2.0}),
        ("t5", "full", "cpu", {"F": 2.0, "I": 4.0, "W": 0.0}),
        ("t5", "full", "cuda", {"F": 2.0, "I": 2.0, "W": 2.0}),
        ("llama", "lora", "cpu", {"F": 2.0, "I": 2.0 + 2 * 311_296 / 2_148_480, "W": 0.0}),
    ],
)
def test_the_pass_for_weights_takes_what_trains_where_it_can_be_split_off(
    name: str, method: str, device: str, lengths: dict[str, float]
) -> None:
    """torch cannot where T5's decoder begins, fused blocks can."""
    axis = "parallel={pp: {size: 2, stages: [2, 2, 2, 2], schedule: zero-bubble, microbatches: 4}}"
    (chart,) = charts(forecast(load_recipe(f"{name}_{method}", [axis, f"device={device}"])))
    boxes = [box for row in chart.rows for box in row.boxes]
    if SELECTIVE or device == "cuda":
        for box in boxes:
            assert box.end - box.start == pytest.approx(lengths[box.text[1]], abs=1e-9), box


def test_fused_blocks_leave_products_of_weights_whatever_torch_can_split(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeline, "SELECTIVE", False)
    axis = "parallel={pp: {size: 2, stages: [2, 2, 2, 2], schedule: zero-bubble, microbatches: 4}}"
    for device, weights in (("cpu", 0.0), ("cuda", 2.0)):
        (chart,) = charts(forecast(load_recipe("llama_full", [axis, f"device={device}"])))
        found = {box.end - box.start for row in chart.rows for box in row.boxes if box.text[1] == "W"}
        assert found == {weights}


# ------------------------------------------------------------------ against a run


def spoken(case: Case) -> list[str]:
    """What a training step of this rank says, in order."""
    runner = place(case, case.plan)
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, word in (
            (dist, "all_reduce", "all-reduce"),
            (dist, "reduce_scatter", "reduce-scatter"),
            (collectives, "_all_gather", "all-gather"),
        ):
            plain = getattr(owner, name)

            def noted(*args: Any, plain: Any = plain, word: str = word, **more: Any) -> Any:
                found.append(word)
                return plain(*args, **more)

            patch.setattr(owner, name, noted)
        runner.backward([collate(rows(case, 0)[0], case)], total(case, 0))
    return found


@pytest.mark.parametrize("backend", ["tp-whole-vocabulary", "galaxy", "sp-gather"])
def test_ranks_say_what_is_drawn_in_its_order(backend: str, tmp_path: Path) -> None:
    one = case("llama-causal", "full", BACKENDS[backend]("llama-causal", 2))
    name = backend.partition("-")[0]
    settings: dict[str, Any] = {"size": 2, "vocabulary": False} if name == "tp" else {"size": 2}
    block, *rest = charts(told(tmp_path, method="full", parallel={name: settings}))
    ahead, back = ([_operation(text) for text in row if _operation(text)] for row in texts(block))
    around = [_operation(text) or text for text in (texts(rest[0])[0] if rest else ("forward", "backward"))]
    drawn = []
    for word in around:
        drawn += {"forward": 2 * ahead, "backward": 2 * back}.get(word, [word])
    assert run(2, spoken, one)[0] == drawn


def _operation(text: str) -> str:
    """The collective in a box's text; what a rank keeps inside a part of a block counts, too."""
    words = text.replace("(", "").split()
    return next((word for word in words if word in ("all-reduce", "all-gather", "reduce-scatter")), "")


def test_plans_keep_their_own_numbers(tmp_path: Path) -> None:
    found = told(tmp_path, parallel={"galaxy": {"size": 2}})
    block, _ = charts(found)
    enter = next(one for one in found.transitions if one.when == "enter")
    none = replace(found, transitions=tuple(replace(one, backward=0) for one in found.transitions))
    assert f"sends {enter.forward // 1024} KiB" in block.rows[0].boxes[0].title or enter.forward < 1024
    assert [row.label for row in charts(none)[0].rows] == ["forward"]
