"""Every operation has one owner: the module that runs, or the one in whose forward the autograd node was
made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from petune.profiling.attribution import OUTSIDE, Attribution


class Scale(nn.Module):
    """An operation of its own, on an input that comes by keyword."""

    def forward(self, *, x: Tensor) -> Tensor:
        return x.exp()


class Pair(nn.Module):
    """`first` is frozen and its input needs no gradient; `second` is called by keyword; `sin` is the model's
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3), Scale()

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        x = self.middle(self.first(x)).sin()
        return checkpoint(self.second, x=x, use_reentrant=False) if again else self.second(x=x)


class Owners(TorchDispatchMode):
    """The owner of each operation that was dispatched, by its name."""

    def __init__(self, attribution: Attribution) -> None:
        super().__init__()
        self.attribution, self.seen = attribution, set[tuple[str, str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add((func._overloadpacket.__name__, *self.attribution.now()))
        return func(*args, **(kwargs or {}))


def owners(model: nn.Module, **how: Any) -> set[tuple[str, str, str]]:
    with Attribution([model]) as attribution, Owners(attribution) as found:
        (model(torch.randn(2, 3), **how).sum() * 2).backward()
    return found.seen


def test_forward_operations_belong_to_the_innermost_module_that_runs():
    seen = owners(Pair())
    assert {
        ("addmm", "forward", "first"),
        ("addmm", "forward", "middle"),
        ("sin", "forward", ""),
        ("exp", "forward", "second"),
    } <= seen
    assert ("sum", "forward", OUTSIDE) in seen


def test_backward_operations_belong_to_the_module_whose_forward_made_the_node():
    seen = owners(Pair())
    assert {path for name, phase, path in seen if (name, phase) == ("mm", "backward")} == {"middle"}
    assert {path for name, phase, path in seen if (name, phase) == ("cos", "backward")} == {""}
    products = {path for name, phase, path in seen if (name, phase) == ("mul", "backward")}
    assert products == {OUTSIDE, "", "second"}  # of the factor 2, of sin and of exp


def test_what_is_computed_again_is_a_phase_of_its_own():
    assert ("exp", "recompute", "second") in owners(Pair(), again=True)
    assert not [one for one in owners(Pair()) if one[1] == "recompute"]


def test_an_exception_leaves_no_module_running():
    model = Pair()
    with Attribution([model]) as attribution:
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 4))
        assert attribution.now() == ("forward", OUTSIDE)


def test_modules_keep_no_hooks():
    model = Pair()
    with Attribution([model]):
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert owners(model)  # the global ones are gone too, or this would count twice
    assert not nn.modules.module._global_forward_pre_hooks and not nn.modules.module._global_forward_hooks
