"""What a model's folder may not decide: that its own Python runs, that kernels are fetched, or that other
weights than its own are read.

petune always passes trust_remote_code=False, so transformers neither asks nor runs code. A folder whose class
transformers has itself is read with that class; any other is refused with what it asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from petune.errors import FileError, PetuneError, Problem
from petune.files.safetensors import read_json
from petune.models.bitsandbytes_files import is_readable
from petune.models.mxfp4_files import is_mxfp4

_CODE = ("config.json", "tokenizer_config.json")
ADAPTER = "adapter_config.json"
_MOST_LAYERS = 10_000  # transformers would build as many as a config says, for ever
_READ = (".json", ".jinja", ".txt", ".model", ".safetensors")  # what loaders of models and tokenizers read
# of a tokenizer's config: paths
_VOCABULARIES = ("vocab_file", "merges_file", "tokenizer_file", "spm_file", "source_spm", "target_spm")


def wanted_code(folder: Path) -> list[str]:
    """The Python that a folder's JSON files name as their own, one line each: file, entry, and the module it
    would run."""
    found = []
    for name in _CODE:
        try:
            entries = (
                read_json(folder / name, links=True).get("auto_map") if (folder / name).is_file() else None
            )
        except PetuneError:
            continue  # whoever reads it says what is wrong
        named = entries if isinstance(entries, dict) else {"AutoTokenizer": entries} if entries else {}
        for entry, reference in named.items():
            references = reference if isinstance(reference, list) else [reference]
            found += [
                f"{name}: auto_map {entry}: {one!r}{_file_of(str(one))}"[:300]
                for one in references
                if one is not None
            ]
    return found


def _file_of(reference: str) -> str:
    """The file of `module.Class` or `org/name--module.Class`, to be put behind it."""
    repository, _, module = reference.rpartition("--")
    return f" in {module.rpartition('.')[0].replace('.', '/')}.py{f' of {repository}' if repository else ''}"


def code_refused(folder: Path | None, place: str, reason: str) -> FileError:
    """The error for a model or tokenizer that only Python of its own could read; `reason` is
    transformers'."""
    wanted = wanted_code(folder) if folder is not None else []
    remedy = (
        "use a model whose class transformers has itself; one that you trust, load yourself and give to"
        " petune.train as an object"
    )
    problems = [
        Problem(
            "asks to run Python of its own, which petune never does", place, found=reason[:200], remedy=remedy
        )
    ]
    return FileError([*problems, *(Problem("is not run", line) for line in wanted[:10])])


def refuse_settings(fields: Mapping[str, Any], place: str) -> None:
    """Raise FileError for settings of a config.json that make transformers read other weights or fetch code,
    and for such as no model has."""
    problems = [
        replace(problem, where=f"{place}/config.json  {path}"[:500])
        for path, key, value in walk(fields)
        for problem in _wrong_setting(key, value)
    ]
    if problems:
        raise FileError(problems[:10])


def _wrong_setting(key: str, value: Any) -> Iterator[Problem]:
    """What is wrong with a field of a config.json, wherever it stands there."""
    remove, shown = "remove the setting", repr(value)
    if key in ("attn_implementation", "_attn_implementation", "experts_implementation") and "/" in shown:
        yield Problem("names a kernel to be fetched and run", found=shown[:80], remedy=remove)
    if key == "transformers_weights":
        remedy = "give a folder whose weights have their usual names; a tuning is read with petune.load"
        yield Problem("names the file of the weights", found=shown[:120], remedy=remedy)
    if key in ("dtype", "torch_dtype") and isinstance(value, str) and not _is_dtype(value):
        yield Problem("is no dtype of torch", found=shown[:80], remedy=remove)
    if isinstance(value, int) and abs(value) > (_MOST_LAYERS if key.endswith("layers") else 2**40):
        yield Problem("is no size of a model", found=shown[:40], remedy="use another copy")
    known = isinstance(value, Mapping) and (is_readable(value) or is_mxfp4(value))
    if key == "quantization_config" and value and not known:
        remedy = (
            "use the model in float32 or bfloat16, as it was before it was quantised; base_dtype: nf4"
            " makes of it what bitsandbytes does"
        )
        yield Problem("this model is quantised, which petune cannot tune", remedy=remedy)


def _is_dtype(name: str) -> bool:
    return name == "auto" or isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)


def walk(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """(path, key, value) of every field of nested objects, as sub-configs are."""
    for key, inner in value.items() if isinstance(value, Mapping) and depth < 8 else ():
        yield f"{path}{key}", str(key), inner  # ids of classes are numbers
        yield from walk(inner, f"{path}{key}.", depth + 1)


def refuse_adapter(folder: Path) -> None:
    """Raise FileError for a model's folder with an adapter of peft's in it, which transformers would add to
    the model, or read instead."""
    if (folder / ADAPTER).is_file():
        alone = not (folder / "config.json").is_file()
        what = (
            "is an adapter, not a model"
            if alone
            else "holds an adapter beside the model, which transformers would add to it"
        )
        remedy = "give the base as `model` and this folder as init_adapter"
        raise FileError(what, where=str(folder / ADAPTER), remedy=remedy)


def refuse_links_out(folder: Path) -> None:
    """Raise FileError for a file that loaders read, in `folder`, that a link or tokenizer_config.json leads
    out of it."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.suffix in _READ:
            refuse_outside(folder, path.name)
    settings = folder / "tokenizer_config.json"
    for key, name in read_json(settings, links=True).items() if settings.is_file() else ():
        if key in _VOCABULARIES and isinstance(name, str) and _exists(folder / name):
            refuse_outside(folder, name)


def refuse_outside(folder: Path, name: str) -> None:
    """Raise FileError for a file outside its folder, behind any links; a hub cache, whose links lead to its
    own blobs, is one folder."""
    root, real = folder.resolve(), (folder / name).resolve()
    root = root.parent.parent if root.parent.name == "snapshots" else root
    if not real.is_relative_to(root):
        remedy = "give the folder with the file itself, or copy the file here"
        raise FileError(
            "leads out of the model's folder", where=str(folder / name), found=str(real), remedy=remedy
        )


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no name of a file
        return False
