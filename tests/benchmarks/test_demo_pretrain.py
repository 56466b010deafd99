"""The pretraining script's pieces: spans, targets, packing, and a run of two steps that writes a loadable
checkpoint."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
from benchmarks import demo_pretrain as pretrain
from benchmarks.demo_pretrain import LENGTH, Document, cut_out, general_rows, packed, rows_of, spans
from benchmarks.demo_tokenizer import BOS, EOS, MASK, SENTINELS


@pytest.mark.parametrize("length", [4, 17, 254])
def test_spans_are_ordered_apart_and_of_the_asked_share(length: int) -> None:
    for seed in range(20):
        places = spans(length, 0.3, random.Random(seed))
        assert sum(stop - start for start, stop in places) == max(1, round(0.3 * length))
        edges = [edge for place in places for edge in place]
        assert edges == sorted(set(edges)) and edges[0] > 0 and edges[-1] <= length


def test_bart_reads_masks_and_writes_the_whole_text() -> None:
    ids = list(range(100, 200))
    read, write = cut_out("bart", ids, random.Random(0))
    assert (
        write == ids
        and [token for token in read if token != MASK] == [token for token in ids if token in read]
        and len(read) < len(ids)
    )


def test_t5_writes_what_its_sentinels_stand_for() -> None:
    ids = list(range(100, 200))
    read, write = cut_out("t5", ids, random.Random(0))
    cut: dict[int, list[int]] = {}
    for token in write:
        if token in SENTINELS:
            last = cut.setdefault(token, [])
        else:
            last.append(token)
    restored = [inner for token in read for inner in cut.get(token, [token])]
    assert restored == ids and len(cut) > 1


def test_packed_rows_are_full_and_lose_only_the_end() -> None:
    docs = [Document(text=[50 + at] * at, question=[], summary=[], body=[]) for at in range(1, 12)]
    rows = list(packed(docs, 16, random.Random(0), 0.0))
    stream = [token for row in rows for token in row]
    assert all(len(row) == 16 for row in rows) and len(stream) > sum(len(doc.text) + 2 for doc in docs) - 16
    assert stream[0] == BOS and stream.count(BOS) - stream.count(EOS) in (0, 1)


def test_pretraining_sees_neither_eval_nor_the_domain() -> None:
    learn, held = general_rows()
    modules = {row["module"] for row in learn}
    assert learn and held
    for rows in (held, rows_of("eval"), rows_of("domain_train"), rows_of("domain_eval")):
        assert not modules & {row["module"] for row in rows}


@pytest.mark.slow
def test_two_steps_write_a_checkpoint_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    text = "Return the value number {0} of it.\n\n" + "More is said of {0} here. " * 12
    rows = [{"module": f"m{at}", "name": f"f{at}", "text": text.format(at) * 4} for at in range(24)]
    monkeypatch.setattr(pretrain, "general_rows", lambda: (rows[:16], rows[16:]))
    monkeypatch.setattr(pretrain, "rows_of", lambda name: rows[16:])
    assert (
        pretrain.main(["t5", "--steps", "2", "--rows", "2", "--device", "cpu", "--out", str(tmp_path)]) == 0
    )
    model, report = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert (
        not any(report.values()) and json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    )
    assert "weights of step 2" in (tmp_path / "README.md").read_text("utf-8") and LENGTH == 256
    assert AutoTokenizer.from_pretrained(tmp_path)("x").input_ids[-1] == model.config.eos_token_id
