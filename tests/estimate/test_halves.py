"""What overlap hides: by hand, as it was measured, and where a search tries it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from petune.estimate.cluster import Cluster, Device, LinkSpeed
from petune.estimate.durations import Both
from petune.estimate.findings import name_of
from petune.estimate.forecast import Sketch, sketch
from petune.estimate.halves import LOST, HalfRegion, added, in_turns
from petune.estimate.planner import Planner
from petune.estimate.step_time import Clock
from petune.estimate.workload import workload
from petune.kernels.memory.block_cost import H100
from petune.parallel import ParallelConfig, make_plan
from petune.parallel.configs import CutConfig
from petune.recipe import load_recipe
from tests.written_recipes import recipe_of

# Linked H100s, by benchmarks/RESULTS.md: two talk by copy engines, four by NCCL, but where that is hidden.
TWO = LinkSpeed(
    1.5e-5,
    290e9,
    (("all-reduce", 1e-5, 270e9), ("all-gather", 1e-5, 291e9), ("reduce-scatter", 1e-5, 223e9)),
)
FOUR = LinkSpeed(
    1.5e-5,
    290e9,
    (
        *(("all-reduce", 1e-5, 290e9), ("all-gather", 1e-5, 314e9), ("reduce-scatter", 1e-5, 309e9)),
        *(("hidden all-reduce", 1e-5, 220e9), ("hidden all-gather", 1e-5, 250e9)),
        ("hidden reduce-scatter", 1e-5, 230e9),
    ),
)
# 8B, LoRA r=16, rows of 2,048 tokens, blocks fused: GPUs, rows, the link, the cut, ms of a step without
# overlap and with it (benchmarks/RESULTS.md, Several GPUs, H100s, 2026-11-26 and 27); predicted are
#     577 and 543, 571 and 524, 722 and 592, 676 and 560, 191 and 159, 179 and 151
MEASURED = (
    (2, 8, TWO, "tp", 562, 551),
    (2, 8, TWO, "galaxy", 567, 553),
    (4, 16, FOUR, "tp", 693, 634),
    (4, 16, FOUR, "galaxy", 680, 620),
    (4, 4, FOUR, "tp", 188, 176),
    (4, 4, FOUR, "galaxy", 196, 173),
)


def of_gpus(number: int, link: LinkSpeed = FOUR) -> Cluster:
    return Cluster((Device("H100", H100, 80 * 2**30),) * number, link, link)


def cut_by(name: str, size: int, overlap: bool, **more: str) -> ParallelConfig:
    return ParallelConfig(**{name: CutConfig(size=size, overlap=overlap, **more)})  # type: ignore[arg-type]  # names are given


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Sketch:
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    config = LlamaConfig(**sizes, num_hidden_layers=32, num_key_value_heads=8, vocab_size=128256)
    place = folder / "config.json"
    place.write_text(json.dumps(config.to_dict()))
    asked = {"model": f"config:{place}", "device": "cuda", "dtype": "bf16", "data.max_length": 2048}
    return sketch(load_recipe(recipe_of("llama-causal", folder, method={"name": "lora", "r": 16}), asked))


@pytest.mark.parametrize(("ranks", "rows", "link", "name", "plain", "hidden"), MEASURED)
def test_overlap_is_priced_as_it_was_measured(
    large: Sketch, ranks: int, rows: int, link: LinkSpeed, name: str, plain: float, hidden: float
) -> None:
    clock = Clock(replace(workload(large), rows=rows), of_gpus(ranks, link))
    assert large.family is not None
    times = []
    for overlap, measured in ((False, plain), (True, hidden)):
        config = cut_by(name, ranks, overlap)
        plan = make_plan(config, large.family, large.config, ranks, rows)
        times.append(1e3 * clock.of(plan).total)
        assert times[-1] == pytest.approx(measured, rel=0.15)
    assert times[1] < times[0]


def both(forward: float, backward: float = 0.0) -> Both:
    return Both(forward, backward)


def test_what_takes_longer_than_the_other_half_computes_is_waited_for() -> None:
    turns = [
        HalfRegion(both(2, 4), both(1, 1), both(0.1)),  # hidden by either half
        HalfRegion(both(3, 6), both(5, 1), both(0.2)),  # longer than itself by 2, than the first by 3
        HalfRegion(both(0), both(0), both(0)),
    ]
    computing, left = in_turns(turns)
    assert computing == both(10, 20)
    assert left.forward == pytest.approx(5 + LOST * (2 + 10 - 5) + 2 * (0.1 + 0.2))
    assert left.backward == pytest.approx(LOST * 4)
    assert in_turns([HalfRegion(both(2, 4), both(0), both(0))]) == (both(4, 8), both(0))


def test_adding_up_moves_terms_and_their_sum() -> None:
    """Of 12 bytes two ranks read both terms and write; of four each reads four parts, and writes one."""
    assert added("all-reduce", 2, 12) == 36 and added("all-reduce", 4, 18) == 15
    assert added("reduce-scatter", 2, 6) == 18 and added("reduce-scatter", 4, 9) == 15
    assert added("all-gather", 4, 9) == 0


def test_a_cpu_hides_nothing(tmp_path: Path) -> None:
    planner = Planner(sketch(recipe_of("llama-causal", tmp_path, batch_size=8)), of_gpus(2))
    times = {planner.clocks[False].of(planner.plan(cut_by("tp", 2, one))) for one in (False, True)}
    assert len(times) == 1
    assert len(list(planner._hidden_or_not(cut_by("tp", 2, False)))) == 1


def test_a_search_tries_overlap_where_halves_go_through_fused_blocks(tmp_path: Path) -> None:
    gpus = {"device": "cuda", "dtype": "bf16", "batch_size": 8}

    def tried(name: str, config: ParallelConfig, **more: object) -> bool:
        planner = Planner(sketch(recipe_of(name, tmp_path, **(gpus | more))), of_gpus(2))
        return len(list(planner._hidden_or_not(config))) > 1

    tp = cut_by("tp", 2, False)
    assert tried("llama-causal", tp) and tried("llama-causal", cut_by("galaxy", 2, False))
    assert not tried("llama-causal", tp, batch_size=1), "one row has no halves"
    assert not tried("llama-causal", tp, kernels="off")
    assert not tried("llama-causal", tp, data={"path": "nowhere", "packing": True}), "rows are one"
    assert not tried("llama-causal", cut_by("sp", 2, False, exchange="ulysses"))
    assert not tried("t5-seq2seq", tp) and not tried("mixtral-causal", tp)
    assert not tried("qwen3_5-causal", tp), "cores that are called as they are have no halves"
    assert not tried("llama-causal", tp, method={"name": "side", "reduction": 4}), (
        "blocks beside a ladder have no way back"
    )
    assert not tried("llama-classify", tp, method="head"), "nor have those below a head alone"


def test_what_is_proposed_is_overlapped_where_that_is_faster(tmp_path: Path) -> None:
    drawn = sketch(recipe_of("llama-causal", tmp_path, device="cuda", dtype="bf16", batch_size=8))
    for launch, hides in ((0.0, True), (1e-3, False)):
        device = Device("a", replace(H100, launch=launch, matmul=1e10, processors=1))
        link = LinkSpeed(0.0, 1e9)
        planner = Planner(drawn, Cluster((device, device), link, link))
        best = planner.search([cut_by("tp", 2, False)]).choices[0]
        assert best.parallel == cut_by("tp", 2, hides)
        assert name_of(best) == "tp 2" + ", overlapped" * hides
