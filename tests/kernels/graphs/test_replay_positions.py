"""Blocks of DeBERTa, whose attention is called as it is, train from recordings as they do block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.kernels.fuse import fuse, fused_blocks
from petune.kernels.graphs import bucket as buckets
from petune.kernels.graphs.bucket import Bucket
from petune.kernels.graphs.replay import Graphs
from petune.kernels.memory import block_cost
from petune.kernels.memory.policy_hook import shape_of
from petune.models import family_of
from petune.models.copied import copied
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.own_blocks import fused, tuned
from tests.kernels.replays import Again, replayed, stacks
from tests.methods.zoo import assert_same_gradients, gradients

DROPS = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}
METHODS: dict[str, dict[str, Any]] = {"lora": {"r": 4, "dropout": 0.3}, "full": {}, "dora": {"r": 4}}
# of texts; the second is held by the recording of the first, that of the third has a longest of 128
LENGTHS = [(30, 3, 7), (12, 5, 8), (60, 9, 70)]
CELLS = [
    ("lora", "deberta-classify"),
    ("full", "deberta2-mlm"),
    pytest.param("full", "deberta-classify", marks=pytest.mark.long),
    pytest.param("lora", "deberta2-mlm", marks=pytest.mark.long),
    pytest.param("dora", "deberta-classify", marks=pytest.mark.long),
]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that tiny batches can tell apart."""
    monkeypatch.setattr(buckets, "QUANTUM", 16)


def pair(
    method: str, name: str = "deberta-classify", dtype: Any = torch.float64, **config: Any
) -> tuple[Any, Any, Again]:
    """The same fused model, replayed and not."""
    config = {"max_position_embeddings": 128} | config
    plain = fused(tuned(name, method, METHODS[method], dtype, **config))
    model = copied(plain)
    return model, plain, replayed(model)


def texts(model: Any, lengths: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    """Texts of these lengths, padded to the longest."""
    draw = torch.Generator().manual_seed(seed)
    there = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.randint(3, 40, there.shape, generator=draw) * there
    labels = torch.randint(0, model.config.num_labels, (len(lengths),), generator=draw)
    if hasattr(model, "cls"):
        labels = ids.masked_fill(~there, -100)
    found = {"input_ids": ids, "labels": labels}
    return found if bool(there.all()) else found | {"attention_mask": there.long()}


def step(model: Any, inputs: dict[str, Tensor], number: int, key: bool = True) -> tuple[Tensor, Any]:
    rows = torch.tensor([4, -1, 9], device=inputs["input_ids"].device)
    here = Running(rows=rows, key=step_key(0, number)) if key else Running()
    with drawing(here):
        return gradients(model, inputs)


@pytest.mark.parametrize(("method", "name"), CELLS)
def test_texts_of_any_length_train_as_block_by_block_with_dropout(method: str, name: str) -> None:
    model, plain, recorder = pair(method, name, **DROPS)
    for number, lengths in enumerate(LENGTHS):
        inputs = texts(model, lengths, number)
        (loss, found), (expected, wanted) = (step(one, inputs, number) for one in (model, plain))
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        assert_same_gradients(found, wanted, 1e-9)
        with torch.no_grad():
            for one in (model, plain):
                for value in one.parameters():
                    value.sub_(0 if value.grad is None else 0.01 * value.grad)
    assert (recorder.recorded, recorder.forwards, recorder.backwards) == (2, 3, 3)


def test_a_table_that_all_rows_share_weighs_once_where_launches_are_weighed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, _, recorder = pair("lora")
    spec, rates = fused_blocks(model)[0].spec, block_cost.rates_of("cpu")
    tokens, longest = Bucket.of((3, 30), None).own.tokens, max(LENGTHS[0])
    work = block_cost.forward(shape_of(spec, torch.float64, longest), tokens, longest)
    monkeypatch.setattr(block_cost, "LAUNCH_BOUND", 2 * rates.seconds(work, longest))
    step(model, texts(model, LENGTHS[0]), 0)
    assert recorder.recorded == 1


@pytest.mark.long
def test_without_a_key_every_replay_draws_what_blocks_one_by_one_draw() -> None:
    model, plain, recorder = pair("lora", **DROPS)
    losses = []
    for _ in range(3):
        found = []
        for one in (model, plain):
            torch.manual_seed(len(losses))
            found.append(step(one, texts(model, LENGTHS[0]), 0, key=False))
        (loss, own), (expected, wanted) = found
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        assert_same_gradients(own, wanted, 1e-9)
        losses.append(float(loss))
    assert len(set(losses)) == 3 and recorder.forwards == 3


@pytest.mark.long
def test_by_kernels_with_draws_in_memory_scores_are_the_same() -> None:
    model, plain, recorder = pair("lora", dtype=torch.float32, num_hidden_layers=1, **DROPS)
    for one in (model, plain):
        for block in fused_blocks(one):
            block.spec.ops = replace(block.spec.ops, name="triton")
    inputs = texts(model, (5, 3, 2))
    (loss, found), (expected, wanted) = (step(one, inputs, 1) for one in (model, plain))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, 1e-5)
    assert recorder.recorded == 1


