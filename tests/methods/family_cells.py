"""What every family is tried with on one device: the cells of tests, by which docs/families.md has its
marks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from petune.models.frozen_weight import FORMS
from petune.saving.servers import SERVERS
from tests.methods.more_models import MORE
from tests.methods.zoo import EACH, MOE, ZOO, table


def in_turn(whats: Any, families: Any) -> list[Any]:
    """(what, family): of each family one here, the others in the long part."""
    return [
        pytest.param(what, family, marks=() if (at + turn) % len(whats) == 0 else pytest.mark.long)
        for (turn, family), (at, what) in product(enumerate(families), enumerate(whats))
    ]


def every(number: int, cells: Any) -> list[Any]:
    """Cells, each `number`th of them here, the others in the long part."""
    marked = [getattr(cell, "values", (cell,)) for cell in cells]
    marks = [getattr(cell, "marks", ()) for cell in cells]
    return [
        pytest.param(*own, marks=marks[at] if at % number == 0 else pytest.mark.long)
        for at, own in enumerate(marked)
    ]


QUANTISED = in_turn(FORMS, EACH.values())
# every family, and more models of some
PACKING = [*MORE, *(name for name in EACH.values() if name not in MORE)]
_PACK = [name for name in PACKING if name.endswith("causal") and table(name).packs]
PACKED = [*(name for name in _PACK if name in MORE), *every(3, [name for name in _PACK if name not in MORE])]
MERGED = (*ZOO, *MOE)  # by tests/methods/test_merging.py and test_lora_experts.py
# Of these peft takes a dense MLP's linears for experts': most models of the one have none, all of the other.
ALONE: dict[str, dict[str, Any]] = {"qwen3moe-causal": {"mlp_only_layers": []}}
MISREAD = ("qwen3next-causal",)
EXPORTED = every(4, [name for name in EACH.values() if name not in MISREAD])
SERVED_KINDS = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
WITH_EXPERTS = ("qwen3_moe", "mixtral")  # by vLLM alone
SERVED = [
    *in_turn(SERVERS, [EACH[kind] for kind in SERVED_KINDS]),
    *(pytest.param("vllm", EACH[kind], marks=pytest.mark.long) for kind in WITH_EXPERTS),
]
_UNSERVED = [EACH[kind] for kind in EACH if kind not in (*SERVED_KINDS, *WITH_EXPERTS)]
UNSERVED = every(3, in_turn(SERVERS, _UNSERVED))
