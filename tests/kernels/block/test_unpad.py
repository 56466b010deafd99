"""Padding left out: kept tokens get what they would have got in the padded batch, and whatever is read is
Hugging Face's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertForQuestionAnswering,
    BertModel,
    BertPreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

import petune
from petune.kernels.block import attention as attending
from petune.kernels.block.attention import How
from petune.kernels.block.edges import Unpadded
from petune.kernels.block.unpad import NO_MASK, FindSegments
from petune.kernels.block.varlen import Segments, from_mask, of_rows, pack
from petune.kernels.configs import MemoryConfig
from petune.kernels.fuse import fuse
from petune.methods.configs import SideConfig
from petune.methods.side import apply as climb
from petune.models import family_of
from petune.models.copied import copied
from petune.models.stack import own_stacks
from petune.rng.context import Running, running
from tests.methods.zoo import VOCAB, ZOO, assert_same_gradients, gradients, tiny

MASKS = {
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 1, 0, 1], [1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 0]],
    "an empty row": [[1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]],
}
PACKED = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 2]]


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


def within_segments(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any
) -> tuple[Tensor, None]:
    """Hugging Face's attention function as a fused block would compute it."""
    segments: Segments | None = running().segments
    assert segments is None or (mask is None and query.shape[0] == 1 and query.shape[2] == segments.total)
    window = kw.get("sliding_window")
    how = How(
        bool(getattr(module, "is_causal", True)), kw["scaling"], len(query), segments, mask, window=window
    )
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
    stack.edges.append(Unpadded())
    FindSegments(model, model.base_model, stack.rule.causal).register(model, model.base_model)


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


def test_bert_computes_on_kept_tokens_what_it_computed_in_the_padded_batch() -> None:
    plain, model = both("bert-tokens")
    batch = inputs("right")
    seen, kept = tokens_in_stack(model), batch["attention_mask"].bool()
    left: list[Tensor] = []
    model.bert.register_forward_hook(lambda _, args, output: left.append(output.last_hidden_state))
    torch.testing.assert_close(
        model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12
    )
    assert seen == [(1, int(kept.sum()), 64)]
    assert not left[0][~kept].any()
    batch["labels"] = torch.where(kept, batch["input_ids"] % 3, -100)
    (loss, grads), (expected_loss, expected_grads) = gradients(model, batch), gradients(plain, batch)
    assert seen[1:] == [(1, int(kept.sum()), 64)]
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    assert_same_gradients(grads, expected_grads, 1e-12)


def test_bert_pools_the_first_token_of_every_row() -> None:
    plain, model = both("bert-classify")
    batch = inputs(
        "right", labels=torch.tensor([0, 2, 1]), token_type_ids=torch.tensor([[0, 0, 1, 1, 1, 1]] * 3)
    )
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], 1e-12)


@pytest.mark.parametrize("name", ["llama-causal", "qwen3-causal", "mistral-causal"])
def test_a_decoder_computes_on_kept_tokens_what_it_computed_in_the_padded_batch(name: str) -> None:
    plain, model = both(name)
    batch: dict[str, Any] = inputs("right") | {"use_cache": False}
    seen, kept = tokens_in_stack(model), batch["attention_mask"].bool()
    torch.testing.assert_close(
        model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12
    )
    batch["position_ids"] = 2 * torch.arange(6).expand(3, -1)  # each row has positions of its own
    torch.testing.assert_close(
        model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12
    )
    batch["labels"] = torch.where(kept, batch["input_ids"], -100)
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], 1e-12)
    assert seen == [(1, int(kept.sum()), 64)] * 3


@pytest.mark.parametrize(("left_out", "length"), [("right", 12), ("", 18)], ids=["padded", "whole rows"])
@pytest.mark.parametrize("name", ["mistral-causal", "gemma3-causal"])
def test_rows_longer_than_a_sliding_window_are_segments_padded_or_not(
    name: str, left_out: str, length: int
) -> None:
    plain, model = both(name, sliding_window=3)
    batch: dict[str, Any] = inputs("right") | {"use_cache": False}
    if not left_out:
        batch["attention_mask"] = torch.ones(3, 6)
    seen, kept, near = (
        tokens_in_stack(model),
        batch["attention_mask"].bool(),
        2e-6 if name.startswith("gemma3") else 1e-12,
    )
    torch.testing.assert_close(model(**batch).logits[kept], plain(**batch).logits[kept], rtol=near, atol=near)
    batch["labels"] = torch.where(kept, batch["input_ids"], -100)
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], near)
    if not left_out:
        del batch["attention_mask"]
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=near, atol=near)
    assert seen == [(1, length, 64)] * (2 + (not left_out))


