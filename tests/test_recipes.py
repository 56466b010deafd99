"""Every shipped recipe runs offline as it stands: a step or two, tried, and merged where it can be. Of those
that train the same method, family and task, one does so in the short suite; the others are built there.

A recipe with a parallel plan trains in as many processes as the plan asks for, and ends as the same recipe
does in one.
"""

from __future__ import annotations

import re
import runpy
import shutil
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import petune
from petune.demo import data_path, model_path
from petune.errors import UsageError
from petune.methods import tuned_parameters
from petune.models.loading import AUTO, Head
from petune.parallel import ALONE
from petune.recipe import load_recipe, recipe_folder, shipped_recipes
from petune.run.build import build, plan_of, prepare
from petune.tasks import TASKS, pad_token_id
from tests.group_pool import assert_same_but_for_rounding, ranks
from tests.narrow_models import write_narrow_minilm
from tests.small_runs import run

pytestmark = pytest.mark.usefixtures("no_picture", "no_network")
SMALL = (
    "warmup=0",
    "data.max_rows=12",
    "data.max_length=16",
    "head_only=false",
    "device=cpu",
    "batch_size=2",
    "eval_batch_size=12",
)
TWO_STEPS = (
    "max_steps=2",
    "warmup=0",
    "data.max_rows=14",
    "eval_batch_size=14",
    "data.max_length=16",
    "head_only=false",
    "device=cpu",
    "batch_size=8",
)
ALL = {file.stem: file for file in shipped_recipes()}
PLANS = {name: plan_of(load_recipe(file)) for name, file in ALL.items()}
RECIPES = {name: file for name, file in ALL.items() if PLANS[name] == ALONE}
PARALLEL = {name: file for name, file in ALL.items() if PLANS[name] != ALONE}


def test_there_is_a_recipe_for_every_family_and_method():
    methods = ("full", "lora", "adapter", "side")
    assert {f"{family}_{method}" for family in ("bert", "bart", "t5", "llama") for method in methods} <= set(
        RECIPES
    )


def test_every_backend_has_a_recipe_that_is_one_of_a_single_process_with_a_plan():
    assert {name.rpartition("_")[2] for name in PARALLEL} == {"dp", "tp", "sp", "galaxy", "pp", "ep"}
    for name, file in PARALLEL.items():
        theirs, ours = load_recipe(ALL[base(name)]).resolved(), load_recipe(file).resolved()
        assert {key for key in ours if ours[key] != theirs[key]} == {"parallel", "out", "name"}, name


