"""The families' tables and what they carry, on the oldest transformers that petune supports, in a process of
its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = "5.17.0"
ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".venv" / "oldest"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    paths = [str(PLACE), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if not (PLACE / "transformers").is_dir():
        pytest.fail(f"transformers {OLDEST} is not in {PLACE}: run `make setup`")


PROGRAM = """
import sys, pytest, transformers
print(transformers.__version__, transformers.__file__, flush=True)
sys.exit(pytest.main(sys.argv[1:]))
"""


FEW = "llama or bart or t5 or bert or gptoss or qwen3_5"


@pytest.mark.timeout(300)
@pytest.mark.long  # an interpreter that imports half of transformers
@pytest.mark.parametrize("families", [FEW, "test"], ids=["few", "all"])
def test_reading_tables_identity_generation_and_merging_hold_on_the_oldest(families: str) -> None:
    """In one process: it takes longer to start than to do this."""
    files = ("tests/models/test_contents.py", "tests/models/test_families.py", "tests/models/test_t5gemma.py")
    of_all = "as_transformers_reads or left_to_it or those_of_transformers"
    names = f"{of_all} or test_families and ({families})"
    which = ("-m", "not long", "-k", names)
    done = run("-c", PROGRAM, "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *files, *which)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    version, place = done.stdout.split(maxsplit=2)[:2]
    assert version == OLDEST
    assert Path(place).is_relative_to(PLACE)
