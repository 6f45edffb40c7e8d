"""The solver's process: warms up, then answers jobs and questions until its input ends. Started by `solver_client`.

Jobs have priority: advice is computed while there are none, and pauses for new ones before it measures a fleet.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
from collections.abc import Sequence

from qlm_planner.machine.effects import Solve
from qlm_planner.overload.advice import FleetForecast, advise, forecast
from qlm_planner.overload.advice_question import Question
from qlm_planner.shell.solver_requests import AdviceAnswer, AdviceRequest, Choice, answer
from qlm_process.die_with_parent import on_parents_death

FOLDER_VARIABLE = "QLM_SOLVER_FOLDER"
"""Names the folder for temporary files, above all of Pyomo and its solvers."""
HEADER = struct.Struct("!Q")
"""The length of the message that follows."""


class Server:
    """Reads messages from one file descriptor and writes answers to another."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._choice = Choice.HEURISTIC
        self._question: AdviceRequest | None = None

    def serve(self) -> None:
        """Reads the choice of the solver, answers with the seconds of the warm-up, then serves. Returns, or raises SystemExit, at the end
        of the input."""
        from qlm_planner.shell.warm_up import warm_up  # local: it loads the compiler

        choice = self._read()
        assert isinstance(choice, Choice), "the first message"
        self._choice = choice
        warm_up_s = warm_up()
        _leave_files_in(os.environ.get(FOLDER_VARIABLE, ""))  # after the warm-up, whose cache may be in the system's folder
        gc.freeze()  # scanning compiled code takes longer than a plan
        self._write(warm_up_s)
        while True:
            if self._question is None:
                self._take()
            else:
                question, self._question = self._question, None
                self._write(self._advise(question))

    def _take(self) -> None:
        """Waits for the next message. A job is done at once."""
        message = self._read()
        if isinstance(message, Solve):
            self._write(answer(message, self._choice))
        else:
            assert isinstance(message, AdviceRequest), "there are no other messages"
            self._question = message

    def _pause(self) -> None:
        while select.select([self._source], [], [], 0.0)[0]:
            self._take()

    def _measure(self, question: Question, fleet: Sequence[int]) -> FleetForecast:
        self._pause()
        return forecast(question, fleet)

    def _advise(self, request: AdviceRequest) -> AdviceAnswer:
        try:
            return AdviceAnswer(number=request.number, advice=advise(request.question, measure=self._measure))
        except Exception as error:  # invalid profiles cost the advice, not the solver
            return AdviceAnswer(number=request.number, advice=None, reason=f"{type(error).__name__}: {error}")

    def _read(self) -> object:
        message: object = pickle.loads(self._exactly(HEADER.unpack(self._exactly(HEADER.size))[0]))
        return message

    def _exactly(self, size: int) -> bytearray:
        found = bytearray()
        while len(found) < size:
            part = os.read(self._source, size - len(found))
            if not part:
                raise SystemExit(0)
            found += part
        return found

    def _write(self, message: object) -> None:
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        rest = memoryview(HEADER.pack(len(body)) + body)
        while rest:
            rest = rest[os.write(self._sink, rest) :]


def _leave_files_in(folder: str) -> None:
    if folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder


def main() -> None:
    # A terminal's interrupt reaches the whole group; this process ends when the planner closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_parents_death(signal.SIGKILL)  # a job may still take seconds after the planner's death
    sink = sys.stdout.fileno()
    sys.stdout = sys.stderr  # prints must not mix with messages
    Server(sys.stdin.fileno(), sink).serve()


if __name__ == "__main__":
    main()
