"""One LoRA made of several on the same base, as peft's `add_weighted_adapter` combines them: with weights w_i
and scales s_i,

        cat      A = [w_i s_i A_i],  B = [B_i]: the sum of the updates, exactly, of rank sum r_i
        svd      the best approximation of that sum of a rank (Eckart and Young 1936)
        linear   A = sum sign_i q_i A_i,  B = sum q_i B_i,  q_i = sqrt(|w_i s_i|): of equal ranks, and not the
                 sum
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.files.given import path_of
from petune.files.manifest import RECORD, check_folder
from petune.files.safetensors import read_json, read_tensors
from petune.log import say
from petune.methods import Tuning, lora
from petune.methods.configs import LoraConfig
from petune.methods.registry import refuse_tuned
from petune.methods.saving import remember
from petune.methods.wrapped import bare
from petune.models.experts import weight_at
from petune.saving.fingerprint import plain_name
from petune.saving.multimodal import in_text
from petune.saving.peft import CONFIG, TENSORS, Adapter, check_config, from_peft
from petune.saving.peft_parts import parts_named
from petune.saving.tuning_record import family_name, origin_files, read_record

Combination = Literal["cat", "svd", "linear"]  # how several updates become one
Part = tuple[Tensor, Tensor, float]  # A [r, in], B [out, r] of one layer of one adapter, and w s
Model = TypeVar("Model", bound=nn.Module)


def combine(
    base_model: Model, folders: Mapping[str | Path, float], how: Combination = "cat", r: int | None = None
) -> Model:
    """Tune `base_model`, in place, with the combination of LoRA folders, {folder: weight}; save or merge it
    as any other.

    r: the rank of svd, by default the largest of the folders'. Layers that a folder does not tune have
    nothing of it. Raises UsageError for fewer than two folders, for dora, for modules, biases or rows that
    were trained beside the factors and have no sum, for linear with ranks that differ, and for r with another
    combination; FileError as `load`.
    """
    model = bare(base_model)
    refuse_tuned(model)
    if len(folders) < 2 or how not in ("cat", "svd", "linear") or (r is not None and how != "svd"):
        what = "combine takes two folders or more, how: cat, svd or linear, and r with svd alone"
        found = f"{len(folders)} folders, how: {how}, r: {r}"
        raise UsageError(what, found=found, remedy='combine(base, {one: 0.7, two: 0.3}, "svd", r=16)')
    adapters = {str(folder): read_adapter(model, path_of(folder)) for folder in folders}
    parts: dict[str, list[Part]] = {}
    for adapter, weight in zip(adapters.values(), folders.values(), strict=True):
        for name, own in adapter.layers.items():
            a, b = (adapter.state[f"{name}.{leaf}"].float() for leaf in ("lora_A", "lora_B"))
            parts.setdefault(name, []).append((a, b, weight * own.scale))
    rank = r or max(own.r for adapter in adapters.values() for own in adapter.layers.values())
    made = {name: _combined(name, found, how, rank) for name, found in parts.items()}
    full = {plain_name(name): name for name, _ in model.named_modules()}
    sizes = {full[name]: len(factors["lora_A"]) for name, factors in made.items()}
    usual = Counter(sizes.values()).most_common(1)[0][0]
    for name, factors in made.items():
        layer, size = model.get_submodule(full[name]), len(factors["lora_A"])
        tuned = lora.tune(layer, LoraConfig(r=size, alpha=size), factors)
        model.set_submodule(full[name], tuned)
    others = {name: size for name, size in sizes.items() if size != usual}
    config = LoraConfig(
        r=usual,
        alpha=usual,
        targets=tuple(sizes),
        rank_pattern=others,
        alpha_pattern={name: float(size) for name, size in others.items()},
        also_train=(),
    )
    remember(model, Tuning("lora", config, family_name(model), ()))
    return base_model


def read_adapter(
    model: nn.Module,
    folder: Path,
    verify_base: bool = False,
    base_files: Mapping[str, Path] | None = None,
) -> Adapter:
    """The LoRA of a folder of petune's or peft's on `model`, alone. Raises as `combine`; the rest as for
    `load`."""
    if (folder / RECORD).is_file():
        files = origin_files(model, verify_base) if base_files is None else base_files
        record = read_record(folder)
        record.check_base(model, files, verify_base)
        if parts := parts_named(model, record.config, record.also_train):
            say(f"{folder}: LoRA by parts is read as one LoRA of the whole linear: {', '.join(parts)}")
    else:
        check_folder(folder)
    config = read_json(folder / CONFIG, links=True)
    check_config(config, folder / CONFIG)  # before its patterns are read
    config, tensors = in_text(model, config, read_tensors(folder / TENSORS, links=True), folder)
    adapter = from_peft(model, config, tensors, folder)
    beside = (*adapter.also_train, *adapter.biases, *adapter.token_rows)
    if beside or type(adapter.config) is not LoraConfig:
        what = f"{beside[0]} is trained beside the factors" if beside else "dora has no sum of updates"
        raise UsageError(what, where=str(folder), remedy="merge one into the base first")
    if experts := next((name for name in adapter.layers if weight_at(model, name)), None):
        what = f"{experts} is a weight of experts, whose updates are not combined"
        raise UsageError(what, where=str(folder), remedy="merge one into the base first")
    kinds = {plain_name(name): type(layer) for name, layer in model.named_modules()}
    if conv := next((name for name in adapter.layers if kinds.get(name) is nn.Conv2d), None):
        what = f"{conv} is a convolution, whose updates are not combined"
        raise UsageError(what, where=str(folder), remedy="merge one into the base first")
    return adapter


def _combined(name: str, parts: Sequence[Part], how: Combination, rank: int) -> dict[str, Tensor]:
    """The factors of one layer, of scale 1."""
    if how == "cat":
        a = torch.cat([scale * a for a, _, scale in parts])
        return {"lora_A": a, "lora_B": torch.cat([b for _, b, _ in parts], dim=1)}
    if how == "linear":
        if len({len(a) for a, _, _ in parts}) > 1:
            found = ", ".join(str(len(a)) for a, _, _ in parts)
            raise UsageError("linear needs equal ranks", where=name, found=found, remedy="use cat or svd")
        roots = [math.sqrt(abs(scale)) for _, _, scale in parts]
        a = sum((math.copysign(q, s) * a for q, (a, _, s) in zip(roots, parts, strict=True)), torch.zeros(()))
        b = sum((q * b for q, (_, b, _) in zip(roots, parts, strict=True)), torch.zeros(()))
        return {"lora_A": a, "lora_B": b}
    u, s, vh = torch.linalg.svd(sum((w * b @ a for a, b, w in parts), torch.zeros(())), full_matrices=False)
    return {"lora_A": vh[:rank], "lora_B": u[:, :rank] * s[:rank]}
