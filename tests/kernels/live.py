"""The bytes of tensors that are made and not yet freed."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made and not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            value.untyped_storage()._cdata
            for value in tree_leaves((args, kwargs))
            if isinstance(value, Tensor)
        }
        for value in (one for one in tree_leaves(out) if isinstance(one, Tensor)):
            storage = value.untyped_storage()
            if storage._cdata not in self.seen | given:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def free(self, key: int, size: int) -> None:
        self.now -= size
        self.seen.discard(key)
