"""Several LoRA updates on one base, each with a name, each for rows of its own in one batch.

        y_i = W x_i + b + s_n B_n A_n dropout(x_i)          n: the adapter of row i

The product with the base is one for all rows, and so are the updates, as in Punica (Chen et al. 2023,
arXiv:2310.18547): factors are stacked, filled up with zeros to the largest rank and taken by row. A row meets
its own adapter alone, so what trains together trains as it would alone. Made, saved, loaded and merged an
adapter is as the only one (`alone`); only computing is done together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.errors import UsageError
from petune.methods.configs import LoraConfig, name_of
from petune.methods.lora import LAYERS, LoraLayer
from petune.methods.saving import forget, remember
from petune.methods.wrapped import Tuning, is_wrapped, tuning
from petune.models.spec import CutKind, TensorSplit
from petune.models.tuned_linear import KeptFeatures, TunedLinear, tuned_layers

Model = TypeVar("Model", bound=nn.Module)


class Update(nn.Module):
    """What one adapter adds to one layer: the factors, scale and dropout of `layer`."""

    def __init__(self, layer: LoraLayer) -> None:
        super().__init__()
        self.lora_A, self.lora_B = layer.lora_A, layer.lora_B
        self.scale, self.dropout = layer.scale, layer.dropout

    def forward(self, x: Tensor) -> Tensor:
        """scale * B A dropout(x) for x [..., in], in the factors' dtype."""
        x = F.dropout(x.to(self.lora_A.dtype), self.dropout, self.training)
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


@dataclass(frozen=True)
class ActiveAdapters:
    """Which adapters act: all of `names` on every row; with `rows` the one that is named for a row, or none.

    beams: rows of the model for each of `rows`, one behind the other, besides one.
    """

    names: tuple[str, ...]
    rows: tuple[str | None, ...] | None = None
    beams: int = 1


@dataclass
class Chosen:
    """The choice of a model, which all its layers share."""

    choice: ActiveAdapters

    def now(self) -> ActiveAdapters:
        """The choice a forward pass computes with. Raises UsageError in a backward pass, which may come when
        another is made."""
        if torch._C._current_graph_task_id() != -1:
            what = "blocks with several adapters cannot run again in the backward pass"
            raise UsageError(what, remedy="model.gradient_checkpointing_disable()")
        return self.choice


