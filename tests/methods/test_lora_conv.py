"""LoRA beside convolutions against peft: logits, gradients, steps of AdamW, merging, and files both ways."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import petune
from petune.errors import FileError, UsageError
from petune.methods import merge, tuned_state, wrap
from petune.saving.combining import combine

TARGETS = ["first", "second", "head"]
FILE = "adapter_model.safetensors"


class Pictures(nn.Module):
    """Two convolutions, one with stride and padding, one that is not square and has no bias, and a head."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 6, (3, 1), padding="same", bias=False, **changes)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 3, height, width] -> [batch, 4]."""
        found: Tensor = self.head(self.second(self.first(x).relu()).relu().mean((2, 3)))
        return found


def pictures() -> Tensor:
    return torch.randn(5, 3, 9, 8, generator=torch.Generator().manual_seed(1))


def ours() -> Any:
    """Tuned, and away from its start."""
    model = wrap(Pictures(), "lora", r=4, alpha=12, targets=TARGETS, also_train=())
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in tuned_state(model).values():
            value += 0.2 * torch.randn(value.shape, generator=draw)
    return model


def read_by_peft(folder: Path) -> Any:
    """What peft makes of a folder; no key is missing or surplus."""
    model = peft.PeftModel.from_pretrained(Pictures(), str(folder), is_trainable=True)
    result = model.load_adapter(str(folder), "default", is_trainable=True)
    assert not result.unexpected_keys and not [key for key in result.missing_keys if "lora_" in key]
    trained = {key for key, value in model.named_parameters() if value.requires_grad}
    assert {key.replace(".default", "") for key in trained} == set(load_file(folder / FILE))
    return model


def test_a_tuned_convolution_starts_as_its_base_to_the_bit() -> None:
    model = wrap(Pictures(), "lora", r=4, targets=TARGETS, also_train=())
    assert torch.equal(model(pictures()), Pictures()(pictures()))
    bound = 1 / (3 * 3 * 3) ** 0.5
    assert 0.9 * bound < float(model.first.lora_A.detach().abs().max()) <= bound


def test_convolutions_train_as_pefts_do(tmp_path: Path) -> None:
    model = ours()
    petune.save(model, tmp_path / "tuned")
    theirs, x = read_by_peft(tmp_path / "tuned"), pictures()
    own, twins = dict(model.named_parameters()), dict(theirs.base_model.model.named_parameters())
    factors = [f"{name}.{leaf}" for name in TARGETS for leaf in ("lora_A", "lora_B")]
    pairs = [(own[name], twins[f"{name}.default.weight"]) for name in factors]
    steps = [torch.optim.AdamW([pair[at] for pair in pairs], lr=1e-2) for at in (0, 1)]
    for _ in range(3):
        found, expected = model(x), theirs(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        for logits, step in zip((found, expected), steps, strict=True):
            step.zero_grad()
            logits.square().sum().backward()
        for one, other in pairs:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)
        for step in steps:
            step.step()
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_merged_convolution_answers_as_the_tuned_one_and_as_pefts(tmp_path: Path) -> None:
    model, x = ours(), pictures()
    petune.save(model, tmp_path / "tuned")
    expected, theirs = model(x), read_by_peft(tmp_path / "tuned").merge_and_unload()
    merge(model)
    assert type(model.first) is nn.Conv2d
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model.second.weight, theirs.second.weight, rtol=1e-6, atol=1e-6)


def test_what_peft_has_saved_is_read(tmp_path: Path) -> None:
    torch.manual_seed(4)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=TARGETS, init_lora_weights=False)
    theirs = peft.get_peft_model(Pictures(), config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = petune.load(Pictures(), tmp_path / "theirs")
    torch.testing.assert_close(model(pictures()), theirs(pictures()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"groups": 2}, "groups 1"),
        ({"dilation": 2}, r"dilation \(1, 1\)"),
        ({"padding_mode": "reflect"}, "zeros"),
    ],
)
def test_convolutions_that_peft_cannot_merge_are_refused(changes: Any, match: str) -> None:
    model = Pictures(**changes)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=match) as refused:
        wrap(model, "lora", r=4, targets=TARGETS, also_train=())
    assert "second" in str(refused.value) and type(model.first) is nn.Conv2d
    assert model.state_dict().keys() == before.keys()


def test_a_folder_of_pefts_with_such_a_convolution_is_refused_by_its_name(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=TARGETS)
    peft.get_peft_model(Pictures(dilation=2), config).save_pretrained(tmp_path / "theirs")
    with pytest.raises(FileError, match=r"adapter_config.json  second[\s\S]*dilation \(2, 2\)"):
        petune.load(Pictures(dilation=2), tmp_path / "theirs")


@pytest.mark.parametrize(
    ("method", "settings", "match"),
    [("dora", {}, "not Conv2d"), ("lora", {"init": "pissa"}, "a convolution has no components")],
)
def test_what_convolutions_do_not_have_is_refused(method: str, settings: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        wrap(Pictures(), method, r=4, targets=["first"], also_train=(), **settings)


def test_updates_of_convolutions_are_not_combined(tmp_path: Path) -> None:
    for name in ("a", "b"):
        petune.save(ours(), tmp_path / name)
    with pytest.raises(UsageError, match="is a convolution"):
        combine(Pictures(), {tmp_path / "a": 1.0, tmp_path / "b": 1.0})
