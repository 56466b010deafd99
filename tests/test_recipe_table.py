"""The shipped recipes are one table: a family says what is trained on, a method says how, a backend over
which processes.

Nothing else differs. A recipe over several processes is that of its family and method with `parallel` added;
one streams its blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from petune.demo import model_path
from petune.parallel.configs import CUTS, CutConfig
from petune.recipe import load_recipe, recipe_folder, shipped_recipes

METHODS = ("full", "lora", "adapter", "side")
SHARED: dict[str, Any] = {"batch_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {
        "model": "demo:minilm",
        "data": {"path": "demo:docstrings", "max_length": 64},
        "task": "classify",
        "epochs": 3,
        "class_weights": "balanced",
    },
    "bart": {
        "model": "demo:tiny-bart",
        "data": {"path": "demo:docstrings-domain", "max_length": 128},
        "task": "seq2seq",
        "epochs": 4,
    },
    "t5": {
        "model": "demo:tiny-t5",
        "data": {"path": "demo:docstrings-domain", "max_length": 128},
        "task": "seq2seq",
        "epochs": 4,
    },
    "llama": {
        "model": "demo:tiny-llama",
        "data": {"path": "demo:docstrings-domain", "max_length": 128},
        "task": "causal",
        "epochs": 2,
    },
}
LR: dict[str, tuple[float, ...]] = {  # in the order of METHODS
    "bert": (1e-4, 5e-4, 2e-3, 4e-3),
    "bart": (5e-4, 2e-3, 1e-2, 1e-2),
    "t5": (2e-3, 5e-3, 1e-2, 2e-2),
    "llama": (1e-3, 5e-3, 1e-2, 2e-2),
}
ALONE = [f"{family}_{method}" for family in FAMILIES for method in METHODS]

HEADS = {"bert": (8, 4), "llama": (6, 2)}
COLUMNS = {"bert": (1024, 512), "llama": (240, 144)}
STAGES = {"bert": (4, 2), "bart": (5, 3), "t5": (5, 3), "llama": (5, 3)}
TOKENS = (5, 3)


def parallel(family: str, backend: str) -> dict[str, Any]:
    """What `parallel` is in the recipes of a family and backend."""
    pp = {"stages": STAGES[family], "microbatches": 4}
    if backend == "pp":
        return {"pp": pp}
    if backend == "dp":
        return {"dp": {"shares": (3, 1)}}
    by_heads = {"heads": HEADS[family], "columns": COLUMNS[family]}
    plans: dict[str, dict[str, Any]] = {
        "tp": {"tp": by_heads},
        "sp": {"sp": {"sequence": TOKENS}},
        "galaxy": {"galaxy": {**by_heads, "sequence": TOKENS}},
        "dp_tp_pp": {"dp": 2, "tp": by_heads, "pp": pp},
    }
    return plans[backend]


EVERY_CUT = ("dp", "tp", "sp", "pp", "galaxy")
OVER: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # family -> methods, backends
    "bert": (METHODS, EVERY_CUT),
    "bart": (METHODS, ("pp",)),
    "t5": (METHODS, ("dp", "pp")),
    "llama": (("full", "lora"), EVERY_CUT),
}
TOGETHER = [
    f"{family}_{method}_{backend}"
    for family, (methods, backends) in OVER.items()
    for method in methods
    for backend in backends
]
TOGETHER.append("llama_lora_dp_tp_pp")
STREAMED = {"clip": None, "memory": {"stream": "fp32"}, "kernels": "reference"}  # as a CPU can, too
OTHER_TASKS: dict[str, dict[str, Any]] = {  # over what the recipe of family and method says
    "bert_lora_tokens": {"task": "tokens", "class_weights": "none", "lr": 1e-3},
    "bert_lora_embed": {"task": "embed", "class_weights": "none", "lr": 2e-4},
    "bert_lora_rerank": {
        "task": "rerank",
        "rerank": "softmax",
        "class_weights": "none",
        "lr": 2e-3,
        "epochs": 1,
    },
    "llama_lora_prefer": {
        "task": "prefer",
        "data": {"path": "demo:docstrings", "max_length": 128, "truncation": "left"},
        "lr": 1e-3,
        "epochs": 1,
    },
    "bert_lora_mlm": {
        "task": "mlm",
        "class_weights": "none",
        "lr": 2e-3,
        "data": {**FAMILIES["bert"]["data"], "chunk": True},
    },
}
VARIANTS: dict[str, dict[str, Any]] = {  # of a family's recipe of lora
    "rslora": {"method": {"name": "lora", "r": 64, "alpha": 16, "rslora": True}},
    "qlora": {"base_dtype": "nf4"},
    "dora": {"method": "dora"},
}
FROZEN: dict[str, dict[str, Any]] = {"head": {"method": "head", "lr": 1e-2, "epochs": 10}}  # the same
KINDS: dict[str, dict[str, Any]] = {  # of a recipe: other settings of its method
    "bert_adapter_pfeiffer": {"name": "adapter", "kind": "pfeiffer", "activation": "relu"},
    "bart_side_only": {"name": "side", "end": "paper"},
}
QWEN3_MOE: dict[str, Any] = {
    **FAMILIES["llama"],
    "model": "config:shapes/qwen3_moe.json",
    "method": {"name": "lora", "r": 8, "rank_pattern": {"experts": 2}},
    "lr": 5e-3,
}
SHAPES: dict[str, dict[str, Any]] = {  # random weights: a config and a tokenizer lie beside the recipe
    "qwen3_moe_lora": QWEN3_MOE,
    "qwen3_moe_lora_ep": {**QWEN3_MOE, "parallel": {"ep": {"experts": [10, 6], "shares": [1, 3]}}},
    "qwen3_5_lora": {
        **FAMILIES["llama"],
        "model": "config:shapes/qwen3_5.json",
        "data": {**FAMILIES["llama"]["data"], "packing": True},
        "method": "lora",
        "lr": LR["llama"][METHODS.index("lora")],
    },
    "gpt_oss_qlora": {**QWEN3_MOE, "model": "config:shapes/gpt_oss.json", **VARIANTS["qlora"]},
    **{
        f"{name}_lora": {
            **FAMILIES[like],
            "model": f"config:shapes/{name}.json",
            "method": "lora",
            "lr": LR[like][METHODS.index("lora")],
        }
        for like, names in (("bert", ("deberta", "modernbert")), ("llama", ("opt", "gemma3")))
        for name in names
    },
}
NAMES = [
    *ALONE,
    "llama_full_streamed",
    "t5_side_cache",
    "bert_head_cache",
    *(f"llama_{variant}" for variant in VARIANTS),
    *KINDS,
    *OTHER_TASKS,
    *SHAPES,
    *TOGETHER,
]


def test_the_recipes_of_the_table_are_there_and_no_others() -> None:
    assert [file.stem for file in shipped_recipes()] == sorted(NAMES)
    assert (len(ALONE), len(TOGETHER)) == (16, 43)


@pytest.mark.parametrize("name", SHAPES)
def test_a_recipe_of_a_shape_is_its_row_of_the_table(name: str) -> None:
    row = {**SHARED, **SHAPES[name], "out": f"runs/{name}", "name": name}
    row["model"] = f"config:{recipe_folder().absolute() / SHAPES[name]['model'].removeprefix('config:')}"
    assert load_recipe(recipe_folder() / f"{name}.yaml").resolved() == load_recipe(row).resolved()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SHAPES])
def test_a_recipe_is_its_row_of_the_table(name: str) -> None:
    family, written, *over = name.split("_", 2)
    own = (VARIANTS | FROZEN).get(written)
    method = written if own is None else "lora"
    row = (
        {
            **SHARED,
            **FAMILIES[family],
            "method": method,
            "lr": LR[family][METHODS.index(method)],
            "out": f"runs/{name}",
        }
        | {"name": name}
        | (own or {})
    )
    if over == ["streamed"]:
        row |= STREAMED
    elif over == ["cache"]:
        row["cache"] = True
    elif name in KINDS:
        row["method"] = KINDS[name]
    elif name in OTHER_TASKS:
        row |= OTHER_TASKS[name]
    elif over:
        row["parallel"] = parallel(family, over[0])
    assert load_recipe(recipe_folder() / f"{name}.yaml").resolved() == load_recipe(row).resolved()


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_short_and_says_what_it_is(name: str) -> None:
    lines = (recipe_folder() / f"{name}.yaml").read_text().splitlines()
    settings = [line for line in lines if line and not line.startswith("#")]
    assert lines[0].startswith("# ") and 6 <= len(settings) <= 14
    assert lines[1].startswith("# ") and f"recipes/{name}.yaml" in lines[1]


@pytest.mark.parametrize("name", TOGETHER)
def test_a_parallel_recipe_without_its_plan_is_the_recipe_of_one_process(name: str) -> None:
    family, method, _ = name.split("_", 2)
    alone = load_recipe(f"{family}_{method}", {"out": f"runs/{name}", "name": name})
    assert load_recipe(name, ["parallel=none"]).resolved() == alone.resolved()


@pytest.mark.parametrize("name", TOGETHER)
def test_the_shares_of_a_recipe_add_up_to_its_model(name: str) -> None:
    recipe = load_recipe(name)
    config = json.loads((model_path(recipe.model.removeprefix("demo:")) / "config.json").read_text())
    for backend, axis in recipe.parallel.axes.items():
        if backend in CUTS:
            assert isinstance(axis, CutConfig)
            group = config["num_attention_heads"] // config.get(
                "num_key_value_heads", config["num_attention_heads"]
            )
            assert sum(axis.heads) in (0, config["num_attention_heads"]) and all(
                count % group == 0 for count in axis.heads
            )
            assert sum(axis.columns) in (0, config["intermediate_size"])
    if recipe.parallel.pp is not None:
        sides = [
            ("num_hidden_layers",),
            ("encoder_layers", "decoder_layers"),
            ("num_layers", "num_decoder_layers"),
        ]
        blocks = next(sum(config[side] for side in names) for names in sides if set(names) <= config.keys())
        assert sum(recipe.parallel.pp.stages) == blocks


@pytest.mark.parametrize("name", TOGETHER)
def test_a_parallel_recipe_shares_out_unevenly_and_says_for_how_many(name: str) -> None:
    recipe = load_recipe(name)
    assert str(recipe.parallel) == (
        "dp 2 x tp 2 x pp 2" if name == "llama_lora_dp_tp_pp" else f"{name.rpartition('_')[2]} 2"
    )
    for backend, axis in recipe.parallel.axes.items():
        lists = [
            getattr(axis, one)
            for one in ("shares", "heads", "columns", "sequence", "stages")
            if getattr(axis, one, ())
        ]
        assert all(len(set(one)) == 2 for one in lists)
        assert lists or backend == "dp"


def test_the_readme_links_every_recipe() -> None:
    text = Path(recipe_folder() / "README.md").read_text()
    assert all(f"({name}.yaml)" in text for name in NAMES)
