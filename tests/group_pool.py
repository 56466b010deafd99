"""Several ranks of a run in one test: `ranks(2, function, ...)` calls the function in two forked processes,
as a launcher starts them.

Where tests/pool.py makes the group itself, this sets the environment of a launcher and leaves joining to what
is called, usually `petune.run.train.train`. Forking costs a tenth of a second where starting an interpreter
that imports torch costs five, and what a test has patched is patched in its ranks. `ends` is for ranks that
are meant to fail: it waits for all of them and says how each has ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from petune.parallel.launch import process_group
from petune.run.finished import load_run
from tests.pool import RankError
from tests.small_runs import newest, numbers, state_of

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class End:
    """How a rank has ended. code: of its process, minus the number of a signal; value: what the function
    returned; error: a traceback."""

    rank: int
    code: int
    value: Any
    error: str | None
    seconds: float  # monotonic time of the end


def ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """What `function(*args)` returned on each of `world` ranks, by rank; plain data. Raises RankError when
    one has failed or is late."""
    found = ends(world, function, *args, timeout=timeout)
    bad = sorted(
        (end for end in found if end.code or end.error), key=lambda end: (end.error is None, end.seconds)
    )
    if bad:
        raise RankError("\n".join(f"rank {end.rank} ended with {end.code}: {end.error}" for end in bad))
    return [end.value for end in found]


def ends(world: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[End]:
    """How each of `world` ranks that call `function(*args)` has ended, by rank. An exception ends a rank as
    in `python -m petune`.

    Raises RankError when one has not ended after `timeout` seconds. No rank is left, whatever happens.
    """
    with _free_port() as port:
        pipes = [_FORK.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _FORK.Process(target=_rank, args=(rank, world, port, pipes, function, args), daemon=True)
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            for _, theirs in pipes:
                theirs.close()
            return _gather(processes, [mine for mine, _ in pipes], time.monotonic() + timeout)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join(5)
            for mine, _ in pipes:
                mine.close()


@contextmanager
def _free_port() -> Iterator[int]:
    """A port that nobody else gets in the meantime: it is bound here, which lets rank 0 listen at it but is
    given to no one as free."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


def _gather(processes: list[Any], pipes: list[Connection], deadline: float) -> list[End]:
    found: dict[int, End] = {}
    said: dict[int, tuple[Any, str | None]] = {}
    while len(found) < len(processes):
        quiet = [pipe for rank, pipe in enumerate(pipes) if rank not in said]
        running = [process.sentinel for rank, process in enumerate(processes) if rank not in found]
        ready = wait([*quiet, *running], max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [str(rank) for rank in range(len(processes)) if rank not in found]
            raise RankError(f"these ranks had not ended in time: {', '.join(late)} of {len(processes)}")
        for rank, pipe in enumerate(pipes):
            if pipe in ready:  # read before the process is asked, or a large value would never be written
                try:
                    said[rank] = pipe.recv()
                except (EOFError, OSError):
                    said[rank] = (None, None)
        for rank, process in enumerate(processes):
            if rank in said and rank not in found and process.sentinel in ready:
                process.join()
                found[rank] = End(rank, process.exitcode, *said[rank], time.monotonic())
    return [found[rank] for rank in range(len(processes))]


def _rank(
    rank: int,
    world: int,
    port: int,
    pipes: list[tuple[Connection, Connection]],
    function: Callable[..., Any],
    args: Any,
) -> None:
    gc.freeze()  # see tests/pool.py
    for other, (theirs, mine) in enumerate(pipes):
        theirs.close()
        if other != rank:
            mine.close()
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "SLURM", "PETUNE"))]:
        del os.environ[name]
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
    }
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_CPP_LOG_LEVEL": "FATAL",
        "PETUNE_SECRET": "of a test",
    }
    torch.set_num_threads(1)
    # what should be equal on all ranks must not be so by the accident of a fork
    torch.default_generator.manual_seed(1000 + rank)  # see tests/pool.py
    value, error, code = None, None, 0
    try:
        value = function(*args)
    except BaseException as failure:
        error = "".join(traceback.format_exception(failure))
        code = process_group.report(failure)
    with suppress(OSError):
        pipes[rank][1].send((value, error))
    pipes[rank][1].close()
    sys.stdout.flush()
    os._exit(code)


