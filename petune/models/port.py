"""Port: one block of a stack as the model's own loop sees it.

The loop is Hugging Face's, so every block gets the mask, the positions and the bias that the loop makes for
it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from petune.rng.context import Running

if TYPE_CHECKING:
    from petune.models.stack import Stack

Arguments = dict[str, Any]  # a block's arguments by name; "hidden_states" is always there
WrittenArguments = tuple[tuple[Any, ...], Arguments]  # by position, by name
T = TypeVar("T")
PLAIN = (bool, int, float, str, type(None))


class Elsewhere:
    """Stand-in for a block that lives in another process: its class, its attributes that are plain values,
    the names of its arguments."""

    def __init__(self, block: nn.Module) -> None:
        self.kind = block.__class__
        self.values = {name: value for name, value in vars(block).items() if isinstance(value, PLAIN)}

    def __getattr__(self, name: str) -> Any:
        if name in ("kind", "values") or name not in self.values:  # a copy asks before it has any
            raise AttributeError(f"this block lives in another process, and nothing is known of its {name!r}")
        return self.values[name]


class Port:
    """One block of one iteration over a stack. It has the class and the attributes of its block, and calling
    it runs the block inside the stack's pass (see Stack.advance).

    first, last: whether the iteration begins or ends with it, blocks that live elsewhere not counted."""

    __slots__ = ("_block", "_first", "_last", "_number", "_stack")

    def __init__(
        self, stack: Stack, number: int, block: nn.Module | Elsewhere, first: bool, last: bool
    ) -> None:
        for name, value in zip(Port.__slots__, (block, first, last, number, stack), strict=True):
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]  # a class for isinstance, as mocks have it
    def __class__(self) -> type:
        """The class of the block."""
        return self._block.kind if type(self._block) is Elsewhere else self._block.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._block, name, value)

    def __repr__(self) -> str:
        return repr(self._block)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]  # torch's
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the block returns."""
        return self._stack.advance(self._number, self._block, self._first, self._last, args, kwargs)

    forward = __call__  # for a loop that steps around hooks


@dataclass
class Recorded:
    """A call of a port that is not run yet."""

    number: int
    block: nn.Module
    call: Arguments
    by_position: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """What the blocks `numbers` give, the last of a stack among them unless nobody reads any: values
    [numbers, batch, seq, width], as it is read. computed: what the last gave before that was rounded, where
    blocks elsewhere go on from it."""

    numbers: list[int]
    values: Tensor
    computed: Tensor | None = None

    def of(self, number: int) -> Tensor | None:
        """What one of them gives, None for another."""
        return self.values[self.numbers.index(number)] if number in self.numbers else None


@dataclass
class StackPass:
    """The state of a stack between its first port and its last.

    here: where the tensors of the blocks lie in the whole batch. carry: what the first block is handed, as
    the blocks see it. side: the ladder's carry. found: what blocks give, where it is known before the ladder
    climbs, and below: what its gates mix in then, [levels, ...]. level: what the block that has just run will
    be read as, where that is rounded. waiting: the calls so far, where all blocks are to run at once."""

    here: Running
    carry: Arguments = field(default_factory=dict)
    side: Arguments | None = None
    found: Found | None = None
    below: Tensor | None = None
    level: Tensor | None = None
    waiting: list[Recorded] | None = None
    made: dict[tuple[Hashable, int], tuple[Any, Any]] = field(default_factory=dict)

    def once(self, what: Hashable, make: Callable[[Any], T], value: Any) -> T:
        """`make(value)`, made once in a pass for each `what` and each object: blocks are handed the same
        tensors."""
        key = what, id(value)
        if key not in self.made:
            self.made[key] = value, make(value)  # the value too, so that no other object gets its id
        found: T = self.made[key][1]
        return found


def names_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """The arguments of a module's forward pass that may be given by position."""
    return _by_position(kind.forward)


@cache
def _by_position(forward: Callable[..., Any]) -> tuple[str, ...]:
    parameters = signature(forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")


def takes_a_cache(model: Any) -> bool:
    """Whether a model, compiled or not, may be told of a cache: encoders know of none, and T5Gemma's with
    classes say themselves that there is none."""
    return _told_of_a_cache(getattr(model, "_orig_mod", model).__class__)


@cache
def _told_of_a_cache(kind: Any) -> bool:
    return "use_cache" in signature(kind.forward).parameters


def ends_alone(call: Arguments) -> bool:
    """Whether a model is asked for the logits of so many last tokens alone, so that its loop may leave the
    others out; it does so for no tensor that names places."""
    kept = call.get("logits_to_keep")
    return isinstance(kept, int) and kept > 0


# arguments by which the blocks of one stack may differ and still go through it at once
OWN = ("position_embeddings", "per_layer_input")


def alike(one: Arguments, other: Arguments) -> bool:
    """Whether two calls have the same arguments but for hidden states and `OWN`: the same objects, or equal
    plain values."""
    rest = one.keys() | other.keys()
    return all(_same(one.get(name), other.get(name)) for name in rest - {"hidden_states", *OWN})


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether both are one tensor, or views of the very same numbers, as a slice of all is, and both train or
    neither."""
    if one is other or one.is_meta:
        return one is other
    shape = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return shape and one.requires_grad == other.requires_grad and one.data_ptr() == other.data_ptr()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return all(map(_same, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_numbers(one, other)
    return one is other or (isinstance(one, PLAIN) and isinstance(other, PLAIN) and one == other)
