"""The program of a block of which only the sizes are known, and what follows from it for a plan of memory."""

from __future__ import annotations

from petune.kernels.block.attention_steps import Attend
from petune.kernels.block.called_step import CallCore
from petune.kernels.block.cores import CoreSizes, vectors_in
from petune.kernels.block.linear_steps import Activated, Product
from petune.kernels.block.program import Program, compiled
from petune.kernels.configs import Level
from petune.kernels.memory.shape import BlockShape
from petune.models.spec import Role


def of_shape(shape: BlockShape) -> Program:
    """The program of a block of that shape."""
    return compiled(shape.sublayers, CoreSizes(shape.heads, shape.kv_heads, shape.head_dim, "silu", 1e-6))


def remade(program: Program, keep: Level) -> tuple[frozenset[Role], bool]:
    """The roles whose products the backward pass of a rung makes again, and whether it attends again."""
    back = program.schedules.backward(keep, (True,) * program.tensors, (True,) * len(program.inputs))
    steps = [action.step for section in back.sections for action in section.actions if not action.back]
    roles = frozenset(
        role for step in steps if isinstance(step, Product | Activated) for role in step.place.sites
    )
    called = [step for step in steps if isinstance(step, CallCore)]
    roles = roles.union(*(step.roles for step in called))
    return roles, bool(called) or any(isinstance(step, Attend) for step in steps)


def needs_of(shape: BlockShape, program: Program) -> tuple[bool, ...]:
    """Which tensors of a block of that shape train: its weights, the factors of its updates."""
    roles = [role for group in program.groups for role in group.roles]
    scaled = {role for one in program.sublayers for role in one.scaled | one.entries}
    tuned = [(shape.rank(role) > 0, role in scaled) for role in roles]
    own = [need for lora, by in tuned for need in (shape.trained, shape.trained, lora, lora, by)]
    own += [True] * (4 * len(program.bottlenecks))
    for _ in program.mixtures:
        up, down = shape.routed.up > 0, shape.routed.down > 0
        own += [shape.trained, shape.trained, up, up, shape.trained, down, down, *[shape.trained] * 4]
    own += [shape.trained] * len(program.sinks)
    own += [True] * sum(core.called for core in program.called)
    own += [learns for one in program.sublayers for learns in vectors_in(one)]
    return *own, *(shape.trained for norm in program.norms for _ in range(1 if norm.kind == "rms" else 2))
