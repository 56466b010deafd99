"""What `start: fisher` of a ladder is made of: the Fisher information of a base on rows of its run.

Every process of a group computes it, as each has the whole base then, and all compare what they have chosen.
Where what trains is read from a checkpoint, nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from petune.errors import UsageError
from petune.log import phase
from petune.methods import tuned_parameters, tuning
from petune.methods.configs import SideConfig
from petune.methods.pruning import fisher_of, weigh
from petune.models.checksums import checksums, digest
from petune.parallel.launch import process_group
from petune.run.evaluate import batches
from petune.run.objective import objective_of
from petune.tasks import pad_token_id

if TYPE_CHECKING:
    from petune.run.build import Prepared

ROWS = 128
TASKS = ("classify", "tokens", "seq2seq", "causal", "chat")


def weigh_by_rows(model: nn.Module, prepared: Prepared) -> None:
    """Leave on a whole base, before it is tuned, what a ladder with `start: fisher` asks for; nothing for any
    other method.

    Raises UsageError for rows whose loss is no -log p of their targets, or that are not all there.
    """
    config, recipe = prepared.recipe.method, prepared.recipe
    if not isinstance(config, SideConfig) or config.start != "fisher":
        return
    where, remedy = recipe.where("method.start"), "set method.start: pruned"
    if prepared.task.name not in TASKS:
        what, found = "start: fisher needs rows with a probability of their targets", prepared.task.name
        raise UsageError(what, where=where, expected=", ".join(TASKS), found=found, remedy=remedy)
    if prepared.encoded.stream is not None:
        raise UsageError(
            "start: fisher draws among all rows, and these are streamed", where=where, remedy=remedy
        )
    if prepared.restored:  # only the shapes of what is kept will matter
        weigh(model, {name: value.detach() for name, value in model.eval().named_parameters()})
        return
    units = prepared.encoded.train
    order = torch.randperm(len(units), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    chosen = [units[at] for at in order[: config.fisher_rows or ROWS]]
    objective, pad = objective_of(prepared.task, None), pad_token_id(prepared.tokenizer)

    def losses() -> Iterator[Tensor]:
        for batch in batches(chosen, 1, prepared.task.name, pad, packed=prepared.encoded.packed):
            with prepared.place.autocast():
                outputs = objective.forward(model, batch)
            yield objective.loss(outputs, batch)

    with phase(f"measuring what matters on {len(chosen)} rows"):
        weigh(model, fisher_of(model.eval(), losses()))


def agree_on_start(model: nn.Module, prepared: Prepared) -> None:
    """Compare among all ranks what a ladder with `start: fisher` begins as, whole. Raises DistributedError
    where they chose other weights: what they measured rounds by the machine."""
    config, restored = tuning(model).config, prepared.restored
    if restored and process_group.restarted():
        return  # the ranks that this one meets again are past their start
    if process_group.inside() and isinstance(config, SideConfig) and config.start == "fisher":
        found = "a checkpoint" if restored else digest(checksums(tuned_parameters(model)))
        process_group.agree({"start of the ladder": found})
