"""The registered attention function against Hugging Face's own SDPA, and its explicit form, which attention
dropout needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from petune.errors import UsageError
from petune.methods import wrap
from petune.models import attention
from petune.rng.context import Running, bound
from petune.rng.dropout import drawing
from tests.methods import zoo


class Module(nn.Module):
    """What Hugging Face's functions read off an attention module."""

    def __init__(self, groups: int = 1, is_causal: bool = False) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = groups, is_causal


def tensors(*, heads: int = 4, kv_heads: int = 4, length: int = 7, keys: int | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    keys = length if keys is None else keys
    shapes = [(2, heads, length, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def padding(length: int = 7) -> Tensor:
    """[2, 1, 1, k]; the second row starts with two paddings."""
    mask = torch.ones(2, 1, 1, length, dtype=torch.bool)
    mask[1, ..., :2] = False
    return mask


def left_padded_causal(length: int = 7) -> Tensor:
    """[2, 1, q, k]; queries that are padding may attend to nothing."""
    return padding(length) & torch.ones(length, length, dtype=torch.bool).tril()


def with_gradients(call: Any, inputs: list[Tensor]) -> list[Tensor]:
    output = call(*inputs)[0]
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=output.dtype)
    return [output, *torch.autograd.grad((output * weight).sum(), inputs)]


@pytest.mark.parametrize("padded", ["right", "left", "none"])
@pytest.mark.parametrize("name", zoo.FOUR)
def test_a_model_of_each_family_computes_what_it_did_with_sdpa(name: str, padded: str) -> None:
    inputs = zoo.batch(name)
    if padded == "left":
        inputs["attention_mask"] = inputs["attention_mask"].flip(1)
    elif padded == "none":
        inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    model = zoo.tiny(name, attn_implementation="sdpa")
    loss, gradients = zoo.gradients(model, inputs)
    attention.use(model)
    own_loss, own_gradients = zoo.gradients(model, inputs)
    assert model.config._attn_implementation == "petune"
    assert torch.equal(own_loss, loss)
    zoo.assert_same_gradients(own_gradients, gradients, 0.0)


@pytest.mark.parametrize("name", zoo.FOUR)
def test_every_attention_of_a_model_and_of_its_ladder_goes_through_module_exchange(name: str) -> None:
    model = zoo.tiny(name)
    wrap(model, "side", reduction=4)
    attention.use(model)
    calls: list[str] = []
    names = [
        path
        for path, module in model.named_modules()
        if type(module).__name__.endswith(("Attention", "SelfAttention"))
    ]
    names = [path for path in names if hasattr(model.get_submodule(path), "scaling")]
    for path in names:

        def exchange(attend: Any, module: nn.Module, *args: Any, path: str = path, **kw: Any) -> Any:
            calls.append(path)
            return attend(module, *args, **kw)

        model.get_submodule(path).exchange = exchange
    model(**zoo.batch(name))
    assert sorted(calls) == sorted(names)
    assert any(".side." in path for path in calls)


def test_use_refuses_a_model_whose_attention_cannot_be_chosen() -> None:
    class Fixed(PreTrainedModel):
        config_class = zoo.BertConfig

    model = Fixed(zoo.BertConfig(attn_implementation="eager"))
    model._can_set_attn_implementation = lambda: False
    with pytest.raises(UsageError, match="does not take an attention function"):
        attention.use(model)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "mask",
    [None, padding(), left_padded_causal(), torch.where(left_padded_causal(), 0.3, -torch.inf).double()],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_explicit_form_equals_sdpa(
    monkeypatch: pytest.MonkeyPatch, mask: Any, biased: bool, is_causal: bool, kv_heads: int
) -> None:
    module, inputs = Module(4 // kv_heads, is_causal), tensors(kv_heads=kv_heads)
    if biased:
        inputs.append(
            torch.randn(
                1, 4, 7, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64
            ).requires_grad_()
        )

    def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Any:
        return attention.attention(
            module, query, key, value, mask, position_bias=bias, scaling=0.4, dropout=dropout
        )

    dropout = 0.0
    expected = with_gradients(call, inputs)
    monkeypatch.setattr(attention, "drop_attention", lambda probabilities, p, head, query: probabilities)
    dropout = 0.5
    found = with_gradients(call, inputs)
    for own, theirs in zip(found, expected, strict=True):
        assert not torch.isnan(own).any()
        torch.testing.assert_close(own, theirs, atol=1e-12, rtol=0)


def test_a_single_query_sees_all_keys_whatever_the_module_says() -> None:
    module, inputs = Module(is_causal=True), tensors(length=1, keys=5)
    plain = attention.attend(module, *inputs, None)[0]
    with bound(key=None):
        torch.manual_seed(0)
        dropped = torch.stack(
            [attention.attend(module, *inputs, None, dropout=0.1)[0] for _ in range(4000)]
        ).mean(0)
    torch.testing.assert_close(dropped, plain, atol=0.1, rtol=0)


def test_dropout_falls_on_probabilities_by_the_number_of_row_head_query_and_key() -> None:
    module, (query, key, value) = Module(is_causal=True), tensors()
    value = torch.eye(7, dtype=torch.float64).expand(2, 4, 7, 7)  # so that the output is the probabilities
    here = Running(rows=torch.tensor([5, 2]), key=11, site="decoder.0")
    with drawing(here):
        whole = attention.attention(module, query, key, value, None, dropout=0.4)[0].transpose(1, 2)
    module.first_head = 1
    with drawing(here):
        heads = attention.attention(module, query[:, 1:3], key[:, 1:3], value[:, 1:3], None, dropout=0.4)[
            0
        ].transpose(1, 2)
    mask = torch.ones(7, 7, dtype=torch.bool).tril()[None, None, 4:]
    with drawing(here):
        last = attention.attend(
            module, query[:, :, 4:], key, value, mask, dropout=0.4, first_head=0, first_query=4
        )[0].transpose(1, 2)
    plain = torch.softmax(
        (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(~torch.ones(7, 7).tril().bool(), -torch.inf), -1
    )
    kept = whole != 0
    torch.testing.assert_close(whole, torch.where(kept, plain / 0.6, 0.0))
    assert 0.4 < kept.sum() / (plain > 0).sum() < 0.8
    torch.testing.assert_close(heads, whole[:, 1:3])
    torch.testing.assert_close(last, whole[:, :, 4:])


def test_without_a_key_dropout_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(F, "dropout", lambda x, p, *_: drawn.append((tuple(x.shape), p)) or x)
    attention.attend(Module(), *tensors(), None, dropout=0.3)
    assert drawn == [((2, 4, 7, 7), 0.3)]


def test_no_queries_give_an_empty_output_and_gradients_of_zero() -> None:
    query, key, value = tensors()
    query = query.detach()[:, :, :0].requires_grad_()
    output = attention.attend(Module(), query, key, value, torch.ones(2, 1, 0, 7, dtype=torch.bool))[0]
    output.sum().backward()
    assert output.shape == (2, 0, 4, 8)
    assert key.grad is not None and not key.grad.any()
    assert value.grad is not None and not value.grad.any()


def test_bfloat16_probabilities_are_made_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [x.detach().bfloat16() for x in tensors()]
    monkeypatch.setattr(attention, "drop_attention", lambda probabilities, p, head, query: probabilities)
    found = attention.attend(Module(), *inputs, padding(), dropout=0.1)[0]
    expected = attention.attend(Module(), *[x.double() for x in inputs], padding())[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, atol=2e-2, rtol=0)


def test_a_soft_cap_bends_scores_before_the_mask_and_a_ring_refuses_it() -> None:
    query, key, value = inputs = tensors()
    scores = 2.0 * torch.tanh(query @ key.mT * 8**-0.5 / 2.0)
    expected = torch.softmax(scores.masked_fill(~padding(), -torch.inf), -1) @ value
    found = attention.attention(Module(), *inputs, padding(), softcap=2.0)[0]
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-12)
    module = Module()
    module.exchange = type("Ring", (), {"kind": "ring"})()
    with pytest.raises(UsageError, match="a ring does not cap attention scores"):
        attention.attention(module, *inputs, None, softcap=30.0)


@pytest.mark.parametrize("padded", [False, True])
def test_sinks_take_the_probability_that_they_take_in_transformers(padded: bool) -> None:
    model, inputs = zoo.tiny("gptoss-causal"), zoo.batch("gptoss-causal")
    inputs = {name: value for name, value in inputs.items() if name == "input_ids" or padded}
    with torch.no_grad():
        model.model.layers[0].self_attn.sinks += 1.0
        expected = model(**inputs).logits
        attention.use(model)
        found = model(**inputs).logits
    kept = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert torch.allclose(found[kept], expected[kept], atol=1e-6)


def test_sinks_and_tokens_of_other_ranks_are_refused() -> None:
    module, heads = nn.Module(), torch.zeros(1, 2, 3, 4)
    module.exchange = object()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="attention with sinks"):
        attention.attention(module, heads, heads, heads, None, s_aux=torch.zeros(2))
