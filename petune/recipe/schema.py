"""The keys of a recipe and the frozen object they become.

Top-level keys are declared here; the settings of data, of a method, of memory and of an axis of parallel are
read from their config dataclasses (type, default, range, doc), so a new setting there is a new key here.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, SkipValidation, create_model

from petune.errors import FileError
from petune.files.given import in_home
from petune.kernels.configs import KEEPS, BaseDtype, KernelsName, MemoryConfig
from petune.methods.configs import METHODS, ROOM, MethodConfig, method_of, name_of
from petune.parallel.configs import BACKENDS, ParallelConfig
from petune.recipe.raw import AUTO, OPTIONAL, PARALLEL, SECTIONS, Written
from petune.recipe.yaml_lines import KeyPath, dotted, short, write_scalar
from petune.tasks.configs import DataConfig, EmbedConfig, PreferConfig, RerankConfig

# What the recipe names as input; a relative one is looked for beside the recipe, then in the working
# directory.
INPUTS: tuple[KeyPath, ...] = (("model",), ("data", "path"), ("data", "eval"), ("init_adapter",))
PATHS = (*map(dotted, INPUTS), "cache_folder", "rows_cache", "out")

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
_WHOLE_LIMIT = 2**31  # a setting without an upper bound of its own stays below these
_NUMBER_LIMIT = 1e9


def _data_in_home(data: DataConfig | None) -> DataConfig | None:
    """The same of what data names; None where it is wrong, which is told already."""
    return data and dataclasses.replace(data, path=in_home(data.path), eval=data.eval and in_home(data.eval))


Count = Annotated[int, Field(ge=1, lt=_WHOLE_LIMIT)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(in_home)]  # a file, a folder, or a name
Tracker = Literal[
    "tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "aim", "clearml", "dvclive", "swanlab"
]


class Recipe(BaseModel):
    """What to train, on what, how. Frozen; made by `load_recipe`, which also checks the rules between
    keys."""

    model_config = _STRICT

    version: Literal[1] = Field(1, description="version of the recipe format")
    name: Annotated[str, Field(min_length=1)] = Field(
        "run", description="name of the run, in its folder and README; the file's name"
    )
    model: PathText = Field(
        description="folder, hub id[@revision], demo:NAME, or config:FILE for random weights"
    )
    data: Annotated[SkipValidation[DataConfig], AfterValidator(_data_in_home)] = Field(
        description="file, folder, glob, demo:NAME or hub id; or a mapping with path and more"
    )
    task: (
        Literal["classify", "tokens", "mlm", "seq2seq", "causal", "chat", "prefer", "embed", "rerank"] | None
    ) = Field(
        None,
        description=(
            "classify, tokens, mlm, seq2seq, causal, chat, prefer, embed or rerank; null: inferred from"
            " model and data where unambiguous"
        ),
    )
    method: SkipValidation[MethodConfig] = Field(
        description=f"{', '.join(METHODS)}; or a mapping with name and settings"
    )
    epochs: Annotated[float, Field(gt=0, le=10_000)] = Field(
        1.0, description="passes over the training rows; fractions count"
    )
    max_steps: Count | None = Field(
        None, description="stop after this many optimizer steps, even if epochs would go on"
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = Field(8, description="rows per forward pass")
    accumulate: Annotated[int, Field(ge=1, le=65_536)] = Field(
        1, description="forward passes per optimizer step"
    )
    eval_batch_size: Annotated[int, Field(ge=1, le=65_536)] | None = Field(
        None, description="batch_size of evaluation; null: the same"
    )
    lr: Annotated[float, Field(gt=0, le=10)] | None = Field(
        None, description="peak learning rate; null: the method's usual one, by the model's width"
    )
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear", description="lr after the warm-up; linear and cosine end at 0"
    )
    warmup: Annotated[float, Field(ge=0, le=1_000_000)] = Field(
        0.03, description="below 1 a share of all steps, else a number of steps"
    )
    weight_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="AdamW's decoupled weight decay, of matrices; not of biases, norms, gates and scales"
    )
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="AdamW's decay of the gradient mean")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.999, description="AdamW's decay of the squared gradient"
    )
    clip: Annotated[float, Field(gt=0, le=_NUMBER_LIMIT)] | None = Field(
        1.0, description="largest gradient norm; null: no clipping"
    )
    on_spike: Literal["off", "warn", "stop", "skip", "rewind"] = Field(
        "off",
        description=(
            "a loss or gradient norm far outside its recent range: warn, stop, skip the step, rewind to the"
            " last saved state"
        ),
    )
    spike_window: Annotated[int, Field(ge=16, le=10_000)] = Field(
        64, description="on_spike: steps that the recent range is made of"
    )
    spike_threshold: Annotated[float, Field(gt=0, le=_NUMBER_LIMIT)] = Field(
        10.0,
        description=(
            "on_spike: usual distances (1.48 median absolute deviations) above the median at which the range"
            " ends"
        ),
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="seed of initialisation, data order and dropout"
    )
    dtype: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="of frozen weights and activations; auto: bf16 on cuda"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    gradient_checkpointing: bool = Field(
        False, description="recompute activations in the backward pass: less memory, more time"
    )
    compile: bool = Field(False, description="torch.compile the model")
    kernels: KernelsName = Field(
        "auto", description="fused blocks and loss; auto: where Triton can run; off: the model's own"
    )
    memory: SkipValidation[MemoryConfig] = Field(
        MemoryConfig(),
        description=(
            f"what fused blocks keep for the backward pass: {', '.join(KEEPS)}; or a mapping with keep and"
            " more"
        ),
    )
    base_dtype: BaseDtype | None = Field(
        None,
        description=(
            "hold frozen weights of the blocks in fewer bytes: nf4 (4.13 bits), int8, fp8 (multiplies in"
            " them); not exact"
        ),
    )
    prefer: SkipValidation[PreferConfig] = Field(
        PreferConfig(), description="task prefer: dpo, ipo, orpo or kto; or a mapping with loss and more"
    )
    embed: SkipValidation[EmbedConfig] = Field(
        EmbedConfig(), description="task embed: mean or cls pooling; or a mapping with pooling and more"
    )
    rerank: SkipValidation[RerankConfig] = Field(
        RerankConfig(), description="task rerank: bce or softmax; or a mapping with loss"
    )
    cache: bool | Literal["fp32", "bf16", "fp8"] = Field(
        False,
        description="side, head: run the frozen backbone once for each row; true, or a dtype to store",
    )
    cache_folder: PathText | None = Field(
        None, description="cache: folder that keeps it for other runs; null: in the run folder until its end"
    )
    cache_room: Annotated[float, Field(ge=0, le=1)] = Field(
        ROOM,
        description="cache: share of GPU memory left by a step that rows may take, where all fit; 0: none",
    )
    rows_cache: PathText = Field(
        "auto",
        description=(
            "folder that keeps tokenized rows for all ranks of a host and for later runs; auto: the user's"
            " cache folder, from 4 MiB of data on; off: every process makes its own"
        ),
    )
    rows_cache_gib: Annotated[float, Field(gt=0, le=_NUMBER_LIMIT)] = Field(
        50.0, description="rows_cache: GiB that it may take; what was unused longest is deleted"
    )
    parallel: SkipValidation[ParallelConfig] = Field(
        ParallelConfig(),
        description=(
            "none; auto: chosen for the devices here; a backend (dp, tp, sp, galaxy, galaxy2, cut, pp); or a"
            " mapping of backends to size or settings"
        ),
    )
    eval_every: Count | None = Field(None, description="steps between evaluations; null: after each epoch")
    save_every: Count | None = Field(None, description="steps between checkpoints; null: after each epoch")
    snapshot_every: Count | None = Field(
        None,
        description=(
            "steps between snapshots: copied beside the next step, written as the disk has time; null: none"
        ),
    )
    keep: Annotated[int, Field(ge=2, le=1000)] = Field(
        2, description="checkpoints kept; the best one is kept besides"
    )
    metric: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="decides which checkpoint is best; null: the task's own"
    )
    direction: Literal["auto", "min", "max"] = Field(
        "auto", description="which metric is better; auto: known from the metric"
    )
    patience: Count | None = Field(
        None, description="stop after this many evaluations without a better metric; null: never"
    )
    class_weights: (
        Literal["none", "balanced"] | dict[str, Annotated[float, Field(gt=0, le=_NUMBER_LIMIT)]]
    ) = Field("none", description="classify: balanced, or a mapping of label to weight in the loss")
    head_only: bool = Field(
        True,
        description=(
            "classify: also train a head on the frozen model, as the score to beat; method head is such a one"
        ),
    )
    timeout: Annotated[float, Field(ge=1, le=86_400)] = Field(
        60.0, description="several processes: seconds one may be silent before the run ends, naming it"
    )
    trackers: tuple[Tracker, ...] = Field(
        (), description="also log to these, through accelerate; metrics.jsonl is always written"
    )
    report: bool = Field(True, description="also leave report.html: the run as one page, without a network")
    init_adapter: PathText | None = Field(
        None, description="folder of tuned weights to start from, petune's or peft's"
    )
    out: PathText | None = Field(None, description="run folder; null: runs/<recipe>-<time>")

    _source: Path | None = PrivateAttr(None)
    _folder: Path = PrivateAttr(default_factory=Path)
    _notes: tuple[str, ...] = PrivateAttr(())
    _written: Written = PrivateAttr(default_factory=lambda: Written())

    @property
    def source(self) -> Path | None:
        """The file it was read from; None for a recipe made from a mapping."""
        return self._source

    @property
    def folder(self) -> Path:
        """Where input paths are looked for first: the recipe's folder."""
        return self._folder

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of these settings: that they are the neutral ones, or that some were chosen
        for a demo."""
        return self._notes

    @property
    def given(self) -> frozenset[KeyPath]:
        """The key paths that were written, in the file, on the command line or in Python; all others have
        their defaults."""
        return frozenset(self._written.places)

    @property
    def lines(self) -> Mapping[str, int]:
        """Line in `source` of every key path the file sets (`method.r`, `trackers[0]`); settings from the
        command line have none."""
        return {dotted(path): line for path, line in self._written.lines.items()}

    @property
    def method_name(self) -> str:
        """The name of the method: full, lora, ..."""
        return name_of(self.method)

    @property
    def learning_rate(self) -> float:
        """`lr`; the method's usual one of a wide model where none is set and the model was not looked at."""
        return method_of(self.method).usual_lr if self.lr is None else self.lr

    def where(self, key: str) -> str:
        """The place to name in an error about `key`: `recipe.yaml:4`, `command line`, or the file when the
        key has its default."""
        path = tuple(key.split("."))
        return self._written.where(
            next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self._written.places), ())
        )

    def resolve_path(self, text: str) -> Path | None:
        """The existing file or folder `text` means: beside the recipe, else from the working directory; None
        when neither is there."""
        try:
            return next((path for path in (self._folder / text, Path(text)) if path.exists()), None)
        except (
            OSError,
            ValueError,
        ):  # too long or with characters no path has: a hub id or a typing error, not a path
            return None

    def adapter_folder(self) -> Path:
        """The folder that `init_adapter` means. Raises FileError where there is none."""
        given = self.init_adapter or ""
        if (found := self.resolve_path(given)) is None:
            remedy = "give the folder of an adapter, from the recipe or from here, or leave the key out"
            where = self.where("init_adapter")
            raise FileError("init_adapter is not there", where=where, found=given, remedy=remedy)
        return found

    def resolved(self) -> dict[str, Any]:
        """Every value as plain data: inputs that lie on this machine as absolute paths."""
        values: dict[str, Any] = {name: getattr(self, name) for name in type(self).model_fields}
        values["data"] = _as_dict(self.data)
        values["method"] = {"name": self.method_name, **_as_dict(self.method)}
        values |= {key: _as_dict(getattr(self, key)) for key in OPTIONAL}
        values["parallel"] = {name: _as_dict(axis) for name, axis in self.parallel.axes.items()} or (
            AUTO if self.parallel.auto else "none"
        )
        for path in INPUTS:
            holder = values["data"] if path[0] == "data" else values
            if isinstance(holder.get(path[-1]), str):
                holder[path[-1]] = self._absolute(holder[path[-1]])
        return {key: _as_plain(value) for key, value in values.items()}

    def _absolute(self, text: str) -> str:
        prefix, rest = ("config:", text.removeprefix("config:")) if text.startswith("config:") else ("", text)
        found = self.resolve_path(rest)
        return prefix + (str(found.absolute()) if found else rest)

    def to_yaml(self) -> str:
        """`resolved()` as a recipe, each key with its meaning; reading it back gives the same recipe."""
        lines = [f"# Every setting of {short(self.name)}, defaults included."]
        docs = {name: info.description for name, info in type(self).model_fields.items()}
        for key, value in self.resolved().items():
            if key == PARALLEL and isinstance(value, dict):
                lines += [f"{key}:  # {docs[key]}", *self._parallel_lines(value)]
                continue
            if key not in SECTIONS:
                lines.append(_line(key, value, docs[key]))
                continue
            lines += [f"{key}:  # {docs[key]}"]
            inner = field_docs(type(getattr(self, key)))
            lines += [_line(f"  {name}", item, inner.get(name, "the method")) for name, item in value.items()]
        return "\n".join(lines) + "\n"

    def _parallel_lines(self, axes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        docs = field_docs(ParallelConfig)
        for name, settings in axes.items():
            yield f"  {name}:  # {docs[name]}"
            inner = field_docs(BACKENDS[name])
            yield from (_line(f"    {setting}", value, inner[setting]) for setting, value in settings.items())


def _bounded(kind: Any, metadata: Mapping[str, Any]) -> Any:
    """The annotation `kind` of a config field with the ranges and choices of its metadata, as pydantic reads
    them."""
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return Union[tuple(_bounded(one, metadata) for one in arguments)]  # noqa: UP007 - built at run time
    if kind in (int, float):
        bounds = {name: metadata[name] for name in ("ge", "gt", "le", "lt") if name in metadata}
        if not {"le", "lt"} & bounds.keys():
            bounds["lt"] = _WHOLE_LIMIT if kind is int else _NUMBER_LIMIT
        return Annotated[kind, Field(**bounds)]
    if kind is str and "choices" in metadata:
        return Literal[tuple(metadata["choices"])]
    if get_origin(kind) is tuple:
        return tuple[_bounded(arguments[0], metadata), ...]  # type: ignore[misc]  # built at run time
    if isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping):
        keys = Literal[tuple(metadata["keys"])] if "keys" in metadata else str
        return dict[keys, _bounded(arguments[1], metadata)]  # type: ignore[valid-type, misc]  # as above
    return kind


