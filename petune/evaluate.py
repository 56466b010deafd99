"""Scoring a model on held-out rows, and the control every classifier is held against: a head trained on the frozen backbone alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from petune.errors import TrainingFault
from petune.tasks import Example, Scorer, collate, loss_sum

Batch = dict[str, Tensor]
Autocast = Callable[[], AbstractContextManager[Any]]


def batches(
    examples: Sequence[Example], size: int, task: str, pad_token_id: int, padding_side: str, packed: bool = False
) -> Iterator[Batch]:
    """Padded batches of `size` examples, in order; tensors on the CPU."""
    for start in range(0, len(examples), size):
        yield collate(examples[start : start + size], task, pad_token_id, padding_side, packed)


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Logits in the model's output dtype: [batch, seq, vocab], or [batch, classes]. Labels never reach the model's own loss."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        if batch["labels"].dim() == 2:
            inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])  # type: ignore[operator]
        inputs["use_cache"] = False  # type: ignore[assignment]
    elif getattr(config, "model_type", "") != "bert":
        inputs["use_cache"] = False  # type: ignore[assignment]
    logits = model(**inputs).logits
    assert isinstance(logits, Tensor)
    return logits


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


@torch.no_grad()
def evaluate(
    model: nn.Module, rows: Iterable[Batch], task: str, device: torch.device, autocast: Autocast, check: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The task's metrics over `rows`, with the model in eval mode and put back afterwards. `check` runs before each batch and may raise.

    Raises TrainingFault when the loss is not finite.
    """
    was_training = model.training
    model.eval()
    try:
        scorer = Scorer(task)
        for batch in rows:
            check()
            batch = to_device(batch, device)
            with autocast():
                logits = forward(model, batch)
            total, number = loss_sum(logits, batch, task)
            scorer.add(logits, batch["labels"], total, number)
        scores = scorer.result()
    finally:
        model.train(was_training)
    if not all(value == value and abs(value) != float("inf") for value in scores.values()):
        raise TrainingFault("a score of the evaluation is not finite", found=str(scores))
    return scores


def head_only(
    model: nn.Module,
    head_name: str,
    train: Sequence[Example],
    held_out: Sequence[Example],
    batcher: Callable[[Sequence[Example]], Iterable[Batch]],
    device: torch.device,
    check: Callable[[], None],
    *,
    seed: int,
    autocast: Autocast,
    weights: Tensor | None = None,
    epochs: int = 30,
    lr: float = 1e-2,
) -> float:
    """Accuracy of a head trained to convergence on the frozen model's features: what tuning has to beat.

    The features are what enters the head, computed once in eval mode. A head applied to every token is trained on the token the model
    pools, the last one that is not padding. The head starts from the model's own (new) head and trains with AdamW and cosine decay,
    under the run's class weights.
    """
    inputs, labels = _features(model, head_name, batcher(train), device, check, autocast)
    tests, wanted = _features(model, head_name, batcher(held_out), device, check, autocast)
    weights = None if weights is None else weights.to(inputs.dtype)
    head = copy.deepcopy(model.get_submodule(head_name)).to(device).float().train()
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.01)
    generator = torch.Generator().manual_seed(seed)
    steps = epochs * -(-len(labels) // 32)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(seed)
        for parameter in head.parameters():
            parameter.requires_grad_(True)
        for _ in range(epochs):
            for picked in torch.randperm(len(labels), generator=generator).split(32):
                optimizer.zero_grad()
                nn.functional.cross_entropy(head(inputs[picked]), labels[picked], weight=weights).backward()
                optimizer.step()
                schedule.step()
    with torch.no_grad():
        return float((head.eval()(tests).argmax(-1) == wanted).float().mean())


@torch.no_grad()
def _features(
    model: nn.Module, head_name: str, rows: Iterable[Batch], device: torch.device, check: Callable[[], None], autocast: Autocast
) -> tuple[Tensor, Tensor]:
    """What enters the head [rows, width] in float32, and the labels [rows]."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        kept.append(args[0].float())

    features, labels = [], []
    handle = model.get_submodule(head_name).register_forward_pre_hook(keep)
    was_training = model.training
    model.eval()
    try:
        for batch in rows:
            check()
            batch = to_device(batch, device)
            with autocast():
                forward(model, batch)
            entering = kept.pop()
            if entering.dim() == 3:
                last = batch["attention_mask"].long().cumsum(-1).argmax(-1)
                entering = entering[torch.arange(len(entering), device=device), last]
            features.append(entering)
            labels.append(batch["labels"])
    finally:
        handle.remove()
        model.train(was_training)
    return torch.cat(features), torch.cat(labels)
