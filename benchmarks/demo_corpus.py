"""Makes `demo:docstrings`, the frozen corpus, from the docstrings of the running Python's standard library.

Deterministic for one Python version: sources are parsed with `ast` and never imported, order and choice come
from SHA-256 of names. Near-duplicates are dropped everywhere, hence never lie in two splits, and a module
lies in one split only.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

Row = dict[str, str]

KINDS = ("function", "class", "module")
EXTRA_KEYS = ("kind", "module", "name", "text")
FILES = ("train", "eval", "extra", "domain_train", "domain_eval")
DOMAIN = frozenset({"tkinter", "idlelib", "turtle", "turtledemo"})
DOMAIN_EVAL = frozenset(
    f"tkinter.{name}" for name in ("ttk", "font", "simpledialog", "filedialog", "dnd")
) | frozenset(
    f"idlelib.{name}"
    for name in ("configdialog", "run", "help", "codecontext", "debugger", "scrolledlist", "searchbase")
)
TESTS = r"_?_?tests?|test_.*|.*_test"  # path parts of the library's own tests, whose docstrings say little

SHORTEST, LONGEST = 30, 3000  # characters; longer ones are whole manuals and would drown the rest
LONGEST_SUMMARY = 160  # characters; a longer first paragraph gives only its first sentence
SHINGLE, NEAR = 3, 0.5  # words in a shingle; Jaccard similarity from which two texts count as one
EVAL_PER_KIND = 150
# only modules with at most so many rows are held out, so that balancing wastes little text
EVAL_MODULE_ROWS = 14
TRAIN_PER_KIND = 800


def order(*names: str) -> str:
    """A fixed pseudo-random sort key."""
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def split_summary(text: str) -> tuple[str, str]:
    """(summary on one line, body): the first paragraph, or its first sentence when it is long; the body is
    what follows, maybe ''."""
    first, _, rest = text.partition("\n\n")
    summary, body = " ".join(first.split()), rest.strip("\n")
    sentence = re.match(r".{15,}?[.!?](?=\s+[A-Z])", first, re.DOTALL)
    if len(summary) > LONGEST_SUMMARY and sentence:
        summary, body = " ".join(sentence[0].split()), text[sentence.end() :].strip()
    return summary, body


def docstrings(module: str, source: str) -> Iterator[Row]:
    """A row for each docstring of a module, the module's own first; SyntaxError when the source does not
    parse.

    Left out: texts of a length outside [SHORTEST, LONGEST], and those that speak of copyright, as they may
    come under other terms.
    """
    definitions = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

    def visit(node: ast.AST, path: str) -> Iterator[Row]:
        for child in ast.iter_child_nodes(node):
            yield from (
                visit(child, f"{path}.{child.name}".lstrip("."))
                if isinstance(child, definitions[1:])
                else visit(child, path)
            )
        if isinstance(node, definitions):
            text = (ast.get_docstring(node) or "").strip()
            if (
                SHORTEST <= len(text) <= LONGEST
                and text.isascii()
                and not re.search(r"copyright|licen[cs]e", text, re.IGNORECASE)
            ):
                kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
                summary, body = split_summary(text)
                yield {
                    "kind": kind,
                    "module": module,
                    "name": path or module,
                    "summary": summary,
                    "body": body,
                    "text": text,
                }

    yield from visit(ast.parse(source), "")


def standard_library(root: Path) -> Iterator[Row]:
    """Every row of the library under `root` but for its tests, in the order of paths; a file that does not
    parse is passed over."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in ("site-packages", "dist-packages") or any(re.fullmatch(TESTS, part) for part in parts):
            continue
        try:
            yield from docstrings(".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    """Runs of SHINGLE words; case, punctuation and the value of numbers do not count."""
    words = re.findall(r"[a-z]+|0", re.sub(r"\d+", "0", text.lower()))
    return frozenset(tuple(words[at : at + SHINGLE]) for at in range(max(1, len(words) - SHINGLE + 1)))


def jaccard(left: frozenset[tuple[str, ...]], right: frozenset[tuple[str, ...]]) -> float:
    """Size of the intersection over size of the union."""
    return len(left & right) / len(left | right)


def without_near_duplicates(rows: Iterable[Row]) -> list[Row]:
    """The rows whose similarity to every earlier kept row is under NEAR. Exact duplicates are the case
    1.0."""
    kept: list[Row] = []
    sizes: list[int] = []
    holders: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        mine = shingles(row["text"])
        shared = Counter(at for shingle in mine for at in holders.get(shingle, ()))
        if any(common >= NEAR * (len(mine) + sizes[at] - common) for at, common in shared.items()):
            continue
        for shingle in mine:
            holders.setdefault(shingle, []).append(len(kept))
        kept.append(row)
        sizes.append(len(mine))
    return kept


def take(rows: Iterable[Row], per_kind: int) -> list[Row]:
    """At most `per_kind` rows of each kind, by their fixed order."""
    room = Counter(dict.fromkeys(KINDS, per_kind))
    chosen = []
    for row in sorted(rows, key=lambda row: order(row["module"], row["name"], row["text"])):
        if room[row["kind"]] > 0:
            room[row["kind"]] -= 1
            chosen.append(row)
    return chosen


def held_out_modules(rows: Sequence[Row]) -> set[str]:
    """Modules for the evaluation split: by their fixed order until they hold EVAL_PER_KIND rows of each kind.

    A module is taken only while it brings rows of a kind that is still short; ValueError when the library has
    too few.
    """
    modules: dict[str, Counter[str]] = {}
    for row in rows:
        modules.setdefault(row["module"], Counter())[row["kind"]] += 1
    held: set[str] = set()
    have: Counter[str] = Counter()
    for module in sorted(
        (name for name, kinds in modules.items() if kinds.total() <= EVAL_MODULE_ROWS), key=order
    ):
        if any(have[kind] < EVAL_PER_KIND and modules[module][kind] for kind in ("class", "module")):
            held.add(module)
            have += modules[module]
    if any(have[kind] < EVAL_PER_KIND for kind in KINDS):
        raise ValueError(
            f"this Python's library gives too few rows to hold out {EVAL_PER_KIND} of each kind: {dict(have)}"
        )
    return held


def splits(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """FILES -> rows. `train`, `eval` and `extra` are general, the domain files the tkinter family; `eval` is
    balanced over KINDS.

    `extra` holds what `train` leaves of the same modules (mostly functions): more text for pretraining,
    without the text's two parts.
    """
    unique = without_near_duplicates(sorted(rows, key=lambda row: KINDS[::-1].index(row["kind"])))
    domain = [row for row in unique if row["module"].partition(".")[0] in DOMAIN]
    general = [row for row in unique if row["module"].partition(".")[0] not in DOMAIN]
    held = held_out_modules(general)
    learn = [row for row in general if row["module"] not in held]
    train = take(learn, TRAIN_PER_KIND)
    chosen = {id(row) for row in train}
    rest = (row for row in learn if id(row) not in chosen)
    return {
        "train": train,
        "eval": take((row for row in general if row["module"] in held), EVAL_PER_KIND),
        "extra": [{key: row[key] for key in EXTRA_KEYS} for row in take(rest, len(learn))],
        "domain_train": take((row for row in domain if row["module"] not in DOMAIN_EVAL), len(domain)),
        "domain_eval": take((row for row in domain if row["module"] in DOMAIN_EVAL), len(domain)),
    }


PROVENANCE = """demo:docstrings - docstrings of the Python standard library

Source    the standard library of {implementation} {version}, parsed with ast, never imported
Script    python -m benchmarks.demo_corpus OUT   (the same Python version gives the same bytes)
Licence   PSF-2.0. Copyright (c) 2001-2023 Python Software Foundation. All Rights Reserved.
          Copyright (c) 2000 BeOpen.com. Copyright (c) 1995-2001 Corporation for National Research Initiatives.
          Copyright (c) 1991-1995 Stichting Mathematisch Centrum. All Rights Reserved.
          The full text: https://docs.python.org/3.11/license.html
          Some modules were contributed under the compatible notices listed there.
Changes   Only docstrings were taken, dedented, {shortest} to {longest} characters, ASCII.
          The library's own tests and texts that speak of copyright or licence are left out.
          Texts whose word {shingle}-shingles have a Jaccard similarity of {near} or more with an earlier one were dropped, over all files.
          Each module lies in one split (train and extra count as one).
          The domain files (tkinter family: {domain}) and eval.jsonl were never used in pretraining.

file                     rows  function  class  module  characters  sha256
{table}
"""


def write(out: Path, files: Mapping[str, Sequence[Row]]) -> None:
    """Writes FILES as JSON lines and PROVENANCE with counts and SHA-256 into the folder `out`, made when
    missing."""
    out.mkdir(parents=True, exist_ok=True)
    table = []
    for name in FILES:
        data = "".join(json.dumps(row) + "\n" for row in files[name]).encode()
        (out / f"{name}.jsonl").write_bytes(data)
        kinds = Counter(row["kind"] for row in files[name])
        characters = sum(len(row["text"]) for row in files[name])
        counts = (
            f"{len(files[name]):5} {kinds['function']:9} {kinds['class']:6} {kinds['module']:7}"
            f" {characters:11}"
        )
        table.append(f"{name + '.jsonl':22} {counts}  {hashlib.sha256(data).hexdigest()}")
    notice = PROVENANCE.format(
        implementation=platform.python_implementation(),
        version=platform.python_version(),
        shortest=SHORTEST,
        longest=LONGEST,
        shingle=SHINGLE,
        near=NEAR,
        domain=", ".join(sorted(DOMAIN)),
        table="\n".join(table),
    )
    (out / "PROVENANCE").write_text(notice, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Makes the corpus in the folder named by the one argument; returns the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m benchmarks.demo_corpus OUT", file=sys.stderr)
        return 2
    out = Path(arguments[0])
    write(out, splits(standard_library(Path(sysconfig.get_path("stdlib")))))
    print((out / "PROVENANCE").read_text(encoding="utf-8"), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
