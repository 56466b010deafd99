"""The host memory that this process and its children may take, what is left of it, and whether the kernel
killed some of them for want of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from petune.log import human

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_UNLIMITED = 1 << 60  # bytes: version 1 of cgroups says "no limit" with a number near 2^63


@dataclass(frozen=True)
class _Names:
    """Files of a version of cgroups: where kills are counted, the limit, the most that was used and what is
    used now. files: fields of memory.stat with what the use counts of files, which the kernel can drop."""

    below: str
    kills: str
    limit: str
    peak: str
    now: str
    files: tuple[str, str]


_VERSIONS = {
    "": _Names(
        "", "memory.events", "memory.max", "memory.peak", "memory.current", ("inactive_file", "active_file")
    ),
    "memory": _Names(
        "memory",
        "memory.oom_control",
        "memory.limit_in_bytes",
        "memory.max_usage_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}


class HostMemory:
    """Counts what the kernel has killed for want of memory since this was made, in this process's cgroup or,
    without one, on this host."""

    def __init__(self, cgroups: Path = CGROUPS, proc: Path = PROC) -> None:
        self.cgroups, self.proc = cgroups, proc
        self.before = self._kills()

    def shortage(self) -> tuple[str, str] | None:
        """The limit and what was used or killed, in words, where the kernel has killed since; None where
        nothing says so."""
        now = self._kills()
        new = {
            place: count - self.before.get(place, 0)
            for place, count in now.items()
            if count > self.before.get(place, 0)
        }
        if not new:
            return None
        killed = f"killed by the kernel for want of memory: {max(new.values())}"
        for folder, names in self._groups():
            if (limit := _number(folder / names.limit)) is not None and limit < _UNLIMITED:
                used = _number(folder / names.peak) or _number(folder / names.now)
                return (
                    f"at most {human(limit)} ({folder / names.limit})",
                    f"{human(used)} in use, {killed}" if used else killed,
                )
        total = _field(self.proc / "meminfo", "MemTotal:")
        return f"at most {human(1024 * total)}, the memory of this host" if total else "enough memory", killed

    def free(self) -> int | None:
        """Bytes that may still be taken, by the host and every limit of a cgroup; None if nothing says so."""
        available = _field(self.proc / "meminfo", "MemAvailable:")
        found = [] if available is None else [1024 * available]
        for folder, names in self._groups():
            limit, used = _number(folder / names.limit), _number(folder / names.now)
            if limit is not None and used is not None and limit < _UNLIMITED:
                files = sum(_field(folder / "memory.stat", name) or 0 for name in names.files)
                found.append(max(0, limit - used + files))
        return min(found, default=None)

    def _groups(self) -> list[tuple[Path, _Names]]:
        """The cgroups that count this process, the innermost first; a container sees its own as the root."""
        lines: list[str] = []
        with suppress(OSError):
            lines = (self.proc / "self" / "cgroup").read_text().splitlines()
        found: list[tuple[Path, _Names]] = []
        for line in lines:
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            names = next((names for key, names in _VERSIONS.items() if key in controllers.split(",")), None)
            if names is None or ".." in path.split("/"):
                continue
            root = self.cgroups / names.below
            place = root / path.strip("/")
            found += [
                (folder, names)
                for folder in (place, *place.parents)
                if folder.is_relative_to(root) and (folder / names.kills).is_file()
            ]
        return found

    def _kills(self) -> dict[Path, int]:
        """Kills so far, by the file that counts them: the innermost cgroup's, else the host's."""
        for folder, names in self._groups():
            if (count := _field(folder / names.kills, "oom_kill")) is not None:
                return {folder / names.kills: count}
        count = _field(self.proc / "vmstat", "oom_kill")
        return {} if count is None else {self.proc / "vmstat": count}


def _field(file: Path, name: str) -> int | None:
    """The number after `name` on a line of its own."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == name:
                return int(words[1])
    return None


def _number(file: Path) -> int | None:
    """The one number in a file; None for "max"."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None
