"""Padding left out: a fused stack computes on real tokens alone, one sample after the other, and the model
around it sees none of that.

A batch [b, t] is padded (`attention_mask`) or packed (`position_ids` that restart). `FindSegments` reads that
off the calls of the model and of its part that owns the stack; `Unpadded`, the stack's edges, then carries
the tokens across:

    hidden states [b, t, w] -> [1, total, w] -> the blocks, which attend within segments -> [b, t, w], zeros
    where padding was

Kept tokens get what they would have got in the padded batch; embeddings, pooler and heads are Hugging Face's
own and see [b, t]. Zeros must not be read, so padding is left out only behind the last token of a row, and
only where a head of transformers' own is known not to read it: see `FindSegments`. A decoder that attends
across to an encoder sees the encoder's kept tokens alone, [1, kept, w]; stacks that fill a cache keep their
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from petune.kernels.block.edges import Unpadded
from petune.kernels.block.hooks import flattened, least, ready
from petune.kernels.block.layout import MEMORY, NO_MASK
from petune.kernels.block.module import FusedBlock
from petune.kernels.block.varlen import Segments, each_row, from_mask, from_positions
from petune.kernels.head.linear_cross_entropy import IGNORED
from petune.log import say
from petune.models.port import ends_alone, names_of
from petune.models.sharded import class_of
from petune.models.spec import Family, StackName, stack_paths
from petune.models.stack import Arguments, Stack
from petune.rng.context import on_host, running

# ------------------------------------------------------------------ where they are found


def owner_of(model: nn.Module, family: Family) -> nn.Module:
    """The model that makes masks and positions and holds the stacks: of one stack the innermost around it."""
    base, (path, *others) = getattr(model, "base_model", model), stack_paths(model, family).values()
    while path and not others:
        path = path.rpartition(".")[0]
        if isinstance(inner := model.get_submodule(path), PreTrainedModel):
            return inner
    return cast("nn.Module", base)


def leave_padding_out(
    model: nn.Module, owner: nn.Module, family: Family, stacks: Mapping[StackName, Stack]
) -> list[RemovableHandle]:
    """Compute on real tokens alone in those of `stacks` that are fused, unless something in one must see
    where padding was; the hooks that this takes.

    owner: the model that makes masks and positions and holds the stacks.
    """
    found: FindSegments | None = None
    hooks: list[RemovableHandle] = []
    if family.reads == "image":  # all pictures of a batch are of one size
        return hooks
    fused = [block for stack in stacks.values() for block in stack.modules() if isinstance(block, FusedBlock)]
    reasons = [block.spec.padded for block in fused]
    reasons += ["tokens meet between its blocks" for stack in stacks.values() if _meets(owner, stack)]
    if reason := next((reason for reason in reasons if reason), None):
        say(f"kernels: padding, where there is any, is computed too: {reason}")
        for block in fused:
            block.spec.pairs = True
        return hooks
    for name, stack in stacks.items():
        done = any(isinstance(edges, Unpadded) for edges in stack.edges)
        if done or not isinstance(stack.blocks[0], FusedBlock):
            continue
        if family.kind == "encoder-decoder":  # whose stacks each have a module that makes their masks
            if name == "decoder" and "encoder" not in stacks:  # a stage before this one has it
                encoder = cast("Any", model).get_encoder()
                found = FindSegments(model, encoder, False, lambda owner: False, feeds=True)
                hooks += found.register(model, encoder)
            owner = next(module for module in model.modules() if stack in module.children())
        path = next(path for path, module in owner.named_modules() if module is stack)
        feeds = name == "encoder" and "decoder" in stacks
        asked = partial(ready, path), partial(flattened, path), partial(least, path)
        given = (model, owner, stack.rule.causal, *asked)
        counted, packs, hides = stack.rule.counted, family.packs, stack.rule.hides
        whole = stack.rule.positions is not None
        found = FindSegments(
            *given, feeds=feeds, encoder=found, counted=counted, packs=packs, hides=hides, whole=whole
        )
        hooks += found.register(model, owner)
        stack.edges.insert(0, Unpadded())
        for block in fused if whole and found.unknown is not None else ():  # whose calls have masks
            block.spec.pairs = True
    return hooks


def _meets(owner: nn.Module, stack: Stack) -> bool:
    """Whether something between two blocks reads tokens beside a token."""
    return stack.rule.between is not None and bool(getattr(owner.config, stack.rule.between, 0))


class FindSegments:
    """Hooks on a model and on its owner of a stack, which makes the masks (BertModel, LlamaModel, ...): they
    bind `running().segments`.

    feeds: an encoder whose hidden states a decoder alone reads, through the same mask. encoder: of such a
    decoder, the finder of its encoder.
    counted: the owner counts positions along the mask. packs: its masks tell samples apart by positions.
    hides: without a mask the owner makes one of the tokens that are no `pad_token_id`, which is read here as
    if it were given; not of an encoder that `feeds`, whose reader sees all its places then.
    causal: a decoder, which takes restarting `position_ids` for packed samples. As in Hugging Face a mask
    comes first: with one, positions say nothing of samples. Where there is nothing to leave out, a call has
    neither segments nor a mask, unless rows are longer than the model's sliding window: they are segments
    too, as the dense mask that says the window would cost more than attention within it. These calls are left
    alone, with no segments and their mask as it was:
    - with a mask that is not [b, t];
    - that read or fill a cache, which for a decoder is the default: pass use_cache=False;
    - whose last blocks compute some tokens alone (Gemma 4's, of those whose logits are asked for);
    - that go across to an encoder, unless the encoder's own finder is given, by whom `running().memory` is
      found;
    - of which hidden states or attentions are recorded, as they would be recorded packed;
    - for which `ready`, asked with the owner, says that blocks would not attend within segments at this
      moment;
    - with fewer tokens than `least`, asked so too.
    Where `flattened`, asked so too, says so, whole rows beside those of an encoder are segments as well.
    whole: all whole rows are, as attention that scores positions has no other sign that nothing is masked;
    the mask stays, as its model's embeddings read it, and is taken away where the stack begins.

    Padding is also computed, which is said once, where it may be read:
    - before or between the tokens of a row: a pooler reads the first place, and the loss of a token the place
      before it;
    - where a label stands on padding, or the token that such a classifier pools, the last that is not
      `pad_token_id`, is masked;
    - by heads over all tokens of a row (question answering), by a model without a head, by one that is not
      transformers' own, and by who calls the owner itself.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: nn.Module,
        causal: bool,
        ready: Callable[[nn.Module], bool] = lambda owner: True,
        flattened: Callable[[nn.Module], bool] = lambda owner: False,
        least: Callable[[nn.Module], int] = lambda owner: 1,
        *,
        feeds: bool = False,
        encoder: FindSegments | None = None,
        counted: bool = False,
        packs: bool = True,
        hides: bool = False,
        whole: bool = False,
    ) -> None:
        self.causal, self.ready, self.flattened, self.least = causal, ready, flattened, least
        self.feeds, self.encoder, self.counted, self.packs = feeds, encoder, counted, packs
        self.hides, self.whole = hides, whole
        # what was said of a mask, by its version
        self.last: tuple[Tensor, int, Segments | str | None] | None = None
        self.arguments, self.around = names_of(type(owner)), names_of(type(model))
        self.unknown = _unknown(model, owner)
        ends = (causal or (hides and not feeds)) and self.unknown is None
        self.pools = ends and cast("Any", model).get_output_embeddings() is None
        self.asked: Arguments | None = None  # the running call of the model around the owner
        self.said: set[str] = set()

    def register(self, model: nn.Module, owner: nn.Module) -> tuple[RemovableHandle, ...]:
        """Hang the hooks on both; those behind a call act after an exception too."""
        return (
            model.register_forward_pre_hook(self.before_model, with_kwargs=True),
            owner.register_forward_pre_hook(self.before, with_kwargs=True),
            owner.register_forward_hook(self.after, always_call=True),
            model.register_forward_hook(self.after_model, always_call=True),
        )

    def before_model(self, model: nn.Module, args: Any, kwargs: Arguments) -> None:
        """Remember the call: its labels say what will be read."""
        self.asked = dict(zip(self.around, args, strict=False)) | kwargs

    def after_model(self, model: nn.Module, args: Any, output: Any) -> None:
        """Forget it."""
        self.asked = None

    def before(self, owner: nn.Module, args: Any, kwargs: Arguments) -> tuple[tuple[()], Arguments] | None:
        """Bind what the call's mask or positions say, and take the mask away where it is said."""
        call = dict(zip(self.arguments, args, strict=False)) | kwargs
        config = getattr(owner, "config", None)
        alone = self._left_alone(config, call) or not self.ready(owner)
        known = None if alone else self._both(config, call)
        if known is not None and known[0] is not None and known[0].total < self.least(owner):
            known = None
        if known is not None and call.get(MEMORY) is not None and self.flattened(owner):
            known = known[0] or each_row(_read(call)), known[1] or each_row(call[MEMORY])
        if known is not None and self.whole:
            known = known[0] or each_row(_read(call)), None
        running().segments, running().memory = (None, None) if known is None else known
        if known is None:
            return None
        across = call.get(MEMORY) is not None and "encoder_attention_mask" in self.arguments
        masks = dict.fromkeys(["attention_mask"] + ["encoder_attention_mask"] * across, NO_MASK)
        if self.whole:  # who has no mask looks for padding, for which the host waits
            given, read = call.get("attention_mask"), _read(call)
            masks = {"attention_mask": read.new_ones(read.shape[:2]) if given is None else given}
        return (), call | self._positions(call) | masks

    def _positions(self, call: Arguments) -> Arguments:
        """Those of a mask that is taken away, where the owner would have counted them."""
        if not self.counted or call.get("position_ids") is not None:
            return {}
        mask = call["attention_mask"]
        return {"position_ids": (mask.cumsum(1) * mask - 1).long()}

    def after(self, owner: nn.Module, args: Any, output: Any) -> None:
        """Forget."""
        running().segments = running().memory = None

    def _left_alone(self, config: Any, call: Arguments) -> bool:
        """Whether something about the call needs its padding, or the mask that its owner makes for it."""
        given = (call.get(name) for name in ("attention_mask", "position_ids"))
        if self.counted and all(value is None for value in given):
            return True
        if call.get("past_key_values") is not None or (call.get(MEMORY) is not None and self.encoder is None):
            return True
        if any(
            _asked(config, call, f"output_{name}")
            for name in ("hidden_states", "attentions", "router_logits")
        ):
            return True
        if getattr(config, "num_kv_shared_layers", 0) and ends_alone(call):
            return True  # whose last blocks compute the last tokens of rows alone
        # A BERT that is asked to be a decoder is one; encoders ignore a config that speaks of a cache
        return (
            _asked(config, call, "use_cache") if self.causal else bool(getattr(config, "is_decoder", False))
        )

    def _both(self, config: Any, call: Arguments) -> tuple[Segments | None, Segments | None] | None:
        """(segments of the call's own tokens, of those it attends across to), None for whole rows; or None
        where padding is computed, and has a mask."""
        memory = None if self.encoder is None or call.get(MEMORY) is None else self.encoder.said_of(call)
        own = "" if isinstance(memory, str) else self._found(config, call)
        return None if isinstance(own, str) or isinstance(memory, str) else (own, memory)

    def said_of(self, call: Arguments) -> Segments | str | None:
        """Of an encoder: what `from_mask` said of the mask with which a decoder's call reads its hidden
        states; it is not asked again."""
        mask, hidden = call.get("encoder_attention_mask"), call[MEMORY]
        if mask is None or self.asked is None:
            return None if mask is None else "the model was not called by its head"
        if self.last is None or self.last[0] is not mask or self.last[1] != mask._version:
            said: Segments | str | None = "it is no mask of rows"
            if mask.shape == hidden.shape[:2]:
                said = _there(from_mask(_reader(hidden.device, mask)(mask)), hidden.device)
            self.last = mask, mask._version, said
        return self.last[2]

    def _found(self, config: Any, call: Arguments) -> Segments | str | None:
        inputs = _read(call)
        if inputs is None:
            return "it has no tokens"
        (rows, tokens), mask = inputs.shape[:2], call.get("attention_mask")
        if mask is None and self.hides and inputs.dim() == 2:
            if (pad := getattr(config, "pad_token_id", None)) is None:
                return "it has no pad_token_id"
            mask = on_host(inputs) != pad
            if self.feeds:
                return None if bool(mask.all()) else "no mask is given, and a decoder reads all its places"
        positions = call.get("position_ids") if self.causal and self.packs else None
        found: Segments | str | None = None
        if mask is not None:
            if mask.shape != (rows, tokens):
                found = "it is no mask of rows"
            else:
                found = self._from_mask(config, mask, inputs.device, call)
        elif positions is not None and positions.dim() == 2 and positions.shape[1] == tokens:
            found = _there(from_positions(on_host(positions).expand(rows, -1)), inputs.device)
        if found is None and self.causal and _masks_whole_rows(config, tokens):
            return each_row(inputs)
        return found

    def _from_mask(
        self, config: Any, given: Tensor, device: torch.device, call: Arguments
    ) -> Segments | str | None:
        """What a mask [b, t] says, or, said once, why its padding is computed."""
        found: Segments | str | None = self.unknown or "the model was not called by its head"
        if self.unknown is None and self.asked is not None:
            labels = [] if self.feeds else _of_tokens(self.asked)
            ids = call.get("input_ids") if self.pools and not labels else None
            read = _reader(device, given, *labels, *([] if ids is None else [ids]))
            mask = read(given)
            wanted = _labelled([read(value) for value in labels], mask)
            if wanted is None:
                wanted = self._pooled(config, None if ids is None else read(ids), mask)
            found = wanted if isinstance(wanted, str) else _there(from_mask(mask, wanted), device)
        if self.feeds:
            self.last = given, given._version, found
        if isinstance(found, str) and found not in self.said and torch.is_grad_enabled():
            self.said.add(found)
            say(f"kernels: padding, where there is any, is computed too: {found}")
        return found

    def _pooled(self, config: Any, ids: Tensor | None, mask: Tensor) -> Tensor | None:
        """Where a decoder's classifier finds the token that it pools, [b, t]: the last of these, or the last
        of all."""
        if not self.pools:
            return None
        pad = getattr(config, "pad_token_id", None)
        return torch.ones_like(mask, dtype=torch.bool) if ids is None or pad is None else ids != pad


