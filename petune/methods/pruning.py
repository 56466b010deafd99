"""Structural pruning of a backbone's blocks, by which a ladder may start (Sung et al. 2022, arXiv:2206.06522,
section 3.3, after Li et al. 2017, arXiv:1608.08710).

A weight W [out, in] loses the columns whose inputs the layer before has lost, and keeps of its rows those
that matter most, I = sum_j |W_ij|, or by Fisher information sum_j F_ij, in their order. Weights whose rows
belong together (q, k and v; gate and up) keep the same ones: I is of the product of their entries. A chain
goes through a stack: it begins with the features of the embedding of tokens that matter most, residual sums
are no link of it, and norms keep what their input has. Each head keeps as many of its own, and where
positions turn pairs, pairs; of heads that share a key, q counts as their mean.

Fisher information is that of training rows, F = 1/N sum_n (d log p(y_n | x_n) / d W)^2: a row at a time, each
with the targets that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.models.note import Note
from petune.models.spec import Attention, Mlp, Norm, Role, RoutedMlp, Shape, StackRule, SubLayer, child_of

_ELSE = "set start: random"
_FISHER = Note[Mapping[str, Tensor]]("petune_fisher")


def kept(importance: Tensor, reduction: int) -> Tensor:
    """The indices, in their order, of one in `reduction` entries of importance [..., n]: the greatest."""
    count = importance.shape[-1] // reduction
    return importance.topk(count, dim=-1).indices.sort(-1).values


@dataclass
class Chain:
    """The way through one stack. features: those of the hidden states that the weight before has kept;
    memory: of an encoder's last, None without one; fisher: by the names of the model, None for weights that
    matter by their size."""

    shape: Shape
    rule: StackRule
    reduction: int
    features: Tensor
    memory: Tensor | None = None
    fisher: Mapping[str, Tensor] | None = None
    found: dict[str, Tensor] = field(default_factory=dict)
    tables: dict[str, Tensor] = field(default_factory=dict)  # of position biases, for the first side block
    where: str = ""

    def block(self, block: nn.Module, where: str) -> dict[str, Tensor]:
        """The pruned tensors of the next block, by their names in it. Raises UsageError for a block of which
        the table does not say all."""
        self.found, self.own = {}, {name: _wide(value) for name, value in block.named_parameters()}
        self.where = where
        for one in self.rule.sublayers_in(block):
            self._sublayer(block, one, where)
        if left := [name for name in self.own if name not in self.found]:
            what = "a pruned start knows no place for this tensor"
            raise UsageError(what, where=f"{where}.{left[0]}", remedy=_ELSE)
        return self.found

    def _sublayer(self, block: nn.Module, one: SubLayer, where: str) -> None:
        self._norm(one.norm_in)
        if isinstance(one.core, RoutedMlp):
            raise UsageError("a pruned start knows no experts", where=where, remedy=_ELSE)
        inner = (
            self._attention(block, one.core)
            if isinstance(one.core, Attention)
            else self._mlp(block, one.core)
        )
        out = one.core.out if isinstance(one.core, Attention) else one.core.down
        self.features = kept(self._matter(out)[:, inner].sum(1), self.reduction)
        self._take(out, self.features, inner)
        for norm in (one.norm_out, one.norm_after_sum):
            self._norm(norm)

    def _attention(self, block: nn.Module, core: Attention) -> Tensor:
        """What the way out reads of it."""
        members = dict(_present(block, core))
        if core.gated or not {"q", "k", "v"} <= members.keys():
            raise UsageError("a pruned start knows q, k and v apart alone", where=core.at, remedy=_ELSE)
        sources = {role: self.features for role in members}
        if core.memory is not None and self.memory is not None:
            sources |= {"k": self.memory, "v": self.memory}
        shape = self.shape
        groups = shape.heads // shape.kv_heads
        parts = {role: self._matter(path)[:, sources[role]] for role, path in members.items()}
        shared = parts["q"].unflatten(0, (shape.kv_heads, groups, shape.head_dim)).mean(1).flatten(0, 1)
        each = (shared * parts["k"] * parts["v"]).sum(1).unflatten(0, (shape.kv_heads, shape.head_dim))
        if self.rule.rotary is not None:  # feature i turns with i + head_dim / 2
            pairs = kept(each.unflatten(1, (2, -1)).sum(1), self.reduction)
            chosen = torch.cat([pairs, pairs + shape.head_dim // 2], 1)
        else:
            chosen = kept(each, self.reduction)
        first = torch.arange(shape.heads)[:, None] * shape.head_dim
        queries = (chosen.repeat_interleave(groups, 0) + first).flatten()
        keys = (chosen + first[: shape.kv_heads]).flatten()
        for role, path in members.items():
            self._take(path, queries if role == "q" else keys, sources[role])
        if core.bias is not None and (table := f"{core.at}.{core.bias}.weight") in self.own:
            self.found[table] = self.tables[table] = self.own[table]  # of heads, which are as many
        return queries

    def _mlp(self, block: nn.Module, core: Mlp) -> Tensor:
        """What the way out reads of it."""
        found = dict(_present(block, core))
        if not found.keys() <= {"gate", "up", "down"}:
            raise UsageError("a pruned start knows gate and up apart alone", where=core.down, remedy=_ELSE)
        members = [path for role, path in found.items() if role != "down"]
        product = torch.stack([self._matter(path)[:, self.features] for path in members]).prod(0)
        columns = kept(product.sum(1), self.reduction)
        for path in members:
            self._take(path, columns, self.features)
        return columns

    def _rows(self, path: str) -> Tensor:
        return self.own[f"{path}.weight"]

    def _matter(self, path: str) -> Tensor:
        """How much each entry of a weight matters. Products of Fisher information leave float32's range."""
        if self.fisher is None:
            return self._rows(path).abs()
        return self.fisher[f"{self.where}.{path}.weight"].double()

    def _take(self, path: str, rows: Tensor, columns: Tensor) -> None:
        self.found[f"{path}.weight"] = self._rows(path)[rows][:, columns]
        if f"{path}.bias" in self.own:
            self.found[f"{path}.bias"] = self.own[f"{path}.bias"][rows]

    def _norm(self, norm: Norm | None) -> None:
        for name in () if norm is None else (f"{norm.path}.weight", f"{norm.path}.bias"):
            if name in self.own:
                self.found[name] = self.own[name][self.features]


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32))


