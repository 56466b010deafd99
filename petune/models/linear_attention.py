"""Attention without scores, where it trains: gated-delta mixers computed by petune's rule where transformers
has no kernels, and told of the samples that are packed in a row, so that no state and no convolution goes
from one to the next.

transformers tells them apart by positions, but to attention with scores alone. `tell_samples` hangs a hook on
the module around a stack: where rows have several samples it hands every block `seq_idx` [1 | rows, tokens],
the number of each token's sample, which is transformers' own word for it. The mixers get a class that heeds
it. Rows of one sample go transformers' own way where flash-linear-attention is installed, with a cache, and
where nothing trains: transformers' fallback takes whole tensors apart chunk by chunk, so that its backward
pass moves bytes by the square of the length.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from petune.errors import UsageError
from petune.models.extension import extend
from petune.models.gated_delta import MixedHeads, causal_convolution, kernels_at, mixed_rule
from petune.models.spec import Family, stack_paths

BY_POSITION = ("input_ids", "attention_mask", "position_ids", "past_key_values")  # arguments of such a module
ELSE = ("attention_mask", "past_key_values", "seq_idx")  # where one of them is given, positions say nothing
HAS_KERNELS = find_spec("fla") is not None  # flash-linear-attention's, which transformers takes where it is
_TELLS = "petune_tells_samples"  # attribute of the module around a stack: the handle of the hook


class GatedDelta(nn.Module):
    """Extends transformers' gated-delta mixers."""

    A_log: Tensor
    dt_bias: Tensor
    conv1d: nn.Conv1d
    norm: nn.Module
    out_proj: nn.Module
    activation: str

    num_k_heads: int
    head_k_dim: int
    num_v_heads: int
    head_v_dim: int

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k and v side by side [rows, tokens, features], z [rows, tokens, heads, features], b, a [rows,
        tokens, heads] of hidden states [rows, tokens, width]."""
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
        if cache_params is not None or (seq_idx is None and self.better_as_it_is(kwargs)):
            kwargs |= {} if seq_idx is None else {"seq_idx": seq_idx}
            return cast("Any", super()).forward(hidden_states, cache_params, attention_mask, **kwargs)
        if attention_mask is not None:  # [rows, tokens], 0 where there is no token
            hidden_states = hidden_states * attention_mask[..., None].to(hidden_states.dtype)
        x, z, b, a = self.projected(hidden_states)
        wide = torch.promote_types(a.dtype, torch.float32)
        g = -self.A_log.to(wide).exp() * F.softplus(a.to(wide) + self.dt_bias)
        heads = MixedHeads(self.num_k_heads, self.head_k_dim, self.num_v_heads, self.head_v_dim)
        y = mixed_rule(self.convolved(x, seq_idx), g, b.sigmoid(), seq_idx, heads)
        return self.out_proj(self.normed(y.flatten(0, 2), z.flatten(0, 2)).view_as(y).flatten(2))

    def better_as_it_is(self, kwargs: dict[str, Any]) -> bool:
        """Whether a call without a cache, of rows of one sample, goes transformers' own way: where it has
        kernels, where no gradient is wanted, and where it is told of samples in words that it alone knows.
        While training, a pass without a graph is one that is computed again with it, alike."""
        told = kwargs.get("cu_seq_lens_q") is not None
        return told or HAS_KERNELS or not (self.training or torch.is_grad_enabled())

    def convolved(self, x: Tensor, samples: Tensor | None) -> Tensor:
        """[rows, tokens, features] behind the convolution and its activation."""
        if (kernels := kernels_at(x)) is not None and self.activation == "silu" and self.conv1d.bias is None:
            found = kernels.convolution(x, self.conv1d.weight[:, 0], samples)
            if found is not None:
                return found
        if samples is not None:
            y: Tensor = ACT2FN[self.activation](causal_convolution(x, self.conv1d.weight[:, 0], samples))
            return y
        y = self.conv1d(x.mT.to(self.conv1d.weight.dtype))[..., : x.shape[1]]
        y = ACT2FN[self.activation](y)
        return y.to(x.dtype).mT

    def normed(self, x: Tensor, gate: Tensor) -> Tensor:
        """The norm of heads [heads, features], times what their gates let through."""
        found = None if (kernels := kernels_at(x)) is None else kernels.norm(self.norm, x, gate)
        y: Tensor = self.norm(x, gate) if found is None else found
        return y


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
            what = "rows of several samples leave no state to go on from"
            raise UsageError(what, where="use_cache", remedy="set use_cache=False")
        return args, kwargs | {"seq_idx": samples, "use_cache": False}


def samples_of(positions: Tensor) -> Tensor:
    """The number of each token's sample in its row, of positions [rows, tokens] that count up inside one."""
    return F.pad(positions.diff(dim=-1) != 1, (1, 0)).cumsum(-1)


def tell_samples(model: nn.Module, family: Family) -> None:
    """Extend attention without scores, also in blocks of a side network, and tell it of the samples in a row.
    Undone by `forget_samples`."""
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
