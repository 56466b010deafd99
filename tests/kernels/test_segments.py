"""Padding left out: kept tokens get what they would have got in the padded batch, and nothing outside the stack notices."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from petune.dropout import drop
from petune.kernels import attending
from petune.kernels.attending import How
from petune.kernels.segments import NO_MASK, FindSegments, Segments, Unpadded, from_mask, from_positions, pack, unpack
from petune.methods.configs import SideConfig
from petune.methods.side import apply as climb
from petune.models import family_of
from petune.running import Running, bound, bound_to, running
from petune.stack import own_stacks
from tests.methods.zoo import VOCAB, assert_same_gradients, gradients, tiny

MASKS = {
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0]],
}
PACKED = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 2]]


# ------------------------------------------------------------------ what is kept


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("side", MASKS)
def test_a_mask_keeps_its_tokens_row_by_row(side: str, dtype: torch.dtype) -> None:
    mask = torch.tensor(MASKS[side]).to(dtype)
    found = from_mask(mask)
    assert found is not None and found.places is not None
    assert found.places.tolist() == mask.flatten().nonzero().squeeze(1).tolist()
    lengths = mask.long().sum(1)
    assert found.starts.dtype == torch.int32 and found.starts.is_contiguous() and found.places.is_contiguous()
    assert found.starts.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert (found.lengths, found.shape) == (tuple(lengths.tolist()), (3, 6))
    assert (found.longest, found.total) == (int(lengths.max()), int(lengths.sum()))
    assert mask[found.rows, found.tokens].all() and (found.rows * 6 + found.tokens).tolist() == found.places.tolist()


def test_rows_of_padding_alone_have_no_segment() -> None:
    found = from_mask(torch.tensor([[0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 0]]))
    assert found is not None
    assert (found.lengths, found.starts.tolist(), found.rows.tolist(), found.tokens.tolist()) == ((2, 1), [0, 2, 3], [1, 1, 3], [0, 1, 1])
    nothing = from_mask(torch.zeros(2, 3))
    assert nothing is not None and nothing.starts.tolist() == [0] and (nothing.total, nothing.longest) == (0, 0)


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
    assert found.rows.tolist() == [0] * 6 + [1] * 6 + [2] * 6 and found.tokens.tolist() == [*range(6)] * 3
    jumping = from_positions(torch.tensor([[3, 4, 9, 10, 2]]))
    assert jumping is not None and jumping.lengths == (2, 2, 1)


def test_segments_of_one_length_are_found_together() -> None:
    found = from_positions(torch.tensor([[0, 1, 0, 0, 1, 0, 1, 2]]))
    assert found is not None
    assert [places.tolist() for places in found.by_length] == [[[0, 1], [3, 4]], [[2]], [[5, 6, 7]]]


# ------------------------------------------------------------------ across the edge


@pytest.mark.parametrize("side", MASKS)
def test_what_is_packed_comes_back_in_its_place(side: str) -> None:
    segments, x = from_mask(torch.tensor(MASKS[side])), torch.randn(3, 6, 5)
    assert segments is not None
    packed = pack(x, segments)
    assert torch.equal(packed[0], x[segments.rows, segments.tokens])
    assert torch.equal(unpack(packed, segments), x * torch.tensor(MASKS[side])[..., None])


def test_packed_samples_are_only_viewed() -> None:
    segments, x = from_positions(torch.tensor(PACKED)), torch.randn(3, 6, 5)
    assert segments is not None
    assert pack(x, segments).shape == (1, 18, 5) and pack(x, segments).data_ptr() == x.data_ptr()
    assert torch.equal(unpack(pack(x, segments), segments), x)


def test_one_row_for_all_gives_each_token_its_own() -> None:
    segments, x = from_mask(torch.tensor(MASKS["left"])), torch.randn(1, 6, 5)
    assert segments is not None
    assert torch.equal(pack(x, segments), pack(x.expand(3, -1, -1), segments))


def test_gradients_cross_both_ways_and_twice() -> None:
    segments = from_mask(torch.tensor(MASKS["holes"]))
    assert segments is not None
    whole = torch.randn(3, 6, 2, dtype=torch.float64, requires_grad=True)
    kept = torch.randn(1, segments.total, 2, dtype=torch.float64, requires_grad=True)
    for across, x in ((pack, whole), (unpack, kept)):
        assert torch.autograd.gradcheck(lambda x, across=across: across(x, segments), x)
        assert torch.autograd.gradgradcheck(lambda x, across=across: across(x, segments), x)


def test_dropout_by_index_of_kept_tokens_is_that_of_the_padded_batch() -> None:
    segments = from_mask(torch.tensor(MASKS["holes"]))
    assert segments is not None
    numbers, ones = torch.tensor([4, 9, 2]), torch.ones(3, 6, 32)

    def dropped(x: Tensor, rows: Tensor, token: int) -> Tensor:
        with bound_to(Running(rows=rows, key=5, site="encoder.0", token=token)):
            return drop(x, 0.5)

    found = [
        dropped(torch.ones(1, 1, 32), numbers[row : row + 1], int(token)) for row, token in zip(segments.rows, segments.tokens, strict=True)
    ]
    assert torch.equal(pack(dropped(ones, numbers, 0), segments), torch.cat(found, 1))


# ------------------------------------------------------------------ whole models


class Attend(torch.autograd.Function):
    """attending's two functions as one node, as a fused block strings them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: How) -> Tensor:
        out, ctx.kept = attending.forward(q, k, v, how)
        ctx.how = how
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out = ctx.saved_tensors
        return *attending.backward(dout, q, k, v, out, ctx.kept, ctx.how), None


