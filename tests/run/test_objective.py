"""Objectives: that of a task that balances experts against transformers' own, those of embeddings and of
passages against formulas in float64, under plans against one process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy, cosine_similarity, cross_entropy
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

import petune
from petune.errors import RecipeError, UsageError
from petune.methods import tuned_parameters
from petune.parallel.in_pieces import backward_in_pieces
from petune.parallel.mesh import alone
from petune.parallel.objective import Objective, RowChunks
from petune.recipe import load_recipe
from petune.run.answers import before_and_after
from petune.run.balance import balance_in, balance_of
from petune.run.objective import idle_tensors, objective_of
from petune.tasks import TASKS
from petune.tasks.configs import RerankConfig
from petune.tasks.loss import count
from tests.group_pool import assert_same_but_for_rounding, ranks
from tests.methods.zoo import MOE, batch, stir, tiny
from tests.small_runs import run, settings, training, write_model


@pytest.mark.parametrize("name", MOE)
def test_the_routers_loss_and_its_gradients_are_those_of_transformers(name: str) -> None:
    model, inputs = (
        petune.wrap(tiny(name, output_router_logits=True, router_aux_loss_coef=0.3), r=2),
        batch(name),
    )
    stir(model, std=0.1)
    labels = inputs["labels"].clone()
    labels[:, 0] = -100  # transformers counts the labels that are left after the shift
    inputs["labels"] = labels
    assert balance_of(model) == 0.3 and balance_of(tiny(name)) == 0
    objective = objective_of(TASKS["causal"], None, balance_in(model, alone(torch.device("cpu"))))
    outputs = objective.forward(model, inputs)
    loss = objective.loss(outputs, inputs) / count(inputs)
    expected = model(**inputs).loss
    assert torch.allclose(loss, expected, atol=1e-6)
    tuned = list(tuned_parameters(model).values())
    for own, theirs in zip(
        torch.autograd.grad(loss, tuned), torch.autograd.grad(expected, tuned), strict=True
    ):
        assert torch.allclose(own, theirs, atol=1e-6)


def test_a_table_of_words_that_no_stack_reads_is_not_asked_for_a_gradient(tmp_path: Path) -> None:
    """BART whose config ties nothing: full fine-tuning trains the tables of both stacks, and its head."""
    write_model(tmp_path / "bart", "bart", tie_word_embeddings=False)
    full = {"max_steps": 3, "warmup": 0, "save_every": 3}
    done = run(settings(tmp_path, "bart", "full", **full))
    before, after = (load_file(file) for file in (tmp_path / "bart" / FILE, done.folder / "tuned" / FILE))
    still = {name for name, value in before.items() if torch.equal(value, after[name])}
    assert still - {"final_logits_bias"} == {"model.shared.weight"}


def test_a_table_that_something_reads_is_asked_for_one() -> None:
    for name in ("bart-seq2seq", "t5-seq2seq", "llama-causal"):
        assert not idle_tensors(petune.wrap(tiny(name), "full"), TASKS["seq2seq"], RerankConfig())


# ---------------------------------------------------------------- embeddings

FILE = "model.safetensors"
PLANS: dict[str, Any] = {
    "dp": {"dp": {"shares": [3, 1]}},
    "dp with a replica without rows": {"dp": {"shares": [9, 1]}},
    "dp sharded": {"dp": {"size": 2, "shard": True}},
    "tp": {"tp": 2},
    "sp": {"sp": 2},
}
CACHED = {"dp": 1, "dp with a replica without rows": 3, "sp": 3}  # plans that go in pieces, of so many rows


def embedding(place: Path, method: Any = "lora", **changes: Any) -> dict[str, Any]:
    """A recipe of embeddings: six steps of four pairs, in one forward pass each."""
    more = {"warmup": 0, "batch_size": 4, "accumulate": 1, **changes}
    return settings(place, "bert", method, task="embed", **more)


def mean_of(model: Any, ids: list[int]) -> Tensor:
    """The mean of the last hidden states of one text by itself."""
    found: Tensor = model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
    return found


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("kernels", ["off", "reference"])
def test_a_step_on_embeddings_has_loss_and_gradient_of_the_formula(
    method: str, kernels: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "bert", "bert")
    tuned: Any = {"name": method, **({"r": 2} if method == "lora" else {})}
    step = training(embedding(tmp_path, tuned, kernels=kernels))
    torch.manual_seed(3)
    with torch.no_grad():
        for value in step.tuned.values():
            value.add_(0.1 * torch.randn_like(value))
    loss = step.passes(step.micro_batches(0), 0)
    plain = training(embedding(tmp_path, tuned, kernels="off"))
    model = plain.model.double().eval()
    with torch.no_grad():
        for name, value in plain.tuned.items():
            value.copy_(step.tuned[name])
    pairs = [[mean_of(model, text.input_ids) for text in example.texts] for example in plain.rows_of(0)]
    anchors, positives = (torch.stack(side) for side in zip(*pairs, strict=True))
    scores = 20 * cosine_similarity(anchors[:, None], positives[None], dim=-1)
    expected = cross_entropy(scores, torch.arange(4))
    assert loss == pytest.approx(float(expected.detach()), abs=1e-6)
    grads = torch.autograd.grad(expected, list(plain.tuned.values()))
    largest = max(float(grad.abs().max()) for grad in grads)
    for (name, value), grad in zip(step.tuned.items(), grads, strict=True):
        assert value.grad is not None
        assert float((value.grad.double() - grad).abs().max()) <= 1e-5 * largest, name


METHOD = {"name": "lora", "r": 2}


def train_in_group(recipe: Mapping[str, Any]) -> None:
    run(recipe)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that drops out and `one`, a run in one process."""
    folder = tmp_path_factory.mktemp("embedding")
    write_model(folder / "bert", "bert", dropout=0.1)
    run(embedding(folder, METHOD, out="one", max_steps=2, save_every=50))
    return folder


