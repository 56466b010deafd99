"""A device that runs its work twice trains to the same bit, and does run it twice."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.twice import OVER, Twice
from petune.kernels.dispatch import triton_ops
from petune.kernels.fuse import fuse
from petune.kernels.head.linear_cross_entropy import IGNORED
from petune.kernels.memory.adamw import AdamWStep
from petune.kernels.triton.adamw import _adamw, adamw_
from petune.methods import tune, tuned_parameters
from petune.methods.configs import LoraConfig
from petune.models import FAMILIES
from petune.rng.dropout import Drop
from tests.methods import zoo


class Seen(TorchDispatchMode):
    """How often each operation is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Step:
    """A step of a tiny decoder: its loss, its gradients, a number drawn after it, what was asked for, and
    what ran again."""

    def __init__(self, times: int, kernels: str | None, drops: float) -> None:
        model: Any = zoo.tiny("llama-causal", attention_dropout=drops)
        tune(model, LoraConfig(r=4, dropout=drops))
        zoo.stir(model, std=0.1)
        if kernels is not None:
            fuse(model, FAMILIES["llama"], kernels)  # type: ignore[arg-type]  # a name of those
        torch.manual_seed(5)
        with Seen() as seen, Twice(times) if times > 1 else nullcontext() as twice:
            self.loss = model.train()(**zoo.batch("llama-causal")).loss
            self.loss.backward()
        self.gradients = {name: value.grad for name, value in tuned_parameters(model).items()}
        self.drawn, self.asked = torch.rand(3), seen.names
        self.again = Counter[str]() if twice is None else twice.counted

    def same(self, other: Step) -> bool:
        """To the bit."""
        alike = torch.equal(self.loss, other.loss) and torch.equal(self.drawn, other.drawn)
        pairs = ((value, other.gradients[name]) for name, value in self.gradients.items())
        return alike and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize("kernels", [None, "reference"])
def test_a_step_is_the_same_to_the_bit(kernels: str | None, drops: float) -> None:
    once, again = Step(1, kernels, drops), Step(2, kernels, drops)
    assert once.same(again)
    assert once.asked == again.asked
    products = [name for name in once.asked if "mm" in name]
    assert products
    assert all(again.again[name] == once.asked[name] for name in products)
    sums = sum(again.again.values())
    assert sums > 0.3 * sum(once.asked.values())  # the others are views, what is drawn, or in place


def test_kernels_of_triton_run_again_and_over_tensors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, kind = Counter[str](), type(_adamw)  # compiled, or interpreted
    run = kind.run

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    monkeypatch.setattr(kind, "run", counted)
    once = written_over()
    with Twice(3) as twice:
        again = written_over()
    assert all(torch.equal(*pair) for pair in zip(once, again, strict=True))
    assert set(launched) == {*OVER, "_forward"} <= set(twice.counted)
    assert set(launched.values()) == {4}, "once, and three times"


def written_over() -> list[Tensor]:
    """What every kernel that writes over an input makes of it, and one that does not."""
    ops = triton_ops()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    value = torch.arange(16.0, device=device).view(4, 4) / 16
    how = Drop(torch.arange(4, device=device), 7, 0.5, 0)
    qkv = ops.rope_(value.clone(), value[:, :2], value[:, 2:], 2)
    logits = value.clone()
    losses, logs = ops.cross_entropy_(logits, torch.tensor([1, 2, 3, IGNORED], device=device))
    dx = ops.add_dropped_low_(value.clone(), value[:, :2], value[:2], [2], [how])
    states = [value.clone() for _ in range(3)]
    adamw_(states[0], value, *states[1:], AdamWStep(0.1, (0.9, 0.99), 1e-8, 0.1, 1), (1, 2, 3, 4))
    return [qkv, logits, losses, logs, dx, *states, *ops.rms_norm(value, value[0], 1e-6)[:2]]


def test_a_number_to_the_power_of_a_tensor_on_its_device() -> None:
    """Torch wraps the number in a tensor there, in its own C++."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with Twice(2) as twice:
        found = 2.0 ** torch.arange(3.0, device=device)
    assert found.tolist() == [1.0, 2.0, 4.0]
    assert twice.counted["aten.pow.Scalar"] == 1


def test_products_written_over_their_inputs_run_beside_and_what_is_drawn_once() -> None:
    x, ones, out = torch.ones(4, 4), torch.ones(4, 4), torch.empty(4, 4)
    torch.manual_seed(1)
    drawn = torch.rand(2)
    torch.manual_seed(1)
    with Twice(3) as twice:
        x.add_(1.0)
        x.addmm_(ones, ones)
        torch.addmm(x, ones, ones, out=x)
        torch.mm(ones, ones, out=out)
        halved = x.bfloat16() * 0.1
        torch.ops.mkldnn._linear_pointwise(ones, ones, None, "none", [], "")
        found = torch.rand(2)
        assert not torch._C._len_torch_dispatch_stack(), "under a mode no stack would be recorded"
    assert torch.equal(found, drawn)
    assert torch.equal(x, torch.full((4, 4), 10.0))
    assert torch.equal(out, torch.full((4, 4), 4.0))
    assert torch.equal(halved, torch.full((4, 4), 10.0).bfloat16() * 0.1)
    of_torch = {f"aten.{name}" for name in ("addmm_.default", "addmm.out", "mm.out", "mul.Tensor")}
    assert twice.counted == dict.fromkeys(of_torch | {"mkldnn._linear_pointwise.default"}, 1)
    torch.mm(ones, ones)
    assert twice.counted.total() == 5, "what is done outside is done once"