# ------------------------------------------------------------------ what is read all the same


def everywhere(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch with labels on every token, padding included, or with one for each row."""
    return batch | {
        "labels": torch.tensor([0, 2, 1]) if name.endswith("classify") else batch["input_ids"] % 3
    }


@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize(
    "name", ["bert-classify", "bert-tokens", "bert-mlm", "llama-causal", "llama-classify"]
)
def test_fused_blocks_agree_with_hugging_face_wherever_padding_stands_and_labels_do(
    name: str, side: str
) -> None:
    plain = tiny(name).double().train()
    fused = petune.wrap(copied(plain), "full", kernels="reference").train()
    # Hugging Face's RMS norm is float32
    batch, close = everywhere(name, inputs(side)), 1e-9 if name.startswith("bert") else 2e-6
    found, expected = fused(**batch), plain(**batch)
    torch.testing.assert_close(found.loss.float(), expected.loss.float(), rtol=2e-6, atol=0)
    if side != "right" or not name.endswith("classify"):  # then no place is left out
        torch.testing.assert_close(torch.as_tensor(found.logits), expected.logits, rtol=close, atol=close)
    assert_same_gradients(gradients(fused, batch)[1], gradients(plain, batch)[1], close)


def test_the_first_token_of_a_model_without_a_head_is_hugging_faces() -> None:
    plain = tiny("bert-classify").double().bert
    fused = petune.wrap(copied(plain), "lora", kernels="reference").train()
    for side in MASKS:
        found, expected = fused(**inputs(side)), plain(**inputs(side))
        torch.testing.assert_close(found.pooler_output, expected.pooler_output, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-9, atol=1e-9)


def test_a_head_over_all_places_of_a_row_reads_padding_too() -> None:
    config = BertConfig(**{**ZOO["bert-tokens"][2], "num_labels": 2})
    plain = BertForQuestionAnswering(config).double()
    fused = petune.wrap(copied(plain), "full", kernels="reference").train()
    batch = inputs("right", start_positions=torch.tensor([0, 1, 2]), end_positions=torch.tensor([3, 1, 2]))
    assert_same_gradients(gradients(fused, batch)[1], gradients(plain, batch)[1], 1e-9)


class Mean(BertPreTrainedModel):
    """A model of somebody's own, which reads every place."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.bert(**batch).last_hidden_state.mean(1)


def test_who_else_reads_hidden_states_finds_padding_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.block.unpad.say", said.append)
    own = Mean(BertConfig(**ZOO["bert-tokens"][2])).double().eval()
    fused = petune.wrap(copied(own), "lora", kernels="reference").train()
    for _ in range(2):
        torch.testing.assert_close(fused(**inputs("right")), own(**inputs("right")), rtol=1e-9, atol=1e-9)
    plain, model = both("bert-tokens")
    torch.testing.assert_close(
        model.bert(**inputs("right"))[0], plain.bert(**inputs("right"))[0], rtol=1e-12, atol=1e-12
    )
    assert [line.partition("is computed too: ")[2] for line in said] == [
        "Mean is not transformers' own, and may read every place",
        "the model was not called by its head",
    ]


def test_a_classifier_pools_a_token_that_is_masked() -> None:
    plain, model = both("llama-classify")
    seen, batch = tokens_in_stack(model), inputs("right") | {"use_cache": False}  # no token is pad_token_id
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)
    assert seen == [(3, 6, 64), (1, 12, 64)]


def test_labels_of_an_unknown_shape_keep_the_padding() -> None:
    plain, model = both("llama-causal")
    seen, batch = tokens_in_stack(model), inputs("right")
    shifted = batch["input_ids"].roll(-1, 1)
    call: dict[str, Any] = batch | {
        "labels": batch["input_ids"][:, 1:],
        "shift_labels": shifted,
        "use_cache": False,
    }
    torch.testing.assert_close(model(**call).loss, plain(**call).loss, rtol=1e-12, atol=1e-12)
    assert seen == [(3, 6, 64)]


# ------------------------------------------------------------------ samples that are packed, ladders


