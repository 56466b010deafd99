"""What a recipe has or does in the place of other programs' keys that have no counterpart in it, by the last
name of the key. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping

_PROMPTS = "prompts are not trained; of data.format: text all is"
_ATTENTION = "attention is computed by the fastest way of the device"
_HELD = "some rows are always held out, a share of them: data.split"
_SCHEDULE = "see `schedule`: linear, cosine or constant"
WHY: Mapping[str, str] = {
    "load_in_8bit": "see `base_dtype`: int8",
    "quantization_bit": "see `base_dtype`: nf4 or int8",
    "deepspeed": "several devices: see `parallel`",
    "fsdp": "several devices: see `parallel`",
    "template": "the tokenizer's own chat template is used",
    "chat_template": "the tokenizer's own chat template is used",
    "logging_steps": "every step is in metrics.jsonl",
    "log_every_n_steps": "every step is in metrics.jsonl",
    "dataset": "not in a dataset_info.json here: data is the path of a file or folder, or a hub id",
    "dataset_dir": "see `data`",
    "wandb_project": "trackers: [wandb] logs to the project petune",
    "tokenizer.path": "the model's own tokenizer is used",
    "checkpointer.output_dir": "a run's folder is `out`",
    "resume_from_checkpoint": "petune train RECIPE --resume",
    "trust_remote_code": "code of a model's folder is never run",
    **dict.fromkeys(("val_set_size", "val_size"), _HELD),
    **dict.fromkeys(("train_on_inputs", "train_on_prompt", "train_on_input"), _PROMPTS),
    **dict.fromkeys(("flash_attention", "flash_attn", "sdp_attention", "attn_implementation"), _ATTENTION),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), _SCHEDULE),
    **dict.fromkeys(("neftune_noise_alpha", "noisy_embedding_alpha"), "embeddings get no noise"),
    **dict.fromkeys(("optimizer", "optim"), "the optimizer is AdamW; see `memory` for what its moments take"),
    "roles_to_train": "the assistant's turns are trained, of no other role",
    "train_on_eos": "what ends a trained turn is trained, no other end",
    "message_field_training": 'a turn of the assistant with "weight": 0 is read and not trained',
    "message_field_training_detail": 'a turn is trained whole or, with "weight": 0, not at all',
    "mask_history": 'give the earlier turns of the assistant "weight": 0',
    "gradient_checkpointing": "see `gradient_checkpointing` and `memory`",
    "pad_to_sequence_len": "a batch is padded to its longest row",
    "evals_per_epoch": "see `eval_every`, which counts steps",
    "saves_per_epoch": "see `save_every`, which counts steps",
    "dataset_prepared_path": "tokenized rows are kept without being asked: rows_cache",
}
