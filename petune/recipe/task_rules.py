"""Rules of settings that belong to some tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from petune.methods.configs import method_of
from petune.recipe.schema import Recipe
from petune.tasks.configs import OF_TASKS


class Rule(NamedTuple):
    """Holds of every good recipe; checked when none of `keys` is wrong by itself. The problem is placed at
    the first of them."""

    keys: tuple[str, ...]
    holds: Callable[[Recipe], bool]
    what: str
    remedy: str


def _task_is(recipe: Recipe, *tasks: str) -> bool:
    return recipe.task is None or recipe.task in tasks


def _judges(recipe: Recipe) -> bool:
    """Whether answers are learned that are good or bad."""
    return recipe.task == "prefer" and recipe.prefer.loss == "kto"


def _belongs(task: str) -> Rule:
    """The settings of a task must be the usual ones where it is another one."""
    usual = OF_TASKS[task]()
    return Rule(
        (task, "task"),
        lambda recipe: getattr(recipe, task) == usual or _task_is(recipe, task),
        f"it belongs to task: {task}",
        f"remove {task}",
    )


def _of_loss(loss: str, key: str) -> Rule:
    """A setting of one loss over preferences must be the usual one where it is another."""
    usual = getattr(OF_TASKS["prefer"](), key)
    return Rule(
        (f"prefer.{key}",),
        lambda recipe: recipe.prefer.loss == loss or getattr(recipe.prefer, key) == usual,
        f"only {loss} has it",
        f"remove it, or set prefer.loss: {loss}",
    )


TASK_RULES = (
    Rule(
        ("data.packing", "task"),
        lambda recipe: not getattr(recipe.data, "packing", False) or _task_is(recipe, "causal", "chat"),
        "packing joins examples of causal and chat only",
        "remove data.packing, or set task: causal",
    ),
    Rule(
        ("data.chunk", "task"),
        lambda recipe: not getattr(recipe.data, "chunk", False) or _task_is(recipe, "causal", "mlm"),
        "only causal and mlm read documents",
        "remove data.chunk, or set task: causal or mlm",
    ),
    Rule(
        ("data.chunk", "data.packing"),
        lambda recipe: not (getattr(recipe.data, "chunk", False) and getattr(recipe.data, "packing", False)),
        "windows are full already, and packing joins rows that are not",
        "remove data.packing",
    ),
    Rule(
        ("data.max_target_length", "task"),
        lambda recipe: getattr(recipe.data, "max_target_length", None) is None or _task_is(recipe, "seq2seq"),
        "only seq2seq has targets of their own length",
        "use data.max_length",
    ),
    Rule(
        ("class_weights", "task"),
        lambda recipe: recipe.class_weights == "none" or _task_is(recipe, "classify"),
        "they belong to task: classify",
        "remove class_weights",
    ),
    *(_belongs(task) for task in OF_TASKS),
    Rule(
        ("parallel", "task"),
        lambda recipe: recipe.task != "embed" or "pp" not in recipe.parallel.axes,
        "a pipeline's pieces do not see one another's texts, which embed compares",
        "use dp, tp or sp",
    ),
    Rule(
        ("embed.cached", "memory.stream"),
        lambda recipe: recipe.embed.cached is None or recipe.memory.stream == "none",
        "a streamed model is updated inside one backward pass, and pieces have one each",
        "remove embed.cached, or set memory.stream: none",
    ),
    Rule(
        ("embed.cached", "parallel.dp.shard"),
        lambda recipe: recipe.embed.cached is None or not getattr(recipe.parallel.dp, "shard", False),
        "replicas that gather weights together need as many pieces each, and may have other rows",
        "remove embed.cached, or parallel.dp.shard",
    ),
    Rule(
        ("method", "prefer", "task"),
        lambda recipe: (
            recipe.task != "prefer" or not recipe.prefer.refers or not method_of(recipe.method).trains_base
        ),
        "full fine-tuning overwrites the model that dpo, ipo and kto compare with",
        "set prefer: orpo, or method: lora",
    ),
    _of_loss("dpo", "label_smoothing"),
    _of_loss("kto", "desirable_weight"),
    _of_loss("kto", "undesirable_weight"),
    Rule(
        ("parallel", "prefer", "task"),
        lambda recipe: not _judges(recipe) or "pp" not in recipe.parallel.axes,
        "a pipeline's pieces do not see one another's texts, by all of which kto tells how far the model has"
        " moved",
        "use dp, tp or sp",
    ),
    Rule(
        ("batch_size", "prefer", "task"),
        lambda recipe: not _judges(recipe) or recipe.batch_size > 1,
        "kto tells by the other answers of a batch how far the model has moved, and there is one row",
        "set batch_size: 2 or more",
    ),
)
