"""Rows of the table of tokens: peft's `trainable_token_indices` as the oracle, tied heads included, and who
must know that a table has rows of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import petune
from petune.errors import FileError, UsageError
from petune.methods import count_parameters, merge, merged_weights, without_tuning, wrap
from petune.saving.export import save_merged
from tests.methods import zoo
from tests.methods.peft_twins import assert_close, assert_trains_as_peft
from tests.methods.zoo import assert_same_gradients, batch, gradients, stir, tiny
from tests.parallel.harness import Case, check
from tests.parallel.plans import BACKENDS, settings_of

IDS = sorted(set(batch("llama-causal")["input_ids"][0].tolist()))[:3]
TIED = {"tie_word_embeddings": True}


def tuned(name: str, changes: Any = None, **settings: Any) -> Any:
    model = wrap(tiny(name, **(changes or {})), **{"r": 2, "targets": ["q"], "token_rows": IDS, **settings})
    stir(model, std=0.2)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama-causal", {}), ("llama-causal", TIED), ("bert-classify", {}), ("t5-seq2seq", TIED)],
)
def test_they_train_as_in_peft_and_files_go_both_ways(name: str, changes: Any, tmp_path: Path) -> None:
    model = assert_trains_as_peft(name, tmp_path, changes=changes, r=2, targets=["q"], token_rows=IDS)
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == IDS
    stored = [key for key in load_file(tmp_path / "ours" / "adapter_model.safetensors") if "token" in key]
    assert len(stored) == 1 and stored[0].endswith(".token_adapter.trainable_tokens_delta")
    assert model.petune_tuning.config.token_rows == tuple(IDS)


def test_only_the_named_rows_are_trained_and_counted() -> None:
    base, model = tiny("llama-causal"), tuned("llama-causal")
    plain = wrap(tiny("llama-causal"), r=2, targets=["q"])
    assert count_parameters(model)[0] - count_parameters(plain)[0] == len(IDS) * 64
    assert torch.equal(model.model.embed_tokens.weight, base.model.embed_tokens.weight)
    everything = torch.arange(97)[None]
    moved = model.model.embed_tokens(everything) != base.model.embed_tokens(everything)
    assert sorted(moved[0].any(-1).nonzero().flatten().tolist()) == sorted(IDS)
    with without_tuning(model):
        assert torch.equal(model(**batch("llama-causal")).logits, base(**batch("llama-causal")).logits)


@pytest.mark.parametrize("changes", [{}, TIED])
def test_merging_keeps_the_logits_and_a_tie(changes: Any, tmp_path: Path) -> None:
    name = "llama-causal"
    base, model = tiny(name, **changes), tuned(name, changes)
    expected = model(**batch(name)).logits
    with merged_weights(model):
        assert_close(model(**batch(name)).logits, expected)
    save_merged(model, tmp_path / "merged")
    plain = type(base).from_pretrained(tmp_path / "merged").eval()
    assert_close(plain(**batch(name)).logits, expected)
    assert_close(merge(model)(**batch(name)).logits, expected)
    for one in (plain, model):
        tie = one.lm_head.weight is one.model.embed_tokens.weight
        assert tie is bool(one.config.tie_word_embeddings) is bool(changes)


def test_a_tied_table_of_t5_is_merged_and_saved_as_one(tmp_path: Path) -> None:
    model = tuned("t5-seq2seq", TIED)
    expected = model(**batch("t5-seq2seq")).logits
    save_merged(model, tmp_path / "merged")
    plain = type(tiny("t5-seq2seq")).from_pretrained(tmp_path / "merged").eval()
    assert_close(plain(**batch("t5-seq2seq")).logits, expected)


def test_a_tied_head_with_a_bias_adds_it_beside_narrower_weights() -> None:
    base, inputs = tiny("bert-mlm").bfloat16(), batch("bert-mlm")
    base.cls.predictions.bias.data.normal_()
    expected = base(**inputs).logits
    model = wrap(base, r=2, targets=["q"], token_rows=IDS)
    found = model(**inputs).logits
    others = [number for number in range(97) if number not in IDS]
    assert torch.equal(found[..., others], expected[..., others])
    torch.testing.assert_close(found[..., IDS], expected[..., IDS], rtol=2e-2, atol=2e-2)
    gradients(model, inputs)


def test_beside_biases_of_tuned_layers_a_tied_head_keeps_its_own_and_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = wrap(tiny("bert-mlm"), r=2, targets=["o"], token_rows=IDS, bias="lora")
    stir(model)
    assert not model.cls.predictions.bias.requires_grad
    petune.save(model, tmp_path / "tuned")
    assert "peft adds no bias of cls.predictions.decoder" in caplog.text
    again = petune.load(tiny("bert-mlm"), tmp_path / "tuned")
    assert_close(again(**batch("bert-mlm")).logits, model(**batch("bert-mlm")).logits)


def test_fused_blocks_give_the_same_gradients_and_the_head_says_that_it_is_not_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr("petune.kernels.head.hooks.say", said.append)
    sides = []
    for kernels in ("off", "reference"):
        model = tuned("llama-causal", TIED, kernels=kernels)
        sides.append(gradients(model.train(), batch("llama-causal"))[1])
    assert_same_gradients(sides[1], sides[0], 1e-5)
    assert any("RowLinear is neither torch.nn.Linear nor LoRA" in line for line in said)


@pytest.mark.parametrize(
    ("backend", "name"), [("galaxy", "llama-causal"), ("tp", "t5-seq2seq"), ("pp-1f1b", "t5-seq2seq")]
)
def test_across_two_ranks_they_train_as_in_one_process(
    backend: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(zoo.SETTINGS, "lora", {"r": 2, "token_rows": IDS})
    plan = BACKENDS[backend](name, 2)
    check(Case(name, "lora", plan, settings=settings_of(name, plan), passes=(3,)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama-causal", {"token_rows": [97]}, "token_rows: 97 is no row that can train"),
        ("llama-causal", {"token_rows": [0]}, "found padding"),
        ("llama-causal", {"token_rows": [5, 5]}, "found twice"),
        ("llama-causal", {"targets": ["embed_tokens"]}, "this table is tuned already"),
        ("llama-causal", {"also_train": ["embed_tokens"]}, "this table trains whole already"),
    ],
)
def test_what_cannot_be_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap(tiny(name), **{"r": 2, "targets": ["q"], "token_rows": [5], **settings})


@pytest.mark.parametrize(
    ("name", "kind"), [("bart-seq2seq", "BartScaled"), ("gemma3-causal", "Gemma3TextScaled")]
)
def test_a_scaled_table_is_refused_and_trains_whole_as_the_remedy_says(name: str, kind: str) -> None:
    with pytest.raises(UsageError, match=f"rows of a {kind}WordEmbedding cannot train") as refused:
        wrap(tiny(name), r=2, targets=["q"], token_rows=[5])
    names = str(refused.value).split("also_train: [")[1].split("]")[0].split(", ")
    model = wrap(tiny(name), r=2, targets=["q"], also_train=names)
    model(**batch(name)).loss.backward()
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0


def test_rows_of_another_table_in_a_folder_are_refused(tmp_path: Path) -> None:
    petune.save(tuned("llama-causal"), tmp_path / "a")
    for name in ("petune.json", "petune.manifest.json"):
        (tmp_path / "a" / name).unlink()
    file = tmp_path / "a" / "adapter_config.json"
    for given in ({"lm_head": IDS}, {"embed_tokens": IDS, "lm_head": IDS}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"trainable_token_indices": given}))
        with pytest.raises(FileError, match="trains rows of another table"):
            petune.load(tiny("llama-causal"), tmp_path / "a")
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"trainable_token_indices": {"embed_tokens": IDS}})
    )
    petune.load(tiny("llama-causal"), tmp_path / "a")
