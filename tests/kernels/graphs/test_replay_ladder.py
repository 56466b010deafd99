"""Ladders beside blocks that are known: all levels are replayed at once, and train as level by level."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import petune
from petune.kernels.dispatch import reference_ops
from petune.kernels.fuse import fuse
from petune.kernels.graphs import bucket as buckets
from petune.kernels.graphs import replay
from petune.kernels.graphs.beneath import BeneathGraphs
from petune.kernels.graphs.replay import Graphs
from petune.methods import without_tuning
from petune.methods.activation_cache import ActivationCache
from petune.models import family_of
from petune.models.copied import copied
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.replays import Again, replayed, replayed_beneath, stacks
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny

DROPOUTS: dict[str, dict[str, Any]] = {
    "llama-causal": {"attention_dropout": 0.3},
    "bert-mlm": {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3},
    "bart-seq2seq": {"dropout": 0.2, "attention_dropout": 0.3, "activation_dropout": 0.1},
    "t5-seq2seq": {"dropout_rate": 0.2},
    "gemma3-causal": {"attention_dropout": 0.3},
}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that tiny batches can tell apart, and a recording for every one of them."""
    monkeypatch.setattr(buckets, "QUANTUM", 16)
    monkeypatch.setattr(replay, "RECORDING", 0)


def sided(name: str, layers: list[int] | None = None, **changes: Any) -> Any:
    """A fused ladder away from its start, in training."""
    model: Any = tiny(name, **changes)
    petune.wrap(model, "side", reduction=4, kernels="reference", also_train=(), layers=layers)
    stir(model, std=0.1)
    return model.train()


def inputs_of(name: str, rows: int = 3, whole: bool = False, seed: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = batch(name, rows=rows, seed=seed)
    if whole:
        del found["attention_mask"]
    return found if name.startswith("bert") else found | {"use_cache": False}


@pytest.fixture
def cached(tmp_path: Path) -> Iterator[Any]:
    """Gives (a model that reads what its blocks give for some batches, its recorder)."""
    open_ones = []

    def make(model: nn.Module, *batches: dict[str, Any]) -> tuple[ActivationCache, Again]:
        cache = ActivationCache(model, tmp_path)
        open_ones.append(cache)
        with torch.no_grad():
            for one in batches:
                model(**one)
        return cache, replayed(model)

    yield make
    for one in open_ones:
        one.close()


@pytest.mark.crossed(1)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", DROPOUTS)
def test_all_levels_at_once_train_as_one_by_one(name: str, whole: bool, cached: Any) -> None:
    model = sided(name)
    batches = [inputs_of(name, rows, whole, seed) for rows, seed in ((3, 1), (2, 2), (3, 1))]
    expected = [gradients(model, one) for one in batches]
    cache, recorder = cached(model, *batches[:2])
    for one, (loss, wanted) in zip(batches, expected, strict=True):
        found, grads = gradients(model, one)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        assert_same_gradients(grads, wanted)
    assert recorder.forwards == recorder.backwards == len(stacks(model)) * len(batches)
    assert cache.counts.read > 0


def test_levels_beside_some_blocks_are_replayed_at_once(cached: Any) -> None:
    model, inputs = sided("t5-seq2seq", [0, 2], num_layers=4), inputs_of("t5-seq2seq")
    loss, wanted = gradients(model, inputs)
    _, recorder = cached(model, inputs)
    found, grads = gradients(model, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, wanted)
    assert recorder.forwards == recorder.backwards == 2


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", DROPOUTS)
def test_beside_blocks_that_run_all_levels_train_as_one_by_one(
    name: str, whole: bool, recorded: bool
) -> None:
    model = sided(name)
    batches = [inputs_of(name, rows, whole, seed) for rows, seed in ((3, 1), (2, 2), (3, 1))]
    expected = [gradients(model, one) for one in batches]
    recorder, beneath = replayed(model), replayed_beneath(model) if recorded else Again()
    for one, (loss, wanted) in zip(batches, expected, strict=True):
        found, grads = gradients(model, one)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        assert_same_gradients(grads, wanted)
    assert recorder.forwards == recorder.backwards == len(stacks(model)) * len(batches)
    assert (beneath.forwards, beneath.backwards) == (recorder.forwards * recorded, 0)


def test_blocks_without_a_level_are_replayed_below_those_that_have_one() -> None:
    model, inputs = sided("t5-seq2seq", [0, 2], num_layers=4), inputs_of("t5-seq2seq")
    loss, wanted = gradients(model, inputs)
    recorder, beneath = replayed(model), replayed_beneath(model)
    found, grads = gradients(model, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, wanted)
    assert recorder.forwards == beneath.forwards == 2


@pytest.mark.parametrize("stored", ["fp8", "bf16", "auto"])
def test_what_a_replay_gives_is_cached_as_what_blocks_give(stored: Any, tmp_path: Path) -> None:
    model, inputs = sided("t5-seq2seq"), inputs_of("t5-seq2seq")
    plain, found = copied(model), []
    beneath = replayed_beneath(model)
    for one in (model, plain):
        with ActivationCache(one, tmp_path / str(len(found)), stored) as cache:
            found += [gradients(one, inputs) for _ in range(2)]
            assert (cache.counts.computed, cache.counts.read) == (6, 6)
    assert beneath.forwards == 2
    for loss, grads in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=1e-6, atol=0)
        assert_same_gradients(grads, found[0][1])


