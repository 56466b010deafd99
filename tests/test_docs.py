"""The documents do as they are typed: each page's code blocks run one after another in a folder of its own.

A block whose first line is `# needs ...` cannot run in a test, and says so to the reader: it is parsed, its
verbs, options and settings are looked up. `my-model` and `my-recipe.yaml` are what pages call a reader's own.
"""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from petune_cli.main import app
from petune_cli.sweep import sorted_out

import petune
from petune.recipe import load_recipe, shipped_recipes
from petune.run.sweep import grid
from tests.built_command import built
from tests.narrow_models import write_narrow_minilm
from tests.picture_runs import write_pictures, write_vit
from tests.small_runs import write_model, write_rows
from tests.sound_runs import write_sounds, write_whisper

pytestmark = [
    pytest.mark.forks,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("no_picture"),
]

ROOT = Path(__file__).parent.parent
OF_OTHER_TESTS = {"docs/files.md"}  # tests/methods/test_saving.py
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), ROOT / "recipes" / "README.md")
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHELL = re.compile(r"(petune|pip|make|torchrun|python3?|cat|\.venv/\S+|#) ")
NEEDS = re.compile(r"# needs \w")


def blocks(page: str) -> list[tuple[str, str]]:
    """(python or sh, text) of each block of a document that is code. Without a language it is by its first
    word."""
    found = FENCE.findall((ROOT / page).read_text(encoding="utf-8"))
    named = [(language or ("sh" if SHELL.match(text) else "text"), text) for language, text in found]
    return [(language, text) for language, text in named if language in ("python", "sh")]


PAGES = [
    page for page in DOCUMENTS if page.startswith("docs/") and page not in OF_OTHER_TESTS and blocks(page)
]


# ---------------------------------------------------------------- what a reader has