@pytest.fixture(scope="module")
def short_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first rows of every file of the demo's corpus, which has a hundred times as many as are asked
    for."""
    folder = tmp_path_factory.mktemp("corpus")
    for file in data_path("docstrings").iterdir():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / file.name).write_text("".join(lines[:60]), encoding="utf-8")
    return folder


# On their own checkpoint and the whole corpus; others see the first rows, and those of BERT a narrower one.
WHOLE = {"bert_lora", "llama_lora"}


def kind(name: str) -> tuple[str, str, str]:
    """Model, method and task."""
    recipe = load_recipe(RECIPES[name])
    return str(recipe.model), recipe.method_name, str(recipe.task)


FIRST = {kind(name): name for name in (*reversed(RECIPES), *sorted(WHOLE))}.values()


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FIRST])
def test_a_shipped_recipe_is_read_and_built(
    name: str, tmp_path: Path, narrow_bert: Path, short_corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petune.tasks.sources.data_path", lambda corpus: short_corpus)
    of_bert = load_recipe(RECIPES[name]).model == "demo:minilm"
    overrides = [*SMALL, f"out={tmp_path / 'run'}", *([f"model={narrow_bert}"] if of_bert else [])]
    prepared = prepare(load_recipe(RECIPES[name], overrides))
    assert tuned_parameters(build(prepared)) and prepared.encoded.train and prepared.encoded.eval


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FIRST else pytest.mark.long) for name in RECIPES]
)
def test_a_shipped_recipe_trains_and_merges(
    name: str, tmp_path: Path, narrow_bert: Path, short_corpus: Path, monkeypatch: pytest.MonkeyPatch
):
    steps = 2 if name in WHOLE else 1
    overrides = [*SMALL, f"max_steps={steps}", f"out={tmp_path / 'run'}"]
    if name not in WHOLE:
        monkeypatch.setattr("petune.tasks.sources.data_path", lambda corpus: short_corpus)
        overrides += [f"model={narrow_bert}"] if load_recipe(RECIPES[name]).model == "demo:minilm" else []
    trained = run(RECIPES[name], overrides=overrides)
    assert trained.summary["steps"] == steps
    if trained.recipe.method_name in ("adapter", "side"):
        with pytest.raises(UsageError, match=r"petune\.load"):
            trained.merge()
        return
    merged = (
        AUTO[cast(Head, TASKS[trained.summary["task"]].head)]
        .from_pretrained(trained.merge(), dtype=torch.float32)
        .eval()
    )
    ids = trained.speaker.tokenizer("Return the length of the list.", return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids}
    if trained.summary["task"] == "seq2seq":
        inputs["decoder_input_ids"] = torch.full((1, 1), pad_token_id(trained.speaker.tokenizer))
    with torch.no_grad():
        found, expected = merged(**inputs), trained.speaker.model(**inputs)
        assert torch.allclose(found[0], expected[0], atol=1e-4)  # logits, or the states of no head


def first_blocks(number: int, folder: Path) -> Path:
    """The demo's Llama without all later blocks."""
    config = AutoConfig.from_pretrained(model_path("tiny-llama"), num_hidden_layers=number)
    AutoModelForCausalLM.from_pretrained(model_path("tiny-llama"), config=config).save_pretrained(folder)
    for file in model_path("tiny-llama").glob("*token*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, pytest.param(8, marks=pytest.mark.long)])
def test_each_of_two_adapters_is_best_on_its_own_rows(
    blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = first_blocks(blocks, tmp_path / "llama")
    monkeypatch.setattr("petune.demo.model_path", lambda name: base)
    script = recipe_folder() / "llama_two_adapters.py"
    monkeypatch.setattr("sys.argv", [str(script), "12", str(tmp_path / "both")])
    made = runpy.run_path(str(script), run_name="__main__")
    table = re.findall(r"loss on \w+ ([\d.]+)", capsys.readouterr().out)
    docstrings, names, untouched = (list(map(float, table[at : at + 2])) for at in (0, 2, 4))
    assert docstrings[0] < min(names[0], untouched[0])
    assert names[1] < min(docstrings[1], untouched[1])
    again = petune.load(AutoModelForCausalLM.from_pretrained(base), tmp_path / "both")
    x = torch.tensor([[9, 10, 11]] * 2)
    with (
        torch.no_grad(),
        petune.per_row(again, ["names", "docstrings"]),
        petune.per_row(made["model"], ["names", "docstrings"]),
    ):
        assert torch.equal(again(x).logits, made["model"](x).logits)


# ---------------------------------------------------------------- several processes


def base(name: str) -> str:
    """The recipe in one process that a parallel one is made from: llama_lora of llama_lora_dp_tp_pp."""
    return max((other for other in RECIPES if name.startswith(f"{other}_")), key=len)


@pytest.fixture(scope="module")
def narrow_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT for the recipes of MiniLM."""
    return write_narrow_minilm(tmp_path_factory.mktemp("bert") / "narrow")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run folder of a recipe in one process, trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def trained(name: str, *overrides: str) -> Path:
        run(ALL[name], overrides=[*TWO_STEPS, *overrides, f"out={folder / name}"])
        return folder / name

    return trained


def train_in_group(recipe: Path, overrides: list[str]) -> None:
    """What every rank calls."""
    run(recipe, overrides=overrides)


# tests/test_matrix.py has every method and family under every backend, tests/run/test_rank.py a whole run
# under each; here are three axes at once, and heads and tokens.
QUICK = {"llama_lora_dp_tp_pp", "bert_lora_galaxy"}


MARKS = {name: pytest.mark.slow if plan.world > 4 else () for name, plan in PLANS.items()}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=MARKS[name] if name in QUICK else pytest.mark.long) for name in PARALLEL],
)
def test_a_parallel_recipe_trains_as_one_process_does(
    name: str,
    tmp_path: Path,
    alone: Any,
    narrow_bert: Path,
    short_corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("petune.tasks.sources.data_path", lambda corpus: short_corpus)
    model = (f"model={narrow_bert}",) if load_recipe(ALL[name]).model == "demo:minilm" else ()
    expected = alone(base(name), *model)
    ranks(
        PLANS[name].world,
        train_in_group,
        PARALLEL[name],
        [*TWO_STEPS, *model, f"out={tmp_path / 'run'}"],
        timeout=110,
    )
    assert_same_but_for_rounding(tmp_path / "run", expected)
