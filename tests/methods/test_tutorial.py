"""The code of CONTRIBUTING's tutorial, run as it stands there: what somebody copies trains, merges, is saved,
and is cut across ranks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import petune
from petune.errors import UsageError
from petune.methods import configs, merge, merged_weights, without_tuning
from petune.models.tuned_linear import TunedLinear
from petune.parallel.tensor.shard_params import splits_of
from tests.methods import zoo
from tests.methods.zoo import batch, gradients, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of

ROOT = Path(__file__).parents[2]
# What the three pieces of code find around them in the files that they are written into.
AROUND = (
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "from petune.methods.configs import ALSO_TRAIN, MethodConfig\nfrom petune.setting import setting\n{}",
    "from petune.methods.configs import Method, ScaleConfig\nMETHODS = {{\n{}}}\n",
    "{}",
)


@pytest.fixture(autouse=True)
def scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tutorial followed: config, method and line in the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    pieces = re.findall(
        r"```python\n(.*?)```", text[text.index("## Add a method") : text.index("## Add a family")], re.S
    )
    config, line, method = [around.format(piece) for around, piece in zip(AROUND, pieces, strict=True)]

    def load(name: str, source: str) -> ModuleType:
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    own: Any = load("petune.methods.config_of_the_tutorial", config).ScaleConfig
    monkeypatch.setattr(configs, "ScaleConfig", own, raising=False)
    of_the_table: Any = load("petune.methods.line_of_the_tutorial", line)
    monkeypatch.setitem(configs.METHODS, "scale", of_the_table.METHODS["scale"])
    found = load("petune.methods.scale", method)
    monkeypatch.setattr(sys.modules["petune.methods"], "scale", found, raising=False)
    monkeypatch.setitem(zoo.SETTINGS, "scale", {})
    return found


def test_it_starts_as_the_identity_follows_its_equation_and_is_merged(
    scale: ModuleType, tmp_path: Path
) -> None:
    inputs = batch("bert-classify")
    base, model = tiny("bert-classify"), petune.wrap(tiny("bert-classify"), "scale")
    assert torch.equal(model(**inputs).logits, base(**inputs).logits)
    stir(model)
    layer, x = model.bert.encoder.layer[0].output.dense, torch.randn(3, 96)
    torch.testing.assert_close(layer(x), layer.scale * (x @ layer.weight.T) + layer.bias)
    tuned = model(**inputs).logits
    assert float((tuned - base(**inputs).logits).detach().abs().max()) > 0.05
    heads = {name: value for name, value in model.state_dict().items() if name.startswith("classifier")}
    base.load_state_dict(heads, strict=False)
    with without_tuning(model):
        torch.testing.assert_close(model(**inputs).logits, base(**inputs).logits)
    with merged_weights(model):
        torch.testing.assert_close(model(**inputs).logits, tuned, rtol=1e-4, atol=1e-5)
    petune.save(model, tmp_path / "tuned")
    torch.testing.assert_close(petune.load(tiny("bert-classify"), tmp_path / "tuned")(**inputs).logits, tuned)
    assert [type(one) for one in merge(model).modules()] == [type(one) for one in base.modules()]
    torch.testing.assert_close(model(**inputs).logits, tuned, rtol=1e-4, atol=1e-5)


def test_fused_it_stays_what_it_is(scale: ModuleType) -> None:
    plain, model = (
        petune.wrap(tiny("llama-causal"), "scale", kernels=kernels) for kernels in ("off", "reference")
    )
    for one in (plain, model):
        stir(one)
    zoo.assert_same_gradients(
        gradients(model.train(), batch("llama-causal"))[1],
        gradients(plain.train(), batch("llama-causal"))[1],
        1e-5,
    )


@pytest.mark.parametrize(("backend", "name"), [("tp", "bert-classify"), ("galaxy", "llama-causal")])
def test_cut_across_two_ranks_it_trains_as_in_one_process(scale: ModuleType, backend: str, name: str) -> None:
    plan = BACKENDS[backend](name, 2)
    check(Case(name, "scale", plan, settings=settings_of(name, plan), passes=(3,)))


def test_a_layer_that_does_not_say_how_it_is_cut_is_refused(
    scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = scale.tune(torch.nn.Linear(4, 3))
    assert splits_of(layer, "column", "q") == {"weight": 0, "bias": 0, "scale": 0}
    monkeypatch.setattr(scale.ScaleLinear, "splits", lambda self, cut: {"weight": 0, "bias": 0})
    with pytest.raises(UsageError, match="scale"):
        splits_of(layer, "column", "q")


def test_a_layer_of_another_class_is_never_taken_for_a_linear(scale: ModuleType) -> None:
    class Twice(torch.nn.Linear):
        """A linear to isinstance, with `splits` by name, and no tuned layer."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

        def splits(self, cut: str) -> dict[str, int]:
            return {"weight": 0, "bias": 0}

    with pytest.raises(UsageError, match="Twice does not say how it is cut"):
        splits_of(Twice(4, 3), "column", "q")
    with pytest.raises(TypeError, match="splits"):
        type("Unsaid", (TunedLinear, torch.nn.Linear), {"base": torch.nn.Linear}).of(torch.nn.Linear(4, 3))
