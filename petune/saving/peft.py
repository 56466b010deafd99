"""LoRA folders as peft lays them out: adapter_config.json and adapter_model.safetensors, written for its
readers and read strictly.

Keys are `base_model.model.<module>.lora_A.weight` (embeddings: `.lora_embedding_A`) and, for modules trained
whole, the parameter's own name. Which layers must be there is what the config's patterns match in the base,
so a tensor that is missing is noticed. A setting petune does not compute is refused by name: it would
otherwise give the base's output, or a wrong one, without a word. The file is long because what is written and
what is read are two sides of one table.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from petune.errors import FileError, Problem
from petune.files.json_fields import (
    Fields,
    IntegerValue,
    Kind,
    ListOf,
    MapOf,
    Number,
    OneOf,
    TextValue,
    Truth,
    check_fields,
)
from petune.files.patterns import Pattern, compile_pattern
from petune.log import say, warn
from petune.methods import dora, lora, lora_conv, pissa, tuned_state, tuning
from petune.methods.configs import DoraConfig, LoraConfig, MethodConfig
from petune.methods.lora import Layers, LoraEmbedding, LoraLayer
from petune.methods.lora_experts import LoraExperts
from petune.methods.lora_parts import LoraParts, in_one_form
from petune.methods.saving import check_tensors
from petune.methods.targets import within
from petune.methods.token_rows import ROWS, holders, table_of
from petune.methods.trainable import refuse_tied_heads
from petune.models import family_of
from petune.models.experts import is_experts
from petune.models.tuned_linear import tuned_layers
from petune.saving.fingerprint import MOST, plain_name
from petune.saving.peft_experts import places, weights_named

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
PEFT_VERSION = "0.21.2"  # the layout that is written

_TASKS = (
    ("ForSequenceClassification", "SEQ_CLS", ("classifier", "score")),
    ("ForTokenClassification", "TOKEN_CLS", ("classifier", "score")),
    ("ForQuestionAnswering", "QUESTION_ANS", ("qa_outputs",)),
    ("ForConditionalGeneration", "SEQ_2_SEQ_LM", ()),
    ("ForCausalLM", "CAUSAL_LM", ()),
    ("LMHeadModel", "CAUSAL_LM", ()),
)

# Every field of peft's LoraConfig that petune does not compute, with the value that asks for nothing.
_NEUTRAL: Mapping[str, Any] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "corda_config": None,
    "ensure_weight_tying": False,
    "kasa_config": None,
    "layer_replication": None,
    "loftq_config": {},
    "lora_bias": False,
    "lora_ga_config": None,
    "megatron_config": None,
    "monteclora_config": None,
    "use_bdlora": None,
    "use_qalora": False,
    "velora_config": None,
}
_READ: Mapping[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layers_pattern": None,
    "layers_to_transform": None,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "peft_version": PEFT_VERSION,
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "alpha_pattern": {},
    "revision": None,
    "target_modules": None,
    "target_parameters": None,
    "task_type": None,
    "trainable_token_indices": None,
    "use_dora": False,
    "use_rslora": False,
}
_WORDS, _MAYBE_TEXT = ListOf(TextValue()), OneOf(TextValue(), None)
_KINDS: Mapping[str, Kind] = {
    "base_model_name_or_path": _MAYBE_TEXT,
    "bias": TextValue(("none", "all", "lora_only")),
    "exclude_modules": OneOf(TextValue(), _WORDS, None),
    "fan_in_fan_out": OneOf(Truth(), None),
    "inference_mode": OneOf(Truth(), None),
    "init_lora_weights": OneOf(Truth(), TextValue(), None),
    "layers_pattern": OneOf(TextValue(), _WORDS, None),
    "layers_to_transform": OneOf(IntegerValue(), ListOf(IntegerValue()), None),
    "lora_alpha": Number(1e-6, 1e6),
    "lora_dropout": OneOf(Number(0, 1), None),
    "modules_to_save": OneOf(_WORDS, None),
    "peft_version": _MAYBE_TEXT,
    "r": IntegerValue(1, 2**20),
    "rank_pattern": OneOf(MapOf(IntegerValue(1, 2**20)), None),
    "alpha_pattern": OneOf(MapOf(Number(1e-6, 1e6)), None),
    "revision": _MAYBE_TEXT,
    "target_modules": OneOf(TextValue(), _WORDS, None),
    "target_parameters": OneOf(_WORDS, None),
    "task_type": _MAYBE_TEXT,
    "trainable_token_indices": OneOf(ListOf(IntegerValue()), MapOf(ListOf(IntegerValue())), None),
    "use_dora": OneOf(Truth(), None),
    "use_rslora": OneOf(Truth(), None),
}
# A peft that states its version writes every field: what decides the numbers is not left to a default.
_WHOLE_FILE = (
    *("r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern"),
)
# By peft's `use_dora`: the method's settings and the classes of its layers.
_METHODS: Mapping[bool, tuple[type[LoraConfig], Layers]] = {
    False: (LoraConfig, lora.LAYERS),
    True: (DoraConfig, dora.LAYERS),
}
_MAGNITUDE = "lora_magnitude_vector"
_ENDS = {"lora_A": "lora_A.weight", "lora_B": "lora_B.weight", _MAGNITUDE: _MAGNITUDE}
_ENDS_OF_EMBEDDING = {"lora_A": "lora_embedding_A", "lora_B": "lora_embedding_B"}
_TOKENS = "token_adapter.trainable_tokens_delta"  # the rows themselves, for all its name
_BIAS = "base_layer.bias"  # of a tuned layer, where it trains
_INERT = {"runtime_config"}  # how it is run, not what it computes
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")  # those that leave the base's weights alone
_FLATTEN = "load it with peft, merge it into its base (merge_and_unload) and save that"


@dataclass(frozen=True)
class Adapter:
    """A LoRA folder in petune's words: the whole config, each layer's own and the forms of their classes,
    what is trained whole, single biases and rows of the table of tokens, tensors by base-model name."""

    config: LoraConfig
    layers: Mapping[str, LoraConfig]
    forms: Layers
    also_train: tuple[str, ...]
    biases: tuple[str, ...]
    token_rows: tuple[str, ...]
    state: Mapping[str, Tensor]


# ---------------------------------------------------------------- writing


def to_peft(
    model: nn.Module, state: Mapping[str, Tensor], base_model: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config of a model wrapped with lora or dora, and its tuned state, as peft names them.

    Raises UsageError for a module trained whole whose tensor is tied to one that is not: peft would load it
    untied.
    """
    record = tuning(model)
    assert isinstance(record.config, LoraConfig)
    layers = layers_in(model)
    shared = shared_fields(model, tuple(layers), base_model)
    tied = _rows_of_ties(model) if record.config.token_rows else ()
    experts = tuned_experts(model)
    _warn_of_zeros(state)
    tensors = {PREFIX + _to_key(name, layers): value for name, value in state.items() if name not in tied}
    for path, module in experts.items():
        own = {weight: module.factors(weight)[0].shape[1] for weight in module.weights}
        for name, place in places(module, path, own).items():
            tensors[PREFIX + place.key] = place.to_file(tensors.pop(PREFIX + name))
    r, alpha, ranks, alphas = _sizes(layers, experts, record.config)
    columns = sum(isinstance(layer, Conv1D) for layer in layers.values())
    tables = sum(isinstance(layer, LoraEmbedding) for layer in layers.values())
    config = {
        **_NEUTRAL,
        **_READ,
        **shared,
        "bias": "lora_only" if record.config.bias == "lora" else record.config.bias,
        "fan_in_fan_out": 0 < columns == len(layers) - tables,
        "lora_alpha": _number(alpha),
        "lora_dropout": record.config.dropout,
        "r": r,
        "use_dora": type(record.config) is _METHODS[True][0],
        "use_rslora": record.config.rslora,
        "rank_pattern": ranks,
        "alpha_pattern": {name: _number(own) for name, own in alphas.items()},
        "target_parameters": sorted(
            f"{name}.{weight}" for name in experts for weight in experts[name].weights
        )
        or None,
        "trainable_token_indices": list(record.config.token_rows) or None,
    }
    return dict(sorted(config.items())), tensors


