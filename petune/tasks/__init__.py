"""Tasks: what the data is and how a model learns from it. TASKS is the table; everything else is a step on
the way from a file to a loss.

    rows = load_rows(config, task, folder, seed=0)          # read, detect, check, split
    encoded = encode(rows, task, tokenizer, config, ...)    # token ids, what is trained, a report
    batch = collate(encoded.train[:8], task, pad_token_id(tokenizer), packed=encoded.packed)
    total, n = loss_sum(model(**batch).logits, batch, task)

Importing this costs no torch: what needs it (collate, the loss, the metrics) is fetched when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from petune.tasks.configs import METRICS, DataConfig
from petune.tasks.encode import Encoded, encode, encode_prompt, make_coder, pad_token_id
from petune.tasks.examples import Example
from petune.tasks.glance import check_first_rows, hub_specs
from petune.tasks.load import detect_format, infer_task, load_rows
from petune.tasks.objects import OBJECT, DataObject, Table, take_rows
from petune.tasks.registry import TASKS, Task, check_fit
from petune.tasks.report import render, spans
from petune.tasks.rerank import refuse_single
from petune.tasks.rows import Conversation, Labelled, Message, Pair, RowFacts, Rows, Tagged, Text
from petune.tasks.stream_place import MARK, Mark
from petune.tasks.streamed import stream_rows

if TYPE_CHECKING:
    from petune.tasks.batch import collate
    from petune.tasks.kept import Asked, Shelf, rows_and_examples
    from petune.tasks.loss import class_weights, count, loss_sum, trained_positions
    from petune.tasks.metrics import Scorer

NEED_TORCH = {
    "collate": "batch",
    "class_weights": "loss",
    "count": "loss",
    "loss_sum": "loss",
    "trained_positions": "loss",
    "Scorer": "metrics",
    "Asked": "kept",
    "Shelf": "kept",
    "rows_and_examples": "kept",
}

__all__ = [
    "MARK",
    "METRICS",
    "OBJECT",
    "TASKS",
    "Asked",
    "Conversation",
    "DataConfig",
    "DataObject",
    "Encoded",
    "Example",
    "Labelled",
    "Mark",
    "Message",
    "Pair",
    "RowFacts",
    "Rows",
    "Scorer",
    "Shelf",
    "Table",
    "Tagged",
    "Task",
    "Text",
    "check_first_rows",
    "check_fit",
    "class_weights",
    "collate",
    "count",
    "detect_format",
    "encode",
    "encode_prompt",
    "hub_specs",
    "infer_task",
    "load_rows",
    "loss_sum",
    "make_coder",
    "pad_token_id",
    "refuse_single",
    "render",
    "rows_and_examples",
    "spans",
    "stream_rows",
    "take_rows",
    "trained_positions",
]


def __getattr__(name: str) -> Any:
    """The names that need torch."""
    if name not in NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(import_module(f"{__name__}.{NEED_TORCH[name]}"), name)
    return found
