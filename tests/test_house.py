"""The walls of the house: who may import whom, what nobody may call, how large a file grows, what is shipped.

Each rule is a function from source to complaints, tried first on a source that breaks it: a rule that cannot
fail guards nothing.
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import re
import resource
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE = sorted([*(ROOT / "petune").rglob("*.py"), *(ROOT / "cli").rglob("*.py")])
TESTS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])

# From the top down. A room imports rooms of later groups; rooms of one group know nothing of each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("petune_cli", "__main__", "__init__"),
    ("preflight", "profiling"),
    ("estimate",),
    ("run",),
    ("report",),
    ("recipe", "saving"),
    ("methods", "parallel", "tasks"),
    ("kernels",),
    ("models",),
    ("demo", "files", "rng"),
    ("errors", "log", "setting"),
)
LEVEL = {room: level for level, rooms in enumerate(ORDER) for room in rooms}

# Package: the rooms that may import it. An empty tuple: nobody.
ONLY = {
    "pydantic": ("recipe",),
    "datasets": ("tasks",),
    "typer": ("petune_cli",),
    "rich": ("petune_cli",),
    "torch.distributed": ("parallel",),
    "triton": ("kernels",),
    "peft": (),
    "click": (),
}

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_BUILTINS = {"eval", "exec"}
BANNED_CALLS = {
    "torch.load",
    "torch.save",
    "os.system",
    "os.popen",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
}
OBJECT_COLLECTIVE = re.compile(r"^((all_)?gather|broadcast|scatter|send|recv)_object(_list)?$")
VAGUE_NAMES = {"utils", "util", "common", "base", "helpers", "helper", "misc"}
# A test about a banned thing makes one to show that it is refused: file -> what it may use.
ABOUT_BANNED_THINGS: dict[str, set[str]] = {
    "tests/kernels/test_fuse.py": {"torch.save", "torch.load"},
    "tests/methods/test_activation_cache.py": {"torch.save", "torch.load"},
    "tests/methods/test_merging.py": {"pickle"},
    "tests/models/test_frozen_weight.py": {"pickle", "torch.save", "torch.load"},
}

LONG = 400  # lines of a file
# Files past it. Before a name is added here: are there two ideas in the file?
LONG_FILES = (
    "petune/estimate/forecast.py",
    "petune/files/safetensors.py",
    "petune/kernels/block/attention.py",
    "petune/kernels/memory/offloaded_adamw.py",
    "petune/kernels/reference.py",
    "petune/kernels/triton/attention.py",
    "petune/models/stack.py",
    "petune/parallel/launch/launcher.py",
    "petune/parallel/launch/process_group.py",
    "petune/parallel/planning.py",
    "petune/parallel/runner.py",
    "petune/profiling/throughput.py",
    "petune/rng/dropout.py",
    "petune/saving/export.py",
    "petune/saving/peft.py",
)
NAME = 80  # characters of a test's name
SCREEN = 60  # lines of a function, but for its docstring
SILENCED = re.compile(
    r"# (?:type: ignore(?:\[[\w, -]+\])?|noqa(?:: [A-Z]+\d+(?:, [A-Z]+\d+)*)?)(?P<reason>.*)"
)
# folders of tests/ whose modules do not lie in petune/
ELSEWHERE = {"cli": "cli/petune_cli", "benchmarks": "benchmarks"}
# Tests of a room as a whole, which no single module answers for. Those of several rooms lie in tests/ itself.
OF_A_ROOM = (
    "tests/demo/test_models.py",
    "tests/kernels/test_gate.py",
    "tests/kernels/test_rounding.py",
    "tests/methods/test_everywhere.py",
    "tests/methods/test_tutorial.py",
    "tests/models/test_families.py",
    "tests/models/test_oldest.py",
)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home|Users|opt|mnt|data)/[\w.-]+|[A-Z]:\\Users")


# ------------------------------------------------------------------ the rules


def room_of(path: Path) -> str:
    """The room a source file belongs to: the package or module directly under petune, or petune_cli."""
    return path.relative_to(ROOT).with_suffix("").parts[1]


@cache
def nodes(tree: ast.AST) -> list[ast.AST]:
    """Every node of a tree, which several rules ask for, and which takes as long to walk as to read."""
    return list(ast.walk(tree))


def imports(tree: ast.AST, package: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    """Every dotted name a module imports, wherever it does so, with its line; `from a import b` gives a.b."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (above, node.module or "") if part)
            yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)


