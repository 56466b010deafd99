"""A model of several languages is trained and asked in one, from the recipe, the tokenizer or neither, which
is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
    pipeline,
)

import petune
from petune.errors import UsageError
from petune.models.languages import in_language
from petune.preflight.inputs import check_inputs, preview
from petune.recipe import load_recipe
from petune.run.build import prepare
from petune.run.finished import Run
from petune.tasks.kept import identity_of
from tests.picture_runs import write_pictures, write_vit
from tests.small_runs import write_model
from tests.sound_runs import RATE, TEXTS, tone, whisper_tokenizer, write_multilingual, write_sounds

pytestmark = pytest.mark.usefixtures("no_picture")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("languages")
    write_multilingual(folder / "whisper")
    write_sounds(folder)
    return folder


def settings(place: Path, language: str | None = "german", **more: Any) -> dict[str, Any]:
    own = {"model": str(place / "whisper"), "method": {"name": "lora", "r": 8}, "lr": 0.02, "epochs": 8}
    data = {"path": str(place / "rows.jsonl")} | ({} if language is None else {"language": language})
    return own | {"data": data, "out": str(place / "run")} | more


@pytest.fixture(scope="module")
def run(place: Path) -> Run:
    return petune.train(**settings(place))


def tokenizer_of(recipe: dict[str, Any]) -> Any:
    """The tokenizer that a run would have."""
    return prepare(load_recipe(recipe)).tokenizer


def theirs(place: Path, **how: Any) -> WhisperTokenizer:
    """transformers' own tokenizer of the model's folder."""
    found: WhisperTokenizer = AutoTokenizer.from_pretrained(place / "whisper", **how)
    return found


def refused(**recipe: Any) -> UsageError:
    """What a run is refused with, before which `petune check` says the same."""
    with pytest.raises(UsageError) as caught:
        preview(load_recipe(recipe), 1)
    with pytest.raises(UsageError) as checked:
        check_inputs(load_recipe(recipe))
    assert checked.value.problems == caught.value.problems
    return caught.value


def written(model: Any, **how: Any) -> torch.Tensor:
    """The tokens that transformers lets a model write of two tones."""
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    heard = extractor([tone(0), tone(1)], sampling_rate=RATE, return_tensors="pt")
    found: torch.Tensor = model.generate(heard["input_features"].to(model.device), max_new_tokens=6, **how)
    return found


@pytest.mark.parametrize("language", ["german", "de", "German"])
def test_targets_are_what_transformers_makes_of_them(language: str, place: Path) -> None:
    prepared = prepare(load_recipe(settings(place, language)))
    words = theirs(place, language="german", task="transcribe")
    begins, *wanted = words(TEXTS[0])["input_ids"]
    assert prepared.reader is not None and prepared.reader.begins == begins
    tokens = words.convert_ids_to_tokens(wanted)
    assert tokens[:3] == ["<|de|>", "<|transcribe|>", "<|notimestamps|>"] and tokens[-1] == "<|endoftext|>"
    assert wanted in [row.labels for row in prepared.encoded.train]


def test_a_run_learns_the_token_of_its_language_and_is_asked_with_it(run: Run, place: Path) -> None:
    assert run.summary["after"]["token_accuracy"] == 1.0 > run.summary["before"]["token_accuracy"]
    asked = [str(place / "sounds" / f"{number}.wav") for number in range(2)]
    assert run.generate(asked) == [*TEXTS]
    model, wanted = run.speaker.model, theirs(place, language="german", task="transcribe").prefix_tokens[1]
    first = torch.tensor([[model.config.decoder_start_token_id]])
    said = model(input_features=torch.randn(1, 8, 100), decoder_input_ids=first).logits[0, 0]
    assert int(said.argmax()) == wanted
    own = written(model)
    assert torch.equal(own, written(model, language="german", task="transcribe"))
    assert not torch.equal(own, written(model, language="french", task="transcribe"))


def test_a_run_read_again_keeps_its_language(run: Run, place: Path) -> None:
    again = petune.load_run(run.folder)
    assert again.generate(str(place / "sounds" / "1.wav")) == TEXTS[1]
    assert (again.speaker.tokenizer.language, again.speaker.tokenizer.task) == ("german", "transcribe")
    assert again.eval()["tuned"] == pytest.approx(run.summary["after"])


def test_a_merged_folder_writes_the_language_wherever_it_is_read(run: Run, place: Path) -> None:
    folder = run.merge(overwrite=True)
    said = GenerationConfig.from_pretrained(folder)
    assert (said.language, said.task, said.is_multilingual) == ("german", "transcribe", True)
    model = WhisperForConditionalGeneration.from_pretrained(folder)
    assert torch.equal(written(model), written(run.speaker.model))
    reader = pipeline("automatic-speech-recognition", str(folder))
    heard = reader([tone(0), tone(1)], generate_kwargs={"max_new_tokens": 6})
    assert [one["text"] for one in heard] == [*TEXTS]
    again = settings(place, None, model=str(folder))  # its tokenizer says the language
    assert tokenizer_of(again).language == "german"


def test_what_the_folder_s_tokenizer_says_is_taken_unless_the_recipe_says_more(tmp_path: Path) -> None:
    write_sounds(tmp_path, 6)
    write_multilingual(tmp_path / "whisper")
    theirs(tmp_path, language="french", task="translate").save_pretrained(tmp_path / "whisper")
    for language, wanted in ((None, ("french", "translate")), ("de", ("de", "transcribe"))):
        found = tokenizer_of(settings(tmp_path, language))
        assert (found.language, found.task) == wanted
    theirs(tmp_path, task=None).save_pretrained(tmp_path / "whisper")
    assert tokenizer_of(settings(tmp_path, None)).task == "transcribe"  # as transformers has it


def test_a_tokenizer_from_python_is_set_and_the_one_given_stays(place: Path) -> None:
    model = WhisperForConditionalGeneration.from_pretrained(place / "whisper")
    both = WhisperProcessor.from_pretrained(place / "whisper")
    given = {"model": model, "tokenizer": both, "max_steps": 1, "out": str(place / "given")}
    with pytest.raises(UsageError, match="nothing says which one"):
        petune.train(**settings(place, None, **given))
    run = petune.train(**settings(place, **given))
    assert both.tokenizer.language is None
    assert AutoTokenizer.from_pretrained(run.folder / "tuned").language == "german"
    said: Any = run.speaker.model.generation_config
    assert said.language == "german"


def test_a_model_that_says_nothing_of_itself_is_asked_with_the_tokenizer_s_ids(tmp_path: Path) -> None:
    write_multilingual(tmp_path / "whisper", None)
    write_sounds(tmp_path, 6)
    assert tokenizer_of(settings(tmp_path, None)).language is None
    found = petune.train(**settings(tmp_path, max_steps=1)).speaker.model
    assert torch.equal(written(found), written(found, language="german", task="transcribe"))


@pytest.mark.parametrize(
    ("language", "expected", "remedy"),
    [
        (None, "the name or the code of a language", "say which, for example data.language: english"),
        ("germn", "english, chinese, german", "did you mean: german"),
        ("cantonese", "(99 in all, or their codes)", None),  # transformers would take <|translate|>
    ],
)
def test_a_language_that_is_missing_or_unknown_is_refused(
    language: str | None, expected: str, remedy: str | None, place: Path
) -> None:
    (problem,) = refused(**settings(place, language)).problems
    assert problem.where == "data.language" and expected in str(problem.expected)
    assert problem.remedy == remedy


def test_a_language_for_a_model_of_one_is_refused(tmp_path: Path) -> None:
    write_sounds(tmp_path, 6)
    write_multilingual(tmp_path / "whisper", several=False)
    check_inputs(load_recipe(settings(tmp_path, None)))
    (problem,) = refused(**settings(tmp_path)).problems
    assert problem.where == "data.language" and "one language alone" in problem.what
    theirs(tmp_path, language="german").save_pretrained(tmp_path / "whisper")
    (problem,) = refused(**settings(tmp_path, None)).problems
    assert "tokenizer_config.json" in str(problem.remedy)


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_a_language_for_a_model_that_reads_no_sounds_is_refused(kind: str, tmp_path: Path) -> None:
    if kind == "vit":
        write_vit(tmp_path / "model")
        rows = write_pictures(tmp_path, 6)
    else:
        write_model(tmp_path / "model", "bert")
        rows = tmp_path / "rows.jsonl"
        lines = [json.dumps({"text": f"red sun {at}", "label": "ab"[at % 2]}) + "\n" for at in range(20)]
        rows.write_text("".join(lines))
    data = {"path": str(rows), "language": "german"}
    said = refused(model=str(tmp_path / "model"), data=data, method="lora").problems
    assert [(problem.where, problem.remedy) for problem in said] == [
        ("data.language", "remove data.language")
    ]


def test_rows_that_are_kept_are_those_of_one_language() -> None:
    words = whisper_tokenizer()
    german, french = (in_language(words, name, True) for name in ("german", "french"))
    found = [identity_of(one) for one in (words, german, french)]
    assert None not in found and found[0] != found[1] != found[2] != found[0]
