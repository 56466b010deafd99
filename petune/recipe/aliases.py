"""The classic names of parallel settings, accepted at the top level of a recipe and on the command line.

Each is moved to its modern key together with the place it was written at, so that one check serves both. The
three `*_parallel_method` together name a backend; the lists belong to the backend that is there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from petune.errors import Problem, did_you_mean
from petune.parallel.configs import CUTS, row_name
from petune.recipe.raw import PARALLEL, FoundProblem, Written, as_mapping, show
from petune.recipe.yaml_lines import KeyPath

# Classic key -> the modern one. A list goes to the backend that is there in place of tp or sp.
CLASSIC: Mapping[str, str] = {
    "tp_num_attention_heads_list": "parallel.tp.heads",
    "tp_intermediate_size_list": "parallel.tp.columns",
    "seq_scatter_list": "parallel.sp.sequence",
    "stage_num_hidden_layers_list": "parallel.pp.stages",
    "con_parallel_method": "parallel.cut.connection",
    "att_parallel_method": "parallel.cut.attention",
    "mlp_parallel_method": "parallel.cut.mlp",
}
# Method key -> what it takes -> the layout that is.
_METHODS: Mapping[str, Mapping[str, str]] = {
    "con_parallel_method": {"None": "whole", "SP": "sequence"},
    "att_parallel_method": {"TP": "heads", "SP": "sequence"},
    "mlp_parallel_method": {"TP": "heads", "SP": "sequence"},
}
_STAGES = "stage_num_hidden_layers_list"

# the key paths written together with the classic keys; None: all there are
Fresh = Collection[KeyPath] | None


def accept_classic_keys(written: Written, fresh: Fresh = None) -> list[FoundProblem]:
    """Move every classic key of `written` to its modern one; what is wrong with doing so.

    A modern key written together with its classic one (`fresh`) contradicts it, an older one is overridden by
    it. No classic key is left.
    """
    given = [key for key in written.tree if key in CLASSIC]
    if not given:
        return []
    section = written.tree.get(PARALLEL)
    if _is_fresh((PARALLEL,), written, fresh) and (
        as_mapping((PARALLEL,), section) is None or section in ("none", None)
    ):
        problems = [
            _problem(
                written, given[0], f"{given[0]} beside a parallel it cannot be put in", "remove one of them"
            )
        ]
    else:
        methods = [key for key in given if key in _METHODS]
        lists = [key for key in given if key not in _METHODS]
        backend, problems = _backend(written, methods, lists, fresh)
        for key in lists:
            axis = "pp" if key == _STAGES else backend
            problems += _move(written, key, (PARALLEL, axis, _setting(key)), fresh) if axis else []
    for key in given:
        written.tree.pop(key, None)
    return problems


def in_classic_words(problem: Problem, written: Written) -> Problem:
    """`problem` with every key path that was given under a classic key called by that key."""
    for path, key in written.spelled.items():
        texts = {
            name: text.replace(".".join(path), key)
            for name in ("what", "expected", "remedy")
            if (text := getattr(problem, name))
        }
        problem = replace(problem, **texts)
    return problem


def _setting(key: str) -> str:
    return CLASSIC[key].rpartition(".")[2]


def _is_fresh(path: KeyPath, written: Written, fresh: Fresh) -> bool:
    """Whether what is at `path` was written together with the classic keys."""
    if fresh is None:
        return path[0] in written.tree
    return any(one == path[: len(one)] or (path == one[: len(path)] and len(path) > 1) for one in fresh)


def _problem(
    written: Written,
    key: str,
    what: str,
    remedy: str | None,
    expected: str | None = None,
    found: str | None = None,
) -> FoundProblem:
    return (key,), Problem(what, written.where((key,)), expected, found, remedy)


def _given_twice(written: Written, key: str, modern: KeyPath) -> FoundProblem:
    name = ".".join(modern)
    return _problem(
        written, key, f"{key} beside {name}", "keep one of them", found=f"{name} at {written.where(modern)}"
    )


def _move(written: Written, key: str, target: KeyPath, fresh: Fresh) -> list[FoundProblem]:
    axis = as_mapping(target[:2], written.get(target[:2])) or {}
    if target[2] in axis:
        if _is_fresh(target, written, fresh):
            return [_given_twice(written, key, target)]
        written.drop(target)
    written.move((key,), target)
    written.spelled[target] = key
    return []


def _backend(
    written: Written, methods: Sequence[str], lists: Sequence[str], fresh: Fresh
) -> tuple[str, list[FoundProblem]]:
    """The backend that lists about blocks belong to; "" where it cannot be told. One that methods name is
    there afterwards."""
    there = [name for name in as_mapping((PARALLEL,), written.tree.get(PARALLEL)) or {} if name in CUTS]
    about_blocks = [key for key in lists if key != _STAGES]
    if methods:
        problems = _wrong_methods(written, methods)
        if there and _is_fresh((PARALLEL, there[0]), written, fresh):
            problems.append(_given_twice(written, methods[0], (PARALLEL, there[0])))
        if problems:
            # galaxy has a place for each list, so that each is looked at
            return next(iter(there), "galaxy"), problems
        return _take_backend(written, there), []
    if there or len(about_blocks) == 3:
        return next(iter(there), "galaxy"), []  # galaxy is the one row that shares out all three
    if "seq_scatter_list" not in about_blocks:
        return "tp", []
    if len(about_blocks) == 1:
        return "sp", []
    what = f"{about_blocks[0]} beside {about_blocks[1]}: several backends share out both"
    return "", [_problem(written, about_blocks[0], what, f"say which is meant, with {', '.join(_METHODS)}")]


def _take_backend(written: Written, there: Sequence[str]) -> str:
    """Put the backend the three methods name in the place of the one that was there before; it keeps its
    shares."""
    found = {_setting(key): _METHODS[key][_word(written.tree[key])] for key in _METHODS}
    name = row_name(found)
    if len(there) == 1 and there[0] != name:
        written.move((PARALLEL, there[0]), (PARALLEL, name))
    for setting in found:
        written.drop((PARALLEL, name, setting))
    for key in _METHODS:
        written.tree[key] = found[_setting(key)]
    if name == "cut":
        for key in _METHODS:
            written.move((key,), (PARALLEL, "cut", _setting(key)))
            written.spelled[PARALLEL, "cut", _setting(key)] = key
    elif not there:
        written.tree["con_parallel_method"] = None
        written.move(("con_parallel_method",), (PARALLEL, name))
    return name


def _wrong_methods(written: Written, methods: Sequence[str]) -> list[FoundProblem]:
    problems = []
    for key in methods:
        word = _word(written.tree[key])
        if word not in _METHODS[key]:
            meant, expected = did_you_mean(word[:64].upper(), _METHODS[key]), " or ".join(_METHODS[key])
            problems.append(
                _problem(
                    written, key, f"{key} does not take this value", meant, expected, show(written.tree[key])
                )
            )
    if missing := [key for key in _METHODS if key not in methods]:
        remedy = f"give {' and '.join(missing)} too"
        problems.append(
            _problem(
                written,
                methods[0],
                f"{methods[0]} without {' and '.join(missing)}",
                remedy,
                ", ".join(_METHODS),
            )
        )
    by_sequence = [
        key for key in ("att_parallel_method", "mlp_parallel_method") if _word(written.tree.get(key)) == "SP"
    ]
    if (
        "con_parallel_method" in methods
        and _word(written.tree["con_parallel_method"]) == "None"
        and by_sequence
    ):
        what = (
            f"con_parallel_method beside {' and '.join(by_sequence)} SP: an all-reduce would sum different"
            " tokens"
        )
        problems.append(
            _problem(written, "con_parallel_method", what, "set con_parallel_method: SP", "SP", "None")
        )
    return problems


def _word(value: object) -> str:
    return "None" if value is None else value if isinstance(value, str) else ""
