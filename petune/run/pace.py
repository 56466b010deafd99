"""What makes steps slow, said once: cores that other programs use, before the first step; steps that have
become slow for good, as a device or a link that others use, or that runs hot, slows every rank of a plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

FIRST = 10  # steps whose median is what others are held to, the very first left out
TIMES = 3.0  # as slow
STEPS = 100  # in a row
CROWDED = 2.0  # programs that want to compute, for each core


def crowded() -> list[str]:
    """A line of the header where other programs keep the cores of this machine busy: the threads of an
    operation wait for one another, so several can be many times as slow as one."""
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    try:
        load = os.getloadavg()[0]
    except OSError:  # this system does not tell
        return []
    if threads < 2 or load < CROWDED * cores:
        return []
    busy = f"other programs keep the {cores} cores busy (load {load:.0f})"
    return [f"         warning: {busy}, and {threads} threads wait for one another: try OMP_NUM_THREADS=1"]


class Pace:
    """Tokens a second of the first steps of this process, and how many in a row have been so much slower."""

    def __init__(self, several: bool) -> None:
        self.several, self.first, self.slow = several, list[float](), 0
        self.warm = self.said = False

    def look(self, record: Mapping[str, Any]) -> str | None:
        """What is to be said after a step; None for nothing."""
        speed = record["tokens_per_s"]
        if len(self.first) < FIRST:
            self.first += [speed] * self.warm
            self.warm = True
            return None
        usual = median(self.first)
        self.slow = self.slow + 1 if speed * TIMES <= usual else 0
        if self.said or self.slow < STEPS:
            return None
        self.said = True
        anew = "; petune plan --auto measures the devices anew, and --resume takes another plan"
        return (
            f"SLOW: {STEPS} steps in a row have taken {TIMES:g} times as long as the first ones or more"
            f" ({speed:,.0f} tokens/s, then {usual:,.0f}): a device or a link is slower than it was"
            + anew
            * self.several
        )
