"""BART and T5 that are replayed from recordings train as they do block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petune
from petune.kernels.fuse import fuse
from petune.kernels.graphs import replay
from petune.models import family_of
from petune.models.copied import copied
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.replays import Again, replayed, stacks
from tests.methods.zoo import assert_same_gradients, gradients, stir, tiny

METHODS: dict[str, dict[str, Any]] = {"lora": {"r": 4}, "full": {}, "adapter": {"reduction": 4}}
Lengths = Sequence[int]


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    """Every test here."""


def pair(
    name: str, method: str = "lora", settings: dict[str, Any] | None = None, **changes: Any
) -> tuple[nn.Module, nn.Module, Again]:
    """The same fused model, replayed and not, in training and away from the start."""
    plain: nn.Module = tiny(name, **changes).to(torch.float64)
    petune.wrap(plain, method, **METHODS[method], **(settings or {}), kernels="off")
    stir(plain, std=0.1)
    done = fuse(plain, family_of(plain), "reference")  # type: ignore[arg-type]
    assert done.blocks and not done.reasons
    model = copied(plain.train())
    return model, plain, replayed(model)


def texts(lengths: Lengths, labels: Lengths, seed: int = 0) -> dict[str, Tensor]:
    """Texts of these lengths and labels of those, each padded to the longest."""
    draw = torch.Generator().manual_seed(seed)

    def padded(sizes: Lengths) -> tuple[Tensor, Tensor]:
        there = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
        return torch.randint(3, 40, there.shape, generator=draw), there

    (ids, kept), (targets, counted) = padded(lengths), padded(labels)
    found = {"input_ids": ids * kept, "labels": targets.masked_fill(~counted, -100)}
    return found if bool(kept.all()) else found | {"attention_mask": kept.long()}


def assert_same_step(
    model: nn.Module, plain: nn.Module, inputs: dict[str, Tensor], step: int | None = None
) -> None:
    """Losses and gradients; with `step`, of what drops out in it."""
    found = []
    for one in (model, plain):
        here = (
            Running()
            if step is None
            else Running(rows=torch.arange(len(inputs["input_ids"])) + 3, key=step_key(7, step))
        )
        with drawing(here):
            found.append(gradients(one, inputs))
    (loss, own), (expected, wanted) = found
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    assert_same_gradients(own, wanted, 1e-9)


SIZES = [
    ((9, 4, 7), (3, 5, 2)),
    ((6, 9, 3), (5, 5, 5)),
    ((8, 2, 1), (1, 2, 6)),
    ((7, 7, 7), (4, 1, 4)),
    ((9, 9), (2, 7)),
]


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-seq2seq", "t5-gated"])
def test_batches_of_unequal_length_on_both_sides_train_as_block_by_block(name: str, method: str) -> None:
    model, plain, recorder = pair(name, method)
    for step, sizes in enumerate(SIZES):
        assert_same_step(model, plain, texts(*sizes, step))
        with torch.no_grad():
            for one in (model, plain):
                for value in one.parameters():
                    if value.grad is not None:
                        value -= 0.01 * value.grad
    # encoders of full rows wait for their turn
    assert recorder.forwards == recorder.backwards == 2 * len(SIZES) - 2
    assert recorder.recorded < recorder.forwards


def test_a_decoder_reuses_recordings_for_batches_of_other_lengths() -> None:
    model, plain, recorder = pair("t5-seq2seq")
    for step, sizes in enumerate([((20, 9, 4), (9, 9, 9)), ((5, 12, 4), (7, 7, 7)), ((8, 3, 19), (8, 1, 2))]):
        assert_same_step(model, plain, texts(*sizes, step))
    assert (recorder.recorded, recorder.forwards) == (2, 6)


@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-gated"])
def test_dropout_of_every_kind_draws_the_masks_of_blocks_that_run_one_by_one(name: str) -> None:
    drops = (
        {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1}
        if name.startswith("bart")
        else {"dropout_rate": 0.2}
    )
    model, plain, recorder = pair(name, settings={"dropout": 0.2}, **drops)
    for step, sizes in enumerate(SIZES[:2]):
        assert_same_step(model, plain, texts(*sizes, step), step)
    assert recorder.forwards == 4


@pytest.mark.crossed(1)
@pytest.mark.parametrize("tuned", ["encoder", "decoder"])
@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-gated"])
def test_a_side_of_which_nothing_trains_still_carries_the_gradients_of_the_other(
    name: str, tuned: str
) -> None:
    model, plain, recorder = pair(name)
    for one in (model, plain):
        for path, value in one.named_parameters():
            value.requires_grad_(value.requires_grad and tuned in path)
    for step, sizes in enumerate(SIZES[:2]):
        assert_same_step(model, plain, texts(*sizes, step))
    assert recorder.backwards == (4 if tuned == "encoder" else 2), (
        "an encoder without anything to train has no backward pass"
    )


def test_two_losses_of_one_encoder_add_up() -> None:
    """The gradient of the states is given away, not lent."""
    model, plain, _ = pair("t5-gated")
    for one in (model, plain):
        one.zero_grad()
        for seed in (1, 2):
            one(**texts((9, 4), (3, 5), seed)).loss.backward()
    for (name, value), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if value.grad is not None and other.grad is not None:
            torch.testing.assert_close(value.grad, other.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_a_bias_that_is_handed_in_goes_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(replay, "say", said.append)
    model, _, recorder = pair("t5-seq2seq")
    encoder = stacks(model)[0]
    hidden = torch.randn(1, 4, model.config.d_model, requires_grad=True)  # type: ignore[union-attr,arg-type]
    bias = torch.zeros(1, model.config.num_heads, 4, 4)  # type: ignore[union-attr,arg-type]
    for _ in range(3):
        out = hidden
        for block in encoder:
            out, bias, _ = block(out, None, bias, None, None, None)
        out.sum().backward()
    assert recorder.forwards == 0
    assert said == [
        "kernels: encoder runs block by block, not as CUDA graphs: it is handed a bias of relative positions"
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("name", ["bart-seq2seq", "t5-gated"])
def test_on_a_device_replays_train_as_block_by_block(name: str, p: float) -> None:
    torch.set_default_dtype(torch.float32)
    wide = {"d_model": 128, "vocab_size": 64}
    sizes = (
        {"d_ff": 256, "d_kv": 64, "num_heads": 2}
        if name.startswith("t5")
        else {f"{side}_ffn_dim": 256 for side in ("encoder", "decoder")}
    )
    sizes |= (
        {} if name.startswith("t5") else {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    )
    drops = {"dropout_rate": p} if name.startswith("t5") else {"dropout": p, "attention_dropout": p}
    plain: nn.Module = tiny(name, **wide, **sizes, **drops, max_position_embeddings=512)
    petune.wrap(plain, "lora", r=8, dropout=p, kernels="off")
    stir(plain, std=0.02)
    plain.to("cuda", torch.bfloat16)
    assert fuse(plain, family_of(plain), "auto").blocks  # type: ignore[arg-type]
    for stack in stacks(plain):
        stack.whole = None
    model = copied(plain.train())
    for stack in stacks(model):
        stack.whole = replay.Graphs()
    draw = torch.Generator().manual_seed(0)
    for step in range(8):
        lengths, labels = (torch.randint(1, most, (6,), generator=draw).tolist() for most in (300, 90))
        inputs = {key: value.cuda() for key, value in texts(lengths, labels, step).items()}
        found = []
        for one in (model, plain):
            with (
                drawing(Running(rows=torch.arange(6, device="cuda"), key=step_key(7, step))),
                torch.autocast("cuda", dtype=torch.bfloat16),
            ):
                found.append(gradients(one, inputs))
        (loss, own), (expected, wanted) = found
        torch.testing.assert_close(loss.float(), expected.float(), rtol=2e-2, atol=2e-2)
        for path, value in own.items():
            assert float((value - wanted[path]).norm()) <= 0.1 * float(wanted[path].norm()) + 1e-6, (
                step,
                path,
            )
    assert all(stack.whole.graphs for stack in stacks(model))  # type: ignore[union-attr]
