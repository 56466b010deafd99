"""DINOv2 beside transformers: its gated MLP, pictures of another size, the token of masked patches, and what
is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitImageProcessorPil, Dinov2Model

import petune
from petune.errors import UsageError
from petune.methods import merge, wrap
from petune.methods.side import Ladder
from petune.models import FAMILIES
from petune.models.loading import read_config
from petune.models.sites import find_sites
from petune.models.source import resolve_model
from petune.run.readers import reader_of
from tests.methods.zoo import SETTINGS, batch, gradients, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS
from tests.picture_runs import write_pictures

NAME = "dinov2-classify"
GATED: dict[str, Any] = {"use_swiglu_ffn": True, "mlp_ratio": 1, "hidden_size": 144}  # 96 columns


def gated(**changes: Any) -> Any:
    return tiny(NAME, **GATED, **changes)


def test_a_gated_mlp_is_found_with_its_sizes() -> None:
    model = gated()
    sites = find_sites(model, FAMILIES["dinov2"])
    assert [site.role for site in sites if site.block == 0] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert (
        FAMILIES["dinov2"].shape(model.config).columns
        == model.dinov2.encoder.layer[0].mlp.down_proj.in_features
    )


@pytest.mark.parametrize("method", SETTINGS)
def test_a_gated_model_starts_and_merges_as_the_base(method: str) -> None:
    inputs, expected = batch(NAME), gated()(**batch(NAME)).logits
    model = wrap(gated(), method, **(SETTINGS[method] | ({"reduction": 2} if method == "side" else {})))
    if method != "side":  # a ladder has a say of its own
        torch.testing.assert_close(model(**inputs).logits, expected, atol=1e-6, rtol=1e-5)
    if method == "lora":
        stir(model)
        torch.testing.assert_close(
            merge(model)(**inputs).logits, model(**inputs).logits, atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize("kind", ["houlsby", "parallel"])
def test_adapters_stand_behind_and_beside_a_gated_mlp(kind: str) -> None:
    model = wrap(gated(), "adapter", reduction=4, kind=kind)
    stir(model)
    assert all(float(value.abs().sum()) > 0 for value in gradients(model, batch(NAME))[1].values())


@pytest.mark.parametrize("backend", ["tp", "sp-gather", "pp-1f1b"])
def test_a_gated_model_is_cut_and_trains_as_in_one_process(backend: str) -> None:
    plan = BACKENDS[backend](NAME, 2)
    settings = tuple((GATED | {"num_hidden_layers": 3 if backend.startswith("pp") else 2}).items())
    check(Case(NAME, "full", plan, settings=settings, steps=1, dtype=torch.float64))


def test_a_side_network_draws_each_of_its_tensors() -> None:
    model = wrap(tiny(NAME), "side", reduction=4)
    (ladder,) = (module for module in model.modules() if isinstance(module, Ladder))
    for name in ladder.tuned():
        ladder.get_parameter(name).data.fill_(7.0)
        ladder.draw(name)
    scales = [value for name, value in ladder.named_parameters() if "lambda" in name]
    assert scales and all(bool((value == 0.5).all()) for value in scales)
    assert not any(bool((value == 7.0).any()) for value in ladder.parameters())


def test_a_side_network_does_not_begin_with_a_pruned_picture_model() -> None:
    with pytest.raises(UsageError, match="begins with an embedding of tokens"):
        wrap(tiny(NAME), "side", reduction=4, start="pruned")


def written(folder: Path, **changes: Any) -> Path:
    """A backbone that reads pictures of 14 and was made for those of 12, and masks patches in pretraining."""
    model = tiny(NAME, use_mask_token=True, **changes)
    Dinov2Model(model.config).save_pretrained(folder)
    BitImageProcessorPil(size={"shortest_edge": 18}, crop_size={"height": 16, "width": 16}).save_pretrained(
        folder
    )
    return folder


@pytest.mark.usefixtures("no_picture")
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_run_reads_larger_pictures_and_its_mask_stays(method: str, tmp_path: Path) -> None:
    rows, model = write_pictures(tmp_path), written(tmp_path / "dinov2")
    run = petune.train(
        model=str(model), data=str(rows), method=method, lr=3e-3, max_steps=6, out=str(tmp_path / "run")
    )
    assert json.loads((tmp_path / "run" / "setup.json").read_text())["data"]["longest"] == 17
    assert run.summary["after"]["accuracy"] == 1.0
    assert not run.model.dinov2.embeddings.mask_token.any()  # type: ignore[union-attr, operator]


def test_sub_layers_that_are_left_out_at_random_are_refused(tmp_path: Path) -> None:
    source = resolve_model(str(written(tmp_path / "dinov2", drop_path_rate=0.1)), tmp_path)
    with pytest.raises(UsageError, match="drop_path_rate"):
        reader_of(source, read_config(source))