def shared_fields(model: nn.Module, layers: tuple[str, ...], base_model: str | None) -> dict[str, Any]:
    """What the config of a wrapped model says whatever its method, which tunes `layers`. Raises as
    `to_peft`."""
    also_train = tuning(model).also_train
    refuse_tied_heads(model, also_train)
    heads = tuple(plain_name(head) for head in also_train)
    names = [plain_name(name) for name, _ in model.named_modules() if name]
    frozen = [name for name in names if not within(name, heads)]
    task = _task_type(model, frozen)
    mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return {
        "auto_mapping": None if task else mapping,
        "base_model_name_or_path": base_model,
        "exclude_modules": None,
        "inference_mode": True,
        "modules_to_save": _saved_whole(heads, names) or None,
        "peft_version": PEFT_VERSION,
        "revision": None,
        "target_modules": shortest(layers, frozen),
        "task_type": task,
    }


def _warn_of_zeros(state: Mapping[str, Tensor]) -> None:
    """Say of dora over a weight with rows of zeros, as a head has that is tied to a table with a row of
    padding, that others divide by their lengths."""
    for name, value in state.items():
        if name.endswith(_MAGNITUDE) and (rows := int((value == 0).sum())):
            layer = name.removesuffix(f".{_MAGNITUDE}")
            warn(
                f"{layer}: {rows} of its rows are zeros, whose length peft divides by: it gives NaN there,"
                " and petune 0; leave this layer out for peft and servers, or merge"
            )


