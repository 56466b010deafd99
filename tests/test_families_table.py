"""Which families petune knows and what each can: docs/families.md, made by asking the code.

`python -m tests.test_families_table` writes it anew. A mark of a method, of fused blocks or of a plan counts
here only where a test runs that family so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from petune.errors import PetuneError
from petune.methods import merge, wrap
from petune.methods.configs import make_config
from petune.methods.registry import tune
from petune.models import FAMILIES
from petune.parallel.configs import CutConfig, DpConfig, EpConfig, ParallelConfig, PpConfig
from petune.parallel.plan import make_plan
from petune.tasks.registry import check_fit
from tests.mark_tables import MODELS, Notes, built, fresh, of_blocks, rows
from tests.methods.zoo import FUSED, MOE, SETTINGS, ZOO
from tests.parallel.cells import BY_COLUMNS, CELLS, KIN, METHODS, OTHERS, SPREAD, SPREAD_FUSED
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
}
BACKEND = {"FSDP2": "shard", "sp": "sp-gather", "ulysses": "sp-ulysses", "ring": "sp-ring", "pp": "pp-1f1b"}
COLUMNS = (*METHODS, "merge", "fused", "fp8", "packed", *PLANS)
MIXED = (*METHODS, "fused", "tp", "galaxy", "ep")  # of mixtures
HEAD = """# Families

Written by `python -m tests.test_families_table`, which asks the code; a test compares. A row is the
`model_type` of a config, with any head that transformers has for it. `fused`, `fp8`: blocks under LoRA on
one device; elsewhere LoRA's linears are fused one by one. `packed`: samples joined in a row, decoders alone.
`sp`, `ulysses` and `ring` are the three exchanges of sequence parallelism. No mark stands without a test that
trains a small model of the family so and finds the numbers of transformers' own, or a test of the refusal.
Mixtures of experts have a table of their own: under `tp` and `galaxy` each expert is cut by columns, under
`ep` they lie whole on [several ranks](parallel.md#experts-on-several-ranks). Of them tells
[methods.md](methods.md#experts).
Of `gemma4_text` a model of dense blocks is asked: those with embeddings for each block, or keys and values
that several blocks read, have no `pp`, and those with experts are refused. Mixtures of Llamas in Mixtral's
class are `mixtral`; `llama_moe`, which has a class of its own, is refused by that name.
Other models train with `full`, `lora` and `dp`: every linear outside the head is a target.

"""


def models() -> dict[str, str]:
    """The first model of the zoo of each type."""
    found: dict[str, str] = {}
    for name, (_, config, _) in (ZOO | MOE).items():
        found.setdefault(config.model_type, name)
    return {kind: found[kind] for kind in FAMILIES}


def cell(kind: str, column: str, notes: Notes) -> str:
    """What a family can, or why not."""
    name, family = models()[kind], FAMILIES[kind]
    if column in ("fused", "fp8"):
        return of_blocks(name, "lora", "fp8" if column == "fp8" else None, notes)
    if column == "packed" and family.kind != "decoder":
        return ""
    try:
        if column in METHODS:
            heads = {"reduction": 2} if column == "side" and kind in MIXTURES else {}  # small ones
            tune(fresh(name), make_config(column, SETTINGS[column] | heads))
        elif column == "merge":
            merge(wrap(fresh(name), "lora", r=2))
        elif column == "packed":
            check_fit("causal", family.kind, True, family.packs)
        else:
            plan = PLANS.get(column) or ParallelConfig(ep=EpConfig(size=2))
            make_plan(plan, family, built(name).config, None, 8)
    except PetuneError as error:
        return notes("; ".join(problem.what for problem in error.problems))
    return "yes"


def document() -> str:
    """The page."""
    notes = Notes()
    lines: list[str] = []
    for kinds, columns in ((DENSE, COLUMNS), (MIXTURES, MIXED)):
        named = (f"`{kind}`" for kind in FAMILIES if kind in kinds)
        lines += [*rows(named, columns, lambda row, column: cell(row[1:-1], column, notes)), ""]
    return HEAD + "\n".join([*lines, *notes.lines(), ""])


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
    run: set[tuple[str, str]] = set()
    for method, backend, name in cells:
        run |= {(ZOO[name][1].model_type, one) for one in (method, backend)}
    for method, backend, name in BY_COLUMNS:
        run |= {(MOE[name][1].model_type, one) for one in (method, backend)}
    for method, name, *_ in SPREAD:  # every one of them under ep
        run |= {(MOE[name][1].model_type, one) for one in (method, "ep")}
    for kind, column, can in marks(made):
        if column in (*METHODS, *PLANS, "ep"):
            assert ((kind, BACKEND.get(column, column)) in run) == can, (kind, column)


def test_every_mark_of_fused_blocks_is_tested_beside_transformers(made: str) -> None:
    proved = {
        ZOO[name][1].model_type for name in (*FUSED, *MODELS.values(), "mistral-causal", "qwen2-causal")
    }
    proved |= {MOE[name][1].model_type for _, name, *_ in SPREAD_FUSED}
    assert {kind for kind, column, can in marks(made) if column == "fused" and can} == proved


def test_every_family_stands_in_the_page(made: str) -> None:
    assert {kind for kind, *_ in marks(made)} == set(FAMILIES)


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
    sys.exit()
