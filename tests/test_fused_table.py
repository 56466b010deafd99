"""What is fused where, and why not: the tables of docs/fused.md, made by asking the code, held by comparing.

`python -m tests.test_fused_table` writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from petune.errors import RecipeError
from petune.methods.configs import ACTIVATIONS, METHODS
from petune.models.acts import ACTS
from petune.models.frozen_weight import FORMS
from petune.recipe import load_recipe
from tests.mark_tables import MODELS, Notes, of_blocks, rows
from tests.methods.zoo import of_64
from tests.parallel.plans import BACKENDS

pytestmark = pytest.mark.slow  # it looks at every cell of the house

DOCUMENT = Path(__file__).parent.parent / "docs" / "fused.md"
# blocks of 64 inputs fill the MLPs, and experts
WIDE = dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 128)
WIDE |= {"hidden_size": 64, "moe_intermediate_size": 64, "linear_value_head_dim": 16}
# every method that tunes a language model, and kinds of adapters beside the usual one
COLUMNS = [
    *(name for name in METHODS if name not in ("side", "head")),
    *("adapter, pfeiffer", "adapter, parallel", "side"),
]
TOLD = {**MODELS, "Qwen3-MoE": "qwen3moe-causal", "gpt-oss": "gptoss-causal", "Qwen3.5": "qwen3_5-causal"}
# models in which linears are several, and the parts of these
PARTED: dict[str, tuple[str, list[str]]] = {
    "Phi-3": ("phi3-causal", ["q", "k", "v", "gate", "up"]),
    "ModernBERT": ("modernbert-classify", ["q", "k", "v", "gate", "up"]),
    "GLM-4": ("glm4-causal", ["gate", "up"]),
    "GPT-2": ("gpt2-causal", ["q", "k", "v"]),
}
# with blocks of their own kinds, of which tests of these tell over quantised bases
OTHERS = {
    **{"GLM-4": "glm4-causal", "Ministral 3": "ministral3-causal", "Cohere": "cohere-causal"},
    **{"Phi-4-mini": "phi4-causal", "Gemma 4": "gemma4-causal", "Gemma 4 E": "gemma4e-causal"},
    **{"GPT-2": "gpt2-causal", "DeBERTa": "deberta-classify", "DINOv2": "dinov2-classify"},
}
PLANS: dict[str, Any] = {
    "one process": "none",
    "dp": {"dp": 2},
    "dp, `shard: true`": {"dp": {"size": 2, "shard": True}},
    "tp": {"tp": 2},
    "sp, gather": {"sp": {"size": 2}},
    "sp, ulysses": {"sp": {"size": 2, "exchange": "ulysses"}},
    "sp, ring": {"sp": {"size": 2, "exchange": "ring"}},
    "galaxy": {"galaxy": 2},
    "galaxy2": {"galaxy2": 2},
    "`overlap: true`": {"galaxy": {"size": 2, "overlap": True}},
    "pp": {"pp": 2},
    "tp x pp": {"tp": 2, "pp": 2},
    "sp x pp": {"sp": 2, "pp": 2},
    "dp x tp": {"dp": 2, "tp": 2},
    "ep, dp x ep": {"dp": 2, "ep": 2},
    "sharded x tp": {"dp": {"size": 2, "shard": True}, "tp": 2},
    "sharded x pp": {"dp": {"size": 2, "shard": True}, "pp": 2},
}
HEAD = """# What is fused, and what is not

Written by `python -m tests.test_fused_table`, which asks the code; a test compares. Yes means fused blocks:
one autograd node a block, with `memory`, and the loss without logits where the task has one. Elsewhere LoRA's
linears and RMS norms are fused one by one, and the header of the run says why. Numbers are equal everywhere;
[kernels.md](kernels.md) says how. Mixers and gated attention of Qwen3.5, and DeBERTa's attention, are called
as they are inside it.

Adapters here have the activation silu. Bottlenecks of {fused} are fused alike; of another activation blocks
are not, and the header says which: {others}.

Blocks below a head alone (`head`) have nothing of a method in them: they are fused as under lora, and
run their forward pass alone, so `memory` is refused there.
"""
HEAD = HEAD.format(
    fused=", ".join(name for name in ACTIVATIONS if name in ACTS),
    others=", ".join(name for name in ACTIVATIONS if name not in ACTS),
)


def of_forms(model: str, method: str, notes: Notes, every: bool) -> str:
    """Whether they are over quantised weights, which is the same for every form of them: that is seen, or one
    form after the other is asked, cell by cell."""
    turn = list(TOLD.values()).index(model) + COLUMNS.index(method)
    forms = FORMS if every else [list(FORMS)[turn % len(FORMS)]]
    (found,) = {of_blocks(model, method, form, notes, **WIDE) for form in forms}
    return found


def of_parts(model: str, column: str, notes: Notes) -> str:
    """Whether they are with LoRA by parts of the linears that are several."""
    name, targets = PARTED[model]
    if column.endswith("parts"):
        return ", ".join(targets)
    return of_blocks(name, "lora", None if column == "fused" else "nf4", notes, targets, **of_64(name))


def of_plan(plan: Any, asked: dict[str, Any], notes: Notes) -> str:
    """Whether a recipe may ask for fused blocks, or for a setting, under a plan."""
    recipe = {"model": "demo:tiny-llama", "data": "demo:docstrings", "method": "lora", "parallel": plan}
    try:
        load_recipe({**recipe, **asked})
    except RecipeError as error:
        return notes("; ".join(problem.what for problem in error.problems))
    return "yes"


ASKED: dict[str, dict[str, Any]] = {
    "fused blocks": {},
    "`memory`": {"memory": "input"},
    "fused over `base_dtype`": {"base_dtype": "nf4"},
    "`cache: true` (side, head)": {"method": "side", "cache": True},
}


def tables(every: bool = True) -> str:
    """The document; `every` form of quantised weights is asked in each cell, or one."""
    notes = Notes()
    lines = [HEAD, "## Families and methods, on one device", ""]
    whole = TOLD | OTHERS
    lines += rows(whole, COLUMNS, lambda name, method: of_blocks(whole[name], method, None, notes))
    lines += ["", "The same with `base_dtype: nf4`, `int8` or `fp8`:", ""]
    lines += rows(TOLD, COLUMNS, lambda name, method: of_forms(TOLD[name], method, notes, every))
    lines += ["", "LoRA by [parts of one linear](methods.md#parts-of-one-linear), `targets: [q, v]`:", ""]
    lines += rows(PARTED, ["parts", "fused", "with `base_dtype`"], lambda *cell: of_parts(*cell, notes))
    lines += ["", "## Plans", ""]
    lines += rows(PLANS, ASKED, lambda name, column: of_plan(PLANS[name], ASKED[column], notes))
    return "\n".join([*lines, "", *notes.lines(), ""])


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.long)])
def made(request: pytest.FixtureRequest) -> str:
    return tables(request.param)


def test_the_tables_are_what_the_code_says(made: str) -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == made, "python -m tests.test_fused_table"


def test_every_plan_that_the_matrix_runs_stands_in_the_table(made: str) -> None:
    backends = {name.partition("-")[0] for name in BACKENDS}
    assert all(any(name.startswith(backend) for name in PLANS) for backend in backends - {"shard", "cut"})


if __name__ == "__main__":
    DOCUMENT.write_text(tables(), encoding="utf-8")
    sys.exit()
