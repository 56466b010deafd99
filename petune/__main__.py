"""`python -m petune RECIPE [key=value ...]` trains: what a launcher starts. Plain lines, the exit codes of `petune`, no terminal needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from petune.errors import PetuneError


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what the command line says; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m petune", description="train a recipe")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args(arguments)
    from petune.train import train

    try:
        train(given.recipe, overrides=given.overrides, resume=given.resume, overwrite=given.overwrite)
    except PetuneError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
