"""The finder of stacks and sites on modules made for the purpose; real families are in
tests/models/test_families.py."""

from __future__ import annotations

import pytest
from torch import nn

from petune.errors import UsageError
from petune.models.sites import find_sites
from petune.models.spec import Attention, Family, Mlp, Shape, StackRule, SubLayer, linears, stack_paths


class Block(nn.Module):
    def __init__(self, gated: bool = False, crossing: bool = False) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "out")})
        self.mlp = nn.ModuleDict(
            {name: nn.Linear(4, 4) for name in (("gate", "up", "down") if gated else ("fc", "down"))}
        )
        if crossing:
            self.cross = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("query", "out")})


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(blocks)


ATTENTION = Attention("attn", (linears(q="attn.query"),), "attn.out")
CROSS = Attention("cross", (linears(q="cross.query"),), "cross.out", memory="key_value_states")
MLP = Mlp("mlp", linears(gate="mlp.gate", up="mlp.up|mlp.fc"), "mlp.down")


def family(*cores: Attention | Mlp, blocks: str = "layers") -> Family:
    return Family(
        "toy",
        "decoder",
        {"decoder": StackRule(blocks, tuple(map(SubLayer, cores)))},
        (),
        lambda _: Shape(1, 1, 4, 4, 4),
        lambda _: {},
        lambda config, _: config,
    )


def test_sites_come_in_the_order_of_the_blocks_with_full_names() -> None:
    sites = find_sites(Model(Block(), Block()), family(ATTENTION, MLP))
    names = ["attn.query", "attn.out", "mlp.fc", "mlp.down"]
    assert [site.name for site in sites] == [
        f"body.layers.{index}.{name}" for index in range(2) for name in names
    ]
    assert [site.block for site in sites] == [0] * 4 + [1] * 4
    assert [site.role for site in sites[:4]] == ["q", "o", "up", "down"]
    assert [site.leaves for site in sites[:4]] == [False, True, False, True]


def test_the_first_alternative_that_exists_is_taken_and_a_gate_may_be_absent() -> None:
    sites = find_sites(Model(Block(gated=True)), family(MLP))
    assert [(site.role, site.name.rpartition(".")[2]) for site in sites] == [
        ("gate", "gate"),
        ("up", "up"),
        ("down", "down"),
    ]


def test_cross_attention_may_be_absent_as_a_whole() -> None:
    assert len(find_sites(Model(Block()), family(ATTENTION, CROSS))) == 2
    assert len(find_sites(Model(Block(crossing=True)), family(ATTENTION, CROSS))) == 4


def test_half_a_cross_attention_is_an_error() -> None:
    block = Block(crossing=True)
    del block.cross["out"]
    with pytest.raises(UsageError, match="no module for the module attention leaves by"):
        find_sites(Model(block), family(ATTENTION, CROSS))


def test_one_odd_block_among_many_is_an_error_that_says_which() -> None:
    odd = Block()
    odd.attn["query_"] = odd.attn.pop("query")
    with pytest.raises(UsageError) as caught:
        find_sites(Model(Block(), odd), family(ATTENTION))
    problem = caught.value.problems[0]
    assert problem.where == "body.layers.1"
    assert problem.expected == "attn.query"
    assert "attn.query_" in (problem.found or "")


def test_no_stack_is_an_error_that_lists_the_module_lists() -> None:
    with pytest.raises(UsageError) as caught:
        stack_paths(Model(Block()), family(ATTENTION, blocks="h"))
    assert "no module list named 'h'" in str(caught.value)
    assert "body.layers" in str(caught.value)
    with pytest.raises(UsageError, match="no module list at all"):
        stack_paths(nn.Linear(2, 2), family(ATTENTION))


def test_a_stack_is_found_at_the_root_and_by_whole_path_parts_only() -> None:
    assert stack_paths(Model(Block()).body, family(ATTENTION)) == {"decoder": "layers"}
    other = nn.Module()
    other.sublayers = nn.ModuleList([Block()])
    with pytest.raises(UsageError):
        stack_paths(other, family(ATTENTION))


def test_of_nested_lists_the_outer_one_is_the_stack() -> None:
    block = Block()
    block.layers = nn.ModuleList([nn.Linear(4, 4)])
    assert stack_paths(Model(block), family(ATTENTION)) == {"decoder": "body.layers"}
