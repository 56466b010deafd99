"""The public face as a stranger meets it: signatures, examples that run, and types that a checker sees in
another project."""

from __future__ import annotations

import ast
import doctest
import inspect
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import petune
from petune.errors import FileError, PetuneError, RecipeError, UsageError
from petune.recipe import Recipe
from tests.methods.zoo import tiny
from tests.small_runs import write_model, write_rows

ROOT = Path(__file__).parent.parent
# in the order in which their examples run
SHOWN = (
    *("load_recipe", "PetuneError", "train", "load_run", "Run", "Run.history", "Callback"),
    *("wrap", "mark_only_trainable", "tuned_state", "save", "load", "save_base", "merge", "merged_weights"),
    "text_model",
    *("add", "alone", "active", "per_row", "ActivationCache"),
)
FUNCTIONS = [name for name in petune.__all__ if inspect.isfunction(getattr(petune, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_the_face_names_and_types_its_arguments(name: str):
    signature = inspect.signature(getattr(petune, name))
    assert signature.return_annotation is not inspect.Signature.empty
    for argument in signature.parameters.values():
        assert argument.annotation is not inspect.Parameter.empty, argument
        assert argument.kind is not inspect.Parameter.VAR_POSITIONAL or argument.annotation != "Any", (
            "*args: Any says nothing"
        )


WRONG: dict[str, tuple[Callable[[Any], object], type[PetuneError]]] = {
    "wrap": (lambda model: petune.wrap(model, "nothing"), UsageError),
    "merge": (petune.merge, UsageError),
    "merged_weights": (lambda model: petune.merged_weights(model).__enter__(), UsageError),
    "save": (lambda model: petune.save(model, "tuned"), UsageError),
    "save_base": (lambda model: petune.save_base(model, "base"), UsageError),
    "text_model": (petune.text_model, UsageError),
    "load": (lambda model: petune.load(model, "nowhere"), FileError),
    "add": (lambda model: petune.add(model, "a/b"), UsageError),
    "alone": (lambda model: petune.alone(model, "poet").__enter__(), UsageError),
    "active": (lambda model: petune.active(model, "poet"), UsageError),
    "per_row": (lambda model: petune.per_row(model, ["poet"]), UsageError),
    "tuned_state": (petune.tuned_state, UsageError),
    "mark_only_trainable": (petune.mark_only_trainable, UsageError),
    "load_recipe": (lambda model: petune.load_recipe("no.yaml"), RecipeError),
    "load_run": (lambda model: petune.load_run("nowhere"), FileError),
    "train": (lambda model: petune.train("no.yaml"), RecipeError),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_function_of_the_face_raises_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    call, error = WRONG[name]
    with pytest.raises(error):
        call(tiny("llama-causal"))
    text = " ".join((inspect.getdoc(getattr(petune, name)) or "").split())
    names = "|".join(one.__name__ for one in error.__mro__ if issubclass(one, PetuneError))
    assert re.search(rf"Raises (\w+ [^.]*[;:] )?({names})\b", text), text


def test_every_function_of_the_face_is_tried_with_something_wrong():
    assert {name for name in FUNCTIONS if not name.startswith("mark_only_")} <= WRONG.keys()


@pytest.mark.parametrize("name", ["wrap", "merge", "save", "add", "per_row"])
def test_shapes_and_dtypes_of_tensors_are_said(name: str):
    text = inspect.getdoc(getattr(petune, name)) or ""
    assert re.search(r"\[[\w() *]+, \w+\]", text) and re.search(r"dtype|float32", text)


def test_every_name_of_the_face_has_an_example_and_a_place_on_its_page():
    names = {name for name in petune.__all__ if not name.startswith(("mark_only_", "__"))}
    names.add("mark_only_trainable")  # which has several
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    assert all(f"\n::: petune.{name}\n" in page for name in names)
    assert names - {"Recipe"} == {name for name in SHOWN if "." not in name}  # load_recipe shows one


def test_help_of_train_names_every_setting_with_its_default():
    text = inspect.getdoc(petune.train) or ""
    for name, info in Recipe.model_fields.items():
        if name in ("version", "model", "data", "method"):
            assert name == "version" or f"\n{name}: " in text
        else:
            (line,) = (line for line in text.splitlines() if line.startswith(f"    {name}: "))
            assert " = " in line and (info.description or "") in text
    assert "    epochs: float = 1.0" in text and "    memory: str | Mapping[str, Any] = 'auto'" in text


@pytest.mark.slow
def test_the_examples_of_the_face_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_picture: None):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "my-model", "llama")
    write_rows(tmp_path / "rows.jsonl", "causal")
    names: dict[str, Any] = {"petune": petune, "torch": torch, "transformers": transformers}
    for name in SHOWN:
        owner, _, attribute = name.partition(".")
        shown: Any = getattr(getattr(petune, owner), attribute) if attribute else getattr(petune, owner)
        test = doctest.DocTestParser().get_doctest(inspect.getdoc(shown) or "", names, name, None, 0)
        assert test.examples, f"{name} has no example"
        said: list[str] = []
        result = doctest.DocTestRunner(verbose=False).run(test, out=said.append, clear_globs=False)
        assert result.failed == 0, "".join(said)
        names = test.globs
    assert (
        type(names["plain"]).__module__.startswith("transformers.")
        and (tmp_path / "merged" / "config.json").is_file()
    )


USER = """
from typing import Any, Mapping
import petune, transformers

class Enough(petune.Callback):
    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        return bool(metrics["eval_loss"] < 0.1)

model = transformers.BertForMaskedLM(transformers.BertConfig())
rows = [{"text": "a", "label": "b"}]
run = petune.train(model=model, data=rows, method={"name": "lora", "r": 8}, callbacks=[Enough()], lr=1e-4)
reveal_type(petune.train)
reveal_type(run)
reveal_type(run.model)
reveal_type(run.history)
reveal_type(petune.wrap(model, "lora"))
reveal_type(petune.load(model, "tuned"))
reveal_type(petune.merge(model))
with petune.merged_weights(model) as merged:
    reveal_type(merged)
reveal_type(petune.save(model, "tuned"))
reveal_type(petune.load_run("run").summary)
reveal_type(petune.load_recipe("run.yaml").lr)
petune.train(data=3)
petune.wrap("my-model")
petune.no_such_name
"""
SEEN = [
    "def (recipe: str | pathlib.Path | petune.recipe.schema.Recipe | typing.Mapping[str, Any] | None =, *,",
    "petune.run.finished.Run",
    "torch.nn.Module",
    "list[dict[str, float]]",
    *["transformers.BertForMaskedLM"] * 4,
    "pathlib.Path",
    "dict[str, Any]",
    "float | None",
    'Argument "data" to "train" has incompatible type "int"',
    'No overload variant of "wrap" matches argument type "str"',
    'Module has no attribute "no_such_name"',
]


# So much of both libraries as the face shows: reading all of them would take a minute.
STUBS = {
    "torch/__init__.pyi": "from torch import nn as nn\nclass Tensor: ...\n",
    "torch/nn/__init__.pyi": "class Module: ...\n",
    "transformers/__init__.pyi": """from torch import nn
class PreTrainedModel(nn.Module): ...
class PreTrainedTokenizerBase: ...
class BertConfig: ...
class BertForMaskedLM(PreTrainedModel):
    def __init__(self, config: BertConfig) -> None: ...
""",
}


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders that an editable install puts on the path, as its .pth file names them."""
    folder = tmp_path_factory.mktemp("editable")
    source = folder / "source"
    source.mkdir()
    for name in ("petune", "cli", "recipes", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    code = f"from setuptools.build_meta import build_editable\nprint(build_editable({str(folder)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".pth"))
        return [Path(line) for line in wheel.read(path).decode().splitlines()]


def test_an_editable_install_is_found_by_folders_that_type_checkers_read(editable: list[Path]):
    """mypy and pyright look where a .pth file points; they follow no import hook."""
    assert [
        (folder / name).is_dir() for folder, name in zip(editable, ("petune", "petune_cli"), strict=True)
    ] == [True, True]
    assert (editable[0] / "petune" / "py.typed").is_file()


def test_every_name_of_the_face_is_declared_for_type_checkers():
    """And none through `__getattr__`, which would give any misspelt name the type Any."""
    tree = ast.parse((ROOT / "petune" / "__init__.py").read_text())
    branches = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        name.asname or name.name
        for node in branches[0].body
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    assert declared | {"__version__"} == set(petune.__all__)
    hidden = [node for node in branches if ast.unparse(node.test) == "not TYPE_CHECKING"]
    lazy = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"
    ]
    assert lazy == [node for branch in hidden for node in branch.body]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_type_checker_of_another_project_sees_the_types(editable: list[Path], tmp_path: Path):
    """Without petune's own configuration, as of an installed package."""
    config = "[mypy]\n[mypy-petune.*]\nignore_errors = True\nfollow_imports = silent\n"
    for name, text in (STUBS | {"user.py": USER, "mypy.ini": config}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-error-summary",
        "--cache-dir",
        str(tmp_path / "cache"),
        "user.py",
    ]
    environment = os.environ | {"MYPYPATH": os.pathsep.join(map(str, (tmp_path, *editable)))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    # what else a call of wrap could have been is noted besides
    lines = [line for line in done.stdout.splitlines() if "note:" not in line or "Revealed" in line]
    assert len(lines) == len(SEEN), done.stdout + done.stderr
    for line, words in zip(lines, SEEN, strict=True):
        assert words in line
