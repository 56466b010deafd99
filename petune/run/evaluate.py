"""Scoring a model on held-out rows, the control every classifier is held against, and what is to be said of a
run that is no success.

The control is a head trained on the frozen backbone alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from petune.errors import RecipeError, TrainingFault
from petune.models import family_of
from petune.models.port import takes_a_cache
from petune.parallel import Batch, Outputs
from petune.recipe import Recipe
from petune.rng.context import chosen, on_host
from petune.tasks import METRICS, Example, Scorer, Task, collate
from petune.tasks.embed_loss import EmbeddingScorer
from petune.tasks.examples import MASKED
from petune.tasks.metrics import Scores
from petune.tasks.prefer_loss import JudgementScorer, PreferenceScorer
from petune.tasks.rerank_loss import JUDGED, LISTED, RankingScorer


def batches(
    examples: Sequence[Example],
    size: int,
    task: str,
    pad_token_id: int,
    shortest: int = 1,
    packed: bool = False,
) -> Iterator[Batch]:
    """Padded batches of `size` examples, in order, none shorter than `shortest` tokens; tensors on the
    CPU."""
    for start in range(0, len(examples), size):
        yield collate(examples[start : start + size], task, pad_token_id, packed=packed, shortest=shortest)


BESIDE = ("labels", "rows", "reference", "good")  # of a batch, what no model reads


def outputs_of(model: nn.Module, batch: Batch) -> Outputs:
    """What the model answers, its logits in its output dtype: [batch, seq, vocab], or [batch, classes]."""
    outputs: Any = model(**inputs_of(model, batch))
    if not hasattr(outputs, "logits"):  # a model without a head, for embeddings
        outputs.logits = outputs.last_hidden_state
    return cast("Outputs", outputs)


def inputs_of(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The arguments by which a model is asked about a batch. Labels never reach its own loss."""
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name not in BESIDE}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and batch["labels"].dim() == 2:
        inputs["decoder_input_ids"] = _read_while_writing(model, batch["labels"])
    family = family_of(model)
    # a cache would let packed samples see one another
    if family is None or (family.caches and takes_a_cache(model)):
        inputs["use_cache"] = False
    return inputs


