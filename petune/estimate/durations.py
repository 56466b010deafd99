"""Seconds of passes and of steps, and the ranks that they are of."""

from __future__ import annotations

from dataclasses import dataclass

from petune.estimate.cluster import LinkSpeed


@dataclass(frozen=True)
class StepTime:
    """Seconds of an optimizer step. compute: of the busiest ranks; communication: what is left of it once
    all is hidden that can be; waiting: of a pipeline's ranks for one another."""

    compute: float
    communication: float
    waiting: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.compute + self.communication + self.waiting


@dataclass(frozen=True)
class Both:
    """Seconds forward and backward."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Both) -> Both:
        return Both(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> Both:
        return Both(self.forward * times, self.backward * times)

    @property
    def total(self) -> float:
        """Of both."""
        return self.forward + self.backward


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share blocks: their kinds of device, by number, and the link between them."""

    kinds: tuple[int, ...]
    link: LinkSpeed
