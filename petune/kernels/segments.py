"""Padding left out: a fused stack computes on real tokens alone, one sample after the other, and the model around it sees none of that.

A batch [b, t] is padded (`attention_mask`) or packed (`position_ids` that restart). `FindSegments` reads that off the call of the model
that owns the stack; `Unpadded`, the stack's edges, then carries the tokens across:

    hidden states [b, t, w] -> [1, total, w] -> the blocks, which attend within segments -> [b, t, w], zeros where padding was

Kept tokens get what they would have got in the padded batch; embeddings, pooler and heads are Hugging Face's own and see [b, t]. What a
model leaves at padding, which nothing may read, becomes zero. On the CPU nothing waits; on a CUDA device the host waits once per call, for
the lengths. Stacks that attend across to another one, learn a position bias or fill a cache keep their padding.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.hooks import RemovableHandle

from petune.running import Running, running
from petune.stack import Call, Stack

# Stands in for the attention mask of a call whose segments are known. Hugging Face hands a mask with four dims on as it is, so the
# [b, 1, t, t] that nobody would read is never made; a block that reads it after all raises, as no scores have such a shape.
NO_MASK = torch.empty(0, 0, 0, 0, dtype=torch.bool)


# ------------------------------------------------------------------ what is kept


@dataclass(frozen=True, eq=False)
class Segments:
    """The kept tokens of a batch [b, t], row by row, and which of them attend to each other: those of one segment.

    starts: [segments + 1] int32 on the batch's device, the first kept token of each segment, and the total. lengths: tokens of each
    segment, at least one. places: [total] int64, where each kept token lies in the flattened [b * t], ascending; None where all are kept.
    shape: (b, t).
    """

    starts: Tensor
    lengths: tuple[int, ...]
    places: Tensor | None
    shape: tuple[int, int]

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths, default=0)

    @cached_property
    def total(self) -> int:
        """Tokens kept."""
        return sum(self.lengths)

    @cached_property
    def rows(self) -> Tensor:
        """The row of the batch that each kept token is in, [total] int64: what dropout by index numbers it by, with `tokens`."""
        return self._places // self.shape[1]

    @cached_property
    def tokens(self) -> Tensor:
        """The place of each kept token in its row, padding counted, [total] int64."""
        return self._places % self.shape[1]

    @cached_property
    def by_length(self) -> tuple[Tensor, ...]:
        """For each length that occurs, the kept tokens of its segments, [segments of that length, length] int64."""
        firsts = defaultdict(list)
        for first, length in zip(accumulate(self.lengths, initial=0), self.lengths, strict=False):
            firsts[length].append(first)
        device = self.starts.device
        return tuple(torch.tensor(own, device=device)[:, None] + torch.arange(length, device=device) for length, own in firsts.items())

    @property
    def _places(self) -> Tensor:
        return torch.arange(self.total, device=self.starts.device) if self.places is None else self.places


def from_mask(mask: Tensor) -> Segments | None:
    """One segment for each row with tokens: where `mask` [b, t], of any dtype, is not zero. Padding may be on either side, or between.

    None where nothing is padding.
    """
    kept = mask != 0
    counts = kept.sum(1)
    lengths = counts.tolist()
    if all(length == mask.shape[1] for length in lengths):
        return None
    if 0 in lengths:
        lengths = [length for length in lengths if length]
        counts = counts[_true(counts, len(lengths))]
    starts = F.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return Segments(starts, tuple(lengths), _true(kept.flatten(), sum(lengths)), _shape(mask))


def from_positions(positions: Tensor) -> Segments | None:
    """One segment for each sample of a packed batch, by Hugging Face's rule: `positions` [b, t] that do not go on by one begin a sample.

    None where every row is one sample.
    """
    begins = torch.ones_like(positions, dtype=torch.bool)
    begins[:, 1:] = positions.diff(dim=1) != 1
    firsts = begins.flatten().cpu().nonzero().squeeze(1).tolist()
    if len(firsts) == len(positions):
        return None
    starts = F.pad(_true(begins.flatten(), len(firsts)), (0, 1), value=positions.numel()).to(torch.int32)
    lengths = tuple(end - first for first, end in pairwise([*firsts, positions.numel()]))
    return Segments(starts, lengths, None, _shape(positions))


def _true(values: Tensor, count: int) -> Tensor:
    """Where the `count` entries of `values` [n] that are not zero lie; the device is not asked how many there are."""
    return torch.nonzero_static(values, size=count).squeeze(1)


def _shape(x: Tensor) -> tuple[int, int]:
    return x.shape[0], x.shape[1]


# ------------------------------------------------------------------ across the edge


def pack(x: Tensor, segments: Segments) -> Tensor:
    """The kept tokens of `x` [b, t, ...], or of [1, t, ...] that holds for every row: [1, total, ...]; differentiable."""
    if len(x) != segments.shape[0]:
        return x[0].index_select(0, segments.tokens)[None]
    flat = x.flatten(0, 1)
    return (flat if segments.places is None else _applied(_Pack, flat, segments.places))[None]


def unpack(x: Tensor, segments: Segments) -> Tensor:
    """Kept tokens [1, total, ...] back in their places, [b, t, ...], zeros elsewhere; differentiable."""
    flat, (rows, tokens) = x.flatten(0, 1), segments.shape
    if segments.places is not None:
        flat = _applied(_Unpack, flat, segments.places, rows * tokens)
    return flat.view(rows, tokens, *flat.shape[1:])


def _applied(function: type[Function], *args: Any) -> Tensor:
    return cast("Tensor", cast("Any", function).apply(*args))


class _Pack(Function):
    """x [n, ...] -> x[places]. No place is taken twice, so the gradient is copied, where torch's own would be added up atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.length = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _applied(_Unpack, grad, *ctx.saved_tensors, ctx.length), None


