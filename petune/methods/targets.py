"""Which layers a method tunes: `auto`, `all-linear`, roles, name suffixes or a regex, none of which may be
idle."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from petune.errors import Problem, UsageError, nearest
from petune.files.patterns import compile_pattern
from petune.models.behind import output_head
from petune.models.experts import ROLES, is_experts, weights_of
from petune.models.joined import JoinedLinear, joined_linears, split_name
from petune.models.sites import find_sites
from petune.models.spec import Family

_T = TypeVar("_T")
LINEAR = (nn.Linear, Conv1D)
# of transformers models petune has no table for
USUAL_HEADS = ("classifier", "score", "classification_head", "qa_outputs")


def select_layers(
    model: nn.Module,
    family: Family | None,
    targets: str | Sequence[str],
    exclude: Sequence[str],
    taken: Iterable[str],
    parts: bool = False,
) -> dict[str, nn.Module]:
    """The layers named by `targets` less `exclude`, by full name, in model order; of experts each weight, by
    the name of its parameter; of a linear that is several, where a list names them, parts (see
    petune.models.joined).

    `taken` are modules trained whole; nothing inside them is a target. parts: whether the method tunes parts.
    Raises UsageError naming each entry of a list that matches nothing, with the nearest module names and how
    often they occur, and for parts that it does not tune or that are asked for beside the whole.
    """
    whole = {name: module for name, module in _layers(model) if name and not within(name, taken)}
    joined = {name: one for name, one in joined_linears(model, family).items() if name in whole}
    layers, roles = _with_parts(whole, joined), _roles(model, family, joined)
    by_word = isinstance(targets, str)
    chosen = (
        _by_word(model, family, str(targets), whole, roles)
        if by_word
        else _by_list(targets, layers, roles, "targets")
    )
    left_out = [*_by_list(exclude, layers, roles, "exclude")]
    _refuse_parts(list(chosen), left_out, joined, parts)
    left_out += [f"{name}.{role}" for name in left_out if name in joined for role in joined[name].lengths]
    return {name: module for name, module in chosen.items() if name not in left_out}


def _with_parts(layers: Mapping[str, nn.Module], joined: Mapping[str, JoinedLinear]) -> dict[str, nn.Module]:
    """`layers`, and behind each that is several its parts, with the module of the whole."""
    found: dict[str, nn.Module] = {}
    for name, module in layers.items():
        found[name] = module
        if name in joined:
            found |= {f"{name}.{role}": module for role in joined[name].lengths}
    return found


def _refuse_parts(
    chosen: Sequence[str], left_out: Sequence[str], joined: Mapping[str, JoinedLinear], parts: bool
) -> None:
    """Raise UsageError for parts of a linear where the method has none, or where the whole of it is tuned."""
    for name in chosen:
        if (at := split_name(name, joined)) is None:
            continue
        layer, role = at
        if not parts:
            what = f"{role} is some of the outputs of one linear, which this method tunes whole"
            remedy = f"target {layer.rpartition('.')[2]}, or use method lora"
            raise UsageError(what, where=layer, remedy=remedy)
        if layer in chosen and layer not in left_out:
            what = f"targets names both this linear and {role}, which is a part of it"
            remedy = f"name {', '.join(joined[layer].lengths)}, or the whole"
            raise UsageError(what, where=layer, remedy=remedy)
    for name in left_out:
        if (at := split_name(name, joined)) is not None and at[0] in chosen and at[0] not in left_out:
            rest = [role for role in joined[at[0]].lengths if f"{at[0]}.{role}" not in left_out]
            what = f"exclude names {at[1]}, a part of this linear, which is tuned whole"
            remedy = f"name the other parts in `targets`: {', '.join(rest)}"
            raise UsageError(what, where=at[0], remedy=remedy)


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a model with its name, but of experts each weight by its own."""
    for name, module in model.named_modules():
        if is_experts(module):
            yield from ((f"{name}.{weight}", module) for weight in weights_of(module))
        else:
            yield name, module


def in_blocks(layers: Mapping[str, nn.Module], numbers: Sequence[int]) -> dict[str, nn.Module]:
    """Those of `layers` that are in the blocks of these numbers, which are the first number in a name.

    Raises UsageError for a number that none of them is in.
    """
    found = {name: re.search(r"(?<=\.)\d+(?=\.)", f".{name}.") for name in layers}
    blocks = {name: int(number[0]) for name, number in found.items() if number is not None}
    if idle := sorted(set(numbers) - set(blocks.values())):
        known = ", ".join(map(str, sorted(set(blocks.values())))) or "none"
        raise UsageError(f"layers: no target is in block {idle[0]}", expected=f"of the blocks {known}")
    return {name: layers[name] for name, number in blocks.items() if number in numbers}


