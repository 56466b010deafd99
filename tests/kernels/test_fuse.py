"""What a fused model still is: saved, copied, merged, loaded, moved and hooked as any other; and every call
that it declines."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import petune
import petune.kernels.fuse as fusing
from petune.errors import PetuneError, UsageError
from petune.kernels import reference
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.packed_linear import Group
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.dispatch import reference_ops, triton_ops
from petune.kernels.fuse import fuse, unfuse
from petune.kernels.head.hooks import has_fused_head
from petune.models import attention, family_of
from petune.models.copied import copied
from petune.models.frozen_weight import QuantisedWeight
from petune.models.quantise import quantise_blocks
from petune.models.stack import own_stacks
from petune.rng.context import Running, running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import (
    BERT,
    GROUPED,
    METHODS,
    MODELS,
    assert_alike,
    batch,
    blocks,
    gradients,
    pair,
    stand_on,
)
from tests.methods.zoo import stir, tiny

LORA = METHODS["lora"]


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    """Every test here."""


def twice(model: nn.Module, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """A tuned model, fused and not, in training."""
    petune.wrap(model, kernels="off", **settings)
    fused = copied(model)
    assert fuse(fused, family_of(fused), "reference")
    return fused.train(), model.train()


def hidden(model: Any, **inputs: Tensor) -> Tensor:
    """The last hidden states."""
    found: Tensor = model.model(**inputs, use_cache=False)[0]
    return found


def block_of(model: Any) -> Any:
    return model.model.layers[0]


def in_bank(model: nn.Module) -> bool:
    """Whether q still lies in the first block's bank."""
    block: Any = blocks(model)[0]
    return bool(block.spec.banks[0].tensors[0].data_ptr() == block.self_attn.q_proj.weight.data_ptr())


# ------------------------------------------------------------------ calls that are declined


def test_dropout_inside_attention_leaves_padding_unseen() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(**{**BERT, "attention_probs_dropout_prob": 1e-12, "initializer_range": 0.3})
    )
    fused, plain = twice(model)
    torch.testing.assert_close(fused(**batch("bert")).logits, plain(**batch("bert")).logits)


def test_dropout_inside_attention_keeps_packed_samples_apart() -> None:
    torch.manual_seed(0)
    fused, plain = twice(
        LlamaForCausalLM(LlamaConfig(**GROUPED, attention_dropout=1e-12, initializer_range=0.3))
    )
    packed = {
        "input_ids": batch("llama")["input_ids"],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2),
    }
    torch.testing.assert_close(hidden(fused, **packed), hidden(plain, **packed), rtol=1e-5, atol=1e-5)


def test_blocks_that_decline_under_autocast_still_see_the_padding() -> None:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    fused, plain = twice(LlamaForCausalLM(LlamaConfig(**GROUPED, initializer_range=0.3)))
    inputs = {name: value for name, value in batch("llama").items() if name != "labels"}
    real = inputs["attention_mask"].bool()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = hidden(fused, **inputs)[real], hidden(plain, **inputs)[real]
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, padding) for name in ("bert", "llama") for padding in ("right", "none", "a mask of its own")]
    + [("llama", "left"), ("llama", "packed")],
)
def test_dropout_inside_attention_draws_the_masks_of_the_unfused_model(name: str, padding: str) -> None:
    torch.manual_seed(0)
    if name == "bert":
        model: Any = BertForSequenceClassification(
            BertConfig(**{**BERT, "attention_probs_dropout_prob": 0.3, "initializer_range": 0.3})
        )
    else:
        model = LlamaForCausalLM(LlamaConfig(**GROUPED, attention_dropout=0.3, initializer_range=0.3))
    fused, plain = twice(model, r=4, dropout=0.2)
    own_stacks(plain, family_of(plain))
    attention.use(plain)
    inputs = padded_so(padding, name)
    found = []
    for one in (fused, plain):
        with drawing(Running(rows=torch.tensor([5, -1]), key=step_key(7, 3))):
            found.append(gradients(one, inputs))
    assert not blocks(fused)[0].spec.said
    torch.testing.assert_close(found[0][0].float(), found[1][0].float(), rtol=2e-6, atol=0)
    for key, value in found[1][1].items():
        torch.testing.assert_close(
            found[0][1][key], value, rtol=1e-4, atol=2e-6 * float(value.abs().max()) + 1e-12
        )


