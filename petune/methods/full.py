"""Full fine-tuning: nothing is replaced and every parameter trains."""

from __future__ import annotations

from torch import nn

from petune.methods.configs import FullConfig
from petune.models.spec import Family


def apply(model: nn.Module, family: Family | None, config: FullConfig, also_train: tuple[str, ...]) -> None:
    """Leave the model as it is; `mark_only_trainable` does the rest."""
