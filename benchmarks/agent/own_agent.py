"""One agent, as its process runs it, on a queue of the bench's own. The bench writes the virtual queue itself: no gateway, no planner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider

from benchmarks.agent.model_config import INSTANCE, QUEUE
from benchmarks.queue.bulk_queue import BulkQueue, acceptance_of, bulk_queue
from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm_agent.config import AgentConfig
from qlm_agent.shell.process import AgentProcess
from qlm_agent.telemetry.metrics import AgentMetrics
from qlm_core.vocabulary.errors import QlmError
from qlm_queue.values import GroupPlacement, Lease, RequestPlacement, StepStatus

SLO_S, SLO_CLASS = 36_000.0, "65536s"
"""So far ahead that no request is evicted."""
READY_S = 300.0
SILENCE_S = 120.0
"""Longest time without an event."""
READ_S, READ_MAX = 1.0, 1_000
PLACED_MAX = 100
"""Requests of one call to the queue."""

ENDS = frozenset({events_pb2.EVENT_KIND_COMPLETED, events_pb2.EVENT_KIND_FAILED})


class NotServed(QlmError):
    """A request of the bench failed, or no event arrived for long."""

    default_reason = "ENGINE_FAILURE"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRequest:
    """A greedy request that makes exactly so many tokens."""

    prompt: Sequence[int]
    output_tokens: int


class OwnAgent:
    """`events`: all events read from the queue's event stream."""

    def __init__(self, queue: BulkQueue, lease: Lease) -> None:
        self.events: list[events_pb2.RequestEvent] = []
        self._queue = queue
        self._lease = lease
        self._after = "0"
        self._number = 0
        self._ended = 0

    async def accept(self, model: str, requests: Sequence[GreedyRequest]) -> list[RequestPlacement]:
        """Takes requests into the queue; they wait there for `place`. One call's are a group."""
        self._number += 1
        group = f"g{self._number}"
        found = []
        for each in requests:
            self._number += 1
            acceptance = acceptance_of(_request(model, f"r{self._number}", each), gateway="g")
            receipt = await self._queue.accept(acceptance)
            found.append(RequestPlacement(queue_id=receipt.queue_id, key=acceptance.key, group_id=group))
        return found

    async def place(self, model: str, requests: Sequence[RequestPlacement]) -> None:
        """Puts an accepted group at the end of the agent's virtual queue."""
        group = GroupPlacement(
            group_id=requests[0].group_id,
            instance=INSTANCE,
            before="",
            first_deadline_s=math.inf,
            slo_least_s=SLO_S,
            meta={"model": model, "slo_kind": "completion", "slo_class": SLO_CLASS},
        )
        for first in range(0, len(requests), PLACED_MAX):
            done = await self._queue.place(self._lease, [group], requests[first : first + PLACED_MAX])
            assert set(done) == {StepStatus.DONE}

    async def until_ended(self, requests: int) -> None:
        """Waits until so many more have ended. Raises NotServed."""
        wanted = self._ended + requests
        loop = asyncio.get_running_loop()
        heard_s = loop.time()
        while self._ended < wanted:
            if await self.read_events():
                heard_s = loop.time()
            elif loop.time() - heard_s > SILENCE_S:
                raise NotServed(f"{wanted - self._ended} of {requests} requests did not end; no event for {SILENCE_S:g} s")

    async def read_events(self) -> int:
        """Reads past events, or the next one within a second; returns their number. Raises NotServed for a request that failed."""
        entries = await self._queue.read_events(self._after, READ_S, READ_MAX)
        before = len(self.events)
        for entry in entries:
            self._after = entry.entry_id
            for event in events_pb2.RequestEvents.FromString(entry.payload).events:
                self.events.append(event)
                if event.kind == events_pb2.EVENT_KIND_FAILED:
                    raise NotServed("a request of the bench failed on the engine")
                self._ended += event.kind in ENDS
        return len(self.events) - before


@asynccontextmanager
async def own_agent(config: AgentConfig, scratch: Path) -> AsyncIterator[OwnAgent]:
    """Starts a queue and the agent, and stops both. Raises ConfigError, and NotServed if the agent ends."""
    async with bulk_queue(scratch / "queue", QUEUE) as queue:
        stop = asyncio.Event()
        process = AgentProcess(config, queue, AgentMetrics(), TracerProvider())
        running = asyncio.create_task(process.run(stop, lambda address: None), name="bench-agent")
        try:
            await _registered(process, running)
            yield OwnAgent(queue, await queue.planner_lease())
        finally:
            stop.set()
            await asyncio.wait([running])
        await running


async def _registered(process: AgentProcess, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(READY_S):
        while not process.shell.machine.incarnation:
            if running.done():
                await running
                raise NotServed("the agent ended before it served")
            await asyncio.sleep(0.02)


def _request(model: str, request_id: str, request: GreedyRequest) -> request_pb2.Request:
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=SLO_S)
    return request_pb2.Request(
        model=model,
        tokens=request_pb2.TokenPrompt(ids=request.prompt),
        sampling=request_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
        tenant="bench",
        request_id=request_id,
        admission=request_pb2.Admission(prompt_tokens=len(request.prompt), output_tokens_max=request.output_tokens, slo=slo),
    )