def by_layer(
    model: nn.Module,
    family: Family | None,
    layers: Mapping[str, nn.Module],
    values: Mapping[str, _T],
    setting: str,
) -> dict[str, _T]:
    """What a mapping of roles or name suffixes to values says of each of `layers`, by full name; the first
    entry that fits counts.

    Raises UsageError for an entry that decides nothing.
    """
    found: dict[str, _T] = {}
    joined = joined_linears(model, family) if values else {}
    parts = {name: at[0] for name in layers if (at := split_name(name, joined)) is not None}
    known = {**layers, **{whole: layers[name] for name, whole in parts.items()}}
    roles = _roles(model, family, joined)
    for entry, value in values.items():
        meant = _by_list([entry], known, roles, setting).keys()
        hits = [name for name in layers if name in meant or parts.get(name) in meant]
        hits = [name for name in hits if name not in found]
        if not hits:
            what = f"{setting}: {entry!r} decides nothing: no tuned layer is left for it"
            raise UsageError(what, remedy="remove it, or put the narrower entry first")
        found |= dict.fromkeys(hits, value)
    return found


def head_modules(model: nn.Module, family: Family | None, also_train: str | Sequence[str]) -> tuple[str, ...]:
    """Full names of the modules trained whole: the family's task heads for `auto`, else the names given, but
    for those inside another.

    Raises UsageError for a given name that is not in the model.
    """
    names = [name for name, _ in model.named_modules() if name]
    if also_train == "auto":
        known = family.heads if family else USUAL_HEADS if isinstance(model, PreTrainedModel) else ()
        return tuple(name for name in names if name in known)
    wanted = (also_train,) if isinstance(also_train, str) else tuple(also_train)
    found: list[str] = []
    for entry in wanted:
        hits = [name for name in names if _matches(name, entry)]
        if not hits:
            raise UsageError([_no_match("also_train", entry, names)])
        found += [hit for hit in hits if hit not in found]
    return tuple(name for name in found if not within(name, (other for other in found if other != name)))


