"""LoRA as llama.cpp reads it: one GGUF file of factors, as its convert_lora_to_gguf writes them, through the
package gguf.

        blk.0.attn_q.weight.lora_a  A [r, in]     .lora_b  B [out, r]     adapter.lora.alpha
        y = W x + (alpha / r) B A x               r is read off the tensor

The base's W is stored with the rows of q and k in another order where the architecture rotates neighbouring
features (llama), so B has its rows in that order too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petune.errors import FileError, MachineError, UsageError

ADAPTER = "adapter.gguf"
_INTERLEAVED = {"llama": {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}}

FactorsByName = Mapping[str, tuple[Tensor, Tensor]]  # (A [r, in], B [out, r]) of a linear by its name


def need_gguf(title: str) -> Any:
    """The package gguf. Raises MachineError, with what to type instead, where it is not installed."""
    try:
        return import_module("gguf")
    except ImportError:
        remedy = (
            "pip install 'petune[gguf]', or petune export RUN --to peft --out LORA, and with llama.cpp's own"
            " script: python convert_lora_to_gguf.py --base BASE --outfile adapter.gguf LORA"
        )
        raise MachineError(f"{title} reads GGUF, which needs the package gguf", remedy=remedy) from None


def names_in_gguf(modules: Iterable[str], architecture: str, blocks: int) -> dict[str, str]:
    """{name of a linear: that of its weight in a GGUF file of the base}; what has none there is left out."""
    gguf = import_module("gguf")
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(kind, blocks)
    found = {name: table.get_name(f"{name}.weight", try_suffixes=(".weight",)) for name in modules}
    return {name: own for name, own in found.items() if own is not None}


def write_gguf(
    file: Path, factors: FactorsByName, alpha: float, architecture: str, config: Any, where: str
) -> None:
    """Write the factors, float32, for a base of an architecture in gguf's words. config: the base's.

    Raises UsageError for a linear that the architecture has no name for.
    """
    gguf = import_module("gguf")
    names = names_in_gguf(factors, architecture, config.num_hidden_layers)
    if lost := [name for name in factors if name not in names]:
        remedy = "narrow `targets`, or merge: petune merge RUN"
        raise UsageError(f"{architecture} in GGUF has no {lost[0]}", where=where, remedy=remedy)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, (a, b) in factors.items():
        heads = _heads(names[name], architecture, config)
        order = None if heads is None else _interleaved(len(b), heads)
        b = b if order is None else b[order]
        for end, value in (("lora_a", a), ("lora_b", b)):
            writer.add_tensor(f"{names[name]}.{end}", value.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(
    file: Path, modules: Iterable[str], config: Any
) -> tuple[dict[str, tuple[Tensor, Tensor]], float]:
    """The factors of a LoRA in GGUF by names of the base's linears, B in their order of rows; and alpha.

    Raises FileError for a file of another kind and for a tensor that no linear of `modules` answers to, which
    llama.cpp refuses too.
    """
    gguf = import_module("gguf")
    reader = gguf.GGUFReader(file)
    fields = {key: reader.get_field(key).contents() for key in reader.fields if not key.startswith("GGUF.")}
    if (fields.get("general.type"), fields.get(gguf.Keys.Adapter.TYPE)) != ("adapter", "lora"):
        raise FileError("is no LoRA in GGUF", where=str(file))
    architecture = fields["general.architecture"]
    names = names_in_gguf(modules, architecture, config.num_hidden_layers)
    homes = {own: name for name, own in names.items()}
    tensors = {entry.name: torch.tensor(entry.data) for entry in reader.tensors}
    found = {}
    for key, a in tensors.items():
        if not key.endswith(".lora_a"):
            continue
        own = key.removesuffix(".lora_a")
        if own not in homes:
            raise FileError(f"the base has no {own}", where=str(file))
        b, heads = tensors[f"{own}.lora_b"], _heads(own, architecture, config)
        if heads is not None:
            b = torch.empty_like(b).index_copy(0, _interleaved(len(b), heads), b)
        found[homes[own]] = a, b
    return found, float(fields[gguf.Keys.Adapter.LORA_ALPHA])


def _heads(name: str, architecture: str, config: Any) -> int | None:
    """The heads of a weight whose rows stand in another order in GGUF, else None."""
    setting = _INTERLEAVED.get(architecture, {}).get(name.split(".")[-2])
    return None if setting is None else int(getattr(config, setting))


def _interleaved(rows: int, heads: int) -> Tensor:
    """Which row comes when neighbours are rotated: the first of the first half of a head, the first of its
    second half, the second ..."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).reshape(-1)
