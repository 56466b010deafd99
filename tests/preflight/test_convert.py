"""Other programs' configurations, shaped as their documentation shapes them, become recipes that check; no
key of them is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from petune.errors import FileError, UsageError
from petune.preflight.convert import convert, flat, recipe_text
from petune.preflight.foreign import PROGRAMS
from petune.preflight.inputs import check_inputs
from petune.recipe import load_recipe

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
model_type: LlamaForCausalLM
tokenizer_type: AutoTokenizer
load_in_8bit: true
load_in_4bit: false
strict: false
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
  - path: second/set
    type: alpaca
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
output_dir: ./outputs/lora-out
adapter: lora
lora_model_dir:
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
lora_r: 16
lora_alpha: 32
lora_dropout: 0.05
lora_target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
wandb_project:
gradient_accumulation_steps: 2
micro_batch_size: 2
num_epochs: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
bf16: auto
tf32: false
gradient_checkpointing: true
logging_steps: 1
flash_attention: true
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|end_of_text|>
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
trust_remote_code: true
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: org/identity
template: llama3
cutoff_len: 2048
max_samples: 1000
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/llama3-8b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
ddp_timeout: 180000000
val_size: 0.1
per_device_eval_batch_size: 1
eval_strategy: steps
eval_steps: 500
use_dora: true
"""
TORCHTUNE = """
output_dir: /tmp/torchtune/llama3_1_8B/lora_single_device
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  apply_lora_to_output: False
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: /tmp/Meta-Llama-3.1-8B-Instruct/original/tokenizer.model
  max_seq_len: null
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: meta-llama/Meta-Llama-3.1-8B-Instruct
  checkpoint_files: [model-00001-of-00004.safetensors]
  recipe_checkpoint: null
  output_dir: ${output_dir}
  model_type: LLAMA3
resume_from_checkpoint: False
save_adapter_weights_only: False
dataset:
  _component_: torchtune.datasets.alpaca_cleaned_dataset
  packed: False
seed: null
shuffle: True
batch_size: 2
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.LinearCrossEntropyLoss
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
compile: False
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
log_every_n_steps: 1
device: cuda
dtype: bf16
enable_activation_checkpointing: True
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
learning_rate: 2.0e-4
num_train_epochs: 1
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
gradient_checkpointing: true
eos_token: <|im_end|>
eval_strategy: steps
eval_steps: 100
use_peft: true
lora_r: 32
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
warmup_steps: 10
save_total_limit: 1
lr_scheduler_type: cosine_with_restarts
report_to: [tensorboard]
output_dir: Qwen2-0.5B-SFT
"""
PEFT = {
    "alpha_pattern": {"v_proj": 4},
    "base_model_name_or_path": "org/model",
    "bias": "lora_only",
    "init_lora_weights": "pissa",
    "layers_to_transform": [0, 1],
    "lora_alpha": 32,
    "lora_dropout": 0.1,
    "loftq_config": {},
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 4,
    "rank_pattern": {},
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": {"embed_tokens": [1]},
    "use_dora": False,
    "use_rslora": True,
}
FILES = {
    "axolotl": AXOLOTL,
    "llamafactory": LLAMA_FACTORY,
    "torchtune": TORCHTUNE,
    "trl": TRL,
    "peft": json.dumps(PEFT),
}
MORE = {"peft": ("data=org/rows",)}
# what each becomes: key paths of the recipe
MEANT: dict[str, dict[str, Any]] = {
    "axolotl": {
        "model": "NousResearch/Llama-3.2-1B",
        "data.path": "teknium/GPT4-LLM-Cleaned",
        "data.format": "alpaca",
        "data.split": 0.05,
        "data.max_length": 4096,
        "data.packing": True,
        "method.name": "lora",
        "method.r": 16,
        "method.alpha": 32,
        "method.dropout": 0.05,
        "method.targets": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
        "lr": 2e-4,
        "epochs": 4,
        "batch_size": 2,
        "accumulate": 2,
        "schedule": "cosine",
        "warmup": 0.1,
        "gradient_checkpointing": True,
        "out": "./outputs/lora-out",
    },
    "llamafactory": {
        "method.name": "dora",
        "method.r": 8,
        "method.targets": "all-linear",
        "data.path": "org/identity",
        "data.max_rows": 1000,
        "data.split": 0.1,
        "lr": 1e-4,
        "accumulate": 8,
        "eval_every": 500,
        "save_every": 500,
        "dtype": "bf16",
        "seed": 42,
    },
    "torchtune": {
        "model": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "data.path": "yahma/alpaca-cleaned",
        "method.targets": ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "method.alpha": 16,
        "lr": 3e-4,
        "warmup": 100,
        "schedule": "cosine",
        "weight_decay": 0.01,
        "clip": None,
        "device": "cuda",
    },
    "trl": {
        "data.path": "trl-lib/Capybara",
        "data.packing": True,
        "method.r": 32,
        "method.alpha": 16,
        "method.dropout": 0.05,
        "epochs": 1,
        "warmup": 10,
        "trackers": ["tensorboard"],
        "schedule": "linear",
        "keep": 2,
    },
    "peft": {
        "method.r": 4,
        "method.rslora": True,
        "method.init": "pissa",
        "method.bias": "lora",
        "method.alpha_pattern": {"v_proj": 4},
        "method.layers": [0, 1],
    },
}
LEFT = {
    "axolotl": {
        *("model_type", "tokenizer_type", "load_in_8bit", "datasets.1.path", "datasets.1.type"),
        *("dataset_prepared_path", "pad_to_sequence_len", "optimizer", "flash_attention", "evals_per_epoch"),
        "special_tokens",
    },
    "llamafactory": {
        *("trust_remote_code", "template", "preprocessing_num_workers", "logging_steps", "ddp_timeout"),
        "overwrite_output_dir",
    },
    "torchtune": {
        *(
            "tokenizer._component_",
            "tokenizer.path",
            "checkpointer.checkpoint_files",
            "checkpointer.output_dir",
        ),
        *(
            "checkpointer.model_type",
            "save_adapter_weights_only",
            "metric_logger.log_dir",
            "profiler._component_",
        ),
    },
    "trl": {"eos_token", "save_total_limit", "lr_scheduler_type"},
    "peft": {"trainable_token_indices"},
}


