"""Ladder side-tuning, LST (Sung et al. 2022, arXiv:2206.06522): a narrow network climbs beside a backbone
that needs no backward pass.

        s <- down_0(dropout(h_0));   per level i:  g = sigmoid(a_i / T),  s <- block_i(g s + (1 - g)
                                     down_i(h_i))

There is a level beside each block, or beside those of `layers` alone: what the others give is not read.
h_i is the output of backbone block i, block_i the family's own block class with every width divided by
`reduction` and as many heads, a_i one scalar that starts at 0. End `residual`: h_L + up(s_L) with up = 0, so
a wrapped model computes exactly what the base did. End `paper`: up(dropout(norm(s_L))) in place of the
backbone's normed output. End `blend` is side-tuning (Zhang et al. 2020, arXiv:1912.13503): the side network
reads the input alone, s <- block_i(s), and alpha h_L + (1 - alpha) up(s_L) leaves, alpha = sigmoid(a) with a
= 0 at the start, or fixed. The backbone runs in eval mode under no_grad. Side blocks start at random or,
`start: pruned` and `fisher`, as what is left of the backbone's (petune/methods/pruning.py). An encoder's side
state reaches the decoder's ladder beside encoder_hidden_states on the hidden dim, so generate's expansion for
beams carries it along. Side keys and values live in the model's own cache, past the backbone's layers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.kernels.block.drawing import Places
from petune.kernels.block.layout import Layout
from petune.kernels.dispatch import Ops
from petune.kernels.mixing import mixed
from petune.methods.configs import SideConfig
from petune.methods.head import StandStill, refuse_before
from petune.methods.narrowing import check, narrow_block, narrow_config, narrow_norm
from petune.methods.pruning import Chain, of_embedding, prune_into, weighed
from petune.models.copied import copied
from petune.models.linear_attention import GatedDelta
from petune.models.port import Arguments, StackPass
from petune.models.spec import Config, Family, StackName, StackRule, stack_paths
from petune.models.stack import Stack, carried_by, own_stacks, run_block, tail_of
from petune.models.tuned_linear import TunedModule
from petune.rng.context import running
from petune.rng.dropout import draw, dropped, tokens_here


class Ladder(TunedModule, PreTrainedModel):
    """The side network of one stack (stack_protocols.LadderLike). A PreTrainedModel of its own, so that the
    model's recorder of hidden states passes it by."""

    config_class: Any = None
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(
        self,
        config: Config,
        rule: StackRule,
        blocks: nn.ModuleList,
        around: nn.Module,
        settings: SideConfig,
        width: int,
        feeds: bool,
    ) -> None:
        super().__init__(config)
        narrow = width // settings.reduction
        self.rule, self.width, self.feeds, self.settings = rule, width, feeds, settings
        self.depth = len(blocks)
        beside = settings.beside(self.depth)
        read = beside if settings.climbs else ()
        self.down = nn.ModuleList(
            nn.Linear(width, narrow) if index in (-1, *read) else nn.Identity()
            for index in range(-1, self.depth)
        )
        self.gates = nn.ParameterDict({str(index): nn.Parameter(torch.zeros(())) for index in read})
        self.blocks = nn.ModuleList(
            narrow_block(block, config, rule, self.depth + index, index == beside[0])
            if index in beside
            else nn.Identity()
            for index, block in enumerate(blocks)
        )
        with torch.device("cpu"):  # its angles are no weights: they are never left without memory
            self.rotary = type(around.get_submodule(rule.rotary))(config) if rule.rotary else None
        self.norm = (
            narrow_norm(tail, narrow)
            if (tail := tail_of(around, rule)) is not None and (feeds or settings.end == "paper")
            else None
        )
        self.positions = None if rule.positions is None else nn.Linear(width, narrow, bias=False)
        self.up = None if feeds else nn.Linear(narrow, width)
        if self.up is not None and settings.end == "residual":
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)
        blends = settings.end == "blend" and settings.alpha is None and not feeds
        self.alpha = nn.Parameter(torch.zeros(())) if blends else None
        # an encoder's side state, between the end of its stack and the end of the encoder
        self.handed: Tensor | None = None
        self.ops: Ops | None = None

    @property
    def numbered(self) -> list[tuple[int, nn.Module]]:
        return [(at, block) for at, block in enumerate(self.blocks) if self.has(at)]

    def has(self, number: int) -> bool:
        return not isinstance(self.blocks[number], nn.Identity)

    def reads(self, number: int) -> bool:
        return self.has(number) and self.settings.climbs

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the modules' own initialisation is meant."""

    def tuned(self) -> dict[str, nn.Parameter]:
        """Every parameter of the side network."""
        return dict(self.named_parameters())

    def begun(self) -> Collection[str]:
        """See TunedModule: side blocks, and the norm behind them, that were pruned."""
        pruned = self.settings.start != "random"
        return [name for name in self.tuned() if pruned and name.startswith(("blocks.", "norm."))]

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """Fill a tensor anew as its module does it; gates, and what ends in nothing, are zero."""
        path, _, leaf = name.rpartition(".")
        value, module = self.get_parameter(name), self.get_submodule(path)
        nothing = module is self.up and self.settings.end == "residual"
        if module is self.gates or value is self.alpha or nothing:
            value.zero_()
        elif hasattr(module, "reset_parameters"):
            made: Any = copy.deepcopy(module).to("meta")  # so that this tensor alone draws
            made._parameters[leaf] = nn.Parameter(torch.empty_like(value))
            made.reset_parameters()
            value.copy_(made._parameters[leaf])
        elif isinstance(module, Conv1D):
            value.copy_(Conv1D(module.nf, module.nx).get_parameter(leaf))
        elif isinstance(module, GatedDelta):
            module.begin(leaf)
        elif leaf != "weight":  # a scale of what a sub-layer gives (LayerScale)
            value.fill_(cast("Any", self.config).layerscale_value)
        else:  # a norm, which begins alike whatever its width
            value.fill_(float(cast("Any", type(module))(1).weight))

    def keep(self, start: int, end: int) -> None:
        """Drop every level that is not beside one of the blocks [start, end), as a stage of a pipeline does;
        names do not change."""
        for index in (index for index, _ in self.numbered if not start <= index < end):
            self.down[index + 1] = nn.Identity()
            self.blocks[index] = nn.Identity()
            if str(index) in self.gates:
                del self.gates[str(index)]
        if start > 0:
            self.down[0] = nn.Identity()
        if end < self.depth:
            self.norm = self.up = self.alpha = None

    def begin(self, call: Arguments, arrived: Arguments | None) -> Arguments:
        """See stack_protocols.LadderLike; with the carry come the angles of each type of attention.

        Raises UsageError for encoder states that were not made by this model's own encoder."""
        across = call.get("encoder_hidden_states")
        if across is not None and across.shape[-1] == self.width:
            remedy = "make them with this model's encoder, or leave them out"
            raise UsageError("encoder_hidden_states carry no side state", remedy=remedy)
        side: Arguments = {name: None for name in self.rule.carry if name in call}
        if arrived is None:
            hidden = self._own(call["hidden_states"].detach())
            side["hidden_states"] = self.down[0](self._dropped(hidden))
        else:
            side |= arrived
        if self.rotary is not None:
            own, positions = side["hidden_states"], call.get("position_ids")
            here = tokens_here(own.shape[1], own.device)
            if positions is None:  # blocks that are told their angles alone
                kept = running().segments
                positions = (here if kept is None else kept.tokens)[None]
            if positions.shape[-1] != own.shape[1]:  # those of all ranks
                positions = positions[..., here]
            if "position_ids" in call:  # which blocks may read themselves
                side["position_ids"] = positions
            if hasattr(self.rotary, "mrope_section"):  # of time, height and width, which text counts alike
                positions = positions.expand(3, *positions.shape)
            turn = partial(self.rotary, side["hidden_states"], position_ids=positions)
            by_type = "layer_type" in inspect.signature(self.rotary.forward).parameters
            types = sorted(set(self.config.layer_types)) if by_type else [None]
            side["position_embeddings"] = {one: turn(layer_type=one) if by_type else turn() for one in types}
        _make_room(call.get("past_key_values"), self.depth)
        return side

    def split(self, call: Arguments, now: StackPass) -> tuple[Arguments, Arguments]:
        backbone = dict(call)
        side = {name: value for name, value in call.items() if name not in self.rule.carry}
        across = call.get("encoder_hidden_states")
        if across is not None:
            # laid out as the encoder left them: of tensors with other strides products may round otherwise
            # than the base's
            own, dtype = across[..., : self.width].detach(), call["hidden_states"].dtype
            backbone["encoder_hidden_states"] = now.once(
                "backbone", lambda _: own.to(dtype).contiguous(), across
            )
            side["encoder_hidden_states"] = now.once(
                "side", lambda _: across[..., self.width :].contiguous(), across
            )
        name = "" if self.rule.positions is None else self.rule.positions.argument
        if self.positions is not None and (table := call.get(name)) is not None:
            narrow = self.positions
            side[name] = now.once("positions", lambda x: narrow(self._own(x.detach())), table)
        for name in ("attention_mask", "encoder_attention_mask"):
            if (mask := call.get(name)) is not None:
                side[name] = now.once("mask", self._own, mask)
        return backbone, side

    def lower(self, levels: Tensor) -> Tensor:
        """See stack_protocols.LadderLike: one batched product."""
        down = [cast("nn.Linear", self.down[at + 1]) for at, _ in self.numbered]
        weights, biases = torch.stack([one.weight for one in down]), torch.stack([one.bias for one in down])
        found = torch.baddbmm(biases[:, None], self._entering(levels).flatten(1, -2), weights.mT)
        return cast("Tensor", found.unflatten(1, levels.shape[1:-1]))

    def gate(self) -> tuple[Tensor, float]:
        return torch.stack(list(self.gates.values())), self.settings.temperature

    def call(self, index: int, call: Arguments) -> Arguments:
        """See stack_protocols.LadderLike: with the angles of its type of attention."""
        if self.rotary is None:
            return call
        angles = call["position_embeddings"]
        kind = self.config.layer_types[index] if None not in angles else None
        return call | {"position_embeddings": angles[kind]}

    def step(self, index: int, hidden: Tensor, call: Arguments, below: Tensor | None = None) -> Arguments:
        """See stack_protocols.LadderLike: the gate mixes before the block."""
        state = call["hidden_states"]
        if self.reads(index):
            if below is None:
                below = self.down[index + 1](self._entering(hidden))
            state = mixed(self.ops, state, below, self.gates[str(index)], self.settings.temperature)
        call = self.call(index, call | {"hidden_states": state})
        return carried_by(self.rule, run_block(self.blocks[index], call))

    def end(self, hidden: Tensor, call: Arguments) -> Tensor:
        state = call["hidden_states"]
        if self.norm is not None:
            state = self.norm(state)
        if self.up is None:
            self.handed = state
            return hidden
        dtype = hidden.dtype
        if self.settings.end == "paper":
            return cast("Tensor", self.up(self._dropped(state))).to(dtype)
        lifted = cast("Tensor", self.up(state))
        if self.settings.end == "blend":
            alpha: Any = self.settings.alpha if self.alpha is None else self.alpha.sigmoid()
            blended: Tensor = alpha * hidden.to(lifted.dtype) + (1 - alpha) * lifted
            return blended.to(dtype)
        return hidden + lifted.to(dtype)

    def _dropped(self, x: Tensor) -> Tensor:
        """`x` [batch, seq, width] with the dropout of the ladder's ends, also where padding is left out."""
        p = self.settings.dropout if self.training else 0.0
        if not p or running().segments is None:
            return F.dropout(x, p)
        return dropped(x.flatten(0, 1), draw(Places(Layout.of(x), x, None).own, p)).view_as(x)

    def _entering(self, x: Tensor) -> Tensor:
        """What a block gives, on its way down: in the side network's dtype, or as autocast will cast it."""
        return x if torch.is_autocast_enabled(x.device.type) else self._own(x)

    def _own(self, x: Tensor) -> Tensor:
        """`x` in the side network's dtype; masks of bool stay."""
        return x.to(self.dtype) if x.is_floating_point() else x


