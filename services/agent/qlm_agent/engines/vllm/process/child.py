"""An agent's end of one engine process: calls, output, how it ended, and a watch over it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from qlm_agent.engines.vllm.process.frames import BrokenFrame, Frame, FrameReader
from qlm_core.vocabulary.errors import QlmError

WATCH_SHARE = 0.1
WATCH_MAX_S = 1.0
"""How often a process is checked: a share of its timeout."""

EXIT_CODE_WAIT_S = 1.0
"""How long the exit code of a process that closed its socket is waited for; it only makes a message clearer."""

CALLS_MAX = 1_000
"""Most calls without an answer."""


class ChildEnded(QlmError):
    """The engine process ended, or was killed without an answer."""

    default_reason = "ENGINE_FAILURE"


class CallFailed(QlmError):
    """The engine process lives, but failed a call."""

    default_reason = "ENGINE_FAILURE"


@dataclass(slots=True)
class _Call:
    answer: asyncio.Future[dict[str, Any]]
    op: str
    began_s: float
    timeout_s: float


class Child(asyncio.Protocol):
    """One engine process. `on_step`: called with each frame of output; `on_end`: once, with the reason of its end, except after `stop`.
    `exit_code`: waits for the code of a process id, None if unknown."""

    def __init__(
        self,
        *,
        step_timeout_s: float,
        on_step: Callable[[Child, Frame], None],
        on_end: Callable[[Child, str], None],
        exit_code: Callable[[int], asyncio.Future[int]],
    ) -> None:
        self.pid = 0
        self.stats: dict[str, Any] = {}
        self.model = ""
        self.ended = ""  # why, "" while it lives
        self._step_timeout_s = step_timeout_s
        self._on_step = on_step
        self._on_end = on_end
        self._exit_code = exit_code
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, _Call] = {}
        self._numbers = 0
        self._expects_since_s: float | None = None
        self._heard_s = time.monotonic()
        self._why_killed = ""
        self._fatal = ""
        self._stopping = False
        self._closed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def ready(self, timeout_s: float) -> None:
        """Waits until it lives. Raises ChildEnded."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError:
            self.kill(f"did not start within {timeout_s:g} s")
            raise ChildEnded(f"the engine process did not start within {timeout_s:g} s") from None
        self._spawn(self._watch())

    # Calls ------------------------------------------------------------------------------------------------------------

    async def call(self, op: str, *, timeout_s: float = 0.0, **fields: Any) -> dict[str, Any]:
        """Sends a request and waits for the answer. `timeout_s`: 0 for that of a step; after it the process is killed. Raises ChildEnded
        and CallFailed."""
        if self.ended or self._transport is None:
            raise ChildEnded(self.ended or "the engine process has not started")
        if len(self._calls) >= CALLS_MAX:
            raise CallFailed(f"{CALLS_MAX} calls to the engine process have no answer")
        self._numbers += 1
        number = self._numbers
        call = _Call(asyncio.get_running_loop().create_future(), op, time.monotonic(), timeout_s or self._step_timeout_s)
        self._calls[number] = call
        self.send(Frame({"op": op, "id": number, **fields}))
        try:
            answer = await call.answer
        finally:
            self._calls.pop(number, None)
        if "error" in answer:
            raise CallFailed(str(answer["error"]))
        return answer

    def send(self, frame: Frame) -> None:
        """Sends a message without an answer; nothing if the process has ended."""
        if self._transport is not None and not self.ended:
            self._transport.write(frame.encoded())

    def expect_steps(self, expected: bool) -> None:
        """Whether it has work and so must report."""
        if not expected:
            self._expects_since_s = None
        elif self._expects_since_s is None:
            self._expects_since_s = time.monotonic()

    # The end ----------------------------------------------------------------------------------------------------------

    def kill(self, why: str) -> None:
        """Ends it at once. `why`: for people."""
        if self.ended:
            return
        self._why_killed = self._why_killed or why
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        if self._transport is not None:
            self._transport.abort()

    async def stop(self) -> None:
        """Ends it without `on_end`. Safe twice."""
        self._stopping = True
        self.kill("stopped")
        await self._closed.wait()
        for task in list(self._tasks):
            task.cancel()

    async def _end(self) -> None:
        why = self._why_killed
        if not why and self.pid:
            code: int | None = None
            with suppress(TimeoutError):
                code = await asyncio.wait_for(asyncio.shield(self._exit_code(self.pid)), EXIT_CODE_WAIT_S)
            why = self._fatal or _exit_text(code)
        self._ended(why or self._fatal or "ended")

    def _ended(self, why: str) -> None:
        self.ended = f"the engine process of {self.model or 'no model'} {why}"
        error = ChildEnded(self.ended)
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)
        self._closed.set()
        if not self._stopping:
            self._on_end(self, self.ended)

    # Bytes ------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods alone

    def data_received(self, data: bytes) -> None:
        self._heard_s = time.monotonic()
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except BrokenFrame as error:
            self.kill(f"sent an invalid frame: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._spawn(self._end())

    def _take(self, frame: Frame) -> None:
        head = frame.head
        if "stats" in head:
            self.stats = head["stats"]
        match head["t"]:
            case "hello":
                self.pid = int(head["pid"])
                if not self._ready.done():
                    self._ready.set_result(None)
            case "answer":
                call = self._calls.get(head["id"])
                if call is not None and not call.answer.done():
                    call.answer.set_result(head)
            case "step":
                self._on_step(self, frame)
            case "fatal":
                self._fatal = f"failed: {head['message']}"
            case _:
                raise BrokenFrame(f"a frame of the unknown type {head['t']!r}")

    async def _watch(self) -> None:
        """Kills a process that has work or an open call, and is silent."""
        while not self.ended:
            await asyncio.sleep(min(WATCH_MAX_S, WATCH_SHARE * self._step_timeout_s))
            now_s = time.monotonic()
            loading = any(call.timeout_s > self._step_timeout_s for call in self._calls.values())
            late = self._late(now_s)
            since_s = self._expects_since_s
            if late is not None:
                self.kill(f"did not answer to {late.op} for {late.timeout_s:g} s, and was killed")
            elif since_s is not None and not loading and now_s - max(since_s, self._heard_s) > self._step_timeout_s:
                self.kill(f"made no step for {self._step_timeout_s:g} s, and was killed")

    def _late(self, now_s: float) -> _Call | None:
        """An overdue call. Answers are in order, so a call may take as long as all before it."""
        allowed_s = 0.0
        for call in self._calls.values():
            allowed_s = max(allowed_s, call.timeout_s)
            if now_s - max(call.began_s, self._heard_s) > allowed_s:
                return call
        return None

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _exit_text(code: int | None) -> str:
    """How a process ended, for people."""
    if code is None:
        return "ended"
    if code < 0:
        name = signal.Signals(-code).name if -code in {each.value for each in signal.Signals} else f"signal {-code}"
        return f"was killed by {name}" + (": perhaps the host is out of memory" if -code == signal.SIGKILL else "")
    return f"ended with code {code}"
