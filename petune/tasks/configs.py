"""What a recipe may say about its data: one frozen dataclass, no torch, no reading.

Ranges and choices live in the field metadata, so that recipe, documentation and check have one source.
`columns` maps the role a column plays here to the name it has in the file; a role not named is found by its
usual names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

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
    format: str = field(
        default="auto",
        metadata={"choices": ("auto", *FORMATS), "doc": "shape of a row; auto: by the column names"},
    )
    columns: Mapping[str, str] = field(
        default_factory=dict, metadata={"keys": ROLES, "doc": "role: name of the column that plays it"}
    )
    eval: str | None = field(
        default=None, metadata={"doc": "rows to evaluate on, given like path; otherwise some of path"}
    )
    split: float = field(
        default=0.1,
        metadata={"gt": 0.0, "lt": 1.0, "doc": "share of the distinct rows held out when eval is not given"},
    )
    split_by: str = field(
        default="content",
        metadata={
            "choices": ("content", "seed"),
            "doc": "content: the same held-out rows for every seed; seed: others for each seed",
        },
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "ge": 8,
            "doc": f"longest example, tokens; default {DEFAULT_MAX_LENGTH} or what the model can take",
        },
    )
    max_target_length: int | None = field(
        default=None, metadata={"ge": 8, "doc": "longest target of seq2seq, tokens; default max_length"}
    )
    truncation: str = field(
        default="right",
        metadata={"choices": ("right", "left"), "doc": "the side cut from an over-long input"},
    )
    packing: bool = field(
        default=False,
        metadata={"doc": "causal and chat: several examples in one sequence, none seeing another"},
    )
    chunk: bool = field(
        default=False,
        metadata={
            "doc": (
                "causal and mlm, plain text: documents joined and cut into windows of max_length; a .txt file"
                " is one"
            )
        },
    )
    prefix: str = field(
        default="", metadata={"doc": "text put before every source of a pair, as T5 wants: 'summarize: '"}
    )
    separator: str = field(
        default="\n", metadata={"doc": "text between prompt and completion of a pair, causal only"}
    )
    language: str | None = field(
        default=None,
        metadata={
            "doc": "of a sound model of several languages, the one that is spoken and written: german, or de"
        },
    )
    on_bad_line: str = field(
        default="error",
        metadata={
            "choices": ("error", "skip"),
            "doc": f"skip: bad rows are counted, at most {MAX_BAD_SHARE:.0%}",
        },
    )
    max_rows: int | None = field(
        default=None,
        metadata={
            "ge": 1,
            "doc": "at most this many rows of each side, sampled by content; of a stream the first",
        },
    )
    stream: bool = field(
        default=False, metadata={"doc": "read rows from their files as steps need them; needs max_steps"}
    )
    window: int = field(
        default=10_000, metadata={"ge": 1, "doc": "stream: rows that are read at a time and shuffled"}
    )
    held_out: int | None = field(
        default=None, metadata={"ge": 1, "doc": "stream: hold out the first so many distinct rows"}
    )


@dataclass(frozen=True)
class PreferConfig:
    """How preferences are learned: direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290),
    identity preference optimisation (Azar et al. 2023, arXiv:2310.12036), odds ratios (Hong et al. 2024,
    arXiv:2403.07691), which alone compare with no reference, or, of single answers that are good or bad,
    Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv:2402.01306)."""

    loss: str = field(
        default="dpo",
        metadata={
            "choices": ("dpo", "ipo", "orpo", "kto"),
            "doc": (
                "dpo, ipo and kto compare with the model before training, orpo with nothing; kto is of single"
                " answers with a label"
            ),
        },
    )
    beta: float = field(
        default=0.1,
        metadata={
            "gt": 0.0,
            "le": 100.0,
            "doc": "dpo, ipo and kto: how near to the reference; orpo: its weight",
        },
    )
    label_smoothing: float = field(
        default=0.0,
        metadata={"ge": 0.0, "lt": 0.5, "doc": "dpo: share of rows taken to be the wrong way round"},
    )
    desirable_weight: float = field(
        default=1.0, metadata={"gt": 0.0, "le": 100.0, "doc": "kto: of good answers in the loss"}
    )
    undesirable_weight: float = field(
        default=1.0, metadata={"gt": 0.0, "le": 100.0, "doc": "kto: of bad answers in the loss"}
    )

    @property
    def refers(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss != "orpo"


@dataclass(frozen=True)
class EmbedConfig:
    """How texts are embedded, and how near the right ones must be (van den Oord et al. 2018,
    arXiv:1807.03748, with the other rows of a batch as negatives)."""

    pooling: str = field(
        default="mean",
        metadata={
            "choices": ("mean", "cls"),
            "doc": "of last hidden states: mean of a text, or its first",
        },
    )
    scale: float = field(
        default=20.0, metadata={"gt": 0.0, "le": 1000.0, "doc": "of cosines in the loss; 1 / temperature"}
    )
    dims: tuple[int, ...] = field(
        default=(),
        metadata={"ge": 1, "doc": "also train the first so many features alone, as [256, 64]; Matryoshka"},
    )
    cached: int | None = field(
        default=None,
        metadata={
            "ge": 1,
            "doc": "rows of a batch that go through the model at a time, twice each; all of it is compared",
        },
    )


@dataclass(frozen=True)
class RerankConfig:
    """How a passage is judged beside its query: by itself, or among the passages of that query (Cao et al.
    2007, "Learning to rank: from pairwise approach to listwise approach")."""

    loss: str = field(
        default="bce",
        metadata={
            "choices": ("bce", "softmax"),
            "doc": "bce: each passage by itself; softmax: the right one of a query's passages",
        },
    )


# key of a recipe, which is the name of its task -> its settings, of which the first may stand for all
OF_TASKS: Mapping[str, type] = {"prefer": PreferConfig, "embed": EmbedConfig, "rerank": RerankConfig}


def choices_of(config: type) -> tuple[str, ...]:
    """What the setting takes that may stand for all of such a section."""
    return tuple(fields(config)[0].metadata["choices"])
