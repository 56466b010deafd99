"""What works behind the last block, held against what the blocks give when it moves."""

from __future__ import annotations

import pytest
import torch

from petune.models import family_of
from petune.models.behind import behind_blocks
from petune.models.stack import own_stacks
from tests.methods.zoo import batch, tiny

FAR = {  # modules by whose tensors it is known, but for heads
    "bert-classify": {"bert.pooler.dense"},
    "t5-classify": {"transformer.decoder.final_layer_norm"},
    "bart-classify": set(),
    "llama-causal": {"model.norm", "lm_head"},
    "bert-mlm": {"cls.predictions", "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"},
    "deberta-classify": {"pooler.dense"},
    "dinov2-classify": {"dinov2.layernorm"},
}


@pytest.mark.parametrize("name", FAR)
def test_what_is_behind_moves_nothing_that_the_last_block_gives(name: str) -> None:
    model = tiny(name)
    behind = behind_blocks(model, family_of(model))
    named = list(model.named_parameters())
    found = {own.rpartition(".")[0] for own, value in named if id(value) in behind}
    assert {one for one in found if not one.startswith(("classif", "score"))} == FAR[name]
    given: list[torch.Tensor] = []
    last = list(own_stacks(model, family_of(model)).values())[-1].blocks[-1]
    last.register_forward_hook(lambda block, args, output: given.append(first(output)))
    model(**batch(name))
    with torch.no_grad():
        for _, value in named:
            if id(value) in behind:
                value += 1.0
    model(**batch(name))
    assert torch.equal(given[0], given[1])


def first(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output
