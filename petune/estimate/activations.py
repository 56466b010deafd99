"""How much of a forward pass is kept for the backward pass: an estimate in bytes, block by block, from the
modules as a rank holds them.

Counted is what autograd saves in a block of Hugging Face's with SDPA, by the layers that are there (a = bytes
of an activation; under bf16 autocast 2, and norms still save 4). Per token that a region or the connection
works on:

        a linear that trains, or has factors    its input: once for q, k and v together in float32, a copy for
                                                each in bf16
        low-rank factors, bottlenecks           their own inner features, a bottleneck also its input
        attention                               q, k, v and the output, a each; of one linear for q, k and v
                                                its whole output beside q and k
        experts                                 as an MLP, for each expert that a token goes through
        MLP                                     gated: gate, act(gate) and up; plain: what enters the
                                                activation; and what enters `down`
        a gated-delta mixer                     see models/gated_delta.py
        norm                                    its input, 4, and its result, 4, if its scale trains
        dropout                                 1 per feature of the mask

Per pair of tokens and head: with dropout on the probabilities 4 + 2 a + 1, as they are computed openly; as
they are with sinks, capped scores (a more) or scores of positions, 4, and a under autocast; for T5 the bias
in a, once for all rows, or 4 per row when the bias table trains, which no fused kernel knows. A frozen linear
saves nothing. tests/estimate measure it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers.activations import NewGELUActivation

from petune.models.experts import number_of, sizes_of, weights_of
from petune.models.gated_delta import state_bytes
from petune.models.sites import ends_of
from petune.models.spec import Attention, LinearAttention, Mlp, Region, Role, RoutedMlp, StackRule, child_of
from petune.models.tuned_linear import KeptFeatures, TunedLayer, TunedLinear, bottleneck_of
from petune.parallel.plan import Cut

QKV: tuple[Role, ...] = ("q", "k", "v", "qkv")
NORM = 4  # bytes of what a norm saves, whatever the activations are
OPEN = 4  # bytes of a softmax that is computed openly
# activations of single operations: features they save besides their input
STEPS: dict[type[nn.Module], int] = {NewGELUActivation: 3}


@dataclass(frozen=True)
class Extent:
    """Tokens of a stack on one rank: the whole sequence, this rank's part of it, and what cross-attention
    reads; heads of the rank; copies of tokens that its experts see, for each that its own tokens make. gpu:
    where the rank computes."""

    whole: int
    own: int
    across: int = 0
    heads: int = 1
    routed: float = 1.0
    gpu: bool = True


@dataclass(frozen=True)
class Saved:
    """Bytes kept for the backward pass: for every row, and once whatever the rows."""

    row: float = 0.0
    once: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.row + other.row, self.once + other.once)

    def of(self, rows: float) -> float:
        """Bytes for so many rows."""
        return rows * self.row + self.once


def saved_by(
    block: nn.Module,
    rule: StackRule,
    cut: Cut | None,
    extent: Extent,
    itemsize: int,
    dropouts: tuple[float, float],
) -> Saved:
    """What a block that takes part in the backward pass saves; `dropouts` are the rates on probabilities and
    on hidden states.

    `block` is as the rank holds it: narrowed, tuned. `itemsize` is that of activations.
    """
    connection = extent.whole if cut is None or cut.connection == "whole" else extent.own
    found = Saved()
    for core in _cores(block, rule):
        region = core.region
        tokens = connection if cut is None or cut.layout(region.kind) == "sequence" else extent.whole
        if isinstance(core, RoutedMlp):
            found += _of_experts(block, core, tokens, connection, itemsize, extent.routed)
            continue
        found += _of_region(block, core, rule, cut, extent, tokens, itemsize, dropouts[0])
        if dropouts[1]:
            found += Saved(connection * ends_of(_layer(block, region.leave))[1])
        found += Saved(connection * _kept(_layer(block, region.leave)).after * itemsize)
    inside = {
        id(part)
        for region in rule.regions_in(block)
        if (enter := child_of(block, region.enter))
        for part in enter[1].modules()
    }
    found += Saved(connection * sum(_of_norm(norm) for norm in _norms(block) if id(norm) not in inside))
    return found + Saved(connection * sum(_of_sum(module, itemsize) for module in (block, *_norms(block))))


def _of_sum(module: nn.Module, itemsize: int) -> float:
    """Bytes per token of a bottleneck that is part of a block, or of the norm behind a sum, which is read
    twice then."""
    part = bottleneck_of(module)
    if part is None or not part.of_sum:
        return 0.0
    again = 0.0 if module._parameters.get("weight") is None else _of_norm(module)
    return again + cast("TunedLayer", module).kept_features().after * itemsize


def _cores(block: nn.Module, rule: StackRule) -> Iterator[Attention | Mlp | RoutedMlp]:
    """The cores of a block, a shared expert's besides."""
    for core in (sublayer.core for sublayer in rule.sublayers_in(block)):
        yield core
        if isinstance(core, RoutedMlp) and core.shared is not None:
            yield core.shared


