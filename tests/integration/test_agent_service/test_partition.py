"""A server that cannot be reached or does not answer, for less and for longer than a lease: buffers stay bounded, nothing is lost, and
calls of an incarnation that is over change nothing, however late they arrive."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.values import TerminalRecord
from wire import Wire

from .rig import Rig, RunningAgent, until

LEASE_S = 3.0


@pytest.fixture
async def wire(rig: Rig) -> AsyncIterator[Wire]:
    wire = await Wire(rig.url).start()
    yield wire
    wire.heal()
    for agent in rig.agents:
        await agent.stop()
    await wire.stop()


async def busy(rig: Rig, agent: RunningAgent, count: int, answer: int) -> list[str]:
    """Requests that run on the agent, each with some output."""
    names = await rig.accept(count, answer=answer)
    await rig.place(names, instance=agent.config.agent.name, group=f"g-{names[0]}")
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "all run")
    return names


async def test_a_partition_shorter_than_a_lease_is_bridged(rig: Rig, wire: Wire) -> None:
    agent = await rig.agent(url=wire.url, simulated={"time_scale": 3.0})
    names = await busy(rig, agent, 8, answer=1500)
    wire.cut()
    await asyncio.sleep(LEASE_S / 3)
    held = agent.process.shell.machine.runs.held_tokens
    assert held > 100, "the engine continues"
    wire.heal()
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    assert {(result.incarnation, result.attempts) for result in results} == {("a/1", 1)}
    await until(lambda: agent.owned == 0, "all is written")


async def test_a_partition_longer_than_a_lease_makes_a_zombie_that_changes_nothing(rig: Rig, wire: Wire) -> None:
    zombie = await rig.agent("a", url=wire.url, simulated={"time_scale": 3.0})
    other = await rig.agent("b")
    names = await busy(rig, zombie, 8, answer=2000)
    wire.cut()
    await until(lambda: wire.held > 0, "a call of the zombie is on its way")
    await asyncio.sleep(LEASE_S + 0.5)  # the server's clock ends the lease
    assert await rig.reclaim("a/1") == 8
    await rig.move([f"g-{names[0]}"], "b")
    await until(lambda: other.owned == 8, "the other one has them")
    await rig.read_until(lambda: len(rig.results) >= 2, "it serves them")
    before = {name: await rig.request(name) for name in rig.results}
    wire.heal()  # what the zombie sent arrives now, and so does all that it held
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    assert {(result.incarnation, result.attempts) for result in results} == {("b/1", 2)}
    await until(lambda: zombie.incarnation == "a/2", "it registers anew")
    await until(lambda: zombie.owned == 0, "it drops what is another's")
    assert {name: await rig.request(name) for name in before} == before
    assert zombie.value("qlm_agent_dropped_requests_total") == 8
    assert zombie.value("qlm_agent_emitted_tokens_total") < 8 * 2000
    again = await rig.accept(2)
    await rig.place(again, group="again")
    assert {result.incarnation for result in await rig.results_of(again)} == {"a/2"}


@pytest.mark.parametrize("buffer_tokens_max", [1_000_000, 1_500])
async def test_a_server_that_stands_still_for_longer_than_a_lease(rig: Rig, server: EmbeddedServer, buffer_tokens_max: int) -> None:
    agent = await rig.agent(buffer_tokens_max=buffer_tokens_max, simulated={"time_scale": 4.0})
    short, long = await busy(rig, agent, 4, answer=900), await busy(rig, agent, 4, answer=3900)
    machine = agent.process.shell.machine
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    most = 0
    for _ in range(20):
        await asyncio.sleep((LEASE_S + 1.0) / 20)
        most = max(most, machine.runs.held_tokens)
    if buffer_tokens_max < 1_000_000:
        assert machine.paused
        assert most <= buffer_tokens_max + 8 * 60, "at most the output of one engine poll is beyond the bound"
    else:
        assert not machine.paused
        assert most > 2_000
        assert machine.runs.running == 4, "the short ones ended meanwhile"
    os.kill(server.pid, signal.SIGCONT)
    await until(lambda: agent.incarnation == "a/2", "a new incarnation")
    results = await rig.results_of(short + long)
    await rig.assert_whole(short + long)
    assert {result.attempts for result in results[4:]} == {2}, "running requests were requeued with their output, and continued"
    if buffer_tokens_max == 1_000_000:
        assert {result.attempts for result in results[:4]} == {1}, "ended requests were written though the lease was over"
    record = await rig.request(short[0])
    assert isinstance(record, TerminalRecord)
