"""Bottleneck adapters as AdapterHub's library `adapters` lays them out: adapter_config.json, whose `config`
is the kind, and adapter.safetensors; beside them, where a head trains, head_config.json and
model_head.safetensors.

Keys are `<block>.<place>.adapters.<name>.adapter_down.0.weight`, the adapter's name among them. Its kinds
double_seq_bn, seq_bn and par_bn are houlsby, pfeiffer and parallel here. Names and fields are those that
adapters 1.3.0 writes (tests/saving/adapters_layout.json). Its usual .bin files are pickles, and not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from petune import methods
from petune.errors import FileError, Problem, UsageError
from petune.files.json_fields import Fields, Kind, Number, OneOf, TextValue, Truth, check_fields
from petune.files.safetensors import check_dtypes, read_json, read_tensors
from petune.log import say, warn
from petune.methods import tuned_names, tuning
from petune.methods.configs import ACTIVATIONS, ADAPTERHUB, AdapterConfig
from petune.methods.saving import check_tensors, remember, shapes_of
from petune.methods.targets import within
from petune.methods.trainable import fill
from petune.models import family_of
from petune.models.spec import Attention, Family, RoutedMlp, stack_paths
from petune.saving.fingerprint import MOST, plain_name
from petune.saving.peft import refuse_untied, repeats

CONFIG, TENSORS = "adapter_config.json", "adapter.safetensors"
HEAD_CONFIG, HEAD_TENSORS = "head_config.json", "model_head.safetensors"
VERSION = "adapters.1.3.0"  # the layout that is written

# Where the library has a sub-layer's adapter, by the linear that leaves it: both below a block.
_BERT = {"attention.output.dense": "attention.output", "output.dense": "output"}
_BART = {
    "self_attn.out_proj": "attention_adapters",
    "encoder_attn.out_proj": "cross_attention_adapters",
    "fc2": "output_adapters",
}
_T5 = {
    "layer.0.SelfAttention.o": "layer.0",
    "layer.1.EncDecAttention.o": "layer.1",
    "layer.1.DenseReluDense.wo": "layer.1",
    "layer.2.DenseReluDense.wo": "layer.2",
}
_LLAMA = {"self_attn.o_proj": "attention_adapters", "mlp.down_proj": "output_adapters"}
PLACES: Mapping[str, Mapping[str, str]] = {  # by model_type
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _BERT),
    **dict.fromkeys(("bart", "mbart"), _BART),
    **dict.fromkeys(("t5", "mt5"), _T5),
    **dict.fromkeys(("llama", "mistral"), _LLAMA),
}
_ENDS = {  # here: there
    "adapter_down.weight": "adapter_down.0.weight",
    "adapter_down.bias": "adapter_down.0.bias",
    "adapter_up.weight": "adapter_up.weight",
    "adapter_up.bias": "adapter_up.bias",
}
_THERE = {here: there for there, here in ADAPTERHUB.items()}  # it knows transformers' words besides
# What tells the kinds apart.
_FORMS: Mapping[str, Mapping[str, bool]] = {
    "houlsby": {"mh_adapter": True, "original_ln_before": False, "is_parallel": False},
    "pfeiffer": {"mh_adapter": False, "original_ln_before": True, "is_parallel": False},
    "parallel": {"mh_adapter": False, "original_ln_before": False, "is_parallel": True},
}
# The fields that petune does not compute otherwise, as it computes them.
_FIXED: Mapping[str, Any] = {
    "adapter_residual_before_ln": False,
    "inv_adapter": None,
    "leave_out": [],
    "ln_after": False,
    "ln_before": False,
    "original_ln_after": True,
    "output_adapter": True,
    "phm_layer": False,
    "residual_before_ln": True,
    "stochastic_depth": 0.0,
    "use_gating": False,
}
# Of what is off, and of how an adapter begins: no number follows from them.
_IDLE: Mapping[str, Any] = {
    "factorized_phm_W": True,
    "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "init_weights": "bert",
    "init_weights_seed": None,
    "inv_adapter_reduction_factor": None,
    "learn_phm": True,
    "phm_bias": True,
    "phm_c_init": "normal",
    "phm_dim": 4,
    "phm_init_range": 0.0001,
    "phm_rank": 1,
    "shared_W_phm": False,
    "shared_phm_rule": True,
}
_KINDS: Mapping[str, Kind] = {
    "mh_adapter": Truth(),
    "is_parallel": Truth(),
    "original_ln_before": Truth(),
    "cross_adapter": Truth(),
    "reduction_factor": Number(1, 2**20),
    "non_linearity": TextValue(ACTIVATIONS),
    "scaling": Number(1e-6, 1e6),
    "dropout": Number(0, 1),
    "architecture": OneOf(None),
}
_REQUIRED = ("mh_adapter", "reduction_factor", "non_linearity")  # the library gives the others its defaults
_REMEDY = "run it with the library `adapters`"


def is_of_adapters(fields: Mapping[str, Any]) -> bool:
    """Whether an adapter_config.json is this library's and not peft's."""
    return "peft_type" not in fields and isinstance(fields.get("config"), Mapping)


# ---------------------------------------------------------------- writing


def to_adapters(
    model: nn.Module, state: Mapping[str, Tensor], base_model: str | None, name: str
) -> dict[str, dict[str, Any]]:
    """The files of a model wrapped with adapters, by name, whose tuned state this is: JSON's fields, or
    tensors.

    Raises UsageError for another method, a model that the library does not know, and for what trains besides
    and is no head.
    """
    record = tuning(model)
    if not isinstance(record.config, AdapterConfig):
        raise UsageError(
            f"adapters' layout is for bottleneck adapters, not {record.method}",
            remedy="petune.save writes it",
        )
    keys = _keys(model, name)
    rest = {own: value for own, value in state.items() if own not in keys}
    if inside := next((own for own in rest if _inside(model, own)), None):
        what = "adapters' files have no place for what trains inside the base"
        raise UsageError(what, where=inside, remedy="petune.save keeps it")
    if record.config.dropout:
        warn("dropout inside the bottleneck has no counterpart in adapters' files: they say 0")
    config: Any = model.config
    about = {
        "hidden_size": _width(model),
        "model_class": type(model).__name__,
        "model_name": base_model or "",
        "model_type": config.model_type,
        "version": VERSION,
    }
    files: dict[str, dict[str, Any]] = {
        CONFIG: about | {"name": name, "config": _fields(model, record.config)},
        TENSORS: {keys[own]: value for own, value in state.items() if own in keys},
    }
    if rest:
        labels = {"label2id": config.label2id, "num_labels": config.num_labels}
        files |= {HEAD_CONFIG: about | {"name": None, "config": None} | labels, HEAD_TENSORS: rest}
    return files


def _fields(model: nn.Module, config: AdapterConfig) -> dict[str, Any]:
    crosses = config.kind == "houlsby" and bool(
        getattr(cast("Any", model).config, "is_encoder_decoder", False)
    )
    own = {
        "cross_adapter": crosses,
        "dropout": 0.0,
        "init_weights": "mam_adapter" if config.kind == "parallel" else "bert",
        "non_linearity": _THERE.get(config.activation, config.activation),
        "reduction_factor": config.reduction,
        "scaling": float(config.factor),
    }
    return dict(sorted({**_FIXED, **_IDLE, **_FORMS[config.kind], **own}.items()))


def _width(model: nn.Module) -> int:
    return cast("Family", family_of(model)).shape(cast("Any", model).config).width


def _inside(model: nn.Module, name: str) -> bool:
    """Whether a tensor lies in the base model, where the library looks for no head."""
    prefix = getattr(model, "base_model_prefix", "")
    roots = (prefix,) if prefix in model._modules else ("encoder", "decoder", "shared")  # of T5
    return name.partition(".")[0] in roots


class _Place(NamedTuple):
    """Of a bottleneck: its module in petune, its place in the library, and whether it is behind attention to
    an encoder."""

    own: str
    there: str
    crosses: bool


def _places_of(model: nn.Module) -> Mapping[str, str]:
    """The row of PLACES. Raises UsageError where there is none."""
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in PLACES:
        what = f"the library `adapters` has no layout for {kind} here"
        raise UsageError(
            what, expected=", ".join(PLACES), remedy="petune.save keeps adapters of every family"
        )
    return PLACES[kind]


def _bottlenecks(model: nn.Module) -> Iterator[_Place]:
    """Each bottleneck of a wrapped model."""
    places, family = _places_of(model), cast("Family", family_of(model))
    tuned = {name.rpartition(".adapter_")[0] for name in tuned_names(model) if ".adapter_" in name}
    for stack, path in stack_paths(model, family).items():
        for at, block in model.get_submodule(path).named_children():
            for one in family.stacks[stack].sublayers_in(block) if at.isdigit() else ():
                assert not isinstance(one.core, RoutedMlp), "no model of PLACES has experts"
                out, attends = one.core.region.leave, isinstance(one.core, Attention)
                crosses = isinstance(one.core, Attention) and one.core.memory is not None
                for end in (out,) if attends else (out, one.bottleneck_at(of_sum=True)):
                    if (own := f"{path}.{at}.{end}".removesuffix(".")) in tuned:
                        yield _Place(plain_name(own), plain_name(f"{path}.{at}.{places[out]}"), crosses)


def _keys(model: nn.Module, name: str) -> dict[str, str]:
    """{name in petune: key in the file} of every tensor of a wrapped model's bottlenecks."""
    return {
        f"{place.own}.{here}": f"{place.there}.adapters.{name}.{there}"
        for place in _bottlenecks(model)
        for here, there in _ENDS.items()
    }


