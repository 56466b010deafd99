"""Embedding, output head and cross-entropy cut by vocabulary over the tp axis (Shoeybi et al. 2019,
arXiv:1909.08053, section 3).

Each rank holds the rows [first, first + count) of the token table and of the head. An embedding looks up its
own rows, gives zeros for the others, and the ranks' results are summed. The head's input is copied (its
gradient summed), and its output is

    with gradients      this rank's logits [..., count]: take the loss of them with `vocabulary_losses`, never
                        with a plain cross-entropy
    under no_grad       whole logits [..., vocabulary], gathered, so that scoring and generation need not know

A fused head makes its loss without them (petune.kernels.head), by the slice of the vocabulary that hooking
puts on it. A table tied to several modules is cut once and stays tied. `cut_vocabulary` only narrows, so it
runs on meta tensors; `hook_vocabulary` then hooks what is there, of a pipeline's stage too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from petune.errors import DistributedError
from petune.models.behind import output_head
from petune.models.boundary import put_slice
from petune.models.spec import TensorSplit
from petune.models.transition import applied
from petune.models.tuned_linear import TunedLinear, TunedModule
from petune.parallel.collectives import (
    COPY,
    MaybeGroup,
    Sizes,
    all_max_,
    all_sum_,
    alone,
    copy,
    gather_dim,
    reduce,
)
from petune.parallel.plan import Cut, in_grains
from petune.parallel.tensor.shard_params import Placed, Slice, splits_of

BIAS = "final_logits_bias"  # BART adds this buffer [1, vocabulary] to what its head gives
# attribute of an embedding or a head that is cut by vocabulary: the number of its first row
FIRST_ROW = "first_row"


# ---------------------------------------------------------------- narrowing


def refusal(model: nn.Module) -> str | None:
    """Why this model's vocabulary cannot be cut, or None where it can. Works on meta tensors, on a tuned
    model too."""
    tables = _tables(model)
    if not tables:
        return "the model has no table of tokens"
    head = _head(model)
    rows = {table.weight.shape[0] for table in tables} | (
        {cast("Tensor", head.weight).shape[0]} if head is not None else set()
    )
    if len(rows) > 1:
        return f"its token tables and its head differ in rows: {', '.join(map(str, sorted(rows)))}"
    for table in tables:
        if isinstance(table, TunedModule):
            return "an embedding is tuned beside its table, by factors that every rank needs whole"
        if table.max_norm is not None or table.scale_grad_by_freq or table.sparse:
            return "an embedding with max_norm, scale_grad_by_freq or sparse gradients must see every token"
    if head is not None and type(head) is not nn.Linear and not isinstance(head, TunedLinear):
        return f"its head is a {type(head).__name__}, neither torch.nn.Linear itself nor a TunedLinear"
    return None


def rows_of_ranks(model: nn.Module, cut: Cut | None) -> Sizes:
    """Rows of table and head that each rank of `cut` holds; empty where they are whole, by the plan or by
    `refusal`."""
    if cut is None or not cut.vocabulary or refusal(model) is not None:
        return ()
    return in_grains(cast("Any", model).get_input_embeddings().weight.shape[0], cut.vocabulary)


def has_cut_head(model: nn.Module) -> bool:
    """Whether `model` holds a head cut by vocabulary: with gradients on, its logits are this rank's."""
    return any(
        hasattr(module, FIRST_ROW) and not isinstance(module, nn.Embedding) for module in model.modules()
    )


def cut_vocabulary(model: nn.Module, sizes: Sizes, index: int) -> Placed:
    """Narrow every token table and the head of `model`, of which there is no `refusal`, to the rows of rank
    `index`, in place; `sizes` are the rows of each rank."""
    tables, head = _tables(model), _head(model)
    splits: dict[int, TensorSplit] = {id(table.weight): 0 for table in tables}
    if head is not None:
        declared = splits_of(head, "column", "the head")
        splits |= {id(value): declared[name] for name, value in head.named_parameters()}
    placed = Placed()
    for name, value in model.named_parameters(remove_duplicate=False):
        if id(value) in splits:
            if splits[id(value)] is None:  # whole, but seen through this rank's logits only
                placed.partial.add(name)
            else:
                placed.slices[name] = Slice(0, sizes)
    _narrow(model, {key for key, split in splits.items() if split == 0}, sizes, index)
    for module in (*tables, *([head] if head is not None else [])):
        _mark(module, sizes, index)
    return placed


