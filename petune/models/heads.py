"""Which class of transformers makes a model with the head of a task, by what the model reads."""

from __future__ import annotations

from typing import Any, Literal

import transformers

from petune.errors import UsageError
from petune.models import FAMILIES
from petune.models.spec import Input

Head = Literal["classify", "tokens", "mlm", "seq2seq", "causal", "embed"]

AUTO: dict[Head, Any] = {
    "classify": transformers.AutoModelForSequenceClassification,
    "tokens": transformers.AutoModelForTokenClassification,
    "mlm": transformers.AutoModelForMaskedLM,
    "seq2seq": transformers.AutoModelForSeq2SeqLM,
    "causal": transformers.AutoModelForCausalLM,
    "embed": transformers.AutoModel,
}
# of models that read something else than text
AUTO_OF: dict[Input, dict[Head, Any]] = {
    "text": AUTO,
    "image": {"classify": transformers.AutoModelForImageClassification},
    "audio": {"seq2seq": transformers.AutoModelForSpeechSeq2Seq},
}


def reads(config: Any) -> Input:
    """What a model of this config reads; one without a table is taken to read text."""
    family = FAMILIES.get(config.model_type)
    return family.reads if family else "text"


def model_class(config: Any, head: Head) -> Any:
    """The class of transformers that makes a model of this config with the head; None where there is none."""
    found = AUTO_OF[reads(config)].get(head)
    return found if found is not None and type(config) in found._model_mapping else None


def refuse_headless(config: Any, head: Head) -> None:
    """Raise UsageError for a type of model without such a head or with a faulty one."""
    if head == "classify" and config.model_type == "t5gemma" and config.is_encoder_decoder:
        what = (
            "transformers' head of classes for t5gemma reads the longest text of a batch one token early, so"
            " that an answer depends on the texts beside it"
        )
        remedy = "write the class as a text (task: seq2seq), or use an encoder or a decoder"
        raise UsageError(what, where="task", remedy=remedy)
    if model_class(config, head) is None:
        kind = AUTO_OF[reads(config)].get(head, AUTO[head])
        what = f"transformers has no {kind.__name__} for models of type {config.model_type}"
        raise UsageError(what, where="task", remedy="choose another model or another task")
