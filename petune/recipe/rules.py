"""Rules between keys that need neither model nor data to be judged. Each is one row; what needs a model is
checked where the model is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from petune.errors import Problem, UsageError
from petune.files.given import home_known
from petune.files.patterns import compile_pattern
from petune.kernels.configs import MemoryConfig
from petune.methods.configs import ROOM, method_of
from petune.parallel.configs import (
    CutConfig,
    ParallelConfig,
    layouts,
    size_of,
)
from petune.parallel.contradictions import axis_contradictions, beside_experts, too_many_cuts
from petune.recipe.raw import PARALLEL, FoundProblem, Written, as_mapping
from petune.recipe.schema import PATHS, Recipe
from petune.recipe.stream_rules import STREAM_RULES
from petune.recipe.task_rules import TASK_RULES, Rule
from petune.recipe.yaml_lines import KeyPath
from petune.tasks.configs import METRICS


def _metrics(recipe: Recipe) -> Mapping[str, str]:
    """The metrics the recipe can name: its task's, or every task's while the task is to be inferred."""
    if recipe.task:
        return METRICS[recipe.task]
    return {name: better for table in METRICS.values() for name, better in table.items()}


# roles that are never cut by their inputs
_BY_OUTPUTS = ("q", "k", "v", "q_pos", "k_pos", "gate", "up", "qkv", "gate_up")


def _cuts_rows(recipe: Recipe) -> bool:
    """Whether the plan cuts a target by its inputs, as far as the names of targets say."""
    targets = getattr(recipe.method, "targets", ())
    if isinstance(targets, tuple) and targets and set(targets) <= set(_BY_OUTPUTS):
        return False
    cuts = [
        (name, axis)
        for name, axis in recipe.parallel.axes.items()
        if isinstance(axis, CutConfig) and size_of(axis) != 1
    ]
    return any("heads" in layouts(name, axis).values() for name, axis in cuts)


_PLACEHOLDER = re.compile(r"\$\{\w*\}|\$[A-Z_]+\b|<[A-Z_]+>")


def _text_at(recipe: Recipe, key: str) -> str:
    section, _, setting = key.rpartition(".")
    return str(getattr(getattr(recipe, section) if section else recipe, setting, None) or "")


def _is_pattern(targets: object) -> bool:
    """Whether `targets` is no single text, or a pattern that can be matched in bounded work."""
    if not isinstance(targets, str):
        return True
    try:
        compile_pattern(targets, UsageError)
    except UsageError:
        return False
    return True


# Key -> whether the recipe asks for fused blocks with it, and how to ask no more.
_ASKS_FOR_FUSED: Mapping[str, tuple[Callable[[Recipe], bool], str]] = {
    "kernels": (lambda recipe: recipe.kernels in ("reference", "triton"), "set kernels: off"),
    "memory": (lambda recipe: recipe.memory != MemoryConfig(), "remove memory"),
}
# Key -> whether it leaves the recipe without fused blocks, why, and what would not.
_LEAVES_NONE_FUSED: Mapping[str, tuple[Callable[[Recipe], bool], str, str]] = {
    "kernels": (
        lambda recipe: recipe.kernels == "off",
        "it is about fused blocks, and kernels: off leaves none",
        "set kernels: auto",
    ),
    "compile": (lambda recipe: recipe.compile, "fused blocks do not go with compile", "set compile: false"),
}


# Key -> whether it says nothing of what blocks keep.
_KEPT: Mapping[str, Callable[[Recipe], bool]] = {
    "gradient_checkpointing": lambda recipe: not recipe.gradient_checkpointing,
    "memory": lambda recipe: recipe.memory == MemoryConfig(),
}


def _fused(asking: str, leaving_none: str) -> Rule:
    """No recipe asks for fused blocks with one key and leaves none with another: a setting without effect is
    an error."""
    (asks, no_more), (leaves_none, why, instead) = _ASKS_FOR_FUSED[asking], _LEAVES_NONE_FUSED[leaving_none]
    return Rule(
        (asking, leaving_none),
        lambda recipe: not (asks(recipe) and leaves_none(recipe)),
        why,
        f"{no_more}, or {instead}",
    )


def _streamed(key: str, holds: Callable[[Recipe], bool], what: str, remedy: str) -> Rule:
    """What a recipe that streams its blocks must have of another key."""
    return Rule(
        (key, "memory"),
        lambda recipe: recipe.memory.stream == "none" or holds(recipe),
        what,
        f"{remedy}, or memory.stream: none",
    )


STREAMED = (
    _streamed(
        "method",
        lambda recipe: method_of(recipe.method).trains_base,
        "memory.stream is for blocks whose weights all train",
        "set method: full",
    ),
    _streamed(
        "parallel",
        lambda recipe: recipe.parallel == ParallelConfig(),
        "memory.stream is for one process",
        "set parallel: none",
    ),
    _streamed(
        "accumulate",
        lambda recipe: recipe.accumulate == 1,
        "memory.stream uses each gradient up inside the backward pass, so a step has one",
        "set accumulate: 1",
    ),
    _streamed(
        "clip",
        lambda recipe: recipe.clip is None,
        "memory.stream uses gradients up before the norm of all of them is known",
        "set clip: null",
    ),
    _streamed(
        "dtype",
        lambda recipe: recipe.memory.stream == "fp32" or recipe.dtype != "fp32",
        "memory.stream: bf16 keeps weights in bf16",
        "set dtype: bf16, or memory.stream: fp32",
    ),
    _streamed(
        "on_spike",
        lambda recipe: recipe.on_spike in ("off", "warn"),
        "memory.stream has made the update inside the backward pass before the norm of all gradients is"
        " known",
        "set on_spike: warn",
    ),
    _streamed(
        "snapshot_every",
        lambda recipe: recipe.snapshot_every is None,
        "memory.stream changes the whole model inside the backward pass: there is no moment beside which to"
        " copy it",
        "set snapshot_every: null, and save_every as often as you want",
    ),
)
CACHED = (
    Rule(
        ("cache", "method"),
        lambda recipe: not recipe.cache or method_of(recipe.method).still,
        "it keeps what frozen blocks give, and this method changes that in every step",
        "remove cache, or set method: side or head",
    ),
    Rule(
        ("cache", "task"),
        lambda recipe: not recipe.cache or recipe.task != "mlm",
        "mlm draws other masks in every epoch, so no row comes twice",
        "remove cache",
    ),
    Rule(
        ("cache", "parallel"),
        lambda recipe: not recipe.cache or recipe.parallel.dp is None or not recipe.parallel.dp.shard,
        "it does not go with sharded weights yet",
        "remove cache, or use dp without shard, tp, sp, galaxy or pp",
    ),
    Rule(
        ("cache", "parallel"),
        lambda recipe: not recipe.cache or not recipe.parallel.spreads,
        "ranks that share experts run their blocks together, and cached rows run none",
        "remove cache, or use dp",
    ),
    Rule(
        ("cache", "compile"),
        lambda recipe: not recipe.cache or not recipe.compile,
        "a compiled model runs its blocks",
        "remove cache, or set compile: false",
    ),
    Rule(
        ("cache_folder", "cache"),
        lambda recipe: recipe.cache_folder is None or bool(recipe.cache),
        "it is about the cache, which is off",
        "remove cache_folder, or set cache: true",
    ),
    Rule(
        ("cache_room", "cache"),
        lambda recipe: recipe.cache_room == ROOM or bool(recipe.cache),
        "it is about the cache, which is off",
        "remove cache_room, or set cache: true",
    ),
)
RULES = (
    *TASK_RULES,
    Rule(
        ("data.path",),
        lambda recipe: bool(recipe.data.path.strip()),
        "no data is named",
        "for example  data: demo:docstrings",
    ),
    *(
        Rule(
            (key,),
            lambda recipe, key=key: not _PLACEHOLDER.search(_text_at(recipe, key)),  # type: ignore[misc]  # mypy: a default
            "a recipe fills in no ${NAME}",
            f'write the value; or leave it to the shell: {key}="$NAME" on the command line',
        )
        for key in ("model", "data.path", "data.eval", "init_adapter", "out")
    ),
    *(
        Rule(
            (key,),
            lambda recipe, key=key: home_known(_text_at(recipe, key)),  # type: ignore[misc]  # mypy: a default
            "it begins with ~ and a user whose home is not known",
            "write the path in full",
        )
        for key in PATHS
    ),
    Rule(
        ("method.targets",),
        lambda recipe: _is_pattern(getattr(recipe.method, "targets", "auto")),
        "a single text is a regular expression for whole module names, and this is none, or one that may take"
        " too long",
        "for roles or name suffixes write a list: [q, v]",
    ),
    Rule(
        ("warmup",),
        lambda recipe: recipe.warmup < 1 or recipe.warmup == int(recipe.warmup),
        "1 or more is a number of steps and must be whole",
        "below 1 it is a share of all steps: 0.05",
    ),
    Rule(
        ("warmup", "max_steps"),
        lambda recipe: recipe.max_steps is None or recipe.warmup < 1 or recipe.warmup < recipe.max_steps,
        "it is not over when max_steps ends the run",
        "make warmup smaller than max_steps",
    ),
    Rule(
        ("init_adapter", "method"),
        lambda recipe: recipe.init_adapter is None or not method_of(recipe.method).trains_base,
        "full fine-tuning has no adapter to start from",
        "put the folder of the tuned model in model",
    ),
    Rule(
        ("metric", "task"),
        lambda recipe: recipe.metric is None or recipe.metric in _metrics(recipe),
        "no such metric of this task",
        "; ".join(f"{task} has {', '.join(metrics)}" for task, metrics in METRICS.items()),
    ),
    Rule(
        ("direction", "metric", "task"),
        lambda recipe: (
            recipe.direction == "auto"
            or recipe.direction == _metrics(recipe).get(recipe.metric or "", recipe.direction)
        ),
        "it would keep the worst checkpoint by this metric",
        "remove direction; auto knows",
    ),
    Rule(
        ("patience", "eval_every", "max_steps"),
        lambda recipe: (
            recipe.patience is None
            or recipe.max_steps is None
            or recipe.eval_every is None
            or recipe.eval_every <= recipe.max_steps
        ),
        "it counts evaluations, and eval_every is beyond max_steps",
        "make eval_every smaller than max_steps",
    ),
    *(
        Rule(
            (key, "on_spike"),
            lambda recipe, key=key: (  # type: ignore[misc]  # mypy: a default
                recipe.on_spike != "off" or getattr(recipe, key) == Recipe.model_fields[key].default
            ),
            "it is about on_spike, which is off",
            f"remove {key}, or set on_spike: warn, stop, skip or rewind",
        )
        for key in ("spike_window", "spike_threshold")
    ),
    *(_fused(asking, other) for asking in _ASKS_FOR_FUSED for other in _LEAVES_NONE_FUSED if other != asking),
    *STREAMED,
    *CACHED,
    *STREAM_RULES,
    Rule(
        ("base_dtype", "parallel"),
        lambda recipe: (
            recipe.base_dtype is None or recipe.parallel.dp is None or recipe.parallel.dp.offload == "none"
        ),
        "shards of quantised weights do not rest in host memory yet",
        "remove base_dtype, or set parallel.dp.offload: none",
    ),
    Rule(
        ("base_dtype", "method"),
        lambda recipe: recipe.base_dtype is None or not method_of(recipe.method).trains_base,
        "it quantises weights that do not train, and here all do",
        "remove base_dtype, or set another method",
    ),
    Rule(
        ("base_dtype", "compile"),
        lambda recipe: recipe.base_dtype is None or not recipe.compile,
        "compile reads dense weights",
        "remove base_dtype, or set compile: false",
    ),
    Rule(
        ("method", "parallel"),
        lambda recipe: method_of(recipe.method).row_cut or not _cuts_rows(recipe),
        "it cannot cut a linear by its inputs, which `o` and `down` are under tp, galaxy, galaxy2 and heads"
        " of cut",
        "set parallel: dp, sp or pp, or name targets among " + ", ".join(_BY_OUTPUTS),
    ),
    *(
        Rule(
            (key, "method"),
            lambda recipe, unset=unset: unset(recipe) or not method_of(recipe.method).head_alone,  # type: ignore[misc]  # mypy: a default
            "it is about what blocks keep for a backward pass, and under this method they have none",
            f"remove {key}, or set another method",
        )
        for key, unset in _KEPT.items()
    ),
    Rule(
        ("gradient_checkpointing", "memory"),
        lambda recipe: not recipe.gradient_checkpointing or recipe.memory.keep in ("auto", "input"),
        "it keeps the input of a block alone, and memory.keep says more",
        "remove gradient_checkpointing, or memory.keep",
    ),
    # The two of memory alone are said again, in the same words, where a config made in Python meets them
    # (kernels/policy.py).
    Rule(
        ("memory.offload",),
        lambda recipe: recipe.memory.keep != "input" or recipe.memory.offload != "attention",
        "a block that keeps its input alone has no attention output to offload",
        "use offload: input, none or auto, or keep: attention",
    ),
    Rule(
        ("memory.tile",),
        lambda recipe: recipe.memory.keep != "all" or recipe.memory.tile is None,
        "the MLP of a block that keeps all is not tiled",
        "remove tile, or keep: projections, or less",
    ),
)


def broken_rules(
    written: Written, values: Mapping[str, Any], wrong: Sequence[KeyPath]
) -> Iterator[FoundProblem]:
    """The rules a recipe breaks, judged on the values that are right by themselves."""
    bad = {path[0] for path in (*wrong, *written.refused) if path}
    good = {key: value for key, value in values.items() if key in Recipe.model_fields and key not in bad}
    recipe = Recipe.model_construct(**{**good, "data": values.get("data"), "method": values.get("method")})
    for rule in RULES:
        if bad.isdisjoint(key.partition(".")[0] for key in rule.keys) and not rule.holds(recipe):
            path = tuple(rule.keys[0].split("."))
            yield path, Problem(f"{rule.keys[0]}: {rule.what}", written.where(path), remedy=rule.remedy)
    yield from _broken_plan(written, values["parallel"])


def _broken_plan(written: Written, config: ParallelConfig) -> Iterator[FoundProblem]:
    """The rules of `parallel`, which stand beside its settings. `config` holds the axes that are right by
    themselves."""
    if any(path[:1] == (PARALLEL,) for path in written.refused):
        return
    named = as_mapping((PARALLEL,), written.tree.get(PARALLEL)) or {}
    found = [*too_many_cuts(named), *beside_experts(config.axes)]
    for name, axis in config.axes.items():
        found += axis_contradictions(name, axis)
    for inner, problem in found:
        path = (PARALLEL, *inner)
        yield path, dataclasses.replace(problem, where=written.where(path))
