"""Which module an operation belongs to, in the forward pass and in the backward pass.

Forward it is the innermost module that runs. Backward it is the module in whose forward the autograd node was
made that runs now: nodes are numbered in the order of their making, so the calls of a module are intervals of
those numbers. Unlike hooks on gradients, by which torch's ModuleTracker follows the backward pass, this also
holds where inputs come by keyword or need no gradient, and every operation has one owner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

StepPhase = Literal["forward", "backward", "recompute"]  # of a step, what a kernel belongs to

OUTSIDE = "(outside)"  # the path of what no module runs: the loss, the sums of gradients


def join(path: str, name: str) -> str:
    """The path of a child."""
    return ".".join(part for part in (path, name) if part)


def paths_of(modules: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Every module by its path: "" for a model, "0" and "1" for two stages of one that lie on one rank."""
    tops = [""] if len(modules) == 1 else map(str, range(len(modules)))
    return {
        module: join(top, path)
        for top, whole in zip(tops, modules, strict=True)
        for path, module in whole.named_modules()
    }


def in_backward() -> bool:
    """Whether autograd runs a node now."""
    return torch._C._current_autograd_node() is not None


@contextmanager
def watching(
    modules: Sequence[nn.Module], enter: Callable[[str], None], leave: Callable[[], None]
) -> Iterator[None]:
    """Call `enter` with the path of each module that begins its forward, and `leave` when it ends, also by an
    exception.

    The hooks are torch's global ones: the modules stay as they are, and who looks at their hooks sees none.
    """
    paths = paths_of(modules)

    def before(module: nn.Module, _: Any) -> None:
        if module in paths:
            enter(paths[module])

    def after(module: nn.Module, *_: Any) -> None:
        if module in paths:
            leave()

    handles = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Attribution:
    """While entered, follows which of `modules` (a model, or the stages of one) runs."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._running: list[tuple[str, bool]] = []  # path, and whether it was entered in the backward pass
        self._starts, self._owners = [0], [OUTSIDE]  # nodes numbered from starts[i] on were made by owners[i]
        self._watch: AbstractContextManager[None] = watching(modules, self._enter, self._leave)

    def __enter__(self) -> Self:
        self._watch.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._watch.__exit__(*error)

    def _enter(self, path: str) -> None:
        self._running.append((path, in_backward()))
        self._mark()

    def _leave(self) -> None:
        _, again = self._running.pop()
        if not again:
            self._mark()

    def _mark(self) -> None:
        """What is recomputed makes nodes too, but none of them is ever run, and another thread has numbered
        them."""
        path, again = self._running[-1] if self._running else (OUTSIDE, False)
        if not again:
            self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # torch has no type for it
            self._owners.append(path)

    def owner(self, sequence: int) -> str:
        """The path of the module in whose forward the autograd node of this sequence number was made."""
        return self._owners[bisect_right(self._starts, sequence) - 1]

    def now(self) -> tuple[StepPhase, str]:
        """The phase, and the path of the module, that the operation belongs to which is being dispatched."""
        node: Any = torch._C._current_autograd_node()
        if self._running:
            path, again = self._running[-1]
            return ("recompute" if again else "forward" if node is None else "backward"), path
        return ("forward", OUTSIDE) if node is None else ("backward", self.owner(node._sequence_nr()))
