"""Norms and positions of heads at once: the reference against Hugging Face and autograd, the kernels against
the reference in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as turn_twins
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb as gemma4_turned
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from petune.kernels import reference
from petune.kernels.triton import norm, norm_rope, rope
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

HEADS = (3, 2, 2)  # of queries, keys and values
EPS = 1e-6
# rows, positions, width of a head
SHAPES = [(1, 1, 16), (3, 3, 64), (66, 22, 128), (130, 65, 32), (20, 10, 256), (5, 1, 2)]
each_shape = pytest.mark.parametrize(("rows", "positions", "width"), SHAPES)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
# RMSNorm of halves, and Command R+'s: LayerNorm with weights for each head, of columns side by side
each_norm = pytest.mark.parametrize("layer", [False, True])


def tables(positions: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, width], both halves alike."""
    angles = torch.arange(positions)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], -1).to(DEVICE)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def operands(
    rows: int, positions: int, width: int, dtype: torch.dtype, strided: bool = False, layer: bool = False
) -> dict[str, Any]:
    """What the way ahead is given, by name."""
    cos, sin = tables(positions, width, dtype)
    weights = tuple(matrix(heads, width, dtype, 4 + at) + 1 for at, heads in enumerate(HEADS[:2]))
    weights = weights if layer else tuple(weight[0] for weight in weights)
    raw = matrix(rows, sum(HEADS) * width, dtype, 3, strided)
    return {"raw": raw, "weights": weights, "eps": EPS, "cos": cos, "sin": sin}


