"""The solver's process: planning takes a core for milliseconds to seconds, and the planner's loop must not wait for it (ADR 15).

One process, started and warmed up with the planner, one job at a time. A job that comes while another runs waits; of several that wait only
the newest is done. Advice is worked out in the same process while there are no jobs. A process that dies or takes too long is ended and
started again, after a pause that grows while that repeats.
Messages are pickles behind their length, on the pipes of a child that nobody else can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from qlm_planner.machine.effects import Solve
from qlm_planner.machine.events import Solved, SolveFailed
from qlm_planner.overload.advice import Advice, AdviceFailedError
from qlm_planner.overload.advice_question import Question
from qlm_planner.shell.solver_process import FOLDER_VARIABLE, HEADER
from qlm_planner.shell.solver_requests import AdviceAnswer, AdviceAsked, Choice
from qlm_process.temporary_folder import TemporaryFolder

START_TIMEOUT_S = 300.0
"""To start and warm up: compiling takes long where nothing is cached."""

PIPE_BYTES = 1 << 22
"""Read ahead of an answer."""

ANSWER_BYTES_MAX = 1 << 28
"""Of one answer: a million groups take 4 MB."""

RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
STEADY_S = 60.0
"""A process that lived so long was not broken: the next pause is the first again."""

ADVICE_TIMEOUT_S = 300.0
"""Of one piece of advice; longer ones are of no use."""

Answer = Callable[[Solved | SolveFailed], None]


class WorkerGoneError(Exception):
    """The process died, or was ended for taking too long; the message says which."""


@dataclass(slots=True)
class Waiting:
    """A job and who is told of its answer."""

    job: Solve
    answer: Answer

    def failed(self, reason: str) -> None:
        self.answer(SolveFailed(job=self.job.job, reason=reason))


class SolverWorker:
    """`start` and `stop` are safe to repeat; `stop` waits for the end of the process. `job_timeout_s`: of one job. `ready`: the process is
    warmed up, and does jobs."""

    def __init__(
        self,
        choice: Choice,
        job_timeout_s: float,
        on_ready: Callable[[float], None] = lambda ready: None,
        command: Sequence[str] = (),
    ) -> None:
        """`on_ready`: told 1.0 when its process is warmed up, 0.0 when that is gone. `command`: that of the process."""
        self._on_ready = on_ready
        self._choice = choice
        self._job_timeout_s = job_timeout_s
        self._command = tuple(command) or (sys.executable, "-m", "qlm_planner.shell.solver_process")
        self._process: asyncio.subprocess.Process | None = None
        self._folder: TemporaryFolder | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: Waiting | None = None
        self._doing: Waiting | None = None
        self._questions = 0
        self._advice: asyncio.Future[AdviceAnswer] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.ready = False
        self._ended_for = ""
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="planner-solver")

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._end()  # the task may have been ended while it waited for that
        self._drop("the planner stops")

    def submit(self, job: Solve, answer: Answer) -> None:
        """Does a job as soon as the one before is over; `answer` is called once, unless a newer one takes its place before it began. The
        first ones wait for the warm-up; where a process has died, jobs fail at once until there is another."""
        waiting = Waiting(job, answer)
        if self._task is None or (not self.ready and self.restarts):
            waiting.failed("the solver's process is gone")
            return
        self._next = waiting
        self._send_next()

    async def advise(self, question: Question) -> Advice:
        """`advise`, while there are no jobs; one question at a time. Raises AdviceFailedError."""
        if not self.ready:
            raise AdviceFailedError("the solver's process is gone or warms up")
        self._questions += 1
        number, self._advice = self._questions, asyncio.get_running_loop().create_future()
        self._send(AdviceAsked(number=number, question=question))
        try:
            async with asyncio.timeout(ADVICE_TIMEOUT_S):
                answer = await self._advice
        except TimeoutError:
            self._end_for(f"no advice within {ADVICE_TIMEOUT_S:g} s")
            raise AdviceFailedError(self._ended_for) from None
        finally:
            self._advice = None
        if answer.advice is None:
            raise AdviceFailedError(answer.reason)
        return answer.advice

    # Inside -----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = RESTART_FIRST_S
        while True:
            began_s = time.monotonic()
            reason = "the planner stops"
            try:
                await self._serve()
            except (WorkerGoneError, OSError) as error:
                reason = str(error)
                structlog.get_logger().error("solver_gone", error=reason, pause_s=pause_s)
                self.restarts += 1
            finally:
                self._become_ready(False)
                await self._end()
                self._drop(reason)
            if time.monotonic() - began_s >= STEADY_S:
                pause_s = RESTART_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(RESTART_MAX_S, 2.0 * pause_s)

    async def _serve(self) -> None:
        """Until the process is gone or takes too long: raises WorkerGoneError."""
        pipe = asyncio.subprocess.PIPE
        self._ended_for = ""
        self._folder = TemporaryFolder("solver")
        environment = {**os.environ, FOLDER_VARIABLE: str(self._folder.path)}
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe, limit=PIPE_BYTES, env=environment
        )
        self._send(self._choice)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                warm_up_s = await self._read(process)
        except TimeoutError:
            raise WorkerGoneError(f"not warmed up within {START_TIMEOUT_S:g} s") from None
        self._become_ready(True)
        structlog.get_logger().info("solver_ready", pid=process.pid, warm_up_s=warm_up_s)
        self._send_next()
        while True:
            self._take(await self._read(process))

    def _take(self, message: object) -> None:
        doing = self._doing
        if isinstance(message, AdviceAnswer):
            # That of a term that is over is for nobody.
            if self._advice is not None and message.number == self._questions and not self._advice.done():
                self._advice.set_result(message)
        elif isinstance(message, Solved | SolveFailed) and doing is not None and message.job == doing.job.job:
            self._doing = None
            self._stop_timer()
            doing.answer(message)
            self._send_next()
        else:
            raise WorkerGoneError("the answer to something else")

    def _send_next(self) -> None:
        if self.ready and self._doing is None and self._next is not None:
            self._doing, self._next = self._next, None
            reason = f"no answer within {self._job_timeout_s:g} s"
            self._timer = asyncio.get_running_loop().call_later(self._job_timeout_s, self._end_for, reason)
            self._send(self._doing.job)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _send(self, message: object) -> None:
        """What is not read yet is kept: a job and a question at the most. Where the process is gone, that is seen as its output ends."""
        assert self._process is not None
        assert self._process.stdin is not None
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        self._process.stdin.write(HEADER.pack(len(body)) + body)

    async def _read(self, process: asyncio.subprocess.Process) -> object:
        assert process.stdout is not None
        try:
            (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
            if size > ANSWER_BYTES_MAX:
                raise WorkerGoneError(f"an answer of {size:,} bytes")
            answer = await process.stdout.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerGoneError(self._ended_for or "the process died") from error
        try:
            return pickle.loads(answer)
        except Exception as error:  # whatever it is, the next answer cannot be trusted either
            raise WorkerGoneError(f"an answer that cannot be read: {type(error).__name__}: {error}") from error

    def _become_ready(self, ready: bool) -> None:
        self.ready = ready
        self._on_ready(float(ready))

    def _end_for(self, reason: str) -> None:
        self._ended_for = reason
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _end(self) -> None:
        if self._process is not None:
            self._end_for(self._ended_for)
            await self._process.wait()
        self._process = None
        if self._folder is not None:
            self._folder.remove()
        self._folder = None

    def _drop(self, reason: str) -> None:
        """Tells who waits that nobody will come."""
        doing, self._doing = self._doing, None
        waiting, self._next = self._next, None
        self._stop_timer()
        for each in (doing, waiting):
            if each is not None:
                each.failed(reason)
        if self._advice is not None and not self._advice.done():
            self._advice.set_result(AdviceAnswer(number=self._questions, advice=None, reason=reason))
