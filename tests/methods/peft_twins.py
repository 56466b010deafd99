"""A model tuned by petune beside the same one tuned by peft, the oracle: what they compute, how they train,
and the files that go from one to the other and back."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peft
import torch
from torch import Tensor, nn

import petune
from petune.methods import tuned_parameters, tuned_state
from petune.saving.one_tensor import LAYOUTS, to_one_tensor
from petune.saving.peft import to_peft
from tests.methods.zoo import batch, stir, tiny

CLOSE = 1e-5


def read_by_peft(name: str, folder: Path, **changes: Any) -> Any:
    """The model of the zoo tuned by what petune wrote, as peft reads it, to be trained; no key is missing or
    surplus."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(tiny(name, **changes), str(folder), is_trainable=True)
        result = model.load_adapter(str(folder), "default", is_trainable=True)
    strangers = [str(one.message) for one in said if "missing" in str(one.message)]
    assert not strangers and not result.unexpected_keys, (strangers, result.unexpected_keys)
    return model


def parameters_of(theirs: nn.Module) -> dict[str, nn.Parameter]:
    """What trains in peft's model, by the key it has in a file."""
    return {
        key.replace(".default", "")
        .replace(".modules_to_save", "")
        .replace("_vector.weight", "_vector"): value
        for key, value in theirs.named_parameters()
        if value.requires_grad and ".original_module." not in key
    }


def assert_trains_as_peft(
    name: str,
    folder: Path,
    method: str = "lora",
    changes: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> nn.Module:
    """Tune a model of the zoo, its config changed, stirred, and hold it against peft's reading of its files:
    logits, every gradient, three steps of AdamW, and the way back. Returns petune's model, trained."""
    ours = petune.wrap(tiny(name, **changes), method, **settings)
    stir(ours, std=0.1)
    petune.save(ours, folder / "ours")
    theirs, inputs = read_by_peft(name, folder / "ours", **changes), batch(name)
    own, twins = tuned_parameters(ours), parameters_of(theirs)
    state = tuned_state(ours)
    names = {id(value): key for key, value in state.items()}
    to_files = to_one_tensor if method in LAYOUTS else to_peft
    keys = {key: names[id(value)] for key, value in to_files(ours, state, None)[1].items()}
    assert twins.keys() == {key for key in keys if keys[key] in own}
    base = tiny(name, **changes)(**inputs).logits
    found, expected = ours.eval()(**inputs).logits, theirs.eval()(**inputs).logits
    assert_close(found, expected)
    assert float((found - base).detach().abs().max()) > 1e-2, "the tuning must change what is computed"
    assert_steps_agree(ours, theirs, own, {keys[key]: value for key, value in twins.items()}, name)
    theirs.save_pretrained(str(folder / "theirs"))
    again = petune.load(tiny(name, **changes), folder / "theirs")
    state = tuned_state(again)
    assert state.keys() == tuned_state(ours).keys()
    assert all(torch.equal(state[keys[key]], value.detach()) for key, value in twins.items())
    assert_close(again.eval()(**inputs).logits, theirs.eval()(**inputs).logits)
    return ours


def assert_steps_agree(
    ours: nn.Module,
    theirs: nn.Module,
    own: dict[str, nn.Parameter],
    twins: dict[str, nn.Parameter],
    name: str,
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Three steps on the same batch give the same losses, gradients and values. optimizers: of both sides;
    AdamW by default."""
    ours.train(), theirs.train()
    sides = [list(side.values()) for side in (own, twins)]
    optimizers = optimizers or [torch.optim.AdamW(side, lr=1e-3, eps=1e-4) for side in sides]
    start = {key: value.detach().clone() for key, value in own.items()}
    for step in range(3):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(**batch(name)).loss
            loss.backward()
            losses.append(loss.detach())
        assert_close(*losses)
        for key, value in own.items():
            assert value.grad is not None and twins[key].grad is not None, key
            assert_close(value.grad, twins[key].grad, key)
        for optimizer in optimizers:
            optimizer.step()
    for key, value in own.items():
        assert_close(value.detach(), twins[key].detach(), key)
    assert any(not torch.equal(value, start[key]) for key, value in own.items())


def assert_close(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Equal within CLOSE of the largest entry, or of 1."""
    scale = max(1.0, float(expected.detach().abs().max()))
    assert float((found - expected).detach().abs().max()) <= CLOSE * scale, what
