"""Patterns of files: the answer of Python's own matcher, in bounded work, or a refusal with the exit code of
the file."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from petune.errors import FileError, PetuneError, UsageError
from petune.files.patterns import MOST_STEPS, Pattern, Refused, _Program, compile_pattern, parser
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


def drawn(draw: random.Random, depth: int = 3) -> str:
    """A pattern over a and b: characters, classes, anchors, groups, alternatives, repetitions, looks
    around."""
    kind = draw.choice(("one", "one", "many", "way", "row", "look", "at") if depth else ("one",))
    if kind == "one":
        return draw.choice(("a", "b", ".", "[ab]", "[^a]", r"\w", r"\d", "[0-9b]"))
    if kind == "at":
        return draw.choice((r"\b", r"\B", "^", "$", r"\Z"))
    inner = drawn(draw, depth - 1)
    if kind == "many":
        return f"({inner})" + draw.choice(("*", "+", "?", "{2}", "{1,3}", "*?", "+?", "??", "{,2}?"))
    if kind == "look":
        return draw.choice((f"(?={inner})", f"(?!{inner})", "(?<=a)", "(?<!b)"))
    other = drawn(draw, depth - 1)
    return f"(?:{inner}|{other})" if kind == "way" else inner + other


def test_the_bounded_matcher_gives_the_answers_of_pythons_own():
    draw, texts, different = random.Random(0), ["a", "b", "ab", "ba", "aab", "abab", "b3", "a.b", "aabba"], 0
    for _ in range(1500):
        pattern = drawn(draw)
        program = _Program(parser.parse(pattern))
        for text in texts:
            assert (program.run(text, whole=True) is not None) == (re.fullmatch(pattern, text) is not None), (
                pattern,
                text,
            )
            # groups matched twice or looked at differ
            if not any(part in pattern for part in ("*", "+", "{", "(?=")):
                found, expected = program.run(text, whole=False), re.match(pattern, text)
                assert found == (expected and expected.groups()), (pattern, text)
                different += found is not None
    assert different > 1000


@pytest.mark.parametrize("pattern", EVIL)
def test_a_pattern_that_python_never_ends_with_is_answered_in_bounded_steps(pattern: str):
    """Every name within MOST_STEPS, or refused; 10,000 names take seconds, where Python would take years."""
    began = time.monotonic()
    compiled = compile_pattern(pattern, FileError)
    assert compiled.quick is None
    for name in NAMES[::50]:
        try:
            assert not compiled.fullmatch(name)
        except FileError as error:
            assert "takes more than" in str(error)
        assert compiled.program is not None and MOST_STEPS >= compiled.program.left >= -1
    assert time.monotonic() - began < 30


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
        assert _Program(parser.parse(pattern)).run(text, whole=False) == (found and found.groups())


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "not a regular expression"),
        ("(a)\\1", "bounded work"),
        ("(?>a*)", "bounded work"),
        ("(?i)a", "flags"),
        ("(?i:a)b", "flags"),
        ("a" * 10_001, "longer than 10,000"),
        ("(a*){4000000000}", "too large"),
        ("(){4000000000}", "too large"),
        ("a{99999999999}", "too large"),
        ("(" * 4000 + ")" * 4000, "nested too deeply"),
    ],
)
def test_what_is_refused_is_named_at_once(pattern: str, says: str):
    for kind in (FileError, UsageError):
        with pytest.raises(kind, match=says) as caught:
            compile_pattern(pattern, kind, "place")
        assert str(caught.value).startswith("place  ") and "list of names" in str(caught.value)


def test_steps_run_out_with_the_name_that_took_them():
    program = _Program(parser.parse("(" + "a?" * 60 + ")*!"))
    with pytest.raises(Refused, match="steps"):
        program.run("a" * 400, whole=True)
    with pytest.raises(FileError, match="steps, at 'aaa"):
        compile_pattern("(" + "a?" * 60 + ")*!", FileError).fullmatch("a" * 400)


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
