"""The time of a training step on a GPU that is not here, as petune's memory policy foretells it.

    PYTHONPATH=. python benchmarks/foretell.py H200 petune:t5-large:lora:16x512:fill=0.4 ...

A CASE is one of benchmarks/shapes.py, which measures it; no weight is drawn. What was measured is beside what
is foretold in tests/benchmarks/test_foretell.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from benchmarks.shapes import Case, base_model, batches, tuned_model
from petune.estimate.fused_forecast import CARDS
from petune.kernels.configs import MemoryConfig
from petune.kernels.fuse import fused_blocks
from petune.kernels.memory.block_cost import rates_of
from petune.kernels.memory.block_step import GIB, BlockStep
from petune.kernels.memory.outside import fixed_bytes, once, vocabulary_of
from petune.kernels.memory.policy import choose
from petune.kernels.memory.policy_hook import kinds_of, rounded, shape_of, typical, usable
from petune.models.stack import Stack


def foretold(case: Case, card: str) -> float:
    """Seconds of a step of `case` on `card`, one of CARDS, for the median of its batches: those of all stacks
    of blocks, for each of which the policy is asked as in a run."""
    (model, sides), seconds = _asked(case), 0.0
    rates, dtype = rates_of(card), torch.bfloat16
    budget, host = (case.budget or CARDS[card] * usable(False)) * GIB, case.host * GIB
    stacks = [one for one in model.modules() if isinstance(one, Stack)]
    for stack, (tokens, longest) in zip(stacks, sides, strict=False):
        first = stack is stacks[0]
        memory = None if first else (sides[0][0] / tokens, sides[0][1])
        specs = [block.spec for block in fused_blocks(stack)]
        step = BlockStep(
            shape_of(typical(specs), dtype, longest, memory),
            len(specs),
            tokens,
            min(longest, tokens),
            vocabulary_of(model) if stack is stacks[-1] else 0,
            rates,
            fixed_bytes(model),
            kinds=kinds_of(specs, dtype, tokens, longest, memory),
            once=once(model, rates) if first else 0.0,
        )
        seconds += choose(step, MemoryConfig(), int(budget), int(host)).seconds
    return seconds


@cache
def _asked(case: Case) -> tuple[nn.Module, list[tuple[int, int]]]:
    """The model without weights, and the sides of the median batch; the same for every card."""
    model = tuned_model(case, base_model(case, "meta", {}), None).train()
    made = sorted(_sides(batch) for batch, _ in batches(case, model.config.vocab_size))
    return model, made[len(made) // 2]


def _sides(batch: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """Tokens, and those of the longest row, that a policy is asked for, of each stack that there may be;
    padding is left out where a mask says so."""
    labels = batch["labels"]
    lengths = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).sum(1)
    found = (int(lengths.sum()), int(lengths.max())), (labels.numel(), labels.shape[-1])
    return [(rounded(tokens), rounded(longest, 128)) for tokens, longest in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Foretell every CASE."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("card", choices=[*CARDS])
    parser.add_argument("cases", nargs="+", metavar="CASE")
    given = parser.parse_args(arguments)
    for text in given.cases:
        seconds = foretold(Case.parse(text), given.card)
        print(f"{text}: {1e3 * seconds:.1f} ms on one {given.card}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
