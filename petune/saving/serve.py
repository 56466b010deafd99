"""A LoRA written for a server, by the rules in `servers`: plain factors of one legal rank and a whole alpha,
names of the class that is served; proved by playing the server before it counts as written.

Rank r goes to the next legal one by rows of zeros in A and columns of zeros in B, and what of a scale is not
alpha / r goes into B: neither changes B A but for rounding. What a server would drop or compute otherwise is
refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from petune.errors import FileError, UsageError
from petune.files.atomic import commit_folder
from petune.files.given import path_of
from petune.files.manifest import MANIFEST
from petune.files.safetensors import read_json, write_json, write_tensors
from petune.kernels.fuse import fused_blocks, unfuse
from petune.log import say
from petune.methods import tuning
from petune.methods.configs import LoraConfig, name_of
from petune.methods.lora import LoraEmbedding
from petune.methods.merging import refuse_merged
from petune.methods.saving import plain_class
from petune.methods.targets import within
from petune.methods.wrapped import bare, sole_tuning
from petune.models.experts import weights_of
from petune.models.multimodal import name_in_whole, whole_of
from petune.saving.export import logits_of, probe
from petune.saving.fingerprint import plain_name
from petune.saving.gguf import ADAPTER, need_gguf, write_gguf
from petune.saving.modelfile import MODELFILE, write_modelfile
from petune.saving.peft import (
    CONFIG,
    PREFIX,
    TENSORS,
    in_file_form,
    layers_in,
    shortest,
    to_peft,
    tuned_experts,
)
from petune.saving.played import Served, play, serving
from petune.saving.served_experts import changes_of, factors_of, parts, renamed
from petune.saving.servers import SERVERS, Server

CLOSE = 1e-3  # of logits, absolute up to 1 and relative above it, in float32
_OURS = (CONFIG, ADAPTER, MODELFILE, MANIFEST)
_MERGE = "merge, and serve the whole model: petune merge RUN"
_LOAD = "petune.load(base, folder) reads it"

ServedFactors = dict[str, tuple[Tensor, Tensor]]  # (A, B) by the name of a linear


@dataclass(frozen=True)
class ServedFolder:
    """A folder that a server can load. `logits`: the largest difference from the tuned model's when the
    server was played. `serve`: what to type."""

    folder: Path
    rank: int
    alpha: int
    logits: float
    serve: str


def write_for(
    to: str,
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    base_name: str | None = None,
    overwrite: bool = False,
) -> ServedFolder:
    """Write a lora tuning for a server of SERVERS as `folder`, which appears only when playing the server
    gave the model's own logits.

    Fused blocks become the model's own. Raises UsageError for what the server refuses, in its words, and for
    a base whose served class has other modules; MachineError without the package gguf where it is needed;
    FileError where the played server computes something else; otherwise as `save`.
    """
    server, model = SERVERS[to], bare(model)
    refuse_merged(model)
    _refuse(model, server)
    assert isinstance(model, PreTrainedModel)
    if fused_blocks(model):  # which call no layer that could play the server's
        unfuse(model)
        say("kernels: blocks of this model run unfused from here on, as a server is played on their layers")
    kind = str(model.config.model_type)
    gguf = server.layout == "gguf" and kind not in server.peft_for
    if gguf:
        need_gguf(server.title)
    renames = _renames(model, base_name, server)
    if gguf:  # which has numbers of blocks in the place of names
        renames = {name: name for name in renames}
    factors, rank, alpha = _folded(model, server)
    before, found = logits_of(model, probe(model)), 0.0
    place = path_of(folder).absolute()

    def fill(work: Path) -> None:
        nonlocal found
        if gguf:
            write_gguf(work / ADAPTER, factors, alpha, server.architectures[kind], model.config, server.title)
        else:
            _write_peft(model, work, base_name, renames, factors, alpha)
        if to == "ollama":
            write_modelfile(work / MODELFILE, tokenizer, base_name, f"./{ADAPTER}" if gguf else ".", model)
        elif tokenizer is not None and not gguf:
            tokenizer.save_pretrained(work)
        found = _prove(model, work, server, renames, before)

    commit_folder(place, fill, overwrite, _OURS)
    serve = server.serve.format(base=base_name or "BASE", folder=place, rank=rank)
    return ServedFolder(place, rank, alpha, found, serve)


# ---------------------------------------------------------------- refusing


def _refuse(model: nn.Module, server: Server) -> None:
    """Raise UsageError for the first thing about a tuned model that `server` does not take."""
    record = sole_tuning(model)
    method = name_of(record.config)
    if method == "full":
        remedy = "write the whole model: petune export RUN --to hf"
        raise UsageError(f"{server.title} takes adapters here, and full is none", remedy=remedy)
    if not isinstance(model, PreTrainedModel):
        raise UsageError(f"{type(model).__name__} is not a transformers model", remedy=_LOAD)
    layers, kind = layers_in(model), str(model.config.model_type)
    leaves = {name.rpartition(".")[2] for name in layers}
    heads = [name for name in record.also_train if name.rpartition(".")[2] not in server.heads]
    config = record.config
    tied = getattr(model.config, "tie_word_embeddings", False)
    found = {
        method: method != "lora",
        "heads": heads,
        "bias": isinstance(config, LoraConfig) and config.bias != "none",
        "token_rows": isinstance(config, LoraConfig) and config.token_rows,
        "Conv1D": any(isinstance(layer, Conv1D) for layer in layers.values()),
        "embedding": not server.embeddings
        and any(isinstance(layer, LoraEmbedding) for layer in layers.values()),
        "only": server.only and leaves - set(server.only),
        "tied": tied and "lm_head" in leaves,
        "experts": [] if kind in server.experts else list(tuned_experts(model)),
    }
    for feature, there in found.items():
        if there and (feature in server.refuses or feature == method):
            what = f"{server.title} {server.version} does not take {_WORDS.get(feature, feature)}"
            where = ", ".join(map(str, there)) if isinstance(there, list | set) else None
            remedy = _LOAD if method == "side" or method == "adapter" else _MERGE
            raise UsageError(
                what, where=where, found=server.refuses.get(feature, "its files are no LoRA"), remedy=remedy
            )
    if (whole := whole_of(model)) is not None and whole.kind not in server.wholes:
        what = f"{server.title} is not known to load LoRA for the text model of a {whole.kind}"
        known = ", ".join(server.wholes) or "a text model by itself"
        raise UsageError(what, where="model", expected=known, remedy=_MERGE)
    if kind not in server.models:
        what = f"{server.title} is not known to load LoRA for a {kind}"
        raise UsageError(what, expected=", ".join(server.models), remedy=_MERGE)


_WORDS = {
    "heads": "modules that are trained whole",
    "bias": "trained biases",
    "token_rows": "trained rows of tokens",
    "embedding": "LoRA of the table of tokens",
    "only": "LoRA of these modules",
    "tied": "LoRA of a head that is tied",
    "Conv1D": "LoRA of transformers' Conv1D",
    "experts": "LoRA of these experts",
}


# ---------------------------------------------------------------- names


def _renames(model: PreTrainedModel, base_name: str | None, server: Server) -> dict[str, str]:
    """{module here, or linear of an expert: its name in the class that the base's config.json asks a server
    to build}.

    A decoder that was tuned alone is `language_model` in a checkpoint of several modalities. Raises
    UsageError for a class in which a tuned or wholly trained module is not found with its shape.
    """
    mine = {plain_name(name): module for name, module in model.named_modules() if name}
    if whole_of(model) is not None:
        return _with_experts({name: name_in_whole(name) for name in mine}, model, server)
    file = Path(base_name or "") / "config.json"
    fields = read_json(file, links=True) if base_name and file.is_file() else model.config.to_dict()
    architecture = (fields.get("architectures") or [plain_class(model).__name__])[0]
    if architecture == plain_class(model).__name__:
        return _with_experts({name: name for name in mine}, model, server)
    served = _outline(architecture, file.parent if file.is_file() else None, model)
    ways = {name: name for name in mine}, {name: name_in_whole(name) for name in mine}
    tuned = [*layers_in(model), *tuned_experts(model), *map(plain_name, tuning(model).also_train)]
    for way in ways:
        if all(_alike(mine[name], served.get(way[name])) for name in tuned):
            return _with_experts(way, model, server)
    what = f"{server.title} would serve this base as {architecture}, which has no such module"
    raise UsageError(what, where=", ".join(tuned[:3]), found=plain_class(model).__name__, remedy=_MERGE)


def _with_experts(renames: dict[str, str], model: PreTrainedModel, server: Server) -> dict[str, str]:
    names = server.experts.get(str(model.config.model_type))
    return renames if names is None else renames | renamed(parts(model), names, renames)


def _outline(architecture: str, folder: Path | None, model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules of the class that a server builds, without their numbers; none for a class that is unknown
    here or has another config."""
    kind = getattr(transformers, architecture, None)
    config = AutoConfig.from_pretrained(folder) if folder else model.config
    if kind is None or not isinstance(config, kind.config_class):
        return {}
    with torch.device("meta"):
        return dict(kind(config).named_modules())


