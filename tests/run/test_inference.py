"""A tuned model is asked the way it was trained, alone, in numbers, or in a conversation that can turn to the
base and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from petune.errors import UsageError
from petune.methods import without_tuning
from petune.run.train import load_run
from petune.tasks import encode_prompt
from tests.small_runs import METHODS, WORDS, brief, run, settings, tokenizer, write_model

pytestmark = pytest.mark.usefixtures("no_picture")


def trained(place: Path, family: str = "llama", method: str = "lora", **changes: Any) -> Any:
    finished = run(settings(place, family, method, **{"max_steps": 3, "lr": 0.05, **changes}))
    return load_run(finished.folder)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What `trained` gives, read anew from a run that was trained when it was first asked for."""
    folder_of = cache(
        lambda *which: trained(tmp_path_factory.mktemp("shared"), *which[:2], **dict(which[2:])).folder
    )
    return lambda family="llama", method="lora", **changes: load_run(
        folder_of(family, method, *changes.items())
    )


@pytest.mark.parametrize(
    ("family", "method"), [("bart", "lora"), ("t5", "adapter"), ("llama", "side"), ("llama", "full")]
)
def test_generate_is_greedy_and_continues_the_prompt_as_it_was_trained(
    family: str, method: str, shared: Callable[..., Any]
):
    loaded = shared(family, method)
    answer = loaded.generate("red sun moon", max_new_tokens=5)
    assert isinstance(answer, str) and answer == loaded.generate("red sun moon", max_new_tokens=5)
    speaker = loaded.speaker
    ids = encode_prompt(
        "red sun moon", speaker.task.name, speaker.tokenizer, speaker.data, format=speaker.format
    )
    expected = speaker.model.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=5, do_sample=False, pad_token_id=0
    )[0]
    start = len(ids) if family == "llama" else 0
    assert answer == speaker.tokenizer.decode(expected[start:], skip_special_tokens=True).strip()
    assert len(answer.split()) <= 5
    assert not answer.startswith("red sun moon") or family != "llama"


def test_many_prompts_have_the_answers_of_each(shared: Callable[..., Any]):
    loaded = shared()
    prompts = ["red sun", "blue moon star sea"]
    assert loaded.generate_many(prompts, max_new_tokens=3) == [
        loaded.generate(prompt, max_new_tokens=3) for prompt in prompts
    ]


def test_options_of_sampling_sample_and_are_transformers_own(shared: Callable[..., Any]):
    loaded = shared()
    ids = torch.tensor(
        [
            encode_prompt(
                "red", "causal", loaded.speaker.tokenizer, loaded.speaker.data, format=loaded.speaker.format
            )
        ]
    )
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 5}, {"do_sample": True, "temperature": 5.0}),
        ({"top_k": 50, "temperature": 9.0}, {"do_sample": True, "top_k": 50, "temperature": 9.0}),
        ({"do_sample": True}, {"do_sample": True}),
        ({"num_beams": 3}, {"do_sample": False, "num_beams": 3}),
        ({"temperature": 0}, {"do_sample": False}),
    ]
    for said, meant in cases:
        torch.manual_seed(1)
        answer = loaded.generate("red", max_new_tokens=8, **said)
        torch.manual_seed(1)
        mask = torch.ones_like(ids)
        expected = loaded.speaker.model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=8, pad_token_id=0, **meant
        )[0]
        assert (
            answer
            == loaded.speaker.tokenizer.decode(expected[ids.shape[1] :], skip_special_tokens=True).strip()
        )
    torch.manual_seed(0)
    assert len({loaded.generate("red", temperature=5.0, max_new_tokens=8) for _ in range(5)}) > 1
    assert loaded.generate(["red", "sun"], max_new_tokens=3) == loaded.generate_many(
        ("red", "sun"), max_new_tokens=3
    )
    with pytest.raises(UsageError, match=r"transformers refuses[\s\S]*early_stopping"):
        loaded.generate("red", early_stopping=3)
    for wrong in (5, None, b"red", ["red", 5], [["red"]], {"text": "red"}):
        with pytest.raises(UsageError, match="a prompt is a text"):
            loaded.generate(wrong)
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        loaded.generate("")
    for wrong in ("red", 5, None):
        with pytest.raises(UsageError, match="takes a list of texts"):
            loaded.generate_many(wrong)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_classifier_answers_with_a_label_and_its_probability(family: str, shared: Callable[..., Any]):
    loaded = shared(family, task="classify")
    label, probability = loaded.speaker.classify("red sun moon")
    assert label in ("red", "green", "blue") and 1 / 3 <= probability <= 1
    assert loaded.generate("red sun moon") == label
    assert loaded.generate(["red sun moon", "blue"]) == [label, loaded.generate("blue")]
    with pytest.raises(UsageError, match="the prompt has no tokens"):
        loaded.generate("")
    for ask in (loaded.generate, loaded.chat):
        with pytest.raises(UsageError, match="no generation options"):
            ask(*["red sun moon"] * (ask == loaded.generate), max_new_tokens=5)
    for wrong in (5, None, [None]):
        with pytest.raises(UsageError, match="a prompt is a text"):
            loaded.generate(wrong)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_text_longer_than_the_model_is_cut_as_in_training(family: str, shared: Callable[..., Any]):
    """The tokenizer here knows no limit and the recipe sets none: the 64 positions of the model are what
    there is."""
    loaded = shared(family, task="classify")
    long = " ".join(["red"] * 30 + ["sun"] * 300)
    assert loaded.generate(long) in ("red", "green", "blue")