RECIPE = "model: my-model\ndata: rows.jsonl\nmethod: lora\nbatch_size: 4\nmax_steps: 2\n"
REVIEWS = "text,label\n" + "".join(f"red sun {at},{('good', 'bad')[at % 2]}\n" for at in range(12))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's models, data and a run of them."""
    folder = tmp_path_factory.mktemp("own")
    # so wide that a ladder can be an eighth of it, and that blocks of nf4 fill it
    write_model(folder / "my-model", "llama", hidden_size=64, intermediate_size=64)
    write_model(folder / "bert", "bert")
    write_rows(folder / "rows.jsonl", "causal")
    (folder / "reviews.csv").write_text(REVIEWS)
    (folder / "my-recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture
def reader(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's folder, in which lines are typed."""
    shutil.copytree(own, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def of_recipes(folder: Path) -> dict[str, Any]:
    """The page's model is an encoder."""
    shutil.rmtree(folder / "my-model")
    (folder / "bert").rename(folder / "my-model")
    return {}


def of_images(folder: Path) -> dict[str, Any]:
    """The page's model reads pictures, of which there are some."""
    shutil.rmtree(folder / "my-model")
    write_vit(folder / "my-model")
    (folder / "rows.jsonl").unlink()
    write_pictures(folder, 6)
    return {}


def of_sounds(folder: Path) -> dict[str, Any]:
    """The page's model hears, and there is something to hear."""
    shutil.rmtree(folder / "my-model")
    write_whisper(folder / "my-model")
    (folder / "rows.jsonl").unlink()
    write_sounds(folder, 6)
    return {}


def of_reports(folder: Path) -> dict[str, Any]:
    """Three runs, of which one was made."""
    petune.train("my-recipe.yaml", out="runs/recipe")
    for name in ("one", "two"):
        shutil.copytree("runs/recipe", f"runs/{name}")
    return {}


def of_python(folder: Path) -> dict[str, Any]:
    """What the page's lines name before they make it."""

    class Enough(petune.Callback):
        """A callback that has not heard enough."""

    return {
        "petune": petune,
        "model": transformers.AutoModelForCausalLM.from_pretrained("my-model"),
        "tokenizer": transformers.AutoTokenizer.from_pretrained("my-model"),
        "rows": [{"text": "red sun sings"}, {"text": "blue sea runs"}, {"text": "green hill sings"}],
        "ids": torch.tensor([[1, 9, 10, 11, 2]]),
        "Enough": Enough,
    }


BEFORE = {
    "docs/recipes.md": of_recipes,
    "docs/how-to/embeddings.md": of_recipes,
    "docs/how-to/reranking.md": of_recipes,
    "docs/how-to/images.md": of_images,
    "docs/how-to/speech.md": of_sounds,
    "docs/report.md": of_reports,
    "docs/python.md": of_python,
    "docs/kernels.md": of_python,
}


# ---------------------------------------------------------------- typing


def commands(text: str) -> Iterator[list[str]]:
    """The words of each line of a block; a text that goes into a file is written."""
    lines = iter(text.splitlines())
    for line in lines:
        if into := re.fullmatch(r"cat > (\S+) <<'END'", line):
            Path(into[1]).write_text("".join(f"{one}\n" for one in iter(lambda: next(lines), "END")))
        elif words := shlex.split(line, comments=True):
            yield words


def run_shell(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Type the lines of a block; each has to end well."""
    for program, *words in commands(text):
        assert program == "petune", f"{program} cannot run here: begin the block with `# needs ...`"
        with pytest.raises(SystemExit) as ended:
            app(words)
        said = capsys.readouterr()
        assert not ended.value.code, f"petune {shlex.join(words)}\n{said.out[-2000:]}{said.err}"


def parse_shell(text: str) -> None:
    """Look up what the petune lines of a block say."""
    for program, *words in commands(text):
        if program == "make":
            assert all(f"\n{target}: " in f"\n{MAKEFILE}" for target in words), words
        if program == "petune":
            verb, *rest = words
            built().commands[verb].make_context(verb, list(rest))
            settings = [word for word in rest if re.match(r"[a-z_0-9.]+=", word)]
            shipped = next((word for word in rest if word in SHIPPED), None)
            axes, others = sorted_out(settings) if verb == "sweep" else ({}, settings)
            recipe = load_recipe(shipped or {"model": "m", "data": "d", "method": "lora"}, others)
            assert not axes or grid(recipe, axes)


TEN_MINUTES = "docs/ten-minutes.md"
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SHIPPED = {file.stem for file in shipped_recipes()}


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_narrow_minilm(tmp_path_factory.mktemp("bert") / "minilm", num_hidden_layers=1)


@pytest.fixture(autouse=True)
def _built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """See tests/built_command.py."""
    monkeypatch.setattr("petune_cli.main.command_line", built)


@pytest.mark.parametrize(
    ("page", "real"),
    [*((page, False) for page in PAGES), pytest.param(TEN_MINUTES, True, marks=pytest.mark.long)],
)
def test_a_page_does_as_it_is_typed(
    page: str,
    real: bool,
    reader: Path,
    narrow: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """real: MiniLM is the real one, not a small part of it."""
    if not real:
        monkeypatch.setattr("petune.demo.minilm_folder", lambda: narrow)
    names = BEFORE.get(page, lambda folder: {})(reader)
    for number, (language, text) in enumerate(blocks(page)):
        if NEEDS.match(text):
            ast.parse(text) if language == "python" else parse_shell(text)
        elif language == "sh":
            run_shell(text, capsys)
        else:
            file = reader / f"block_{number}.py"
            file.write_text(text, encoding="utf-8")
            made = runpy.run_path(str(file), init_globals=names)
            names |= {name: value for name, value in made.items() if not name.startswith("__")}


# ---------------------------------------------------------------- names and links


def test_our_names_beside_those_of_other_tools_are_ours() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    verbs = built().commands
    for row in re.findall(r"^\| .* \| (.*) \|$", text, re.MULTILINE):
        for name in re.findall(r"`([^`]+)`", row):
            if name.startswith("petune "):
                assert name.split()[1] in verbs, name
            elif found := re.match(r"petune\.([a-z_.]+)", name):
                assert found[1].startswith("methods.") or found[1] in petune.__all__, name
            elif re.fullmatch(r"[a-z_]+(\.[a-z_]+)*(=\w+)?", name) and name not in WORDS:
                key, _, value = name.partition("=")
                assert re.search(rf"`{key}(\.|`)", KEYS) or key in ("data", "method", "memory", "parallel"), (
                    name
                )
                assert not value or f"### {value}\n" in KEYS, name


KEYS = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
WORDS = {"auto", "from_pretrained", "loss.png", "report.html"}  # values and files


def test_every_page_has_a_place_in_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    notebooks = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.ipynb")]
    pages = [page.removeprefix("docs/") for page in (*DOCUMENTS, *notebooks) if page.startswith("docs/")]
    assert [page for page in pages if f" {page.replace('.ipynb', '.md')}\n" not in site] == []


def anchors(text: str) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    heads = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", DOCUMENTS)
def test_a_link_leads_to_a_file_and_a_heading(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{path}#{anchor}"


def test_figures_of_the_summary_stand_in_its_sections() -> None:
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    summary = re.search(r"^## Where petune stands\n.*?(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert summary is not None and len(summary[0].splitlines()) <= 70
    number = re.compile(r"\d[\d,]*\.?\d+")
    below = set(number.findall(text.replace(summary[0], "")))
    newest = [row.split("|")[2] for row in summary[0].splitlines() if row.startswith("| ")]
    figures = [one for cell in newest for one in number.findall(re.sub(r"\([^()]*\)", "", cell))]
    assert [one for one in figures if len(one) > 2 and one not in below] == []
    assert len(figures) > 100
