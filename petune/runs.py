"""A run on disk taken up again: its scores, its tuned model to ask, to score, to merge and to export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from petune import checkpoint, export
from petune.assemble import choose_place, load_base, prepare, rebuild
from petune.errors import FileError, UsageError
from petune.evaluate import batches, evaluate
from petune.inference import Chat, Speaker
from petune.methods.configs import FullConfig
from petune.models.load import resolve_model
from petune.recipe import load_recipe
from petune.tasks import TASKS, pad_token_id


class Run:
    """A run on disk. Nothing is loaded until a model is needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        model, tokenizer = rebuild(self.recipe, self.folder / "tuned", summary["task"])
        return Speaker(model, tokenizer, TASKS[summary["task"]], self.recipe.data, summary["format"], choose_place(self.recipe))

    def generate(self, prompt: str, **options: Any) -> str:
        """The tuned model's answer to `prompt`; for classify the label. `options` as in transformers' generate."""
        return self.speaker.ask(prompt, **options)

    def generate_many(self, prompts: Sequence[str], **options: Any) -> list[str]:
        """`generate` for each prompt."""
        return [self.generate(prompt, **options) for prompt in prompts]

    def chat(self, **options: Any) -> Chat:
        """A conversation with the tuned model that can switch to the untouched base."""
        base = None
        if isinstance(self.recipe.method, FullConfig):
            source = resolve_model(self.recipe.model, self.recipe.folder)
            tuned = self.speaker
            untouched: nn.Module = load_base(source, tuned.task, None, self.recipe, tuned.tokenizer).model
            base = Speaker(untouched.to(tuned.place.device).eval(), tuned.tokenizer, tuned.task, tuned.data, tuned.format, tuned.place)
        return Chat(self.speaker, base, options)

    def eval(self) -> dict[str, Any]:
        """Score the tuned model and the untouched base on the held-out rows; also written to eval.json."""
        prepared = prepare(self.recipe)
        tuned = self.speaker
        size = self.recipe.eval_batch_size or self.recipe.batch_size
        rows = list(batches(prepared.encoded.eval, size, tuned.task.name, pad_token_id(tuned.tokenizer), "right"))
        after = evaluate(tuned.model, rows, tuned.task.name, tuned.place.device, tuned.place.autocast)
        scores = {"base": self.summary["before"], "tuned": after, "rows": len(prepared.encoded.eval)}
        checkpoint.write_json(self.folder / "eval.json", scores)
        return scores

    def merge(self, out: str | Path | None = None) -> Path:
        """Write a plain Hugging Face checkpoint with the tuning in its weights. Raises UsageError for adapter and side."""
        place = Path(out) if out else self.folder / "merged"
        speaker = self.speaker
        export.save_merged(speaker.model, place, speaker.tokenizer)
        return place

    def export(self, to: str, out: str | Path | None = None) -> Path:
        """Write what another library reads: `peft` (lora) or `hf` (lora and full). Raises UsageError for other formats and methods."""
        if to == "hf":
            return self.merge(out or self.folder / "hf")
        if to != "peft":
            raise UsageError(f"there is no export to {to!r}", expected="peft, hf")
        if self.recipe.method_name != "lora":
            name = self.recipe.method_name
            raise UsageError(
                f"peft reads LoRA, not {name}", remedy="petune.load(base, folder) reads it" if name != "full" else "use --to hf"
            )
        place = Path(out) if out else self.folder / "peft"
        speaker = self.speaker
        export.save(speaker.model, place, tokenizer=speaker.tokenizer, base_name=self.recipe.model, overwrite=False)
        return place


def load_run(folder: str | Path) -> Run:
    """A run by its folder. Raises FileError when the folder is not one."""
    path = Path(folder).expanduser()
    if not (path / "resolved.yaml").is_file():
        raise FileError("this is not a run folder", where=str(path), expected="a folder with resolved.yaml", remedy="give what `out` was")
    return Run(path)
