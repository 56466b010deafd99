"""Which families petune knows and what each can: docs/families.md, made by asking the code.

`python -m tests.test_families_table` writes it anew. A yes counts here only where a test runs that family so,
whose cells are read; every no is a refusal that the code gives when the page is
made.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch

from petune import models
from petune.errors import PetuneError, UsageError
from petune.methods import merge, tuned_state, wrap
from petune.methods.configs import make_config
from petune.methods.registry import tune
from petune.models import FAMILIES, family_of
from petune.models.frozen_weight import FORMS
from petune.models.quantise import quantise_blocks
from petune.parallel.configs import CutConfig, DpConfig, EpConfig, ParallelConfig, PpConfig
from petune.parallel.planning import make_plan
from petune.saving.peft import to_peft
from petune.saving.peft_experts import warn_of_conversion
from petune.saving.serve import _refuse as refuse_to_serve
from petune.saving.servers import SERVERS
from petune.tasks.registry import check_fit
from tests.mark_tables import MODELS, Notes, built, fresh, of_blocks, rows
from tests.methods import family_cells
from tests.methods.more_models import MORE
from tests.methods.zoo import EACH, MOE, SETTINGS, ZOO, of_64, tiny
from tests.parallel.cells import (
    BY_COLUMNS,
    CELLS,
    EXPERTS,
    KIN,
    METHODS,
    OTHERS,
    SPREAD,
    SPREAD_FUSED,
    WHOLE_EXPERTS,
)
from tests.parallel.plans import BACKENDS

pytestmark = pytest.mark.slow  # it looks at every cell of the house

DOCUMENT = Path(__file__).parent.parent / "docs" / "families.md"
CUT = CutConfig(size=2)
MIXTURES = [config.model_type for _, config, _ in MOE.values()]
DENSE = [kind for kind in FAMILIES if kind not in MIXTURES]
PLANS: dict[str, ParallelConfig] = {
    "dp": ParallelConfig(dp=DpConfig(size=2)),
    "FSDP2": ParallelConfig(dp=DpConfig(size=2, shard=True)),
    "tp": ParallelConfig(tp=CUT),
    "galaxy": ParallelConfig(galaxy=CUT),
    "sp": ParallelConfig(sp=CUT),
    "ulysses": ParallelConfig(sp=CutConfig(size=2, exchange="ulysses")),
    "ring": ParallelConfig(sp=CutConfig(size=2, exchange="ring")),
    "pp": ParallelConfig(pp=PpConfig(size=2)),
    "ep": ParallelConfig(ep=EpConfig(size=2)),
}
BACKEND = {"FSDP2": "shard", "sp": "sp-gather", "ulysses": "sp-ulysses", "ring": "sp-ring", "pp": "pp-1f1b"}
MIXED = (
    *METHODS,
    "fused",
    *PLANS,
    "packed",
    *FORMS,
    "merge",
    "export",
    "vLLM",
    "other servers",
)  # of mixtures
COLUMNS = tuple(column for column in MIXED if column != "ep")
HEAD = """# Families

Written by `python -m tests.test_families_table`, which asks the code; a test compares. A row is the
`model_type` of a config, with any head that transformers has for it; a [checkpoint of several
modalities](how-to/multimodal.md) has the row of its text model. `fused`: blocks under LoRA on one
device; elsewhere LoRA's linears are fused one by one. `sp`, `ulysses` and `ring` are the three exchanges of
sequence parallelism. `packed`: samples joined in a row, decoders alone. `nf4`, `int8`, `fp8`: LoRA over a
base in that `base_dtype`, in fused blocks or not. `export`: LoRA in files that peft computes the same with.
`vLLM`, `other servers`: LoRA that these [servers](serving.md) are written; a whole model is what `petune
merge` is for.

No mark stands without a test. Behind a yes is one that trains a small model of the family so (packs its
samples, merges it, reads its files) and finds the numbers of transformers' own, or of peft; the cells that
such tests run are compared with these marks. Behind a no is the refusal itself, which the code gave when this
page was made.

