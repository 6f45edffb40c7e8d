"""Processes that end with their parent. As a script it runs a command that the kernel kills when its parent dies:
`python die_with_parent.py PARENT_PID COMMAND...`.

The script is started by path and imports nothing of QLM: it runs between fork and exec of the real command, where a supervisor, which has
threads, may not run Python code. Off Linux there is no such signal; then only an orderly stop ends the children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def launcher() -> tuple[str, ...]:
    """The command that binds the life of the command which follows it to this process: to its thread that starts it."""
    return (sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(os.getpid()))


def on_parents_death(number: signal.Signals) -> None:
    """Has the kernel send a signal to this process when its parent dies. Raises OSError where it does not."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def main(parent_pid: int, command: list[str]) -> None:
    on_parents_death(signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent died before the call above
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
