"""The solver's process: planning takes a core for milliseconds to seconds, and the planner's loop must not wait for it (ADR 15).

One process, started and warmed up with the planner, one job at a time. A job that comes while another runs waits; of several that wait only
the newest is done. A process that dies or takes too long is ended and started again, after a pause that grows while that repeats.
Messages are pickles behind their length, on the pipes of a child that nobody else can reach.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from qlm_planner.effects import Solve
from qlm_planner.events import Solved, SolveFailed
from qlm_planner.solver_jobs import Choice
from qlm_planner.worker_main import HEADER

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

Answer = Callable[[Solved | SolveFailed], None]


class WorkerGoneError(Exception):
    """The process died, or was ended for taking too long; the message says which."""


@dataclass(slots=True)
class Waiting:
    """A job and who is told of its answer."""

    job: Solve
    answer: Answer


class SolverWorker:
    """`start` and `stop` are safe to repeat; `stop` waits for the end of the process. `job_timeout_s`: of one job."""

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
        self._command = tuple(command) or (sys.executable, "-m", "qlm_planner.worker_main")
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._next: Waiting | None = None
        self._asked = asyncio.Event()
        self._ready = False
        self.restarts = 0

    @property
    def ready(self) -> bool:
        """Its process is warmed up, and does jobs."""
        return self._ready

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
        if self._task is None or (not self._ready and self.restarts):
            answer(SolveFailed(job=job.job, reason="the solver's process is gone"))
            return
        self._next = Waiting(job, answer)
        self._asked.set()

    # Inside -----------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        pause_s = RESTART_FIRST_S
        while True:
            began_s = time.monotonic()
            try:
                await self._serve()
            except (WorkerGoneError, OSError) as error:
                structlog.get_logger().error("solver_gone", error=str(error), pause_s=pause_s)
                self.restarts += 1
            finally:
                self._become_ready(False)
                await self._end()
            self._drop("the solver's process is gone")
            if time.monotonic() - began_s >= STEADY_S:
                pause_s = RESTART_FIRST_S
            await asyncio.sleep(pause_s)
            pause_s = min(RESTART_MAX_S, 2.0 * pause_s)

    async def _serve(self) -> None:
        """Until the process is gone or takes too long: raises WorkerGoneError, after telling who waits for its answer."""
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(*self._command, stdin=pipe, stdout=pipe, limit=PIPE_BYTES)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                warm_up_s = await self._exchange(process, self._choice)
        except TimeoutError:
            raise WorkerGoneError(f"not warmed up within {START_TIMEOUT_S:g} s") from None
        self._become_ready(True)
        structlog.get_logger().info("solver_ready", pid=process.pid, warm_up_s=warm_up_s)
        died = asyncio.create_task(process.wait(), name="planner-solver-exit")
        try:
            while True:
                asked = asyncio.create_task(self._asked.wait(), name="planner-solver-asked")
                try:
                    await asyncio.wait([asked, died], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    asked.cancel()
                if died.done():
                    raise WorkerGoneError(f"the process ended with {process.returncode}")
                self._asked.clear()
                waiting, self._next = self._next, None
                if waiting is not None:
                    try:
                        waiting.answer(await self._do(process, waiting.job))
                    except WorkerGoneError as error:
                        waiting.answer(SolveFailed(job=waiting.job.job, reason=str(error)))
                        raise
        finally:
            died.cancel()

    async def _do(self, process: asyncio.subprocess.Process, job: Solve) -> Solved | SolveFailed:
        try:
            async with asyncio.timeout(self._job_timeout_s):
                found = await self._exchange(process, job)
        except TimeoutError:
            raise WorkerGoneError(f"no answer within {self._job_timeout_s:g} s") from None
        if not isinstance(found, Solved | SolveFailed) or found.job != job.job:
            raise WorkerGoneError("the answer to something else")
        return found

    async def _exchange(self, process: asyncio.subprocess.Process, message: object) -> object:
        assert process.stdin is not None
        assert process.stdout is not None
        body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            process.stdin.write(HEADER.pack(len(body)))
            process.stdin.write(body)
            await process.stdin.drain()
            (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
            if size > ANSWER_BYTES_MAX:
                raise WorkerGoneError(f"an answer of {size:,} bytes")
            answer = await process.stdout.readexactly(size)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WorkerGoneError("the process died") from error
        try:
            return pickle.loads(answer)
        except Exception as error:  # whatever it is, the next answer cannot be trusted either
            raise WorkerGoneError(f"an answer that cannot be read: {type(error).__name__}: {error}") from error

    def _become_ready(self, ready: bool) -> None:
        self._ready = ready
        self._on_ready(float(ready))

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._process = None

    def _drop(self, reason: str) -> None:
        """Tells who waits that nobody will come."""
        waiting, self._next = self._next, None
        self._asked.clear()
        if waiting is not None:
            waiting.answer(SolveFailed(job=waiting.job.job, reason=reason))
