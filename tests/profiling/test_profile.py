"""A profiled step computes what a plain one does; its figures fit together; what cannot be profiled is
refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petune.errors import UsageError
from petune.profiling import profile
from petune.profiling.profile import take_apart
from petune.profiling.repeat_step import Rehearsal
from petune.recipe import load_recipe
from petune.run.evaluate import Batch
from petune.tasks import count
from tests.profiling.conftest import Rehearse
from tests.small_runs import METHODS, settings, training


class Remembering(Rehearsal):
    """Keeps the loss and the gradients of every repetition."""

    def passes(self, micro: list[Batch]) -> float:
        seen: list[tuple[float, dict[str, Tensor]]] = self.__dict__.setdefault("seen", [])
        loss = super().passes(micro)
        seen.append(
            (loss, {name: value.grad.clone() for name, value in self.tuned.items() if value.grad is not None})
        )
        return loss


@pytest.mark.parametrize(
    ("family", "method", "changes"),
    [
        ("llama", "lora", {"accumulate": 1}),
        ("llama", "full", {"gradient_checkpointing": True, "accumulate": 1}),
        ("bert", "adapter", {"class_weights": "balanced"}),
        pytest.param("bart", "lora", {"accumulate": 1}, marks=pytest.mark.long),
        pytest.param("t5", "side", {"accumulate": 1}, marks=pytest.mark.long),
    ],
)
def test_every_repetition_has_the_loss_and_gradients_of_a_plain_step(
    family: str, method: str, changes: dict[str, Any], rehearse: Rehearse, tmp_path: Path
) -> None:
    plain = training(settings(tmp_path, family, method, **changes))
    micro = plain.micro_batches(0)
    plain.model.train()
    loss = plain.runner.backward(
        micro, sum(count(batch, plain.weights) for batch in micro), plain._dropout_key(0)
    )
    rehearsal = rehearse(family, method, Remembering, **changes)
    found = take_apart(rehearsal, steps=1)
    seen = rehearsal.__dict__["seen"]
    assert len(seen) == 2 * 1 + 4
    assert found.loss == loss
    for number, (one, gradients) in enumerate(seen):
        assert one == loss
        assert gradients.keys() == plain.tuned.keys()
        # torch's counter takes composite operations apart: equal but for rounding
        counted = number == 1 + 2 * 1
        for name, value in plain.tuned.items():
            torch.testing.assert_close(
                gradients[name], value.grad, rtol=1e-5 * counted, atol=1e-6 * counted, msg=f"{number} {name}"
            )
    assert all(torch.equal(value, rehearsal.tuned[name]) for name, value in plain.tuned.items())


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "t5"])
def test_the_tree_is_the_model(family: str, rehearse: Rehearse) -> None:
    rehearsal = rehearse(family, METHODS["lora"], accumulate=1)
    found = take_apart(rehearsal, steps=1)
    parts = {part.path: part for part in found.models[0].walk()}
    assert list(parts) == [name for name, _ in rehearsal.runner.model.named_modules()]
    whole = parts[""]
    assert whole.parameters == sum(value.numel() for value in rehearsal.runner.model.parameters())
    assert whole.trained == sum(value.numel() for value in rehearsal.tuned.values())
    assert whole.calls == len(rehearsal.batches()) == 1
    assert whole.forward_s is not None
    assert all(part.forward_s is None or 0 < part.forward_s <= whole.forward_s for part in parts.values())
    assert whole.backward_s > 0
    assert found.rows == 2
    assert found.timing.step == pytest.approx(
        found.timing.batches + found.timing.passes + found.timing.update
    )
    assert (found.communication, found.bubble) == (0, 0)


@pytest.mark.slow
def test_a_profile_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(settings(tmp_path, out="never", accumulate=1))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    before = sorted(tmp_path.rglob("*"))
    profile(recipe, steps=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_plan_needs_its_ranks_and_the_message_says_how_to_start_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"torchrun --nproc-per-node 2 .*parallel=none"):
        profile(load_recipe(settings(tmp_path, parallel="tp")))


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compile=false"):
        profile(load_recipe(settings(tmp_path, compile=True)))
