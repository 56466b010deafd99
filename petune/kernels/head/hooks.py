"""A fused head in Hugging Face's models without a line of theirs changed: hooks make it answer with logits
that are not made.

Those are a tensor of their own (petune.kernels.head.lazy_logits), whose cross-entropy is taken in one step
(petune.kernels.head.linear_cross_entropy).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from petune.kernels.dispatch import Ops
from petune.kernels.head.lazy_logits import Origin, Unmade, unmade
from petune.kernels.head.linear_cross_entropy import IGNORED, linear_cross_entropy
from petune.log import say
from petune.models.behind import output_head
from petune.models.boundary import SharedTokens, VocabularySlice, shared_tokens_of, slice_of
from petune.models.sharded import class_of
from petune.models.tuned_linear import low_rank_of
from petune.models.tuned_parts import LowRank

_FUSION = "petune_fused_head"  # attribute of a model


def _counting(labels: Tensor) -> Callable[[], int]:
    """How many labels on a CUDA device count.

    Asked for before the blocks run, the number has come to the host when the head does: reading it waits, at
    most, for what the device had been given before this forward pass.
    """
    number = torch.empty((), dtype=torch.int64, pin_memory=True).copy_((labels >= 0).sum(), non_blocking=True)
    arrived = torch.cuda.current_stream(labels.device).record_event()

    def read() -> int:
        arrived.synchronize()
        return int(number)

    return read


class _Fusion:
    """The hooks of one model, and whether the running forward pass is to leave its logits unmade."""

    def __init__(self, model: nn.Module, head: nn.Module, ops: Ops) -> None:
        self.head, self.ops = head, ops
        self.signature = inspect.signature(model.forward)
        self.armed = False
        # what `head_loss` has asked for, whatever the arguments: a loss of the logits
        self.asked: Callable[[Tensor], Tensor] | None = None
        self.hidden: Tensor | None = None  # between the hooks of the head
        # how many labels of the running forward pass count, where that is known
        self.trained: Callable[[], int] | None = None
        self.said: set[str] = set()
        self.handles = (
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            # before the hooks that free weights after the forward pass
            model.register_forward_hook(self.after_model, always_call=True, prepend=True),
            # ahead of a slice's own, which would sum the gradient of the hidden states a second time
            head.register_forward_pre_hook(self.before_head, prepend=True),
            head.register_forward_hook(self.after_head),
        )

    @property
    def part(self) -> VocabularySlice | None:
        """The slice of the vocabulary that the head holds; None for all of it."""
        return slice_of(self.head)

    def before_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Logits stay unmade in training with labels, unless the call or the head forbids it."""
        given = self.signature.bind_partial(*args, **kwargs).arguments
        labels, kept = given.get("labels"), given.get("logits_to_keep")
        whole = kept is None or (isinstance(kept, int) and kept == 0)
        asked = self.asked is not None
        if not asked and not (model.training and isinstance(labels, Tensor) and whole):
            return
        if self.part is not None and not torch.is_grad_enabled():  # then its logits are those of all slices
            return
        # nn.DataParallel runs its replicas in threads
        if torch.compiler.is_compiling() or getattr(model, "_is_replica", False):
            return
        if (reason := self.refusal()) is not None:
            if reason not in self.said:
                self.said.add(reason)
                say(f"the head and its loss are not fused: {reason}")
            return
        self.armed = True
        if not asked and labels is not None and labels.is_cuda and kwargs.get("shift_labels") is None:
            self.trained = _counting(labels)

    def after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        """The end of the forward pass, after an error too: a loss that was asked for joins its output."""
        self.armed, self.hidden = False, None
        if self.asked is None:
            self.trained = None
        elif output is not None:
            output["loss"] = self.asked(output.logits)

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        """The head itself sees no row: what it gives then is the dtype and the width of its logits."""
        if not self.armed:
            return None
        (self.hidden,) = args
        return (args[0].flatten(0, -2)[:0],)

    def after_head(self, head: nn.Module, args: tuple[Any, ...], output: Tensor) -> Unmade | None:
        """Unmade logits instead of none."""
        if self.hidden is None:
            return None
        hidden, self.hidden = self.hidden, None
        kind = hidden.device.type
        autocast = partial(
            torch.autocast, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        )

        def make() -> Tensor:
            armed, self.armed = self.armed, False
            try:
                with autocast():
                    logits: Tensor = head(hidden)
            finally:
                self.armed = armed
            return logits

        recorded, linear = torch.is_grad_enabled(), getattr(self.head, "bias", None) is None
        tokens = shared_tokens_of(head) if self.part is None else None
        share = None if tokens is None else tokens.of_call(hidden.shape[:-1].numel())
        loss = partial(self.loss, autocast, share)
        origin = Origin(hidden, loss, self.part is None, recorded, linear=linear)
        return Unmade(origin, output.shape[-1], output.dtype, make)

    @contextmanager
    def asking(self, loss: Callable[[Tensor], Tensor], trained: int | None) -> Iterator[None]:
        """Every forward pass of the block leaves its logits unmade, and makes their `loss` before it ends."""
        self.asked, self.trained = loss, None if trained is None else lambda: trained
        try:
            yield
        finally:
            self.asked, self.trained = None, None

    def refusal(self) -> str | None:
        """Why the head as it is now must run by itself, or None."""
        head, linear = self.head, low_rank_of(self.head)
        if linear is None:
            return f"{type(head).__name__} is neither torch.nn.Linear nor LoRA on one"
        if linear.dropout and head.training:
            return "there is dropout between it and its LoRA factors"
        known = 2 if self.part is None else 4  # these, and those of the slice
        if len(head._forward_hooks) + len(head._forward_pre_hooks) > known:
            return "others have hooks on the head, and would see no logits"
        return None

    def loss(
        self,
        autocast: Callable[[], torch.autocast],
        share: SharedTokens | None,
        hidden: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        softcap: float,
        count: Tensor | None,
        each: bool,
    ) -> Tensor:
        """The cross-entropy of unmade logits, by the head as it is now; of own tokens, where ranks share
        them, and summed."""
        linear = cast("LowRank", low_rank_of(self.head))
        biases = [one for one in (linear.bias, bias) if one is not None]
        trained = None if self.trained is None else self.trained()
        if share is not None:
            hidden, labels = share.part(hidden), share.part(labels)
            trained = None if trained is None else min(trained, len(labels))
        with autocast():
            bias = biases[0] + biases[1] if len(biases) == 2 else next(iter(biases), None)
            low = None if linear.a is None or linear.b is None else (linear.a, linear.b, linear.scale)
            found = linear_cross_entropy(
                hidden,
                linear.weight,
                labels,
                ops=self.ops,
                bias=bias,
                low=low,
                softcap=softcap,
                smoothing=smoothing,
                trained=trained,
                count=count,
                part=self.part,
                each=each,
            )
        return found if share is None else share.total(found)