def test_a_stage_hands_on_what_blocks_gave_and_not_what_is_kept_of_it(tmp_path: Path) -> None:
    """As it does where blocks run one by one: the next stage computes what one process does."""
    model, inputs, sent = sided("llama-causal"), inputs_of("llama-causal"), list[Tensor]()
    plain = copied(model)
    replayed(model)

    def keep(carried: Any) -> None:
        sent.append(carried.backbone["hidden_states"])

    for one in (plain, model):
        (stack,) = stacks(one)
        stack.wire = SimpleNamespace(ends=False, receive=lambda: None, send=keep)
        with ActivationCache(one, tmp_path / str(len(sent)), "fp8"):
            one(**inputs)
    torch.testing.assert_close(sent[1], sent[0], rtol=1e-5, atol=1e-6)


def test_a_hook_on_a_block_below_a_ladder_is_called() -> None:
    model, inputs = sided("llama-causal"), inputs_of("llama-causal")
    loss, wanted = gradients(model, inputs)
    beneath, seen = replayed_beneath(model), []
    replayed(model)
    stacks(model)[0].blocks[1].register_forward_hook(lambda *args: seen.append(args[0]))
    found, grads = gradients(model, inputs)
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    assert_same_gradients(grads, wanted)
    assert (len(seen), beneath.forwards) == (1, 0)


def test_a_step_of_the_backbone_is_seen_and_blocks_that_leave_are_let_go() -> None:
    model, inputs = sided("llama-causal"), inputs_of("llama-causal")
    beneath = replayed_beneath(model)
    before = gradients(model, inputs)[0]
    with torch.no_grad():
        for block in stacks(model)[0].blocks:
            next(block.parameters()).mul_(1.5)
    after = gradients(model, inputs)[0]
    assert not torch.equal(before, after)
    stacks(model)[0].beneath.forget()
    torch.testing.assert_close(gradients(model, inputs)[0], after)
    assert (beneath.recorded, beneath.forwards) == (2, 3)


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_drawn_as_level_by_level(name: str, cached: Any) -> None:
    model, inputs = sided(name, **DROPOUTS[name]), inputs_of(name)
    found = []
    _, recorder = cached(model, inputs)
    for whole in (True, False):
        if not whole:
            for stack in stacks(model):
                stack.whole = None
        with drawing(Running(rows=torch.tensor([5, -1, 7]), key=step_key(7, 3))):
            found.append(gradients(model, inputs))
    assert recorder.forwards == len(stacks(model))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    assert_same_gradients(found[0][1], found[1][1])


def test_gradients_of_micro_batches_add_up_and_a_step_is_seen(cached: Any) -> None:
    model = sided("bert-mlm")
    inputs = [inputs_of("bert-mlm", seed=seed) for seed in (1, 2)]
    plain = copied(model)
    cached(model, *inputs)
    for one in (model, plain):
        rate = torch.optim.SGD([value for value in one.parameters() if value.requires_grad], lr=0.1)
        for _ in range(2):
            rate.zero_grad()
            for each in inputs:
                one(**each).loss.backward()
            rate.step()
    there = dict(plain.named_parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, there[name], rtol=1e-5, atol=1e-6, msg=name)


def test_a_second_forward_before_the_backward_pass_climbs_level_by_level(cached: Any) -> None:
    model, inputs = sided("llama-causal"), inputs_of("llama-causal")
    expected = {name: 2 * value for name, value in gradients(model, inputs)[1].items()}
    _, recorder = cached(model, inputs)
    model.zero_grad()
    losses = [model(**inputs).loss for _ in range(2)]
    sum(losses).backward()
    assert recorder.forwards == 1
    found = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert_same_gradients(cast("dict[str, Tensor]", found), expected)


