"""The notebooks run from the first cell to the last, and a run shows itself in them: in a kernel's process,
and in a shell of this one, which has imported torch."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from jupyter_client import KernelManager
from nbclient import NotebookClient
from traitlets.config import Config

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"
SHOWN = {  # what an output of each has
    "first-model": ("<progress", "<svg", "<td>accuracy</td>", "'good'"),
    "two-methods": ("<progress", "compared.html", "'adapter'", "<iframe"),
    "ladder": ("<progress", "<svg", "<td>loss</td>"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Runs a notebook. All of them share a kernel, which has to import torch once, and none sees another's
    names."""
    folder = tmp_path_factory.mktemp("notebooks")
    home, own = str(Path(sys.executable).parent), os.pathsep.join(map(str, (ROOT, ROOT / "cli")))
    given = {"PATH": os.pathsep.join((home, os.environ["PATH"])), "PYTHONPATH": own}
    kernel = KernelManager()
    kernel.start_kernel(cwd=str(folder), env={**os.environ, **given, "IPYTHONDIR": str(folder / "ipython")})

    def executed(name: str) -> Any:
        notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        return NotebookClient(notebook, km=kernel, timeout=280).execute()

    yield executed
    kernel.shutdown_kernel(now=True)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """A shell that a kernel would have, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    hooks = sys.displayhook, sys.excepthook
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell.instance(config=config)
    made.kernel = object()
    made.display_formatter.active_types = made.display_formatter.format_types  # HTML too
    yield made
    atexit.unregister(made.atexit_operations)
    made.atexit_operations()
    InteractiveShell.clear_instance()
    sys.displayhook, sys.excepthook = hooks


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_cells_of_a_notebook_run_and_show_their_runs(shell: InteractiveShell) -> None:
    shown = ""
    for cell in nbformat.read(NOTEBOOKS / "first-model.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            with capture_output() as said:
                done = shell.run_cell(cell.source)
            done.raise_error()
            shown += str(shell.display_formatter.format(done.result)[0])
            shown += said.stdout + "".join(str(output.data) for output in said.outputs)
    assert [words for words in SHOWN["first-model"] if words not in shown] == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_and_shows_its_runs(name: str, run: Callable[[str], Any]) -> None:
    cells = run(name).cells
    shown = "".join(str(output) for cell in cells for output in cell.get("outputs", ()))
    assert [words for words in SHOWN[name] if words not in shown] == []
    if name == "ladder":
        far = next(cell for cell in cells if "max(abs" in cell.source)
        assert float(far.outputs[0]["data"]["text/plain"]) < 1e-3


def test_every_notebook_is_run_and_none_keeps_outputs() -> None:
    files = {file.stem: nbformat.read(file, as_version=4) for file in NOTEBOOKS.glob("*.ipynb")}
    assert files.keys() == SHOWN.keys()
    for notebook in files.values():
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") for cell in notebook.cells)
