"""Real agents on a real queue: requests are accepted and placed by hand through the port, and read back as a gateway does."""

from __future__ import annotations

import asyncio
import itertools
import math
import struct
from collections.abc import Callable, Sequence

import redis.asyncio as redis
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2, frames_pb2
from qlm_agent.config import AgentConfig
from qlm_agent.shell.process import AgentProcess
from qlm_agent.telemetry.metrics import AgentMetrics
from qlm_core.vocabulary.request import RequestKey
from qlm_core.vocabulary.simulated_model import LENGTH_TOKEN_BASE, answer_tokens, prompt_digest
from qlm_queue.keys import Keys
from qlm_queue.port import Queue
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import (
    PLANNER_ROLE,
    Acceptance,
    GroupPlacement,
    Lease,
    LiveRequest,
    PlanChunk,
    QueueSegment,
    RequestPlacement,
    StepStatus,
    TerminalRecord,
)

DEADLINE_S = 60.0
QUEUE = "test"
GATEWAY = "gateway-0"
VOCABULARY = 32_000
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def until(condition: Callable[[], object], what: str) -> None:
    """Waits for a condition that other tasks bring about."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}") from None


class RunningAgent:
    """One agent process, in this one."""

    def __init__(self, url: str, name: str, **agent: object) -> None:
        simulated: dict[str, object] = {"time_scale": 20.0, **agent.pop("simulated", {})}  # type: ignore[dict-item]
        self.config = AgentConfig.model_validate(
            {
                "queue": {"name": QUEUE, "url": url, "call_timeout_s": 1.0},
                "models": [{"name": "m", "profile": "Mistral-7B"}, {"name": "n", "profile": "Mistral-7B"}],
                "agent": {"name": name, "gpu": "H100-80GB", "simulated": simulated, "heartbeat_s": 0.1, **agent},
            }
        )
        self.queue = RedisQueue(url, QUEUE, call_timeout_s=1.0)
        self.metrics = AgentMetrics()
        self.spans = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.process = AgentProcess(self.config, self.queue, self.metrics, self.provider)
        self.address = ""
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def incarnation(self) -> str:
        return self.process.shell.machine.incarnation

    @property
    def owned(self) -> int:
        return len(self.process.shell.machine.runs)

    def value(self, metric: str, **labels: str) -> float:
        """A figure of its metrics, 0 where it is not there."""
        return self.metrics.registry.get_sample_value(metric, labels) or 0.0

    def lso(self, name: str) -> float:
        """How often it carried out an LLM serving operation."""
        assert self.value("qlm_agent_lso_seconds_count", lso=name) <= self.value("qlm_agent_lso_total", lso=name)
        return self.value("qlm_agent_lso_total", lso=name)

    def spans_named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans.get_finished_spans() if span.name == name]

    async def start(self) -> RunningAgent:
        def on_ready(address: str) -> None:
            self.address = address

        self._task = asyncio.create_task(self.process.run(self._stop, on_ready))
        await until(lambda: self.incarnation or self._task is None or self._task.done(), "the agent registers")
        if self._task.done():
            await self._task
        return self

    def begin_stop(self) -> None:
        self._stop.set()

    async def stop(self) -> None:
        """As SIGTERM does; waits for the end. Safe twice."""
        self.begin_stop()
        if self._task is not None:
            async with asyncio.timeout(DEADLINE_S):
                await self._task
        await self.queue.stop()

    async def crash(self) -> None:
        """As SIGKILL does: nothing is given back."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        self._task = None
        await self.queue.stop()


