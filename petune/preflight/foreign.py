"""The keys of other programs and what they are in a recipe, one table a program. Torch-free.

A key has a rule of `meanings`; one without has no counterpart, and `reasons` says more of those that many
files have. `defaults` are what a program takes for a key that is not in the file, where petune takes another.
Some keys are put together afterwards: `data.files`, `data.config` and `data.split_of` go into data.path,
`method.also` adds to method.targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from petune.preflight.meanings import (
    ALPACA,
    DATASET,
    SHAREGPT,
    KeyRule,
    KeyTable,
    already,
    as_it_is,
    assistant,
    attention,
    clipping,
    component,
    either,
    fields_of_turns,
    leaves,
    names,
    off,
    one_of,
    share,
    single,
    split,
    steps,
    switch,
    targets,
    text,
    to,
    trackers,
    truth,
)


@dataclass(frozen=True)
class ForeignProgram:
    """A program whose files are read: one of `marks` tells them from the others'."""

    title: str
    marks: tuple[str, ...]
    table: KeyTable
    defaults: dict[str, Any] = field(default_factory=dict)
    prefer: dict[str, Any] = field(default_factory=dict)  # and those of its trainers of preferences


ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "torch.optim.AdamW", "AdamW")
SCHEDULE = one_of(
    linear={"schedule": "linear"},
    cosine={"schedule": "cosine"},
    constant={"schedule": "constant", "warmup": 0},
    constant_with_warmup={"schedule": "constant"},
)
DTYPE = {"float32": {"dtype": "fp32"}, "bfloat16": {"dtype": "bf16"}, "auto": {}, "null": {}, "none": {}}
DTYPE |= {"fp32": {"dtype": "fp32"}, "bf16": {"dtype": "bf16"}}
DORA: KeyRule = switch({"method.name": "dora"})
PREFER = {name: {"task": "prefer", "prefer.loss": name} for name in ("dpo", "ipo", "orpo", "kto")}
SMOOTHING: KeyRule = either(already(0, 0.0), to("prefer.label_smoothing"))
FOUR_BITS: KeyRule = switch({"base_dtype": "nf4"})
INIT: KeyRule = either(already(True, "default", None), one_of(pissa={"method.init": "pissa"}))
TARGET_LISTS: KeyTable = {
    "bias": one_of(none={}, all={"method.bias": "all"}, lora_only={"method.bias": "lora"}),
    "rank_pattern": to("method.rank_pattern", as_it_is),
    "alpha_pattern": to("method.alpha_pattern", as_it_is),
    "layers_to_transform": either(
        off, to("method.layers", lambda value: [value] if isinstance(value, int) else value)
    ),
    "exclude_modules": either(off, leaves),
    "trainable_token_indices": either(
        off, to("method.token_rows", lambda value: value if isinstance(value, list) else None)
    ),
}
# transformers.TrainingArguments, which several programs read
TRAINER: KeyTable = {
    "output_dir": to("out", text),
    "run_name": to("name", text),
    "learning_rate": to("lr"),
    "num_train_epochs": to("epochs"),
    "max_steps": either(already(-1), steps("max_steps")),
    "per_device_train_batch_size": to("batch_size"),
    "per_device_eval_batch_size": to("eval_batch_size"),
    "gradient_accumulation_steps": to("accumulate"),
    "lr_scheduler_type": SCHEDULE,
    "warmup_ratio": either(already(0, 0.0), to("warmup")),
    "warmup_steps": either(already(0), to("warmup")),
    "weight_decay": to("weight_decay"),
    "adam_beta1": to("beta1"),
    "adam_beta2": to("beta2"),
    "adam_epsilon": already(1e-8, "1e-8", "1e-08"),
    "max_grad_norm": clipping,
    "optim": already(*ADAMW),
    "seed": to("seed"),
    "bf16": one_of(true={"dtype": "bf16"}, false={"dtype": "fp32"}),
    "fp16": off,
    "tf32": off,
    "gradient_checkpointing": to("gradient_checkpointing", truth),
    "gradient_checkpointing_kwargs.use_reentrant": already(True, False),
    "neftune_noise_alpha": off,
    "torch_compile": to("compile", truth),
    "eval_strategy": either(already("epoch", "steps")),
    "save_strategy": either(already("epoch", "steps")),
    "logging_strategy": already("steps"),
    "eval_steps": steps("eval_every"),
    "save_steps": steps("save_every"),
    "save_total_limit": to("keep"),
    "logging_steps": already(1),
    "metric_for_best_model": to("metric", text),
    "greater_is_better": one_of(true={"direction": "max"}, false={"direction": "min"}),
    "load_best_model_at_end": already(True),
    "early_stopping_patience": steps("patience"),
    "report_to": trackers,
    "resume_from_checkpoint": off,
    "deepspeed": off,
    "fsdp": off,
    "do_train": already(True),
    **dict.fromkeys(("push_to_hub", "trust_remote_code", "group_by_length", "overwrite_output_dir"), off),
}
TRAINER_DEFAULTS = {"warmup": 0, "epochs": 3, "batch_size": 8, "seed": 42}

