"""Samples that are packed in a row, told to attention without scores: no state and no convolution goes from
one to the next.

transformers tells them apart by positions, but to attention with scores alone. `tell_samples` hangs a hook on
the module around a stack: where rows have several samples it hands every block `seq_idx` [1 | rows, tokens],
the number of each token's sample, which is transformers' own word for it. The mixers get a class that heeds
it; rows of one sample go transformers' own way, fast kernels included.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from petune.errors import UsageError
from petune.models.extension import extend
from petune.models.gated_delta import causal_convolution, gated_delta_rule
from petune.models.spec import Family, stack_paths

BY_POSITION = ("input_ids", "attention_mask", "position_ids", "past_key_values")  # arguments of such a module
ELSE = ("attention_mask", "past_key_values", "seq_idx")  # where one of them is given, positions say nothing
_TELLS = "petune_tells_samples"  # attribute of the module around a stack: the handle of the hook


class GatedDelta(nn.Module):
    """Extends transformers' gated-delta mixers."""

    A_log: Tensor
    dt_bias: Tensor
    conv1d: nn.Conv1d
    norm: nn.Module
    out_proj: nn.Module
    activation: str

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k [rows, tokens, key heads, features], v, z [rows, tokens, heads, features], b, a [rows, tokens,
        heads] of hidden states [rows, tokens, width]."""
        raise NotImplementedError

    def begin(self, leaf: str) -> None:
        """Draw a parameter of the mixer's own as transformers does."""
        value = self.get_parameter(leaf)
        if leaf == "A_log":
            value.uniform_(0.01, 16).log_()
        else:
            value.fill_(1.0)

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: Any = None,
        attention_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As the base; with `seq_idx` and no cache, every sample of a row by itself."""
        if seq_idx is None or cache_params is not None:
            kwargs |= {} if seq_idx is None else {"seq_idx": seq_idx}
            return cast("Any", super()).forward(hidden_states, cache_params, attention_mask, **kwargs)
        if attention_mask is not None:  # [rows, tokens], 0 where there is no token
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        q, k, v, z, b, a = self.projected(hidden_states)
        heads = [x.shape[2:] for x in (q, k, v)]
        mixed = causal_convolution(
            torch.cat([x.flatten(2) for x in (q, k, v)], -1), self.conv1d.weight[:, 0], seq_idx
        )
        parts = ACT2FN[self.activation](mixed).split([shape.numel() for shape in heads], -1)
        q, k, v = (part.unflatten(-1, shape) for part, shape in zip(parts, heads, strict=True))
        wide = torch.promote_types(a.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias)
        y = gated_delta_rule(q, k, v, g, b.sigmoid(), seq_idx)
        return self.out_proj(self.norm(y.flatten(0, 2), z.flatten(0, 2)).view_as(y).flatten(2))


class TellSamples:
    """Hook before the module around a stack; see above."""

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The call with `seq_idx` where positions begin anew inside a row, as transformers itself tells it:
        where there is neither a mask nor a cache. Raises UsageError for a call that asks for a cache then."""
        given = dict(zip(BY_POSITION, args, strict=False)) | kwargs
        positions = given.get("position_ids")
        if positions is None or any(given.get(name) is not None for name in ELSE):
            return None
        # Qwen3.5 takes four of each token, of which the first counts tokens
        samples = samples_of(positions[0] if positions.dim() == 3 else positions)
        if not samples[:, -1].any():
            return None
        if kwargs.get("use_cache"):
            raise UsageError(
                "rows of several samples leave no state to go on from",
                where="use_cache",
                remedy="set use_cache=False",
            )
        return args, kwargs | {"seq_idx": samples, "use_cache": False}


def samples_of(positions: Tensor) -> Tensor:
    """The number of each token's sample in its row, of positions [rows, tokens] that count up inside one."""
    return F.pad(positions.diff(dim=-1) != 1, (1, 0)).cumsum(-1)


def tell_samples(model: nn.Module, family: Family) -> None:
    """Tell attention without scores of the samples in a row, also in blocks of a side network. Undone by
    `forget_samples`."""
    for stack, path in stack_paths(model, family).items():
        core = family.stacks[stack].linear
        if core is None or core.form is None:
            continue
        around = model.get_submodule(path.rpartition(".")[0])
        for name, module in around.named_modules():
            if name.endswith(f".{core.at}"):
                extend(module, core.form)
        if _TELLS not in around.__dict__:
            around.__dict__[_TELLS] = around.register_forward_pre_hook(TellSamples(), with_kwargs=True)


def forget_samples(model: nn.Module) -> None:
    """Leave nothing of `tell_samples` but the classes, which `extension.restore` does."""
    for module in model.modules():
        if (handle := module.__dict__.pop(_TELLS, None)) is not None:
            handle.remove()
