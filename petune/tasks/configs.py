"""What a recipe may say about its data: one frozen dataclass, no torch, no reading.

Ranges and choices stand at each field (petune/setting.py), so that recipe, documentation and check have one
source.
`columns` maps the role a column plays here to the name it has in the file; a role not named is found by its
usual names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from petune.setting import setting

FORMATS = (
    *("text-label", "tokens", "pairs", "alpaca", "sharegpt", "messages", "text"),
    *("preferences", "preference-turns", "judgements", "anchors", "passages"),
    *("image-label", "audio-text"),
)
ROLES = (
    *("text", "text_pair", "label", "tokens", "tags", "source", "target", "instruction", "input", "output"),
    *("messages", "system", "history", "tools", "prompt", "chosen", "rejected", "completion"),
    *("anchor", "positive", "negative", "query", "passage", "image", "audio", "transcript"),
)
_OF_TEXT = {"loss": "min", "perplexity": "min", "token_accuracy": "max"}
METRICS: Mapping[str, Mapping[str, str]] = {  # task -> metric -> the better direction
    "classify": {"accuracy": "max", "f1_macro": "max", "matthews": "max", "loss": "min"},
    "tokens": {"f1": "max", "precision": "max", "recall": "max", "accuracy": "max", "loss": "min"},
    "mlm": _OF_TEXT,
    "seq2seq": _OF_TEXT,
    "causal": _OF_TEXT,
    "chat": _OF_TEXT,
    "prefer": {"loss": "min", "accuracy": "max", "margin": "max"},
    "embed": {"mrr": "max", "recall_at_1": "max", "loss": "min"},
    "rerank": {"mrr_at_10": "max", "ndcg_at_10": "max", "accuracy": "max", "loss": "min"},
}
DEFAULT_MAX_LENGTH = 1024
MAX_LINE_BYTES = 16 * 2**20  # a longer line is a broken file far more often than a row
MAX_BAD_SHARE = 0.05  # what `on_bad_line: skip` may skip


@dataclass(frozen=True)
class DataConfig:
    """Where the rows are, how they are read, and how long an example may be."""

    path: str = field(metadata={"doc": "file, folder, glob, demo:NAME, or hub id[:config][@split]"})
    format: str = setting("auto", "shape of a row; auto: by the column names", choices=("auto", *FORMATS))
    columns: Mapping[str, str] = field(
        default_factory=dict, metadata={"keys": ROLES, "doc": "role: name of the column that plays it"}
    )
    eval: str | None = setting(None, "rows to evaluate on, given like path; otherwise some of path")
    split: float = setting(0.1, "share of the distinct rows held out when eval is not given", gt=0.0, lt=1.0)
    split_by: str = setting(
        "content",
        "content: the same held-out rows for every seed; seed: others for each seed",
        choices=("content", "seed"),
    )
    max_length: int | None = setting(
        None, f"longest example, tokens; default {DEFAULT_MAX_LENGTH} or what the model can take", ge=8
    )
    max_target_length: int | None = setting(
        None, "longest target of seq2seq, tokens; default max_length", ge=8
    )
    truncation: str = setting("right", "the side cut from an over-long input", choices=("right", "left"))
    packing: bool = setting(False, "causal and chat: several examples in one sequence, none seeing another")
    chunk: bool = setting(
        False,
        "causal and mlm, plain text: documents joined and cut into windows of max_length; a .txt file is one",
    )
    prefix: str = setting("", "text put before every source of a pair, as T5 wants: 'summarize: '")
    separator: str = setting("\n", "text between prompt and completion of a pair, causal only")
    language: str | None = setting(
        None, "of a sound model of several languages, the one that is spoken and written: german, or de"
    )
    on_bad_line: str = setting(
        "error", f"skip: bad rows are counted, at most {MAX_BAD_SHARE:.0%}", choices=("error", "skip")
    )
    max_rows: int | None = setting(
        None, "at most this many rows of each side, sampled by content; of a stream the first", ge=1
    )
    stream: bool = setting(False, "read rows from their files as steps need them; needs max_steps")
    window: int = setting(10_000, "stream: rows that are read at a time and shuffled", ge=1)
    held_out: int | None = setting(None, "stream: hold out the first so many distinct rows", ge=1)


@dataclass(frozen=True)
class PreferConfig:
    """How preferences are learned: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290),
    identity preference optimisation (Azar et al. 2023, arXiv:2310.12036), odds ratios (Hong et al. 2024,
    arXiv:2403.07691), which alone compare with no reference, or, of single answers that are good or bad,
    Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306)."""

    loss: str = setting(
        "dpo",
        "dpo, ipo and kto compare with the model before training, orpo with nothing; kto is of single"
        " answers with a label",
        choices=("dpo", "ipo", "orpo", "kto"),
    )
    beta: float = setting(
        0.1, "dpo, ipo and kto: how near to the reference; orpo: its weight", gt=0.0, le=100.0
    )
    label_smoothing: float = setting(
        0.0, "dpo: share of rows taken to be the wrong way round", ge=0.0, lt=0.5
    )
    desirable_weight: float = setting(1.0, "kto: of good answers in the loss", gt=0.0, le=100.0)
    undesirable_weight: float = setting(1.0, "kto: of bad answers in the loss", gt=0.0, le=100.0)

    @property
    def refers(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss != "orpo"


@dataclass(frozen=True)
class EmbedConfig:
    """How texts are embedded, and how near the right ones must be (van den Oord et al. 2018,
    arXiv:1807.03748, with the other rows of a batch as negatives)."""

    pooling: str = setting(
        "mean", "of last hidden states: mean of a text, or its first", choices=("mean", "cls")
    )
    scale: float = setting(20.0, "of cosines in the loss; 1 / temperature", gt=0.0, le=1000.0)
    dims: tuple[int, ...] = setting(
        (), "also train the first so many features alone, as [256, 64]; Matryoshka", ge=1
    )
    cached: int | None = setting(
        None, "rows of a batch that go through the model at a time, twice each; all of it is compared", ge=1
    )


@dataclass(frozen=True)
class RerankConfig:
    """How a passage is judged beside its query: by itself, or among the passages of that query (Cao et al.
    2007, "Learning to rank: from pairwise approach to listwise approach")."""

    loss: str = setting(
        "bce",
        "bce: each passage by itself; softmax: the right one of a query's passages",
        choices=("bce", "softmax"),
    )


# key of a recipe, which is the name of its task -> its settings, of which the first may stand for all
OF_TASKS: Mapping[str, type] = {"prefer": PreferConfig, "embed": EmbedConfig, "rerank": RerankConfig}


def choices_of(config: type) -> tuple[str, ...]:
    """What the setting takes that may stand for all of such a section."""
    return tuple(fields(config)[0].metadata["choices"])