@functools.cache
def section_model(config: type, name: str = "") -> type[BaseModel]:
    """The pydantic model of a config dataclass; a method's also has its `name`."""
    hints = get_type_hints(config)
    settings: dict[str, Any] = {"name": (Literal[name], Field(description="the method"))} if name else {}
    for entry in dataclasses.fields(config):
        default: dict[str, Any] = {}
        if entry.default is not dataclasses.MISSING:
            default["default"] = entry.default
        elif entry.default_factory is not dataclasses.MISSING:
            default["default_factory"] = entry.default_factory
        kind = _bounded(hints[entry.name], entry.metadata)
        settings[entry.name] = (kind, Field(description=entry.metadata.get("doc"), **default))
    return create_model(config.__name__, __config__=_STRICT, **settings)


def _as_dict(config: Any) -> dict[str, Any]:
    return {entry.name: _as_plain(getattr(config, entry.name)) for entry in dataclasses.fields(config)}


def _as_plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value


def field_docs(config: type) -> dict[str, str]:
    """What each field of a config means, by name."""
    return {entry.name: entry.metadata.get("doc", "") for entry in dataclasses.fields(config)}


def _line(key: str, value: Any, doc: str | None) -> str:
    return f"{key}: {write_scalar(value)}".ljust(36) + (f"  # {doc}" if doc else "")
