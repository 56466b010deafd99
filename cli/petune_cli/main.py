"""The `petune` command: the verbs in their help panels, and the one place where an error becomes a message
and an exit code.

Start-up imports typer alone; whatever a verb needs it imports itself, so `petune --help` answers at once.
"""

from __future__ import annotations

import atexit
import errno
import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from petune import __version__
from petune.errors import MachineError, PetuneError, UsageError
from petune.files.given import path_of
from petune.log import open_closed_streams
from petune_cli import (
    bench,
    chat,
    check,
    convert,
    data,
    doctor,
    export,
    generate,
    init,
    merge,
    plan,
    profile,
    recipes,
    report,
    runs,
    script,
    sweep,
    train,
    watch,
)
from petune_cli import eval as scoring
from petune_cli.echo import STDOUT, echo

commands = typer.Typer(
    name="petune",
    help="Tune Hugging Face models fully, or by LoRA and its kin: one recipe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Start": (
        train.train,
        sweep.sweep,
        init.init,
        convert.convert,
        chat.chat,
        recipes.ls,
        recipes.cp,
        script.script,
        doctor.doctor,
    ),
    "Look": (runs.runs, report.report, watch.watch),
    "Check": (check.check, plan.plan, profile.profile, bench.bench, data.data, scoring.evaluate),
    "Ship": (merge.merge, export.export, generate.generate),
}


