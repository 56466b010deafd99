"""What of a model works behind its last block: its tensors can train while all that the blocks give stays as
it is."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from petune.models.spec import Family, stack_paths


def behind_blocks(model: nn.Module, family: Family) -> set[int]:
    """Ids of the parameters that work behind the last block alone.

    These are the norm behind the last stack, and what lies outside the modules that hold stacks and makes no
    hidden states; a table of tokens, and all that is tied to it, is none of them. Raises UsageError as
    `stack_paths`.
    """
    paths = stack_paths(model, family)
    last = list(paths)[-1]
    above = {path.rpartition(".")[0] for path in paths.values()}
    spine = spine_of(above)
    makes = () if family.signal is None else family.signal.embeddings
    found: list[str] = []
    for path in spine:
        for name, child in model.get_submodule(path).named_children():
            full = f"{path}.{name}" if path else name
            if full in spine or full in paths.values():
                continue
            tail = path == paths[last].rpartition(".")[0] and name == family.stacks[last].tail
            if tail or not (path in above or name in makes or embeds(child)):
                found.append(f"{full}.")
    named = list(model.named_parameters(remove_duplicate=False))
    before = {id(value) for name, value in named if not name.startswith(tuple(found))}
    return {id(value) for _, value in named} - before


def spine_of(paths: Iterable[str]) -> set[str]:
    """These modules, and all that they are in, the model itself as ""."""
    spine = {"", *paths}
    while longer := {path.rpartition(".")[0] for path in spine} - spine:
        spine |= longer
    return spine


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes logits of the vocabulary, as the model itself says; None for a classifier."""
    ask = getattr(model, "get_output_embeddings", None)
    found = ask() if callable(ask) else None
    return found if isinstance(found, nn.Module) else None


def embeds(module: nn.Module) -> bool:
    """Whether there is a table of tokens or positions in it."""
    return any(isinstance(part, nn.Embedding) for part in module.modules())