class _Unpack(Function):
    """x [total, ...] -> zeros [length, ...] with x at `places`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(length, *x.shape[1:]).index_copy_(0, places, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _applied(_Pack, grad, *ctx.saved_tensors), None, None


class Unpadded:
    """Edges of a stack (petune.stack.Edges) that leave padding outside, where `running().segments` says what is kept; else they do nothing.

    Inside, every argument of the call that has a row [t] for each row of the batch, or one for all of them, has [1, total] instead,
    `position_embeddings` and `position_ids` among them, and there is no attention mask: blocks have to attend within segments.
    """

    def enter(self, stack: Stack, call: Call) -> tuple[Call, Running]:
        """See petune.stack.Edges."""
        here = replace(running())
        segments: Segments | None = here.segments
        if segments is None:
            return call, here
        assert stack.rule.bias is None and call.get("encoder_hidden_states") is None, "such a stack keeps its padding"
        packed = {name: _packed(value, segments) for name, value in call.items() if name != "attention_mask"}
        return packed | {"attention_mask": None}, here

    def enter_side(self, stack: Stack, call: Call, here: Running) -> Call:
        """See petune.stack.Edges: a ladder's call is made from one that has entered."""
        return call

    def part(self, hidden: Tensor, here: Running) -> Tensor:
        """See petune.stack.Edges."""
        return hidden if here.segments is None else pack(hidden, here.segments)

    def leave(self, hidden: Tensor, here: Running) -> Tensor:
        """See petune.stack.Edges."""
        return hidden if here.segments is None else unpack(hidden, here.segments)


def _packed(value: Any, segments: Segments) -> Any:
    """`value` of a call with its tokens packed, where it has some."""
    if isinstance(value, tuple):
        return tuple(_packed(one, segments) for one in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] in (1, segments.shape[0]) and value.shape[1] == segments.shape[1]:
        return pack(value, segments)
    return value


# ------------------------------------------------------------------ where they are found


class FindSegments:
    """Hooks on the model that makes the masks of a stack (BertModel, LlamaModel, ...): they bind `running().segments` for its call.

    causal: a decoder, which takes restarting `position_ids` for packed samples. As in Hugging Face a mask comes first: with one, positions
    say nothing of samples. These calls are left alone, with no segments and their mask as it was:
    - with a mask that is not [b, t], with nothing to leave out, or longer than the model's sliding window;
    - that go across to an encoder, or read or fill a cache, which for a decoder is the default: pass use_cache=False;
    - of which hidden states or attentions are recorded, as they would be recorded packed;
    - for which `ready`, asked with the owner, says that blocks would not attend within segments at this moment.
    """

    def __init__(self, owner: nn.Module, causal: bool, ready: Callable[[nn.Module], bool] = lambda owner: True) -> None:
        self.causal, self.ready = causal, ready
        parameters = inspect.signature(type(owner).forward).parameters.values()
        self.arguments = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")

    def register(self, owner: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        """Hang both hooks on `owner`; the second acts after an exception too."""
        before = owner.register_forward_pre_hook(self.before, with_kwargs=True)
        return before, owner.register_forward_hook(self.after, always_call=True)

    def before(self, owner: nn.Module, args: Any, kwargs: Call) -> tuple[tuple[()], Call] | None:
        """Bind what the call's mask or positions say, and take the mask away where it is said."""
        call = dict(zip(self.arguments, args, strict=False)) | kwargs
        config = getattr(owner, "config", None)
        found = None if self._left_alone(config, call) or not self.ready(owner) else self._found(call)
        if found is not None and found.shape[1] > (getattr(config, "sliding_window", None) or found.shape[1]):
            found = None
        running().segments = found
        return None if found is None else ((), call | {"attention_mask": NO_MASK})

    def after(self, owner: nn.Module, args: Any, output: Any) -> None:
        """Forget."""
        running().segments = None

    def _left_alone(self, config: Any, call: Call) -> bool:
        """Whether something about the call needs its padding."""
        if call.get("past_key_values") is not None or call.get("encoder_hidden_states") is not None:
            return True
        if any(_asked(config, call, name) for name in ("output_hidden_states", "output_attentions")):
            return True
        # A BERT that is asked to be a decoder is one; encoders ignore a config that speaks of a cache
        return _asked(config, call, "use_cache") if self.causal else bool(getattr(config, "is_decoder", False))

    def _found(self, call: Call) -> Segments | None:
        inputs = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        if inputs is None:
            return None
        (rows, tokens), mask, positions = inputs.shape[:2], call.get("attention_mask"), call.get("position_ids")
        if mask is not None:
            return from_mask(mask.to(inputs.device)) if mask.shape == (rows, tokens) else None
        if self.causal and positions is not None and positions.dim() == 2 and positions.shape[1] == tokens:
            return from_positions(positions.expand(rows, -1))
        return None


def _asked(config: Any, call: Call, name: str) -> bool:
    """Whether the call, or the config where the call says nothing, asks for `name`."""
    given = call.get(name)
    given = getattr(config, name, None) if given is None else given
    return given is not None and given is not False
