"""What `wrap` refuses: unknown methods and settings, values out of range, models that are tuned or merged
already."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from torch import nn

import petune
from petune.errors import UsageError
from petune.methods import METHODS, is_wrapped, merge, merged_weights, tuning, wrap
from petune.methods.configs import LoraConfig, make_config
from tests.methods.zoo import SETTINGS, tiny

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("lora", {"r": 0}, "lora.r = 0 must be at least 1"),
    ("lora", {"r": -4}, "lora.r = -4 must be at least 1"),
    ("lora", {"r": 2.5}, "lora.r = 2.5 is not a whole number"),
    ("lora", {"r": "8"}, "lora.r = '8' is not a whole number"),
    ("lora", {"r": True}, "lora.r = True"),
    ("lora", {"r": None}, "lora.r = None"),
    ("lora", {"alpha": 0}, "lora.alpha = 0 must be above 0"),
    ("lora", {"alpha": float("nan")}, "lora.alpha = nan"),
    ("lora", {"alpha": float("inf")}, "lora.alpha = inf"),
    ("lora", {"dropout": 1.0}, "lora.dropout = 1.0 must be below 1"),
    ("lora", {"dropout": -0.1}, "lora.dropout = -0.1 must be at least 0"),
    ("lora", {"dropout": float("nan")}, "lora.dropout = nan"),
    ("lora", {"targets": 5}, "lora.targets = 5"),
    ("lora", {"targets": [3]}, "lora.targets = "),
    ("lora", {"targets": []}, "nothing to tune"),
    ("lora", {"exclude": "q"}, "lora.exclude = 'q' is not a list of names"),
    ("lora", {"also_train": [None]}, "lora.also_train = "),
    ("adapter", {"reduction": 0}, "adapter.reduction = 0 must be at least 1"),
    ("adapter", {"reduction": 128}, "adapter.reduction 128 leaves no bottleneck"),
    ("adapter", {"activation": "prelu"}, "adapter.activation = 'prelu' is not one of"),
    ("side", {"reduction": 3}, "side.reduction 3 does not divide the model's hidden_size"),
    ("side", {"reduction": 16}, "side.reduction 16 does not divide the model's head_dim"),
    ("side", {"end": "pap"}, "side.end = 'pap' is not one of"),
    ("side", {"temperature": 0}, "side.temperature = 0 must be above 0"),
    ("side", {"temperature": float("inf")}, "side.temperature = inf"),
    ("full", {"r": 8}, "r is not a setting of full"),
]


@pytest.mark.parametrize(
    ("method", "settings", "message"), BAD, ids=[f"{method} {settings}" for method, settings, _ in BAD]
)
def test_a_setting_out_of_range_is_a_clear_error(method: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrap(tiny("bert-classify"), method, **settings)
    assert message in str(caught.value)


def test_an_unknown_setting_is_named_with_the_nearest_and_the_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        wrap(tiny("bert-classify"), "lora", dropuot=0.1)
    text = str(caught.value)
    assert "dropuot is not a setting of lora" in text
    assert "did you mean: dropout" in text
    assert "targets" in text


def test_an_unknown_method_is_named_with_the_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        wrap(tiny("bert-classify"), "laro")
    text = str(caught.value)
    assert "no method named 'laro'" in text
    assert "full, lora, dora, ia3, miss, adapter, side" in text
    assert "did you mean: lora" in text


@pytest.mark.parametrize("method", [None, 5, {"name": "lora"}])
def test_a_method_that_is_no_name_is_refused(method: Any) -> None:
    with pytest.raises(UsageError, match=r"no method named[\s\S]*give its name, and settings apart"):
        wrap(tiny("bert-classify"), method)


@pytest.mark.parametrize("function", [wrap, petune.load, petune.add])
@pytest.mark.parametrize("model", [None, "demo:minilm", nn.Linear])
def test_what_is_no_model_is_refused(function: Any, model: Any) -> None:
    with pytest.raises(UsageError, match=r"this is no model[\s\S]*load it first"):
        function(model, "lora")


def test_every_problem_comes_in_one_error() -> None:
    with pytest.raises(UsageError) as caught:
        wrap(tiny("bert-classify"), "lora", r=0, dropout=2, bogus=1)
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("again", ["lora", "full"])
def test_wrapping_twice_is_an_error(method: str, again: str) -> None:
    model = wrap(tiny("bert-classify"), method, **SETTINGS.get(method, {}))
    with pytest.raises(UsageError, match=f"wrapped already, with {method}"):
        wrap(model, again)


def test_wrapping_inside_merged_weights_is_an_error() -> None:
    model = wrap(tiny("bert-classify"), "lora", r=4)
    with merged_weights(model), pytest.raises(UsageError, match="wrapped already"):
        wrap(model, "lora", r=4)


def test_wrapping_a_merged_model_is_an_error() -> None:
    model = merge(wrap(tiny("bert-classify"), "lora", r=4))
    with pytest.raises(UsageError, match="merged"):
        wrap(model, "lora", r=4)


def test_a_part_of_a_wrapped_model_cannot_be_wrapped() -> None:
    model = wrap(tiny("bert-classify"), "lora", r=4)
    with pytest.raises(UsageError, match="tuned already: LoraLinear"):
        wrap(model.bert, "lora", r=4)
    sided = wrap(tiny("bert-classify"), "side", reduction=4)
    with pytest.raises(UsageError):
        wrap(sided.bert, "lora", r=4)


@pytest.mark.parametrize("method", ["adapter", "side"])
def test_a_method_that_needs_a_family_lists_those_it_knows(method: str) -> None:
    with pytest.raises(UsageError) as caught:
        wrap(nn.Sequential(nn.Linear(4, 4)), method)
    text = str(caught.value)
    for family in ("bert", "bart", "t5", "llama", "mistral", "qwen2", "qwen3"):
        assert family in text
    assert "Sequential" in text


@pytest.mark.parametrize("method", ["lora", "full"])
def test_lora_and_full_take_any_module(method: str) -> None:
    assert is_wrapped(wrap(nn.Sequential(nn.Linear(4, 4)), method))


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameters"):
        wrap(nn.Sequential(nn.ReLU()), "full")


def test_a_side_network_that_cannot_be_built_leaves_the_model_as_it_was() -> None:
    # decoder heads of width 4, divided by 8: none left
    model = tiny("bart-seq2seq", decoder_attention_heads=16)
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(UsageError):
        wrap(model, "side", reduction=8)
    assert [(name, type(module)) for name, module in model.named_modules()] == before


def test_a_decoder_whose_mlp_the_reduction_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="does not divide") as caught:
        wrap(tiny("bart-seq2seq", decoder_ffn_dim=98), "side", reduction=4)
    assert "set reduction to a divisor of 2," in str(caught.value)
    wrap(tiny("bart-seq2seq", decoder_ffn_dim=98), "side", reduction=2)


def test_the_record_says_how_a_model_is_tuned() -> None:
    record = tuning(wrap(tiny("llama-classify"), "lora", r=4))
    assert (record.method, record.config, record.family, record.also_train) == (
        "lora",
        LoraConfig(r=4),
        "llama",
        ("score",),
    )
    with pytest.raises(UsageError, match="not wrapped"):
        tuning(tiny("bert-classify"))


def test_lists_become_tuples_so_that_configs_stay_frozen_and_hashable() -> None:
    assert make_config("lora", {"targets": ["q", "v"]}).targets == ("q", "v")
    assert all(hash(method.config()) is not None for method in METHODS.values())


def test_configs_do_not_load_torch() -> None:
    """`petune check` is fast because of it; petune.methods itself needs torch, so the module is loaded from
    its file."""
    program = (
        "import importlib.util, sys; import petune.errors\nspec ="
        " importlib.util.find_spec('petune').submodule_search_locations[0] + '/methods/configs.py'\nmade ="
        " importlib.util.spec_from_file_location('configs', spec); module ="
        " importlib.util.module_from_spec(made)\nsys.modules['configs'] = module;"
        " made.loader.exec_module(module)\nassert 'torch' not in sys.modules and 'transformers' not in"
        " sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
