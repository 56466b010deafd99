"""What part of causal attention a rank has by the tokens that it has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from petune.estimate.rank_shares import TokenCost, held_of, share_of
from petune.estimate.workload import WorkPart
from petune.models import FAMILIES
from petune.parallel.plan import Cut, foldable

SP = Cut("sequence", "sequence", "sequence", "gather", (), (), (), (3, 1), (), False)
SCORES = WorkPart("scores", 8, 8, 4, causal=True, folds=True)


@pytest.mark.parametrize(
    ("cut", "part", "share"),
    [
        (SP, SCORES, 1 / 4),
        (SP, replace(SCORES, folds=False), 7 / 16),
        (replace(SP, mlp="heads"), SCORES, 7 / 16),
        (replace(SP, exchange="ring"), SCORES, 7 / 16),
        (replace(SP, exchange="ulysses"), SCORES, 1 / 2),
        (SP, replace(SCORES, causal=False, folds=False), 1 / 4),
    ],
)
def test_scores_follow_tokens_where_ranks_have_them_from_both_ends(
    cut: Cut, part: WorkPart, share: float
) -> None:
    assert share_of(part, cut, 1) == pytest.approx(share)


@pytest.mark.parametrize(
    ("samples", "rows", "shares"),
    [
        (1, 1.0, [1 / 4] * 4),  # nothing to leave out: two pieces
        (1, 2.0, [1 / 8, 3 / 8, 1 / 8, 3 / 8]),
        (1, 1.5, [1 / 8, 3 / 8, 1 / 8, 3 / 8]),
        (2, 1.0, [1 / 8, 3 / 8, 1 / 8, 3 / 8]),
        (1, 3.0, [3 / 16, 11 / 48, 13 / 48, 5 / 16]),
        (1, 4.0, [1 / 4] * 4),
        (2, 4.0, [1 / 4] * 4),
        (0, 2.0, [1 / 4] * 4),
    ],
)
def test_rows_behind_one_another_have_their_dear_tokens_where_they_end(
    samples: int, rows: float, shares: list[float]
) -> None:
    """Pairs counted one by one, of 48 tokens in all on four ranks."""
    cut, part = replace(SP, sequence=(1,) * 4), replace(SCORES, samples=samples)
    found = [share_of(part, cut, index, rows) for index in range(4)]
    if (several := samples * math.ceil(rows)) > 1:
        seen = [token % (48 // several) + 0.5 for token in range(48)]
        counted = [sum(seen[first : first + 12]) / sum(seen) for first in range(0, 48, 12)]
        assert found == pytest.approx(counted)
    assert sum(found) == pytest.approx(1.0)
    assert found == pytest.approx(shares)


def test_a_fast_rank_has_the_tokens_that_balance_rows_behind_one_another() -> None:
    cost = TokenCost(64, (((0.0, 0.0), (0.0, 1.0)),), 2)
    assert cost(0, 32) == cost(32, 64) == 1 / 2
    assert cost(16, 32) == 3 * cost(0, 16) == 3 / 8


@pytest.mark.parametrize(
    ("cut", "own", "done", "held"),
    [
        (SP, True, 1 / 4, 1.0),
        (SP, False, 1.0, 1.0),  # something trains behind the blocks, or kernels are off
        (replace(SP, connection="whole"), True, 1.0, 1.0),
        (replace(SP, vocabulary=(1, 1)), True, 1 / 2, 1 / 2),
    ],
)
def test_a_head_is_that_of_own_tokens_or_of_a_slice(cut: Cut, own: bool, done: float, held: float) -> None:
    head = WorkPart("head", 8, 8, 4, own_tokens=own)
    assert (share_of(head, cut, 1), held_of(head, cut, 1)) == (done, held)


def test_only_stacks_of_causal_attention_alone_have_pieces() -> None:
    found = {
        name: {stack: foldable(rule) for stack, rule in FAMILIES[name].stacks.items()} for name in TABLES
    }
    assert found == TABLES


TABLES = {
    "llama": {"decoder": True},
    "bert": {"encoder": False},
    "bart": {"encoder": False, "decoder": False},
    "t5": {"encoder": False, "decoder": False},
}