Mixtures of experts have a table of their own: under `tp` and `galaxy` each expert is cut by columns, under
`ep` they lie whole on [several ranks](parallel.md#experts-on-several-ranks). Of them tells
[methods.md](methods.md#experts).
Of `gemma4_text` a model of dense blocks is asked: those with embeddings for each block, or keys and values
that several blocks read (E2B, E4B), have no `pp` and are not fused under `sp`, and those
with experts are refused.
Mixtures of Llamas in Mixtral's class are `mixtral`; `llama_moe`, which has a class of its own, is refused by
that name.
Other models train with `full`, `lora` and `dp`: every linear outside the head is a target.

"""


def cell(kind: str, column: str, notes: Notes) -> str:
    """What a family can, or why not."""
    name, family = EACH[kind], FAMILIES[kind]
    if column == "fused":
        return of_blocks(name, "lora", None, notes)
    if column == "packed" and family.kind != "decoder":
        return ""
    try:
        if column in METHODS:
            heads = {"reduction": 2} if column == "side" and kind in MIXTURES else {}  # small ones
            tune(fresh(name), make_config(column, SETTINGS[column] | heads))
        elif column == "packed":
            check_fit("causal", family.kind, True, family.packs)
        elif column in PLANS:
            make_plan(PLANS[column], family, built(name).config, None, 8)
        else:
            OTHER.get(column, _quantised)(kind, column)
    except PetuneError as error:
        return notes("; ".join(problem.what for problem in error.problems))
    return "yes"


def _quantised(kind: str, base_dtype: str) -> None:
    """Raise UsageError for a base that cannot be held so; nothing is computed."""
    with patch("petune.models.quantise.quantised", lambda own, form: own):
        quantise_blocks(_sized(kind), family_of(_sized(kind)), base_dtype, torch.device("cpu"))


@lru_cache(maxsize=1)
def _sized(kind: str) -> Any:
    with torch.device("meta"):
        return tiny(EACH[kind], **of_64(EACH[kind])).requires_grad_(False)


@lru_cache(maxsize=1)
def _tuned(kind: str) -> Any:
    changes = family_cells.ALONE.get(EACH[kind], {})
    return wrap(tiny(EACH[kind], **changes) if changes else fresh(EACH[kind]), r=2, also_train=())


def _exported(kind: str, column: str) -> None:
    """Raise UsageError where it is said of files that peft does not read them right."""
    model = _tuned(kind)
    with patch("petune.saving.peft_experts.warn") as warn:
        to_peft(model, tuned_state(model), None)
        warn_of_conversion(model)
    if warn.called:
        what = "peft takes linears beside its experts for an expert's: exclude them, or read it with petune"
        raise UsageError(what)


def _served(kind: str, column: str) -> None:
    """Raise UsageError where vLLM, or none of the others, is written its LoRA."""
    found, servers = (
        list[str](),
        [one for name, one in SERVERS.items() if (name == "vllm") == (column == "vLLM")],
    )
    for server in servers:
        try:
            refuse_to_serve(_tuned(kind), server)
        except UsageError as error:
            what = error.problems[0].what.replace(f" {server.version}", "").replace(server.title, "a server")
            found.append(what.replace(f" for a {kind}", " for it"))
    assert len(found) in (0, len(servers)), "one mark no longer stands for all of them"
    if found:
        raise UsageError(found[0])


OTHER: dict[str, Callable[[str, str], Any]] = {
    "merge": lambda kind, column: merge(wrap(fresh(EACH[kind]), "lora", r=2)),
    "export": _exported,
    "vLLM": _served,
    "other servers": _served,
}


def document() -> str:
    """The page."""
    notes = Notes()
    lines: list[str] = []
    for kinds, columns in ((DENSE, COLUMNS), (MIXTURES, MIXED)):
        named = (f"`{kind}`" for kind in FAMILIES if kind in kinds)
        lines += [*rows(named, columns, lambda row, column: cell(row[1:-1], column, notes)), ""]
    return HEAD + cost() + "\n".join([*lines, *notes.lines(), ""])


def lines_of_tables() -> dict[str, int]:
    """Lines of each module of petune.models that holds tables of families, empty ones, imports and docstrings
    counted."""
    tree = ast.parse(inspect.getsource(models))
    values = next(one.value for one in ast.walk(tree) if isinstance(one, ast.AnnAssign))
    names = {one.value.id for one in ast.walk(values) if _is_table(one)}
    return {name: len(inspect.getsource(getattr(models, name)).splitlines()) for name in sorted(names)}


def _is_table(node: Any) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


def cost() -> str:
    """What a family costs, in words."""
    lines = lines_of_tables()
    dearest = max(lines, key=lambda name: lines[name])
    return (
        f"A family's cost in lines: {median(lines.values()):g} in the median, the whole module that holds its"
        f" table; {len(lines)} modules hold\nthe tables of {len(FAMILIES)} types. The longest has"
        f" {lines[dearest]} (`{dearest}.py`). What mixers compute stands in modules of its own.\n\n"
    )


@pytest.fixture(scope="module")
def made() -> str:
    return document()


def marks(text: str) -> Iterator[tuple[str, str, bool]]:
    """(family, column, whether it can) of every mark."""
    for line in text.splitlines():
        if line.startswith("| `"):
            kind, *found = [one.strip() for one in line.strip("|").split("|")]
            columns = MIXED if kind[1:-1] in MIXTURES else COLUMNS
            yield from (
                (kind[1:-1], column, one == "yes") for column, one in zip(columns, found, strict=True)
            )


def test_the_page_is_what_the_code_says(made: str) -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == made, "python -m tests.test_families_table"


def test_every_mark_of_a_plan_and_of_a_method_is_a_cell_of_the_matrix(made: str) -> None:
    cells = {*CELLS, *KIN, *((method, *rest) for method, *rest in product(METHODS, BACKENDS, OTHERS))}
    cells |= {*map(values, EXPERTS), *WHOLE_EXPERTS, *BY_COLUMNS}
    cells |= {(method, "ep", name) for method, name in SPREAD}
    run = {(kind_of(name), one) for method, backend, name in cells for one in (method, backend)}
    for kind, column, can in marks(made):
        if column in (*METHODS, *PLANS):
            assert ((kind, BACKEND.get(column, column)) in run) == can, (kind, column)


def test_every_mark_of_a_base_of_packing_and_of_files_is_a_cell_of_a_test(made: str) -> None:
    run = {(kind_of(name), form) for form, name in map(values, family_cells.QUANTISED)}
    of_one = {"packed": family_cells.PACKED, "merge": family_cells.MERGED, "export": family_cells.EXPORTED}
    run |= {(kind_of(*values(name)), column) for column, names in of_one.items() for name in names}
    served = [name for _, name in map(values, family_cells.SERVED)]
    run |= {(kind_of(name), "vLLM") for name in served}
    run |= {(kind_of(name), "other servers") for name in served if served.count(name) == len(SERVERS)}
    columns = {*FORMS, *of_one, "vLLM", "other servers"}
    assert {(kind, column) for kind, column, can in marks(made) if can and column in columns} == run


def values(cell: Any) -> tuple[Any, ...]:
    """The parameters of a cell that may have marks."""
    return (cell,) if isinstance(cell, str) else tuple(getattr(cell, "values", cell))


def kind_of(name: str) -> str:
    """The family of a model of the zoo."""
    return str((ZOO | MOE)[name][1].model_type)


def test_every_mark_of_fused_blocks_is_tested_beside_transformers(made: str) -> None:
    proved = {ZOO[name][1].model_type for name in (*MORE, *MODELS.values(), "mistral-causal", "qwen2-causal")}
    proved |= {MOE[name][1].model_type for _, name, *_ in SPREAD_FUSED}
    assert {kind for kind, column, can in marks(made) if column == "fused" and can} == proved


def test_a_familys_cost_in_lines_is_at_most_60_in_the_median() -> None:
    lines = lines_of_tables()
    assert median(lines.values()) <= 60 and max(lines.values()) <= 150, lines
    assert {"bert", "llama", "moe", "qwen3_next"} <= lines.keys() and "FAMILIES" not in lines


def test_every_family_stands_in_the_page(made: str) -> None:
    assert {kind for kind, *_ in marks(made)} == set(FAMILIES)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    sys.exit()