def padded_so(padding: str, name: str) -> dict[str, Tensor]:
    """A batch with padding, or other masks, of the kind."""
    inputs = batch(name, padded=padding in ("right", "left"))
    mask = inputs["attention_mask"]
    if padding == "left":
        labels = inputs["labels"].flip(1)
        inputs |= {
            "attention_mask": mask.flip(1),
            "labels": labels.masked_fill(mask.flip(1).cumsum(1) <= 1, -100),
        }  # padding foretells none
    elif padding == "none":
        del inputs["attention_mask"]
    elif padding == "a mask of its own":
        square = torch.ones(2, 1, mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
        inputs["attention_mask"] = square
    elif padding == "packed":
        del inputs["attention_mask"]
        inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    return inputs


def test_blocks_that_decline_without_padding_are_the_models_own_and_say_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.block.module.say", said.append)
    fused, plain = pair("llama", LORA)
    inputs = {"input_ids": batch("llama")["input_ids"]}
    for _ in range(2):
        found, expected = fused(**inputs, use_cache=True), plain(**inputs, use_cache=True)
        torch.testing.assert_close(found.logits, expected.logits)
    assert len(said) == 1 and "cache" in said[0]


def test_a_mask_of_another_kind_goes_to_the_models_own_block() -> None:
    fused, _ = pair("llama", LORA)
    assert "as its mask" in str(
        block_of(fused).declines(torch.zeros(2, 9, 32), {"attention_mask": torch.ones(2, 9)})
    )
    assert block_of(fused).declines(torch.zeros(2, 9, 32), {"attention_mask": torch.ones(2, 1, 9, 9)}) is None


def test_a_window_that_no_mask_says_is_the_blocks_own() -> None:
    config = MistralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=8,
    )
    fused = petune.wrap(MistralForCausalLM(config), method="lora", r=2, kernels="reference")
    block, hidden = block_of(fused), torch.randn(2, 11, 32)
    seen = torch.ones(11, 11, dtype=torch.bool).tril().triu(-7).expand(2, 1, -1, -1)
    angles = fused.model.rotary_emb(hidden, torch.arange(11)[None])
    found, expected = (
        block(hidden, attention_mask=mask, position_embeddings=angles) for mask in (None, seen)
    )
    torch.testing.assert_close(found, expected)
    assert not block.spec.said and block.spec.program.attends[0].window == 8


WINDOWED = {
    "of all blocks": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=4)),
    "of the last blocks": lambda: Qwen2ForCausalLM(
        Qwen2Config(**GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1)  # type: ignore[arg-type]
    ),
}


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("which", WINDOWED)
def test_rows_longer_than_the_windows_of_blocks_train_without_a_mask(
    which: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    fused, plain = twice(WINDOWED[which](), method="lora", r=4)
    seen: list[Any] = []
    monkeypatch.setattr(
        FusedBlock, "hows", lambda *args, own=FusedBlock.hows: (seen.extend(made := own(*args)), made)[1]
    )
    assert_alike(fused, plain, batch("llama", padded), 2e-6)
    windows = [4, 4, 4] if which == "of all blocks" else [None, 4, 4]
    assert [how.window for how in seen] == windows and all(how.mask is None for how in seen)


def test_a_call_in_training_that_says_nothing_of_a_cache_has_none_and_runs_fused() -> None:
    fused, _ = pair("llama", LORA)
    ids = batch("llama")["input_ids"]
    assert fused(input_ids=ids).past_key_values is None
    assert not blocks(fused)[0].spec.said


def test_a_call_without_gradients_has_the_cache_of_the_model() -> None:
    fused, _ = pair("llama", LORA)
    with torch.no_grad():
        assert fused(input_ids=batch("llama")["input_ids"]).past_key_values is not None


def test_blocks_that_decline_for_a_cache_have_the_models_gradients_on_the_input_rung() -> None:
    fused, plain = pair("llama", LORA)
    stand_on(fused, Rung("input"))
    grads = []
    for model in (fused, plain):
        model(**batch("llama"), use_cache=True).loss.backward()
        grads.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, value in grads[1].items():
        assert float((grads[0][name] - value).abs().max()) <= 2e-6 * float(value.abs().max()), name


def test_gradients_in_eval_mode_are_those_of_the_model() -> None:
    fused, plain = pair("llama", LORA)
    assert_alike(fused.eval(), plain.eval(), batch("llama"), 2e-6)


def test_recorded_hidden_states_are_those_of_the_model() -> None:
    fused, plain = pair("llama", LORA)
    inputs = {name: value for name, value in batch("llama").items() if name != "labels"}
    real = inputs["attention_mask"].bool()
    found, expected = (
        model(**inputs, output_hidden_states=True, use_cache=False).hidden_states for model in (fused, plain)
    )
    assert len(found) == len(expected) == 4
    for value, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value[real], other[real], rtol=1e-5, atol=1e-5)