@pytest.mark.parametrize(
    "which",
    [
        "p of probabilities",
        *(pytest.param(one, marks=pytest.mark.long) for one in ("p of an update", "autocast")),
    ],
)
def test_what_a_call_reads_beside_tensors_is_part_of_a_recording(which: str) -> None:
    dtype = torch.bfloat16 if which == "autocast" else torch.float32
    model, plain, recorder = pair("lora", dtype=dtype, **DROPS)
    inputs = texts(model, LENGTHS[0])
    step(model, inputs, 0)
    for one in (model, plain):
        own = fused_blocks(one)[0].attention.self
        if which == "p of probabilities":
            own.dropout.p = 0.5
        elif which == "p of an update":
            own.query_proj.dropout = 0.6
    with torch.autocast("cpu", torch.bfloat16, enabled=which == "autocast"):
        (loss, _), (expected, _) = (step(one, inputs, 0) for one in (model, plain))
    torch.testing.assert_close(loss, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    assert recorder.recorded == 2


@pytest.mark.long
def test_padding_before_tokens_runs_block_by_block() -> None:
    model, _, recorder = pair("lora")
    inputs = texts(model, LENGTHS[0])
    step(model, inputs | {name: inputs[name].flip(1) for name in ("input_ids", "attention_mask")}, 0)
    assert recorder.recorded == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", ["deberta-classify", "deberta2-mlm"])
def test_on_a_device_replays_train_as_block_by_block(name: str, method: str, autocast: bool) -> None:
    wide = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 256}
    plain = tuned(name, method, METHODS[method], **wide, **DROPS, max_position_embeddings=512)
    plain.to("cuda", torch.bfloat16)
    assert fuse(plain, family_of(plain), "auto").blocks
    for stack in stacks(plain):
        assert isinstance(stack.whole, Graphs)
        stack.whole = None
    model = copied(plain)
    for stack in stacks(model):
        stack.whole = Graphs()
    draw = torch.Generator().manual_seed(0)
    for number in range(8):
        lengths = torch.randint(1, 300, (3,), generator=draw).tolist()
        inputs = {key: value.cuda() for key, value in texts(model, lengths, number).items()}
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            (loss, own), (expected, wanted) = (step(one, inputs, number) for one in (model, plain))
        torch.testing.assert_close(loss.float(), expected.float(), rtol=2e-2, atol=2e-2)
        for path, value in own.items():
            apart, most = float((value - wanted[path]).norm()), float(wanted[path].norm())
            assert apart <= 0.1 * most + 1e-6, (number, path)
    assert all(stack.whole.graphs for stack in stacks(model))  # type: ignore[union-attr]  # Graphs