def _read_while_writing(model: nn.Module, labels: Tensor) -> Tensor:
    """What a decoder reads to write these labels [rows, tokens]: each token one place later."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is not None:
        return cast("Tensor", shift(labels=labels))
    config = cast("Any", model).config  # Whisper, whose classes shift labels themselves, for their own loss
    read = labels.roll(1, -1).masked_fill(labels.roll(1, -1) == MASKED, config.pad_token_id)
    read[:, 0] = config.decoder_start_token_id
    return read


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """The logits of `outputs_of`."""
    return outputs_of(model, batch).logits


def real_rows(logits: Tensor, batch: Batch) -> tuple[Tensor, Batch]:
    """Logits and batch without the rows that only fill it up, which have the number -1."""
    rows = batch.get("rows")
    if rows is None or bool((kept := on_host(rows) >= 0).all()):
        return logits, batch
    logits, *real = chosen(kept, logits, *batch.values())
    return logits, dict(zip(batch, real, strict=True))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


class Metric(NamedTuple):
    """What says which state of a run is the best."""

    name: str
    larger_is_better: bool


def metric_of(recipe: Recipe, task: Task, row: Example) -> Metric:
    """The metric that a recipe names, or its task's own for rows like this one. Raises RecipeError for one
    that they do not have."""
    usual, better = task.metric, METRICS[task.name]
    known: Sequence[str] = tuple(better)
    if task.name == "rerank":
        known = LISTED if row.others else JUDGED
        usual = known[0]
    name = recipe.metric or usual
    if name not in known:
        rows = f" for rows of {len(row.texts)} text{'s' * bool(row.others)}" if task.name == "rerank" else ""
        what, expected = f"task {task.name} has no metric {name!r}{rows}", ", ".join(known)
        raise RecipeError(what, where=recipe.where("metric"), expected=expected)
    return Metric(name, (better[name] if recipe.direction == "auto" else recipe.direction) == "max")


Ask = Callable[[Batch], Tensor | None]  # logits of a batch; None in a process that only passes them on


SumOverAll = Callable[[Any], Any]  # numbers summed over all processes


def scorer_of(recipe: Recipe, task: Task, labels: Sequence[str] = (), rows: Sequence[Example] = ()) -> Scores:
    """A scorer of a recipe's task that has seen none of `rows`. `labels` are the classes or tags in the order
    of their ids, none for other tasks."""
    if task.name == "rerank":
        return RankingScorer(recipe.rerank, len(rows[0].texts))
    if task.name == "embed":
        size = recipe.eval_batch_size or recipe.batch_size
        return EmbeddingScorer(recipe.embed, len(rows), len(rows[0].texts), size)
    if task.name == "prefer" and recipe.prefer.loss == "kto":
        return JudgementScorer(recipe.prefer, len(rows), recipe.eval_batch_size or recipe.batch_size)
    return PreferenceScorer(recipe.prefer) if task.name == "prefer" else Scorer(task.name, labels)


def answered(
    ask: Ask, rows: Iterable[Batch | None], check: Callable[[], None]
) -> Iterator[tuple[Tensor, Batch]]:
    """The logits of each batch, with the batch beside them, without rows that count for nothing. `check` runs
    before each batch and may raise; None is a batch this process has no part in."""
    for batch in rows:
        check()
        logits = None if batch is None else ask(batch)
        if batch is not None and logits is not None:
            yield real_rows(logits, to_device(batch, logits.device))


def scored(
    ask: Ask,
    rows: Iterable[Batch | None],
    scorer: Scores,
    add: SumOverAll = lambda numbers: numbers,
    check: Callable[[], None] = lambda: None,
) -> Scores:
    """What `scorer` is when it has seen all `rows`, which are asked as by `answered`. Raises TrainingFault
    when a score is not finite."""
    for logits, batch in answered(ask, rows, check):
        scorer.look(logits, batch)
    whole = scorer.whole(add(scorer.numbers()))
    scores = whole.result()
    if not all(value == value and abs(value) != float("inf") for value in scores.values()):
        what, remedy = "a score of the evaluation is not finite", "lower lr, or set dtype: fp32"
        raise TrainingFault(what, found=str(scores), remedy=remedy)
    return whole


def asking(
    model: nn.Module, device: torch.device, autocast: Callable[[], AbstractContextManager[Any]]
) -> Ask:
    """Logits of a model that is whole in this process."""

    @torch.no_grad()
    def ask(batch: Batch) -> Tensor:
        with autocast():
            return forward(model, to_device(batch, device))

    return ask


@contextmanager
def scoring(*models: nn.Module) -> Iterator[None]:
    """Eval mode, and back to what it was."""
    before = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, training in zip(models, before, strict=True):
            model.train(training)


FEW_ROWS = 20  # of fewer held-out rows, a score that counts rows can differ by one or two by chance


def undecided(summary: Mapping[str, Any]) -> list[str]:
    """Why the held-out rows of a summary cannot show a difference to the untouched base, in one line; nothing
    where they can."""
    metric, rows = str(summary["metric"]), summary.get("held_out")
    before, after = summary["before"][metric], summary["after"][metric]
    number = "" if rows is None else f"{rows:,} row{'s' * (rows != 1)} "
    if _by_chance(summary, before, after):
        return [
            f"{number}held out cannot show a difference ({metric} {before:.4f} -> {after:.4f}); some hundreds"
            " are wanted"
        ]
    if before == after == 1 and _counts(summary):
        return [
            f"the untouched base is right already ({metric} 1.0000): the {number}held out cannot show a"
            " difference; take harder ones"
        ]
    return []


def _counts(summary: Mapping[str, Any]) -> bool:
    """Whether the score of a summary counts what is right, and is no mean over tokens like the loss."""
    return summary["metric"] not in ("loss", "perplexity", "margin")


def _by_chance(summary: Mapping[str, Any], one: float, other: float) -> bool:
    """Whether two scores that count differ by less than two of the few held-out rows there are."""
    rows = summary.get("held_out") or FEW_ROWS
    return _counts(summary) and rows < FEW_ROWS and abs(one - other) * rows < 1.5


def shortcomings(summary: Mapping[str, Any]) -> list[str]:
    """Why the run of a summary is no success, one line each with the numbers and what to do; nothing where it
    is one.

    It diverged where the training loss ended above its start and the held-out loss above the untouched
    base's: the first alone may be the noise of one batch, the second overfitting. A score equal to the base's
    is no better, unless the rows are `undecided`; the control must be better to be named.
    """
    metric, before, after = str(summary["metric"]), summary["before"], summary["after"]
    (first, last), at_end, rate = summary["loss"], summary.get("last") or after, summary.get("lr")
    direction = summary.get("direction") or METRICS[summary["task"]][metric]
    lower = "lower lr" if rate is None else f"lower lr (it was {rate:g})"
    lines = []
    diverged = last > first and at_end["loss"] > before["loss"]
    if diverged:
        lines.append(
            f"training diverged: loss {first:.4f} -> {last:.4f}, held out {before['loss']:.4f} ->"
            f" {at_end['loss']:.4f}; {lower} or raise warmup"
        )
    worse = after[metric] <= before[metric] if direction == "max" else after[metric] >= before[metric]
    if worse and not undecided(summary):
        remedy = (
            lower
            if diverged
            else "try another lr, more epochs or more data, and look at the rows with petune data"
        )
        lines.append(
            f"no better than the untouched base: {metric} {before[metric]:.4f} -> {after[metric]:.4f}, held"
            f" out; {remedy}"
        )
    control = summary.get("head_only")
    if (
        control is not None
        and control > after["accuracy"]
        and not _by_chance(summary, control, after["accuracy"])
    ):
        remedy = "try another lr, more epochs or more data"
        lines.append(
            f"a head alone on the frozen base does better: accuracy {control:.4f}, tuned"
            f" {after['accuracy']:.4f}; {remedy}"
        )
    return lines


def head_only(
    model: nn.Module,
    head_name: str,
    sides: tuple[Iterable[Batch], Iterable[Batch]],
    ask: Ask,
    check: Callable[[], None],
    *,
    seed: int,
    weights: Tensor | None = None,
    epochs: int = 30,
) -> float | None:
    """Accuracy of a linear head trained on the frozen model's features: what tuning has to beat.

    Two kinds of features are tried and the better result counts, which favours the control: what enters the
    model's own head (its pooled token), and the mean of the last hidden states over the tokens. Both are
    computed once in eval mode and standardised. `sides` are the rows to train on and the held-out ones. AdamW
    at 1e-2 with cosine decay, batches of 32, under the run's class weights. None in a process that sees no
    logits.
    """
    trained, held_out = (_features(model, head_name, rows, ask, check) for rows in sides)
    if not trained:
        return None
    labels, wanted = trained.pop("labels"), held_out.pop("labels")
    with (
        torch.random.fork_rng(devices=[labels.device] if labels.device.type == "cuda" else []),
        torch.enable_grad(),
    ):
        torch.manual_seed(seed)
        return max(
            _fit_linear(trained[kind], labels, held_out[kind], wanted, weights, epochs) for kind in trained
        )


def _fit_linear(
    inputs: Tensor, labels: Tensor, tests: Tensor, wanted: Tensor, weights: Tensor | None, epochs: int
) -> float:
    """Held-out accuracy of one linear layer on standardised features [rows, width]."""
    mean, spread = inputs.mean(0), inputs.std(0) + 1e-6
    inputs, tests = (inputs - mean) / spread, (tests - mean) / spread
    classes = int(labels.max()) + 1
    head = nn.Linear(inputs.shape[1], classes).to(inputs.device)
    weights = None if weights is None else weights[:classes].to(inputs.dtype)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(labels) // 32))
    for _ in range(epochs):
        for picked in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(inputs[picked]), labels[picked], weight=weights).backward()
            optimizer.step()
            schedule.step()
    return float((head(tests).argmax(-1) == wanted).float().mean())


@torch.no_grad()
def _features(
    model: nn.Module, head_name: str, rows: Iterable[Batch], ask: Ask, check: Callable[[], None]
) -> dict[str, Tensor]:
    """Features by kind, [rows, width] in float32, and "labels" [rows]. A head that sees every token is asked
    for the last one alone."""
    seen: dict[str, list[Tensor]] = {}  # of one batch, which may go through in several pieces

    def keep_pooled(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.setdefault("pooled", []).append(args[0])

    def keep_tokens(module: nn.Module, args: Any, output: Any) -> None:
        seen.setdefault("mean", []).append(output.last_hidden_state)

    backbone = getattr(model, "base_model", model)
    handles = [
        model.get_submodule(head_name).register_forward_pre_hook(keep_pooled),
        backbone.register_forward_hook(keep_tokens),
    ]
    found: dict[str, list[Tensor]] = {}
    try:
        for batch in rows:
            check()
            seen.clear()
            logits = ask(batch)
            if logits is None:
                continue
            batch = to_device(batch, logits.device)
            # rows that fill up a piece come last
            features = {kind: torch.cat(parts)[: len(batch["labels"])] for kind, parts in seen.items()}
            every = features["mean"].new_ones(features["mean"].shape[:2])  # as pictures have no padding
            mask = batch.get("attention_mask", every)
            if features["pooled"].dim() == 3:
                last = mask.long().cumsum(-1).argmax(-1)
                features["pooled"] = features["pooled"][torch.arange(len(last), device=last.device), last]
            tokens = features.pop("mean")
            if tokens.shape[:2] == mask.shape:
                features["mean"] = (tokens.float() * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            for kind, value in (*features.items(), ("labels", batch["labels"])):
                found.setdefault(kind, []).append(value.float() if kind != "labels" else value)
    finally:
        for handle in handles:
            handle.remove()
    return {kind: torch.cat(values) for kind, values in found.items()}