class Rig:
    """The rest of the world: gateway, planner and the server's clock."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.queue: Queue = RedisQueue(url, QUEUE)
        self.client = redis.Redis.from_url(url, protocol=2)
        self.keys = Keys(QUEUE)
        self.agents: list[RunningAgent] = []
        self.outputs: dict[str, list[int]] = {}
        self.results: dict[str, request_pb2.Result] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[str, tuple[str, list[int], int]] = {}
        self._accepted_s: dict[str, float] = {}
        self._ids: dict[str, str] = {}
        self._lease: Lease | None = None
        self._after = "0"
        self._plan_version = 0

    async def start(self) -> None:
        await self.queue.start()
        self._lease = await self.queue.acquire_lease(PLANNER_ROLE, "rig", 600.0, "")

    async def stop(self) -> None:
        for agent in self.agents:
            await agent.stop()
        await self.client.aclose()
        await self.queue.stop()

    async def agent(self, name: str = "a", *, url: str = "", **settings: object) -> RunningAgent:
        """`url`: how it reaches the server, if not as the rest of the world does."""
        agent = RunningAgent(url or self.url, name, **settings)
        self.agents.append(agent)
        return await agent.start()

    async def accept(
        self,
        count: int,
        *,
        model: str = "m",
        answer: int = 20,
        prompt: int = 30,
        output_max: int = 4000,
        slo_s: float = 60.0,
        seed: int | None = None,
    ) -> list[str]:
        """Accepts requests; returns their request ids."""
        names: list[str] = []
        for _ in range(count):
            number = next(self._numbers)
            ids = [number % VOCABULARY] * (prompt - 1) + [LENGTH_TOKEN_BASE + answer]
            slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=slo_s)
            body = request_pb2.Request(
                model=model,
                tokens=request_pb2.TokenPrompt(ids=ids),
                sampling=request_pb2.SamplingParams(seed=seed),
                tenant="t",
                request_id=f"r{number}",
                trace=request_pb2.TraceContext(traceparent=TRACEPARENT),
                admission=request_pb2.Admission(prompt_tokens=len(ids), output_tokens_max=output_max, slo=slo),
            )
            self._answers[f"r{number}"] = (model, ids, min(answer, output_max))
            names.append(await self.accept_body(f"r{number}", body.SerializeToString(), prompt))
        return names

    async def accept_body(self, name: str, body: bytes, prompt_tokens: int) -> str:
        receipt = await self.queue.accept(
            Acceptance(
                key=RequestKey("t", name), body=body, digest=bytes(16), gateway=GATEWAY, slo_class="64s", prompt_tokens=prompt_tokens
            )
        )
        self._ids[name] = receipt.queue_id
        self._accepted_s[name] = receipt.accepted_s
        return name

    async def place(
        self,
        names: Sequence[str],
        instance: str = "a",
        *,
        group: str = "g",
        model: str = "m",
        before: str = "",
        slo_s: float = math.inf,
    ) -> None:
        """Puts requests into a group, in front of another or at the end of an instance's queue. `slo_s`: what the group says of its
        requests' SLO; infinite: nothing, so that it is not urgent."""
        assert self._lease is not None
        placement = GroupPlacement(
            group_id=group,
            instance=instance,
            before=before,
            first_deadline_s=min(self._accepted_s[name] for name in names) + slo_s,
            slo_least_s=slo_s,
            meta={"model": model, "slo_kind": "completion", "slo_class": "64s"},
        )
        requests = [RequestPlacement(queue_id=self._ids[name], key=RequestKey("t", name), group_id=group) for name in names]
        assert set(await self.queue.place(self._lease, [placement], requests)) == {StepStatus.DONE}

    async def move(self, groups: Sequence[str], instance: str) -> None:
        """Moves groups to the end of another queue, as a plan does."""
        assert self._lease is not None
        self._plan_version += 1
        versions = {record.instance: record.version for record in (await self.queue.overview()).virtual_queues}
        segment = QueueSegment(instance=instance, start=1_000, group_ids=tuple(groups))
        chunk = PlanChunk(plan_version=self._plan_version, versions=versions, segments=[segment])
        applied = await self.queue.apply_plan(self._lease, chunk)
        assert applied.applied
        assert applied.moved == len(groups)

    async def events(self) -> list[events_pb2.RequestEvent]:
        """All events so far."""
        entries = await self.queue.read_events("0", 0.0, 10_000)
        return [event for entry in entries for event in events_pb2.RequestEvents.FromString(entry.payload).events]

    async def reclaim(self, incarnation: str) -> int:
        assert self._lease is not None
        return await self.queue.reclaim(self._lease, incarnation, b"")

    async def expire_lease(self, incarnation: str) -> None:
        await self.client.delete(self.keys("lease", incarnation))

    async def request(self, name: str) -> LiveRequest | TerminalRecord:
        return await self.queue.find(RequestKey("t", name))

    async def cancel(self, name: str) -> None:
        await self.queue.cancel(RequestKey("t", name), request_pb2.Result().SerializeToString())

    async def read_frames(self) -> None:
        """Takes what was sent to the gateway; chunks may repeat output but never leave a gap."""
        names = {queue_id: name for name, queue_id in self._ids.items()}
        for entry in await self.queue.read_frames(GATEWAY, self._after, 0.1):
            self._after = entry.entry_id
            for frame in frames_pb2.FrameBatch.FromString(entry.payload).frames:
                output = self.outputs.setdefault(names[frame.queue_id], [])
                if frame.token_ids:  # an end without tokens has no offset
                    assert frame.offset <= len(output), f"a gap before {frame.offset} after {len(output)}"
                    known = len(output) - frame.offset
                    assert output[frame.offset :] == list(frame.token_ids)[:known], "a token was taken back"
                    output.extend(frame.token_ids[known:])
                if frame.HasField("result"):
                    assert names[frame.queue_id] not in self.results, "a second end"
                    self.results[names[frame.queue_id]] = frame.result

    async def read_until(self, condition: Callable[[], object], what: str) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not condition():
                    await self.read_frames()
        except TimeoutError:
            raise AssertionError(f"not within {DEADLINE_S:.0f} s: {what}") from None

    async def results_of(self, names: Sequence[str]) -> list[request_pb2.Result]:
        """Waits for the ends of requests."""
        await self.read_until(lambda: all(name in self.results for name in names), f"{len(names)} requests end")
        return [self.results[name] for name in names]

    async def assert_whole(self, names: Sequence[str]) -> None:
        """Streamed and stored output are the model's answer, each token once."""
        for name in names:
            model, ids, length = self._answers[name]
            expected = list(struct.unpack(f"<{length}I", answer_tokens(prompt_digest(model, ids), 0, length, VOCABULARY)))
            assert self.outputs[name] == expected, name
            record = await self.request(name)
            assert isinstance(record, TerminalRecord)
            assert list(request_pb2.Result.FromString(record.result).output_token_ids) == expected
