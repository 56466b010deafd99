"""Escape sequences from labels, columns, tensors, paths and answers: none reaches a terminal or run.log,
whatever shows them."""

from __future__ import annotations

import ast
import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from petune_cli import display
from petune_cli.display import Live
from petune_cli.echo import echo_answer
from rich.console import Console
from safetensors.torch import load_file, save_file

from petune.log import printable
from petune.run.finished import load_run
from petune.run.reporting import Logged, PlainReporter
from tests.cli.conftest import Type
from tests.small_runs import as_yaml, settings, write_model

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp.exe\u2066\x08\x7f\r\udcff"
CLI = Path(display.__file__).parent


def assert_clean(text: str) -> None:
    """Nothing a terminal obeys."""
    bad = {
        hex(ord(sign)) for sign in text if unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t"
    }
    directions = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    bad |= {hex(ord(sign)) for sign in text if unicodedata.bidirectional(sign) in directions}
    assert not bad, bad


def test_every_control_character_is_written_out_and_nothing_else():
    everything = "".join(map(chr, range(0x30000)))
    shown = printable(everything)
    assert_clean(shown)
    assert "\\x1b" in shown and "\\u202e" in shown and "\\udcff" in shown and "\\x9b" in shown
    ordinary = "naïve 日本語 \N{GRINNING FACE} tab\tand\nline \N{ZERO WIDTH JOINER} C:\\dir"
    assert printable(ordinary) == ordinary
    shown.encode()


@pytest.mark.usefixtures("no_picture")
def test_labels_columns_paths_and_answers_are_written_out_by_every_verb(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    labels = [HOSTILE.replace("\udcff", "") + end for end in ("a", "b")]
    base = settings(tmp_path, "bert")
    folder = tmp_path / "data\x1b[31m"
    folder.mkdir()
    texts = [json.loads(line)["text"] for line in Path(base["data"]["path"]).read_text().splitlines()]
    rows = [
        {"text": text, "label": labels[number % 2], "more\x1b[5m\u202e": 1}
        for number, text in enumerate(texts)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = base | {
        "data": {"path": str(folder / "rows.jsonl")},
        "out": "run\x1b[7m",
        "max_steps": 2,
        "warmup": 0,
    }
    model = write_model(tmp_path / "model", "bert")
    recipe = as_yaml(tmp_path / "r.yaml", shape | {"model": str(model)})
    for words in (
        ["check", str(recipe)],
        ["data", str(recipe)],
        ["train", str(recipe)],
        ["eval", shape["out"]],
        ["plan", str(recipe)],
    ):
        shown = type_(*words)
        assert shown.code == 0, shown.err
        assert_clean(shown.out + shown.err)
        if words[0] in ("data", "train"):
            assert "\\x1b]0;owned" in shown.out
    log = (tmp_path / shape["out"] / "run.log").read_text()
    assert_clean(log)
    assert "\\x1b]0;owned" in log and "more\\x1b[5m\\u202e" in log
    said = type_("generate", shape["out"], "red sun").out
    assert said.removesuffix("\n") in labels  # to a pipe, exactly what the model says
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert_clean(type_("generate", shape["out"], "red sun").out)
    assert load_run(tmp_path / shape["out"]).generate("red sun") in labels


def test_errors_that_quote_a_file_are_written_out(type_: Type, tmp_path: Path):
    recipe = settings(tmp_path, data={"path": "x\x1b[31m.jsonl"})
    shown = type_("check", str(as_yaml(tmp_path / "r.yaml", recipe)))
    assert shown.code == 3 and "\\x1b[31m.jsonl" in shown.err
    assert_clean(shown.err)
    whole = settings(tmp_path)
    weights = tmp_path / "llama" / "model.safetensors"
    tensors = load_file(weights)
    hostile = {
        (f"{name}{HOSTILE[:-1]}" if "layers.1" in name else name): value for name, value in tensors.items()
    }
    save_file(hostile, weights, {"format": "pt"})
    for debug in ((), ("--debug",)):
        shown = type_("train", str(as_yaml(tmp_path / "r.yaml", whole)), *debug)
        assert shown.code == 4 and "\\x1b]0;owned" in shown.err, shown.err
        assert_clean(shown.out + shown.err)


def test_the_live_display_and_the_log_write_them_out(tmp_path: Path):
    screen = io.StringIO()
    live = Live(Console(file=screen, force_terminal=True, width=200))
    logged, plain = Logged(live, tmp_path / "run.log", tmp_path / "metrics.jsonl"), list[str]()
    record: dict[str, Any] = {
        "step": 1,
        "epoch": 1.0,
        "loss": 1.0,
        "lr": 0.1,
        "grad_norm": 1.0,
        "tokens": 1,
        "tokens_per_s": 1.0,
    }
    for reporter in (logged, PlainReporter(plain.append)):
        reporter.header([f"model {HOSTILE}"], 1)
        reporter.step(record)
        reporter.evaluated({"step": 1, f"eval_{HOSTILE}": 1.0})
        reporter.note(f"[bold]{HOSTILE}[/bold]")
        reporter.done([HOSTILE])
    logged.write_error(ValueError(HOSTILE))
    live.close()
    shown = screen.getvalue()
    assert (
        "\x1b]0" not in shown
        and "\x9b" not in shown
        and "\u202e" not in shown
        and "[2J" not in shown.replace("\\x1b[2J", "")
    )
    assert shown.count("\\x1b]0;owned\\x07") == 4 and "[bold]" in shown
    assert_clean((tmp_path / "run.log").read_text())
    assert_clean("".join(plain))


def test_a_table_on_a_terminal_takes_no_markup_and_no_escapes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows = [["[link=http://x]name[/link]", HOSTILE]]
    display.show_table(("a", "b"), rows)
    assert_clean(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    display.show_table(("a", "b"), rows)
    shown = capsys.readouterr().out
    assert "[link=http://x]name[/link]" in shown and "\x1b]0" not in shown and "\u202e" not in shown


def test_an_answer_to_a_pipe_is_exact(capsys: pytest.CaptureFixture[str]):
    echo_answer("\x1b[31mred\x1b[0m")
    assert capsys.readouterr().out == "\x1b[31mred\x1b[0m\n"


def test_no_verb_prints_but_by_echo():
    for file in CLI.glob("*.py"):
        calls = {
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        }
        assert file.name == "echo.py" or not calls & {
            "typer.echo",
            "typer.secho",
            "print",
            "sys.stdout.write",
        }, file
