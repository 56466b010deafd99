"""What a training step is made of: operations and time by module, memory by what holds it, the operations
that take longest.

`profile` repeats the first step of a recipe, each time under one instrument, and writes nothing but the trace
it is asked for.

    repeat_step.py   the first step, again and again, at a learning rate of zero
    latency.py       phases of a step, forward of modules
    attribution.py   which module an operation belongs to, forward and backward
    flops.py         floating-point operations
    operations.py    torch's profiler: self times, time of collectives, the trace
    memory.py        bytes by what holds them
    profile.py       all of it, as a tree of modules
"""

from __future__ import annotations

from petune.profiling.memory import MemoryUse
from petune.profiling.operations import Operation
from petune.profiling.profile import Profile, ProfiledModule, profile

__all__ = ["MemoryUse", "Operation", "Profile", "ProfiledModule", "profile"]
