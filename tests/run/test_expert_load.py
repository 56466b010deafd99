"""How evenly routers send tokens is counted, and is in the records of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

from petune.run.expert_load import ExpertLoad
from tests.methods.zoo import batch, tiny
from tests.small_runs import moe_folder, run, settings

pytestmark = pytest.mark.usefixtures("no_picture", "no_network")


def test_the_load_is_that_of_the_busiest_expert_over_the_mean_one() -> None:
    model, inputs = tiny("mixtral-causal").train(), batch("mixtral-causal")
    load = ExpertLoad([model])
    chosen: list[Any] = []
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(lambda _, args, found: chosen.append(found[2]))
    model(**inputs)
    model.eval()(**inputs)  # is not counted
    real = inputs["attention_mask"].reshape(-1).bool()  # padding is no load
    counts = [torch.bincount(one[real].reshape(-1), minlength=4).double() for one in chosen[:2]]
    expected = sum(float(one.max() / one.mean()) for one in counts) / 2
    assert load.take(list) == pytest.approx(expected)
    assert ExpertLoad([tiny("llama-causal")]).take(list) is None


def test_padding_of_packed_rows_is_no_load_whatever_a_plan_makes_of_it() -> None:
    model = tiny("mixtral-causal").train()
    load, found = ExpertLoad([model]), []
    for width in (9, 14):
        ids, places = torch.zeros(1, width, dtype=torch.int64), torch.arange(width)[None] - 9
        ids[0, :9], places[0, :9] = torch.arange(5, 14), torch.arange(9) % 5
        model(input_ids=ids, position_ids=places, use_cache=False)
        found.append(load.take(list))
    assert found[0] == found[1]


def test_a_pad_token_that_ends_a_sample_of_a_packed_row_is_load() -> None:
    """Where the end token pads: the last sample has tokens of its own, and none of its tail is padding."""
    model = tiny("mixtral-causal").train()
    load, chosen = ExpertLoad([model]), list[Any]()
    model.model.layers[0].mlp.gate.register_forward_hook(lambda _, args, found: chosen.append(found[2]))
    ids = torch.tensor([[5, 6, 7, 8, 0, 0]])
    model(input_ids=ids, position_ids=torch.tensor([[0, 1, 0, 1, 2, 3]]), use_cache=False)
    assert load.counts[0] is not None
    assert torch.equal(load.counts[0], torch.bincount(chosen[0].reshape(-1), minlength=4))


def test_a_run_on_experts_reports_their_load_and_merges(tmp_path: Path) -> None:
    moe_folder(tmp_path / "llama")
    done = run(settings(tmp_path, method={"name": "lora", "r": 2}, max_steps=2, warmup=0))
    lines = (done.folder / "metrics.jsonl").read_text().splitlines()
    steps = [found for line in lines if "loss" in (found := json.loads(line))]
    assert len(steps) == 2 and all(1 <= one["expert_load"] <= 5 for one in steps)
    assert isinstance(AutoModelForCausalLM.from_pretrained(done.merge()), Qwen3MoeForCausalLM)


def test_a_frozen_mixture_beside_a_side_network_has_no_load(tmp_path: Path) -> None:
    moe_folder(tmp_path / "llama")
    side = {"name": "side", "reduction": 4}
    done = run(settings(tmp_path, method=side, max_steps=2, warmup=0))
    text = (done.folder / "metrics.jsonl").read_text()
    assert "NaN" not in text and "expert_load" not in text


def test_the_routers_loss_is_added_where_the_config_asks_for_it(tmp_path: Path) -> None:
    losses = []
    for coefficient in (0.0, 0.5):
        place = tmp_path / str(coefficient)
        place.mkdir()
        moe_folder(place / "llama", output_router_logits=True, router_aux_loss_coef=coefficient)
        done = run(settings(place, method={"name": "lora", "r": 2}, max_steps=1, warmup=0))
        losses.append(json.loads((done.folder / "metrics.jsonl").read_text().splitlines()[1])["loss"])
    assert losses[1] > losses[0] + 0.5  # an even load costs the coefficient times the experts of a token
