"""The base of a run that was held in four bits, written for other programs as it was held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from petune.errors import UsageError
from petune.models.loading import read_config
from petune.models.quantise import quantise_blocks
from petune.models.source import model_files, resolve_model
from petune.recipe import Recipe, load_recipe
from petune.run.build import load_base
from petune.run.readers import Processors, inputs_of
from petune.saving.four_bit import save_base
from petune.saving.tuning_record import Record
from petune.tasks import TASKS


def write_held_base(
    recipe: Recipe,
    record: Record,
    task: str,
    folder: Path,
    *,
    verify_base: bool = False,
    overwrite: bool = False,
) -> Path:
    """Write the base of a finished run with `base_dtype: nf4`, read from its files again and quantised on the
    CPU, as `save_base`, and what makes its inputs.

    It is read in the dtype that it was trained in; a head that no file holds is drawn again from the run's
    seed. Raises UsageError for a run with another base_dtype, for `init: pissa` and for a base that was given
    in memory; otherwise as `save_base` and `Record.check_base`.
    """
    source = resolve_model(recipe.model, recipe.folder)
    if recipe.base_dtype != "nf4":
        what = "this run's base was not held in four bits"
        found = recipe.base_dtype or "no base_dtype"
        remedy = "its base is the model of its recipe: peft and transformers read it as it is"
        raise UsageError(what, where="base_dtype", expected="nf4", found=found, remedy=remedy)
    if getattr(record.config, "init", None) == "pissa":
        what = "init: pissa quantised what its components left of the base, not the base"
        remedy = "give transformers the base as it was: petune export RUN --to peft is a tuning of that"
        raise UsageError(what, where="method.init", remedy=remedy)
    if source.kind == "object":
        remedy = 'petune.save_base(petune.wrap(model, base_dtype="nf4"), folder) writes it'
        raise UsageError("the base of this run was given in memory", where="model", remedy=remedy)
    kinds = {row[0] for row in record.facts["base"]["fingerprint"]["tensors"].values()}
    recipe = load_recipe(recipe, {"dtype": "bf16" if "bfloat16" in kinds else "fp32"})
    files = {} if source.kind == "config" else model_files(source.place, source.revision)
    record.check_files(files, weights=False)  # before a config is read that could say anything
    config = read_config(source)
    own = replace(source, kind="folder", place=str(record.file.parent), revision=None)
    tokenizer, reader = inputs_of(own, config)
    loaded = load_base(source, TASKS[task], record.labels, recipe, tokenizer, config=config)
    loaded.model.requires_grad_(False)
    quantise_blocks(loaded.model, loaded.family, "nf4")
    model = loaded.read()
    record.check_base(model, files, verify_base)
    return save_base(model, folder, tokenizer=Processors(tokenizer, reader), overwrite=overwrite)
