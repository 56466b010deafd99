"""A stack that is replayed from recordings trains as one that runs block by block; what cannot be replayed is
not."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForSequenceClassification

import petune
from petune.errors import UsageError
from petune.kernels.block.module import FusedBlock
from petune.kernels.configs import BaseDtype, MemoryConfig, Rung
from petune.kernels.fuse import fuse, fused_blocks, unfuse
from petune.kernels.graphs import bucket as buckets
from petune.kernels.graphs import replay
from petune.kernels.graphs.bucket import Size
from petune.kernels.graphs.recorder import CudaRecorder
from petune.kernels.graphs.replay import Graphs, ungraph
from petune.kernels.graphs.ways import Lanes
from petune.kernels.memory import block_cost
from petune.models import family_of
from petune.models.copied import copied
from petune.models.frozen_weight import FORMS, QuantisedWeight
from petune.models.quantise import quantise_blocks
from petune.models.stack import Stack
from petune.rng.context import Running
from petune.rng.dropout import drawing, step_key
from tests.kernels.fused_pairs import BERT, METHODS, MODELS, MOVED, fresh
from tests.kernels.replays import Again, replayed, stacks
from tests.kernels.shapes import DECODER, ENCODER
from tests.methods.zoo import batch as of_zoo
from tests.methods.zoo import tiny

Batch = dict[str, Tensor]
LORA = METHODS["lora"]


@pytest.fixture(autouse=True)
def _float64(float64: None) -> None:
    """Every test here."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets that tiny batches can tell apart."""
    monkeypatch.setattr(buckets, "QUANTUM", 16)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(replay, "say", said.append)
    return said


def tuned(
    name: str,
    settings: dict[str, Any] = LORA,
    make: Callable[[], nn.Module] | None = None,
    base_dtype: BaseDtype | None = None,
) -> nn.Module:
    """A fused model in training whose updates are not zero."""
    if make is None:
        model = fresh(name, settings)
    else:
        torch.manual_seed(0)
        model = make()
        petune.wrap(model, **settings, kernels="off")
        with torch.no_grad():
            for path, value in model.named_parameters():
                if any(part in path for part in MOVED):
                    value.add_(torch.randn_like(value), alpha=0.1)
    if base_dtype is not None:
        quantise_blocks(model, family_of(model), base_dtype)
    assert fuse(model, family_of(model), "reference")
    return model.train()


def pair(name: str, settings: dict[str, Any] = LORA) -> tuple[nn.Module, nn.Module, Again]:
    """The same model, replayed and not."""
    model = tuned(name, settings)
    plain = copied(model)
    return model, plain, replayed(model)


