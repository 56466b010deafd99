"""The order of passes: data and tokenizer, then load -> tune, and by the Runner stack -> cut -> place.

`prepare` reads everything that can be wrong before a weight is loaded, so a bad data file costs seconds and
writes nothing. `build` makes the whole tuned model without its weights; `run_on` hands it to a Runner, which
cuts it, and each rank reads its part. New tensors are drawn from seed and names, alike under every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from petune.errors import MachineError, UsageError
from petune.log import phase, say, warn
from petune.methods import tune, tuned_parameters, tuning, untouched
from petune.methods.configs import method_of
from petune.methods.coverage import coverage
from petune.methods.targets import head_modules
from petune.methods.trainable import hold_biases, widen
from petune.models import FAMILIES, family_of
from petune.models.contents import attach, contents_of
from petune.models.fresh import draw_tuned
from petune.models.heads import reads
from petune.models.languages import speak
from petune.models.loading import (
    Head,
    Loaded,
    adopt_model,
    kind_of,
    load_model,
    packs,
    read_config,
)
from petune.models.source import ModelSource, resolve_model
from petune.parallel import ALONE, Mesh, ParallelConfig, ParallelPlan, Runner, make_plan, parallelize
from petune.parallel.placement import Placement, parts_of
from petune.parallel.tensor.shard_params import refuse_cut_form
from petune.recipe import Recipe, with_rate
from petune.run.balance import balance_in, refuse_parted
from petune.run.fisher import weigh_by_rows
from petune.run.fusing import fuse
from petune.run.objective import embed_objective, objective_of, rerank_objective
from petune.run.objects import NO_OBJECTS, Objects
from petune.run.readers import Processors, inputs_of, with_language
from petune.run.rows import rows_of
from petune.run.streaming import refuse_unstreamable, stream, streams
from petune.saving.export import Processor, refuse_unwritable
from petune.saving.load import load
from petune.tasks import (
    TASKS,
    Encoded,
    RowFacts,
    Task,
    check_fit,
    detect_format,
    infer_task,
    refuse_single,
)
from petune.tasks.classify import READ_AT_END, refuse_unended
from petune.tasks.embed import refuse_alone
from petune.tasks.judgements import refuse_other_rows
from petune.tasks.media import Reader, refuse_settings


@dataclass(frozen=True)
class Prepared:
    """A recipe with its data read and tokenized; no weights yet. config: the model's, as it was read.
    tokenizer: None for a model that reads pictures, which has a `reader`. restored: what trains will be read
    from a checkpoint, whatever it begins as."""

    recipe: Recipe
    source: ModelSource
    config: Any
    task: Task
    tokenizer: PreTrainedTokenizerBase | None
    rows: RowFacts
    encoded: Encoded
    objects: Objects = NO_OBJECTS
    reader: Reader | None = None
    restored: bool = False

    @property
    def processor(self) -> Processor:
        """What is saved beside the model, so that others give it the same inputs."""
        return Processors(self.tokenizer, self.reader)

    @cached_property
    def place(self) -> ComputeSetting:
        """Where it runs, asked when this process knows its device."""
        return choose_place(self.recipe)


@dataclass(frozen=True)
class ComputeSetting:
    """Where a model runs and in what: the device, the dtype of frozen weights, and autocast around every
    forward."""

    device: torch.device
    dtype: torch.dtype

    def autocast(self) -> AbstractContextManager[Any]:
        """bf16 matmuls when frozen weights are bf16; nothing otherwise."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype is torch.bfloat16 else nullcontext()

    def __str__(self) -> str:
        return f"{'bf16' if self.dtype is torch.bfloat16 else 'fp32'} on {self.device.type}"


def choose_place(recipe: Recipe) -> ComputeSetting:
    """The device and dtype a recipe means here. Raises MachineError for cuda without a CUDA device."""
    available = torch.cuda.is_available()
    if recipe.device == "cuda" and not available:
        raise MachineError(
            "device: cuda, but this machine shows no CUDA device", remedy="use device: auto or cpu"
        )
    cuda = recipe.device == "cuda" or (recipe.device == "auto" and available)
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    bf16 = recipe.dtype == "bf16" or (recipe.dtype == "auto" and device.type == "cuda")
    return ComputeSetting(device, torch.bfloat16 if bf16 else torch.float32)


@dataclass(frozen=True)
class Base:
    """The model that a recipe names, before a weight is read. Each fact is read when it is first asked for,
    and once.

    Raises FileError then for a model that is not there.
    """

    recipe: Recipe
    objects: Objects = NO_OBJECTS

    @cached_property
    def source(self) -> ModelSource:
        """Where it lies."""
        return resolve_model(self.recipe.model, self.recipe.folder)

    @cached_property
    def config(self) -> Any:
        """Its config in transformers."""
        return read_config(self.source) if self.objects.model is None else self.objects.model.config