def upward(tree: ast.AST, room: str) -> list[str]:
    """Imports of a room that stands above or beside `room`, and rooms that have no place in ORDER."""
    if room not in LEVEL:
        return [f"room {room} has no place in ORDER"]
    found = []
    for name, line in imports(tree):
        parts = name.split(".")
        other = (
            parts[1]
            if parts[0] == "petune" and len(parts) > 1
            else parts[0]
            if parts[0] == "petune_cli"
            else None
        )
        if other is None or other == room or (parts[0] == "petune" and not is_room(other)):
            continue
        if other not in LEVEL:
            found.append(f"{line}: room {other} has no place in ORDER")
        elif LEVEL[other] <= LEVEL[room]:
            found.append(f"{line}: {room} may not import {other}")
    return found


def is_room(name: str) -> bool:
    """Whether petune.<name> is a module and not a name of the face, such as __version__."""
    return name in LEVEL or (ROOT / "petune" / name).is_dir() or (ROOT / "petune" / f"{name}.py").is_file()


def foreign(tree: ast.AST, room: str) -> list[str]:
    """Imports of a package that is another room's business."""
    return [
        f"{line}: only {' and '.join(rooms) or 'nobody'} may import {package}"
        for name, line in imports(tree)
        for package, rooms in ONLY.items()
        if (name == package or name.startswith(package + ".")) and room not in rooms
    ]


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression made of names and attributes; '' for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (left := dotted(node.value)):
        return f"{left}.{node.attr}"
    return ""


def banned(tree: ast.AST) -> list[tuple[str, int]]:
    """Each banned thing used, with its line: imports, names, calls, and shell=True."""
    found = []
    for name, line in imports(tree):
        if (
            name.split(".")[0] in BANNED_MODULES
            or name in BANNED_CALLS
            or OBJECT_COLLECTIVE.match(name.split(".")[-1])
        ):
            found.append((name, line))
    for node in nodes(tree):
        if isinstance(node, ast.Name) and node.id in BANNED_BUILTINS and isinstance(node.ctx, ast.Load):
            found.append((node.id, node.lineno))
        if isinstance(node, ast.Attribute) and (
            dotted(node) in BANNED_CALLS or OBJECT_COLLECTIVE.match(node.attr)
        ):
            found.append((dotted(node) or node.attr, node.lineno))
        if (
            isinstance(node, ast.keyword)
            and node.arg == "shell"
            and not (isinstance(node.value, ast.Constant) and node.value.value is False)
        ):
            found.append(("shell=True", node.value.lineno))
    return found


