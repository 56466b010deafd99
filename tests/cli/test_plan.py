"""`petune plan`: what it prints, what it refuses, and how sizes and speeds are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from petune_cli.plan import _rates, _sizes

from petune.errors import UsageError
from petune.recipe import load_recipe
from tests.cli.conftest import Type

GALAXY = "parallel={galaxy: {shares: [3, 1]}}"


def test_plan_shows_layout_memory_and_traffic(type_: Type, tmp_path: Path, no_network: None) -> None:
    shown = type_("plan", "llama_lora", GALAXY)
    lines = shown.out.splitlines()
    assert shown.code == 0
    assert lines[2] == "plan     galaxy 2 (heads 6,2; columns 288,96; sequence 3:1)"
    heads = next(line for line in lines if line.startswith("rank "))
    assert heads.split()[:10] == [
        "rank",
        "blocks",
        "heads",
        "columns",
        "tokens",
        "rows",
        "frozen",
        "tuned",
        "gradients",
        "optimizer",
    ]
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[:7] for row in rows] == [
        ["0", "decoder", "0-7", "6", "288", "96", "16"],
        ["1", "decoder", "0-7", "2", "96", "32", "16"],
    ]
    assert any(line.split()[:3] == ["decoder", "mlp", "all-gather"] for line in lines)
    assert lines[-1] == "fits     yes"
    assert list(tmp_path.iterdir()) == []


def test_plan_of_one_process_has_nothing_to_send(type_: Type) -> None:
    shown = type_("plan", "llama_lora")
    assert "plan     one process" in shown.out
    assert "sent by" not in shown.out and "bubble" not in shown.out and "classes" not in shown.out
    assert "classes  2, as the model's config says" in type_("plan", "bert_head_cache").out


def test_plan_is_for_any_world(type_: Type) -> None:
    shown = type_("plan", "llama_lora", "parallel={dp: {shard: true, offload: cpu}, pp: 2}", "--world", "8")
    assert "plan     dp 4 (sharded; shards on the CPU) x pp 2" in shown.out
    assert (
        "gathered" in shown.out
        and "rest in the memory of the CPU" in shown.out
        and "bubble   33%" in shown.out
    )
    assert type_("plan", "llama_lora", "parallel={tp: 2}", "--world", "3").code == 2


def test_a_plan_that_cannot_be_is_exit_2_with_its_keys(type_: Type) -> None:
    shown = type_("plan", "llama_lora", "parallel={tp: {heads: [5, 3]}, pp: {stages: [5, 5]}}")
    assert shown.code == 2
    assert "parallel.tp.heads" in shown.err and "parallel.pp.stages" in shown.err


def test_a_plan_that_does_not_fit_is_shown_and_is_exit_5(type_: Type) -> None:
    shown = type_("plan", "llama_lora", GALAXY, "--memory", "0.3,8")
    assert shown.code == 5
    assert shown.out.count("DOES NOT FIT") == 1
    assert shown.err.startswith("rank 0 does not fit its device") and "saves" in shown.err
    assert type_("plan", "llama_lora", GALAXY, "--memory", "8").code == 0


def test_speeds_give_lists_to_write_into_a_recipe(type_: Type) -> None:
    shown = type_("plan", "llama_lora", "parallel=galaxy", "--speeds", "3,1")
    assert "gain     a step computes 1.81 times as fast" in shown.out
    written = next(line for line in shown.out.splitlines() if line.startswith("write    ")).removeprefix(
        "write    "
    )
    assert written == "parallel: {galaxy: {size: 2, heads: [6, 2], columns: [288, 96], sequence: [3, 1]}}"
    again = load_recipe("llama_lora", ["parallel=" + written.removeprefix("parallel: ")])
    assert again.parallel.galaxy is not None and again.parallel.galaxy.heads == (6, 2)


def test_plan_for_a_device_that_is_not_here_says_what_fused_blocks_keep(
    type_: Type, no_network: None
) -> None:
    lines = type_("plan", "llama_lora", "--device", "H200").out.splitlines()
    assert lines[3] == "pass     16 rows of up to 128 tokens, bf16 on cuda"
    assert lines[4:6] == ["blocks   fused on H200, whose rates are measured", "memory: blocks 0-7 keep all"]
    assert lines[6].startswith("memory: peak 0.2 GiB of 131.9; step ") and "tokens/s predicted" in lines[7]
    assert next(line for line in lines if line.startswith("0 ")).endswith("140 GiB")
    assert "activations are what the peak above has besides the rest" in lines[-2]
    assert "--memory 24GiB" in type_("plan", "llama_lora", "--device", "RTX 4090").err
    assert type_("plan", "llama_lora", "--device", "RTX 4090", "--memory", "24").code == 0


def test_plan_says_what_blocks_beside_a_ladder_keep(type_: Type) -> None:
    shown = type_("plan", "llama_side", "--device", "H200").out
    assert (
        "blocks   fused: the backbone's keep nothing, the ladder's all" in shown
        and "activations are an estimate" in shown
    )


def test_plan_says_what_leaves_memory_with_a_whole_cache(type_: Type) -> None:
    lines = type_("plan", "t5_side_cache").out.splitlines()
    leave, take = (line for line in lines if line.startswith("cache "))
    assert "of blocks leave memory" in leave and take.endswith("for a row of 128 + 128 tokens")
    on_gpu = type_("plan", "t5_side_cache", "--device", "H200", "cache_room=0.25").out
    assert "on the device, besides, where all take at most 3" in on_gpu
    row = next(line for line in on_gpu.splitlines() if line.startswith("0 "))
    assert "  3" in row and "rows at most" in on_gpu  # 3x GiB of 140
    assert "besides" not in type_("plan", "t5_side_cache", "--device", "H200", "cache_room=0").out
    assert not any("leave memory" in line for line in type_("plan", "llama_side").out.splitlines())


def test_a_memory_setting_that_does_not_fit_is_exit_2(type_: Type) -> None:
    shown = type_("plan", "llama_lora", "memory.budget=0.01", "--device", "H200")
    assert shown.code == 2 and shown.err.startswith(
        "command line  memory: a step of 2,048 tokens does not fit its memory"
    )


def test_a_search_prints_the_best_plan_and_the_runner_up(
    type_: Type, tmp_path: Path, no_network: None
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "devices: {H200: {memory: 139GiB}, A100: {memory: 39GiB}}\n"
        "hosts: [{devices: [H200, A100]}]\n"
        "links: {inside: {latency: 5e-6, bandwidth: 300e9}, between: {bandwidth: 40e9}}\n"
    )
    lines = type_("plan", "llama_lora", "--simulate", str(file)).out.splitlines()
    assert lines[0].split()[:3] == ["plan", "step", "computes"]
    assert any(line.startswith("because ") and "longer" in line for line in lines)
    (written,) = (line.removeprefix("write    parallel: ") for line in lines if line.startswith("write "))
    assert load_recipe("llama_lora", ["parallel=" + written]).parallel.axes
    found = json.loads(type_("plan", "llama_lora", "--cluster", str(file), "--json").out)
    assert len(found["choices"]) == 2 and found["choices"][0]["step_s"] <= found["choices"][1]["step_s"]
    for other in (("--speeds", "3,1"), ("--world", "2"), ("--device", "H200")):
        assert type_("plan", "llama_lora", "--simulate", str(file), *other).code == 2


def test_there_is_a_speed_for_each_rank(type_: Type) -> None:
    assert type_("plan", "llama_lora", "parallel=pp", "--speeds", "3,1", "--world", "3").code == 2
    assert type_("plan", "llama_lora", "parallel=pp", "--speeds", "fast").code == 2
    assert type_("plan", "llama_lora", "parallel=pp", "--speeds", "3,-1").code == 2


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("24GiB", [24 * 2**30]),
        ("24", [24 * 2**30]),
        ("80GB", [80 * 10**9]),
        ("8,24", [8 * 2**30, 24 * 2**30]),
        ("0.5 gib, 512MiB", [2**29, 2**29]),
        ("1TB", [10**12]),
        ("123B", [123]),
    ],
)
def test_sizes_are_written_with_or_without_a_unit(text: str, bytes_: list[int]) -> None:
    assert _sizes(text) == bytes_


@pytest.mark.parametrize("text", ["", "much", "24GX", "1,,2", "-3", "1e3"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--memory"):
        _sizes(text)
    with pytest.raises(UsageError, match="--speeds"):
        _rates("1,x")
