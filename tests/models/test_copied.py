"""Copies of models, held against those of copy.deepcopy."""

from __future__ import annotations

from collections import OrderedDict
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import petune
from petune.models import family_of
from petune.models.copied import copied
from petune.models.quantise import quantise_blocks
from petune.models.stack import own_stacks
from tests.methods.zoo import SETTINGS, batch, table, tiny


def shape(value: Any, seen: dict[int, int]) -> Any:
    """What a thing consists of, all the way down; what was met before is its number, so that what is one here
    must be one there."""
    if isinstance(value, (bool, int, float, str, type, type(None), torch.dtype, torch.device)):
        return value
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.requires_grad, value.detach().flatten().tolist()
    if isinstance(value, dict):
        return type(value), [(shape(key, seen), shape(part, seen)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape(part, seen) for part in value]
    own = getattr(value, "__dict__", None) if not callable(value) or isinstance(value, nn.Module) else None
    return type(value), shape(own, seen)


@pytest.mark.parametrize(
    ("name", "method"), [("bert-classify", "lora"), ("bart-seq2seq", "adapter"), ("t5-seq2seq", "side")]
)
def test_a_tuned_model_is_copied_as_by_deepcopy_and_shares_nothing(name: str, method: str) -> None:
    """BART and T5 have tied tables; a model with stacks of its own, hooks and a side network refers to
    itself from many places."""
    model = petune.wrap(tiny(name), method=method, **SETTINGS[method])
    own_stacks(model, table(name))
    found, expected = copied(model), deepcopy(model)
    assert shape(vars(found), {}) == shape(vars(expected), {})
    assert type(found) is type(expected)
    assert not {value.data_ptr() for value in model.parameters()} & {
        value.data_ptr() for value in found.parameters()
    }
    assert torch.equal(found(**batch(name)).loss, model(**batch(name)).loss)


def test_a_quantised_base_and_tensors_that_are_named_stay_what_they_are() -> None:
    model = tiny("llama-causal").requires_grad_(False)
    quantise_blocks(model, family_of(model), "int8")
    first = next(model.parameters())
    found = copied(model, {id(first): first})
    assert next(found.parameters()) is first
    for (name, one), other in zip(model.named_parameters(), found.parameters(), strict=True):
        assert type(one) is type(other) and (one is other) == (one is first), name
    assert torch.equal(found(**batch("llama-causal")).logits, model(**batch("llama-causal")).logits)


def test_what_says_how_it_is_copied_is_asked_and_aliases_stay() -> None:
    class Asked(nn.Module):
        def __deepcopy__(self, memo: dict[int, Any]) -> Asked:
            return self

    model = nn.Sequential(nn.Linear(2, 2), Asked(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    empty: list[int] = []
    model[0].told = model[2].told = empty
    model.table = OrderedDict({3: model[0], "x": {"y": model[2]}})
    model.bound = model[0].forward
    found = copied(model)
    assert found[1] is model[1] and found[2].weight is found[0].weight is not model[0].weight
    assert found[0].told is found[2].told is not empty
    assert found.table[3] is found[0] and found.table["x"]["y"] is found[2]
    assert found.bound.__self__ is found[0]
