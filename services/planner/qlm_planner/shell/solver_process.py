"""The solver's process: warms up, then answers jobs and questions until its input ends. Started by `solver_client`.

Jobs of the solver come first: advice is worked out while there are none, and pauses for each that comes before it measures a fleet.
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

from qlm_planner import search
from qlm_planner.machine.effects import Solve
from qlm_planner.overload.advice import FleetForecast, advise, forecast
from qlm_planner.overload.advice_question import Question
from qlm_planner.shell.solver_requests import AdviceAnswer, AdviceAsked, Choice, answer
from qlm_process.die_with_parent import on_parents_death

FOLDER_VARIABLE = "QLM_SOLVER_FOLDER"
"""Names the folder for temporary files, those of Pyomo and its solvers above all."""

HEADER = struct.Struct("!Q")
"""The length of the message behind it."""


class Server:
    """Reads messages from one file descriptor and writes answers to another."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._choice = Choice.HEURISTIC
        self._asked: AdviceAsked | None = None

    def serve(self) -> None:
        """The first message says which solver, and is answered by the seconds of its warm-up. Returns, or raises SystemExit, at the end of
        the input."""
        choice = self._read()
        assert isinstance(choice, Choice), "it comes first"
        self._choice = choice
        warm_up_s = search.warm_up()
        _leave_files_in(os.environ.get(FOLDER_VARIABLE, ""))  # from here on: the cache of compiled code may be in the system's
        gc.freeze()  # what is compiled is no garbage: to look through it takes longer than a plan
        self._write(warm_up_s)
        while True:
            if self._asked is None:
                self._take()
            else:
                asked, self._asked = self._asked, None
                self._write(self._advised(asked))

    def _take(self) -> None:
        """The next message, waited for. A job is done at once."""
        message = self._read()
        if isinstance(message, Solve):
            self._write(answer(message, self._choice))
        else:
            assert isinstance(message, AdviceAsked), "there are no others"
            self._asked = message

    def _pause(self) -> None:
        while select.select([self._source], [], [], 0.0)[0]:
            self._take()

    def _measure(self, question: Question, fleet: Sequence[int]) -> FleetForecast:
        self._pause()
        return forecast(question, fleet)

    def _advised(self, asked: AdviceAsked) -> AdviceAnswer:
        try:
            return AdviceAnswer(number=asked.number, advice=advise(asked.question, measure=self._measure))
        except Exception as error:  # nonsense in a profile costs advice, not the solver
            return AdviceAnswer(number=asked.number, advice=None, reason=f"{type(error).__name__}: {error}")

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
    # The terminal's interrupt goes to the whole group; this process ends when the planner, which is told too, closes its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    on_parents_death(signal.SIGKILL)  # a job may take seconds more; a planner that has died by now has closed the input
    sink = sys.stdout.fileno()
    sys.stdout = sys.stderr  # whatever prints does not print between messages
    Server(sys.stdin.fileno(), sink).serve()


if __name__ == "__main__":
    main()
