"""Runs in progress as a live page, on this machine alone: `http://127.0.0.1:PORT/TOKEN/`.

The server reads the files a run writes and nothing else. Who does not know the token, which is new at every
start, gets nothing, nor does a page of another site whose name was pointed here (DNS rebinding), as it names
another host. A request never becomes a path: it is looked up among the names of the runs that were found.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote

from petune.files.lock import RunLock
from petune.report import listing
from petune.report.compare import curves
from petune.report.files import RunFiles, find_runs
from petune.report.markup import Markup, element, join, table
from petune.report.page import content, guarded, page, policy
from petune.report.words import figure

HOST = "127.0.0.1"
FRAGMENT = "fragment"  # in place of the page: what is inside it
_OVERLAID = 8  # runs in progress whose curves the first page shows
_CHANGING = (
    *("metrics.jsonl", "summary.json", "setup.json", "ranks.json"),
    *("eval.json", "answers.json", "forecast.json"),
)
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{policy(live=True)}; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Watch(ThreadingHTTPServer):
    """Serves the pages of the runs in `folder`. `token`: what an address must begin with."""

    daemon_threads = True

    def __init__(self, folder: Path, port: int = 0) -> None:
        """Port 0 takes a free one. Raises OSError for one that is taken."""
        self.folder, self.token = folder, secrets.token_urlsafe(24)
        self.reading = Lock()  # of the files, which threads would read twice
        self._read: dict[Path, tuple[object, RunFiles]] = {}
        super().__init__((HOST, port), _Answer)

    @property
    def root(self) -> str:
        """What every address begins with."""
        return f"/{self.token}/"

    @property
    def address(self) -> str:
        """Of the first page."""
        return f"http://{HOST}:{self.server_port}{self.root}"

    @property
    def hosts(self) -> tuple[str, str]:
        """What a browser that was given the address names as its host."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"

    def runs(self) -> Mapping[str, Path]:
        """The run folders there are now, by the names that addresses may use."""
        return {listing.name_below(path, self.folder): path for path in find_runs(self.folder)}

    def files(self, run: Path) -> RunFiles:
        """The files of a run; read again when one of them has changed or its process has ended."""
        stamp = RunLock(run).is_held(), *(_stamp(run / name) for name in _CHANGING)
        if run not in self._read or self._read[run][0] != stamp:
            self._read[run] = stamp, RunFiles(run)
        return self._read[run][1]


class _Answer(BaseHTTPRequestHandler):
    """One request. Only GET and HEAD are understood."""

    server: Watch
    server_version, sys_version = "petune", ""
    timeout = 20

    def do_GET(self) -> None:
        """A page, or a fragment of one."""
        status, said = self._found()
        inside = said.encode()
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(inside)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(inside)

    do_HEAD = do_GET

    def _found(self) -> tuple[HTTPStatus, str]:
        path, _, asked = self.path.partition("?")
        before, token, rest = [*path.split("/", 2), "", ""][:3]
        known = secrets.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode())
        named = self.headers.get_all("Host", []) in [[host] for host in self.server.hosts]
        if before or not known or not named:
            return HTTPStatus.FORBIDDEN, "not allowed: open the address that petune watch printed\n"
        name = unquote(rest).removesuffix("/")
        with self.server.reading:
            runs = self.server.runs()
            if name and name not in runs:
                return HTTPStatus.NOT_FOUND, "there is no such run here\n"
            inside = content([self.server.files(runs[name])]) if name else overview(self.server, runs)
        if asked == FRAGMENT:
            return HTTPStatus.OK, inside
        title = f"{name} | petune watch" if name else "petune watch"
        back = element("p", element("a", "All runs", href=self.server.root)) if name else ""
        return HTTPStatus.OK, page(title, inside, live=f"{path}?{FRAGMENT}", above=back)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: an address in a log would give the token away."""


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        found = file.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def overview(server: Watch, runs: Mapping[str, Path]) -> Markup:
    """The first page: every run with a link to its own, and the curves of those in progress."""
    found = [server.files(path) for path in runs.values()]
    facts = [listing.row(run, name) for name, run in zip(runs, found, strict=True)]
    rows = [_linked(one, server.root) for one in listing.ordered(facts, "began")]
    going = [run for run in found if run.state == "running"][:_OVERLAID]
    numbers = [listing.KEYS.index(key) for key in ("base", "tuned")]
    shown = table(listing.KEYS, rows, numbers=numbers) if rows else element("p", "No run has begun here yet.")
    heading = element("h1", f"{figure(len(rows))} runs, {len(going)} in progress")
    return join(
        (heading, element("p", element("code", str(server.folder)), class_="facts"), shown, _curves(going))
    )


def _linked(one: dict[str, Any], root: str) -> list[str]:
    cells = dict(zip(listing.KEYS, listing.cells(one), strict=True))
    name = element("a", cells["name"], href=root + quote(str(one["name"]), safe="/"))
    return [*(cells | {"name": name, "began": element("time", cells["began"])}).values()]


def _curves(runs: list[RunFiles]) -> Markup:
    return guarded(curves, runs) if runs else Markup()
