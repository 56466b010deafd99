"""A picture of a page, by a real browser: `python -m benchmarks.screenshot RUN|FILE OUT.png [WIDTH [dark]]`.
Those of the documents: `python -m benchmarks.screenshot docs RUN`, of a run that is done, and
`python -m benchmarks.screenshot compared`, of three that it trains.

The browser is chromium (Debian: apt install chromium), without a window, spoken to through a pipe; nothing is
installed for it and no port is opened. Tests of pages use the same.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import chdir, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from petune.report.files import RunFiles
from petune.report.page import write_report
from petune.report.watch import Watch

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60


def program() -> str | None:
    """Where the browser is; None where there is none."""
    return next((found for name in PROGRAMS if (found := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are not among the first numbers, which chromium gets."""
    ends = os.pipe()
    high = fcntl.fcntl(ends[0], fcntl.F_DUPFD_CLOEXEC, 10), fcntl.fcntl(ends[1], fcntl.F_DUPFD_CLOEXEC, 10)
    for end in ends:
        os.close(end)
    return high


class Browser:
    """One tab of chromium. errors: what pages said on the console, and what was refused or thrown."""

    def __init__(self, width: int = 1100, height: int = 900, *, dark: bool = False) -> None:
        self.size, self.dark = (width, height), dark
        self.errors: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._number, self._rest, self._session = 0, b"", ""

    def __enter__(self) -> Browser:
        found = program()
        assert found is not None, "there is no chromium here"
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (reads, self._to), (self._from, writes) = _pipe(), _pipe()
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        words += ["--remote-debugging-pipe", f"--user-data-dir={self._home.name}", "about:blank"]
        # chromium reads from 3 and writes to 4
        shell = f'exec "$0" "$@" 3<&{reads} 4>&{writes}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, found, *words],
            pass_fds=(reads, writes),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        width, height = self.size
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if self.dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        with suppress(AssertionError, OSError, subprocess.TimeoutExpired):  # it ends its own processes first
            self.call("Browser.close")
            self._process.wait(TIMEOUT_S)
        self._process.kill()
        self._process.wait(TIMEOUT_S)
        os.close(self._to)
        os.close(self._from)
        self._home.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """What chromium's DevTools protocol answers to a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._from, 1 << 20)
            assert more, "chromium has ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        if event.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.errors.append(json.dumps(event["params"])[:500])

    def open(self, address: str) -> None:
        """Go to an address and wait until it is loaded."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._note(self._read())

    def ask(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Move the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, *, whole: bool = True) -> bytes:
        """The page as a PNG, all of it or what is in sight."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])


def shot(
    address: str, out: Path, width: int = 1100, *, dark: bool = False, height: int = 1500, part: str = ""
) -> None:
    """The page at an address as a PNG; with `part`, from the section of that heading on."""
    with Browser(width, height, dark=dark) as browser:
        browser.open(address)
        if part:
            named = (
                f"[...document.querySelectorAll('h2')].find(one => one.textContent === {json.dumps(part)})"
            )
            browser.ask(f"{named}.scrollIntoView()")
        out.write_bytes(browser.picture(whole=False))
        print(f"{out}: {out.stat().st_size:,} bytes; on the console: {browser.errors or 'nothing'}")


DOCS = Path(__file__).parent.parent / "docs"
SCHEMES = (("", False), ("-dark", True))
TRAIN = [sys.executable, "-c", "from petune_cli.main import app; app()", "train"]
GOING = ["bert_lora", "model=demo:tiny-llama", "max_steps=80", "eval_every=20", "data.max_length=32"]
GOING += ["batch_size=8", "parallel=dp:2", "out=runs/docstrings"]
METHODS = ("lora", "adapter", "side")
SHORT = ["max_steps=60", "eval_every=15", "data.max_length=32", "batch_size=8"]


def docs(run: Path) -> None:
    """The pictures of docs/report.md, light and dark: the page about a run that is done, the live page with
    it and another that two processes train meanwhile, in this folder, and what its page says of them."""
    shutil.copytree(run, Path("runs") / run.name)
    page = (Path("runs") / run.name / "report.html").resolve().as_uri()
    for name, dark in SCHEMES:
        shot(page, DOCS / f"report{name}.png", dark=dark)
    metrics = Path("runs/docstrings/metrics.jsonl")
    with subprocess.Popen([*TRAIN, *GOING]) as going, Watch(Path("runs")) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            while going.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 50):
                time.sleep(0.5)
            for name, dark in SCHEMES:
                shot(server.address, DOCS / f"watch{name}.png", dark=dark, height=800)
                page = f"{server.address}docstrings"
                shot(page, DOCS / f"watch-ranks{name}.png", dark=dark, height=260, part="Parallel plan")
        finally:
            going.terminate()
            server.shutdown()


def compared() -> None:
    """The picture of a page about several runs, light and dark: three methods, trained in this folder."""
    for method in METHODS:
        subprocess.run([*TRAIN, f"llama_{method}", *SHORT, f"out=runs/{method}"], check=True)
    write_report([RunFiles(Path("runs") / method) for method in METHODS], Path("compared.html"))
    for name, dark in SCHEMES:
        shot(Path("compared.html").resolve().as_uri(), DOCS / f"compared{name}.png", dark=dark, height=1240)


def main(words: list[str]) -> None:
    """Take the picture."""
    if words[0] in ("docs", "compared"):
        runs = [Path(word).resolve() for word in words[1:]]
        with tempfile.TemporaryDirectory(prefix="petune-") as folder, chdir(folder):
            return docs(*runs) if words[0] == "docs" else compared()
    source, out, *more = words
    page = Path(source) / "report.html" if Path(source).is_dir() else Path(source)
    shot(page.resolve().as_uri(), Path(out), int(more[0]) if more else 1100, dark="dark" in more)


if __name__ == "__main__":
    main(sys.argv[1:])