def refuse_unreached(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise UsageError for layers whose forward never runs, where an update would train nothing: torch's own
    encoder layer reads the weights of its linears itself in eval mode, and encoder-decoder models look tokens
    up in tied twins of `shared`."""
    tables = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if getattr(layer, "max_norm", None) is not None:  # of a table, whose rows are made shorter in place
            what, remedy = "rows of a table with max_norm cannot be merged", f"exclude: [{leaf}]"
            raise UsageError(what, where=name, found=f"max_norm {layer.max_norm}", remedy=remedy)
        if isinstance(owner, nn.TransformerEncoderLayer | nn.MultiheadAttention):
            what = f"{type(owner).__name__} reads this weight without calling the layer"
            raise UsageError(what, where=name, remedy=f"exclude: [{leaf}]")
        twins = (
            [twin for twin, table in tables.items() if twin != name and table.weight is layer.weight]
            if name in tables
            else []
        )
        if twins and leaf == "shared":
            what = "this embedding is never called, only its tied twins are"
            raise UsageError(what, where=name, remedy=f"target {', '.join(twins)}")


def _roles(
    model: nn.Module, family: Family | None, joined: Mapping[str, JoinedLinear]
) -> Mapping[str, list[str]]:
    roles: dict[str, list[str]] = {}
    for site in find_sites(model, family) if family else ():
        if site.role != "experts":
            roles.setdefault(site.role, []).append(site.name)
            for role in joined[site.name].lengths if site.name in joined else ():
                roles.setdefault(role, []).append(f"{site.name}.{role}")
            continue
        for role, weights in ROLES.items():
            own = [f"{site.name}.{weight}" for weight in weights_of(site.module) if weight in weights]
            roles.setdefault(role, []).extend(own)
    return roles


def _by_word(
    model: nn.Module,
    family: Family | None,
    word: str,
    layers: Mapping[str, nn.Module],
    roles: Mapping[str, list[str]],
) -> dict[str, nn.Module]:
    if word == "auto" and family:
        wanted = {name for names in roles.values() for name in names}
        return {name: layer for name, layer in layers.items() if name in wanted}
    if word in ("auto", "all-linear"):
        outputs = output_head(model)
        return {
            name: module
            for name, module in layers.items()
            if (type(module) in LINEAR and module is not outputs) or is_experts(module)
        }
    pattern = compile_pattern(word, UsageError, "targets")
    hits = {name: module for name, module in layers.items() if pattern.fullmatch(name)}
    if not hits:
        problem = _no_match("targets", word, list(layers))
        suffix = (
            f"for a suffix write [{word}]"
            if any(_matches(name, word) for name in layers) or word in roles
            else None
        )
        raise UsageError(
            [problem, Problem("a single text is a regular expression for whole module names", remedy=suffix)]
        )
    return hits


def left_alone(
    method: str, model: nn.Module, tuned: Iterable[nn.Module], trained: Iterable[nn.Parameter]
) -> str | None:
    """One line about the matrices of a model without a table that `auto` or `all-linear` did not reach, or
    None where there is none.

    tuned: the layers that have an update; trained: parameters that train. Embeddings, the output head, norms
    and biases are not counted.
    """
    passed = [*tuned, *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    passed += [head] if (head := output_head(model)) is not None else []
    known = {id(value) for module in passed for value in module.parameters(recurse=False)} | {
        id(value) for value in trained
    }
    found: dict[str, list[nn.Parameter]] = {"linears": [], "parameters of 3 dims and more": []}
    places: dict[str, dict[str, str]] = {kind: {} for kind in found}
    for name, value in model.named_parameters():
        if value.dim() < 2 or id(value) in known:
            continue
        kind = "linears" if value.dim() == 2 else "parameters of 3 dims and more"
        found[kind].append(value)
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        places[kind][re.sub(r"(?<=\.)\d+(?=\.)", "*", name)] = owner
    missed = [value for values in found.values() for value in values]
    if not missed:
        return None
    number, total = sum(value.numel() for value in missed), sum(value.numel() for value in model.parameters())
    shown = [f"{len(found[kind])} {kind} ({_abridged(names)})" for kind, names in places.items() if names]
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    what = (
        f"{method} leaves {len(missed)} tensors with {number:,} of {total:,} parameters alone"
        f" ({100 * number / total:.1f} %)"
    )
    return (
        f"{what}: {' and '.join(shown)}, as it tunes torch.nn.Linear, Conv1D and experts as transformers"
        f" groups them only, and petune has no table of {family}"
    )


def _abridged(names: Mapping[str, str], most: int = 4) -> str:
    """The first names with the classes of their owners, and how many more there are."""
    shown = [f"{name} of {owner}" for name, owner in list(names.items())[:most]]
    return ", ".join(shown + [f"{len(names) - most} more"] * (len(names) > most))


def _by_list(
    entries: Sequence[str], layers: Mapping[str, nn.Module], roles: Mapping[str, list[str]], setting: str
) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    problems = []
    for entry in entries:
        hits = roles.get(entry) or [name for name, module in layers.items() if _means(entry, name, module)]
        if not hits:
            problems.append(_no_match(setting, entry, list(layers), roles))
        chosen |= {name: layers[name] for name in hits if name in layers}
    alone = {"gate", "up"} & set(entries)
    fused = [name for name in roles.get("gate", ()) if name.endswith(".gate_up_proj")]
    if len(alone) == 1 and fused and setting in ("targets", "exclude"):
        what = f"{setting}: gate and up are one weight in experts"
        remedy = f"{setting}: name both, gate and up, or neither"
        problems.append(Problem(what, fused[0], "both or neither", ", ".join(alone), remedy))
    if problems:
        raise UsageError(problems)
    return {name: chosen[name] for name in layers if name in chosen}


def _means(entry: str, name: str, module: nn.Module) -> bool:
    """Whether an entry means a layer: by the end of its name or, a weight of experts, of theirs."""
    return _matches(name, entry) or (is_experts(module) and _matches(name.rpartition(".")[0], entry))


def _matches(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)


def within(name: str, parents: Iterable[str]) -> bool:
    """Whether `name` is one of `parents` or lies inside one."""
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


def _no_match(
    setting: str, entry: str, names: Sequence[str], roles: Mapping[str, list[str]] = MappingProxyType({})
) -> Problem:
    """The problem of an idle pattern, with the nearest module names and roles and how many modules each
    stands for."""
    leaves = Counter(name.rpartition(".")[2] for name in names) | Counter(
        {role: len(sites) for role, sites in roles.items()}
    )
    for number in [leaf for leaf in leaves if leaf.isdigit()]:
        del leaves[number]
    near = nearest(entry.rpartition(".")[2], leaves) or [leaf for leaf, _ in leaves.most_common(8)]
    found = "the nearest names are " + ", ".join(f"{leaf} ({leaves[leaf]})" for leaf in near)
    remedy = "name one of these, or take the entry out"
    return Problem(f"{setting}: {entry!r} matches no module", found=found, remedy=remedy)
