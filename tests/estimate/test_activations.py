"""The estimate of what is kept for the backward pass, against what autograd really saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from petune.estimate.activations import Extent, Saved, inputs_of, saved_by
from petune.estimate.footprint import ForwardPass, saved_in
from petune.estimate.forecast import sketch
from petune.kernels.fuse import fuse
from petune.methods import wrap
from petune.models import family_of
from petune.models.gated_delta import CHUNK
from petune.models.stack import own_stacks
from petune.parallel.mesh import Coordinate
from petune.parallel.plan import ALONE, Cut, ParallelPlan
from petune.parallel.tensor.shard_params import cut
from tests.methods.zoo import MOE, ZOO
from tests.written_recipes import recipe_of

WIDE: dict[str, int] = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "d_model": 256,
    "encoder_ffn_dim": 640,
    "decoder_ffn_dim": 640,
    "d_ff": 640,
    "d_kv": 32,
    "n_embd": 256,
    "n_head": 8,
}
LENGTH, ROWS = 48, 2


def model_of(name: str, method: str, depth: int, bf16: bool = False, r: int = 16, **changes: Any) -> Any:
    """A wider model of the zoo with `depth` blocks per stack, tuned, in training mode."""
    made, config, values = (ZOO | MOE)[name]
    layers = {
        key: depth
        for key in ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layer")
        if key in values
    }
    wide: dict[str, Any] = {key: value for key, value in WIDE.items() if key in values}
    if "layer_types" in values:
        wide["layer_types"] = values["layer_types"][-1:] * depth
    torch.manual_seed(0)
    model = made(config(**{**values, **wide, **layers, **changes})).train()
    name, _, kind = method.partition(", ")
    settings: dict[str, Any] = {"side": {"reduction": 8}, "lora": {"r": r}}.get(name, {})
    by_parts = {"targets": ["q", "k", "v", "gate", "up"]}
    settings |= by_parts if kind == "by parts" else {"kind": kind} if kind else {}
    return wrap(model.bfloat16() if bf16 and method != "full" else model, name, **settings)


def saved_by_autograd(model: Any, name: str, bf16: bool = False) -> int:
    """Bytes of everything autograd saves in a forward pass, parameters and inputs apart."""
    ids = torch.randint(3, 97, (ROWS, LENGTH))
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["labels"] = torch.zeros(ROWS, dtype=torch.long) if name.endswith("classify") else ids.clone()
    known = {
        value.untyped_storage().data_ptr()
        for value in (*model.parameters(), *model.buffers(), *inputs.values())
    }
    found: dict[int, Any] = {}

    def pack(value: Tensor) -> Tensor:
        cast_weight = (
            bf16 and value.dim() == 2 and value.dtype is torch.bfloat16 and value.shape[0] != ROWS * LENGTH
        )
        if not cast_weight and value.untyped_storage().data_ptr() not in known:
            found[value.untyped_storage().data_ptr()] = value.untyped_storage()
        return value

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        model(**inputs)
    return sum(storage.nbytes() for storage in found.values())


def estimated(model: Any, itemsize: int = 4, dropouts: tuple[float, float] = (0.0, 0.0)) -> float:
    """The estimate for the last block of every stack."""
    total = 0.0
    for stack in own_stacks(model, family_of(model)).values():  # type: ignore[arg-type]
        extent = Extent(LENGTH, LENGTH, LENGTH, heads=8)
        total += saved_by(stack.blocks[-1], stack.rule, None, extent, itemsize, dropouts).of(ROWS)
    return total


def test_mixers_that_a_cpu_is_to_run_are_counted_by_the_plain_rule(tmp_path: Path) -> None:
    """A model without memory says nothing of where it will be."""
    model = model_of("qwen3_5-causal", "lora", 1, layer_types=["linear_attention"])
    (stack,) = own_stacks(model, family_of(model)).values()  # type: ignore[arg-type]

    def saved(gpu: bool) -> float:
        extent = Extent(LENGTH, LENGTH, heads=8, gpu=gpu)
        return saved_by(stack.blocks[0], stack.rule, None, extent, 2, (0.0, 0.0)).row

    here = saved(gpu=True)
    model.to("meta")
    assert saved(gpu=False) == here > 1.2 * saved(gpu=True)
    assert not sketch(recipe_of("qwen3_5-causal", tmp_path, dtype="bf16")).work.gpu


@pytest.mark.crossed(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full", "adapter", "adapter, pfeiffer"])
@pytest.mark.parametrize(
    "name",
    [
        *("llama-causal", "qwen3-causal", "bert-classify", "deberta-classify"),
        *("bart-seq2seq", "t5-seq2seq", "t5-gated"),
        *("phi3-causal", "modernbert-classify", "gemma2-causal"),
        pytest.param("gemma4-causal", marks=pytest.mark.long),
    ],
)
def test_the_estimate_of_a_block_is_what_autograd_saves(name: str, method: str) -> None:
    saved = [saved_by_autograd(model_of(name, method, depth), name) for depth in (1, 2)]
    assert estimated(model_of(name, method, 2)) == pytest.approx(saved[1] - saved[0], rel=0.1)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_so_is_that_of_layers_whose_weights_lie_the_other_way(method: str) -> None:
    saved = [saved_by_autograd(model_of("gpt2-causal", method, depth), "gpt2-causal") for depth in (1, 2)]
    assert estimated(model_of("gpt2-causal", method, 2)) == pytest.approx(saved[1] - saved[0], rel=0.1)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("name", ["mixtral-causal", "qwen2moe-causal", "gptoss-causal"])
def test_of_experts_those_that_a_token_goes_through_are_counted(name: str, method: str) -> None:
    saved = [saved_by_autograd(model_of(name, method, depth), name) for depth in (1, 2)]
    assert estimated(model_of(name, method, 2)) == pytest.approx(saved[1] - saved[0], rel=0.1)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_of_attention_that_takes_turns_both_forms_are_near(
    kind: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second block is of this kind; rows are a chunk long."""
    monkeypatch.setattr("tests.estimate.test_activations.LENGTH", CHUNK)
    sizes: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "use_cache": False}
    sizes |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32)
    kinds = ["full_attention", kind]
    models = [model_of("qwen3_5-causal", method, at, layer_types=kinds[:at], **sizes) for at in (1, 2)]
    one, two = (saved_by_autograd(model, "qwen3_5-causal") for model in models)
    assert estimated(models[1]) == pytest.approx(two - one, rel=0.1)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "full", "adapter"])
