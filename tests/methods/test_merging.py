"""Merging for good and for a block: equal outputs, bit-exact return, and nothing of petune left behind."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from petune.errors import UsageError
from petune.kernels.fuse import unfuse
from petune.kernels.head.hooks import unfuse_head
from petune.kernels.single_modules import unfuse_sites
from petune.methods import is_wrapped, merge, merged_weights, tuned_parameters, wrap
from petune.models import attention, family_of
from petune.models.sites import find_sites
from petune.models.stack import own_stacks
from tests.methods.zoo import FOUR, GENERATE, GENERATING, SETTINGS, ZOO, batch, prompt, stir, table, tiny


def stirred(name: str, **settings: Any) -> Any:
    changes = settings.pop("changes", {})
    model = wrap(tiny(name, **changes), "lora", **{"r": 4, **settings})
    stir(model, std=0.1)
    return model


def assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert float((found - expected).detach().abs().max()) <= tolerance * max(
        1.0, float(expected.detach().abs().max())
    )


# one model of each family; the others have another head
FAMILIES = {config: name for name, (_, config, _) in ZOO.items()}.values()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAMILIES else pytest.mark.long) for name in ZOO]
)
def test_a_merged_model_computes_what_the_adapter_did(name: str) -> None:
    model = stirred(name)
    inputs = batch(name)
    expected, base = model(**inputs).logits, tiny(name)(**inputs).logits
    assert float((expected - base).detach().abs().max()) > 0.05
    assert_close(merge(model)(**inputs).logits, expected)


PAST = ("kernels: reference", "kernels: off", "stacks of its own", "q alone", "unfused first")


def merged(name: str, method: str, past: str) -> Any:
    """A model that was tuned, trained for a step and merged."""
    first = find_sites(tiny(name), table(name))[0].role  # q, or the projection that q is in
    settings: dict[str, Any] = (
        {"r": 4, "targets": [first, "o"] if past == "q alone" else "auto"} if method == "lora" else {}
    )
    bare = method == "full" and name == "dinov2-classify"  # nothing is fused
    unfused = bare or past in ("kernels: off", "stacks of its own")
    model = wrap(tiny(name), method, kernels="off" if unfused else "reference", **settings)
    if past == "stacks of its own":
        own_stacks(model, family_of(model))  # type: ignore[arg-type]
        attention.use(model, family_of(model))
    model.train()(**batch(name)).loss.backward()
    model.zero_grad(set_to_none=True)
    if past == "unfused first":
        unfuse(model)
    return merge(model.eval())


def assert_never_met_petune(model: nn.Module, base: nn.Module) -> None:
    """Module by module: class, children as they are iterated, attributes, every dictionary of hooks, and
    memory of its own."""
    for (key, module), (other, plain) in zip(model.named_modules(), base.named_modules(), strict=True):
        assert (key, type(module)) == (other, type(plain))
        assert module.__dict__.keys() == plain.__dict__.keys(), key
        assert module.training == plain.training, key
        for name, value in plain.__dict__.items():
            if "hooks" in name:
                assert len(module.__dict__[name]) == len(value), (key, name)
            elif isinstance(value, str | int | float | bool | tuple | type(None)):
                assert module.__dict__[name] == value, (key, name)
        if isinstance(plain, nn.ModuleList):
            assert [type(child) for child in module] == [type(child) for child in plain]  # type: ignore[attr-defined]
            assert [type(child) for child in module[:1]] == [type(child) for child in plain[:1]]  # type: ignore[index]
    for (key, value), (other, plain_value) in zip(
        model.named_parameters(), base.named_parameters(), strict=True
    ):
        assert (key, value.shape, value.dtype, value.requires_grad) == (
            other,
            plain_value.shape,
            plain_value.dtype,
            True,
        )
        assert (
            value.is_contiguous()
            and value.untyped_storage().nbytes() == value.nbytes
            and type(value) is nn.Parameter
        ), key


@pytest.mark.slow
@pytest.mark.crossed(1)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("past", PAST)
def test_a_merged_model_has_never_met_petune(name: str, method: str, past: str) -> None:
    base = tiny(name)
    base(**batch(name))  # Hugging Face notes in a config what labels it has seen
    for one in {"kernels: reference", past}:
        model = merged(name, method, one)
        assert_never_met_petune(model, base)
        assert not is_wrapped(model) and list(model.state_dict()) == list(base.state_dict())
        assert model.config.to_dict() == base.config.to_dict()
        assert model.config._attn_implementation == base.config._attn_implementation


@pytest.mark.parametrize("past", ["kernels: reference", "q alone"])
def test_an_unfused_model_was_never_fused(past: str) -> None:
    settings: dict[str, Any] = {"r": 4, "targets": ["q"] if past == "q alone" else "auto"}
    base, model = (
        wrap(tiny("llama-causal"), "lora", kernels=kernels, **settings) for kernels in ("off", "reference")
    )
    unfuse(model)
    for one in (base, model):
        one.requires_grad_(True)
    assert_never_met_petune(model, base)


def test_a_stack_that_cannot_be_fused_leaves_none_behind() -> None:
    base, model = (
        wrap(tiny("llama-causal", hidden_act="relu6"), "lora", r=4, kernels=kernels)
        for kernels in ("off", "reference")
    )
    unfuse_sites(model)
    unfuse_head(model)
    assert [(key, type(one)) for key, one in model.named_modules()] == [
        (key, type(one)) for key, one in base.named_modules()
    ]
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_merged_models_are_unpickled_where_there_is_no_petune(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is imported here is taken out of sight, which takes no time, where a Python without it takes 5
    s."""
    written = [pickle.dumps((merged(name, "lora", "kernels: reference"), batch(name))) for name in FOUR]
    own = pickle.dumps(wrap(tiny("llama-causal"), "lora"))
    for name in [name for name in sys.modules if name.startswith("petune.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "petune", None)
    with pytest.raises(ModuleNotFoundError, match="petune"):
        pickle.loads(own)
    for one in written:
        model, inputs = pickle.loads(one)
        assert model(**inputs).loss > 0
    assert not [name for name in sys.modules if name.startswith("petune.")]


@pytest.mark.parametrize("name", FOUR)
def test_a_merged_model_is_saved_and_loaded_as_a_plain_one(name: str, tmp_path: Path) -> None:
    model = merge(stirred(name, kernels="reference"))
    expected = model(**batch(name)).logits
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert_close(loaded.eval()(**batch(name)).logits, expected, 0)


TIED = {
    "llama embedding": ("llama-causal", ["embed_tokens"], {"tie_word_embeddings": True}),
    "llama head": ("llama-causal", ["lm_head"], {"tie_word_embeddings": True}),
    "llama both": ("llama-causal", ["embed_tokens", "lm_head"], {"tie_word_embeddings": True}),
    "bert embedding": ("bert-mlm", ["word_embeddings"], {}),
    "bert head": ("bert-mlm", ["predictions.decoder"], {}),
    "t5 encoder embedding": ("t5-seq2seq", ["encoder.embed_tokens"], {}),
    "t5 decoder embedding": ("t5-seq2seq", ["decoder.embed_tokens"], {}),
    "t5 both embeddings": ("t5-seq2seq", ["embed_tokens"], {}),
    "t5 head": ("t5-seq2seq", ["lm_head"], {}),
    "bart head": ("bart-seq2seq", ["lm_head"], {}),
}


@pytest.mark.parametrize("case", TIED)
def test_lora_on_one_end_of_a_tied_pair_survives_merging_and_saving(case: str, tmp_path: Path) -> None:
    """An in-place merge drags the other end along, and a checkpoint that still says `tied` undoes the
    untying."""
    name, targets, changes = TIED[case]
    inputs = batch(name)
    model = stirred(name, targets=targets, changes=changes)
    expected = model(**inputs).logits
    with merged_weights(model):
        assert_close(model(**inputs).logits, expected)
    assert torch.equal(model(**inputs).logits, expected)
    model = merge(model)
    assert_close(model(**inputs).logits, expected)
    model.save_pretrained(tmp_path)
    assert_close(type(model).from_pretrained(tmp_path).eval()(**inputs).logits, expected)


def test_an_embedding_that_only_lends_its_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="never called") as caught:
        wrap(tiny("t5-seq2seq"), "lora", r=4, targets=["shared"])
    assert "encoder.embed_tokens, decoder.embed_tokens" in str(caught.value)


def test_merging_layers_that_are_not_tied_leaves_the_tie_alone() -> None:
    model = merge(stirred("llama-causal", changes={"tie_word_embeddings": True}))
    assert model.config.tie_word_embeddings is True
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_weight_without_values_takes_no_update() -> None:
    """An update that is added to nothing would be lost without a word."""
    model = wrap(tiny("llama-causal"), "lora", r=2)
    model.get_submodule("model.layers.1.mlp.down_proj").to("meta")
    for attempt in (merge, lambda model: merged_weights(model).__enter__()):
        with pytest.raises(UsageError, match=r"down_proj[\s\S]*this tensor has no values"):
            attempt(model)
    assert is_wrapped(model)


def test_conv1d_merges_in_its_own_layout() -> None:
    torch.manual_seed(0)
    model = wrap(
        GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=32)).eval(),
        "lora",
        r=4,
    )
    stir(model)
    inputs = batch("llama-causal")
    expected = model(**inputs).logits
    assert_close(merge(model)(**inputs).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_sum_is_made_wide_and_rounded_once(dtype: torch.dtype) -> None:
    model = wrap(nn.Sequential(nn.Linear(32, 16)).to(dtype), "lora", r=4)
    stir(model)
    layer = model[0]
    expected = (layer.weight.double() + layer.scale * layer.lora_B.double() @ layer.lora_A.double()).to(dtype)
    found = merge(model)[0].weight
    assert found.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    else:
        # a float32 sum that lies on a tie may round the other way
        assert float((found != expected).float().mean()) < 0.01


@pytest.mark.parametrize("name", ["bert-classify", "t5-seq2seq", "llama-causal"])
def test_merged_weights_computes_the_same_and_restores_every_bit(name: str) -> None:
    model = stirred(name, changes={"tie_word_embeddings": True} if name == "llama-causal" else {})
    inputs = batch(name)
    tensors = dict(model.named_parameters())
    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
    expected = model(**inputs).logits
    with merged_weights(model) as inside:
        assert inside is model
        assert any(not torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert_close(model(**inputs).logits, expected)
    after = dict(model.named_parameters())
    assert all(after[key] is value for key, value in tensors.items())
    assert list(after) == list(tensors)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(**inputs).logits, expected)


def test_merged_weights_restores_every_bit_after_an_exception() -> None:
    model = stirred("llama-causal")
    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
    with pytest.raises(KeyError), merged_weights(model):
        raise KeyError
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    gradient_names = {key for key, value in model.named_parameters() if value.requires_grad}
    assert gradient_names == set(tuned_parameters(model))


def test_merged_weights_restores_every_bit_when_merging_itself_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stirred("llama-causal")
    before = {key: value.detach().clone() for key, value in model.state_dict().items()}
    last = model.model.layers[1].mlp.down_proj

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(last, "merged_weight", fail)
    with pytest.raises(MemoryError), merged_weights(model):
        pass
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.parametrize("name", ["llama-causal", "bert-classify"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_training_inside_merged_weights_raises(name: str, mode: str) -> None:
    """In eval mode too: with a task head beside the method a backward pass would otherwise train the head
    alone, in silence."""
    model = getattr(stirred(name), mode)()
    # RuntimeError: torch finds nothing to differentiate
    with merged_weights(model), pytest.raises((UsageError, RuntimeError)):
        model(**batch(name)).loss.backward()


def test_full_fine_tuning_inside_merged_weights_raises() -> None:
    model = wrap(tiny("bert-classify"), "full").train()
    with pytest.raises(UsageError), merged_weights(model):
        model(**batch("bert-classify")).loss.backward()


def test_evaluation_inside_merged_weights_is_allowed() -> None:
    model = stirred("bert-classify")
    with merged_weights(model), torch.no_grad():
        model.train()(**batch("bert-classify"))
        model.eval()(**batch("bert-classify"))


def test_merged_weights_does_not_nest_and_merge_inside_it_is_refused() -> None:
    model = stirred("llama-causal")
    expected = model(**batch("llama-causal")).logits
    with merged_weights(model):
        with pytest.raises(UsageError, match="merged already"), merged_weights(model):
            pass
        with pytest.raises(UsageError, match="inside merged_weights"):
            merge(model)
        assert_close(model(**batch("llama-causal")).logits, expected)
    assert torch.equal(model(**batch("llama-causal")).logits, expected)


@pytest.mark.parametrize("name", GENERATING)
def test_generate_is_the_same_before_and_after_merging(name: str) -> None:
    model = stirred(name)
    expected = model.generate(**prompt(name), **GENERATE)
    base = tiny(name).generate(**prompt(name), **GENERATE)
    assert not torch.equal(expected, base)
    with merged_weights(model):
        assert torch.equal(model.generate(**prompt(name), **GENERATE), expected)
    assert torch.equal(merge(model).generate(**prompt(name), **GENERATE), expected)


@pytest.mark.parametrize("method", ["adapter", "side"])
def test_what_cannot_be_merged_says_so_and_names_the_remedy(method: str) -> None:
    model = wrap(tiny("bert-classify"), method, **SETTINGS[method])
    with pytest.raises(UsageError, match=r"cannot be merged(.|\n)*petune\.load"):
        merge(model)
    with pytest.raises(UsageError, match="cannot be merged"), merged_weights(model):
        pass
    assert is_wrapped(model)


def test_full_merges_into_itself() -> None:
    model = wrap(tiny("bert-classify"), "full")
    expected = model(**batch("bert-classify")).logits
    model = merge(model)
    assert not is_wrapped(model)
    assert torch.equal(model(**batch("bert-classify")).logits, expected)


def test_a_plain_model_cannot_be_merged() -> None:
    with pytest.raises(UsageError, match="not wrapped"):
        merge(tiny("bert-classify"))
