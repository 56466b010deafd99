"""Updates of experts as vLLM has them, an expert at a time: peft reads the same numbers, and files with a
fault are not left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch

import petune
from petune.errors import FileError, UsageError
from petune.files.safetensors import read_json, read_tensors
from petune.saving import serve, served_experts
from petune.saving.peft import CONFIG, PREFIX, TENSORS
from petune.saving.serve import write_for
from tests.methods.zoo import batch, stir, tiny

NAMES = {
    "mixtral-causal": ("block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3moe-causal": ("mlp.experts", ("gate_proj", "up_proj", "down_proj")),
}
WAYS: dict[str, dict[str, Any]] = {
    "all linears": {"r": 3},
    "unlike ranks": {"targets": ["experts"], "r": 2, "rank_pattern": {"down_proj": 5}, "rslora": True},
    "one weight of one block": {"targets": ["down"], "r": 2, "layers": [1]},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_peft_reads_what_was_trained_of_every_expert(name: str, way: str, tmp_path: Path) -> None:
    changes = {"mlp_only_layers": []} if "qwen" in name else {}
    model, inputs = stirred(name, changes, **WAYS[way]), batch(name)
    expected = model(**inputs).logits
    written = write_for("vllm", model, tmp_path / "a", base_name="org/base")
    assert written.logits <= serve.CLOSE
    assert torch.equal(model(**inputs).logits, expected), "the model is as it was"
    tensors = read_tensors(tmp_path / "a" / TENSORS)
    assert {len(value) for key, value in tensors.items() if "lora_A" in key} == {written.rank}
    at, leaves = NAMES[name]
    block = f"{PREFIX}model.layers.1.{at}."
    own = {key.removeprefix(block) for key in tensors if key.startswith(block)}
    count = 4 if "mixtral" in name else 5
    assert own == {f"{e}.{leaf}.lora_{x}.weight" for e in range(count) for leaf in leaves for x in "AB"}
    assert read_json(tmp_path / "a" / CONFIG)["target_parameters"] is None
    theirs = peft.PeftModel.from_pretrained(tiny(name, **changes), str(tmp_path / "a")).eval()
    assert torch.allclose(theirs(**inputs).logits, expected, atol=1e-5)
    assert not torch.allclose(tiny(name, **changes)(**inputs).logits, expected, atol=0.05)


@pytest.mark.parametrize("base", ["int8", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_experts_of_a_base_in_fewer_bytes_are_served_beside_dense_blocks(base: str, tmp_path: Path) -> None:
    plain = tiny("qwen3moe-causal").to(torch.bfloat16 if base == "bfloat16" else torch.float32)
    held = {} if base == "bfloat16" else {"base_dtype": base}
    model = petune.wrap(plain, r=2, kernels="off", **held)
    stir(model, std=0.1)
    write_for("vllm", model.eval(), tmp_path / "a")
    assert f"{PREFIX}model.layers.0.mlp.gate_proj.lora_A.weight" in read_tensors(tmp_path / "a" / TENSORS)


REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "3-D weights": ("vllm", "gptoss-causal", {}, "is_3d_moe_weight"),
    "no mapping of experts": ("vllm", "qwen2moe-causal", {}, "get_expert_mapping"),
    "shared experts alone": (
        "vllm",
        "qwen2moe-causal",
        {"targets": ["shared_expert.down_proj"]},
        "for a qwen2_moe",
    ),
    "the router": ("vllm", "mixtral-causal", {"also_train": ["mlp.gate"]}, "modules_to_save"),
    "names that SGLang drops": ("sglang", "mixtral-causal", {}, "drops unsaid"),
    "GGUF": ("llamacpp", "qwen3moe-causal", {}, "linears alone"),
    "an ADAPTER": ("ollama", "mixtral-causal", {}, "linears of blocks alone"),
    "rank": ("vllm", "mixtral-causal", {"targets": ["q"], "r": 513}, "greater than max_lora_rank 512"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_server_does_not_take_of_experts_is_refused_in_its_words(case: str, tmp_path: Path) -> None:
    to, name, settings, words = REFUSED[case]
    with pytest.raises(UsageError, match=words) as caught:
        write_for(to, petune.wrap(tiny(name), **settings), tmp_path / "a")
    assert "petune merge" in str(caught.value.problems[0].remedy)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["fewer", "another"])
def test_experts_that_are_missing_or_others_are_noticed(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole = stirred("mixtral-causal", {}, r=2, targets=["experts"]), served_experts.factors_of

    def faulty(*arguments: Any) -> Any:
        made = whole(*arguments)
        names = [f"model.layers.1.mlp.experts.{expert}.down_proj" for expert in (2, 3)]
        if fault == "fewer":
            del made[names[0]]
        else:
            made[names[0]], made[names[1]] = made[names[1]], made[names[0]]
        return made

    monkeypatch.setattr(serve, "factors_of", faulty)
    words = "finds none of .*experts.2.w2" if fault == "fewer" else "another update"
    with pytest.raises(FileError, match=words):
        write_for("vllm", model, tmp_path / "a")
    assert not any(tmp_path.iterdir())


def stirred(name: str, changes: dict[str, Any], **settings: Any) -> Any:
    """The model `name` with LoRA that computes something."""
    model = petune.wrap(tiny(name, **changes), **settings)
    stir(model, std=0.1)
    return model.eval()
