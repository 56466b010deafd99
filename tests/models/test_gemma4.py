"""Gemma 4: blocks of unlike sizes, that read keys and values of others and embeddings of their own, train as
peft trains them; and what does not go with them is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from petune.errors import UsageError
from petune.kernels.fuse import fuse
from petune.methods import wrap
from petune.models import FAMILIES
from petune.models.loading import packs
from petune.models.stack import own_stacks
from petune.parallel.configs import CutConfig, EpConfig, ParallelConfig, PpConfig
from petune.parallel.planning import make_plan
from tests.methods.zoo import (
    GENERATE,
    ZOO,
    assert_same_gradients,
    batch,
    gradients,
    prompt,
    stir,
    table,
    tiny,
)
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS

# of both kinds of attention one block that makes keys and values and one that reads them
DEEP: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
}
MODELS: dict[str, dict[str, Any]] = {"gemma4-causal": {}, "gemma4e-causal": DEEP}
ROWS: dict[str, Any] = {"use_cache": False}
EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 16,
}


def tuned(name: str) -> Any:
    """In float64, with LoRA in every place, nothing at identity."""
    model = wrap(tiny(name, **MODELS[name]).double(), "lora", r=4, alpha=8, kernels="off")
    stir(model, std=0.1)
    return model


def by_peft(name: str, like: nn.Module) -> nn.Module:
    """The same tuning as peft has it."""
    layers = sorted({key.rpartition(".")[0] for key, _ in like.named_parameters() if key.endswith("lora_A")})
    made: nn.Module = get_peft_model(
        tiny(name, **MODELS[name]), LoraConfig(r=4, lora_alpha=8, target_modules=layers)
    )
    with torch.no_grad():
        made.double()
        for layer in layers:
            for side in ("lora_A", "lora_B"):
                theirs = made.get_parameter(f"base_model.model.{layer}.{side}.default.weight")
                theirs.copy_(like.get_parameter(f"{layer}.{side}"))
    return made.eval()


def inputs_of(name: str, packed: bool) -> dict[str, Any]:
    """Padded rows, or two samples in a row that positions tell apart."""
    if not packed:
        return batch(name) | ROWS
    ids = batch(name, rows=1, length=13)["input_ids"]
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids} | ROWS


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_lora_has_the_loss_and_the_gradients_of_peft(name: str, packed: bool) -> None:
    model, inputs = tuned(name), inputs_of(name, packed)
    expected, theirs = gradients(by_peft(name, model), inputs)
    wanted = {
        key.removeprefix("base_model.model.").removesuffix(".default.weight"): value
        for key, value in theirs.items()
    }
    single = copy.deepcopy(model)
    fuse(single, FAMILIES["gemma4_text"], "reference")
    for one in (model, single):
        loss, found = gradients(one, inputs)
        assert float(loss) == pytest.approx(float(expected), rel=1e-6)
        assert_same_gradients(found, wanted)


def test_keys_that_later_blocks_read_have_their_gradient_where_all_is_computed_again() -> None:
    model = tuned("gemma4e-causal")
    inputs = inputs_of("gemma4e-causal", packed=False)
    expected = gradients(model, inputs)
    for stack in own_stacks(model, FAMILIES["gemma4_text"]).values():
        stack.recompute = True
    loss, found = gradients(model, inputs)
    assert torch.equal(loss, expected[0])
    assert_same_gradients(found, expected[1], 0)
    own = "model.layers.1.self_attn.k_proj.lora_B"
    alone = gradients(without_sharing(model), inputs)[1]
    assert not torch.allclose(found[own], alone[own], rtol=1e-3), "no later block has read these keys"


def without_sharing(model: Any) -> Any:
    """A copy whose later blocks see keys and values as numbers."""
    made = copy.deepcopy(model)
    for block in made.model.layers.blocks[2:]:
        block.register_forward_pre_hook(cut_off, with_kwargs=True)
    return made


def cut_off(block: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    kept = {key: tuple(one.detach() for one in pair) for key, pair in kwargs["shared_kv_states"].items()}
    return args, kwargs | {"shared_kv_states": kept}


@pytest.mark.parametrize("backend", ["sp-gather", pytest.param("sp-ring", marks=pytest.mark.long)])
def test_a_rank_reads_the_embeddings_of_its_own_tokens_and_all_train(backend: str) -> None:
    """Under full their table and their linear have a gradient, which ranks gather."""
    name = "gemma4e-causal"
    settings = (("num_hidden_layers", 4), ("num_kv_shared_layers", 2))
    check(Case(name, "full", BACKENDS[backend](name, 2), recompute=True, settings=settings, steps=1))


def test_tokens_that_the_last_blocks_leave_out_do_not_change_what_is_generated() -> None:
    """A first pass of generation asks for logits of one token, and blocks without keys compute that alone."""
    model = tuned("gemma4e-causal")
    own_stacks(model, FAMILIES["gemma4_text"])
    given = prompt("gemma4e-causal")
    found = model.generate(**given, **GENERATE)
    assert torch.equal(found, model.generate(**given, use_cache=False, **GENERATE))


@pytest.mark.parametrize(
    ("name", "plan", "reason"),
    [
        ("gemma4e-causal", ParallelConfig(pp=PpConfig(size=2)), r"num_kv_shared_layers = 2"),
        ("gemma4-causal", ParallelConfig(tp=CutConfig(size=2)), r"heads of its blocks .* another width"),
        ("gemma4-causal", ParallelConfig(galaxy=CutConfig(size=2)), r"heads of its blocks .* another width"),
        ("gemma4-causal", ParallelConfig(ep=EpConfig(size=2)), r"no routed experts to cut"),
        (
            "gemma4-causal",  # of whose keys and values blocks with full attention have 2
            ParallelConfig(sp=CutConfig(size=3, exchange="ulysses")),
            r"at most 2 ranks",
        ),
    ],
)
def test_plans_that_its_blocks_do_not_go_with_are_refused(
    name: str, plan: ParallelConfig, reason: str
) -> None:
    config = tiny(name, **MODELS[name]).config
    with pytest.raises(UsageError, match=reason):
        make_plan(plan, table(name), config, None, 12)


def test_embeddings_of_blocks_alone_are_no_part_of_a_pipeline() -> None:
    _, config, values = ZOO["gemma4e-causal"]
    given = config(**{**values, "num_kv_shared_layers": 0})
    with pytest.raises(UsageError, match="hidden_size_per_layer_input = 12"):
        make_plan(ParallelConfig(pp=PpConfig(size=2)), FAMILIES["gemma4_text"], given, None, 12)


@pytest.mark.parametrize("method", ["lora", "full", "adapter"])
def test_experts_beside_a_dense_mlp_are_refused(method: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be tuned(.|\n)*enable_moe_block"):
        wrap(tiny("gemma4-causal", **EXPERTS), method)


def test_samples_are_not_packed_where_tokens_see_later_ones() -> None:
    config = tiny("gemma4-causal").config
    assert packs(config)
    config.use_bidirectional_attention = "all"
    assert not packs(config)


def test_a_side_network_is_refused() -> None:
    with pytest.raises(UsageError, match="takes its sizes from its number"):
        wrap(tiny("gemma4-causal"), "side", reduction=4)