AXOLOTL: KeyTable = TRAINER | {  # it hands most keys of the Trainer on
    "base_model": to("model", text),
    "adapter": either(
        one_of(lora={"method.name": "lora"}, qlora={"method.name": "lora"}),
        lambda value: {"method.name": "full"} if off(value) == {} else None,
    ),
    "load_in_8bit": off,
    "load_in_4bit": FOUR_BITS,
    "strict": off,
    "datasets.0.path": to("data.path", text),
    "datasets.0.name": to("data.config", text),
    "datasets.0.split": split,
    "datasets.0.data_files": to("data.files", single),
    "datasets.0.ds_type": already("json", "csv", "parquet", "text"),
    "datasets.0.type": one_of(
        alpaca=ALPACA,
        chat_template={"task": "chat"},
        sharegpt={"task": "chat", **SHAREGPT},
        completion={"task": "causal", "data.format": "text"},
    ),
    "datasets.0.field": to("data.columns.text", text),
    "datasets.0.field_messages": to("data.columns.messages", text),
    "datasets.0.field_system": to("data.columns.system", text),
    "datasets.0.roles_to_train": assistant,
    "datasets.0.train_on_eos": already("turn"),
    "datasets.0.message_property_mappings": fields_of_turns,
    "datasets.0.message_field_role": one_of(role={}, **{"from": SHAREGPT}),
    "datasets.0.message_field_content": one_of(content={}, value=SHAREGPT),
    **dict.fromkeys(("chat_template", "datasets.0.chat_template"), already("tokenizer_default", None)),
    "test_datasets.0.path": to("data.eval", text),
    "val_set_size": share,
    "sequence_len": to("data.max_length"),
    "sample_packing": to("data.packing", truth),
    "train_on_inputs": already(False),
    "lora_r": to("method.r"),
    "lora_alpha": to("method.alpha"),
    "lora_dropout": to("method.dropout"),
    "lora_target_modules": either(off, targets),
    "lora_target_linear": switch({"method.targets": "all-linear"}),
    "lora_modules_to_save": either(off, to("method.also_train", names)),
    "lora_model_dir": either(off, to("init_adapter", text)),
    "lora_fan_in_fan_out": already(None, False),
    "peft_use_dora": DORA,
    "peft_use_rslora": to("method.rslora", truth),
    "rl": either(off, one_of(**PREFER)),
    "rl_beta": to("prefer.beta"),
    "orpo_alpha": to("prefer.beta"),
    "dpo_label_smoothing": SMOOTHING,
    "kto_desirable_weight": to("prefer.desirable_weight"),
    "kto_undesirable_weight": to("prefer.undesirable_weight"),
    "peft_layers_to_transform": TARGET_LISTS["layers_to_transform"],
    "loraplus_lr_ratio": to("method.lr_ratio"),
    "num_epochs": to("epochs"),
    "micro_batch_size": to("batch_size"),
    "eval_batch_size": to("eval_batch_size"),
    "optimizer": already(*ADAMW),
    "lr_scheduler": SCHEDULE,
    **dict.fromkeys(("warmup_steps", "warmup_ratio"), to("warmup")),  # 0 too, which is not its default
    "bf16": one_of(auto={}, true={"dtype": "bf16"}, false={"dtype": "fp32"}),
    "use_tensorboard": switch({"trackers": ["tensorboard"]}),
    "evals_per_epoch": already(1),
    "saves_per_epoch": already(1),
    "early_stopping_patience": either(off, steps("patience")),
    **dict.fromkeys(("local_rank", "fsdp_config", "xformers_attention", "special_tokens", "debug"), off),
    **dict.fromkeys(("flash_attention", "sdp_attention", "noisy_embedding_alpha"), off),
    **dict.fromkeys(("wandb_project", "wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model"), off),
}
LLAMA_FACTORY: KeyTable = (
    TRAINER
    | TARGET_LISTS
    | DATASET
    | {
        "model_name_or_path": to("model", text),
        "adapter_name_or_path": to("init_adapter", text),
        "stage": one_of(sft={}, pt={"task": "causal"}, dpo={"task": "prefer"}, kto=PREFER["kto"]),
        "pref_loss": one_of(sigmoid=PREFER["dpo"], ipo=PREFER["ipo"], orpo=PREFER["orpo"]),
        "pref_beta": to("prefer.beta"),
        "pref_ftx": already(0, 0.0),
        "dpo_label_smoothing": SMOOTHING,
        "kto_chosen_weight": to("prefer.desirable_weight"),
        "kto_rejected_weight": to("prefer.undesirable_weight"),
        "finetuning_type": one_of(lora={"method.name": "lora"}, full={"method.name": "full"}),
        "lora_rank": to("method.r"),
        "lora_alpha": to("method.alpha"),
        "lora_dropout": to("method.dropout"),
        "lora_target": targets,
        "additional_target": to("method.also_train", names),
        "use_rslora": to("method.rslora", truth),
        "use_dora": DORA,
        "pissa_init": switch({"method.init": "pissa"}),
        "pissa_iter": steps("method.init_iterations"),
        "loraplus_lr_ratio": to("method.lr_ratio"),
        "eval_dataset": to("data.eval", text),
        "cutoff_len": to("data.max_length"),
        "max_samples": to("data.max_rows"),
        "val_size": share,
        "packing": to("data.packing", truth),
        "neat_packing": switch({"data.packing": True}),
        "train_on_prompt": already(False),
        "mask_history": off,
        "quantization_bit": either(off, one_of(**{"4": {"base_dtype": "nf4"}})),
        "overwrite_cache": already(True, False),
        "plot_loss": already(True),
        "flash_attn": already("auto"),
    }
)
TRL: KeyTable = (
    TRAINER
    | TARGET_LISTS
    | {
        "model_name_or_path": to("model", text),
        "dataset_name": to("data.path", text),
        "dataset_config": to("data.config", text),
        "dataset_train_split": split,
        "dataset_text_field": to("data.columns.text", text),
        "max_length": to("data.max_length"),
        "max_seq_length": to("data.max_length"),
        "packing": to("data.packing", truth),
        "packing_strategy": already("bfd"),
        "assistant_only_loss": already(True),
        "completion_only_loss": already(True, None),
        "loss_type": one_of(nll={}, sigmoid=PREFER["dpo"], ipo=PREFER["ipo"], kto=PREFER["kto"]),
        "beta": to("prefer.beta"),
        "label_smoothing": SMOOTHING,
        "desirable_weight": to("prefer.desirable_weight"),
        "undesirable_weight": to("prefer.undesirable_weight"),
        "use_peft": one_of(true={"method.name": "lora"}, false={"method.name": "full"}),
        "lora_r": to("method.r"),
        "lora_alpha": to("method.alpha"),
        "lora_dropout": to("method.dropout"),
        "lora_target_modules": targets,
        "lora_modules_to_save": either(off, to("method.also_train", names)),
        "lora_task_type": one_of(causal_lm={}, seq_cls={"task": "classify"}),
        "use_rslora": to("method.rslora", truth),
        "use_dora": DORA,
        "load_in_4bit": FOUR_BITS,
        "load_in_8bit": off,
        **dict.fromkeys(("dtype", "torch_dtype"), one_of(**DTYPE)),
    }
)
PEFT: KeyTable = TARGET_LISTS | {
    "base_model_name_or_path": to("model", text),
    "revision": either(off, already("main")),
    "peft_type": one_of(lora={"method.name": "lora"}),
    "task_type": one_of(
        causal_lm={},
        none={},
        seq_2_seq_lm={"task": "seq2seq"},
        seq_cls={"task": "classify"},
        token_cls={"task": "tokens"},
    ),
    "r": to("method.r"),
    "lora_alpha": to("method.alpha"),
    "lora_dropout": to("method.dropout"),
    "target_modules": targets,
    "modules_to_save": either(off, to("method.also_train", names)),
    "use_rslora": to("method.rslora", truth),
    "use_dora": DORA,
    "init_lora_weights": INIT,
    "inference_mode": already(True, False),
    "fan_in_fan_out": already(True, False),
    "peft_version": lambda value: {},
    "megatron_core": already("megatron.core"),
    "qalora_group_size": already(16),
    **dict.fromkeys(("auto_mapping", "layers_pattern", "loftq_config", "layer_replication"), off),
    **dict.fromkeys(("lora_bias", "megatron_config", "corda_config", "eva_config", "arrow_config"), off),
    **dict.fromkeys(("alora_invocation_tokens", "target_parameters", "use_qalora", "use_bdlora"), off),
    **dict.fromkeys(("ensure_weight_tying", "lora_ga_config", "kasa_config", "velora_config"), off),
    "monteclora_config": off,
}


