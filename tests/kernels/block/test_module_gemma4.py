"""Fused blocks of Gemma 4: values that are normed, or made of keys; heads of two widths in one stack; a
number that a block ends with. Every method on every rung, plans, recordings, weights that stream, bytes; what
is refused; planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

from petune.kernels import reference
from petune.kernels.configs import Rung
from petune.kernels.fuse import fuse, fused_blocks
from petune.models import family_of
from tests.kernels import own_blocks
from tests.kernels.fused_pairs import stand_on
from tests.kernels.gemma4_blocks import (
    METHODS,
    assert_bytes_are_foretold,
    assert_weights_are_counted,
    blocks_of,
    rows_of,
    set_factors,
    wide_norm,
)
from tests.kernels.own_blocks import assert_trains_alike, cells_of_methods
from tests.kernels.replays import replayed
from tests.methods.zoo import assert_same_gradients, batch, gradients, of_64
from tests.parallel.cells import KEPT, case
from tests.parallel.harness import check
from tests.parallel.plans import BACKENDS, COMPOSED, LOOPED

NAME = "gemma4-causal"  # of whose two blocks the second has wider heads, fewer keys, and no linear of values


@pytest.fixture
def _float64(float64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma4RMSNorm, "forward", wide_norm)


def tuned(method: str = "lora", dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A tuned model whose own blocks run."""
    kind, settings = METHODS[method]
    plain = own_blocks.tuned(NAME, kind, settings, dtype, **config)
    set_factors(plain)
    return plain


def pair(
    method: str = "lora", keep: Any = "all", dtype: torch.dtype = torch.float64, **config: Any
) -> tuple[Any, Any]:
    """A tuned model, fused and not, that tiles what it may and drops attention's probabilities out."""
    plain = tuned(method, dtype, **{"attention_dropout": 0.2, **config})
    made = own_blocks.fused(plain, keep)
    stand_on(made, Rung(keep), tile=None if keep == "all" else 4)
    return made, plain


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize(("method", "keep", "rows"), cells_of_methods(METHODS))
def test_every_method_trains_as_with_the_models_own_blocks(method: str, keep: Any, rows: str) -> None:
    assert_trains_alike(*pair(method, keep), rows_of(NAME, rows), 2)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("changes", [{"attention_k_eq_v": False}, {"layer_types": ["full_attention"] * 2}])
def test_values_of_wide_heads_may_have_a_linear_and_blocks_one_kind(changes: dict[str, Any]) -> None:
    made, plain = pair("full", "input", **changes)
    for kind in ("whole", "one row"):
        assert_trains_alike(made, plain, rows_of(NAME, kind), 1)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("method", ["lora", "pfeiffer"])
def test_the_number_that_a_block_ends_with_is_read_in_every_pass(method: str) -> None:
    made, plain = pair(method, "input")
    for by in (1.0, -0.5):
        set_factors(made, plain, by=by)
        assert_trains_alike(made, plain, rows_of(NAME, "padded"), 1)
    for model in (made, plain):  # another tensor in its place
        blocks_of(model)[1].layer_scalar = torch.full((1,), 2.0, dtype=torch.float64)
    assert_trains_alike(made, plain, rows_of(NAME, "padded"), 1)


@pytest.mark.parametrize("form", ["nf4", pytest.param("int8", marks=pytest.mark.long)])
def test_over_a_quantised_base_it_trains_as_the_models_own_blocks(form: str) -> None:
    own = {"r": 4, "base_dtype": form}
    plain = own_blocks.tuned(NAME, "lora", own, torch.float32, **of_64(NAME))
    set_factors(plain)
    assert_trains_alike(own_blocks.fused(plain, "input"), plain, rows_of(NAME, "packed"), 1)


def test_under_bfloat16_autocast_losses_and_gradients_are_near() -> None:
    """Hidden states are bfloat16, and what they are multiplied by is float32."""
    made, plain = pair("full", "input", torch.float32, attention_dropout=0.0)
    inputs = rows_of(NAME, "padded")
    with torch.autocast("cpu", torch.bfloat16):
        both = [gradients(one, inputs) for one in (made, plain)]
    (loss, found), (expected, wanted) = both
    assert float(loss) == pytest.approx(float(expected), rel=2e-2)
    for key, value in wanted.items():
        assert float((found[key] - value).norm()) < 0.1 * float(value.norm()) + 1e-3, key
    assert not any(block.spec.said for block in fused_blocks(made))


@pytest.mark.long  # the kernels by themselves are in the short suite
def test_kernels_of_triton_train_as_plain_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tuned("full", torch.float32)
    own_blocks.assert_trains_by_triton(plain, batch(NAME, rows=1, length=6), monkeypatch)


# ------------------------------------------------------------------ plans, recordings, streams, bytes

