"""FLOP by module against the formulas of the field, and their sum against torch's counter without modules."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from petune.methods import lora_node
from petune.methods.configs import LoraConfig
from petune.methods.lora import tune
from petune.profiling.attribution import Attribution
from petune.profiling.flops import FORMULAS, FlopCounts, counting
from petune.profiling.profile import take_apart
from petune.profiling.repeat_step import Rehearsal
from tests.profiling.conftest import Rehearse
from tests.small_runs import METHODS, write_model

RANK = 2
LORA = {"name": "lora", "r": RANK}


def counted(rehearsal: Rehearsal) -> FlopCounts:
    """FLOP of one step, by phase and path of the module that runs itself."""
    with Attribution(rehearsal.runner.modules) as attribution, counting(attribution) as found:
        rehearsal.passes(rehearsal.batches())
    return found


def within(counts: FlopCounts, path: str) -> tuple[int, int]:
    """FLOP of a module and all below it, forward and backward."""
    below = {
        key: number for key, number in counts.items() if f"{key[1]}.".startswith(f"{path}." if path else "")
    }
    forward, backward = (
        sum(number for (phase, _), number in below.items() if phase == wanted)
        for wanted in ("forward", "backward")
    )
    return forward, backward


@pytest.fixture
def llama(rehearse: Rehearse, tmp_path: Any) -> Rehearsal:
    """One batch of a Llama without dropout, whose attention is therefore one operation."""
    write_model(tmp_path / "llama", "llama")
    return rehearse("llama", LORA, batch_size=4, accumulate=1)


def expected(rehearsal: Rehearsal) -> dict[str, tuple[int, int]]:
    """FLOP forward and backward by path: 2 N + 2 n + attention, and for a frozen base 2 N + 4 n + 2.5
    attention.

    N are the weights of linears, n those of low-rank factors, times the tokens. Below the first block nothing
    trains, so what reads its input has no gradient to hand on.
    """
    model = cast("Any", rehearsal.runner.model)
    rows, length = rehearsal.batches()[0]["input_ids"].shape
    tokens, config = rows * length, model.config
    attention = (
        4 * rows * config.num_attention_heads * length**2 * (config.hidden_size // config.num_attention_heads)
    )
    found = {"lm_head": (2 * tokens * model.lm_head.weight.numel(),) * 2}
    for index in range(config.num_hidden_layers):
        path = f"model.layers.{index}"
        forward, backward = attention, attention * 5 // 2
        for name, linear in model.get_submodule(path).named_modules():
            if not isinstance(linear, nn.Linear):
                continue
            base, low = (
                2 * tokens * linear.weight.numel(),
                2 * tokens * RANK * (linear.in_features + linear.out_features),
            )
            lowest = index == 0 and name.endswith(("q_proj", "k_proj", "v_proj"))
            forward += base + low
            backward += 2 * low + (-2 * tokens * RANK * linear.in_features if lowest else base)
        found[path] = forward, backward
    return found


def test_llama_with_lora_does_what_the_formula_says_block_by_block(llama: Rehearsal) -> None:
    found, wanted = counted(llama), expected(llama)
    assert {path: within(found, path) for path in wanted} == wanted
    assert within(found, "") == tuple(map(sum, zip(*wanted.values(), strict=True)))


def test_the_backward_pass_of_a_frozen_base_costs_about_one_forward_and_not_two(
    llama: Rehearsal, rehearse: Rehearse
) -> None:
    frozen, full = counted(llama), counted(rehearse("llama", "full", batch_size=4, accumulate=1))
    for linear in ("gate_proj", "down_proj"):
        path = f"model.layers.1.mlp.{linear}"
        weights, both = within(full, path)
        forward, backward = within(frozen, path)
        assert both == 2 * weights
        assert backward == weights + 2 * (forward - weights)


@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_by_token_counts_every_pair_of_its_rows(packed: bool) -> None:
    """As CUDA's kernels are called: [batch, length, heads, d], or tokens of rows of 24 and 8 in one; two
    heads share keys and values."""
    lengths, heads, shared, size = ((24, 8) if packed else (16, 16)), 4, 2, 8
    starts = torch.tensor([0, 24, 32]) if packed else None
    shape = (32,) if packed else (2, 16)
    q, out, grad = (torch.empty(*shape, heads, size, device="meta") for _ in range(3))
    k, v = (torch.empty(*shape, shared, size, device="meta") for _ in range(2))
    lse = torch.empty(2, heads, 24, device="meta")
    longest, pairs = max(lengths), sum(length**2 for length in lengths) * heads * size
    one = FORMULAS[torch.ops.aten._flash_attention_forward](
        q, k, v, starts, starts, longest, longest, 0.0, True, False, out_val=out
    )
    two = FORMULAS[torch.ops.aten._flash_attention_backward](
        *(grad, q, k, v, out, lse, starts, starts, longest, longest, 0.0, True, None, None), out_val=(q, k, v)
    )
    assert (one, two) == (2 * 2 * pairs, 5 * 2 * pairs)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["rounded", "wide"])
def test_a_product_is_counted_whatever_dtype_it_is_summed_in(dtype: torch.dtype | None) -> None:
    x, y, addend = (
        torch.zeros(shape, dtype=torch.bfloat16, device="meta") for shape in ((2, 3), (3, 4), (2, 4))
    )
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        torch.addmm(addend, x, y) if dtype is None else torch.addmm(addend.float(), x, y, dtype)
        torch.mm(x, y) if dtype is None else torch.mm(x, y, out_dtype=dtype)
    assert counter.get_total_flops() == 2 * (2 * 2 * 3 * 4)


def test_a_lora_linear_counts_as_much_a_row_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_node, "_LARGE", 0)
    layer = tune(torch.nn.Linear(6, 5).requires_grad_(False), LoraConfig(r=2))
    counts = []
    for rows in (32, 64):  # which other libraries multiply
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            layer(torch.zeros(rows, 6, requires_grad=True)).sum().backward()
        counts.append(counter.get_total_flops() / rows)
    assert counts == [2 * (2 * 6 * 5 + 3 * 2 * (6 + 5))] * 2


def test_attention_by_head_counts_every_query_head_though_keys_have_fewer() -> None:
    query, key = (2, 4, 16, 8), (2, 2, 24, 8)
    for form in ("flash_attention", "cudnn_attention"):
        ahead = FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{form}")]
        back = FORMULAS[getattr(torch.ops.aten, f"_scaled_dot_product_{form}_backward")]
        assert ahead(query, key, key) == 2 * 2 * (2 * 4 * 16 * 24 * 8)
        assert back(query, query, key, key) == 5 * 2 * (2 * 4 * 16 * 24 * 8)


@pytest.mark.parametrize(("family", "method"), [("bert", "adapter"), ("t5", "side")])
def test_modules_and_what_is_outside_of_them_sum_to_the_whole(
    family: str, method: str, rehearse: Rehearse
) -> None:
    rehearsal = rehearse(family, method, accumulate=1)
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as whole:
        rehearsal.passes(rehearsal.batches())
    found = take_apart(rehearsal, steps=1)
    assert sum(map(found.flop, ("forward", "backward", "recompute"))) == whole.get_total_flops() > 0
    for part in found.models[0].walk():
        assert part.backward >= sum(child.backward for child in part.parts)
        assert (part.forward > 0) >= (part.backward > 0)


@pytest.mark.parametrize(
    "family", ["llama", "t5", *(pytest.param(name, marks=pytest.mark.long) for name in ("bert", "bart"))]
)
def test_recomputation_is_counted_apart_and_changes_nothing_else(family: str, rehearse: Rehearse) -> None:
    counts = [
        counted(rehearse(family, METHODS["lora"], gradient_checkpointing=again, out=str(again), accumulate=1))
        for again in (False, True)
    ]
    kept, recomputed = (
        {key: number for key, number in one.items() if key[0] != "recompute" and number} for one in counts
    )
    assert kept == recomputed
    assert not any(phase == "recompute" for phase, _ in counts[0])
    again = {path: number for (phase, path), number in counts[1].items() if phase == "recompute"}
    assert again and all(number <= counts[1]["forward", path] for path, number in again.items())