# ---------------------------------------------------------------- reading


def check_adapters(fields: Mapping[str, Any], file: Path) -> None:
    """Raise FileError naming every field of such a config that is of another kind, unknown, or asks for what
    petune does not compute."""
    own = fields["config"]
    if (kind := own.get("architecture")) is not None:
        expected = "a bottleneck adapter (seq_bn, double_seq_bn, par_bn)"
        raise FileError(f"architecture is {kind!r}", where=str(file), expected=expected, remedy=_REMEDY)
    check_fields(own, Fields({name: _KINDS[name] for name in _REQUIRED}, _KINDS, others=True), file)
    known = {*_KINDS, *_FIXED, *_IDLE}
    problems = [
        Problem(f"{name} = {own[name]!r} is not supported"[:200], str(file), repr(value), remedy=_REMEDY)
        for name, value in _FIXED.items()
        if own.get(name, value) not in (value, *(() if value else (None, False, 0, [])))
    ]
    problems += [
        Problem(f"{name} = {value!r} is unknown to petune"[:200], str(file), remedy=_REMEDY)
        for name, value in own.items()
        if name not in known and value not in (None, False, {}, [], "")
    ]
    if _kind(own) is None:
        kinds = "double_seq_bn, seq_bn or par_bn"
        said = ", ".join(f"{name} {own.get(name, False)}" for name in _FORMS["houlsby"])
        problems.append(
            Problem(
                "is no kind of adapter petune has", str(file), kinds, said, "set kinds apart, or " + _REMEDY
            )
        )
    if problems:
        raise FileError(problems[:MOST])


