"""What makes hidden states before the first block, and need not where no block of a pass runs."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from petune.models.behind import embeds
from petune.models.spec import Family, stack_paths


class Entrances:
    """The modules with tables of tokens or positions beside the stacks of a model and above them, as far as
    they make of ids [rows, tokens] hidden states [rows, tokens, width], which is seen when they run. Those
    with hooks of somebody else's, of a slice of a table say, run always."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        paths = [path.rpartition(".")[0] for path in stack_paths(model, family).values()]
        above = {path[:end] for path in paths for end in range(len(path) + 1) if f"{path}."[end] == "."}
        spine = {id(model.get_submodule(path)) for path in above}
        beside = [child for path in sorted(above) for child in model.get_submodule(path).children()]
        self.modules = {
            id(child): child
            for child in beside
            if id(child) not in spine and not isinstance(child, nn.ModuleList) and embeds(child)
        }
        self.like: dict[int, Tensor] = {}  # [width], of what a module gives
        self.hooks: list[RemovableHandle] = [
            module.register_forward_hook(self._see, with_kwargs=True) for module in self.modules.values()
        ]

    def _see(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ids = _ids((*args, *kwargs.values()))
        if ids is not None and isinstance(output, Tensor) and output.shape[:-1] == ids.shape:
            self.like[id(module)] = output.new_zeros(()).expand(output.shape[-1])

    def shut(self) -> None:
        """Let the modules give zeros, which take no memory, until `open`."""
        for key, module in self.modules.items():
            own = len(module._forward_hooks) == 1 and not module._forward_pre_hooks
            if key in self.like and own and "forward" not in module.__dict__:
                module.forward = partial(_zeros, self.like[key])

    def open(self) -> None:
        """Let them run again."""
        for module in self.modules.values():
            if getattr(module.__dict__.get("forward"), "func", None) is _zeros:
                del module.forward

    def close(self) -> None:
        """Leave the model as it was."""
        self.open()
        for hook in self.hooks:
            hook.remove()


def _ids(given: Iterable[Any]) -> Tensor | None:
    """The first matrix of whole numbers."""
    matrices = (one for one in given if isinstance(one, Tensor) and one.dim() == 2)
    return next((one for one in matrices if not one.is_floating_point()), None)


def _zeros(like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    ids = _ids((*args, *kwargs.values()))
    assert ids is not None, "such a call was seen before"
    return torch.zeros((), dtype=like.dtype, device=ids.device).expand(*ids.shape, len(like))
