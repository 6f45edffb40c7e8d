"""One supervised process: started, watched, started again with bounded backoff, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from logging.handlers import RotatingFileHandler
from pathlib import Path

import structlog

from qlm_cli.up.config import ProcessSpec, UpSection
from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.cluster.state import ProcessState
from qlm_process.die_with_parent import launcher
from qlm_process.runner import EXIT_CONFIG

READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 20
"""A longer log line is cut into lines of this size."""
LOG_TAIL_LINES = 20
OUTPUT_DRAIN_S = 1.0
"""How long after its end the rest of its output is read."""


class Phase(StrEnum):
    """The phase of a child. READY: it has reported its address; SERVING: it answers by gRPC."""

    STARTING = "starting"
    READY = "ready"
    SERVING = "serving"
    STOPPED = "stopped"


class Child:
    """Keeps one process running until `stop`. `on_change` is called whenever `state()` may have changed."""

    def __init__(self, spec: ProcessSpec, settings: UpSection, log_dir: Path, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.phase = Phase.STOPPED
        self.killed = False
        self.ready = asyncio.Event()
        self._settings = settings
        self._log_path = log_dir / f"{spec.name}.log"
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._address = ""
        self._http = ""
        self._metrics_port = 0
        self._restart_times_s: deque[float] = deque(maxlen=settings.restarts_max + 1)
        self._restarts = 0
        self._stopping = False
        self._ended = asyncio.Event()
        self._tail: deque[str] = deque(maxlen=LOG_TAIL_LINES)

    @property
    def serving(self) -> bool:
        """Its health said SERVING, and it has not ended since: what it wrote last may still be read then."""
        return self.phase is Phase.SERVING and self._process is not None and self._process.returncode is None

    def state(self) -> ProcessState:
        process = self._process
        running = process is not None and process.returncode is None
        return ProcessState(
            name=self.spec.name,
            service=self.spec.service,
            pid=process.pid if running and process is not None else 0,
            address=self._address,
            http=self._http,
            metrics_port=self._metrics_port,
            restarts=self._restarts,
            serving=self.serving,
            log=str(self._log_path),
        )

    def mark_serving(self) -> None:
        if self.phase is Phase.READY:
            self._enter(Phase.SERVING)

    async def run(self) -> None:
        """Runs until it is stopped. Raises ConfigError if its configuration is wrong, Unavailable if it keeps failing."""
        log = _LogFile(self._log_path, self._settings.log_bytes_max)
        try:
            while not self._stopping:
                code = await self._run_once(log)
                if self._stopping:
                    return
                structlog.get_logger().warning("process_ended", name=self.spec.name, exit_code=code)
                if code == EXIT_CONFIG and self._restarts == 0 and not self._address:
                    raise ConfigError(f"{self.spec.name}: {self.complaint()}")
                await self._pause()
        finally:
            log.close()
            self._ended.set()

    def restart(self) -> None:
        """Drains it; it starts again. Does nothing while it is down."""
        if self._process is not None and self._process.returncode is None:
            self._enter(Phase.STOPPED)
            self._process.terminate()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL if it takes longer than `timeout_s`; waits for its end. Safe unstarted and twice."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            structlog.get_logger().warning("process_killed", name=self.spec.name, after_s=timeout_s)
            self.killed = True
            process.kill()
            await process.wait()
        await self._ended.wait()

    async def _run_once(self, log: _LogFile) -> int:
        self.ready.clear()
        output, its_end = os.pipe()
        reader = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(output, "rb", buffering=0)
        )
        reading = asyncio.create_task(self._read_output(reader, log))
        try:
            try:
                self._process = await self._started(its_end)
            finally:
                os.close(its_end)
            if self._stopping:  # stop() was called during its start
                self._process.terminate()
            self._enter(Phase.STARTING)
            return await self._until_its_end(self._process, reading)
        finally:
            process = self._process
            if process is not None and process.returncode is None:  # cancelled: a child never outlives its supervisor
                process.kill()
                await process.wait()
            reading.cancel()
            pipe.close()
            self._enter(Phase.STOPPED)

    async def _started(self, output: int) -> asyncio.subprocess.Process:
        sticky: tuple[str, ...] = ()
        if self._address and self.spec.service == "gateway":
            sticky = ("--set", f"gateway.listen={self._address}")
            if self._http:
                sticky += ("--set", f"gateway.http.listen={self._http.removeprefix('http://')}")
        return await asyncio.create_subprocess_exec(
            *launcher(),
            *self.spec.command,
            *sticky,  # its clients know it by the ports that it got at first
            env={**os.environ, **self.spec.environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in a terminal goes to the supervisor alone, which stops in order
        )

    async def _until_its_end(self, process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> int:
        """Its exit code, once what it wrote is read: for OUTPUT_DRAIN_S at the most, since what it started may hold its output for long."""
        ending = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({ending, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait({reading}, timeout=OUTPUT_DRAIN_S)
            if reading.done():
                reading.result()
            return await ending
        finally:
            ending.cancel()

    async def _read_output(self, reader: asyncio.StreamReader, log: _LogFile) -> None:
        rest = b""
        while data := await reader.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._take_line(line.decode(errors="replace"), log)
        if rest:
            self._take_line(rest.decode(errors="replace"), log)

    def _take_line(self, line: str, log: _LogFile) -> None:
        log.write(line)
        self._tail.append(line)
        if self.phase is Phase.STARTING and '"ready"' in line:
            event = _parsed(line)
            if event.get("event") == "ready":
                self._address = str(event.get("address", ""))
                self._http = str(event.get("http", ""))
                port = event.get("metrics_port", 0)
                self._metrics_port = port if isinstance(port, int) else 0
                self.ready.set()
                self._enter(Phase.READY)

    async def _pause(self) -> None:
        """Waits before a restart: twice as long as the last time, from the first pause again after a quiet window."""
        now_s = time.monotonic()
        self._restart_times_s.append(now_s)
        recent = [at_s for at_s in self._restart_times_s if now_s - at_s < self._settings.restart_window_s]
        if len(recent) > self._settings.restarts_max:
            raise Unavailable(
                f"{self.spec.name} ended {len(recent)} times within {self._settings.restart_window_s:g} s: {self.complaint()}"
            )
        await asyncio.sleep(min(self._settings.restart_backoff_s * 2 ** (len(recent) - 1), self._settings.restart_backoff_max_s))
        self._restarts += 1

    def complaint(self) -> str:
        """Returns the error that its log names, and the path of the log."""
        for line in reversed(self._tail):
            error = _parsed(line).get("error")
            if error:
                return f"{error} (see {self._log_path})"
        last = next((line for line in reversed(self._tail) if line.strip()), "ended without a word")
        return f"{last} (see {self._log_path})"

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._on_change()


class _LogFile(RotatingFileHandler):
    """A log of bounded size: the file and one before it. A full disk loses lines."""

    def __init__(self, path: Path, bytes_max: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, maxBytes=bytes_max, backupCount=1, encoding="utf-8")

    def write(self, line: str) -> None:
        self.emit(logging.LogRecord("child", logging.INFO, "", 0, line, None, None))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (of the standard library)
        """Prints nothing: the standard library's prints a page of stack for each line."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of bytes that a full disk has not taken
            super().close()


def _parsed(line: str) -> dict[str, object]:
    """A JSON log line; nothing for any other."""
    try:
        event = json.loads(line)
    except ValueError:
        return {}
    return event if isinstance(event, dict) else {}
