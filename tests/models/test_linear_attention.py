"""Models whose blocks take turns in mixers and attention: samples that are packed in a row see nothing of one
another, in logits and gradients, and what of a mixer trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import petune
from petune.errors import UsageError
from petune.methods import merge, wrap
from petune.models import gated_delta, linear_attention
from petune.models.gated_delta import gated_delta_rule
from petune.models.linear_attention import samples_of
from petune.models.sites import find_sites
from petune.parallel.configs import CutConfig, ParallelConfig
from petune.parallel.planning import make_plan
from tests.methods.peft_twins import assert_trains_as_peft
from tests.methods.zoo import GENERATE as HOW
from tests.methods.zoo import SETTINGS, batch, gradients, prompt, stir, table, tiny

NAMES = ("qwen3_5-causal", "qwen3next-causal", "qwen3_5moe-causal")
LENGTHS = ((3, 5, 2), (7, 1, 2))  # of the samples of each row


def samples() -> list[list[Tensor]]:
    """The samples of each row."""
    draw = torch.Generator().manual_seed(5)
    return [[torch.randint(3, 90, (length,), generator=draw) for length in row] for row in LENGTHS]


def packed() -> dict[str, Tensor]:
    """Rows of several samples, which positions tell apart."""
    ids = torch.stack([torch.cat(row) for row in samples()])
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    labels = ids.masked_fill(positions == 0, -100)  # the last token of a sample predicts nothing
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def apart() -> dict[str, Tensor]:
    """The same samples, a row each, padded."""
    rows = [sample for row in samples() for sample in row]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.index_fill(1, torch.tensor([0]), -100)}


def tuned(name: str, method: str = "lora", **changes: Any) -> Any:
    """The model, tuned and moved away from its start, its loss without the experts' own part."""
    model = wrap(tiny(name), method, **(SETTINGS.get(method, {}) | changes))
    stir(model, std=0.1)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_packed_samples_have_the_logits_and_gradients_of_rows_of_their_own(name: str) -> None:
    model = tuned(name)
    together, alone = model(**packed()).logits, model(**apart()).logits
    at = 0
    for row, lengths in zip(together, LENGTHS, strict=True):
        for part in row.split(lengths):
            assert torch.allclose(part, alone[at, : len(part)], atol=1e-5)
            at += 1
    found, expected = gradients(model, packed()), gradients(model, apart())
    assert torch.allclose(found[0], expected[0], atol=1e-6)
    assert {key.split(".")[3] for key in found[1]} >= {"linear_attn", "self_attn"}
    for key, value in expected[1].items():
        assert torch.allclose(found[1][key], value, rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("name", NAMES)
def test_transformers_alone_lets_a_state_through(name: str) -> None:
    """What the test above would not see if it held without petune."""
    model = tiny(name)
    found = model(**packed(), use_cache=False).logits
    alone = model(samples()[0][1][None], use_cache=False).logits[0]
    assert not torch.allclose(found[0, 3:8], alone, atol=1e-3)


@pytest.mark.parametrize("method", ["full", "adapter", "side", "dora", "ia3", "miss"])
def test_every_method_keeps_packed_samples_apart(method: str) -> None:
    model = tuned(NAMES[0], method, **({"r": 4} if method in ("dora", "miss") else {})).eval()
    together, alone = model(**packed()).logits, model(**apart()).logits
    assert torch.allclose(together[1, 7:8], alone[4, :1], atol=1e-5)
    assert torch.allclose(together[0, 8:], alone[2, :2], atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_sample_go_transformers_own_way(name: str) -> None:
    model, plain = petune.wrap(tiny(name), "full"), tiny(name)
    inputs = batch(name)
    positions = torch.arange(9).expand(3, -1)
    assert torch.equal(model(**inputs).logits, plain(**inputs).logits)
    ids = {"input_ids": inputs["input_ids"], "position_ids": positions}
    assert torch.equal(model(**ids).logits, plain(**ids).logits)
    found = model.generate(**prompt(name), **HOW)  # padded on the left, so that positions do not count up
    assert torch.equal(found, plain.generate(**prompt(name), **HOW))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padded", ["not", "left", "right"])
def test_rows_of_one_sample_train_as_transformers_own(padded: str, name: str) -> None:
    """In float32: transformers computes its scan in no other. The rows are longer than a chunk."""
    ids = torch.randint(3, 90, (2, 70), generator=torch.Generator().manual_seed(6))
    mask = torch.ones_like(ids)
    mask[1, {"not": slice(0), "left": slice(9), "right": slice(61, None)}[padded]] = 0
    inputs: dict[str, Any] = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100)}
    inputs |= {"use_cache": False} | ({} if padded == "not" else {"attention_mask": mask})
    model, plain = petune.wrap(tiny(name), "full", kernels="off"), tiny(name)
    found, expected = gradients(model, inputs), gradients(plain, inputs)
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for key, value in expected[1].items():
        scale = max(1.0, float(value.abs().max()))
        assert float((found[1][key] - value).abs().max()) < 1e-6 * scale, key