def _kind(own: Mapping[str, Any]) -> str | None:
    """The kind by petune's name; where it is parallel the library asks for no norm before it."""
    said = {name: own.get(name, False) for name in _FORMS["houlsby"]}
    if said["is_parallel"]:
        said["original_ln_before"] = False
    return next((kind for kind, form in _FORMS.items() if form == said), None)


def load_adapters(model: nn.Module, fields: Mapping[str, Any], folder: Path) -> None:
    """Tune `model`, in place, as such a folder says, with the head that it has for this class of model.

    Raises FileError for a setting petune lacks, a pickle, and for tensors that are missing, unexpected,
    mis-shaped or no weights, UsageError for a model without such adapters; all before the model is changed,
    but for adapters that do not fit it.
    """
    file = folder / CONFIG
    check_adapters(fields, file)
    refuse_pickle(folder)
    _places_of(model)
    own, name = fields["config"], str(fields.get("name") or "")
    given = read_tensors(folder / TENSORS, links=True)
    heads, head = _head(model, folder)
    kind = cast("str", _kind(own))
    config = AdapterConfig(
        kind=kind,
        reduction=_reduction(model, own["reduction_factor"], file),
        activation=ADAPTERHUB.get(own["non_linearity"], own["non_linearity"]),
        scale=float(own.get("scaling", 1.0)),
        also_train=heads,
    )
    if own.get("dropout"):
        warn(
            f"{file}: dropout {own['dropout']} behind the bottleneck has no counterpart here, and is left out"
        )
    devices = {value.device for value in model.parameters() if value.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        methods.tune(model, config)
    remember(model, replace(tuning(model), config=config))
    wanted = {plain_name(key): value for key, value in tuned_names(model).items()}
    state = head | _renamed(given, {there: here for here, there in _keys(model, name).items()})
    if kind == "houlsby" and not own.get("cross_adapter"):  # here they begin by adding nothing
        across = [place.own for place in _bottlenecks(model) if place.crosses]
        state |= {key: wanted[key] for key in wanted if within(key, across) and key not in state}
    check_tensors(shapes_of(wanted), state, str(folder / TENSORS), heads)
    check_dtypes(state, {key: value.dtype for key, value in wanted.items()}, str(folder / TENSORS))
    fill(wanted, state)


def refuse_pickle(folder: Path) -> None:
    """Raise FileError for a folder that has its adapter in a pickle alone."""
    if not (folder / TENSORS).exists():
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        remedy = (
            "where you trust it, load it with adapters and save it: save_adapter(..., use_safetensors=True)"
        )
        what = "holds no adapter in safetensors, and a .bin file is a pickle, which can run code"
        raise FileError(what, where=str(folder), expected=TENSORS, found=found, remedy=remedy)


def _reduction(model: nn.Module, factor: float, file: Path) -> int:
    """The whole reduction that gives a bottleneck as wide. Raises FileError where there is none."""
    width = _width(model)
    features = max(1, int(width // factor))
    reduction = width // features
    if width // reduction != features:
        what = f"reduction_factor {factor} gives {features} features of {width}, which no whole number does"
        raise FileError(what, where=str(file), remedy=_REMEDY)
    return reduction


def _renamed(given: Mapping[str, Tensor], keys: Mapping[str, str]) -> dict[str, Tensor]:
    """Tensors by petune's names. A model with a head has the base model's names behind a prefix, or the other
    way round; what belongs nowhere keeps its name."""
    found = {}
    for key, value in given.items():
        near = [one for one in keys if one == key or one.endswith(f".{key}") or key.endswith(f".{one}")]
        found[keys[near[0]] if len(near) == 1 else key] = value
    return found


def _head(model: nn.Module, folder: Path) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The modules that the folder's head is of, and their tensors; nothing where it has none for this
    model."""
    if not (folder / HEAD_TENSORS).exists():
        return (), {}
    made = read_json(folder / HEAD_CONFIG, links=True).get("model_class")
    if made != type(model).__name__:
        say(f"{folder}: its head is one of {made} and not read")
        return (), {}
    own = dict(model.state_dict(keep_vars=True))
    given = read_tensors(folder / HEAD_TENSORS, links=True)
    others = {key for key, value in given.items() if not repeats(key, value, own, given)}
    outer = {key.partition(".")[0] for key in others}  # what was not trained is the base's own
    heads = tuple(name for name, _ in model.named_modules() if plain_name(name) in outer)
    refuse_untied(model, heads, given, folder)
    return heads, {key: value for key, value in given.items() if key in others or within(key, heads)}
