"""Tiny random checkpoints with a tokenizer of words, small data files, and runs on them: what the tests of
the training loop share.

Two blocks of width 32, 24 short rows of uneven length; a run of six steps takes a fraction of a second.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from petune.recipe import load_recipe
from petune.run.build import prepare
from petune.run.folder import RunFolder
from petune.run.loop import Loop
from petune.run.reporting import Logged, PlainReporter
from petune.run.signals import StopRequest
from petune.run.step import OptimizerStep
from petune.run.train import Run, train
from tests.methods.zoo import MOE
from tests.written_once import written_once

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system")
WORDS = (
    "red",
    "green",
    "blue",
    "one",
    "two",
    "three",
    "sun",
    "moon",
    "star",
    "sea",
    "hill",
    "tree",
    "cat",
    "dog",
    "fox",
    "runs",
    "sings",
)
CHATML = (
    "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)
TASK = {"bert": "classify", "bart": "seq2seq", "t5": "seq2seq", "llama": "causal"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"name": "full"},
    "lora": {"name": "lora", "r": 2, "dropout": 0.1},
    "adapter": {"name": "adapter", "reduction": 8, "dropout": 0.1},
    "side": {"name": "side", "reduction": 4, "dropout": 0.1},
}


# ---------------------------------------------------------------- models and data


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    core = Tokenizer(
        WordLevel({word: index for index, word in enumerate((*SPECIAL, *WORDS))}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    made.chat_template = CHATML
    return made


@written_once
def write_model(folder: Path, family: str, *, dropout: float = 0.0, seed: int = 0, **changes: Any) -> Path:
    """A random checkpoint of the family with its tokenizer; `changes` go over the config."""
    shared: dict[str, Any] = {"vocab_size": len(SPECIAL) + len(WORDS), "pad_token_id": 0, "eos_token_id": 2}
    wide: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    stacks: dict[str, Any] = {
        f"{side}_{what}": value for side in ("encoder", "decoder") for what, value in _BART_STACK.items()
    }
    torch.manual_seed(seed)
    made: Any
    if family == "bert":
        wide |= {
            "hidden_dropout_prob": dropout,
            "attention_probs_dropout_prob": dropout,
            "max_position_embeddings": 64,
        }
        made = BertModel(BertConfig(**{**shared, **wide, "initializer_range": 0.1, **changes}))
    elif family == "bart":
        fixed = {
            "d_model": 32,
            "max_position_embeddings": 64,
            "dropout": dropout,
            "init_std": 0.1,
            "bos_token_id": 1,
        }
        fixed |= {"decoder_start_token_id": 2, "forced_eos_token_id": 2}
        made = BartForConditionalGeneration(BartConfig(**{**shared, **fixed, **stacks, **changes}))
    elif family == "t5":
        fixed = {
            "d_model": 32,
            "d_ff": 48,
            "d_kv": 8,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": dropout,
        }
        fixed["decoder_start_token_id"] = 0
        made = T5ForConditionalGeneration(T5Config(**{**shared, **fixed, **changes}))
    else:
        wide |= {
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "attention_dropout": dropout,
            "bos_token_id": 1,
        }
        made = LlamaForCausalLM(LlamaConfig(**{**shared, **wide, "initializer_range": 0.1, **changes}))
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


_BART_STACK = {"layers": 2, "ffn_dim": 48, "attention_heads": 4}


def sentences(number: int, *, seed: int = 0) -> list[str]:
    """Distinct sentences of 2 to 12 words; the first word tells the class."""
    draw = random.Random(seed)
    made: dict[str, None] = {}
    while len(made) < number:
        words = [WORDS[len(made) % 3], *(draw.choice(WORDS[3:]) for _ in range(draw.randint(1, 11)))]
        made[" ".join(words)] = None
    return list(made)


def row_of(text: str, task: str) -> dict[str, Any]:
    """One row of a file for the task."""
    words = text.split()
    if task == "classify":
        return {"text": text, "label": words[0]}
    if task == "seq2seq":
        return {"source": text, "target": " ".join(words[:4])}
    if task == "chat":
        return {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": " ".join(reversed(words))},
            ]
        }
    if task == "embed":
        return {"anchor": text, "positive": " ".join(reversed(words)) + " one"}
    if task == "rerank":
        return {"query": words[0], "positive": text, "negative": [f"dog {words[-1]}", "fox hill"]}
    if task == "prefer":
        answer = " ".join(reversed(words))
        return {"prompt": text, "chosen": f"{answer} one", "rejected": " ".join(["dog", *words[:2]])}
    if task == "tokens":
        return {
            "tokens": words,
            "tags": [
                ("B-COLOR", "I-COLOR")[at] if at < 2 else "B-NUMBER" if word in WORDS[3:6] else "O"
                for at, word in enumerate(words)
            ],
        }
    return {"text": text}


def write_rows(path: Path, task: str, number: int = 24, *, seed: int = 0) -> Path:
    """A JSONL file of `number` rows."""
    path.write_text(
        "".join(json.dumps(row_of(text, task)) + "\n" for text in sentences(number, seed=seed)),
        encoding="utf-8",
    )
    return path


def settings(
    place: Path,
    family: str = "llama",
    method: str | Mapping[str, Any] = "lora",
    *,
    out: str = "run",
    **changes: Any,
) -> dict[str, Any]:
    """A recipe as a mapping: six steps of four rows, model and data made in `place` unless they are there.
    `changes` go over it.

    Dropout is 0.1 in the model and, where it has any, in the method.
    """
    task = str(changes.get("task", TASK[family]))
    model, rows, held = place / family, place / f"{task}.jsonl", place / f"{task}-held.jsonl"
    if not model.exists():
        write_model(model, family, dropout=0.1)
    if not rows.exists():
        write_rows(rows, task)
        write_rows(held, task, 9, seed=1)
    tuned_by = METHODS[method] if isinstance(method, str) else method
    recipe: dict[str, Any] = {"model": str(model), "task": task, "method": tuned_by, "out": str(place / out)}
    recipe |= {
        "data": {"path": str(rows), "eval": str(held)},
        "lr": 1e-3,
        "batch_size": 2,
        "accumulate": 2,
        "device": "cpu",
    }
    recipe |= {"warmup": 2, "save_every": 1, "head_only": False}
    return recipe | changes


def brief(
    place: Path, family: str = "llama", method: str | Mapping[str, Any] = "lora", **changes: Any
) -> dict[str, Any]:
    """`settings` in two steps that are saved at their end, for tests of what a run leaves."""
    return settings(place, family, method, **{"max_steps": 2, "warmup": 0, "save_every": 50, **changes})


def going_wrong(place: Path, **changes: Any) -> dict[str, Any]:
    """A recipe that trains on rows of one word: from its first step on it leads away from the held-out rows,
    by more than 0.01 nats a step.

    So the first evaluation after a step is the best, on any processor.
    """
    recipe = settings(place, method="full", lr=0.01, schedule="constant", warmup=0, **changes)
    rows = [row_of("red " * (2 + number), "causal") for number in range(24)]
    Path(recipe["data"]["path"]).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return recipe


def as_yaml(path: Path, recipe: Mapping[str, Any]) -> Path:
    """The recipe as a file; JSON is YAML."""
    path.write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in recipe.items()), encoding="utf-8"
    )
    return path


def moe_folder(place: Path, **changes: Any) -> None:
    """A checkpoint of Qwen3-MoE, one file entry an expert, with the tokenizer of the tiny runs."""
    write_model(place, "llama")
    _, config, values = MOE["qwen3moe-causal"]
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config(**{**values, "vocab_size": len(SPECIAL) + len(WORDS), **changes}))
    model.save_pretrained(place)


# ---------------------------------------------------------------- runs


class Listener:
    """A reporter that keeps what it is told and calls `at_step` after each step."""

    def __init__(self, at_step: Callable[[int], None] = lambda step: None) -> None:
        self.at_step = at_step
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.scores: list[dict[str, Any]] = []
        self.closing: list[str] = []

    def header(self, lines: Sequence[str], total_steps: int) -> None:
        self.lines += lines

    def step(self, record: Mapping[str, Any]) -> None:
        self.steps.append(dict(record))
        self.at_step(int(record["step"]))

    def evaluated(self, record: Mapping[str, Any]) -> None:
        self.scores.append(dict(record))

    def note(self, line: str) -> None:
        self.notes.append(line)

    def done(self, lines: Sequence[str]) -> None:
        self.closing += lines


def terminate_at(*steps: int) -> Listener:
    """A listener that sends this process SIGTERM after each of the steps."""

    def at_step(step: int) -> None:
        if step in steps:
            os.kill(os.getpid(), signal.SIGTERM)

    return Listener(at_step)


def run(recipe: Any, listener: Listener | None = None, **options: Any) -> Run:
    """`train`, told to a listener instead of the terminal."""
    return train(recipe, reporter=listener or Listener(), **options)


def training(recipe: Mapping[str, Any]) -> OptimizerStep:
    """The step of a recipe, set up but not taken."""
    return OptimizerStep(prepare(load_recipe(recipe)))


def loop(recipe: Mapping[str, Any]) -> Loop:
    """The loop of a recipe, set up but not started, and its folder made."""
    settled = load_recipe(recipe)
    folder = RunFolder.of(settled)
    folder.path.mkdir(parents=True, exist_ok=True)
    return Loop(prepare(settled), folder, Logged(PlainReporter(), folder.log, folder.metrics), StopRequest())


def newest(folder: Path) -> Path:
    """The checkpoint of the highest step."""
    return max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))


def state_of(checkpoint: Path) -> tuple[dict[str, torch.Tensor], Any]:
    """Every tensor of a checkpoint (tuned, optimizer, generators) and its JSON."""
    return load_file(checkpoint / "state.safetensors"), json.loads((checkpoint / "state.json").read_text())


def numbers(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock decides; each number of confused classes by itself."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [flat(json.loads(line)) for line in lines]
    return [{key: value for key, value in record.items() if key != "tokens_per_s"} for record in found]


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of metrics with each number of confused classes by itself."""
    rows = enumerate(record.get("confusion", ()))
    cells = {f"confusion {at} {other}": count for at, row in rows for other, count in enumerate(row)}
    return {key: value for key, value in record.items() if key != "confusion"} | cells


class Scripted:
    """Scores that a test has chosen, in the place of a Scorer."""

    def __init__(self, **scores: float) -> None:
        self.scores = scores

    def result(self) -> dict[str, float]:
        return self.scores

    def confusion(self) -> None:
        return None


def assert_same_run(found: Path, expected: Path) -> None:
    """Two run folders with the same end: state, records and tuned files, bit by bit."""
    assert newest(found).name == newest(expected).name
    (tensors, facts), (others, other_facts) = state_of(newest(found)), state_of(newest(expected))
    assert tensors.keys() == others.keys()
    assert any(name.startswith("tuned/") for name in tensors) and any(
        name.startswith("optimizer/exp_avg") for name in tensors
    )
    assert "rng/torch" in tensors
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name
    assert facts == other_facts
    assert numbers(found) == numbers(expected)
    files = sorted(path.relative_to(expected) for path in (expected / "tuned").rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(found) for path in (found / "tuned").rglob("*") if path.is_file())
    assert any(path.suffix == ".safetensors" for path in files)
    for path in files:
        assert (found / path).read_bytes() == (expected / path).read_bytes(), path


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file but the log."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.log"
    }