def within_segments(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any) -> tuple[Tensor, None]:
    """Hugging Face's attention function as a fused block would compute it."""
    segments: Segments | None = running().segments
    assert segments is None or (mask is None and query.shape[0] == 1 and query.shape[2] == segments.total)
    how = How(bool(getattr(module, "is_causal", True)), kw["scaling"], len(query), segments, mask)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    return Attend.apply(*flat, how).unflatten(0, (query.shape[0], -1)), None  # type: ignore[no-untyped-call]


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    AttentionInterface.register("within_segments", within_segments)
    AttentionMaskInterface.register("within_segments", sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop("within_segments")
    AttentionMaskInterface._global_mapping.pop("within_segments")


def both(name: str, side: bool = False, **changes: Any) -> tuple[Any, Any]:
    """The model as it is, and one whose stack leaves padding out; float64."""
    models = [tiny(name, attn_implementation=way, **changes).double() for way in ("sdpa", "within_segments")]
    for model in models if side else []:
        torch.manual_seed(3)
        climb(model, family_of(model), SideConfig(reduction=4, dropout=0.0), ())
        for parameter in model.parameters():
            parameter.data = parameter.data.double()
    plain, model = models
    if not side:
        model.load_state_dict(plain.state_dict())
    unpad(model)
    return plain, model


def unpad(model: Any) -> None:
    family = family_of(model)
    assert family is not None
    (stack,) = own_stacks(model, family).values()
    stack.edges = Unpadded()
    FindSegments(model.base_model, stack.rule.causal).register(model.base_model)


def inputs(side: str, **more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(1)
    mask = torch.tensor(MASKS[side])
    return {"input_ids": torch.randint(3, VOCAB, (3, 6)), "attention_mask": mask, **more}


def tokens_in_stack(model: Any) -> list[tuple[int, ...]]:
    """Shapes that the first block sees from now on."""
    seen: list[tuple[int, ...]] = []
    block = next(iter(own_stacks(model, family_of(model)).values()))[0]  # type: ignore[arg-type]
    block.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    return seen


@pytest.mark.parametrize("side", MASKS)
def test_bert_computes_on_kept_tokens_what_it_computed_in_the_padded_batch(side: str) -> None:
    plain, model = both("bert-tokens")
    batch = inputs(side)
    seen, kept = tokens_in_stack(model), batch["attention_mask"].bool()
    expected, found = plain.bert(**batch).last_hidden_state, model.bert(**batch).last_hidden_state
    assert seen == [(1, int(kept.sum()), 64)]
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-12, atol=1e-12)
    assert not found[~kept].any()
    batch["labels"] = torch.where(kept, batch["input_ids"] % 3, -100)
    (loss, grads), (expected_loss, expected_grads) = gradients(model, batch), gradients(plain, batch)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    assert_same_gradients(grads, expected_grads, 1e-12)


def test_bert_pools_the_first_token_of_every_row() -> None:
    plain, model = both("bert-classify")
    batch = inputs("right", labels=torch.tensor([0, 2, 1]), token_type_ids=torch.tensor([[0, 0, 1, 1, 1, 1]] * 3))
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], 1e-12)


