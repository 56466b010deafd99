"""What petune.kernels.triton.gated_delta_backward launches for the shapes that matter."""

from __future__ import annotations

from collections.abc import Iterator

from petune.kernels.triton.gated_delta import stages_of
from petune.kernels.triton.gated_delta_backward import BLOCK, _keys_kernel, _states_kernel, _values_kernel
from tests.kernels.variants.gated_delta import shapes, signature
from tests.kernels.variants.variant import Variant


def variants() -> Iterator[Variant]:
    """See tests/kernels/gate.py."""
    for kind, columns, sizes in shapes():
        own = sizes | {"BV": columns}
        yield _states_kernel, signature(_states_kernel, kind), own, 4, stages_of(columns)
        for kernel in (_values_kernel, _keys_kernel):
            yield kernel, signature(kernel, kind), sizes | {"BV": BLOCK}, 4, 1
