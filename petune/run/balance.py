"""The loss by which the routers of a mixture are kept even, over all tokens of a pass whatever the plan.

    E * sum over experts e of f_e P_e    f: the choices that fell on e, of each token; P: its mean probability

(Fedus et al. 2021, arXiv:2101.03961), both over the real tokens of all layers. On one process transformers
makes it. Of replicas each makes the probabilities' part of its own tokens, with the counts of all, so that
the parts, and their gradients, add up to it. Ranks that share every expert by columns have the scores of the
same tokens each, and sum the gradients of these: each adds its share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.log import say
from petune.parallel import Batch, Mesh, Outputs, ParallelPlan
from petune.parallel.collectives import MaybeGroup, all_sum_

# (outputs, batch, trained tokens of its rows) -> what is added to their summed loss
Balance = Callable[[Outputs, Batch, int], Tensor]


def balance_of(model: nn.Module) -> float:
    """The coefficient of the loss, where the model's config asks for it (output_router_logits) and
    transformers adds it, to a language model's; else 0."""
    config: Any = getattr(model, "config", None)
    asked = getattr(config, "output_router_logits", False) and hasattr(model, "router_aux_loss_coef")
    return float(config.router_aux_loss_coef) if asked else 0.0


def routes_are_whole(plan: ParallelPlan) -> bool:
    """Whether the routers of all layers are on every rank, and see all tokens of its replica."""
    return plan.pp == 1 and (plan.cut is None or plan.cut.mlp == "heads")


def refuse_parted(plan: ParallelPlan, packed: bool, where: str = "parallel") -> None:
    """Raise UsageError for a plan whose ranks do not have all layers of their tokens, at the key `where`, and
    for `packed` rows, which do not say where their padding is: the loss cannot be made there."""
    if packed:
        what = "the routers' auxiliary loss is of real tokens, and packed rows do not say which are padding"
        remedy = "set packing: false, or output_router_logits: false in the model's config.json"
        raise UsageError(what, where="data.packing", remedy=remedy)
    if not routes_are_whole(plan):
        what = "the routers' auxiliary loss is made of all layers' scores, which a rank of this plan has not"
        expected, found = "parallel: dp, tp, galaxy, ep or none", "output_router_logits: true in config.json"
        remedy = "choose one of these, or set output_router_logits: false there"
        raise UsageError(what, where=where, expected=expected, found=found, remedy=remedy)


def balance_in(model: nn.Module, mesh: Mesh, packed: bool = False) -> Balance | None:
    """The loss of a pass under the plan of `mesh`, which weighs as much as the tokens of its rows do; None
    where nobody asks for it. Raises as `refuse_parted`."""
    coefficient, plan = balance_of(model), mesh.plan
    if not coefficient:
        if mesh.main and getattr(getattr(model, "config", None), "output_router_logits", False):
            say("output_router_logits: the routers' auxiliary loss is a language model's, and left out here")
        return None
    refuse_parted(plan, packed)
    if plan.dp == 1:
        return lambda outputs, batch, trained: _shared(
            coefficient * trained * cast("Any", outputs).aux_loss, plan.tp
        )
    chosen, group = int(cast("Any", model).config.num_experts_per_tok), mesh.groups["dp"]

    def own_part(outputs: Outputs, batch: Batch, trained: int) -> Tensor:
        scores = cast("Any", outputs).router_logits
        return _shared(coefficient * part_of(scores, batch, trained, chosen, group), plan.tp)

    return own_part


def _shared(loss: Tensor, ranks: int) -> Tensor:
    """The loss with its share of the gradient for each of the ranks that make the same."""
    return loss if ranks == 1 else torch.lerp(loss.detach(), loss, 1 / ranks)


def part_of(scores: tuple[Tensor, ...], batch: Batch, trained: int, chosen: int, group: MaybeGroup) -> Tensor:
    """What own tokens add to the loss times the tokens that replicas train. scores: of each layer
    [tokens, experts]; chosen: experts of a token. All replicas call it."""
    real = batch["attention_mask"] * (batch["rows"] >= 0)[:, None]
    weight = real.reshape(-1).to(scores[0].device, torch.float32)
    experts = scores[0].shape[1]
    counts, sums = weight.new_zeros(experts), weight.new_zeros(experts)
    for layer in scores:
        probs = torch.softmax(layer, -1)
        index = probs.topk(chosen, -1).indices
        counts.scatter_add_(0, index.reshape(-1), weight.repeat_interleave(chosen))
        sums = sums + (probs.float() * weight[:, None]).sum(0)
    told = torch.cat([counts, weight.sum()[None] * len(scores), weight.new_tensor([trained])]).double()
    all_sum_([told], group)
    rows, everyone = told[-2], told[-1]
    return (everyone * experts * (told[:experts] / rows) * (sums.double() / rows)).sum().to(sums.dtype)
