"""Around a fused stack: no cache while training, what its calls have to be like, dense tensors in files."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from petune.kernels.block.module import FusedBlock
from petune.models.port import takes_a_cache
from petune.models.stack import Stack


def ready(path: str, owner: nn.Module) -> bool:
    """Whether all blocks of the stack at `path` below an owner, and of a ladder beside it, compute by
    themselves at this moment, and so attend within segments."""
    stack = cast("Stack", owner.get_submodule(path))
    blocks = stack.blocks
    embeddings = cast("Any", owner).get_input_embeddings().weight
    alike = embeddings.dtype == cast("FusedBlock", blocks[0]).spec.dtype
    # what makes states of sounds stands on the meta device in later stages of a pipeline
    device = next(blocks[0].parameters()).device if embeddings.is_meta else embeddings.device
    beside = [] if stack.ladder is None else [block for _, block in stack.ladder.numbered]
    return alike and all(
        isinstance(block, FusedBlock) and block.unready(device) is None for block in (*blocks, *beside)
    )


def least(path: str, owner: nn.Module) -> int:
    """How many tokens a call of the stack at `path` below an owner must have, as every rank of a cut sequence
    gets some."""
    stack = cast("Stack", owner.get_submodule(path))
    return max((edges.least for edges in stack.edges), default=1)


def flattened(path: str, owner: nn.Module) -> bool:
    """Whether the stack at `path` below an owner, whose blocks are ready, has a way through all of them, on
    tokens that are cut across ranks: all rows are cut as one then, so that in a recording each rank's lie in
    one piece."""
    stack = cast("Stack", owner.get_submodule(path))
    return stack.whole is not None and cast("FusedBlock", stack.blocks[0]).spec.by_sequence


def dense(block: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Hook on a block's state: a weight packed with others is copied, as files hold dense tensors only, and
    accelerate takes tensors of one storage for one tensor."""
    for name, value in state.items():
        # else the tensors themselves are asked for
        shown = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        if shown and name.startswith(prefix) and value.untyped_storage().nbytes() > value.nbytes:
            state[name] = value.clone(memory_format=torch.contiguous_format)


class NoCache:
    """Hook before a model: no cache of keys and values where gradients are made, unless the caller asks for
    one by name."""

    def register(self, model: nn.Module) -> RemovableHandle:
        """Act before every other hook of `model`, which must see the call as it will be."""
        self.takes = takes_a_cache(model)
        stacks = [module for module in model.modules() if isinstance(module, Stack)]
        self.stacks = stacks
        # beside a ladder, and before a head alone, the model itself is in eval mode
        self.learners = [model, *(cast("Any", stack.ladder) for stack in stacks if stack.ladder is not None)]
        return model.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The call, with use_cache=False where it says nothing."""
        silent = kwargs.get("use_cache") is None and kwargs.get("past_key_values") is None
        learning = any(one.training for one in self.learners) or any(one.still for one in self.stacks)
        learns = torch.is_grad_enabled() and learning
        return args, kwargs | {"use_cache": False} if silent and self.takes and learns else kwargs