class SeveralLayer(TunedLinear):
    """A layer with updates by the names of their adapters. It has no fused form."""

    additions: ClassVar[tuple[str, ...]] = ("updates", "chosen")
    updates: nn.ModuleDict
    chosen: Chosen

    @classmethod
    def around(cls, layer: nn.Module, chosen: Chosen) -> Self:
        """The form of `layer` for several adapters, with none yet."""
        made = cls.of(layer)
        made.updates, made.chosen = nn.ModuleDict(), chosen
        return made

    def alone(self, name: str) -> nn.Module:
        """The layer with one adapter, which shares everything with this one; the base layer where that does
        not tune it."""
        plain = self.plain()
        if name not in self.updates:
            return plain
        found = cast("type[LoraLayer]", LAYERS[self.base]).of(plain)
        update = cast("Update", self.updates[name])
        found.lora_A, found.lora_B = update.lora_A, update.lora_B
        found.scale, found.dropout, found.lr_ratio = update.scale, update.dropout, None
        return found

    def tuned(self) -> dict[str, nn.Parameter]:
        """The factors of all adapters."""
        return {f"updates.{name}": value for name, value in self.updates.named_parameters()}

    def draw(self, name: str) -> None:
        """As the adapter's layer would, were it the only one."""
        _, adapter, own = name.split(".")
        cast("LoraLayer", self.alone(adapter)).draw(own)

    def splits(self, cut: CutKind) -> dict[str, TensorSplit]:
        """Raises UsageError."""
        raise UsageError(
            "several adapters on one base have no parallel plan", remedy="train each in a run of its own"
        )

    def kept_features(self) -> KeptFeatures:
        """The input, and what the A of every adapter makes of it."""
        ranks = [len(cast("Update", update).lora_A) for update in self.updates.values()]
        return KeptFeatures(input=True, inner=sum(ranks))

    def delta(self) -> Tensor:
        """Raises UsageError: which adapter is to be merged?"""
        raise UsageError("several adapters are not merged together", remedy="petune.merge(model, name)")

    def forward(self, x: Tensor) -> Tensor:
        """The base map plus the updates that are chosen, x [rows, ..., in] -> [rows, ..., out]."""
        y = cast("Tensor", super().forward(x))
        choice = self.chosen.now()
        held = tuple(name for name in choice.names if name in self.updates)
        if not self.active or not held:
            return y
        if choice.rows is None:
            update = sum((self.updates[name](x) for name in held[1:]), self.updates[held[0]](x))
        else:
            update = self._by_row(x, _places(choice, held, len(x), x.device), held)
        return cast("Tensor", y + update).to(y.dtype)

    def _by_row(self, x: Tensor, places: Tensor, held: tuple[str, ...]) -> Tensor:
        """The update of each row; places [rows]: of its adapter among `held`, whose number is of none."""
        updates = [cast("Update", self.updates[name]) for name in held]
        dropouts = {update.dropout for update in updates}
        if self.training and len(dropouts) > 1:
            found = ", ".join(f"{name}: {one.dropout:g}" for name, one in zip(held, updates, strict=True))
            what = "adapters of different dropouts cannot train in one batch"
            raise UsageError(what, found=found, remedy="give them one dropout")
        a, b = _stacked(updates)
        x = F.dropout(x.to(a.dtype), max(dropouts), self.training)
        low = torch.bmm(x.reshape(len(x), -1, x.shape[-1]), a[places].mT)
        return torch.bmm(low, b[places].mT).view(*x.shape[:-1], b.shape[1])


def _stacked(updates: Sequence[Update]) -> tuple[Tensor, Tensor]:
    """A [n + 1, r, in] and scale * B [n + 1, out, r] of n updates and of none; r: the largest rank."""
    ranks = [len(update.lora_A) for update in updates]
    a = [F.pad(one.lora_A, (0, 0, 0, max(ranks) - rank)) for one, rank in zip(updates, ranks, strict=True)]
    b = [
        F.pad(one.lora_B * one.scale, (0, max(ranks) - rank))
        for one, rank in zip(updates, ranks, strict=True)
    ]
    return torch.stack([*a, torch.zeros_like(a[0])]), torch.stack([*b, torch.zeros_like(b[0])])


@lru_cache(maxsize=64)
def _places(choice: ActiveAdapters, held: tuple[str, ...], count: int, device: torch.device) -> Tensor:
    """The place among `held` of the adapter of each of `count` rows, len(held) for none."""
    assert choice.rows is not None
    beams = choice.beams if count != len(choice.rows) else 1
    if count != len(choice.rows) * beams:
        raise UsageError(
            "adapters are chosen for other rows than these",
            expected=f"a batch of {len(choice.rows)} rows",
            found=f"{count} rows",
            remedy="name one for each row of the batch, and give `beams` for a search with several; a model"
            " whose blocks lay their rows one behind the other (OPT), or put a table of positions through the"
            " same layers (DeBERTa), takes one adapter at a time",
        )
    places = [held.index(name) if name in held else len(held) for name in choice.rows for _ in range(beams)]
    with torch.inference_mode(False):  # a backward pass may want it later
        return torch.tensor(places, device=device)


class SeveralLinear(SeveralLayer, nn.Linear):
    """nn.Linear with updates by name."""

    base = nn.Linear


class SeveralConv1D(SeveralLayer, Conv1D):  # type: ignore[misc]  # as LoraConv1D
    """transformers' Conv1D with updates by name."""

    base = Conv1D
    __repr__ = nn.Module.__repr__


