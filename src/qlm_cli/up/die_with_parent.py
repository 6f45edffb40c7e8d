"""Runs a command in this process so that it is killed when its parent dies: `python die_with_parent.py PARENT_PID COMMAND...`.

A script of its own, started by path: it runs between fork and exec of the real command, where the supervisor, which has threads, may
not run Python code. Off Linux there is no such signal; then only an orderly stop ends the children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)  # the parent died before the call above
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