def _read(call: Arguments) -> Any:
    """What a call reads, [b, t, ...]: ids, or embeddings where they are given."""
    return call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]


def _unknown(model: nn.Module, owner: nn.Module) -> str | None:
    """Why it is not known which hidden states the model around a stack's owner reads, or None."""
    kind = class_of(model)
    if model is owner:
        return f"{kind.__name__} has no head, and whoever calls it may read every place"
    if kind.__module__.partition(".")[0] != "transformers":
        return f"{kind.__name__} is not transformers' own, and may read every place"
    if "start_positions" in names_of(type(model)):
        return f"{kind.__name__} compares all places of a row"
    if "labels" not in names_of(type(model)):
        return f"{kind.__name__} has no head, and whoever calls it may read every place"
    return None


def _reader(device: torch.device, *read: Tensor) -> Callable[[Tensor], Tensor]:
    """How to read the tensors that segments are found by: as the host has them, where it has all of them,
    else on `device`, for which the host then waits."""
    known = all(on_host(value).device.type == "cpu" for value in read)
    return on_host if known else lambda value: value.to(device)


def _there(found: Segments | str | None, device: torch.device) -> Segments | str | None:
    """What was found, on the device that computes on it."""
    return found.to(device) if isinstance(found, Segments) else found


def _of_tokens(call: Arguments) -> list[Tensor]:
    """The labels of a call that are of tokens."""
    labels = [value for name in ("labels", "shift_labels") if isinstance(value := call.get(name), Tensor)]
    return [value for value in labels if value.dim() > 1 and not value.is_floating_point()]


def _labelled(labels: Sequence[Tensor], mask: Tensor) -> Tensor | str | None:
    """Where labels of tokens stand that count, [b, t]; None without such labels, in words that they cannot be
    laid on the mask."""
    if any(value.shape != mask.shape for value in labels):
        return "labels have another shape than the mask"
    places = [value != IGNORED for value in labels]
    return torch.stack(places).any(0) if places else None


def _masks_whole_rows(config: Any, tokens: int) -> bool:
    """Whether transformers writes a dense mask for causal rows of `tokens` without padding: for a window
    that is shorter, and for its eager attention, the one that caps scores."""
    window = getattr(config, "sliding_window", None) or tokens
    return tokens > window or getattr(config, "_attn_implementation", None) == "eager"


def _asked(config: Any, call: Arguments, name: str) -> bool:
    """Whether the call, or the config where the call says nothing, asks for `name`."""
    given = call.get(name)
    given = getattr(config, name, None) if given is None else given
    return given is not None and given is not False
