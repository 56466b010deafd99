"""Floating-point operations by phase and module, counted by torch's FlopCounterMode as operations are
dispatched.

Counted are matrix products, convolutions and attention as they are executed: a causal mask halves nothing,
and the backward pass of fused attention has five products of its size, as it computes the scores again. One
multiply-accumulate (MAC) is two operations. Not counted, as everywhere in the field: element by element work;
and what a Triton kernel multiplies by itself, our own attention among it, since only dispatched operations
are seen. Composite operations are taken apart to be counted, so gradients of a counted pass may differ from
others in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from petune.profiling.attribution import Attribution, StepPhase

Dims = tuple[int, ...]
FlopCounts = Mapping[tuple[StepPhase, str], int]  # operations by phase and by name

aten = torch.ops.aten


FORWARD, BACKWARD = (1, 1), (3, 2)  # products of queries with keys, and of probabilities with values


def _attention(query: Dims, key: Dims, value: Dims, *_: Any, times: Dims = FORWARD, **__: Any) -> int:
    """Of [batch, heads, length, d]. Keys may have fewer heads, each of which serves several: not every torch
    release counts those."""
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[-2] * (times[0] * width + times[1] * value[-1])


def _attention_backward(grad_out: Dims, *given: Any, **named: Any) -> int:
    return _attention(*given, **named, times=BACKWARD)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor | None,
    key_starts: Tensor | None,
    *_: Any,
    times: Dims = FORWARD,
    **__: Any,
) -> int:
    """Of [batch, length, heads, d], or packed: [tokens, heads, d] beside where sequences start."""
    features = times[0] * query.shape[-1] + times[1] * value.shape[-1]
    return 2 * query.shape[-2] * _pairs(query, key, starts, key_starts) * features


def _flash_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *rest: Any, **named: Any
) -> int:  # fmt: skip
    return _flash(query, key, value, *rest, **named, times=BACKWARD)


def _pairs(query: Tensor, key: Tensor, starts: Tensor | None, key_starts: Tensor | None) -> int:
    """Of queries and keys of the same sequence."""
    if starts is None or key_starts is None:
        return query.shape[0] * query.shape[1] * key.shape[1]
    return int((starts.diff().long() * key_starts.diff().long()).sum())


def _addmm(addend: Dims, left: Dims, right: Dims, *_: Any, **__: Any) -> int:
    """Of [n, k] and [k, m]. A dtype of the result may follow, which torch's own formula takes for its
    shape."""
    return 2 * left[0] * left[1] * right[1]


def _linear(rows: Dims, weight: Dims, *_: Any, **__: Any) -> int:
    """Of [n, k] and [m, k]."""
    return 2 * rows[0] * rows[1] * weight[0]


for _formula in (_flash, _flash_backward):
    cast("Any", _formula)._get_raw = True  # tensors, not shapes: the lengths of packed rows are in one
FORMULAS: dict[
    Any, Callable[..., int]
] = {  # what torch's registry lacks, counts in newer releases only, or cannot take
    **{
        getattr(aten, f"_scaled_dot_product_{form}{way}"): formula
        for form in ("flash_attention_for_cpu", "flash_attention", "cudnn_attention", "efficient_attention")
        for way, formula in (("", _attention), ("_backward", _attention_backward))
    },
    aten.addmm: _addmm,
    aten.addmm_: _addmm,
    aten._flash_attention_forward: _flash,
    aten._flash_attention_backward: _flash_backward,
}
if torch.backends.mkldnn.is_available():
    FORMULAS[torch.ops.mkldnn._linear_pointwise] = _linear


class _Labels:
    """Stands where FlopCounterMode has its tracker of modules: the one phase and module of the operation that
    is counted."""

    def __init__(self, attribution: Attribution) -> None:
        self.attribution = attribution
        self.seen: dict[str, tuple[StepPhase, str]] = {}

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
def counting(attribution: Attribution) -> Iterator[dict[tuple[StepPhase, str], int]]:
    """Count what runs inside; the dictionary, by phase and path of a module without what its children run, is
    filled at the end."""
    counts: dict[tuple[StepPhase, str], int] = {}
    counter, labels = FlopCounterMode(display=False, custom_mapping=FORMULAS), _Labels(attribution)
    cast("Any", counter).mod_tracker = labels
    with counter:
        yield counts
    found = counter.get_flop_counts()
    counts.update({key: sum(found[label].values()) for label, key in labels.seen.items() if label in found})
    assert sum(counts.values()) == counter.get_total_flops()
