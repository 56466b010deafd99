"""The live page answers who has its address, on this machine, and nobody else."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from petune.files.lock import RunLock
from petune.report.watch import HOST, Watch
from tests.made_runs import Parsed, evaluation, step_records, write_run


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Watch]:
    """Two runs, watched."""
    write_run(tmp_path / "runs" / "done")
    write_run(tmp_path / "runs" / "deep" / "a b&c", 40, records=step_records(9), finished=False)
    (tmp_path / "secret.txt").write_text("secret")
    with Watch(tmp_path / "runs") as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(server: Watch, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, str]:
    """Status and text of an answer."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    for one in [f"{HOST}:{server.server_port}"] if host is None else host.split("|"):
        if one:
            connection.putheader("Host", one)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_first_page_links_every_run(served: Watch) -> None:
    status, text = asked(served, served.root)
    page = Parsed(text)
    assert status == 200 and page.unclosed == [] and "2 runs, 0 in progress" in page.text
    links = [found["href"] for found in page.all("a")]
    assert sorted(links) == [f"{served.root}deep/a%20b%26c", f"{served.root}done"]
    for link in links:
        status, text = asked(served, link)
        assert status == 200 and Parsed(text).unclosed == []
        assert Parsed(text).all("main")[0]["data-live"] == f"{link}?fragment"


def test_the_fragment_follows_the_run(served: Watch) -> None:
    folder = served.folder / "deep" / "a b&c"
    address = f"{served.root}deep/a%20b%26c?fragment"
    with RunLock(folder):
        status, before = asked(served, address)
        assert status == 200 and "step 9 of 40" in before and "<html" not in before
        assert asked(served, address)[1] == before
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(
                "".join(json.dumps(one) + "\n" for one in (*step_records(3, first=10), evaluation(12, 0.8)))
            )
        assert "step 12 of 40" in asked(served, address)[1]
        text = Parsed(asked(served, f"{served.root}?fragment")[1]).text
        assert "2 runs, 1 in progress" in text and "Curves" in text
    assert "stopped" in asked(served, address)[1]


def test_a_run_that_began_meanwhile_appears(served: Watch) -> None:
    write_run(served.folder / "new")
    assert f"{served.root}new" in asked(served, served.root)[1]


@pytest.mark.parametrize(
    "path", ["/", "/wrong/", "/NEARLY/", "http://elsewhereROOT", "xROOT", "*", "/%C3%A9/"]
)
def test_without_the_token_nothing_is_told(path: str, served: Watch) -> None:
    nearly = served.token[:-1] + ("a" if served.token[-1] != "a" else "b")
    path = path.replace("NEARLY", nearly).replace("ROOT", served.root)
    status, text = asked(served, path)
    assert status == 403 and "done" not in text and served.token not in text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:PORT", "", "127.0.0.1", "127.0.0.1:PORT|evil.example"]
)
def test_another_hosts_name_is_refused(host: str, served: Watch) -> None:
    status, text = asked(served, served.root, host=host.replace("PORT", str(served.server_port)))
    assert status == 403 and "done" not in text


def test_localhost_is_this_machine_too(served: Watch) -> None:
    assert asked(served, served.root, host=f"localhost:{served.server_port}")[0] == 200


@pytest.mark.parametrize(
    "name",
    [
        *(
            "../secret.txt",
            "..%2fsecret.txt",
            "%2e%2e/secret.txt",
            "done/../../secret.txt",
            "done/summary.json",
        ),
        *("/etc/passwd", "%2fetc%2fpasswd", "done%00", "deep", "./done", "done//", "..", "~", "a" * 5000),
    ],
)
def test_a_name_that_is_no_run_is_not_found(name: str, served: Watch) -> None:
    status, text = asked(served, served.root + name)
    assert status == 404 and "secret" not in text and "root:" not in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(method: str, served: Watch) -> None:
    assert asked(served, served.root, method=method)[0] == 501


def test_a_head_request_has_no_body(served: Watch) -> None:
    assert asked(served, served.root, method="HEAD") == (200, "")


def test_answers_may_not_be_kept_framed_or_read_by_others(served: Watch) -> None:
    connection = http.client.HTTPConnection(HOST, served.server_port, timeout=10)
    connection.request("GET", served.root)
    found = connection.getresponse().headers
    assert found["Cache-Control"] == "no-store" and found["Referrer-Policy"] == "no-referrer"
    assert (
        found["Cross-Origin-Resource-Policy"] == "same-origin"
        and found["X-Content-Type-Options"] == "nosniff"
    )
    said = found["Content-Security-Policy"]
    assert "default-src 'none'" in said and "frame-ancestors 'none'" in said and "connect-src 'self'" in said
    assert "Access-Control-Allow-Origin" not in found
    connection.close()


def test_it_listens_on_this_machine_alone_under_a_token_of_its_own(served: Watch) -> None:
    assert served.server_address[0] == "127.0.0.1" and len(served.token) >= 32
    with Watch(served.folder) as other:
        assert other.token != served.token and served.token in served.address


def test_a_folder_without_runs_is_said_to_be_empty(tmp_path: Path) -> None:
    with Watch(tmp_path) as server:
        Thread(target=server.handle_request).start()
        assert "No run has begun here yet." in asked(server, server.root)[1]
