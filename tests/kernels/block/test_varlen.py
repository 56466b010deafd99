"""Which tokens of a batch are kept, and their way into a stack and back."""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import Tensor

from petune.kernels.block.varlen import Segments, from_mask, from_positions, overlapping, pack, unpack
from petune.rng.context import Running, bound_to
from petune.rng.dropout import drop

MASKS = {
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    "short": [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]],
    "long": [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]],
}
PACKED = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 2]]


# ------------------------------------------------------------------ what is kept


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("side", MASKS)
def test_a_mask_keeps_its_tokens_row_by_row(side: str, dtype: torch.dtype) -> None:
    mask = torch.tensor(MASKS[side]).to(dtype)
    found = from_mask(mask)
    assert isinstance(found, Segments) and found.places is not None
    assert found.places.tolist() == mask.flatten().nonzero().squeeze(1).tolist()
    lengths = mask.long().sum(1)
    assert found.starts.dtype == torch.int32 and found.starts.is_contiguous() and found.places.is_contiguous()
    assert found.starts.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert (found.lengths, found.shape) == (tuple(lengths.tolist()), (3, 6))
    assert (found.longest, found.total) == (int(lengths.max()), int(lengths.sum()))
    assert found.tokens.tolist() == mask.nonzero()[:, 1].tolist()


SCATTERED = {
    "before": [[0, 0, 1], [1, 1, 1]],
    "between": [[1, 0, 1], [1, 1, 1]],
    "a row of padding alone": [[0, 0, 0], [1, 1, 0]],
    "nothing but padding": [[0, 0, 0], [0, 0, 0]],
}


@pytest.mark.parametrize("where", SCATTERED)
def test_padding_that_is_not_behind_a_row_is_not_left_out(where: str) -> None:
    found = from_mask(torch.tensor(SCATTERED[where]))
    assert isinstance(found, str) and "before or between tokens" in found


def test_padding_that_is_read_all_the_same_is_not_left_out() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    read = torch.tensor([[True, True, False], [True, True, True]])
    assert isinstance(from_mask(mask, read), Segments)
    read[0, 2] = True
    found = from_mask(mask, read)
    assert isinstance(found, str) and "a label stands on it" in found


def test_where_nothing_is_gained_there_are_no_segments() -> None:
    assert from_mask(torch.ones(3, 4)) is None
    assert from_mask(torch.ones(0, 4)) is None
    assert from_positions(torch.arange(5).expand(3, -1)) is None
    assert from_positions(torch.arange(5).expand(3, -1) + torch.tensor([[0], [7], [2]])) is None


def test_positions_that_do_not_go_on_begin_a_sample() -> None:
    found = from_positions(torch.tensor(PACKED))
    assert found is not None and found.places is None
    assert (found.lengths, found.longest, found.total) == ((4, 2, 6, 1, 2, 3), 6, 18)
    assert found.starts.dtype == torch.int32 and found.starts.tolist() == [0, 4, 6, 12, 13, 15, 18]
    assert found.tokens.tolist() == [*range(6)] * 3
    jumping = from_positions(torch.tensor([[3, 4, 9, 10, 2]]))
    assert jumping is not None and jumping.lengths == (2, 2, 1)


def test_segments_of_one_length_are_found_together() -> None:
    found = from_positions(torch.tensor([[0, 1, 0, 0, 1, 0, 1, 2]]))
    assert found is not None
    assert [places.tolist() for places in found.by_length] == [[[0, 1], [3, 4]], [[2]], [[5, 6, 7]]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 9), (0, 4), (4, 9), (2, 3), (3, 7), (8, 9), (5, 5)])
def test_a_stretch_of_queries_keeps_the_segments_that_it_overlaps(first: int, end: int, causal: bool) -> None:
    whole = from_mask(torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1]]))
    assert isinstance(whole, Segments) and whole.places is not None
    numbers = [0] * 3 + [1] * 2 + [2] * 4  # of the segments, token by token
    own, keys, (low, high) = overlapping(whole, whole, first, end, causal)
    read = [at for at, one in enumerate(numbers) if one in numbers[first:end] and not (causal and at >= end)]
    assert [*range(low, high)] == read
    for part, places in ((own, range(first, end)), (keys, read)):
        lengths = Counter(numbers[at] for at in places)
        assert part.lengths == tuple(lengths.values()) and part.shape == whole.shape
        assert part.starts.diff().tolist() == list(part.lengths) and part.starts.dtype == torch.int32
        assert part.tokens.tolist() == [whole.tokens[at] for at in places]


# ------------------------------------------------------------------ across the edge


@pytest.mark.parametrize("side", MASKS)
def test_what_is_packed_comes_back_in_its_place(side: str) -> None:
    segments, x = from_mask(torch.tensor(MASKS[side])), torch.randn(3, 6, 5)
    assert isinstance(segments, Segments)
    packed = pack(x, segments)
    assert torch.equal(packed[0], x[torch.tensor(MASKS[side]).bool()])
    assert torch.equal(unpack(packed, segments), x * torch.tensor(MASKS[side])[..., None])


def test_packed_samples_are_only_viewed() -> None:
    segments, x = from_positions(torch.tensor(PACKED)), torch.randn(3, 6, 5)
    assert isinstance(segments, Segments)
    assert pack(x, segments).shape == (1, 18, 5) and pack(x, segments).data_ptr() == x.data_ptr()
    assert torch.equal(unpack(pack(x, segments), segments), x)


def test_one_row_for_all_gives_each_token_its_own() -> None:
    segments, x = from_mask(torch.tensor(MASKS["short"])), torch.randn(1, 6, 5)
    assert isinstance(segments, Segments)
    assert torch.equal(pack(x, segments), pack(x.expand(3, -1, -1), segments))


def test_gradients_cross_both_ways_and_twice() -> None:
    segments = from_mask(torch.tensor(MASKS["long"]))
    assert isinstance(segments, Segments)
    whole = torch.randn(3, 6, 2, dtype=torch.float64, requires_grad=True)
    kept = torch.randn(1, segments.total, 2, dtype=torch.float64, requires_grad=True)
    for across, x in ((pack, whole), (unpack, kept)):
        assert torch.autograd.gradcheck(lambda x, across=across: across(x, segments), x)
        assert torch.autograd.gradgradcheck(lambda x, across=across: across(x, segments), x)


def test_dropout_by_index_of_kept_tokens_is_that_of_the_padded_batch() -> None:
    segments = from_mask(torch.tensor(MASKS["long"]))
    assert isinstance(segments, Segments)
    numbers, ones = torch.tensor([4, 9, 2]), torch.ones(3, 6, 32)

    def dropped(x: Tensor, rows: Tensor, token: int) -> Tensor:
        with bound_to(Running(rows=rows, key=5, site="encoder.0", token=token)):
            return drop(x, 0.5)

    found = [
        dropped(torch.ones(1, 1, 32), numbers[row : row + 1], token)
        for row, token in torch.tensor(MASKS["long"]).nonzero().tolist()
    ]
    assert torch.equal(pack(dropped(ones, numbers, 0), segments), torch.cat(found, 1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_a_gpu_once() -> None:
    mask, positions = torch.tensor(MASKS["short"], device="cuda"), torch.tensor(PACKED, device="cuda")
    for build, x in ((from_mask, mask), (from_positions, positions)):
        build(x)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                found = build(x)
                assert isinstance(found, Segments)
                unpack(pack(torch.randn(3, 6, 4, device="cuda"), found), found)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len([one for one in waits if "synchroniz" in str(one.message)]) == 1
        assert torch.equal(found.starts.cpu(), build(x.cpu()).starts)  # type: ignore[union-attr]
