"""Several adapters on one base: one more, drawn or read; and folders of them, a sub-folder each, as peft lays
them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from petune.errors import UsageError
from petune.files.given import path_of
from petune.files.manifest import MANIFEST, RECORD, check_folder, seal_folder
from petune.log import say
from petune.methods import Tuning, describe, lora, tune, tuning
from petune.methods.configs import LoraConfig, make_config
from petune.methods.several import alone, bare_base, refuse_unfit, take
from petune.methods.wrapped import bare, refuse_no_model, refuse_replicas
from petune.models.tuned_linear import tuned_layers
from petune.saving.combining import read_adapter
from petune.saving.fingerprint import plain_name
from petune.saving.peft import CONFIG, Adapter
from petune.saving.tuning_record import family_name

Model = TypeVar("Model", bound=nn.Module)


def add(
    model: Model, name: str, method: str = "lora", *, folder: str | Path | None = None, **settings: Any
) -> Model:
    """Give `model` one more adapter, beside those it has from here: a fresh one, or that of a LoRA folder.

        >>> base = transformers.AutoModelForCausalLM.from_pretrained("my-model")
        >>> model = petune.add(base, "poet", r=8)
        >>> model = petune.add(model, "clerk", r=4, targets=["q", "v"])

    `settings` and the start of a fresh one are as for `wrap`, with method lora alone; its factors are A
    [r, in] and B [out, r], float32 or wider. All adapters train; the first acts until `active` or `per_row`
    say otherwise. Blocks are not fused.

    Raises UsageError for a name that is taken or cannot name a folder, for a model that is wrapped or merged,
    for other methods, and for what changes more than layers of its own: modules trained whole, biases, token
    rows, init: pissa; FileError as `load`.
    """
    refuse_no_model(model)
    refuse_replicas(model, "petune.add(model, name, ...)")
    inner = bare(model)
    if folder is not None:
        if settings or method != "lora":
            raise UsageError("a folder says its settings itself", where=name, remedy="leave them out")
        _add_read(inner, name, path_of(folder))
        return model
    config = make_config(method, settings)
    if not isinstance(config, LoraConfig):
        what, remedy = "several adapters on one base are LoRA alone", "use lora, or a base for each"
        raise UsageError(what, where=name, found=method, remedy=remedy)
    refuse_unfit(inner, name, config)
    with bare_base(inner):
        tune(inner, config)
        made, record = dict(tuned_layers(inner)), tuning(inner)
    take(inner, name, made, record)
    say(describe(inner))
    return model


def _add_read(model: nn.Module, name: str, folder: Path, **base: Any) -> None:
    """Add the adapter of a LoRA folder. base: `verify_base` and `base_files`, as for `load`."""
    refuse_unfit(model, name, LoraConfig())
    with bare_base(model):
        made, record = _read(model, read_adapter(model, folder, **base))
    take(model, name, made, record)
    say(describe(model))


def _read(model: nn.Module, adapter: Adapter) -> tuple[dict[str, Any], Tuning]:
    """The layers of an adapter on `model`, which is not changed, and how they are tuned."""
    plain = {plain_name(name): (name, module) for name, module in model.named_modules()}
    made = {}
    for name, own in adapter.layers.items():
        if name not in plain:
            what = "several adapters do not share a weight of experts"
            raise UsageError(what, where=name, remedy="load it as the only one: petune.load")
        full, layer = plain[name]
        factors = {leaf: adapter.state[f"{name}.{leaf}"] for leaf in ("lora_A", "lora_B")}
        made[full] = lora.tune(layer, own, factors)
    return made, Tuning("lora", adapter.config, family_name(model), ())


def save_each(model: nn.Module, work: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write each adapter, as the only one of its model, into a sub-folder of its name."""
    for name in tuning(model).adapters:
        (work / name).mkdir()
        with alone(model, name):
            fill(work / name)
        seal_folder(work / name)


def holds_several(folder: Path) -> bool:
    """Whether `save` wrote several adapters here."""
    beside = any((folder / name).exists() for name in (RECORD, CONFIG, "config.json"))
    return (folder / MANIFEST).is_file() and not beside and bool(_inside(folder))


def load_each(model: nn.Module, folder: Path, **base: Any) -> None:
    """Add every adapter of a folder that `save` wrote, in the order of their names. base: as for `load`.
    Raises as `add`."""
    check_folder(folder)
    for name in _inside(folder):
        _add_read(model, name, folder / name, **base)


def _inside(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob(f"*/{RECORD}"))