def prepare(
    recipe: Recipe,
    labels: tuple[str, ...] | None = None,
    objects: Objects = NO_OBJECTS,
    base: Base | None = None,
) -> Prepared:
    """Find the model, read and check the rows, tokenize them. Loads no weights and writes nothing.

    `objects` are what was given from Python and the recipe names by fingerprint. `labels` are the classes of
    a model that is already trained, in the order of their ids; the rows may have no others. `base`: the
    model, where it was found already. Raises UsageError when task, data and model do not go together,
    DataError for bad rows, FileError for a model that is not there.
    """
    base = base or Base(recipe, objects)
    source, config = base.source, base.config
    recipe, kind = with_rate(recipe, config), kind_of(config)
    name = recipe.task or infer_task(detect_format(recipe.data, recipe.folder, objects.data), kind)
    check_fit(name, kind, recipe.data.packing, packs(config), reads(config))
    refuse_settings(recipe.data, reads(config))
    labels = labels or (objects.labels if TASKS[name].names_classes else None)
    tokenizer, reader = inputs_of(source, config, objects.tokenizer, objects.processor)
    tokenizer = with_language(tokenizer, reader, recipe.data, source, objects.model)
    rows, encoded = rows_of(recipe, name, config, positions_of(config), tokenizer, labels, objects, reader)
    if name == "prefer":
        refuse_other_rows(recipe.prefer, rows.format, recipe.where("prefer"))
    if name == "classify" and config.model_type in READ_AT_END:
        for side in (encoded.train, encoded.eval):
            refuse_unended(side, config.eos_token_id)
    if name == "embed":
        refuse_alone(encoded.train, recipe.batch_size, recipe.where("batch_size"))
    if name == "rerank":
        refuse_single(recipe.rerank, encoded.train, recipe.where("rerank"))
    return Prepared(recipe, source, config, TASKS[name], tokenizer, rows, encoded, objects, reader)


def positions_of(config: Any) -> int | None:
    """The longest sequence a model of this config takes, in tokens; None when its positions are relative and
    know no end."""
    family = FAMILIES.get(config.model_type)
    if family is not None and not family.bounded:
        return None
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)


def load_base(
    source: ModelSource,
    task: Task,
    labels: Sequence[str] | None,
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase | None,
    given: PreTrainedModel | None = None,
    config: Any = None,
) -> Loaded:
    """The untouched model of a recipe, before its weights are read, heads drawn from the recipe's seed; or,
    in place, the one that was `given` in memory.

    config: the model's, where it was read already; it stays as it is.
    """
    whole = method_of(recipe.method).trains_base and not streams(recipe)
    dtype = torch.float32 if whole else choose_place(recipe).dtype
    ends = (source, cast("Head", task.head), task.outputs(labels), dtype)
    own = (*ends, deepcopy(config), recipe.seed)
    loaded = load_model(*own) if given is None else adopt_model(given, *ends)
    if tokenizer is not None:
        loaded.model.config.pad_token_id = tokenizer.pad_token_id
        speak(loaded.model, tokenizer)
    for name in {*head_modules(loaded.model, loaded.family, "auto"), *loaded.new}:
        loaded.model.get_submodule(name).float()  # they train in float32, and are read back in it
    return loaded


def build(prepared: Prepared) -> nn.Module:
    """The tuned model of a recipe, whole, in eval mode: on the meta device, with its contents, where its
    files are read by ranges; else in memory, on the CPU.

    Modules the checkpoint had no weights for train beside the method, or they would stay random for ever;
    tensors that train are float32, but for those of a streamed model. Raises UsageError for a recipe that
    cannot be streamed here.
    """
    recipe, place = prepared.recipe, prepared.place
    refuse_unstreamable(recipe, place.dtype, place.device)
    given = prepared.objects.model
    with phase("building the model"):
        task, labels, tokenizer = prepared.task, prepared.rows.labels, prepared.tokenizer
        loaded = load_base(prepared.source, task, labels, recipe, tokenizer, given, prepared.config)
    model, contents = cast("nn.Module", loaded.model), loaded.contents
    if loaded.note:
        say(loaded.note)
    with phase(f"adding {recipe.method_name} to the model"):
        if recipe.init_adapter is not None:
            model, contents = _start_from(loaded.read(), recipe), None
        else:
            if recipe.method.reads_weights:
                model, contents = loaded.read(), None
            weigh_by_rows(model, prepared)
            torch.manual_seed(recipe.seed)  # components of weights are found from random ones
            tune(model, _with_new(recipe.method, model, loaded))
    refuse_unwritable(model)
    if (line := untouched(model)) is not None:
        warn(line)
    if (line := coverage(model, recipe.base_dtype)) is not None:
        say(line)
    _widen(model, recipe)
    if contents is not None:
        attach(model, contents)
    elif recipe.init_adapter is None:
        draw_tuned(model, recipe.seed)
    torch.manual_seed(recipe.seed)  # whatever was drawn on the way
    return model


def _widen(model: nn.Module, recipe: Recipe) -> None:
    """Let what trains be float32, unless the model is streamed. Raises UsageError for what cannot train."""
    tuned = tuned_parameters(model)
    for name, parameter in tuned.items():
        if not parameter.is_floating_point():
            what, found = "this tensor cannot train: it is not of floating point", str(parameter.dtype)
            raise UsageError(what, where=name, found=found, remedy="use lora, or a model in bf16 or fp32")
    if not streams(recipe):
        widen(model, tuned.values())


