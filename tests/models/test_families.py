"""Each family's table against real Hugging Face modules: every site found, and every linear of every block
covered by one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache, lru_cache
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BertModel, LlamaModel, T5EncoderModel
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.methods import merge, wrap
from petune.methods.targets import LINEAR
from petune.models import FAMILIES, family_of
from petune.models.heads import refuse_headless
from petune.models.sites import find_sites
from petune.models.spec import Family, child_of, linears, stack_paths
from tests.methods.zoo import (
    ADAPTED,
    FOUR,
    GENERATE,
    GENERATING,
    LADDERED,
    SETTINGS,
    ZOO,
    batch,
    frozen,
    prompt,
    stir,
    tiny,
)

# roles and ways out of one block, by stack, of what most families of a kind have
ROLES = {
    "encoder": {"encoder": ("q k v o", "up down", 2)},
    "encoder-decoder": {"encoder": ("q k v o", "up down", 2), "decoder": ("q k v o " * 2, "up down", 3)},
    "decoder": {"decoder": ("q k v o", "gate up down", 2)},
}
OTHERS = {  # by family
    "opt": {"decoder": ("q k v o", "up down", 2)},
    "eurobert": {"encoder": ("q k v o", "gate up down", 2)},
    "modernbert": {"encoder": ("qkv o", "gate_up down", 2)},
    "gpt2": {"decoder": ("qkv o", "up down", 2)},
    "phi3": {"decoder": ("qkv o", "gate_up down", 2)},
    "glm4": {"decoder": ("q k v o", "gate_up down", 2)},
    "qwen3_5": {"decoder": (("qkv z b a o", "q k v o"), "gate up down", 2)},  # of each block in turn
}
OF_MODELS = {  # of those whose blocks differ otherwise
    "gemma4-causal": {"decoder": (("q k v o", "q k o"), "gate up down", 2)},
    "gemma4e-causal": {"decoder": (("q k v o", "q o"), "gate up down", 2)},
}
EMBEDS = "per_layer_"  # linears of embeddings for a block, which are no part of attention or MLP


plain = cache(tiny)  # for tests that only look


def family(name: str) -> Family:
    found = family_of(plain(name))
    assert found is not None
    return found


@pytest.mark.parametrize("name", ZOO)
def test_every_linear_of_every_block_is_one_site(name: str) -> None:
    model = plain(name)
    sites = find_sites(model, family(name))
    assert len({site.name for site in sites}) == len(sites)
    assert all(model.get_submodule(site.name) is site.module for site in sites)
    linears = {
        f"{path}.{key}"
        for path in stack_paths(model, family(name)).values()
        for key, module in model.get_submodule(path).named_modules()
        if isinstance(module, LINEAR) and not key.rpartition(".")[2].startswith(EMBEDS)
    }
    assert {site.name for site in sites} == linears


@pytest.mark.parametrize("name", ZOO)
def test_every_block_has_its_roles_and_leaves_each_region_once(name: str) -> None:
    sites = find_sites(plain(name), family(name))
    expected = OF_MODELS.get(name) or OTHERS.get(family(name).name, ROLES[family(name).kind])
    assert {site.stack for site in sites} == set(expected)
    for stack, (attention, mlp, ways_out) in expected.items():
        apart = ["q_pos", "k_pos"] if name == "deberta2-mlm" else []
        gated = ["gate"] if name in ("t5-gated", "mt5-seq2seq", "t5gemma-seq2seq") else []
        for block in range(2):
            own = [site for site in sites if (site.stack, site.block) == (stack, block)]
            here = attention if isinstance(attention, str) else attention[block]
            assert Counter(site.role for site in own) == Counter(
                [*here.split(), *apart, *mlp.split(), *gated]
            )
            assert {site.role for site in own if site.leaves} == {"o", "down"}
            assert sum(site.leaves for site in own) == ways_out


@pytest.mark.parametrize("name", ZOO)
def test_what_the_table_names_beside_the_blocks_exists(name: str) -> None:
    """Entries, head counts, cuts by head, the tail, the rotary module: read by methods and plans, not by
    find_sites."""
    model, table = plain(name), family(name)
    for stack, path in stack_paths(model, table).items():
        rule, around = table.stacks[stack], model.get_submodule(path.rpartition(".")[0])
        for beside in (rule.tail, rule.rotary):
            if beside:
                assert hasattr(around, beside)
        for block in model.get_submodule(path):
            for region in rule.regions_in(block):
                inner = block.get_submodule(region.enter)
                assert child_of(block, region.leave)
                counts = dict.fromkeys(region.head_counts, "heads") | dict.fromkeys(
                    region.kv_counts, "kv_heads"
                )
                for own, size in counts.items():
                    assert attrgetter(own)(inner) == getattr(table.shape(model.config), size)
        if rule.bias:
            assert block.get_submodule(rule.regions[0].enter) is not None


@pytest.mark.parametrize("name", ZOO)
def test_shape_is_that_of_the_weights(name: str) -> None:
    model, table = plain(name), family(name)
    shape = table.shape(model.config)
    for site in find_sites(model, table):
        if name in OF_MODELS and site.block:  # which differs from the first in sizes
            continue
        weight = site.module.weight.T if isinstance(site.module, Conv1D) else site.module.weight
        mixer = table.stacks[site.stack].linear
        if mixer is not None and site.region == mixer.region:
            continue
        if site.role == "q":
            assert weight.shape == (shape.heads * shape.head_dim * (1 + (mixer is not None)), shape.width)
        elif site.role in ("k", "v"):
            fewest = 2 if name == "gemma4-causal" else 1  # of the other block
            assert weight.shape == (fewest * shape.kv_heads * shape.head_dim, shape.width)
        elif site.role in ("gate", "up", "gate_up"):
            assert weight.shape == (shape.columns * (1 + (site.role == "gate_up")), shape.width)
        elif site.role == "qkv":
            assert weight.shape == ((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.width)


@pytest.mark.parametrize("name", LADDERED)
def test_narrow_divides_every_width_and_keeps_heads_and_the_original(name: str) -> None:
    model, table = plain(name), family(name)
    before = model.config.to_dict()
    wide, small = table.shape(model.config), table.shape(table.narrow(model.config, 4))
    assert model.config.to_dict() == before
    assert (small.heads, small.kv_heads) == (wide.heads, wide.kv_heads)
    assert (small.head_dim, small.columns, small.width) == (
        wide.head_dim // 4,
        wide.columns // 4,
        wide.width // 4,
    )


@pytest.mark.parametrize("name", [name for name in ZOO if name.endswith(("classify", "tokens"))])
def test_the_table_names_the_task_head(name: str) -> None:
    model = plain(name)
    beside = {key: list(child.parameters()) for key, child in model.named_children()}
    del beside[model.base_model_prefix]
    heads = {key for key, values in beside.items() if values}
    assert heads and heads <= {*family(name).heads, *family(name).fresh}
    assert sum(value.shape[0] == 3 for key in heads for value in beside[key]) >= 1


@pytest.mark.parametrize("model_type", [BertModel, LlamaModel, T5EncoderModel])
def test_a_bare_backbone_has_its_sites_too(model_type: type) -> None:
    name = {BertModel: "bert-classify", LlamaModel: "llama-causal", T5EncoderModel: "t5-seq2seq"}[model_type]
    assert find_sites(model_type(tiny(name).config), family(name))


@pytest.mark.parametrize("name", FOUR)
@pytest.mark.parametrize("other", ["bert", "bart", "t5", "llama"])
def test_the_wrong_table_raises_and_names_what_is_there(name: str, other: str) -> None:
    if name.startswith(other):
        find_sites(tiny(name), FAMILIES[other])
        return
    with pytest.raises(UsageError) as caught:
        find_sites(tiny(name), FAMILIES[other])
    text = str(caught.value)
    own = {"bert": "encoder.layer", "bart": "layers", "t5": "block", "llama": "layers"}[name.split("-")[0]]
    assert own in text or "SelfAttention" in text or "self_attn" in text


def bent(table: Family, stack: str, **changes: object) -> Family:
    """The table with changes to the first core of a stack."""
    rule = table.stacks[stack]  # type: ignore[index]
    first, *rest = rule.sublayers
    first = dataclasses.replace(first, core=dataclasses.replace(first.core, **changes))
    return dataclasses.replace(
        table, stacks={**table.stacks, stack: dataclasses.replace(rule, sublayers=(first, *rest))}
    )


def test_a_role_the_model_has_under_another_name_is_an_error_naming_it() -> None:
    groups = (linears(q="self_attn.q_prj", k="self_attn.k_proj", v="self_attn.v_proj"),)
    with pytest.raises(UsageError) as caught:
        find_sites(tiny("llama-causal"), bent(FAMILIES["llama"], "decoder", groups=groups))
    problem = caught.value.problems[0]
    assert problem.where == "model.layers.0"
    assert "self_attn.q_proj" in (problem.found or "")


@pytest.mark.parametrize("part", ["at", "out"])
def test_a_region_whose_entry_or_exit_is_missing_is_an_error(part: str) -> None:
    """Without a way out no site leaves, and an adapter would silently be put nowhere."""
    with pytest.raises(UsageError):
        find_sites(tiny("llama-causal"), bent(FAMILIES["llama"], "decoder", **{part: "self_attn.nowhere"}))


def test_a_model_without_a_table_has_no_family() -> None:
    assert family_of(nn.Linear(2, 2)) is None


# -- behaviour that depends on transformers' own code; run on the oldest supported release too --


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=pytest.mark.long if method == rare else ())
        for at, name in enumerate(ZOO)
        # a ladder beside each, since its blocks are the family's own; LoRA or adapters in turn
        for rare in [("adapter", "lora")[at % 2] if name in ADAPTED else "adapter"]
        for method in SETTINGS
        if method != "full" and name in {"adapter": ADAPTED, "side": LADDERED}.get(method, ZOO)
    ],
)
def test_a_wrapped_model_starts_as_its_base(name: str, method: str) -> None:
    found = wrap(tiny(name), method, **SETTINGS[method], also_train=())(**batch(name))
    assert torch.equal(found.logits, logits_of_base(name))


@lru_cache(maxsize=1)
def logits_of_base(name: str) -> torch.Tensor:
    """The same for every method."""
    logits: torch.Tensor = frozen(tiny(name))(**batch(name)).logits
    return logits


@pytest.mark.crossed(1)
@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
@pytest.mark.parametrize("name", GENERATING)
def test_a_wrapped_model_generates_alike_with_and_without_a_cache(name: str, method: str) -> None:
    model = wrap(tiny(name), method, **SETTINGS[method]).eval()
    stir(model, std=0.1)
    found = model.generate(**prompt(name), **GENERATE)
    assert torch.equal(found, model.generate(**prompt(name), use_cache=False, **GENERATE))
    assert not torch.equal(found, tiny(name).generate(**prompt(name), **GENERATE))


@pytest.mark.parametrize("name", FOUR)
def test_a_merged_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = wrap(tiny(name), "lora", r=4)
    stir(model, std=0.1)
    model = merge(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(
        type(model).from_pretrained(tmp_path).eval()(**batch(name)).logits, model(**batch(name)).logits
    )


def test_t5gemmas_head_of_classes_which_reads_a_token_early_is_refused() -> None:
    config = tiny("t5gemma-seq2seq").config
    with pytest.raises(UsageError, match="one token early"):
        refuse_headless(config, "classify")
    refuse_headless(config, "seq2seq")
    config.is_encoder_decoder = False
    refuse_headless(config, "classify")