FORMS: Mapping[type[nn.Module], type[SeveralLayer]] = {nn.Linear: SeveralLinear, Conv1D: SeveralConv1D}

# ---------------------------------------------------------------- made and taken apart


def refuse_unfit(model: nn.Module, name: str, config: LoraConfig) -> None:
    """Raise UsageError for a name that no adapter can have, and for settings that change more than layers of
    their own."""
    taken = tuning(model).adapters if is_wrapped(model) else {}
    if not isinstance(name, str) or not name.isidentifier() or name in taken:
        what = "there is an adapter of this name" if name in taken else "this cannot name an adapter"
        raise UsageError(what, where=str(name), expected="another name, of letters, digits and _")
    if is_wrapped(model) and not taken:
        remedy = "load the base model again, and begin with petune.add"
        raise UsageError("this model is wrapped, with one tuning that has no name", remedy=remedy)
    beside = {
        "init": config.init != "auto",
        "bias": config.bias != "none",
        "token_rows": bool(config.token_rows),
        "lr_ratio": config.lr_ratio not in (None, 1),
    }
    if asked := [setting for setting, given in beside.items() if given]:
        what = f"{asked[0]} does not go with several adapters on one base"
        raise UsageError(what, where=f"{name}.{asked[0]}", remedy="leave it out")


@contextmanager
def bare_base(model: nn.Module) -> Iterator[None]:
    """The model as it was before adapters were added, for as long as one more is made for it; what was made
    of it meanwhile is undone."""
    record, layers = tuning(model) if is_wrapped(model) else None, dict(several_layers(model))
    for name, layer in layers.items():
        model.set_submodule(name, layer.plain())
    if record is not None:
        forget(model)
    try:
        yield
    finally:
        for name, made in list(tuned_layers(model)):
            model.set_submodule(name, made.plain())
        if is_wrapped(model):
            forget(model)
        for name, layer in layers.items():
            model.set_submodule(name, layer)
        if record is not None:
            remember(model, record)


def take(model: nn.Module, name: str, made: Mapping[str, nn.Module], record: Tuning) -> None:
    """Give `model` one more adapter: layers made on its bare base, by full name, and how it is tuned. The
    first one acts."""
    if record.also_train or type(record.config) is not LoraConfig:
        beside = f"{record.also_train[0]} trained whole" if record.also_train else name_of(record.config)
        what, remedy = f"several adapters on one base are LoRA alone, without {beside}", "set also_train: []"
        raise UsageError(what, where=name, remedy=remedy if record.also_train else "use method lora")
    if wrong := next((full for full, one in made.items() if _form(one) is None), None):
        found = made[wrong]
        kind = found.base.__name__ if isinstance(found, LoraLayer) else cast("Any", found).kind
        what = f"several adapters do not share a {kind}"
        raise UsageError(what, where=wrong, remedy="name it in `exclude`, or target the whole linear")
    others = tuning(model).adapters if is_wrapped(model) else {}
    first = next((layer for _, layer in several_layers(model)), None)
    chosen = Chosen(ActiveAdapters((name,))) if first is None else first.chosen
    for full, layer in made.items():
        old = model.get_submodule(full)
        if not isinstance(old, SeveralLayer):
            old = FORMS[type(old)].around(old, chosen)
            model.set_submodule(full, old)
        old.updates[name] = Update(cast("LoraLayer", layer)).train(old.training)
    remember(model, replace(record, adapters={**others, name: record}))


def _form(layer: nn.Module) -> type[SeveralLayer] | None:
    return FORMS.get(layer.base) if isinstance(layer, LoraLayer) else None


def several_layers(model: nn.Module) -> Iterator[tuple[str, SeveralLayer]]:
    """The layers with updates by name, with their full names."""
    return ((name, layer) for name, layer in tuned_layers(model) if isinstance(layer, SeveralLayer))


