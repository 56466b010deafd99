"""`tuned/` at the end of a run: the whole tuned model, and the hashes of the base it was made on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from petune.errors import FileError
from petune.files.hashes import FileHashes
from petune.log import phase
from petune.methods import tuned_parameters
from petune.methods.configs import method_of
from petune.models.source import model_files
from petune.run import state
from petune.run.build import build_whole
from petune.run.objects import base_name
from petune.run.reporting import Logged
from petune.run.step import Step
from petune.saving import export
from petune.saving.fingerprint import base_is_changed


class TunedFiles:
    """Writes what `step` has trained, as others read it."""

    def __init__(self, step: Step, reporter: Logged) -> None:
        self.step, self.prepared, self.runner, self.reporter = step, step.prepared, step.runner, reporter
        self.base_files: dict[str, dict[str, Any]] = {}

    @contextmanager
    def hashing(self) -> Iterator[None]:
        """Hash the base's files while the device trains."""
        with FileHashes(self._base_files()) as self.hashes:
            yield

    def _base_files(self) -> dict[str, Path]:
        """The files whose hashes name the base, in the process that writes; of random weights and a model in
        memory none."""
        source = self.prepared.source
        if not self.runner.mesh.main or source.kind in ("config", "object"):
            return {}
        return model_files(
            source.place, getattr(self.runner.model.config, "_commit_hash", None) or source.revision
        )

    def whole_model(self) -> nn.Module | None:
        """The tuned model in one piece: this one, or, where it is cut, one built anew and filled in the main
        process; None elsewhere.

        Every process must call this.
        """
        if self.runner.plan.world == 1:
            return self.step.model
        trained = self.runner.whole({name: value.detach() for name, value in self.step.tuned.items()})
        if not self.runner.mesh.main:
            return None
        model = build_whole(self.prepared)
        state.fill(tuned_parameters(model), trained, "the trained state")
        return model

    def wait(self) -> None:
        """Wait for sizes and hashes of the base's files; without them, which is said, `tuned/` is written all
        the same."""
        with phase("waiting for the hashes of the base's files"):
            try:
                self.base_files = self.hashes.entries()
            except FileError as error:
                self.reporter.note(f"tuned/ STORES NO HASH OF ITS BASE: {error}")

    def write(self, model: nn.Module, folder: Path) -> None:
        """Write the tuned tensors of `model`, with its tokenizer and what names its base, into `folder`."""
        recipe, tokenizer = self.prepared.recipe, self.prepared.tokenizer
        name, whole = base_name(recipe), self._hashed_object(model)
        with phase("writing tuned/"):
            export.save(
                model,
                folder,
                tokenizer=tokenizer,
                base_name=name,
                base_sha256=whole,
                base_files=self.base_files,
                overwrite=True,
            )

    def _hashed_object(self, model: nn.Module) -> str | None:
        """The hash of the tensors of a base that was given in memory; None where a full tuning has taken its
        place, or its weights have another form: then the fingerprint alone knows it again."""
        if self.prepared.objects.model is None or method_of(self.prepared.recipe.method).trains_base:
            return None
        if base_is_changed(model) is not None:
            return None
        with phase("hashing the base"):
            return export.full_hash(model)
