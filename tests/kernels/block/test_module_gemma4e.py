"""Fused blocks of Gemma 4 that read a vector for every token (per-layer embeddings) and keys and values of an
earlier block: every method on every rung, beside blocks that run unfused, in narrow numbers, streamed, by
Triton's kernels; bytes; what is refused; planted faults."""

from __future__ import annotations

from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from petune.errors import UsageError
from petune.kernels.block.lent_steps import TOKENS, Lend, OfTokens
from petune.kernels.block.program import compiled
from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse, fused_blocks
from petune.methods import wrap
from petune.models import family_of
from tests.kernels import own_blocks
from tests.kernels.fused_pairs import stand_on
from tests.kernels.gemma4_blocks import (
    METHODS,
    assert_bytes_are_foretold,
    assert_weights_are_counted,
    rows_of,
    set_factors,
    wide_norm,
)
from tests.kernels.own_blocks import assert_trains_alike, cells_of_methods
from tests.kernels.replays import replayed
from tests.methods.zoo import GENERATE, assert_same_gradients, batch, gradients, of_64, prompt, tiny
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS

NAME = "gemma4e-causal"
# of both kinds of attention, of unlike widths, a block that lends its keys and one that reads them
DEEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
}
STILL: dict[str, Any] = {**DEEP, "attention_dropout": 0.0}


@pytest.fixture
def _float64(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma4RMSNorm, "forward", wide_norm)


