"""A process of the cluster: it receives events, and can be killed, restarted, frozen and thawed.

Code of the services that awaits only calls to the queue runs here unchanged: a `Task` drives its coroutine, and each await is a
`Suspension` that names its resumer. There is no asyncio behind it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

from qlm_sim.world.schedule import Alarm, Event, Schedule

CLEANUPS_MAX = 8
"""Most awaits on the way out of a coroutine that is ended."""


class Task:
    """A coroutine of a process, resumed by events."""

    def __init__(self, process: Process, coroutine: Coroutine[Suspension, Any, Any]) -> None:
        self._process = process
        self._coroutine = coroutine
        self.over = False
        self._running = False

    def resume(self, value: object = None, error: BaseException | None = None) -> None:
        """Continues with a value or an error, up to its next suspension; nothing if it is over."""
        if self.over:
            return
        self._running = True
        try:
            suspension = self._coroutine.send(value) if error is None else self._coroutine.throw(error)
        except StopIteration:
            self._end()
            return
        except BaseException:
            self._end()
            raise
        finally:
            self._running = False
        if self.over:  # it ended its own process
            self._close()
        else:
            suspension(self)

    def cancel(self) -> None:
        """Ends it where it stands. Safe twice."""
        if not self.over:
            self._end()
            if not self._running:
                self._close()

    def _close(self) -> None:
        """Ends as a killed process does: its awaits on the way out do not happen."""
        for _ in range(CLEANUPS_MAX):
            try:
                self._coroutine.close()
            except RuntimeError:
                continue  # it awaited something
            return
        raise AssertionError("a coroutine that does not end")

    def _end(self) -> None:
        self.over = True
        self._process.tasks.pop(self, None)


Suspension = Callable[[Task], None]
"""Called with the suspended task; the receiver resumes the task once, by an event."""


@types.coroutine
def suspend(suspension: Suspension) -> Generator[Suspension, Any, Any]:
    """Awaits the value that resumes the task."""
    return (yield suspension)


class Process:
    """`skew_s`: error of its estimate of the server's clock. `epoch` counts its starts and ends: events for an earlier life are lost."""

    def __init__(self, schedule: Schedule, name: str, skew_s: float = 0.0) -> None:
        self.schedule = schedule
        self.name = name
        self.alive = False
        self.frozen = False
        self.epoch = 0
        self.tasks: dict[Task, None] = {}
        self._skew_s = skew_s
        self._latest_s = 0.0
        self._held: list[tuple[int, Event]] = []

    def now_s(self) -> float:
        """The server's clock as this process estimates it; it never decreases."""
        self._latest_s = max(self._latest_s, self.schedule.now_s + self._skew_s)
        return self._latest_s

    def alarm(self, ring: Event) -> OwnAlarm:
        """An alarm by this process's clock."""
        return OwnAlarm(self, ring)

    def to_schedule_s(self, own_s: float) -> float:
        return own_s - self._skew_s

    def reached(self, own_s: float) -> None:
        """Its clock shows at least this: conversions between clocks are not exact."""
        self._latest_s = max(self._latest_s, own_s)

    # Life -------------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        assert not self.alive, f"{self.name} is started twice"
        self.alive = True
        self.frozen = False
        self.epoch += 1

    def end(self) -> None:
        """SIGKILL, or the end of its work: nothing of it continues."""
        self.alive = False
        self.frozen = False
        self.epoch += 1
        self._held.clear()
        for task in list(self.tasks):
            task.cancel()

    def freeze(self) -> None:
        self.frozen = True

    def thaw(self) -> None:
        """Delayed events happen now, in order."""
        if not self.frozen:
            return
        self.frozen = False
        held, self._held = self._held, []
        for epoch, event in held:
            self.schedule.after(0.0, partial(self.receive, epoch, event))

    # Events -----------------------------------------------------------------------------------------------------------

    def deliver(self, delay_s: float, event: Event) -> None:
        """An event for this process as it lives now."""
        self.schedule.after(delay_s, partial(self.receive, self.epoch, event))

    def spawn(self, coroutine: Coroutine[Suspension, Any, Any]) -> Task:
        """Runs a coroutine; its first part at once, after the events due now."""
        task = Task(self, coroutine)
        self.tasks[task] = None
        self.deliver(0.0, task.resume)
        return task

    async def sleep(self, seconds: float) -> None:
        await suspend(lambda task: self.deliver(seconds, task.resume))

    def receive(self, epoch: int, event: Event) -> None:
        """An event that is due, meant for one life of this process."""
        if epoch != self.epoch:
            return
        if self.frozen:
            self._held.append((epoch, event))
        else:
            event()


class OwnAlarm:
    """An `Alarm` in the clock of a process."""

    def __init__(self, process: Process, ring: Event) -> None:
        self._process = process
        self._ring = ring
        self._due_s = 0.0
        self._moved = 0  # how often it was set: a frozen process may get a ring after it was moved
        self._epoch = process.epoch
        self._alarm = Alarm(process.schedule, self._rang)

    def set(self, own_due_s: float | None) -> None:
        """None: not at all."""
        self._moved += 1
        if own_due_s is not None:
            self._due_s = own_due_s
            self._alarm.set(self._process.to_schedule_s(own_due_s))
        else:
            self._alarm.set(None)

    def _rang(self) -> None:
        self._process.receive(self._epoch, partial(self._wake, self._moved))

    def _wake(self, moved: int) -> None:
        if moved == self._moved:
            self._process.reached(self._due_s)
            self._ring()
