"""Resumable state on disk: a checkpoint is a folder committed whole, and valid exactly when its manifest
verifies.

Temporary name, fsync of every file, SHA-256 manifest, one rename, fsync of the parent; pointer and rotation
only after it, and the pointer is a hint nobody depends on. Tensors are safetensors and all else JSON: nothing
that is read here can run code.
"""

# Names inside a folder of checkpoints:
#   step-N             committed            step-N.tmp-PID   a save that has not finished
#   step-N.old-PID     what a second save of step N is replacing: still whole, and found as long as there is
# no step-N
#   step-N.gone-PID    rotated out, being deleted            aside-step-N   set aside by the user's choice of
# an earlier step; never touched

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petune.errors import FileError, MachineError, PetuneError, Problem, UsageError, nearest
from petune.files.hashes import leaf_hashes, number_of_blocks, whole_and_leaf_hashes
from petune.files.manifest import name_fault
from petune.files.safetensors import (
    open_regular,
    parse_json,
    read_bytes,
    read_json,
    read_tensors,
    reading,
    sync_folder,
    write_file,
    write_json,
    write_tensors,
    writing,
)
from petune.log import human, warn

__all__ = [
    "Manifest",
    "OptimizerPacker",
    "candidates",
    "commit",
    "newest_good",
    "pack_optimizer",
    "read_json",
    "read_tensors",
    "require_free",
    "restore_optimizer",
    "rotate",
    "set_aside",
    "sweep",
    "verify",
    "write_json",
    "write_tensors",
]

VERSION = 2
READABLE = (1, 2)  # version 1 has no leaf hashes
MANIFEST = "manifest.json"
POINTER = "latest"
# a folder of its own inside one of checkpoints, so that neither's rotation sees the other's
SNAPSHOTS = "snapshots"
_COMMITTED = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_LEFTOVER = re.compile(r"step-(0|[1-9][0-9]{0,17})\.(tmp|old|gone)-[0-9]+")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: `facts` is the writer's JSON, `files` maps a relative path to what is known of
    its bytes.

    That is `size`, `sha256` of all of them, and, from version 2 on, `blocks`: the SHA-256 of every 64 MiB.
    """

    version: int
    run_id: str
    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]


# ---------------------------------------------------------------- writing


def commit(
    root: Path,
    step: int,
    write: Callable[[Path], None],
    *,
    run_id: str,
    facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
) -> Path:
    """Save one checkpoint as `root/step-N`: `write` fills an empty folder, which takes its name whole or
    never.

    `facts` may be asked for when all else is on disk. Saving a step again replaces it without a moment in
    which neither is found. Raises MachineError (disk full, permission, ...) and whatever `write` raises; then
    nothing of the attempt is left and every earlier checkpoint is as it was.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    final, work, old = (
        root / f"step-{step}{suffix}" for suffix in ("", f".tmp-{os.getpid()}", f".old-{os.getpid()}")
    )
    with writing(final):
        try:
            _prepare(root, work, old, final)
            write(work)
            _seal(work, step, run_id, facts)
            if os.path.lexists(final):
                os.rename(final, old)
            os.rename(work, final)
            sync_folder(root)
        except BaseException:
            _undo(work, old, final)
            raise
    try:
        _remove(old)
        write_file(root / POINTER, [f"{final.name}\n".encode()], sync=True)
    except (OSError, MachineError) as error:
        warn(f"step {step} is saved, but tidying up after it failed: {error}")
    return final


def _prepare(root: Path, work: Path, old: Path, final: Path) -> None:
    if not root.exists():
        root.mkdir(parents=True)
        sync_folder(root.parent)
    _remove(work)
    _settle(old, final)
    work.mkdir()


