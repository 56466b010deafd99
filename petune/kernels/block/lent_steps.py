"""The steps of what a block reads beside hidden states and an encoder: a vector for every token, and keys and
values of an earlier block, which that one hands out; and how a call finds both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from petune.errors import UsageError
from petune.kernels.block.dense import matmul32
from petune.kernels.block.steps import BlockRun, Charge, Step, Values
from petune.kernels.memory.op_cost import Cost, activate, activate_backward, copy, matmul
from petune.kernels.memory.shape import BlockShape
from petune.kernels.reference import Act
from petune.models.spec import Attention, Lending, SubLayer
from petune.rng.context import running

if TYPE_CHECKING:
    from petune.kernels.block.call import Spec

TOKENS, KEYS, LENT = "tokens", "keys", "lent"  # values: e, k | v of another block, own ones for others
OF_ONE = (TOKENS, KEYS)  # inputs that are not the same for all blocks


@dataclass(eq=False)
class OfTokens(Step):
    """p = (act(x A^T) * e) B^T, of weights A [f, width] and B [width, f] that no method tunes. at: place of A
    among the block's vectors, which B follows; first: among the tensors. learns: they train, so that x is
    read on the way back."""

    x: str
    p: str
    features: int
    act: Act
    at: int
    first: int
    learns: bool

    def __post_init__(self) -> None:
        self.z = f"{self.p}.z"  # x A^T
        self.takes, self.gives = (self.x, TOKENS), (self.p, self.z)
        self.keeps = dict.fromkeys(self.gives, "projections")
        self.reads = (self.z, TOKENS, *((self.x,) if self.learns else ()))
        self.trained = (self.first, self.first + 1) if self.learns else ()

    def _weights(self, run: BlockRun, like: Tensor) -> tuple[Tensor, Tensor]:
        enter, leave = (one.to(like.dtype) for one in run.vectors[self.at : self.at + 2])
        return enter, leave

    def forward(self, run: BlockRun, v: Values) -> None:
        x = v[self.x]
        enter, leave = self._weights(run, x)
        v[self.z] = z = x @ enter.T
        v[self.p] = run.ops.activate(z, self.act, False)[0].mul_(v[TOKENS]) @ leave.T

    def backward(self, run: BlockRun, v: Values) -> None:
        """See Step. Of x others have a gradient, which may be somebody else's too."""
        dp, z, e = run.grads.pop(self.p), v[self.z], v[TOKENS]
        enter, leave = self._weights(run, dp)
        dm = dp @ leave
        dz = run.ops.activate_backward(dm * e, z, self.act, False)[0]
        learns = [self.learns and run.sink.needs[place] for place in (self.first, self.first + 1)]
        if TOKENS in run.wants or learns[1]:
            h = run.ops.activate(z, self.act, False)[0]
            if TOKENS in run.wants:
                run.grads[TOKENS] = dm.mul_(h)
            if learns[1]:
                run.sink.add(self.first + 1, matmul32(dp.T, h.mul_(e)))
        if learns[0]:
            run.sink.add(self.first, matmul32(dz.T, v[self.x]))
        if self.x in run.wants:
            found = run.grads.get(self.x)
            run.grads[self.x] = dz @ enter if found is None else found.addmm(dz, enter)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {self.p: shape.width * shape.itemsize, self.z: self.features * shape.itemsize}

    def beside(self, shape: BlockShape) -> int:
        """See Step. What the second product reads."""
        return self.features * shape.itemsize

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: shape.width * shape.itemsize, TOKENS: self.features * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. The same, its gradient, and those of what e multiplies and of what enters the
        activation."""
        return 4 * self.features * shape.itemsize

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "matmul", matmul(rows, self.features, shape.width, shape.itemsize)
        yield "memory", activate(rows, self.features, False, shape.itemsize)
        yield "memory", self._times(shape, rows)
        yield "matmul", matmul(rows, shape.width, self.features, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        product = matmul(rows, shape.width, self.features, shape.itemsize)
        for _ in range(2 + 2 * self.learns):
            yield "matmul", product
        for _ in range(2):
            yield "memory", self._times(shape, rows)
        yield "memory", activate(rows, self.features, False, shape.itemsize)
        yield "memory", activate_backward(rows, self.features, False, shape.itemsize)

    def _times(self, shape: BlockShape, rows: float) -> Cost:
        """Of a product number by number."""
        return Cost(0, 3 * rows * self.features * shape.itemsize)


@dataclass(eq=False)
class Lend(Step):
    """k | v by themselves, for later blocks; the gradient of what these make of them joins that of own
    attention, which the next step back takes one by one. columns: of q."""

    qkv: str
    columns: int

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.qkv,), (LENT,), {LENT: "input"}

    def forward(self, run: BlockRun, v: Values) -> None:
        v[LENT] = v[self.qkv][:, self.columns :].clone()

    def backward(self, run: BlockRun, v: Values) -> None:
        given, (dq, *own) = run.grads.pop(LENT), run.grads[self.qkv]
        others = given.view(len(given), -1, dq.shape[-1]).chunk(2, 1)
        both = [one + other for one, other in zip(own, others, strict=True)]
        run.grads[self.qkv] = (dq, *both)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        return {LENT: (shape.qkv - shape.queries) * shape.itemsize}

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.qkv: shape.qkv * shape.itemsize}

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        yield "memory", copy(rows, shape.qkv - shape.queries, shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        yield "memory", Cost(0, 3 * rows * (shape.qkv - shape.queries) * shape.itemsize)


# ------------------------------------------------------------------ of a block's call


class Lent(tuple[Tensor, Tensor]):
    """Keys and values [b, kv_heads, t, d] as the model's own blocks hand them on; states: both in one
    [b, t, 2 kv_heads d], whose views they are."""

    states: Tensor

    @classmethod
    def of(cls, states: Tensor, width: int) -> Lent:
        """Those of states, of heads of `width`."""
        made = cls(one.transpose(1, 2) for one in states.unflatten(2, (-1, width)).chunk(2, 2))
        made.states = states
        return made


@cache
def lending_of(sublayers: tuple[SubLayer, ...]) -> Lending | None:
    """How a block of these hands keys and values on, or reads others', None where it does neither."""
    cores = (one.core for one in sublayers if isinstance(one.core, Attention))
    return next((core.lending for core in cores if core.lending is not None), None)