def plan_of(recipe: Recipe, world: int | None = None, base: Base | None = None) -> ParallelPlan:
    """The parallel plan of a recipe, over `world` processes that exist, or over as many as it asks for. Loads
    no weights.

    base: the model, where it was found already.
    Raises UsageError for a plan that cannot be, with every reason.
    """
    if recipe.parallel == ParallelConfig():
        return ALONE
    config = (base or Base(recipe)).config
    family = FAMILIES.get(config.model_type)
    if recipe.compile:
        what = "compile does not go with a parallel plan"
        raise UsageError(what, where=recipe.where("compile"), remedy="set compile: false")
    task = recipe.task or infer_task(detect_format(recipe.data, recipe.folder), kind_of(config))
    available = torch.cuda.device_count() if choose_place(recipe).device.type == "cuda" else 2
    plan = make_plan(
        recipe.parallel,
        family,
        config,
        world,
        recipe.batch_size,
        available,
        vocabulary_head=TASKS[task].over_vocabulary,
        still=method_of(recipe.method).head_alone,
    )
    asked = getattr(config, "output_router_logits", False) and getattr(config, "router_aux_loss_coef", 0)
    if asked and TASKS[task].over_vocabulary:
        refuse_parted(plan, recipe.data.packing, recipe.where("parallel"))
    if recipe.base_dtype is not None and plan.cut is not None and family is not None:
        refuse_cut_form(recipe.base_dtype, plan.cut, family.shape(config))
    return plan


def run_on(model: nn.Module, prepared: Prepared, mesh: Mesh, weights: Tensor | None) -> Runner:
    """The tuned model cut and placed by the plan of `mesh`. `weights` are the classes' in the loss, on the
    mesh's device."""
    recipe, family, again = prepared.recipe, family_of(model), prepared.recipe.gradient_checkpointing
    found = objective_of(
        prepared.task, weights, balance_in(model, mesh, recipe.data.packing), recipe.prefer, mesh
    )
    texts = len(prepared.encoded.train[0].texts)
    if prepared.task.name == "embed":
        found = embed_objective(recipe.embed, texts, mesh)
    elif prepared.task.name == "rerank":
        found = rerank_objective(recipe.rerank, texts)
    objective = replace(found, autocast=prepared.place.autocast)
    unread = contents_of(model) is not None
    with phase("reading the weights" if unread else f"moving the model to {mesh.device}"):
        where = parallelize(
            model,
            family,
            mesh.plan,
            mesh,
            objective.tuned,
            recompute=again,
            streams=streams(recipe),
            base_dtype=recipe.base_dtype,
        )
        _hold_biases(where, unread)
        runner = Runner(where, objective)
    with phase("fusing the blocks"):
        fuse(runner, recipe)
    if streams(recipe):
        stream(runner, recipe, prepared.place.autocast())
    if recipe.gradient_checkpointing and not runner.owned and mesh.plan.world > 1:
        remedy = "set gradient_checkpointing: false, or parallel: none"
        what = "replicas of this model cannot recompute: its blocks are not ours"
        raise UsageError(what, where="gradient_checkpointing", remedy=remedy)
    if recipe.gradient_checkpointing and not runner.owned:
        _checkpoint_activations(runner.model)
    if recipe.compile:
        runner.model.compile()
    return runner


def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute activations in the backward pass, in the form that does not need inputs to require
    gradients."""
    names = "activation_checkpointing_enable", "gradient_checkpointing_enable"  # the older transformers'
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None:
        what, found = "this model has no gradient checkpointing", type(model).__name__
        raise UsageError(what, where="gradient_checkpointing", found=found, remedy="set it to false")
    enable({"use_reentrant": False})


def _hold_biases(where: Placement, unread: bool) -> None:
    """Remember the base's biases as this rank holds them. Those of a model that was in memory are known
    whole, and an adapter that the run begins with may have changed them."""
    for module in where.modules:
        hold_biases(module)
        record = tuning(module)
        for part in parts_of(record.held.items(), where.placed, where.mesh) if not unread else ():
            ends = zip(part.start, part.out.shape, strict=True)
            box = tuple(slice(first, first + size) for first, size in ends)
            part.out.copy_(record.biases[part.name][box])


def _start_from(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The model tuned as the folder of `init_adapter` says; its settings count, not the recipe's, but the
    method must be the same."""
    folder, where = recipe.adapter_folder(), recipe.where("init_adapter")
    model = load(model, folder, wide=True)
    say(f"starting from {folder}: what it was tuned with counts, not the settings under `method`")
    if tuning(model).method != recipe.method_name:
        raise UsageError(
            f"{folder} was tuned with {tuning(model).method}", where=where, expected=recipe.method_name
        )
    return model


def _with_new(method: Any, model: nn.Module, loaded: Loaded) -> Any:
    """The method's config with fresh modules added to what trains beside it."""
    if method_of(method).trains_base or not loaded.new:
        return method
    named = head_modules(model, loaded.family, method.also_train)
    return replace(method, also_train=tuple(dict.fromkeys((*named, *loaded.new))))
