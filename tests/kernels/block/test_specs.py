"""What is not exactly known is not fused: blocks, single modules and heads with other mathematics inside
compute it, and a line says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import petune
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.single_modules import FusedLora
from petune.methods.configs import LoraConfig
from petune.methods.lora import LoraLinear, tune
from petune.models import family_of
from petune.models.tuned_linear import low_rank_of
from petune.models.tuned_parts import LowRank
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny


class Thrice(LoraLinear):
    """LoRA's factors and attributes, and other mathematics."""

    def update(self, x: Tensor) -> Tensor:
        return 3 * super().update(x)


class Declared(Thrice):
    """The same, which says what it is."""

    def low_rank(self) -> LowRank:
        found = LoraLinear.low_rank(self)
        return found._replace(scale=3 * found.scale)


class Negated(nn.Linear):
    """A linear that is none."""

    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


class DoubledMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoubledBlock(LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * super().forward(*args, **kwargs)


def no_exchange(attend: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    return attend(*args, **kw)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    module.__class__ = kind


def patch(module: Any, name: str) -> None:
    before = module.forward
    setattr(module, name, lambda *args, **kwargs: 2 * before(*args, **kwargs))


def other_epsilon(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.5


# What is changed in a tuned model, and words of the reason why it is not fused then.
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a subclass of LoRA": (
        lambda m: become(m.model.layers[1].self_attn.v_proj, Thrice),
        "self_attn.v_proj is a Thrice",
    ),
    "a subclass of a linear": (
        lambda m: become(m.model.layers[0].mlp.up_proj, Negated),
        "mlp.up_proj is a Negated",
    ),
    "a patched linear": (
        lambda m: patch(m.model.layers[0].mlp.up_proj, "forward"),
        "mlp.up_proj is a Linear",
    ),
    "a subclass of the MLP": (lambda m: become(m.model.layers[1].mlp, DoubledMLP), "mlp is a DoubledMLP"),
    "a subclass of the block": (
        lambda m: become(m.model.layers[1], DoubledBlock),
        "the block is a DoubledBlock",
    ),
    "a patched block": (lambda m: patch(m.model.layers[0].mlp, "forward"), "mlp is a LlamaMLP"),
    "another activation": (
        lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.ReLU()),
        "mlp.act_fn is a ReLU",
    ),
    "another norm": (
        lambda m: setattr(m.model.layers[1], "input_layernorm", nn.RMSNorm(64)),
        "its norm RMSNorm",
    ),
    "another epsilon": (other_epsilon, "different epsilons"),
    "an exchange": (
        lambda m: setattr(m.model.layers[1].self_attn, "exchange", no_exchange),
        "exchanges tokens",
    ),
}


def changed(change: Callable[[Any], None]) -> Any:
    """A tuned model, trained a little, with something in it changed."""
    model = petune.wrap(tiny("llama-causal"), "lora", kernels="off", targets=["q", "k", "v", "o"], r=4)
    stir(model, std=0.1)
    change(model)
    return model.double().train()


@pytest.mark.parametrize("what", CHANGES)
def test_a_block_with_a_stranger_inside_is_not_fused_and_computes_what_it_did(what: str) -> None:
    change, words = CHANGES[what]
    plain = changed(change)
    model = changed(change)
    done = fuse(model, family_of(model), "reference")
    assert not done.blocks and not fused_blocks(model) and words in done.reasons[0]
    (loss, found), (expected_loss, expected) = (
        gradients(model, batch("llama-causal")),
        gradients(plain, batch("llama-causal")),
    )
    torch.testing.assert_close(loss.float(), expected_loss.float(), rtol=2e-6, atol=0)
    assert_same_gradients(found, expected, 2e-6)


def test_an_exchange_that_is_set_on_a_fused_block_is_asked() -> None:
    model = changed(lambda model: None)
    assert fuse(model, family_of(model), "reference").blocks
    block = model.model.layers[1]
    assert block.unready(torch.device("cpu")) is None
    block.self_attn.exchange = no_exchange
    assert "exchanges tokens" in block.unready(torch.device("cpu"))


def test_why_a_block_is_not_fused_is_said_where_fusing_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.fuse.say", said.append)
    monkeypatch.setattr("petune.kernels.single_modules.say", said.append)
    model = changed(CHANGES["a subclass of LoRA"][0])
    fuse(model, family_of(model), "reference")
    assert any("self_attn.v_proj is a Thrice" in line for line in said)
    assert any("no fused form" in line and "Thrice" in line for line in said)


def test_a_single_module_is_fused_by_what_its_own_class_says() -> None:
    def model_of(kind: type[nn.Module]) -> Any:
        model = petune.wrap(tiny("t5-seq2seq"), "lora", kernels="off", r=4)
        stir(model, std=0.1)
        for module in model.modules():
            if type(module) is LoraLinear:
                become(module, kind)
        return model.double().train()

    for kind, fused in ((LoraLinear, True), (Declared, True), (Thrice, False)):
        plain, model = model_of(kind), model_of(kind)
        # of a family without a table, whose blocks stay as they are
        assert fuse(model, None, "reference").sites
        assert any(isinstance(module, FusedLora) for module in model.modules()) is fused
        # T5's own norms take their mean of squares in float32
        assert_same_gradients(
            gradients(model, batch("t5-seq2seq"))[1], gradients(plain, batch("t5-seq2seq"))[1], 5e-6
        )
        assert all(
            low_rank_of(module) is not None for module in model.modules() if isinstance(module, FusedLora)
        )


@pytest.mark.parametrize("kind", [LoraLinear, Declared, Thrice], ids=lambda kind: kind.__name__)
def test_a_head_is_fused_by_what_its_own_class_says(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.head.hooks.say", said.append)
    plain = petune.wrap(tiny("llama-causal"), "lora", kernels="off", targets=["lm_head"], r=4)
    stir(plain, std=0.1)
    become(plain.lm_head, kind)
    model = copy.deepcopy(plain).train()
    fuse(model, family_of(model), "reference")
    assert_same_gradients(
        gradients(model, batch("llama-causal"))[1], gradients(plain.train(), batch("llama-causal"))[1], 1e-5
    )
    refused = [line for line in said if "Thrice is neither torch.nn.Linear nor LoRA on one" in line]
    assert len(refused) == (kind is Thrice)


def test_a_part_is_what_a_class_says_of_itself() -> None:
    layer = nn.Linear(4, 3)
    assert low_rank_of(layer) is not None and low_rank_of(tune(layer, LoraConfig(r=2))) is not None
    for kind, known in ((Thrice, False), (Declared, True)):
        tuned = tune(layer, LoraConfig(r=2))
        become(tuned, kind)
        assert (low_rank_of(tuned) is not None) is known
    patch(layer, "forward")
    assert low_rank_of(layer) is None and low_rank_of(Negated(4, 3)) is None


def test_the_same_for_lora_s_own_subclass_with_another_forward() -> None:
    """A form that is inherited would make fused blocks train plain LoRA in the place of what the class
    computes."""

    class Normed(LoraLinear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y / y.norm(dim=-1, keepdim=True)

    tuned = tune(nn.Linear(4, 3), LoraConfig(r=2))
    become(tuned, Normed)
    assert isinstance(tuned, LoraLinear) and tuned.low_rank() is None and low_rank_of(tuned) is None
