"""Replays a workload through the SDK, open loop: requests are sent by the trace's clock, independent of the system.

Each request is one `AsyncClient.generate`, streamed to its end. The SDK reconnects a stream that breaks off, at any gateway, at its token
offset; the ledger records it. Only a stated bound closes the loop: at most `in_flight_max` requests are open, and a request due beyond it
is sent when another ends (the ledger counts it as sent late).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

import qlm
from qlm.errors import NotFound, QlmError, RequestEnded
from qlm_load.replay.ledger import Ledger
from qlm_load.workload.workload import Workload, WorkloadRequest

READ_AGAIN_CONCURRENCY = 16
"""Concurrent readings of results after the run."""
TICK_S = 0.02
"""Shortest sleep of the pacing task: requests due within it are sent together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """`addresses`: gateways, "host:port"; requests start at them in turn. `time_scale`: trace seconds in a real second. `drain_timeout_s`:
    real seconds after the last arrival until open requests are given up."""

    addresses: tuple[str, ...]
    time_scale: float = 1.0
    in_flight_max: int = 5_000
    drain_timeout_s: float = 600.0
    tenant: str = "default"
    reconnect_attempts_max: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayProgress:
    """Progress of a run: counts of requests; `streams` are those open at each gateway, by the client's own view."""

    total: int
    sent: int
    ended: int
    in_flight: int
    streams: Mapping[str, int]


class Replay:
    """One run. `run` sends and streams everything; `read_again` reads each Result from another gateway and checks it against the stream."""

    def __init__(self, workload: Workload, ledger: Ledger, settings: ReplaySettings) -> None:
        self._workload = workload
        self._ledger = ledger
        self._settings = settings
        self._log = structlog.get_logger()
        self._sent = 0
        self._streams: dict[int, qlm.TokenStream] = {}
        self._slots = asyncio.Semaphore(settings.in_flight_max)

    def progress(self) -> ReplayProgress:
        streams = Counter(stream.address for stream in self._streams.values())
        return ReplayProgress(
            total=len(self._workload.requests),
            sent=self._sent,
            ended=self._ledger.ended,
            in_flight=len(self._streams),
            streams={address: streams[address] for address in self._settings.addresses},
        )

    async def run(self, start_s: float) -> None:
        """Sends from `start_s` (monotonic) on and returns when every request has ended or was given up."""
        settings = self._settings
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(self._client(rotated(settings.addresses, n))) for n in range(len(settings.addresses))
            ]
            last_due_s = start_s + self._workload.duration_s / settings.time_scale
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + last_due_s - time.monotonic() + settings.drain_timeout_s):
                    async with asyncio.TaskGroup() as group:
                        await self._pace(start_s, clients, group)
            except TimeoutError:
                self._log.warning("replay_given_up", unended=len(self._workload.requests) - self._ledger.ended)

    async def _pace(self, start_s: float, clients: Sequence[qlm.AsyncClient], group: asyncio.TaskGroup) -> None:
        for request in self._workload.requests:
            due_s = start_s + request.arrival_s / self._settings.time_scale
            if (ahead_s := due_s - time.monotonic()) > TICK_S:
                await asyncio.sleep(ahead_s)
            await self._slots.acquire()
            group.create_task(self._serve(request, clients[request.index % len(clients)]))

    async def _serve(self, request: WorkloadRequest, client: qlm.AsyncClient) -> None:
        index, ledger = request.index, self._ledger
        self._sent += 1
        ledger.sent(index, time.monotonic())
        stream = client.generate(
            request.model,
            self._workload.prompt(request),
            slo_s=request.slo_s / self._settings.time_scale,
            max_tokens=request.output_tokens_max,
            temperature=0.0,
            request_id=request.request_id,
        )
        self._streams[index] = stream
        try:
            accepted = await stream.wait_accepted()
            ledger.accepted(index, time.monotonic(), accepted.queue_id)
            first_address = stream.address
            async for chunk in stream:
                ledger.tokens(index, time.monotonic(), chunk.offset, chunk.token_ids)
        except RequestEnded:
            pass  # FAILED, CANCELLED or EXPIRED: its Result shows it, below
        except QlmError as error:
            ledger.give_up(index, f"{type(error).__name__} {error.reason}: {error.message}"[:300])
            return
        finally:
            del self._streams[index]
            self._slots.release()
            await stream.aclose()
        if stream.resumes and stream.address != first_address:
            ledger.resumed(index)
        if stream.result is None:
            ledger.give_up(index, "the stream ended without a Result")
        else:
            ledger.end(index, time.monotonic(), stream.result)

    async def read_again(self) -> None:
        """Reads the Result of every sent request, from another gateway than its own if there are two."""
        addresses = self._settings.addresses
        turn = asyncio.Semaphore(READ_AGAIN_CONCURRENCY)
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self._client(rotated(addresses, n + 1))) for n in range(len(addresses))]

            async def read(request: WorkloadRequest) -> None:
                async with turn:
                    try:
                        result = await clients[request.index % len(clients)].result(request.request_id, wait_s=0.0)
                    except NotFound:
                        result = None
                    self._ledger.read_again(request.index, result)

            async with asyncio.TaskGroup() as group:
                for entry in self._ledger.entries:
                    if entry.sent_s is not None:
                        group.create_task(read(entry.request))

    def _client(self, addresses: Sequence[str]) -> qlm.AsyncClient:
        return qlm.AsyncClient(addresses, tenant=self._settings.tenant, reconnect_attempts_max=self._settings.reconnect_attempts_max)


def rotated(addresses: Sequence[str], by: int) -> tuple[str, ...]:
    by %= len(addresses)
    return (*addresses[by:], *addresses[:by])
