"""The queue's server: the memory twin, one command at a time; it may be slow, stalled or away, and recover.

A read that blocks waits for a later command's write, never for time alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sized
from enum import Enum
from typing import Any, Protocol

from qlm_core.vocabulary.errors import QlmError, Unavailable
from qlm_queue.memory.queue import MemoryQueue
from qlm_sim.world.network import BLOCK_ARGUMENT, Command, Exchange
from qlm_sim.world.schedule import Schedule

READ_ONLY = frozenset(
    {
        "find",
        "leader_address",
        "overview",
        "owned",
        "read_profiles",
        "read_unplaced",
        "read_waits",
        "renew_lease",
        "requests_ahead",
        "server_time_s",
        "waiting",
        *BLOCK_ARGUMENT,
    }
)
"""Commands that change nothing."""

StreamKey = tuple[str, str]


class Condition(Enum):
    """State of the server."""

    UP = "up"
    STALLED = "stalled"  # it answers nothing, and does all of it later
    AWAY = "away"  # connections are refused


class Watcher(Protocol):
    """Sees every command just before and after it is carried out."""

    def before(self, process: str, command: Command) -> None: ...

    def after(self, process: str, command: Command, value: object, error: QlmError | None) -> None: ...


class SimServer:
    """`slow_s`: seconds that each command takes, one after the other. `watchers` see all commands."""

    def __init__(self, schedule: Schedule, queue: MemoryQueue) -> None:
        self.queue = queue
        self.condition = Condition.UP
        self.slow_s = 0.0
        self.watchers: list[Watcher] = []
        self._schedule = schedule
        self._busy_until_s = 0.0
        self._backlog: list[Exchange] = []
        self._blocked: list[tuple[Exchange, float, StreamKey]] = []  # with the time at which it returns empty

    def receive(self, exchange: Exchange) -> None:
        match self.condition:
            case Condition.AWAY:
                self._refuse(exchange)
            case Condition.STALLED:
                self._backlog.append(exchange)
                exchange.give_up_at_deadline()
            case Condition.UP if self.slow_s or self._busy_until_s > self._schedule.now_s:
                self._busy_until_s = max(self._busy_until_s, self._schedule.now_s) + self.slow_s
                exchange.give_up_at_deadline()
                self._schedule.at(self._busy_until_s, lambda: self._take_turn(exchange))
            case Condition.UP:
                self._execute(exchange)

    # Conditions -------------------------------------------------------------------------------------------------------

    def stall(self) -> None:
        """As by SIGSTOP."""
        self.condition = Condition.STALLED

    def kill(self) -> None:
        """It keeps all answered commands; unread ones are lost."""
        self.condition = Condition.AWAY
        left = [*self._backlog, *(exchange for exchange, *_ in self._blocked)]
        self._backlog, self._blocked = [], []
        for exchange in left:
            self._refuse(exchange)

    def recover(self) -> None:
        """Up again; after a stall it carries out the delayed commands."""
        self.condition = Condition.UP
        backlog, self._backlog = self._backlog, []
        for exchange in backlog:
            self.receive(exchange)

    # Commands ---------------------------------------------------------------------------------------------------------

    def _refuse(self, exchange: Exchange) -> None:
        exchange.answer(None, Unavailable(f"{exchange.command.name}: connection refused"))

    def _take_turn(self, exchange: Exchange) -> None:
        if self.condition is Condition.UP:
            self._execute(exchange)
        else:
            self.receive(exchange)

    def _execute(self, exchange: Exchange) -> None:
        command = exchange.command
        if command.name in BLOCK_ARGUMENT:
            if exchange.heard and not self._read(exchange, last=command.block_s <= 0.0):
                until_s = self._schedule.now_s + command.block_s
                self._blocked.append((exchange, until_s, _read_key(command)))
                self._schedule.at(until_s, lambda: self._unblock(exchange))
            return
        value, error = self._perform(exchange)
        exchange.answer(value, error)
        self._wake_readers()

    def _wake_readers(self) -> None:
        """Answers the blocked reads of written streams, in order of arrival."""
        written = self.queue.state.written
        if written:
            self._blocked = [
                blocked
                for blocked in self._blocked
                if blocked[2] not in written or (blocked[0].heard and not self._read(blocked[0], last=False))
            ]
            written.clear()

    def _unblock(self, exchange: Exchange) -> None:
        """Its time is over, if it still waits."""
        for place, (blocked, until_s, _) in enumerate(self._blocked):
            if blocked is exchange and until_s <= self._schedule.now_s:
                del self._blocked[place]
                self._read(exchange, last=True)
                return

    def _read(self, exchange: Exchange, *, last: bool) -> bool:
        """Whether a blocking read was answered."""
        value, error = self._perform(exchange)
        if error is None and not last and not _found(value):
            return False
        exchange.answer(value, error)
        return True

    def _perform(self, exchange: Exchange) -> tuple[object, QlmError | None]:
        command = exchange.command
        args = command.args
        place = BLOCK_ARGUMENT.get(command.name)
        if place is not None:
            args = (*args[:place], 0.0, *args[place + 1 :])
        for watcher in self.watchers:
            watcher.before(exchange.process.name, command)
        value: object = None
        error: QlmError | None = None
        method: Callable[..., Coroutine[object, None, object]] = getattr(self.queue, command.name)
        try:
            value = drive(method(*args))
        except QlmError as failure:
            error = failure
        for watcher in self.watchers:
            watcher.after(exchange.process.name, command, value, error)
        return value, error


def drive(coroutine: Coroutine[Any, Any, object]) -> object:
    """The result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: object = end.value
        return result
    raise AssertionError(f"{coroutine} waits for something")


def _read_key(command: Command) -> StreamKey:
    """The stream that a blocking read waits on, as `MemoryState.written` names it."""
    owner = command.args[0] if command.name in ("read_frames", "read_control") else ""
    return command.name.removeprefix("read_"), owner


def _found(value: object) -> bool:
    assert isinstance(value, Sized)
    return len(value) > 0
