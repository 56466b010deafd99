"""TASKS: what each task is, in one table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from petune.errors import UsageError, did_you_mean
from petune.tasks.causal import encode_causal
from petune.tasks.chat import encode_chat
from petune.tasks.classify import encode_classify
from petune.tasks.embed import encode_embed
from petune.tasks.examples import Coder, Example
from petune.tasks.media import CALLED
from petune.tasks.mlm import encode_mlm
from petune.tasks.prefer import encode_prefer
from petune.tasks.rerank import ONE_OUTPUT, encode_rerank
from petune.tasks.rows import Row
from petune.tasks.seq2seq import encode_seq2seq
from petune.tasks.tokens import encode_tokens


@dataclass(frozen=True)
class Task:
    """`head`: what the model must end in. `kinds`: families it fits. `metric`, `direction`: what names the
    best checkpoint by default. `reads`: what its rows may be made of."""

    name: str
    head: str
    kinds: frozenset[str]
    metric: str
    direction: str
    packs: bool
    encode: Callable[[Sequence[Row], Coder], list[Example]]
    reads: frozenset[str] = frozenset({"text"})

    @property
    def texts(self) -> int:
        """How many rows of the model make an example, at least."""
        return 2 if self.name in ("prefer", "embed") else 1

    @property
    def over_vocabulary(self) -> bool:
        """Whether its logits are about tokens of the vocabulary, and not about classes or tags."""
        return self.head not in ("classify", "tokens", "embed")

    @property
    def shifts(self) -> bool:
        """Whether the logits of a token are about the next one."""
        return self.head == "causal"

    @property
    def names_classes(self) -> bool:
        """Whether a whole row has one label, of classes that are named."""
        return self.name == "classify"

    def outputs(self, labels: Sequence[str] | None) -> Sequence[str] | None:
        """What the outputs of its head are called, for rows of these labels; None for heads over a
        vocabulary, and for none."""
        return ONE_OUTPUT if self.name == "rerank" else labels


TASKS: dict[str, Task] = {
    "classify": Task(
        "classify",
        "classify",
        frozenset({"encoder", "encoder-decoder", "decoder"}),
        "accuracy",
        "max",
        False,
        encode_classify,
        frozenset({"text", "image"}),
    ),
    "tokens": Task("tokens", "tokens", frozenset({"encoder", "decoder"}), "f1", "max", False, encode_tokens),
    "mlm": Task("mlm", "mlm", frozenset({"encoder"}), "loss", "min", False, encode_mlm),
    "seq2seq": Task(
        "seq2seq",
        "seq2seq",
        frozenset({"encoder-decoder"}),
        "loss",
        "min",
        False,
        encode_seq2seq,
        frozenset({"text", "audio"}),
    ),
    "causal": Task("causal", "causal", frozenset({"decoder"}), "loss", "min", True, encode_causal),
    "chat": Task("chat", "causal", frozenset({"decoder"}), "loss", "min", True, encode_chat),
    "prefer": Task("prefer", "causal", frozenset({"decoder"}), "loss", "min", False, encode_prefer),
    "embed": Task("embed", "embed", frozenset({"encoder"}), "mrr", "max", False, encode_embed),
    "rerank": Task("rerank", "classify", frozenset({"encoder"}), "mrr_at_10", "max", False, encode_rerank),
}


def find_task(name: str) -> Task:
    """The task of that name; UsageError otherwise."""
    if name not in TASKS:
        remedy = did_you_mean(name, TASKS)
        raise UsageError(f"there is no task {name!r}", where="task", expected=", ".join(TASKS), remedy=remedy)
    return TASKS[name]


def check_fit(
    task: str, model_kind: str, packing: bool = False, packs: bool = True, reads: str = "text"
) -> None:
    """UsageError unless a model of this kind ("encoder", "encoder-decoder", "decoder") can learn the task,
    and packing makes sense; packs: whether the model tells samples in a row apart; reads: "text", "image" or
    "audio"."""
    found = find_task(task)
    if reads not in found.reads:
        fitting = ", ".join(name for name, other in TASKS.items() if reads in other.reads)
        raise UsageError(
            f"task {task} is not for a model that reads {CALLED[reads]}",
            where="task",
            expected=fitting,
            remedy="choose another model, or a task that fits",
        )
    if model_kind not in found.kinds:
        fitting = ", ".join(name for name, other in TASKS.items() if model_kind in other.kinds)
        raise UsageError(
            f"task {task} does not fit a model of kind {model_kind}",
            where="task",
            expected=f"a model of kind {' or '.join(sorted(found.kinds))}",
            remedy=f"choose another model, or a task that fits: {fitting}",
        )
    if packing and not packs:
        raise UsageError(
            "samples packed in a row would see one another: this model's mask does not know them",
            where="data.packing",
            remedy="set data.packing to false",
        )
    if packing and not found.packs:
        remedy = "set data.packing to false, or choose task causal or chat with a decoder"
        raise UsageError(
            f"packing does not fit task {task} with a model of kind {model_kind}",
            where="data.packing",
            remedy=remedy,
        )
