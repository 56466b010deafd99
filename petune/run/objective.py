"""The objective of a recipe's task: how its model is asked, and the summed loss of its outputs over real
rows."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor, nn

from petune.kernels.head.hooks import has_fused_head, head_loss
from petune.methods import tuned_parameters, tuning
from petune.methods.configs import method_of
from petune.models import family_of
from petune.parallel import Batch, Mesh, Objective, Outputs
from petune.parallel.collectives import all_sum_, gather_dim, gather_seq
from petune.parallel.objective import RowChunks
from petune.run.balance import Balance
from petune.run.evaluate import outputs_of, real_rows
from petune.tasks import Task, count, trained_positions
from petune.tasks.configs import EmbedConfig, PreferConfig, RerankConfig
from petune.tasks.embed_loss import alone, contrastive, pooled
from petune.tasks.loss import cross_entropy_sum
from petune.tasks.prefer_loss import judged, judged_texts, token_losses, trained_tokens
from petune.tasks.rerank_loss import passage_scores, ranking_losses

DPO = PreferConfig()


def _positions(task: str, outputs: Outputs, batch: Batch) -> tuple[Tensor, Tensor]:
    """The logits and labels of real rows that count for a task."""
    kept, rows = real_rows(outputs.logits, batch)
    return trained_positions(kept, rows["labels"], task)


def prefer_objective(
    config: PreferConfig, balance: Balance | None = None, mesh: Mesh | None = None
) -> Objective:
    """What a runner needs to know of preferences, as `objective_of`; a mean that kto takes is over the
    replicas of `mesh`."""

    def mean(values: Tensor) -> Tensor:
        if mesh is None or mesh.plan.dp == 1:
            return values.mean()
        found = torch.stack([values.sum(), values.new_tensor(float(len(values)))])
        all_sum_([found], mesh.groups["dp"])
        return found[0] / found[1]

    def finish(losses: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        _, rows = real_rows(batch["labels"], batch)
        found = judged(losses, rows, config, mean).loss
        return found.sum() + (0 if balance is None else balance(outputs, batch, len(found)))

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        return finish(token_losses(*real_rows(outputs.logits, batch)), outputs, batch)

    def of_tokens(table: Tensor, batch: Batch) -> Tensor:
        kept, rows = real_rows(table, batch)
        texts = -kept.sum(-1), trained_tokens(rows["labels"])
        return judged_texts(*texts, rows, config, mean).loss.sum()

    def fused_loss(model: nn.Module, batch: Batch, trained: int) -> Tensor | None:
        if balance is not None or not has_fused_head(model):
            return None
        finish = partial(of_tokens, batch=batch)
        return head_loss(model, batch, outputs_of, shift=True, trained=trained, finish=finish)

    return Objective(
        outputs_of,
        loss,
        partial(_positions, "prefer"),
        finish,
        texts=2,
        fused_loss=fused_loss,
        tuned=tuned_parameters,
        meets=balance is not None or config.loss == "kto",
    )


def embed_objective(config: EmbedConfig, texts: int, mesh: Mesh) -> Objective:
    """What a runner needs to know of embeddings of examples of so many texts, as `objective_of`: candidates
    are gathered over the replicas of `mesh`."""

    def meet(rows: Tensor) -> tuple[Tensor, int]:
        group = mesh.groups["dp"]
        count = torch.tensor([len(rows)], device=rows.device)
        sizes = tuple(gather_dim(count, (1,) * mesh.plan.dp, 0, group).tolist())
        return gather_seq(rows[None], sizes, group)[0], sum(sizes[: mesh.at.dp])

    def give(outputs: Outputs, batch: Batch) -> Tensor:
        return pooled(outputs.logits, batch, config)

    def compare(found: Tensor, batch: Batch) -> Tensor:
        kept, _ = real_rows(found, batch)
        return contrastive(kept.unflatten(0, (-1, texts)), config, meet if mesh.plan.dp > 1 else alone)

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        return compare(give(outputs, batch), batch)

    pieces = None if config.cached is None else RowChunks(config.cached * texts, give, compare)
    return Objective(outputs_of, loss, texts=texts, pieces=pieces, tuned=tuned_parameters, meets=True)


def rerank_objective(config: RerankConfig, texts: int) -> Objective:
    """What a runner needs to know of queries with so many passages each, as `objective_of`."""

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        kept, rows = real_rows(outputs.logits, batch)
        return ranking_losses(passage_scores(kept), rows["labels"], texts, config).sum()

    return Objective(outputs_of, loss, texts=texts, tuned=tuned_parameters)


def idle_tensors(model: nn.Module, task: Task, rerank: RerankConfig) -> frozenset[str]:
    """The tuned tensors that the loss does not depend on: what a softmax over the passages of a query sees
    is the same whatever is added to all of their scores. Their gradients are rounding, which no optimizer
    should follow. The token of masked patches has none: no task masks any; nor has a table of words that
    full fine-tuning takes along and no stack reads."""
    tuned, family = tuned_parameters(model).items(), family_of(model)
    if task.name != "rerank" or rerank.loss != "softmax":
        idle = () if family is None or family.signal is None else family.signal.idle
        whole = family is not None and method_of(tuning(model).config).trains_base
        unread = family.unread if family is not None and whole else ()
        names = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))
        return frozenset(
            name
            for name, value in tuned
            if name.endswith(idle) or (name.endswith(unread) and names[id(value)] == 1)
        )
    return frozenset(name for name, value in tuned if name.endswith(".bias") and value.shape == (1,))


def objective_of(
    task: Task,
    weights: Tensor | None,
    balance: Balance | None = None,
    prefer: PreferConfig = DPO,
    mesh: Mesh | None = None,
) -> Objective:
    """What a runner needs to know of `task`, without autocast. weights: the classes' in the loss, on the
    model's device. balance: the routers' loss. prefer: how preferences are learned; mesh: over which
    replicas."""
    if task.name == "prefer":
        return prefer_objective(prefer, balance, mesh)

    def loss(outputs: Outputs, batch: Batch) -> Tensor:
        logits, rows = real_rows(outputs.logits, batch)
        found = cross_entropy_sum(logits, rows, task.name, weights)
        return found if balance is None else found + balance(outputs, batch, int(count(rows, weights)))

    def finish(losses: Tensor, outputs: Outputs, batch: Batch) -> Tensor:
        return losses.sum() + (0 if balance is None else balance(outputs, batch, len(losses)))

    def fused_loss(model: nn.Module, batch: Batch, trained: int) -> Tensor | None:
        if balance is not None or not task.over_vocabulary or not has_fused_head(model):
            return None
        return head_loss(model, batch, outputs_of, shift=task.shifts, trained=trained)

    meets = balance is not None
    return Objective(
        outputs_of,
        loss,
        partial(_positions, task.name),
        finish,
        fused_loss=fused_loss,
        tuned=tuned_parameters,
        meets=meets,
    )