def test_a_classifier_without_a_vocabulary_has_the_loss_of_the_unfused_one() -> None:
    torch.manual_seed(0)
    fused, plain = twice(
        LlamaForSequenceClassification(LlamaConfig(**GROUPED, num_labels=3, pad_token_id=0)), r=4
    )
    inputs = batch("llama") | {"labels": torch.tensor([0, 2])}
    inputs["input_ids"] = inputs["input_ids"].clamp(min=1) * inputs["attention_mask"]
    assert_alike(fused, plain, inputs, 2e-6)


def test_holes_in_the_padding_of_an_encoder_change_nothing() -> None:
    fused, plain = pair("bert", LORA)
    inputs = batch("bert") | {"attention_mask": torch.tensor([[1, 0, 1, 1, 0, 1, 1, 0, 1], [1] * 9])}
    assert_alike(fused, plain, inputs, 1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_batch_of_padding_alone_has_no_loss_and_no_gradient(name: str) -> None:
    fused, _ = pair(name, LORA)
    ids = batch("llama")["input_ids"]
    found = hidden(fused, input_ids=ids, attention_mask=torch.zeros_like(ids))
    assert found.shape == (2, 9, 32)
    found.sum().backward()


# ------------------------------------------------------------------ taking it off


def test_an_unfused_model_is_the_one_it_was_without_padding() -> None:
    fused, plain = pair("llama", LORA)
    unfuse(fused)
    assert not blocks(fused) and not has_fused_head(fused)
    assert_alike(fused, plain, batch("llama", padded=False), 1e-6)


def test_an_unfused_model_is_the_one_it_was_with_padding() -> None:
    fused, plain = pair("llama", LORA)
    unfuse(fused)
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_unfusing_leaves_no_hook() -> None:
    fused, plain = pair("llama", LORA)
    unfuse(fused)
    hooks = [
        sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.modules())
        for model in (fused, plain)
    ]
    assert hooks[0] <= hooks[1] + 1  # the stack's own


def test_fusing_twice_is_fusing_once() -> None:
    fused, _ = pair("llama", LORA)
    count = sum(len(one._forward_pre_hooks) for one in fused.modules())
    assert fuse(fused, family_of(fused), "reference")
    assert sum(len(one._forward_pre_hooks) for one in fused.modules()) == count


def test_fusing_again_with_other_settings_of_memory_sets_them() -> None:
    fused, _ = pair("llama", LORA)
    fuse(fused, family_of(fused), "reference", MemoryConfig(keep="input"))
    gradients(fused, batch("llama"))
    assert blocks(fused)[0].spec.rung == Rung("input")


def test_settings_of_memory_are_followed() -> None:
    model = petune.wrap(
        MODELS["llama"](),
        kernels="reference",
        memory={"keep": "attention", "offload": "attention", "tile": 128},
    ).train()
    gradients(model, batch("llama"))
    assert {(block.spec.rung, block.spec.tile) for block in blocks(model)} == {
        (Rung("attention", "attention"), 128)
    }


# ------------------------------------------------------------------ merging, saving, loading


