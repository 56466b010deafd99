"""Every message that a user can get: docs/messages.md, found in the code by its trees, held by comparing.

`python -m tests.test_messages_page` writes it anew. A message is the first argument of a class of
petune.errors. Where it is a name, the function around it says what it can be: by what is assigned there, by
what its callers give, by what another function returns. What changes from case to case is an ellipsis.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any, cast

import pytest

import petune.errors
from petune.errors import PetuneError

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "messages.md"
KINDS = {
    name: one
    for name, one in vars(petune.errors).items()
    if isinstance(one, type) and (issubclass(one, PetuneError) or name == "Problem")
}
# Raised inside a room, and said to the user as a problem with its place.
INNER = {"Bad": "DataError", "BadValue": "DataError", "Refused": "UsageError"}
ANY = "…"
DEEP = 4  # calls that are followed
# Files with an error whose words are the system's, or are read where they are made: beats, problems, Bad.
WORDS_OF_OTHERS = {
    "cli/petune_cli/main.py",
    "petune/parallel/launch/launcher.py",
    "petune/preflight/job_script.py",
    "petune/recipe/read.py",
    "petune/saving/checkpoint.py",
    "petune/tasks/row_maker.py",
}
HEAD = f"""# Every message

Written by `python -m tests.test_messages_page`, which reads the code; a test compares. Look here for the
words that you were shown: {ANY} stands for what differs from case to case. A message goes on with its place,
with what was expected and what was found; the arrow says what to do. The number is the
[exit code](recipes.md#exit-codes); a message without one is a part of another.
By symptom: [troubleshooting.md](troubleshooting.md).
"""
ROOMS = {
    "": "The command line",
    "petune_cli": "The command line",
    "recipe": "Recipes",
    "tasks": "Data",
    "models": "Models and their files",
    "methods": "Methods",
    "parallel": "Plans of several processes",
    "kernels": "Kernels and memory",
    "estimate": "Forecasts",
    "profiling": "Profiles",
    "preflight": "What is looked at before training",
    "run": "Runs",
    "report": "Pages about runs",
    "saving": "Checkpoints and tuned folders",
    "files": "Files",
    "rng": "Random numbers",
    "demo": "The demo",
}


class Module:
    """The tree of a file, with what each name of it may be."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(ROOT)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._bindings: dict[ast.AST, list[ast.AST]] = {}

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """The functions of the file by name, methods too."""
        return {node.name: node for node in self.parents if isinstance(node, ast.FunctionDef)}

    @cached_property
    def calls(self) -> dict[str, list[ast.Call]]:
        """Calls by the last name of what is called."""
        found: dict[str, list[ast.Call]] = defaultdict(list)
        for node in self.parents:  # every node but the root, in the order of a walk
            if isinstance(node, ast.Call):
                found[called(node)].append(node)
        return found

    def bindings(self, scope: ast.AST) -> list[ast.AST]:
        """What binds names in a function or file."""
        if scope not in self._bindings:
            kinds = ast.Assign | ast.AnnAssign | ast.NamedExpr | ast.For | ast.comprehension
            every = self.parents if scope is self.tree else ast.walk(scope)
            self._bindings[scope] = [node for node in every if isinstance(node, kinds)]
        return self._bindings[scope]

    def last(self, name: str, bindings: list[ast.AST], at: ast.AST) -> int | None:
        """The line of the last statement that assigns to a name on every way to a node; None without one."""
        way = [at]
        while way[-1] in self.parents:
            way.append(self.parents[way[-1]])
        steps = [(over, one.lineno) for one, over in pairwise(way) if isinstance(one, ast.stmt)]
        lines = [
            binding.lineno
            for binding in bindings
            if isinstance(binding, ast.Assign)
            and name in (target.id for target in ast.walk(binding) if isinstance(target, ast.Name))
            and any(self.beside(binding, over, line) for over, line in steps)
        ]
        return max(lines, default=None)

    def beside(self, binding: ast.Assign, over: ast.AST, line: int) -> bool:
        """Whether an assignment stands before a line in the same run of statements below a node."""
        blocks = (block for _, block in ast.iter_fields(over) if isinstance(block, list))
        return any(
            binding in block
            and any(getattr(one, "lineno", 0) == line for one in block)
            and binding.lineno < line
            for block in blocks
        )

    @property
    def room(self) -> str:
        """The package below petune that the file lies in."""
        parts = self.path.parts
        return parts[1] if len(parts) > 2 else ""

    def around(self, node: ast.AST) -> ast.FunctionDef | ast.Module:
        """The function that a node stands in, or the file."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, ast.FunctionDef):
                return node
        return self.tree


def called(call: ast.Call) -> str:
    """The last name of what a call calls."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


class Reader:
    """What an expression of a module can say."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def texts(self, node: ast.expr | None, deep: int = DEEP) -> set[str]:
        """The texts that a node may be; empty where nothing is known."""
        match node:
            case ast.Constant(value=str(text)):
                return {text}
            case ast.JoinedStr(values=parts):
                return {"".join(one) for one in product(*(self.part(part, deep) for part in parts))}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                ends = product(self.texts(left, deep) or {ANY}, self.texts(right, deep) or {ANY})
                return {first + second for first, second in ends} - {ANY + ANY}
            case ast.IfExp(body=one, orelse=other):
                return self.texts(one, deep) | self.texts(other, deep)
            case ast.BoolOp(values=several) | ast.Tuple(elts=several) | ast.List(elts=several):
                return set().union(*(self.texts(one, deep) for one in several))
            case ast.Dict(values=several):
                return set().union(*(self.texts(one, deep) for one in several))
            case ast.Subscript(value=holder) | ast.Starred(value=holder):
                return self.texts(holder, deep)
            case ast.Call(func=ast.Attribute(value=text, attr="lower" | "format" | "capitalize")):
                return self.texts(text, deep)
            case ast.Call(func=ast.Attribute(attr="join"), args=[ast.GeneratorExp(elt=one)]):
                return self.texts(one, deep)
            case ast.Call(func=ast.Name(id="did_you_mean")):
                return {f"did you mean: {ANY}"}
            case ast.Call() if deep and (function := self.module.functions.get(called(node))):
                returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return)]
                return set().union(*(self.texts(one, deep - 1) for one in returned))
            case ast.Name(id=name) if deep:
                return self.named(name, node, deep - 1)
        return set()

    def part(self, part: ast.expr, deep: int) -> set[str]:
        """What a piece of an f-string may be: its own text, one of two words, or anything."""
        if not isinstance(part, ast.FormattedValue):
            return self.texts(part, deep)
        if not isinstance(part.value, ast.IfExp):
            return {ANY}
        return (self.texts(part.value.body, deep) or {ANY}) | (self.texts(part.value.orelse, deep) or {ANY})

    def named(self, name: str, node: ast.AST, deep: int) -> set[str]:
        """What a name may be at a node."""
        function = self.module.around(node)
        found = self.assigned(name, function, deep, node)
        if not found and isinstance(function, ast.FunctionDef):
            found = self.given(name, function, deep)
        return found or self.assigned(name, self.module.tree, deep)

    def assigned(self, name: str, scope: ast.AST, deep: int, at: ast.AST | None = None) -> set[str]:
        """What is assigned to a name in a function or file, also as one of several, also by a loop. at: where
        it is read, which the last assignment before on the way there decides alone."""
        found: set[str] = set()
        bindings = self.module.bindings(scope)
        if at is not None and (last := self.module.last(name, bindings, at)) is not None:
            end = cast("Any", at).lineno
            bindings = [one for one in bindings if last <= getattr(one, "lineno", last) <= end]
        for node in bindings:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    found |= self.texts(value, deep)
                case ast.AnnAssign(target=ast.Name(id=target), value=value) if target == name:
                    found |= self.texts(value, deep)
                case ast.NamedExpr(target=ast.Name(id=target), value=value) if target == name:
                    found |= self.texts(value, deep)
                case (
                    ast.Assign(targets=[ast.Tuple(elts=targets)], value=value)
                    | ast.For(target=ast.Tuple(elts=targets), iter=value)
                    | ast.comprehension(target=ast.Tuple(elts=targets), iter=value)
                ):
                    found |= self.of_several(name, targets, value, deep)
                case ast.For(target=ast.Name(id=target), iter=value) if target == name:
                    found |= self.texts(value, deep)
        return found

    def of_several(self, name: str, targets: list[ast.expr], value: ast.expr, deep: int) -> set[str]:
        """What one of several names is that are assigned at once."""
        at = next(
            (at for at, one in enumerate(targets) if isinstance(one, ast.Name) and one.id == name), None
        )
        if at is None:
            return set()
        if isinstance(value, ast.IfExp):
            return self.of_several(name, targets, value.body, deep) | self.of_several(
                name, targets, value.orelse, deep
            )
        if isinstance(value, ast.Tuple | ast.List):
            pairs = [one for one in value.elts if isinstance(one, ast.Tuple)]
            if pairs:
                return set().union(*(self.texts(one.elts[at], deep) for one in pairs if at < len(one.elts)))
            return self.texts(value.elts[at], deep) if at < len(value.elts) else set()
        return set()

    def given(self, name: str, function: ast.FunctionDef, deep: int) -> set[str]:
        """What the callers of a function in its file give it as an argument."""
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        every = [*names, *(one.arg for one in function.args.kwonlyargs)]
        if name not in every:
            return set()
        found: set[str] = set()
        for call in self.module.calls.get(function.name, ()):
            at = names.index(name) - (names[:1] == ["self"]) if name in names else len(call.args)
            value = next((one.value for one in call.keywords if one.arg == name), None)
            found |= self.texts(call.args[at] if at < len(call.args) else value, deep)
        return found


def messages(module: Module) -> Iterator[tuple[str, str, str, ast.Call]]:
    """Of each message made in a file: its class, its words, its remedy, and the call. Words are empty where
    none can be read off."""
    reader = Reader(module)
    for name in (*KINDS, *INNER):
        for call in module.calls.get(name, ()):
            first = call.args[0] if call.args else None
            what = next((one.value for one in call.keywords if one.arg == "what"), first)
            if what is None or of_problems(what):
                continue
            fourth = call.args[4] if len(call.args) > 4 else None
            remedy = next((one.value for one in call.keywords if one.arg == "remedy"), fourth)
            texts, remedies = reader.texts(what), sorted(map(plain, reader.texts(remedy)))
            if len(texts) > 1 and len(remedies) > 1:
                remedies = []  # which belongs to which is not told by the tree
            for words in sorted(map(plain, texts)) or [""]:
                yield INNER.get(name, name), words, " / ".join(remedies), call


def of_problems(node: ast.expr) -> bool:
    """Whether an error is made of problems, which have words of their own."""
    match node:
        case ast.List() | ast.ListComp() | ast.BinOp(left=ast.ListComp()):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in ("problems", "faults")
        case ast.Subscript(value=several):
            return of_problems(several)
    return False


def plain(text: str) -> str:
    """One line, without what Markdown would take for its own."""
    return re.sub(rf"{ANY}(\W?{ANY})+", ANY, " ".join(text.split())).replace("`", "'")


def modules() -> list[Module]:
    """Every file of the package but the errors' own."""
    files = sorted([*(ROOT / "petune").rglob("*.py"), *(ROOT / "cli" / "petune_cli").rglob("*.py")])
    return [Module(file) for file in files if file.name != "errors.py"]


def page(read: Iterable[Module]) -> str:
    """The document, of modules."""
    found: dict[str, dict[str, tuple[set[str], set[str]]]] = defaultdict(dict)
    for module in read:
        for name, words, remedy, _ in messages(module):
            if len(re.sub(rf"[{ANY}\W]", "", words)) > 2:
                kinds, remedies = found[ROOMS[module.room]].setdefault(words, (set(), set()))
                kinds.update([name] if name != "Problem" else [])
                remedies.update([remedy] if remedy else [])
    lines = [HEAD]
    for room in dict.fromkeys(ROOMS.values()):
        if room in found:
            lines += [f"## {room}", "", *map(line, sorted(found[room].items(), key=by_words)), ""]
    return "\n".join(lines)


def by_words(item: tuple[str, object]) -> str:
    """By letters, whatever stands before them."""
    return re.sub(r"^\W+", "", item[0]).lower()


def line(item: tuple[str, tuple[set[str], set[str]]]) -> str:
    """A message as a point of a list."""
    words, (kinds, remedies) = item
    codes = ", ".join(str(code) for code in sorted({KINDS[kind].code for kind in kinds}))
    number = f" ({codes})" if codes else ""
    ways = "".join(f"<br>→ {'; '.join(sorted(remedies))}" if remedies else "")
    return f"- `{words}`{number}{ways}"


@pytest.fixture(scope="module")
def read() -> Iterator[list[Module]]:
    """Every file, read without a search for garbage among the nodes of its tree."""
    gc.disable()
    yield modules()
    gc.enable()


def test_the_page_has_every_message_of_the_code(read: list[Module]) -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read), "python -m tests.test_messages_page"