def _of_experts(
    block: nn.Module, core: RoutedMlp, tokens: int, connection: int, itemsize: int, routed: float
) -> Saved:
    """What a mixture saves: the router's scores and their softmax, and for each expert of a token, two places
    of 8 bytes, what gates, what is weighted, and the input of weights that train or have factors. connection:
    tokens of a bottleneck behind it; routed: see Extent."""
    module, router = _module(block, core.experts), cast("Any", _module(block, core.router))
    up, down = weights_of(module)
    copies = tokens * int(router.top_k)
    _, made, width = sizes_of(module, up)
    _, _, columns = sizes_of(module, down)
    tuned = module.weights if isinstance(module, TunedLayer) else ()
    inner = module.kept_features().inner if isinstance(module, TunedLayer) else 0
    features = made + columns + inner  # gate and up, act(gate)
    features += 3 * columns * (core.act == "clamped")  # both as they are clamped, and the sigmoid
    if tuned:
        features += columns  # what the router's share weighs, before the way down
    else:
        features += width  # and behind it, as transformers does
    for weight, inputs in ((up, width), (down, columns)):
        features += inputs * (weight in tuned or module.get_parameter(weight).requires_grad)
    whole = _module(block, core.at)
    behind = whole.kept_features().after if isinstance(whole, TunedLayer) else 0
    here = copies * routed * (features * itemsize + 2 * 8) + (copies * 2 * 8 if routed != 1 else 0)
    return Saved(here + tokens * 2 * number_of(module) * NORM + connection * behind * itemsize)


def inputs_of(width: int, cut: Cut | None, extent: Extent, itemsize: int) -> float:
    """Bytes per row of what a block takes in: all that is kept of it where activations are computed again."""
    return width * itemsize * (extent.whole if cut is None or cut.connection == "whole" else extent.own)


def _of_region(
    block: nn.Module,
    core: Attention | Mlp,
    rule: StackRule,
    cut: Cut | None,
    extent: Extent,
    tokens: int,
    itemsize: int,
    dropout: float,
) -> Saved:
    region = core.region
    layers = {
        role: cast("nn.Linear", found[1])
        for role, path in region.sites.items()
        if (found := child_of(block, path))
    }
    leave = _layer(block, region.leave)
    exchanged = cut is not None and cut.attention == "sequence" and cut.exchange in ("ulysses", "ring")
    keys = extent.across if region.cross else extent.own if exchanged else extent.whole
    read = {role: keys if region.cross and role in ("k", "v") else tokens for role in layers}
    entering: dict[int, float] = {}
    total = 0.0
    for role, layer in layers.items():
        total += read[role] * _kept(layer).inner * itemsize
        if layer is not leave and (_kept(layer).input or _trains(layer)):
            # in float32 layers that read the same save one tensor
            source = id(layer) if itemsize < NORM else read[role]
            entering[source] = read[role] * ends_of(layer)[0] * itemsize
    total += sum(entering.values())
    if isinstance(core, LinearAttention):
        mixer = cast("Any", _module(block, core.at))
        return Saved(total + tokens * state_bytes(mixer, itemsize, extent.gpu))
    if isinstance(core, Attention):
        made = {role: ends_of(layer)[1] for role, layer in layers.items()}
        inner = ends_of(leave)[0]  # of all heads
        total += itemsize * tokens * core.given(inner)
        total += itemsize * sum((keys if role in ("k", "v") else tokens) * made.get(role, 0) for role in QKV)
        if "qkv" in made:  # whole, as v is a part of it, beside q and k
            total += itemsize * tokens * (made["qkv"] + inner) / 2
        for by_head, role in ((core.q_norm, "q"), (core.k_norm, "k")):
            if by_head is not None and (norm := child_of(block, by_head.path)) is not None:
                size = made[role] / (1 + (core.gated and role == "q"))
                total += tokens * size / _width(norm[1]) * _of_norm(norm[1])
        if itemsize < NORM and _kept(leave).input:
            total += tokens * ends_of(leave)[0] * itemsize
        pairs = extent.heads * tokens * keys
        total += _of_own_scores(block, core, made, inner, pairs, keys, itemsize, bool(dropout))
        return Saved(total) + _pairs(block, region, rule, pairs, itemsize, dropout)
    columns = ends_of(leave)[0]
    steps = max((STEPS.get(type(part), 0) for part in _module(block, region.enter).modules()), default=0)
    total += tokens * columns * itemsize * ((3 if {"gate", "gate_up"} & layers.keys() else 1) + steps)
    if (_kept(leave).input or _trains(leave)) and not _relu(block, region):
        total += tokens * columns * itemsize
    return Saved(total)