_COSINE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"
_SETS = {
    "torchtune.datasets.alpaca_dataset": {"data.path": "tatsu-lab/alpaca", **ALPACA},
    "torchtune.datasets.alpaca_cleaned_dataset": {"data.path": "yahma/alpaca-cleaned", **ALPACA},
    "torchtune.datasets.chat_dataset": {"task": "chat"},
    "torchtune.datasets.text_completion_dataset": {"task": "causal", "data.format": "text"},
    "torchtune.datasets.instruct_dataset": {},
}
TORCHTUNE: KeyTable = {
    "model._component_": component,
    "model.lora_attn_modules": attention,
    "model.apply_lora_to_mlp": switch({"method.also": ["gate_proj", "up_proj", "down_proj"]}),
    "model.apply_lora_to_output": switch({"method.also": ["lm_head"]}),
    "model.lora_rank": to("method.r"),
    "model.lora_alpha": to("method.alpha"),
    "model.lora_dropout": to("method.dropout"),
    "model.use_dora": DORA,
    "checkpointer.checkpoint_dir": to("model", text),
    "checkpointer._component_": already("torchtune.training.FullModelHFCheckpointer"),
    "checkpointer.adapter_checkpoint": off,
    "checkpointer.recipe_checkpoint": off,
    "tokenizer.max_seq_len": either(off, to("data.max_length")),
    "dataset._component_": lambda value: _SETS.get(value),
    "dataset.source": to("data.path", text),
    "dataset.data_files": to("data.files", text),
    "dataset.split": split,
    "dataset.column": to("data.columns.text", text),
    "dataset.conversation_column": to("data.columns.messages", text),
    "dataset.conversation_style": one_of(openai={"data.format": "messages"}, sharegpt=SHAREGPT),
    "dataset.packed": to("data.packing", truth),
    "dataset.train_on_input": already(False),
    "seed": either(off, to("seed")),
    "shuffle": already(True),
    "batch_size": to("batch_size"),
    "epochs": to("epochs"),
    "max_steps_per_epoch": off,
    "gradient_accumulation_steps": to("accumulate"),
    "clip_grad_norm": either(lambda value: {"clip": None} if value is None else None, clipping),
    "optimizer._component_": already(*ADAMW),
    "optimizer.fused": already(True, False),
    "optimizer.lr": to("lr"),
    "optimizer.weight_decay": to("weight_decay"),
    "lr_scheduler._component_": lambda value: {"schedule": "cosine"} if value == _COSINE else None,
    "lr_scheduler.num_warmup_steps": to("warmup"),
    "loss._component_": already(
        "torchtune.modules.loss.LinearCrossEntropyLoss",
        "torchtune.modules.loss.CEWithChunkedOutputLoss",
        "torch.nn.CrossEntropyLoss",
    ),
    "compile": to("compile", truth),
    "device": one_of(cpu={"device": "cpu"}, cuda={"device": "cuda"}),
    "dtype": one_of(**DTYPE),
    "enable_activation_checkpointing": to("gradient_checkpointing", truth),
    "enable_activation_offloading": off,
    "resume_from_checkpoint": off,
    "output_dir": to("out", text),
    "metric_logger._component_": one_of(
        **{
            "torchtune.training.metric_logging.disklogger": {},
            "torchtune.training.metric_logging.wandblogger": {"trackers": ["wandb"]},
            "torchtune.training.metric_logging.tensorboardlogger": {"trackers": ["tensorboard"]},
        }
    ),
    "log_every_n_steps": already(1, None),
    "log_level": already("INFO"),
    "profiler.enabled": off,
}
_LORA = {"method.name": "lora", "method.r": 8}
PROGRAMS: Mapping[str, ForeignProgram] = {
    "torchtune": ForeignProgram(
        "torchtune",
        ("model._component_", "checkpointer._component_"),
        TORCHTUNE,
        _LORA | {"method.alpha": 16, "schedule": "constant", "warmup": 0, "weight_decay": 0.01, "clip": None},
    ),
    "peft": ForeignProgram("peft", ("peft_type",), PEFT, _LORA | {"method.alpha": 8}),
    "axolotl": ForeignProgram(
        "axolotl",
        ("base_model", "micro_batch_size", "datasets.0.type"),
        AXOLOTL,
        {"method.name": "full", "schedule": "cosine", "epochs": 1, "batch_size": 1},
    ),
    "llamafactory": ForeignProgram(
        "LLaMA-Factory",
        ("finetuning_type", "stage", "cutoff_len", "template", "lora_target"),
        LLAMA_FACTORY,
        TRAINER_DEFAULTS | _LORA | {"lr": 5e-5, "data.max_length": 2048},
    ),
    "trl": ForeignProgram(
        "TRL",
        ("dataset_name", "use_peft", "per_device_train_batch_size", "num_train_epochs"),
        TRL,
        TRAINER_DEFAULTS
        | {"method.name": "full", "lr": 2e-5, "data.max_length": 1024}
        | {"method.r": 16, "method.alpha": 32, "method.dropout": 0.05},
        {"lr": 1e-6},
    ),
}
