"""Bottleneck adapters: where they stand, what they compute, and that they start as the identity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import petune
from petune.errors import UsageError
from petune.kernels.configs import MemoryConfig
from petune.kernels.fuse import fuse, fused_blocks, unfusable, unfuse
from petune.methods import tuned_parameters, tuned_state, without_tuning, wrap
from petune.methods.adapter import AdapterBlock, AdapterLinear, AdapterNorm, tune
from petune.methods.configs import ACTIVATIONS, AdapterConfig
from tests.methods import references
from tests.methods.zoo import (
    FOUR,
    MOE,
    assert_same_gradients,
    batch,
    frozen,
    gradients,
    prompt,
    stir,
    table,
    tiny,
)
from tests.parallel.cells import case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

BERT, LLAMA = {"attention.output.dense", "output.dense"}, {"self_attn.o_proj", "mlp.down_proj"}
BART = {"self_attn.out_proj", "fc2"}
PLACES = {
    "bert-classify": {"bert.encoder.layer": BERT},
    "bart-seq2seq": {"model.encoder.layers": BART, "model.decoder.layers": BART | {"encoder_attn.out_proj"}},
    "t5-gated": {
        "encoder.block": {"layer.0.SelfAttention.o", "layer.1.DenseReluDense.wo"},
        "decoder.block": {
            "layer.0.SelfAttention.o",
            "layer.1.EncDecAttention.o",
            "layer.2.DenseReluDense.wo",
        },
    },
    "llama-causal": {"model.layers": LLAMA},
    "qwen3-causal": {"model.layers": LLAMA},
    "gemma3-causal": {"model.layers": LLAMA},
}


def test_an_adapter_behind_a_transposed_weight_is_refused() -> None:
    with pytest.raises(UsageError, match=r"adapter tunes torch\.nn\.Linear, not Conv1D"):
        wrap(tiny("gpt2-causal"), "adapter", reduction=4)


@pytest.mark.parametrize("name", FOUR)  # tests/models/test_families.py has every model
def test_an_adapter_starts_as_the_base_bit_for_bit(name: str) -> None:
    inputs = batch(name)
    expected = frozen(tiny(name))(**inputs)
    found = wrap(tiny(name), "adapter", reduction=4, also_train=())(**inputs)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("name", PLACES)
def test_one_adapter_stands_after_every_attention_and_every_mlp(name: str) -> None:
    model = wrap(tiny(name), "adapter", reduction=4)
    found = [key for key, module in model.named_modules() if isinstance(module, AdapterLinear)]
    expected = [
        f"{stack}.{index}.{place}"
        for stack, places in PLACES[name].items()
        for index in range(2)
        for place in places
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize("name", PLACES)
def test_each_adapter_runs_once_in_a_forward(name: str) -> None:
    model = wrap(tiny(name), "adapter", reduction=4)
    calls: dict[str, int] = {}
    for key, module in model.named_modules():
        if isinstance(module, AdapterLinear):
            calls[key] = 0
            module.adapter_up.register_forward_hook(
                lambda *_, key=key: calls.__setitem__(key, calls[key] + 1)
            )
    model(**batch(name))
    assert set(calls.values()) == {1}


def _same(value: Tensor) -> Tensor:
    return value


def _tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        name: getattr(F, name)
        for name in ("silu", "relu", "gelu", "leaky_relu", "hardswish", "mish", "relu6")
    },
    "swish": lambda x: x * torch.sigmoid(x),
    "leakyrelu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "tanh": torch.tanh,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "linear": lambda x: x,
    "relu2": lambda x: F.relu(x) ** 2,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu_python": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_10": lambda x: F.gelu(x).clamp(-10, 10),
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * 2**0.5))),
    "sqrtsoftplus": lambda x: torch.log1p(torch.exp(x)).sqrt(),
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh"), _tanh_gelu),
    **dict.fromkeys(("gelu_accurate", "gelu_fast"), _tanh_gelu),
}


def test_every_activation_has_a_reference() -> None:
    assert ACTS.keys() == set(ACTIVATIONS)


@pytest.mark.parametrize("activation", ACTS)
def test_forward_and_gradients_follow_the_equation_in_float64(activation: str) -> None:
    torch.manual_seed(0)
    base = nn.Linear(10, 8).double().requires_grad_(False)
    layer = tune(copy.deepcopy(base), AdapterConfig(reduction=2, activation=activation), "it")
    for value in layer.tuned().values():
        nn.init.normal_(value)
    twin = {key: value.detach().clone().requires_grad_() for key, value in layer.tuned().items()}
    x, upstream = torch.randn(3, 5, 10, dtype=torch.float64), torch.randn(3, 5, 8, dtype=torch.float64)
    y, kept = base(x), list[Tensor]()
    inner = ACTS[activation](y @ twin["adapter_down.weight"].T + twin["adapter_down.bias"])
    expected = y + inner @ twin["adapter_up.weight"].T + twin["adapter_up.bias"]
    with torch.autograd.graph.saved_tensors_hooks(lambda value: (kept.append(value), value)[1], _same):
        found = layer(x)
    near = 1e-8 if activation == "gelu_fast" else 1e-12  # which has a constant of ten digits
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    (found * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for key, value in layer.tuned().items():
        torch.testing.assert_close(value.grad, twin[key].grad, rtol=near, atol=near)
    rows = {value.untyped_storage().data_ptr(): value.shape[-1] for value in kept if value.numel() % 15 == 0}
    said = layer.kept_features().after
    assert said - 4 * (activation in ("relu", "tanh", "sigmoid", "linear")) == sum(rows.values())


@pytest.mark.parametrize("name", ["bert-classify", "llama-causal", "qwen3moe-causal"])
@pytest.mark.parametrize("kind", ["houlsby", "pfeiffer", "parallel"])
def test_bottlenecks_of_an_activation_with_a_kernel_are_fused_and_others_are_said(
    name: str, kind: str
) -> None:
    settings: dict[str, Any] = {"reduction": 4, "kind": kind}
    made = {}
    for kernels in ("off", "reference"):
        model = wrap(tiny(name), "adapter", activation="gelu_new", kernels=kernels, **settings)
        assert bool(fused_blocks(model)) == (kernels == "reference")
        stir(model)
        made[kernels] = gradients(model, batch(name))
    torch.testing.assert_close(made["reference"][0], made["off"][0])
    assert_same_gradients(made["reference"][1], made["off"][1], 1e-5)
    model = wrap(tiny(name), "adapter", activation="tanh", kernels="off", **settings)
    (reason,) = unfusable([model], table(name), "reference", torch.device("cpu"))
    assert "the activation 'tanh' of the bottleneck behind " in reason


def test_dropout_is_inside_the_bottleneck_and_only_in_training() -> None:
    torch.manual_seed(0)
    layer = tune(nn.Linear(8, 8), AdapterConfig(reduction=2, dropout=0.5), "it")
    for value in layer.tuned().values():
        nn.init.normal_(value)
    x = torch.randn(4, 8)
    y = F.linear(x, layer.weight, layer.bias)
    inner = F.silu(layer.adapter_down(y))
    torch.testing.assert_close(layer.eval()(x), y + layer.adapter_up(inner))
    torch.manual_seed(4)
    found = layer.train()(x)
    torch.manual_seed(4)
    torch.testing.assert_close(found, y + layer.adapter_up(F.dropout(inner, 0.5)))


def test_up_is_zero_and_down_is_drawn_with_deviation_two_hundredths() -> None:
    torch.manual_seed(0)
    layer = tune(nn.Linear(8, 400), AdapterConfig(reduction=2), "it")
    assert not layer.adapter_up.weight.any()
    assert not layer.adapter_up.bias.any()
    assert not layer.adapter_down.bias.any()
    assert float(layer.adapter_down.weight.detach().std()) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bottleneck_is_float32_on_a_low_precision_base(dtype: torch.dtype) -> None:
    layer = tune(nn.Linear(8, 8).to(dtype), AdapterConfig(reduction=2), "it")
    assert {value.dtype for value in layer.tuned().values()} == {torch.float32}
    assert layer(torch.randn(2, 8).to(dtype)).dtype == dtype


@pytest.mark.parametrize(
    ("name", "places"), [("bert-tokens", 4), ("bart-seq2seq", 10), ("t5-gated", 10), ("llama-causal", 4)]
)
@pytest.mark.parametrize("reduction", [4, 16])
def test_the_count_of_trained_parameters_is_the_formula(name: str, places: int, reduction: int) -> None:
    width, inner = 64, 64 // reduction
    model = wrap(tiny(name), "adapter", reduction=reduction, also_train=())
    assert sum(value.numel() for value in tuned_state(model).values()) == places * (
        2 * width * inner + inner + width
    )


# ---------------------------------------------------------------- norms that train beside it

LAYER_NORMS = ("LayerNorm",)  # of attentions and MLPs, and of the embeddings


@pytest.mark.parametrize("kind", ["houlsby", "pfeiffer", "parallel"])
def test_norms_train_whole_beside_adapters_in_fused_blocks(kind: str, tmp_path: Path) -> None:
    found, name = [], "bert-classify"
    for kernels in ("off", "reference"):
        settings = {"kind": kind, "reduction": 4, "also_train": LAYER_NORMS}
        model = wrap(tiny(name), "adapter", kernels=kernels, **settings).train()
        stir(model, std=0.1)
        assert bool(fused_blocks(model)) == (kernels == "reference")
        found.append(gradients(model, batch(name)))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    assert_same_gradients(found[1][1], found[0][1], 1e-5)
    places = ("embeddings", *(f"layer.{at}.{part}output" for at in (0, 1) for part in ("attention.", "")))
    trained = [key for key in found[1][1] if ".LayerNorm." in key and "adapter_" not in key]
    assert len(trained) == 2 * len(places)
    assert all(any(f"{one}.L" in key for key in trained) for one in places)
    unfuse(model)
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned").eval()
    assert torch.equal(again(**batch(name)).logits, model.eval()(**batch(name)).logits)


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("houlsby", "attention"),
        *(pytest.param(kind, None, marks=pytest.mark.long) for kind in ("houlsby", "pfeiffer")),
        pytest.param("pfeiffer", "attention", marks=pytest.mark.long),
    ],
)
def test_norms_train_whole_beside_adapters_under_tp(kind: str, kept: Any) -> None:
    own: Any = (("also_train", LAYER_NORMS), ("kind", kind))
    one = case("bert-classify", "adapter", BACKENDS["tp"]("bert-classify", 2), steps=1, tuning=own)
    check(replace(one, blocks=None if kept is None else MemoryConfig(kept)))


def test_at_step_zero_only_the_way_up_has_a_gradient() -> None:
    model = wrap(tiny("llama-causal"), "adapter", reduction=4)
    _, found = gradients(model, batch("llama-causal"))
    for name, value in found.items():
        assert bool(value.any()) is (".adapter_up." in name), name


def test_base_names_do_not_change() -> None:
    for name in PLACES:
        base, model = tiny(name).state_dict(), wrap(tiny(name), "adapter", reduction=4)
        assert list(base) == [key for key in model.state_dict() if key in base]
        assert {key for key in model.state_dict() if key not in base} == {
            key for key in tuned_state(model) if ".adapter_" in key
        }


def test_a_deep_copy_stands_alone_and_a_state_dict_goes_round() -> None:
    inputs = batch("bart-seq2seq")
    model = wrap(tiny("bart-seq2seq"), "adapter", reduction=4)
    stir(model)
    twin, expected = copy.deepcopy(model), model(**inputs).logits
    stir(model, seed=8)
    assert torch.equal(twin(**inputs).logits, expected)
    other = wrap(tiny("bart-seq2seq", seed=5), "adapter", reduction=4)
    other.load_state_dict(twin.state_dict(), strict=True)
    assert torch.equal(other(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("bart-seq2seq", "houlsby"), ("llama-causal", "houlsby"), ("llama-causal", "pfeiffer")],
)
def test_generation_with_a_cache_is_generation_without(name: str, kind: str) -> None:
    model = wrap(tiny(name), "adapter", kind=kind, reduction=4)
    stir(model, std=0.1)
    settings = {"max_new_tokens": 6, "do_sample": False, "no_repeat_ngram_size": 1}
    assert torch.equal(
        model.generate(**prompt(name), **settings),
        model.generate(**prompt(name), use_cache=False, **settings),
    )


@pytest.mark.parametrize("name", MOE)
def test_an_adapter_stands_behind_a_whole_mixture_and_comes_back(name: str, tmp_path: Path) -> None:
    model, inputs = wrap(tiny(name), "adapter", reduction=4), batch(name)
    expected = tiny(name)(**inputs).logits
    assert torch.equal(model(**inputs).logits, expected)
    at = {key.rpartition(".adapter_")[0].partition("layers.1.")[2] for key in tuned_state(model)} - {""}
    assert at == {"self_attn.o_proj", "mlp"}
    stir(model)
    found, trained = model(**inputs), tuned_parameters(model)
    found.loss.backward()
    assert float((found.logits - expected).detach().abs().max()) > 1e-2
    assert all(value.grad is not None and value.grad.any() for value in trained.values())
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    assert torch.equal(again(**inputs).logits, found.logits)
    assert torch.equal(copy.deepcopy(again)(**inputs).logits, found.logits)
    with without_tuning(model):
        assert torch.equal(model(**inputs).logits, expected)


# ------------------------------------------------------------------ Pfeiffer's kind

SUMS = {  # norms behind sums, or blocks that end with one
    "bert-classify": ["bert.encoder.layer.{}.output.LayerNorm"],
    "bart-seq2seq": ["model.encoder.layers.{}.final_layer_norm", "model.decoder.layers.{}.final_layer_norm"],
    "t5-gated": ["encoder.block.{}", "decoder.block.{}"],
    "llama-causal": ["model.layers.{}"],
    "gemma3-causal": ["model.layers.{}"],
    "qwen3moe-causal": ["model.layers.{}"],
}
PFEIFFER: dict[str, Any] = {"kind": "pfeiffer", "reduction": 4}


def at_sums(name: str) -> list[str]:
    return [place.format(index) for place in SUMS[name] for index in range(2)]


@pytest.mark.parametrize("kernels", ["off", "reference"])
@pytest.mark.parametrize("name", SUMS)
def test_pfeiffers_adapters_stand_at_sums_and_start_as_the_base(name: str, kernels: Any) -> None:
    inputs, base = batch(name), frozen(tiny(name)).train()
    fuse(base, table(name), kernels)
    expected = base(**inputs).loss
    model = wrap(tiny(name), "adapter", **PFEIFFER, also_train=(), kernels=kernels).train()
    assert len(fused_blocks(model)) == len(fused_blocks(base)) == len(SUMS[name]) * 2 * (kernels != "off")
    assert torch.equal(model(**inputs).loss, expected)
    found = {key for key, module in model.named_modules() if isinstance(module, AdapterNorm | AdapterBlock)}
    assert found == set(at_sums(name))
    stir(model, std=0.1)
    assert float((model(**inputs).loss - expected).detach().abs()) > 1e-3
    with without_tuning(model):
        assert torch.equal(model(**inputs).loss, expected)


def test_norms_learn_as_without_them_where_adapters_of_sums_are_passed_by() -> None:
    found, name = [], "bert-classify"
    for kernels in ("off", "reference"):
        model = wrap(tiny(name), "adapter", **PFEIFFER, kernels=kernels, also_train=LAYER_NORMS).train()
        stir(model, std=0.1)
        with without_tuning(model):
            found.append(gradients(model, batch(name)))
    trained = [{key: own for key, own in one.items() if "adapter_" not in key} for _, one in found]
    assert sum(".LayerNorm." in key for key in trained[0]) == 10
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    assert_same_gradients(trained[1], trained[0], 1e-5)


def test_fused_adapters_of_sums_start_as_the_base_in_bf16_too() -> None:
    for name in ("bert-classify", "llama-causal"):
        inputs, base = batch(name), frozen(tiny(name).bfloat16()).train()
        fuse(base, table(name), "reference")
        model = wrap(tiny(name).bfloat16(), "adapter", **PFEIFFER, also_train=(), kernels="reference")
        assert fused_blocks(model)
        assert torch.equal(model.train()(**inputs).loss, base(**inputs).loss)


@pytest.mark.parametrize(
    "name", ["gpt2-causal", "opt-causal", "granite-causal", "qwen3_5-causal", "vit-classify"]
)
def test_pfeiffers_adapters_stand_behind_blocks_of_every_kind(name: str) -> None:
    """Blocks with attributes of the names of an adapter's settings, and with linears that adapters do not
    stand at."""
    inputs = batch(name)
    expected = tiny(name)(**inputs).logits
    model = wrap(tiny(name), "adapter", **PFEIFFER, dropout=0.3, also_train=())
    assert torch.equal(model(**inputs).logits, expected)
    stir(model, std=0.1)
    assert float((model(**inputs).logits - expected).detach().abs().max()) > 1e-3
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        pytest.param(name, kernels, marks=pytest.mark.long if name[0] in "bt" and kernels == "off" else ())
        for name in SUMS
        for kernels in ("off", "reference")
    ],
)
def test_pfeiffers_adapters_follow_the_paper_in_float64(name: str, kernels: Any) -> None:
    """Llama's and T5's norms go through float32."""
    near = 1e-10 if name.startswith("b") else 3e-6
    references.pfeiffers_adapters_follow_the_paper(name, at_sums(name), kernels, near)


@pytest.mark.parametrize("name", ["bart-seq2seq", "llama-causal"])
def test_pfeiffers_adapters_come_back_from_their_files(name: str, tmp_path: Path) -> None:
    inputs = batch(name)
    model = wrap(tiny(name), "adapter", **PFEIFFER, dropout=0.1, kernels="reference")
    stir(model)
    expected = model(**inputs).logits
    assert torch.equal(copy.deepcopy(model)(**inputs).logits, expected)
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    torch.testing.assert_close(again.eval()(**inputs).logits, expected)
    unfuse(model)
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    with pytest.raises(UsageError, match="adapter cannot be merged"):
        petune.merge(again)


def test_a_block_whose_forward_was_exchanged_refuses_pfeiffers_kind() -> None:
    """As accelerate does where it spreads a model over devices: the adapter would be passed by."""
    model = tiny("llama-causal")
    model.model.layers[1].forward = model.model.layers[1].forward
    with pytest.raises(UsageError, match="this one's forward was exchanged") as refused:
        wrap(model, "adapter", **PFEIFFER)
    assert refused.value.problems[0].where == "model.layers.1" and "kind: houlsby" in str(refused.value)
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


# ------------------------------------------------------------------ the parallel kind

PARALLEL = references.PARALLEL
BESIDE = {
    "bert-classify": ["bert.encoder.layer.{}.output.dense"],
    "bart-seq2seq": ["model.encoder.layers.{}.fc2", "model.decoder.layers.{}.fc2"],
    "t5-gated": ["encoder.block.{}.layer.1.DenseReluDense.wo", "decoder.block.{}.layer.2.DenseReluDense.wo"],
    "llama-causal": ["model.layers.{}.mlp.down_proj"],
}


@pytest.mark.parametrize("name", BESIDE)
def test_one_parallel_adapter_stands_beside_every_mlp(name: str) -> None:
    model = wrap(tiny(name), "adapter", **PARALLEL)
    found = {key for key, module in model.named_modules() if isinstance(module, AdapterLinear)}
    assert found == {place.format(index) for place in BESIDE[name] for index in range(2)}


@pytest.mark.parametrize("name", ["bert-tokens", "t5-seq2seq", "gemma3-causal", "opt-causal", *MOE])
def test_parallel_adapters_start_as_the_base_and_can_be_passed_by(name: str) -> None:
    inputs = batch(name)
    expected = frozen(tiny(name))(**inputs).logits
    model = wrap(tiny(name), "adapter", **PARALLEL)
    assert torch.equal(model(**inputs).logits, expected)
    stir(model, std=0.1)
    assert float((model(**inputs).logits - expected).detach().abs().max()) > 1e-3
    with without_tuning(model):
        assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(("given", "scale"), [({}, 4.0), ({"scale": 0.75}, 0.75)])
@pytest.mark.parametrize("name", ["bert-classify", "llama-causal"])
def test_parallel_adapters_follow_the_paper_in_float64(
    name: str, given: dict[str, float], scale: float
) -> None:
    references.parallel_adapters_follow_the_paper(name, given, scale)


def test_the_scale_of_an_adapter_after_a_sub_layer_is_one_unless_it_is_set() -> None:
    torch.manual_seed(0)
    plain = tune(nn.Linear(8, 8), AdapterConfig(reduction=2), "it")
    scaled = tune(nn.Linear(8, 8), AdapterConfig(reduction=2, scale=3.0), "it")
    for value in plain.tuned().values():
        nn.init.normal_(value)
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(4, 8)
    y = F.linear(x, plain.weight, plain.bias)
    torch.testing.assert_close(scaled(x) - y, 3 * (plain(x) - y), rtol=1e-5, atol=1e-5)


def test_parallel_adapters_begin_as_a_linear_does() -> None:
    model = wrap(tiny("bert-classify", hidden_size=256), "adapter", **PARALLEL)
    drawn = [value for key, value in tuned_state(model).items() if key.endswith("adapter_down.weight")]
    for value in drawn:
        assert float(value.abs().max()) <= 256**-0.5
        assert float(value.std()) == pytest.approx((3 * 256) ** -0.5, rel=0.03)
    others = [value for key, value in tuned_state(model).items() if not key.endswith("adapter_down.weight")]
    assert not any(value.any() for value in others)


@pytest.mark.parametrize("name", ["bart-seq2seq", "qwen3moe-causal"])
def test_parallel_adapters_come_back_from_their_files(name: str, tmp_path: Path) -> None:
    inputs = batch(name)
    model = wrap(tiny(name), "adapter", **PARALLEL, dropout=0.1, scale=2.0)
    stir(model)
    expected = model(**inputs).logits
    petune.save(model, tmp_path / "tuned")
    again = petune.load(tiny(name), tmp_path / "tuned")
    assert torch.equal(again.eval()(**inputs).logits, expected)
    assert torch.equal(copy.deepcopy(again)(**inputs).logits, expected)
    with pytest.raises(UsageError, match="adapter cannot be merged"):
        petune.merge(again)
