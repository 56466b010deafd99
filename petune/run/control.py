"""What a run is compared with: the untouched base, and, of a classifier, a head trained on it alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from petune.log import phase
from petune.methods import without_tuning
from petune.methods.configs import MethodConfig, method_of
from petune.methods.targets import head_modules
from petune.models import family_of
from petune.parallel import Runner
from petune.run.build import Prepared
from petune.run.evaluate import batches, head_only, scoring
from petune.tasks import pad_token_id


@contextmanager
def untouched_base(modules: Sequence[nn.Module], method: MethodConfig) -> Iterator[None]:
    """The base model again inside the block, for as long as nothing has trained."""
    with ExitStack() as stack:
        for module in () if method_of(method).trains_base else modules:
            stack.enter_context(without_tuning(module))
        yield


def head_only_control(
    runner: Runner, prepared: Prepared, check_stop: Callable[[], None], weights: Tensor | None
) -> float | None:
    """Accuracy of a head trained on the model as it is now; None where it has no head of its own.

    weights: the classes' in the loss. Every process must call this. Raises what `check_stop` does, which it
    asks between passes.
    """
    model, encoded = runner.modules[-1], prepared.encoded
    heads = head_modules(model, family_of(model), "auto")
    if not heads:
        return None
    pad, shortest = pad_token_id(prepared.tokenizer), runner.plan.tp
    sides = [batches(rows, 32, prepared.task.name, pad, shortest) for rows in (encoded.train, encoded.eval)]
    with phase("training the control, a head on the frozen base"), scoring(*runner.modules):
        found = head_only(
            model,
            heads[0],
            (sides[0], sides[1]),
            runner.logits,
            check_stop,
            seed=prepared.recipe.seed,
            weights=weights,
        )
    runner.barrier()  # only where logits come out was there something to fit
    return runner.sum([found or 0.0])[0] / runner.plan.dp
