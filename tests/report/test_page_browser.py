"""Pages in a real browser (`make test-system`): no word on the console, curves where they should be, values
under the pointer."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from benchmarks.screenshot import Browser, program
from petune.files.lock import RunLock
from petune.report.files import RunFiles
from petune.report.page import write_report
from petune.report.watch import Watch
from tests.made_runs import step_records, write_run

pytestmark = [
    pytest.mark.system,
    pytest.mark.forks,
    pytest.mark.skipif(program() is None, reason="no chromium here: apt install chromium"),
]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser(420) as found:
        yield found


def test_a_page_loads_fits_a_phone_and_shows_what_is_under_the_pointer(
    browser: Browser, tmp_path: Path
) -> None:
    name = "</script><img src=x onerror=alert(1)>"
    folder = write_run(tmp_path / "run", 40, settings={"model": name})
    write_report([RunFiles(folder)], tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri())
    assert name in browser.ask("document.body.innerText") and browser.ask("document.images.length") == 0
    assert browser.ask("document.documentElement.scrollWidth") <= 420
    points = (
        "document.querySelector('path.line.faint').getAttribute('d').split(/[ ML]+/).filter(Boolean).length"
    )
    assert browser.ask(points) == 40
    browser.ask("document.querySelector('svg').scrollIntoView({block: 'center'})")
    frame = "JSON.stringify(document.querySelector('svg').getBoundingClientRect())"
    box = json.loads(browser.ask(frame))
    shown = "document.querySelector('figure output').textContent"
    before = browser.ask(shown)
    browser.point(box["left"] + box["width"] * 0.5, box["top"] + box["height"] * 0.5)
    assert browser.ask(shown).startswith("step ") and "loss " in browser.ask(shown)
    browser.point(1, 1)
    assert browser.ask(shown) == before
    browser.ask("dispatchEvent(new Event('beforeprint'))")
    assert browser.ask("[...document.querySelectorAll('details')].every((part) => part.open)")
    assert browser.errors == []


def test_the_live_page_follows_the_run(browser: Browser, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "one", 40, records=step_records(9), finished=False)
    with Watch(tmp_path / "runs") as server, RunLock(folder):
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            browser.open(f"{server.address}one")
            assert "step 9 of 40" in browser.ask("document.body.innerText")
            browser.ask("document.querySelector('details').open = true")
            write_run(tmp_path / "more", 12, records=step_records(12), finished=False)
            (folder / "metrics.jsonl").write_bytes((tmp_path / "more" / "metrics.jsonl").read_bytes())
            ends = time.monotonic() + 30
            while "step 12 of 40" not in browser.ask("document.body.innerText") and time.monotonic() < ends:
                time.sleep(0.2)
            assert "step 12 of 40" in browser.ask("document.body.innerText")
            assert "up to date at" in browser.ask("document.getElementById('live').textContent")
            assert browser.ask("document.querySelector('details').open")
            assert browser.errors == []
        finally:
            server.shutdown()
            thread.join()
