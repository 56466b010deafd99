"""Merged weights that are rounded stochastically: right in the mean, one of the two neighbours, the same bits
for the same seed, and nothing else touched."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from petune.errors import UsageError
from petune.methods import merged_weights, wrap
from petune.methods.rounding import merged_tensors
from petune.models.frozen_weight import dense_of
from petune.models.tuned_linear import TunedLayer, tuned_layers
from petune.saving.export import probe, save_merged
from tests.methods.zoo import stir, tiny

SEEDS = 64


def tuned(dtype: torch.dtype, std: float = 1e-3, method: str = "lora", **changes: Any) -> Any:
    model = wrap(tiny("llama-causal").to(dtype), method, **({"r": 4} if method == "lora" else {}), **changes)
    stir(model, std=std)
    return model.eval()


def one_of(model: Any) -> tuple[str, TunedLayer]:
    return next(iter(tuned_layers(model)))


def words(value: Tensor) -> Tensor:
    """Numbers of bfloat16 in the order of their sizes, one apart where they are neighbours."""
    bits = value.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("base", [torch.bfloat16, torch.float32], ids=str)
def test_the_mean_over_seeds_is_the_float32_sum_of_neighbours(base: torch.dtype) -> None:
    model = tuned(base)
    name, layer = one_of(model)
    exact = layer.merged_tensors(torch.float32)["weight"].detach()
    made = [merged_tensors(name, layer, torch.bfloat16, seed)["weight"] for seed in range(SEEDS)]
    below = (exact.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()  # towards zero
    steps = torch.stack([words(value) - words(below) for value in made]) * exact.sign().int()
    assert bool(((steps == 0) | (steps == 1)).all())
    spacing = torch.finfo(torch.bfloat16).eps * exact.abs()
    off = torch.stack(made).double().mean(0) - exact.double()
    assert float((off.abs() / spacing).max()) < 6 * 0.5 / SEEDS**0.5
    assert abs(float((off / spacing).mean())) < 6 * 0.5 / (SEEDS * exact.numel()) ** 0.5
    nearest = layer.merged_tensors(torch.bfloat16)["weight"].double() - exact.double()
    assert float(off.norm()) < 0.3 * float(nearest.norm())


def test_a_quarter_of_the_way_is_gone_in_a_quarter_of_the_draws() -> None:
    layer = tuned(torch.bfloat16).get_submodule("model.layers.0.self_attn.q_proj")
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.lora_A.fill_(0.0)[0] = 1.0
        layer.lora_B.fill_(0.0)[:, 0] = 2.0**-9 / layer.low_rank().scale
    made = torch.stack([merged_tensors("q", layer, None, seed)["weight"] for seed in range(8)])
    share = Fraction(int((made == 1 + 2.0**-7).sum()), made.numel())
    assert bool(((made == 1) | (made == 1 + 2.0**-7)).all())
    assert abs(float(share) - 0.25) < 6 * (0.25 * 0.75 / made.numel()) ** 0.5
    up = (made[0].flatten()[:32] > 1).nonzero().flatten().tolist()
    assert up == [2, 3, 14, 16, 18, 19, 21, 23, 31]  # whatever machine it is
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[0], merged_tensors("k", layer, None, 0)["weight"])


def test_the_same_seed_writes_the_same_bytes_and_only_updates_are_rounded(tmp_path: Path) -> None:
    model = tuned(torch.bfloat16, std=5e-4, targets=["q", "down"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = [save_merged(model, tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    one, two, three = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    changed = {f"{name}.weight" for name, _ in tuned_layers(model)}
    assert {name for name in one if not torch.equal(one[name], three[name])} == changed
    assert all(torch.equal(value, before[name]) for name, value in one.items() if name not in changed)
    assert two.keys() == one.keys() and len(changed) == 4
    report = kept[0]
    assert abs(report.kept - 1) < 0.2 < 0.5 < report.noise and report.nearest < 0.8
    assert "stochastically by seed 3" in str(report) and f"({100 * report.nearest:.3g} % to near" in str(
        report
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_rows_and_weights_without_an_update_go_to_nearest(tmp_path: Path) -> None:
    """A float32 base that is written as bfloat16: nothing of it is drawn where nothing was learned."""
    model = tuned(torch.float32, targets=["q"], token_rows=[3, 5])
    report = save_merged(model, tmp_path / "m", dtype=torch.bfloat16, seed=0, batch=probe(model))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    found, own = load_file(tmp_path / "m" / "model.safetensors"), model.state_dict()
    table = found["model.embed_tokens.weight"] != own["model.embed_tokens.weight"].bfloat16()
    assert set(table.any(1).nonzero().flatten().tolist()) == {3, 5}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(found[name], own[name].bfloat16())
    assert report.logits is not None and 0 < report.logits < 0.5


@pytest.mark.parametrize("method", ["dora", "ia3", "miss"])
def test_every_tensor_that_a_method_merges_is_rounded_so(method: str) -> None:
    model = tuned(torch.bfloat16, method=method)
    with merged_weights(model):
        nearest = {name: value.detach().clone() for name, value in model.state_dict().items()}
    with merged_weights(model, seed=1):
        drawn = {name: value.detach().clone() for name, value in model.state_dict().items()}
    changed = {name for name in drawn if not torch.equal(drawn[name], nearest[name])}
    assert changed == {f"{name}.weight" for name, _ in tuned_layers(model)}
    assert all(int((words(drawn[name]) - words(nearest[name])).abs().max()) == 1 for name in changed)


def test_a_quantised_base_is_merged_into_its_dense_values(tmp_path: Path) -> None:
    model = wrap(tiny("llama-causal").bfloat16(), r=4, targets=["q"], base_dtype="int8")
    stir(model, std=1e-3)
    save_merged(model, tmp_path / "m", seed=0)
    found = load_file(tmp_path / "m" / "model.safetensors")
    name, layer = one_of(model)
    exact = dense_of(layer.weight).float() + layer.delta().detach()
    off = words(found[f"{name}.weight"]) - words(exact.bfloat16())
    assert int(off.abs().max()) == 1 and 0 < float((off != 0).float().mean()) < 0.6
    k = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(found[k], dense_of(model.get_parameter(k)))


def test_where_nothing_is_rounded_stochastically_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"written in bfloat16(.|\n)*float32"):
        save_merged(tuned(torch.bfloat16), tmp_path / "m", dtype=torch.float32, seed=0)
    model = tuned(torch.float32)
    with pytest.raises(UsageError, match="written in bfloat16"), merged_weights(model, seed=0):
        pass
    full = wrap(tiny("llama-causal").bfloat16(), "full")
    with pytest.raises(UsageError, match="no update to round"):
        save_merged(full, tmp_path / "m", seed=0)
    assert not list(tmp_path.iterdir())