def in_file_form(model: nn.Module) -> dict[str, Tensor]:
    """The tuned state of a wrapped model with plain LoRA in the place of what a file has no word for: a start
    from components, parts of a linear."""
    return in_one_form(model, pissa.in_difference_form(model, tuned_state(model)))


def settings_in_files(model: nn.Module, config: MethodConfig) -> MethodConfig:
    """`config` as files say it: a start from components is plain LoRA of twice the rank in them."""
    if not isinstance(config, LoraConfig) or not pissa.started(model):
        return config
    r, alpha, ranks, alphas = _sizes(layers_in(model), tuned_experts(model), config)
    sizes: dict[str, Any] = {"r": r, "alpha": alpha, "rank_pattern": ranks, "alpha_pattern": alphas}
    return replace(config, init="auto", init_iterations=None, **sizes)


def _sizes(
    layers: Mapping[str, LoraLayer | LoraParts], experts: Mapping[str, LoraExperts], config: LoraConfig
) -> tuple[int, float, dict[str, int], dict[str, float]]:
    """Rank and alpha of most layers and weights of experts in a file, and those of the others by name."""
    found = {name: (rank_in_file(layer), layer.scale) for name, layer in layers.items()}
    found |= {
        f"{name}.{weight}": (module.factors(weight)[0].shape[1], scale)
        for name, module in experts.items()
        for weight, scale in module.scales.items()
    }
    sizes = {name: (rank, _alpha(scale, replace(config, r=rank))) for name, (rank, scale) in found.items()}
    (r, alpha), _ = Counter(sizes.values()).most_common(1)[0]
    ranks = {name: rank for name, (rank, _) in sizes.items() if rank != r}
    return r, alpha, ranks, {name: own for name, (_, own) in sizes.items() if own != alpha}


def rank_in_file(layer: LoraLayer | LoraParts) -> int:
    """That of the plain LoRA which a file has of a layer."""
    if isinstance(layer, LoraParts):
        return layer.rank
    return len(layer.lora_A) * (2 if pissa.has_start(layer) else 1)


def layers_in(model: nn.Module) -> dict[str, LoraLayer | LoraParts]:
    """The layers of which a file has plain LoRA, by plain name."""
    found = ((plain_name(name), layer) for name, layer in tuned_layers(model))
    return {name: layer for name, layer in found if isinstance(layer, LoraLayer | LoraParts)}


def tuned_experts(model: nn.Module) -> dict[str, LoraExperts]:
    """The modules of experts that have an update, by plain name."""
    found = ((plain_name(name), layer) for name, layer in tuned_layers(model))
    return {name: layer for name, layer in found if isinstance(layer, LoraExperts)}