def batch(name: str, lengths: Sequence[int], seed: int = 0) -> Batch:
    """Texts of these lengths, padded to the longest."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 50, (len(lengths), max(lengths)), generator=draw)
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    labels = (
        torch.randint(0, 3, (len(lengths),), generator=draw)
        if name == "bert"
        else ids.masked_fill(mask == 0, -100)
    )
    found = {"input_ids": ids, "labels": labels}
    return found if len(set(lengths)) == 1 else found | {"attention_mask": mask}


def loss_of(model: nn.Module, inputs: Batch) -> Tensor:
    extra = {} if isinstance(model, BertForSequenceClassification) else {"use_cache": False}
    loss: Tensor = model(**inputs, **extra).loss
    return loss


def assert_same_step(model: nn.Module, plain: nn.Module, inputs: Batch) -> None:
    """Losses and gradients, which add up to those that are there."""
    losses = [loss_of(one, inputs) for one in (model, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=1e-6, atol=0)
    assert_same_gradients(model, plain)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    wanted = dict(plain.named_parameters())
    for name, value in model.named_parameters():
        other = wanted[name].grad
        assert (value.grad is None) == (other is None), name
        if value.grad is not None and other is not None:
            torch.testing.assert_close(
                value.grad, other, rtol=1e-9, atol=1e-12 + 1e-10 * float(other.abs().max()), msg=name
            )


# ------------------------------------------------------------------ the same numbers

RECORDED = ["lora", "lora on q and v", "full", "adapter", "adapter of sums", "dora", "ia3", "miss"]


@pytest.mark.crossed(1)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("settings", [METHODS[name] for name in RECORDED], ids=RECORDED)
@pytest.mark.parametrize("name", ["bert", "llama", "qwen3"])
def test_batches_of_unequal_length_train_as_block_by_block(name: str, settings: dict[str, Any]) -> None:
    model, plain, recorder = pair(name, settings)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain)]
    sizes = [
        (9, 4, 7),
        (9, 4, 7),
        (6, 9, 3),
        (30, 11, 9),
        (8, 2),
        (1, 20, 28),
        (2, 8, 9),
    ]
    for step, lengths in enumerate(sizes):
        assert_same_step(model, plain, batch(name, lengths, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.recorded == 2
    assert recorder.forwards == recorder.backwards == len(sizes)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("lengths", [(9, 4, 7), (9, 9, 9)])
def test_blocks_with_windows_and_angles_of_their_own_are_replayed(lengths: Sequence[int]) -> None:
    model = tuned("gemma3", make=lambda: tiny("gemma3-causal", sliding_window=4))
    plain, recorder = copied(model), replayed(model)
    for seed in range(3):
        assert_same_step(model, plain, batch("gemma3", lengths, seed))
    assert recorder.forwards == recorder.backwards > 0
    (stack,) = stacks(model)
    assert {kind for graph in cast("Graphs", stack.whole).graphs.values() for kind in graph.kinds} == {0, 1}
    assert {one.window for block in fused_blocks(model) for one in block.spec.program.attends} == {4, None}


@pytest.mark.parametrize("settings", [LORA, METHODS["full"]], ids=["lora", "full"])
@pytest.mark.parametrize("name", ["gpt2-causal", "dinov2-classify"])
def test_transposed_weights_and_vectors_are_replayed(name: str, settings: dict[str, Any]) -> None:
    model = tuned(name, settings, lambda: tiny(name))
    plain, recorder = copied(model), replayed(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, plain)]
    for step in range(4):
        inputs = of_zoo(name, rows=2, seed=step)
        extra = {"use_cache": False} if name == "gpt2-causal" else {}
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(next(model.parameters()).dtype)
        losses = [one(**inputs, **extra).loss for one in (model, plain)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=1e-6, atol=0)
        assert_same_gradients(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.forwards == recorder.backwards > 0


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_rows_of_equal_length_are_replayed_for_their_very_shape(name: str) -> None:
    model, plain, recorder = pair(name)
    for step, lengths in enumerate([(8, 8), (8, 8), (8, 8), (5, 5), (4, 4, 4, 4), (8, 8)]):
        assert_same_step(model, plain, batch(name, lengths, step))
        model.zero_grad(), plain.zero_grad()
    assert (recorder.recorded, recorder.forwards) == (1, 3)


def test_packed_samples_are_replayed_whatever_their_number() -> None:
    model, plain, recorder = pair("llama")
    for step, lengths in enumerate([(9, 4, 11), (9, 4, 11), (3, 21), (24,), (1, 22, 1)]):
        inputs = batch("llama", (24, 24), step) | {
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).expand(2, -1)
        }
        assert_same_step(model, plain, inputs)
        model.zero_grad(), plain.zero_grad()
    assert recorder.forwards == 4  # a row of one sample is no packed row


def test_gradients_of_micro_batches_add_up() -> None:
    model, plain, recorder = pair("llama")
    for step, lengths in enumerate([(9, 4), (9, 4), (5, 7), (3, 9)]):
        assert_same_step(model, plain, batch("llama", lengths, step))
    assert recorder.backwards == 4


def test_what_a_backward_pass_gave_away_is_not_written_again() -> None:
    model, _, recorder = pair("llama")
    inputs = batch("llama", (9, 4))
    loss_of(model, inputs).backward()
    held = []
    for _ in range(2):
        model.zero_grad()
        loss_of(model, inputs).backward()
        held.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    kept = {name: value.clone() for name, value in held[0].items()}
    model.zero_grad()
    loss_of(model, batch("llama", (8, 3), 5)).backward()
    assert recorder.forwards == 4
    for name, value in kept.items():
        assert torch.equal(value, held[0][name]) and torch.equal(value, held[1][name])


def test_hidden_states_that_are_held_are_not_written_again() -> None:
    model, _, recorder = pair("llama")
    decoder: Any = model.get_submodule("model")
    held: list[tuple[Tensor, Tensor]] = []
    decoder.norm.register_forward_pre_hook(
        lambda _, args: held.append((args[0].detach(), args[0].detach().clone()))
    )
    for step in range(3):  # without padding nothing is copied behind the blocks
        ids = batch("llama", (24, 24), step)["input_ids"]
        decoder(input_ids=ids, position_ids=torch.arange(12).repeat(4).view(2, 24), use_cache=False)[
            0
        ].sum().backward()
    assert recorder.forwards == 3
    assert all(torch.equal(*states) for states in held)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_the_input_gets_its_gradient_where_it_needs_one(name: str) -> None:
    model, plain, recorder = pair(name)
    for one in (model, plain):
        one.get_input_embeddings().weight.requires_grad_()
    for step in range(3):
        assert_same_step(model, plain, batch(name, (9, 4), step))
    assert recorder.backwards == 3


def test_blocks_below_the_lowest_that_trains_are_passed_by() -> None:
    model, plain, recorder = pair("llama")
    for one in (model, plain):
        for path, value in one.named_parameters():
            if "layers.2." not in path:
                value.requires_grad_(False)
    for step in range(3):
        assert_same_step(model, plain, batch("llama", (9, 4), step))
    assert recorder.backwards == 3


@pytest.mark.usefixtures("small")
def test_a_batch_that_lacks_tokens_sees_none_of_a_larger_one() -> None:
    model, plain, recorder = pair("bert")
    for step, lengths in enumerate([(30, 11, 9), (30, 11, 9), (25, 4), (9, 8, 9), (30, 2, 1)]):
        assert_same_step(model, plain, batch("bert", lengths, step))
        model.zero_grad(), plain.zero_grad()
    assert (recorder.recorded, recorder.forwards) == (1, 5)


DROPS: dict[str, tuple[str, dict[str, Any], Callable[[], nn.Module]]] = {
    "of updates": ("llama", LORA | {"dropout": 0.3}, MODELS["llama"]),
    "of connections": ("bert", LORA, lambda: bert(hidden_dropout_prob=0.2)),
    "of attention": ("bert", LORA, lambda: bert(attention_probs_dropout_prob=0.2)),
    "of all": (
        "bert",
        LORA | {"dropout": 0.3},
        lambda: bert(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2),
    ),
    "of all, in adapters": (
        "bert",
        METHODS["adapter"] | {"dropout": 0.3},
        lambda: bert(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2),
    ),
    "of all, in full": (
        "bert",
        METHODS["full"],
        lambda: bert(hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2),
    ),
}


def bert(**changes: float) -> nn.Module:
    return BertForSequenceClassification(BertConfig(**{**BERT, **changes}))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "which", [pytest.param(one, marks=pytest.mark.long if one == "of connections" else ()) for one in DROPS]
)
def test_dropout_is_drawn_as_block_by_block(which: str) -> None:
    name, settings, make = DROPS[which]
    model = tuned(name, settings, make)
    plain, recorder = copied(model), replayed(model)
    for step, lengths in enumerate([(9, 4, 7), (9, 4, 7), (2, 9, 4), (30, 3, 7), (9, 9, 9), (9, 9, 9)]):
        inputs = batch(name, lengths, step)
        model.zero_grad(), plain.zero_grad()
        losses = []
        for one in (model, plain):
            with drawing(Running(rows=torch.tensor([4, -1, 9]), key=step_key(0, step))):
                losses.append(loss_of(one, inputs))
                losses[-1].backward()
        torch.testing.assert_close(*(loss.detach() for loss in losses), rtol=1e-6, atol=0)
        assert_same_gradients(model, plain)
    assert recorder.forwards == recorder.backwards >= 4


def test_without_a_key_every_replay_draws_anew() -> None:
    model = tuned("bert", make=lambda: bert(hidden_dropout_prob=0.5))
    recorder = replayed(model)
    losses = []
    for _ in range(4):
        losses.append(loss_of(model, batch("bert", (9, 4))))
        losses[-1].backward()
    assert recorder.forwards == 4 and len({float(loss.detach()) for loss in losses}) == 4


@pytest.mark.parametrize("which", ["p of a dropout", "the mode of a block"])
def test_a_dropout_that_changes_is_recorded_anew(which: str) -> None:
    model = tuned("bert", make=lambda: bert(hidden_dropout_prob=0.5))
    plain = copied(model)
    recorder = replayed(model)

    def loss() -> float:
        found = []
        for one in (plain, model):
            with drawing(Running(key=1)):
                found.append(loss_of(one, batch("bert", (9, 4))))
            found[-1].backward()
        assert float(found[0].detach()) == pytest.approx(float(found[1].detach()), rel=1e-9)
        return float(found[1].detach())

    before = loss()
    for block in (*stacks(model)[0].blocks, *stacks(plain)[0].blocks):
        if which == "p of a dropout":
            cast("Any", block).attention.output.dropout.p = 0.1
        else:
            block.eval()
    assert loss() != pytest.approx(before, rel=1e-6)
    assert recorder.recorded == 2 and recorder.forwards == 2


def test_attention_that_drops_out_unequally_is_not_replayed(lines: list[str]) -> None:
    model = tuned("bert", make=lambda: bert(attention_probs_dropout_prob=0.2))
    cast("Any", stacks(model)[0].blocks[1]).attention.self.dropout.p = 0.3
    assert_not_replayed(model, replayed(model), "bert")
    assert lines == [
        "kernels: encoder runs block by block, not as CUDA graphs: the attention of its blocks drops out"
        " unequally"
    ]


# ------------------------------------------------------------------ sizes


@pytest.mark.usefixtures("small")
def test_a_batch_that_comes_often_gets_a_recording_of_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, recorder = pair("bert")
    # 64 and 48 tokens: a third of a replay is lost each time that the large one serves
    large, small = (30, 11, 9), (25, 9)

    def steps(*sizes: tuple[int, ...]) -> tuple[int, int]:
        for step, lengths in enumerate(sizes):
            model.zero_grad(), plain.zero_grad()
            assert_same_step(model, plain, batch("bert", lengths, step))
        return recorder.recorded, recorder.forwards

    assert steps(large, large) == (1, 2)
    monkeypatch.setattr(replay, "RECORDING", 0.99)
    assert steps(small, small) == (1, 4)
    assert steps(large, small) == (2, 6)


@pytest.mark.usefixtures("small")
def test_a_batch_is_served_by_any_larger_recording_and_gets_one_where_there_is_none() -> None:
    model, plain, recorder = pair("bert")
    for step, lengths in enumerate([(30, 31, 32), (30, 31, 32), (3, 4), (60, 61, 33)]):
        assert_same_step(model, plain, batch("bert", lengths, step))
        model.zero_grad(), plain.zero_grad()
    assert (recorder.recorded, recorder.forwards) == (2, 4)


def test_a_block_that_keeps_the_device_busy_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cost, "LAUNCH_BOUND", 0.0)
    model, plain, recorder = pair("bert")
    for step in range(3):
        assert_same_step(model, plain, batch("bert", (9, 4), step))
    assert recorder.recorded == 0


@pytest.mark.parametrize("staged", [False, True])
def test_longer_blocks_are_replayed_where_other_stages_wait_for_them(
    staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cost.Rates, "seconds", lambda *given: 1.5 * block_cost.LAUNCH_BOUND)
    model, plain, recorder = pair("llama")
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        assert isinstance(stack.whole, Graphs)
        stack.whole.staged = staged
    for step in range(3):
        assert_same_step(model, plain, batch("llama", (9, 4), step))
    assert recorder.recorded == int(staged)
    assert Lanes(2).make().staged and Graphs(staged=True).__reduce__()[1][-1]


def test_rows_that_keep_the_device_busy_do_not_wait_for_one_another_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_cost, "LAUNCH_BOUND", 0.0)
    model, plain, _ = pair("llama")
    asked: list[bool] = []
    takes = Graphs.takes

    def told(self: Graphs, *args: Any) -> bool:
        asked.append(takes(self, *args))
        return asked[-1]

    monkeypatch.setattr(Graphs, "takes", told)
    for lengths in ((8, 8), (8, 8), (6, 6)):
        assert_same_step(model, plain, batch("llama", lengths))
    assert asked == [True, False, True]


@pytest.mark.parametrize(
    ("width", "tokens", "replays"), [(1024, 5120, True), (4096, 8192, False), (4096, 512, True)]
)
def test_a_large_encoder_is_bound_by_launches_and_a_llama_of_8b_is_not(
    monkeypatch: pytest.MonkeyPatch, width: int, tokens: int, replays: bool
) -> None:
    from petune.kernels.memory.shape import BlockShape, Ranks

    gated = width == 4096
    ranks = Ranks(16, 16, 16, 16, 16 * gated, 16, 16)
    heads = (32, 8, 128, 14336) if gated else (16, 16, 64, 4096)
    shape = BlockShape(width, *heads, gated, ranks, sublayers=DECODER if gated else ENCODER)
    monkeypatch.setattr(replay, "shape_of", lambda spec, dtype, longest: shape)
    monkeypatch.setattr(block_cost, "rates_of", lambda name: block_cost.H200)
    spec = SimpleNamespace(computes_in=lambda kind: torch.bfloat16, peers=None)
    blocks: Any = [SimpleNamespace(spec=spec, parameters=lambda: [])]
    assert Graphs()._worthwhile(Size(tokens, tokens), blocks, torch.device("cpu")) is replays


# ------------------------------------------------------------------ when weights change


def test_weights_that_are_replaced_or_moved_are_recorded_anew() -> None:
    model, plain, recorder = pair("llama")

    def replace(one: nn.Module) -> None:
        layer: Any = one.get_submodule("model.layers.1.mlp.up_proj")
        layer.lora_A = nn.Parameter(layer.lora_A.detach() * 2)

    def move(one: nn.Module) -> None:
        layer: Any = one.get_submodule("model.layers.0.self_attn.k_proj")
        layer.weight.data = layer.weight.data * 3

    def freeze(one: nn.Module) -> None:
        one.get_submodule("model.layers.0.self_attn.k_proj").lora_B.requires_grad_(False)  # type: ignore[union-attr, operator]

    def scale(one: nn.Module) -> None:
        one.get_submodule("model.layers.0.self_attn.k_proj").scale = 7.0

    for count, change in enumerate((None, replace, move, freeze, scale), 1):
        for one in (model, plain) if change else ():
            change(one)
        for step in range(3):
            model.zero_grad(), plain.zero_grad()
            assert_same_step(model, plain, batch("llama", (9, 4), step))
        assert (recorder.recorded, recorder.forwards) == (count, 3 * count)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_layers_are_not_asked_again_until_something_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, recorder = pair(name)
    asked: list[FusedBlock] = []
    own = FusedBlock.linears

    def counted(block: FusedBlock) -> Any:
        asked.append(block)
        return own(block)

    monkeypatch.setattr(FusedBlock, "linears", counted)
    counts: list[int] = []
    for step in range(4):
        if step == 3:  # by its equal, so that the recordings are as good as before
            layer: Any = next(module for module in model.modules() if hasattr(module, "lora_A"))
            layer.scale = float(str(layer.scale))
        loss_of(model, batch(name, (9, 4), step)).backward()
        counts.append(len(asked))
    blocks = sum(isinstance(module, FusedBlock) for module in model.modules())
    assert [after - before for before, after in pairwise(counts)] == [blocks, 0, blocks]
    assert recorder.recorded == 1


@pytest.mark.parametrize("base_dtype", FORMS)
def test_a_quantised_base_is_replayed_and_recorded_anew_when_it_moves(base_dtype: BaseDtype) -> None:
    def make() -> nn.Module:  # as wide as the forms ask for
        wide = dict.fromkeys(("hidden_size", "intermediate_size"), 64)
        return BertForSequenceClassification(BertConfig(**BERT | wide)).to(torch.float32)

    model = tuned("bert", make=make, base_dtype=base_dtype)
    plain = copied(model)
    recorder = replayed(model)
    one, other = batch("bert", (5, 9, 3)), batch("bert", (9, 2, 4), seed=1)
    assert_same_step(model, plain, one)
    assert_same_step(model, plain, other)
    assert (recorder.recorded, recorder.forwards) == (1, 2)
    quantised = next(value for value in model.parameters() if isinstance(value, QuantisedWeight))
    quantised.data = cast("Tensor", copy.deepcopy(quantised.data))
    assert_same_step(model, plain, one)
    assert recorder.recorded == 2


def test_weights_that_move_between_the_passes_are_an_error() -> None:
    model, _, _ = pair("llama")
    loss_of(model, batch("llama", (9, 4))).backward()
    loss = loss_of(model, batch("llama", (9, 4)))
    weight = model.get_submodule("model.layers.0.self_attn.k_proj").weight
    weight.data = weight.data.clone()  # type: ignore[union-attr, operator]
    with pytest.raises(UsageError, match="moved"):
        loss.backward()


def test_a_weight_that_is_stepped_between_the_passes_is_autograds_error() -> None:
    model, _, _ = pair("llama")
    loss_of(model, batch("llama", (9, 4))).backward()
    loss = loss_of(model, batch("llama", (9, 4)))
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------ one at a time


def test_a_second_forward_pass_before_the_backward_pass_runs_block_by_block() -> None:
    model, plain, recorder = pair("llama")
    inputs = [batch("llama", (9, 4), seed) for seed in range(3)]
    assert_same_step(model, plain, inputs[0])
    losses = [[loss_of(one, given) for given in inputs] for one in (model, plain)]
    assert recorder.forwards == 2
    for own in losses:
        for loss in (own[1], own[0], own[2]):
            loss.backward()
    assert_same_gradients(model, plain)
    assert_same_step(model, plain, inputs[0])
    assert recorder.forwards == recorder.backwards == 3


def test_a_forward_pass_that_is_given_up_is_in_nobodys_way() -> None:
    model, plain, recorder = pair("bert")
    assert_same_step(model, plain, batch("bert", (9, 4)))
    with pytest.raises(ZeroDivisionError):
        _ = loss_of(model, batch("bert", (9, 4), 1)) * (1 / 0)
    gc.collect()
    assert_same_step(model, plain, batch("bert", (9, 4), 2))
    assert (recorder.forwards, recorder.backwards) == (3, 2)


def test_a_second_backward_pass_is_an_error_that_names_the_remedy() -> None:
    model, _, _ = pair("bert")
    loss_of(model, batch("bert", (9, 4))).backward()
    loss = loss_of(model, batch("bert", (9, 4)))
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="ungraph"):
        loss.backward()


def test_a_gradient_of_the_gradient_is_refused_by_autograd() -> None:
    model, _, _ = pair("bert")
    loss_of(model, batch("bert", (9, 4))).backward()
    trained = [value for value in model.parameters() if value.requires_grad]
    first = torch.autograd.grad(loss_of(model, batch("bert", (9, 4))), trained, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(value.sum() for value in first).backward()  # type: ignore[union-attr]


# ------------------------------------------------------------------ what is not replayed


def assert_not_replayed(model: nn.Module, recorder: Again, name: str = "llama") -> None:
    for step in range(3):
        loss = loss_of(model, batch(name, (9, 4), step))
        if loss.requires_grad:
            loss.backward()
    assert recorder.forwards == 0


def test_evaluation_and_forward_passes_without_gradients_are_not_replayed() -> None:
    model, _, recorder = pair("llama")
    assert_not_replayed(model.eval(), recorder)
    with torch.no_grad():
        assert_not_replayed(model.train(), recorder)


def test_what_is_not_kept_is_not_replayed() -> None:
    model = tuned("llama")
    unfuse(model)
    fuse(model, family_of(model), "reference", MemoryConfig(keep="input"))
    assert_not_replayed(model, replayed(model))
    assert {module.spec.rung for module in model.modules() if isinstance(module, FusedBlock)} == {
        Rung("input")
    }


def test_hooks_on_blocks_are_called(lines: list[str]) -> None:
    model, _, recorder = pair("llama")
    seen: list[int] = []
    stacks(model)[0].blocks[1].register_forward_hook(lambda *_: seen.append(1))
    assert_not_replayed(model, recorder)
    assert len(seen) == 3 and "hooks" in lines[0]


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_whoever_watches_operations_sees_them() -> None:
    model, _, recorder = pair("llama")
    with Watched():
        assert_not_replayed(model, recorder)


def test_an_attention_mask_is_not_replayed() -> None:
    model, _, recorder = pair("llama")
    ids = torch.ones(1, 4, dtype=torch.int64)
    for _ in range(3):
        model(
            input_ids=ids,
            attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(),
            labels=ids,
            use_cache=False,
        ).loss.backward()
    assert recorder.forwards == 0


def test_a_recorder_may_refuse_and_says_why(lines: list[str]) -> None:
    model, _, recorder = pair("llama")
    recorder.refused = "the moon is full"
    assert_not_replayed(model, recorder)
    assert lines == ["kernels: decoder runs block by block, not as CUDA graphs: the moon is full"]


def test_a_recording_that_fails_is_not_tried_again(lines: list[str]) -> None:
    model, plain, recorder = pair("bert")
    recorder.error = RuntimeError("out of room\nand a trace")
    for step in range(3):
        assert_same_step(model, plain, batch("bert", (9, 4), step))
        recorder.error = None if step else recorder.error
    assert recorder.recorded == 0
    assert len(lines) == 1 and lines[0].endswith("could not be recorded as CUDA graphs: out of room")


def test_the_log_tells_when_graphs_begin(lines: list[str]) -> None:
    model, _, _ = pair("bert")
    for step in range(4):
        loss_of(model, batch("bert", (9, 4), step)).backward()
    assert lines == ["kernels: encoder runs as CUDA graphs, recorded as larger batches come"]


@pytest.mark.usefixtures("small")
def test_only_a_recording_that_was_not_used_for_long_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LIMIT", 2)
    monkeypatch.setattr(replay, "PATIENCE", 6)
    model, plain, recorder = pair("llama")
    first, second, third = (3, 4), (12, 9), (30, 20)

    def steps(*sizes: tuple[int, int]) -> tuple[int, int]:
        for step, lengths in enumerate(sizes):
            model.zero_grad(), plain.zero_grad()
            assert_same_step(model, plain, batch("llama", lengths, step))
        return recorder.recorded, recorder.forwards

    assert steps(first, first, second, second) == (2, 4)
    assert steps(third, third) == (2, 4)  # both have been used a short while ago
    assert steps(second, third) == (3, 6)  # first was used six calls before
    assert steps(second, third) == (3, 8)
    assert steps(first) == (3, 9)  # a larger one serves


# ------------------------------------------------------------------ copies


def test_a_copy_makes_its_own_recordings() -> None:
    model, plain, recorder = pair("llama")
    for step in range(2):
        assert_same_step(model, plain, batch("llama", (9, 4), step))
    other = copy.deepcopy(model)
    model.zero_grad(), plain.zero_grad(), other.zero_grad()
    (own,) = [stack.whole for stack in stacks(other)]
    assert isinstance(own, Graphs) and not own.graphs
    for step in range(2):
        assert_same_step(other, plain, batch("llama", (9, 4), step))
    assert recorder.recorded == 2


@pytest.mark.parametrize("leave", [ungraph, unfuse])
def test_a_model_that_leaves_its_graphs_runs_block_by_block(leave: Callable[[nn.Module], None]) -> None:
    model, _, recorder = pair("bert")
    leave(model)
    for step in range(3):
        loss_of(model, batch("bert", (8, 8), step)).backward()
    assert recorder.forwards == 0


# ------------------------------------------------------------------ on a device

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WIDE: dict[str, Any] = dict(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_labels=3,
) | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def on_gpu(
    dtype: torch.dtype, dropout: float = 0.0, base_dtype: BaseDtype | None = None
) -> tuple[nn.Module, nn.Module]:
    """A model that is replayed, and the same that is not."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    sizes = {**WIDE, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    base = BertForSequenceClassification(BertConfig(**sizes)).to("cuda", dtype)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        model = petune.wrap(
            copy.deepcopy(base),
            method="lora",
            r=16,
            targets=("q", "k", "v", "o", "up", "down"),
            kernels="auto",
            base_dtype=base_dtype,
        ).train()
        with torch.no_grad():
            for path, value in model.named_parameters():
                if "lora_B" in path:
                    value.normal_(std=0.02)
        found.append(model)
    ungraph(found[1])
    return found[0], found[1]


