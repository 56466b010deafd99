"""Every shipped recipe runs offline as it stands: two steps, stopped and resumed in between, tried, and merged where it can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from petune.demo import minilm_folder
from petune.errors import Stopped, UsageError
from petune.recipe import load_recipe, shipped_recipes
from petune.tasks import pad_token_id
from tests.small_runs import Listener, assert_same_run, run, terminate_at
from tests.small_runs import no_picture as no_picture

pytestmark = pytest.mark.usefixtures("no_picture", "no_network")
AUTO = {"classify": AutoModelForSequenceClassification, "seq2seq": AutoModelForSeq2SeqLM, "causal": AutoModelForCausalLM}
SMALL = ("max_steps=2", "warmup=0", "data.max_rows=24", "data.max_length=32", "head_only=false", "device=cpu", "batch_size=4")
RECIPES = {file.stem: file for file in shipped_recipes()}


def test_there_is_a_recipe_for_every_family_and_method():
    methods = ("full", "lora", "adapter", "side")
    assert {f"{family}_{method}" for family in ("bert", "bart", "t5", "llama") for method in methods} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_trains_resumes_and_merges(name: str, tmp_path: Path):
    real = "minilm" in load_recipe(RECIPES[name]).model
    assert not real or minilm_folder() is not None, "the recipes of BERT need the package of requirements/demo.txt"
    recipe = tmp_path / RECIPES[name].name  # a copy: the recipe is the same at every start below
    recipe.write_bytes(RECIPES[name].read_bytes())
    with pytest.raises(Stopped):
        run(recipe, terminate_at(1), overrides=[*SMALL, f"out={tmp_path / 'run'}"])
    listener = Listener()
    resumed = run(recipe, listener, overrides=[*SMALL, f"out={tmp_path / 'run'}"], resume=True)
    assert [record["step"] for record in listener.steps] == [2]
    assert resumed.summary["steps"] == 2
    if not real:  # the large checkpoint is not trained twice for what the small ones show
        assert_same_run(resumed.folder, run(recipe, overrides=[*SMALL, f"out={tmp_path / 'straight'}"]).folder)
    if resumed.recipe.method_name in ("adapter", "side"):
        with pytest.raises(UsageError, match=r"petune\.load"):
            resumed.merge()
        return
    merged = AUTO[resumed.summary["task"]].from_pretrained(resumed.merge(), dtype=torch.float32).eval()
    ids = resumed.speaker.tokenizer("Return the length of the list.", return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids}
    if resumed.summary["task"] == "seq2seq":
        inputs["decoder_input_ids"] = torch.full((1, 1), pad_token_id(resumed.speaker.tokenizer))
    with torch.no_grad():
        assert torch.allclose(merged(**inputs).logits, resumed.speaker.model(**inputs).logits, atol=1e-4)
