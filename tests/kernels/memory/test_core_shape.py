"""What a core that a block calls keeps and takes, as its shape foretells it, against what autograd holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import delta
from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.memory.block_cost import H100, backward, forward, recomputed
from petune.kernels.memory.buffers import kept_bytes, kept_sizes, working_set
from petune.kernels.memory.policy_hook import shape_of, typical
from petune.kernels.memory.shape import BlockShape
from petune.kernels.memory.shaped_program import remade
from petune.methods import wrap
from petune.models import family_of, gated_delta
from tests.kernels.fused_pairs import stand_on
from tests.methods.zoo import SETTINGS, tiny

TOKENS = 128  # two chunks of a mixer's scan, which is filled up to whole ones
WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}


def made(method: str, dtype: torch.dtype = torch.float32, name: str = "qwen3_5-causal", **config: Any) -> Any:
    model = wrap(tiny(name, **WIDE | config).to(dtype), method, **SETTINGS.get(method, {}))
    fuse(model, family_of(model), "reference")
    stand_on(model, Rung("all"))
    return model.train()


def shapes(method: str, **config: Any) -> list[BlockShape]:
    return [shape_of(block.spec) for block in fused_blocks(made(method, **config))]


def held(model: Any, number: int) -> float:
    """Bytes of a token that one block keeps beside its parameters."""
    own, found = {one.untyped_storage().data_ptr() for one in model.parameters()}, dict[int, Tensor]()

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            found[value.untyped_storage().data_ptr()] = value
        return value

    weight = next(model.parameters())
    x = torch.randn(2, TOKENS, 128, dtype=weight.dtype, requires_grad=True)
    angles = model.model.rotary_emb(x, torch.arange(TOKENS).expand(3, 1, -1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = fused_blocks(model)[number](x, position_embeddings=angles)
    assert y.requires_grad
    return sum(value.untyped_storage().nbytes() for value in found.values()) / x.shape[:2].numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["lora", pytest.param("full", marks=pytest.mark.long), "adapter"])
def test_blocks_of_mixers_and_of_gated_attention_keep_what_is_foretold(method: str, dtype: Any) -> None:
    model = made(method, dtype)
    for number, (block, near) in enumerate(zip(fused_blocks(model), (0.05, 0.15), strict=True)):
        assert kept_bytes(shape_of(block.spec), "all") == pytest.approx(held(model, number), rel=near)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
def test_of_a_mixer_by_kernels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_kernels", lambda *_: delta.modules())
    block = fused_blocks(model := made("lora", torch.bfloat16))[0]
    plain = kept_bytes(shape_of(block.spec), "all")
    monkeypatch.setitem(gated_delta.KERNELS, "cpu", delta.MIXERS)
    found = kept_bytes(shape_of(block.spec), "all")
    assert found == pytest.approx(held(model, 0), rel=0.05) and found < plain / 2


def test_all_but_the_highest_rung_keep_nothing_of_a_core_and_call_it_again() -> None:
    for shape, block in zip(shapes("lora"), fused_blocks(made("lora")), strict=True):
        kept = [kept_sizes(shape, keep) for keep in ("all", "projections", "attention", "input")]
        assert ["attention.o.graph" in one for one in kept] == [True, False, False, False]
        assert kept[0]["attention.o.graph"] == int(shape.called_core.kept) > 5 * kept_bytes(shape, "input")
        roles = set(block.spec.program.called[0].region.sites)
        assert not roles & remade(block.spec.program, "all")[0]
        assert roles <= remade(block.spec.program, "input")[0] and remade(block.spec.program, "input")[1]
        assert (
            recomputed(shape, "input", 64, 64)
            and working_set(shape, "input", 64) > shape.called_core.kept * 64
        )


def test_weights_of_a_core_are_counted_whether_they_train_or_what_tunes_them() -> None:
    for method in ("full", "lora"):
        model = made(method)
        for shape, block in zip(shapes(method), fused_blocks(model), strict=True):
            (core,) = block.spec.called
            numbers = sum(value.numel() for value in core.module.parameters())
            tuned = sum(value.numel() for value in core.module.parameters() if value.requires_grad)
            assert shape.called_core.weights == numbers - (tuned if method == "lora" else 0)
            assert shape.called_core.tuned == (tuned if method == "lora" else 0)
            assert shape.trained is (method == "full") and shape.heads == 0


def test_time_grows_with_the_sequence_but_where_a_state_goes() -> None:
    mixer, scores = shapes("lora")
    for work in (forward, backward):
        of_mixer, of_scores = (
            [H100.seconds(work(shape, 4096, tokens), tokens) for tokens in (128, 4096)]
            for shape in (mixer, scores)
        )
        assert of_mixer[0] == of_mixer[1] and of_scores[0] < of_scores[1]


def test_the_block_that_stands_for_a_stack_is_the_commonest() -> None:
    kinds = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    specs = [block.spec for block in fused_blocks(made("lora", **kinds))]
    assert typical(specs).program is specs[0].program is not specs[3].program
    assert shape_of(typical(specs)).called_core.scores is None
