"""Watches a run from outside: the live requests of queue, agents and client, and the agents' counters over all their lives."""

from __future__ import annotations

import asyncio
import time
from urllib.error import URLError
from urllib.request import urlopen

import structlog
from rich.console import Console

import qlm
from qlm.errors import QlmError
from qlm_load.campaign.chaos import Chaos, Kill, RunSample
from qlm_load.counters import CounterSums, parse_counters
from qlm_load.cpu_time import CpuTime
from qlm_load.demo.cluster import Cluster, living_pids, serving_pids
from qlm_load.replay.replay import Replay
from qlm_process.cluster.state import ClusterState

POLL_EVERY_S = 0.25
SCRAPE_EVERY_POLLS = 4
SCRAPE_TIMEOUT_S = 2.0


class Watch:
    """Polls the cluster every POLL_EVERY_S, and passes the result to `chaos`."""

    def __init__(self, cluster: Cluster, client: qlm.AsyncClient, replay: Replay, chaos: Chaos, console: Console) -> None:
        self.counters = CounterSums()
        self.cpu = CpuTime()
        self._cluster = cluster
        self._client = client
        self._replay = replay
        self._chaos = chaos
        self._console = console
        self._log = structlog.get_logger()

    async def run(self) -> None:
        """Runs until cancelled."""
        polls = 0
        while True:
            started_s = time.monotonic()
            if polls % SCRAPE_EVERY_POLLS == 0:
                await self.scrape()
            await self.poll()
            polls += 1
            await asyncio.sleep(max(0.0, POLL_EVERY_S - (time.monotonic() - started_s)))

    async def poll(self) -> list[Kill]:
        """Polls once; returns the kills that follow."""
        progress = self._replay.progress()
        share = progress.ended / progress.total
        state = self._cluster.state()
        held: dict[str, int] = {}
        if state is not None and share >= self._chaos.next_from_share:
            held = await self._held(state)
            await self.scrape()  # for the counters of an agent that is killed now
        kills = self._chaos.poll(RunSample(now_s=time.monotonic(), ended_share=share, held=held), serving_pids(state))
        for kill in kills:
            who = f"SIGKILL {kill.process} (pid {kill.pid}) at {kill.at_s:.1f} s ({kill.at_utc})"
            text = f"{who}, holding {kill.held} live requests; seed {kill.seed}"
            self._console.print(text, style="bold red", highlight=False, soft_wrap=True)
        return kills

    async def scrape(self) -> None:
        """Reads the CPU time of the cluster, and the counters of all agents that answer."""
        state = self._cluster.state()
        self.cpu.sample(living_pids(state).values())
        for agent in state.of("agent") if state is not None else ():
            if agent.pid and agent.metrics_port:
                try:
                    text = await asyncio.to_thread(_page, agent.metrics_port)
                except (URLError, OSError):
                    continue  # it is down, or starting: its next life is read later
                self.counters.observe(agent.name, agent.pid, parse_counters(text))

    async def _held(self, state: ClusterState) -> dict[str, int]:
        """Live requests by process (see chaos.py)."""
        streams = self._replay.progress().streams
        held = {gateway.name: streams.get(gateway.address, 0) for gateway in state.of("gateway")}
        try:
            status = await self._client.status()
        except QlmError as error:
            self._log.info("status_failed", reason=error.reason)
            return held
        held |= {queue.instance: queue.running for queue in status.virtual_queues}
        held |= {planner.name: status.live for planner in state.of("planner") if planner.address == status.planner}
        return held


def _page(port: int) -> str:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
        text: str = answer.read().decode()
    return text
