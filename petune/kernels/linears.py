"""The steps of linears: a group's low-rank input, its product, and the activation of an MLP with the product
behind it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from petune.kernels.block.packed_linear import Rows
from petune.kernels.configs import Level
from petune.kernels.reference import Act
from petune.kernels.steps import Normalize, Run, Step, Values


@dataclass(eq=False)
class Low(Step):
    """s = x a^T, the low-rank input of a group's update; None where nothing is tuned."""

    x: str
    s: str
    at: int
    keep: Level
    differs = False  # the product's backward pass is this one's too

    def __post_init__(self) -> None:
        self.takes, self.gives, self.keeps = (self.x,), (self.s,), {self.s: self.keep}

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        v[self.s] = run.groups[self.at].low(v[self.x])


@dataclass(eq=False)
class Product(Step):
    """y = x W^T + bias + s b^T of a group. norm: the step that gave x, from which x need not be made again
    for the gradients of A."""

    x: str
    s: str
    y: str
    at: int
    tensors: tuple[int, ...]
    keep: Level | None
    norm: Normalize | None = None

    def __post_init__(self) -> None:
        self.takes, self.gives, self.trained = (self.x, self.s), (self.y,), self.tensors
        self.inlet = f"{self.x}.inlet"
        self.keeps = {} if self.keep is None else {self.y: self.keep}
        self.reads = (self.s, self.x) if self.norm is None else (self.s, *self.norm.reads)
        self.soft = () if self.norm is None else (self.x,)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        v[self.y] = run.groups[self.at].product(v[self.x], v[self.s], v.get(self.inlet))

    def backward(self, run: Run, v: Values) -> None:
        """See Step. In the place of the gradient of s stands what an activation has made of that of b."""
        group = run.groups[self.at]
        dy, db = run.grads.pop(self.y), run.grads.pop(self.s, None)
        wanted = self.x in run.wants
        dx, ds = group.dproducts(dy) if wanted else (None, group.dlow(dy))
        x = v.get(self.x)
        entered = Rows.of(x) if x is not None else self.norm.entered(run, v)  # type: ignore[union-attr]
        group.learn(run.sink, dy, entered, v[self.s], ds, db=db)
        if dx is not None:
            run.give_own(self.x, group.dupdated(dx, ds))


@dataclass(eq=False)
class Activated(Step):
    """d = m W^T + bias + s b^T with m = act(gate) * up or act(up), which lives in here alone. above, at: the
    groups of up and of down.

    low: of the update of u, which the activation may add. drop: the dropout of m, or None.
    """

    u: str
    low: str
    s: str
    d: str
    act: Act
    gated: bool
    above: int
    at: int
    tensors: tuple[int, ...]
    drop: int | None = None
    keep: Level | None = None

    def __post_init__(self) -> None:
        self.takes, self.gives, self.trained = (self.u, self.low), (self.s, self.d), self.tensors
        self.keeps = {self.s: "input"} if self.keep is None else {self.s: "input", self.d: self.keep}
        self.reads = (self.low, self.u, self.s)

    def forward(self, run: Run, v: Values) -> None:
        """See Step."""
        up, down, u = run.groups[self.above], run.groups[self.at], v[self.u]
        drop = None if self.drop is None else run.drops[self.drop]
        m, inlet = down.inlet(u)
        a = down.a if down.folds_input and drop is None else None
        s = run.ops.activate(u, self.act, self.gated, up.deferred(v[self.low]), a, up.paired, m)[1]
        if drop is not None:
            m, inlet = drop(m, run.rows), None
        v[self.s] = s = down.low(m) if s is None else s
        v[self.d] = down.product(m, s, inlet)

    def backward(self, run: Run, v: Values) -> None:
        """See Step."""
        up, down, u = run.groups[self.above], run.groups[self.at], v[self.u]
        drop = None if self.drop is None else run.drops[self.drop]
        low, dd = v[self.low], run.grads.pop(self.d)

        def again() -> Tensor:
            m: Tensor = run.ops.activate(u, self.act, self.gated, up.deferred(low), None, up.paired)[0]
            return m if drop is None else drop(m, run.rows)

        dm, ds = down.dproducts(dd)
        below = (ds, down.a) if ds is not None and down.folds_input and drop is None else None
        if below is None:
            down.dupdated(dm, ds)
        if drop is not None:
            dm = drop(dm, run.rows)
        du, db, da = run.ops.activate_backward(dm, u, self.act, self.gated, up.read(low), below, up.paired)
        down.learn(run.sink, dd, Rows.again(again), v[self.s], ds, da=da)
        if self.u in run.wants:
            run.grads[self.u] = du
            if db is not None:
                run.grads[self.low] = db