def _rows_of_ties(model: nn.Module) -> tuple[str, ...]:
    """The names of trained rows but for the first: peft's file has them once, where tokens are looked up.
    Says of a tied head with a bias that peft leaves it out."""
    found = {plain_name(name): module for name, module in holders(model, table_of(model)).items()}
    if head := next((name for name, one in found.items() if getattr(one, "bias", None) is not None), None):
        warn(
            f"peft adds no bias of {head} where rows of its table train (token_rows): it does not compute the"
            " same from this folder, petune does; for peft leave token_rows out, for others merge"
        )
    return tuple(f"{name}.{ROWS}" for name in found)[1:]


def _to_key(name: str, layers: Mapping[str, LoraLayer | LoraParts]) -> str:
    module, _, own = name.rpartition(".")
    if own == ROWS and module not in layers:
        return f"{module}.{_TOKENS}"
    if module not in layers:
        return name
    return f"{module}.{_BIAS if own == 'bias' else _ends(isinstance(layers[module], LoraEmbedding))[own]}"


def _ends(embedding: bool) -> Mapping[str, str]:
    """The end of a layer's keys in the file, by the name of its tensor in petune."""
    return _ENDS | _ENDS_OF_EMBEDDING if embedding else _ENDS


def shortest(wanted: tuple[str, ...], names: Iterable[str]) -> list[str]:
    """Names for which peft's rule (the whole name or what follows a dot) finds exactly `wanted`: sorted last
    parts, else in full."""
    leaves = {name.rpartition(".")[2] for name in wanted}
    hit = {name for name in names if name.rpartition(".")[2] in leaves}
    return sorted(leaves if hit == set(wanted) else wanted)


def _saved_whole(heads: tuple[str, ...], names: Sequence[str]) -> list[str]:
    """`shortest` by peft's rule for modules saved whole, which asks for the end of a name alone: `norm` finds
    q_norm too."""
    found = shortest(heads, names)
    return found if {name for name in names if name.endswith(tuple(found))} == set(heads) else sorted(heads)


def _task_type(model: nn.Module, frozen: Iterable[str]) -> str | None:
    """peft's task type. One that implies a head which is not trained stays unsaid: peft would look for that
    head in the file; and any of a model that reads no text: peft would hand it ids of tokens."""
    family = family_of(model)
    if family is not None and family.reads != "text":
        return None
    leaves = {name.rpartition(".")[2] for name in frozen}
    return next(
        (
            task
            for ending, task, implied in _TASKS
            if type(model).__name__.endswith(ending) and leaves.isdisjoint(implied)
        ),
        None,
    )


def _alpha(scale: float, own: LoraConfig) -> float:
    """The alpha that gives a layer's scale again, bit by bit. own: its settings, with its rank."""
    stated = own.alpha if own.alpha is not None else 2 * own.r
    about = scale * own.divisor
    near = [float(stated), about, *(math.nextafter(about, end) for end in (0.0, math.inf))]
    return next((alpha for alpha in near if replace(own, alpha=alpha).scale == scale), near[1])


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value


# ---------------------------------------------------------------- reading


