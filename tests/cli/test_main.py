"""Help on one screen, and every way to fail with its own exit code and one message."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from petune import __version__, errors
from tests.cli.conftest import Type


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Let `petune train` end with `error`."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("petune.run.train.train", fail)


def test_help_fits_a_screen_and_groups_the_verbs(type_: Type) -> None:
    shown = type_("--help")
    assert shown.code == 0
    assert len(shown.out.splitlines()) <= 41
    words = shown.out.split()
    order = [
        words.index(word)
        for word in (
            "Start",
            "train",
            "sweep",
            "init",
            "chat",
            "ls",
            "cp",
            "doctor",
            "Look",
            "runs",
            "report",
            "watch",
            "Check",
            "plan",
            "profile",
            "bench",
            "data",
            "eval",
            "Ship",
            "merge",
            "export",
        )
    ]
    assert order == sorted(order)


@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "sweep",
        "convert",
        "script",
        "chat",
        "ls",
        "cp",
        "doctor",
        "runs",
        "report",
        "watch",
        "check",
        "plan",
        "profile",
        "bench",
        "data",
        "eval",
        "merge",
        "export",
        "generate",
    ],
)
def test_every_verb_has_help(type_: Type, verb: str) -> None:
    shown = type_(verb, "--help")
    assert shown.code == 0
    assert f"petune {verb}" in shown.out


def test_version(type_: Type) -> None:
    assert type_("--version").out == f"petune {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        ("bogus",),
        ("train", "--bogus"),
        ("export", "x", "--to", "tgi"),
        ("export", "x"),
        ("data", "-n", "many"),
    ],
)
def test_a_wrong_command_line_is_exit_2(type_: Type, words: tuple[str, ...]) -> None:
    assert type_(*words).code == 2


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.RecipeError, 2),
        (errors.DataError, 3),
        (errors.FileError, 4),
        (errors.MachineError, 5),
        (errors.DistributedError, 6),
        (errors.TrainingFault, 7),
        (errors.Stopped, 75),
    ],
)
def test_each_kind_of_error_has_its_exit_code(
    type_: Type, monkeypatch: pytest.MonkeyPatch, kind: Any, code: int
) -> None:
    raising(monkeypatch, kind("it broke", where="here", remedy="mend it"))
    shown = type_("train", "llama_lora")
    assert (shown.code, shown.err) == (code, "here  it broke\n   mend it\n")


def test_an_unforeseen_error_is_one_message_without_traceback(
    type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(monkeypatch, ZeroDivisionError("first\nsecond"))
    shown = type_("train", "llama_lora")
    assert shown.code == 1
    assert (
        shown.err
        == "petune: internal error: ZeroDivisionError: first\n   run again with --debug to see where\n"
    )


@pytest.mark.parametrize("words", [("--debug", "train", "llama_lora"), ("train", "llama_lora", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(
    type_: Type, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    raising(monkeypatch, errors.DataError("it broke"))
    shown = type_(*words)
    assert shown.code == 3
    assert "Traceback" in shown.err


def test_debug_after_a_double_dash_is_a_word(type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, errors.DataError("it broke"))
    shown = type_("train", "--", "--debug")
    assert shown.code == 2
    assert "--debug" in shown.err


def test_ctrl_c_is_exit_130(type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert type_("train", "llama_lora").code == 130


@pytest.mark.parametrize(
    "words",
    [("check", "--schema"), ("ls",)],
    ids=["a flushed text", "a table left in the buffer"],
)
def test_who_reads_the_output_may_go_away(words: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", "from petune_cli.main import app; app()", *words]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=120, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_run_stopped_by_a_broken_pipe_says_where_it_is_and_ends_with_141(
    type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = errors.Stopped("stopped; saved runs/x", remedy="go on with: petune train runs/x --resume")
    stopped.__cause__ = BrokenPipeError(errno.EPIPE, "Broken pipe")
    monkeypatch.setattr("petune_cli.main._drop_output", lambda: None)
    raising(monkeypatch, stopped)
    shown = type_("train", "llama_lora")
    assert shown.code == 141 and "saved runs/x" in shown.err and "--resume" in shown.err


def test_an_output_that_is_full_is_named() -> None:
    command = [sys.executable, "-c", "from petune_cli.main import app; app()", "--version"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert ended.returncode == 5
    assert (
        ended.stderr == b"standard output  no space left on device\n   free some space, or files (inodes)\n"
    )


@pytest.mark.parametrize("closed", [(0, 2), (1,)], ids=["input and error", "output"])
def test_closed_standard_streams_are_the_null_device(closed: tuple[int, ...], tmp_path: Path) -> None:
    """And no file of a run gets their numbers."""
    names = [("stdin", "stdout", "stderr")[number] for number in closed]
    places = "' '.join(os.readlink(f'/proc/self/fd/{number}') for number in range(3))"
    code = f"""if True:
        import atexit, os, pathlib, sys
        [os.close(number) for number in {closed}]
        [setattr(sys, name, None) for name in {names}]
        atexit.register(lambda: pathlib.Path("seen").write_text({places}))
        from petune_cli.main import app
        app(["generate", "nowhere", "--json"])"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, input=b"", capture_output=True, timeout=120, check=False)
    assert ended.returncode == 2 and b"internal" not in ended.stderr
    seen = (tmp_path / "seen").read_text().split()
    assert [number for number, place in enumerate(seen) if place == "/dev/null"] == [*closed]


