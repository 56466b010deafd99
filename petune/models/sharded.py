"""What a process holds of a model whose weights are sharded over ranks: said by whoever shards them, read
where memory is planned and where whole weights are needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from petune.models.note import Note


@dataclass(frozen=True)
class Shards:
    """own: bytes on the device of this process, of its shards and of what is whole; trained: numbers among
    them that train; gathered: bytes of weights and gradients that are whole at once while the model runs."""

    own: int
    trained: int
    gathered: int


_SHARDS = Note[Shards]("petune_shards")  # of a model whose weights are sharded
put_shards, shards_of = _SHARDS.put, _SHARDS.of


def class_of(model: nn.Module) -> type[nn.Module]:
    """The model's own class, of which FSDP2 makes one of its own."""
    return type(model) if shards_of(model) is None else type(model).__mro__[2]


def class_in(module: nn.Module) -> type[nn.Module]:
    """The own class of a module of such a model: FSDP2 makes one of its own of some."""
    kind = type(module)
    return kind.__mro__[2] if kind.__mro__[1].__name__ == "FSDPModule" else kind
