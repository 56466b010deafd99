"""Where a wrapped model remembers how it is tuned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from petune.errors import UsageError
from petune.methods.configs import MethodConfig

REPLICAS: tuple[type[nn.Module], ...] = (nn.parallel.DistributedDataParallel, nn.DataParallel)


@dataclass(frozen=True)
class Tuning:
    """How a model is tuned: the method, its config, the family's name if it has one, the modules trained
    whole beside it, and by name the values in the base of the single biases that train.

    held: the same values as this rank holds them, where a plan may have cut them. ends: other names of
    tensors of modules trained whole, to which they are tied, and theirs. adapters: how each of several is, by
    name, where there are several; the rest is then the last one's.
    """

    method: str
    config: MethodConfig
    family: str | None
    also_train: tuple[str, ...]
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    held: Mapping[str, Tensor] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, Tuning] = field(default_factory=dict)


def refuse_no_model(model: object) -> None:
    """Raise UsageError for what is no model: a name, a path, a class."""
    if not isinstance(model, nn.Module):
        remedy = "load it first: transformers.AutoModelForCausalLM.from_pretrained(...)"
        raise UsageError(
            "this is no model", expected="a torch.nn.Module", found=repr(model)[:80], remedy=remedy
        )


def bare(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers."""
    *_, inner = _around(model)
    return inner


def _around(model: nn.Module) -> Iterator[nn.Module]:
    """Such wrappers, from the outside, and last the model inside them."""
    found: nn.Module | None = model
    while found is not None:
        yield found
        found = found._modules.get("module" if isinstance(found, REPLICAS) else "_orig_mod")


def refuse_replicas(model: nn.Module, call: str, kinds: tuple[type[nn.Module], ...] = REPLICAS[:1]) -> None:
    """Raise UsageError for a model inside a wrapper that sums the gradients of the parameters that it was
    given, and of no others. call: what makes new ones, as a user writes it."""
    for found in _around(model):
        if isinstance(found, kinds):
            kind = type(found).__name__
            what = f"{kind} knows the parameters that it was given alone"
            remedy = f"tune the model first: {kind}({call})"
            raise UsageError(what, found=f"a model inside {kind}", remedy=remedy)


def tuning(model: nn.Module) -> Tuning:
    """The tuning of a wrapped model. Raises UsageError for a model that is not wrapped."""
    found = getattr(model, "petune_tuning", None)
    if not isinstance(found, Tuning):
        remedy = 'call petune.wrap(model, method="lora") first'
        raise UsageError(f"this {type(model).__name__} is not wrapped", remedy=remedy)
    return found


def is_wrapped(model: nn.Module) -> bool:
    """Whether `wrap` has been called on this model and not undone by `merge`."""
    return isinstance(getattr(model, "petune_tuning", None), Tuning)


def refuse_wrapped(model: nn.Module) -> None:
    """Raise UsageError for a wrapped model."""
    if is_wrapped(model):
        what = f"this model is wrapped already, with {tuning(model).method}"
        raise UsageError(what, remedy="merge it, or load the base model again")


def sole_tuning(model: nn.Module) -> Tuning:
    """`tuning` of a model with one. Raises UsageError too for several adapters on one base."""
    record = tuning(model)
    if record.adapters:
        names = list(record.adapters)
        remedy = f'inside `with petune.alone(model, "{names[0]}"):` it has one; petune.merge takes a name'
        raise UsageError("this model has several adapters", found=", ".join(names), remedy=remedy)
    return record