def test_messages_quoted_in_troubleshooting_are_messages() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| \*([^*]+?)(?: \.\.\.)?\*", text, re.MULTILINE)
    known = PAGE.read_text(encoding="utf-8").lower()
    assert len(quoted) > 3 and [words for words in quoted if words not in known] == []


def test_words_that_cannot_be_read_off_are_those_of_others(read: list[Module]) -> None:
    unread = {one.path.as_posix() for one in read for _, words, _, _ in messages(one) if not words}
    assert unread == WORDS_OF_OTHERS


MADE = """
def refuse(kind, name):
    what, remedy = ("no room", "make some") if kind else (f"{name} is full", "wait")
    raise FileError(what, where=name, remedy=remedy)
def damaged(what, file):
    return Problem(what, file)
def check(file):
    seal = "seal" if file else "hash"
    raise FileError([damaged("cut off", file), damaged("the " + seal + " does not fit", file)])
def twice(file):
    remedy = "first"
    if file:
        remedy = "inner"
    where, remedy = (file, "later") if file else ("", "last")
    raise FileError("reused", where=where, remedy=remedy)
def strange(error):
    raise UsageError(str(error))
"""


def test_words_are_found_behind_names_callers_and_branches(tmp_path: Path) -> None:
    file = ROOT / "petune" / "log.py"
    module = Module(file)
    module.tree = ast.parse(MADE)
    module.parents = {child: node for node in ast.walk(module.tree) for child in ast.iter_child_nodes(node)}
    ways = {words: remedy for _, words, remedy, _ in messages(module)}
    found = ways.keys()
    assert ways["reused"] == "last / later"
    assert found == {
        "no room",
        f"{ANY} is full",
        "reused",
        "cut off",
        "the seal does not fit",
        "the hash does not fit",
        "",
    }


if __name__ == "__main__":
    PAGE.write_text(page(modules()), encoding="utf-8")
    sys.exit()