def test_a_batch_that_lacks_tokens_sees_none_of_a_larger_one(
    cached: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "RECORDING", 7)  # so that the larger one's recording serves it
    model = sided("llama-causal")
    large, little = inputs_of("llama-causal", 3), inputs_of("llama-causal", 2, seed=2)
    expected = gradients(model, little)[1]
    _, recorder = cached(model, large, little)
    gradients(model, large)
    assert_same_gradients(gradients(model, little)[1], expected)
    assert (recorder.recorded, recorder.forwards) == (1, 2)


def test_a_mask_that_stays_climbs_level_by_level(cached: Any) -> None:
    model, inputs = sided("llama-causal"), inputs_of("llama-causal")
    inputs |= {key: inputs[key].flip(1) for key in ("input_ids", "attention_mask", "labels")}
    expected = gradients(model, inputs)
    _, recorder = cached(model, inputs)
    found = gradients(model, inputs)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert_same_gradients(found[1], expected[1])
    assert recorder.forwards == 0


def test_levels_that_are_computed_again_are_not_replayed(cached: Any) -> None:
    model, inputs = sided("llama-causal"), inputs_of("llama-causal")
    expected = gradients(model, inputs)[1]
    _, recorder = cached(model, inputs)
    stacks(model)[0].recompute = True
    assert_same_gradients(gradients(model, inputs)[1], expected)
    assert recorder.forwards == 0


def test_without_its_tuning_a_model_replays_nothing(cached: Any) -> None:
    model, inputs = sided("llama-causal"), inputs_of("llama-causal")
    with without_tuning(model):
        expected = model(**inputs).loss
    _, recorder = cached(model, inputs)
    with without_tuning(model):
        torch.testing.assert_close(model(**inputs).loss, expected)
    assert recorder.forwards == 0


def test_a_device_gets_graphs_of_the_ladder_and_of_its_backbone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ops = replace(reference_ops(), name="triton")
    monkeypatch.setattr("petune.kernels.fuse.select", lambda *_: ops)
    model: Any = petune.wrap(tiny("t5-seq2seq"), "side", reduction=4, kernels="off")
    assert fuse(model, family_of(model), "auto")
    assert [cast("Graphs", stack.whole).beside for stack in stacks(model)] == [True, True]
    assert copy.deepcopy(stacks(model)[0].whole).beside  # type: ignore[union-attr]
    assert [type(copy.deepcopy(stack.beneath)) for stack in stacks(model)] == [BeneathGraphs, BeneathGraphs]


# heads of 16 columns, of which a ladder's have 8: the fewest that kernels take
SIXTEEN: dict[str, dict[str, Any]] = {
    "llama-causal": {"head_dim": 16},
    "bert-mlm": {"hidden_size": 128},
    "bart-seq2seq": {"d_model": 128},
    "t5-gated": {"d_kv": 16},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", SIXTEEN)
def test_on_a_device_levels_at_once_train_as_one_by_one(
    name: str, whole: bool, cache: bool, tmp_path: Path
) -> None:
    plain: Any = tiny(name, **SIXTEEN[name]).to("cuda", torch.bfloat16)
    petune.wrap(plain, "side", reduction=2, kernels="auto", also_train=())
    stir(plain, std=0.05)
    model = copied(plain.train())
    for stack in stacks(plain):
        stack.whole = stack.beneath = None
    inputs = {
        key: value.cuda() if isinstance(value, Tensor) else value
        for key, value in inputs_of(name, whole=whole).items()
    }
    with ExitStack() as caches:
        for at, one in enumerate((model, plain) if cache else ()):
            caches.enter_context(ActivationCache(one, tmp_path / str(at)))
        for _ in range(4):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                (loss, own), (expected, wanted) = gradients(model, inputs), gradients(plain, inputs)
            torch.testing.assert_close(loss.float(), expected.float(), rtol=2e-2, atol=2e-2)
            scale = max(float(value.norm()) for value in wanted.values())
            for path, value in own.items():
                assert float((value - wanted[path]).norm()) <= 0.1 * scale, path
    assert all(cast("Graphs", stack.whole).graphs for stack in stacks(model))
    assert all(cast("BeneathGraphs", stack.beneath).graphs for stack in stacks(model))
