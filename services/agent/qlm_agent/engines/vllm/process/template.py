"""The process that imports vLLM once and forks an engine process for each call (see `process.main`)."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

import structlog

from qlm_agent.engines.vllm.process.child import Child, ChildEnded
from qlm_agent.engines.vllm.process.frames import Frame, FrameReader
from qlm_agent.engines.vllm.process.versions import check_version, sources_digest
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.temporary_folder import TemporaryFolder

READ_BYTES = 1 << 16
LINES_KEPT = 30
"""Last lines of the processes' standard error, for messages."""
LINE_BYTES_MAX = 1 << 16
LAST_WORDS_S = 0.1
"""How long the last output of a process may take to arrive."""

ERROR = re.compile(r"(?:\(\S+ pid=\d+\) ERROR [^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception): .+)")
"""The line of a traceback that names the exception, by itself or as vLLM logs it."""
ERROR_CHARACTERS_MAX = 500
EXITS_KEPT = 64
"""Most process ids whose end is remembered or awaited."""

EXIT_MAX_S = 10.0
GONE_POLL_S = 0.02
"""Longest wait for the end of a process, and time between checks."""

FORK = b"F"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Engines read folders, never a hub, and send no usage reports."""


@dataclass(frozen=True, slots=True)
class TemplateProcess:
    """A process: its standard error, and a function that ends it and waits."""

    errors: IO[bytes]
    end: Callable[[], None]


class Template:
    """`python`: the interpreter, "" for this one; `environment`: over that of this process. `start` and `stop` are safe twice."""

    def __init__(self, python: str, environment: Mapping[str, str], start_timeout_s: float) -> None:
        self.device = ""  # device of this vLLM, by its own name; known once it has started
        self._python = python or sys.executable
        self._environment = {**os.environ, **ENVIRONMENT, **environment}
        self._start_timeout_s = start_timeout_s
        self._process: TemplateProcess | None = None
        self._starting = asyncio.Lock()
        self._gone = False  # it closed its socket
        self._control: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._hello: asyncio.Future[Frame] | None = None
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._errors: deque[str] = deque(maxlen=LINES_KEPT)
        self.errors_logged = 0  # exceptions on its standard error so far

    async def start(self) -> None:
        """Returns when vLLM is imported. Raises ConfigError if it cannot be, or is too old, or if its QLM differs."""
        async with self._starting:  # after its end, several models may call this at once
            await self._start()

    async def _start(self) -> None:
        if self._process is not None and not self._gone:
            return
        await self.stop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._process = self.launch(theirs)
        except OSError as error:
            ours.close()
            raise ConfigError(f"agent.vllm.python: {self._python} cannot be started: {error}") from error
        finally:
            theirs.close()
        loop = asyncio.get_running_loop()
        self._gone = False
        self._control = ours
        self._hello = loop.create_future()
        self._tasks = [loop.create_task(self._read_control(ours)), loop.create_task(self._read_lines())]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                said = await asyncio.shield(self._hello)
        except TimeoutError:
            await self.stop()
            raise ConfigError(f"vllm was not imported by {self._python} within {self._start_timeout_s:g} s") from None
        except BaseException:
            await self.stop()
            raise
        if said.head["t"] == "fatal":
            await self.stop()
            raise ConfigError(f"agent.engine: vllm needs vLLM: {said.head['message']}")
        try:
            if said.head.get("sources") != sources_digest():
                raise ConfigError(f"agent.vllm.python: {self._python} has another qlm-serving than the agent: install the same in both")
            check_version(said.head["vllm"])
        except ConfigError:
            await self.stop()
            raise
        self.device = said.head["device"]
        structlog.get_logger().info(
            "vllm_ready", vllm=said.head["vllm"], torch=said.head["torch"], device=self.device, pid=said.head["pid"]
        )

    def launch(self, control: socket.socket) -> TemplateProcess:
        """Starts the process with its end of the socket, which the caller closes. Raises OSError."""
        folder = TemporaryFolder("vllm")
        compiled = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")}  # is to stay
        try:
            process = subprocess.Popen(
                [self._python, "-m", "qlm_agent.engines.vllm.process.main", str(control.fileno()), str(os.getpid())],
                env={**compiled, **self._environment, **folder.environment},
                pass_fds=[control.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except BaseException:
            folder.remove()
            raise

        def end() -> None:
            process.send_signal(signal.SIGKILL)
            process.wait()
            folder.remove()

        assert process.stderr is not None
        return TemplateProcess(process.stderr, end)

    async def fork(self, make: Callable[[Callable[[int], asyncio.Future[int]]], Child]) -> Child:
        """A fresh engine process without a model. `make`: builds the agent's end, given how to wait for exit codes. Raises ChildEnded and
        ConfigError."""
        await self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise ChildEnded(f"the process that starts engines has ended: {error}") from error
        finally:
            theirs.close()
        child = make(self._exit_of)
        await asyncio.get_running_loop().create_connection(lambda: child, sock=ours)
        try:
            await child.ready(self._start_timeout_s)
        except BaseException:
            child.kill("not needed any more")
            raise
        return child

    async def wait_for_exit(self, pid: int) -> None:
        """Waits until an ended engine process, and the group that it leads if any, no longer exist: only then is their memory free. At most
        EXIT_MAX_S: in a container without an init nobody may reap them."""
        deadline_s = time.monotonic() + EXIT_MAX_S
        while pid and (_lives(os.kill, pid) or _lives(os.killpg, pid)):
            if time.monotonic() >= deadline_s:
                structlog.get_logger().warning("vllm_process_remains", pid=pid)
                return
            await asyncio.sleep(GONE_POLL_S)

    async def stop(self) -> None:
        """Ends it, and with it all that it forked."""
        process, self._process = self._process, None
        tasks, self._tasks = self._tasks, []
        if self._control is not None:
            self._control.close()
            self._control = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if process is not None:
            await asyncio.to_thread(process.end)
            process.errors.close()

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The end of its processes' standard error."""
        return tuple(self._lines)

    async def first_error(self, after: int) -> str:
        """The first exception on its standard error after so many (`errors_logged`), "" for none. The error of a vLLM with processes of its
        own only says that one of them failed."""
        await asyncio.sleep(LAST_WORDS_S)
        count = self.errors_logged - after
        return "" if count <= 0 else self._errors[max(0, len(self._errors) - count)]

    def _exit_of(self, pid: int) -> asyncio.Future[int]:
        if pid not in self._exits:
            while len(self._exits) >= EXITS_KEPT:
                del self._exits[next(iter(self._exits))]
            self._exits[pid] = asyncio.get_running_loop().create_future()
        return self._exits[pid]

    async def _read_control(self, control: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = FrameReader()
        assert self._hello is not None
        while True:
            with suppress(ConnectionError):
                data = await loop.sock_recv(control, READ_BYTES)
                for frame in reader.feed(data) if data else ():
                    if frame.head["t"] == "exit":
                        future = self._exit_of(frame.head["pid"])
                        if not future.done():
                            future.set_result(frame.head["code"])
                    elif not self._hello.done():
                        self._hello.set_result(frame)
                if data:
                    continue
            self._gone = True
            if not self._hello.done():
                await asyncio.sleep(LAST_WORDS_S)
                lines = " | ".join(self.last_lines)
                self._hello.set_exception(ConfigError(f"agent.engine: vllm: {self._python} ended before vLLM was imported: {lines}"))
            return

    async def _read_lines(self) -> None:
        """Logs of vLLM: kept for messages, and logged at debug level."""
        assert self._process is not None
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self._process.errors)
        try:
            while True:
                try:
                    line = await stream.readline()
                except ValueError:  # a line over the limit, which has dropped it
                    continue
                if not line:
                    return
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._lines.append(text)
                    if (error := ERROR.match(text)) is not None:
                        self._errors.append(error[1][:ERROR_CHARACTERS_MAX])
                        self.errors_logged += 1
                    structlog.get_logger().debug("vllm_said", line=text)
        finally:
            transport.close()


def _lives(kill: Callable[[int, int], None], pid: int) -> bool:
    try:
        kill(pid, 0)
    except (ProcessLookupError, PermissionError):  # the latter: another user's by now
        return False
    return True
