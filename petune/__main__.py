"""`python -m petune RECIPE [key=value ...]` trains: what torchrun or srun start, and `--job FILE` what
petune's own launcher does.

Plain lines, the exit codes of `petune`, no terminal needed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from petune.errors import PetuneError
from petune.log import open_closed_streams


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit code."""
    open_closed_streams()
    given = _given(arguments)
    try:
        from petune.log import printable
        from petune.parallel.launch import orders, process_group

        work = _work(given)
    except KeyboardInterrupt:
        return 130
    if orders.SPARE in os.environ:
        orders.take_place()
    try:
        work()
    except BaseException as error:
        if process_group.joined():
            process_group.quit_process(process_group.report(error))
        if isinstance(error, PetuneError):
            with suppress(OSError):  # its terminal may be gone
                print(printable(str(error)), file=sys.stderr)
            return error.code
        if isinstance(error, KeyboardInterrupt):
            return 130
        raise
    return 0


def _given(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m petune", description="train a recipe")
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="keys laid over the recipe"
    )
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--from", dest="checkpoint", metavar="STEP", help="go on from exactly this checkpoint folder"
    )
    parser.add_argument("--overwrite", action="store_true")
    parser.add_argument("--allow-change", action="append", default=[], metavar="KEY")
    parser.add_argument(
        "--since",
        type=float,
        default=0.0,
        metavar="TIME",
        help="when the ranks were first started, for a restart",
    )
    parser.add_argument(
        "--job", type=Path, metavar="FILE", help="what the launcher of `petune train` has settled, alone"
    )
    parser.add_argument(
        "--measure", type=Path, nargs=2, metavar="FILE", help="how fast a device is, for `petune plan --auto`"
    )
    parser.add_argument(
        "--choose", type=Path, nargs=2, metavar="FILE", help="the axes of a recipe with `parallel: auto`"
    )
    given = parser.parse_args(arguments)
    if sum(one is not None for one in (given.recipe, given.job, given.measure, given.choose)) != 1:
        parser.error("the following arguments are required: recipe")
    return given


def _work(given: argparse.Namespace) -> Callable[[], None]:
    """What is asked for, once all is imported that it needs: a spare process has that done before it takes
    another's place."""
    from petune.parallel.launch import process_group
    from petune.run import distributed
    from petune.run.build import Base
    from petune.run.folder import RunFolder
    from petune.run.job import Job, going_on
    from petune.run.rank import Here, run_rank
    from petune.run.train import settle, train

    def do_job() -> None:
        job = Job.read(given.job).again()
        base = Base(job.recipe)
        with job.speaking() as reporter:
            run_rank(job, base, distributed.wanted(job.recipe, base), Here(reporter))

    def train_recipe() -> None:
        again = process_group.restarted() > 0 and going_on(
            RunFolder.of(settle(given.recipe, given.overrides, given.settings)), given.since
        )
        train(
            given.recipe,
            overrides=given.overrides,
            resume=again or given.checkpoint or given.resume,
            overwrite=given.overwrite and not again,
            allow_change=given.allow_change,
            **given.settings,
        )

    if given.measure is not None:
        from petune.estimate.measure import measure_rank

        return partial(measure_rank, *given.measure)
    if given.choose is not None:
        from petune.estimate.findings import choose

        return partial(choose, *given.choose)
    return train_recipe if given.job is None else do_job


if __name__ == "__main__":
    sys.exit(main())