@pytest.mark.parametrize("name", ["llama-causal", "bert-classify", "t5-seq2seq"])
def test_under_bf16_autocast_it_is_near(name: str, method: str) -> None:
    saved = [saved_by_autograd(model_of(name, method, depth, bf16=True), name, bf16=True) for depth in (1, 2)]
    assert estimated(model_of(name, method, 2, bf16=True), itemsize=2) == pytest.approx(
        saved[1] - saved[0], rel=0.2
    )


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", ["phi3-causal", pytest.param("modernbert-classify", marks=pytest.mark.long)])
def test_parts_of_one_linear_save_its_input_once(name: str, bf16: bool) -> None:
    models = [model_of(name, "lora, by parts", depth, bf16) for depth in (1, 2)]
    saved = [saved_by_autograd(model, name, bf16) for model in models]
    found = estimated(models[1], itemsize=2 if bf16 else 4)
    assert found == pytest.approx(saved[1] - saved[0], rel=0.1)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("bert-classify", ("attention_probs_dropout_prob", "hidden_dropout_prob")),
        ("deberta-classify", ("attention_probs_dropout_prob", "hidden_dropout_prob")),
        ("t5-seq2seq", ("dropout_rate",) * 2),
    ],
)
def test_dropout_is_near(name: str, rates: tuple[str, str]) -> None:
    changes = dict.fromkeys(rates, 0.1)
    saved = [saved_by_autograd(model_of(name, "lora", depth, **changes), name) for depth in (1, 2)]
    assert estimated(model_of(name, "lora", 2), dropouts=(0.1, 0.1)) == pytest.approx(
        saved[1] - saved[0], rel=0.3
    )


def test_the_rank_of_an_update_is_what_its_layer_says() -> None:
    """A rank above the width is no less a rank."""

    saved = [
        saved_by_autograd(model_of("llama-causal", "lora", depth, r=300), "llama-causal") for depth in (1, 2)
    ]
    assert estimated(model_of("llama-causal", "lora", 2, r=300)) == pytest.approx(
        saved[1] - saved[0], rel=0.05
    )


class Rescale(LlamaRMSNorm):
    """A norm by another name."""


class NormalLinear(nn.Linear):
    """No norm, whatever it is called."""


def test_norms_and_linears_are_known_by_their_tensors_and_not_by_their_names() -> None:
    model = model_of("qwen3-causal", "full", 2)
    before = estimated(model)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.__class__ = Rescale
        elif type(module) is nn.Linear:
            module.__class__ = NormalLinear
    assert estimated(model) == before


