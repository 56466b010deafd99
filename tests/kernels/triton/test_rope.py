"""Rotary positions: the reference against Hugging Face and autograd, the kernels against the reference in
float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as turn_neighbours
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

from petune.kernels import reference
from petune.kernels.reference import Scale
from petune.kernels.triton import rope
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

HEADS = (3, 2, 2)  # of queries, keys and values
# rows, positions, width of a head
SHAPES = [(1, 1, 16), (3, 3, 64), (66, 22, 128), (65, 65, 80), (130, 65, 96), (4, 2, 256), (3, 1, 18)]
each_shape = pytest.mark.parametrize(("rows", "positions", "width"), SHAPES)
# which columns are turned together, and the share of a head that is turned
PAIRS = [(False, 1.0), (True, 1.0), (False, 0.75), (True, 0.5)]
each_pairs = pytest.mark.parametrize(("neighbours", "share"), PAIRS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def tables(positions: int, width: int, dtype: torch.dtype, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, that share of the width], both halves alike."""
    width = 2 * int(width * share / 2)
    angles = torch.arange(positions)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.cat([angles, angles], -1).to(DEVICE)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def gradients(rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """dq, dk, dv [rows, heads, width], dense."""
    return [matrix(rows, heads * width, dtype, heads).reshape(rows, heads, width) for heads in HEADS]


# ------------------------------------------------------------------ the reference


@each_pairs
def test_the_reference_turns_as_hugging_face_does(neighbours: bool, share: float) -> None:
    batch, positions, width = 2, 5, 16
    qkv = matrix(batch * positions, sum(HEADS) * width, torch.float64, 3)
    cos, sin = (table.double() for table in tables(positions, width, torch.float64, share))
    q, k, v = qkv.view(batch, positions, -1, width).transpose(1, 2).split(HEADS, 1)
    turn = turn_neighbours if neighbours else apply_rotary_pos_emb
    turned = torch.cat([*turn(q, k, cos[None], sin[None]), v], 1).transpose(1, 2).flatten(2).flatten(0, 1)
    how = sum(HEADS[:2]), neighbours, width
    torch.testing.assert_close(reference.rope_(qkv.clone(), cos, sin, *how), turned)


@each_pairs
def test_the_references_backward_is_autograds(neighbours: bool, share: float) -> None:
    cos, sin = tables(3, 8, torch.float64, share)
    qkv = matrix(6, sum(HEADS) * 8, torch.float64, 3).requires_grad_()
    parts = gradients(6, 8, torch.float64)
    turned = reference.rope_(qkv.clone(), cos, sin, sum(HEADS[:2]), neighbours, 8)
    (dqkv,) = torch.autograd.grad(turned, qkv, torch.cat([part.flatten(1) for part in parts], 1))
    torch.testing.assert_close(reference.rope_backward(*parts, cos, sin, neighbours), dqkv)


@each_pairs
def test_the_references_way_back_through_a_scale_is_autograds(neighbours: bool, share: float) -> None:
    """Of c x + o, turned by angles that carry a factor of attention."""
    cos, sin = (1.3 * table for table in tables(3, 8, torch.float64, share))
    x, columns, own = leaves = [
        matrix(rows, sum(HEADS) * 8, torch.float64, rows).squeeze(0).requires_grad_() for rows in (6, 1, 1)
    ]
    parts = gradients(6, 8, torch.float64)
    turned = reference.rope_((columns * x + own).clone(), cos, sin, sum(HEADS[:2]), neighbours, 8)
    wanted = torch.autograd.grad(turned, leaves, torch.cat([part.flatten(1) for part in parts], 1))
    with torch.no_grad():
        found, sums = reference.rope_unscale(*parts, turned, cos, sin, Scale(columns, own), neighbours)
        for one, other in zip((found, sums[0] / columns, sums[1]), wanted, strict=True):
            torch.testing.assert_close(one, other)


def test_the_reference_passes_gradcheck() -> None:
    cos, sin = tables(2, 4, torch.float64)
    assert torch.autograd.gradcheck(
        lambda qkv: reference.rope_(qkv.clone(), cos, sin, 2),
        matrix(4, 12, torch.float64, 3).requires_grad_(),
    )


# ------------------------------------------------------------------ the kernels


@pytest.mark.crossed
@each_dtype
@each_shape
@each_pairs
def test_turning_is_the_references(
    neighbours: bool, share: float, rows: int, positions: int, width: int, dtype: torch.dtype
) -> None:
    cos, sin = tables(positions, width, dtype, share)
    qkv = matrix(rows, sum(HEADS) * width, dtype, 3)
    how = sum(HEADS[:2]), neighbours, width
    found, same = qkv.clone(), reference.rope_(qkv.clone(), cos, sin, *how)
    assert rope.rope_(found, cos, sin, *how) is found
    assert_as_good(found, same, reference.rope_(*wider((qkv.clone(), cos, sin)), *how))


@each_dtype
def test_turning_is_the_references_where_rows_are_strided_and_angles_in_float32(dtype: torch.dtype) -> None:
    cos, sin = tables(11, 64, torch.float32)
    sin = torch.cat([sin, sin], 1)[:, :64]
    row = matrix(33, sum(HEADS) * 64 + 24, dtype, 3)
    qkv, beside = row[:, :-24], row[:, -24:].clone()
    same = reference.rope_(qkv.clone(), cos, sin, 5)
    exact = reference.rope_(*wider((qkv.clone(), cos, sin, 5)))  # type: ignore[misc]
    assert_as_good(rope.rope_(qkv, cos, sin, 5), same, exact)
    assert torch.equal(row[:, -24:], beside)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
@each_dtype
def test_values_are_not_touched(dtype: torch.dtype) -> None:
    cos, sin = tables(5, 32, dtype)
    qkv = matrix(5, 7 * 32, dtype, 3)
    qkv[:, 5 * 32 :] = float("inf")  # times a sine of zero it would be no number
    values = qkv[:, 5 * 32 :].clone()
    assert torch.equal(rope.rope_(qkv.clone(), cos, sin, 5)[:, 5 * 32 :], values)
    assert torch.equal(rope.rope_(qkv.clone(), cos, sin, 0), qkv)


@pytest.mark.crossed
@each_dtype
@each_shape
@each_pairs
def test_turning_back_is_the_references(
    neighbours: bool, share: float, rows: int, positions: int, width: int, dtype: torch.dtype
) -> None:
    cos, sin = tables(positions, width, dtype, share)
    parts = gradients(rows, width, dtype)
    found = rope.rope_backward(*parts, cos, sin, neighbours)
    assert_as_good(
        found,
        reference.rope_backward(*parts, cos, sin, neighbours),
        reference.rope_backward(*wider((*parts, cos, sin)), neighbours),
    )
    assert found.is_contiguous()


@pytest.mark.parametrize("share", [1.0, 0.75])
@each_dtype
def test_turning_back_takes_any_strides_of_rows_and_heads(dtype: torch.dtype, share: float) -> None:
    cos, sin = tables(13, 32, torch.float32, share)
    parts = gradients(13, 32, dtype)
    moved = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in parts[:2]]
    moved.append(torch.cat([parts[2], parts[2]], 2)[:, :, :32])
    assert all(one.stride() != other.stride() for one, other in zip(moved, parts, strict=True))
    assert torch.equal(rope.rope_backward(*moved, cos, sin), rope.rope_backward(*parts, cos, sin))


