"""`petune watch`: runs in progress in the browser of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from petune.errors import MachineError
from petune_cli.arguments import refuse_no_folder
from petune_cli.echo import echo


def watch(
    folder: Annotated[Path, typer.Argument(help="A run folder, or a folder of runs.")] = Path("runs"),
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: a free one.")] = 0,
) -> None:
    """Watch runs in progress in a browser on this machine."""
    from petune.report.watch import Watch

    refuse_no_folder(folder, "watch")
    try:
        server = Watch(folder, port)
    except OSError as error:
        what = f"port {port} cannot be used: {error.strerror}"
        raise MachineError(what, where="--port", remedy="leave it out") from None
    echo(f"{server.address}\n   open it in a browser on this machine; it is new each time. End with Ctrl-C")
    with server:
        server.serve_forever()
