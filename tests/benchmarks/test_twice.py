"""A device that runs its work twice trains to the same bit, and does run it twice."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.twice import Twice
from petune.kernels.fuse import fuse
from petune.methods import tune, tuned_parameters
from petune.methods.configs import LoraConfig
from petune.models import FAMILIES
from tests.methods import zoo


class Seen(TorchDispatchMode):
    """How often each operation is run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step(twice: bool, fused: bool, drops: float) -> tuple[Tensor, dict[str, Tensor], Tensor, Counter[str]]:
    """The loss of a step, its gradients, a number drawn after it, and what was run."""
    model: Any = zoo.tiny("llama-causal", attention_dropout=drops)
    tune(model, LoraConfig(r=4, dropout=drops))
    zoo.stir(model, std=0.1)
    if fused:
        fuse(model, FAMILIES["llama"], "reference")
    torch.manual_seed(5)
    with Seen() as seen, Twice() if twice else nullcontext():
        loss = model.train()(**zoo.batch("llama-causal")).loss
        loss.backward()
    gradients = {name: value.grad for name, value in tuned_parameters(model).items()}
    return loss, gradients, torch.rand(3), seen.names


@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_the_same_to_the_bit(fused: bool, drops: float) -> None:
    once, again = step(False, fused, drops), step(True, fused, drops)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[2], again[2])
    assert once[1].keys() == again[1].keys()
    assert all(torch.equal(value, again[1][name]) for name, value in once[1].items())
    products = [name for name in once[3] if "mm" in name and "_." not in name and ".out" not in name]
    assert products
    assert all(again[3][name] >= 2 * once[3][name] for name in products)


def test_what_is_written_over_its_inputs_or_drawn_is_done_once() -> None:
    x, ones, out = torch.ones(4, 4), torch.ones(4, 4), torch.empty(4, 4)
    torch.manual_seed(1)
    drawn = torch.rand(2)
    torch.manual_seed(1)
    with Seen() as seen, Twice(3) as twice:
        x.add_(1.0)
        x.addmm_(ones, ones)
        torch.addmm(x, ones, ones, out=x)
        torch.mm(ones, ones, out=out)
        found = torch.rand(2)
    assert torch.equal(found, drawn)
    assert torch.equal(x, torch.full((4, 4), 10.0))
    assert torch.equal(out, torch.full((4, 4), 4.0))
    assert twice.counted == {True: 3}
    beside = {"aten.addmm.default": 4, "aten.addmm_.default": 1, "aten.addmm.out": 1, "aten.mm.out": 3}
    assert seen.names == {"aten.add_.Tensor": 1, "aten.rand.default": 1, **beside}
