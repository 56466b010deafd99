"""The random generators of a process as tensors and JSON: what a checkpoint keeps of them, and the way
back."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from petune.errors import FileError
from petune.log import warn


def seed_others(seed: int) -> None:
    """Seed Python's generator and numpy's. petune draws from neither; a model or a callback may."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def seeded(text: str) -> Iterator[None]:
    """Let torch's generator of the CPU begin from a text, for as long as the block lasts; then it goes on
    where it was."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        yield


def rng_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every generator a run may draw from: torch's on the CPU and, once used, on each GPU,
    Python's, numpy's if imported.

    Returns tensors ("rng/...") and JSON.
    """
    tensors = {"rng/torch": torch.get_rng_state()}
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        tensors |= {f"rng/cuda-{at}": state for at, state in enumerate(cuda.get_rng_state_all())}
    version, words, gauss = random.getstate()
    tensors["rng/python"] = torch.tensor(words, dtype=torch.int64)
    facts: dict[str, Any] = {"python": {"version": version, "gauss": gauss}}
    if numpy := sys.modules.get("numpy"):
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        tensors["rng/numpy"] = torch.tensor(keys.tolist(), dtype=torch.int64)
        facts["numpy"] = {
            "kind": kind,
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        }
    return tensors, facts


def set_rng_state(tensors: Mapping[str, Tensor], facts: Mapping[str, Any], where: str) -> None:
    """Set every generator to a state from `rng_state`; `where` names the checkpoint in errors. Raises
    FileError, then nothing is set.

    GPU states are for the same number of GPUs; with another number they are left out with a warning.
    """
    before = rng_state()
    try:
        _apply_rng(tensors, facts)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        _apply_rng(*before)
        what = f"the random generators' state cannot be restored: {error}"
        raise FileError(what[:300], where=where, remedy="use another checkpoint") from error


def _apply_rng(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    torch.set_rng_state(tensors["rng/torch"])
    random.setstate(
        (facts["python"]["version"], tuple(tensors["rng/python"].tolist()), facts["python"]["gauss"])
    )
    if saved := facts.get("numpy"):
        import numpy

        keys = numpy.array(tensors["rng/numpy"].tolist(), dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
    cuda = [
        tensors[key]
        for key in sorted(tensors, key=lambda key: (len(key), key))
        if key.startswith("rng/cuda-")
    ]
    if cuda and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    elif cuda:
        warn(
            f"the checkpoint is of a run on {len(cuda)} GPUs, here are {torch.cuda.device_count()}: their"
            " random numbers start anew"
        )
