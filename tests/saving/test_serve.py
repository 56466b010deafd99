"""What is written for a server computes there what was trained, by peft as by the played server, or is
refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import Gemma3Config, Gemma3ForCausalLM, Gemma3TextConfig

from petune.errors import FileError, UsageError
from petune.files.safetensors import read_json, read_tensors
from petune.methods import wrap
from petune.saving import serve
from petune.saving.peft import CONFIG, TENSORS
from petune.saving.serve import write_for
from petune.saving.servers import SERVERS
from tests.methods.zoo import tiny
from tests.tiny_models import bert, llama, llama_classifier, logits, stir, tuned

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4},
    "rslora": {"r": 6, "alpha": 5, "rslora": True},
    "patterns": {"r": 4, "rank_pattern": {"q": 2}, "alpha_pattern": {"down": 3}},
    "pissa": {"r": 3, "init": "pissa"},
    "one block": {"r": 4, "targets": ["q"], "layers": [1]},
}


@pytest.mark.crossed(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("to", SERVERS)
def test_every_server_computes_what_was_trained(to: str, way: str, tmp_path: Path) -> None:
    model = tuned(llama, **WAYS[way])
    expected = logits(model)
    written = write_for(to, model, tmp_path / "a", base_name="org/base")
    assert written.logits <= serve.CLOSE
    assert torch.equal(logits(model), expected), "the model is as it was"
    if not (tmp_path / "a" / CONFIG).exists():
        assert (tmp_path / "a" / "adapter.gguf").exists()
        return
    fields, tensors = read_json(tmp_path / "a" / CONFIG), read_tensors(tmp_path / "a" / TENSORS)
    assert isinstance(fields["lora_alpha"], int)
    assert not (fields["use_rslora"] or fields["rank_pattern"] or fields["alpha_pattern"])
    assert {len(value) for key, value in tensors.items() if "lora_A" in key} == {fields["r"]}
    assert not SERVERS[to].ranks or fields["r"] in SERVERS[to].ranks
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path / "a").eval()
    assert torch.allclose(logits(theirs), expected, atol=1e-5)


def test_partners_that_a_server_asks_for_are_written_as_zeros(tmp_path: Path) -> None:
    write_for("sglang", tuned(llama, targets=["q"], layers=[1]), tmp_path / "a")
    write_for("vllm", tuned(llama, targets=["q"], layers=[1]), tmp_path / "b")
    there = {
        key.split(".lora_")[0].partition("base_model.model.model.")[2]
        for key in read_tensors(tmp_path / "a" / TENSORS)
    }
    assert there == {f"layers.{block}.self_attn.{leaf}_proj" for block in (0, 1) for leaf in "qkv"}
    assert read_json(tmp_path / "a" / CONFIG)["target_modules"] == ["k_proj", "q_proj", "v_proj"]
    assert len(read_tensors(tmp_path / "b" / TENSORS)) == 2
    assert read_json(tmp_path / "b" / CONFIG)["target_modules"] == ["model.layers.1.self_attn.q_proj"]


def test_a_narrow_base_and_a_table_of_tokens_are_served(tmp_path: Path) -> None:
    write_for("vllm", tuned(lambda: llama().bfloat16()), tmp_path / "a")
    model = tuned(llama, targets=["embed_tokens", "q_proj"])
    write_for("vllm", model, tmp_path / "b")
    assert "base_model.model.model.embed_tokens.lora_embedding_A" in read_tensors(tmp_path / "b" / TENSORS)
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path / "b").eval()
    assert torch.allclose(logits(theirs), logits(model), atol=1e-5)


def test_a_model_whose_blocks_are_fused_is_written_and_computes_the_same(tmp_path: Path) -> None:
    """As a run is that was given its model in memory."""
    model = stir(wrap(llama(), targets=["q", "up"], kernels="reference"))
    before = logits(model)
    assert write_for("vllm", model, tmp_path / "a").logits < 1e-5
    assert torch.allclose(logits(model), before, atol=1e-5)
    theirs = peft.PeftModel.from_pretrained(llama(), tmp_path / "a").eval()
    assert torch.allclose(logits(theirs), before, atol=1e-5)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "dora": ("vllm", lambda: wrap(llama(), "dora"), "vLLM does not yet support DoRA"),
    "ia3": ("sglang", lambda: wrap(llama(), "ia3"), "peft_type must be lora"),
    "miss": ("vllm", lambda: wrap(llama(), "miss", r=4), "does not take miss"),
    "adapter": ("vllm", lambda: wrap(llama(), "adapter"), r"petune\.load"),
    "side": ("ollama", lambda: wrap(llama(), "side", reduction=2), r"petune\.load"),
    "full": ("vllm", lambda: wrap(llama(), "full"), "--to hf"),
    "bias": ("vllm", lambda: wrap(bert(), bias="lora", also_train=[]), "Adapter bias is not supported"),
    "heads": ("vllm", lambda: wrap(llama(), also_train=["lm_head"]), "modules_to_save"),
    "heads of GGUF": ("llamacpp", lambda: wrap(llama(), also_train=["lm_head"]), "Embeddings is present"),
    "rows": ("sglang", lambda: wrap(llama(), token_rows=[5]), "added tokens"),
    "tied": ("llamacpp", lambda: wrap(llama(tie=True), targets=["lm_head"]), "#9065"),
    "only": ("ollama", lambda: wrap(llama(), targets=["lm_head"]), "blocks alone"),
    "rank": ("vllm", lambda: wrap(llama(), r=513), "greater than max_lora_rank 512"),
    "family": ("vllm", lambda: wrap(bert(), also_train=[]), "not known to load LoRA for a bert"),
    "family of two stacks": ("llamacpp", lambda: wrap(tiny("t5gemma-seq2seq")), "for a t5gemma"),
    "no model": ("vllm", lambda: wrap(nn.Sequential(nn.Linear(2, 2)), also_train=[]), "transformers"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_server_refuses_is_refused_in_its_words(case: str, tmp_path: Path) -> None:
    to, make, words = REFUSED[case]
    with pytest.raises(UsageError, match=words) as caught:
        write_for(to, make(), tmp_path / "a")
    assert caught.value.problems[0].remedy
    assert not any(tmp_path.iterdir())


def test_a_head_is_served_where_the_base_has_it(tmp_path: Path) -> None:
    model = tuned(llama_classifier)
    write_for("vllm", model, tmp_path / "a")
    assert "base_model.model.score.weight" in read_tensors(tmp_path / "a" / TENSORS)
    model.config.architectures = ["LlamaForCausalLM"]
    with pytest.raises(UsageError, match="serve this base as LlamaForCausalLM"):
        write_for("vllm", model, tmp_path / "b")


def pictured(folder: Path) -> nn.Module:
    """A text model out of a checkpoint, as its config.json says, of pictures and text."""
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    text = Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    whole.architectures = ["Gemma3ForConditionalGeneration"]
    whole.save_pretrained(folder)
    torch.manual_seed(0)
    return Gemma3ForCausalLM(text).eval()


def test_names_are_those_of_the_class_that_is_served(tmp_path: Path) -> None:
    model = stir(wrap(pictured(tmp_path / "base"), r=4))
    write_for("vllm", model, tmp_path / "a", base_name=str(tmp_path / "base"))
    names = {key.partition(".layers.")[0] for key in read_tensors(tmp_path / "a" / TENSORS)}
    assert names == {"base_model.model.model.language_model"}
    fields = json.loads((tmp_path / "base" / "config.json").read_text())
    fields["architectures"] = ["T5ForConditionalGeneration"]
    (tmp_path / "base" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UsageError, match="T5ForConditionalGeneration"):
        write_for("vllm", model, tmp_path / "b", base_name=str(tmp_path / "base"))


@pytest.mark.parametrize("to", ["vllm", "llamacpp"])
def test_files_that_compute_something_else_are_not_left(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = tuned(llama), serve._folded

    def weaker(model: Any, server: Any) -> Any:
        factors, rank, alpha = whole(model, server)
        return factors, rank, alpha + 1

    def fewer(model: Any, server: Any) -> Any:
        factors, rank, alpha = whole(model, server)
        return dict(list(factors.items())[1:]), rank, alpha

    for fault in (weaker, fewer):
        monkeypatch.setattr(serve, "_folded", fault)
        with pytest.raises(FileError, match="another update") as caught:
            write_for(to, model, tmp_path / "a")
        assert "merge" in str(caught.value)
        assert not any(tmp_path.iterdir())


def test_partners_that_are_missing_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_partners", lambda *arguments: [])
    with pytest.raises(FileError, match=r"looks for model\.layers\.1\.self_attn\.k_proj beside q_proj"):
        write_for("sglang", tuned(llama, targets=["q"], layers=[1]), tmp_path / "a")


def test_logits_are_compared_and_not_only_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tuned(llama)
    monkeypatch.setattr(serve, "logits_of", lambda model, batch: logits(model) + next(shift))
    shift = iter((0.0, 0.1))
    with pytest.raises(FileError, match="other logits"):
        write_for("vllm", model, tmp_path / "a")