@pytest.mark.parametrize(
    "plan", [pytest.param(plan, marks=pytest.mark.long if plan == "dp" else ()) for plan in PLANS]
)
def test_a_plan_compares_the_texts_of_all_replicas(plan: str, place: Path) -> None:
    shape = {"max_steps": 2, "save_every": 50, "parallel": PLANS[plan], "embed": {"cached": CACHED.get(plan)}}
    ranks(2, train_in_group, embedding(place, METHOD, out=plan, **shape))
    assert_same_but_for_rounding(place / plan, place / "one")


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("cached", [1, 3, 8])
def test_pieces_have_the_loss_and_gradients_of_the_whole_batch(
    method: str, cached: int, tmp_path: Path
) -> None:
    write_model(tmp_path / "bert", "bert", dropout=0.1)
    tuned: Any = {"name": method, **({"r": 2, "dropout": 0.1} if method == "lora" else {})}

    def taken(**embed: Any) -> tuple[float, dict[str, Tensor]]:
        step = training(embedding(tmp_path, tuned, batch_size=7, embed={"dims": [8], **embed}))
        step.model.train()
        loss = step.passes(step.micro_batches(0), 0)
        return loss, {name: cast("Tensor", value.grad) for name, value in step.tuned.items()}

    (found, own), (expected, whole) = taken(cached=cached), taken()
    assert found == pytest.approx(expected, abs=1e-6)
    for name, grad in whole.items():
        torch.testing.assert_close(own[name], grad, rtol=1e-5, atol=1e-6)


def test_pieces_repeat_the_masks_that_torch_draws(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3))
    batch = {"input_ids": torch.randn(6, 4)}

    def ask(one: nn.Module, rows: dict[str, Tensor]) -> Any:
        return SimpleNamespace(logits=one(rows["input_ids"]))

    pieces = RowChunks(2, lambda outputs, _: outputs.logits, lambda found, _: found.logsumexp(0).sum())
    objective = Objective(ask, lambda outputs, _: outputs.logits.sum(), pieces=pieces)
    torch.manual_seed(0)
    loss = backward_in_pieces(model, batch, objective, pieces, 2.0, None)
    torch.manual_seed(0)
    drawn = torch.cat([model(part) for part in batch["input_ids"].split(2)]).logsumexp(0).sum()
    torch.testing.assert_close(loss, drawn.detach())
    for value, grad in zip(
        model.parameters(), torch.autograd.grad(drawn / 2, list(model.parameters())), strict=True
    ):
        torch.testing.assert_close(value.grad, grad)


