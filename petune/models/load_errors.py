"""What goes wrong while a model is read, each as one message with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from petune.errors import FileError, MachineError
from petune.log import phase
from petune.models.source import ModelSource, local_folder
from petune.models.trust import code_refused, wanted_code

SMALLER = (
    "give each process a part of it (parallel: tp or pp), hold it in fewer bytes (base_dtype), or take a"
    " smaller model; petune plan says what each needs"
)


@contextmanager
def room_for(place: str) -> Iterator[None]:
    """Turn a want of memory for the model of `place` into MachineError."""
    what = "not enough memory to load the model"
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except MemoryError:
        raise MachineError(what, where=place, remedy=SMALLER) from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise MachineError(what, where=place, found=first_line(error), remedy=SMALLER) from None


def asking(source: ModelSource) -> AbstractContextManager[None]:
    """Says that the hub is asked, which tries again for half a minute where it cannot be reached."""
    return phase(f"asking the hub for {source.place}") if source.kind == "hub" else nullcontext()


@contextmanager
def hub_errors(source: ModelSource) -> Iterator[None]:
    """The many errors of loading, each as one message with a remedy."""
    try:
        with room_for(source.place):
            yield
    except (FileError, MachineError, torch.OutOfMemoryError):
        raise
    except OSError as error:
        remedy = None
        if source.kind == "hub" and _is_unreachable(error):
            remedy = (
                "check the network; a local folder needs none, nor what an earlier run has put into the cache"
            )
            raise MachineError(
                f"cannot reach the hub for the model {source.place!r}: {first_line(error)}", remedy=remedy
            ) from None
        if source.kind == "hub":
            remedy = (
                "check the name and the network; give a local folder to work offline; a gated model needs its"
                " licence accepted and a token"
            )
        elif "safetensors" in str(error):
            remedy = "only safetensors are read: convert the weights with save_pretrained"
        raise FileError(f"cannot be loaded: {first_line(error)}", where=source.place, remedy=remedy) from None
    except RuntimeError as error:
        what, remedy = (
            f"cannot be loaded: {first_line(error)}",
            "use another copy of the model, or another model",
        )
        raise FileError(what, where=source.place, remedy=remedy) from error
    except (
        Exception
    ) as error:  # transformers and safetensors raise bare classes of their own for damaged files
        folder = local_folder(source.place, source.revision)
        if "trust_remote_code" in str(error) or (
            isinstance(error, ValueError) and folder is not None and wanted_code(folder)
        ):
            raise code_refused(folder, source.place, first_line(error)) from None
        remedy = "a file in it is damaged, missing or not what its name says: use another copy"
        what = f"cannot be loaded: {type(error).__name__}: {first_line(error)}"
        raise FileError(what, where=source.place, remedy=remedy) from error


_UNREACHABLE = (
    "OfflineModeIsEnabled",
    "LocalEntryNotFoundError",
    "ConnectError",
    "ConnectTimeout",
    "ConnectionError",
)


def _is_unreachable(error: BaseException | None) -> bool:
    """Whether an error of loading comes of a hub that cannot be reached, or may not be."""
    while error is not None:
        if any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def first_line(error: BaseException) -> str:
    """The first line of what an error says, with the next where it only announces that; or its class."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])