def from_peft(
    base: nn.Module, config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path
) -> Adapter:
    """What a LoRA folder says about `base`, which is not changed. `config` and `tensors` are the contents of
    its two files.

    Raises FileError for a setting petune lacks, and for tensors that are missing, unexpected, mis-shaped or
    given twice (first ten).
    """
    check_config(config, folder / CONFIG)
    _, forms = _METHODS[bool(config.get("use_dora"))]
    modules = {plain_name(name): module for name, module in base.named_modules() if name}
    given = strip_wrappers(tensors, modules, folder)
    heads = tuple(name for name in modules if is_saved_whole(name, config))
    heads = tuple(name for name in heads if not within(name, [other for other in heads if other != name]))
    ends = tuple(f".{end}" for end in (*_ENDS.values(), *_ENDS_OF_EMBEDDING.values()))
    present = {key.rpartition(".lora_")[0] for key in given if key.endswith(ends)}
    layers = {
        name: _own_config(name, config)
        for name in modules
        if (name in present or is_target(name, config, heads)) and not is_experts(modules[name])
    }
    wanted = {
        key: name
        for module, own in layers.items()
        for key, name in _keys(module, modules[module], own, forms, folder).items()
    }
    experts = weights_named(modules, config.get("target_parameters") or (), folder / CONFIG)
    tuned = {
        path: {weight: _own_config(f"{path}.{weight}", config) for weight in weights}
        for path, weights in experts.items()
    }
    layers |= {f"{path}.{weight}": own for path, found in tuned.items() for weight, own in found.items()}
    where = {
        name: place
        for path, found in tuned.items()
        for name, place in places(
            modules[path], path, {weight: own.r for weight, own in found.items()}
        ).items()
    }
    wanted |= {place.key: (name, place.in_file) for name, place in where.items()}
    own = dict(base.state_dict(keep_vars=True))
    shapes = {key: shape for key, (_, shape) in wanted.items()}
    for head in heads:
        whole = {f"{head}.{name}": tuple(value.shape) for name, value in modules[head].named_parameters()}
        shapes |= whole
        wanted |= {key: (key, shape) for key, shape in whole.items()}
    ids, rows = _token_rows(base, config, folder)
    for first in rows[:1]:
        key = f"{first.removesuffix(ROWS)}{_TOKENS}"
        shapes[key] = len(ids), table_of(base).embedding_dim
        wanted[key] = first, shapes[key]
    biases = _biases(modules, layers, heads, config.get("bias") or "none")
    wanted |= {key: (name, tuple(own[name].shape)) for key, name in biases.items()}
    shapes |= {key: tuple(own[name].shape) for key, name in biases.items()}
    given = fitting(base, shapes, given, heads, folder)
    state = {wanted[key][0]: value for key, value in given.items()}
    state |= {name: place.from_file(state[name]) for name, place in where.items()}
    for other in rows[1:]:
        state[other] = state[rows[0]]
    settings = replace(_settings(config, layers, heads, bool(biases)), token_rows=ids)
    return Adapter(settings, layers, forms, heads, tuple(biases.values()), rows, state)


