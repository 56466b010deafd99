"""LoRA in GGUF: what is read back is what was written, and the order of rows is what llama.cpp rotates by."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from petune.errors import FileError, MachineError
from petune.saving.gguf import read_gguf, write_gguf
from petune.saving.serve import write_for
from tests.tiny_models import llama, llama_config, tuned

NAME = "model.layers.1.self_attn.k_proj"


def test_a_file_is_read_back_by_the_library_and_by_us(tmp_path: Path) -> None:
    a, b = torch.randn(3, 32), torch.randn(16, 3)
    write_gguf(tmp_path / "x.gguf", {NAME: (a, b)}, 6, "llama", llama_config(), "here")
    reader = gguf.GGUFReader(tmp_path / "x.gguf")
    tensors = {entry.name: entry for entry in reader.tensors}
    assert tensors["blk.1.attn_k.weight.lora_a"].shape.tolist() == [32, 3]  # ggml counts from the fastest
    assert tensors["blk.1.attn_k.weight.lora_b"].shape.tolist() == [3, 16]
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("adapter.lora.alpha").contents() == 6.0
    found, alpha = read_gguf(tmp_path / "x.gguf", [NAME], llama_config())
    assert alpha == 6
    assert torch.equal(found[NAME][0], a) and torch.equal(found[NAME][1], b)
    with pytest.raises(FileError, match=r"the base has no blk\.1\.attn_k\.weight"):
        read_gguf(tmp_path / "x.gguf", ["model.layers.1.mlp.up_proj"], llama_config())


def test_rows_stand_in_the_order_that_llama_cpp_rotates(tmp_path: Path) -> None:
    """ggml turns neighbours (2i, 2i + 1) by the angle that Hugging Face gives i and i + half."""
    torch.manual_seed(0)
    config: Any = llama_config()
    heads, width, x = 2, 8, torch.randn(5, 32)
    a, b = torch.randn(3, 32), torch.randn(heads * width, 3)
    write_gguf(tmp_path / "x.gguf", {NAME: (a, b)}, 3, "llama", config, "here")
    entries = {entry.name: torch.tensor(entry.data) for entry in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    stored = entries["blk.1.attn_k.weight.lora_b"] @ entries["blk.1.attn_k.weight.lora_a"]
    angles = torch.outer(torch.arange(5.0), 10000 ** (-torch.arange(0, width, 2) / width))
    cos, sin = (torch.cat([part, part], -1)[None] for part in (angles.cos(), angles.sin()))
    mine = (x @ (b @ a).T).view(1, 5, heads, width).transpose(1, 2)
    _, turned = apply_rotary_pos_emb(mine, mine, cos, sin)
    pairs = torch.view_as_complex((x @ stored.T).view(5, heads, width // 2, 2).contiguous())
    theirs = torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)[:, None])
    expected = torch.einsum("hqd,hkd->hqk", turned[0], turned[0])
    assert torch.allclose(torch.einsum("qhde,khde->hqk", theirs, theirs), expected, rtol=1e-4, atol=1e-3)


def test_without_the_package_the_command_to_type_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = builtins.__import__
    monkeypatch.setattr("petune.saving.gguf.import_module", lambda name: whole("no_such_package"))
    with pytest.raises(MachineError, match=r"convert_lora_to_gguf\.py --base BASE"):
        write_for("llamacpp", tuned(llama), tmp_path / "a")
