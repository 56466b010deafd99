"""The cells of the matrix: the methods, backends and families that are tried together.

CELLS is their whole product, for the long suite. LATIN is the part in the short one: under every backend four
cells, a Latin square of methods and families that turns with the backend, so that every pair of a method, a
backend and a family is there. Where blocks are fused under a backend too, two of its four cells are
(FUSED_SQUARE), which a rung of what is kept goes round, and two are not (SQUARE).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from petune.kernels.configs import MemoryConfig
from petune.parallel.plan import ParallelPlan
from tests.methods.more_models import MORE
from tests.methods.zoo import ADAPTED, FOUR, LADDERED, MOE, SETTINGS, ZOO, table
from tests.parallel.harness import Case
from tests.parallel.plans import BACKENDS, COMPOSED, settings_of

METHODS = tuple(SETTINGS)
CELLS = [(method, backend, name) for name in FOUR for method in METHODS for backend in BACKENDS]
LATIN = [(at, turn, FOUR[(at - turn - 1) % 4]) for turn in range(len(BACKENDS)) for at in range(4)]
KEPT = [
    MemoryConfig("all"),
    MemoryConfig("projections", tile=7),
    MemoryConfig("attention"),
    MemoryConfig("input", tile=5),
]
APART = ("tp", "tp-whole-vocabulary", "galaxy", "galaxy2", "shard")
EXCHANGING = ("sp-gather", "sp-ulysses", "sp-ring", "cut")
STAGED_FUSED = ("pp-1f1b",)  # all its methods are fused in tests/test_matrix.py


def _fused(at: int, turn: int) -> bool:
    """Whether a cell of the square is fused: under each backend two, of every method and family as many."""
    return list(BACKENDS)[turn] in APART + EXCHANGING + STAGED_FUSED and (turn + turn // 4 + at // 2) % 2 == 1


SQUARE = [(METHODS[at], list(BACKENDS)[turn], name) for at, turn, name in LATIN if not _fused(at, turn)]
FUSED_SQUARE = [
    (METHODS[at], list(BACKENDS)[turn], name, (2 * at + 3 * turn) % 4)
    for at, turn, name in LATIN
    if _fused(at, turn) and list(BACKENDS)[turn] not in STAGED_FUSED
]
# One cell for each backend, so that the family and the method go round. How far these two lists turn is
# decided by the long part of tests/test_mutations.py: biases train under tp and galaxy, Llama's positions are
# cut under sp-gather, BERT drops out under galaxy.
ROUND = [(METHODS[(at + at // 4) % 4], backend, FOUR[(at + 1) % 4]) for at, backend in enumerate(BACKENDS)]
# Plans that differ from another in what the square tries with every method: a vocabulary that is whole, a
# connection on all tokens, an order of micro-batches.
TWINS = ("tp-whole-vocabulary", "galaxy2", "pp-gpipe")
SHORT_ROUND = [cell for cell in ROUND if cell[1] not in TWINS]
# Each composition with every family and methods that go round; the short suite has one cell of each, in which
# the families go round too.
COMPOSITIONS = [
    (METHODS[(at + turn // 2) % 4], composed, FOUR[at])
    for at in range(4)
    for turn, composed in enumerate(COMPOSED)
]
ONE_EACH = [
    cell for turn, cell in enumerate(COMPOSITIONS) if turn // len(COMPOSED) == turn % len(COMPOSED) % 4
]
OTHERS = (
    "bert-tokens",
    "bert-mlm",
    "bart-classify",
    "t5-gated",
    "t5-classify",
    "llama-classify",
    "mistral-causal",
    "qwen2-causal",
    "qwen3-causal",
    "qwen3-classify",
    "gemma3-causal",
    "gemma3-classify",
)


# whose embeddings go to every block: see test_matrix
UNSTAGED = ("gemma4e-causal",)


def can_be_cut(name: str, backend: str) -> bool:
    """Whether the blocks of a model can be cut as the backend wants it, by the family's table and its
    config."""
    cut = BACKENDS[backend](name, 2).cut
    if cut is None:
        return name not in UNSTAGED or not backend.startswith("pp")
    own = ZOO[name][2]
    if cut.exchange == "ring" and (own | own.get("decoder", {})).get("attn_logit_softcapping"):
        return False
    if scores_positions(name) and cut.attention == "sequence":
        return False
    if carries_state(name) and cut.connection == "sequence":
        return False
    whole = "heads" not in (cut.attention, cut.mlp)
    return whole or all(rule.uncut is None for rule in table(name).stacks.values())


def scores_positions(name: str) -> bool:
    """Whether its attention scores positions itself, those of all tokens."""
    return any(rule.positions is not None for rule in table(name).stacks.values())


def carries_state(name: str) -> bool:
    """Whether some of its attention carries a state through all tokens of a row."""
    return any(rule.linear is not None for rule in table(name).stacks.values())


def has_sinks(name: str) -> bool:
    """Whether its attention has sinks, which want all keys of a row."""
    return any(
        getattr(one.core, "sinks", None) for rule in table(name).stacks.values() for one in rule.sublayers
    )


def fitting(name: str, turn: int, backend: str) -> str:
    """The method whose turn it is."""
    method = METHODS[turn % len(METHODS)]
    cut = BACKENDS[backend](name, 2).cut
    by_tokens = cut is not None and cut.connection == "sequence"
    unladdered = name not in LADDERED or (by_tokens and scores_positions(name))
    alone = {"adapter": name not in ADAPTED, "side": unladdered}
    return "lora" if alone.get(method) else method


# Families that are a few lines more: one cell where blocks are cut by heads if they can be; of every fourth
# family, and of those that cannot be cut so, one that goes round.
KIN = [
    (fitting(name, at + turn, backend), backend, name)
    for (at, backend), (turn, name) in product(enumerate(BACKENDS), enumerate(MORE))
    if can_be_cut(name, backend)
]
ROUND_KIN = {
    (name, backend)
    for at, name in enumerate(MORE)
    for backend in ("tp", [other for other in BACKENDS if other != "tp"][at % (len(BACKENDS) - 1)])
    if backend == "tp" or at % 4 == 0 or not can_be_cut(name, "tp")
}
SHORT_KIN = [cell for cell in KIN if (cell[2], cell[1]) in ROUND_KIN]


def left(*cells: tuple[str, ...]) -> list[Any]:
    """Cells for the long suite."""
    return [pytest.param(*cell, marks=pytest.mark.long) for cell in cells]


# Experts over ranks: every method on every family of them, in the long part. No ladder where blocks have no
# form without experts, which it would be made of.
SPREAD = [
    (method, name)
    for method, name in product(METHODS, MOE)
    if method != "side" or name not in ("mixtral-causal", "gptoss-causal", "qwen3_5moe-causal")
]
# and every expert over ranks by its columns
BY_COLUMNS = [
    (method, backend, name)
    for (method, name), backend in product(SPREAD, ("tp", "tp-whole-vocabulary", "galaxy"))
    # whose mixers carry a state through all tokens of a row
    if backend != "galaxy" or name not in ("qwen3next-causal", "qwen3_5moe-causal")
]
# every family of experts and every plan once, with the methods in turn; what is cut by columns trains in
# float64 below, too, and quantised
EXPERTS = [
    ("lora", "dp", "gptoss-causal"),
    ("full", "shard", "mixtral-causal"),
    ("side", "pp-1f1b", "qwen3moe-causal"),
    ("lora", "sp-gather", "mixtral-causal"),
    ("adapter", "galaxy2", "qwen2moe-causal"),
    ("adapter", "tp", "gptoss-causal"),
    ("full", "galaxy", "qwen3moe-causal"),
    ("lora", "cut", "mixtral-causal"),
    *left(
        ("lora", "galaxy2", "qwen3moe-causal"),
        ("lora", "tp", "qwen2moe-causal"),
        ("full", "tp", "gptoss-causal"),
        ("lora", "galaxy", "gptoss-causal"),
        ("adapter", "galaxy", "mixtral-causal"),
    ),
]
# and every plan that cuts no expert, the methods in turn
WHOLE = ("dp", "shard", "sp-gather", "sp-ulysses", "sp-ring", "pp-1f1b")
WHOLE_EXPERTS = [
    ("lora" if METHODS[(at + turn) % 4] == "side" else METHODS[(at + turn) % 4], backend, name)
    for (at, backend), (turn, name) in product(enumerate(WHOLE), enumerate(MOE))
    if not (backend.startswith("sp") and (carries_state(name) or has_sinks(name)))
]
# of those with mixers, which no cell above has
SHORT_WHOLE = [cell for cell in WHOLE_EXPERTS if cell[1] == "dp" and carries_state(cell[2])]
SPREAD_FUSED = [
    ("lora", "qwen3moe-causal", 2, 2, "input"),
    ("full", "mixtral-causal", 3, 1, "attention"),
    ("adapter", "qwen2moe-causal", 2, 1, "projections"),
    ("lora", "gptoss-causal", 2, 1, "all"),  # biases, transposed weights
    ("lora", "qwen3next-causal", 2, 1, "input"),  # mixers
    ("full", "qwen3_5moe-causal", 2, 1, "all"),
]


def in_part(cells: list[Any], short: list[Any]) -> list[Any]:
    """The cells as parameters, those that are not in the short suite marked as long."""
    return [pytest.param(*cell, marks=() if cell in short else pytest.mark.long) for cell in cells]


def case(name: str, method: str, plan: ParallelPlan, **changes: object) -> Case:
    """The cell with as many blocks as the plan's stages say."""
    return Case(name, method, plan, settings=settings_of(name, plan), **changes)  # type: ignore[arg-type]


def short_cells(like: Case) -> list[Case]:
    """The cells of the short suite under the backend of `like`: with its dropout and recomputation, or
    without as it is."""
    backends = {name for name, plan in BACKENDS.items() if plan(like.name, 2) == like.plan}
    composed = {name for name, plan in COMPOSED.items() if plan(like.name) == like.plan}
    changes = {"dropout": like.dropout, "recompute": True, "steps": 1} if like.dropout else {"steps": 1}
    found = [
        case(name, method, BACKENDS[backend](name, 2), **changes)
        for method, backend, name in (SHORT_ROUND if like.dropout else SQUARE)
        if backend in backends
    ]
    found += [
        case(name, method, BACKENDS[backend](name, 2), steps=1, dropout=0.1, blocks=KEPT[kept])
        for method, backend, name, kept in FUSED_SQUARE
        if backend in backends
    ]
    return found + [
        case(name, method, COMPOSED[both](name), **changes)
        for method, both, name in ONE_EACH
        if both in composed
    ]