def test_packed_samples_do_not_see_one_another() -> None:
    plain, model = both("llama-causal")
    ids = inputs("right")["input_ids"]
    batch: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": torch.tensor(PACKED),
        "labels": ids,
        "use_cache": False,
    }
    seen = tokens_in_stack(model)
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)
    assert seen == [(1, 18, 64)]
    assert_same_gradients(gradients(model, batch)[1], gradients(plain, batch)[1], 1e-12)
    alone = {"input_ids": ids[:1, 4:], "position_ids": torch.tensor([[0, 1]]), "use_cache": False}
    torch.testing.assert_close(model(**batch).logits[:1, 4:], plain(**alone).logits, rtol=1e-12, atol=1e-12)


def test_one_row_of_positions_packs_every_row() -> None:
    plain, model = both("llama-causal")
    batch: dict[str, Any] = {
        "input_ids": inputs("right")["input_ids"],
        "position_ids": torch.tensor(PACKED[:1]),
        "use_cache": False,
    }
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=1e-12, atol=1e-12)


def test_a_ladder_climbs_beside_kept_tokens() -> None:
    plain, model = both("llama-causal", side=True)
    batch: dict[str, Any] = inputs("right") | {"use_cache": False}
    kept = batch["attention_mask"].bool()
    for one in (plain, model):
        nn.init.constant_(one.model.layers.side.up.weight, 0.1)
    torch.testing.assert_close(
        model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12
    )


def test_a_part_of_whole_hidden_states_is_what_is_kept_of_them() -> None:
    segments, x = from_mask(torch.tensor(MASKS["right"])), torch.randn(3, 6, 4)
    assert segments is not None
    edges, here = Unpadded(), Running(segments=segments)
    assert torch.equal(edges.part(x, here), pack(x, segments))
    assert torch.equal(edges.leave(edges.part(x, here), here), x * torch.tensor(MASKS["right"])[..., None])
    assert edges.part(x, Running()) is x and edges.leave(x, Running()) is x


# ------------------------------------------------------------------ encoders and decoders


