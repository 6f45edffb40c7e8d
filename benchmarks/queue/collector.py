"""The bench's side of its span sink."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks import ROOT
from benchmarks.queue.span_sink import Times
from benchmarks.queue.worker import REPORT_BYTES_MAX
from qlm_core.vocabulary.errors import Unavailable

ANSWER_TIMEOUT_S = 20.0
POLL_S = 0.5


class Collector:
    """Runs `span_sink` while the context is open. Not for several callers at a time."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Collector:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "benchmarks.queue.span_sink"),
            stdin=asyncio.subprocess.PIPE,
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            limit=REPORT_BYTES_MAX,
            start_new_session=True,
        )
        self.endpoint = (await self._read())["endpoint"]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    @property
    def environment(self) -> Mapping[str, str]:
        """For traced processes: a trace is sampled where its parent is, and exported within half a second."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": self.endpoint,
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }

    async def counts(self) -> dict[str, int]:
        """Spans so far, by name."""
        found: dict[str, int] = (await self._request("counts"))["by_name"]
        return found

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keeps the times of requests while the context is open."""
        await self._request("follow")
        try:
            yield
        finally:
            await self._request("rest")

    async def times(self, request_ids: Collection[str], names: Collection[str], timeout_s: float) -> dict[str, Times]:
        """The spans of these requests, by request id. Exports lag: waits until those of all `names` arrived, or for `timeout_s`; returns
        the complete ones."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            kept: dict[str, Times] = (await self._request("times"))["times"]
            found = {each: kept[each] for each in request_ids if each in kept and kept[each].keys() >= set(names)}
            if len(found) == len(request_ids) or time.monotonic() > deadline_s:
                return found
            await asyncio.sleep(POLL_S)

    async def _request(self, what: str) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(what.encode() + b"\n")
        await self._process.stdin.drain()
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise Unavailable("the span sink does not answer") from None
        if not line:
            raise Unavailable("the span sink ended")
        found: dict[str, Any] = json.loads(line)
        return found