# ------------------------------------------------------------------ comparing their run with one process'


def assert_same_but_for_rounding(found: Path, expected: Path) -> None:
    """Two run folders of the same files whose numbers differ by the order of floating-point sums alone.

    Losses agree to 1e-5, scores to 1e-3. AdamW moves an element whose gradient is rounding error as far as
    any other, so gradients are compared by their running means, tensor by tensor, and weights by their root
    mean square difference, to a tenth of what one step moves.
    """
    assert files(found) == files(expected), files(found) ^ files(expected)
    assert_same_records(found, expected)
    room = 0.1 * load_run(expected).recipe.learning_rate
    noise = assert_same_state(newest(found), newest(expected), room)
    for file in sorted((expected / "tuned").glob("*.safetensors")):
        assert_same_weights(load_file(found / "tuned" / file.name), load_file(file), noise, room)


def files(folder: Path) -> set[str]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def assert_same_records(found: Path, expected: Path) -> None:
    """metrics.jsonl of two runs: losses to 1e-5, gradient norms and scores to 1e-3, the rest as it is."""
    records, others = numbers(found), numbers(expected)
    assert [(record["step"], record.keys()) for record in records] == [
        (other["step"], other.keys()) for other in others
    ]
    for record, other in zip(records, others, strict=True):
        assert record == pytest.approx(other, rel=1e-3, abs=1e-6)
        if "loss" in record:
            assert record["loss"] == pytest.approx(other["loss"], rel=1e-5), record["step"]


def assert_same_state(found: Path, expected: Path, room: float = 1e-5) -> set[str]:
    """Two checkpoints, whatever the plans that saved them: whole tensors of the same names and shapes, and
    the same moments.

    Returns the names of tensors whose gradient is nothing but rounding, as that of every bias of keys, which
    softmax does not see.
    """
    (tensors, facts), (others, other_facts) = state_of(found), state_of(expected)
    assert _shapes(tensors) == _shapes(others)
    for part, power in {"exp_avg": 1, "exp_avg_sq": 2}.items():
        moments = {name: value for name, value in others.items() if name.startswith(f"optimizer/{part}/")}
        largest = {name: float(value.norm()) for name, value in moments.items()}
        allowed = {
            name: power * 1e-2 * own + 1e-6**power * max(largest.values()) for name, own in largest.items()
        }
        away = {name: float((tensors[name] - value).norm()) for name, value in moments.items()}
        wrong = {name: (away[name], largest[name]) for name in moments if away[name] > allowed[name]}
        assert not wrong, wrong
        if power == 1:
            noise = {
                name.removeprefix("optimizer/exp_avg/")
                for name, own in largest.items()
                if own < 1e-5 * max(largest.values())
            }
    assert all(
        torch.equal(tensors[name], others[name]) for name in others if name.startswith("optimizer/step/")
    )
    mine, theirs = (
        {name: value for name, value in side.items() if name.startswith("tuned/")}
        for side in (tensors, others)
    )
    assert_same_weights(mine, theirs, {f"tuned/{name}" for name in noise}, room)
    assert facts["optimizer"] == other_facts["optimizer"], (facts["optimizer"], other_facts["optimizer"])
    return noise


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (value.shape, value.dtype) for name, value in tensors.items() if not name.startswith("rng/")
    }


def assert_same_weights(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    noise: Collection[str] = (),
    room: float = 1e-5,
) -> None:
    """Tensors of the same names, shapes and types, each but those of `noise` within `room` in the root mean
    square."""
    assert expected and _shapes(found) == _shapes(expected)
    away = {
        name: float((found[name] - value).double().pow(2).mean().sqrt())
        for name, value in expected.items()
        if name not in noise
    }
    assert all(value <= room for value in away.values()), {
        name: value for name, value in away.items() if value > room
    }
