"""The notebooks run from the first cell to the last, and a run shows itself in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"
SHOWN = {  # what an output of each has
    "first-model": ("<progress", "<svg", "<td>accuracy</td>", "'good'"),
    "two-methods": ("<progress", "compared.html", "'adapter'", "<iframe"),
    "ladder": ("<progress", "<svg", "<td>loss</td>"),
}


@pytest.mark.slow
@pytest.mark.forks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SHOWN)
def test_a_notebook_runs_and_shows_its_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "cli"))))
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=100, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = "".join(str(output) for cell in notebook.cells for output in cell.get("outputs", ()))
    assert all(words in shown for words in SHOWN[name])
    if name == "ladder":
        far = next(cell for cell in notebook.cells if "max(abs" in cell.source)
        assert float(far.outputs[0]["data"]["text/plain"]) < 1e-3


def test_every_notebook_is_run_and_none_keeps_outputs() -> None:
    files = {file.stem: nbformat.read(file, as_version=4) for file in NOTEBOOKS.glob("*.ipynb")}
    assert files.keys() == SHOWN.keys()
    for notebook in files.values():
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") for cell in notebook.cells)
