"""Proof, while it trains, that a run trains what it says and nothing else.

Every tuned tensor must have had a gradient that is not all zero within two updates and have moved within
three (LoRA's A waits one update for B); every frozen tensor must have the same checksum at each save as at
the start. A fault names the tensors, as the usual cause is a layer that the forward pass never reaches. Of a
bfloat16 weight that is streamed, which a small step moves by chance or not yet, what must have moved is what
its steps add up in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from petune.errors import Problem, TrainingFault
from petune.methods import frozen_tensors
from petune.models.frozen_weight import bytes_in
from petune.parallel import local

GRADIENT_WITHIN = 2
MOVED_WITHIN = 3
CHECKSUM_VERSION = 2  # stands before every digest: values of another version are not comparable
_COLUMNS = 1024  # 32-bit words in a row of a checksum
# bytes of a tensor on a device that are multiplied at once: the products take twice as many
_PORTION = 128 << 20


def checksum(tensor: Tensor) -> int:
    """A 64-bit checksum of the bits of `tensor`, position included: the same on every device and with any
    number of threads.

    The contiguous bits, as signed 32-bit words and filled up with zeros, are multiplied by odd 64-bit
    weights, one for each position, and added modulo 2^64. So one changed word always changes the sum, and of
    other changes about one in 2^32 is missed at the worst (two words of which only the signs change). Shape
    and dtype are not part of it.
    """
    return checksums({"": tensor})[""]


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """`checksum` of every tensor by name: those on the CPU by as many threads as torch uses, those of each
    device with one wait.

    That of a quantised weight is an odd multiple of each of those of the tensors that it is held in, added
    up.
    """
    found: dict[tuple[str, int], int] = {}
    parts = {(name, at): part for name, value in tensors.items() for at, part in enumerate(bytes_in(value))}
    for device in {value.device for value in parts.values()}:
        here = {name: value for name, value in parts.items() if value.device == device}
        weights = _weights(
            _COLUMNS + 1 + max(value.nbytes for value in here.values()) // (4 * _COLUMNS), device
        )
        add_up = partial(_weighted_sum, weights=weights)
        if device.type == "cpu":
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                sums = list(threads.map(add_up, here.values()))
        else:
            sums = [add_up(value) for value in here.values()]
        found |= zip(here, torch.stack(sums).tolist(), strict=True)
    counts = {name: len(bytes_in(value)) for name, value in tensors.items()}
    return {
        name: sum((2 * at + 1) * found[name, at] for at in range(count)) % 2**64
        for name, count in counts.items()
    }


@torch.no_grad()
def _weighted_sum(tensor: Tensor, weights: Tensor) -> Tensor:
    """The checksum as a signed int64 scalar on the tensor's device, which is not waited for."""
    whole, rest = _words(tensor)
    columns, rows = weights[:_COLUMNS], weights[_COLUMNS:]
    return (_row_sums(whole, columns) * rows[: len(whole)]).sum() + (rest * columns).sum() * rows[len(whole)]


def _words(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of `tensor` as int32 words: whole rows of _COLUMNS, a view where it can be one, and a last row
    filled up with zeros."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 4:
        flat = flat.clone()
    content, row = flat.view(torch.uint8), 4 * _COLUMNS
    end = len(content) // row * row
    rest = torch.zeros(row, dtype=torch.uint8, device=flat.device)
    rest[: len(content) - end] = content[end:]
    return content[:end].view(torch.int32).view(-1, _COLUMNS), rest.view(torch.int32)


def _row_sums(words: Tensor, columns: Tensor) -> Tensor:
    """The weighted sum of each row: numpy widens in its registers on the CPU; a device multiplies a portion
    at a time."""
    if words.device.type == "cpu":
        return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), columns.numpy()))
    portions = words.split(_PORTION // (4 * _COLUMNS))
    return torch.cat([columns.new_zeros(0), *(torch.mul(portion, columns).sum(1) for portion in portions)])


def _weights(number: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers without a pattern, always the same: the steps of splitmix64, with shifts that keep
    the sign."""
    mixed = torch.arange(1, number + 1, device=device).mul_(_signed(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed.bitwise_xor_(mixed >> shift).mul_(_signed(factor))
    return mixed.bitwise_xor_(mixed >> 31).bitwise_or_(1)


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def frozen_checksums(model: nn.Module) -> dict[str, int]:
    """The checksum of every tensor of `model` that must not move."""
    return checksums(frozen_tensors(model))


def digest(checksums: Mapping[str, int]) -> str:
    """One text for the checksums of many tensors, in their order, behind the version of the checksum."""
    values = b"".join(value.to_bytes(8, "little") for value in checksums.values())
    return f"{CHECKSUM_VERSION}:{hashlib.sha256(values).hexdigest()[:16]}"


def comparable(saved: str) -> bool:
    """Whether a digest is of this version of the checksum, so that a difference means other bits."""
    return saved.startswith(f"{CHECKSUM_VERSION}:")


Anyone = Callable[[Sequence[bool]], list[bool]]  # for each flag, whether any process raised it


class Audit:
    """Watches one run. `tuned` and `frozen` are live tensors by name: those of this process, or its parts of
    them.

    `names` are all tuned tensors, those of other processes included; `anyone` joins what every process has
    seen of each. `has_gradient` tells of a tuned tensor, by name, whether its gradient is not all zero; None:
    its `grad` does.
    """

    def __init__(
        self,
        tuned: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        names: Sequence[str] = (),
        anyone: Anyone = list,
        has_gradient: Callable[[str], bool] | None = None,
    ) -> None:
        self.tuned, self.frozen, self.anyone = tuned, frozen, anyone
        self.has_gradient = has_gradient or self._has_gradient
        self.frozen_before = checksums(frozen)
        self.waiting = list(names or tuned)
        self.still = list(names or tuned)
        self.before = checksums({name: local(value) for name, value in tuned.items()})
        self.updates = 0

    def after_backward(self) -> None:
        """Note which tensors have a gradient. Raises TrainingFault after the second update's if one still has
        none."""
        if self.updates >= GRADIENT_WITHIN:
            return
        seen = self.anyone([self.has_gradient(name) for name in self.waiting])
        self.waiting = [
            name for name, has_gradient in zip(self.waiting, seen, strict=True) if not has_gradient
        ]
        if self.updates + 1 == GRADIENT_WITHIN and self.waiting:
            raise TrainingFault(
                [
                    Problem(f"has had no gradient in {GRADIENT_WITHIN} updates", where=name)
                    for name in sorted(self.waiting)[:10]
                ]
            )

    def _has_gradient(self, name: str) -> bool:
        grad = self.tuned[name].grad if name in self.tuned else None
        return grad is not None and bool(local(grad).any())

    def after_update(self) -> None:
        """Note which tensors moved. Raises TrainingFault after the third update if one has not."""
        if self.updates >= MOVED_WITHIN:
            return
        self.updates += 1
        now = checksums({name: local(self.tuned[name]) for name in self.still if name in self.tuned})
        moved = self.anyone([name in now and now[name] != self.before[name] for name in self.still])
        self.still = [name for name, has_moved in zip(self.still, moved, strict=True) if not has_moved]
        if self.updates == MOVED_WITHIN and self.still:
            raise TrainingFault(
                [
                    Problem(f"has not moved in {MOVED_WITHIN} updates", where=name)
                    for name in sorted(self.still)[:10]
                ]
                + [
                    Problem(
                        "the learning rate may be too small for the size of these values", remedy="raise lr"
                    )
                ]
            )

    def check_frozen(self) -> None:
        """Raises TrainingFault naming every frozen tensor whose bits changed since the start."""
        now = checksums(self.frozen)
        moved = [name for name, before in self.frozen_before.items() if now[name] != before]
        if self.anyone([bool(moved)])[0]:
            raise TrainingFault(
                [
                    Problem("is frozen but has changed", where=name)
                    for name in moved[:10] or ["a tensor of another process"]
                ]
            )