def _present(block: nn.Module, core: Attention | Mlp) -> Iterator[tuple[Role, str]]:
    """The roles that a block has, with their paths, but for the way out of attention."""
    for role, path in core.region.sites.items():
        if role != "o" and (hit := child_of(block, path)) is not None:
            yield role, hit[0]


# ---------------------------------------------------------------- Fisher information


def fisher_of(model: nn.Module, losses: Iterable[Tensor]) -> dict[str, Tensor]:
    """The Fisher information of the weights of `model` by name, in float32 or more.

    losses: of each row, -log p of its targets, made when it is asked for."""
    named = {name: value for name, value in model.named_parameters() if value.dim() > 1}
    trained = [value.requires_grad for value in named.values()]
    found, rows = {name: torch.zeros_like(_wide(value)) for name, value in named.items()}, 0
    for value in named.values():
        value.requires_grad_(True)
    for loss in losses:
        rows += 1
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        for total, grad in zip(found.values(), grads, strict=True):
            if grad is not None:
                total += _wide(grad).square()
    for value, before in zip(named.values(), trained, strict=True):
        value.requires_grad_(before)
    return {name: total / rows for name, total in found.items()}


def weigh(model: nn.Module, fisher: Mapping[str, Tensor]) -> None:
    """Leave on `model` what `start: fisher` asks for when it is wrapped.

    >>> from petune.methods.pruning import fisher_of, weigh
    >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model").eval()
    >>> rows = [torch.tensor([[1, 9, 10, 11, 2]]), torch.tensor([[1, 12, 9, 2]])]
    >>> weigh(base, fisher_of(base, (base(row, labels=row).loss * (row.numel() - 1) for row in rows)))
    >>> model = petune.wrap(base, "side", start="fisher", reduction=4)
    """
    _FISHER.put(model, fisher)


def weighed(model: nn.Module) -> Mapping[str, Tensor]:
    """What `weigh` has left, which the model forgets. Raises UsageError where it was not called."""
    if (found := _FISHER.taken(model)) is None:
        what = "start: fisher needs gradients of training rows, which nobody has measured"
        remedy = "train by a recipe, or call weigh of petune.methods.pruning before"
        raise UsageError(what, where="start", remedy=remedy)
    return found


def of_embedding(
    model: nn.Module, width: int, reduction: int, fisher: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The features of the embedding of tokens that matter most, see Chain. Raises UsageError for one of
    another width."""
    table = getattr(cast("Any", model).get_input_embeddings(), "weight", None)
    if table is None or table.dim() != 2:
        what = f"a pruned start begins with an embedding of tokens, and {type(model).__name__} has none"
        raise UsageError(what, remedy=_ELSE)
    if table.shape[1] != width:
        found = f"{table.shape[1]} features, and {width} in the blocks"
        raise UsageError("a pruned start begins with the embedding of tokens", found=found, remedy=_ELSE)
    if fisher is None:
        return kept(_wide(table).abs().sum(0), reduction)
    name = next(name for name, value in model.named_parameters() if value is table)
    return kept(fisher[name].double().sum(0), reduction)


@torch.no_grad()
def prune_into(side: nn.ModuleList, blocks: Mapping[str, nn.Module], chain: Chain, path: str) -> None:
    """Fill the side blocks with what a chain keeps of the backbone's, which goes through all of them. blocks:
    by number; path: of their list.

    Raises UsageError for blocks that the chain has no rule for."""
    for index, (at, block) in enumerate(blocks.items()):
        made = chain.tables | chain.block(block, f"{path}.{at}")
        for name, value in side[index].named_parameters():
            if name not in made or made[name].shape != value.shape:
                what = "a pruned start knows no place for this tensor of a side block"
                raise UsageError(what, where=f"{path}.{at}.{name}", remedy=_ELSE)
            value.copy_(made[name])
