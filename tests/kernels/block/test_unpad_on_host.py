"""Segments of a batch that came from the CPU are found there: the device is asked for nothing, and they are
what it would have said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from petune.kernels.block.unpad import FindSegments
from petune.kernels.block.varlen import Segments, from_mask, from_positions
from petune.rng.context import bound, running, twins
from tests.methods.zoo import VOCAB, tiny

MASKS = {
    "right": [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]],
    "left": [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1]],
}
PACKED = [[0, 1, 2, 3, 0, 1], [0, 1, 2, 3, 4, 5], [0, 0, 1, 0, 1, 2]]
META = torch.device("meta")  # stands for a device: it has shapes, and whoever asks it for a value fails


class Unread(TorchDispatchMode):
    """Nothing is computed from these tensors."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = {id(value): name for name, value in values.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            assert id(value) not in self.kept, f"{self.kept[id(value)]} is read by {func}"
        return func(*args, **(kwargs or {}))


def found(
    name: str, batch: Mapping[str, Tensor], host: Mapping[str, Tensor], **settings: Any
) -> tuple[Segments | None, FindSegments]:
    """The segments of a call of the zoo's model `name` with this batch, of which the CPU has `host`; only the
    hooks run."""
    model = tiny(name)
    finder = FindSegments(model, model.base_model, not name.startswith("bert"), **settings)
    with bound(host=twins(batch, host)), torch.no_grad():
        finder.before_model(model, (), dict(batch))
        given = {key: value for key, value in batch.items() if key != "labels"} | {"use_cache": False}
        finder.before(model.base_model, (), given)
        segments: Segments | None = running().segments
    return segments, finder


def inputs(side: str) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {"input_ids": torch.randint(3, VOCAB, (3, 6)), "attention_mask": torch.tensor(MASKS[side])}


def on_device(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to(META) for name, value in batch.items()}


def places(segments: Segments) -> list[int] | None:
    """Where the kept tokens lie, of segments on the CPU."""
    return None if segments.places is None else segments.places.tolist()


@pytest.mark.parametrize("name", ["bert-tokens", "llama-causal", "llama-classify"])
def test_segments_are_found_without_reading_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = inputs("right")
    if name == "llama-classify":  # pools the last token that is not the pad token
        batch["input_ids"] *= batch["attention_mask"]
    else:
        batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    expected, _ = found(name, batch, {})
    assert expected is not None
    sent: list[Segments] = []
    to = Segments.to

    def sending(self: Segments, device: torch.device) -> Segments:
        sent.append(self)
        return to(self, device)

    monkeypatch.setattr(Segments, "to", sending)
    device = on_device(batch)
    with Unread(device):
        segments, _ = found(name, device, batch)
    assert segments is not None
    assert segments.starts.device == META and segments.places is not None and segments.places.device == META
    assert (segments.lengths, segments.shape) == (expected.lengths, expected.shape)
    assert segments.starts.dtype == expected.starts.dtype and segments.places.dtype == torch.int64
    assert sent[-1].starts.tolist() == expected.starts.tolist() and places(sent[-1]) == places(expected)


def test_packed_samples_are_found_without_reading_the_device() -> None:
    batch = {"input_ids": torch.ones(3, 6, dtype=torch.int64), "position_ids": torch.tensor(PACKED)}
    device = on_device(batch)
    with Unread(device):
        segments, _ = found("llama-causal", device, batch)
    expected = from_positions(batch["position_ids"])
    assert segments is not None and expected is not None
    assert segments.lengths == expected.lengths and segments.starts.device == META


def test_the_mask_of_an_encoder_is_remembered_by_the_one_on_the_device() -> None:
    batch = inputs("right")
    device = on_device(batch)
    segments, finder = found("bert-tokens", device, batch, feeds=True)
    hidden = torch.empty(3, 6, 8, device=META)
    call = {"encoder_attention_mask": device["attention_mask"], "encoder_hidden_states": hidden}
    assert finder.said_of(call) is segments
    finder.last = None
    with bound(host=twins(device, batch)), Unread(device):
        again = finder.said_of(call)
    assert isinstance(again, Segments) and segments is not None
    assert again.lengths == segments.lengths and again.starts.device == META


@pytest.mark.parametrize("missing", ["attention_mask", "labels"])
def test_the_device_is_read_where_the_host_lacks_something(missing: str) -> None:
    batch = inputs("right")
    batch["labels"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"] % 3, -100)
    device = on_device(batch)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        found("bert-tokens", device, {name: value for name, value in batch.items() if name != missing})


def test_padding_that_has_to_be_computed_is_seen_on_the_host() -> None:
    batch = inputs("left")
    device = on_device(batch)
    with Unread(device):
        segments, finder = found("bert-tokens", device, batch, feeds=True)
    assert segments is None and finder.last is not None and "before or between" in str(finder.last[2])


def test_segments_stay_where_they_are() -> None:
    segments = from_mask(torch.tensor(MASKS["right"]))
    assert isinstance(segments, Segments)
    assert segments.to(torch.device("cpu")) is segments
