from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from petune.kernels.block.node import flattened
from petune.kernels.block.spread_steps import Depart, ExpertTraffic
from petune.models.experts import Way
from petune.models.routes import Routes, routes_of
from petune.models.spec import RoutedMlp


class Alone:
    """A rank that has all four experts."""

    def way(self, index: Tensor) -> tuple[Way, Routes]:
        """Tokens stay."""
        routes = routes_of(index.new_zeros(len(index), 1), 1)
        return Way((len(index),), (len(index),), routes.tokens, routes), routes_of(index, 4)

    def there(self, x: Tensor, way: Way) -> Tensor:
        """The same."""
        return x[way.tokens]

    back = there


def test_each_tensor_of_a_way_is_kept_as_one() -> None:
    """One within a tuple of a tuple would be kept without autograd's knowledge."""
    core = RoutedMlp("mlp", "experts", "gate", chosen=2, held=(4,))
    step = Depart("h", 0, 0, None, "index", "share", "mlp", ExpertTraffic.of(core))
    index, values = torch.tensor([[0, 3], [1, 2]]), dict[str, Any]()
    values |= {"index": index, "share": torch.tensor([[0.25, 0.75], [0.5, 0.5]])}
    run: Any = SimpleNamespace(mixtures=[SimpleNamespace(spread=Alone())], grads={})
    step.forward(run, values)
    _, names = flattened({name: values[name] for name in step.gives})
    assert not [one for *_, one in names if not isinstance(one, int | tuple | None)]
    assert not [one for *_, one in names if isinstance(one, tuple) and any(map(torch.is_tensor, one))]
    run.grads[step.share_here] = torch.ones(2, 2)
    step.backward(run, values)
    assert torch.equal(run.grads["share"], torch.ones(2, 2))


def test_traffic_is_that_of_ranks_with_as_many_tokens() -> None:
    core = RoutedMlp("mlp", "experts", "gate", chosen=2, held=(3, 1), index=1)
    assert ExpertTraffic.of(core) == ExpertTraffic(copies=0.5, received=1.0, sent=1.5, ranks=2)