def on_device(lengths: Sequence[int], seed: int) -> Batch:
    return {name: value.cuda() for name, value in batch("bert", lengths, seed).items()}


def drawn(seed: int, rows: int = 16) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, generator=draw) * 0.9 + 4.0).exp().long().clamp(4, 400).tolist()


def whole(model: nn.Module) -> Graphs:
    (found,) = [stack.whole for stack in stacks(model)]
    assert isinstance(found, Graphs)
    return found


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(
    ("dtype", "dropout", "base_dtype"),
    [
        (torch.bfloat16, 0.0, None),
        (torch.bfloat16, 0.1, None),
        (torch.float32, 0.0, None),
        (torch.float32, 0.1, None),
        *((torch.bfloat16, 0.1, form) for form in FORMS),
    ],
)
def test_on_a_device_replays_train_as_block_by_block(
    dtype: torch.dtype, dropout: float, base_dtype: BaseDtype | None
) -> None:
    model, plain = on_gpu(dtype, dropout, base_dtype)
    optimizers = [
        torch.optim.AdamW([v for v in one.parameters() if v.requires_grad], lr=1e-4, fused=True)
        for one in (model, plain)
    ]
    for step in range(12):
        # float32 has no kernel for segments
        inputs = on_device(drawn(step) if dtype == torch.bfloat16 else (64,) * 8, step)
        losses = []
        for one in (model, plain):
            one.zero_grad()
            with drawing(Running(key=step_key(0, step))):
                losses.append(loss_of(one, inputs))
                losses[-1].backward()
        close, near = (2e-2, 0.1) if dtype == torch.bfloat16 else (1e-4, 1e-3)
        torch.testing.assert_close(losses[0].float(), losses[1].float(), rtol=close, atol=close)
        wanted = dict(plain.named_parameters())
        for name, value in model.named_parameters():
            if value.grad is not None:
                other = wanted[name].grad
                assert other is not None
                assert float((value.grad - other).norm()) <= near * float(other.norm()) + 1e-6, (step, name)
        with torch.no_grad():  # the same weights again, so that rounding does not grow from step to step
            optimizers[0].step()
            for name, value in model.named_parameters():
                if value.requires_grad:
                    wanted[name].copy_(value)
    assert whole(model).graphs


@pytest.mark.gpu
@GPU
def test_on_a_device_rounding_up_costs_no_finite_number() -> None:
    model, _ = on_gpu(torch.bfloat16)
    for step in range(20):
        loss = loss_of(model, on_device(drawn(step, 3 + step % 7), step))
        loss.backward()
        assert bool(torch.isfinite(loss))
        for value in model.parameters():
            assert value.grad is None or bool(torch.isfinite(value.grad).all())
        model.zero_grad()


@pytest.mark.gpu
@GPU
def test_on_a_device_memory_does_not_grow() -> None:
    model, _ = on_gpu(torch.bfloat16)
    sizes = []
    for step in range(150):
        loss_of(model, on_device(drawn(step), step)).backward()
        model.zero_grad()
        sizes.append(torch.cuda.memory_allocated())
    assert whole(model).graphs
    assert max(sizes[100:]) <= 1.02 * max(sizes[60:100])


@pytest.mark.gpu
@GPU
def test_on_a_device_another_stream_is_refused() -> None:
    recorder = CudaRecorder(torch.device("cuda"))
    assert recorder.refusal() is None
    with torch.cuda.stream(torch.cuda.Stream()):
        assert recorder.refusal() is not None