def _alike(mine: nn.Module, other: nn.Module | None) -> bool:
    """Whether a module of the served class is of the same shape."""
    own, served = (
        [tuple(module.get_parameter(name).shape) for name in weights_of(module) or _weight(module)]
        for module in (mine, other or nn.Identity())
    )
    return bool(own) and own == served


def _weight(module: nn.Module) -> tuple[str, ...]:
    return ("weight",) if isinstance(getattr(module, "weight", None), nn.Parameter) else ()


# ---------------------------------------------------------------- numbers


def _folded(model: PreTrainedModel, server: Server) -> tuple[ServedFactors, int, int]:
    """Factors of one rank and scale by module, zeros for partners that the server asks for; the rank and the
    alpha of all."""
    layers, state = layers_in(model), in_file_form(model)
    state = {plain_name(name): value for name, value in state.items()}
    pairs = {
        name: (state[f"{name}.lora_A"], state[f"{name}.lora_B"], layer.scale)
        for name, layer in layers.items()
    }
    pairs |= factors_of(tuned_experts(model), parts(model))
    widest = max(len(a) for a, _, _ in pairs.values())
    legal = [rank for rank in server.ranks or (widest,) if rank >= widest]
    if not legal:
        what = f"LoRA rank {widest} is greater than max_lora_rank {server.ranks[-1]}."
        raise UsageError(what, where=server.title, remedy=_MERGE)
    rank = legal[0]
    usual = Counter(scale for _, _, scale in pairs.values()).most_common(1)[0][0]
    alpha = max(1, round(usual * rank))
    factors = {}
    for name, (a, b, scale) in pairs.items():
        missing, folded = rank - len(a), scale / (alpha / rank)
        grown = nn.functional.pad(a, (0, 0, 0, missing)), nn.functional.pad(b * folded, (0, missing))
        factors[name] = tuple(half.detach().cpu().contiguous() for half in grown)
    modules = {plain_name(name): module for name, module in model.named_modules()}
    for name in _partners(layers, modules, server):
        rows, columns = cast("Tensor", modules[name].weight).shape
        factors[name] = torch.zeros(rank, columns), torch.zeros(rows, rank)
    return cast("ServedFactors", factors), rank, alpha