def test_what_is_merged_can_be_trained() -> None:
    fused, plain = (petune.merge(model) for model in pair("llama", LORA))
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_what_is_merged_says_what_the_tuned_model_said() -> None:
    fused, plain = pair("llama", LORA)
    ids = batch("llama")["input_ids"]
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        torch.testing.assert_close(
            petune.merge(fused).eval()(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-6
        )


def test_merged_weights_are_used_and_come_back_into_the_bank() -> None:
    fused, plain = (model.eval() for model in pair("llama", LORA))
    ids = batch("llama")["input_ids"]
    with petune.methods.merged_weights(fused), petune.methods.merged_weights(plain), torch.no_grad():
        assert not in_bank(fused)
        torch.testing.assert_close(
            hidden(fused, input_ids=ids), hidden(plain, input_ids=ids), rtol=1e-5, atol=1e-6
        )
    assert in_bank(fused)
    assert_alike(fused.train(), plain.train(), batch("llama"), 2e-6)


def test_files_of_a_tuning_are_those_of_the_unfused_model_byte_by_byte(tmp_path: Path) -> None:
    for method in ("lora", "full", "adapter"):
        for name, model in zip(("fused", "plain"), pair("llama", METHODS[method]), strict=True):
            petune.save(model, tmp_path / method / name)
        for file in (tmp_path / method / "plain").iterdir():
            assert (tmp_path / method / "fused" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize("method", ["lora", "adapter"])
def test_a_saved_tuning_is_loaded_into_a_base_and_fused_there(method: str, tmp_path: Path) -> None:
    fused, plain = pair("llama", METHODS[method])
    petune.save(fused, tmp_path / "tuned")
    torch.manual_seed(0)
    again = petune.load(MODELS["llama"](), tmp_path / "tuned")
    assert fuse(again, family_of(again), "reference")
    assert_alike(again.train(), plain, batch("llama"), 2e-6)


def test_hugging_face_saves_a_fused_model_as_it_saves_the_unfused_one(tmp_path: Path) -> None:
    for name, model in zip(("fused", "plain"), pair("llama", LORA), strict=True):
        model.save_pretrained(tmp_path / name)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("fused", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("fused", "plain")]
    assert sizes[0] <= sizes[1] * 1.01


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_loaded_into_a_fused_model(assign: bool) -> None:
    fused, plain = pair("llama", LORA)
    state = {name: value * 1.1 for name, value in plain.state_dict().items()}
    for model in (fused, plain):
        model.load_state_dict(state, assign=assign)
    assert in_bank(fused) is not assign
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_weights_written_in_place_count() -> None:
    fused, plain = pair("llama", LORA)
    for model in (fused, plain):
        with torch.no_grad():
            for value in model.parameters():  # what replicas do with what rank 0 sends
                value.mul_(0.9).add_(0.01)
    assert in_bank(fused)
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_a_bias_that_is_replaced_leaves_the_bank_and_counts() -> None:
    fused, plain = pair("qwen2", LORA)
    for model in (fused, plain):
        for name, module in model.named_modules():
            if name.endswith("q_proj"):
                module.bias = nn.Parameter(module.bias.detach() + 1, requires_grad=False)
    assert_alike(fused, plain, batch("llama"), 2e-6)


# ------------------------------------------------------------------ copies and moves


def test_a_copy_is_fused_and_stands_alone() -> None:
    fused, plain = pair("llama", LORA)
    again = copy.deepcopy(fused)
    with torch.no_grad():
        for value in fused.parameters():
            value.zero_()
    assert len(blocks(again)) == 3 and all(
        one.spec is not other.spec for one, other in zip(blocks(again), blocks(fused), strict=True)
    )
    assert_alike(again, plain, batch("llama"), 2e-6)
    unfuse(again)
    assert has_fused_head(fused) and len(blocks(fused)) == 3


def test_a_copy_has_its_layers_in_its_bank_once_it_trains() -> None:
    fused, plain = pair("llama", LORA)
    again = copy.deepcopy(fused)
    assert_alike(again, plain, batch("llama"), 2e-6)
    assert in_bank(again) and in_bank(fused)


def test_a_model_comes_back_from_a_file_fused(tmp_path: Path) -> None:
    """A block of a class that is itself made at run time, in whole; and eight-bit floats in a bank."""
    torch.set_default_dtype(torch.float32)
    ids, pfeiffer = torch.arange(12).view(2, 6), {"method": "adapter", "kind": "pfeiffer"}
    every: tuple[dict[str, Any], ...] = (pfeiffer, {"base_dtype": "fp8"})
    for settings in every:
        model = petune.wrap(tiny("llama-causal"), kernels="reference", **settings).train()
        stir(model)
        torch.save(model, tmp_path / "model.pt")
        again = torch.load(tmp_path / "model.pt", weights_only=False)
        assert len(blocks(again)) == len(blocks(model)) > 0
        for module in (model, again):
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        for one, other in zip(model.parameters(), again.parameters(), strict=True):
            assert torch.equal(one, other) and (one.grad is None or torch.equal(one.grad, other.grad))


def test_a_model_of_another_dtype_computes_in_it() -> None:
    fused, plain = (model.float() for model in pair("llama", LORA))
    assert_alike(fused, plain, batch("llama"), 1e-4)
    assert not blocks(fused)[0].spec.said


def test_weights_that_a_model_has_left_are_freed() -> None:
    fused, _ = pair("llama", LORA)
    fused.float()
    gradients(fused, batch("llama"))
    gc.collect()
    banks = [bank for block in blocks(fused) for bank in block.spec.banks if bank is not None]
    assert all(bank.tensors[0].dtype == torch.float32 for bank in banks)


# ------------------------------------------------------------------ what trains


@pytest.mark.parametrize("what", ["lm_head", "norm", "embed_tokens", "k_proj.weight", "lora_A", "gate_proj"])
def test_what_trains_may_change_after_fusing(what: str) -> None:
    fused, plain = pair("llama", LORA)
    for model in (fused, plain):
        for name, value in model.named_parameters():
            value.requires_grad_(what in name)
    assert_alike(fused, plain, batch("llama"), 2e-6)
    for model in (fused, plain):
        torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.1).step()
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_embeddings_that_ask_for_gradients_get_them() -> None:
    fused, plain = pair("llama", LORA)
    for model in (fused, plain):
        model.enable_input_require_grads()
        model.model.embed_tokens.weight.requires_grad_(True)
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_updates_of_unequal_scale_in_one_group() -> None:
    fused, plain = pair("llama", LORA)
    for model in (fused, plain):
        for name, module in model.named_modules():
            if name.endswith(("k_proj", "up_proj")):
                module.scale = 0.7
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_weights_that_are_others_in_the_backward_pass_are_not_read() -> None:
    """A sharded model frees and refills its weights between the passes."""
    fused, _ = pair("llama", LORA)
    ids = batch("llama")["input_ids"]
    names = [name for name, value in fused.named_parameters() if value.requires_grad]
    hidden(fused, input_ids=ids).square().sum().backward()
    expected = {name: fused.get_parameter(name).grad.clone() for name in names}
    fused.zero_grad()
    value = hidden(fused, input_ids=ids).square().sum()
    for block in blocks(fused):
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(torch.full_like(module.weight, torch.nan), requires_grad=False)
    value.backward()
    for name in names:
        assert torch.equal(fused.get_parameter(name).grad, expected[name]), name


@pytest.mark.parametrize("targets", [["q", "v"], ["k", "o", "gate"], ["up", "down"]])
def test_dropout_of_updates_on_some_sites_draws_the_masks_of_the_unfused_model(targets: list[str]) -> None:
    fused, plain = pair("llama", LORA | {"dropout": 0.3, "targets": targets})
    own_stacks(plain, family_of(plain))
    found = []
    for model in (fused, plain):
        with drawing(Running(rows=torch.arange(2), key=step_key(7, 3))):
            found.append(gradients(model, batch("llama")))
    torch.testing.assert_close(found[0][0].float(), found[1][0].float(), rtol=2e-6, atol=0)
    for name, value in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-4, atol=2e-6 * float(value.abs().max()))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_dropout_goes_with_tiles(name: str) -> None:
    found = []
    for tile in (None, 4):
        fused, _ = pair(name, LORA | {"dropout": 0.3})
        stand_on(fused, Rung("attention"), tile)
        with drawing(Running(rows=torch.arange(2), key=step_key(7, 3))):
            found.append(gradients(fused, batch(name)))
    torch.testing.assert_close(found[0][0], found[1][0])
    for key, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][key], value, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------ gradients that arrive in other shapes


