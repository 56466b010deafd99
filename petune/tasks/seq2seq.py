"""seq2seq: the encoder reads the source, a text or a sound, the decoder writes the target; every token of the
target is trained, its end token included."""

from __future__ import annotations

from collections.abc import Sequence

from petune.tasks.examples import Coder, Example, cut_on
from petune.tasks.media import Reader, Reading, read_sound
from petune.tasks.rows import Pair, Row, Spoken
from petune.tasks.sounds import sound_of


def encode_seq2seq(rows: Sequence[Row], coder: Coder) -> list[Example]:
    """One example per Pair or Spoken row. A source is cut on the side the config names, a target always at
    its end; a cut target has no end token."""
    if coder.reader is not None:
        return _encode_sounds(rows, coder, coder.reader)
    pairs = [row for row in rows if isinstance(row, Pair)]
    eos = coder.eos()
    sources = coder.ids([coder.config.prefix + row.source for row in pairs])
    targets = coder.target_ids([row.target for row in pairs])
    examples = []
    with cut_on(coder.tokenizer, coder.config.truncation):
        for row, source, target in zip(pairs, sources, targets, strict=True):
            length = len(source)
            if length > coder.limit:
                source = coder.tokenizer(
                    coder.config.prefix + row.source, truncation=True, max_length=coder.limit, verbose=False
                )["input_ids"]
            if target[-1:] != [eos]:
                target = [*target, eos]
            lost = max(0, len(target) - coder.target_limit)
            examples.append(
                Example(source, target[: coder.target_limit], row.where, length + lost, has_target=True)
            )
    return examples


def _encode_sounds(rows: Sequence[Row], coder: Coder, reader: Reader) -> list[Example]:
    """Sounds, which are padded to the model's window by its processor and lose what is longer, and what is
    said in them. Raises DataError, see `read_sound`."""
    spoken = [row for row in rows if isinstance(row, Spoken)]
    eos, rate, window = coder.eos(), reader.processor.sampling_rate, reader.processor.n_samples
    examples = []
    for row, target in zip(spoken, coder.target_ids([row.target for row in spoken]), strict=True):
        sound = read_sound(row.sound, rate, row.where, sound_of)
        # the model itself puts its first token before what it writes
        target = target[1:] if target[:1] == [reader.begins] else target
        target = target if target[-1:] == [eos] else [*target, eos]
        lost = max(0, len(target) - coder.target_limit)
        length = max(reader.tokens, -(-sound.length * reader.tokens // window)) + lost
        reading = Reading(row.sound, reader)
        kept = target[: coder.target_limit]
        examples.append(Example([], kept, row.where, length, has_target=True, reading=reading))
    return examples