def met(spec: Spec, hidden: Tensor, given: Mapping[str, Any]) -> dict[str, Tensor] | str:
    """What a call of hidden states [b, t, w] with these arguments reads of either kind, by name, or why it
    cannot. Raises UsageError for values of other tokens where padding is left out, of whose places the model
    knows nothing."""
    program, found = spec.program, dict[str, Tensor]()
    if TOKENS in program.inputs:
        if (e := vectors_of(spec, given)) is None:
            return "it is handed no vector of every token"
        found[TOKENS] = e.to(hidden.dtype)
    if (lending := lending_of(program.sublayers)) is not None:
        if (handed := given.get(lending.argument)) is None:
            return f"it is handed no place for keys and values that blocks share ({lending.argument})"
        pair = handed.get(getattr(spec.attentions[0], lending.key))
        if lending.borrows and pair is None:
            return "it is handed no keys and values of an earlier block"
        if lending.borrows:
            states = pair.states if isinstance(pair, Lent) else _joined(*pair)
            found[KEYS] = states.to(hidden.dtype)
    if all(one.shape[:-1] == hidden.shape[:-1] for one in found.values()):
        return found
    if running().segments is None:
        return "it is handed keys, or vectors, of other tokens than its hidden states"
    what = "the last blocks are handed some tokens alone (logits_to_keep), where padding is left out"
    raise UsageError(what, remedy="ask for all logits, or set kernels: off")


def vectors_of(spec: Spec, given: Mapping[str, Any]) -> Tensor | None:
    """The vectors [b, t, f] that a call with these arguments is handed for its tokens, None for none."""
    tables = (one.per_token for one in spec.program.sublayers)
    return next((given.get(one.argument) for one in tables if one is not None), None)


def lenders(specs: Sequence[Spec]) -> list[int | None] | None:
    """For each block the place among these of the one whose keys it reads, None for own ones; None where one
    reads keys of a block that is not here."""
    found, last = list[int | None](), dict[str, int]()
    for at, spec in enumerate(specs):
        lending = lending_of(spec.program.sublayers)
        key = "" if lending is None else getattr(spec.attentions[0], lending.key)
        if KEYS in spec.program.inputs and key not in last:
            return None
        found.append(last[key] if KEYS in spec.program.inputs else None)
        if lending is not None and lending.lends:
            last[key] = at
    return found


def to_come(specs: Sequence[Spec], hidden: Tensor) -> dict[str, Any]:
    """The argument by which blocks hand keys on, with room without memory for those that blocks will lend
    before they are read; nothing where none does."""
    found: dict[str, Any] = {}
    for spec in (one for one in specs if one.program.meets):  # asked in every pass, of most blocks no more
        lending = lending_of(spec.program.sublayers)
        if lending is not None and lending.lends:
            key = getattr(spec.attentions[0], lending.key)
            room = Lent.of(hidden.new_empty(*hidden.shape[:-1], 2, device="meta"), 1)
            found.setdefault(lending.argument, {})[key] = room
    return found


def lend(spec: Spec, lent: Tensor | None, hidden: Tensor, given: Mapping[str, Any]) -> None:
    """Hand on what the node of a call gave beside its output, [m, 2 kv_heads d]; None for nothing."""
    lending = lending_of(spec.program.sublayers)
    if lent is not None and lending is not None:
        states = lent.view(*hidden.shape[:-1], -1)
        made = Lent.of(states, spec.program.sizes.head_dim)
        given[lending.argument][getattr(spec.attentions[0], lending.key)] = made


def _joined(keys: Tensor, values: Tensor) -> Tensor:
    """k | v [b, t, 2 kv_heads d] of both [b, kv_heads, t, d], as a block of the model's own hands them on."""
    return torch.cat([one.transpose(1, 2).flatten(2) for one in (keys, values)], -1)
