"""Planners and estimators as real processes, two of each: killed, paused and stopped; the other one continues."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from qlm.api.v1 import request_pb2
from qlm_core.vocabulary.request import RequestKey
from qlm_process.wire.instance import to_body
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Acceptance

from .estimator_rig import A100, Rig

DEADLINE_S = 60.0
POLL_S = 0.02
LEASE_S = 2.0
RENEW_S = 0.25
LONG_LEASE_S = 60.0
ROLES = ("planner", "estimator")


async def until(condition: Callable[[], Awaitable[bool]], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for a condition, fails at the deadline."""
    began_s = time.monotonic()
    while not await condition():
        assert time.monotonic() < began_s + deadline_s, f"not within {deadline_s} s: {what}"
        await asyncio.sleep(POLL_S)


@dataclass
class Member:
    """One process of a role."""

    name: str
    log: Path
    process: asyncio.subprocess.Process

    def events(self) -> list[str]:
        """Names of its log events, in order."""
        return [json.loads(line)["event"] for line in self.log.read_text("utf-8").splitlines() if line.startswith("{")]

    @property
    def address(self) -> str:
        for line in self.log.read_text("utf-8").splitlines():
            if line.startswith("{") and json.loads(line)["event"] == "ready":
                return str(json.loads(line)["address"])
        return ""


@dataclass
class Pair:
    """Two processes of one role on a queue of their own."""

    role: str
    url: str
    folder: Path
    queue: RedisQueue
    rig: Rig | None = None
    members: list[Member] = field(default_factory=list)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def start(self, lease_s: float) -> tuple[Member, Member]:
        """Both, at the same time; returns the leader and the standby."""
        config = self.folder / "qlm.yaml"
        models = [{"name": "chat", "profile": "Mistral-7B"}]
        queue = {"name": "test", "url": self.url, "lease_ttl_s": lease_s, "lease_renew_s": RENEW_S}
        settings = {"planner": {"listen": "127.0.0.1:0"}, "estimator": {"listen": "127.0.0.1:0", "publish_every_s": 0.2}}
        telemetry = {"log_format": "json"}
        config.write_text(yaml.safe_dump({"models": models, "queue": queue, "telemetry": telemetry, **settings}), "utf-8")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("QLM_")}
        for number in range(2):
            log = self.folder / f"{self.role}-{number}.log"
            with log.open("wb") as out:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", f"qlm_{self.role}", "--config", str(config), "--name", f"{self.role}-{number}",
                    stdout=out, stderr=out, env=environment,
                )  # fmt: skip
            self.members.append(Member(f"{self.role}-{number}", log, process))

        async def both_stand() -> bool:
            return all(each.address for each in self.members) and any("lease_awaited" in each.events() for each in self.members)

        await until(both_stand, "one leads and one stands by")
        await until(self.led, "there is a leader")
        leader = await self.leader()
        assert leader is not None
        [standby] = [each for each in self.members if each is not leader]
        return leader, standby

    async def leader(self) -> Member | None:
        address = await self.queue.leader_address(self.role)
        return next((each for each in self.members if address and each.address == address), None)

    async def led(self) -> bool:
        return await self.leader() is not None

    async def led_by(self, member: Member, within_s: float = DEADLINE_S) -> None:
        async def leads() -> bool:
            return await self.leader() is member

        await until(leads, f"{member.name} leads", within_s)

    async def logged(self, member: Member, event: str, times: int = 1) -> None:
        async def found() -> bool:
            return member.events().count(event) >= times

        await until(found, f"{member.name} logs {event}")

    # Work of the role -------------------------------------------------------------------------------------------------

    async def submit(self, count: int = 20) -> None:
        for _ in range(count):
            key = RequestKey("tenant", f"r{next(self.numbers)}")
            slo = request_pb2.Slo(kind=request_pb2.SLO_KIND_COMPLETION, seconds=60.0)
            admission = request_pb2.Admission(prompt_tokens=100, output_tokens_max=100, slo=slo)
            body = request_pb2.Request(model="chat", text="x", tenant=key.tenant, request_id=key.request_id, admission=admission)
            await self.queue.accept(
                Acceptance(key=key, body=body.SerializeToString(), digest=bytes(16), gateway="gateway", slo_class="64s", prompt_tokens=100)
            )

    async def works(self) -> None:
        """The leader does its work: all is placed, or new profiles arrive."""
        if self.role == "planner":
            await self.submit()

            async def placed() -> bool:
                return (await self.queue.overview()).unplaced == 0

            await until(placed, "all is placed")
        else:
            assert self.rig is not None
            version, _ = await self.queue.read_profiles()
            await self.rig.serve(5, 100, seconds=0.0)

            async def published() -> bool:
                return (await self.queue.read_profiles())[0] > version

            await until(published, "it publishes what it learned")


@pytest.fixture(params=ROLES)
async def pair(request: pytest.FixtureRequest, server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Pair]:
    queue = RedisQueue(server.url, "test")
    await queue.start()
    pair = Pair(request.param, server.url, tmp_path, queue)
    if pair.role == "estimator":
        # The planner and the agent are played here.
        pair.rig = Rig(queue)
        await pair.rig.start()
    else:
        await queue.register(A100.name, "nonce", to_body(A100), 3600.0)
    yield pair
    for member in pair.members:
        if member.process.returncode is None:
            member.process.send_signal(signal.SIGCONT)
            member.process.kill()
            await member.process.wait()
    await queue.stop()


async def test_a_paused_leader_is_fenced_and_a_killed_one_is_followed(pair: Pair) -> None:
    first, second = await pair.start(LEASE_S)
    await pair.works()

    # Paused for longer than its lease. Requests of that time may have been handed to it already.
    first.process.send_signal(signal.SIGSTOP)
    if pair.role == "planner":
        await pair.submit()
    await pair.led_by(second)
    await pair.works()

    # It wakes up in the belief that it leads, learns otherwise, and stands by again.
    waited = first.events().count("lease_awaited")
    first.process.send_signal(signal.SIGCONT)
    await pair.logged(first, "lease_awaited", waited + 1)
    assert await pair.leader() is second
    await pair.works()

    # The other one is killed: the first leads a second time, with what happened since.
    second.process.kill()
    await second.process.wait()
    await pair.led_by(first)
    await pair.works()
    if pair.role == "planner":
        fences = {group_id.partition("-")[0] for group_id in (await pair.queue.overview()).groups}
        assert fences <= {"g1", "g2", "g3"}
        assert (await pair.queue.overview()).unplaced == 0


async def test_a_leader_that_is_stopped_hands_over_at_once(pair: Pair) -> None:
    """SIGTERM: the lease is given back, so that the standby need not wait for it to expire, which takes a minute here."""
    first, second = await pair.start(LONG_LEASE_S)
    await pair.works()
    first.process.terminate()
    await pair.led_by(second, LONG_LEASE_S / 2)
    assert await asyncio.wait_for(first.process.wait(), DEADLINE_S) == 0
    await pair.works()
    second.process.terminate()
    assert await asyncio.wait_for(second.process.wait(), DEADLINE_S) == 0
    assert await pair.queue.leader_address(pair.role) == ""
