"""`petune watch` prints its address, and refuses what it cannot watch."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from petune.report.watch import Watch
from tests.cli.conftest import Type


def test_the_address_is_printed_before_it_serves(
    type_: Type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Path] = []
    monkeypatch.setattr(Watch, "serve_forever", lambda self: served.append(self.folder))
    (tmp_path / "runs").mkdir()
    shown = type_("watch")
    assert shown.code == 0 and served == [Path("runs")]
    assert shown.out.startswith("http://127.0.0.1:") and len(shown.out.split("/")[3]) >= 32


def test_a_folder_that_is_not_there_and_a_port_that_is_taken_are_refused(type_: Type, tmp_path: Path) -> None:
    assert type_("watch", "nothing").code == 2
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        shown = type_("watch", ".", "--port", str(taken.getsockname()[1]))
    assert shown.code == 5 and "cannot be used" in shown.err