def _tables(model: nn.Module) -> list[nn.Embedding]:
    """Every embedding of tokens: of the model, its encoder and decoder, and whatever is tied to one."""
    ask = (getattr(model, name, None) for name in ("get_encoder", "get_decoder"))
    owners = [model, *(part() for part in ask if callable(part))]
    found = [owner.get_input_embeddings() for owner in owners if hasattr(owner, "get_input_embeddings")]
    weights = {id(table.weight) for table in found if isinstance(table, nn.Embedding)}
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    return [table for table in tables if id(table.weight) in weights]


def _head(model: nn.Module) -> nn.Module | None:
    """The linear that makes logits of the vocabulary; None for a classifier."""
    head = output_head(model)
    return head if isinstance(getattr(head, "weight", None), Tensor) else None


def _narrow(model: nn.Module, wanted: set[int], sizes: Sizes, index: int) -> None:
    """Replace each parameter of `wanted` by its own rows, once, wherever it is held."""
    parts: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for leaf, value in list(module._parameters.items()):
            if value is not None and id(value) in wanted:
                if id(value) not in parts:
                    part = value.detach().narrow(0, sum(sizes[:index]), sizes[index]).clone()
                    parts[id(value)] = nn.Parameter(part, requires_grad=value.requires_grad)
                module._parameters[leaf] = parts[id(value)]


def _mark(module: nn.Module, sizes: Sizes, index: int) -> None:
    """Tell the module what it has become."""
    first = sum(sizes[:index])
    setattr(module, FIRST_ROW, first)
    if not isinstance(module, nn.Embedding):
        cast("nn.Linear", module).out_features = sizes[index]
        return
    module.num_embeddings = sizes[index]
    if module.padding_idx is not None:  # its row gets no gradient, on the rank that has it
        module.padding_idx = (
            module.padding_idx - first if first <= module.padding_idx < first + sizes[index] else None
        )


# ---------------------------------------------------------------- hooks


def hook_vocabulary(model: nn.Module, sizes: Sizes, group: dist.ProcessGroup | None, index: int) -> None:
    """Hook the communication onto what `cut_vocabulary` has cut in `model` or its stage."""
    for module in model.modules():
        if hasattr(module, FIRST_ROW):
            hook: VocabularyRows | Logits = (VocabularyRows if isinstance(module, nn.Embedding) else Logits)(
                sizes, group, index
            )
            module.register_forward_pre_hook(hook.before)
            module.register_forward_hook(hook.after)
            if isinstance(hook, Logits):
                put_slice(module, hook)
    if BIAS in model._buffers and has_cut_head(model):
        bias = Bias(sizes, group, index)
        model.register_forward_pre_hook(bias.before)
        model.register_forward_hook(bias.after, always_call=True)


@dataclass
class _Hook:
    """A hook of rank `index`. Copies share the group; pickling loses it, and then a call raises."""

    sizes: Sizes
    group: MaybeGroup
    index: int

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # before and after find the one copy
        memo[id(self)] = found = type(self)(self.sizes, self.group, self.index)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "group": None, "index": self.index}

    @property
    def first(self) -> int:
        """The number of this rank's first row."""
        return sum(self.sizes[: self.index])

    def talk(self) -> MaybeGroup:
        """The group. Raises DistributedError where it is lost."""
        if self.group is None and len(self.sizes) > 1:
            what = "this layer cannot reach the other parts of its vocabulary"
            raise DistributedError(what, expected=f"{len(self.sizes)} ranks", found="1")
        return self.group


