"""LoRA against its equations, against peft, and at its start."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import petune
from petune.errors import UsageError
from petune.methods import tuned_state, wrap
from petune.methods.configs import LoraConfig
from petune.methods.lora import LoraConv1D, LoraEmbedding, LoraLayer, LoraLinear, tune
from tests.methods.zoo import FOUR, batch, frozen, gradients, stir, tiny
from tests.pool import run


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).eval()


def layers() -> dict[str, nn.Module]:
    """One layer of each kind, frozen as `wrap` leaves them."""
    torch.manual_seed(0)
    conv = Conv1D(6, 10)
    nn.init.normal_(conv.weight)
    made = {
        "linear": nn.Linear(10, 6),
        "without bias": nn.Linear(10, 6, bias=False),
        "conv1d": conv,
        "embedding": nn.Embedding(10, 6),
    }
    return {name: layer.requires_grad_(False) for name, layer in made.items()}


def entry(layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(3)
    return (
        torch.randint(0, 10, (4, 7)) if isinstance(layer, nn.Embedding) else torch.randn(4, 7, 10).to(dtype)
    )


def tuned(layer: nn.Module, **settings: Any) -> LoraLayer:
    torch.manual_seed(1)
    form = tune(layer, LoraConfig(**{"r": 3, **settings}))
    with torch.no_grad():
        for factor in form.tuned().values():
            factor.normal_()
    return form


@pytest.mark.parametrize("name", FOUR)  # tests/models/test_families.py has every model
def test_lora_starts_as_the_base_bit_for_bit(name: str) -> None:
    inputs = batch(name)
    with torch.enable_grad():
        expected = frozen(tiny(name))(**inputs)
        found = wrap(tiny(name), "lora", r=4, also_train=())(**inputs)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)


@pytest.mark.parametrize("kind", list(layers()))
def test_a_layer_starts_as_its_base_bit_for_bit(kind: str) -> None:
    layer = layers()[kind]
    x = entry(layer)
    assert torch.equal(tune(layer, LoraConfig(r=3))(x), layer(x))


def test_at_step_zero_only_b_has_a_gradient() -> None:
    model = wrap(tiny("llama-causal"), "lora", r=4)
    _, found = gradients(model, batch("llama-causal"))
    for name, value in found.items():
        assert bool(value.any()) is name.endswith("lora_B"), name


def test_at_step_zero_only_a_of_an_embedding_has_a_gradient() -> None:
    model = wrap(tiny("llama-causal"), "lora", r=4, targets=["embed_tokens"])
    _, found = gradients(model, batch("llama-causal"))
    assert {name.rpartition(".")[2]: bool(value.any()) for name, value in found.items()} == {
        "lora_A": True,
        "lora_B": False,
    }


def test_a_is_drawn_within_one_over_the_root_of_its_inputs_and_b_is_zero() -> None:
    torch.manual_seed(0)
    form = tune(nn.Linear(400, 8), LoraConfig(r=64))
    assert not form.lora_B.any()
    assert float(form.lora_A.detach().abs().max()) <= 1 / 20
    assert float(form.lora_A.detach().std()) == pytest.approx(1 / 20 / 3**0.5, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "scale"), [({"r": 4}, 2.0), ({"r": 4, "alpha": 6}, 1.5), ({"r": 16, "alpha": 8}, 0.5)]
)
def test_scale_is_alpha_over_r_and_alpha_is_twice_r_by_default(
    settings: dict[str, Any], scale: float
) -> None:
    layer = layers()["linear"]
    form = tuned(layer, **settings)
    x = entry(layer)
    torch.testing.assert_close(form(x), layer(x) + scale * x @ form.lora_A.T @ form.lora_B.T)


@pytest.mark.parametrize("kind", ["linear", "without bias", "conv1d"])
def test_forward_and_gradients_follow_the_equation_in_float64(kind: str) -> None:
    layer = layers()[kind].double()
    form = tuned(layer, r=3, alpha=5)
    assert form.lora_A.dtype == torch.float64
    x, upstream = entry(layer, torch.float64).requires_grad_(), torch.randn(4, 7, 6, dtype=torch.float64)
    weight = layer.weight if kind != "conv1d" else layer.weight.T
    bias = 0 if layer.bias is None else layer.bias
    a, b = form.lora_A, form.lora_B
    y = form(x)
    torch.testing.assert_close(y, x @ (weight + 5 / 3 * b @ a).T + bias, rtol=1e-12, atol=1e-12)
    (y * upstream).sum().backward()
    flat_x, flat_g = x.detach().reshape(-1, 10), upstream.reshape(-1, 6)
    torch.testing.assert_close(a.grad, 5 / 3 * b.T @ flat_g.T @ flat_x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(b.grad, 5 / 3 * flat_g.T @ flat_x @ a.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        x.grad.reshape(-1, 10), flat_g @ (weight + 5 / 3 * b @ a), rtol=1e-12, atol=1e-12
    )


def test_an_embedding_follows_the_equation_in_float64() -> None:
    layer = layers()["embedding"].double()
    form = tuned(layer, r=3, alpha=5)
    ids, upstream = entry(layer), torch.randn(4, 7, 6, dtype=torch.float64)
    y = form(ids)
    table = layer.weight + 5 / 3 * (form.lora_B @ form.lora_A).T
    torch.testing.assert_close(y, table[ids], rtol=1e-12, atol=1e-12)
    (y * upstream).sum().backward()
    rows = torch.zeros(10, 6, dtype=torch.float64).index_add(0, ids.flatten(), upstream.reshape(-1, 6))
    torch.testing.assert_close(form.lora_A.grad, 5 / 3 * form.lora_B.T @ rows.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(form.lora_B.grad, 5 / 3 * rows.T @ form.lora_A.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", list(layers()))
def test_factors_are_float32_on_a_low_precision_base_and_the_output_keeps_its_dtype(
    kind: str, dtype: torch.dtype
) -> None:
    layer = layers()[kind].to(dtype)
    form = tuned(layer)
    x = entry(layer, dtype)
    y = form(x)
    assert (form.lora_A.dtype, form.lora_B.dtype, y.dtype, form.weight.dtype) == (
        torch.float32,
        torch.float32,
        dtype,
        dtype,
    )
    wide = {"linear": nn.functional.linear, "without bias": nn.functional.linear}.get(kind)
    if wide and dtype == torch.float16:  # the sum is made in float32 and rounded once; bf16: test_lora_node
        bias = None if form.bias is None else form.bias
        update = x.float() @ form.lora_A.T @ form.lora_B.T * form.scale
        assert torch.equal(y, (nn.functional.linear(x, form.weight, bias).float() + update).to(dtype))


def test_a_bfloat16_model_trains_float32_factors_and_starts_as_its_base() -> None:
    inputs = batch("llama-causal")
    base = frozen(tiny("llama-causal").bfloat16())
    model = wrap(tiny("llama-causal").bfloat16(), "lora", r=4)
    assert {value.dtype for value in tuned_state(model).values()} == {torch.float32}
    assert torch.equal(model(**inputs).logits, base(**inputs).logits)
    _, found = gradients(model, inputs)
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in found.values())


def test_dropout_acts_on_the_update_only_and_only_in_training() -> None:
    layer = layers()["linear"]
    form = tuned(layer, dropout=0.5)
    x = entry(layer)
    torch.manual_seed(9)
    found = form.train()(x)
    torch.manual_seed(9)
    dropped = nn.functional.dropout(x, 0.5)
    torch.testing.assert_close(found, layer(x) + 2 * dropped @ form.lora_A.T @ form.lora_B.T)
    torch.testing.assert_close(form.eval()(x), layer(x) + 2 * x @ form.lora_A.T @ form.lora_B.T)


PEFT_CASES: dict[str, tuple[Any, str, list[str], float]] = {
    "linear": (lambda: tiny("llama-causal"), "llama-causal", ["q_proj", "v_proj", "down_proj"], 0.0),
    "linear with dropout": (
        lambda: tiny("llama-causal"),
        "llama-causal",
        ["q_proj", "v_proj", "down_proj"],
        0.3,
    ),
    "embedding": (  # the id of padding is that of a text's first token
        lambda: tiny("llama-causal", pad_token_id=int(batch("llama-causal")["input_ids"][0, 0])),
        "llama-causal",
        ["embed_tokens", "o_proj"],
        0.0,
    ),
    "conv1d": (tiny_gpt2, "llama-causal", ["c_attn", "c_proj", "c_fc"], 0.0),
    "conv1d with dropout": (tiny_gpt2, "llama-causal", ["c_attn", "c_proj", "c_fc"], 0.3),
    "encoder-decoder": (lambda: tiny("t5-seq2seq"), "t5-seq2seq", ["q", "v", "wo"], 0.0),
    "classifier head": (lambda: tiny("bert-classify"), "bert-classify", ["query", "dense"], 0.0),
}


@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("case", PEFT_CASES)
def test_loss_and_gradients_equal_those_of_peft_with_the_same_factors(
    case: str, dtype: torch.dtype, close: float
) -> None:
    made, name, targets, dropout = PEFT_CASES[case]
    inputs = batch(name)

    def make() -> Any:
        return made().to(dtype)

    ours = wrap(make(), "lora", r=4, alpha=6, dropout=dropout, targets=targets, also_train=())
    stir(ours)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=dropout,
        target_modules=targets,
        fan_in_fan_out=case.startswith("conv1d"),
    )
    theirs = peft.get_peft_model(make(), config).to(dtype)
    twins = {
        key.removeprefix("base_model.model."): value
        for key, value in theirs.named_parameters()
        if value.requires_grad
    }
    twins = {
        key.replace(".default", "").replace(".weight", "").replace("lora_embedding_", "lora_"): value
        for key, value in twins.items()
    }
    state = tuned_state(ours)
    assert twins.keys() == state.keys()
    with torch.no_grad():
        for key, value in twins.items():
            value.copy_(state[key])
    ours.train(), theirs.train()
    torch.manual_seed(5)
    loss, found = gradients(ours, inputs)
    torch.manual_seed(5)
    other = theirs(**inputs).loss
    other.backward()
    assert abs(float(loss) - float(other.detach())) <= close * max(1.0, abs(float(other.detach())))
    for key, value in twins.items():
        assert value.grad is not None
        assert float((found[key] - value.grad).abs().max()) <= close * max(
            1.0, float(value.grad.abs().max())
        ), key


def test_layers_are_subclasses_of_what_they_tune_and_share_its_tensors() -> None:
    forms = {
        "linear": LoraLinear,
        "without bias": LoraLinear,
        "conv1d": LoraConv1D,
        "embedding": LoraEmbedding,
    }
    for kind, layer in layers().items():
        form = tune(layer, LoraConfig(r=3))
        assert type(form) is forms[kind]
        assert isinstance(form, type(layer))
        assert form.weight is layer.weight
        assert "r=3" in repr(form)


def test_a_tuned_layer_keeps_its_hooks() -> None:
    layer = layers()["linear"]
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    tune(layer, LoraConfig(r=3))(entry(layer))
    assert calls == [1]


def test_base_names_do_not_change() -> None:
    for name in ("bert-classify", "bart-seq2seq", "t5-seq2seq", "llama-causal"):
        base = tiny(name).state_dict()
        model = wrap(tiny(name), "lora", r=4)
        state = model.state_dict()
        added = {key for key in state if key not in base}
        assert list(base) == [key for key in state if key in base]
        assert added == {key for key in tuned_state(model) if key not in base}
        assert all(key.endswith((".lora_A", ".lora_B")) for key in added)


def test_a_deep_copy_stands_alone() -> None:
    inputs = batch("llama-causal")
    model = wrap(tiny("llama-causal"), "lora", r=4)
    stir(model)
    twin = copy.deepcopy(model)
    before = twin(**inputs).logits
    stir(model, seed=8)
    assert torch.equal(twin(**inputs).logits, before)
    assert not torch.equal(model(**inputs).logits, before)


def test_a_state_dict_goes_round() -> None:
    inputs = batch("llama-causal")
    model = wrap(tiny("llama-causal"), "lora", r=4)
    stir(model)
    other = wrap(tiny("llama-causal", seed=7), "lora", r=4)
    assert not torch.equal(other(**inputs).logits, model(**inputs).logits)
    other.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(other(**inputs).logits, model(**inputs).logits)


def test_two_wraps_from_one_seed_are_equal() -> None:
    states = []
    for _ in range(2):
        base = tiny("bert-classify")
        torch.manual_seed(11)
        states.append(tuned_state(wrap(base, "lora", r=4)))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_a_layer_whose_forward_torch_skips_is_refused() -> None:
    """nn.TransformerEncoderLayer has a path for inference that reads linear1.weight itself and never calls
    linear1."""
    base = nn.Sequential(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True))
    with pytest.raises(UsageError, match="reads this weight without calling the layer") as caught:
        wrap(base, "lora", r=4)
    assert "linear1" in str(caught.value)


def test_a_model_that_replicas_share_out_already_is_refused_as_it_is() -> None:
    base = nn.DataParallel(tiny("llama-causal"))
    for outer in (base, torch.compile(base)):
        with pytest.raises(UsageError, match=r"tune the model first: DataParallel\(petune.wrap"):
            wrap(outer, "lora", r=4)
    assert not any("lora" in name for name, _ in base.named_parameters())


def test_a_model_whose_gradients_are_summed_already_is_given_no_new_tensors(tmp_path: Path) -> None:
    petune.save(wrap(tiny("llama-causal"), "lora", r=2), tmp_path / "tuned")

    def refused() -> list[str]:
        base, messages = nn.parallel.DistributedDataParallel(tiny("llama-causal")), list[str]()
        outer: Any = torch.compile(base)
        for call in (
            lambda: petune.load(outer, tmp_path / "tuned"),
            lambda: petune.add(outer, "poet", folder=tmp_path / "tuned"),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            messages.append(str(caught.value))
        assert not any("lora" in name for name, _ in base.named_parameters())
        return messages

    ((loading, adding),) = run(1, refused)
    assert "tune the model first: DistributedDataParallel(petune.load(" in loading
    assert "DistributedDataParallel(petune.add(" in adding


def test_a_table_whose_rows_are_made_shorter_is_refused() -> None:
    """torch writes rows longer than max_norm anew where they are looked up, merged ones too."""
    with pytest.raises(UsageError, match=r"found max_norm 1\.0"):
        wrap(nn.Sequential(nn.Embedding(8, 4, max_norm=1.0), nn.Linear(4, 4)), "lora", r=2, targets=["0"])