def undocumented(tree: ast.Module) -> list[str]:
    """Public functions and classes of a module, and the module itself, that have no docstring; overloads have
    that of what they are overloads of."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    told = [node for node in public if "overload" not in map(ast.unparse, node.decorator_list)]
    missing = [node.name for node in told if not ast.get_docstring(node)]
    return ([] if ast.get_docstring(tree) else ["the module"]) + missing


def length_complaints(lengths: Mapping[str, int], allowed: Iterable[str]) -> list[str]:
    """Files past LONG lines that nobody has allowed, and files that are allowed more than they need."""
    longer = [
        f"{name} has {count} lines" for name, count in lengths.items() if count > LONG and name not in allowed
    ]
    return longer + [f"{name} needs no exception" for name in allowed if lengths.get(name, 0) <= LONG]


def imports_of_tests(tree: ast.AST) -> list[str]:
    """Imports of a module of tests, by its dotted name: tests.test_x, tests.parallel.test_y."""
    return [f"{line}: {name}" for name, line in imports(tree) if re.match(r"tests\.(\w+\.)*test_", name)]


def unmirrored(tests: Iterable[str], modules: Iterable[str], allowed: Iterable[str]) -> list[str]:
    """Tests in a room that are named after none of its modules, and exceptions that are not needed; all are
    paths from the root.

    `petune/run/loop.py` is tested by `tests/run/test_loop.py` and `tests/run/test_loop_WHAT.py`.
    """
    known = set(modules)

    def mirrors(test: str) -> bool:
        _, room, *inner, name = PurePosixPath(test).with_suffix("").parts
        folder = "/".join([ELSEWHERE.get(room, f"petune/{room}"), *inner])
        words = name.split("_")[1:]
        return any(f"{folder}/{'_'.join(words[:count])}.py" in known for count in range(1, len(words) + 1))

    homeless = [test for test in tests if len(PurePosixPath(test).parts) > 2 and not mirrors(test)]
    alone = [f"{test} is named after no module of its room" for test in homeless if test not in allowed]
    return alone + [f"{test} needs no exception" for test in allowed if test not in homeless]


def long_names(tree: ast.AST) -> list[str]:
    """Tests whose names have more than NAME characters."""
    return [
        f"{node.lineno}: {node.name} has {len(node.name)} characters"
        for node in nodes(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and len(node.name) > NAME
    ]


def long_functions(tree: ast.AST) -> list[str]:
    """Functions of more lines than a screen has, but for docstrings. A kernel of Triton's is one program."""

    def lines(one: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        told = one.body[0] if ast.get_docstring(one) else None
        said = (told.end_lineno or 0) - told.lineno + 1 if told else 0
        return (one.end_lineno or 0) - one.lineno + 1 - said

    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    own = [one for one in nodes(tree) if isinstance(one, kinds)]
    own = [one for one in own if not any("triton.jit" in ast.unparse(by) for by in one.decorator_list)]
    return [f"{one.lineno}: {one.name} has {lines(one)} lines" for one in own if lines(one) > SCREEN]


def unreasoned(text: str) -> list[str]:
    """Lines that silence a checker and say nothing of why."""
    found = ((number, SILENCED.search(line)) for number, line in enumerate(text.splitlines(), 1))
    return [f"{number}: {what[0]}" for number, what in found if what and not what["reason"].strip(" #-")]


def type_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of each public class of a module, and of each alias that looks like one."""
    for number, node in enumerate(tree.body):
        if isinstance(node, ast.ClassDef):
            yield node.name, f"class {number} of {id(tree)}"
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):  # as a TypeVar is
            yield from (
                (one.id, ast.unparse(node.value)) for one in node.targets if isinstance(one, ast.Name)
            )


def two_meanings(named: Iterable[tuple[str, str]]) -> list[str]:
    """Names that stand for several things; the same alias in two rooms is one."""
    camel = {one for one in named if re.match(r"[A-Z][A-Za-z]*[a-z]", one[0])}
    return [name for name, many in Counter(name for name, _ in camel).items() if many > 1]


# ------------------------------------------------------------------ the rules can fail


@pytest.mark.parametrize(
    ("source", "room", "complaint"),
    [
        ("from petune.run.train import train", "saving", "saving may not import run"),
        ("from petune.saving import checkpoint", "methods", "methods may not import saving"),
        ("def f():\n    from petune.tasks import TASKS", "methods", "methods may not import tasks"),
        ("import petune_cli.main", "run", "run may not import petune_cli"),
        ("from petune.methods.lora import tune", "kernels", "kernels may not import methods"),
        ("from petune.methods import configs", "parallel", "parallel may not import methods"),
        ("import petune.errors", "cellar", "room cellar has no place"),
    ],
)
def test_an_import_against_the_order_is_seen(source: str, room: str, complaint: str) -> None:
    assert complaint in upward(ast.parse(source), room)[0]


@pytest.mark.parametrize(
    "source",
    ["import petune.errors", "from petune import __version__", "from petune.models.spec import Family"],
)
def test_an_import_along_the_order_is_fine(source: str) -> None:
    assert upward(ast.parse(source), "kernels") == []


@pytest.mark.parametrize(
    ("source", "room"),
    [
        ("import peft", "saving"),
        ("from torch import distributed", "run"),
        ("import torch.distributed as d", "run"),
        ("import rich", "run"),
    ],
)
def test_an_import_of_another_rooms_package_is_seen(source: str, room: str) -> None:
    assert foreign(ast.parse(source), room)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load('x')",
        "from torch import load",
        "eval('1')",
        "run = exec",
        "yaml.load(t, Loader=L)",
        "subprocess.run(c, shell=True)",
        "subprocess.run(c, shell=flag)",
        "os.system('x')",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
    ],
)
def test_a_banned_thing_is_seen(source: str) -> None:
    assert banned(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "run.eval()",
        "yaml.safe_load(t)",
        "petune.load(m, d)",
        "subprocess.run(c, shell=False)",
    ],
)
def test_what_only_looks_banned_is_fine(source: str) -> None:
    assert banned(ast.parse(source)) == []


def test_a_long_file_needs_an_exception_and_a_public_name_a_docstring() -> None:
    assert length_complaints({"a": LONG + 1, "b": LONG}, ["b"]) == [
        f"a has {LONG + 1} lines",
        "b needs no exception",
    ]
    assert length_complaints({"a": LONG + 1, "b": LONG}, ["a"]) == []
    assert undocumented(ast.parse("def f(): ...\nclass _C: ...")) == ["the module", "f"]


@pytest.mark.parametrize(
    "source",
    [
        "from tests.test_x import f",
        "from tests.a.test_x import f",
        "import tests.test_x",
        "from tests import test_x",
    ],
)
def test_an_import_of_a_test_is_seen(source: str) -> None:
    assert imports_of_tests(ast.parse(source))
    assert not imports_of_tests(ast.parse("from tests.pool import run"))


def test_a_test_outside_the_room_of_its_module_is_seen() -> None:
    modules = ["petune/run/loop.py", "petune/kernels/head/hooks.py", "cli/petune_cli/main.py"]
    right = [
        "tests/run/test_loop.py",
        "tests/run/test_loop_ends.py",
        "tests/kernels/head/test_hooks.py",
        "tests/cli/test_main.py",
        "tests/test_all.py",
    ]
    assert unmirrored(right, modules, []) == []
    wrong = ["tests/run/test_loops.py", "tests/files/test_loop.py", "tests/kernels/test_hooks.py"]
    assert unmirrored(wrong, modules, []) == [
        f"{test} is named after no module of its room" for test in wrong
    ]
    assert unmirrored(wrong, modules, [*wrong, right[0]]) == [f"{right[0]} needs no exception"]


def test_a_name_that_is_too_long_is_seen() -> None:
    assert long_names(ast.parse(f"class Tests:\n    def {'test_':x<{NAME + 1}}(): ..."))
    assert not long_names(ast.parse(f"def {'test_':x<{NAME}}(): ..."))


def test_a_function_longer_than_a_screen_is_seen() -> None:
    body = "    x = 1\n" * SCREEN
    assert long_functions(ast.parse(f"class A:\n  def f():\n{body}"))
    assert not long_functions(ast.parse(f'def f():\n    """\n\n    Long."""\n{body[10:]}'))
    assert not long_functions(ast.parse(f"@triton.jit\ndef f():\n{body}"))


def test_a_name_with_two_meanings_is_seen() -> None:
    sources = ["class Way: ...", "Way = Literal['a']", "Way = Literal['b']", "Way = Literal['a']"]
    names = [list(type_names(ast.parse(source))) for source in sources]
    assert [two_meanings(names[0] + names[1]), two_meanings(names[1] + names[2])] == [["Way"], ["Way"]]
    assert two_meanings(names[1] + names[3]) == []


def test_a_checker_that_is_silenced_without_a_reason_is_seen() -> None:
    bare = [
        "x  # type: " + "ignore",
        "x  # type: " + "ignore[a, b-c]  #",
        "x  # no" + "qa: B018",
        "# no" + "qa",
    ]
    assert [unreasoned(line) != [] for line in bare] == [True] * len(bare)
    assert not unreasoned("x  # type: " + "ignore[misc]  # torch's\ny  # no" + "qa: B018, E1 - asked")


@pytest.mark.parametrize(
    "text", ["see " + "/ho" + "me/me/model", "cd " + "/wo" + "rk/main", "'" + "/ro" + "ot/.cache'"]
)
def test_a_machine_path_is_seen(text: str) -> None:
    assert MACHINE_PATH.search(text)


# ------------------------------------------------------------------ the house keeps them


def name_of(path: Path) -> str:
    """The path from the root, as a test id."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    """The tree of a file, which several rules read."""
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """Trees are no garbage, and a search for it among a million nodes takes longer than reading them: none
    here, and no tree is left for those in later tests."""
    gc.disable()
    yield
    parsed.cache_clear()
    nodes.cache_clear()
    gc.enable()


def complaints(files: list[Path], rule: Callable[[Path], Iterable[str]]) -> list[str]:
    """What a rule finds in all the files, each with the file's path from the root."""
    return [f"{name_of(path)}:{what}" for path in files for what in rule(path)]


def test_imports_follow_the_order() -> None:
    def rule(path: Path) -> list[str]:
        return upward(parsed(path), room_of(path)) + foreign(parsed(path), room_of(path))

    assert complaints(SOURCE, rule) == []


def test_nothing_banned_is_used() -> None:
    def rule(path: Path) -> list[str]:
        allowed = ABOUT_BANNED_THINGS.get(name_of(path), set())
        return [f"{line}: {what}" for what, line in banned(parsed(path)) if what not in allowed]

    assert complaints(SOURCE + TESTS, rule) == []


def test_no_module_imports_a_test() -> None:
    """What tests share lies in conftest.py or in a module that is no test."""
    assert complaints(SOURCE + TESTS, lambda path: imports_of_tests(parsed(path))) == []


def test_tests_lie_where_their_modules_do() -> None:
    tests = [name_of(path) for path in TESTS if path.name.startswith("test_")]
    modules = [name_of(path) for path in [*SOURCE, *(ROOT / "benchmarks").glob("*.py")]]
    assert unmirrored(tests, modules, OF_A_ROOM) == []


def test_names_of_tests_can_be_read() -> None:
    assert complaints(TESTS, lambda path: long_names(parsed(path))) == []


def test_every_function_fits_a_screen() -> None:
    assert complaints(SOURCE, lambda path: long_functions(parsed(path))) == []


def test_no_checker_is_silenced_without_a_reason() -> None:
    assert complaints(SOURCE, lambda path: unreasoned(path.read_text())) == []


def test_everything_public_is_documented() -> None:
    assert complaints(SOURCE, lambda path: undocumented(parsed(path))) == []


def test_no_file_is_long_without_an_exception() -> None:
    lengths = {name_of(path): path.read_text().count("\n") for path in SOURCE}
    assert length_complaints(lengths, LONG_FILES) == [], "are there two ideas in it? Else LONG_FILES"


def test_files_are_named_after_their_idea() -> None:
    assert [name_of(path) for path in SOURCE + TESTS if {path.stem, path.parent.name} & VAGUE_NAMES] == []


def test_no_name_of_a_class_or_an_alias_has_two_meanings() -> None:
    assert two_meanings(name for path in SOURCE for name in type_names(parsed(path))) == []


def test_no_file_names_a_path_of_one_machine() -> None:
    endings = {".py", ".md", ".toml", ".txt", ".yaml", ".json", ""}
    found = []
    for path in shipped_text(endings):
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if MACHINE_PATH.search(line) and "#!/" not in line:
                found.append(f"{name_of(path)}:{number}")
    assert found == []


def shipped_text(endings: set[str]) -> list[Path]:
    """Our own text files: what a clone holds, but for data and tokenizers. In a worktree `.git` is a file; it
    is git's."""
    rooms = ("petune", "cli", "tests", "benchmarks", "recipes", "docs", "requirements", ".ci")
    files = [path for room in rooms for path in (ROOT / room).rglob("*")] + [
        path for path in ROOT.glob("*") if path.name != ".git"
    ]
    return [
        path
        for path in files
        if path.is_file() and path.suffix in endings and not {"__pycache__", "docstrings"} & set(path.parts)
    ]


# ------------------------------------------------------------------ the package


def test_every_package_is_shipped() -> None:
    packages = {
        ".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "petune").rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages | {"petune_cli", "petune.recipes"}


def test_the_pins_keep_the_bounds() -> None:
    files = [ROOT / "constraints.txt", ROOT / "requirements" / "docs.txt"]
    lines = [line for file in files for line in file.read_text().splitlines() if not line.startswith("#")]
    assert len({line.partition("==")[0].lower() for line in lines}) == len(lines), "pinned twice"
    pins = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    assert "+" not in pins["torch"], "a local version tag ties the pin to one platform"
    extras = PROJECT["project"]["optional-dependencies"]
    for text in [*PROJECT["project"]["dependencies"], *(text for extra in extras.values() for text in extra)]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(Version(pins[wanted.name.lower()])), text


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter that sees the tree."""
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'cli'}", "PATH": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


HEAVY = (
    "print(json.dumps(sorted({'torch', 'transformers', 'datasets', 'pydantic', 'rich'} & set(sys.modules))))"
)


def seconds_of(code: str) -> float:
    """The processor time a fresh interpreter needs for `code`: other processes do not count."""
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(code)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime


def is_within(code: str, bound: float, tries: int = 5) -> bool:
    """Whether a fresh interpreter needs less than `bound` seconds for `code`, once in so many tries."""
    return any(seconds_of(code) < bound for _ in range(tries))


def test_import_petune_is_quick_and_loads_nothing() -> None:
    assert json.loads(python(f"import json, sys, petune\n{HEAVY}")) == []
    empty = min(seconds_of("pass") for _ in range(2))
    assert is_within("import petune", empty + 0.15)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    loaded = json.loads(python(f"import json, sys\nimport petune_cli.main\n{HEAVY}"))
    assert not {"torch", "transformers", "datasets", "pydantic"} & set(loaded)
    assert is_within("from petune_cli.main import app\napp(['--help'])", 0.6)


def test_checking_a_recipe_loads_no_torch() -> None:
    assert "torch" not in json.loads(
        python(f"import json, sys\nfrom petune.recipe import load_recipe\nload_recipe('llama_lora')\n{HEAVY}")
    )


def test_the_face_holds_what_it_names() -> None:
    import petune

    assert [
        name for name in petune.__all__ if not callable(getattr(petune, name)) and name != "__version__"
    ] == []
    assert dir(petune) == sorted(petune.__all__)
    with pytest.raises(AttributeError, match="no attribute 'wrapp'"):
        petune.wrapp  # noqa: B018


def test_no_name_of_the_face_is_also_a_module() -> None:
    """Importing a submodule binds it in the package under its name, where it would hide the function."""
    import petune
    import petune.run.train

    assert [name for name in petune.__all__ if is_room(name)] == []
    assert inspect.isfunction(petune.train) and petune.train is petune.run.train.train
    assert "resume" in inspect.signature(petune.train).parameters
