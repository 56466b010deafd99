"""Tables of families as steps: a block computes what Hugging Face's own does, and every gradient of it, on
each rung.

Blocks that attend to an encoder, or with a bias of relative positions, are folded here by hand: `fuse` does
not yet hand them what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import BartConfig, T5Config
from transformers.models.bart.modeling_bart import BartDecoderLayer, BartEncoderLayer
from transformers.models.t5.modeling_t5 import T5Block, T5LayerNorm

from petune.kernels.block import fold
from petune.kernels.block.attention import How
from petune.kernels.block.cores import CoreSizes
from petune.kernels.block.packed_linear import Group
from petune.kernels.block.program import Program, compiled
from petune.kernels.block.steps import BlockRun
from petune.kernels.block.sublayers import read_sublayers
from petune.kernels.block.turns import alone
from petune.kernels.configs import Level
from petune.kernels.dispatch import reference_ops
from petune.methods.adapter import AdapterBlock, AdapterNorm, tune
from petune.methods.configs import AdapterConfig
from petune.models import bart, t5
from petune.models.spec import StackRule
from petune.models.tuned_linear import bottleneck_of
from petune.models.tuned_parts import BottleneckPart, LowRank

WIDTH, HEADS, COLUMNS, ROWS, TOKENS, MEMORY = 24, 4, 40, 2, 7, 5
KEEPS: tuple[Level, ...] = ("all", "projections", "attention", "input")
BART = BartConfig(
    d_model=WIDTH,
    encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS,
    encoder_ffn_dim=COLUMNS,
    decoder_ffn_dim=COLUMNS,
    dropout=0.0,
    attn_implementation="eager",
)


def t5_config(act: str, decoder: bool) -> T5Config:
    return T5Config(
        d_model=WIDTH,
        d_kv=WIDTH // HEADS,
        num_heads=HEADS,
        d_ff=COLUMNS,
        feed_forward_proj=act,
        dropout_rate=0.0,
        is_decoder=decoder,
        attn_implementation="eager",
    )


@dataclass(frozen=True)
class Kind:
    """A kind of block: how it is made, the table of its stack, its activation and the epsilon of its
    norms."""

    make: Callable[[], nn.Module]
    rule: StackRule
    act: Any
    eps: float


KINDS = {
    "bart encoder": Kind(lambda: BartEncoderLayer(BART), bart.FAMILY.stacks["encoder"], "gelu", 1e-5),
    "bart decoder": Kind(lambda: BartDecoderLayer(BART, 0), bart.FAMILY.stacks["decoder"], "gelu", 1e-5),
    "t5 encoder": Kind(lambda: T5Block(t5_config("relu", False)), t5.FAMILY.stacks["encoder"], "relu", 1e-6),
    "t5 decoder": Kind(
        lambda: T5Block(t5_config("gated-gelu", True), layer_idx=0),
        t5.FAMILY.stacks["decoder"],
        "gelu_tanh",
        1e-6,
    ),
}


def wide_norm(self: Any, x: Tensor) -> Tensor:
    """T5's norm in the dtype of its input; its own goes through float32."""
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def own(block: nn.Module, x: Tensor, memory: Tensor, bias: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
    """What Hugging Face's block makes of its inputs."""
    crosses: dict[str, Any] = {"encoder_hidden_states": memory, "encoder_attention_mask": masks[1]}
    if isinstance(block, BartEncoderLayer):
        out = block(x, masks[0])
    elif isinstance(block, BartDecoderLayer):
        out = block(x, masks[0], **crosses, use_cache=False)
    else:
        out = block(x, masks[0], position_bias=bias, **(crosses if block.is_decoder else {}))
    return out[0] if isinstance(out, tuple) else out


def folded(
    program: Program,
    block: nn.Module,
    inputs: Sequence[Tensor],
    masks: Sequence[Tensor],
    dy: Tensor,
    keep: Level,
    tile: int | None,
) -> tuple[Tensor, list[Tensor | None], dict[str, Tensor]]:
    """(y, the gradients of the inputs, those of the block's parameters) of both passes as steps."""
    names = {id(value): name for name, value in block.named_parameters()}
    layers = [[block.get_submodule(path) for path in place.paths] for place in program.groups]
    parts = [
        [LowRank(one.weight.detach(), None if one.bias is None else one.bias.detach()) for one in group]
        for group in layers
    ]
    behind = [
        cast("BottleneckPart", bottleneck_of(block.get_submodule(path))) for path in program.bottlenecks
    ]
    inner = [value for part in behind for value in part.tensors or ()]
    groups = [
        Group(own, torch.float64, place.first, reference_ops(), gates=place.kind == "up")
        for own, place in zip(parts, program.groups, strict=True)
    ]
    own_norms = [list(block.get_submodule(one.path)._parameters.values()) for one in program.norms]
    norms = [tuple(value.detach() for value in own if value is not None) for own in own_norms]
    hows = [How(False, one.scale, ROWS, mask=masks[at]) for at, one in enumerate(program.attends)]
    own = [
        (part._replace(tensors=tuple(value.detach() for value in part.tensors or ())), None)
        for part in behind
    ]
    run = BlockRun(
        reference_ops(), groups, norms, [None] * len(program.dropouts), hows, None, bottlenecks=own
    )
    needs = [value is not None for group in parts for part in group for value in part.tensors]
    needs += [True] * (len(inner) + sum(map(len, norms)))
    with torch.no_grad():
        y, kept = alone(fold.forward(program, run, inputs, keep, tile))
        grads = alone(fold.backward(program, run, dy, kept, needs, [True] * len(inputs), keep, tile))
    tensors = [
        value for group in layers for one in group for value in (one.weight, one.bias, None, None, None)
    ]
    tensors += inner
    tensors += [value for own in own_norms for value in own]
    found = {names[id(value)]: run.sink.found[at] for at, value in enumerate(tensors) if value is not None}
    return y, grads, found


def adapted(block: nn.Module, rule: StackRule) -> None:
    """Put an adapter behind every linear by which a sub-layer is left."""
    for sublayer in read_sublayers(block, rule):
        path = sublayer.core.region.leave
        block.set_submodule(
            path, tune(cast("nn.Linear", block.get_submodule(path)), AdapterConfig(reduction=4), path)
        )


def adapted_at_its_sum(block: nn.Module, rule: StackRule) -> Any:
    """The block with an adapter at the norm behind its last sum, or behind itself."""
    config, like = AdapterConfig(kind="pfeiffer", reduction=4), next(block.parameters())
    norm = read_sublayers(block, rule)[-1].norm_after_sum
    if norm is None:
        return AdapterBlock.for_class(type(block)).of(block).begin(WIDTH, like, config, "it")
    own = block.get_submodule(norm.path)
    made = AdapterNorm.for_class(type(own)).of(own).begin(WIDTH, like, config, norm.path)
    block.set_submodule(norm.path, made)
    return block


@pytest.mark.parametrize("tile", [None, 5])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "full") for kind in KINDS),
        *((kind, method) for kind in ("bart decoder", "t5 decoder") for method in ("adapter", "of its sum")),
    ],
)
def test_a_block_of_steps_is_the_familys_own_on_every_rung(
    kind: str, method: str, tile: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(T5LayerNorm, "forward", wide_norm)
    torch.manual_seed(0)
    made = KINDS[kind]
    block = made.make().double()
    if method == "adapter":
        adapted(block, made.rule)
    elif method == "of its sum":
        block = adapted_at_its_sum(block, made.rule)
    with torch.no_grad():
        for value in block.parameters():
            value.normal_(std=0.3)
    random = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(ROWS, TOKENS, WIDTH, generator=random, dtype=torch.float64) for _ in range(2))
    memory = torch.randn(ROWS, MEMORY, WIDTH, generator=random, dtype=torch.float64)
    bias = torch.randn(1, HEADS, TOKENS, TOKENS, generator=random, dtype=torch.float64)
    low = torch.finfo(torch.float64).min
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
    seen = (seen if kind.endswith("encoder") else seen.tril()).repeat(ROWS, 1, 1, 1)
    seen[1, ..., TOKENS - 2 :] = False
    read = torch.ones(ROWS, 1, TOKENS, MEMORY, dtype=torch.bool)
    read[1, ..., MEMORY - 1 :] = False
    masks = tuple(torch.zeros_like(one, dtype=torch.float64).masked_fill(~one, low) for one in (seen, read))
    given = [value.requires_grad_() for value in (x, memory, bias)]
    expected = own(block, *given, masks)  # type: ignore[arg-type]
    expected.backward(dy)
    wanted = {name: value.grad for name, value in block.named_parameters() if value.grad is not None}
    program = compiled(
        read_sublayers(block, made.rule), CoreSizes(HEADS, HEADS, WIDTH // HEADS, made.act, made.eps)
    )
    by_name = {"x": x.detach().flatten(0, 1), "memory": memory.detach().flatten(0, 1), "bias": bias.detach()}
    shapes = dict(zip(("x", "memory", "bias"), given, strict=True))
    for keep in KEEPS if tile is None else KEEPS[1:]:
        inputs = [by_name[name] for name in program.inputs]
        y, grads, found = folded(program, block, inputs, masks, dy.flatten(0, 1), keep, tile)
        torch.testing.assert_close(y, expected.detach().flatten(0, 1), rtol=1e-12, atol=1e-12)
        for name, grad in zip(program.inputs, grads, strict=True):
            assert grad is not None
            torch.testing.assert_close(grad.view_as(shapes[name]), shapes[name].grad, rtol=1e-11, atol=1e-11)
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-11)