STRANGE = {
    "expanded": lambda y: y.sum(),
    "expanded over tokens": lambda y: (y.sum(1) * torch.arange(32.0, device=y.device)).sum(),
    "transposed": lambda y: (y.transpose(1, 2).contiguous() * torch.arange(6.0, device=y.device)).sum(),
    "sliced": lambda y: y[:, ::2, ::2].square().sum(),
}


@pytest.mark.parametrize("strange", STRANGE)
@pytest.mark.parametrize("ops", ["reference", "triton"])
def test_a_gradient_of_any_strides_is_read_right(
    strange: str, ops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ops == "triton":
        torch.set_default_dtype(torch.float32)
        monkeypatch.setattr(fusing, "select", lambda *args: triton_ops())
    fused, plain = pair("llama", LORA)
    found, device = [], "cuda" if ops == "triton" and torch.cuda.is_available() else "cpu"
    for model in (fused.to(device), plain.to(device)):
        x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
        positions = torch.arange(6, device=device)[None]
        y = block_of(model)(x, attention_mask=None, position_embeddings=model.model.rotary_emb(x, positions))
        STRANGE[strange](y[0] if isinstance(y, tuple) else y).backward()
        found.append(
            {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
            | {"x": x.grad}
        )
    assert found[0].keys() == found[1].keys()
    for name, value in found[1].items():
        assert float((found[0][name] - value).abs().max()) <= 1e-4 * float(value.abs().max()), name


def test_a_gradient_of_a_gradient_is_refused_in_words() -> None:
    fused, _ = pair("bert", LORA)
    value = fused.bert(input_ids=batch("bert")["input_ids"])[0].square().sum()
    factor = next(value for name, value in fused.named_parameters() if "lora_B" in name)
    (grad,) = torch.autograd.grad(value, factor, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


# ------------------------------------------------------------------ hooks and checkpoints


def test_hooks_on_blocks_fire() -> None:
    fused, _ = pair("llama", LORA)
    seen: list[torch.Size] = []
    block_of(fused).register_forward_hook(lambda module, args, output: seen.append(output.shape))
    gradients(fused, batch("llama", padded=False))
    assert seen == [torch.Size([2, 9, 32])]


def test_hooks_on_layers_inside_a_block_fire_and_the_block_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.block.module.say", said.append)
    fused, plain = pair("llama", LORA)
    seen: list[nn.Module] = []
    handle = block_of(fused).self_attn.q_proj.register_forward_hook(
        lambda module, args, output: seen.append(module)
    )
    assert_alike(fused, plain, batch("llama"), 2e-6)
    assert len(seen) == 1 and any("its self_attn.q_proj to be called" in line for line in said)
    handle.remove()
    gradients(fused, batch("llama"))
    assert len(seen) == 1


def test_what_hugging_face_records_outputs_with_stays_out_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.block.module.say", said.append)
    fused, plain = pair("llama", LORA)
    with torch.no_grad():
        fused(**batch("llama"), output_attentions=True, output_hidden_states=True, use_cache=False)
    said.clear()
    assert_alike(fused, plain, batch("llama"), 2e-6)
    assert not said


def test_a_layer_that_has_changed_its_class_is_refused_in_words() -> None:
    fused, _ = pair("llama", METHODS["lora on q and v"])
    parametrize.register_parametrization(
        block_of(fused).self_attn.o_proj, "weight", nn.Identity(), unsafe=True
    )
    with pytest.raises(UsageError, match="has become a ParametrizedLinear"):
        gradients(fused, batch("llama", padded=False))


def test_a_layer_that_was_exchanged_for_another_is_refused_in_words() -> None:
    fused, _ = pair("llama", LORA)
    block_of(fused).mlp.down_proj = nn.Linear(56, 32, bias=False)
    with pytest.raises(UsageError, match="was exchanged: down_proj"):
        gradients(fused, batch("llama"))
    unfuse(fused)
    gradients(fused, batch("llama"))


def test_hugging_faces_checkpointing_of_fused_blocks_is_refused_with_the_remedy() -> None:
    fused, _ = pair("llama", LORA)
    fused.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(UsageError, match="memory='input'"):
        gradients(fused, batch("llama"))


@pytest.mark.parametrize(
    "rung", [Rung("all"), Rung("attention"), Rung("input", "input")], ids=["all", "attention", "input"]
)
def test_a_checkpoint_around_fused_blocks_changes_nothing(rung: Rung) -> None:
    fused, plain = pair("llama", LORA)
    stand_on(fused, rung)
    for module in fused.modules():
        if hasattr(module, "recompute"):
            module.recompute = True
    assert_alike(fused, plain, batch("llama"), 2e-6)


def test_blocks_that_decline_are_recomputed_where_only_their_input_is_to_be_kept() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(**BERT))
    petune.wrap(model, kernels="reference", memory="input").train()
    calls = []
    layer: Any = blocks(model)[0]
    layer.intermediate.register_forward_hook(lambda *args: calls.append(1))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch("bert", padded=False)).loss
    loss.backward()
    assert len(calls) == 2


def test_after_a_failure_nothing_is_bound() -> None:
    fused, plain = pair("llama", LORA)

    def fail(*args: Any) -> None:
        raise RuntimeError("on purpose")

    handle = block_of(fused).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        fused(**batch("llama"))
    handle.remove()
    assert running().segments is None
    assert_alike(fused, plain, batch("llama"), 2e-6)


# ------------------------------------------------------------------ what is refused


BAD: dict[str, dict[str, Any]] = {
    "kernels": {"kernels": "fast"},
    "base_dtype": {"base_dtype": "int4", "kernels": "reference"},
    "a number as memory": {"memory": 5},
    "no memory": {"memory": None},
    "a tile below its range": {"memory": {"tile": -3}},
    "a tile of words": {"memory": {"tile": "large"}},
    "a budget below its range": {"memory": {"budget": -1}},
    "input alone, attention offloaded": {
        "memory": {"keep": "input", "offload": "attention"},
        "kernels": "reference",
    },
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_value_is_refused_by_wrap(what: str) -> None:
    with pytest.raises(UsageError):
        petune.wrap(MODELS["llama"](), **BAD[what])


@pytest.mark.parametrize(
    ("memory", "words"),
    [("most", "memory.keep"), ({"keeps": "all"}, "memory.keeps"), ({"offload": "x"}, "memory.offload")],
)
def test_a_name_that_memory_lacks_is_refused_by_wrap(memory: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        petune.wrap(MODELS["llama"](), memory=memory)


def test_after_a_refusal_the_remedy_can_be_followed() -> None:
    model = MODELS["llama"]()
    with pytest.raises(UsageError, match="kernels: auto"):
        petune.wrap(model, kernels="triton")
    petune.wrap(model, kernels="auto")


def test_wrapping_a_fused_model_again_is_refused() -> None:
    fused, _ = pair("llama", LORA)
    with pytest.raises(UsageError, match="wrapped already"):
        petune.wrap(fused)


def test_a_model_of_which_one_weight_cannot_be_quantised_is_left_alone() -> None:
    torch.manual_seed(0)
    model = petune.wrap(
        LlamaForCausalLM(LlamaConfig(**GROUPED | {"intermediate_size": 64})), r=4, kernels="off"
    )
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(True)
    with pytest.raises(PetuneError):
        quantise_blocks(model, family_of(model), "fp8")
    assert not any(isinstance(value, QuantisedWeight) for value in model.parameters())


# ------------------------------------------------------------------ numbers


def oracle(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of the model in float64."""
    loss, grads = gradients(copied(model).double(), inputs)
    return float(loss), grads


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Of all gradients together, relative."""
    off = sum(float((found[name].double() - value).square().sum()) for name, value in expected.items())
    return (off / sum(float(value.square().sum()) for value in expected.values())) ** 0.5


def in_bf16(
    seed: int, method: str, name: str = "llama", weights: torch.dtype = torch.bfloat16
) -> tuple[Any, Any]:
    """A fused and an unfused model with `weights` in bf16 and LoRA's factors in float32."""
    torch.manual_seed(seed)
    plain: Any = MODELS[name]()
    petune.wrap(plain, **METHODS[method], kernels="off")
    for path, value in plain.named_parameters():
        value.data = value.data.float() if "lora" in path or "adapter_" in path else value.data.to(weights)
        if "lora_B" in path or "adapter_" in path:
            value.data.normal_(std=0.1)
    if name == "llama":
        plain.model.rotary_emb.float()
    fused = copied(plain)
    assert fuse(fused, family_of(fused), "reference")
    return fused.train(), plain.train()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "lora of a rank too large to fold", "full", "adapter"])
@pytest.mark.parametrize("keep", ["all", "input"])
def test_in_bf16_a_fused_model_is_as_near_to_the_truth_as_the_unfused_one(keep: Any, method: str) -> None:
    ours, theirs = [], []
    for seed in range(4):
        fused, plain = in_bf16(seed, method)
        stand_on(fused, Rung(keep))
        loss, truth = oracle(plain, batch("llama"))
        for model, errors in ((fused, ours), (plain, theirs)):
            # without it the unfused model computes its updates in float32
            with torch.autocast("cpu", torch.bfloat16):
                found, grads = gradients(model, batch("llama"))
            errors.append((abs(float(found) - loss) / loss, distance(grads, truth)))
        assert not blocks(fused)[0].spec.said
    for one, other in zip(torch.tensor(ours).mean(0), torch.tensor(theirs).mean(0), strict=True):
        assert one <= 1.35 * other + 1e-4  # processors sum bf16 products differently: 1.0 to 1.21 were seen


@pytest.mark.parametrize("keep", ["all", "input"])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_float32_weights_that_train_are_rounded_under_autocast_as_linears_round_them(
    name: str, keep: Any
) -> None:
    fused, plain = in_bf16(0, "full", name, torch.float32)
    stand_on(fused, Rung(keep))
    wanted, truth = oracle(plain, batch(name))
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = gradients(fused, batch(name))
    assert not blocks(fused)[0].spec.said and all(value.dtype is torch.float32 for value in grads.values())
    inside = {name: value for name, value in grads.items() if ".layers." in name or ".layer." in name}
    assert all(not torch.equal(value, value.bfloat16().float()) for value in inside.values()), (
        "sums in float32 are not rounded on the way"
    )
    assert abs(float(loss) - wanted) <= 1e-2 * wanted and distance(grads, truth) <= 2e-2
    loss, grads = gradients(fused, batch(name))  # in float32 where there is no autocast
    assert abs(float(loss) - wanted) <= 1e-6 * wanted and distance(grads, truth) <= 1e-5


def test_no_block_computes_in_float16_because_of_autocast() -> None:
    fused, _ = in_bf16(0, "full", weights=torch.float32)
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        assert all(
            "autocast computes in float16" in str(block.unready(torch.device("cpu")))
            for block in blocks(fused)
        )


@pytest.mark.parametrize(
    "rung", [Rung("input", "input"), Rung("attention", "attention")], ids=["input", "attention"]
)
def test_without_gradients_nothing_is_parked(rung: Rung) -> None:
    fused, plain = pair("llama", LORA)
    stand_on(fused, rung)
    with torch.no_grad():
        found, expected = (hidden(one, input_ids=batch("llama")["input_ids"]) for one in (fused, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert blocks(fused)[0].spec.store.pinned == 0
    gradients(fused, batch("llama"))
    assert blocks(fused)[0].spec.store.pinned > 0
    assert copy.deepcopy(fused).model.layers[0].spec.store.pinned == 0, "a copy parks for itself"


def test_frozen_float32_weights_are_left_to_their_own_forward_under_autocast() -> None:
    fused, _ = in_bf16(0, "lora", weights=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        gradients(fused, batch("llama"))
    assert any("autocast computes in bfloat16" in line for line in blocks(fused)[0].spec.said)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [20, pytest.param(50, marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_many_steps_of_adamw_learn_what_the_unfused_model_learns(dtype: torch.dtype, steps: int) -> None:
    torch.set_default_dtype(torch.float32)
    curves = []
    for model in pair("llama", LORA | {"targets": ["q", "k", "v", "o", "gate", "up", "down"]}):
        for name, value in model.named_parameters():
            if "lora" not in name:
                value.data = value.data.to(dtype)
        optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=3e-3)
        curve = []
        for step in range(steps):
            inputs = batch("llama", padded=step % 2 == 0)
            loss = model(**inputs, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    ours, theirs = curves
    assert theirs[-1] < 0.95 * theirs[0]  # or nothing would be compared
    away = [abs(one - other) / other for one, other in zip(ours, theirs, strict=True)]
    # in bf16 both stray, each in its own way
    mean, most = (1e-4, 1e-3) if dtype == torch.float32 else (1e-2, 3e-2)
    assert sum(away) / len(away) <= mean and max(away) <= most


# ------------------------------------------------------------------ faults put in on purpose


def _without_ds_a(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "dupdated", lambda self, dx, ds: dx)


def _without_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "product", lambda self, x, s, inlet=None: self.base(x))
    monkeypatch.setattr(Group, "deferred", lambda self, s: None)


def _with_the_scale_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = Group._stacked
    monkeypatch.setattr(Group, "_stacked", lambda self, dtype: stacked(self, dtype) * self.parts[0].scale)


def _without_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = reference.rms_norm_backward

    def faulty(
        dy: Tensor,
        total: Tensor,
        weight: Tensor,
        rstd: Tensor,
        dresidual: Any = None,
        weight_grad: bool = False,
    ) -> Any:
        return backward(dy, total, weight, rstd, None, weight_grad)

    monkeypatch.setattr(reference, "rms_norm_backward", faulty)


def _turned_the_wrong_way(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = reference.rope_backward
    monkeypatch.setattr(
        reference, "rope_backward", lambda dq, dk, dv, cos, sin, *_: backward(dq, dk, dv, cos, -sin)
    )


def _with_a_stale_low_rank_input(monkeypatch: pytest.MonkeyPatch) -> None:
    low = Group.low
    monkeypatch.setattr(Group, "low", lambda self, x: None if (s := low(self, x)) is None else s.flip(0))


FAULTS = [
    _without_ds_a,
    _without_the_update,
    _with_the_scale_twice,
    _without_the_residual,
    _turned_the_wrong_way,
    _with_a_stale_low_rank_input,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_").replace("_", " "))
def test_a_fault_in_the_engine_is_seen_by_the_comparison(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    reference_ops.cache_clear()
    try:
        fused, plain = pair("llama", METHODS["lora"])
        stand_on(fused, Rung("input"))
        with pytest.raises(AssertionError):
            assert_alike(fused, plain, batch("llama"), 1e-4)
    finally:
        monkeypatch.undo()
        reference_ops.cache_clear()