def test_side_saves_in_the_ladder_only() -> None:
    model = model_of("llama-causal", "side", 2)
    (stack,) = own_stacks(model, family_of(model)).values()  # type: ignore[arg-type]
    assert stack.ladder is not None
    extent = Extent(LENGTH, LENGTH, LENGTH, heads=8)
    ladder: Any = stack.ladder
    level = saved_by(ladder.blocks[0], stack.rule, None, extent, 4, (0.0, 0.0)).of(ROWS)
    # what `down` takes from the backbone, and the two that are mixed
    level += ROWS * LENGTH * 4 * (256 + 2 * 32)
    saved = [saved_by_autograd(model_of("llama-causal", "side", depth), "llama-causal") for depth in (1, 2)]
    assert level == pytest.approx(saved[1] - saved[0], rel=0.05)


@pytest.mark.crossed(1)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("name", ["llama-causal", "bert-classify", "bart-seq2seq", "t5-seq2seq"])
def test_a_fused_level_keeps_what_its_steps_say(name: str, bf16: bool) -> None:
    saved, models = [], [model_of(name, "side", depth, bf16) for depth in (1, 2)]
    for model in models:
        fuse(model, family_of(model), "reference")
        saved.append(saved_by_autograd(model.train(), name, bf16))
    work = ForwardPass(ROWS, {"encoder": LENGTH, "decoder": LENGTH}, itemsize=2 if bf16 else 4)
    found = 0.0
    for stack in own_stacks(models[1], family_of(models[1])).values():  # type: ignore[arg-type]
        *_, level = saved_in(stack, models[1].config, family_of(models[1]), ALONE, Coordinate(), work, None)  # type: ignore[arg-type]
        found += level.of(ROWS)
    assert found == pytest.approx(saved[1] - saved[0], rel=0.05)


# ------------------------------------------------------------------ what a rank saves


def shares(connection: str) -> list[Saved]:
    """What each of two ranks saves, heads and columns cut 3:1."""
    found = []
    for rank in (0, 1):
        model = model_of("llama-causal", "lora", 2)
        family = family_of(model)
        assert family is not None
        one = Cut("heads", "heads", connection, "gather", (6, 2), (3, 1), (480, 160), (3, 1), False, False)  # type: ignore[arg-type]
        cut(model, family, ParallelPlan(tp=2, cut=one), Coordinate(tp=rank))
        (stack,) = own_stacks(model, family).values()
        extent = Extent(LENGTH, LENGTH * (3, 1)[rank] // 4, heads=(6, 2)[rank])
        found.append(saved_by(stack.blocks[0], stack.rule, one, extent, 4, (0.0, 0.0)))
    return found


def test_what_regions_save_is_shared_out_and_what_lies_between_only_by_sequence() -> None:
    whole = saved_by_block(0)
    between = 2 * LENGTH * 4 * 256  # two norms
    # inputs of column sites, and what their factors make, are the same on every rank
    entering = LENGTH * 4 * (2 * 256 + 7 * 16)
    for connection, doubled in (("whole", between + entering), ("sequence", entering)):
        assert sum(one.row for one in shares(connection)) == pytest.approx(whole + doubled, rel=0.02)
    even, uneven = shares("whole")
    assert even.row > uneven.row


def saved_by_block(index: int) -> float:
    """Bytes per row of a block that is not cut."""
    model = model_of("llama-causal", "lora", 2)
    (stack,) = own_stacks(model, family_of(model)).values()  # type: ignore[arg-type]
    return saved_by(stack.blocks[index], stack.rule, None, Extent(LENGTH, LENGTH, heads=8), 4, (0.0, 0.0)).row


def test_of_a_block_computed_again_its_input_is_kept() -> None:
    one = Cut("sequence", "sequence", "sequence", "gather", (), (), (), (3, 1), False, False)
    assert inputs_of(256, None, Extent(48, 36), 2) == 256 * 48 * 2
    assert inputs_of(256, one, Extent(48, 36), 2) == 256 * 36 * 2


def test_a_region_by_sequence_saves_all_keys_and_values_unless_they_travel() -> None:
    def saved(exchange: str) -> float:
        model: nn.Module = model_of("llama-causal", "lora", 1)
        (stack,) = own_stacks(model, family_of(model)).values()  # type: ignore[arg-type]
        one = Cut("sequence", "sequence", "sequence", exchange, (), (), (), (3, 1), False, False)
        return saved_by(stack.blocks[0], stack.rule, one, Extent(LENGTH, 12, heads=8), 4, (0.0, 0.0)).row

    assert saved("gather") - saved("ring") == 2 * (LENGTH - 12) * 128 * 4
    assert saved("ring") == saved("ulysses") == pytest.approx(saved_by_block(0) / 4)
