"""A picture of a command in the terminal: `python -m benchmarks.terminal OUT.svg COMMAND ...` runs it and
draws what it prints, as SVG.

That of the demo takes five minutes: `python -m benchmarks.terminal docs/terminal.svg petune train
recipes/bert_lora.yaml --overwrite`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 130  # letters; what is longer is cut, which three dots show
_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # rich would load them from elsewhere


def drawn(command: str, said: str) -> str:
    """A terminal in which `command` was typed and has `said` something, as SVG without anything to load."""
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "green"), (command, "bold")))
    for line in said.splitlines():
        shown = line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
        console.print(
            shown, style="bold" if line.startswith("evaluation") else None, markup=False, highlight=False
        )
    return _FONTS.sub("", console.export_svg(title="petune", unique_id="terminal"))


def main(words: list[str]) -> None:
    """Run the command, show what it says, and draw it."""
    out, *command = words
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=offline, text=True) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if running.returncode:
        sys.exit(running.returncode)
    Path(out).write_text(drawn(shlex.join(command), "".join(lines)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