def _partners(tuned: Iterable[str], modules: Mapping[str, nn.Module], server: Server) -> list[str]:
    """Linears that are not tuned and yet have to be in the file."""
    tuned = set(tuned)
    leaves = {name.rpartition(".")[2] for name in tuned} if server.whole else set()
    leaves |= {leaf for group in server.together if leaves & set(group) for leaf in group}
    linears = (name for name, module in modules.items() if isinstance(module, nn.Linear))
    return [name for name in linears if name not in tuned and name.rpartition(".")[2] in leaves]


# ---------------------------------------------------------------- files


def _write_peft(
    model: PreTrainedModel,
    work: Path,
    base_name: str | None,
    renames: Mapping[str, str],
    factors: ServedFactors,
    alpha: int,
) -> None:
    """peft's two files with the factors, all of one rank, under the names that are served."""
    state = {plain_name(name): value for name, value in in_file_form(model).items()}
    fields, _ = to_peft(model, state, base_name)
    heads, layers = tuple(map(plain_name, tuning(model).also_train)), layers_in(model)
    names = [own for name, own in renames.items() if not within(name, heads)]
    plain: dict[str, Any] = {
        "r": len(next(iter(factors.values()))[0]),
        "lora_alpha": alpha,
        "rank_pattern": {},
        "alpha_pattern": {},
        "use_rslora": False,
        "target_parameters": None,
        "target_modules": shortest(tuple(renames[name] for name in factors), names),
    }
    tensors = {PREFIX + name: value for name, value in state.items() if within(name, heads)}
    for name, halves in factors.items():
        form = "embedding_{}" if isinstance(layers.get(name), LoraEmbedding) else "{}.weight"
        for end, half in zip("AB", halves, strict=True):
            tensors[f"{PREFIX}{renames[name]}.lora_{form.format(end)}"] = half
    write_tensors(work / TENSORS, tensors, {"format": "pt"})
    write_json(work / CONFIG, fields | plain)


