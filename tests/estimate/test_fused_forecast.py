"""What fused blocks would keep on a device that is not here: measured plans of Llama-3.1-8B on an H200, and
who is not fused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from petune.errors import UsageError
from petune.estimate import fused_forecast
from petune.estimate.cluster import Cluster, Device, LinkSpeed
from petune.estimate.footprint import held_by
from petune.estimate.forecast import PROCESS, Forecast, sketch
from petune.estimate.fused_forecast import (
    CARDS,
    FIRST,
    Outlook,
    block_shapes,
    on_device,
    outlook,
    policy_for,
)
from petune.estimate.step_time import Clock
from petune.estimate.workload import workload
from petune.kernels.configs import LEVELS, Rung
from petune.kernels.fuse import fused_blocks
from petune.kernels.memory.block_cost import rates_of
from petune.kernels.memory.block_step import GIB, BlockStep
from petune.kernels.memory.buffers import waiting_bytes
from petune.kernels.memory.core_shape import core_shape
from petune.kernels.memory.policy import Policy
from petune.kernels.memory.policy_hook import rounded
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ALONE, Cut, ParallelPlan, Stage
from petune.recipe import Recipe, load_recipe
from tests.methods.zoo import MOE, ZOO
from tests.written_recipes import foretold, recipe_of, sketched

pytestmark = pytest.mark.slow  # shapes of 32 blocks
H200 = int(CARDS["H200"] * GIB)
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}


def large(folder: Path, rows: int, tokens: int, blocks: int = 32, **settings: Any) -> Recipe:
    """Llama-3.1-8B, or so many blocks of it, with LoRA of rank 16 on a CUDA device; nobody reads its data."""
    place = folder / "8b.json"
    place.write_text(json.dumps(ZOO["llama-causal"][1](**LLAMA_8B | {"num_hidden_layers": blocks}).to_dict()))
    data = {"path": "nowhere.jsonl", "max_length": tokens}
    base = {
        "model": f"config:{place}",
        "data": data,
        "task": "causal",
        "method": "lora",
        "batch_size": rows,
        "device": "cuda",
    }
    return load_recipe({**base, **settings})


def mixture(folder: Path, blocks: int, **settings: Any) -> Recipe:
    """So many blocks of Qwen3-30B-A3B with LoRA of rank 16 on attention and experts."""
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": blocks,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    recipe = large(folder, 4, 2048, **settings)
    (folder / "8b.json").write_text(json.dumps(MOE["qwen3moe-causal"][1](**sizes).to_dict()))
    return recipe


def chosen(recipe: Recipe, device: str = "H200", memory: int = H200) -> Policy:
    found = policy_for(sketched(recipe), ALONE, recipe.batch_size, device, memory)
    assert isinstance(found, Policy), found
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """What all 32 blocks keep of four rows of 2048 tokens, for all tests that ask."""
    return chosen(large(tmp_path_factory.mktemp("plain"), 4, 2048))


@pytest.mark.parametrize("card", ["H200", pytest.param("H100", marks=pytest.mark.long)])
@pytest.mark.parametrize("work", ["mixture", pytest.param("lora", marks=pytest.mark.long), "full"])
def test_a_planner_tells_the_time_of_one_device_as_its_policy_does(
    work: str, card: str, tmp_path: Path
) -> None:
    recipe = mixture(tmp_path, 12) if work == "mixture" else large(tmp_path, 4, 2048, 8, method=work)
    free, drawn = LinkSpeed(0.0, 1e15), sketched(recipe)
    told = Clock(workload(drawn), Cluster((Device(card, rates_of(card)),), free, free)).of(ALONE)
    assert told.total == pytest.approx(chosen(recipe, card, 1000 * GIB).seconds, rel=0.08)


def seen(recipe: Recipe, memory: int = H200, device: str | None = "H200", **options: Any) -> Outlook:
    return outlook(foretold(recipe, memory=[memory], **options), device)


# ------------------------------------------------------------------ what is chosen


def test_a_short_batch_of_a_large_model_keeps_all(plain: Policy) -> None:
    assert plain.rungs == (Rung("all"),) * 32
    assert plain.peak / GIB == pytest.approx(40.0, rel=0.02)  # as measured
    assert plain.seconds == pytest.approx(0.470, rel=0.08)  # as measured
    assert 130 * GIB < plain.budget < H200 - PROCESS["cuda"]


def test_a_long_row_rests_in_host_memory(tmp_path: Path) -> None:
    found = chosen(large(tmp_path, 1, 131072, memory={"budget": 80}))
    assert found.rungs[0] == Rung("attention", "attention")
    assert found.budget == 80 * GIB and found.peak < 40 * GIB and 60 * GIB <= found.host <= 62 * GIB
    with pytest.raises(UsageError, match="does not fit its memory"):
        chosen(large(tmp_path, 1, 131072, memory={"budget": 24, "host": 1}))


@pytest.mark.parametrize(("stream", "bytes_"), [("bf16", 6), ("fp32", 14)])
def test_streamed_blocks_rest_on_the_host_with_their_states(stream: str, bytes_: int, tmp_path: Path) -> None:
    recipe = large(
        tmp_path,
        1,
        131072,
        method="full",
        clip=None,
        memory={"stream": stream, "keep": "input", "offload": "none"},
    )
    found = seen(recipe)
    (policy,), (rank,) = found.policies, found.forecast.ranks
    blocks = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert policy.host == bytes_ * blocks
    assert policy.seconds == pytest.approx(41.5, rel=0.2)  # as measured, with inputs offloaded
    outside = 2 * 128256 * 4096 + 4096
    slots = 3 * (bytes_ + 2) * blocks / 32
    assert rank.memory.total == policy.peak
    assert rank.memory.total - rank.memory.activations == pytest.approx(2 * 2 * outside + slots, rel=1e-3)
    # norms left out
    assert rank.memory.at_rest == pytest.approx(bytes_ * blocks + (bytes_ - 2) * outside, rel=1e-3)


def test_a_plan_is_refused_as_the_run_would_be(tmp_path: Path) -> None:
    streams = {"method": "full", "clip": None, "memory": {"stream": "bf16"}}
    with pytest.raises(UsageError, match="keeps weights in bf16"):
        sketch(large(tmp_path, 1, 128, **streams, device="cpu"))
    narrow = foretold(large(tmp_path, 1, 128, **streams, device="cpu", dtype="bf16"))
    assert outlook(narrow).lines[0].startswith("blocks   refused on a CPU")
    assert "method=lora" not in dict(narrow.knobs)


def test_settings_of_memory_are_honoured(tmp_path: Path) -> None:
    assert chosen(large(tmp_path, 4, 2048, 2, memory="attention")).rungs == (Rung("attention"),) * 2
    again = chosen(large(tmp_path, 4, 2048, 2, gradient_checkpointing=True))
    assert {rung.keep for rung in again.rungs} == {"input"}
    tiled = chosen(large(tmp_path, 4, 2048, 2, memory={"keep": "input", "tile": 2048, "budget": 30}))
    assert tiled.tile == 2048 and tiled.budget == 30 * GIB


def test_eight_bits_are_faster_and_hold_half_of_the_blocks_weights(tmp_path: Path) -> None:
    plain, eight = (chosen(large(tmp_path, 4, 2048, 8, **own)) for own in ({}, {"base_dtype": "fp8"}))
    weights = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert eight.seconds < 0.8 * plain.seconds
    # the room for factors is gone too, and rows in eight bits come
    assert plain.peak - eight.peak == pytest.approx(weights, rel=0.1)


def test_the_forecast_counts_a_byte_a_weight_and_its_scales(tmp_path: Path) -> None:
    plain, eight = (
        seen(large(tmp_path, 4, 2048, 4, **own)).forecast.ranks[0].memory
        for own in ({}, {"base_dtype": "fp8"})
    )
    weights, outputs = (
        4 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336),
        4 * (3 * 4096 + 2 * 1024 + 2 * 14336),
    )
    assert plain.frozen - eight.frozen == weights - 4 * outputs
    assert eight.tuned == plain.tuned and eight.activations > 0


def test_four_bits_hold_a_quarter_and_take_the_time_to_be_made_dense(
    tmp_path: Path,
) -> None:
    plain, four = (seen(large(tmp_path, 4, 2048, 8, **own)) for own in ({}, {"base_dtype": "nf4"}))
    numbers = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    saved = plain.forecast.ranks[0].memory.frozen - four.forecast.ranks[0].memory.frozen
    assert saved == numbers * 2 - (numbers / 2 + numbers / 64 + 4 * numbers / 64 / 256 + 4 * 7 * 8)
    (one,), (two,) = plain.policies, four.policies
    assert one.seconds < two.seconds < 1.1 * one.seconds
    # what is made dense, and its room, come; the standing room for factors goes
    assert one.peak - two.peak == pytest.approx(saved, rel=0.1)


def test_a_smaller_device_is_slower_and_rests_more_in_its_host(plain: Policy, tmp_path: Path) -> None:
    memory = int(CARDS["A100-40"] * GIB)
    small = chosen(large(tmp_path, 4, 2048), "A100-40", memory)
    assert small.host > plain.host == 0 and small.seconds > plain.seconds
    assert small.peak <= small.budget < memory - PROCESS["cuda"]


def test_an_encoder_is_fused_without_a_vocabulary(tmp_path: Path) -> None:
    recipe = recipe_of("bert-classify", tmp_path, device="cuda", batch_size=64)
    assert chosen(recipe).rungs == (Rung("all"),) * 2


def test_what_does_not_fit_is_said_at_the_line_of_the_recipe(tmp_path: Path) -> None:
    large(tmp_path, 4, 2048)
    file = tmp_path / "mine.yaml"
    rows = [
        "model: config:8b.json",
        "data: {path: nowhere.jsonl, max_length: 2048}",
        "task: causal",
        "method: lora",
    ]
    file.write_text("\n".join([*rows, "device: cuda", "memory: {keep: all, budget: 20}"]) + "\n")
    with pytest.raises(UsageError) as caught:
        seen(load_recipe(file))
    (problem,) = caught.value.problems
    assert problem.where == f"{file}:6" and problem.what.startswith("memory: ")
    assert "at most 20.0 GiB" in str(problem.expected) and "memory: auto fits" in str(problem.remedy)


# ------------------------------------------------------------------ who is not fused


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("llama-causal", {"kernels": "off"}, "kernels: off"),
        ("llama-causal", {"compile": True}, "compile: true"),
    ],
    ids=str,
)
def test_blocks_that_are_not_fused_have_a_reason(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    found = foretold(recipe_of(name, tmp_path, **{"device": "cuda", **settings}), memory=[H200])
    told = outlook(found, "H200")
    assert told.policies == () and told.forecast is found
    (line,) = told.lines
    assert line.startswith("blocks   unfused: ") and line.endswith(reason)


def keeps(policy: Policy | str) -> list[str]:
    assert isinstance(policy, Policy), policy
    return [rung.keep for rung in policy.rungs]


@pytest.mark.parametrize("plan", ["tp", "galaxy"])
def test_ranks_that_share_blocks_keep_the_same_and_hold_their_parts(plan: str, tmp_path: Path) -> None:
    shares = {"heads": [24, 8], "columns": [10752, 3584], "vocabulary": False}
    recipe, memory = large(tmp_path, 8, 4096, 8, parallel={plan: shares}), [H200 // 14, H200 // 2]
    told = outlook(foretold(recipe, memory=memory), "H200")
    first, second = told.policies
    drawn = told.forecast.drawn
    alone = [
        policy_for(drawn, told.forecast.plan, 8, "H200", own, Coordinate(tp=at))
        for at, own in enumerate(memory)
    ]
    assert keeps(first) == keeps(second) and first.tile == second.tile
    assert keeps(alone[0]) != keeps(alone[1]), "they would have kept different things"
    assert keeps(first) == [min(both, key=LEVELS.index) for both in zip(*map(keeps, alone), strict=True)]
    whole = policy_for(drawn, ALONE, 8, "H200", H200)
    assert isinstance(whole, Policy) and first.peak < whole.peak


@pytest.mark.parametrize("exchange", ["gather", "ulysses", "ring"])
def test_ranks_that_hold_tokens_keep_the_same_of_their_own(exchange: str, tmp_path: Path) -> None:
    """Every rank holds whole blocks, and of what they keep a part for each of its tokens."""
    plan = {"sp": {"sequence": [3, 1], "exchange": exchange}}
    recipe = large(tmp_path, 4, 4096, 8, parallel=plan)
    told = outlook(foretold(recipe, memory=[H200 // 2, H200]), "H200")
    first, second = told.policies
    (alone,) = outlook(foretold(large(tmp_path, 4, 4096, 8), memory=[H200]), "H200").policies
    assert told.lines[0].startswith("blocks   fused") and keeps(first) == keeps(second)
    assert second.peak < first.peak < alone.peak and second.seconds < alone.seconds / 2


def test_a_stage_keeps_as_much_as_its_passes_on_the_way_leave_it(tmp_path: Path) -> None:
    """Eight pieces of four rows in four stages: four passes on the first rank, one on the last."""
    axis = {"size": 4, "microbatches": 8}
    recipe = large(tmp_path, 32, 4096, parallel={"pp": axis}, memory={"offload": "none"})
    told = outlook(foretold(recipe, memory=[H200 // 3]), "H200")
    assert [len(policy.rungs) for policy in told.policies] == [9, 9, 8, 6], "the last one has the head"
    assert told.policies[-1].rungs == (Rung("all"),) * 6, "one pass on the way"
    kept = [fmean(LEVELS.index(rung.keep) for rung in policy.rungs) for policy in told.policies]
    assert kept[0] < kept[-1] and kept == sorted(kept)
    assert all(policy.peak <= H200 // 3 for policy in told.policies)
    assert all(rank.total <= H200 // 3 for rank in told.forecast.ranks)


def test_a_pipeline_is_as_fast_as_its_slowest_stage_and_its_bubble_let_it(tmp_path: Path) -> None:
    axis = {"size": 2, "microbatches": 4}
    told = outlook(foretold(large(tmp_path, 8, 2048, 8, parallel={"pp": axis}), memory=[H200]), "H200")
    step = 4 * max(policy.seconds for policy in told.policies) / (1 - told.forecast.bubble)
    assert told.forecast.bubble == pytest.approx(1 / 5)
    assert f"{8 * 2048 / step:,.0f} tokens/s predicted" in told.lines[-1]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({}, "all"),
        ({"memory": "input"}, "input"),
        ({"gradient_checkpointing": True}, "levels are computed again"),
    ],
)
def test_blocks_beside_a_ladder_keep_nothing_and_its_own_what_is_asked(
    asked: dict[str, Any], kept: str, tmp_path: Path
) -> None:
    settings = {"method": {"name": "side", "reduction": 4}, "device": "cuda", **asked}
    found = foretold(recipe_of("llama-causal", tmp_path, **settings), memory=[H200])
    told = outlook(found, "H200")
    assert told.policies == ()
    assert told.forecast.ranks[0].memory.activations < found.ranks[0].memory.activations or "again" in kept
    assert told.lines == (f"blocks   fused: the backbone's keep nothing, the ladder's {kept}",)


@pytest.mark.parametrize("name", ["deberta-classify", "qwen3next-causal"])
def test_what_a_block_calls_keeps_bytes_of_the_dtype_it_computes_in(name: str, tmp_path: Path) -> None:
    kept = []
    for precision in ("fp32", "bf16"):
        drawn = sketched(recipe_of(name, tmp_path, device="cuda", dtype=precision, method="full"))
        held = held_by(drawn.model, drawn.family, ALONE, FIRST).modules
        (shape, *_) = block_shapes(drawn, ALONE, held)
        (core,) = next(block for one in held for block in fused_blocks(one)).spec.called
        assert shape.called == core_shape(core, drawn.work.itemsize, max(drawn.work.tokens.values()))
        kept.append(shape.called_core.kept)
    assert kept[1] < kept[0]


def test_blocks_below_a_head_alone_keep_nothing(tmp_path: Path) -> None:
    settings = {"method": {"name": "head"}, "device": "cuda"}
    found = foretold(recipe_of("llama-classify", tmp_path, **settings), memory=[H200])
    told = outlook(found, "H200")
    cast_head = 2 * 3 * found.drawn.config.hidden_size
    assert (told.policies, told.forecast.ranks[0].memory.activations) == ((), cast_head)
    assert told.lines == ("blocks   fused: they keep nothing, as no gradient goes back through them",)


def test_what_is_asked_for_by_name_and_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.kernels.fuse.unownable", lambda model: "it drops whole layers")
    with pytest.raises(UsageError, match=r"argument  memory\.stream: not all blocks"):
        asked = {"method": "full", "clip": None, "memory": {"stream": "bf16"}}
        seen(recipe_of("llama-causal", tmp_path, device="cuda", **asked))


@pytest.mark.parametrize(
    ("kernels", "word"), [("auto", "unfused"), ("reference", "fused"), ("triton", "refused")]
)
def test_without_a_device_the_way_to_name_one_is_told(kernels: str, word: str, tmp_path: Path) -> None:
    (line,) = seen(recipe_of("llama-causal", tmp_path, kernels=kernels), device=None).lines
    assert line.startswith(f"blocks   {word}") and "on a CPU" in line and "--device H200" in line


def test_a_device_that_cannot_run_them_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = foretold(recipe_of("llama-causal", tmp_path, device="cuda"), memory=[16 * GIB])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(fused_forecast, "refusal", lambda *_: "they need compute capability 8.0")
    assert outlook(found).lines == ("blocks   unfused: they need compute capability 8.0",)


# ------------------------------------------------------------------ the forecast with it


def test_the_peak_takes_the_place_of_the_estimate(tmp_path: Path) -> None:
    recipe = large(tmp_path, 4, 2048, 8)
    before, told = foretold(recipe, memory=[H200]).ranks[0], seen(recipe)
    (rank,), (policy,) = told.forecast.ranks, told.policies
    assert rank.total == policy.peak + PROCESS["cuda"]
    assert replace(rank.memory, activations=before.memory.activations) == before.memory
    assert told.lines[1:3] == policy.lines()
    assert told.lines[0] == "blocks   fused on H200, whose rates are measured"
    predicted, roofline = (f"{8192 / seconds:,.0f}" for seconds in (policy.seconds, policy.roofline))
    assert told.lines[3].startswith(f"speed    {predicted} tokens/s predicted, {roofline} at the roofline")
    told.forecast.check()


def test_replicas_have_policies_of_their_rows(tmp_path: Path) -> None:
    even = seen(large(tmp_path, 4, 2048, 8, parallel={"dp": 2}))
    assert len(even.lines) == 4 and len(set(even.policies)) == 1
    told = seen(large(tmp_path, 4, 2048, 8, parallel={"dp": {"shares": [3, 1]}}))
    assert [policy.peak for policy in told.policies] == [
        rank.total - PROCESS["cuda"] for rank in told.forecast.ranks
    ]
    assert told.policies[0].peak > even.policies[0].peak > told.policies[1].peak
    assert [line for line in told.lines if line.startswith("ranks")] == ["ranks    0", "ranks    1"]


def test_shards_leave_room_that_blocks_keep_more_in(tmp_path: Path) -> None:
    alone = seen(large(tmp_path, 4, 4096), 60 * GIB)
    told = seen(large(tmp_path, 8, 4096, parallel={"dp": {"size": 2, "shard": True}}), 60 * GIB)
    (whole,), (policy, _) = alone.forecast.ranks, told.policies
    stands = [rank.memory.total - rank.memory.activations for rank in (whole, *told.forecast.ranks)]
    assert stands[1] < 0.75 * stands[0], "a half, and what is gathered"
    assert policy.host < alone.policies[0].host
    assert told.forecast.ranks[0].total == policy.peak + PROCESS["cuda"]


def test_devices_of_unknown_memory_have_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found: Forecast = foretold(recipe_of("llama-causal", tmp_path, device="cuda"))
    assert outlook(found, "H200").lines == (
        "blocks   fused, but the memory of the devices is not known: give --memory",
    )


def test_nothing_is_changed_in_the_model_that_is_looked_at(tmp_path: Path) -> None:
    drawn = sketched(recipe_of("llama-causal", tmp_path, device="cuda"))
    before = str(drawn.model)
    policy_for(drawn, ALONE, 8, "H200", H200)
    assert str(drawn.model) == before


def test_products_of_weights_that_wait_are_counted_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two blocks a rank, of one pass of one of them on rank 0, and of two on rank 1, which puts one off."""
    asked: list[Any] = []
    monkeypatch.setattr(
        fused_forecast,
        "choose",
        lambda step, *_: asked.append((step.shape, step.fixed, step.tokens)),
    )
    drawn = sketched(large(tmp_path, 64, 2048, 4, method="full"))
    one = ParallelPlan(
        pp=2, stages=tuple(Stage({"decoder": (at, at + 1)}) for at in range(4)), microbatches=4
    )
    for schedule, rank in product(("interleaved", "zero-bubble"), range(2)):
        policy_for(drawn, replace(one, schedule=schedule), 64, "H200", H200, Coordinate(pp=rank))
    (shape, first, tokens), (_, second, _) = asked[:2]
    own = waiting_bytes(shape) * tokens
    assert [fixed for _, fixed, _ in asked[2:]] == [first + own, second + 2 * own]