def settle(model: nn.Module, name: str) -> dict[str, SeveralLayer]:
    """Leave a model one adapter of several, as if it were its only one; the layers it had, by full name."""
    record = tuning(model)
    _check_names(model, [name])
    layers = dict(several_layers(model))
    for full, layer in layers.items():
        model.set_submodule(full, layer.alone(name))
    remember(model, record.adapters[name])
    return layers


@contextmanager
def alone(model: Model, name: str) -> Iterator[Model]:
    """The model with one of its adapters as its only tuning, for the length of a block: to save, export or
    look at it.

        >>> with petune.alone(model, "poet"):
        ...     folder = petune.save(model, "poet")

    Parameters are the same objects. Raises UsageError for a name it has not, and at the end for a model that
    was merged meanwhile.
    """
    record = tuning(model)
    layers = settle(model, name)
    try:
        yield model
    finally:
        if getattr(model, "petune_tuning", None) is not record.adapters[name]:
            raise UsageError("this model was merged inside alone()", remedy="use petune.merge(model, name)")
        for full, layer in layers.items():
            layer.train(model.get_submodule(full).training)
            model.set_submodule(full, layer)
        remember(model, record)


# ---------------------------------------------------------------- which of them act


class Acting:
    """A choice that has been made; as a context manager, until the block ends."""

    def __init__(self, model: nn.Module, choice: ActiveAdapters) -> None:
        self.chosen = next(layer for _, layer in several_layers(model)).chosen
        self.before, self.chosen.choice = self.chosen.choice, choice

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        self.chosen.choice = self.before


def active(model: nn.Module, names: str | Sequence[str]) -> Acting:
    """Let the adapters of these names act, all of them on every row: from now on, or in a `with` block.

        >>> with petune.active(model, ["poet", "clerk"]):
        ...     logits = model(input_ids=torch.tensor([[9, 10, 11]])).logits

    Without names the base alone computes. What trains does not change. Raises UsageError for a name the model
    has not.
    """
    named = (names,) if isinstance(names, str) else _listed(names)
    _check_names(model, named)
    return Acting(model, ActiveAdapters(tuple(dict.fromkeys(named))))


def per_row(model: nn.Module, names: Sequence[str | None], *, beams: int = 1) -> Acting:
    """Let each row of the batch have an adapter of its own, or None: from now on, or in a `with` block.

        >>> with petune.per_row(model, ["poet", "clerk", None]):
        ...     answers = model.generate(torch.tensor([[9, 10], [9, 10], [9, 10]]), max_new_tokens=4)

    names: one for each row: a batch of ids is [len(names) * beams, tokens]; what leaves a layer has the dtype
    that it has without. beams: what generate is given as num_beams or num_return_sequences, their product. A
    batch of another number of rows is refused. In training, add the mean losses of each adapter's rows: none
    has a gradient of another's. Raises UsageError for a name the model has not, and for no rows.
    """
    rows = _listed(names)
    named = [name for name in rows if name is not None]
    _check_names(model, named)
    if not rows or type(beams) is not int or beams < 1:
        what = "a batch has at least one row, of at least one beam"
        remedy = "give a name, or None, for each row, and beams a whole number"
        raise UsageError(what, found=f"{len(rows)} names, beams {beams!r}", remedy=remedy)
    return Acting(model, ActiveAdapters(tuple(dict.fromkeys(named)), rows, beams))


def _listed(names: Iterable[Any]) -> tuple[Any, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise UsageError("adapters are named in a list", found=repr(names)[:80], remedy='["one", "two"]')
    return tuple(names)


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    known = tuning(model).adapters
    if not known:
        raise UsageError("this model has no adapters by name", remedy='begin with petune.add(model, "name")')
    if strange := [name for name in names if not isinstance(name, str) or name not in known]:
        raise UsageError("there is no adapter of this name", where=str(strange[0]), expected=", ".join(known))
