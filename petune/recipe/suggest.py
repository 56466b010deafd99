"""What an unknown key or value was probably meant to be.

Suggestions only: no name of this table is accepted in place of the key; the classic ones that are stand in
`aliases`. Spelling alone does not lead from `rank` to `r`, hence the table of the names other toolkits use.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from petune.errors import nearest
from petune.kernels.configs import MemoryConfig
from petune.methods.configs import METHODS
from petune.parallel.configs import BACKENDS
from petune.recipe.aliases import CLASSIC
from petune.recipe.raw import MEMORY, PARALLEL, SECTIONS
from petune.recipe.schema import Recipe
from petune.recipe.yaml_lines import KeyPath
from petune.tasks.configs import OF_TASKS, DataConfig

# Names other toolkits and people use -> the key path here, or a sentence (it has a space) where there is
# none.
ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("rank", "lora_r", "lora_rank"), "method.r"),
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    **dict.fromkeys(("target_modules", "lora_target", "lora_target_modules", "target"), "method.targets"),
    "exclude_modules": "method.exclude",
    **dict.fromkeys(("modules_to_save", "additional_target"), "method.also_train"),
    "reduction_factor": "method.reduction",
    **dict.fromkeys(("peft", "peft_method", "finetuning_type", "adapter", "tuner"), "method"),
    **dict.fromkeys(("learning_rate", "peak_lr"), "lr"),
    **dict.fromkeys(
        ("bs", "batch", "per_device_train_batch_size", "train_batch_size", "micro_batch_size", "batchsize"),
        "batch_size",
    ),
    "per_device_eval_batch_size": "eval_batch_size",
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "accumulation_steps", "gradient_accumulation"),
        "accumulate",
    ),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "epoch", "n_epochs", "max_epochs"), "epochs"),
    **dict.fromkeys(("steps", "num_steps", "max_train_steps", "train_steps"), "max_steps"),
    **dict.fromkeys(
        ("model_name_or_path", "model_name", "base_model", "model_path", "model_id", "checkpoint"), "model"
    ),
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_name", "train_file", "train_data", "dataset_path", "data_path"),
        "data",
    ),
    **dict.fromkeys(
        ("eval_dataset", "validation_file", "val_data", "eval_data", "eval_file", "test_data"), "data.eval"
    ),
    **dict.fromkeys(("val_set_size", "val_size", "validation_split", "test_size"), "data.split"),
    **dict.fromkeys(
        ("max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "max_len", "seq_len"),
        "data.max_length",
    ),
    **dict.fromkeys(("sample_packing", "pack"), "data.packing"),
    **dict.fromkeys(("max_samples", "max_train_samples"), "data.max_rows"),
    "truncation_side": "data.truncation",
    **dict.fromkeys(("lang", "source_lang", "target_lang"), "data.language"),
    **dict.fromkeys(("output_dir", "output", "out_dir", "run_dir", "save_dir"), "out"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), "schedule"),
    **dict.fromkeys(("warmup_ratio", "warmup_steps", "num_warmup_steps", "warm_up"), "warmup"),
    **dict.fromkeys(
        ("max_grad_norm", "gradient_clip_val", "grad_clip", "clip_grad_norm", "gradient_clipping"), "clip"
    ),
    **dict.fromkeys(("logging", "report_to", "loggers", "tracker", "log_with"), "trackers"),
    **dict.fromkeys(("eval_steps", "evaluation_steps"), "eval_every"),
    "save_steps": "save_every",
    "save_total_limit": "keep",
    **dict.fromkeys(("metric_for_best_model", "best_metric"), "metric"),
    "greater_is_better": "direction",
    **dict.fromkeys(("early_stopping_patience", "early_stopping"), "patience"),
    "random_seed": "seed",
    **dict.fromkeys(("precision", "torch_dtype", "bf16", "mixed_precision"), "dtype"),
    "activation_checkpointing": "gradient_checkpointing",
    "torch_compile": "compile",
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel", "liger", "fused_kernels", "use_triton", "triton"), "kernels"
    ),
    **dict.fromkeys(("recompute_granularity", "selective_checkpointing", "save_activations"), "memory.keep"),
    **dict.fromkeys(
        ("activation_offloading", "offload_activations", "enable_activation_offloading"), "memory.offload"
    ),
    **dict.fromkeys(("tiled_mlp", "mlp_tile", "tile_size"), "memory.tile"),
    **dict.fromkeys(("gpu_memory", "max_memory", "gpu_memory_limit"), "memory.budget"),
    **dict.fromkeys(("pinned_memory", "cpu_memory", "host_memory"), "memory.host"),
    **dict.fromkeys(
        (
            "load_in_4bit",
            "load_in_8bit",
            "fp8",
            "nf4",
            "quantization",
            "quantization_bit",
            "base_quantization",
        ),
        "base_dtype",
    ),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel", "dp_size", "ddp", "num_processes", "nproc_per_node"),
        "parallel.dp",
    ),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_parallel", "tp_size", "tensor_model_parallel_size"), "parallel.tp"
    ),
    **dict.fromkeys(
        ("sequence_parallel_size", "sequence_parallel", "sp_size", "context_parallel_size", "cp_size"),
        "parallel.sp",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "pipeline_parallel", "pp_size", "pipeline_model_parallel_size"),
        "parallel.pp",
    ),
    **dict.fromkeys(("fsdp", "fsdp2", "zero3", "hybrid_shard"), "parallel.dp.shard"),
    **dict.fromkeys(("micro_batches", "num_microbatches", "chunks"), "parallel.pp.microbatches"),
    "parallelism": "parallel",
    "cpu_offload": "parallel.dp.offload",
    "wd": "weight_decay",
    **dict.fromkeys(("adapter_name_or_path", "adapter_path", "lora_weights"), "init_adapter"),
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    **dict.fromkeys(("resume_from_checkpoint", "resume"), "to resume:  petune train RECIPE --resume"),
    **dict.fromkeys(
        ("overwrite_output_dir", "overwrite"), "to start afresh:  petune train RECIPE --overwrite"
    ),
    "fp16": "not supported: use dtype: bf16 or dtype: fp32",
    **dict.fromkeys(("optim", "optimizer"), "the optimizer is AdamW (weight_decay, beta1, beta2)"),
    "trust_remote_code": "not supported: petune runs no code from a model folder",
    **dict.fromkeys(("logging_steps", "log_every"), "every step is written to metrics.jsonl"),
    "include": "not supported: a recipe is one file; use key=value overrides for what varies",
}

_VALUE_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("classification", "sequence-classification", "text-classification"), "classify"),
    **dict.fromkeys(("ner", "token-classification", "token_classification", "tagging", "pos"), "tokens"),
    **dict.fromkeys(("masked-lm", "masked_lm", "fill-mask", "mlm-pretraining"), "mlm"),
    **dict.fromkeys(("summarization", "translation", "text2text", "seq2seq-lm"), "seq2seq"),
    **dict.fromkeys(("clm", "causal-lm", "causal_lm", "lm", "pretrain", "text-generation"), "causal"),
    **dict.fromkeys(("sft", "instruct", "conversation"), "chat"),
    **dict.fromkeys(("bfloat16", "float16", "fp16", "half"), "bf16"),
    **dict.fromkeys(("float32", "float", "fp64"), "fp32"),
    **dict.fromkeys(("gpu", "cuda:0"), "cuda"),
    **dict.fromkeys(("qlora", "peft"), "lora"),
    **dict.fromkeys(("houlsby", "bottleneck"), "adapter"),
    **dict.fromkeys(("lst", "ladder"), "side"),
    **dict.fromkeys(("linear-probe", "linear_probe", "linear-probing", "probe", "frozen"), "head"),
    **dict.fromkeys(("finetune", "full-finetuning", "none"), "full"),
    **dict.fromkeys(("minimize", "lower"), "min"),
    **dict.fromkeys(("maximize", "higher"), "max"),
    **dict.fromkeys(("ddp", "fsdp", "data"), "dp"),
    **dict.fromkeys(("tensor", "megatron"), "tp"),
    **dict.fromkeys(("cp", "context", "ulysses", "ring"), "sp"),
    **dict.fromkeys(("pipe", "pipeline", "gpipe"), "pp"),
    **dict.fromkeys(("zb", "zbv", "zero_bubble", "interleavedzerobubble"), "zero-bubble"),
    "interleaved1f1b": "interleaved",
    "tokens": "sequence",
    "attn": "attention",
    **dict.fromkeys(("replicate", "replicated", "full"), "whole"),
    **dict.fromkeys(("eager", "disabled"), "off"),
    **dict.fromkeys(("torch", "pytorch"), "reference"),
    **dict.fromkeys(("liger", "fused"), "triton"),
    **dict.fromkeys(("checkpoint", "checkpointing", "recompute", "minimal"), "input"),
    **dict.fromkeys(("float8", "e4m3"), "fp8"),
    **dict.fromkeys(("4bit", "int4", "fp4", "bnb"), "nf4"),
    "8bit": "int8",
}

_ALL = "   (all settings: petune check --full)"


@functools.cache
def _settings() -> dict[str, dict[str, tuple[str, ...]]]:
    """Setting name -> key path -> the methods it belongs to (none: it is no method's)."""
    table: dict[str, dict[str, tuple[str, ...]]] = {key: {key: ()} for key in Recipe.model_fields}
    sections: dict[str, type] = {"data": DataConfig, MEMORY: MemoryConfig, **OF_TASKS}
    for section, config in sections.items():
        for entry in dataclasses.fields(config):
            table.setdefault(entry.name, {})[f"{section}.{entry.name}"] = ()
    for name, method in METHODS.items():
        for entry in dataclasses.fields(method.config):
            paths = table.setdefault(entry.name, {})
            paths[f"method.{entry.name}"] = (*paths.get(f"method.{entry.name}", ()), name)
    for name, path in _axis_settings().items():
        table.setdefault(name, {})[path] = ()
    return table


@functools.cache
def _axis_settings() -> dict[str, str]:
    """Setting of an axis -> its key path, for a setting of several axes that of the first that reads it."""
    own = {"attention": "cut", "mlp": "cut", "connection": "cut", "sequence": "sp", "exchange": "sp"}
    table: dict[str, str] = {name: f"{PARALLEL}.{name}" for name in BACKENDS}
    for backend, config in BACKENDS.items():
        for entry in dataclasses.fields(config):
            table.setdefault(entry.name, f"{PARALLEL}.{own.get(entry.name, backend)}.{entry.name}")
    return table


def suggest(path: KeyPath, method_name: str | None) -> str:
    """What an unknown key was probably meant to be."""
    leaf = path[-1][:64].lower().lstrip("-").replace("-", "_").replace(" ", "_")
    if "." in leaf and leaf.split(".")[0] in (*SECTIONS, PARALLEL, *BACKENDS):
        outer, *inner = leaf.split(".")
        return (
            f"in a file, nest it:  {outer}: {{{': {'.join(inner)}: ...{'}' * len(inner)}; dots are for the"
            " command line"
        )
    if path[0] == PARALLEL and len(path) > 1:
        return _suggest_of_axis(path, leaf)
    if leaf in ALIASES:
        target = ALIASES[leaf]
        return target if " " in target else _did_you_mean([target], method_name)
    table = _settings()
    prefix = f"{path[0]}." if len(path) > 1 else ""
    if leaf in table:
        return _did_you_mean(
            [name for name in table[leaf] if name != ".".join(path)] or list(table[leaf]), method_name
        )
    here = [
        key
        for key, paths in table.items()
        for full, methods in paths.items()
        if _belongs(full, methods, prefix, method_name)
    ]
    near = [f"{prefix}{key}" for key in nearest(leaf, here)]
    if not near:
        near = [
            _best_path(table[key], method_name) for key in nearest(leaf, [*table, *ALIASES]) if key in table
        ]
        near = near or [ALIASES[key] for key in nearest(leaf, ALIASES) if " " not in ALIASES[key]]
        classic = nearest(leaf, CLASSIC, 1)
        near = classic if classic == nearest(leaf, [*table, *ALIASES, *CLASSIC], 1) else near
    return _did_you_mean(near[:2], method_name) if near else _ALL.strip().strip("()")


def setting_of(option: str) -> str | None:
    """The key path that a command-line option stands for (`--learning-rate`: lr); None for what is no
    setting."""
    key = option.lstrip("-").replace("-", "_")
    known = {path for paths in _settings().values() for path in paths}
    meant = key if key in known else ALIASES.get(key) or next(iter(_settings().get(key, ())), None)
    return None if meant is None or " " in meant else meant


def _suggest_of_axis(path: KeyPath, leaf: str) -> str:
    """What an unknown backend, or an unknown setting of one, was meant to be."""
    own = (
        {entry.name: f"{PARALLEL}.{path[1]}.{entry.name}" for entry in dataclasses.fields(BACKENDS[path[1]])}
        if len(path) > 2
        else {}
    )
    near = nearest(leaf, own, 1) if own else [one] if (one := meant_value(leaf, tuple(BACKENDS))) else []
    known = {
        **_axis_settings(),
        **CLASSIC,
        **{key: to for key, to in ALIASES.items() if to.startswith(PARALLEL + ".")},
    }
    if leaf in known and not (leaf in BACKENDS and not own):
        setting = known[leaf].rpartition(".")[2]
        return _did_you_mean([own.get(setting, known[leaf])], None)
    if near:
        return _did_you_mean([own[near[0]] if own else f"{PARALLEL}.{near[0]}"], None)
    meant = [known[one] for one in nearest(leaf, known, 1)]
    return _did_you_mean(meant, None) if meant else _ALL.strip().strip("()")


def _belongs(full: str, methods: tuple[str, ...], prefix: str, method_name: str | None) -> bool:
    return full.rpartition(".")[0] == prefix.rstrip(".") and (not methods or method_name in methods)


def _best_path(paths: Mapping[str, tuple[str, ...]], method_name: str | None) -> str:
    return next(
        (full for full, methods in paths.items() if not methods or method_name in methods), next(iter(paths))
    )


def _did_you_mean(paths: Sequence[str], method_name: str | None) -> str:
    methods = _settings().get(paths[0].rpartition(".")[2], {}).get(paths[0], ())
    if methods and method_name not in methods:
        only = f"this recipe's method is {method_name}" if method_name else "the recipe names no method"
        every = " and ".join(", ".join(part) for part in (methods[:-1], methods[-1:]) if part)
        return f"{paths[0]} is a setting of {every}; {only}"
    return f"did you mean: {' or '.join(dict.fromkeys(paths))}{_ALL}"


def meant_value(text: str, choices: Sequence[str]) -> str | None:
    """The one of `choices` a wrong text was probably meant to be."""
    alias = _VALUE_ALIASES.get(text.lower())
    near = [alias] if alias in choices else nearest(text[:64].lower(), choices, 1)
    return near[0] if near else None
