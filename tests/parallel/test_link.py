"""Plans whose ranks talk by copy engines, every message, train as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from petune.kernels.configs import MemoryConfig
from petune.parallel.boundary import SequenceBoundary, WholeBoundary
from petune.parallel.copy_engines import CopyEngines
from petune.parallel.launch.lasting import LastingGroup
from petune.parallel.sequence.exchange import GatherExchange, Ring, Ulysses
from tests.parallel import harness
from tests.parallel.cells import case
from tests.parallel.harness import Case, Trace, compare, oracle
from tests.parallel.linked_processes import link_all
from tests.parallel.plans import BACKENDS, overlapping
from tests.pool import run

SAYS = {
    "tp": {"all_reduce"},
    "galaxy": {"gather", "reduce_scatter"},
    "galaxy2": {"gather", "reduce_scatter"},
    "sp-gather": {"gather", "reduce_scatter"},
    "sp-ulysses": {"fetch", "swap"},
}


def _steps(one: Case, limit: float, folder: Path) -> dict[str, Any]:
    link_all(folder)
    said: set[str] = set()
    for name in ("all_reduce", "fetch", "gather", "reduce_scatter", "swap"):
        plain = getattr(CopyEngines, name)

        def noted(*given: Any, name: str = name, plain: Any = plain) -> Any:
            said.add(name)
            return plain(*given)

        setattr(CopyEngines, name, noted)
    return {"trace": harness._steps(one, limit), "said": said}


# what enters a sub-layer of BERT is added to what it gives, as it has no norm of its own
CELLS = [
    *(("llama-causal", backend, overlap) for backend in SAYS for overlap in (False, True)),
    *(("bert-classify", backend, True) for backend in ("tp", "galaxy", "sp-gather")),
]
SHORT = [
    ("llama-causal", "tp", False),
    ("llama-causal", "tp", True),
    ("llama-causal", "galaxy", True),
    ("llama-causal", "galaxy2", False),
    ("llama-causal", "sp-gather", True),
    ("llama-causal", "sp-ulysses", False),
    ("bert-classify", "galaxy", True),
]


@pytest.mark.parametrize(
    ("name", "backend", "overlap"),
    [pytest.param(*cell, marks=() if cell in SHORT else pytest.mark.long) for cell in CELLS],
)
def test_ranks_that_talk_by_copy_engines_train_as_one_process(
    name: str, backend: str, overlap: bool, tmp_path: Path
) -> None:
    plan = (overlapping(backend) if overlap else BACKENDS[backend])(name, 2)
    one = case(
        name,
        "lora",
        plan,
        passes=(4,),
        steps=1,
        dropout=0.1,
        blocks=MemoryConfig("all", offload="none"),
    )
    expected = oracle(one)
    found = run(2, _steps, one, expected.norms[0] / 2, tmp_path, timeout=90)
    compare([Trace(**rank["trace"]) for rank in found], expected, one)
    assert all(rank["said"] == SAYS[backend] for rank in found)


def _recordable() -> list[bool]:
    world = dist.group.WORLD
    assert world is not None
    groups = world, LastingGroup(world)
    made: list[Any] = [kind(group) for kind in (WholeBoundary, SequenceBoundary) for group in groups]
    made += [kind(group, 0) for kind in (GatherExchange, Ulysses, Ring) for group in groups]
    return [one.recordable for one in made]


def test_what_ranks_say_that_may_be_replaced_is_no_part_of_a_recording() -> None:
    """A recording would go on with the connections of the lost one."""
    assert run(2, _recordable) == [[True, False] * 4 + [False] * 2] * 2