def test_a_long_text_is_cut_on_the_side_that_training_cut(tmp_path: Path):
    data = settings(tmp_path, "bert")["data"] | {"max_length": 8, "truncation": "left"}
    loaded = trained(tmp_path, "bert", data=data)
    end = "green hill tree cat dog fox runs sings"
    assert loaded.speaker.classify(f"red sun moon star sea {end}") == pytest.approx(
        loaded.speaker.classify(end)
    )


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_prompt_longer_than_the_model_is_refused_with_both_lengths(family: str, shared: Callable[..., Any]):
    loaded = shared(family)
    with pytest.raises(UsageError, match="positions") as caught:
        loaded.generate("sun " * 300)
    assert "at most 64" in str(caught.value) and "30" in str(caught.value)


def test_relative_positions_know_no_end(shared: Callable[..., Any]):
    assert isinstance(shared("t5").generate("sun " * 300, max_new_tokens=2), str)


@pytest.mark.forks
@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_turns_to_the_base_and_back(method: str, tmp_path: Path):
    loaded = trained(tmp_path, "llama", method, task="chat", lr=0.3, max_steps=6)
    chat = loaded.chat(max_new_tokens=6)
    (tuned,) = chat.ask("red sun moon")
    chat.reset()
    chat.use_base(True)
    (base,) = chat.ask("red sun moon")
    chat.reset()
    chat.use_base(False)
    (again,) = chat.ask("red sun moon")
    assert tuned == again != base
    from transformers import AutoModelForCausalLM

    untouched = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    ids = encode_prompt("red sun moon", "chat", loaded.speaker.tokenizer, loaded.speaker.data)
    expected = untouched.generate(
        input_ids=torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0
    )[0, len(ids) :]
    assert base == loaded.speaker.tokenizer.decode(expected, skip_special_tokens=True).strip()


@pytest.mark.forks
def test_a_conversation_remembers_its_turns_and_forgets_them_on_reset(
    shared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
):
    loaded = shared(task="chat")
    asked: list[Any] = []
    monkeypatch.setattr(
        type(loaded.speaker),
        "ask",
        lambda self, prompt, **options: asked.append(prompt) or f"answer {len(asked)}",
    )
    chat = loaded.chat()
    list(chat.ask("one"))
    list(chat.ask("two"))
    chat.reset()
    list(chat.ask("three"))
    said = [[(turn.role, turn.content) for turn in prompt] for prompt in asked]
    assert said == [
        [("user", "one")],
        [("user", "one"), ("assistant", "answer 1"), ("user", "two")],
        [("user", "three")],
    ]


@pytest.mark.forks
def test_a_turn_that_failed_is_not_remembered(shared: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    loaded = shared(task="chat")
    chat = loaded.chat()
    with pytest.raises(UsageError, match="a prompt is a text"):
        list(chat.ask(5))
    with pytest.raises(UsageError, match="did you mean: temperature"):
        loaded.chat(temprature=1.0)

    def fail(self: Any, prompt: Any, **options: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(loaded.speaker), "ask", fail)
        with pytest.raises(KeyboardInterrupt):
            list(chat.ask("one"))
    assert chat.turns == []


def test_tasks_other_than_chat_see_each_prompt_by_itself(shared: Callable[..., Any]):
    loaded = shared("bart")
    chat = loaded.chat(max_new_tokens=4)
    first = list(chat.ask("red sun moon"))
    list(chat.ask("blue sea"))
    assert list(chat.ask("red sun moon")) == first == [loaded.generate("red sun moon", max_new_tokens=4)]


@pytest.mark.parametrize("method", ["lora", "adapter", "side"])
def test_the_base_inside_a_wrapped_model_is_the_untouched_one(method: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "llama", "llama")
    loaded = trained(tmp_path, method=method)
    ids = torch.tensor([[1, *range(9, 9 + len(WORDS[:6]))]])
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    with torch.no_grad(), without_tuning(loaded.speaker.model) as model:
        assert torch.equal(model(input_ids=ids).logits, base(input_ids=ids).logits)
    with torch.no_grad():
        assert not torch.allclose(
            loaded.speaker.model(input_ids=ids).logits, base(input_ids=ids).logits, atol=1e-4
        )


def test_a_prompt_that_is_not_utf8_or_too_long_says_what_to_do(shared: Callable[..., Any]):
    loaded = shared("llama", "side")
    talk = loaded.chat()
    asked: list[Callable[[], Any]] = [
        lambda: loaded.generate("red \udcff sun"),
        lambda: loaded.generate(["red", "\udcff"]),
        lambda: list(talk.ask("\udcff")),
        lambda: shared("bert").generate("\ud800"),
    ]
    for ask in asked:
        with pytest.raises(UsageError, match=r"the prompt is not UTF-8(.|\n)*iconv"):
            ask()
    with pytest.raises(UsageError, match=r"model's positions(.|\n)*a shorter text"):
        loaded.generate("red " * 500)
    assert loaded.generate("naïve ☀", max_new_tokens=2) is not None and talk.turns == []


def test_an_answer_ends_where_a_table_of_positions_does(tmp_path: Path):
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    ends: Any = {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = OPTConfig(vocab_size=26, num_attention_heads=4, **sizes, **ends)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    tokenizer().save_pretrained(tmp_path / "opt")
    finished = run(brief(tmp_path) | {"model": str(tmp_path / "opt")})
    assert 40 <= len(finished.generate("red sun", suppress_tokens=[0, 1, 2]).split()) <= 64
    assert finished.generate("red " * 60, suppress_tokens=[0, 1, 2])
    for wanted in ({"min_new_tokens": 100}, {"max_new_tokens": 100}, {"max_length": 200}):
        with pytest.raises(UsageError, match="the answer is longer than the model's positions"):
            finished.generate("red sun", suppress_tokens=[0, 1, 2], **wanted)
