"""Spikes: steps whose loss or gradient norm lies far above what the steps before had.

The range is robust: the median of the last `spike_window` steps, plus `spike_threshold` times their usual
distance from it (1.4826 times the median absolute deviation, the standard deviation where numbers are normal;
at least a tenth of the median). So one spike does not widen it, and numbers that hardly vary do not narrow it
to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from petune.errors import TrainingFault
from petune.run.progress import Progress

LEAST = 16  # steps that a range is made of at least: before, nothing is judged
IN_A_ROW = 8  # steps left out one after the other, with which a run ends: it has left its range for good
_NORMAL = 1.4826  # of a normal distribution, the standard deviation over the median absolute deviation
_FLOOR = 0.1  # of the median: the smallest usual distance


def limit(values: Sequence[float], threshold: float) -> float:
    """The largest value that is no spike after `values`."""
    middle = median(values)
    usual = max(_NORMAL * median(abs(value - middle) for value in values), _FLOOR * abs(middle))
    return middle + threshold * usual


def outside(loss: float, norm: float, recent: Sequence[Sequence[float]], threshold: float) -> str | None:
    """What of a step lies outside the range of the [loss, gradient norm] in `recent`, in words; None where
    nothing does."""
    if len(recent) < LEAST:
        return None
    found = []
    for name, value, values in (
        ("loss", loss, [one for one, _ in recent]),
        ("gradient norm", norm, [one for _, one in recent]),
    ):
        if value > (most := limit(values, threshold)):
            found.append(
                f"{name} {value:.4g}, where the last {len(values)} steps have a median of"
                f" {median(values):.4g} and allow {most:.4g}"
            )
    return "; ".join(found) or None


@dataclass(frozen=True)
class SpikeRule:
    """What a recipe says of spikes. action: off, warn, stop, skip or rewind."""

    action: str
    window: int
    threshold: float

    def judge(
        self, loss: float, norm: float, progress: Progress, anyone: Callable[[Sequence[bool]], list[bool]]
    ) -> str | None:
        """What of a step is a spike, the same decision on every rank; keeps the range, and the count of
        spikes in a row, in `progress`."""
        if self.action == "off":
            return None
        found = outside(loss, norm, progress.recent, self.threshold)
        spike = anyone([found is not None])[0]
        if not spike or self.action == "warn":
            progress.recent = [*progress.recent, [loss, norm]][-self.window :]
        progress.spikes = progress.spikes + 1 if spike else 0
        return (found or "outside its range in another process") if spike else None

    def ends(self, progress: Progress) -> bool:
        """Whether a spike that was just found ends the run."""
        return self.action == "stop" or (self.action != "warn" and progress.spikes >= IN_A_ROW)


def said(places: Sequence[str]) -> str:
    """The first rows of a step by file and line."""
    return f"rows {', '.join(places[:5])}{' and more' if len(places) > 5 else ''}"


def spike_record(action: str, found: str, places: Sequence[str], back: int | None) -> dict[str, Any]:
    """What the record of a step says of its spike. back: the step of the state that the run has gone back to,
    if any."""
    rewound = {} if back is None else {"rewound_to": back}
    return {"spike": action, "outside": found, "rows": list(places)} | rewound


def spike_line(record: Mapping[str, Any]) -> str:
    """What was done about the spike in a step's record, for a person."""
    done = {
        "warn": "the update was made",
        "skip": "the update was left out",
        "rewind": f"back to the state of step {record.get('rewound_to')}; what was trained since is left out",
    }[record["spike"]]
    return f"SPIKE at step {record['step']}, {done}: {record['outside']}; {said(record['rows'])}"


def spike_fault(found: str, step: int, places: Sequence[str], saved: Any, in_a_row: int) -> TrainingFault:
    """The error that ends a run before the update of `step`, with its state in the checkpoint `saved`."""
    row = f"the last of {in_a_row} spikes in a row" if in_a_row > 1 else "a spike"
    others = "lower lr, raise spike_threshold, or set on_spike: warn (--allow-change)"
    skip = "lower lr, or go on without them: --resume on_spike=skip --allow-change on_spike"
    return TrainingFault(
        f"{row}: the update was not made, and the state before it is saved in {saved}",
        where=f"step {step}",
        found=f"{found}; {said(places)}",
        remedy=f"look at these rows, {others if in_a_row > 1 else skip}",
    )


def refuse_non_finite(
    loss: float, norm: float, step: int, places: Callable[[], Sequence[str]], made: bool
) -> None:
    """Raise TrainingFault for a loss or gradient norm that is not finite. made: the update of `step` was made
    inside the backward pass."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    lost = made and math.isfinite(loss)
    what = (
        "its update was made inside the backward pass, so this state is lost"
        if lost
        else "the update was not made"
    )
    raise TrainingFault(
        f"the {'gradient' if math.isfinite(loss) else 'loss'} is not finite; {what}",
        where=f"step {step}",
        found=f"loss {loss}, gradient norm {norm}; {said(places())}",
        remedy="lower lr, use dtype: fp32, or look at these rows; checkpoints hold only finite states",
    )
