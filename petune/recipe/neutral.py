"""Settings of a run that has no recipe, and lines about settings that are far from what is known to work.

The evidence: LoRA on all linears, the MLP's above all, at about ten times the learning rate of full
fine-tuning, nearly whatever the rank; a rank is too small where its parameters cannot hold what the rows say,
at 2 bits a parameter and about 1 bit a trained token (Schulman et al. 2025, "LoRA Without Regret").
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from petune.methods.configs import WIDTH, method_of
from petune.recipe.raw import Written, as_mapping
from petune.recipe.schema import Recipe

FEW_STEPS = 30
# a learning rate this many times the method's usual one, or less than its share of it, is far from it
FAR = 10
BITS_OF_PARAMETER, BITS_OF_TOKEN = 2, 1

# Settings of a demo recipe that were chosen for its model and rows; a user's own model and data want others.
_CHOSEN_FOR_DEMO = ("lr", "epochs", "max_steps", "batch_size", "task", "class_weights")
_DECIDE = ("lr", "max_steps", "task", "class_weights")


def neutral_settings() -> dict[str, Any]:
    """What is set besides `model` and `data` when there is no recipe: LoRA for 3 epochs.

    Everything else has the default of its key: r 16, all linears of the blocks, the method's usual learning
    rate, the task that data and model mean.
    """
    return {"method": "lora", "epochs": 3}


def neutral_note(recipe: Recipe) -> str:
    """One line: the settings a run without a recipe has."""
    rank = f" with r {recipe.method.r}" if hasattr(recipe.method, "r") else ""
    task = recipe.task or "by data and model"
    rate = "lr by the model's width" if recipe.lr is None else f"lr {recipe.lr:g}"
    return (
        f"no recipe was given, so the defaults hold: {recipe.method_name}{rank}, {rate},"
        f" {recipe.epochs:g} epochs, task {task}; petune init writes a recipe to edit"
    )


def usual_rate(recipe: Recipe, config: Any) -> float:
    """The usual learning rate of the method for a model of this config in transformers."""
    # of several texts' configs the decoder's: transformers refuses to choose unasked
    width = getattr(config.get_text_config(decoder=True), "hidden_size", None)
    return method_of(recipe.method).lr_at(width)


def with_rate(recipe: Recipe, config: Any) -> Recipe:
    """The recipe with the usual learning rate for its model where it sets none."""
    return recipe.model_copy(update={"lr": usual_rate(recipe, config)}) if recipe.lr is None else recipe


def demo_note(
    written: Written, before: Mapping[str, Any], fresh: Collection[str], recipe: Recipe
) -> str | None:
    """One line where `model`, `data` or the method of a demo recipe is replaced and settings that were chosen
    for them stay.

    `before` holds what the file says, `fresh` the top-level keys set over it.
    """
    if not str(before.get("model")).startswith("demo:"):
        return None
    name = (as_mapping(("method",), before.get("method")) or {}).get("name")
    replaced = [key for key in ("model", "data") if _source(key, before) != _source(key, written.tree)]
    replaced += ["method"] if name != recipe.method_name else []
    usual = {key: Recipe.model_fields[key].default for key in _CHOSEN_FOR_DEMO} | neutral_settings()
    method = method_of(recipe.method)
    usual["lr"] = method.usual_lr
    rate = f"{method.usual_lr:g}" + (f" at a width of {WIDTH:,}" if method.lr_power else "")
    kept = [key for key in _CHOSEN_FOR_DEMO if key not in fresh and before.get(key, usual[key]) != usual[key]]
    if not replaced or not set(kept) & set(_DECIDE):
        return None
    said = [
        f"{key} {before[key]}" + (f" (usual for {recipe.method_name}: {rate})" if key == "lr" else "")
        for key in kept
    ]
    nulls = " ".join(
        f"{key}={'none' if key == 'class_weights' else 'null'}" for key in kept if key in _DECIDE
    )
    what = " and ".join(", ".join(part) for part in (replaced[:-1], replaced[-1:]) if part)
    return (
        f"{what} replaced, but chosen for the demo and still in force: {', '.join(said)}; "
        f"give {nulls} for the usual values, or write a recipe of your own with petune init"
    )


def _source(key: str, tree: Mapping[str, Any]) -> Any:
    return (as_mapping((key,), tree.get(key)) or {}).get("path") if key == "data" else tree.get(key)


def far_from_known(
    recipe: Recipe, config: Any, trainable: int, trained_tokens: int | None, steps: int
) -> Iterator[str]:
    """Lines about a learning rate, a rank or a number of steps that is far from what is known to work.

    `config`: of its model, in transformers. `trainable`: parameters that train. `trained_tokens`: of the
    rows, each counted once; None where rows are trained, not tokens. Of rate and rank nothing is said for the
    demo models, which are far smaller than those the evidence is about.
    """
    if steps < FEW_STEPS and recipe.max_steps is None:
        yield f"{steps} steps are few to learn from: raise epochs, or lower batch_size"
    if recipe.model.startswith("demo:"):
        return
    usual = usual_rate(recipe, config)
    times = recipe.learning_rate / usual
    if times >= FAR or times <= 1 / FAR:
        ratio = f"{times:.3g} times" if times > 1 else f"1/{1 / times:.3g} of"
        yield (
            f"lr {recipe.learning_rate:g} is {ratio} the usual {usual:g} of {recipe.method_name} for"
            " models of this width"
        )
    rank = getattr(recipe.method, "r", None)
    if rank and trained_tokens and trained_tokens * BITS_OF_TOKEN > trainable * BITS_OF_PARAMETER:
        enough = rank * trained_tokens * BITS_OF_TOKEN / (trainable * BITS_OF_PARAMETER)
        wanted = next((power for power in (2**n for n in range(1, 11)) if power >= enough), 1024)
        yield (
            f"r {rank} trains {trainable:,} parameters, which hold about {trainable * BITS_OF_PARAMETER:,}"
            f" bits; {trained_tokens:,} trained tokens hold about {trained_tokens * BITS_OF_TOKEN:,}: r"
            f" {wanted} or method full can learn more of them"
        )
