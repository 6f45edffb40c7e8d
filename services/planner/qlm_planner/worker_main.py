"""What the solver's process does: warms up, then answers one job after the other until its input ends. Started by `worker`."""

from __future__ import annotations

import gc
import pickle
import signal
import struct
import sys
from typing import BinaryIO

from qlm_planner import solver
from qlm_planner.effects import Solve
from qlm_planner.solver_jobs import Choice, answer

HEADER = struct.Struct("!Q")
"""The length of the message behind it."""


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """The first message says which solver, and is answered by the seconds of its warm-up."""
    choice = _read(source)
    if not isinstance(choice, Choice):
        return
    warm_up_s = solver.warm_up()
    gc.freeze()  # what is compiled is no garbage: to look through it takes longer than a plan
    _write(sink, warm_up_s)
    while isinstance(job := _read(source), Solve):
        _write(sink, answer(job, choice))


def _read(source: BinaryIO) -> object | None:
    """The next message, None at the end."""
    head = source.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    message: object = pickle.loads(source.read(HEADER.unpack(head)[0]))
    return message


def _write(sink: BinaryIO, message: object) -> None:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    sink.write(HEADER.pack(len(body)) + body)
    sink.flush()


def main() -> None:
    # The terminal's interrupt goes to the whole group; this process ends when the planner, which is told too, closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sink = sys.stdout.buffer
    sys.stdout = sys.stderr  # whatever prints does not print between messages
    serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
