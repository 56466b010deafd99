"""The zoo's models of families that are a few lines more: one each, of the sizes of the others."""

from __future__ import annotations

from typing import Any

from transformers import (
    CamembertConfig,
    CamembertForTokenClassification,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    DebertaV2ForSequenceClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    EuroBertConfig,
    EuroBertForSequenceClassification,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MBartConfig,
    MBartForConditionalGeneration,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    MT5Config,
    MT5ForConditionalGeneration,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    RobertaConfig,
    RobertaForMaskedLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
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
BART: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "num_labels": 3,
    "init_std": 0.1,
    **TOKENS,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_ff": 96,
    "d_kv": 8,
    "num_layers": 2,
    "num_heads": 8,
    "dropout_rate": 0.0,
    "num_labels": 3,
    "initializer_factor": 1.0,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}
GATED = {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
DECODER: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
# a window shorter than a batch's texts in every other block
SLIDING: dict[str, Any] = {
    **DECODER,
    "head_dim": 8,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
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
# multipliers of embeddings, scores, sums and logits
GRANITE: dict[str, Any] = {
    **DECODER,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}
MINISTRAL3: dict[str, Any] = {
    **DECODER,
    "head_dim": 8,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "llama_4_scaling_beta": 0.5,
        "original_max_position_embeddings": 4,
    },
}
GEMMA2: dict[str, Any] = {
    **SLIDING,
    "query_pre_attn_scalar": 12,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 5.0,
    "attn_implementation": "eager",  # the only one of transformers' own that caps scores
}
# values that are keys, and with full attention wider heads and fewer keys
GEMMA4: dict[str, Any] = {
    **SLIDING,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 5.0,
}
# a last block that reads the keys and values of the one before, and embeddings of each block
GEMMA4E: dict[str, Any] = {
    **SLIDING,
    "layer_types": ["full_attention", "full_attention"],
    "global_head_dim": 16,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
}
PHI3 = {**DECODER, "sliding_window": 4, "resid_pdrop": 0.0}
TURNED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
PHI4 = {**PHI3, "rope_parameters": TURNED}  # whose positions turn some columns of a head
MODERNBERT: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "local_attention": 4,
    "classifier_dropout": 0.0,
}
# DeBERTa 3: positions go through q and k; more of them than buckets, so that some share one
DEBERTA3: dict[str, Any] = {
    **BERT,
    "relative_attention": True,
    "position_buckets": 4,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
}
# linears of positions, a table without norm and buckets, positions of tokens besides, types of tokens
DEBERTA2: dict[str, Any] = {
    **BERT,
    "relative_attention": True,
    "max_relative_positions": 5,
    "pos_att_type": "p2c|c2p",
    "type_vocab_size": 2,
}
OPT: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "word_embed_proj_dim": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "init_std": 0.1,
}
GPT2: dict[str, Any] = {
    **COMMON,
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 2,
    "n_head": 8,
    "n_positions": 64,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
# nine patches and the token before them
PICTURE: dict[str, Any] = {"num_labels": 3, "initializer_range": 0.1, "image_size": 12, "patch_size": 4}
VIT: dict[str, Any] = {
    **PICTURE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
}
# a learned scale behind each sub-layer, which here is no one
DINOV2: dict[str, Any] = {
    **PICTURE,
    "hidden_size": 96,
    "mlp_ratio": 1,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "layerscale_value": 0.5,
    "use_mask_token": False,
}
WHISPER: dict[str, Any] = {
    **{name: value for name, value in BART.items() if name not in ("max_position_embeddings", "num_labels")},
    "decoder_attention_heads": 8,
    "num_mel_bins": 6,
    "max_source_positions": 9,
    "max_target_positions": 64,
}
# A mixer in every other block, with two heads of values for each of keys. A first token gives the product of
# query and key, which a norm makes a sign of: an epsilon so great that no rounding decides it.
MIXERS: dict[str, Any] = {
    "rms_norm_eps": 1e-3,
    "head_dim": 16,
    "rope_parameters": TURNED,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
# two configs of Gemma 2's kind
_T5GEMMA = {
    name: value for name, value in GEMMA2.items() if name not in ("num_labels", "attn_implementation")
}
T5GEMMA: dict[str, Any] = {
    **TOKENS,
    "vocab_size": VOCAB,
    "encoder": _T5GEMMA,
    "decoder": _T5GEMMA,
    "num_labels": 3,
    "attn_implementation": "eager",
}

MORE: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "roberta-mlm": (RobertaForMaskedLM, RobertaConfig, BERT),
    "xlm_roberta-classify": (XLMRobertaForSequenceClassification, XLMRobertaConfig, BERT),
    "camembert-tokens": (CamembertForTokenClassification, CamembertConfig, BERT),
    "distilbert-classify": (DistilBertForSequenceClassification, DistilBertConfig, DISTILBERT),
    "ministral-causal": (MinistralForCausalLM, MinistralConfig, SLIDING),
    "ministral3-causal": (Ministral3ForCausalLM, Ministral3Config, MINISTRAL3),
    "smollm3-causal": (SmolLM3ForCausalLM, SmolLM3Config, {**DECODER, "no_rope_layers": [1, 0, 1] * 2}),
    "granite-causal": (GraniteForCausalLM, GraniteConfig, GRANITE),
    "olmo2-causal": (Olmo2ForCausalLM, Olmo2Config, DECODER),
    "olmo3-causal": (Olmo3ForCausalLM, Olmo3Config, SLIDING),
    "gemma2-causal": (Gemma2ForCausalLM, Gemma2Config, GEMMA2),
    "gemma4-causal": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4),
    "gemma4e-causal": (Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4E),
    "phi3-causal": (Phi3ForCausalLM, Phi3Config, PHI3),
    "phi4-causal": (Phi3ForCausalLM, Phi3Config, PHI4),
    "glm4-causal": (Glm4ForCausalLM, Glm4Config, {**DECODER, "head_dim": 8, "attention_bias": True}),
    "cohere-causal": (CohereForCausalLM, CohereConfig, {**DECODER, "use_qk_norm": True}),
    "modernbert-classify": (ModernBertForSequenceClassification, ModernBertConfig, MODERNBERT),
    "opt-causal": (OPTForCausalLM, OPTConfig, OPT),
    "gpt2-causal": (GPT2LMHeadModel, GPT2Config, GPT2),
    # OPT 350M's order of norms and width of embeddings
    "opt350-causal": (
        OPTForCausalLM,
        OPTConfig,
        {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "deberta-classify": (DebertaV2ForSequenceClassification, DebertaV2Config, DEBERTA3),
    "deberta2-mlm": (DebertaV2ForMaskedLM, DebertaV2Config, DEBERTA2),
    "eurobert-classify": (EuroBertForSequenceClassification, EuroBertConfig, DECODER),
    "qwen3_5-causal": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {**DECODER, **MIXERS}),
    "mbart-seq2seq": (MBartForConditionalGeneration, MBartConfig, BART),
    "mt5-seq2seq": (MT5ForConditionalGeneration, MT5Config, GATED),
    "vit-classify": (ViTForImageClassification, ViTConfig, VIT),
    "whisper-seq2seq": (WhisperForConditionalGeneration, WhisperConfig, WHISPER),
    "dinov2-classify": (Dinov2ForImageClassification, Dinov2Config, DINOV2),
    "t5gemma-seq2seq": (T5GemmaForConditionalGeneration, T5GemmaConfig, T5GEMMA),
    "cohere2-causal": (Cohere2ForCausalLM, Cohere2Config, {**SLIDING, "logit_scale": 0.5}),
}
