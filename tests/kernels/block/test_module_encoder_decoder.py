"""BART and T5 with fused blocks: whole models against Hugging Face's own, on every rung, padded and with
dropout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5LayerNorm

import petune
from petune.errors import UsageError
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.fuse import fuse, unfuse
from petune.kernels.memory.buffers import kept_bytes
from petune.kernels.memory.policy_hook import shape_of
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.stack import own_stacks
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import blocks, stand_on
from tests.methods.zoo import GENERATE, assert_same_gradients, batch, gradients, stir, tiny

NAMES = ("bart-seq2seq", "bart-classify", "t5-seq2seq", "t5-gated", "t5-classify")
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"r": 4},
    "full": {},
    "adapter": {"reduction": 4},
    "side": {"reduction": 2},
    "dora": {"r": 4},
    "ia3": {},
    "miss": {"r": 12},
}
KEEPS = ("all", "projections", "attention", "input")


def wide_norm(self: Any, x: Tensor) -> Tensor:
    """T5's norm in the dtype of its input; its own goes through float32."""
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


wide_norm.__module__ = T5LayerNorm.__module__  # or a block with it is a stranger's


@pytest.fixture
def _float64(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(T5LayerNorm, "forward", wide_norm)


def pair(
    name: str, method: str = "lora", dtype: torch.dtype = torch.float64, p: float = 0.0, **changes: Any
) -> tuple[Any, Any]:
    """A tuned model twice, fused and not, in training and away from the start. p: of the updates' dropout."""
    plain = tiny(name, **changes).to(dtype)
    petune.wrap(plain, method, **METHODS[method], **({"dropout": p} if p else {}), kernels="off")
    stir(plain, std=0.1)
    fused = copied(plain)
    done = fuse(fused, family_of(fused), "reference")
    assert done.blocks and not done.reasons and len(blocks(fused)) == (8 if method == "side" else 4)
    return fused.train(), plain.train()


def test_a_decoders_block_keeps_what_is_foretold_of_longer_texts() -> None:
    fused, _ = pair("bart-seq2seq", dtype=torch.float32)
    block = blocks(fused)[-1]
    x, memory = (torch.randn(2, tokens, block.embed_dim, requires_grad=True) for tokens in (8, 24))
    own, found = {one.untyped_storage().data_ptr() for one in (*fused.parameters(), memory)}, dict[int, int]()

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in own and value.shape[0] in (2 * 8, 2 * 24):
            found[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        block(x, encoder_hidden_states=memory)
    heads = 2 * 8 * 4  # of both log-sum-exps, which lie by rows of heads
    assert sum(found.values()) / 16 + heads == kept_bytes(shape_of(block.spec, memory=(3.0, 24)), "all")


def padded(name: str, rows: str = "both") -> dict[str, Tensor]:
    """Texts of unequal length; for a language model the labels too, unless `rows` is "encoder"."""
    inputs = batch(name)
    if name.endswith("classify") or rows == "encoder":
        return inputs
    there = torch.arange(6) < torch.tensor([6, 3, 1])[:, None]
    ids = inputs["labels"]
    return inputs | {
        "labels": ids.masked_fill(~there, -100),
        "decoder_input_ids": ids,
        "decoder_attention_mask": there.long(),
    }


def said(model: nn.Module) -> set[str]:
    return {reason for block in blocks(model) for reason in block.spec.said}


def assert_alike(fused: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], tolerance: float) -> None:
    (loss, found), (expected, wanted) = gradients(fused, inputs), gradients(plain, inputs)
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    assert_same_gradients(found, wanted, tolerance)


# ------------------------------------------------------------------ whole models


@pytest.mark.crossed(1)
@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rows", ["both", "encoder"])
@pytest.mark.parametrize("name", NAMES)
def test_a_whole_model_is_hugging_faces_to_the_last_bits_of_float64_on_every_rung(
    name: str, rows: str, method: str
) -> None:
    fused, plain = pair(name, method)
    inputs = padded(name, rows)
    expected, wanted = gradients(plain, inputs)
    for keep in KEEPS:
        stand_on(fused, Rung(keep), tile=None if keep == "all" else 4)
        loss, found = gradients(fused, inputs)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        assert_same_gradients(found, wanted, 1e-12)
    assert not said(fused)


@pytest.mark.parametrize("way", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-gated"])
def test_in_float32_it_is_hugging_faces_to_its_rounding_with_masks_of_either_kind(
    name: str, way: str
) -> None:
    # else it attends too steeply for float32
    gentle = {"initializer_factor": 0.3} if name.startswith("t5") else {}
    fused, plain = pair(name, "full", torch.float32, attn_implementation=way, **gentle)
    assert_alike(fused, plain, padded(name), 2e-6)
    left = {
        key: value.flip(1) if key in ("input_ids", "attention_mask") else value
        for key, value in padded(name).items()
    }
    assert_alike(fused, plain, left, 2e-6)  # padding that is computed, and has masks
    full = {key: value for key, value in padded(name).items() if "mask" not in key}
    assert_alike(fused, plain, full, 2e-6)
    assert not said(fused)


@pytest.mark.crossed(1)
@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_dropout_of_every_kind_draws_the_masks_of_the_unfused_model(name: str, left: bool) -> None:
    drops: dict[str, Any] = {
        "dropout": 0.2,
        "attention_dropout": 0.3,
        "activation_dropout": 0.1,
        "classifier_dropout": 0.1,
    }
    fused, plain = pair(name, p=0.2, **(drops if name.startswith("bart") else {"dropout_rate": 0.2}))
    own_stacks(plain, family_of(plain))  # type: ignore[arg-type]
    attention.use(plain)
    inputs = padded(name)
    if left:
        inputs |= {key: inputs[key].flip(1) for key in ("input_ids", "attention_mask")}
    found = []
    for model in (fused, plain):
        with drawing(Running(rows=torch.tensor([5, -1, 7]), key=step_key(7, 3))):
            found.append(gradients(model, inputs))
    assert not said(fused)
    # softmax is float32 where probabilities drop out
    torch.testing.assert_close(found[0][0], found[1][0], rtol=2e-6, atol=0)
    assert_same_gradients(found[0][1], found[1][1], 2e-6)


def test_the_blocks_see_what_padding_leaves_and_the_memory_too() -> None:
    fused, _ = pair("t5-seq2seq", dtype=torch.float32)
    seen: list[tuple[tuple[int, ...], ...]] = []
    for stack in ("encoder", "decoder"):
        block = getattr(fused, stack).block.blocks[1]
        before = block.inputs
        block.inputs = lambda *args, before=before: (
            seen.append(tuple(x.shape for x in before(*args))) or before(*args)
        )
    inputs = padded("t5-seq2seq")
    fused(**inputs)
    kept, own = int(inputs["attention_mask"].sum()), int(inputs["decoder_attention_mask"].sum())
    assert seen == [((1, kept, 64), (8, 17)), ((1, own, 64), (8, 11), (1, kept, 64))]


def test_a_decoder_of_other_heads_than_its_encoder_is_read_off_its_blocks() -> None:
    fused, plain = pair("bart-seq2seq", dtype=torch.float32, decoder_attention_heads=4)
    assert [block.spec.program.sizes.heads for block in blocks(fused)] == [8, 8, 4, 4]
    assert_alike(fused, plain, padded("bart-seq2seq"), 2e-6)


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq"])
def test_bf16_autocast_is_near_the_unfused_models(name: str) -> None:
    fused, plain = pair(name, "full", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (loss, found), (expected, wanted) = gradients(fused, padded(name)), gradients(plain, padded(name))
    assert not said(fused)
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    close = [
        torch.nn.functional.cosine_similarity(found[key].flatten(), value.flatten(), 0)
        for key, value in wanted.items()
    ]
    assert sorted(close)[len(close) // 10] > 0.98


# ------------------------------------------------------------------ calls that are declined


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq"])
def test_generation_and_attentions_are_the_models_own(name: str) -> None:
    fused, plain = (model.eval() for model in pair(name, dtype=torch.float32))
    inputs = {key: value for key, value in batch(name).items() if key != "labels"}
    assert torch.equal(fused.generate(**inputs, **GENERATE), plain.generate(**inputs, **GENERATE))
    call = padded(name) | {"use_cache": False}
    with torch.no_grad():
        found, expected = (
            model(**call, output_attentions=True, output_hidden_states=True) for model in (fused, plain)
        )
    for key in ("encoder_hidden_states", "decoder_hidden_states", "cross_attentions", "decoder_attentions"):
        for one, two in zip(found[key], expected[key], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("at", [0, 1])
def test_one_block_of_its_own_among_fused_ones_takes_and_gives_the_bias(at: int) -> None:
    fused, plain = pair("t5-seq2seq", "full", torch.float32)
    for stack in ("encoder", "decoder"):
        getattr(fused, stack).block.blocks[at].layer[0].register_forward_hook(lambda *args: None)
    assert_alike(fused, plain, padded("t5-seq2seq"), 2e-6)
    assert len(said(fused)) == 1 and "a hook" in said(fused).pop()


def test_half_precision_whose_overflow_the_models_clamp_is_declined() -> None:
    for name, fused in (("t5-seq2seq", 0), ("bart-seq2seq", 2)):  # of BART only the encoder clamps
        model = petune.wrap(tiny(name).half(), "lora", r=4, kernels="off")
        done = fuse(model, family_of(model), "reference")
        assert len(blocks(model)) == fused and all(
            "float16 its own forward clamps" in reason for reason in done.reasons
        )
    late, _ = pair("t5-seq2seq", dtype=torch.float32)
    assert "float16" in str(blocks(late.half())[0].unready(torch.device("cpu")))


def test_blocks_that_read_more_than_hidden_states_do_not_stream() -> None:
    model = petune.wrap(tiny("t5-seq2seq"), "full", kernels="off")
    with pytest.raises(UsageError, match="do not stream"):
        fuse(model, family_of(model), "reference", MemoryConfig(stream="bf16"))


# ------------------------------------------------------------------ what a fused model still is


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-classify"])
def test_names_files_and_merging_are_those_of_any(name: str, tmp_path: Path) -> None:
    fused, plain = pair(name, dtype=torch.float32)
    assert fused.state_dict().keys() == plain.state_dict().keys()
    petune.save(fused, tmp_path)
    again = petune.load(tiny(name), tmp_path)
    inputs = padded(name) | {"use_cache": False}
    with torch.no_grad():
        expected = plain.eval()(**inputs).logits
        for model in (fused.eval(), again.eval(), petune.merge(fused)):
            torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    assert not blocks(fused)


def test_unfused_again_it_is_what_it_was_bit_by_bit() -> None:
    fused, plain = pair("t5-gated", dtype=torch.float32)
    unfuse(fused)
    assert not any(isinstance(module, FusedBlock) for module in fused.modules())
    (loss, found), (expected, wanted) = (
        gradients(fused, padded("t5-gated")),
        gradients(plain, padded("t5-gated")),
    )
    assert torch.equal(loss, expected) and all(
        torch.equal(found[key], value) for key, value in wanted.items()
    )


@pytest.mark.parametrize("name", ["bart-classify", "t5-seq2seq"])
def test_at_its_start_a_tuned_model_is_the_base_model_bit_by_bit(name: str) -> None:
    tuned = petune.wrap(tiny(name), "lora", r=4, kernels="reference")
    base = copied(tuned)
    inputs = padded(name) | {"use_cache": False}
    with torch.no_grad():
        found = tuned(**inputs).logits
        with petune.methods.without_tuning(base):
            expected = base(**inputs).logits
    assert torch.equal(found, expected)
