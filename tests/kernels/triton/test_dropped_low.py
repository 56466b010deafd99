"""Low-rank products with dropped inputs: the reference against autograd, the kernels against the reference in
float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels import reference
from petune.kernels.dispatch import triton_ops
from petune.kernels.triton import dropped_low as fused
from petune.rng.dropout import Drop
from tests.kernels.exactness import DEVICE, DTYPES, assert_as_good, matrix, wider

kernels = triton_ops()
P = 0.3
# rows, columns, ranks
SHAPES = [
    (1, 16, [1]),
    (65, 130, [16, 16, 16]),
    (33, 70, [8, 8]),
    (33, 70, [4, 20, 4]),
    (65, 64, [72]),
    (0, 32, [8, 8]),
]
each_shape = pytest.mark.parametrize(("rows", "columns", "ranks"), SHAPES, ids=str)


def operands(rows: int, columns: int, ranks: list[int], dtype: torch.dtype, p: float = P) -> dict[str, Any]:
    """x, dx, ds, a and a draw for each update, all of whose rows are strided."""
    numbers = torch.arange(rows, device=DEVICE) * 2**32 + 5
    return {
        "x": matrix(rows, columns, dtype, 1, True),
        "dx": matrix(rows, columns, dtype, 2, True),
        "ds": matrix(rows, sum(ranks), dtype, 3, True),
        "a": matrix(sum(ranks), columns, dtype, 4, True) / 4,
        "ranks": ranks,
        "hows": [Drop(numbers, -(2**62) + 991 * at, p, 7) for at in range(len(ranks))],
    }


def low(module: Any, given: dict[str, Any]) -> Tensor:
    found: Tensor = module.dropped_low(given["x"], given["a"], given["ranks"], given["hows"])
    return found


def low_backward(module: Any, given: dict[str, Any]) -> Tensor:
    scales = [1.5] * len(given["ranks"])
    found: Tensor = module.dropped_low_backward(
        given["ds"], given["x"], given["ranks"], given["hows"], scales
    )
    return found


def added(module: Any, given: dict[str, Any]) -> Tensor:
    whole = torch.cat([given["dx"], given["dx"]], 1)
    dx = whole[:, : given["dx"].shape[1]]
    found: Tensor = module.add_dropped_low_(dx, given["ds"], given["a"], given["ranks"], given["hows"])
    assert found is dx and torch.equal(whole[:, dx.shape[1] :], given["dx"])
    return found


CALLS = [low, low_backward, added]
each_call = pytest.mark.parametrize("call", CALLS)


def exact(call: Any, given: dict[str, Any]) -> Tensor:
    found: Tensor = call(
        reference,
        {name: wider(value) if isinstance(value, Tensor) else value for name, value in given.items()},
    )
    return found


# ------------------------------------------------------------------ the reference


def test_the_references_gradients_are_autograds() -> None:
    given = operands(5, 7, [2, 3], torch.float64)
    x, a = (given[name].clone().requires_grad_() for name in ("x", "a"))
    pieces = [reference.drop(x, how) @ own.T for own, how in zip(a.split([2, 3]), given["hows"], strict=True)]
    expected = torch.autograd.grad(torch.cat(pieces, 1), (x, a), given["ds"])
    torch.testing.assert_close(low(reference, given), torch.cat(pieces, 1).detach())
    torch.testing.assert_close(added(reference, given), given["dx"] + expected[0])
    torch.testing.assert_close(low_backward(reference, given), 1.5 * expected[1])


@each_call
def test_what_does_not_drop_is_a_plain_product(call: Any) -> None:
    given = operands(5, 7, [2, 3], torch.float64)
    torch.testing.assert_close(
        call(reference, given | {"hows": [None, None]}),
        call(reference, operands(5, 7, [2, 3], torch.float64, 0.0)),
    )


# ------------------------------------------------------------------ the kernels


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@each_shape
@each_call
def test_the_kernels_are_the_reference(
    call: Any, rows: int, columns: int, ranks: list[int], dtype: torch.dtype
) -> None:
    given = operands(rows, columns, ranks, dtype)
    if call is added and len(set(ranks)) > 1:  # several launches, which round each
        dtype = torch.float32
        given = operands(rows, columns, ranks, dtype)
    assert_as_good(call(kernels, given), call(reference, given), exact(call, given))


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.5, 1.0])
@each_call
def test_every_probability_drops_the_elements_that_the_reference_drops(call: Any, p: float) -> None:
    given = operands(65, 40, [16, 16], torch.float32, p)
    assert_as_good(call(kernels, given), call(reference, given), exact(call, given))


@each_call
def test_an_update_that_does_not_drop_goes_beside_one_that_does(call: Any) -> None:
    given = operands(33, 40, [16, 16, 16], torch.float32)
    given["hows"][1] = None
    assert_as_good(call(kernels, given), call(reference, given), exact(call, given))


@each_call
def test_bases_on_the_device_are_read_there(call: Any) -> None:
    given = operands(33, 40, [16, 16, 16], torch.bfloat16)
    there = [how._replace(base=torch.tensor([how.base], device=DEVICE)) for how in given["hows"]]
    assert torch.equal(call(kernels, given), call(kernels, given | {"hows": there}))


@each_call
def test_rows_of_a_tile_drop_what_they_drop_in_the_whole(call: Any) -> None:
    given = operands(65, 40, [16, 16], torch.float32)
    tile = {name: given[name][20:50] for name in ("x", "dx", "ds")}
    tile["hows"] = [how._replace(numbers=how.numbers[20:50]) for how in given["hows"]]
    if call is low_backward:
        given["ds"] = given["ds"].clone()
        given["ds"][:20], given["ds"][50:] = 0, 0
        torch.testing.assert_close(call(kernels, given | tile), call(kernels, given))
    else:
        torch.testing.assert_close(call(kernels, given | tile), call(kernels, given)[20:50])


@each_call
def test_walks_shared_between_programs_add_up_and_give_the_same_bits(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = operands(130, 130, [16, 16], torch.bfloat16)  # three tiles each way
    plain, true = call(reference, given), exact(call, given)
    for split in (1, 2, 3):
        monkeypatch.setattr(fused, "shares", lambda walks, steps, places, split=split: split)
        found = call(kernels, given)
        assert torch.equal(found, call(kernels, given))
        assert_as_good(found, plain, true)


def test_updates_that_drop_alike_are_one_launch() -> None:
    given = operands(4, 8, [16] * 3, torch.float32)
    hows = given["hows"]
    assert [one.ranks for one in fused._launches([16] * 3, hows)] == [slice(0, 48)]
    assert [one.ranks for one in fused._launches([16] * 3, [*hows[:2], hows[2]._replace(p=0.5)])] == [
        slice(0, 32),
        slice(32, 48),
    ]
    assert [one.ranks for one in fused._launches([16, 8, 8], hows)] == [slice(0, 16), slice(16, 32)]
    assert [one.ranks for one in fused._launches([16] * 4, [*hows, hows[0]])] == [slice(0, 48), slice(48, 64)]
    assert [one.ranks for one in fused._launches([100], hows[:1])] == [slice(0, 100)]
    assert [one.ranks for one in fused._launches([101], hows[:1])] == [slice(0, 50), slice(50, 101)]
    scaled = fused._launches([16] * 3, hows, [1.0, 1.0, 2.0])
    assert [one.ranks for one in scaled] == [slice(0, 32), slice(32, 48)]