def test_petunes_rule_computes_what_trains_where_transformers_has_no_kernels(monkeypatch: Any) -> None:
    calls: list[tuple[Any, ...]] = []

    def counted(*given: Any) -> Tensor:
        calls.append(given)
        return gated_delta_rule(*given)

    monkeypatch.setattr(gated_delta, "gated_delta_rule", counted)
    model = petune.wrap(tiny(NAMES[0]), "full", kernels="off")
    inputs = {"input_ids": batch(NAMES[0])["input_ids"], "use_cache": False}

    def computed(**changes: Any) -> bool:
        calls.clear()
        model(**inputs | changes)
        return bool(calls)

    assert computed() and not computed(use_cache=True)
    with torch.no_grad():
        assert not computed()
        model.train()
        assert computed(), "as a pass that is computed again with gradients"
    with pytest.raises(ValueError, match="packed sequences"):
        computed(cu_seq_lens_q=torch.tensor([0, 4, 9], dtype=torch.int32))
    monkeypatch.setattr(linear_attention, "HAS_KERNELS", True)
    assert not computed()


PEFTS: dict[str, dict[str, Any]] = {
    **{method: {"r": 4} for method in ("lora", "dora", "miss")},
    "ia3": {"targets": ["qkv", "k", "v", "down"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", PEFTS)
def test_linears_of_mixers_train_as_pefts_and_files_go_both_ways(method: str, tmp_path: Path) -> None:
    assert_trains_as_peft(NAMES[0], tmp_path, method, **PEFTS[method])


@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
def test_generation_goes_on_from_states_as_from_the_whole_text(method: str) -> None:
    """A ladder's mixers have states of their own in the cache."""
    name = NAMES[0]
    model = tuned(name, method).eval()
    found = model.generate(**prompt(name), **HOW)
    assert torch.equal(found, model.generate(**prompt(name), use_cache=False, **HOW))
    assert not torch.equal(found, tiny(name).generate(**prompt(name), **HOW))


def test_a_ladders_mixers_begin_as_transformers_own() -> None:
    model = wrap(tiny(NAMES[0]), "side", reduction=4)
    ladder: Any = model.get_submodule("model.layers.side")
    torch.manual_seed(0)
    for leaf in ("A_log", "dt_bias"):
        ladder.draw(f"blocks.0.linear_attn.{leaf}")
    mixer = ladder.blocks[0].linear_attn
    assert mixer.dt_bias.eq(1).all() and mixer.A_log.exp().ge(0.01).all() and mixer.A_log.exp().le(16).all()
    assert len(set(mixer.A_log.tolist())) > 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("how", ["galaxy", "galaxy2", "sp"])
def test_rows_are_not_cut_where_a_state_goes_through_them(how: str, name: str) -> None:
    plan = ParallelConfig(**{how: CutConfig(size=2)})
    with pytest.raises(UsageError, match=r"a state through all tokens of a row(.|\n)*use tp, pp or dp"):
        make_plan(plan, table(name), tiny(name).config, None, 8)


def test_samples_are_kept_apart_in_bfloat16_over_a_quantised_base_and_copied() -> None:
    name, ids = NAMES[0], {key: value for key, value in packed().items() if key != "labels"}
    base = wrap(tiny(name, linear_value_head_dim=16), "lora", r=4, base_dtype="int8").bfloat16()
    stir(base, std=0.1)
    model = copy.deepcopy(base).eval()
    together = model(**ids).logits.detach()
    alone = base.eval()(samples()[0][1][None]).logits[0]
    assert together.dtype is torch.bfloat16
    assert torch.allclose(together[0, 3:8].float(), alone.float(), atol=0.15)
    assert float((together[0, 3:8] - alone).float().pow(2).mean().sqrt()) < 0.05


def test_told_samples_of_padded_rows_heed_the_mask() -> None:
    model = tuned(NAMES[0]).eval()
    inputs = {key: value.flip(1) for key, value in batch(NAMES[0]).items() if key != "labels"}
    one = {"seq_idx": torch.zeros(3, 9, dtype=torch.int64), "use_cache": False}
    found, expected = (model(**inputs, **more).logits for more in (one, {}))
    assert torch.allclose(
        found[inputs["attention_mask"] > 0], expected[inputs["attention_mask"] > 0], atol=1e-5
    )


def test_a_cache_of_packed_rows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"use_cache  rows of several samples leave no state"):
        tuned(NAMES[0])(**packed(), use_cache=True)


def test_a_merged_model_has_no_class_and_no_hook_of_petune() -> None:
    name = NAMES[0]
    model = tuned(name)
    expected = model(**batch(name)).logits
    merged = merge(copy.deepcopy(model))
    assert torch.allclose(merged(**batch(name)).logits, expected, atol=1e-4)
    assert {type(one).__module__.partition(".")[0] for one in merged.modules()} <= {"torch", "transformers"}
    assert not any(one._forward_pre_hooks or hasattr(type(one), "petune_extends") for one in merged.modules())


def test_the_line_counts_linears_of_mixers_and_says_what_stays_frozen(caplog: Any) -> None:
    caplog.set_level("INFO")
    petune.wrap(tiny(NAMES[0]), "lora", r=2)
    assert "mixer 5/5 (dt_bias, A_log, conv1d, norm frozen), attention 4/4" in caplog.text
    petune.wrap(tiny(NAMES[0]), "ia3")
    assert "mixer 0/5" in caplog.text


def test_a_role_of_mixers_is_a_target_of_its_own() -> None:
    model = wrap(tiny(NAMES[0]), "lora", r=2, targets=["qkv", "z"])
    layers = [site.name for site in find_sites(model, table(NAMES[0])) if hasattr(site.module, "lora_A")]
    assert layers == [f"model.layers.0.linear_attn.in_proj_{part}" for part in ("qkv", "z")]


def test_samples_are_numbered_where_positions_do_not_count_up() -> None:
    assert samples_of(torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 8, 9]])).tolist() == [
        [0, 0, 0, 1, 1, 2],
        [0] * 6,
    ]
