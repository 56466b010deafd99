"""A wrapped model in other people's programs: their loops train what they should, and their files load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, TrainingArguments

import petune
from petune.errors import UsageError
from petune.tasks.configs import EmbedConfig
from petune.tasks.embed_loss import contrastive, pooled
from tests.small_runs import run, settings, training, write_model

LORA: dict[str, Any] = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
STEPS: dict[str, Any] = {
    "max_steps": 4,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "disable_tqdm": True,
}
TEXTS = ["the cat sat", "a dog ran home", "the dog sat", "a cat ran"] * 2


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A random causal model with its tokenizer."""
    return write_model(tmp_path / "llama", "llama")


@pytest.fixture(params=["off", "reference"])
def kernels(request: pytest.FixtureRequest) -> str:
    """Blocks as Hugging Face computes them, and fused."""
    return str(request.param)


def causal(checkpoint: Path) -> Any:
    """The model, untouched, ready to be trained."""
    return AutoModelForCausalLM.from_pretrained(checkpoint).train()


def started_alike(checkpoint: Path, kernels: str) -> tuple[nn.Module, nn.Module]:
    """One model wrapped by petune and one by peft, with the same factors."""
    ours = petune.wrap(causal(checkpoint), "lora", kernels=kernels, **LORA)  # type: ignore[arg-type]
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LORA["targets"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(causal(checkpoint), config)
    factors = petune.tuned_state(ours)
    for name, value in theirs.named_parameters():
        if value.requires_grad:
            value.data.copy_(factors[bare(name)])
    return ours, theirs


def bare(name: str) -> str:
    """A name of peft's as petune says it."""
    return name.removeprefix("base_model.model.").replace(".default.weight", "")


def factors_of(model: nn.Module) -> dict[str, Tensor]:
    """What trains, by petune's names."""
    return {bare(name): value.detach() for name, value in model.named_parameters() if value.requires_grad}


def curve(trainer: Any) -> list[float]:
    """The loss of every step."""
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.system
def test_trls_sft_trainer_trains_as_with_a_peft_model(checkpoint: Path, kernels: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="make test-system installs it")
    from datasets import Dataset

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def trained(model: nn.Module, name: str) -> tuple[list[float], dict[str, Tensor]]:
        # TRL turns Hugging Face's recomputation on by itself
        settings = trl.SFTConfig(output_dir=str(tmp_path / name), gradient_checkpointing=False, **STEPS)
        rows = Dataset.from_list([{"text": text} for text in TEXTS])
        trainer = trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
        return curve(trainer), factors_of(model)

    ours, theirs = started_alike(checkpoint, kernels)
    start = {name: value.clone() for name, value in factors_of(ours).items()}
    (losses, ended), (expected, reference) = trained(ours, "ours"), trained(theirs, "theirs")
    assert losses == pytest.approx(expected, abs=2e-4)  # its log has four digits
    assert ended.keys() == reference.keys()
    for name, value in ended.items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize("loss", ["dpo", "ipo"])
def test_a_step_on_preferences_has_the_loss_and_gradients_of_trls_dpo_trainer(
    checkpoint: Path, kernels: str, loss: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl", reason="make test-system installs it")
    from datasets import Dataset

    rows = [
        {"prompt": text, "chosen": "one sun", "rejected": f"{text} fox"}
        for text in ("red sun", "blue", "two sea hill", "three cat runs moon")
    ]
    for name, part in {"rows": rows, "held": [rows[0] | {"prompt": "green"}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    data = {"path": str(tmp_path / "rows.jsonl"), "eval": str(tmp_path / "held.jsonl"), "separator": " "}
    recipe = {"model": str(checkpoint), "data": data, "task": "prefer", "method": {"name": "lora", **LORA}}
    recipe |= {
        "prefer": loss,
        "batch_size": 4,
        "device": "cpu",
        "kernels": kernels,
        "out": str(tmp_path / "o"),
    }
    step = training(recipe)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in step.tuned.values():
            value.add_(0.1 * torch.randn_like(value))
    step.refer()
    found = step.passes(step.micro_batches(0), 0)

    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=LORA["targets"], task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(causal(checkpoint), config)
    names = {"dpo": "sigmoid", "ipo": "ipo"}
    given = STEPS | {"per_device_train_batch_size": 4, "gradient_checkpointing": False}
    settings = trl.DPOConfig(output_dir=str(tmp_path / "trl"), beta=0.1, loss_type=names[loss], **given)
    trainer = trl.DPOTrainer(
        theirs,
        args=settings,
        train_dataset=Dataset.from_list([row | {"prompt": row["prompt"] + " "} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
    )
    trained = {bare(name): value for name, value in theirs.named_parameters() if value.requires_grad}
    for name, value in trained.items():  # now, as its reference is the model that it is given
        value.data.copy_(step.tuned[name])
    expected = trainer.compute_loss(trainer.model, next(iter(trainer.get_train_dataloader())))
    expected.backward()
    assert found == pytest.approx(float(expected.detach()), abs=1e-5)
    for name, value in trained.items():
        torch.testing.assert_close(step.tuned[name].grad, value.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.system
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_sentence_transformers_reads_a_merged_model_and_has_the_same_loss(
    pooling: str, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="make test-system installs it")
    losses = pytest.importorskip("sentence_transformers.losses")
    recipe = settings(tmp_path, "bert", "lora", task="embed", embed=pooling, batch_size=4, accumulate=1)
    done = run(recipe)
    read = library.SentenceTransformer(str(done.merge()), device="cpu").eval()
    assert read.max_seq_length == 64
    texts = ["red sun sings", "blue", "two moon hill tree cat"]
    coded = done.speaker.tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        own = pooled(done.model(**coded).last_hidden_state, coded, EmbedConfig(pooling))
        torch.testing.assert_close(read.encode(texts, convert_to_tensor=True), own, rtol=1e-5, atol=1e-5)

    rows = {"anchor": texts, "positive": ["red sun", "blue sea", "two moon"], "negative": ["a", "dog", "fox"]}
    features = [
        dict(done.speaker.tokenizer(side, padding=True, return_tensors="pt")) for side in rows.values()
    ]
    expected = losses.MultipleNegativesRankingLoss(read)(features, torch.arange(3))
    sides = [pooled(done.model(**one).last_hidden_state, one, EmbedConfig(pooling)) for one in features]
    found = contrastive(torch.stack(sides, 1), EmbedConfig(pooling)) / 3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.system
@pytest.mark.parametrize("loss", ["bce", "softmax"])
def test_a_cross_encoder_reads_a_merged_model_and_has_the_same_loss_and_gradients(
    loss: str, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers", reason="make test-system installs it")
    losses = pytest.importorskip("sentence_transformers.cross_encoder.losses")
    write_model(tmp_path / "bert", "bert")
    (tmp_path / "bert" / "chat_template.jinja").unlink()  # encoders have none; it would write pairs as turns
    rows = [
        {"query": f"red {one}", "positive": f"sun {one} hill", "negative": ["dog", f"fox {one} sea"]}
        for one in ("one", "two", "three sings", "moon")
    ]
    for name, part in {"rerank": rows, "rerank-held": [rows[0] | {"query": "blue"}]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    recipe = settings(
        tmp_path, "bert", "full", task="rerank", rerank=loss, batch_size=4, accumulate=1, max_steps=3
    )
    step = training(recipe)
    found = step.passes(step.micro_batches(0), 0)
    for made in (step.model, step.prepared.tokenizer):
        made.save_pretrained(tmp_path / "begun")  # type: ignore[operator]
    read = library.CrossEncoder(str(tmp_path / "begun"), device="cpu")
    columns = [[row["query"], row["positive"], *row["negative"]] for row in rows]
    if loss == "softmax":
        theirs = losses.MultipleNegativesRankingLoss(read, scale=1.0, activation_fn=nn.Identity())
        # one query at a time, or the passages of the others would join
        expected = sum(theirs([[text] for text in column], None) for column in columns) / len(columns)
    else:
        pairs = [(query, passage) for query, *passages in columns for passage in passages]
        gold = torch.tensor([1.0, 0.0, 0.0] * 4)
        expected = losses.BinaryCrossEntropyLoss(read)(
            [list(side) for side in zip(*pairs, strict=True)], gold
        )
    expected.backward()
    assert found == pytest.approx(float(expected.detach()), abs=1e-6)
    own = {name: value.grad for name, value in step.tuned.items() if name not in step.idle}
    for name, value in own.items():
        torch.testing.assert_close(value, read.model.get_parameter(name).grad, rtol=1e-4, atol=1e-7)

    done = run(recipe)
    merged = library.CrossEncoder(str(done.merge()), device="cpu")
    ranked = done.rank("red two", ["sun two hill", "dog", "blue sea fox"])
    scores = merged.predict([("red two", passage) for passage, _ in ranked])
    assert merged.max_seq_length == 64 and scores == pytest.approx([score for _, score in ranked], abs=1e-6)


@pytest.mark.system
def test_recomputation_by_trl_is_refused_with_the_switch_that_ends_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl", reason="make test-system installs it")
    from datasets import Dataset

    model = petune.wrap(causal(checkpoint), "lora", kernels="reference", **LORA)
    settings = trl.SFTConfig(output_dir=str(tmp_path / "out"), **STEPS)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = Dataset.from_list([{"text": text} for text in TEXTS])
    trainer = trl.SFTTrainer(model, settings, train_dataset=rows, processing_class=tokenizer)
    with pytest.raises(
        petune.PetuneError, match="gradient_checkpointing=False in TrainingArguments or SFTConfig"
    ):
        trainer.train()


@pytest.mark.system
def test_sentence_transformers_trains_encodes_and_saves_it(tmp_path: Path, kernels: str) -> None:
    sentences = pytest.importorskip("sentence_transformers", reason="make test-system installs it")
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses

    folder = write_model(tmp_path / "bert", "bert")
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "encoder")
    model = sentences.SentenceTransformer(str(tmp_path / "encoder"), device="cpu")
    encoder = model[0].auto_model
    petune.wrap(encoder, "lora", r=4, kernels=kernels)
    start = model.encode(TEXTS)
    pairs = Dataset.from_list([{"anchor": text, "positive": text + " again"} for text in TEXTS])
    settings = sentences.SentenceTransformerTrainingArguments(output_dir=str(tmp_path / "out"), **STEPS)
    loss = losses.MultipleNegativesRankingLoss(model)
    sentences.SentenceTransformerTrainer(model, settings, train_dataset=pairs, loss=loss).train()
    tuned = model.encode(TEXTS)
    assert abs(tuned - start).max() > 1e-3
    petune.merge(encoder)
    assert model.encode(TEXTS) == pytest.approx(tuned, abs=1e-5)
    model.save(str(tmp_path / "saved"))
    read = sentences.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert read.encode(TEXTS) == pytest.approx(tuned, abs=1e-5)


@pytest.mark.system
def test_lm_eval_scores_wrapped_and_merged_alike(checkpoint: Path, kernels: str) -> None:
    pytest.importorskip("lm_eval", reason="make test-system installs it")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model = petune.wrap(causal(checkpoint), "lora", kernels=kernels, **LORA)  # type: ignore[arg-type]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    def scores() -> list[float]:
        harness = HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=2)
        asked = [Instance("loglikelihood", {}, ("the cat", " sat home"), at) for at in range(2)]
        return [score for score, _ in harness.loglikelihood(asked)]

    base = scores()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_()
    tuned = scores()
    assert tuned != pytest.approx(base, abs=1e-2)
    petune.merge(model)
    assert scores() == pytest.approx(tuned, abs=1e-4)


@pytest.fixture
def compiled() -> Iterator[Callable[..., Any]]:
    """torch.compile up to the compiler of C++, whose memory of graphs ends with the test."""
    yield partial(torch.compile, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.long
def test_a_compiled_wrapped_model_has_the_same_loss_and_gradients(
    checkpoint: Path, kernels: str, compiled: Callable[..., Any]
) -> None:
    model = petune.wrap(causal(checkpoint), "lora", kernels=kernels, **LORA)  # type: ignore[arg-type]
    ids = torch.randint(3, 9, (2, 8), generator=torch.Generator().manual_seed(0))

    def step(call: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), {n: v.grad.clone() for n, v in model.named_parameters() if v.grad is not None}

    (loss, grads), (expected, reference) = step(compiled(model)), step(model)
    torch.testing.assert_close(loss, expected)
    assert grads.keys() == reference.keys() and grads
    for name, value in grads.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("held", [{}, pytest.param({"base_dtype": "int8"}, marks=pytest.mark.long)])
def test_accelerate_trains_saves_and_goes_on(
    held: dict[str, Any], checkpoint: Path, kernels: str, tmp_path: Path
) -> None:
    from accelerate import Accelerator

    ids = torch.randint(3, 9, (2, 8), generator=torch.Generator().manual_seed(0))

    def prepared() -> tuple[Any, Any, Any]:
        helper = Accelerator(cpu=True)
        torch.manual_seed(0)
        settings = {"kernels": kernels, **LORA, **held}
        model = petune.wrap(causal(checkpoint), "lora", **settings)  # type: ignore[arg-type]
        return helper, *helper.prepare(model, torch.optim.AdamW(factors(model), lr=1e-2))

    def factors(model: nn.Module) -> list[nn.Parameter]:
        return [value for value in model.parameters() if value.requires_grad]

    def stepped(helper: Any, model: Any, optimizer: Any) -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        helper.backward(loss)
        optimizer.step()
        return float(loss.detach())

    first = prepared()
    for _ in range(2):
        stepped(*first)
    if held:
        with pytest.raises(UsageError, match=r"in int8 is no plain tensor[\s\S]*safe_serialization=False"):
            first[0].save_state(str(tmp_path / "refused"))
    first[0].save_state(str(tmp_path / "state"), safe_serialization=not held)
    went_on = [stepped(*first) for _ in range(2)]
    second = prepared()
    second[0].load_state(str(tmp_path / "state"))
    assert [stepped(*second) for _ in range(2)] == pytest.approx(went_on, abs=1e-6)


@pytest.mark.slow
def test_the_trainer_resumes_where_it_stopped(checkpoint: Path, kernels: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import Trainer

    rows = Dataset.from_list(
        [{"input_ids": [3 + at % 4, 4, 5, 6], "labels": [3, 4, 5, 6]} for at in range(16)]
    )

    def run(folder: str, steps: int, resume: bool = False) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = petune.wrap(causal(checkpoint), "lora", kernels=kernels, **LORA)  # type: ignore[arg-type]
        kept = {
            "max_steps": steps,
            "save_strategy": "steps",
            "save_steps": 2,
            "lr_scheduler_type": "constant",
        }
        settings = TrainingArguments(output_dir=str(tmp_path / folder), **{**STEPS, **kept})
        Trainer(model, settings, train_dataset=rows).train(resume_from_checkpoint=resume)
        return factors_of(model)

    through = run("through", 4)
    run("parts", 2)
    for name, value in run("parts", 4, resume=True).items():
        torch.testing.assert_close(value, through[name], rtol=0, atol=1e-6)