def test_heads_shared_between_programs_are_each_turned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cos, sin = tables(13, 64, torch.float32, 0.75)
    qkv, parts = matrix(13, 7 * 64, torch.float32, 3), gradients(13, 64, torch.float32)
    for share in (1, 2, 3):
        monkeypatch.setattr(rope, "shares", lambda walks, steps, places, share=share: share)
        found = rope.rope_(qkv.clone(), cos, sin, 5, width=64)
        torch.testing.assert_close(found, reference.rope_(qkv.clone(), cos, sin, 5, width=64))
        torch.testing.assert_close(
            rope.rope_backward(*parts, cos, sin), reference.rope_backward(*parts, cos, sin)
        )


@pytest.mark.crossed(1)
@each_dtype
@each_shape
@each_pairs
@pytest.mark.parametrize("apart", [False, True])
def test_the_way_back_through_a_scale_is_the_references(
    rows: int, positions: int, width: int, neighbours: bool, share: float, apart: bool, dtype: torch.dtype
) -> None:
    cos, sin = tables(positions, width, dtype, share)
    qkv, (columns, own) = (
        matrix(rows, sum(HEADS) * width, dtype, 3, strided=True),
        matrix(2, sum(HEADS) * width, torch.float32, 4),
    )
    given = *gradients(rows, width, dtype), qkv, cos, sin
    scale = Scale(columns, own if apart else None)
    cos[-1], sin[-1] = 0, 0  # as of a spare row
    exact = reference.rope_unscale(*wider(given), Scale(*wider(tuple(scale))), neighbours)  # type: ignore[misc]
    how = scale, neighbours
    pairs = zip(rope.rope_unscale(*given, *how), reference.rope_unscale(*given, *how), strict=True)
    for (found, same), true in zip(pairs, exact, strict=True):
        assert_as_good(found, same, true)


def test_turning_back_undoes_turning() -> None:
    cos, sin = tables(9, 96, torch.float32)
    qkv = matrix(18, 7 * 96, torch.float32, 3)
    turned = rope.rope_(qkv.clone(), cos, sin, 5)
    assert not torch.equal(turned, qkv)
    q, k, v = turned.view(18, 7, 96).split(HEADS, 1)
    torch.testing.assert_close(rope.rope_backward(q, k, v, cos, sin), qkv)


@each_dtype
def test_no_rows_give_no_rows(dtype: torch.dtype) -> None:
    cos, sin = tables(3, 64, dtype)
    qkv = matrix(0, 7 * 64, dtype, 3)
    assert rope.rope_(qkv, cos, sin, 5) is qkv
    assert rope.rope_backward(*gradients(0, 64, dtype), cos, sin).shape == (0, 7 * 64)
    scale = Scale(torch.ones(7 * 64, device=DEVICE), None)
    out, sums = rope.rope_unscale(*gradients(0, 64, dtype), qkv, cos, sin, scale)
    assert out.shape == (0, 7 * 64) and torch.equal(sums, torch.zeros(1, 7 * 64, device=DEVICE))
