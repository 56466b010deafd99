"""A head alone on a frozen model (linear probing, Alain and Bengio 2016, arXiv:1610.01644): what a task puts
behind the last block trains, and nothing before it.

        y = head(h_L(x)),   h_L of the base in eval mode, to which no gradient goes back

h_L is therefore the same in every step, and so an activation cache may keep it: the base's dropout is off in
training too, the head's own is on as ever. Blocks run under no_grad, fused ones by their forward pass alone.
The head is a part of the model's own class, so the tuned model is a plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from petune.errors import Problem, UsageError
from petune.methods.configs import HeadConfig
from petune.models.behind import behind_blocks
from petune.models.spec import Family, stack_paths
from petune.models.stack import own_stacks


class StandStill:
    """Hook before the base model and each stack's owner, of a base without a backward pass: eval mode for all
    of it but `inside`, as a base with dropout would be another one in every step. trained: what learns.

    Raises UsageError for what would learn nothing there, where it begins to train: other tensors that require
    gradients, and noise on embeddings, which eval mode leaves out."""

    def __init__(self, inside: Sequence[nn.Module], trained: Sequence[nn.Module]) -> None:
        self.inside, self.trained = inside, trained

    def __call__(self, base: nn.Module, args: Any) -> None:
        if base.training:
            if torch.is_grad_enabled() and self._may_be_idle(base):
                self._refuse_idle(base)  # while it says that it trains, or the next call would pass
            base.eval()
            for module in self.inside:
                module.train()

    def _may_be_idle(self, base: nn.Module) -> bool:
        """Whether there is something to refuse outside `trained`, but for what is tied to it: asked at every
        step, so without names, which take longer."""
        left: list[nn.Module | None] = [base]
        while left:
            if (module := left.pop()) is None or module in self.trained:
                continue
            if module.__dict__.get("neftune_noise_alpha") is not None:
                return True
            for value in module._parameters.values():
                if value is not None and value.requires_grad:
                    return True
            left += module._modules.values()
        return False

    def _refuse_idle(self, base: nn.Module) -> None:
        own = {id(value) for module in self.trained for value in module.parameters()}
        for name, value in base.named_parameters():
            if value.requires_grad and id(value) not in own:
                what = "this tensor requires gradients and is none that trains: blocks have no backward pass"
                remedy = "freeze it (petune.mark_only_trainable(model)), or use another method, or also_train"
                raise UsageError(what, where=name, remedy=remedy)
        for name, module in base.named_modules():
            if (noise := module.__dict__.get("neftune_noise_alpha")) is not None:
                what = "embeddings get no noise: under side and head the base is in eval mode"
                remedy = "leave neftune_noise_alpha out, or use another method"
                raise UsageError(what, where=name, found=f"neftune_noise_alpha {noise}", remedy=remedy)


def apply(model: nn.Module, family: Family | None, config: HeadConfig, also_train: tuple[str, ...]) -> None:
    """Let the blocks run without autograd, in eval mode. Raises UsageError, with the model as it was, where
    there is nothing to train, and for modules that do not work behind the last block."""
    assert family is not None
    if not also_train:
        what = f"head trains what a task puts behind the blocks, and this {type(model).__name__} has nothing"
        expected = "a model of classify, tokens or rerank"
        remedy = "name modules behind the last block in also_train, or use another method"
        raise UsageError(what, where="also_train", expected=expected, remedy=remedy)
    refuse_before("head", model, family, also_train)
    base = getattr(model, "base_model", model)
    within = {id(module) for module in base.modules()}
    trained = [model.get_submodule(name) for name in also_train]
    hold = StandStill([module for module in trained if id(module) in within], trained)
    paths = stack_paths(model, family)
    for name, stack in own_stacks(model, family).items():
        owner = model.get_submodule(paths[name].rpartition(".")[0])
        stack.still = True
        stack.around += (owner.register_forward_pre_hook(hold), base.register_forward_pre_hook(hold))


def refuse_before(method: str, model: nn.Module, family: Family, also_train: Sequence[str]) -> None:
    """Raise UsageError for tensors that something before the end of the last block reads, too."""
    behind = behind_blocks(model, family)
    wrong = [
        f"{name}.{own}"
        for name in also_train
        for own, value in model.get_submodule(name).named_parameters()
        if id(value) not in behind
    ]
    if wrong:
        remedy = "take it out of also_train, or use another method"
        what = f"{method} trains what works behind the last block alone, and this is read before"
        raise UsageError([Problem(what, where=name, remedy=remedy) for name in wrong[:10]])