class VocabularyRows(_Hook):
    """Hooks on an embedding that holds some of the rows: any ids [...] -> vectors [..., width], the same on
    all ranks."""

    others: Tensor | None = None  # between before and after

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Number ids from this rank's first row; the other ranks' ids look up any row. An id of no rank stays
        out of range, and fails."""
        if not args:
            raise RuntimeError("an embedding cut by vocabulary was called without ids")
        ids = args[0]
        known = (ids >= 0) & (ids < sum(self.sizes))
        self.others = known & ((ids < self.first) | (ids >= self.first + self.sizes[self.index]))
        return ((ids - self.first).masked_fill(self.others, 0), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Zeros for the other ranks' ids, and the sum over ranks."""
        assert self.others is not None
        others, self.others = self.others, None
        return reduce(output.masked_fill(others.unsqueeze(-1), 0), self.talk())


class Logits(_Hook):
    """Hooks on a head that holds some of the rows: hidden states, the same on all ranks -> logits, see the
    top of this file. Also the head's petune.models.boundary.VocabularySlice."""

    @property
    def whole(self) -> int:
        return sum(self.sizes)

    @property
    def widest(self) -> int:
        return max(self.sizes)

    def gather(self, x: Tensor) -> Tensor:
        return gather_dim(x[None], (1,) * len(self.sizes), 0, self.talk())

    def enter_backward(self, dx: Tensor) -> Tensor:
        return dx if alone(self.talk()) else COPY.back(dx, self.talk(), own=True)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_losses(logits, labels, self.talk(), self.first)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Copy the hidden states: every rank's logits add to their gradient."""
        if not args:
            raise RuntimeError("a head cut by vocabulary was called without hidden states")
        return (copy(args[0], self.talk()), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """Own logits in training, whole ones where nothing is differentiated."""
        if torch.is_grad_enabled():
            return output
        return gather_dim(output, self.sizes, output.dim() - 1, self.talk())


class Bias(_Hook):
    """Hooks on a model that adds a bias to its head's logits: in training this rank's part of it."""

    whole: Tensor | None = None  # between before and after

    def before(self, model: nn.Module, args: Any) -> None:
        """Narrow the bias for a pass with gradients."""
        if torch.is_grad_enabled():
            self.whole = model._buffers[BIAS]
            assert self.whole is not None
            model._buffers[BIAS] = self.whole.narrow(-1, self.first, self.sizes[self.index])

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        """Put the whole bias back, after an error too."""
        if self.whole is not None:
            model._buffers[BIAS], self.whole = self.whole, None


# ---------------------------------------------------------------- loss


def vocabulary_losses(logits: Tensor, labels: Tensor, group: dist.ProcessGroup | None, first: int) -> Tensor:
    """The cross-entropy in nats of each row of logits that are cut by vocabulary: the same [n], float32 or
    wider, on every rank.

    logits: this rank's [n, count], for the rows of the vocabulary from `first` on. labels: [n] in the whole
    vocabulary, the same on all ranks; negative ones count nothing. A label that no rank has makes its loss
    NaN, on all ranks alike. The gradient of `logits` is exact for this rank's part and needs no sum.
    """
    return applied(_CrossEntropy, logits, labels, group, first)


class _CrossEntropy(Function):
    """max_i + log sum_v exp(x_iv - max_i) - x_i,label_i of each row, max and sums over all ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: MaybeGroup, first: int) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest = wide.amax(-1)
        all_max_([highest], group)
        shifted = wide - highest.unsqueeze(-1)
        own = (labels >= first) & (labels < first + wide.shape[-1])
        at = (labels - first).masked_fill(~own, 0).unsqueeze(-1)
        target = shifted.gather(-1, at).squeeze(-1).masked_fill(~own, 0)
        weights = shifted.exp_()
        total, holders = weights.sum(-1), own.to(wide.dtype)
        all_sum_([total, target, holders], group)
        counts = labels >= 0
        loss = (total.log() - target).masked_fill(holders != 1, torch.nan)
        ctx.save_for_backward(weights.div_(total.unsqueeze(-1)), at, own, counts)
        ctx.dtype = logits.dtype
        return loss.masked_fill(~counts, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # grad: [n]
        softmax, at, own, counts = ctx.saved_tensors
        scale = counts.to(softmax.dtype) * grad
        found = softmax * scale.unsqueeze(-1)
        found.scatter_add_(-1, at, (-scale * own).unsqueeze(-1))
        return found.to(ctx.dtype), None, None, None
