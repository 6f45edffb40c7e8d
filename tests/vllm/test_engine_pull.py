"""Pulling (QLM section 5): pulled requests run at once, unless lookahead allows more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from qlm.api.v1 import request_pb2
from qlm.internal.v1 import events_pb2
from qlm_agent.config import AgentConfig
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.shell.process import AgentProcess
from qlm_agent.telemetry.metrics import AgentMetrics
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import PLANNER_ROLE, Acceptance, GroupPlacement, RequestPlacement, StepStatus, TerminalRecord
from vllm_nursery import QuickTemplate

DEADLINE_S = 100.0
REQUESTS = 60
SEATS = 8
OUTPUT_TOKENS = 60
PROMPT_TOKENS = 30


@pytest.fixture
async def queue(tmp_path: Path) -> AsyncIterator[RedisQueue]:
    server = EmbeddedServer(tmp_path / "state")
    await server.start()
    queue = RedisQueue(server.url, "test")
    await queue.start()
    yield queue
    await queue.stop()
    await server.stop()


def prompt(number: int) -> list[int]:
    return [3 + (number * 31 + at) % 2000 for at in range(PROMPT_TOKENS)]


def body(number: int, ids: Sequence[int]) -> bytes:
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=600.0)
    return request_pb2.Request(
        model="m",
        tokens=request_pb2.TokenPrompt(ids=ids),
        sampling=request_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
        tenant="t",
        request_id=f"r{number}",
        admission=request_pb2.Admission(prompt_tokens=len(ids), output_tokens_max=OUTPUT_TOKENS, slo=slo),
    ).SerializeToString()


async def queue_up(queue: RedisQueue, prompts: Sequence[Sequence[int]]) -> None:
    """Accepts requests, and puts them on the agent's virtual queue."""
    placements = []
    for number, ids in enumerate(prompts):
        key = RequestKey("t", f"r{number}")
        receipt = await queue.accept(
            Acceptance(key=key, body=body(number, ids), digest=bytes(16), gateway="g", slo_class="1024s", prompt_tokens=len(ids))
        )
        placements.append(RequestPlacement(queue_id=receipt.queue_id, key=key, group_id="g1"))
    group = GroupPlacement(
        group_id="g1",
        instance="a",
        before="",
        first_deadline_s=math.inf,
        slo_least_s=math.inf,
        meta={"model": "m", "slo_kind": "completion", "slo_class": "1024s"},
    )
    lease = await queue.acquire_lease(PLANNER_ROLE, "test", 600.0, "")
    assert lease is not None
    assert set(await queue.place(lease, [group], placements)) == {StepStatus.DONE}


async def all_completed(queue: RedisQueue, count: int) -> bool:
    return all([isinstance(await queue.find(RequestKey("t", f"r{number}")), TerminalRecord) for number in range(count)])


@asynccontextmanager
async def served(
    queue: RedisQueue, prompts: Sequence[Sequence[int]], tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, **settings: int
) -> AsyncIterator[VllmEngine]:
    """An agent that serves these requests until the block is left, which is after DEADLINE_S at the latest."""
    monkeypatch.setattr("qlm_agent.engines.vllm.engine.Template", lambda *arguments: QuickTemplate())
    model = {"name": "m", "profile": "tiny", "context_tokens_max": 2048, "vocabulary_size": 2048, "weights": str(tiny_models[0])}
    agent = {"name": "a", "gpu": "CPU", "engine": "vllm", "vllm": {"kv_cache_gb": 0.1}, **settings}
    config = AgentConfig.model_validate({"queue": {"name": "test"}, "models": [model], "agent": agent})
    process = AgentProcess(config, queue, AgentMetrics(), TracerProvider())
    engine = process.shell._engine
    assert isinstance(engine, VllmEngine)
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(stop, lambda address: None))
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not process.shell.machine.incarnation:
                await asyncio.sleep(0.01)
            await queue_up(queue, prompts)
            yield engine
            assert not running.done()
    finally:
        stop.set()
        await running


@pytest.mark.parametrize("lookahead", [0, 4])
async def test_nothing_waits_in_the_engine_without_lookahead(
    lookahead: int, queue: RedisQueue, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    most_running = most_waiting = 0
    prompts = [prompt(number) for number in range(REQUESTS)]
    async with served(queue, prompts, tiny_models, monkeypatch, batch_max=SEATS, lookahead_requests=lookahead) as engine:
        while not await all_completed(queue, REQUESTS):
            most_running = max(most_running, engine.stats().running)
            child = engine._placement.child("m")
            most_waiting = max(most_waiting, 0 if child is None else child.stats.get("waiting_max", 0))
    assert most_running == SEATS
    assert (most_waiting > 0) == (lookahead > 0), f"{most_waiting} waited after a step"
    assert most_waiting <= lookahead


async def test_ends_report_the_cached_part_of_their_prompts(
    queue: RedisQueue, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of 700 tokens arrives once the first has ended, and begins with the same 640, which are whole blocks."""
    shared = [3 + at * 7 % 2000 for at in range(640)]
    prompts = [[*shared, *([tail] * 60)] for tail in (5, 6)]
    async with served(queue, prompts, tiny_models, monkeypatch, batch_max=1):
        while not await all_completed(queue, len(prompts)):
            await asyncio.sleep(0.01)
    entries = await queue.read_events("0", 0.1, 1_000)
    events = [event for entry in entries for event in events_pb2.RequestEvents.FromString(entry.payload).events]
    ends = [event for event in events if event.kind == events_pb2.EVENT_KIND_COMPLETED]
    assert [(end.HasField("cached_tokens"), end.cached_tokens, end.prompt_tokens) for end in ends] == [(True, 0, 700), (True, 640, 700)]