def test_products_of_rows_that_go_in_halves_are_not_counted_as_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows alone are sure to: other rows are padded, and go at once."""
    fixed: list[int] = []
    monkeypatch.setattr(fused_forecast, "choose", lambda step, *_: fixed.append(step.fixed))
    drawn = sketched(large(tmp_path, 64, 2048, 4, method="full"))
    data = replace(drawn.recipe.data, chunk=True)
    windows = replace(drawn, recipe=drawn.recipe.model_copy(update={"data": data}))
    cut = Cut("heads", "heads", "whole", "gather", (16, 16), (4, 4), (7168, 7168), (), (), True)
    stages = tuple(Stage({"decoder": (at, at + 1)}) for at in range(4))
    plan = ParallelPlan(tp=2, pp=2, cut=cut, stages=stages, microbatches=4)
    for one, rows in ((windows, 64), (windows, 4), (drawn, 64)):  # of 4 a pass has one, which has no halves
        for schedule in ("interleaved", "zero-bubble"):
            policy_for(one, replace(plan, schedule=schedule), rows, "H200", H200)
    assert fixed[0] == fixed[1] and fixed[2] < fixed[3] and fixed[4] == fixed[0] < fixed[5]


def test_each_stack_is_priced_over_tokens_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[BlockStep] = []
    monkeypatch.setattr(fused_forecast, "choose", lambda step, *_: asked.append(step))
    drawn = sketched(recipe_of("t5-seq2seq", tmp_path, device="cuda", dtype="bf16", batch_size=512))
    read, written = 32, 8
    drawn = replace(drawn, work=replace(drawn.work, tokens={"encoder": read, "decoder": written}))
    policy_for(drawn, ALONE, 512, "H200", H200)
    encoder, decoder = asked[0].kinds
    assert encoder.shape.memory is None and (encoder.number, decoder.number) == (2, 2)
    assert (encoder.tokens, decoder.tokens) == (512 * read, 512 * written)
    assert decoder.shape.memory == (read / written, rounded(read, 128))
    assert asked[0].once >= rates_of("H200").begins


# ------------------------------------------------------------------ devices by name


def test_a_named_device_makes_the_recipe_one_for_cuda(tmp_path: Path) -> None:
    recipe, memory = on_device(recipe_of("llama-causal", tmp_path, device="auto"), "h200", None)
    assert recipe.device == "cuda" and memory == [H200]
    assert sketched(recipe).work.itemsize == 2
    assert on_device(recipe, "H200", [80 * GIB])[1] == [80 * GIB]


def test_a_device_that_nobody_knows_needs_its_memory(tmp_path: Path) -> None:
    recipe = recipe_of("llama-causal", tmp_path, device="auto")
    with pytest.raises(UsageError, match="--memory 24GiB"):
        on_device(recipe, "RTX 4090", None)
    told = seen(on_device(recipe, "RTX 4090", [24 * GIB])[0], 24 * GIB, "RTX 4090")
    assert told.lines[0] == "blocks   fused on RTX 4090, whose rates are assumed"


def test_a_recipe_for_the_cpu_has_no_cuda_device(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="set device=cuda"):
        on_device(recipe_of("llama-causal", tmp_path, device="cpu"), "H200", None)


def test_a_mixture_holds_all_of_its_experts_and_pays_for_those_that_are_chosen(tmp_path: Path) -> None:
    (one, two) = (chosen(mixture(tmp_path, blocks)) for blocks in (12, 24))
    weights = 128 * 3 * 768 * 2048 + 128 * 2048 + 2 * 2048 * (4096 + 512)
    factors = 16 * (128 * (2048 + 1536 + 768 + 2048) + 2 * 2048 + 2 * 4096 + 2 * (2048 + 512))
    assert two.peak - one.peak == pytest.approx(12 * (2 * weights + 16 * factors + 8192 * 52184), rel=0.02)
    active = 8 * 3 * 768 * 2048 + 128 * 2048 + 2 * 2048 * (4096 + 512)
    arithmetic = 12 * 8192 * 4 * active / 684e12  # both passes with weights that are frozen
    assert arithmetic < two.seconds - one.seconds < 2.5 * arithmetic
    assert {rung.keep for rung in one.rungs} == {"all"}
    assert one.seconds == pytest.approx(0.102, rel=0.05)  # the median of four machines


@pytest.mark.parametrize("base_dtype", ["nf4", "int8"])
def test_quantised_experts_take_the_bytes_of_their_form_and_time_to_be_made_dense(
    base_dtype: str, tmp_path: Path
) -> None:
    def both(**settings: Any) -> tuple[int, float]:
        found = mixture(tmp_path, 2, **settings)
        return foretold(found, memory=[H200]).ranks[0].memory.frozen, chosen(found).seconds

    (dense, fast), (quantised, slow) = both(), both(base_dtype=base_dtype)
    numbers = 2 * (128 * 3 * 768 * 2048 + 2 * 2048 * (4096 + 512))
    each = {"nf4": 0.5 + 1 / 64 + 4 / (64 * 256), "int8": 1 + 4 / 1200}  # about 1,200 numbers a row
    assert dense - quantised == pytest.approx(numbers * (2 - each[base_dtype]), rel=2e-3)
    traffic = 2 * numbers * (2 + each[base_dtype]) / 4.25e12  # in both passes
    assert slow - fast == pytest.approx(traffic, rel=0.1)


def test_a_rank_with_few_tokens_keeps_few_hidden_states_of_its_own(tmp_path: Path) -> None:
    """Under galaxy what lies between sub-layers is of its own tokens, what is gathered inside is of all."""
    peaks = {}
    for sequence in ([1, 1], [63, 1]):
        shares = {"heads": [16, 16], "columns": [7168, 7168], "sequence": sequence, "vocabulary": False}
        recipe = large(tmp_path, 8, 2048, 8, parallel={"galaxy": shares})
        policies = outlook(foretold(recipe, memory=[H200, H200]), "H200").policies
        assert {keep for one in policies for keep in keeps(one)} == {"all"}
        peaks[sequence[0]] = [one.peak for one in policies]
    few, half = peaks[63][1], peaks[1][1]
    states = 2 * 8 * 8 * 2048 * 4096 * 2  # of each block and its attention, in bfloat16
    assert half - few == pytest.approx((1 / 2 - 1 / 64) * states, rel=0.2)


def test_columns_that_slow_a_gpu_down_are_told_of(tmp_path: Path) -> None:
    slow, fast = (
        foretold(large(tmp_path, 4, 2048, 2, parallel={"tp": {"heads": [24, 8], "columns": columns}})).facts
        for columns in ([10344, 3992], [10240, 4096])
    )
    assert slow[-1].startswith("note     columns [10344, 3992]: tensor cores are faster") and len(fast) == 4


MIB = 2**20


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        # hidden states are 64 MiB; of two ranks the other's term comes, to the one with most tokens too;
        # among more a sum lies beside its terms
        ({"tp": {"size": 2}}, 2 * 64 * MIB),
        ({"tp": {"size": 4}}, 0),  # NCCL's rings are as fast among four, unless other work hides what is said
        ({"tp": {"size": 4, "overlap": True}}, 2 * 80 * MIB),
        ({"galaxy": {"size": 2, "sequence": [3, 1]}}, 2 * 48 * MIB),
        ({"sp": {"sequence": [3, 1], "exchange": "ulysses"}}, 2 * 72 * MIB),
        ({"sp": {"sequence": [1, 1], "exchange": "gather"}}, 2 * 16 * MIB),
        ({"pp": {"size": 2, "microbatches": 4}}, 2 * 4 * 16 * MIB),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_rooms_for_what_ranks_say_take_memory(
    parallel: dict[str, Any], message: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak() -> int:
        recipe = large(tmp_path, 4, 2048, 2, parallel=parallel)
        return outlook(foretold(recipe, memory=[H200]), "H200").policies[0].peak

    counted = peak()
    monkeypatch.setattr(fused_forecast, "message_rooms", lambda *_: 0)
    assert counted - peak() == message
