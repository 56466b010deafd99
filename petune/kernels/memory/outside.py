"""What a policy is told of a model beside its fused blocks: bytes that stand, columns of a head, and the
seconds of a step that no block and no loss has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from petune.kernels.block.module import FusedBlock
from petune.kernels.memory.block_cost import Rates
from petune.kernels.memory.op_cost import Cost, KernelCost, adamw, costing
from petune.models.behind import output_head
from petune.models.sharded import shards_of

STATES = 12  # bytes beside a trained number: its gradient and AdamW's two states, in float32


def vocabulary_of(model: nn.Module) -> int:
    """The columns of a language model's head whose logits are never whole, 0 for other models."""
    head = _head(model)
    return 0 if head is None else len(head.weight)


def _head(model: nn.Module) -> Any:
    """The head over a vocabulary, or None: not on every stage of a pipeline."""
    try:
        head = output_head(model)
    except AttributeError:  # of a module inside one that is given away
        return None
    return None if getattr(head, "weight", None) is None else head


def resident_bytes(model: nn.Module) -> int:
    """Bytes on the device beside fused blocks that stream: what else there is, and its gradients; its states
    stream too."""
    return sum(value.nbytes * (1 + value.requires_grad) for value in _outside(model))


def fixed_bytes(*models: nn.Module) -> int:
    """Bytes on the device whatever is kept: tensors of the models, gradients and states of what trains; where
    models, all stages or none, are sharded, of this process' part, and what is gathered while each runs."""
    if shards := [found for model in models if (found := shards_of(model)) is not None]:
        return sum(one.own + STATES * one.trained + one.gathered for one in shards)
    tensors = (value for model in models for value in (*model.parameters(), *model.buffers()))
    values = {id(value): value for value in tensors}.values()
    trained = sum(value.numel() for value in values if value.requires_grad)
    return sum(value.nbytes for value in values) + STATES * trained


def once(model: nn.Module, rates: Rates, pieces: int = 1) -> float:
    """Seconds of a step of `model`, or of a stage, beside its blocks and its loss, as a share of each of the
    passes that a step has: for some the device waits for the host until the first block is launched; what
    trains outside blocks is updated in its own dtype, and tables get gradients of zeros first. Of a sharded
    model those of this process' part."""
    trained = [one for one in _outside(model) if one.requires_grad]
    tables = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    held = [(one, one.to_local() if hasattr(one, "to_local") else one) for one in trained]
    update = sum((adamw(own.numel(), own.element_size()) for _, own in held), Cost())
    zeros = Cost(0, sum(own.nbytes for one, own in held if id(one) in tables))
    work = costing(KernelCost("update", "memory", update), KernelCost("table", "memory", zeros))
    return (rates.begins + rates.seconds(work, 1)) / pieces


def _outside(model: nn.Module) -> Iterator[Tensor]:
    """Its tensors that are in no fused block, each once."""
    blocks = (block for block in model.modules() if isinstance(block, FusedBlock))
    seen = {id(value) for block in blocks for value in block.parameters()}
    for value in (*model.parameters(), *model.buffers()):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