def test_what_cannot_embed_is_refused(tmp_path: Path) -> None:
    for changes, words in (
        ({"parallel": {"pp": 2}}, "a pipeline's pieces do not see one another's texts"),
        ({"task": "classify", "embed": "cls"}, "it belongs to task: embed"),
        ({"embed": "max"}, "embed.pooling does not take this value"),
        ({"embed": {"cached": 0}}, "embed.cached is out of range"),
        (
            {"embed": {"cached": 2}, "parallel": {"dp": {"size": 2, "shard": True}}},
            "replicas that gather weights together need as many pieces",
        ),
        (
            {"embed": {"cached": 2}, "method": "full", "clip": None, "memory": {"stream": "fp32"}},
            "a streamed model is updated inside one backward pass",
        ),
    ):
        with pytest.raises(RecipeError, match=words):
            load_recipe(embedding(tmp_path) | changes)


def test_a_run_learns_what_belongs_together_and_its_merged_model_says_the_same(tmp_path: Path) -> None:
    done = run(embedding(tmp_path, lr=1e-2, epochs=3, save_every=50))
    assert done.summary["after"]["loss"] < done.summary["before"]["loss"]
    assert done.eval()["tuned"] == pytest.approx(done.summary["after"], abs=1e-5)
    merged = done.merge()
    ids = AutoTokenizer.from_pretrained(merged)("red sun sings")["input_ids"]
    with torch.no_grad():
        found = mean_of(AutoModel.from_pretrained(merged).eval(), ids)
        torch.testing.assert_close(found, mean_of(done.model, ids), rtol=1e-5, atol=1e-5)
    assert (merged / "modules.json").is_file() and (merged / "1_Pooling" / "config.json").is_file()
    again = run(embedding(tmp_path, out="again", model=str(merged), max_steps=1))
    assert again.summary["before"]["loss"] == pytest.approx(done.summary["after"]["loss"], abs=1e-4)


# ---------------------------------------------------------------- reranking

RERANK_PLANS: dict[str, Any] = {
    "dp": {"dp": {"shares": [3, 1]}},
    "tp": {"tp": 2},
    "sp": {"sp": 2},
    "pp": {"pp": {"size": 2, "microbatches": 2}},
}


def reranking(place: Path, method: Any = "lora", **changes: Any) -> dict[str, Any]:
    """A recipe of queries with three passages each: six steps of four, in one forward pass each."""
    more = {"warmup": 0, "batch_size": 4, "accumulate": 1, "rerank": "softmax", **changes}
    return settings(place, "bert", method, task="rerank", **more)


