"""Rows of the table of tokens that train beside a method, each in the place of the base's own: what new
tokens need, without a copy of the table.

        y = T[id],  or rows[j] where id = ids[j];        logits[ids[j]] = rows[j] x, where the head is tied

The rows [n, dim] begin as the base's, in float32. Every module that holds the table, a tied head among them,
reads the same rows. As peft's `trainable_token_indices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NoReturn, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.targets import within
from petune.models.spec import CutKind
from petune.models.tuned_linear import KeptFeatures, TunedLinear

ROWS = "rows"


class RowLayer(TunedLinear):
    """What a table with rows of its own and the head tied to it share."""

    additions: ClassVar[tuple[str, ...]] = (ROWS, "index")
    rows: nn.Parameter
    index: Tensor  # the tokens' ids [n]

    @classmethod
    def around(cls, layer: nn.Module, rows: nn.Parameter, index: Tensor) -> Self:
        """The tuned form of `layer`, which shares its parameters."""
        tuned = cls.of(layer)
        tuned.rows, tuned.index = rows, index
        return tuned

    def tuned(self) -> dict[str, nn.Parameter]:
        """The rows."""
        return {ROWS: self.rows}

    @torch.no_grad()
    def draw(self, name: str) -> None:
        """The base's rows."""
        self.rows.copy_(self.weight[self.at(self.weight)])

    def splits(self, cut: CutKind) -> NoReturn:
        """Raises UsageError: a rank without a row could not train it."""
        raise UsageError("token_rows cannot be cut across ranks", remedy="set vocabulary: false")

    def kept_features(self) -> KeptFeatures:
        """Nothing beyond what the layer itself keeps, which is outside the blocks."""
        return KeptFeatures()

    def delta(self) -> Tensor:
        """The rows less the base's, in a table of zeros."""
        wide = self.weight.to(self.rows.dtype)
        at = self.at(wide)
        return torch.zeros_like(wide).index_copy(0, at, self.rows - wide[at])

    def merged_weight(self, dtype: torch.dtype | None = None) -> Tensor:
        """The table with the rows in it, rounded once."""
        rows = self.rows.detach().to(dtype or self.weight.dtype)
        return self.weight.detach().to(rows.dtype).index_copy(0, self.at(rows), rows)

    def at(self, near: Tensor) -> Tensor:
        """The ids on the device of a tensor."""
        if self.index.device != near.device:
            self.index = self.index.to(near.device)
        return self.index

    def extra_repr(self) -> str:
        """The base layer's own words and the number of rows."""
        return f"{super().extra_repr()}, {ROWS}={len(self.rows)}"


class RowEmbedding(RowLayer, nn.Embedding):
    """nn.Embedding with rows that train: ids [...] -> [..., dim], in the base's dtype."""

    base = nn.Embedding

    def forward(self, ids: Tensor) -> Tensor:
        """The row of the table, or the one that trains in its place."""
        y: Tensor = nn.Embedding.forward(self, ids)
        if self.merged or not self.active:
            return y
        place = torch.full((self.num_embeddings,), -1, device=ids.device)
        place[self.at(ids)] = torch.arange(len(self.rows), device=ids.device)
        found = place[ids]
        return torch.where((found >= 0)[..., None], F.embedding(found.clamp_min(0), self.rows).to(y.dtype), y)


class RowLinear(RowLayer, nn.Linear):
    """The head tied to such a table: x [..., dim] -> logits [..., vocabulary], in the base's dtype. It has no
    fused form."""

    base = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        """The base map, with the logits of those tokens by the rows that train."""
        y = F.linear(x, self.weight, self.bias)
        if self.merged or not self.active:
            return y
        at, wide = self.at(x), self.rows.dtype
        own = F.linear(x.to(wide), self.rows, None if self.bias is None else self.bias[at].to(wide))
        return y.index_copy(-1, at, own.to(y.dtype))


FORMS: dict[type[nn.Module], type[RowLayer]] = {nn.Embedding: RowEmbedding, nn.Linear: RowLinear}


def apply(model: nn.Module, ids: Sequence[int], also_train: Iterable[str]) -> None:
    """Let the rows of these tokens train, in every module that holds the model's table of tokens.

    Raises UsageError for a model without such a table, a module whose forward is not exactly known or that
    is tuned already, and ids that are not its own or stand for padding.
    """
    table = table_of(model)
    names = holders(model, table)
    for name, module in names.items():
        if isinstance(module, TunedLinear):
            remedy = "leave token_rows out, or this name out of targets"
            raise _refused("this table is tuned already", name, remedy)
        if within(name, also_train):
            raise _refused("this table trains whole already", name, "leave token_rows out")
        if type(module) not in FORMS or getattr(module, "max_norm", None) is not None:
            remedy = f"leave token_rows out, and train the whole table: also_train: [{', '.join(names)}]"
            raise _refused(f"rows of a {type(module).__name__} cannot train by themselves", name, remedy)
    count, padding = table.num_embeddings, table.padding_idx
    if wrong := [one for one in ids if one >= count or one == padding or ids.count(one) > 1]:
        found = "padding" if wrong[0] == padding else "twice" if wrong[0] < count else f"{count} rows"
        what, remedy = f"token_rows: {wrong[0]} is no row that can train", "take it out, or name another once"
        raise UsageError(what, expected=f"ids 0 to {count - 1}", found=found, remedy=remedy)
    index = torch.tensor(ids, device=table.weight.device)
    dtype = torch.promote_types(table.weight.dtype, torch.float32)
    rows = nn.Parameter(table.weight.detach()[index].to(dtype))
    for name, module in names.items():
        model.set_submodule(name, FORMS[type(module)].around(module, rows, index))


def table_of(model: nn.Module) -> nn.Embedding:
    """The table of tokens. Raises UsageError for a model without one."""
    ask = getattr(model, "get_input_embeddings", None)
    table = ask() if callable(ask) else None
    if not isinstance(table, nn.Embedding):
        what = f"{type(model).__name__} has no table of tokens"
        raise UsageError(what, where="token_rows", remedy="leave token_rows out")
    return table


def holders(model: nn.Module, table: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold the weight of `table`, by full name, itself first."""
    found = {
        name: module
        for name, module in model.named_modules()
        if cast("Any", module)._parameters.get("weight") is table.weight
    }
    return dict(sorted(found.items(), key=lambda item: item[1] is not table))


def _refused(what: str, name: str, remedy: str) -> UsageError:
    return UsageError(what, where=f"token_rows  {name}", remedy=remedy)
