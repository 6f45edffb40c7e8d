"""Draining, stopping, dying, zombies, and a server that is away: nothing is lost, nothing is done twice, output stays whole."""

from __future__ import annotations

import asyncio

from qlm_core.vocabulary.request import RequestState
from qlm_queue.embedded.server import EmbeddedServer
from qlm_queue.values import LiveRequest

from .rig import Rig, RunningAgent, until


async def busy(rig: Rig, agent: RunningAgent, count: int = 8, answer: int = 1500) -> list[str]:
    """Requests that run on the agent, each with some output."""
    names = await rig.accept(count, answer=answer)
    await rig.place(names, instance=agent.config.agent.name, group=f"g-{names[0]}")
    await rig.read_until(lambda: all(rig.outputs.get(name) for name in names), "all run")
    return names


async def test_a_drain_without_time_gives_everything_back_with_its_progress(rig: Rig) -> None:
    agent = await rig.agent()
    names = await busy(rig, agent)
    assert await agent.process.shell.drain(0.0) == (0, 8)
    for name in names:
        live = await rig.request(name)
        assert isinstance(live, LiveRequest)
        assert (live.state, live.failed_attempts) == (RequestState.PLACED, 0)
    overview = await rig.queue.overview()
    (record,) = overview.instances
    assert record.alive  # drained, not gone
    await agent.stop()
    again = await rig.agent()  # a new start of the same instance continues them
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    assert {(result.attempts, result.incarnation) for result in results} == {(2, again.incarnation)}
    assert again.incarnation != agent.incarnation


async def test_a_stop_while_idle_is_quick(rig: Rig) -> None:
    agent = await rig.agent(drain_finish_s=3600.0)
    began_s = asyncio.get_running_loop().time()
    await agent.stop()
    assert asyncio.get_running_loop().time() - began_s < 30.0


async def test_an_agent_that_lost_its_lease_gives_back_and_starts_anew(rig: Rig) -> None:
    agent = await rig.agent(simulated={"time_scale": 3.0})
    names = await busy(rig, agent)
    await rig.expire_lease("a/1")
    await until(lambda: agent.incarnation == "a/2", "a new incarnation")
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    assert {(result.attempts, result.incarnation) for result in results} == {(2, "a/2")}
    assert agent.metrics.registry.get_sample_value("qlm_agent_lease_losses_total") == 1


async def test_work_continues_while_the_server_is_away(rig: Rig, server: EmbeddedServer) -> None:
    agent = await rig.agent()
    names = await busy(rig, agent, answer=1200)
    held = agent.process.shell.machine.runs
    await server.kill()
    await until(lambda: held.held_tokens > 1000, "output is held")
    await server.start()
    await rig.results_of(names)
    await rig.assert_whole(names)
    await until(lambda: agent.owned == 0, "all is written")
    assert held.held_tokens == 0


async def test_a_server_that_was_away_longer_than_the_lease(rig: Rig, server: EmbeddedServer) -> None:
    agent = await rig.agent(simulated={"time_scale": 2.0})
    names = await busy(rig, agent, answer=1000)
    await server.kill()
    await asyncio.sleep(3.5)  # the lease lives 3 s: only real time ends it
    await server.start()
    await until(lambda: agent.incarnation == "a/2", "a new incarnation")
    results = await rig.results_of(names)
    await rig.assert_whole(names)
    assert {result.attempts for result in results} == {2}
