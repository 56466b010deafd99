"""A store whose values are authenticated: what another user of the machine writes to the rendezvous is
ignored, and counted.

The rendezvous is a port of this machine, which any user may write to. Every value carries an HMAC of its key
and itself under a secret that the ranks of a run share: petune's launcher gives them one in their
environment, and ranks that another launcher has started take the user's own from a file that nobody else can
read, or what PETUNE_SECRET says. gloo's own values go through it too, NCCL's do not.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not say that it exports them

from petune.errors import DistributedError
from petune.parallel.launch import orders

# set by petune.parallel.launch.launcher, or by whoever starts ranks on several machines
SECRET = "PETUNE_SECRET"
_DIGEST = 32  # bytes of an HMAC-SHA256
_ABSENT = "petune: there is no such key"
_SEVERAL = 4  # keys that are read together, which takes three requests
_MOST = 10_000  # refused values that are told apart
_refused: set[bytes] = set()


def new_secret() -> str:
    """A secret for one run."""
    return secrets.token_hex(32)


def secret_of(env: Mapping[str, str], one_machine: bool) -> str | None:
    """What the ranks of this run share: PETUNE_SECRET, else, where all of them are on this machine, the
    user's own; None without.

    The user's own lies in ~/.cache/petune and is made when it is first asked for. Raises DistributedError
    where others can read it.
    """
    if env.get(SECRET):
        return env[SECRET]
    if not one_machine:
        return None
    folder = Path(env.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "petune"
    file = folder / "rendezvous-secret"
    try:
        if not file.exists():
            _write(file)
        with file.open(encoding="ascii") as stream:
            facts = os.fstat(stream.fileno())
            if facts.st_uid != os.getuid() or stat.S_IMODE(facts.st_mode) & 0o077:
                what, remedy = "others may know this secret", "remove it; the next run makes another"
                raise DistributedError(what, where=str(file), remedy=remedy)
            return stream.read().strip() or None
    except (OSError, RuntimeError):  # no home, or one that cannot be written
        return None


def _write(file: Path) -> None:
    """Make the file whole; the first of several processes, and of threads of one, wins."""
    file.parent.mkdir(parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f"{file.name}.", dir=file.parent)  # for this user alone
    try:
        with open(number, "w", encoding="ascii") as stream:
            stream.write(new_secret())
        with suppress(FileExistsError):
            os.link(name, file)
    finally:
        os.unlink(name)


def refused() -> int:
    """How many different values that are not of this run this process has met."""
    return len(_refused)


class Sealed(Store):
    """`store` with every value authenticated, under keys that begin with `prefix`. Counters, which torch adds
    up itself, are not."""

    def __init__(self, store: Store, secret: str | None, prefix: str, limit_s: float) -> None:
        super().__init__()
        self.store, self.secret, self.prefix, self.limit_s = store, (secret or "").encode(), prefix, limit_s
        self.clones: list[Sealed] = []  # torch holds the C++ side of a clone alone

    def read(self, key: str) -> str | None:
        """The text of a key, at once; None where there is none of this run."""
        value = self._opened(key, self.store.compare_set(self._name(key), _ABSENT, _ABSENT))
        return None if value is None else value.decode()

    def read_all(self, keys: Sequence[str]) -> list[str | None]:
        """The texts of keys, at once: in a few requests where there are values of all of them."""
        if len(keys) < _SEVERAL or not self.check(keys):
            return [self.read(key) for key in keys]
        return self.texts(keys)

    def texts(self, keys: Sequence[str]) -> list[str | None]:
        """The texts of keys that have been seen, in one request; None for each that is not of this run."""
        found = self.store.multi_get([self._name(key) for key in keys])
        values = [self._opened(key, raw) for key, raw in zip(keys, found, strict=True)]
        return [None if value is None else value.decode() for value in values]

    def within(self, limit_s: float) -> Sealed:
        """The same over this connection, waiting for `limit_s` seconds."""
        return Sealed(self.store, self.secret.decode(), self.prefix, limit_s)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def _digest(self, key: str, value: bytes) -> bytes:
        name = self._name(key).encode()
        return hmac.digest(self.secret, len(name).to_bytes(4, "big") + name + value, "sha256")

    def _opened(self, key: str, raw: bytes) -> bytes | None:
        """What was sealed; None of what is not, or not for this key."""
        if raw == _ABSENT.encode():
            return None
        value = raw[_DIGEST:]
        if hmac.compare_digest(raw[:_DIGEST], self._digest(key, value)):
            return value
        if len(_refused) < _MOST:
            _refused.add(hashlib.sha256(self._name(key).encode() + raw).digest())
        return None

    def beneath(self, name: str) -> Store:
        """The store itself, in C++ alone, under a name that cannot be guessed: for NCCL, whose threads must
        not wait for Python."""
        return PrefixStore(self._digest(name, b"").hex(), self.store)

    # ------------------------------------------------------------ what torch calls, by torch's names

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value with its seal."""
        plain = value.encode() if isinstance(value, str) else value
        self.store.set(self._name(key), self._digest(key, plain) + plain)  # type: ignore[arg-type]  # it takes bytes too

    def get(self, key: str) -> bytes:
        """The value of a key, waited for."""
        self.wait([key])
        until = time.monotonic() + self.limit_s
        while (value := self._opened(key, self.store.get(self._name(key)))) is None:
            if time.monotonic() > until:
                raise DistributedError(
                    f"somebody else writes to the rendezvous: {key} holds no value of this run"
                )
            time.sleep(0.01)
        return value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, waited for."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until there are values of these keys."""
        names = [self._name(key) for key in keys]
        if orders.replaces():  # in torch's own wait nothing is heard of an order of the launcher
            until = time.monotonic() + (self.limit_s if timeout is None else timeout.total_seconds())
            while not self.store.check(names):
                if orders.newer():
                    raise RuntimeError("ProcessGroup: a rank was lost before it met the others")
                if time.monotonic() > until:
                    raise RuntimeError(f"ProcessGroup: waiting for {keys[0]} timed out")
                time.sleep(0.002)
            return
        self.store.wait(names, timedelta(seconds=self.limit_s) if timeout is None else timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether there are values of these keys."""
        return bool(self.store.check([self._name(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Count."""
        return int(self.store.add(self._name(key), amount))

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return bool(self.store.delete_key(self._name(key)))

    def num_keys(self) -> int:
        """All keys of the store."""
        return int(self.store.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait."""
        self.limit_s = timeout.total_seconds()
        self.store.set_timeout(timeout)

    def clone(self) -> Sealed:
        """The same over a connection of its own."""
        made = Sealed(cast("Any", self.store).clone(), self.secret.decode(), self.prefix, self.limit_s)
        self.clones.append(made)
        return made

    def has_extended_api(self) -> bool:
        """Whether values can be appended to: not where they are sealed."""
        return False