def gradients(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """dq, dk, dv [rows, heads, width], dense."""
    return [matrix(rows, heads * width, dtype, heads).reshape(rows, heads, width) for heads in HEADS]


def ahead(form: Any, given: dict[str, Any]) -> Tensor:
    found: Tensor = form.norm_rope(*given.values(), *HEADS[:2], False, *(given["weights"][0].dim() > 1,) * 2)
    return found


def back(
    form: Any, grads: list[Tensor], given: dict[str, Any], weight_grad: bool = True
) -> tuple[Tensor, ...]:
    how = weight_grad, False, *(given["weights"][0].dim() > 1,) * 2
    found: tuple[Tensor, ...] = form.norm_rope_backward(*grads, *given.values(), *how)
    return found


def exact(given: dict[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    return {name: wider(value) for name, value in given.items()}


# ------------------------------------------------------------------ the reference


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_reference_norms_and_turns_as_hugging_face_does(dtype: torch.dtype) -> None:
    batch, positions, width = 2, 5, 8
    given = operands(batch * positions, positions, width, dtype)
    config = Qwen3Config(head_dim=width)
    norms = [Qwen3RMSNorm(width, config.rms_norm_eps).to(DEVICE, dtype) for _ in range(2)]
    for module, weight in zip(norms, given["weights"], strict=True):
        # theirs rounds before it scales
        module.weight.data = weight if dtype == torch.float64 else torch.ones_like(weight)
    given["weights"] = tuple(module.weight.data for module in norms)
    q, k, v = given["raw"].view(batch, positions, -1, width).split(HEADS, 2)
    q, k = (module(part).transpose(1, 2) for module, part in zip(norms, (q, k), strict=True))
    turned = torch.cat(
        [*apply_rotary_pos_emb(q, k, given["cos"][None], given["sin"][None]), v.transpose(1, 2)], 1
    )
    # they norm in float32 at the most, and turn in bfloat16
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float64 else {"rtol": 2**-6, "atol": 2**-7}
    torch.testing.assert_close(
        ahead(reference, given), turned.transpose(1, 2).flatten(2).flatten(0, 1), **tolerance
    )


def test_the_reference_norms_each_head_and_turns_as_command_r_plus_does() -> None:
    given = operands(10, 5, 8, torch.float32, layer=True)
    cos, sin = (given[name][:, :4].repeat_interleave(2, 1)[None] for name in ("cos", "sin"))
    norms = [CohereLayerNorm((heads, 8), EPS).to(DEVICE) for heads in HEADS[:2]]
    for module, weight in zip(norms, given["weights"], strict=True):
        module.weight.data = weight
    q, k, v = given["raw"].view(2, 5, -1, 8).split(HEADS, 2)
    q, k = (module(part).transpose(1, 2) for module, part in zip(norms, (q, k), strict=True))
    turned = torch.cat([*turn_twins(q, k, cos, sin), v.transpose(1, 2)], 1).transpose(1, 2)
    torch.testing.assert_close(ahead(reference, given), turned.flatten(2).flatten(0, 1))


@each_norm
def test_the_references_backward_is_autograds(layer: bool) -> None:
    given = operands(6, 3, 8, torch.float64, layer=layer)
    grads = gradients(6, 8, torch.float64)
    inputs = [given["raw"].requires_grad_(), *(weight.requires_grad_() for weight in given["weights"])]
    expected = torch.autograd.grad(
        ahead(reference, given), inputs, torch.cat([grad.flatten(1) for grad in grads], 1)
    )
    for found, own in zip(back(reference, grads, given), expected, strict=True):
        torch.testing.assert_close(found, own)


# ------------------------------------------------------------------ values that are normed too


def of_values(given: dict[str, Any], keyed: bool) -> dict[str, Any]:
    """What is given where values are made of normed keys, or of their own product."""
    width = given["cos"].shape[1]
    return given | {"raw": given["raw"][:, : sum(HEADS[:2]) * width]} if keyed else given


def both_ways(form: Any, grads: list[Tensor], given: dict[str, Any]) -> tuple[Tensor, ...]:
    """q | k | v with normed values, and the gradients."""
    out = form.norm_rope(*given.values(), *HEADS[:2], True)
    return out, *form.norm_rope_backward(*grads, *given.values(), True, True)


@pytest.mark.parametrize("keyed", [False, True])
def test_the_reference_norms_values_as_gemma_4_does(keyed: bool) -> None:
    given, grads = of_values(operands(6, 3, 8, torch.float64), keyed), gradients(6, 8, torch.float64)
    raw = given["raw"].requires_grad_()
    q, k, *v = raw.view(6, -1, 8).split(HEADS[: 3 - keyed], 1)
    cos, sin = (given[name].repeat(2, 1) for name in ("cos", "sin"))
    norms = [Gemma4RMSNorm(8, EPS).to(DEVICE, torch.float64) for _ in range(2)]
    for module, weight in zip(norms, given["weights"], strict=True):
        module.weight.data = weight
    turned = [gemma4_turned(one(part), cos, sin, 1) for one, part in zip(norms, (q, k), strict=True)]
    bare = Gemma4RMSNorm(8, EPS, with_scale=False)(k if keyed else v[0])
    expected = torch.cat([*turned, bare], 1).flatten(1)
    inputs = [raw, *(module.weight for module in norms)]
    wanted = torch.autograd.grad(expected, inputs, torch.cat([grad.flatten(1) for grad in grads], 1))
    given["raw"] = raw.detach()
    for found, own in zip(both_ways(reference, grads, given), (expected, *wanted), strict=True):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-6)  # theirs norms in float32


@each_dtype
@pytest.mark.parametrize("keyed", [False, True])
def test_kernels_that_norm_values_are_the_references(keyed: bool, dtype: torch.dtype) -> None:
    given = of_values(operands(22, 11, 64, dtype, strided=True), keyed)
    grads = gradients(22, 64, dtype)
    exactly = both_ways(reference, [grad.double() for grad in grads], exact(given))
    forms = (both_ways(form, grads, given) for form in (norm_rope, reference))
    for found, same, own in zip(*forms, exactly, strict=True):
        assert_as_good(found, same, own)


# ------------------------------------------------------------------ the kernels


@pytest.mark.crossed
@each_dtype
@each_shape
@each_norm
def test_the_way_ahead_is_the_references(
    layer: bool, rows: int, positions: int, width: int, dtype: torch.dtype
) -> None:
    given = operands(rows, positions, width, dtype, True, layer)
    before = given["raw"].clone()
    found = ahead(norm_rope, given)
    assert_as_good(found, ahead(reference, given), ahead(reference, exact(given)))
    assert found.is_contiguous()
    assert torch.equal(given["raw"], before)


@each_dtype
@pytest.mark.parametrize("width", [32, 128])
def test_the_way_ahead_is_norm_and_rope_one_after_the_other_bit_for_bit(
    width: int, dtype: torch.dtype
) -> None:
    if DEVICE != "cpu":
        pytest.skip("a device sums the squares of other columns first")
    given = operands(12, 6, width, dtype, strided=True)
    out, first = given["raw"].clone(), 0
    for heads, weight in zip(HEADS, given["weights"], strict=False):
        columns = slice(first * width, (first + heads) * width)
        out[:, columns] = norm.rms_norm(given["raw"][:, columns].reshape(-1, width), weight, EPS)[0].view(
            12, -1
        )
        first += heads
    assert torch.equal(ahead(norm_rope, given), rope.rope_(out, given["cos"], given["sin"], first))


@pytest.mark.crossed(1)
@each_dtype
@each_shape
@each_norm
def test_the_way_back_is_the_references(
    layer: bool, rows: int, positions: int, width: int, dtype: torch.dtype
) -> None:
    given = operands(rows, positions, width, dtype, True, layer)
    grads = gradients(rows, width, dtype)
    of_float64 = back(reference, [grad.double() for grad in grads], exact(given))
    for found, same, own in zip(
        back(norm_rope, grads, given), back(reference, grads, given), of_float64, strict=True
    ):
        assert_as_good(found, same, own)
        assert found.is_contiguous()


@each_dtype
def test_weights_and_angles_may_be_in_float32(dtype: torch.dtype) -> None:
    """A weight that an offset was added to is."""
    given = operands(14, 7, 32, dtype)
    given |= {"weights": tuple(weight.float() + 1e-3 for weight in given["weights"])}
    given |= dict(zip(("cos", "sin"), tables(7, 32, torch.float32), strict=True))
    grads = gradients(14, 32, dtype)
    assert_as_good(ahead(norm_rope, given), ahead(reference, given), ahead(reference, exact(given)))
    of_float64 = back(reference, [grad.double() for grad in grads], exact(given))
    for found, same, own in zip(
        back(norm_rope, grads, given), back(reference, grads, given), of_float64, strict=True
    ):
        assert_as_good(found, same, own)


@each_dtype
def test_the_way_back_takes_any_strides_of_rows_and_heads(dtype: torch.dtype) -> None:
    given, parts = operands(13, 13, 32, dtype), gradients(13, 32, dtype)
    moved = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts[:2]]
    moved.append(torch.cat([parts[2], parts[2]], 2)[:, :, :32])
    for one, other in zip(back(norm_rope, moved, given), back(norm_rope, parts, given), strict=True):
        assert torch.equal(one, other)


def test_gradients_of_weights_are_made_only_where_they_are_asked_for() -> None:
    given, grads = operands(40, 40, 32, torch.float32), gradients(40, 32, torch.float32)
    draw, dq, dk = back(norm_rope, grads, given, weight_grad=False)
    assert (dq, dk) == (None, None)
    found = [back(norm_rope, grads, given) for _ in range(2)]
    torch.testing.assert_close(draw, found[0][0])  # another kernel, which may round otherwise
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@each_norm
def test_heads_shared_between_programs_are_each_treated_once(
    layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, grads = operands(13, 13, 64, torch.float32, layer=layer), gradients(13, 64, torch.float32)
    for share in (1, 2, 3):
        monkeypatch.setattr(norm_rope, "shares", lambda walks, steps, places, share=share: share)
        torch.testing.assert_close(ahead(norm_rope, given), ahead(reference, given))
        for found, same in zip(back(norm_rope, grads, given), back(reference, grads, given), strict=True):
            torch.testing.assert_close(found, same)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@each_dtype
def test_values_are_copied_as_they_are(dtype: torch.dtype) -> None:
    given, grads = operands(5, 5, 32, dtype), gradients(5, 32, dtype)
    given["raw"][:, 5 * 32 :] = float("inf")
    grads[2][:] = float("inf")
    assert torch.equal(ahead(norm_rope, given)[:, 5 * 32 :], given["raw"][:, 5 * 32 :])
    draw = back(norm_rope, grads, given)[0]
    assert torch.equal(draw[:, 5 * 32 :], grads[2].flatten(1))
    assert draw[:, : 5 * 32].isfinite().all()


@pytest.mark.parametrize("width", [96, 80, 1024])
def test_other_widths_are_the_references(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_rope, "_norm_rope_kernel", None)
    monkeypatch.setattr(norm_rope, "_norm_rope_backward_kernel", None)
    given, grads = operands(4, 2, width, torch.float32), gradients(4, width, torch.float32)
    assert torch.equal(ahead(norm_rope, given), ahead(reference, given))
    assert torch.equal(back(norm_rope, grads, given)[0], back(reference, grads, given)[0])


@each_norm
@each_dtype
def test_no_rows_give_no_rows(dtype: torch.dtype, layer: bool) -> None:
    given, grads = operands(0, 3, 64, dtype, layer=layer), gradients(0, 64, dtype)
    assert ahead(norm_rope, given).shape == (0, 7 * 64)
    draw, dq, dk = back(norm_rope, grads, given)
    assert draw.shape == (0, 7 * 64)
    for found, weight in zip((dq, dk), given["weights"], strict=True):
        assert torch.equal(found, torch.zeros(weight.shape, device=DEVICE))
