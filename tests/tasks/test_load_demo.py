"""Every demo model with the demo corpus: what the shipped recipes train on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from petune.demo import model_path
from petune.errors import MachineError
from petune.tasks import DataConfig, collate, encode, infer_task, load_rows, loss_sum, pad_token_id, spans

FIT = [
    ("minilm", "encoder", "classify"),
    ("tiny-t5", "encoder-decoder", "seq2seq"),
    ("tiny-bart", "encoder-decoder", "seq2seq"),
]
FIT += [("tiny-llama", "decoder", "causal")]


@pytest.mark.parametrize(("model", "kind", "task"), FIT)
def test_a_demo_model_takes_the_demo_corpus_with_no_setting(model: str, kind: str, task: str) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path(model))
    except MachineError:
        pytest.skip("the package of MiniLM is not installed")
    assert infer_task("docstrings", kind) == task
    config = DataConfig("demo:docstrings", max_rows=40)
    rows = load_rows(config, task, Path())
    encoded = encode(rows, task, tokenizer, config, model_kind=kind, vocab_size=len(tokenizer))
    assert (len(encoded.train), len(encoded.eval)) == (40, 40)
    assert encoded.report.dropped == 0
    if task != "classify":
        for example in encoded.train:
            ended = example.cut or example.labels[-1] == tokenizer.eos_token_id
            assert ended, "the end token is trained"


@pytest.mark.forks
def test_the_demo_llama_chats_by_its_own_template(jsonl, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny-llama"))
    turns = [{"role": "user", "content": "What is a tuple?"}, {"role": "assistant", "content": "A sequence."}]
    path = jsonl({"messages": turns}, {"messages": [*turns, *turns]})
    config = DataConfig(
        path,
        eval=jsonl({"messages": [turns[0], {"role": "assistant", "content": "Else."}]}, name="held.jsonl"),
    )
    encoded = encode(load_rows(config, "chat", tmp_path), "chat", tokenizer, config, model_kind="decoder")
    marked = [[text for text, trained in spans(example, tokenizer) if trained] for example in encoded.train]
    assert marked == [["A sequence.</s>"], ["A sequence.</s>"] * 2]


def test_a_seq2seq_loss_is_that_of_transformers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_path("tiny-bart"))
    model = AutoModelForSeq2SeqLM.from_pretrained(model_path("tiny-bart")).float().eval()
    config = DataConfig("demo:docstrings", max_rows=4)
    encoded = encode(
        load_rows(config, "seq2seq", Path()), "seq2seq", tokenizer, config, model_kind="encoder-decoder"
    )
    batch = collate(encoded.train, "seq2seq", pad_token_id(tokenizer))
    out = model(**batch)
    total, trained = loss_sum(out.logits, batch, "seq2seq")
    assert (total / trained).item() == pytest.approx(out.loss.item(), rel=1e-5)


def test_reading_and_encoding_import_neither_torch_nor_datasets() -> None:
    program = (
        "import sys; from pathlib import Path; from petune.tasks import DataConfig, load_rows, encode\n"
        "load_rows(DataConfig('demo:docstrings'), 'classify', Path())\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pydantic', 'pyarrow'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
