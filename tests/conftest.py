"""What every test stands on: OMP_NUM_THREADS threads, else one, no hub, and a fixture that proves a thing
works without a network.

The environment is set before anything can import torch or transformers. Tiny models of every family are in
tests/methods/zoo.py.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
)
# ranks without petune's launcher would make the user's own in the home folder
os.environ["PETUNE_SECRET"] = "of the tests"
if not os.path.exists("/dev/nvidia0") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when a kernel is defined

import gc
import socket
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.crossings import leave_to_long
from tests.long_cells import cell, long_cells
from tests.marks import REACHED, marks_of
from tests.slow_tests import named, slow_tests

if TYPE_CHECKING:  # no test needs torch for it
    from tests.pool import Standing

# The same examples on every machine; `make test-long` draws fresh ones (--hypothesis-profile=fresh). There is
# no deadline, for another process may hold the processor for as long.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fresh", deadline=None)
settings.load_profile("same")

PETUNE = str(Path(__file__).parent.parent / "petune")
COMPILERS = ("/torch/_inductor/", "/torch/_dynamo/", "/torch/_functorch/")  # they read caches of their own
STARTS = (
    *("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"),
    *("os.system", "os.exec", "os.spawn", "pty.spawn"),
)
HEARD = frozenset((*STARTS, "pickle.find_class"))
LISTING = [("fc-list",)]  # by which matplotlib finds fonts, once for a user and a machine
_unpickled: list[str] = []
_started: list[str] = []


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    """Note which processes are started, and what is unpickled by petune or by a library that it has
    called."""
    if event not in HEARD:  # as nearly all, every call of id() among them
        return
    if event in STARTS and arguments[:1] not in LISTING:
        _started.append(f"{event} {arguments}")
    frame: FrameType | None = sys._getframe(1) if event == "pickle.find_class" else None
    while frame is not None and not any(place in frame.f_code.co_filename for place in COMPILERS):
        if frame.f_code.co_filename.startswith(PETUNE):
            _unpickled.append(f"{arguments} beneath {frame.f_code.co_filename}:{frame.f_lineno}")
            return
        frame = frame.f_back


@pytest.fixture
def no_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers computes in float32 whatever a model's dtype is (softmax, norms, routers) stays in
    float64: ranks would round their parts of a gradient to float32 before these are summed."""
    import torch

    softmax, narrow = torch.nn.functional.softmax, torch.Tensor.float

    def wide(x: Any, *args: Any, dtype: Any = None, **given: Any) -> Any:
        return softmax(x, *args, dtype=dtype and torch.promote_types(dtype, x.dtype), **given)

    monkeypatch.setattr(torch.nn.functional, "softmax", wide)

    def kept(x: Any) -> Any:
        """Of numbers that are none of the model's, positions say, what multiplies such that are."""
        return narrow(x) if x.is_floating_point() and x.dtype != torch.float64 else x.double()

    monkeypatch.setattr(torch.Tensor, "float", kept)


@pytest.fixture(autouse=True)
def unpickled() -> Iterator[list[str]]:
    """What is unpickled beneath petune in a test, which fails for it."""
    _unpickled.clear()
    yield _unpickled
    assert _unpickled == []


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what crossings and dear tests leave to `make test-long`, and, where -m asks for it, tests that
    start processes, run kernels in Triton's interpreter or are slow: to look takes a fifth of collecting."""
    leave_to_long(items)
    asked = any(mark in config.option.markexpr for mark in REACHED)
    for item in items:
        if isinstance(item, pytest.Function):
            for mark in _reached(item) if asked else ():
                item.add_marker(mark)
            if asked and named(item.module.__name__, item.name) in slow_tests():
                item.add_marker("slow")
            dear = cell(item.module.__name__, item.name) in long_cells()
            if dear and item.get_closest_marker("crossed") is None:
                item.add_marker("long")


