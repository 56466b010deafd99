"""`tuned/` at the end of a run: the whole tuned model, and the hashes of the base it was made on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from petune.errors import FileError
from petune.files.hashes import FileHashes
from petune.files.range_writer import RangeWriter
from petune.files.ranges import Piece, overlap
from petune.log import phase
from petune.methods import frozen_tensors, tuned_parameters
from petune.methods.configs import method_of
from petune.models.contents import allocate, contents_of
from petune.models.fresh import box_of
from petune.models.source import model_files
from petune.parallel import local
from petune.run.build import build
from petune.run.objects import base_name
from petune.run.reporting import Logged
from petune.run.step import OptimizerStep
from petune.saving import export
from petune.saving.fingerprint import base_is_changed


class TunedFiles:
    """Writes what `step` has trained, as others read it."""

    def __init__(self, step: OptimizerStep, reporter: Logged) -> None:
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

    def wait(self) -> None:
        """Wait for sizes and hashes of the base's files; without them, which is said, `tuned/` is written all
        the same."""
        with phase("waiting for the hashes of the base's files"):
            try:
                self.base_files = self.hashes.entries()
            except FileError as error:
                self.reporter.note(f"tuned/ STORES NO HASH OF ITS BASE: {error}")

    def write(self, folder: Path) -> None:
        """Write the tuned tensors, with what makes the model's inputs and what names the base, into `folder`;
        all others `take_part`."""
        recipe, processor = self.prepared.recipe, self.prepared.processor
        model = self.step.model if self.runner.plan.world == 1 else self._built()
        name, whole, crew = base_name(recipe), self._hashed_object(model), self.runner.crew
        tuned = {id(value): name for name, value in tuned_parameters(model).items()}
        every = model.state_dict(keep_vars=True).items()
        names = {name: tuned[id(value)] for name, value in every if id(value) in tuned}

        def share(work: Path, rooms: export.Rooms) -> None:
            if self._writes_ranges:
                own = {
                    file: {key: (names[name], at) for key, (name, at) in room.items()}
                    for file, room in rooms.items()
                }
                crew.tell([str(work), own])
                self._fill(work, own)
                crew.tell()

        with phase("writing tuned/"):
            export.save(
                model,
                folder,
                tokenizer=processor,
                base_name=name,
                base_sha256=whole,
                base_files=self.base_files,
                overwrite=True,
                share=share,
            )

    def take_part(self) -> None:
        """What other processes than the main one do while that writes."""
        if not self._writes_ranges:
            self._gathered()
        elif self.runner.crew.world > 1:
            work, rooms = self.runner.crew.tell()
            self._fill(Path(work), rooms)
            self.runner.crew.tell()

    @property
    def _writes_ranges(self) -> bool:
        """Whether what trains is most of the model, and is written from where it lies."""
        over_ranks = self.runner.plan.world > 1 and self.step.read_by_ranges
        return over_ranks and method_of(self.prepared.recipe.method).trains_base

    def _gathered(self) -> dict[str, Tensor]:
        """The tuned tensors, whole, on the CPU of the main process."""
        return self.runner.whole({name: value.detach() for name, value in self.step.tuned.items()})

    def _built(self) -> nn.Module:
        """The tuned model in one piece, with what has trained in it: as far as it need not be read, its
        tensors are on the meta device."""
        trained = {} if self._writes_ranges else self._gathered()
        model = build(replace(self.prepared, restored=not self._writes_ranges))
        tuned = tuned_parameters(model)
        if not self.step.read_by_ranges:
            for name, value in tuned.items():
                value.data.copy_(trained[name])
            return model
        known = {id(value): trained[name] for name, value in tuned.items() if name in trained}
        if self._writes_ranges and (contents := contents_of(model)) is not None:
            # what a model itself keeps frozen, a table of sines say, no rank has a part of to write
            frozen = frozen_tensors(model).items()
            known |= {id(value): contents.whole(name) for name, value in frozen if value.is_meta}

        def made(value: nn.Parameter) -> nn.Parameter:
            own = known.get(id(value))
            return value if own is None else nn.Parameter(own, requires_grad=value.requires_grad)

        allocate([model], made)
        return model

    def _fill(self, work: Path, rooms: Mapping[str, Mapping[str, tuple[str, Sequence[int]]]]) -> None:
        """Write what this process holds into the rooms for it, of tuned tensors by file and name there."""
        for file, names in rooms.items():
            with RangeWriter(work / file) as writer:
                for key, (name, at) in names.items():
                    if name in self.runner.tuned and self.runner.writes(name):
                        self._write(writer, key, name, at)

    def _write(self, writer: RangeWriter, key: str, name: str, at: Sequence[int]) -> None:
        """Write what this process holds of the tensor `key` of a file, which begins at `at` in the tuned
        tensor `name`."""
        value, shape = local(self.runner.tuned[name].detach()), writer.sources[key].shape
        more = value.dim() - len(shape)  # one of several, an expert
        piece = Piece(key, tuple(at), (*(1,) * more, *shape))
        for part, start in self.runner.place(name).boxes(value):
            if (own := overlap(piece, start, part.shape)) is not None:
                box = box_of(part, own.inside, own.size)
                writer.write(key, box.flatten(0, more) if more else box, own.there[more:])

    def _hashed_object(self, model: nn.Module) -> str | None:
        """The hash of the tensors of a base that was given in memory; None where a full tuning has taken its
        place, or its weights have another form: then the fingerprint alone knows it again."""
        if self.prepared.objects.model is None or method_of(self.prepared.recipe.method).trains_base:
            return None
        if base_is_changed(model) is not None:
            return None
        with phase("hashing the base"):
            return export.full_hash(model)
