"""Ends processes with this one: with their parent, or with the whole process group of an engine."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
KEPT_DESCRIPTORS = 3
"""Standard input, output and error."""


def die_with(parent: int) -> None:
    """Has the kernel kill this process with its parent; at once if the parent has changed."""
    _on_parents_death(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def guard_group() -> None:
    """Makes this process the leader of a group, and starts a small process that kills the group when this one ends, in any way: vLLM's own
    processes do not notice that they are orphans. Call it from the main thread, before there are others."""
    leader = os.getpid()
    os.setpgid(0, 0)
    if os.fork():
        return
    os.closerange(KEPT_DESCRIPTORS, os.sysconf("SC_OPEN_MAX"))  # above all the socket, whose end the agent awaits
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(leader, signal.SIGKILL))
    _on_parents_death(signal.SIGTERM)
    if os.getppid() != leader:
        os.killpg(leader, signal.SIGKILL)
    while True:
        signal.pause()


def _on_parents_death(number: signal.Signals) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
