"""Gateways on a real queue, with the smallest agent that serves it: what the tests of gateway and SDK share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

from published_waits import publish_waits
from qlm.api.v1.instance_pb2 import Instance
from qlm.api.v1.request_pb2 import FinishReason, Request, Result, Usage
from qlm.internal.v1.frames_pb2 import Frame
from qlm.values import TokenLogprobs
from qlm_agent.delivery.logprobs import record
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.errors import LeaseLost, Unavailable
from qlm_core.vocabulary.model import ModelSpec
from qlm_core.vocabulary.request import RequestState
from qlm_gateway.config import GatewayConfig
from qlm_gateway.shell import Gateway
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import (
    BATCH_MAX,
    PLANNER_ROLE,
    Bounds,
    Completion,
    Emission,
    GroupPlacement,
    Lease,
    Owned,
    PullBudget,
    Pulled,
    RequestPlacement,
    RequeueCause,
    StepStatus,
)

MODEL = "mistral-7b"
INSTANCE = "a100-0"
CONTEXT_TOKENS_MAX = 4096
LEASE_S = 60.0
PATIENCE_S = 60.0
"""How long a test waits for what must happen."""


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """The test agent's answer to a prompt."""
    return [(sum(prompt) * 31 + index * 7 + 1) % 1000 for index in range(count)]


def piece_of(token: int) -> str:
    """The test agent's text of a token, where it reports only that: one byte to four."""
    return chr(ord("a") + token % 26) * (1 + token % 4)


def expected_logprobs(tokens: Iterable[int], top: int) -> tuple[TokenLogprobs, ...]:
    """The test agent's log probabilities: exact in a float32."""
    return tuple(TokenLogprobs(-token / 8, tuple((token + n, -(token + n) / 8) for n in range(top))) for token in tokens)


def answer_of(request: Request) -> list[int]:
    return expected_tokens(list(request.tokens.ids) or [len(request.text)], request.admission.output_tokens_max)


