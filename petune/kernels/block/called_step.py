"""The step of a core that a block calls as it is (see called.py)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from petune.kernels.block.steps import BlockRun, Charge, Step, Values
from petune.kernels.configs import Level
from petune.kernels.memory.op_cost import Cost, attention, attention_backward, matmul
from petune.kernels.memory.shape import BlockShape
from petune.models.spec import Role


@dataclass(eq=False)
class CallCore(Step):
    """y = core(x), and the graph by which the way back goes through it, where somebody will. at: which of the
    block's; first, count: of its tensors. keep: from which rung on y is kept, which what stands behind reads.
    whole: y is what the core gives, else what the linear behind it reads; tabled: it reads a table besides.
    """

    x: str
    y: str
    at: int
    first: int
    count: int
    roles: tuple[Role, ...]
    keep: Level | None = None
    whole: bool = True
    tabled: bool = False
    rows: ClassVar[bool] = False
    long: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.graph = f"{self.y}.graph"
        self.takes = (self.x, "table") if self.tabled else (self.x,)
        self.gives, self.reads = (self.y, self.graph), (self.graph,)
        self.trained = tuple(range(self.first, self.first + self.count))
        kept: dict[str, Level] = {} if self.keep is None else {self.y: self.keep}
        self.keeps = {**kept, self.graph: "all"}

    def forward(self, run: BlockRun, v: Values) -> None:
        core, x = run.called[self.at], v[self.x]
        given = [v[name] for name in self.takes]
        if run.kept is not None and self.graph not in run.kept:
            v[self.y], v[self.graph] = core.plain(*given), None
            return
        graph = core.traced(*given)
        # y shares its memory with the end of the graph: who reads it writes elsewhere
        v[self.y], v[self.graph] = graph[0].detach().to(x.dtype), graph

    def backward(self, run: BlockRun, v: Values) -> None:
        needs = [run.sink.needs[place] for place in self.trained]
        dy, asked = run.grads.pop(self.y), [name in run.wants for name in self.takes]
        grads, found = run.called[self.at].gradients(v[self.graph], dy, asked, needs)
        for name, grad in zip(self.takes, grads, strict=True):
            if grad is not None:
                run.give_own(name, grad)
        for at, grad in found.items():
            run.sink.add(self.first + at, grad)

    def sizes(self, shape: BlockShape) -> dict[str, int]:
        if self.whole:
            return {self.y: shape.width * shape.itemsize, self.graph: int(shape.called_core.kept)}
        given = shape.queries * shape.itemsize  # kept by itself, where the graph ends
        return {self.y: given, self.graph: int(shape.called_core.kept) - given}

    def beside(self, shape: BlockShape) -> int:
        """See Step. Scores that are not kept."""
        return int(shape.called_core.beside)

    def grads(self, shape: BlockShape) -> dict[str, int]:
        return {self.x: shape.width * shape.itemsize}

    def beside_back(self, shape: BlockShape, there: bool) -> int:
        """See Step. Gradients of what lies between its linears."""
        return int(shape.called_core.within)

    def ahead(self, shape: BlockShape, rows: float, sequence: float) -> Iterator[Charge]:
        """See Step. Its operations, one by one, write what the graph keeps, and read it."""
        core = shape.called_core
        yield "matmul", matmul(rows, shape.width, core.weights / shape.width, shape.itemsize)
        yield "memory", Cost(rows * core.flop, rows * (2 * core.kept + core.moved))
        if core.scores is not None:
            yield "attention", attention(rows, sequence, *core.scores, itemsize=shape.itemsize)

    def back(self, shape: BlockShape, rows: float, sequence: float, found: bool) -> Iterator[Charge]:
        for kind, cost in self.ahead(shape, rows, sequence):
            if kind != "attention":
                yield kind, cost * (2 if kind == "memory" or shape.trained else 1)
        if (scores := shape.called_core.scores) is not None:
            cost = attention_backward(rows, sequence, *scores, itemsize=shape.itemsize)
            yield "attention_backward", cost
