"""The governor: which policy it asks for and with what, when it asks again, what it says, and what each block
is told."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import petune
from petune.errors import UsageError
from petune.kernels.block.module import Spec
from petune.kernels.configs import MemoryConfig, Rung
from petune.kernels.fuse import fuse_stages
from petune.kernels.memory import buffers, policy_hook
from petune.kernels.memory.block_cost import rates_of
from petune.kernels.memory.block_step import BlockStep
from petune.kernels.memory.buffers import waiting_bytes
from petune.kernels.memory.offload import Passing
from petune.kernels.memory.outside import STATES, fixed_bytes, once
from petune.kernels.memory.policy import Policy, choose, least_bytes
from petune.kernels.memory.policy_hook import Governor, shape_of
from petune.models import family_of
from petune.models.sharded import Shards, put_shards
from petune.models.stack import Stack, own_stacks
from petune.rng.context import bound
from tests.kernels.fused_pairs import BERT, GROUPED, METHODS, MODELS, batch, blocks, gradients, pair
from tests.methods.zoo import tiny

GIB = 2**30
CUDA = torch.device("cuda")
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}


class Device:
    """A card of 80 GiB that says what a test wants of it."""

    total, free, reserved, allocated, fraction = 80 * GIB, 60 * GIB, 20 * GIB, 10 * GIB, 1.0
    recorded = 0  # of what is reserved and not allocated, what CUDA graphs hold


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (made.free, made.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: made.reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: made.allocated)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: made.fraction)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(policy_hook, "private_bytes", lambda device: made.recorded)
    return made


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What policies were asked for, by argument."""
    seen: list[dict[str, Any]] = []

    def record(step: BlockStep, config: MemoryConfig, budget: int, host: int) -> Policy:
        seen.append(vars(step) | {"config": config, "budget": budget, "host": host})
        return choose(step, config, budget, host)

    monkeypatch.setattr(policy_hook, "choose", record)
    return seen


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    lines: list[str] = []
    monkeypatch.setattr(policy_hook, "say", lines.append)
    yield lines


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**GROUPED | changes))


@dataclass
class Planned:
    """A governor and what it plans for; it does not keep its model alive itself."""

    governor: Governor
    model: nn.Module
    specs: list[Spec]

    def kept(self, device: torch.device, tokens: int, longest: int) -> list[tuple[Rung, int | None]]:
        stack = next(module for module in self.model.modules() if isinstance(module, Stack))
        return self.governor._kept(stack, device, tokens, longest)

    def under(self, config: MemoryConfig) -> Planned:
        """The same model under another governor."""
        made = Governor(config)
        made.meet(self.model, ())
        return Planned(made, self.model, self.specs)


def governor(
    make: Callable[[], Any] = llama,
    host: float | None = 100,
    tuned: dict[str, Any] | None = None,
    **settings: Any,
) -> Planned:
    """That of a fused model without memory, on the device "meta"; `tuned` says by what, `settings` are
    memory's."""
    with torch.device("meta"):
        model = petune.wrap(make(), kernels="reference", **(tuned or {}))
    found = Planned(Governor(MemoryConfig()), model, [block.spec for block in blocks(model)])
    return found.under(MemoryConfig(host=host, **settings))


# ------------------------------------------------------------------ what is asked for


def test_a_policy_is_asked_for_once_for_batches_of_nearly_one_size(device: Device, asked: list[Any]) -> None:
    made = governor()
    for tokens in (5000, 5100, 4097, 5120):
        made.kept(CUDA, tokens, 512)
    assert [(one["tokens"], one["sequence"]) for one in asked] == [(5120, 512)]
    made.kept(CUDA, 5121, 512)
    assert [one["tokens"] for one in asked] == [5120, 6144]
    assert made.kept(CUDA, 5000, 512) == made.kept(CUDA, 5120, 512)
    assert len(asked) == 2


def test_the_same_rungs_are_spoken_of_once(device: Device, asked: list[Any], said: list[str]) -> None:
    made = governor()
    for tokens in range(1024, 9 * 1024, 1024):
        made.kept(CUDA, tokens, 512)
    policies = list(made.governor.policies.values())
    assert len(policies) == 8 and len({policy.rungs for policy in policies}) == 1
    assert said == list(policies[0].lines())


