"""A fused block as steps, once its program is made: see program.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from petune.kernels.block.attention_steps import Attend, NormHeads
from petune.kernels.block.cores import CoreSizes, Drawing
from petune.kernels.block.lent_steps import KEYS, Lend, OfTokens
from petune.kernels.block.linear_steps import Activated, Low
from petune.kernels.block.rotary_steps import Rotate
from petune.kernels.block.schedule import Schedules
from petune.kernels.block.steps import Step
from petune.kernels.memory.shape import GroupPlace
from petune.models.spec import Attention, Norm, Pairs, RoutedMlp, SubLayer


@dataclass(eq=False)
class Program:
    """A block as steps. inputs: values that it is given; y: the one it gives. groups, norms and dropouts are
    in the order of their use."""

    sublayers: tuple[SubLayer, ...]
    sizes: CoreSizes
    inputs: tuple[str, ...]
    steps: tuple[Step, ...]
    y: str
    groups: tuple[GroupPlace, ...]
    norms: tuple[Norm, ...]
    dropouts: tuple[str, ...]  # paths
    bottlenecks: tuple[str, ...]  # paths of the modules that have them
    mixtures: tuple[RoutedMlp, ...]
    order: tuple[Drawing, ...]  # in which the block's own forward draws what drops out
    sinks: tuple[str, ...]  # paths of those of attentions
    called: tuple[Attention, ...]  # the cores that are called as they are
    vectors: tuple[str, ...]  # paths of those that scale what sub-layers give
    tensors: int  # that autograd knows of it, weights and those of its tuning
    schedules: Schedules = field(init=False)

    def __post_init__(self) -> None:
        self.schedules = Schedules(self.inputs, self.steps, self.y)
        attentions = [one.core for one in self.sublayers if isinstance(one.core, Attention)]
        # how the angles lie that it is given, see Pairs; whose queries what positions say multiplies
        self.pairs: Pairs = next((core.pairs for core in attentions), "halves")
        self.reach = tuple(core for core in attentions if core.rotary and core.reach)

    @cached_property
    def attends(self) -> list[Attend]:
        """Its attentions, in order."""
        return [step for step in self.steps if isinstance(step, Attend)]

    @cached_property
    def across(self) -> tuple[bool, ...]:
        """Of each group, whether it reads the memory."""
        reads = {step.at: step.x for step in self.steps if isinstance(step, Low)}
        return tuple(reads.get(at) == "memory" for at in range(len(self.groups)))

    @cached_property
    def meets(self) -> bool:
        """Whether it reads what is for this block alone, or lends to later blocks: see lent_steps.py."""
        return any(isinstance(step, OfTokens | Lend) for step in self.steps) or KEYS in self.inputs

    @property
    def gated(self) -> bool:
        """Whether its MLP has a gate."""
        return any(step.gated for step in self.steps if isinstance(step, Activated))

    @cached_property
    def rotary(self) -> bool:
        """Whether it is given the angles of rotary positions."""
        return any(isinstance(step, Rotate | NormHeads) for step in self.steps)
