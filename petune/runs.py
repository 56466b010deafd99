"""A run on disk taken up again: its scores, its tuned model to ask, to score, to merge and to export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from petune import checkpoint, export
from petune.assemble import Prepared, choose_place, labels_of, load_base, prepare, rebuild
from petune.errors import FileError, UsageError
from petune.evaluate import asking, batches, evaluate, scoring
from petune.inference import Chat, Speaker
from petune.methods import without_tuning
from petune.methods.configs import FullConfig
from petune.models.load import resolve_model
from petune.recipe import load_recipe
from petune.tasks import TASKS, pad_token_id


class Run:
    """A run on disk. Nothing is loaded until a model is needed."""

    def __init__(self, folder: Path, verify_base: bool = False) -> None:
        self.folder, self.verify_base = folder, verify_base
        self.merge_report: str | None = None
        self.recipe = load_recipe(folder / "resolved.yaml", {"out": str(folder)})

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def summary(self) -> dict[str, Any]:
        """Scores before and after, losses, time, tokens, memory. Raises FileError for a run that has not finished."""
        if not (self.folder / "summary.json").is_file():
            raise FileError("this run has not finished", where=str(self.folder), remedy=f"petune train {self.folder} --resume")
        return checkpoint.read_json(self.folder / "summary.json")

    def metrics(self) -> list[dict[str, Any]]:
        """Every record of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    @cached_property
    def speaker(self) -> Speaker:
        """The tuned model, ready to be asked."""
        summary = self.summary
        model, tokenizer = rebuild(self.recipe, self.folder / "tuned", summary["task"], self.verify_base)
        return Speaker(model, tokenizer, TASKS[summary["task"]], self.recipe.data, summary["format"], choose_place(self.recipe))

    @cached_property
    def base(self) -> Speaker | None:
        """The untouched model of a full fine-tuning, loaded again; None for the other methods, which can be switched off."""
        if not isinstance(self.recipe.method, FullConfig):
            return None
        tuned = self.speaker
        source = resolve_model(self.recipe.model, self.recipe.folder)
        model: nn.Module = load_base(source, tuned.task, labels_of(self.folder / "tuned"), self.recipe, tuned.tokenizer).model
        return replace(tuned, model=model.to(tuned.place.device).eval())

    def generate(self, prompt: str, **options: Any) -> str:
        """The tuned model's answer to `prompt`; for classify the label. `options` as in transformers' generate."""
        return self.speaker.ask(prompt, **options)

    def generate_many(self, prompts: Sequence[str], **options: Any) -> list[str]:
        """`generate` for each prompt."""
        return [self.generate(prompt, **options) for prompt in prompts]

    def chat(self, **options: Any) -> Chat:
        """A conversation with the tuned model that can switch to the untouched base."""
        return Chat(self.speaker, self.base, options)

    def eval(self) -> dict[str, Any]:
        """Score the tuned model and the untouched base on the recipe's held-out rows; also written to eval.json.

        The base's scores are those of the run when the rows are the same, else measured anew. Raises DataError for a label the model
        does not know.
        """
        trained_on = self.summary["rows"]
        prepared = prepare(self.recipe, labels_of(self.folder / "tuned"))
        after = self._score(self.speaker.model, prepared)
        if prepared.rows.sha256 == trained_on:
            before = self.summary["before"]
        elif self.base is not None:
            before = self._score(self.base.model, prepared)
        else:
            with without_tuning(self.speaker.model):
                before = self._score(self.speaker.model, prepared)
        scores = {"base": before, "tuned": after, "rows": len(prepared.encoded.eval)}
        checkpoint.write_json(self.folder / "eval.json", scores)
        return scores

    def _score(self, model: nn.Module, prepared: Prepared) -> dict[str, float]:
        task, place = prepared.task.name, self.speaker.place
        size = self.recipe.eval_batch_size or self.recipe.batch_size
        held_out = batches(prepared.encoded.eval, size, task, pad_token_id(prepared.tokenizer))
        with scoring(model):
            return evaluate(asking(model, place.device, place.autocast), held_out, task, prepared.rows.labels or ())

    def merge(self, out: str | Path | None = None, *, overwrite: bool = False) -> Path:
        """Write a plain Hugging Face checkpoint with the tuning in its weights; `merge_report` then says what rounding cost.

        Raises UsageError for adapter and side, and for an occupied folder without `overwrite`.
        """
        place = Path(out) if out else self.folder / "merged"
        speaker = self.speaker
        self.merge_report = str(export.save_merged(speaker.model, place, speaker.tokenizer, overwrite=overwrite))
        return place

    def export(self, to: str, out: str | Path | None = None, *, overwrite: bool = False) -> Path:
        """Write what another library reads: `peft` (lora) or `hf` (lora and full). Raises UsageError for other formats and methods."""
        if to == "hf":
            return self.merge(out or self.folder / "hf", overwrite=overwrite)
        if to != "peft":
            raise UsageError(f"there is no export to {to!r}", expected="peft, hf")
        if self.recipe.method_name != "lora":
            name = self.recipe.method_name
            remedy = "petune.load(base, folder) reads it" if name != "full" else "use --to hf"
            raise UsageError(f"peft reads LoRA, not {name}", remedy=remedy)
        place = Path(out) if out else self.folder / "peft"
        speaker = self.speaker
        return export.write_peft(speaker.model, place, tokenizer=speaker.tokenizer, base_name=self.recipe.model, overwrite=overwrite)


def load_run(folder: str | Path, *, verify_base: bool = False) -> Run:
    """A run by its folder. `verify_base` compares the whole base with the one it was trained on when the model is loaded.

    Raises FileError when the folder is not a run's.
    """
    path = Path(folder).expanduser()
    if not (path / "resolved.yaml").is_file():
        raise FileError("this is not a run folder", where=str(path), expected="a folder with resolved.yaml", remedy="give what `out` was")
    return Run(path, verify_base)
