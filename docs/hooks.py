"""What the site has beside docs/: documents of other folders under their own paths, notebooks as pages, and
links that lead to them.

mkdocs calls the functions `on_*`. A link in a document is written as the repository has it, so that it works
there too; here it becomes one between pages. What is no page of the site stays as text.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/RESULTS.md",
    "petune/demo/README.md",
    "recipes/README.md",
)
LINK = re.compile(r"(!?)\[((?:[^][]|\[[^]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of other folders, and read notebooks as pages."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = as_markdown((ROOT / "docs" / file.src_uri).read_text(encoding="utf-8"))
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=page))
    return files


def as_markdown(notebook: str) -> str:
    """The cells of a notebook, code in fences."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells)


class Arguments(griffe.Extension):
    """Paragraphs of docstrings whose every line begins with `name: ` become lists of arguments."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Rewrite the docstring of a function."""
        if func.docstring:
            func.docstring.value = "\n\n".join(map(listed, func.docstring.value.split("\n\n")))


def listed(paragraph: str) -> str:
    """`name: meaning` lines as points of a list; any other paragraph as it is."""
    lines = paragraph.split("\n")
    if not all(re.match(r"\w+: |  ", line) for line in lines):
        return paragraph
    return "\n".join(re.sub(r"^(\w+): ", r"- `\1`: ", line) for line in lines)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to pages of the site."""
    here = page.file.src_uri
    source = here if here in OUTSIDE else f"docs/{here}"

    def led(link: re.Match[str]) -> str:
        picture, words, path, place = link.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = target.removeprefix("docs/") if target not in OUTSIDE else target
        if files.get_file_from_path(target) is None and (ROOT / target).exists():
            return words  # a file of the repository that is no page
        led_to = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"{picture}[{words}]({led_to}{place or ''})"

    return LINK.sub(led, markdown)
