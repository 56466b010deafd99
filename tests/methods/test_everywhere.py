"""Every method on every family under what training puts around a model: torch.compile, autocast, gradient
checkpointing, generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from petune.methods import wrap
from tests.methods.zoo import (
    FOUR,
    GENERATE,
    GENERATING,
    SETTINGS,
    assert_same_gradients,
    batch,
    gradients,
    prompt,
    stir,
    tiny,
)

METHODS = tuple(SETTINGS)
# What is compiled: one block a stack keeps it short; `full` changes no module, so one family stands for all.
SHORT: dict[str, dict[str, int]] = {
    "bert-classify": {"num_hidden_layers": 1},
    "bart-seq2seq": {"encoder_layers": 1, "decoder_layers": 1},
    "t5-seq2seq": {"num_layers": 1},
    "llama-causal": {"num_hidden_layers": 1},
}
IN_SHORT = {("llama-causal", "lora")}
COMPILED = [
    pytest.param(name, method, marks=() if (name, method) in IN_SHORT else pytest.mark.long)
    for name in FOUR
    for method in METHODS
    if method != "full" or name == "bert-classify"
]


def wrapped(name: str, method: str, **changes: Any) -> Any:
    model = wrap(tiny(name, **changes), method, **SETTINGS[method])
    if method != "full":
        stir(model, std=0.05)
    return model.train()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method"), COMPILED)
def test_compiled_forward_and_gradients_are_the_eager_ones(name: str, method: str) -> None:
    model = wrapped(name, method, **SHORT[name])
    loss, expected = gradients(model, batch(name))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad(set_to_none=True)
    found = compiled(**batch(name)).loss
    found.backward()
    assert float(found.detach()) == pytest.approx(float(loss), rel=1e-6)
    assert_same_gradients(
        {key: value.grad for key, value in model.named_parameters() if value.grad is not None}, expected
    )


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FOUR)
def test_autocast_runs_with_finite_float32_gradients_near_the_exact_ones(name: str, method: str) -> None:
    model = wrapped(name, method)
    _, expected = gradients(model, batch(name))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, found = gradients(model, batch(name))
    assert torch.isfinite(loss)
    assert found.keys() == expected.keys()
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in found.values())
    near, far = (torch.cat([part[key].flatten() for key in expected]) for part in (found, expected))
    assert float(torch.cosine_similarity(near, far, dim=0)) > 0.98


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FOUR)
def test_gradient_checkpointing_gives_the_same_gradients(name: str, method: str) -> None:
    model = wrapped(name, method)
    loss, expected = gradients(model, batch(name))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, found = gradients(model, batch(name))
    # checkpointing drops T5's cache, and with it a bit
    assert float(again) == pytest.approx(float(loss), rel=1e-6)
    assert_same_gradients(found, expected)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FOUR)
def test_gradient_checkpointing_really_recomputes(name: str, method: str) -> None:
    """Fewer tensors are kept for backward: the flag reaches the blocks that train, the ladder's included."""
    model = wrapped(name, method)

    def kept() -> int:
        count = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**batch(name))
        return count

    plain = kept()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert kept() < 0.7 * plain


@pytest.mark.crossed(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", GENERATING)
def test_generate_and_beam_search_run_and_need_no_eval_call_to_repeat(name: str, method: str) -> None:
    model = wrapped(name, method).eval()
    for beams in (1, 3):
        found = model.generate(**prompt(name), num_beams=beams, **GENERATE)
        assert torch.equal(found, model.generate(**prompt(name), num_beams=beams, **GENERATE))
        assert found.shape[1] >= 6


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FOUR)
def test_outputs_as_a_tuple_are_the_outputs_by_name(name: str, method: str) -> None:
    model = wrapped(name, method).eval()
    named = model(**batch(name))
    loss, logits = model(**batch(name), return_dict=False)[:2]
    assert torch.equal(loss, named.loss)
    assert torch.equal(logits, named.logits)
