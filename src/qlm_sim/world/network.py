"""Messages on their way: calls to the server and their answers, and messages between processes.

A call whose request is lost never happens; one whose answer is lost happens, and its caller gets nothing; a repeated one happens twice. A
caller without an answer by its deadline gets Unavailable. All by seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from qlm_core.vocabulary.errors import QlmError, Unavailable
from qlm_sim.world.chance import Chance
from qlm_sim.world.process import Process, Task, suspend
from qlm_sim.world.schedule import Event, Schedule

BLOCK_ARGUMENT = {"read_frames": 2, "read_arrivals": 0, "read_events": 1, "read_control": 2}
"""The blocking reads, and the argument that bounds each."""


class MessageFault(StrEnum):
    """Faults of one call."""

    REQUEST_LOST = "request lost"
    ANSWER_LOST = "answer lost"
    REPEATED = "repeated"
    DELAYED = "delayed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """An operation of the queue's port."""

    name: str
    args: tuple[Any, ...]

    @property
    def block_s(self) -> float:
        """How long it may wait at the server."""
        place = BLOCK_ARGUMENT.get(self.name)
        block_s: float = 0.0 if place is None else self.args[place]
        return block_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """Probabilities for each message, and seconds on the way: at least `delay_min_s`, `delay_mean_s` more on average, and up to
    `delay_long_s` for delayed ones."""

    delay_min_s: float = 0.0002
    delay_mean_s: float = 0.0003
    delay_long_s: float = 3.0
    request_lost: float = 0.0
    answer_lost: float = 0.0
    repeated: float = 0.0
    delayed: float = 0.0
    call_timeout_s: float = 2.0


CALM = NetworkSettings()


class Exchange:
    """One call of a process and its answer. `deadline_s`: when its caller gives up."""

    __slots__ = ("_network", "_settled", "_task", "command", "deadline_s", "epoch", "process")

    def __init__(self, network: Network, process: Process, command: Command, deadline_s: float, task: Task) -> None:
        self._network = network
        self._task = task
        self._settled = False
        self.process = process
        self.epoch = process.epoch
        self.command = command
        self.deadline_s = deadline_s

    @property
    def heard(self) -> bool:
        """Its caller still lives and waits."""
        return not self._settled and self.process.epoch == self.epoch

    def answer(self, value: object, error: QlmError | None = None) -> None:
        self._network.answer(self, value, error)

    def give_up_at_deadline(self) -> None:
        if self.heard:
            message = f"{self.command.name}: no answer in time"
            delay_s = max(0.0, self.deadline_s - self._network.schedule.now_s)
            self.process.deliver(delay_s, lambda: self.settle(None, Unavailable(message)))

    def settle(self, value: object, error: QlmError | None) -> None:
        """The first of answer and deadline counts."""
        if not self._settled:
            self._settled = True
            self._task.resume(value, error)


class Server(Protocol):
    """The receiver of calls."""

    def receive(self, exchange: Exchange) -> None: ...


class Network:
    """`settings` may be replaced at any time. `met`: called for every fault with the affected call."""

    def __init__(self, schedule: Schedule, server: Server, chance: Chance, met: Callable[[str, Process, str], None]) -> None:
        self.schedule = schedule
        self.settings = CALM
        self._server = server
        self._chance = chance
        self._met = met
        self._cut: dict[str, None] = {}

    # Partitions -------------------------------------------------------------------------------------------------------

    def cut_off(self, name: str) -> None:
        """No message passes between this process and the server."""
        self._cut[name] = None

    def reconnect(self, name: str) -> None:
        self._cut.pop(name, None)

    # Calls to the server ----------------------------------------------------------------------------------------------

    async def call(self, process: Process, command: Command, within_s: float | None = None) -> Any:
        """Raises the operation's errors, and Unavailable. `within_s`: a deadline below the call timeout."""
        return await suspend(lambda task: self._send(process, command, within_s, task))

    def _send(self, process: Process, command: Command, within_s: float | None, task: Task) -> None:
        settings = self.settings
        timeout_s = settings.call_timeout_s if within_s is None else min(settings.call_timeout_s, within_s)
        deadline_s = self.schedule.now_s + command.block_s + timeout_s
        exchange = Exchange(self, process, command, deadline_s, task)
        if self._is_cut(process, command) or self._happens(settings.request_lost, MessageFault.REQUEST_LOST, process, command):
            exchange.give_up_at_deadline()
            return
        self._carry(self._delay_s(process, command), exchange)
        if self._happens(settings.repeated, MessageFault.REPEATED, process, command):
            self._carry(self._delay_s(process, command) + self._chance.between(0.0, settings.call_timeout_s), exchange)

    def _carry(self, delay_s: float, exchange: Exchange) -> None:
        self.schedule.after(delay_s, lambda: self._arrive(exchange))

    def _arrive(self, exchange: Exchange) -> None:
        if self._is_cut(exchange.process, exchange.command):
            exchange.give_up_at_deadline()
        else:
            self._server.receive(exchange)

    def answer(self, exchange: Exchange, value: object, error: QlmError | None) -> None:
        if not exchange.heard:
            return
        process, command = exchange.process, exchange.command
        lost = self._is_cut(process, command) or self._happens(self.settings.answer_lost, MessageFault.ANSWER_LOST, process, command)
        delay_s = self._delay_s(process, command)
        if lost or self.schedule.now_s + delay_s >= exchange.deadline_s:
            exchange.give_up_at_deadline()
        else:
            process.deliver(delay_s, lambda: exchange.settle(value, error))

    # Messages between processes ---------------------------------------------------------------------------------------

    def send(self, sender: Process, receiver: Process, what: str, event: Event) -> None:
        """Brings one message from process to process, or loses it. A process that is dead by then does not get it."""
        command = Command(name=what, args=())
        if self._happens(self.settings.request_lost, MessageFault.REQUEST_LOST, sender, command):
            return
        receiver.deliver(self._delay_s(sender, command), event)

    # Chance -----------------------------------------------------------------------------------------------------------

    def _is_cut(self, process: Process, command: Command) -> bool:
        if process.name not in self._cut:
            return False
        self._met("partition", process, command.name)
        return True

    def _happens(self, probability: float, fault: MessageFault, process: Process, command: Command) -> bool:
        if probability == 0.0 or not self._chance.happens(probability):
            return False
        self._met(fault, process, command.name)
        return True

    def _delay_s(self, process: Process, command: Command) -> float:
        settings = self.settings
        if self._happens(settings.delayed, MessageFault.DELAYED, process, command):
            return self._chance.between(0.0, settings.delay_long_s)
        return settings.delay_min_s + self._chance.wait_s(settings.delay_mean_s)