def _reached(item: pytest.Function) -> set[str]:
    """The marks of a test by its code, that of its fixtures, and its parameters."""
    fixtures = [one[-1].func for name, one in item._fixtureinfo.name2fixturedefs.items()]
    settings = list(item.callspec.params.values()) if hasattr(item, "callspec") else []
    return marks_of([item.function, *fixtures], settings)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Search for no garbage while tests are collected, for what is imported stays, and keep it out of every
    later search, which takes a third of a second else, and copies every page in a fork. Search seldom: of a
    model alone there are as many objects as start three searches."""
    gc.disable()
    try:
        return (yield)
    finally:
        # There is no way to take one away, a second would cost every test a hundredth, and collecting, in
        # which nothing is listened for, takes a tenth less without.
        sys.addaudithook(_hear)
        gc.freeze()
        gc.set_threshold(20_000, 10, 10)
        gc.enable()


@pytest.fixture(autouse=True)
def started(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """What a test starts. One that starts a process is marked so, by tests/marks.py or by hand, or fails; but
    where there is a GPU, for Triton's compiler starts some."""
    _started.clear()
    yield _started
    if _started and not os.path.exists("/dev/nvidia0"):
        marked = request.node.get_closest_marker("forks") or "forks" in _reached(request.node)
        assert marked, f"mark this test with forks: it starts {_started[0]}"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """As many threads as were asked for, whatever the test before has set: two workers with one each do not
    fight over two cores."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    yield


@pytest.fixture(scope="session", autouse=True)
def _quick_runs() -> Iterator[None]:
    """Nothing waits for the disk, which is seen after a loss of power alone; no run draws a picture, here or
    in a fork, whatever a test undoes; and no stack is written down beside the seed of a device that is not
    there, which takes longer than to make a small model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        if "torch" in sys.modules:
            for kind in ("cuda", "xpu", "mtia"):
                device = getattr(sys.modules["torch"], kind)
                if not device.is_available():
                    patch.setattr(device, "manual_seed_all", lambda seed: None)
        if "petune.run.folder" in sys.modules:
            patch.setattr("petune.run.folder.draw_loss", lambda metrics, picture: False)
        yield


@pytest.fixture(scope="module")
def that_stay() -> Iterator[Standing]:
    """Ranks that stay to the end of a file of tests. By this alone no test is one that forks."""
    from tests.parallel import harness

    made = harness.Standing()
    yield made
    made.end()


@pytest.fixture
def standing(request: pytest.FixtureRequest, that_stay: Standing) -> Iterator[None]:
    """They run the cases of a test that asks for this, or of a file of them; but none of a test that patches
    something, which they would not see."""
    from tests.parallel import harness

    harness.standing = None if "monkeypatch" in request.fixturenames else that_stay
    yield
    harness.standing = None


@pytest.fixture
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss.png at the end of a run: drawing it takes longer than the run."""
    monkeypatch.setattr("petune.run.folder.draw_loss", lambda metrics, picture: False)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss.png at the end of a run."""
    from petune.run.plot import draw_loss

    monkeypatch.setattr("petune.run.folder.draw_loss", draw_loss)


@pytest.fixture
def fast_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that notice a lost one within a second."""
    monkeypatch.setattr("petune.parallel.launch.beats.BEAT_S", 0.1)
    monkeypatch.setattr("petune.parallel.launch.beats.SILENT_S", 0.5)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection or name look-up that would leave this machine fails the test at once."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo

    def refuse_far(host: object) -> None:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in (None, "", "localhost", "::1") and not str(name).startswith("127."):
            pytest.fail(f"this test may not use the network, but asked for {name}")

    def guarded_connect(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            refuse_far(address[0])
        connect(self, address)

    def guarded_look_up(host: Any, *rest: Any, **settings: Any) -> Any:
        refuse_far(host)
        return look_up(host, *rest, **settings)

    monkeypatch.setattr(socket.socket, "connect", guarded_connect)
    monkeypatch.setattr(socket.socket, "connect_ex", guarded_connect)
    monkeypatch.setattr(socket, "getaddrinfo", guarded_look_up)