@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_a_step_on_passages_has_loss_and_gradient_of_the_formula(loss: str, tmp_path: Path) -> None:
    write_model(tmp_path / "bert", "bert")
    tuned = {"name": "lora", "r": 2}
    step = training(reranking(tmp_path, tuned, rerank=loss, kernels="reference"))
    found = step.passes(step.micro_batches(0), 0)
    bias = step.tuned["classifier.bias"].grad  # which no softmax can see
    assert bias is not None and bool(bias.any()) == (loss == "bce")
    plain = training(reranking(tmp_path, tuned, kernels="off"))
    model: Any = plain.model.double().eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        for name, value in plain.tuned.items():
            value.copy_(step.tuned[name])
    expected = torch.zeros((), dtype=torch.float64)
    for example in plain.rows_of(0):
        scores = torch.cat(
            [model(input_ids=torch.tensor([text.input_ids])).logits[0] for text in example.texts]
        )
        gold = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
        expected = expected + (
            cross_entropy(scores[None], torch.tensor([0]))
            if loss == "softmax"
            else binary_cross_entropy(scores.sigmoid(), gold)
        )
    expected = expected / 4
    assert found == pytest.approx(float(expected.detach()), abs=1e-6)
    grads = torch.autograd.grad(expected, list(plain.tuned.values()))
    largest = max(float(grad.abs().max()) for grad in grads)
    for (name, value), grad in zip(step.tuned.items(), grads, strict=True):
        assert value.grad is not None
        assert float((value.grad.double() - grad).abs().max()) <= 1e-5 * largest, name


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=() if plan in ("dp", "pp") else pytest.mark.long) for plan in RERANK_PLANS],
)
def test_a_plan_ranks_as_one_process_does(plan: str, tmp_path: Path) -> None:
    method = {"name": "lora", "r": 2}
    write_model(tmp_path / "bert", "bert", dropout=0.1)
    two = {"max_steps": 2, "save_every": 50}
    run(reranking(tmp_path, method, out="one", **two))
    parallel = RERANK_PLANS[plan]
    ranks(2, train_in_group, reranking(tmp_path, method, out="many", **two, parallel=parallel))
    assert_same_but_for_rounding(tmp_path / "many", tmp_path / "one")


def test_a_run_ranks_passages_and_its_merged_model_says_the_same(tmp_path: Path) -> None:
    done = run(reranking(tmp_path, {"name": "lora", "r": 2}, lr=1e-2, epochs=3, save_every=50))
    assert done.summary["metric"] == "mrr_at_10" and done.summary["num_labels"] == 1
    assert done.summary["after"]["loss"] < done.summary["before"]["loss"]
    assert done.eval()["tuned"] == pytest.approx(done.summary["after"], abs=1e-5)
    passages = ["dog sea", "red sun sings", "fox"]
    ranked = done.rank("red", passages)
    merged = AutoModelForSequenceClassification.from_pretrained(done.merge()).eval()
    tokenizer = AutoTokenizer.from_pretrained(done.folder / "merged")
    for passage, score in ranked:
        with torch.no_grad():
            own = merged(**tokenizer("red", passage, return_tensors="pt")).logits.sigmoid()
        assert score == pytest.approx(float(own), abs=1e-6)
    assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
    lines = done.generate("\n".join(["red", *passages])).splitlines()
    assert [line.split("\t")[1] for line in lines] == [passage for passage, _ in ranked]
    again = run(reranking(tmp_path, out="again", model=str(done.folder / "merged"), max_steps=1))
    assert again.summary["before"]["loss"] == pytest.approx(done.summary["after"]["loss"], abs=1e-4)
    with pytest.raises(UsageError, match="the query has no passages to rank"):
        done.generate("red")
    with pytest.raises(UsageError, match="pairs of texts cannot be asked as one text"):
        before_and_after(done, 1)


def test_rows_of_single_passages_are_scored_by_their_labels(tmp_path: Path) -> None:
    recipe = reranking(tmp_path, rerank="bce", max_steps=1)
    for side, number in (("rerank", 8), ("rerank-held", 3)):
        lines = [{"query": f"red {at}", "passage": "sun one", "label": at % 2} for at in range(number)]
        text = "".join(json.dumps(line | {"query": f"{side} {line['query']}"}) + "\n" for line in lines)
        (tmp_path / f"{side}.jsonl").write_text(text)
    done = run(recipe)
    assert done.summary["metric"] == "accuracy" and set(done.summary["after"]) == {"accuracy", "loss"}
    with pytest.raises(RecipeError, match=r"no metric 'ndcg_at_10' for rows of 1 text"):
        run(recipe | {"metric": "ndcg_at_10", "out": str(tmp_path / "other")})
    with pytest.raises(UsageError, match="softmax compares the passages of one query"):
        run(recipe | {"rerank": "softmax", "out": str(tmp_path / "other")})
    with pytest.raises(RecipeError, match="it belongs to task: rerank"):
        load_recipe(embedding(tmp_path) | {"rerank": "softmax"})