def pair(
    method: str = "lora", keep: Any = "all", dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[Any, Any]:
    """A tuned model, fused and not, that tiles what it may."""
    kind, settings = METHODS[method]
    plain = own_blocks.tuned(NAME, kind, settings, dtype, **config)
    set_factors(plain, by=0.5)
    made = own_blocks.fused(plain, keep)
    stand_on(made, Rung(keep), tile=None if keep == "all" else 4)
    return made, plain


def decline(block: Any) -> None:
    """Have a fused block go to the model's own forward."""
    block.unready = MethodType(lambda *_: "a test says so", block)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(("method", "keep", "rows"), cells_of_methods(METHODS))
def test_every_method_trains_as_with_the_models_own_blocks(method: str, keep: Any, rows: str) -> None:
    deep = DEEP if rows in ("packed", "one row") else {}
    assert_trains_alike(*pair(method, keep, attention_dropout=0.2, **deep), rows_of(NAME, rows), 2)


@pytest.mark.usefixtures("_float64")
def test_blocks_that_share_no_keys_may_read_vectors_of_tokens() -> None:
    """The other way round transformers' own model has an error."""
    made, plain = pair("full", "input", num_kv_shared_layers=0)
    assert_trains_alike(made, plain, rows_of(NAME, "padded"), 1)
    assert all(block.spec.program.inputs == ("x", TOKENS) for block in fused_blocks(made))


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("unfused", [(0, 1), (2, 3)], ids=["those that lend", "those that read"])
def test_keys_pass_between_fused_blocks_and_others(unfused: tuple[int, int]) -> None:
    made, plain = pair("full", "input", **STILL)
    for at in unfused:
        decline(fused_blocks(made)[at])
    (loss, found), (expected, wanted) = (gradients(one, rows_of(NAME, "packed")) for one in (made, plain))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(found, wanted, 2e-6)


@pytest.mark.usefixtures("_float64")
def test_linears_that_begin_to_train_are_learned_by_the_models_own_blocks() -> None:
    made, plain = pair("q and down", **STILL)
    for model in (made, plain):
        for key, value in model.named_parameters():
            value.requires_grad_("per_layer" in key or value.requires_grad)
    (loss, found), (expected, wanted) = (gradients(one, rows_of(NAME, "padded")) for one in (made, plain))
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert_same_gradients(found, wanted, 2e-6)
    assert any("a vector that scales its sub-layers trains" in one for one in fused_blocks(made)[0].spec.said)


def test_over_a_quantised_base_it_trains_as_the_models_own_blocks() -> None:
    plain = own_blocks.tuned(NAME, "lora", {"r": 4, "base_dtype": "nf4"}, torch.float32, **of_64(NAME))
    assert_trains_alike(own_blocks.fused(plain, "input"), plain, rows_of(NAME, "packed"), 1)


def test_under_bfloat16_autocast_losses_and_gradients_are_near() -> None:
    """No farther from those in float32 than the model's own; what blocks are handed for every token is
    float32, and hidden states and keys are bfloat16."""
    made, plain = pair("full", "input", torch.float32, **STILL)
    inputs = rows_of(NAME, "padded")
    expected, wanted = gradients(plain, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        (loss, found), (_, own) = (gradients(one, inputs) for one in (made, plain))
    assert float(loss) == pytest.approx(float(expected), rel=1e-2)
    for key, value in wanted.items():
        far, usual = (float((one[key] - value).norm()) for one in (found, own))
        assert far < 1.5 * usual + 0.03 * float(value.norm()), key
    assert not any(block.spec.said for block in fused_blocks(made))


@pytest.mark.long
def test_kernels_of_triton_train_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = own_blocks.tuned(NAME, "full", {}, torch.float32)
    own_blocks.assert_trains_by_triton(plain, batch(NAME, rows=1, length=6), monkeypatch)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("method", ["lora", "full", pytest.param("adapter", marks=pytest.mark.long)])
def test_blocks_are_replayed_as_they_run_one_by_one(method: str) -> None:
    """Vectors of tokens have a gradient where embeddings train; keys are those of the same replay."""
    deeper = {"num_hidden_layers": 6, "layer_types": DEEP["layer_types"][:2] * 3, "num_kv_shared_layers": 4}
    made, plain = pair(method, attention_dropout=0.2, **deeper)
    recorder = replayed(made)
    for kind in ("padded", "whole", "packed", "padded"):
        assert_trains_alike(made, plain, rows_of(NAME, kind), 1)
    assert recorder.forwards == recorder.backwards == 4


@pytest.mark.usefixtures("_float64")
def test_who_asks_for_some_logits_alone_is_not_replayed() -> None:
    """The last blocks compute those tokens alone."""
    made, plain = pair("full", sliding_window=16, **STILL)
    recorder = replayed(made)
    inputs = {"input_ids": rows_of(NAME, "whole")["input_ids"], "use_cache": False, "logits_to_keep": 1}
    for model in (made, plain):
        model(**inputs).logits.square().sum().backward()
    wanted = {name: value.grad for name, value in plain.named_parameters()}
    assert_same_gradients({name: value.grad for name, value in made.named_parameters()}, wanted, 2e-6)
    assert recorder.forwards == 0


def test_blocks_stream() -> None:
    kind, settings = METHODS["full"]
    plain = own_blocks.tuned(NAME, kind, settings, torch.float32)
    own_blocks.assert_streams_alike(own_blocks.fused(plain), plain, rows_of(NAME, "padded"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("plan", "method"), [("shard", "full"), ("dp", "adapter")])
def test_ranks_of_a_plan_train_as_one_process_with_dropout(plan: str, method: str) -> None:
    check(case(NAME, method, BACKENDS[plan](NAME, 2), steps=1, dropout=0.1, blocks=KEPT[1]))


# ------------------------------------------------------------------ generation


@pytest.mark.parametrize("cache", [False, True])
def test_what_is_generated_is_what_the_models_own_blocks_generate(cache: bool) -> None:
    """Without a cache, too, blocks that have no keys compute the last tokens of padded rows alone."""
    made, plain = pair("lora", dtype=torch.float32, **DEEP)
    given = prompt(NAME) | GENERATE | {"use_cache": cache}
    assert torch.equal(made.eval().generate(**given), plain.eval().generate(**given))


@pytest.mark.parametrize("kept", [1, torch.tensor([1, 3])], ids=["the last", "two places"])
def test_a_row_without_its_padding_of_which_some_logits_are_asked_for_is_whole(kept: int | Tensor) -> None:
    made, plain = pair("lora", dtype=torch.float32, **DEEP)
    inputs = {key: value for key, value in rows_of(NAME, "padded").items() if key != "labels"}
    given = inputs | {"logits_to_keep": kept, "use_cache": False}
    torch.testing.assert_close(made.eval()(**given).logits, plain.eval()(**given).logits)


# ------------------------------------------------------------------ bytes


def held(model: Any, number: int) -> float:
    """Bytes of a token that one block keeps beside its parameters and what is given to every block."""
    block, tokens, found = fused_blocks(model)[number], 512, dict[int, int]()
    config, kind = model.config, model.config.layer_types[number]
    x = torch.randn(2, tokens, 64, requires_grad=True)
    e = torch.randn(2, tokens, config.hidden_size_per_layer_input, requires_grad=True)
    angles = model.model.rotary_emb(x, torch.arange(tokens)[None], kind)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers(), *angles)}
    shape = block.spec.program.sizes
    lent = [torch.randn(2, shape.kv_heads, tokens, shape.head_dim) for _ in range(2)]
    states = {} if number == 0 else {kind: tuple(lent)}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        block(x, e, shared_kv_states=states, position_embeddings=angles)
    handed = [one for one in (lent if number else states[kind])]
    sizes = sum(one.nbytes for one in handed)  # held once, as that of the block that lends
    return (sum(found.values()) + (-sizes if number else sizes)) / (2 * tokens)


@pytest.mark.parametrize("method", ["full", pytest.param("adapter", marks=pytest.mark.long)])
def test_blocks_keep_the_bytes_that_are_foretold(method: str) -> None:
    assert_bytes_are_foretold(NAME, method, held)


def test_weights_of_a_block_are_counted_as_it_has_them() -> None:
    assert_weights_are_counted(NAME)


# ------------------------------------------------------------------ what is refused


def test_another_layer_in_the_place_of_its_gate_leaves_blocks_unfused() -> None:
    made = wrap(tiny(NAME), "lora", kernels="off")
    made.model.layers[0].per_layer_input_gate = nn.Linear(64, 12)
    done = fuse(made, family_of(made), "reference")
    said = "per_layer_input_gate is a Linear, and the table says torch's Linear without a bias"
    assert not done.blocks and any(said in one for one in done.reasons)


def test_blocks_that_share_keys_are_not_fused_where_ranks_share_a_sequence() -> None:
    """They train unfused then, and the run says why."""
    one = case(NAME, "lora", BACKENDS["sp-gather"](NAME, 2), steps=1, blocks=KEPT[0])
    with pytest.raises(Exception, match="its blocks share keys and values, and attention sees tokens of"):
        check(one)


def test_keys_of_other_tokens_are_refused_where_padding_is_left_out() -> None:
    made, _ = pair("lora", dtype=torch.float32)
    own = made.model._maybe_slice_kv_shared_inputs
    made.model._maybe_slice_kv_shared_inputs = lambda *given, **more: own(
        *given[:4], 1, **more
    )  # which nobody has told by an argument
    with pytest.raises(UsageError, match=r"some tokens alone \(logits_to_keep\)"):
        made(
            **{key: value for key, value in rows_of(NAME, "padded").items() if key != "labels"},
            use_cache=False,
        )


# ------------------------------------------------------------------ planted faults


def _without_others(self: Lend, run: Any, v: Any) -> None:
    run.grads.pop("lent")


def _without_tokens(self: OfTokens, run: Any, v: Any) -> None:
    _BACK(self, run, v)
    run.grads[TOKENS] = torch.zeros_like(v[TOKENS])


_BACK = OfTokens.backward
FAULTS: dict[str, tuple[Any, Any]] = {
    "gradients of later blocks do not reach lent keys": (Lend, _without_others),
    "vectors of tokens have no gradient": (OfTokens, _without_tokens),
}


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, wrong = FAULTS[fault]
    monkeypatch.setattr(kind, "backward", wrong)
    compiled.cache_clear()  # whose programs know the steps as they were
    with pytest.raises(AssertionError):
        assert_trains_alike(*pair("full", "input"), rows_of(NAME, "one row"), 1)
    compiled.cache_clear()