def _in_homes(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb, which is given its paths with the homes that ~ stands for: shells leave it behind an equals
    sign, and there is none where another program calls."""

    @wraps(verb)
    def called(**given: Any) -> None:
        for name, value in given.items():
            if isinstance(value, Path):
                given[name] = path_of(value)
            elif isinstance(value, list | tuple):
                given[name] = [path_of(one) if isinstance(one, Path) else one for one in value]
        verb(**given)

    return called


for _panel, _verbs in _PANELS.items():
    for _verb in _verbs:
        _name = "eval" if _verb is scoring.evaluate else None
        commands.command(_name, rich_help_panel=_panel)(_in_homes(_verb))

_OTHER_VERBS = {  # what other tools call it
    **dict.fromkeys(("predict", "infer", "inference", "ask"), "generate"),
    **dict.fromkeys(("fit", "tune", "finetune", "sft"), "train"),
    **dict.fromkeys(("evaluate", "test", "score"), "eval"),
    **dict.fromkeys(("grid", "hpo", "search"), "sweep"),
    **{
        "validate": "check",
        "new": "init",
        "create": "init",
        "list": "ls",
        "copy": "cp",
        "import": "convert",
        "save": "export",
    },
}
_REFUSED_BY_MACHINE = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
}


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"petune {__version__}")
        raise typer.Exit


@commands.callback()
def _face(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    # what matters of its warnings petune says itself, in one line
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.getLogger("huggingface_hub.utils._http").addFilter(_of_interest)


def _of_interest(record: logging.LogRecord) -> bool:
    """Whether the user wants a line of the hub's: petune itself says that it waits, and how that ended."""
    return not record.getMessage().startswith("Retrying in ") and "thrown while" not in record.getMessage()


def command_line() -> Any:
    """The whole command, its help kept on one screen: of the two options for shell completion only the one
    that installs is shown."""
    command = typer.main.get_command(commands)
    for option in command.params:
        if option.name == "install_completion":
            setattr(option, "help", "Complete verbs in this shell.")  # noqa: B010 - typer declares no type for it
        elif option.name == "show_completion":
            setattr(option, "hidden", True)  # noqa: B010 - as above
    return command


def _end_quickly() -> None:
    """Keep Python from searching all of torch for garbage as it ends, which takes one to three seconds.

    Triton from 3.9 on tells at length of whatever was not searched then: nobody hears it.
    """
    gc.freeze()
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def app(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command line (default: this process's) and exit.

    0 done; 1 internal error; 2 usage or recipe; 3 data; 4 model, adapter or checkpoint files; 5 environment;
    6 distributed; 7 training fault; 75 stopped and saved; 130 interrupted; 141 when who reads the output has
    gone: silently, but for a run, which is saved and says where.
    """
    open_closed_streams()
    atexit.register(_end_quickly)
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    debug = "--debug" in words[:end]
    words = [word for word in words[:end] if word != "--debug"] + words[end:]
    try:
        command = command_line()
        _refuse_other_verbs(command, words[:end])
        _refuse_settings_as_options(command, words[:end])
        command(words, prog_name="petune")
    except SystemExit as ended:
        lost = _undelivered()
        if isinstance(ended.__context__, BrokenPipeError) or isinstance(lost, BrokenPipeError):
            _drop_output()
            sys.exit(141)
        if lost is not None:
            lost.filename = STDOUT
            _drop_output()
            _end(lost)
        raise
    except Exception as error:
        if debug:
            echo("".join(traceback.format_exception(error)), err=True, nl=False)
        if isinstance(error.__cause__, BrokenPipeError):  # a run was stopped by it, and has saved
            _drop_output()
            with suppress(OSError):
                echo(str(error), err=True)
            sys.exit(141)
        _end(error)
    sys.exit(0)


def _end(error: Exception) -> NoReturn:
    """Say on standard error, where that can still be written, what has ended the command, and exit."""
    known = _known(error)
    first = (str(error).splitlines() or [""])[0]
    internal = (
        f"petune: internal error: {type(error).__name__}: {first}\n   run again with --debug to see where"
    )
    with suppress(OSError):
        echo(internal if known is None else str(known), err=True)
    sys.exit(1 if known is None else known.code)


def _refuse_other_verbs(command: Any, words: Sequence[str]) -> None:
    """Raise UsageError for a verb of other tools, with petune's."""
    verb = next((word for word in words if not word.startswith("-")), "")
    if verb not in command.commands and (meant := _OTHER_VERBS.get(verb)):
        raise UsageError(
            f"there is no command {verb}", where="command line", remedy=f"did you mean: petune {meant}"
        )


def _refuse_settings_as_options(command: Any, words: Sequence[str]) -> None:
    """Raise UsageError for `--lr 1e-4`, an option no verb has, with the setting that is meant."""
    verb = next((command.commands[word] for word in words if word in command.commands), None)
    if verb is None:
        return
    known = {name for option in (*verb.params, *command.params) for name in option.opts} | {"--help", "-h"}
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option in known or option == "--":
            continue
        from petune.recipe.suggest import setting_of

        if key := setting_of(option):
            if not equals:
                value = next((word for word in words[at + 1 : at + 2] if not word.startswith("--")), "VALUE")
            raise UsageError(
                f"{option} is not an option: settings are written key=value",
                where="command line",
                remedy=f"write {key}={value}",
            )


def _undelivered() -> OSError | None:
    """Why what was printed cannot be delivered; None where it has been."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return None


def _drop_output() -> None:
    """Let the rest of the output go nowhere, or Python would complain of it when it closes its streams."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.__stdout__.fileno() if sys.__stdout__ else 1)


def _unusable_name(error: Exception) -> str | None:
    """The name of a file, as far as it is known, that the system could not even look for: too long, with a
    NUL, or no text."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return repr(error.filename)[:80]
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        return repr(error.object[max(0, error.start - 40) : error.end + 40])
    return "a NUL" if isinstance(error, ValueError) and "null byte" in str(error) else None


def _known(error: Exception) -> PetuneError | None:
    """`error` as one of petune's own, or None when nobody foresaw it."""
    if isinstance(error, PetuneError):
        return error
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError) or (torch is not None and isinstance(error, torch.OutOfMemoryError)):
        found = (str(error).splitlines() or [""])[0] or None
        return MachineError(
            "out of memory",
            found=found,
            remedy="use a smaller batch_size or data.max_length, or a smaller model",
        )
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return MachineError("too many open files", remedy="raise the limit: ulimit -n 4096")
    if named := _unusable_name(error):
        return UsageError(
            "no file can have this name", found=named, remedy="give a shorter one, of UTF-8 without NUL"
        )
    if isinstance(error, OSError) and error.errno in _REFUSED_BY_MACHINE:
        where = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else None
        return MachineError(
            str(error.strerror).lower(),
            where=where,
            remedy="free some space, or files (inodes)"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "choose a place that you may read and write",
        )
    return None