def _seal(
    work: Path, step: int, run_id: str, facts: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
) -> None:
    """Flush every file and folder of `work` and write the manifest last, so that its presence says that all
    else is there."""
    names, problems = _contents(work)
    problems += [Problem(fault, where=str(work / name)) for name in names if (fault := _path_fault(name))]
    if problems:
        raise FileError(problems)
    mode = work.stat().st_mode & 0o666  # as the umask allows: safetensors makes its files 0600
    files = {name: _flush(work / name, mode) for name in names}
    for folder in sorted(
        {parent for name in names for parent in (work / name).parents if parent.is_relative_to(work)},
        reverse=True,
    ):
        sync_folder(folder)
    known = dict(facts() if callable(facts) else facts)
    content = {"version": VERSION, "run_id": run_id, "step": step, "facts": known, "files": files}
    write_file(work / MANIFEST, [_render(content)], sync=True)


def _flush(path: Path, mode: int) -> dict[str, Any]:
    with open_regular(path) as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o666 != mode:
            os.fchmod(file.fileno(), mode)
        os.fsync(file.fileno())
        whole, blocks = whole_and_leaf_hashes(file)
        return {"size": os.fstat(file.fileno()).st_size, "sha256": whole, "blocks": blocks}


def _render(content: Mapping[str, Any]) -> bytes:
    """The one spelling of a manifest; `seal` is the SHA-256 of the rest, so that an edited fact is found as
    well as an edited file."""

    def spell(value: Mapping[str, Any]) -> bytes:
        return json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"

    return spell({**content, "seal": hashlib.sha256(spell(content)).hexdigest()})


def _undo(work: Path, old: Path, final: Path) -> None:
    """Leave nothing of a failed save. Errors here stay unsaid: the one that brought us here is the cause, and
    `sweep` comes later."""
    with suppress(OSError):
        _remove(work)
    with suppress(OSError):
        if not os.path.lexists(final):
            _settle(old, final)


def _settle(old: Path, final: Path) -> None:
    """End a replacement that was cut off: the old checkpoint takes its name back unless the new one stands
    there."""
    if not os.path.lexists(old):
        return
    if os.path.lexists(final):
        _remove(old)
    else:
        os.rename(old, final)