def test_room_for_other_ranks_is_that_of_the_block_with_the_widest_heads(
    device: Device, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = governor(lambda: tiny("gemma4-causal"))
    widths = {one.program.sizes.head_dim * one.program.sizes.heads for one in made.specs}
    assert len(widths) == 2

    class Exchange:
        def room_bytes(self, queries: int, keys: int) -> tuple[int, int]:
            return 0, queries

    for wanted in (0, max(widths) * 1024 * made.specs[0].dtype.itemsize):
        made.under(made.governor.config).kept(CUDA, 1024, 512)
        assert asked[-1]["fixed"] == asked[0]["fixed"] + wanted
        for spec in made.specs:
            monkeypatch.setattr(spec, "exchanges", (Exchange(),))
            monkeypatch.setattr(type(spec), "peers", None)


def test_other_rungs_are_spoken_of(device: Device, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made, policies = (
        governor(),
        [
            Policy((rung,) * 3, None, 1, 2, 3, 1.0, 0.1, 1.0)
            for rung in (Rung("all"), Rung("input"), Rung("all"))
        ],
    )
    left = iter(policies)
    monkeypatch.setattr(policy_hook, "choose", lambda *args, **settings: next(left))
    for tokens in (1024, 2048, 3072):
        made.kept(CUDA, tokens, 512)
    assert said == [line for policy in policies for line in policy.lines()]


def test_stages_count_the_passes_on_the_way_and_what_lies_beside_them(
    device: Device, asked: list[Any]
) -> None:
    """What other passes keep is on the device when a size is new, and is not counted as standing too."""
    made, other = governor(), governor()
    made.governor = Governor(MemoryConfig(host=100), 2.5, [other.model], pieces=4)
    made.governor.meet(made.model, ())
    standing = fixed_bytes(made.model) + GIB
    with bound(passing=Passing(standing=standing)):
        made.kept(CUDA, 4096, 512)
    made.governor.become(MemoryConfig(host=100))
    made.kept(CUDA, 4096, 512)
    assert [one["passes"] for one in asked] == [2.5, 2.5]
    assert asked[0]["once"] == pytest.approx(once(made.model, asked[0]["rates"]) / 4) and asked[0]["once"] > 0
    assert [one["fixed"] for one in asked] == [standing, device.allocated]
    both = fixed_bytes(made.model, other.model)
    assert both == 2 * fixed_bytes(made.model), "tensors of their own"
    device.allocated = 0
    made.governor.become(MemoryConfig(host=100))
    made.kept(CUDA, 4096, 512)
    assert asked[-1]["fixed"] == both


def test_a_rank_counts_the_blocks_of_all_its_stages_in_flight() -> None:
    """Two stages of three blocks, of which two and a half passes each are on the way."""
    with torch.device("meta"):
        models = [llama(), llama()]
    family = family_of(models[0])
    assert family is not None
    for model in models:
        own_stacks(model, family)
    fuse_stages(models, family, "reference", in_flight=2.5, pieces=4, waiting=1.5)
    for model in models:
        (stack,) = (module for module in model.modules() if isinstance(module, Stack))
        (found,) = (hook for hook in stack._forward_pre_hooks.values() if isinstance(hook, Governor))
        assert (found.passes, found.pieces, found.waiting) == (5, 4, 9) and [
            ref() for ref in found.besides
        ] == [other for other in models if other is not model]
        assert blocks(model)[0].spec.store is blocks(models[0])[0].spec.store, "one host, one limit"


ONE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("tuned", "share"),
    [({"method": "full"}, 1), ({"method": "lora"}, 0), ({"method": "lora", "also_train": [ONE]}, 1 / 3)],
    ids=["full", "lora", "a block of three beside lora"],
)
def test_what_products_of_weights_wait_with_is_there_throughout(
    tuned: dict[str, Any], share: float, device: Device, asked: list[Any]
) -> None:
    made = governor(tuned=tuned)
    for made.governor.waiting in (0.0, 2.5):
        made.governor.policies.clear()
        made.kept(CUDA, 8192, 128)
    own = waiting_bytes(replace(asked[0]["shape"], trained=True))
    assert own > 0 and asked[1]["fixed"] - asked[0]["fixed"] == int(2.5 * share * 8192 * own)


@pytest.mark.parametrize(("rows", "masked", "waits"), [(2, False, 0), (1, False, 1), (2, True, 1)])
def test_products_of_rows_that_go_in_halves_do_not_wait(
    rows: int, masked: bool, waits: int, device: Device, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Spec, "overlapped", True)
    made = governor(tuned={"method": "full"})
    hidden = torch.empty(rows, 512, 64, device="meta")
    stack = next(module for module in made.model.modules() if isinstance(module, Stack))
    monkeypatch.setattr(policy_hook, "_room_bytes", lambda *_: (0, 0))
    mask = {"attention_mask": torch.empty(rows, 512)} if masked else {}
    for made.governor.waiting in (0.0, 1.0):
        made.governor._look_at_halves(stack, len(hidden), mask)
        made.governor.policies.clear()
        made.kept(CUDA, rows * 512, 512)
    own = waiting_bytes(replace(asked[0]["shape"], trained=True))
    assert asked[1]["fixed"] - asked[0]["fixed"] == waits * max(1024, rows * 512) * own


def test_short_rows_are_not_priced_as_long_ones(device: Device, asked: list[Any]) -> None:
    governor().kept(CUDA, 8192, 128)
    assert asked[0]["sequence"] <= 256


def test_all_that_is_free_is_the_budget_but_for_a_twentieth(device: Device, asked: list[Any]) -> None:
    governor().kept(CUDA, 2048, 512)
    assert asked[0]["budget"] == int((60 + 20 - 10) * 0.95 * GIB) + 10 * GIB


def test_what_recordings_hold_is_not_free_for_a_new_size(device: Device, asked: list[Any]) -> None:
    device.recorded = 4 * GIB
    governor().kept(CUDA, 2048, 512)
    governor(budget=30).kept(CUDA, 2048, 512)
    assert asked[0]["budget"] == int((60 + 20 - 10 - 4) * 0.95 * GIB) + 10 * GIB
    assert asked[1]["budget"] == 26 * GIB


@pytest.mark.parametrize(
    ("settings", "fraction", "expected"),
    [({"budget": 12.5}, 1.0, 12.5), ({}, 0.25, 20), ({"budget": 30}, 0.25, 20), ({"budget": 500}, 1.0, 76.5)],
)
def test_the_budget_is_never_more_than_was_allowed(
    settings: dict[str, Any], fraction: float, expected: float, device: Device, asked: list[Any]
) -> None:
    device.fraction = fraction
    governor(**settings).kept(CUDA, 2048, 512)
    assert asked[0]["budget"] == int(expected * GIB)


def test_an_encoder_leaves_what_its_decoder_needs_at_least(
    device: Device, asked: list[Any], said: list[str]
) -> None:
    """The decoder is entered when the encoder keeps what it keeps; the head is the decoder's. Each is spoken
    of by its name."""
    sizes = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "vocab_size": 300,
    }
    made = governor(lambda: T5ForConditionalGeneration(T5Config(**sizes)))
    encoder, decoder = (module for module in made.model.modules() if isinstance(module, Stack))
    found = {
        stack: next(hook for hook in stack._forward_pre_hooks.values() if isinstance(hook, Governor))
        for stack in (encoder, decoder)
    }
    for hook in found.values():
        hook.meet(made.model, ())
    for tokens in (4096, 65536):
        found[decoder].entered = tokens, 512
        found[encoder]._kept(encoder, CUDA, tokens, 512)
    found[decoder]._kept(decoder, CUDA, 4096, 512)
    few, many, last = asked
    assert {line.partition(":")[0] for line in said} == {"memory of the encoder", "memory of the decoder"}
    whole = last["budget"]
    assert few["vocabulary"] == many["vocabulary"] == 0 and last["vocabulary"] == 300
    kept = 4096 * 3 * buffers.kept_bytes(shape_of(cast("Any", decoder.blocks[0]).spec), "input")
    assert whole - few["budget"] > kept and whole - many["budget"] > 16 * kept
    assert whole - few["budget"] < whole - many["budget"] < 16 * (whole - few["budget"])


