"""The solver's process, off the planner's loop: planning takes a core for milliseconds to seconds (ADR 15).

One process, started and warmed with the planner, does one job at a time; of waiting jobs only the newest is kept. It computes advice while
there are no jobs. After a crash or a timeout it restarts, with growing pauses. Messages are pickles behind their length, on pipes that only
both processes hold.
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
from qlm_planner.shell.solver_requests import AdviceAnswer, AdviceRequest, Choice
from qlm_process.temporary_folder import TemporaryFolder

START_TIMEOUT_S = 300.0
"""Deadline of start and warm-up: compiling is slow without a cache."""
PIPE_BYTES = 1 << 22
"""Read-ahead of an answer."""
ANSWER_BYTES_MAX = 1 << 28
"""Most bytes of an answer: a million groups take 4 MB."""
RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
STEADY_S = 60.0
"""Lifetime of a process after which the pause is the first one again."""
ADVICE_TIMEOUT_S = 300.0
"""Deadline of one advice."""

Answer = Callable[[Solved | SolveFailed], None]


class WorkerGoneError(Exception):
    """The process died or was killed after a timeout; the message has the reason."""


@dataclass(slots=True)
class PendingJob:
    """A job and the callback for its answer."""

    job: Solve
    answer: Answer

    def failed(self, reason: str) -> None:
        self.answer(SolveFailed(job=self.job.job, reason=reason))


class SolverWorker:
    """`start` and `stop` may be repeated; `stop` waits for the end of the process. `job_timeout_s`: of one job. `ready`: the process is
    warm and takes jobs."""

    def __init__(
        self, choice: Choice, job_timeout_s: float, on_ready: Callable[[float], None] = lambda ready: None, command: Sequence[str] = ()
    ) -> None:
        """`on_ready`: called with 1.0 once the process is warm, with 0.0 after its end. `command`: starts the process."""
        self._on_ready = on_ready
        self._choice = choice
        self._job_timeout_s = job_timeout_s
        self._command = tuple(command) or (sys.executable, "-m", "qlm_planner.shell.solver_process")
        self._process: asyncio.subprocess.Process | None = None
        self._folder: TemporaryFolder | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: PendingJob | None = None
        self._doing: PendingJob | None = None
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
        await self._end()  # the task may have been cancelled during its own wait
        self._drop("the planner stops")

    def submit(self, job: Solve, answer: Answer) -> None:
        """Queues a job; `answer` is called once, unless a newer job replaces it before it starts. The first jobs wait for the warm-up;
        after a crash, jobs fail at once until the next process is warm."""
        waiting = PendingJob(job, answer)
        if self._task is None or (not self.ready and self.restarts):
            waiting.failed("the solver's process is gone")
            return
        self._next = waiting
        self._send_next()

    async def advise(self, question: Question) -> Advice:
        """Computes advice while there are no jobs, one question at a time. Raises AdviceFailedError."""
        if not self.ready:
            raise AdviceFailedError("the solver's process is not ready")
        self._questions += 1
        number, self._advice = self._questions, asyncio.get_running_loop().create_future()
        self._send(AdviceRequest(number=number, question=question))
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
        """Serves until the process dies or times out, then raises WorkerGoneError."""
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
            # Answers to an earlier term are dropped.
            if self._advice is not None and message.number == self._questions and not self._advice.done():
                self._advice.set_result(message)
        elif isinstance(message, Solved | SolveFailed) and doing is not None and message.job == doing.job.job:
            self._doing = None
            self._stop_timer()
            doing.answer(message)
            self._send_next()
        else:
            raise WorkerGoneError("the answer to an unknown job")

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
        """Buffers at most a job and a question. A dead process is noticed when its output ends."""
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
        except Exception as error:  # later answers cannot be trusted either
            raise WorkerGoneError(f"an unreadable answer: {type(error).__name__}: {error}") from error

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
        """Fails all waiting jobs and questions."""
        doing, self._doing = self._doing, None
        waiting, self._next = self._next, None
        self._stop_timer()
        for each in (doing, waiting):
            if each is not None:
                each.failed(reason)
        if self._advice is not None and not self._advice.done():
            self._advice.set_result(AdviceAnswer(number=self._questions, advice=None, reason=reason))