@pytest.mark.parametrize("name", ["llama-causal", "qwen3-causal", "mistral-causal"])
@pytest.mark.parametrize("side", MASKS)
def test_a_decoder_computes_on_kept_tokens_what_it_computed_in_the_padded_batch(name: str, side: str) -> None:
    plain, model = both(name)
    batch: dict[str, Any] = inputs(side) | {"use_cache": False}
    seen, kept = tokens_in_stack(model), batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12)
    assert seen == [(1, int(kept.sum()), 64)]
    batch["position_ids"] = (kept.long().cumsum(1) - 1).clamp(min=0)  # each row has positions of its own
    torch.testing.assert_close(model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12)
    batch["labels"] = torch.where(kept & kept.roll(1, 1), batch["input_ids"], -100)  # a label's token is read off the one before
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], 1e-12)


def test_packed_samples_do_not_see_one_another() -> None:
    plain, model = both("llama-causal")
    ids = inputs("right")["input_ids"]
    batch: dict[str, Any] = {"input_ids": ids, "position_ids": torch.tensor(PACKED), "labels": ids, "use_cache": False}
    seen = tokens_in_stack(model)
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)
    assert seen == [(1, 18, 64)]
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], 1e-12)
    alone = {"input_ids": ids[:1, 4:], "position_ids": torch.tensor([[0, 1]]), "use_cache": False}
    torch.testing.assert_close(model(**batch).logits[:1, 4:], plain(**alone).logits, rtol=1e-12, atol=1e-12)


def test_one_row_of_positions_packs_every_row() -> None:
    plain, model = both("llama-causal")
    batch: dict[str, Any] = {"input_ids": inputs("right")["input_ids"], "position_ids": torch.tensor(PACKED[:1]), "use_cache": False}
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)


def test_a_ladder_climbs_beside_kept_tokens() -> None:
    plain, model = both("llama-causal", side=True)
    batch: dict[str, Any] = inputs("left") | {"use_cache": False}
    kept = batch["attention_mask"].bool()
    for one in (plain, model):
        nn.init.constant_(one.model.layers.side.up.weight, 0.1)
    torch.testing.assert_close(model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12)


def test_a_part_of_whole_hidden_states_is_what_is_kept_of_them() -> None:
    segments, x = from_mask(torch.tensor(MASKS["left"])), torch.randn(3, 6, 4)
    assert segments is not None
    edges, here = Unpadded(), Running(segments=segments)
    assert torch.equal(edges.part(x, here), pack(x, segments))
    assert torch.equal(edges.leave(edges.part(x, here), here), x * torch.tensor(MASKS["left"])[..., None])
    assert edges.part(x, Running()) is x and edges.leave(x, Running()) is x


def test_a_stack_with_a_position_bias_is_not_entered_packed() -> None:
    model = tiny("t5-classify")
    stack = own_stacks(model, family_of(model))["encoder"]  # type: ignore[arg-type]
    with bound(segments=from_mask(torch.tensor(MASKS["left"]))), pytest.raises(AssertionError, match="keeps its padding"):
        Unpadded().enter(stack, {"hidden_states": torch.randn(3, 6, 64)})


# ------------------------------------------------------------------ the hooks


def test_the_mask_that_nobody_reads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = both("llama-causal")
    made: list[int] = []

    def counted(*args: Any, **kw: Any) -> Any:
        made.append(1)
        return sdpa_mask(*args, **kw)

    AttentionMaskInterface.register("within_segments", counted)
    try:
        batch = inputs("left")
        model(**batch, use_cache=False)
        model(input_ids=batch["input_ids"], position_ids=torch.tensor(PACKED), use_cache=False)
        assert not made
        model(**batch, use_cache=True)
        assert made
    finally:
        AttentionMaskInterface.register("within_segments", sdpa_mask)


def test_a_block_that_reads_the_mask_after_all_raises() -> None:
    for name in ("bert-tokens", "llama-causal"):
        for way in ("sdpa", "eager"):
            model = tiny(name, attn_implementation=way)
            FindSegments(model.base_model, name == "llama-causal").register(model.base_model)
            with pytest.raises(RuntimeError, match="size"):
                model(**inputs("left"), use_cache=False)
    with pytest.raises(RuntimeError, match="size"):
        nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 8), attn_mask=NO_MASK)