def _of_own_scores(
    block: nn.Module,
    core: Attention,
    made: Mapping[Role, int],
    inner: int,
    pairs: float,
    keys: float,
    itemsize: int,
    drops: bool,
) -> float:
    """Bytes per row of what attention keeps more where no kernel knows its scores: `pairs` of them, of heads
    with `inner` features in all. made: features that its linears make."""
    total = 0.0
    if core.positions is not None:
        table = 2 * getattr(_module(block, core.at), core.positions.half, 0)
        total += itemsize * (keys * made["k"] + table * (made["q"] + made["k"]))  # repeated for each row
    capped = bool(getattr(_module(block, core.at), "attn_logit_softcapping", None))
    if capped or core.sinks is not None or core.positions is not None:
        total += 0 if drops else pairs * (OPEN + itemsize * (itemsize < NORM))
        total += pairs * itemsize * capped
        total += itemsize * keys * (2 * inner - made.get("k", inner) - made.get("v", inner))
    return total


def _pairs(
    block: nn.Module, region: Region, rule: StackRule, pairs: float, itemsize: int, dropout: float
) -> Saved:
    """What grows with the square of the sequence."""
    if dropout:
        return Saved(pairs * (OPEN + 2 * itemsize + 1))
    if rule.bias is None or region.cross:
        return Saved()
    trains = all(
        _trains(layer) for layer in _module(block, region.enter).modules() if isinstance(layer, nn.Linear)
    )
    return Saved(row=pairs * OPEN) if trains else Saved(once=pairs * itemsize)


def _module(block: nn.Module, path: str) -> nn.Module:
    found = child_of(block, path)
    assert found is not None, path
    return found[1]


def _layer(block: nn.Module, path: str) -> nn.Linear:
    return cast("nn.Linear", _module(block, path))


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from (value for value in module._parameters.values() if value is not None)


def _trains(layer: nn.Module) -> bool:
    weight = layer._parameters.get("weight")
    return weight is not None and weight.requires_grad


def _kept(layer: nn.Module) -> KeptFeatures:
    """What the tuning of a layer keeps; nothing where it has none."""
    return layer.kept_features() if isinstance(layer, TunedLinear) else KeptFeatures()


def _norms(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that scale and shift features and hold nothing else: each of their tensors is a vector."""
    for part in module.modules():
        own = list(_own(part))
        if own and all(value.dim() == 1 for value in own):
            yield part


def _width(norm: nn.Module) -> int:
    return max(value.numel() for value in _own(norm))


def _of_norm(norm: nn.Module) -> float:
    """Bytes per token. An RMS norm, made of single operations, saves its result too when its scale trains, in
    float32."""
    again = NORM if not isinstance(norm, nn.LayerNorm) and _trains(norm) else 0
    return _width(norm) * (NORM + again)


def _relu(block: nn.Module, region: Region) -> bool:
    """Whether the activation saves its result, which is what enters `down`."""
    return any(isinstance(part, nn.ReLU) for part in _module(block, region.enter).modules())
