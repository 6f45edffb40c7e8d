"""Kills of any process under streams of the official client: each answer arrives whole and token-exact."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from itertools import count

import openai

from benchmarks.gateway.stream_client import StreamedChat, WrongText, gateway_clients
from benchmarks.queue.live import LiveCluster, Shape
from benchmarks.queue.run import Bench
from qlm_core.vocabulary.errors import Unavailable
from qlm_load.campaign.campaign import OVERRIDES, VICTIM_SERVICES, ended_by_themselves
from qlm_load.campaign.strikes import Striker, draw_strikes
from qlm_load.demo.cluster import POLL_S, living_pids, serving_pids

SHAPE = Shape(
    gateways=2,
    agents=2,
    planners=2,
    http=True,
    time_scale=4.0,
    queue={"bounds": {"attempts_max": OVERRIDES["queue.bounds.attempts_max"]}},
    up={"restarts_max": OVERRIDES["up.restarts_max"]},
)
OUTPUT_TOKENS = (100, 800)
"""Least and most of a stream, by its number: streams end, and so kills come, at any point of the others. The mean is 2 s undisturbed."""
SLO_S = 60.0
STREAM_TIMEOUT_S = 180.0
"""A stream that takes longer is hung: a kill costs it a lease and a restart, and kills follow each other."""
SETTLE_TIMEOUT_S = 60.0


class Streams:
    """`requests` streamed chats, `clients` at a time. `lost`: keys of those that did not arrive whole and exact, and why."""

    def __init__(self, bench: Bench) -> None:
        self._seed = bench.seed
        self._requests = bench.sizes.stream_requests
        self._clients = bench.sizes.stream_clients
        self.ended = 0
        self.breaks = 0
        self.resumes = 0
        self.broken = 0
        self.lost: dict[str, str] = {}

    @property
    def ended_share(self) -> float:
        return self.ended / self._requests

    async def run(self, addresses: tuple[str, ...]) -> None:
        """Returns when all have ended."""
        numbers = count()
        clients = gateway_clients(addresses)

        async def read_repeatedly() -> None:
            while (number := next(numbers)) < self._requests:
                await self._read(number, clients)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._clients):
                    group.create_task(read_repeatedly())
        finally:
            for client in clients:
                await client.close()

    async def _read(self, number: int, clients: tuple[openai.AsyncOpenAI, ...]) -> None:
        key = f"streams-{self._seed}-{number}"
        least, most = OUTPUT_TOKENS
        tokens = least + number * 389 % (most - least)
        chat = StreamedChat(key=key, content=f"Question {key}", max_tokens=tokens, slo_s=SLO_S, by_event=number % 4 < 2)
        try:
            await chat.read(clients, number, STREAM_TIMEOUT_S)
        except (WrongText, openai.APIError, TimeoutError) as error:
            self.lost[key] = f"{type(error).__name__}: {error}"
        self.ended += 1
        self.breaks += chat.breaks
        self.resumes += chat.resumes
        self.broken += chat.breaks > 0


async def measure_kills(bench: Bench) -> None:
    """SIGKILL at gateways, planners, the estimator, agents and the queue's server, by seed, each when its share of the streams has ended.
    A stream that breaks off continues at the other gateway: every second one by `Last-Event-ID`, the others from their start by their
    `Idempotency-Key`. All text that a client sees is compared with the model's answer."""
    sizes = bench.sizes
    kills = sizes.stream_kills + sizes.stream_server_kills
    bench.say(f"kills: {kills} under {sizes.stream_clients} clients, {sizes.stream_requests:,} streams")
    async with LiveCluster(bench.out / "http-kills", SHAPE, bench.seed, bench.collector) as live:
        names = [process.name for service in VICTIM_SERVICES for process in live.state.of(service)]
        began_s = time.monotonic()
        striker = Striker(draw_strikes(bench.seed, sizes.stream_kills, sizes.stream_server_kills, names), start_s=began_s)
        streams = Streams(bench)
        async with asyncio.TaskGroup() as group:
            striking = group.create_task(_strike(bench, live, striker, streams))
            await streams.run(live.http_addresses)
            striking.cancel()
        seconds = time.monotonic() - began_s
        settled = await _serves_again(live, striker)
        crashed = ended_by_themselves(live.now(), striker.log)
    bench.values |= {"stream_kills": len(striker.log), "streams_lost": len(streams.lost)}
    bench.details["kills"] = {
        "streams": streams.ended,
        "streams_broken": streams.broken,
        "breaks": streams.breaks,
        "resumes": streams.resumes,
        "kills_by_process": dict(Counter(struck.strike.process for struck in striker.log)),
        "seconds": round(seconds, 1),
        "lost": dict(list(streams.lost.items())[:5]),
    }
    if striker.waiting or crashed or not settled:
        raise Unavailable(f"{len(striker.waiting)} kills did not happen; ended by themselves: {crashed}; all serve again: {settled}")


async def _strike(bench: Bench, live: LiveCluster, striker: Striker, streams: Streams) -> None:
    """Polls the run every POLL_S until cancelled."""
    while True:
        state = live.now()
        for struck in striker.poll(time.monotonic(), streams.ended_share, living_pids(state), serving_pids(state)):
            bench.say(f"kills: {struck.strike.process} at {streams.ended} ended, {streams.breaks} breaks, {len(streams.lost)} lost")
        await asyncio.sleep(POLL_S)


async def _serves_again(live: LiveCluster, striker: Striker) -> bool:
    deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not (state := live.now()).ready:
        if time.monotonic() > deadline_s:
            return False
        striker.poll(time.monotonic(), 0.0, {}, serving_pids(state))
        await asyncio.sleep(POLL_S)
    return True