def _remove(path: Path) -> None:
    """Delete a folder, file or link; never what a link points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------- reading


def verify(path: Path) -> Manifest:
    """Check every byte of a checkpoint against its manifest.

    Raises FileError with all problems: missing, unexpected, resized or changed files, links and pipes, an
    edited manifest, another version.
    """
    manifest = _read_manifest(path)
    problems = _compare(path, manifest)
    if not problems:  # else the sizes tell already; hashing gigabytes would not say more
        problems = [
            found for name, fields in manifest.files.items() if (found := _changed(path / name, fields))
        ]
    if problems:
        raise FileError(problems)
    return manifest


def _changed(file: Path, fields: Mapping[str, Any]) -> Problem | None:
    """The first block of a file whose SHA-256 is another one, the whole file where the manifest (version 1)
    knows of no blocks."""
    expected = fields.get("blocks", [fields["sha256"]])
    with open_regular(file) as held, reading(file):
        found = leaf_hashes(held) if "blocks" in fields else [hashlib.file_digest(held, "sha256").hexdigest()]
    for at, (one, other) in enumerate(zip_longest(expected, found, fillvalue=""), 1):
        if one != other:
            block = "" if len(expected) == 1 else f", in block {at} of {len(expected)}"
            return _damaged(
                f"has been changed or damaged{block}", file, f"sha256 {one[:16]}…", f"{other[:16]}…"
            )
    return None


def _damaged(what: str, path: Path, expected: str | None = None, found: str | None = None) -> Problem:
    return Problem(
        what,
        str(path),
        expected,
        found,
        "use another checkpoint; resuming a run falls back to the newest whole one by itself",
    )


def _read_manifest(path: Path) -> Manifest:
    with reading(path):
        folder = path.is_dir() and not path.is_symlink()
    if not folder:
        raise FileError(
            "is not a checkpoint folder",
            where=str(path),
            expected="a folder with a manifest.json",
            remedy="check the path",
        )
    file = path / MANIFEST
    if not os.path.lexists(file):
        raise FileError([_damaged("has no manifest: it is not a checkpoint, or its save was cut off", file)])
    text = read_bytes(file)
    found = parse_json(text, str(file))
    if not isinstance(found, dict):
        raise FileError([_damaged("the manifest is not a JSON object", file)])
    version = found.get("version")
    if version not in READABLE or type(version) is not int:
        what = (
            "a newer version of manifest"
            if type(version) is int and version > VERSION
            else "another version of manifest"
        )
        remedy = "use the petune that wrote it, or another checkpoint"
        raise FileError(
            what,
            where=str(file),
            expected=" or ".join(map(str, READABLE)),
            found=repr(version)[:40],
            remedy=remedy,
        )
    seal = found.pop("seal", None)
    try:
        whole = isinstance(seal, str) and _render(found) == text
    except RecursionError:
        whole = False
    if not whole:
        raise FileError(
            [_damaged("the manifest has been changed or damaged: its own SHA-256 does not fit", file)]
        )
    manifest = _manifest(found, file)
    if (match := _COMMITTED.fullmatch(path.name)) and int(match[1]) != manifest.step:
        raise FileError(
            [_damaged("belongs to another step than its folder says", path, match[1], str(manifest.step))]
        )
    return manifest


def _manifest(found: Mapping[str, Any], file: Path) -> Manifest:
    """Types first: a seal is no signature, and whoever can edit a file can seal it again."""
    kinds = {"version": int, "run_id": str, "step": int, "facts": dict, "files": dict}
    if (
        set(found) != set(kinds)
        or any(type(found[key]) is not kind for key, kind in kinds.items())
        or not found["files"]
    ):
        raise FileError(
            [
                _damaged(
                    "the manifest's fields are not those of a manifest",
                    file,
                    ", ".join(kinds),
                    ", ".join(found)[:200],
                )
            ]
        )
    for name, fields in found["files"].items():
        if fault := _path_fault(name):
            raise FileError([_damaged(fault, file, "a path inside the checkpoint", repr(name)[:200])])
        if not _is_entry(fields, found["version"]):
            needed = "size and sha256" if found["version"] == 1 else "size, sha256 and as many blocks"
            raise FileError([_damaged(f"the manifest's entry for {name!r} is not {needed}", file)])
    return Manifest(**found)


def _is_entry(fields: object, version: int) -> bool:
    kinds = {"size": int, "sha256": str} | ({} if version == 1 else {"blocks": list})
    if not isinstance(fields, dict) or {key: type(value) for key, value in fields.items()} != kinds:
        return False
    blocks = fields.get("blocks", [])
    return version == 1 or (
        len(blocks) == number_of_blocks(fields["size"]) and all(type(one) is str for one in blocks)
    )


def _compare(path: Path, manifest: Manifest) -> list[Problem]:
    """The cheap half of verify: names, kinds and sizes."""
    with reading(path):
        names, problems = _contents(path)
        listed, found = set(manifest.files), set(names) - {MANIFEST}
        problems += [_damaged("is missing", path / name) for name in sorted(listed - found)]
        problems += [
            _damaged("is not in the manifest: remove it", path / name) for name in sorted(found - listed)
        ]
        for name in sorted(listed & found):
            if (size := (path / name).lstat().st_size) != (expected := manifest.files[name]["size"]):
                problems.append(_damaged("has another size", path / name, f"{expected} bytes", f"{size}"))
    return problems


def _contents(folder: Path) -> tuple[list[str], list[Problem]]:
    """Every file below a folder as a relative path, and a problem for whatever is neither file nor folder;
    follows no link."""
    names: list[str] = []
    problems: list[Problem] = []
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(name + "/")
                elif entry.is_file(follow_symlinks=False):
                    names.append(name)
                else:
                    problems.append(
                        _damaged(
                            "is a link, a pipe or a device: a checkpoint holds only files", folder / name
                        )
                    )
    return sorted(names), problems


def _path_fault(name: str) -> str | None:
    if name == MANIFEST:
        return "the manifest cannot list itself"
    fault = name_fault(name)
    return f"a file's name {fault}" if fault else None


def candidates(root: Path) -> list[Path]:
    """Checkpoints and snapshots by their folder's name, newest step first (10 before 9), of one step the
    checkpoint; nothing is verified.

    A missing root has none.
    """
    found = {
        (step, kind): path
        for kind, place in enumerate((root / SNAPSHOTS, root))
        for step, path in _by_step(place).items()
    }
    return [found[key] for key in sorted(found, reverse=True)]


def _by_step(root: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    with reading(root):
        names = os.listdir(root) if root.is_dir() else []
    for name in names:
        if match := _COMMITTED.fullmatch(name):
            found[int(match[1])] = root / name
        elif (match := _LEFTOVER.fullmatch(name)) and match[2] == "old":
            found.setdefault(int(match[1]), root / name)
    return found


def newest_good(root: Path) -> tuple[Path, Manifest, list[Problem]]:
    """The newest checkpoint that verifies, and the problems of every newer one, to be told aloud. Raises
    FileError when there is none."""
    problems: list[Problem] = []
    for path in candidates(root):
        try:
            return path, verify(path), problems
        except FileError as error:
            problems += error.problems
    if problems:
        raise FileError(
            [
                Problem("no checkpoint is whole", str(root), remedy="start the run again without --resume"),
                *problems,
            ]
        )
    raise FileError(
        "no checkpoint here",
        where=str(root),
        expected="folders step-N",
        remedy="check the path, or run without --resume",
    )


# ---------------------------------------------------------------- tidying


def leftovers(root: Path) -> list[str]:
    """What killed saves and rotations left in a folder of checkpoints, as relative paths."""
    found = []
    for prefix in ("", f"{SNAPSHOTS}/"):
        names = os.listdir(root / prefix) if (root / prefix).is_dir() else []
        found += [
            prefix + name
            for name in sorted(names)
            if _LEFTOVER.fullmatch(name) or name.startswith(f".{POINTER}.tmp-")
        ]
    return found


def sweep(root: Path) -> list[str]:
    """Remove what killed saves and rotations left, and finish a replacement that was cut off; call it holding
    the RunLock.

    Returns the relative paths dealt with. Raises MachineError.
    """
    with writing(root):
        found = leftovers(root)
        for path in [root / name for name in found]:
            match = _LEFTOVER.fullmatch(path.name)
            if match and match[2] == "old":
                _settle(path, path.with_name(f"step-{match[1]}"))
            else:
                _remove(path)
    return found


def rotate(root: Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Delete all but the newest `keep` checkpoints of this very folder and the protected ones; returns the
    deleted. Call it after commit.

    Only checkpoints whose names and sizes fit their manifest count as kept, so damaged ones never push the
    last good one out. Raises UsageError for keep < 2 (one flipped bit would end the run), MachineError.
    """
    if keep < 2:
        raise UsageError(
            "keep must be at least 2",
            where="keep",
            expected=">= 2",
            found=str(keep),
            remedy="one checkpoint can be damaged",
        )
    safe = {Path(path).resolve() for path in protect}
    deleted: list[Path] = []
    whole = 0
    own = _by_step(root)
    for path in [own[step] for step in sorted(own, reverse=True)]:
        if whole < keep:
            whole += _looks_whole(path)
        elif _COMMITTED.fullmatch(path.name) and not path.is_symlink() and path.resolve() not in safe:
            gone = root / f"{path.name}.gone-{os.getpid()}"
            with writing(path):
                _remove(gone)
                os.rename(path, gone)  # half a deletion must not look like a checkpoint
                _remove(gone)
            deleted.append(path)
    return deleted


