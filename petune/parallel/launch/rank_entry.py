"""What a rank runs first: it ties its life to the launcher's, sends its output where it belongs, and becomes
the command.

Run as a file by a bare interpreter, before site packages and torch, so that a launcher that is killed leaves
nothing behind and a rank that fails while it imports is on record. It imports the standard library alone.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h; kept across exec


def main() -> None:
    """Become the command that the arguments say."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ["PETUNE_LAUNCHER"]):  # it died before we asked
            sys.exit(6)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # it may become the first rank, whose output is the launcher's; until then it is quiet
    if "PETUNE_SPARE" in os.environ:
        kept = [os.dup(number) for number in (1, 2)]
        for number, copy in zip((1, 2), kept, strict=True):
            os.set_inheritable(copy, True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        os.environ["PETUNE_SPARE_OUTPUT"] = ",".join(map(str, kept))
    elif log := os.environ.pop("PETUNE_RANK_LOG", None):
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
    command = sys.argv[1:]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