def _token_rows(
    base: nn.Module, config: Mapping[str, Any], folder: Path
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids of tokens whose rows are trained, and the names of the rows in petune, where tokens are looked
    up first.

    Raises FileError for rows of another table.
    """
    given = config.get("trainable_token_indices")
    if not given:
        return (), ()
    names = [plain_name(name) for name in holders(base, table_of(base))]
    if isinstance(given, Mapping):
        (name, ids), *others = given.items()
        if others or not is_named(names[0], [name]):
            raise FileError(
                "trains rows of another table",
                where=f"{folder / CONFIG}  trainable_token_indices",
                expected=names[0],
                found=", ".join(given),
                remedy=_FLATTEN,
            )
        given = ids
    return tuple(given), tuple(f"{name}.{ROWS}" for name in names)


def _settings(
    config: Mapping[str, Any], layers: Mapping[str, LoraConfig], heads: tuple[str, ...], biases: bool
) -> LoraConfig:
    """The settings of all layers, in which every layer and what is its own is named in full."""
    whole = replace(_own_config("", config), targets=tuple(layers), also_train=heads)
    return replace(
        whole,
        rank_pattern={name: own.r for name, own in layers.items() if own.r != whole.r},
        alpha_pattern={
            name: own.alpha
            for name, own in layers.items()
            if own.alpha is not None and own.alpha != whole.alpha
        },
        bias=config["bias"].removesuffix("_only") if biases else "none",
    )


def _biases(
    modules: Mapping[str, nn.Module], layers: Mapping[str, LoraConfig], heads: tuple[str, ...], which: str
) -> dict[str, str]:
    """{key in the file: name in petune} of the single biases that train, by peft's word for them."""
    wanted = {"none": {}, "lora_only": layers, "all": modules}[which]
    return {
        f"{name}.{_BIAS if name in layers else 'bias'}": f"{name}.bias"
        for name in wanted  # weights of experts among them, which are no modules
        if name in modules and modules[name]._parameters.get("bias") is not None and not within(name, heads)
    }


def check_config(config: Mapping[str, Any], file: Path) -> None:
    """Raise FileError naming every field of an adapter_config.json that is of another kind or asks for what
    petune does not compute."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise FileError(
            f"peft_type is {kind!r}",
            where=str(file),
            expected="LORA, IA3 or MISS",
            remedy="load this one with peft",
        )
    required = ("r", "lora_alpha", "target_modules") if config.get("peft_version") is None else _WHOLE_FILE
    check_fields(config, Fields({name: _KINDS[name] for name in required}, _KINDS, others=True), file)
    if problems := [*_unread_fields(config, file), *_bad_targets(config, file)]:
        raise FileError(problems[:MOST])


def _unread_fields(config: Mapping[str, Any], file: Path) -> Iterator[Problem]:
    """What is wrong with the fields that petune does not read: they ask for another computation, or may."""
    where = str(file)
    for field, value in config.items():
        neutral = _NEUTRAL.get(field)
        if field in _NEUTRAL and value not in (neutral, None, False, {}, []):
            what = f"{field} = {value!r} is not supported"[:200]
            yield Problem(what, where, f"{field} = {neutral!r}", remedy=_FLATTEN)
        known = field in _NEUTRAL or field in _READ or field in _INERT
        if not known and value not in (None, False, {}, [], ""):
            remedy = "it may change what is computed: " + _FLATTEN
            yield Problem(f"{field} = {value!r} is unknown to petune"[:200], where, remedy=remedy)
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        remedy = "convert it with peft: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        what = f"init_lora_weights = {init!r} changes the base's weights"
        yield Problem(what, where, "true", remedy=remedy)


def _bad_targets(config: Mapping[str, Any], file: Path) -> Iterator[Problem]:
    """What is wrong with the names and patterns of modules."""
    sides = (config.get("target_modules"), config.get("exclude_modules"))
    patterns = [side for side in sides if isinstance(side, str)]
    for pattern in [*patterns, *(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())]:
        try:
            _pattern(pattern)
        except FileError as error:
            yield from (replace(problem, where=str(file)) for problem in error.problems)
    if not config.get("target_modules") and not config.get("target_parameters"):
        remedy = "name the modules the adapter tunes, as peft writes them"
        yield Problem("target_modules is empty", str(file), remedy=remedy)


def fitting(
    base: nn.Module,
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Tensor],
    heads: tuple[str, ...],
    folder: Path,
) -> dict[str, Tensor]:
    """The tensors of a file without those that only repeat the base. Raises as `check_tensors` where they are
    not of these shapes, and as `refuse_untied`."""
    own = base.state_dict(keep_vars=True)
    found = {
        key: value for key, value in given.items() if key in shapes or not repeats(key, value, own, given)
    }
    check_tensors(shapes, found, str(folder / TENSORS), heads)
    refuse_untied(base, heads, found, folder)
    return found


def strip_wrappers(
    tensors: Mapping[str, Tensor], modules: Mapping[str, nn.Module], folder: Path
) -> dict[str, Tensor]:
    """Tensors by plain name: without peft's prefix, and without what torch.compile and data parallelism put
    before or between."""
    plain: dict[str, Tensor] = {}
    wrappers = set()
    for key, value in tensors.items():
        name = key
        while True:
            head, _, rest = name.partition(".")
            if name.startswith(PREFIX):
                name = name.removeprefix(PREFIX)
            elif head == "_orig_mod" or (head == "module" and "module" not in modules):
                name = rest
                wrappers.add(head)
            else:
                break
        if "._orig_mod." in name:
            name = plain_name(name)
            wrappers.add("_orig_mod")
        if name in plain:
            raise FileError(
                "another tensor has this name, once wrappers' prefixes are gone",
                where=f"{folder / TENSORS}  {key}",
                found=name,
            )
        plain[name] = value
    if wrappers:
        say(
            f"{folder / TENSORS}: saved from a wrapped model; {', '.join(sorted(wrappers))} is dropped from"
            " its names"
        )
    return plain


def is_saved_whole(name: str, config: Mapping[str, Any]) -> bool:
    """Whether peft trains the module `name` whole: it asks for the end of a name alone, so `norm` is every
    layernorm too."""
    return name.endswith(tuple(config.get("modules_to_save") or ()))


def is_target(name: str, config: Mapping[str, Any], heads: tuple[str, ...]) -> bool:
    """Whether peft would tune the module `name`: its own rules for target_modules, exclude_modules and
    layers_to_transform."""
    if within(name, heads) or is_named(name, config.get("exclude_modules")):
        return False
    targets = config["target_modules"] or ()
    if not is_named(name, targets):
        return False
    only = config.get("layers_to_transform")
    if only in (None, []) or isinstance(targets, str) or name in targets:
        return True
    patterns = config.get("layers_pattern") or r".*?\.[^.]*"
    for pattern in (
        [patterns] if isinstance(patterns, str) else [rf"(?:^|.*?\.){pattern}" for pattern in patterns]
    ):
        if groups := _pattern(rf"{pattern}\.(\d+)\.").match(name):
            number = groups[0]
            return (
                number is not None
                and number.isdecimal()
                and int(number) in ([only] if isinstance(only, int) else only)
            )
    return False


def is_named(name: str, entries: Any) -> bool:
    """Whether `name` is one of a list of names, or ends in one behind a dot, or matches a regex."""
    if isinstance(entries, str):
        return _pattern(entries).fullmatch(name)
    return any(name == entry or name.endswith("." + entry) for entry in entries or ())


def _own_config(name: str, config: Mapping[str, Any]) -> LoraConfig:
    """Rank and alpha of one module after its patterns."""
    r = by_pattern(name, config.get("rank_pattern") or {}, config.get("r", 8))
    alpha = by_pattern(name, config.get("alpha_pattern") or {}, config.get("lora_alpha", 8))
    kind, _ = _METHODS[bool(config.get("use_dora"))]
    dropout, rslora = float(config.get("lora_dropout") or 0.0), bool(config.get("use_rslora"))
    return kind(r=r, alpha=alpha, rslora=rslora, dropout=dropout)


def by_pattern(name: str, patterns: Mapping[str, Any], default: Any) -> Any:
    """What the first of peft's patterns says that fits a name."""
    return next(
        (value for pattern, value in patterns.items() if _pattern(rf"(.*\.)?({pattern})").fullmatch(name)),
        default,
    )


def _pattern(text: str) -> Pattern:
    """A pattern of somebody's config. Raises FileError for one that cannot be matched in bounded work."""
    return compile_pattern(text, FileError, CONFIG)


def _keys(
    name: str, layer: nn.Module, own: LoraConfig, forms: Layers, folder: Path
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{key in the file: (name in petune, shape)} of one layer's tensors."""
    if type(layer) not in forms:
        kinds = ", ".join(kind.__name__ for kind in forms)
        raise FileError(
            f"tunes a {type(layer).__name__}",
            where=f"{folder / CONFIG}  {name}",
            expected=kinds,
            remedy=_FLATTEN,
        )
    if (wrong := lora_conv.unfit(layer)) is not None:
        raise FileError(
            f"LoRA beside a convolution wants {wrong[0]}",
            where=f"{folder / CONFIG}  {name}",
            found=wrong[1],
            remedy="use it with peft, or train one without this layer",
        )
    ends = _ends(isinstance(layer, nn.Embedding))
    shapes = cast("type[LoraLayer]", forms[type(layer)]).shapes(layer, own.r)
    return {f"{name}.{ends[leaf]}": (f"{name}.{leaf}", shape) for leaf, shape in shapes.items()}


def repeats(key: str, value: Tensor, own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is only a copy of the base's own, as peft writes one for a tuned embedding and beside
    every bias, or of another in the file."""
    mine = own.get(key.replace(".base_layer.", ".").replace(".original_module.", "."))
    if ".modules_to_save." in key:
        mine = given.get(key.replace(".modules_to_save.", "."))
    return (
        mine is not None
        and mine.shape == value.shape
        and torch.equal(mine.detach().cpu(), value.to(mine.dtype))
    )


def refuse_untied(base: nn.Module, heads: tuple[str, ...], given: Mapping[str, Tensor], folder: Path) -> None:
    """peft trains a copy of a tied module; here it would drag the other end along, unless the file holds both
    ends, equal."""
    inside = {
        id(value): f"{head}.{own}"
        for head in heads
        for own, value in base.get_submodule(head).named_parameters()
    }
    for name, value in base.named_parameters(remove_duplicate=False) if inside else ():
        first = inside.get(id(value), name)
        if first != name and not (name in given and torch.equal(given[first], given[name])):
            remedy = "untie them in the base first: config.tie_word_embeddings = False, and clone the weight"
            raise FileError(
                f"{first} was trained apart from {name}, to which it is tied here",
                where=str(folder / TENSORS),
                remedy=remedy,
            )
