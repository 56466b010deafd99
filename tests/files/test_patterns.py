"""Patterns of files: the answer of Python's own matcher, in bounded time, or a refusal with the exit code of
the file."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

import pytest

from petune.errors import FileError, PetuneError, UsageError
from petune.files.patterns import MOST_S, Pattern, compile_pattern
from petune.recipe import load_recipe
from petune.saving.peft import check_config

NAMES = [
    f"model.layers.{at}.{name}"
    for at in range(1250)
    for name in ("q_proj", "mlp.up_proj", "norm", "self_attn.v_proj") * 2
]
EVIL = [
    r"(([a-z0-9_.])+)+X",
    r"(a|a|[a-z.]|model)+X",
    r"(.*)*X",
    r".*.*.*.*.*.*.*.*X",
    "(l?){60}l{60}",
    "(a|a)" * 40 + "X",
    r"(?:(?=(.*.*)+X)|.)*!",
    r"((x+x+)+y|.*)*(?<!z)!",
]
THEIRS = {  # as adapters of today say what they tune
    r"(?:.*?(?:language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|v_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\."
    r"(?:(?:q_proj|v_proj|up_proj)))": "model.layers.3.mlp.up_proj",
    r"^(?!.*(?:vision|lm_head)).*(?:q_proj|v_proj)$": "language.layers.0.q_proj",
    r"^(language_model|model)(?!.*(lm_head|emb|wte)).*": "model.layers.0.mlp",
    r".*decoder.*(SelfAttention|EncDecAttention).*(q|v)$": "decoder.block.0.layer.0.SelfAttention.q",
    r"model\.layers\.(\d+)\..*(?<!gate)_proj": "model.layers.12.mlp.up_proj",
}


@pytest.mark.parametrize("pattern", EVIL)
def test_a_pattern_that_python_never_ends_with_is_answered_in_bounded_time(pattern: str):
    """Each name within MOST_S of the processor, or refused, where Python would take years."""
    compiled = compile_pattern(pattern, FileError)
    for name in (*NAMES[::500], "a" * 400, "l" * 100):
        began = time.process_time()
        with suppress(FileError):
            assert compiled.fullmatch(name) == (pattern == EVIL[4] and set(name) == {"l"})
        assert time.process_time() - began < 2 * MOST_S


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.long)])
def test_ten_thousand_names_are_matched_by_whatever_is_accepted(step: int):
    began = time.monotonic()
    for pattern in (EVIL[0], next(iter(THEIRS))):
        compiled = compile_pattern(pattern, FileError)
        assert sum(compiled.fullmatch(name) for name in NAMES[::step]) in range(len(NAMES) + 1)
    assert time.monotonic() - began < 60 / step  # about 1.5 s for each of the slow ones


@pytest.mark.parametrize("pattern", THEIRS)
def test_what_adapters_of_today_say_is_accepted(pattern: str):
    assert compile_pattern(pattern, FileError).fullmatch(THEIRS[pattern])
    assert not compile_pattern(pattern, FileError).fullmatch("lm_head")


def test_groups_are_pythons():
    for text in ("model.layers.12.q_proj", "layers.3.x", "x.y"):
        pattern = r"(?:^|.*?\.)layers\.(\d+)\."
        assert Pattern(pattern, FileError, None).match(text) == (
            (found := re.match(pattern, text)) and found.groups()
        )


@pytest.mark.filterwarnings("ignore:Possible nested set")
@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "not a regular expression"),
        ("(?i)a", "flags"),
        ("(?i:a)b", "flags"),
        ("a" * 10_001, "longer than 10,000"),
        ("(a*){4000000000}", "too large"),
        ("(){4000000000}", "too large"),
        ("((((a{1000}){1000}){1000}){1000})", "too large"),
        ("a{99999999999}", "too large"),
        ("(" * 4000 + ")" * 4000, "nested too deeply"),
        # by `regex` any letter, and a name with one letter changed
        ("[[:alpha:]]q", "within a set"),
        ("model.(?:q_proj){e<=1}", "{ as a sign"),
    ],
)
def test_what_is_refused_is_named_at_once(pattern: str, says: str):
    for kind in (FileError, UsageError):
        with pytest.raises(kind, match=says) as caught:
            compile_pattern(pattern, kind, "place")
        assert str(caught.value).startswith("place  ") and "list of names" in str(caught.value)


def test_time_runs_out_with_the_name_that_took_it():
    with pytest.raises(FileError, match=r"takes more than 0\.1 s, at 'aaa"):
        compile_pattern("(a|a)" * 40 + "X", FileError).fullmatch("a" * 400)


def test_a_recipes_pattern_is_exit_2_and_an_adapters_exit_4(tmp_path: Path):
    bad = "(?i)((a)+)+"
    with pytest.raises(PetuneError, match=r"method\.targets") as caught:
        load_recipe(
            {
                "model": "demo:tiny-llama",
                "data": "demo:docstrings",
                "method": {"name": "lora", "targets": bad},
            }
        )
    assert caught.value.code == 2
    for field in (
        {"target_modules": bad},
        {"exclude_modules": bad},
        {"rank_pattern": {bad: 3}},
        {"alpha_pattern": {bad: 3}},
    ):
        config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q"], **field}
        with pytest.raises(FileError, match="flags") as refused:
            check_config(config, tmp_path / "adapter_config.json")
        assert refused.value.code == 4 and "adapter_config.json" in str(refused.value)