PLANS: dict[str, Any] = {
    **{
        name: BACKENDS[name](NAME, 2)
        for name in ("shard", "sp-gather", "sp-ulysses", "sp-ring", "pp-1f1b", "pp-gpipe")
    },
    **{name: LOOPED[name](NAME, 2) for name in LOOPED},
    **{name: COMPOSED[name](NAME) for name in ("dp x pp", "sp x pp")},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [pytest.param(one, marks=() if one == "sp-gather" else pytest.mark.long) for one in PLANS]
)
def test_ranks_of_a_plan_train_as_one_process_with_dropout(plan: str) -> None:
    turn = [*PLANS].index(plan)
    method = ("lora", "full", "adapter")[turn % 3]
    check(case(NAME, method, PLANS[plan], steps=1, dropout=0.1, blocks=KEPT[turn % 4]))


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("first", ["sliding_attention", "full_attention"])
def test_blocks_are_replayed_whichever_width_of_heads_comes_first(first: str) -> None:
    """Tables of angles as wide as half a head of the first block are not halves of its own."""
    kinds = [first, "sliding_attention", "full_attention"]
    plain = tuned(layer_types=kinds, num_hidden_layers=len(kinds))
    made = own_blocks.fused(plain)
    recorder = replayed(made)
    for kind in ("padded", "whole", "padded"):
        assert_trains_alike(made, plain, rows_of(NAME, kind), 1)
    assert recorder.backwards


def test_blocks_stream() -> None:
    plain = tuned("full", torch.float32)
    own_blocks.assert_streams_alike(own_blocks.fused(plain), plain, rows_of(NAME, "padded"))


def held(model: Any, number: int) -> float:
    """Bytes of a token that one block keeps beside its parameters and what is given to every block."""
    block, tokens, found = fused_blocks(model)[number], 512, dict[int, int]()
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    x = torch.randn(2, tokens, 64, dtype=next(model.parameters()).dtype, requires_grad=True)
    angles = model.model.rotary_emb(x, torch.arange(tokens)[None], model.config.layer_types[number])
    own |= {one.untyped_storage().data_ptr() for one in angles}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        y = block(x, position_embeddings=angles)
    assert y.requires_grad
    return sum(found.values()) / (2 * tokens)


@pytest.mark.parametrize(
    "method",
    ["full", *(pytest.param(one, marks=pytest.mark.long) for one in ("q and down", "ia3", "adapter"))],
)
def test_blocks_keep_the_bytes_that_are_foretold(method: str) -> None:
    assert_bytes_are_foretold(NAME, method, held)


def test_weights_of_a_block_without_a_linear_of_values_are_counted_without_them() -> None:
    assert_weights_are_counted(NAME)


# ------------------------------------------------------------------ what is refused


class Halved(Gemma4RMSNorm):
    """What its parent computes, halved."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


Halved.__module__ = Halved.forward.__module__ = Gemma4RMSNorm.__module__


def test_a_norm_of_values_that_computes_something_else_leaves_blocks_unfused() -> None:
    made = tuned("lora", torch.float32)
    made.model.layers[1].self_attn.v_norm.__class__ = Halved
    done = fuse(made, family_of(made), "reference")
    said = "Halved is not an RMS norm that scales nothing"
    assert not done.blocks and any(said in one for one in done.reasons)


def test_a_number_that_trains_is_read_by_the_models_own_block() -> None:
    made, plain = pair("dora", dtype=torch.float32, attention_dropout=0.0)
    for model in (made, plain):
        blocks_of(model)[0].layer_scalar.requires_grad_()
    (loss, found), (expected, wanted) = (gradients(one, rows_of(NAME, "padded")) for one in (made, plain))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert_same_gradients(found, wanted, 1e-5)
    said = fused_blocks(made)[0].spec.said
    assert said == {"a vector that scales its sub-layers trains, and did not when it was fused"}
    torch.testing.assert_close(*(blocks_of(one)[0].layer_scalar.grad for one in (made, plain)))


# ------------------------------------------------------------------ planted faults


def _values_as_they_are(raw: Tensor, *given: Any) -> Tensor:
    out = _AHEAD(raw, *given)
    width, (heads, kv_heads) = given[2].shape[1], given[4:6]
    columns = slice(heads * width, (heads + kv_heads) * width)
    out[:, columns.stop :] = raw[:, columns] if raw.shape[1] == columns.stop else raw[:, columns.stop :]
    return out


def _values_back_as_they_are(dq: Tensor, dk: Tensor, dv: Tensor, *given: Any) -> Any:
    keyed = given[0].shape[1] == (dq.shape[1] + dk.shape[1]) * dq.shape[2]
    return _BACK(dq, dk, dv, *given[:-1], keyed)


def _without_values(dq: Tensor, dk: Tensor, dv: Tensor, *given: Any) -> Any:
    return _BACK(dq, dk, torch.zeros_like(dv), *given)


_AHEAD, _BACK = reference.norm_rope, reference.norm_rope_backward
FAULTS: dict[str, tuple[str, Any]] = {
    "values are not normed": ("norm_rope", _values_as_they_are),
    "gradients of values pass their norm by": ("norm_rope_backward", _values_back_as_they_are),
    "gradients of values do not reach keys": ("norm_rope_backward", _without_values),
}


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attribute, wrong = FAULTS[fault]
    made, plain = pair("lora", "input", attention_dropout=0.0)
    for block in fused_blocks(made):
        block.spec.ops = replace(block.spec.ops, **{attribute: wrong})
    with pytest.raises(AssertionError):
        assert_trains_alike(made, plain, rows_of(NAME, "one row"), 1)
