"""Calls over the simulated network: what is lost, repeated, late, refused or put off, and what blocks."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace

from qlm_core.vocabulary.errors import QlmError, Unavailable
from qlm_queue.memory.queue import MemoryQueue
from qlm_queue.values import Bounds
from qlm_sim.world.chance import Chance
from qlm_sim.world.link import QueueLink
from qlm_sim.world.network import CALM, Command, Network, NetworkSettings
from qlm_sim.world.process import Process
from qlm_sim.world.schedule import Schedule
from qlm_sim.world.server import SimServer


class World:
    """A server and one process; `carried_out`: the commands that the server did, with their times."""

    def __init__(self, settings: NetworkSettings = CALM) -> None:
        self.schedule = Schedule(1_000.0)
        self.server = SimServer(self.schedule, MemoryQueue("q", Bounds(), lambda: self.schedule.now_s))
        self.met: list[str] = []
        self.network = Network(self.schedule, self.server, Chance(1, "network"), lambda fault, process, call: self.met.append(str(fault)))
        self.network.settings = settings
        self.process = Process(self.schedule, "p")
        self.process.begin()
        self.link = QueueLink("q", self.process, self.network)
        self.carried_out: list[str] = []
        self.server.watchers.append(self)
        self.answers: list[tuple[float, object]] = []

    def before(self, process: str, command: Command) -> None:
        self.carried_out.append(command.name)

    def after(self, process: str, command: Command, value: object, error: QlmError | None) -> None:
        pass

    async def acquire(self, nonce: str = "n") -> None:
        await self._hear(self.link.acquire_lease("planner", nonce, 3.0, "here"))

    async def wait_for_control(self) -> None:
        await self._hear(self.link.read_control("a", "0", 5.0))

    async def _hear(self, call: Awaitable[object]) -> None:
        try:
            answer = await call
        except Unavailable as error:
            answer = error
        self.answers.append((self.schedule.now_s - 1_000.0, answer))

    def run(self, until_s: float = 30.0) -> None:
        while self.schedule.step(1_000.0 + until_s):
            pass


def test_a_calm_call_happens_once_and_is_answered_soon() -> None:
    world = World()
    world.process.spawn(world.acquire())
    world.run()
    assert world.carried_out == ["acquire_lease"]
    assert world.answers[0][0] < 0.1
    assert not isinstance(world.answers[0][1], Unavailable)


def test_a_lost_request_never_happens_and_a_lost_answer_does() -> None:
    for settings, done in ((replace(CALM, request_lost=1.0), []), (replace(CALM, answer_lost=1.0), ["acquire_lease"])):
        world = World(settings)
        world.process.spawn(world.acquire())
        world.run()
        assert world.carried_out == done
        assert isinstance(world.answers[0][1], Unavailable)
        assert world.answers[0][0] == 2.0
        assert world.met


def test_a_repeated_call_happens_twice_and_is_answered_once() -> None:
    world = World(replace(CALM, repeated=1.0))
    world.process.spawn(world.acquire())
    world.run()
    assert world.carried_out == ["acquire_lease"] * 2
    assert len(world.answers) == 1


def test_a_call_of_a_process_that_is_cut_off_is_given_up_at_its_deadline() -> None:
    world = World()
    world.network.cut_off("p")
    world.process.spawn(world.acquire())
    world.run(5.0)
    assert world.carried_out == []
    assert world.answers[0][0] == 2.0
    world.network.reconnect("p")
    world.process.spawn(world.acquire())
    world.run(10.0)
    assert world.carried_out == ["acquire_lease"]


def test_a_stalled_server_does_all_of_it_later() -> None:
    world = World()
    world.server.stall()
    world.process.spawn(world.acquire())
    world.run(4.0)
    assert isinstance(world.answers[0][1], Unavailable)
    assert world.carried_out == []
    world.server.recover()
    world.run(5.0)
    assert world.carried_out == ["acquire_lease"]  # though its caller has given up


def test_a_server_that_is_away_refuses_at_once_and_forgets_who_waited() -> None:
    world = World()
    world.process.spawn(world.wait_for_control())
    world.run(0.5)
    world.server.kill()
    world.process.spawn(world.acquire())
    world.run(1.0)
    assert [isinstance(answer, Unavailable) for _, answer in world.answers] == [True, True]
    assert max(heard_s for heard_s, _ in world.answers) < 0.6
    assert "acquire_lease" not in world.carried_out


def test_a_blocking_read_is_answered_by_what_is_written_and_else_at_its_end() -> None:
    world = World()
    world.process.spawn(world.wait_for_control())
    world.run(2.0)
    assert world.answers == []
    world.process.spawn(world.acquire())
    world.run(20.0)
    waited_s, entries = world.answers[-1]
    assert 5.0 <= waited_s < 5.1
    assert entries == []


def test_calls_of_a_slow_server_take_their_turns() -> None:
    world = World()
    world.server.slow_s = 0.5
    for nonce in ("one", "two", "three"):
        world.process.spawn(world.acquire(nonce))
    world.run()
    times = sorted(time_s for time_s, _ in world.answers)
    assert [round(time_s, 1) for time_s in times] == [0.5, 1.0, 1.5]


def test_a_call_in_flight_happens_though_its_process_is_killed() -> None:
    world = World()
    world.process.spawn(world.acquire())
    world.schedule.step(1_000.0)  # it is on its way
    world.process.end()
    world.run()
    assert world.carried_out == ["acquire_lease"]
    assert world.answers == []