async def until(condition: Callable[[], object], what: str) -> None:
    """Waits for a condition, for `PATIENCE_S`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + PATIENCE_S
    while not condition():
        assert loop.time() < deadline_s, f"never happened: {what}"
        await asyncio.sleep(0.005)


@dataclass
class Running:
    """A request that the agent runs. `answer`: all tokens that it will produce; `sent`: how many are out."""

    pulled: Pulled
    request: Request
    answer: list[int]
    sent: int = 0


class ScriptedAgent:
    """Places and serves everything in order, through the port. Tokens are made when a test says so (`step`) or by themselves (`run`)."""

    def __init__(self, queue: RedisQueue) -> None:
        self.queue = queue
        self.running: dict[str, Running] = {}
        self.answer_of = answer_of
        self.text_output = False
        self._groups = itertools.count()
        self._planner: Lease | None = None
        self._lease: Lease | None = None
        self.incarnation = ""

    async def start(self) -> None:
        self._planner = await self.queue.acquire_lease(PLANNER_ROLE, "test", LEASE_S, "")
        body = Instance(name=INSTANCE, gpu="A100-80GB", n_gpu=1, engine="simulated", models=[MODEL], time_scale=1.0)
        self.incarnation, self._lease = await self.queue.register(INSTANCE, "test", body.SerializeToString(), LEASE_S)

    async def place(self, within_s: float = 60.0) -> None:
        assert self._planner is not None
        waiting = await self.queue.read_unplaced("", 100)
        for live in waiting:
            gid = f"g{next(self._groups)}"
            meta = {"model": MODEL, "slo_kind": "completion", "slo_class": "64s", "token_class": "16"}
            group = GroupPlacement(group_id=gid, instance=INSTANCE, before="", first_deadline_s=live.accepted_s + within_s, meta=meta)
            placement = RequestPlacement(queue_id=live.queue_id, key=live.key, group_id=gid)
            await self.queue.place(self._planner, [group], [placement])

    async def pull(self) -> None:
        assert self._lease is not None
        budget = PullBudget(requests_max=100, kv_tokens=10_000_000, output_reserve_tokens=1)
        result = await self.queue.pull(self._lease, MODEL, budget)
        for pulled in result.pulled:
            request = Request.FromString(pulled.body)
            answer = self.answer_of(request)
            self.running[pulled.queue_id] = Running(pulled, request, answer, len(pulled.progress) // 4)

    async def step(self, count: int = 1) -> None:
        """So many more tokens of every running request, in one frame each; ends those that have none left. Frames the queue refused (it
        raises Unavailable) are sent again the next time."""
        emitting, emissions, completions = list[Running](), list[Emission](), []
        for running in self.running.values():
            tokens = running.answer[running.sent : running.sent + count]
            sampling = running.request.sampling
            top = sampling.logprobs if sampling.HasField("logprobs") else None
            said = () if top is None else expected_logprobs(tokens, top)
            records = b"".join(record(each.of_token, each.top) for each in said)
            frame = Frame(queue_id=running.pulled.queue_id, attempt=running.pulled.attempt, offset=running.sent, token_ids=tokens)
            progress = b"".join(token.to_bytes(4, "little") for token in tokens)
            offset = running.sent * 4
            if self.text_output:
                frame = Frame(
                    queue_id=frame.queue_id, attempt=frame.attempt, offset=running.sent, pieces=[piece_of(each) for each in tokens]
                )
                progress = Result(output_pieces=frame.pieces).SerializeToString()
                offset = len(Result(output_pieces=[piece_of(each) for each in running.answer[: running.sent]]).SerializeToString())
            emission = Emission(
                queue_id=running.pulled.queue_id,
                key=running.pulled.key,
                attempt=running.pulled.attempt,
                offset=offset,
                progress=progress,
                frame=frame.SerializeToString() + records,
                text=self.text_output,
                logprobs=records,
            )
            if running.sent + len(tokens) < len(running.answer):
                emitting.append(running)
                emissions.append(emission)
                continue
            usage = Usage(prompt_tokens=running.request.admission.prompt_tokens, output_tokens=running.sent + len(tokens))
            result = Result(model=MODEL, finish_reason=FinishReason.FINISH_REASON_LENGTH, usage=usage)
            completions.append(Completion(last=emission, state=RequestState.COMPLETED, result=result.SerializeToString(), event=b""))
        for start in range(0, len(emissions), BATCH_MAX):
            await self.queue.emit(self.incarnation, emissions[start : start + BATCH_MAX])
            for running in emitting[start : start + BATCH_MAX]:
                running.sent += count
        for start in range(0, len(completions), BATCH_MAX):
            await self.queue.complete(self.incarnation, completions[start : start + BATCH_MAX])
        for completion in completions:
            del self.running[completion.last.queue_id]

    async def publish(self, every_s: float = 0.05) -> None:
        """Publishes the waits, again and again, as planners do."""
        assert self._planner is not None
        catalogue = {MODEL: ModelSpec(name=MODEL, profile="Mistral-7B", context_tokens_max=CONTEXT_TOKENS_MAX)}
        profiles = shipped_snapshot()
        while True:
            with suppress(Unavailable):
                await publish_waits(self.queue, self._planner, catalogue, profiles)
            await asyncio.sleep(every_s)

    async def start_all(self) -> None:
        """Places and pulls what is there."""
        await self.place()
        await self.pull()

    async def evict_all(self) -> None:
        """Those that run wait again, with what they have produced."""
        owned = [Owned(queue_id=each.pulled.queue_id, key=each.pulled.key, attempt=each.pulled.attempt) for each in self.running.values()]
        assert await self.queue.requeue(self.incarnation, owned, RequeueCause.EVICTED, b"") == [StepStatus.DONE] * len(owned)
        self.running.clear()

    async def run(self, pause_s: float = 0.002) -> None:
        """Serves until it is cancelled; continues when the server is back."""
        while True:
            with suppress(Unavailable):
                await self.start_all()
                await self.step()
            await asyncio.sleep(pause_s)


class GatewayRun:
    """A gateway in this process. `stop` drains it; `kill` cuts its connections."""

    def __init__(self, gateway: Gateway, queue: RedisQueue) -> None:
        self.gateway = gateway
        self.address = ""
        self._queue = queue
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self.gateway.run(self._stop, ready.set_result))
        await asyncio.wait([self._task, ready], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task
        self.address = ready.result()

    def start_drain(self) -> None:
        self._stop.set()

    async def stop(self) -> None:
        self._stop.set()
        await self._end()

    async def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._end()

    async def _end(self) -> None:
        if self._task is not None:
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
            await self._queue.stop()


class Rig:
    """One queue server, any number of gateways, one agent."""

    def __init__(self, server: EmbeddedServer, bounds: Bounds) -> None:
        self.server = server
        self.bounds = bounds
        self.gateways: list[GatewayRun] = []
        self.queue = self.new_queue()
        self.agent = ScriptedAgent(self.queue)
        self.tracer_provider = TracerProvider()
        self._ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    def new_queue(self) -> RedisQueue:
        return RedisQueue(self.server.url, "test", bounds=self.bounds)

    async def gateway(
        self,
        *,
        tokenizer: str = "",
        context_tokens_max: int = CONTEXT_TOKENS_MAX,
        security: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> GatewayRun:
        model = {"name": MODEL, "profile": "Mistral-7B", "context_tokens_max": context_tokens_max, "tokenizer": tokenizer}
        config = GatewayConfig.model_validate(
            {
                "models": [model],
                "security": security or {},
                "gateway": {"listen": "127.0.0.1:0", "drain_grace_s": 0.5, "stream_poll_s": 0.1, "stream_recheck_s": 0.5, **settings},
            }
        )
        queue = self.new_queue()
        run = GatewayRun(Gateway(config, queue, self.tracer_provider, lambda: f"id{next(self._ids)}"), queue)
        await run.start()
        self.gateways.append(run)
        return run

    def serve(self, pause_s: float = 0.002) -> None:
        """Lets the agent run by itself."""
        self._tasks.append(asyncio.create_task(self.agent.run(pause_s)))

    def publish(self) -> None:
        """Publishes the waits from now on."""
        self._tasks.append(asyncio.create_task(self.agent.publish()))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, LeaseLost):
                await task
        for run in self.gateways:
            await run.kill()
        await self.queue.stop()


@asynccontextmanager
async def open_rig(state_dir: Path, bounds: Bounds | None = None) -> AsyncIterator[Rig]:
    server = EmbeddedServer(state_dir)
    await server.start()
    try:
        rig = Rig(server, bounds or Bounds())
        try:
            await rig.queue.start()
            await rig.agent.start()
            yield rig
        finally:
            await rig.stop()
    finally:
        await server.stop()


def concatenated(chunks: Iterable[tuple[int, ...]]) -> list[int]:
    return [token for chunk in chunks for token in chunk]
