"""A run on disk taken up again: its scores, its tuned model to ask, to score, to merge and to export."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, overload

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from petune.errors import FileError, PetuneError, UsageError
from petune.files.given import path_of
from petune.files.hashes import FileHashes
from petune.files.safetensors import write_json
from petune.methods import without_tuning
from petune.methods.configs import method_of
from petune.methods.rounding import seed_of
from petune.models.loading import read_config
from petune.models.source import model_files, resolve_model
from petune.recipe import Recipe, load_resolved
from petune.report.files import is_run, no_run
from petune.report.results import read_metrics, read_summary
from petune.run.build import Prepared, choose_place, load_base, positions_of, prepare
from petune.run.evaluate import asking, batches, scored, scorer_of, scoring, shortcomings, undecided
from petune.run.held_base import write_held_base
from petune.run.inference import Chat, Speaker, text_of
from petune.run.objects import NO_OBJECTS, Objects, base_name
from petune.run.plot import run_html
from petune.run.readers import Processors, inputs_of
from petune.run.references import referred
from petune.saving import export
from petune.saving.load import load_recorded
from petune.saving.serve import write_for
from petune.saving.servers import ALIASES, SERVERS
from petune.saving.tuning_record import Record, read_record
from petune.tasks import METRICS, TASKS, make_coder, pad_token_id
from petune.tasks.configs import FORMATS
from petune.tasks.embed import sentence_files
from petune.tasks.media import Reader

# a model that was tuned, its tokenizer, and what reads pictures for it
RebuiltModel = tuple[nn.Module, PreTrainedTokenizerBase | None, Reader | None]


class Run:
    """A run on disk. Nothing is loaded until a model is needed. `folder` holds its files, `recipe` is what it
    was trained by.

        >>> run = petune.load_run("runs/first")
        >>> run.summary["after"].keys() == run.eval()["tuned"].keys()
        True
        >>> folder = run.export("peft")
    """

    def __init__(
        self,
        folder: Path,
        verify_base: bool = False,
        objects: Objects = NO_OBJECTS,
        tuned: RebuiltModel | None = None,
    ) -> None:
        """`objects`: what the run was given in memory; its model is untouched, unless `tuned` holds it as it
        was trained."""
        self.folder, self.verify_base, self.objects, self._tuned = folder, verify_base, objects, tuned
        self.merge_report: str | None = None
        self.serve_report: str | None = None
        self.recipe = load_resolved(folder / "resolved.yaml", {"out": str(folder)})

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @property
    def summary(self) -> dict[str, Any]:
        """Scores before and after, losses, time, tokens, memory. Raises FileError for a run that has not
        finished."""
        if not (self.folder / "summary.json").is_file():
            what = "this run has not finished"
            raise FileError(what, where=str(self.folder), remedy=f"petune train {self.folder} --resume")
        return read_summary(self.folder / "summary.json", METRICS, FORMATS)

    @property
    def model(self) -> nn.Module:
        """The tuned model in eval mode on its device: as trained where it was given in memory, else loaded
        from tuned/ when asked. Where it has two dtypes it is asked under autocast."""
        return self.speaker.model

    @property
    def history(self) -> list[dict[str, float]]:
        """One mapping per step, in order: step, epoch, loss, lr, grad_norm, tokens, tokens_per_s, and
        eval_NAME where it was evaluated.

        The first, step 0, holds the scores of the untouched base alone.

            >>> run = petune.load_run("runs/first")
            >>> losses = [(record["step"], record["loss"]) for record in run.history if "loss" in record]
        """
        steps: dict[int, dict[str, float]] = {}
        for record in self.metrics():
            steps.setdefault(record["step"], {}).update(record)
        return [steps[step] for step in sorted(steps)]

    def _repr_html_(self) -> str:
        """What a notebook shows: the folder, the scores before and after, the loss curve."""
        return run_html(
            repr(self), self.summary if (self.folder / "summary.json").is_file() else {}, self.metrics()
        )

    def metrics(self) -> list[dict[str, Any]]:
        """Every record of metrics.jsonl: steps and evaluations apart."""
        return read_metrics(self.folder / "metrics.jsonl")

    @cached_property
    def _record(self) -> Record:
        """What tuned/ says of itself."""
        return read_record(self.folder / "tuned")

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The classes or tags in the order of their ids; None for other tasks."""
        return self._record.labels

    @cached_property
    def speaker(self) -> Speaker:
        """The tuned model, ready to be asked."""
        summary, given = self.summary, self.objects.model
        model, tokenizer, reader = self._tuned or rebuild(
            self.recipe, self._record, summary["task"], self.verify_base, given
        )
        return Speaker(
            model,
            tokenizer,
            reader,
            TASKS[summary["task"]],
            self.recipe.data,
            summary.get("format", "text"),
            choose_place(self.recipe),
        )

    @cached_property
    def base(self) -> Speaker | None:
        """The untouched model of a full fine-tuning, or of one with a head or other modules that were trained
        whole, loaded again.

        None for what can be switched off, for a model given in memory, which was tuned in place, and for one
        that began with an adapter.
        """
        source, record = resolve_model(self.recipe.model, self.recipe.folder), self._record
        whole = method_of(self.recipe.method).trains_base or record.also_train
        if not whole or source.kind == "object" or self.recipe.init_adapter is not None:
            return None
        tuned = self.speaker
        if source.kind != "config":
            record.check_files(model_files(source.place, source.revision), afresh=self.verify_base)
        model: nn.Module = load_base(source, tuned.task, record.labels, self.recipe, tuned.words).read()
        return replace(tuned, model=model.to(tuned.place.device).eval())

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], **options: Any) -> list[str]: ...
    def generate(self, prompt: str | Sequence[str], **options: Any) -> str | list[str]:
        """The tuned model's answer to a text, or a list of answers to a list of texts, each asked by itself.

        That is the label for classify, a line `word<tab>tag` a word for tokens, the text with its masks
        filled in for mlm, and for rerank, of a query and a passage a line, lines `score<tab>passage`.
        `options` are transformers' generation options. Greedy unless one of sampling (`temperature=0.7`,
        `top_p=0.9`, ...) is given. Raises UsageError for prompts that are no texts and for options that are
        unknown, out of range or contradict each other.
        """
        if isinstance(prompt, list | tuple):
            return self.generate_many(prompt, **options)
        return self.speaker.ask(text_of(prompt), **options)

    def generate_many(self, prompts: Sequence[str], **options: Any) -> list[str]:
        """`generate` for each text of a list. Raises UsageError as it does, before the first answer."""
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            what = "generate_many takes a list of texts"
            raise UsageError(what, found=repr(prompts)[:80], remedy="for one text use generate")
        texts = [text_of(prompt) for prompt in prompts]
        return [self.speaker.ask(text, **options) for text in [self.speaker.readable(text) for text in texts]]

    def rank(self, query: str, passages: Sequence[str]) -> list[tuple[str, float]]:
        """The passages with how well each answers the query, from 0 to 1, the best first; for task rerank.
        Raises UsageError for other tasks, and for anything but texts."""
        return self.speaker.rank(query, passages)

    def chat(self, **options: Any) -> Chat:
        """A conversation with the tuned model that can switch to the untouched base."""
        return Chat(self.speaker, lambda: self.base, options)

    def eval(self) -> dict[str, Any]:
        """Score the tuned model and the untouched base on the recipe's held-out rows; also written to
        eval.json.

        The base's scores are those of the run when the rows and the base's form are the same, else measured
        anew. "warnings" says why the run is no success, "notes" why the rows cannot show it. Raises DataError
        for a label the model does not know.
        """
        summary = self.summary
        objects = self.objects
        if objects.model is not None:
            reader = self.speaker.reader
            processor = None if reader is None else reader.processor
            objects = replace(objects, tokenizer=self.speaker.words, processor=processor)
        prepared = prepare(self.recipe, self._record.labels, objects)
        after = self._score(self.speaker.model, prepared)
        # a quantised base is dense again here, and its scores are other ones
        same = prepared.rows.sha256 == summary["rows"] and self.recipe.base_dtype is None
        if same:
            before = summary["before"]
        elif self.base is not None:
            before = self._score(self.base.model, prepared)
        else:
            with without_tuning(self.speaker.model):
                before = self._score(self.speaker.model, prepared)
        rows = len(prepared.encoded.eval)
        found = (
            summary
            | {"before": before, "after": after, "held_out": rows}
            | ({} if same else {"last": after, "head_only": None})
        )
        notes = [*self.dense_base, *([] if same else self.trained_head), *undecided(found)]
        said = {"warnings": shortcomings(found), "notes": notes}
        scores = {"base": before, "tuned": after, "rows": rows, **said}
        write_json(self.folder / "eval.json", scores)
        return scores

    @property
    def dense_base(self) -> list[str]:
        """That base and tuned model are asked here beside other weights than they trained beside, where they
        are."""
        kind = self.recipe.base_dtype
        why = f"trained beside a base in {kind}, and scored beside the dense one of its files: base and tuned"
        return [] if kind is None else [f"{why} model differ from the run's by what {kind} rounds away"]

    @property
    def trained_head(self) -> list[str]:
        """That the base is asked with what was trained whole beside the method, where it has nothing else."""
        names = ", ".join(self._record.also_train)
        return [f"the base is scored with {names} as trained"] if names and self.base is None else []

    def _score(self, model: nn.Module, prepared: Prepared) -> dict[str, float]:
        task, place, units = prepared.task, self.speaker.place, prepared.encoded.eval
        size = self.recipe.eval_batch_size or self.recipe.batch_size
        pad, ask = pad_token_id(prepared.tokenizer), asking(model, place.device, place.autocast)
        if task.name == "prefer" and self.recipe.prefer.refers:
            with scoring(model), without_tuning(model):
                units = referred(units, ask, batches(units, size, task.name, pad))
        scorer = scorer_of(self.recipe, task, prepared.rows.labels or (), units)
        with scoring(model):
            return scored(ask, batches(units, size, task.name, pad), scorer).result()

    def merge(
        self,
        out: str | Path | None = None,
        *,
        dtype: Literal["fp32", "bf16"] | None = None,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        seed: int | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write a plain Hugging Face checkpoint with the tuning in its weights, in a dtype or the run's own;
        `merge_report` then says what rounding cost, and the largest difference of logits on a few tokens.

        rounding: to bfloat16, of the weights that the tuning has changed; the rest is rounded to nearest.
        seed: of stochastic rounding, the run's own by default. Raises UsageError for adapter and side, for an
        occupied folder without `overwrite`, and for rounding or a seed that would do nothing.
        """
        seed = seed_of(rounding, seed, self.recipe.seed)
        place = self._place(out, "merged")
        speaker = self.speaker
        model = cast("PreTrainedModel", speaker.model)
        report = export.save_merged(
            model,
            place,
            Processors(speaker.words, speaker.reader),
            batch=export.probe(model),
            dtype=None if dtype is None else {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
            seed=seed,
            overwrite=overwrite,
            beside=self._sentence_files() if speaker.task.name == "embed" else {},
        )
        self.merge_report = str(report)
        return place

    def _sentence_files(self) -> dict[str, Any]:
        """What sentence-transformers reads beside a model that embeds: its modules and how it pools."""
        model, config = cast("PreTrainedModel", self.speaker.model), self.recipe.embed
        limit = make_coder(
            self.speaker.tokenizer, self.recipe.data, max_positions=positions_of(model.config)
        ).limit
        return sentence_files(config, int(model.config.hidden_size), limit)

    def export(self, to: str, out: str | Path | None = None, *, overwrite: bool = False) -> Path:
        """Write what another library reads: `peft` (lora and its kin), `adapters` (adapter), `hf` (what
        merges), `bitsandbytes` (the base of a run with base_dtype: nf4, as it was trained beside), or a
        server of SERVERS (lora); `serve_report` then says what to type there. Raises UsageError for others,
        for other methods, and for what a server refuses."""
        if to == "hf":
            return self.merge(out or self.folder / "hf", overwrite=overwrite)
        if to == "bitsandbytes":
            place, task = self._place(out, to), self.summary["task"]
            how = {"verify_base": self.verify_base, "overwrite": overwrite}
            return write_held_base(self.recipe, self._record, task, place, **how)
        if (server := ALIASES.get(to, to)) in SERVERS:
            return self._export_for(server, self._place(out, to), overwrite)
        layouts = {"peft": export.write_peft, "adapters": export.write_adapters}
        if to not in layouts:
            known = ", ".join((*layouts, "hf", "bitsandbytes", *SERVERS, *ALIASES))
            raise UsageError(f"there is no export to {to!r}", expected=known)
        name, method = self.recipe.method_name, method_of(self.recipe.method)
        remedy = "use --to hf" if method.mergeable else "petune.load(base, folder) reads it"
        if to == "peft" and method.files != "peft":
            raise UsageError(f"peft has no file for {name}", expected=export.in_peft(), remedy=remedy)
        if to == "adapters" and name != "adapter":
            remedy = "use --to peft" if method.files == "peft" else remedy
            raise UsageError(f"adapters' layout is for bottleneck adapters, not {name}", remedy=remedy)
        speaker = self.speaker
        return layouts[to](
            speaker.model,
            self._place(out, to),
            tokenizer=Processors(speaker.words, speaker.reader),
            base_name=base_name(self.recipe),
            overwrite=overwrite,
        )

    def _place(self, out: str | Path | None, usual: str) -> Path:
        """Where to write: `out`, or a folder of the run's. Raises UsageError for one the run is read from."""
        place, bases = path_of(out) if out else self.folder / usual, list[Path]()
        own = [self.folder / "tuned", self.folder / "best", *self.folder.glob("checkpoints/*")]
        with suppress(PetuneError):  # of a full tuning the base may be gone
            bases.append(Path(resolve_model(self.recipe.model, self.recipe.folder).place).resolve())
        if place.resolve() in bases or any(place.resolve().is_relative_to(one.resolve()) for one in own):
            raise UsageError("this run is read from here", where=str(place), remedy="give another folder")
        return place

    def _export_for(self, server: str, place: Path, overwrite: bool) -> Path:
        speaker, source = self.speaker, resolve_model(self.recipe.model, self.recipe.folder)
        written = write_for(
            server,
            speaker.model,
            place,
            tokenizer=speaker.words,
            base_name=None if source.kind in ("object", "config") else source.place,
            overwrite=overwrite,
        )
        said = f"rank {written.rank}, alpha {written.alpha}, logits within {written.logits:.3g}"
        self.serve_report = f"{said}\n   {written.serve}"
        return place


def load_run(folder: str | Path, *, base: PreTrainedModel | None = None, verify_base: bool = False) -> Run:
    """The run in `folder`, finished or not, to be asked, scored, merged and exported.

        >>> run = petune.load_run("runs/first")
        >>> answer = run.generate("red sun", max_new_tokens=4)

    `base` is the untouched base model where the run was given one in memory; it is tuned in place when the
    model is needed. `verify_base` compares the whole base with the one it was trained on then. Raises
    FileError when the folder is not a run's, or its settings were cut or edited.
    """
    path = path_of(folder)
    if not is_run(path):
        raise no_run(path)
    return Run(path, verify_base, replace(NO_OBJECTS, model=base))


def rebuild(
    recipe: Recipe, record: Record, task: str, verify_base: bool = False, given: PreTrainedModel | None = None
) -> RebuiltModel:
    """The tuned model of a finished run and what makes its inputs: the recipe's base with the folder of
    `record` (a run's `tuned/`) loaded strictly, in eval mode on its device.

    `given` is the base where it is in memory already; it is tuned in place. The base's files are compared
    with the hashes stored when the run ended; `verify_base` reads all of them again, or the tensors of a base
    that was in memory. Raises FileError.
    """
    source = resolve_model(recipe.model, recipe.folder)
    own = replace(source, kind="folder", place=str(record.file.parent), revision=None)
    files = {} if given is not None or source.kind == "config" else model_files(source.place, source.revision)
    record.check_files(files, weights=False)  # before a config is read that could say anything
    config = given.config if given is not None else read_config(source)
    tokenizer, reader = inputs_of(own, config)
    with FileHashes({} if verify_base else files, afresh=False) as hashes:  # beside the loading, remembered
        found = load_base(source, TASKS[task], record.labels, recipe, tokenizer, given, config)
        base: nn.Module = found.read()
        hashes.result()
    model = load_recorded(base, record, verify_base=verify_base, base_files=files)
    return model.to(choose_place(recipe).device).eval(), tokenizer, reader
