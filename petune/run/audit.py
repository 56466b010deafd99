"""Proof, while it trains, that a run trains what it says and nothing else.

Every tuned tensor must have had a gradient that is not all zero within two updates, and have moved within
three of a tenth of the peak learning rate or more (LoRA's A waits one update for B; early in a warm-up and
late in a decay a step is less than the last bit of a norm's weights); every frozen tensor that is in memory
must have the same checksum at each save as at the start. A fault names the tensors, as the usual cause is a
layer that the forward pass never reaches. Of a bfloat16 weight that is streamed, which a small step moves by
chance or not yet, what must have moved is what its steps add up in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from petune.errors import Problem, TrainingFault
from petune.models.checksums import checksums
from petune.parallel import local

GRADIENT_WITHIN = 2
MOVED_WITHIN = 3
# Biases of keys: where no position turns the keys they add alike to all scores of a softmax, and what
# gradient they have is rounding. Where one does (rope) they move with the rest, and are not asked either.
_UNSEEN = ("key.bias", "key_proj.bias", "k_proj.bias", "k_lin.bias")
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
        self.still = [name for name in names or tuned if not name.endswith(_UNSEEN)]
        self.before = checksums({name: local(value) for name, value in tuned.items()})
        self.updates = self.large = 0  # that count, and those of them that should have moved everything
        self.counts = True  # whether the update that comes next does

    def after_backward(self, masks: Sequence[Tensor | None] = (None,)) -> None:
        """Note which tensors have a gradient. masks: of attention, [rows, tokens], of the update's batches;
        where no text has three tokens queries and keys have none, and the update does not count.
        TrainingFault in the second update if one has had none."""
        if self.updates >= GRADIENT_WITHIN:
            return
        attends = any(mask is None or bool((mask.sum(-1) > 2).any()) for mask in masks)
        *seen, self.counts = self.anyone([*map(self.has_gradient, self.waiting), attends])
        self.waiting = [name for name, reached in zip(self.waiting, seen, strict=True) if not reached]
        if self.updates + self.counts == GRADIENT_WITHIN and self.waiting:
            what = f"has had no gradient in {GRADIENT_WITHIN} updates"
            remedy = "no answer depends on it: leave it out of also_train or targets, or use lora"
            waiting = sorted(self.waiting)[:10]
            raise TrainingFault([Problem(what, where=name, remedy=remedy) for name in waiting])

    def _has_gradient(self, name: str) -> bool:
        grad = self.tuned[name].grad if name in self.tuned else None
        return grad is not None and bool(local(grad).any())

    def after_update(self, share: float = 1.0) -> None:
        """Note which tensors moved. share: learning rate over its peak. Raises TrainingFault after the third
        update of a share from 0.1 on if one has not."""
        self.updates, self.large = self.updates + self.counts, self.large + (self.counts and share >= 0.1)
        if not self.still:
            return
        now = checksums({name: local(self.tuned[name]) for name in self.still if name in self.tuned})
        moved = self.anyone([name in now and now[name] != self.before[name] for name in self.still])
        self.still = [name for name, has_moved in zip(self.still, moved, strict=True) if not has_moved]
        if self.large >= MOVED_WITHIN and self.still:
            late = [
                Problem(f"has not moved in {MOVED_WITHIN} updates", where=one) for one in sorted(self.still)
            ]
            what = "the learning rate may be too small for the size of these values"
            raise TrainingFault([*late[:10], Problem(what, remedy="raise lr")])

    def check_frozen(self) -> None:
        """Raises TrainingFault naming every frozen tensor whose bits changed since the start; those that are
        not in memory have none."""
        here = {name: value for name, value in self.frozen.items() if not value.is_meta}
        now = checksums(here)
        moved = [name for name in here if now[name] != self.frozen_before[name]]
        if self.anyone([bool(moved)])[0]:
            places, remedy = moved[:10] or ["a tensor of another process"], "let nothing write into the base"
            raise TrainingFault([Problem("is frozen but has changed", one, remedy=remedy) for one in places])