def test_recipes_are_listed_without_torch() -> None:
    code = "import sys; from petune_cli.recipes import ls; ls(); print({'torch'} & {*sys.modules})"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.endswith("set()\n")


def test_of_what_the_hub_says_of_its_retries_only_a_limit_is_shown(
    type_: Type,
) -> None:
    type_("ls")
    heard = io.StringIO()
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addHandler(handler := logging.StreamHandler(heard))
    for line in (
        "'[Errno -2] Name or service not known' thrown while requesting HEAD https://huggingface.co/a/b",
        "Retrying in 8s [Retry 4/5].",
        "Rate limited. Waiting 9.0s before retry [Retry 1/5].",
    ):
        logger.warning(line)
    logger.removeHandler(handler)
    assert heard.getvalue() == f"{line}\n"


def test_python_searches_nothing_for_garbage_as_the_command_ends() -> None:
    """With torch in memory that search takes longer than a stop may."""
    code = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > len(gc.get_objects())));"
    command = [sys.executable, "-c", f"{code} from petune_cli.main import app; app(['ls', 'nowhere'])"]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout.endswith(
        "True\n"
    )


@pytest.mark.parametrize("loaded", [True, False])
def test_what_triton_says_of_garbage_at_the_end_is_not_heard(loaded: bool) -> None:
    late = "import atexit, os, sys; atexit.register(os.write, 2, b'leaked 514 functions');"  # runs last
    code = f"{late} sys.modules.update({{'triton': None}} if {loaded} else {{}});"
    command = [sys.executable, "-c", f"{code} from petune_cli.main import app; app(['ls', 'nowhere'])"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode in (2, 4), ended
    assert "nowhere" in ended.stderr and ("leaked" in ended.stderr) != loaded


def test_out_of_memory_and_a_full_disk_are_the_machines_fault(
    type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    for error in (
        torch.OutOfMemoryError("no room"),
        MemoryError(),
        *(
            OSError(code, "no", "runs/x")
            for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
        ),
        PermissionError(13, "no", "x"),
    ):
        raising(monkeypatch, error)
        shown = type_("train", "llama_lora")
        assert shown.code == 5, error
        assert "Traceback" not in shown.err


def test_other_errors_of_the_system_are_internal(type_: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, IsADirectoryError(errno.EISDIR, "is a directory", "x"))
    assert type_("train", "llama_lora").code == 1


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("train", "llama_lora", "--lr", "1e-4"), "write lr=1e-4"),
        (("train", "--learning-rate=1e-4"), "write lr=1e-4"),
        (("check", "--method.r", "4"), "write method.r=4"),
        (("train", "--batch-size"), "write batch_size=VALUE"),
        (("train", "--rank", "8"), "write method.r=8"),
    ],
)
def test_a_setting_written_as_an_option_is_told_how_settings_are_written(
    words: tuple[str, ...], remedy: str, type_: Type
) -> None:
    shown = type_(*words)
    assert shown.code == 2 and shown.err.rstrip().endswith(remedy)


@pytest.mark.parametrize(
    ("verb", "meant"), [("predict", "generate"), ("finetune", "train"), ("evaluate", "eval")]
)
def test_a_verb_of_other_tools_is_told_what_it_is_called_here(verb: str, meant: str, type_: Type) -> None:
    shown = type_(verb, "runs/mine", "words")
    assert shown.code == 2 and f"did you mean: petune {meant}\n" in shown.err


def test_options_of_a_verb_and_options_of_none_are_left_to_it(type_: Type) -> None:
    assert "No such option" in type_("train", "--banana").err
    assert type_("train", "--help").code == 0


def test_the_home_behind_an_equals_sign_is_a_folder(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "a.yml").write_text("base_model: org/m\nadapter: lora\nmicro_batch_size: 2\n")
    assert type_("convert", "a.yml", "data=rows.csv", "--out=~/b.yaml").code == 0
    assert (tmp_path / "home" / "b.yaml").is_file() and not (tmp_path / "~").exists()