def test_a_budget_that_is_too_small_is_an_error_in_words(device: Device) -> None:
    with pytest.raises(UsageError, match="does not fit"):
        governor(budget=0.01).kept(CUDA, 8192, 512)


def test_host_memory_is_what_the_config_says_or_four_fifths_of_what_is_free(
    device: Device, asked: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    governor(host=1.5).kept(CUDA, 2048, 512)
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 100 kB\nMemFree: 2 kB\nMemAvailable:   50000 kB\n")
    monkeypatch.setattr(policy_hook, "open", lambda path: file.open(), raising=False)
    governor(host=None).kept(CUDA, 2048, 512)
    assert [one["host"] for one in asked] == [int(1.5 * GIB), int(50000 * 1024 * 0.8)]


def test_a_system_without_proc_offloads_nothing_unasked(
    device: Device, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(path: str) -> Any:
        raise FileNotFoundError(path)

    monkeypatch.setattr(policy_hook, "open", none, raising=False)
    governor(host=None).kept(CUDA, 2048, 512)
    assert asked[0]["host"] == 0


# ------------------------------------------------------------------ what is fixed


def test_fixed_are_weights_buffers_gradients_and_states() -> None:
    model = governor().model
    weights = sum(value.nbytes for value in model.parameters()) + sum(
        value.nbytes for value in model.buffers()
    )
    assert fixed_bytes(model) == weights + STATES * sum(
        value.numel() for value in model.parameters() if value.requires_grad
    )


def test_of_a_sharded_model_what_is_here_and_what_is_gathered_is_fixed(
    device: Device, asked: list[Any]
) -> None:
    """Shards may rest in host memory, where blocks that stream do too."""
    model = petune.wrap(llama(), kernels="reference")
    put_shards(model, Shards(own=20 * GIB, trained=GIB, gathered=5 * GIB))
    Planned(Governor(MemoryConfig()), model, []).under(MemoryConfig(host=1)).kept(CUDA, 2048, 512)
    assert asked[0]["fixed"] == fixed_bytes(model) == (25 + STATES) * GIB
    assert asked[0]["host"] == GIB and asked[0]["wide"] is None
    # more is lost between pieces that are gathered, freed and gathered again
    assert asked[0]["budget"] == int((60 + 20 - 10) * 0.9 * GIB) + 10 * GIB


def test_of_several_sharded_stages_all_are_fixed(device: Device, asked: list[Any]) -> None:
    first, second = (petune.wrap(llama(), kernels="reference") for _ in range(2))
    put_shards(first, Shards(own=2 * GIB, trained=0, gathered=GIB))
    put_shards(second, Shards(own=4 * GIB, trained=GIB, gathered=8 * GIB))
    made = Planned(Governor(MemoryConfig(host=1), passes=2, beside=[second]), first, [])
    made.governor.meet(first, ())
    made.kept(CUDA, 2048, 512)
    assert asked[0]["fixed"] == fixed_bytes(first, second) == (15 + STATES) * GIB


def test_tied_embeddings_are_there_once() -> None:
    tied, untied = (
        fixed_bytes(governor(lambda tied=tied: llama(tie_word_embeddings=tied)).model)
        for tied in (True, False)
    )
    assert untied - tied == 50 * 32 * 4


def test_other_tensors_on_the_device_are_no_room(device: Device, asked: list[Any]) -> None:
    device.allocated = 10 * GIB
    governor().kept(CUDA, 2048, 512)
    # another model of 30 GiB has come
    device.free, device.reserved, device.allocated = 30 * GIB, 50 * GIB, 40 * GIB
    governor().kept(CUDA, 2048, 512)
    rooms = [one["budget"] - one["fixed"] for one in asked]
    assert rooms[0] - rooms[1] > 25 * GIB


def test_a_head_over_a_vocabulary_counts_and_a_classifier_does_not(device: Device, asked: list[Any]) -> None:
    governor().kept(CUDA, 2048, 512)
    governor(
        lambda: LlamaForSequenceClassification(LlamaConfig(**GROUPED, num_labels=3, pad_token_id=0))
    ).kept(CUDA, 2048, 512)
    assert [one["vocabulary"] for one in asked] == [50, 0]


def test_a_head_of_another_name_counts(device: Device, asked: list[Any]) -> None:
    governor(lambda: BertForMaskedLM(BertConfig(**BERT))).kept(CUDA, 2048, 512)
    assert asked[0]["vocabulary"] == 50


def test_the_cost_models_block_has_the_sizes_and_ranks_of_the_fused_one() -> None:
    llama = shape_of(governor(tuned={"r": 3, "targets": ["q", "gate", "down"]}).specs[0])
    assert (llama.width, llama.heads, llama.kv_heads, llama.head_dim, llama.columns, llama.gated) == (
        32,
        4,
        2,
        8,
        56,
        True,
    )
    assert (llama.trained, llama.itemsize, llama.fp8) == (False, 4, False)
    ranks = llama.ranks
    assert (ranks.q, ranks.k, ranks.v, ranks.o, ranks.gate, ranks.up, ranks.down) == (3, 0, 0, 0, 3, 0, 3)
    bert = shape_of(governor(MODELS["bert"], tuned={"method": "full"}).specs[0])
    assert (bert.width, bert.heads, bert.kv_heads, bert.columns, bert.gated) == (32, 4, 4, 56, False)
    assert bert.trained


# ------------------------------------------------------------------ what blocks are told


def test_each_block_gets_its_own_rung_and_tiles_only_where_it_recomputes(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = governor()
    rungs = (Rung("input", "input"), Rung("attention"), Rung("all"))
    monkeypatch.setattr(
        policy_hook, "choose", lambda *args, **settings: Policy(rungs, 2048, 1, 2, 3, 1.0, 0.1, 1.0)
    )
    assert made.kept(CUDA, 2048, 512) == [(rungs[0], 2048), (rungs[1], 2048), (rungs[2], None)]


@pytest.mark.parametrize("keep", ["all", "projections", "attention", "input"])
@pytest.mark.parametrize("offload", ["none", "input"])
def test_what_the_config_says_holds(keep: Any, offload: Any, device: Device) -> None:
    found = governor(keep=keep, offload=offload).kept(CUDA, 4096, 512)
    assert {rung.keep for rung, _ in found} == {keep}
    # the last block's backward pass comes at once
    assert [rung.offload for rung, _ in found] == [offload, offload, "none"]


def test_a_step_that_fits_keeps_all(device: Device) -> None:
    assert governor().kept(CUDA, 2048, 512) == [(Rung("all"), None)] * 3


def test_a_step_that_hardly_fits_keeps_less(device: Device) -> None:
    device.allocated = device.reserved = 0
    roomy = governor(lambda: llama(**WIDE))
    tight = roomy.under(MemoryConfig(host=0.001, budget=5))
    assert {rung.keep for rung, _ in roomy.kept(CUDA, 65536, 4096)} == {"all"}
    assert {rung.keep for rung, _ in tight.kept(CUDA, 65536, 4096)} != {"all"}


@pytest.mark.parametrize("settings", [{}, {"budget": 1e-6}, {"host": 1e-6}])
def test_a_cpu_keeps_all_and_plans_nothing(settings: dict[str, Any], asked: list[Any]) -> None:
    made = governor(**{"host": None, **settings})
    assert made.kept(torch.device("cpu"), 10**9, 10**9) == [(Rung("all"), None)] * 3
    assert not asked


def test_a_cpu_does_what_is_said() -> None:
    made = governor(keep="attention", offload="attention", tile=256)
    assert made.kept(torch.device("cpu"), 10, 10) == [(Rung("attention", "attention"), 256)] * 3


@pytest.mark.parametrize(
    "settings", [{"keep": "input", "offload": "attention"}, {"keep": "all", "tile": 2048}]
)
def test_settings_that_contradict_each_other_are_refused_when_the_model_is_wrapped(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(UsageError, match="memory"):
        petune.wrap(MODELS["llama"](), kernels="reference", memory=settings)


def called(model: Any, whole: bool = True) -> None:
    """A call of a model, or of its stack alone, in which nothing acts but hooks."""
    stack: Any = next(module for module in model.modules() if isinstance(module, Stack))
    stack.forward = lambda hidden: hidden
    model.forward = stack.__call__
    (model if whole else stack)(torch.zeros(2, 9, 32, device="meta"))


def test_a_copy_of_a_model_is_planned_for_when_the_first_is_gone(device: Device, asked: list[Any]) -> None:
    made = governor()
    again: Any = copy.deepcopy(made.model)
    again.lm_head = nn.Linear(32, 70, device="meta")
    del made
    gc.collect()
    called(again)
    assert [one["vocabulary"] for one in asked] == [70]


def test_a_body_that_is_called_without_its_head_is_planned_for(device: Device, asked: list[Any]) -> None:
    called(governor().model, whole=False)
    assert len(asked) == 1


# ------------------------------------------------------------------ when it acts


def sizes_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens, longest) of every call from now on."""
    seen: list[tuple[int, int]] = []

    def kept(self: Governor, specs: list[Spec], device: torch.device, tokens: int, longest: int) -> list[Any]:
        seen.append((tokens, longest))
        return [(Rung(), None)] * len(specs)

    monkeypatch.setattr(Governor, "_kept", kept)
    return seen


def test_padding_is_no_token_and_the_longest_row_is_that_without(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = pair("llama", METHODS["lora"])
    seen = sizes_of(fused, monkeypatch)
    inputs = {
        name: value.float() if value.is_floating_point() else value for name, value in batch("llama").items()
    }
    gradients(fused, inputs)
    gradients(fused, batch("llama", padded=False))
    packed = {
        "input_ids": inputs["input_ids"],
        "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2),
    }
    fused(**packed, use_cache=False)
    assert seen == [(15, 9), (18, 9), (18, 5)]


def test_a_pass_without_gradients_is_not_planned_and_leaves_rungs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused, _ = pair("llama", METHODS["lora"])
    for block in blocks(fused):
        block.spec.rung = Rung("attention")
    seen = sizes_of(fused, monkeypatch)
    with torch.no_grad():
        fused(**batch("llama"))
    assert not seen and {block.spec.rung for block in blocks(fused)} == {Rung("attention")}


def test_hidden_states_are_found_by_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, _ = pair("llama", METHODS["lora"])
    seen = sizes_of(fused, monkeypatch)
    stack: Any = next(module for module in fused.modules() if isinstance(module, Stack))
    x = torch.randn(2, 5, 32, dtype=next(fused.parameters()).dtype)
    angles: tuple[Tensor, Tensor] = fused.model.rotary_emb(x, torch.arange(5)[None])
    with bound(segments=None):
        stack(hidden_states=x, attention_mask=None, position_embeddings=angles)
    assert seen == [(10, 5)]


def test_rungs_change_with_the_size_of_a_batch() -> None:
    """What was kept by one policy is read by it, though another has come between the passes."""
    fused, plain = pair("llama", METHODS["lora"])
    made: list[Governor] = [
        hook
        for module in fused.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, Governor)
    ]
    found = []
    for model in (fused, plain):
        losses = []
        for length, rung in ((9, Rung("all")), (7, Rung("input", "input"))):
            made[0].become(MemoryConfig(keep=rung.keep, offload=rung.offload))
            losses.append(
                model(
                    **{name: value[:, :length] for name, value in batch("llama").items()}, use_cache=False
                ).loss
            )
        losses[0].backward()
        losses[1].backward()
        found.append({name: value.grad for name, value in model.named_parameters() if value.grad is not None})
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


class Beside:
    """A boundary of two ranks, of which the other one says `theirs`."""

    share = 1.0

    def room_bytes(self, *nbytes: int) -> tuple[int, int]:
        return 0, 0

    def __init__(self, theirs: list[int]) -> None:
        self.theirs, self.asked = theirs, 0

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        self.asked += 1
        return [min(one, *self.theirs) for one in numbers]


@pytest.mark.parametrize("peers", ["boundaries", "exchanges"])
def test_where_one_rank_has_no_room_all_of_them_say_so(peers: str, device: Device) -> None:
    made = governor()
    say = (lambda one: {0: one}) if peers == "boundaries" else (lambda one: [None, one])
    setattr(made.specs[0], peers, say(Beside([0])))
    with pytest.raises(UsageError, match="another rank"):
        made.kept(CUDA, 8192, 512)
    tight = governor(budget=0.01)
    own = Beside([1])
    setattr(tight.specs[0], peers, say(own))
    with pytest.raises(UsageError, match="does not fit its memory"):
        tight.kept(CUDA, 8192, 512)
    assert own.asked == 1, "the others would wait"


@pytest.mark.parametrize(
    "settings", [{}, {"offload": "input"}, {"keep": "attention", "offload": "attention"}]
)
def test_a_stack_needs_something_whatever_goes_to_the_host(settings: dict[str, Any]) -> None:
    shape = shape_of(governor().specs[0])
    step = BlockStep(shape, 24, 16384, 512, 0, rates_of("NVIDIA H200"))
    found = least_bytes(step, MemoryConfig(**settings))
    assert found > 24 * 4096 * shape.width


def test_a_decoder_plans_anew_when_its_encoder_keeps_more(device: Device, asked: list[Any]) -> None:
    made = governor()
    for beside in ((1024, 512), (1024, 512), (65536, 512)):
        made.governor.beside = beside
        made.kept(CUDA, 4096, 512)
    assert len(asked) == 2
