"""The sizes of a core that a fused block calls as it is, read off its module."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from petune.kernels.block.called import CalledCore
from petune.kernels.memory.shape import CoreShape
from petune.models.gated_delta import state_bytes
from petune.models.sites import ends_of
from petune.models.spec import LinearAttention, Positions
from petune.models.tuned_linear import KeptFeatures, TunedLayer, low_rank_of

WIDE = 4  # bytes of what norms and copies for factors are in


def core_shape(core: CalledCore, itemsize: int, longest: int = 0, *, pairs: bool = False) -> CoreShape:
    """Those of `core` where activations have so many bytes, in rows of `longest` tokens. pairs: attention
    that scores positions makes scores of all pairs."""
    if core.table.positions is not None:
        return _scoring(core, core.table.positions, itemsize, longest, pairs)
    mixes, module = isinstance(core.table, LinearAttention), cast("Any", core.module)
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
    at = f"{core.table.at}."
    ends = {role: ends_of(layers[path.removeprefix(at)]) for role, path in core.table.region.sites.items()}
    width, inner = ends["o"][1], ends["o"][0]
    kept = 2.0 * itemsize * width + sum(_of_layer(layer, itemsize) for layer in layers.values())
    if mixes:
        between = state_bytes(module, itemsize)
    else:  # q, k and v as they are made, normed and turned, and what attention gives
        made = sum(ends[role][1] for role in ("q", "k", "v"))
        between = itemsize * (made + inner + core.table.given(inner))
        between += WIDE * (inner + ends["k"][1])
    return CoreShape(
        **_weights(module, module.get_submodule(core.table.out.removeprefix(at))),
        kept=kept + between,
        within=between / (1 + mixes),  # by measurement
        flop=6.0 * module.num_v_heads * module.head_k_dim * module.head_v_dim if mixes else 0.0,
        scores=None
        if mixes
        else (inner // module.head_dim, ends["k"][1] // module.head_dim, module.head_dim),
    )


def _weights(module: nn.Module, linear: nn.Module) -> dict[str, int]:
    """Its numbers, and those of its tuning beside them: none where its own train, as `linear`'s do."""
    tuned = sum(value.numel() for value in module.parameters() if value.requires_grad)
    tuned = 0 if cast("Any", linear).weight.requires_grad else tuned
    return {"weights": sum(value.numel() for value in module.parameters()) - tuned, "tuned": tuned}


def _of_layer(layer: nn.Linear, itemsize: int) -> float:
    """Bytes that its tuning keeps of a token beside its input, which others keep too: its own features, and a
    copy of the input for factors that are wider, but for LoRA's."""
    kept = layer.kept_features() if isinstance(layer, TunedLayer) else KeptFeatures()
    copies = kept.input and low_rank_of(layer) is None and itemsize < WIDE
    return itemsize * (kept.inner + kept.after) + copies * WIDE * ends_of(layer)[0]


def _scoring(core: CalledCore, positions: Positions, itemsize: int, longest: int, every: bool) -> CoreShape:
    """Those of attention that scores positions too. every: as transformers has it, which keeps scores of all
    keys of each token; else see scored.py."""
    module, at = cast("Any", core.module), f"{core.table.at}."
    layers = {
        role: module.get_submodule(path.removeprefix(at))
        for role, path in core.table.region.sites.items()
        if role != "o"
    }
    inner, width = ends_of(layers["q"])[1], ends_of(layers["q"])[0]
    table = 2 * getattr(module, positions.half, 0) * core.table.tabled
    drops = any(
        isinstance(drop, nn.Dropout) and drop.p > 0
        for drop in (getattr(module, name, None) for name in positions.drops[:1])
    )
    heads = int(getattr(module, core.table.head_counts[0]))
    pairs, of_table = longest * heads * itemsize, table * heads * itemsize
    # the table's, of one row alone at the least
    rows = width + 6 * inner if every else 4 * inner
    made = itemsize * (rows + 2 * table * inner / max(1, longest))
    if every:  # a mask of one byte, and two indices of eight that all rows, some here, share
        made += pairs * (1 + 2 * drops) + 5 * longest
    else:
        made += WIDE * heads
    return CoreShape(
        **_weights(module, layers["v"]),
        kept=made + sum(_of_layer(layer, itemsize) for layer in layers.values()),
        within=2 * (pairs + of_table) + itemsize * inner if every else 2 * pairs + 4 * of_table,
        # of both terms, a product of each token with each position; 4 ahead, and made again 12 back
        flop=6.0 * table * inner,
        scores=(heads, heads, inner // heads),
        # at the softmax, behind which dropout keeps two
        beside=(4 - 2 * drops) * pairs + of_table if every else 2 * of_table,
        # operation by operation 38 times, with indices of eight bytes; else by both terms and their gradients
        moved=38 * pairs if every else 6 * of_table + pairs,
    )