def _prove(
    model: PreTrainedModel, work: Path, server: Server, renames: Mapping[str, str], before: Tensor
) -> float:
    """The largest difference of logits between the tuned model and the server that is played on `work`.

    Raises FileError where it is more than CLOSE, or the update of a layer is another; logits of a narrow base
    are as coarse as its dtype, so updates are compared too, in float32.
    """
    modules = {plain_name(name): module for name, module in model.named_modules() if name}
    linears = parts(model) if model.config.model_type in server.experts else {}
    served = {renames[name]: module for name, module in modules.items()}
    served |= {renames[name]: modules[part.path] for name, part in linears.items()}
    here = {own: name for name, own in renames.items()}
    updates, whole = play(work, server, served, model.config)
    updates = {here[name]: update for name, update in updates.items()}
    for name, change in _changes(model):
        mine = updates[name].delta() if name in updates else torch.zeros(())
        if float((mine - change).norm()) > 1e-4 * float(change.norm()):
            what = f"{server.title} would compute another update than was trained"
            raise FileError(what, where=name, remedy=_MERGE)
    state = model.state_dict()
    if any(not torch.equal(state[name].cpu(), value.to(state[name].dtype)) for name, value in whole.items()):
        raise FileError(f"{server.title} would load another head", where=next(iter(whole)), remedy=_MERGE)
    names = {plain_name(name): name for name, _ in model.named_modules()}
    experts: dict[str, dict[str, Served]] = {}
    for name in linears.keys() & updates.keys():
        path = linears[name].path
        experts.setdefault(names[path], {})[name.removeprefix(f"{path}.")] = updates.pop(name)
    with serving(model, {names[name]: update for name, update in updates.items()}, experts):
        after = logits_of(model, probe(model))
    found = float((after.double() - before.double()).abs().max())
    size = max(1.0, float(before.abs().max()))
    step = max(torch.finfo(value.dtype).eps for value in model.parameters() if value.is_floating_point())
    if not found <= size * max(CLOSE, 4 * step if step > CLOSE else 0.0):
        what = f"{server.title}, played on these files, gives other logits"
        raise FileError(what, expected=f"within {CLOSE:g}", found=f"{found:.3g}", remedy=_MERGE)
    return found


def _changes(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """What was trained of every layer, and of every linear of tuned experts: [out, in] in float32."""
    for name, layer in layers_in(model).items():
        change = layer.change().detach().float().cpu()
        yield name, change.T if isinstance(layer, LoraEmbedding) else change
    for name, change in changes_of(tuned_experts(model), parts(model)):
        yield name, change.detach().float().cpu()