@dataclass
class HandOver:
    """Hook on an encoder: its last hidden state leaves with the side state beside it, [batch, seq, width +
    narrow]."""

    stack: Stack

    def __call__(self, encoder: nn.Module, args: Any, output: Any) -> Any:
        ladder = cast("Ladder | None", self.stack.ladder)
        # None on a pipeline's stage that ends before the encoder does
        if ladder is not None and ladder.handed is not None:
            output["last_hidden_state"] = torch.cat(
                [output["last_hidden_state"].to(ladder.handed.dtype), ladder.handed], dim=-1
            )
            ladder.handed = None
        return output


@dataclass
class PassTail:
    """Hook on the norm after a stack: with the paper's end the side network has normed already, so the input
    passes through."""

    stack: Stack

    def __call__(self, tail: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output if self.stack.ladder is None else cast("Tensor", args[0])


def apply(model: nn.Module, family: Family | None, config: SideConfig, also_train: tuple[str, ...]) -> None:
    """Give every stack its ladder. Raises UsageError, with the model as it was, for a reduction the model's
    sizes do not allow."""
    assert family is not None
    paths = stack_paths(model, family)
    check(config, {path: len(cast("Any", model.get_submodule(path))) for path in paths.values()})
    refuse_before("side", model, family, also_train)
    small = narrow_config(model, family, config.reduction)
    ladders = {}
    for name, path in paths.items():
        around = model.get_submodule(path.rpartition(".")[0])
        blocks = cast("nn.ModuleList", model.get_submodule(path))
        own = copied(family.part(small, name))
        own.is_decoder = (name == "decoder" and family.kind == "encoder-decoder") or bool(
            getattr(own, "is_decoder", False)
        )
        feeds = name == "encoder" and "decoder" in paths
        weight, width = next(blocks.parameters()), family.shape(model.config).width
        try:
            with torch.device("meta") if weight.is_meta else nullcontext():
                ladder = Ladder(own, family.stacks[name], blocks, around, config, width, feeds)
        except ValueError as error:
            what = f"no side network of reduction {config.reduction} can be built: {error}"
            raise UsageError(what, where=path, remedy="choose another reduction") from None
        cast("nn.Module", ladder).to(torch.promote_types(weight.dtype, torch.float32))
        if not weight.is_meta:
            cast("nn.Module", ladder).to(weight.device)
        ladders[name] = ladder.train(around.training)
    if config.start != "random":
        _start_pruned(model, family, config, ladders, paths)
    trained = [*ladders.values(), *map(model.get_submodule, also_train)]
    hold = StandStill([*ladders.values()], trained)
    for name, stack in own_stacks(model, family).items():
        around = model.get_submodule(paths[name].rpartition(".")[0])
        stack.add_module("side", ladders[name])
        if ladders[name].feeds:
            around.register_forward_hook(HandOver(stack))
        elif config.end == "paper" and (tail := tail_of(around, stack.rule)) is not None:
            tail.register_forward_hook(PassTail(stack))
        around.register_forward_pre_hook(hold)  # generate calls an encoder by itself
    getattr(model, "base_model", model).register_forward_pre_hook(hold)


@torch.no_grad()
def _start_pruned(
    model: nn.Module,
    family: Family,
    config: SideConfig,
    ladders: Mapping[StackName, Ladder],
    paths: Mapping[StackName, str],
) -> None:
    """Fill every ladder's blocks, and its norm, with what is left of the backbone's."""
    shape, memory = family.shape(cast("Any", model).config), None
    if next(model.parameters()).is_meta:  # of a model that is only planned
        return
    if family.reads != "text":
        what = f"a pruned start begins with an embedding of tokens, and {family.name} reads {family.reads}s"
        raise UsageError(what, where="start", remedy="set start: random")
    fisher = weighed(model) if config.start == "fisher" else None
    first = of_embedding(model, shape.width, config.reduction, fisher)
    for name, path in paths.items():
        ladder, rule = cast("Any", ladders[name]), family.stacks[name]
        chain = Chain(shape, rule, config.reduction, first, memory, fisher)
        prune_into(ladder.blocks, dict(model.get_submodule(path).named_children()), chain, path)
        tail = tail_of(model.get_submodule(path.rpartition(".")[0]), rule)
        for own, value in ladder.norm.named_parameters() if ladder.norm is not None else ():
            value.copy_(cast("Any", tail).get_parameter(own)[chain.features])
        memory = chain.features


def _make_room(cache: Any, depth: int) -> None:
    """Append empty layers for the side network to a cache that has only the backbone's."""
    for part in (
        getattr(cache, "self_attention_cache", cache),
        getattr(cache, "cross_attention_cache", None),
    ):
        layers = getattr(part, "layers", None)
        while layers is not None and 0 < len(layers) < 2 * depth:
            layers.append(copy.deepcopy(layers[len(layers) - depth]))
