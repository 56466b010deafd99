"""The blocks of a frozen backbone, which leave memory while an activation cache knows every row that a run
asks about.

While they are away their parameters are on the meta device, as those are that were not read yet. The first
pass that has to run a block reads them again from the files that they came from, and compares checksums:
every bit is what it was. Each rank decides for itself what it holds, as none waits for another in this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import swap_tensors

from petune.errors import FileError, Problem
from petune.kernels.block.module import FusedBlock
from petune.log import human
from petune.methods.activation_cache import ActivationCache
from petune.models.checksums import checksums
from petune.models.stack import Stack, stacks_in
from petune.parallel import Batch, Runner
from petune.run.build import Prepared
from petune.run.evaluate import batches, inputs_of
from petune.tasks import Example, pad_token_id


def all_rows(prepared: Prepared, trained: Sequence[Example], held_out: Sequence[Example]) -> Iterator[Batch]:
    """The rows of a run in padded batches, on the CPU."""
    size, task, pad = prepared.recipe.batch_size, prepared.task.name, pad_token_id(prepared.tokenizer)
    yield from batches(trained, size, task, pad, packed=prepared.encoded.packed)
    yield from batches(held_out, size, task, pad)


class Backbone:
    """The blocks of a runner whose stacks have ladders. say: told when they leave and when they come back;
    stepped: called before each step of this process but the first.

    stays: why they never leave, or None.
    """

    def __init__(
        self,
        runner: Runner,
        cache: ActivationCache,
        say: Callable[[str], None],
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self.runner, self.cache, self.say, self.stepped = runner, cache, say, stepped
        self.stays = "they were not read by ranges of files" if runner.contents is None else None
        self._away: dict[str, int] = {}  # checksums, by name
        self._asked = False
        self._stacks = {path: stack for module in runner.modules for path, stack in stacks_in(module).items()}
        self._hooks = [stack.register_forward_pre_hook(self._before) for stack in self._stacks.values()]

    def leave_if_known(self, rows: Iterable[Batch], boundary: bool) -> None:
        """Leave memory if the cache knows all `rows`. That is asked at the boundary of an epoch, and before
        the first step of this process."""
        if self._asked:
            self.stepped()
        due, self._asked = boundary or not self._asked, True
        if due and not self._away and self.stays is None and all(map(self._known, rows)):
            self._leave()

    def _known(self, batch: Batch) -> bool:
        return all(self.cache.knows(module, inputs_of(module, batch)) for module in self.runner.modules)

    @torch.no_grad()
    def _leave(self) -> None:
        held = self._held()
        self._away, size = checksums(held), sum(value.nbytes for value in held.values())
        for value in held.values():
            swap_tensors(value, nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False))
        self._settle()
        self.say(f"cache: all rows are known; {human(size)} of the backbone's blocks leave memory")

    def _before(self, stack: nn.Module, args: Any) -> None:
        """Hook before a pass of a stack, whose blocks run unless the cache knows what they give."""
        assert isinstance(stack, Stack)
        if stack.levels is None or stack.levels.known is None:
            self.come_back()

    @torch.no_grad()
    def come_back(self) -> None:
        """Read the blocks again where they are away. Raises FileError where the files hold other values."""
        if not self._away:
            return
        held = self._held()
        made = self.runner.read_again(held)
        now = checksums(made)
        if changed := [name for name, before in self._away.items() if now[name] != before]:
            what = "is another tensor than when the run began"
            remedy = "leave the files of the base as they are while a run with cache goes on"
            raise FileError([Problem(what, where=name, remedy=remedy) for name in changed[:10]])
        self._away = {}
        for name, value in held.items():
            swap_tensors(value, made[name])
        self._settle()
        self.say("cache: the backbone's blocks were read again")

    def _held(self) -> dict[str, nn.Parameter]:
        """The frozen parameters of the blocks that are used nowhere else, each once."""
        blocks = list(self._blocks())
        inside = {id(value): name for name, value in reversed(blocks)}
        outside = self._outside()
        return {inside[key]: value for _, value in blocks if (key := id(value)) not in outside}

    def _blocks(self) -> Iterator[tuple[str, nn.Parameter]]:
        for path, stack in self._stacks.items():
            for number, block in stack.numbered:
                for name, value in block.named_parameters(f"{path}.{number}"):
                    if not value.requires_grad:
                        yield name, value

    def _outside(self) -> set[int]:
        """Ids of the parameters of everything but blocks."""
        blocks = {
            id(module)
            for stack in self._stacks.values()
            for block in stack.blocks
            for module in block.modules()
        }
        modules = (one for module in self.runner.modules for one in module.modules() if id(one) not in blocks)
        return {id(value) for one in modules for value in one.parameters(recurse=False)}

    def _settle(self) -> None:
        """Let fused blocks, and recordings of them, know that their weights lie elsewhere."""
        for stack in self._stacks.values():
            if stack.beneath is not None:
                stack.beneath.forget()
            for block in stack.blocks:
                if isinstance(block, FusedBlock):
                    block.bank_again()

    def close(self) -> None:
        """Be asked before no pass any more."""
        for handle in self._hooks:
            handle.remove()
