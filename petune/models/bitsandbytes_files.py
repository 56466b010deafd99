"""Weights that lie in files as bitsandbytes has quantised them (4-bit, NF4, double quantisation): read, and
written, as the very bits that they are.

transformers writes such a weight as two numbers a byte under the weight's own name, and beside it, under that
name and a dot, `absmax` (eight bits a scale), `nested_absmax`, both tables of levels, and
`quant_state.bitsandbytes__nf4`, JSON with sizes and the mean of the scales.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from petune.errors import FileError
from petune.files.ranges import RangeReader, TensorSource
from petune.models.nf4 import BLOCK, NESTED, Nf4, dynamic_levels, levels

_STATE = ".quant_state.bitsandbytes__"
_BYTES = ".bytes"  # behind a weight's name: its numbers as they lie there
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_WANTED = {"quant_type": "nf4", "blocksize": BLOCK, "nested_blocksize": NESTED}


def is_readable(settings: Mapping[str, Any]) -> bool:
    """Whether the `quantization_config` of a model is of such weights."""
    wanted = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    wanted |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8"}
    return all(settings.get(key) == value for key, value in wanted.items())


def settings_of(dtype: torch.dtype, skipped: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a model of such weights, which stand for ones of `dtype`. skipped: its
    linears that are not among them, by name; transformers holds every other in four bits."""
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": list(skipped),
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }


def in_files(name: str, form: Nf4) -> dict[str, Tensor]:
    """What a whole weight lies in files as, by the names that it has there."""
    fields = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(form.dtype).removeprefix("torch."),
        "shape": list(form.shape),
        "nested_blocksize": NESTED,
        "nested_dtype": "float32",
        "nested_offset": float(form.mean),
    }
    cpu = torch.device("cpu")
    return {
        name: form.q.reshape(-1, 1),
        f"{name}.absmax": form.scales.reshape(-1),
        f"{name}.quant_map": levels(cpu).clone(),
        f"{name}.nested_absmax": form.nested,
        f"{name}.nested_quant_map": dynamic_levels(cpu).clone(),
        f"{name}{_STATE}nf4": torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8),
    }


def has_place_for(form: Nf4) -> bool:
    """Whether files can hold a weight: a whole one, which stands for one of a dtype that they know."""
    blocks = form.q.numel() * 2 // BLOCK
    whole = form.stride * len(form.q) == blocks and len(form.nested) == -(-blocks // NESTED)
    return whole and not (form.first or form.skips) and form.dtype in _DTYPES.values()


@dataclass(frozen=True)
class FourBit:
    """A weight [n, k] of files, by the name that it has there. mean: of its scales."""

    name: str
    shape: tuple[int, int]
    mean: float

    def read(self, reader: RangeReader, device: torch.device, dtype: torch.dtype) -> Nf4:
        """The weight on a device, standing for one of `dtype`."""
        stride, parts = self.shape[1] // BLOCK, dict[str, Tensor]()
        for part in (_BYTES, ".absmax", ".nested_absmax"):
            source = reader.sources[self.name + part]
            parts[part] = torch.empty(source.shape, dtype=source.dtype, device=device)
            reader.read(self.name + part, parts[part], (0,) * len(source.shape))
        q, scales = parts[_BYTES].view(self.shape[0], -1), parts[".absmax"].view(self.shape[0], stride)
        mean = torch.tensor([self.mean], device=device)
        return Nf4(q, scales, parts[".nested_absmax"], mean, dtype, stride)


def four_bit_weights(files: Mapping[str, TensorSource]) -> tuple[dict[str, TensorSource], dict[str, FourBit]]:
    """(the tensors of files with each weight in four bits under its name, in the shape and dtype that it
    stands for; those weights by that name).

    What they are held in stays there under other names. Raises FileError for a weight in another form.
    """
    found, weights = dict(files), dict[str, FourBit]()
    with RangeReader(files) as reader:
        for state in (name for name in files if _STATE in name):
            name = state.partition(_STATE)[0]
            fields = _fields(name, state, files, reader)
            shape = (int(fields["shape"][0]), int(fields["shape"][1]))
            found[name + _BYTES] = files[name]
            found[name] = replace(files[name], dtype=_DTYPES[fields["dtype"]], shape=shape)
            weights[name] = FourBit(name, shape, float(fields["nested_offset"]))
    return found, weights


def beside(weights: Mapping[str, FourBit], name: str) -> bool:
    """Whether a tensor of files is a part of one of these weights, and none of a model."""
    return any(name.startswith(f"{own}.") for own in weights)


def _fields(
    name: str, state: str, files: Mapping[str, TensorSource], reader: RangeReader
) -> Mapping[str, Any]:
    """What a file says of a weight. Raises FileError for one of other blocks, levels or sizes than those of
    `Nf4`."""
    try:
        fields = json.loads(bytes(_whole(reader, state).tolist()))
    except ValueError:
        fields = None
    found = {key: fields.get(key) for key in (*_WANTED, "shape")} if isinstance(fields, dict) else {}
    if not found or not _is_whole(name, fields, files) or not _has_levels(name, reader):
        raise FileError(
            "this weight of bitsandbytes is in a form that petune does not read",
            where=f"{files[state].path}  {name}",
            expected=f"nf4, blocks of {BLOCK}, double quantisation with blocks of {NESTED}",
            found=", ".join(f"{key} {value}" for key, value in found.items())[:200] or "no JSON",
            remedy="give the model as it was before it was quantised, with base_dtype: nf4",
        )
    return cast("Mapping[str, Any]", fields)


def _is_whole(name: str, fields: Mapping[str, Any], files: Mapping[str, TensorSource]) -> bool:
    """Whether all that a weight is held in is there, in the sizes that its own tell."""
    shape = fields.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(isinstance(size, int) for size in shape)):
        return False
    count = shape[0] * shape[1] // BLOCK
    sizes = {
        name: (torch.uint8, (count * BLOCK // 2, 1)),
        f"{name}.absmax": (torch.uint8, (count,)),
        f"{name}.nested_absmax": (torch.float32, (-(-count // NESTED),)),
        f"{name}.quant_map": (torch.float32, (16,)),
        f"{name}.nested_quant_map": (torch.float32, (256,)),
    }
    return (
        all(fields.get(key) == value for key, value in _WANTED.items())
        and fields.get("dtype") in _DTYPES
        and isinstance(fields.get("nested_offset"), int | float)
        and min(shape) > 0
        and shape[1] % BLOCK == 0
        and all(own in files and (files[own].dtype, files[own].shape) == held for own, held in sizes.items())
    )


def _has_levels(name: str, reader: RangeReader) -> bool:
    """Whether numbers and scales have the levels of `Nf4`."""
    cpu = torch.device("cpu")
    tables = {"quant_map": levels(cpu), "nested_quant_map": dynamic_levels(cpu)}
    return all(torch.equal(_whole(reader, f"{name}.{own}"), table) for own, table in tables.items())


def _whole(reader: RangeReader, name: str) -> Tensor:
    source = reader.sources[name]
    out = torch.empty(source.shape, dtype=source.dtype)
    reader.read(name, out, (0,) * len(source.shape))
    return out