@pytest.fixture(params=FILES)
def program(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yml").write_text(FILES[request.param])
    return str(request.param)


def test_a_file_becomes_a_recipe_that_checks(program: str) -> None:
    converted = convert(Path("config.yml"), MORE.get(program, ()))
    assert converted.program is PROGRAMS[program]
    Path("recipe.yaml").write_text(recipe_text(converted, Path("config.yml"), Path("recipe.yaml")))
    recipe = load_recipe(Path("recipe.yaml"))
    assert check_inputs(recipe).distant
    values = recipe.resolved()
    for path, wanted in MEANT[program].items():
        top, _, inner = path.partition(".")
        assert (values[top][inner] if inner else values[top]) == wanted, path


def test_every_key_is_meant_or_listed(program: str) -> None:
    converted = convert(Path("config.yml"), MORE.get(program, ()))
    left = {one.key for one in converted.left}
    assert left == LEFT[program]
    assert all(one.why for one in converted.left)
    table = PROGRAMS[program].table
    leaves = dict(flat(yaml.safe_load(FILES[program]), table))
    assert all(key in left or table[key](value) is not None for key, value in leaves.items())
    text = recipe_text(converted, Path("config.yml"), Path("recipe.yaml"))
    assert all(f"#   {key}: " in text for key in left)


def test_what_a_program_takes_by_default_is_written_and_marked(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(
        "base_model: org/m\nadapter: lora\ndatasets: [{path: org/d, type: alpaca}]\n"
    )
    text = recipe_text(convert(tmp_path / "a.yml"), Path("a.yml"), Path("recipe.yaml"))
    assert "schedule: cosine                        # axolotl's default" in text
    assert "batch_size: 1 " in text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("base_model: org/m\nadapter: lora\nwarmup_ratio: 0\n", {"warmup": 0.0}),
        (
            "root: org\ndir: ${root}/models\ncheckpointer: {checkpoint_dir: '${dir}/m'}\n"
            "model: {_component_: a.lora_llama3_8b, lora_rank: 64}\n",
            {"model": "org/models/m", "method.alpha": 16},
        ),
        ("model_name_or_path: org/m\nuse_peft: true\nloss_type: sigmoid\n", {"lr": 1e-6}),
    ],
)
def test_a_program_s_own_value_is_taken_and_not_petune_s(
    text: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.yml").write_text(text)
    values = convert(tmp_path / "a.yml", ["data=rows.csv"]).recipe.resolved()
    for path, value in wanted.items():
        top, _, inner = path.partition(".")
        assert (values[top][inner] if inner else values[top]) == value


def test_other_rows_leave_what_a_file_says_of_lengths(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(
        "base_model: org/m\nsequence_len: 256\nsample_packing: true\n"
        "datasets: [{path: org/x, type: alpaca}]\n"
    )
    data = convert(tmp_path / "a.yml", ["data=rows.csv"], "axolotl").recipe.resolved()["data"]
    assert (data["path"], data["max_length"], data["packing"]) == ("rows.csv", 256, True)
    assert data["format"] == "auto", "of the rows that are not read any more"


def test_a_regex_of_what_to_leave_out_is_listed(tmp_path: Path) -> None:
    fields = PEFT | {"exclude_modules": "(q|v){1,2}_proj"}
    (tmp_path / "a.json").write_text(json.dumps(fields))
    converted = convert(tmp_path / "a.json", ["data=rows.csv"])
    assert "exclude_modules" in {one.key for one in converted.left}


def test_settings_of_lora_beside_full_tuning_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(TRL.replace("use_peft: true", "use_peft: false"))
    converted = convert(tmp_path / "a.yml")
    assert converted.recipe.method_name == "full"
    assert {"lora_r", "lora_alpha", "lora_target_modules"} <= {one.key for one in converted.left}


QLORA = {
    "axolotl": AXOLOTL.replace("adapter: lora", "adapter: qlora").replace("4bit: false", "4bit: true"),
    "llamafactory": LLAMA_FACTORY.replace("use_dora: true", "quantization_bit: 4"),
    "torchtune": TORCHTUNE.replace(".lora_llama", ".qlora_llama"),
    "trl": TRL + "load_in_4bit: true\n",
}


@pytest.mark.parametrize("program", QLORA)
def test_qlora_is_lora_over_a_base_in_four_bits(program: str, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(QLORA[program])
    converted = convert(tmp_path / "a.yml")
    assert (converted.recipe.method_name, converted.recipe.base_dtype) == ("lora", "nf4")


PREFERENCES = {
    "axolotl": (AXOLOTL + "rl: ipo\nrl_beta: 0.2\n", ("data.packing=false",), ("ipo", 0.2)),
    "llamafactory, dpo": (
        LLAMA_FACTORY.replace("sft", "dpo") + "pref_loss: sigmoid\npref_beta: 0.3\n",
        (),
        ("dpo", 0.3),
    ),
    "llamafactory, kto": (
        LLAMA_FACTORY.replace("sft", "kto") + "kto_chosen_weight: 1.5\n",
        ("batch_size=2",),
        ("kto", 0.1),
    ),
    "trl": (TRL + "loss_type: sigmoid\nbeta: 0.4\n", ("data.packing=false",), ("dpo", 0.4)),
}


@pytest.mark.parametrize("program", PREFERENCES)
def test_what_learns_from_preferences_there_does_so_here(program: str, tmp_path: Path) -> None:
    text, more, (loss, beta) = PREFERENCES[program]
    (tmp_path / "a.yml").write_text(text)
    converted = convert(tmp_path / "a.yml", more)
    (tmp_path / "recipe.yaml").write_text(
        recipe_text(converted, tmp_path / "a.yml", tmp_path / "recipe.yaml")
    )
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.task, recipe.prefer.loss, recipe.prefer.beta) == ("prefer", loss, beta)
    assert recipe.prefer.desirable_weight == (1.5 if loss == "kto" else 1.0)
    assert not any("weight" in one.key or "beta" in one.key for one in converted.left)


def test_a_setting_of_preferences_alone_makes_no_task_of_them(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(TRL + "loss_type: dapo\nbeta: 0.04\n")  # as of GRPO
    converted = convert(tmp_path / "a.yml")
    assert converted.recipe.task is None
    assert {"loss_type", "beta"} <= {one.key for one in converted.left}


def test_two_keys_for_one_setting_are_said(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text("warmup_ratio: 0.5" + TRL)
    left = {one.key: one.why for one in convert(tmp_path / "a.yml").left}
    assert left["warmup_ratio"] == "warmup is said by warmup_steps already"


def test_a_constant_schedule_warms_nothing_up_whatever_else_says(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(
        TRL.replace("cosine_with_restarts", "constant")
    )  # behind warmup_steps: 10
    converted = convert(tmp_path / "a.yml")
    assert (converted.recipe.schedule, converted.recipe.warmup) == ("constant", 0)
    assert {one.key: one.why for one in converted.left}["warmup_steps"] == (
        "warmup is said by lr_scheduler_type already"
    )


CHATS = """
base_model: org/m
micro_batch_size: 2
chat_template: tokenizer_default
neftune_noise_alpha: 5
val_set_size: 500
gradient_checkpointing_kwargs: {use_reentrant: false}
datasets:
  - path: org/d
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [gpt]
    train_on_eos: turn
"""


def test_which_turns_are_trained_is_translated_or_its_difference_said(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(CHATS)
    converted = convert(tmp_path / "a.yml")
    recipe, left = converted.recipe, {one.key: one.why for one in converted.left}
    assert (recipe.task, recipe.data.format, recipe.data.columns) == (
        *("chat", "sharegpt"),
        {"messages": "conversations"},
    )
    assert left == {
        "neftune_noise_alpha": "embeddings get no noise",
        "val_set_size": "some rows are always held out, a share of them: data.split",
    }
    others = CHATS.replace("[gpt]", "[gpt, user]").replace("eos: turn", "eos: last")
    (tmp_path / "a.yml").write_text(others.replace("role: from", "role: who") + "wandb_project: mine\n")
    left = {one.key.rpartition(".")[2]: one.why for one in convert(tmp_path / "a.yml").left}
    assert left["roles_to_train"] == "the assistant's turns are trained, of no other role"
    assert left["train_on_eos"] == "what ends a trained turn is trained, no other end"
    assert left["message_property_mappings"] == "no counterpart for this value"
    assert left["wandb_project"] == "trackers: [wandb] logs to the project petune"


def test_other_programs_words_for_chats_and_packing_are_known(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    file.write_text(LLAMA_FACTORY + "neat_packing: true\nflash_attn: fa2\n")
    converted = convert(file)
    assert converted.recipe.data.packing and "neat_packing" not in {one.key for one in converted.left}
    assert "fastest way" in {one.key: one.why for one in converted.left}["flash_attn"]
    style = "chat_dataset\n  source: org/d\n  conversation_column: talk\n  conversation_style: sharegpt"
    file.write_text(TORCHTUNE.replace("alpaca_cleaned_dataset", style))
    data = convert(file).recipe.data
    assert (data.format, data.columns) == ("sharegpt", {"messages": "talk"})


def test_a_name_in_dataset_info_is_its_file_and_another_is_asked_for(tmp_path: Path) -> None:
    file, info = tmp_path / "a.yml", tmp_path / "sets" / "dataset_info.json"
    file.write_text(LLAMA_FACTORY.replace("org/identity", "identity\ndataset_dir: sets"))
    with pytest.raises(UsageError, match=r"data=rows.csv"):
        convert(file)
    assert "dataset_info" in {one.key: one.why for one in convert(file, ["data=a.csv"]).left}["dataset"]
    info.parent.mkdir()
    columns = {"messages": "talk", "tools": "known"}
    entry = {"file_name": "sub/identity.json", "formatting": "sharegpt", "columns": columns}
    info.write_text(json.dumps({"identity": entry}))
    converted = convert(file)
    data = converted.recipe.data
    assert (data.path, data.format) == (str(info.parent / "sub" / "identity.json"), "sharegpt")
    assert data.columns == {"messages": "talk"}
    assert "dataset.columns.tools" in {one.key for one in converted.left}


@pytest.mark.parametrize(
    "text", ["lora_r: 8\nadapter: lora\nlora_r: 16\n", '{"a": {"lora_r": 8, "lora_r": 16}}']
)
def test_a_key_that_is_set_twice_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(text)
    with pytest.raises(FileError, match=r"lora_r is set on line 1 and again on line [13]"):
        convert(tmp_path / "a.yml")


def test_settings_are_laid_over_what_was_read(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(AXOLOTL)
    converted = convert(tmp_path / "a.yml", ("lr=1e-3", "method.r=4"))
    assert (converted.recipe.lr, converted.recipe.resolved()["method"]["r"]) == (1e-3, 4)


def test_files_of_no_use_are_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "a.yml"
    for text, error, words in (
        ("a: [", FileError, "cannot be read"),
        ("a: " + "[" * 3000 + "]" * 3000, FileError, "cannot be read"),
        ("- 1", FileError, "no settings"),
        ("base_model: &a {b: *a}", FileError, "cannot be read"),
        ("base_model: org/m\nlora_r: " + "9" * 400, UsageError, "no data"),
        ("lr: 1", UsageError, "no program known"),
        (json.dumps(PEFT), UsageError, r"no data\.path|no data"),
        ("base_model: org/m", UsageError, "petune convert .* data=rows.csv"),
    ):
        file.write_text(text)
        with pytest.raises(error, match=words):
            convert(file)
    with pytest.raises(FileError, match="cannot be read"):
        convert(tmp_path / "nowhere.yml")


def test_a_file_that_is_not_there_is_no_fault_of_its_yaml(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"nix.yml  cannot be read: No such file or directory"):
        convert(tmp_path / "nix.yml", ())