def _looks_whole(path: Path) -> bool:
    try:
        return not _compare(path, _read_manifest(path))
    except PetuneError:
        return False


def set_aside(root: Path, after: int) -> list[Path]:
    """Rename checkpoints of steps beyond `after` to aside-step-N when a run goes on from an earlier step;
    nothing is deleted.

    Otherwise the next --resume would return to the future that was left. Returns the new paths. Raises
    MachineError.
    """
    moved = []
    for path in candidates(root):
        match = re.match(r"step-([0-9]+)", path.name)
        if match and int(match[1]) > after:
            target = path.with_name(f"aside-step-{match[1]}")
            with writing(path):
                _remove(target)
                os.rename(path, target)
            moved.append(target)
    return moved


# ---------------------------------------------------------------- optimizer


def pack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors ("optimizer/exp_avg/NAME", ...) and JSON, keyed by parameter name and
    not by position.

    `names` maps names to parameters, as dict(model.named_parameters()). The tensors are the live ones: write
    them before the next step. Holds for optimizers whose state is elementwise or scalar (AdamW, Adam, SGD).
    Raises ValueError for a parameter without a name.
    """
    # of tied names the first
    name_of = {id(parameter): name for name, parameter in reversed([*names.items()])}
    tensors: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (name := name_of.get(id(parameter))) is None:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that has no name"
                )
            held = optimizer.state.get(parameter, {})
            kept = {key: value for key, value in held.items() if isinstance(value, Tensor)}
            if odd := [key for key, value in kept.items() if value.dim() and value.shape != parameter.shape]:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {odd} of {name} in another shape than the parameter's"
                )
            tensors |= {f"optimizer/{key}/{name}": value for key, value in kept.items()}
            values = {key: value for key, value in held.items() if key not in kept}
            state[name] = {"shape": list(parameter.shape), "tensors": sorted(kept), "values": values}
        options = {key: value for key, value in group.items() if key != "params"}
        moved = sorted(key for key, value in options.items() if isinstance(value, Tensor))  # lr may be one
        tensors |= {f"optimizer/group-{len(groups)}/{key}": options.pop(key) for key in moved}
        groups.append(
            {
                "options": options,
                "tensors": moved,
                "params": [name_of[id(parameter)] for parameter in group["params"]],
            }
        )
    facts = {"class": type(optimizer).__name__, "groups": groups, "state": state}
    json.dumps(facts, allow_nan=False)  # raises here, at the save, and not at the resume that needs it
    return tensors, facts


class OptimizerPacker:
    """`pack_optimizer` after every step: tensors that are still the same objects are not looked for again,
    nor described."""

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._packed: tuple[dict[str, Tensor], dict[str, Any]] = {}, {}

    def __call__(
        self, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As `pack_optimizer`; nothing of the result may be changed."""
        if not self._same(optimizer, names):
            self._packed = pack_optimizer(optimizer, names)
            self._held = [(value, dict(optimizer.state.get(value, {}))) for value in names.values()]
            return self._packed
        tensors, facts = self._packed
        groups = [
            {**saved, "options": {key: value for key, value in group.items() if key != "params"}}
            for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True)
        ]
        return tensors, {**facts, "groups": groups}

    def _same(self, optimizer: torch.optim.Optimizer, names: Mapping[str, Tensor]) -> bool:
        """Whether the parameters and all that is held of them are the tensors packed last, and the groups'
        options are no tensors."""
        if len(names) != len(self._held) or any(
            isinstance(value, Tensor) for group in optimizer.param_groups for value in group.values()
        ):
            return False
        for value, (before, held) in zip(names.values(), self._held, strict=True):
            now = optimizer.state.get(value, {})
            if (
                value is not before
                or len(now) != len(held)
                or any(now.get(key) is not one for key, one in held.items())
            ):
                return False
        return all(isinstance(one, Tensor) for _, held in self._held for one in held.values())


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    where: str,
) -> None:
    """Put packed state into an optimizer made anew over the same parameters; bit-identical, and all of it or
    nothing.

    `tensors` may hold others beside "optimizer/...". `where` names the checkpoint in errors. Raises FileError
    when class, groups, names, shapes or tensors differ.
    """
    mine = pack_optimizer(optimizer, names)[1]
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith("optimizer/")}
    problems = _differences(mine, facts, kept, where)
    if problems:
        raise FileError(problems)
    index = {name: at for at, name in enumerate(name for group in mine["groups"] for name in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, entry in facts["state"].items():
        if entry["tensors"] or entry["values"]:
            state[index[name]] = {
                key: kept[f"optimizer/{key}/{name}"].clone() for key in entry["tensors"]
            } | entry["values"]
    groups = []
    for at, (group, saved) in enumerate(zip(optimizer.param_groups, facts["groups"], strict=True)):
        options = {
            key: tuple(value) if isinstance(group.get(key), tuple) else value
            for key, value in saved["options"].items()
        }
        options |= {key: kept[f"optimizer/group-{at}/{key}"].clone() for key in saved["tensors"]}
        groups.append(options | {"params": [index[name] for name in mine["groups"][at]["params"]]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _differences(
    mine: Mapping[str, Any], facts: Mapping[str, Any], kept: Mapping[str, Tensor], where: str
) -> list[Problem]:
    try:
        if facts["class"] != mine["class"]:
            return [
                Problem(
                    "another optimizer",
                    where,
                    facts["class"],
                    mine["class"],
                    "resume with the recipe that was saved",
                )
            ]
        here, saved = mine["state"], facts["state"]
        problems = [
            Problem(
                f"no optimizer state of {name!r}, which trains here",
                where,
                found=", ".join(nearest(name, saved)) or None,
            )
            for name in sorted(set(here) - set(saved))
        ]
        problems += [
            Problem(
                f"optimizer state of {name!r}, which does not train here",
                where,
                ", ".join(nearest(name, here)) or None,
            )
            for name in sorted(set(saved) - set(here))
        ]
        theirs, ours = ([set(group["params"]) for group in side["groups"]] for side in (facts, mine))
        if not problems and theirs != ours:
            problems.append(
                Problem(
                    "the optimizer's groups differ",
                    where,
                    f"{[*map(len, theirs)]} tensors",
                    f"{[*map(len, ours)]}",
                )
            )
        wanted = {
            f"optimizer/{key}/{name}": here.get(name, entry)["shape"]
            for name, entry in saved.items()
            for key in entry["tensors"]
        }
        wanted |= {
            f"optimizer/group-{at}/{key}": []
            for at, group in enumerate(facts["groups"])
            for key in group["tensors"]
        }
        shapes = {name: entry["shape"] for name, entry in saved.items()}
        for mapping in [group["options"] for group in facts["groups"]] + [
            entry["values"] for entry in saved.values()
        ]:
            mapping.items()
    except (KeyError, TypeError, AttributeError) as error:
        return [Problem(f"the optimizer's JSON is not what pack_optimizer writes: {error!r}", where)]
    problems += [
        Problem(
            f"optimizer state of {name!r} has another shape",
            where,
            str(here[name]["shape"]),
            str(shapes[name]),
        )
        for name in sorted(set(here) & set(saved))
        if here[name]["shape"] != shapes[name]
    ]
    problems += [Problem(f"the tensor {key!r} is missing", where) for key in sorted(set(wanted) - set(kept))]
    problems += [
        Problem(f"the tensor {key!r} is unexpected", where) for key in sorted(set(kept) - set(wanted))
    ]
    problems += [
        Problem(
            f"the tensor {key!r} holds {str(kept[key].dtype).removeprefix('torch.')}, not moments",
            where,
            "a float",
        )
        for key in sorted(set(wanted) & set(kept))
        if not kept[key].is_floating_point() or kept[key].element_size() == 1
    ]
    return problems + [
        Problem(f"the tensor {key!r} has another shape", where, str(wanted[key]), str([*kept[key].shape]))
        for key in sorted(set(wanted) & set(kept))
        if kept[key].dim() and [*kept[key].shape] != wanted[key]
    ]


# ---------------------------------------------------------------- the disk


def require_free(path: Path, needed: int) -> None:
    """Raise MachineError unless the disk under `path`, which need not exist yet, has `needed` bytes free.
    Quotas are not seen."""
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    with writing(path):
        free = shutil.disk_usage(place).free
    if free < needed:
        sides = {"expected": f"{human(needed)} free", "found": human(free)}
        raise MachineError(
            "not enough disk space", where=str(path), remedy="free some space, or give another `out`", **sides
        )
