"""A command line that can be typed in a test, and a run that needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from petune_cli.main import app

from petune.recipe import load_recipe, sealed_settings
from tests.built_command import built


@dataclass
class Answer:
    """What one command line gave back."""

    code: int
    out: str
    err: str


Type = Callable[..., Answer]


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    """Type words after `petune` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("petune_cli.main.command_line", built)

    def run(*words: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            app(words)
        shown = capsys.readouterr()
        return Answer(int(ended.value.code or 0), shown.out, shown.err)

    return run


@dataclass
class FakeChat:
    """A session that repeats what it hears, in capitals when the base answers."""

    on_base: bool = False
    heard: list[str] = field(default_factory=list)

    def ask(self, text: str) -> Iterator[str]:
        self.heard.append(text)
        yield text.upper() if self.on_base else text[::-1]

    def use_base(self, wanted: bool) -> None:
        self.on_base = wanted

    def reset(self) -> None:
        self.heard.clear()


@dataclass
class FakeRun:
    """A run on disk that remembers what it was asked."""

    folder: Path
    recipe: Any
    dense_base: Any = ()
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    session: FakeChat = field(default_factory=FakeChat)
    verify_base: bool = False
    merge_report: str | None = None
    serve_report: str | None = None
    summary: Mapping[str, Any] = field(default_factory=lambda: {"task": "causal"})

    def eval(self) -> Mapping[str, Any]:
        scores = {
            "base": {"accuracy": 0.5, "loss": 1.25},
            "tuned": {"accuracy": 0.875, "loss": 0.5},
            "rows": 8,
        }
        return scores | {"warnings": ["too good"], "notes": ["too few"]}

    def generate(self, prompt: str, **options: Any) -> str:
        self.calls.append((prompt, options))
        return prompt[::-1]

    def chat(self, **options: Any) -> FakeChat:
        self.calls.append(("chat", options))
        return self.session

    def merge(
        self,
        out: Path | None = None,
        *,
        dtype: str | None = None,
        rounding: str = "nearest",
        seed: int | None = None,
        overwrite: bool = False,
    ) -> Path:
        self.calls.append((f"merge {dtype}" if dtype else "merge", out, overwrite))
        if rounding != "nearest":
            self.calls.append((rounding, seed))
        self.merge_report = "merged 8 layers"
        return out or self.folder / "merged"

    def export(self, to: str, out: Path | None = None, *, overwrite: bool = False) -> Path:
        self.calls.append((to, out, overwrite))
        self.serve_report = (
            None if to in ("peft", "adapters", "hf", "bitsandbytes") else "rank 8, alpha 16\n   vllm serve"
        )
        return out or self.folder / to


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A run in runs/mine, made from the shipped recipe llama_lora; taking it up again loads no weights."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    recipe = load_recipe("llama_lora", {"out": "runs/mine"})
    (folder / "resolved.yaml").write_bytes(sealed_settings(recipe, "0" * 32))
    run = FakeRun(folder, recipe)

    def load(place: Path, *, verify_base: bool = False) -> FakeRun:
        assert Path(place).resolve() == folder
        run.verify_base = verify_base
        return run

    monkeypatch.setattr("petune.run.train.load_run", load)
    return run
