"""Pulling (QLM section 5): what an agent pulls runs at once, unless lookahead asks for more."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

from qlm.api.v1 import request_pb2
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


def body(number: int) -> bytes:
    slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=600.0)
    ids = [3 + (number * 31 + at) % 2000 for at in range(PROMPT_TOKENS)]
    return request_pb2.Request(
        model="m",
        tokens=request_pb2.TokenPrompt(ids=ids),
        sampling=request_pb2.SamplingParams(temperature=0.0, ignore_eos=True),
        tenant="t",
        request_id=f"r{number}",
        admission=request_pb2.Admission(prompt_tokens=PROMPT_TOKENS, output_tokens_max=OUTPUT_TOKENS, slo=slo),
    ).SerializeToString()


async def queue_up(queue: RedisQueue) -> None:
    """Accepts all requests, and puts them on the agent's virtual queue."""
    placements = []
    for number in range(REQUESTS):
        key = RequestKey("t", f"r{number}")
        receipt = await queue.accept(
            Acceptance(key=key, body=body(number), digest=bytes(16), gateway="g", slo_class="1024s", prompt_tokens=PROMPT_TOKENS)
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


async def all_completed(queue: RedisQueue) -> bool:
    return all([isinstance(await queue.find(RequestKey("t", f"r{number}")), TerminalRecord) for number in range(REQUESTS)])


@pytest.mark.parametrize("lookahead", [0, 4])
async def test_nothing_waits_in_the_engine_without_lookahead(
    lookahead: int, queue: RedisQueue, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qlm_agent.engines.vllm.engine.Template", lambda *arguments: QuickTemplate())
    model = {"name": "m", "profile": "tiny", "context_tokens_max": 2048, "vocabulary_size": 2048, "weights": str(tiny_models[0])}
    agent = {"name": "a", "gpu": "CPU", "engine": "vllm", "batch_max": SEATS, "lookahead_requests": lookahead, "vllm": {"kv_cache_gb": 0.1}}
    config = AgentConfig.model_validate({"queue": {"name": "test"}, "models": [model], "agent": agent})
    process = AgentProcess(config, queue, AgentMetrics(), TracerProvider())
    engine = process.shell._engine
    assert isinstance(engine, VllmEngine)
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(stop, lambda address: None))
    most_running = most_waiting = 0
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not process.shell.machine.incarnation:
                await asyncio.sleep(0.01)
            await queue_up(queue)
            while not await all_completed(queue):
                assert not running.done()
                most_running = max(most_running, engine.stats().running)
                child = engine._placement.child("m")
                most_waiting = max(most_waiting, 0 if child is None else child.stats.get("waiting_max", 0))
    finally:
        stop.set()
        await running
    assert most_running == SEATS
    assert (most_waiting > 0) == (lookahead > 0), f"{most_waiting} waited after a step"
    assert most_waiting <= lookahead
