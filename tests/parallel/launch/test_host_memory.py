"""What the kernel says of memory: read from folders laid out as version 2 and version 1 of cgroups are, and
from a host without any."""

from __future__ import annotations

from pathlib import Path

import pytest

from petune.parallel.launch.host_memory import HostMemory

GIB = 1 << 30


def lay_out(place: Path, own: str, **files: object) -> tuple[Path, Path]:
    """Fake /sys/fs/cgroup and /proc: `own` is /proc/self/cgroup, `files` are paths in them with __ for / and
    a trailing content."""
    for name, content in {
        "proc/self/cgroup": own,
        **{key: str(value) for key, value in files.items()},
    }.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(content)
    return place / "cgroup", place / "proc"


def events(kills: int) -> str:
    return f"low 0\nhigh 0\nmax 31\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"


def test_a_kill_in_a_cgroup_of_version_2_is_told_with_the_nearest_limit_and_the_use(tmp_path: Path) -> None:
    inner = {"cgroup/job/run/memory.events": events(2), "cgroup/job/run/memory.max": "max\n"}
    outer = {
        "cgroup/job/memory.events": events(2),
        "cgroup/job/memory.max": 2 * GIB,
        "cgroup/job/memory.peak": 2 * GIB - 4096,
    }
    memory = HostMemory(*lay_out(tmp_path, "0::/job/run\n", **inner, **outer))
    assert memory.shortage() is None, "kills before this run are not its own"
    (tmp_path / "cgroup/job/run/memory.events").write_text(events(3))
    limit, found = memory.shortage() or ("", "")
    assert limit == f"at most 2 GiB ({tmp_path}/cgroup/job/memory.max)"
    assert found == "2 GiB in use, killed by the kernel for want of memory: 1"


def test_a_container_that_sees_its_cgroup_as_the_root_is_read(tmp_path: Path) -> None:
    files = {"cgroup/memory.events": events(0), "cgroup/memory.max": GIB, "cgroup/memory.current": GIB // 2}
    memory = HostMemory(*lay_out(tmp_path, "0::/\n", **files))
    (tmp_path / "cgroup/memory.events").write_text(events(1))
    assert memory.shortage() == (
        f"at most 1 GiB ({tmp_path}/cgroup/memory.max)",
        "512 MiB in use, killed by the kernel for want of memory: 1",
    )


def test_version_1_is_read_too_where_its_path_is_another_containers(tmp_path: Path) -> None:
    files = {"cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n"}
    files |= {
        "cgroup/memory/memory.limit_in_bytes": str(GIB),
        "cgroup/memory/memory.max_usage_in_bytes": str(GIB),
    }
    memory = HostMemory(*lay_out(tmp_path, "4:memory:/docker/abc\n0::/\n", **files))
    (tmp_path / "cgroup/memory/memory.oom_control").write_text("oom_kill 2\n")
    limit, found = memory.shortage() or ("", "")
    assert "1 GiB" in limit and found.endswith(": 2")


def test_without_a_cgroup_the_host_counts(tmp_path: Path) -> None:
    files = {"proc/vmstat": "nr_free 3\noom_kill 5\n", "proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\n"}
    memory = HostMemory(*lay_out(tmp_path, "", **files))
    (tmp_path / "proc/vmstat").write_text("oom_kill 6\n")
    limit, found = memory.shortage() or ("", "")
    assert limit == "at most 8 GiB, the memory of this host" and found.endswith(": 1")


@pytest.mark.parametrize("own", ["", "nonsense", "0::/../../etc\n", "0::/gone\n"])
def test_what_cannot_be_read_says_nothing(own: str, tmp_path: Path) -> None:
    memory = HostMemory(*lay_out(tmp_path, own))
    assert memory.shortage() is None


def test_what_is_free_is_the_least_that_host_and_limits_leave(
    tmp_path: Path,
) -> None:
    host = {"proc/meminfo": f"MemTotal: {9 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
    assert HostMemory(*lay_out(tmp_path / "none", "", **host)).free() == 8 * GIB
    files = {"cgroup/job/memory.events": events(0), "cgroup/job/memory.max": 4 * GIB}
    files |= {"cgroup/job/memory.current": 3 * GIB}
    stat = {"cgroup/job/memory.stat": f"anon 7\ninactive_file {GIB}\nactive_file {GIB // 2}\n"}
    assert HostMemory(*lay_out(tmp_path / "two", "0::/job\n", **host, **files)).free() == GIB
    assert HostMemory(*lay_out(tmp_path / "kept", "0::/job\n", **host, **files, **stat)).free() == (
        2 * GIB + GIB // 2
    )
    unlimited = files | {"cgroup/job/memory.max": "max\n"}
    assert HostMemory(*lay_out(tmp_path / "max", "0::/job\n", **host, **unlimited)).free() == 8 * GIB
    assert HostMemory(*lay_out(tmp_path / "nothing", "")).free() is None
