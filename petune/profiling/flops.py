"""Floating-point operations by phase and module, counted by torch's FlopCounterMode as operations are dispatched.

Counted are matrix products, convolutions and attention as they are executed: a causal mask halves nothing, and the backward pass of fused
attention has five products of its size, as it computes the scores again. One multiply-accumulate (MAC) is two operations. Not counted, as
everywhere in the field: element by element work; and what a Triton kernel multiplies by itself, since only dispatched operations are seen.
Composite operations are taken apart to be counted, so gradients of a counted pass may differ from others in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from petune.profiling.attribution import Attribution, Phase

Shape = tuple[int, ...]
Counts = Mapping[tuple[Phase, str], int]

aten = torch.ops.aten


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(grad_out: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(grad_out, query, key, value))


def _by_head(formula: Callable[..., int], tensors: int) -> Callable[..., int]:
    """torch's formula for a kernel whose first so many tensors are [batch, length, heads, d] unless packed, which it reads as by head."""

    def flop(*args: Any, **kwargs: Any) -> int:
        first = (value.transpose(1, 2) if value.dim() == 4 else value for value in args[:tensors])
        return formula(*first, *args[tensors:], **kwargs)

    cast("Any", flop)._get_raw = True  # tensors, not shapes: the lengths of packed rows are in one
    return flop


FORMULAS = {  # what torch's registry lacks, or has for another layout
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._flash_attention_forward: _by_head(flop_registry[aten._flash_attention_forward], 3),
    aten._flash_attention_backward: _by_head(flop_registry[aten._flash_attention_backward], 4),
}


class _Labels:
    """Stands where FlopCounterMode has its tracker of modules: the one phase and module of the operation that is counted."""

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.seen: dict[str, tuple[Phase, str]] = {}

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    @property
    def parents(self) -> set[str]:
        """The keys FlopCounterMode adds the operation to."""
        phase, path = self.attribution.now()
        label = f"{phase} {path}"
        self.seen[label] = phase, path
        return {"Global", label}


@contextmanager
def counting(attribution: Attribution) -> Iterator[dict[tuple[Phase, str], int]]:
    """Count what runs inside; the dictionary, by phase and path of a module without what its children run, is filled at the end."""
    counts: dict[tuple[Phase, str], int] = {}
    counter, labels = FlopCounterMode(display=False, custom_mapping=FORMULAS), _Labels(attribution)
    cast("Any", counter).mod_tracker = labels
    with counter:
        yield counts
    found = counter.get_flop_counts()
    counts.update({key: sum(found[label].values()) for label, key in labels.seen.items() if label in found})
    assert sum(counts.values()) == counter.get_total_flops()