def test_segments_are_known_inside_the_call_alone_also_after_an_exception() -> None:
    _, model = both("bert-tokens")
    seen: list[Any] = []
    handle = model.bert.encoder.layer[1].register_forward_pre_hook(lambda *_: seen.append(running().segments))
    model(**inputs("left"))
    assert [type(one) for one in seen] == [Segments] and running().segments is None

    def fail(*_: Any) -> None:
        assert running().segments is not None
        raise KeyError("a block failed")

    handle.remove()
    model.bert.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="a block failed"):
        model(**inputs("left"))
    assert running().segments is None


def test_arguments_may_be_given_by_position() -> None:
    plain, model = both("bert-tokens")
    ids, mask = inputs("left").values()
    found, expected = (one.bert(ids, mask).last_hidden_state[mask.bool()] for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_embeddings_may_be_given_in_place_of_tokens() -> None:
    plain, model = both("llama-causal")
    ids, mask = inputs("left").values()
    embedded = plain.model.embed_tokens(ids)
    seen = tokens_in_stack(model)
    found, expected = (one(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits[mask.bool()] for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert seen == [(1, 10, 64)]


LEFT_ALONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nothing to leave out": ("llama-causal", {}, {"attention_mask": torch.ones(3, 6), "use_cache": False}),
    "no mask": ("bert-tokens", {}, {"attention_mask": None}),
    "an encoder's positions": ("bert-tokens", {}, {"attention_mask": None, "position_ids": torch.tensor(PACKED)}),
    "a mask of four dims": ("llama-causal", {}, {"attention_mask": torch.ones(3, 1, 6, 6).tril().bool(), "use_cache": False}),
    "a mask comes before positions": (
        "llama-causal",
        {},
        {"attention_mask": torch.ones(3, 6), "position_ids": torch.tensor(PACKED), "use_cache": False},
    ),
    "a cache by default": ("llama-causal", {}, {}),
    "a cache": ("llama-causal", {"use_cache": False}, {"use_cache": True}),
    "hidden states recorded": ("llama-causal", {}, {"output_hidden_states": True, "use_cache": False}),
    "hidden states recorded by config": ("bert-tokens", {"output_hidden_states": True}, {}),
    "a sliding window": ("mistral-causal", {"sliding_window": 3}, {"use_cache": False}),
    "a BERT as a decoder": ("bert-tokens", {"is_decoder": True}, {}),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_calls_that_need_their_padding_keep_it(why: str) -> None:
    name, changes, more = LEFT_ALONE[why]
    plain, model = both(name, **changes)
    seen, batch = tokens_in_stack(model), inputs("left") | more
    found, expected = model(**batch), plain(**batch)
    assert seen == [(3, 6, 64)]
    kept = torch.tensor(MASKS["left"]).bool()
    torch.testing.assert_close(found.logits[kept], expected.logits[kept], rtol=1e-12, atol=1e-12)
    for one, other in zip(found.hidden_states or (), expected.hidden_states or (), strict=True):
        torch.testing.assert_close(one[kept], other[kept], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["past_key_values", "encoder_hidden_states"])
def test_calls_that_go_on_from_a_cache_or_across_to_an_encoder_keep_their_padding(name: str) -> None:
    model, call = tiny("llama-causal").model, inputs("left") | {"use_cache": False}
    hooks = FindSegments(model, causal=True)
    assert hooks.before(model, (), call | {name: torch.randn(3, 4, 64)}) is None and running().segments is None
    assert hooks.before(model, (), call | {name: None}) is not None and running().segments is not None
    hooks.after(model, (), None)


def test_a_copied_model_finds_its_own_segments() -> None:
    plain, model = both("bert-tokens")
    model = copy.deepcopy(model)
    batch = inputs("right")
    seen, kept = tokens_in_stack(model), batch["attention_mask"].bool()
    torch.testing.assert_close(model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12)
    assert seen == [(1, 12, 64)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_a_gpu_once() -> None:
    mask, positions = torch.tensor(MASKS["left"], device="cuda"), torch.tensor(PACKED, device="cuda")
    for build, x in ((from_mask, mask), (from_positions, positions)):
        build(x)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                found = build(x)
                assert found is not None
                unpack(pack(torch.randn(3, 6, 4, device="cuda"), found), found)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len([one for one in waits if "synchroniz" in str(one.message)]) == 1
        assert torch.equal(found.starts.cpu(), build(x.cpu()).starts)  # type: ignore[union-attr]
