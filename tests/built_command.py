"""petune's command line, built once for all tests of a process: its many options take longer to build than
most of what is typed takes to run."""

from __future__ import annotations

from functools import cache

from petune_cli.main import command_line

built = cache(command_line)
