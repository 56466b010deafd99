"""Everything a recipe names, looked at before anything is spent: files, config, tokenizer, first rows, plan.
Of files with weights the headers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedTokenizerBase

from petune.errors import DataError, FileError, PetuneError, RecipeError
from petune.estimate.forecast import sketch
from petune.log import human
from petune.models.heads import Head, reads
from petune.models.loading import kind_of, load_model, packs, read_config
from petune.models.source import ModelSource, check_weights, resolve_model
from petune.recipe import Recipe
from petune.run.build import Prepared, plan_of, positions_of, prepare
from petune.run.readers import inputs_of, with_language
from petune.run.rows import shelf_of
from petune.run.setup import data_facts
from petune.tasks import check_first_rows, check_fit, detect_format, hub_specs, infer_task, make_coder, render
from petune.tasks.media import Reader, rate_of, refuse_settings
from petune.tasks.registry import find_task
from petune.tasks.rows import Row

_Found = TypeVar("_Found")


class _Looking:
    """Runs one look after another and keeps what each of them refuses."""

    def __init__(self) -> None:
        self.errors: list[PetuneError] = []

    def at(self, look: Callable[[], _Found], where: str | None = None) -> _Found | None:
        """What `look` finds; None, with its problems kept, where it refuses. `where`: the place of those that
        name none."""
        try:
            return look()
        except PetuneError as error:
            problems = [
                problem if problem.where else replace(problem, where=where) for problem in error.problems
            ]
            self.errors.append(type(error)(problems))
            return None

    def errors_of(self, kind: type[PetuneError]) -> bool:
        return any(isinstance(error, kind) for error in self.errors)

    def settle(self) -> None:
        """Raise what was found: as it was where all is of one kind, else everything in one RecipeError."""
        if not self.errors:
            return
        problems = list(dict.fromkeys(problem for error in self.errors for problem in error.problems))
        kinds = {type(error) for error in self.errors}
        raise (kinds.pop() if len(kinds) == 1 else RecipeError)(problems)


@dataclass(frozen=True)
class Inputs:
    """What a recipe means: its task, None where the model and the data that show it are on the hub; the
    columns of its rows that play no role; and what was left alone because it lies on the hub."""

    task: str | None
    unused: tuple[str, ...]
    distant: tuple[str, ...]


def check_inputs(recipe: Recipe) -> Inputs:
    """Look at all that needs no values of weights. Raises a PetuneError with every problem found."""
    looking = _Looking()
    source = looking.at(lambda: resolve_model(recipe.model, recipe.folder), recipe.where("model"))
    model = looking.at(lambda: _model(source)) if source is not None and source.kind != "hub" else None
    kind = kind_of(model[0]) if model else None
    if model and (tokenizer := model[1]) is not None:
        looking.at(lambda: make_coder(tokenizer, recipe.data, max_positions=positions_of(model[0])))
    if model:
        looking.at(lambda: refuse_settings(recipe.data, reads(model[0])))
    if model and source:
        looking.at(lambda: with_language(model[1], model[2], recipe.data, source))
    distant = looking.at(lambda: hub_specs(recipe.data, recipe.folder), recipe.where("data")) or ()
    local = not looking.errors_of(DataError) and recipe.data.path not in distant
    task: str | None = recipe.task
    format_ = looking.at(lambda: detect_format(recipe.data, recipe.folder)) if local and not task else None
    if format_ and kind:
        task = looking.at(lambda: infer_task(format_, kind))
    if task and kind and model:
        looking.at(lambda: check_fit(task, kind, recipe.data.packing, packs(model[0]), reads(model[0])))
    unused = looking.at(lambda: _first_rows(recipe, task, model)) if task and local else None
    if recipe.init_adapter is not None:
        looking.at(recipe.adapter_folder)
    if task and kind and recipe.init_adapter is None and not looking.errors_of(FileError):
        looking.at(lambda: sketch(recipe), recipe.where("method"))
    if not looking.errors and kind:
        looking.at(lambda: plan_of(recipe))
    if task and source and source.kind in ("folder", "demo") and not looking.errors:
        looking.at(lambda: load_model(source, cast("Head", find_task(task).head), None, torch.float32))
    looking.settle()
    on_hub = source is not None and source.kind == "hub"
    return Inputs(
        task,
        unused or (),
        (*((f"model {recipe.model}",) if on_hub else ()), *(f"data {spec}" for spec in distant)),
    )


_Model = tuple[Any, PreTrainedTokenizerBase | None, Reader | None]


def _model(source: ModelSource) -> _Model:
    """Config, tokenizer and reader of a model on this machine; no tokenizer of one that reads pictures, no
    reader of one that reads texts. Raises FileError for what its folder lacks."""
    looking = _Looking()
    config = looking.at(lambda: read_config(source))
    found = None if config is None else looking.at(lambda: inputs_of(source, config))
    looking.at(lambda: check_weights(source))
    looking.settle()
    return config, *(found or (None, None))


def _first_rows(recipe: Recipe, task: str, model: _Model | None) -> tuple[str, ...]:
    """Look at the first rows, for the model where it is known; a task that is not for what it reads was
    refused before."""
    known = reads(model[0]) if model else None
    rate = rate_of(model[2]) if model else None
    fits = known if known in find_task(task).reads else None
    look: Callable[[Sequence[Row]], object] | None = None
    if model and (tokenizer := model[1]) is not None and task in ("chat", "prefer"):  # a template may fail
        coder = make_coder(tokenizer, recipe.data, max_positions=positions_of(model[0]))
        encode = find_task(task).encode

        def look(rows: Sequence[Row]) -> object:
            return encode(rows, coder)

    return check_first_rows(recipe.data, task, recipe.folder, reads=fits, rate=rate, look=look)


@dataclass(frozen=True)
class Preview:
    """What a run would learn from: facts about the rows, and the first of them with what is trained in
    [[...]]. counted: the facts as setup.json of a run has them."""

    facts: tuple[str, ...]
    examples: tuple[str, ...]
    counted: Mapping[str, Any]


def _where_kept(prepared: Prepared) -> list[str]:
    """Where tokenized rows are kept, and how to be rid of them."""
    kept, shelf = prepared.encoded.kept, shelf_of(prepared.recipe)
    if kept is None or shelf is None:
        return []
    room = f"{human(shelf.used())} of at most {human(shelf.most)} used there"
    return [f"tokenized rows are kept in {kept}; {room}; to clear it: rm -r {shelf.folder}"]


def preview(recipe: Recipe, number: int) -> Preview:
    """Read and tokenize the data of a recipe and render `number` rows. Raises as `prepare` does."""
    prepared = prepare(recipe)
    chart = prepared.encoded.report.chart()
    facts = (
        f"model {prepared.source.note}",
        f"task {prepared.task.name}",
        *prepared.rows.notes,
        *prepared.encoded.report.lines(),
        *(["tokens before cutting, and rows of so many", *chart] if chart else []),
        *_where_kept(prepared),
    )
    shown = prepared.encoded.drawn(prepared.encoded.train[:number], "shown")
    examples = tuple(f"{one.where}\n{render(one, prepared.tokenizer, prepared.rows.labels)}" for one in shown)
    said = {"model": prepared.source.note, "task": prepared.task.name, "format": prepared.rows.format}
    return Preview(facts, examples, said | data_facts(prepared))