class AttendBiased(torch.autograd.Function):
    """`Attend` with a bias by distance [heads, 2 L - 1] that trains."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, how: How) -> Tensor:
        out, ctx.kept = attending.forward(q, k, v, how)
        ctx.how = how
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        q, k, v, out = ctx.saved_tensors
        dbias = torch.zeros_like(ctx.how.bias)
        return *attending.backward(dout, q, k, v, out, ctx.kept, ctx.how, dbias), dbias, None


def across_segments(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kw: Any
) -> tuple[Tensor, None]:
    """`within_segments` for blocks of T5 and BART, of which some attend across."""
    here, rows = running(), len(query)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    segments, memory = here.segments, here.memory if module.crosses else None
    if module.crosses and segments is not None and memory is None:
        memory = of_rows(len(key), len(flat[1]), key.device)
    assert mask is None or (segments is None and memory is None)
    how = How(bool(module.is_causal) and mask is None, kw["scaling"], rows, segments, mask, memory=memory)
    dense = None if module.crosses else kw.get("position_bias")
    if dense is None:
        out = Attend.apply(*flat, how)  # type: ignore[no-untyped-call]
    else:  # what Hugging Face made for as many tokens as it saw: its first column and its first row are all there is
        bias = torch.cat([dense[0, :, 1:, 0].flip(1), dense[0, :, 0]], 1)
        out = AttendBiased.apply(*flat, bias, replace(how, bias=bias.detach()))  # type: ignore[no-untyped-call]
    return out.unflatten(0, (rows, -1)), None


def both_stacks(name: str) -> tuple[Any, Any, dict[str, list[tuple[int, ...]]]]:
    """The model as it is, one whose two stacks leave padding out, and the shapes that these stacks' first
    blocks see."""
    plain, model = (tiny(name, attn_implementation=way).double() for way in ("sdpa", "across_segments"))
    model.load_state_dict(plain.state_dict())
    seen: dict[str, list[tuple[int, ...]]] = {"encoder": [], "decoder": [], "memory": []}

    def saw(side: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda _, args: seen[side].append(tuple(args[0].shape)))

    for path, module in model.named_modules():
        module.crosses = path.endswith(("encoder_attn", "EncDecAttention"))
        if module.crosses and "0" in path.split("."):
            saw("memory", getattr(module, "k", None) or module.k_proj)
    owners = {"encoder": model.get_encoder(), "decoder": model.get_decoder()}
    finder = None
    for side, stack in own_stacks(model, family_of(model)).items():  # type: ignore[arg-type]
        stack.edges.append(Unpadded())
        finder = FindSegments(model, owners[side], stack.rule.causal, feeds=side == "encoder", encoder=finder)
        finder.register(model, owners[side])
        saw(side, stack[0])
    return plain, model, seen


@pytest.fixture
def _across() -> Iterator[None]:
    AttentionInterface.register("across_segments", across_segments)
    AttentionMaskInterface.register("across_segments", sdpa_mask)
    yield
    AttentionInterface._global_mapping.pop("across_segments")
    AttentionMaskInterface._global_mapping.pop("across_segments")


WRITTEN = torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0, 0]])


@pytest.mark.usefixtures("_across")
@pytest.mark.parametrize("padded", ["encoder", "decoder", "both", "the encoder on the left"])
@pytest.mark.parametrize("name", ["t5-seq2seq", "bart-seq2seq"])
def test_a_decoder_attends_across_to_what_its_encoder_kept(name: str, padded: str) -> None:
    plain, model, seen = both_stacks(name)
    left = padded == "the encoder on the left"
    call = inputs("left" if left else "right") | {"use_cache": False}
    if padded == "decoder":
        call["attention_mask"] = torch.ones(3, 6)
    labels = torch.randint(3, VOCAB, WRITTEN.shape)
    if padded in ("decoder", "both"):
        call["decoder_attention_mask"] = WRITTEN
        labels = labels.masked_fill(WRITTEN == 0, -100)
    call["labels"] = labels
    (loss, grads), (expected_loss, expected_grads) = gradients(model, call), gradients(plain, call)
    near = 2e-6 if name.startswith("t5") else 1e-9  # whose norm is float32
    torch.testing.assert_close(loss, expected_loss, rtol=near, atol=near)
    assert_same_gradients(grads, expected_grads, near)
    assert seen["encoder"] == [(3, 6, 64) if padded == "decoder" or left else (1, 12, 64)]
    assert seen["memory"] == seen["encoder"]
    assert seen["decoder"] == [(3, 7, 64) if padded == "encoder" or left else (1, int(WRITTEN.sum()), 64)]
    assert running().segments is None and running().memory is None


@pytest.mark.usefixtures("_across")
def test_the_mask_of_an_encoder_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(mask: Tensor, read: Tensor | None = None) -> Segments | str | None:
        asked.append(len(mask))
        return from_mask(mask, read)

    monkeypatch.setattr("petune.kernels.block.unpad.from_mask", counted)
    plain, model, seen = both_stacks("bart-seq2seq")
    call = inputs("right") | {"use_cache": False, "decoder_input_ids": torch.randint(3, VOCAB, (3, 7))}
    for mask in (MASKS["right"], MASKS["right"][::-1]):
        call["attention_mask"].copy_(torch.tensor(mask))
        torch.testing.assert_close(model(**call).logits, plain(**call).logits, rtol=1e-9, atol=1e-9)
    assert asked == [3, 3] and seen["encoder"] == [(1, 12, 64)] * 2


# ------------------------------------------------------------------ the hooks


def test_the_mask_that_nobody_reads_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = both("llama-causal")
    made: list[int] = []

    def counted(*args: Any, **kw: Any) -> Any:
        made.append(1)
        return sdpa_mask(*args, **kw)

    AttentionMaskInterface.register("within_segments", counted)
    try:
        batch = inputs("right")
        model(**batch, use_cache=False)
        model(input_ids=batch["input_ids"], position_ids=torch.tensor(PACKED), use_cache=False)
        whole = torch.ones_like(batch["attention_mask"])
        model(input_ids=batch["input_ids"], attention_mask=whole, use_cache=False)
        model(input_ids=batch["input_ids"], use_cache=False)
        assert not made
        model(**batch, use_cache=True)
        assert made
    finally:
        AttentionMaskInterface.register("within_segments", sdpa_mask)


@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_where_positions_are_counted_along_a_mask_a_call_without_one_is_left_alone(way: str) -> None:
    plain, model = (tiny("opt-causal", attn_implementation=way) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    fuse(model, family_of(model), "reference", MemoryConfig("all"))
    ids = inputs("right")["input_ids"]
    found, expected = (one(input_ids=ids, use_cache=False).logits for one in (model, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_block_that_reads_the_mask_after_all_raises() -> None:
    for name in ("bert-tokens", "llama-causal"):
        for way in ("sdpa", "eager"):
            model = tiny(name, attn_implementation=way)
            FindSegments(model, model.base_model, name == "llama-causal").register(model, model.base_model)
            with pytest.raises(RuntimeError, match="size"):
                model(**inputs("right"), use_cache=False)
    with pytest.raises(RuntimeError, match="size"):
        nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 8), attn_mask=NO_MASK)


def test_segments_are_known_inside_the_call_alone_also_after_an_exception() -> None:
    _, model = both("bert-tokens")
    seen: list[Any] = []
    handle = model.bert.encoder.layer[1].register_forward_pre_hook(lambda *_: seen.append(running().segments))
    model(**inputs("right"))
    assert [type(one) for one in seen] == [Segments] and running().segments is None

    def fail(*_: Any) -> None:
        assert running().segments is not None
        raise KeyError("a block failed")

    handle.remove()
    model.bert.encoder.layer[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="a block failed"):
        model(**inputs("right"))
    assert running().segments is None


def test_arguments_may_be_given_by_position() -> None:
    plain, model = both("llama-causal", use_cache=False)
    ids, mask = inputs("right").values()
    seen, labels = tokens_in_stack(model), torch.where(mask.bool(), ids, -100)
    for counted, shape in ((labels, (1, 12, 64)), (ids, (3, 6, 64))):
        found, expected = (one(ids, mask, None, None, None, counted).loss for one in (model, plain))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert seen.pop() == shape


def test_embeddings_may_be_given_in_place_of_tokens() -> None:
    plain, model = both("llama-causal")
    ids, mask = inputs("right").values()
    embedded = plain.model.embed_tokens(ids)
    seen = tokens_in_stack(model)
    found, expected = (
        one(inputs_embeds=embedded, attention_mask=mask, use_cache=False).logits[mask.bool()]
        for one in (model, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert seen == [(1, 12, 64)]


LEFT_ALONE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "nothing to leave out": ("llama-causal", {}, {"attention_mask": torch.ones(3, 6), "use_cache": False}),
    "no mask": ("bert-tokens", {}, {"attention_mask": None}),
    "an encoder's positions": (
        "bert-tokens",
        {},
        {"attention_mask": None, "position_ids": torch.tensor(PACKED)},
    ),
    "a mask of four dims": (
        "llama-causal",
        {},
        {"attention_mask": torch.ones(3, 1, 6, 6).tril().bool(), "use_cache": False},
    ),
    "a mask comes before positions": (
        "llama-causal",
        {},
        {"attention_mask": torch.ones(3, 6), "position_ids": torch.tensor(PACKED), "use_cache": False},
    ),
    "a cache by default": ("llama-causal", {}, {}),
    "a cache": ("llama-causal", {"use_cache": False}, {"use_cache": True}),
    "hidden states recorded": ("llama-causal", {}, {"output_hidden_states": True, "use_cache": False}),
    "hidden states recorded by config": ("bert-tokens", {"output_hidden_states": True}, {}),
    "a BERT as a decoder": ("bert-tokens", {"is_decoder": True}, {}),
}


@pytest.mark.parametrize("why", LEFT_ALONE)
def test_calls_that_need_their_padding_keep_it(why: str) -> None:
    name, changes, more = LEFT_ALONE[why]
    plain, model = both(name, **changes)
    seen, batch = tokens_in_stack(model), inputs("right") | more
    found, expected = model(**batch), plain(**batch)
    assert seen == [(3, 6, 64)]
    kept = torch.tensor(MASKS["right"]).bool()
    torch.testing.assert_close(found.logits[kept], expected.logits[kept], rtol=1e-12, atol=1e-12)
    for one, other in zip(found.hidden_states or (), expected.hidden_states or (), strict=True):
        torch.testing.assert_close(one[kept], other[kept], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["past_key_values", "encoder_hidden_states"])
def test_calls_that_go_on_from_a_cache_or_across_to_an_encoder_keep_their_padding(name: str) -> None:
    whole, call = tiny("llama-causal"), inputs("right") | {"use_cache": False}
    model = whole.model
    hooks = FindSegments(whole, model, causal=True)
    hooks.before_model(whole, (), call)
    assert (
        hooks.before(model, (), call | {name: torch.randn(3, 4, 64)}) is None and running().segments is None
    )
    assert hooks.before(model, (), call | {name: None}) is not None and running().segments is not None
    hooks.after(model, (), None)


def test_a_copied_model_finds_its_own_segments() -> None:
    plain, model = both("bert-tokens")
    model = copied(model)
    batch = inputs("right")
    seen, kept = tokens_in_stack(model), batch["attention_mask"].bool()
    torch.testing.assert_close(
        model(**batch).logits[kept], plain(**batch).logits[kept], rtol=1e-12, atol=1e-12
    )
    assert seen == [(1, 12, 64)]
