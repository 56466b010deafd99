"""What a recipe would cost: the ranks' parts make up the model, and what does not fit is refused with
numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from petune.errors import MachineError, UsageError
from petune.estimate.footprint import held_by
from petune.estimate.forecast import PROCESS, Forecast, Sketch, cached_row, forecast, sketch
from petune.methods import count_parameters
from petune.parallel import make_plan
from petune.parallel.configs import CutConfig, DpConfig, ParallelConfig, PpConfig
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ParallelPlan
from petune.recipe import load_recipe
from tests.methods.zoo import ZOO, tiny
from tests.written_recipes import foretold, recipe_of, sketched

GB = 10**9


def plan_of(drawn: Sketch, parallel: ParallelConfig) -> ParallelPlan:
    return make_plan(
        parallel, drawn.family, drawn.config, None, drawn.work.rows, 2, drawn.work.vocabulary_head
    )


def sizes(module: nn.Module) -> dict[str, int]:
    """Elements of every tensor by name, ties under each name."""
    return {name: value.numel() for name, value in module.named_parameters(remove_duplicate=False)}


# ------------------------------------------------------------------ what ranks hold


@pytest.mark.crossed(1)
@pytest.mark.parametrize(
    "name", ["bert-classify", "bart-seq2seq", "t5-gated", "llama-causal", "qwen3-causal"]
)
@pytest.mark.parametrize("method", ["full", "lora", "adapter", "side"])
def test_a_sketch_is_the_tuned_model(name: str, method: str, tmp_path: Path) -> None:
    from petune.methods import tune

    settings = {"name": method, **({"reduction": 4} if method in ("side", "adapter") else {})}
    drawn = sketch(recipe_of(name, tmp_path, method=settings, dtype="bf16"))
    real = tiny(name)
    tune(real, drawn.recipe.method)
    assert sizes(drawn.model) == sizes(real)
    assert count_parameters(drawn.model) == count_parameters(real)
    assert all(value.is_meta for value in drawn.model.parameters())
    there = [key for key, value in drawn.model.named_buffers() if not value.is_meta]
    assert all(".side.rotary." in key for key in there), "but a ladder's angles, a few numbers"
    assert {value.dtype for value in drawn.model.parameters() if value.requires_grad} == {torch.float32}


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", ["bert-classify", "bart-seq2seq", "t5-gated", "llama-causal"])
@pytest.mark.parametrize("method", ["lora", "side"])
@pytest.mark.parametrize("row", ["tp", "galaxy", "galaxy2", "sp"])
def test_slices_of_the_ranks_make_up_the_model(name: str, method: str, row: str, tmp_path: Path) -> None:
    settings = {"name": method, **({"reduction": 4} if method == "side" else {})}
    drawn = sketched(recipe_of(name, tmp_path, method=settings))
    cut = CutConfig(shares=(3, 1), vocabulary=False) if row == "tp" else CutConfig(shares=(3, 1))
    plan = plan_of(drawn, ParallelConfig(**{row: cut}))
    held = [held_by(drawn.model, drawn.family, plan, Coordinate(tp=rank)) for rank in (0, 1)]
    whole = sizes(drawn.model)
    for tensor, size in whole.items():
        parts = [sizes(one.modules[0]).get(tensor, 0) for one in held]
        sliced = tensor in held[0].placed.slices
        assert sum(parts) == size if sliced else parts == [size, size], tensor
    assert sizes(drawn.model) == whole, "the sketch itself stays whole"
    if row != "sp":
        assert any(sizes(held[0].modules[0]).get(tensor) == 3 * size // 4 for tensor, size in whole.items())


@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", ["bert-classify", "bart-seq2seq", "t5-gated", "llama-causal"])
@pytest.mark.parametrize("method", ["lora", "side"])
def test_stages_make_up_the_model(name: str, method: str, tmp_path: Path) -> None:
    settings = {"name": method, **({"reduction": 4} if method == "side" else {})}
    drawn = sketched(recipe_of(name, tmp_path, method=settings))
    plan = plan_of(drawn, ParallelConfig(pp=PpConfig(size=2)))
    held = [held_by(drawn.model, drawn.family, plan, Coordinate(pp=stage)) for stage in (0, 1)]
    whole, parts = sizes(drawn.model), [sizes(one.modules[0]) for one in held]
    assert parts[0] | parts[1] == whole
    twice = set(parts[0]) & set(parts[1])
    assert {whole[tensor] for tensor in twice} <= {97 * 64}, f"only tied tables are on both: {twice}"


@pytest.mark.parametrize(("shares", "rows"), [((), [48, 49]), ((3, 1), [72, 25])])
def test_a_vocabulary_is_shared_out(shares: tuple[int, ...], rows: list[int], tmp_path: Path) -> None:
    drawn = sketched(recipe_of("llama-causal", tmp_path))
    plan = plan_of(drawn, ParallelConfig(tp=CutConfig(shares=shares)))
    tables = [
        sizes(held_by(drawn.model, drawn.family, plan, Coordinate(tp=rank)).modules[0])["lm_head.weight"]
        for rank in (0, 1)
    ]
    assert tables == [count * 64 for count in rows]


def test_bytes_are_by_dtype_and_by_what_trains(tmp_path: Path) -> None:
    for method, frozen_bytes in (("lora", 2), ("full", 4)):
        recipe = recipe_of("llama-causal", tmp_path, method=method, dtype="bf16")
        (rank,) = foretold(recipe).ranks
        drawn = sketched(recipe)
        trained, total = count_parameters(drawn.model)
        buffers = sum(value.numel() * value.element_size() for value in drawn.model.buffers())
        assert rank.memory.frozen == frozen_bytes * (total - trained) + buffers
        assert rank.memory.tuned == rank.memory.gradients == 4 * trained
        assert rank.memory.optimizer == 8 * trained
        assert rank.total == rank.memory.total + PROCESS["cpu"]


def test_shards_divide_what_they_hold(tmp_path: Path) -> None:
    recipe = recipe_of("llama-causal", tmp_path, method="full")
    alone = foretold(recipe).ranks[0].memory

    def sharded(**settings: Any) -> Any:
        return (
            foretold(recipe, parallel=ParallelConfig(dp=DpConfig(size=4, shard=True, **settings)))
            .ranks[0]
            .memory
        )

    one = sharded()
    assert one.tuned == one.gradients == pytest.approx(alone.tuned / 4, rel=0.01)
    assert one.optimizer == pytest.approx(alone.optimizer / 4, rel=0.01)
    assert sharded(replicas=2).tuned == pytest.approx(alone.tuned / 2, rel=0.01)
    assert one.gathered == sharded(reshard=False).gathered == 2 * alone.tuned, "two blocks, with gradients"
    resting = sharded(offload="cpu")
    assert (resting.tuned, resting.gradients, resting.optimizer) == (0, 0, 0)
    assert resting.at_rest == pytest.approx(4 * alone.tuned / 4, rel=0.01)
    lora = recipe_of("llama-causal", tmp_path)
    kept = (
        foretold(lora, parallel=ParallelConfig(dp=DpConfig(size=4, shard=True, frozen="replicated")))
        .ranks[0]
        .memory
    )
    assert kept.frozen == foretold(lora).ranks[0].memory.frozen


def test_shards_of_a_quantised_base_are_held_and_sent_in_its_bytes(tmp_path: Path) -> None:
    plan = ParallelConfig(dp=DpConfig(size=2, shard=True))

    def sizes(**settings: Any) -> tuple[int, int, int]:
        found = foretold(recipe_of("llama-causal", tmp_path, method="lora", **settings), parallel=plan)
        (sent,) = [one.forward for one in found.transitions if one.where == "shards of weights"]
        return found.ranks[0].memory.frozen, found.ranks[0].memory.gathered, sent

    dense, held = sizes(), sizes(base_dtype="int8")
    assert dense[0] - held[0] == pytest.approx(dense[2] - held[2], rel=0.01)
    assert all(own < whole for own, whole in zip(held, dense, strict=True))


def test_activations_go_by_rows_in_flight(tmp_path: Path) -> None:
    def most(parallel: ParallelConfig, **settings: Any) -> list[int]:
        recipe = recipe_of("bert-classify", tmp_path, batch_size=8, **settings)
        return [rank.memory.activations for rank in foretold(recipe, parallel=parallel).ranks]

    (alone,) = most(ParallelConfig())
    assert most(ParallelConfig(dp=DpConfig(shares=(3, 1)))) == [
        pytest.approx(0.75 * alone),
        pytest.approx(0.25 * alone),
    ]
    gpipe = most(ParallelConfig(pp=PpConfig(size=2, schedule="gpipe", microbatches=4)))
    steady = most(ParallelConfig(pp=PpConfig(size=2, schedule="1f1b", microbatches=4)))
    assert gpipe == [pytest.approx(0.5 * alone)] * 2
    assert steady == [pytest.approx(0.25 * alone), pytest.approx(0.125 * alone)]
    assert most(ParallelConfig(), gradient_checkpointing=True)[0] < 0.7 * alone


def test_blocks_below_what_trains_and_beside_a_ladder_keep_nothing(tmp_path: Path) -> None:
    def kept(method: dict[str, Any]) -> int:
        return foretold(recipe_of("bert-classify", tmp_path, method=method)).ranks[0].memory.activations

    last = kept({"name": "lora", "targets": ["encoder.layer.1.output.dense"]})
    assert last < 0.7 * kept({"name": "lora", "targets": ["encoder.layer.0.output.dense"]})
    beside = kept({"name": "side", "reduction": 8})
    assert beside < 0.7 * last
    half = kept({"name": "side", "reduction": 8, "layers": [1]})
    assert half < 0.7 * beside
    assert kept({"name": "side", "reduction": 8, "end": "blend"}) < beside


# ------------------------------------------------------------------ the whole forecast


def test_a_forecast_says_what_each_rank_holds(tmp_path: Path) -> None:
    parallel = ParallelConfig(dp=DpConfig(size=2), galaxy=CutConfig(shares=(3, 1)), pp=PpConfig(size=2))
    found = foretold(recipe_of("t5-gated", tmp_path, batch_size=8), parallel=parallel)
    facts = [
        (rank.rank, rank.blocks, rank.heads, rank.columns, rank.tokens, rank.rows) for rank in found.ranks
    ]
    assert facts[0] == (0, "encoder 0-1", 6, 72, 24, 4)
    assert facts[3] == (3, "encoder 0-1", 2, 24, 8, 4)
    assert facts[7] == (7, "decoder 0-1", 2, 24, 8, 4)
    where = {one.where for one in found.transitions}
    assert {"encoder attention", "decoder cross-attention", "stage 0 to 1"} <= where
    assert {"gradients over the cut, once a step", "gradients over replicas, once a step"} <= where
    assert found.bubble == pytest.approx(1 / 3)
    assert found.facts[2] == "plan     " + (
        "dp 2 x galaxy 2 (heads 6,2; columns 72,24; sequence 3:1) x pp 2 (stages 2,2; 1f1b, 2 micro-batches)"
    )


def test_a_ladder_sends_for_itself_and_its_backbone_nothing_back(tmp_path: Path) -> None:
    recipe = recipe_of("llama-causal", tmp_path, method={"name": "side", "reduction": 4}, batch_size=4)
    found = foretold(recipe, parallel=ParallelConfig(sp=CutConfig(size=2), pp=PpConfig(size=2))).transitions
    ladder = [one for one in found if one.where.startswith("ladder")]
    assert [one.where for one in ladder] == ["ladder, decoder attention", "ladder, stage 0 to 1"]
    assert all(one.backward for one in ladder)
    some = recipe_of("llama-causal", tmp_path, method={"name": "side", "reduction": 4, "layers": [1]})
    found = foretold(some, parallel=ParallelConfig(sp=CutConfig(size=2))).transitions
    assert [one.times for one in found if one.where.startswith("ladder")] == [1] < [ladder[0].times]
    assert not any(one.backward for one in found if one.where.startswith(("decoder", "stage")))


def test_a_model_without_a_table_is_replicated(tmp_path: Path) -> None:
    (tmp_path / "openai-gpt.json").write_text(
        json.dumps({"model_type": "openai-gpt", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50})
    )
    recipe = load_recipe(
        {
            "model": f"config:{tmp_path}/openai-gpt.json",
            "data": "nowhere.jsonl",
            "task": "causal",
            "method": "lora",
            "device": "cpu",
        }
    )
    found = foretold(recipe, parallel=ParallelConfig(dp=DpConfig(size=2)))
    assert [(rank.blocks, rank.heads, rank.memory.activations) for rank in found.ranks] == [
        ("all", None, 0)
    ] * 2
    with pytest.raises(UsageError, match="no table"):
        foretold(recipe, parallel=ParallelConfig(tp=CutConfig(size=2)))


def test_nothing_is_loaded_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("petune.models.loading.load_model", lambda *_: pytest.fail("a weight was read"))
    forecast(load_recipe("llama_lora"), parallel=ParallelConfig(tp=CutConfig(size=2)))
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_needs_no_memory(tmp_path: Path) -> None:
    config = ZOO["llama-causal"][1](
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    (tmp_path / "8b.json").write_text(json.dumps(config.to_dict()))
    recipe = load_recipe(
        {
            "model": f"config:{tmp_path}/8b.json",
            "data": "nowhere.jsonl",
            "task": "causal",
            "method": "lora",
            "device": "cuda",
        }
    )
    found = foretold(recipe, parallel=ParallelConfig(tp=CutConfig(size=2)), memory=[80 * GB])
    assert [rank.memory.frozen / GB for rank in found.ranks] == [pytest.approx(8.03, abs=0.02)] * 2


def test_the_blocks_that_leave_with_a_whole_cache_are_all_but_embedding_and_ladder(tmp_path: Path) -> None:
    method = {"name": "side", "reduction": 4}
    drawn = sketched(recipe_of("bert-classify", tmp_path, method=method, cache=True))
    names = [name for name in sizes(drawn.model) if ".encoder.layer." in name and ".side." not in name]
    expected = sum(4 * drawn.model.get_parameter(name).numel() for name in names)
    (rank,) = foretold(drawn.recipe).ranks
    assert rank.memory.leaving == expected < rank.memory.frozen
    for changes in ({"cache": False}, {"method": method | {"start": "pruned"}, "cache": True}):
        (rank,) = foretold(recipe_of("bert-classify", tmp_path, **{"method": method, **changes})).ranks
        assert rank.memory.leaving == 0


def test_a_head_alone_keeps_no_activations_and_all_blocks_may_leave(tmp_path: Path) -> None:
    drawn = sketched(recipe_of("bert-classify", tmp_path, method={"name": "head"}, cache=True))
    blocks = sum(4 * value.numel() for name, value in drawn.model.named_parameters() if ".encoder." in name)
    (rank,) = foretold(drawn.recipe).ranks
    head = 4 * sum(value.numel() for value in drawn.model.classifier.parameters())
    assert (rank.memory.activations, rank.memory.tuned, rank.memory.optimizer) == (0, head, 2 * head)
    assert rank.memory.leaving == blocks < rank.memory.frozen
    assert cached_row(drawn, ParallelPlan()) == drawn.config.hidden_size * 4, "the token that its head reads"


# ------------------------------------------------------------------ what does not fit


def refusal(found: Forecast) -> str:
    with pytest.raises(MachineError) as caught:
        found.check()
    assert caught.value.code == 5
    return str(caught.value)


def test_what_does_not_fit_is_refused_with_numbers_and_what_would_help(tmp_path: Path) -> None:
    recipe = recipe_of("bert-classify", tmp_path, batch_size=8)
    text = refusal(foretold(recipe, memory=[2**28]))
    assert text.startswith("rank 0 does not fit its device\n   expected at most 256 MiB, found ")
    for part in ("frozen", "tuned", "gradients", "optimizer", "activations", "the process 256 MiB"):
        assert part in text
    for knob in (
        "gradient_checkpointing=true saves",
        "batch_size=4 saves",
        "data.max_length=16 saves",
        "dtype=bf16 saves",
    ):
        assert knob in text
    foretold(recipe, memory=[GB]).check()


def test_only_the_ranks_that_are_too_small_are_named(tmp_path: Path) -> None:
    recipe, parallel = recipe_of("bert-classify", tmp_path, batch_size=8), ParallelConfig(dp=DpConfig(size=2))
    text = refusal(foretold(recipe, parallel=parallel, memory=[GB, 2**28]))
    assert "rank 1 does not fit" in text and "rank 0" not in text
    assert "parallel.dp.shard=true saves" in text
    many = foretold(recipe, parallel=ParallelConfig(dp=DpConfig(size=8)), memory=[2**28])
    assert "nor do 4 more ranks" in refusal(many)


def test_every_knob_saves_what_it_says(tmp_path: Path) -> None:
    recipe = recipe_of("bert-classify", tmp_path, batch_size=8)
    found = foretold(recipe)
    for text, saved in found.knobs:
        key, value = text.split("=")
        changed = load_recipe(recipe, [f"{key}={value}"])
        assert found.ranks[0].total - foretold(changed).ranks[0].total == pytest.approx(saved, rel=0.05), text


def test_memory_is_one_number_or_one_for_each(tmp_path: Path) -> None:
    recipe = recipe_of("bert-classify", tmp_path)
    two = ParallelConfig(dp=DpConfig(size=2))
    assert [rank.limit for rank in foretold(recipe, parallel=two, memory=[5]).ranks] == [5, 5]
    assert [rank.limit for rank in foretold(recipe, parallel=two, memory=[5, 6]).ranks] == [5, 6]
    with pytest.raises(UsageError, match="--memory"):
        foretold(recipe, parallel=two, memory=[5, 6, 7])
    here = foretold(recipe, parallel=two).ranks
    assert here[0].limit == here[1].limit and (here[0].limit or 0) > 2**28
