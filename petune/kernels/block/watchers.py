"""Who watches from outside what fused blocks do: hooks on modules or on what autograd keeps, a compiler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from petune.models.boundary import BoundaryHook
from petune.models.experts import RoutesHook

_RECORDS = "transformers.utils.output_capturing"


def hooked(modules: Iterable[nn.Module]) -> bool:
    """Whether there are hooks on one of the modules, or on all there are."""
    return _has_any_global_hook() or any(map(_hooked, modules))


def _hooked(module: nn.Module) -> bool:
    ahead = module._forward_hooks or module._forward_pre_hooks
    return bool(ahead or module._backward_hooks or module._backward_pre_hooks)


def hooks_act(module: nn.Module) -> bool:
    """Whether hooks on a module would act: those by which Hugging Face records outputs stay for ever, and act
    only when asked to; what those of a boundary do is done by steps."""
    if not _hooked(module):
        return False
    before = [hook for hook in module._forward_pre_hooks.values() if not _known(hook)]
    behind = [hook for hook in module._forward_hooks.values() if not _known(hook)]
    others = (*before, *module._backward_hooks.values(), *module._backward_pre_hooks.values())
    return bool(others) or any(hook.__module__ != _RECORDS for hook in behind)


def _known(hook: Any) -> bool:
    """Whether a block does itself what a hook does: steps do it, or tell the hook who is sent where."""
    return isinstance(getattr(hook, "__self__", hook), BoundaryHook | RoutesHook)


def block_by_block() -> bool:
    """Whether somebody counts on blocks being called one by one: a compiler, or checkpointing, by its hooks
    on what autograd keeps."""
    return (
        torch.compiler.is_compiling()  # first, as it cannot read the other
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )
