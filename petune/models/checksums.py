"""Checksums of tensors: 64 bits that tell, at the speed of memory, whether a bit has changed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from petune.models.frozen_weight import bytes_in

VERSION = 2  # stands before every digest: values of another version are not comparable
_COLUMNS = 1024  # 32-bit words in a row of a checksum
_WORTH_THREADS = 1 << 20  # bytes: of fewer a thread's start is the most
# bytes of a tensor on a device that are multiplied at once: the products take twice as many
_PORTION = 128 << 20
_READ = 16 << 20  # bytes of a tensor that a thread has read at once


@dataclass(frozen=True)
class RankShare:
    """A rank's share of checksums that several take together, a part of a tensor at a time; of all where it
    is alone. gather: what each rank gives -> what all give, by rank; may raise."""

    rank: int = 0
    ranks: int = 1
    gather: Callable[[str], list[str]] = lambda text: [text]

    def own(self, sizes: Sequence[int]) -> slice:
        """Which of pieces of so many bytes are this rank's: neighbours, about as many bytes as any has."""
        whole = sum(sizes)
        # a piece belongs to whose its middle is
        ranks = [
            min((2 * end - size) * self.ranks // max(1, 2 * whole), self.ranks - 1)
            for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        first = sum(rank < self.rank for rank in ranks)
        return slice(first, first + ranks.count(self.rank))

    def add_up(self, found: Mapping[str, int]) -> dict[str, int]:
        """Checksums by name, of what each rank has found of them; all ranks call together."""
        sums: dict[str, int] = {}
        for text in self.gather(json.dumps(found)):
            for name, value in json.loads(text).items():
                sums[name] = (sums.get(name, 0) + value) % 2**64
        return sums


ALONE = RankShare()


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
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        if threads > 1 and sum(value.nbytes for value in here.values()) > _WORTH_THREADS:
            with ThreadPoolExecutor(threads) as pool:
                sums = list(pool.map(add_up, here.values()))
        else:
            sums = [add_up(value) for value in here.values()]
        found |= zip(here, torch.stack(sums).tolist(), strict=True)
    counts = {name: len(bytes_in(value)) for name, value in tensors.items()}
    return {
        name: sum((2 * at + 1) * found[name, at] for at in range(count)) % 2**64
        for name, count in counts.items()
    }


def read_checksums(
    likes: Mapping[str, Tensor], read: Callable[[str, range], Tensor], share: RankShare = ALONE
) -> dict[str, int]:
    """What the portions of `share` add to the `checksum` of each dense tensor that is not in memory, by as
    many threads as torch uses; tensors of which it has none are left out. likes: dtype and shape of each;
    read: (its name, a range of its first dim) -> these of its entries, on the CPU."""
    every = [(name, part) for name, like in likes.items() for part in _portions(like)]
    wanted = every[share.own([_entry(likes[name]) * len(part) for name, part in every])]
    most = max((like.nbytes for like in likes.values()), default=0)
    weights = _weights(_COLUMNS + 1 + most // (4 * _COLUMNS), torch.device("cpu"))

    def add_up(name: str, part: range) -> int:
        like = likes[name]
        before = part.start * _entry(like) // (4 * _COLUMNS)
        return int(_weighted_sum(read(name, part), weights, before))

    found = {name: 0 for name, _ in wanted}
    if not wanted:
        return found
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for (name, _), one in zip(wanted, pool.map(add_up, *zip(*wanted, strict=True)), strict=True):
            found[name] = (found[name] + one) % 2**64
    return found


def _entry(like: Tensor) -> int:
    """Bytes of an entry of the first dim; 0 without dims."""
    return like[:1].nbytes if like.dim() else 0


def _portions(like: Tensor) -> list[range]:
    """Ranges of the first dim, each of about _READ bytes, and but for the last of whole rows of a checksum;
    one of a tensor without dims or entries."""
    entry = _entry(like)
    if not entry:
        return [range(len(like) if like.dim() else 1)]
    step = 4 * _COLUMNS // math.gcd(4 * _COLUMNS, entry)
    count = max(step, _READ // entry // step * step)
    return [range(start, min(start + count, len(like))) for start in range(0, len(like), count)]


@torch.no_grad()
def _weighted_sum(tensor: Tensor, weights: Tensor, before: int = 0) -> Tensor:
    """The checksum as a signed int64 scalar on the tensor's device, which is not waited for; of a tensor that
    is a part of another the part of its, `before` rows of which come first."""
    whole, rest = _words(tensor)
    columns, rows = weights[:_COLUMNS], weights[_COLUMNS + before :]
    last = (rest * columns).sum() * rows[len(whole)]
    return last + (_row_sums(whole, columns) * rows[: len(whole)]).sum() if len(whole) else last


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


def digest(checksums: Mapping[str, int]) -> str:
    """One text for the checksums of many tensors, in their order, behind the version of the checksum."""
    values = b"".join(value.to_bytes(8, "little") for value in checksums.values())
    return f"{VERSION}:{hashlib.sha256(values).hexdigest()[:16]}"


def comparable(saved: str) -> bool:
    """Whether a digest is of this version of the checksum, so that a difference means other bits."""
    return saved.startswith(f"{VERSION}:")
