"""The zoo's models of families that are a few lines more: one each, of the sizes of the others."""

from __future__ import annotations

from typing import Any

from transformers import (
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

VOCAB = 97
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
COMMON: dict[str, Any] = {**TOKENS, "vocab_size": VOCAB, "num_labels": 3, "initializer_range": 0.1}
BERT: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
DISTILBERT: dict[str, Any] = {
    **COMMON,
    "dim": 64,
    "hidden_dim": 96,
    "n_layers": 2,
    "n_heads": 8,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}

MORE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "roberta-mlm": (RobertaForMaskedLM, RobertaConfig, BERT),
    "xlm_roberta-classify": (XLMRobertaForSequenceClassification, XLMRobertaConfig, BERT),
    "distilbert-classify": (DistilBertForSequenceClassification, DistilBertConfig, DISTILBERT),
}
