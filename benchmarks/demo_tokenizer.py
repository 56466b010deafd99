"""The one small tokenizer of the tiny checkpoints: byte-level BPE of 2,048 entries, trained on the general
part of the corpus.

All three families share the vocabulary; they differ in what surrounds a text (Llama `<s> x`, BART `<s> x
</s>`, T5 `x </s>`). Llama's has a chat template whose turns all end with `</s>`, so the end of a turn is the
end of a text.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
PAD, EOS, UNK, BOS, MASK, SYSTEM, USER, ASSISTANT = range(8)
SENTINELS = range(8, 40)  # T5's stand-ins for cut spans
# in the order of the ids above
SPECIAL = ["<pad>", "</s>", "<unk>", "<s>", "<mask>", "<|system|>", "<|user|>", "<|assistant|>"]
SPECIAL += [f"<extra_id_{at}>" for at in range(len(SENTINELS))]
AROUND = {"llama": "<s> $A", "bart": "<s> $A </s>", "t5": "$A </s>"}
# the longest input in tokens; T5's positions are relative and have no hard end
POSITIONS = {"llama": 1024, "bart": 512, "t5": 512}

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] not in ['system', 'user', 'assistant'] %}
{{- raise_exception('a role is system, user or assistant, not ' + message['role']) }}
{%- endif %}
{{- '<|' + message['role'] + '|>' + message['content'] + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|assistant|>' }}
{%- endif %}"""


def train_bpe(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of VOCABULARY entries with SPECIAL first; any text makes the round trip, as all 256
    bytes are entries."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe


def for_family(bpe: Tokenizer, family: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers knows it, for `family` in AROUND; saved, it is loadable by
    AutoTokenizer."""
    own = Tokenizer.from_str(bpe.to_str())
    own.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=AROUND[family], special_tokens=[("<s>", BOS), ("</s>", EOS)]
            ),
        ]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=own,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        bos_token="<s>",
        mask_token="<mask>",
        model_max_length=POSITIONS[family],
        clean_up_tokenization_spaces=False,
        padding_side="left" if family == "llama" else "right",
    )
    if family == "llama":
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
