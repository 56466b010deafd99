"""What goes wrong while a model is read."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

import pytest

from petune.errors import FileError, MachineError
from petune.models.load_errors import asking, first_line, room_for
from petune.models.loading import read_config
from petune.models.source import ModelSource, resolve_model


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore")]
)
def test_a_want_of_memory_names_the_model_and_the_ways_out(error: Exception) -> None:
    with pytest.raises(MachineError) as caught, room_for("runs/big"):
        raise error
    said = str(caught.value)
    assert said.startswith("runs/big") and "not enough memory" in said and "more" not in said
    assert all(way in said for way in ("parallel: tp or pp", "base_dtype", "petune plan"))


def test_another_error_is_not_called_a_want_of_memory() -> None:
    with pytest.raises(RuntimeError, match="shapes"), room_for("runs/big"):
        raise RuntimeError("shapes do not fit")


@pytest.mark.parametrize(("kind", "told"), [("hub", True), ("folder", False)])
def test_waiting_for_the_hub_is_told(
    kind: Literal["hub", "folder"],
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("petune.log.PATIENCE", 0.01)
    with caplog.at_level("INFO", "petune"), asking(ModelSource("org/name", kind, "org/name", None, "")):
        time.sleep(0.1)
    assert any("asking the hub for org/name ..." in line for line in caplog.messages) == told


LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 2}
BERT = {"model_type": "bert", "hidden_size": 16, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (LLAMA | {"hidden_act": "siluu"}, "hidden_act  transformers has nothing of this name"),
        (BERT | {"hidden_act": "gelu-new"}, "expected gelu_new, found 'gelu-new'"),
        (
            {"model_type": "deberta-v2", "pooler_hidden_act": "geluu"},  # looked up in a forward pass
            "pooler_hidden_act  transformers has nothing",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "yarm", "factor": 2.0}}, "rope_parameters.rope_type  "),
        (LLAMA | {"torch_dtype": "bfloat17"}, "torch_dtype  is no dtype of torch"),
        (LLAMA | {"num_attention_heads": 3}, "not a model config"),
        (LLAMA | {"num_attention_heads": 0}, "not a model config"),
    ],
)
def test_a_setting_of_a_config_that_nobody_knows_is_named(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(FileError) as caught:
        read_config(resolve_model(f"config:{file}", tmp_path))
    assert said in str(caught.value)


def test_a_line_that_only_announces_the_fault_brings_the_next() -> None:
    assert first_line(ValueError("field 'hidden_size':\n    expected int\nmore")) == (
        "field 'hidden_size': expected int"
    )