def fuse_head(model: nn.Module, ops: Ops) -> bool:
    """Make `model(..., labels=...)` of a Hugging Face language model compute its loss without its logits,
    while it trains.

    The loss is Hugging Face's own, its shift of labels, its mean and `num_items_in_batch` included, but
    always in float32 at least. `output.logits` is then `Unmade`: it computes itself if it is looked at. In
    eval mode, without labels or with `logits_to_keep` nothing changes, so `generate` does not either. The
    head may be a linear layer, tied or not, or LoRA on one; any other runs by itself, and a line of the log
    says why. It may hold a slice of the vocabulary: labels are of the whole, logits that are looked at, of
    the slice.

    Returns whether there was a head to fuse. Undone by `unfuse_head`. Tune the model first: a head that
    replaces another later is missed.
    """
    unfuse_head(model)
    head = output_head(model)
    if head is None:
        say(f"the head and its loss are not fused: {class_of(model).__name__} has no head over a vocabulary")
        return False
    weight, rows = getattr(head, "weight", None), getattr(getattr(model, "config", None), "vocab_size", 0)
    if slice_of(head) is None and isinstance(weight, Tensor) and len(weight) < (rows or 0):
        say("the head and its loss are not fused: its logits are made by the table of tokens itself")
        return False
    setattr(model, _FUSION, _Fusion(model, head, ops))
    return True


def unfuse_head(model: nn.Module) -> None:
    """Undo `fuse_head`; nothing where it was not called. Logits that were left unmade can still be made."""
    fusion = model.__dict__.pop(_FUSION, None)
    if fusion is not None:
        for handle in fusion.handles:
            handle.remove()


NamedInputs = Mapping[str, Tensor]  # what a model is called with, by name


def head_loss(
    model: nn.Module,
    batch: NamedInputs,
    ask: Callable[[nn.Module, Any], Any],
    *,
    shift: bool,
    trained: int | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The summed cross-entropy in nats of a batch, a scalar, float32 or wider, by a model that `fuse_head`
    has seen; nothing is waited for.

    It is made before the model's forward pass ends and stands in its output, as hooks around the model
    expect: FSDP's free the head's weight then, and wait for the gradient of what comes out.

    ask: (model, batch) -> the model's outputs, with logits [b, s, v], labels not among what it hands to the
    model. batch: "labels" [b, s] and perhaps "rows" [b], which are negative where a row only fills the batch
    up. shift: the logits of a token are about the next one. trained: how many labels count at most, where the
    host knows; see `linear_cross_entropy`. finish: what makes the loss of the cross-entropies [b, s], 0 where
    a label does not count, in the place of their sum.
    """

    def loss(logits: Tensor) -> Tensor:
        labels = batch["labels"].to(logits.device)
        if "rows" in batch:
            labels = labels.masked_fill((batch["rows"] < 0).to(labels.device)[:, None], IGNORED)
        if shift:
            labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores, gold = wide.flatten(0, 1), labels.flatten()
        if fusion.part is not None and not unmade(scores):
            found = fusion.part.cross_entropy(scores, gold)
        else:
            how = "sum" if finish is None else "none"
            found = F.cross_entropy(scores, gold, ignore_index=IGNORED, reduction=how)
        return found.sum() if finish is None else finish(found.view(labels.shape))

    fusion: _Fusion = getattr(model, _FUSION)
    with fusion.asking(loss, trained):
        return cast("Tensor", ask(model, batch).loss)


def has_fused_head(model: nn.Module) -> bool:
    """Whether `fuse_head` has acted on this model."""
    return _FUSION in model.__dict__
