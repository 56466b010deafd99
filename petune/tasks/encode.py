"""From rows to examples: checks that task, model and tokenizer fit, encodes, drops what has nothing left to
train, and reports it all.

The rule for over-long rows: they are cut on the configured side; a row that has no trained token left is
dropped and counted; if that is more than half of the rows, training on the rest would not be what was asked
for, and it is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from petune.errors import DataError, FileError, UsageError
from petune.tasks.causal import opened, prompt_text
from petune.tasks.chat import prompt_of
from petune.tasks.classify import encode_pictures
from petune.tasks.configs import DEFAULT_MAX_LENGTH, DataConfig
from petune.tasks.examples import Coder, Example, whole_tokenizer
from petune.tasks.media import Reader, refuse_other_format, refuse_settings
from petune.tasks.mlm import EXCHANGED, HIDDEN, SHARE, Masking, masking_of
from petune.tasks.packing import packed
from petune.tasks.registry import Task, check_fit, find_task
from petune.tasks.report import DataReport, histogram, percentile
from petune.tasks.rows import Message, Row, Rows
from petune.tasks.table import Examples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from petune.tasks.streamed import Streamed

MASKS = (
    f"masks on {SHARE:.0%} of the tokens ({HIDDEN:.0%} hidden, {EXCHANGED:.0%} exchanged), chosen anew at"
    " every step"
)
PORTION = 4096  # rows that are tokenized before they go into a table
ENDLESS = 10**6  # tokenizers without a limit say a number beyond this


@dataclass(frozen=True)
class Encoded:
    """Examples ready to be collated; `train` holds packed sequences if the config says so, `eval` never does.

    `masking` (mlm) says that what is trained is chosen anew at every step: see `drawn`. `kept`: the folder
    they are read from, see petune.tasks.kept. `stream`: where the rows to train on come from, of which
    `train` holds the first then.
    """

    train: Sequence[Example]
    eval: Sequence[Example]
    report: DataReport
    packed: bool
    masking: Masking | None = None
    kept: Path | None = None
    stream: Streamed | None = None

    def drawn(self, examples: Sequence[Example], key: str) -> list[Example]:
        """The examples of one step with the masks that belong to `key`; the same ones for a task without."""
        if self.masking is None:
            return list(examples)
        return [
            self.masking.draw(example, f"{key} row {number}") if example.trained else example
            for number, example in enumerate(examples)
        ]


def encode(
    rows: Rows,
    task: str,
    tokenizer: PreTrainedTokenizerBase | None,
    config: DataConfig,
    *,
    model_kind: str,
    max_positions: int | None = None,
    vocab_size: int | None = None,
    reader: Reader | None = None,
) -> Encoded:
    """Encode both sides. `max_positions`: the longest sequence the model takes; `vocab_size`: its embedding's
    rows; `reader`: of a model that reads pictures, which needs no tokenizer, or sounds.

    Raises UsageError if task, kind, packing or length do not fit; FileError if the tokenizer does not (no end
    token, no template, ids beyond the vocabulary); DataError if more than half of the rows have nothing to
    train.
    """
    reads = "text" if reader is None else reader.kind
    check_fit(task, model_kind, config.packing, reads=reads)
    refuse_settings(config, reads)
    refuse_other_format(rows.format, reads)
    if reader is not None and reader.kind == "image":
        return _pictures(rows, reader)
    assert tokenizer is not None
    labels, segments = rows.labels, model_kind == "encoder"
    coder = make_coder(tokenizer, config, max_positions=max_positions, labels=labels, segments=segments)
    coder = replace(coder, reader=reader)
    with whole_tokenizer(tokenizer):
        sides = [
            _Side.of(_portions(side, coder, find_task(task)), vocab_size) for side in (rows.train, rows.eval)
        ]
    for side in sides:
        refuse_beyond(side.beyond, vocab_size)
    _check_left(sides[0], coder, "train")
    if sides[1].rows:
        _check_left(sides[1], coder, "eval")
    report = _report(sides[0], sides[1], coder, task)
    train, held_out = (side.left for side in sides)
    if config.chunk:
        held = f"held out {len(rows.eval):,} into {len(held_out):,}"
        joined = f"documents joined and cut into windows: {len(rows.train):,} into {len(train):,}, {held}"
        report = replace(report, notes=(joined, *report.notes))
    if task == "mlm":
        encoded = Encoded(
            train, [], replace(report, notes=(MASKS, *report.notes)), packed=False, masking=masking_of(coder)
        )
        return replace(encoded, eval=Examples.of(encoded.drawn(held_out, "held out")))
    if not config.packing:
        return Encoded(train, held_out, report, packed=False)
    assert isinstance(train, Examples), "texts alone are packed"
    bins = Examples.of(packed(train, train.sizes(), coder.limit))
    return Encoded(bins, held_out, replace(report, bins=len(bins)), packed=True)


def _pictures(rows: Rows, reader: Reader) -> Encoded:
    """Pictures and their classes, of which nothing is cut or dropped."""
    train, held_out = (encode_pictures(side, reader, rows.labels or ()) for side in (rows.train, rows.eval))
    size = " x ".join(map(str, reader.shape))
    report = DataReport(
        rows=len(train),
        eval_rows=len(held_out),
        p50=reader.tokens,
        p95=reader.tokens,
        longest=reader.tokens,
        limit=reader.tokens,
        tokens=len(train) * reader.tokens,
        notes=(f"every picture becomes {size}, which the model reads as {reader.tokens} tokens",),
    )
    return Encoded(train, held_out, report, packed=False)


def _portions(rows: Sequence[Row], coder: Coder, task: Task) -> Iterator[list[Example]]:
    """The examples of some rows at a time; of windows, which are cut from all documents, at once. Without
    rows too the encoder is asked, as it may refuse the tokenizer."""
    size = max(1, len(rows)) if coder.config.chunk else PORTION
    for start in range(0, max(1, len(rows)), size):
        yield task.encode(rows[start : start + size], coder)


@dataclass
class _Side:
    """What became of the rows of one side. left: those with something to train, in a table. lengths: of all
    texts, before cutting. targets: trained tokens of those left. lost: the first with nothing to train;
    beyond: the first with a token beyond the vocabulary."""

    left: Sequence[Example] = field(default_factory=Examples)
    rows: int = 0
    lengths: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    cut: int = 0
    tokens: int = 0
    lost: Example | None = None
    beyond: Example | None = None

    @classmethod
    def of(cls, portions: Iterable[list[Example]], vocab_size: int | None) -> _Side:
        """The side that comes in these portions."""
        side, batches = cls(), []
        read: list[Example] = []  # pictures or sounds, which no table holds
        for portion in portions:
            side.rows += len(portion)
            side.lengths += [text.length for example in portion for text in example.texts]
            side.cut += sum(example.cut for example in portion)
            targets = [example.trained for example in portion]
            left = [example for example, trained in zip(portion, targets, strict=True) if trained]
            if side.lost is None and len(left) < len(portion):
                side.lost = portion[targets.index(0)]
            side.targets += filter(None, targets)
            side.tokens += sum(example.tokens for example in left)
            if side.beyond is None:
                side.beyond = beyond(portion, vocab_size)
            if left and left[0].reading is not None:
                read += left
            else:
                batches += Examples.of(left).batches
        side.left = read or Examples(batches)
        return side


def beyond(examples: Iterable[Example], vocab_size: int | None) -> Example | None:
    """The first with a token beyond the vocabulary, or None."""
    return (
        None if vocab_size is None else next((one for one in examples if _highest(one) >= vocab_size), None)
    )


def _highest(example: Example) -> int:
    labels = example.labels if isinstance(example.labels, list) else []
    return max((*example.input_ids, *labels, *map(_highest, example.others)), default=0)


def make_coder(
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    max_positions: int | None = None,
    labels: tuple[str, ...] | None = None,
    segments: bool = False,
) -> Coder:
    """Settle the lengths. UsageError if the config asks for more than the model takes."""
    if config.max_length and max_positions and config.max_length > max_positions:
        what = "data.max_length is more than the model's positions"
        where = "data.max_length"
        raise UsageError(what, where=where, expected=f"at most {max_positions}", found=str(config.max_length))
    own = tokenizer.model_max_length if tokenizer.model_max_length < ENDLESS else DEFAULT_MAX_LENGTH
    limit = config.max_length or min(DEFAULT_MAX_LENGTH, own, max_positions or DEFAULT_MAX_LENGTH)
    target = min(config.max_target_length or limit, max_positions or ENDLESS)
    return Coder(tokenizer, config, limit, target, labels, segments)


def encode_prompt(
    prompt: str | Sequence[Message],
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    *,
    format: str = "text",
) -> list[int]:
    """Token ids to generate from, written as the rows of this task and format were: a text, or (chat) the
    turns so far.

    `format` is `Rows.format`: plain text gets no separator. Raises UsageError for classify, FileError for
    chat without a template.
    """
    coder = make_coder(tokenizer, config)
    if task == "prefer":
        task = "chat" if format == "preference-turns" else "causal"
    if task not in ("seq2seq", "causal", "chat"):
        raise UsageError(f"a model of task {task} does not generate", remedy="petune eval scores it")
    if task == "chat":
        turns = (Message("user", prompt),) if isinstance(prompt, str) else prompt
        return coder.ids([prompt_of(turns, coder)], special=False)[0]
    if not isinstance(prompt, str):
        raise UsageError(f"task {task} generates from a text, not from turns", remedy="use task: chat")
    if task == "seq2seq":
        return coder.ids([config.prefix + prompt])[0]
    text = prompt if format == "text" else prompt_text(prompt, coder)
    return opened(coder.ids([text])[0], coder.eos())


def pad_token_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """The id to fill with: the tokenizer's pad token, else its end token, else 0, as without one. Harmless,
    since masks and labels go by position."""
    for token in () if tokenizer is None else (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def refuse_beyond(example: Example | None, vocab_size: int | None) -> None:
    """Raise FileError for what `beyond` has found."""
    if example is not None:
        what = "the tokenizer does not belong to the model: a token has no row in the embedding"
        where = example.where
        expected = f"ids below {vocab_size}"
        remedy = "take the tokenizer of this model"
        raise FileError(what, where=where, expected=expected, found=str(_highest(example)), remedy=remedy)


def _check_left(side: _Side, coder: Coder, name: str) -> None:
    number, left = side.rows, len(side.left)
    if left * 2 >= number and left:
        return
    assert side.lost is not None
    other = "left" if coder.config.truncation == "right" else "right"
    remedy = f"raise data.max_length, or cut the other side: data.truncation={other}"
    lengths = [text.length for text in side.lost.texts]
    found = max(lengths)
    if found < coder.limit or not all(lengths):  # it is not the cut
        found, remedy = min(lengths), "look at what the tokenizer makes of these texts: petune data RECIPE"
    raise DataError(
        f"{number - left} of {number} rows to {name} have no trained token after cutting to"
        f" {coder.limit} tokens",
        where=side.lost.where,
        found=f"{found} tokens in the first of them",
        remedy=remedy,
    )


def _report(train: _Side, held_out: _Side, coder: Coder, task: str) -> DataReport:
    targets = train.targets if task == "seq2seq" else []
    return DataReport(
        rows=len(train.left),
        eval_rows=len(held_out.left),
        p50=percentile(train.lengths, 0.5),
        p95=percentile(train.lengths, 0.95),
        longest=max(train.lengths, default=0),
        limit=coder.limit if coder.reader is None else coder.reader.tokens,
        truncated=train.cut,
        dropped=train.rows - len(train.left),
        eval_dropped=held_out.rows - len(held_out.left),
        tokens=train.tokens,
        trained=None if task in ("classify", "mlm", "embed", "rerank") else sum(train.targets),
        target_p50=percentile(targets, 0.5) if targets else None,
        target_longest=max(targets) if targets else None,
        truncation=coder.config.truncation,
        notes=(*_answers(train.left, task), *_notes(coder.tokenizer)),
        lengths=histogram(train.lengths),
    )


def _answers(train: Sequence[Example], task: str) -> tuple[str, ...]:
    """The lengths of answers that are compared: where the better ones are longer, a model learns length."""
    if not train or task != "prefer" or train[0].good is not None:
        return ()
    sides = zip(*(one.texts for one in train), strict=True)
    middle = [percentile([text.trained for text in side], 0.5) for side in sides]
    return (f"answers: chosen p50 {middle[0]:,} tokens, rejected p50 {middle[1]:,}",)


def _notes(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    said = (
        "the tokenizer has no pad token: filled with the end token instead, which masks and labels do not see"
    )
    return () if tokenizer.pad_token_id is not None else (said,)
