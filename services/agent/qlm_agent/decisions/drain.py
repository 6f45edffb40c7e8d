"""Draining and stopping: pulling ends, running requests may finish until a time, all others return to the queue.

Offloaded runs return at once, for another instance to continue; only runs that cannot be continued faithfully elsewhere stay, and finish
here while there is time.
"""

from __future__ import annotations

from collections.abc import Sequence

from qlm_agent.decisions.delivery import Delivery
from qlm_agent.decisions.effects import AbortRuns, Deregister, Describe, DrainAnswer, Effect
from qlm_agent.decisions.events import DrainCommand
from qlm_agent.decisions.registration import ServerLink
from qlm_agent.decisions.runs import ReturnCause, Run, RunTable
from qlm_agent.decisions.settings import MachineSettings


class DrainControl:
    """`draining`: set by the first drain command. `stop`: the process ends with the drain."""

    def __init__(self, settings: MachineSettings, runs: RunTable, link: ServerLink, delivery: Delivery) -> None:
        self._settings = settings
        self._runs = runs
        self._link = link
        self._delivery = delivery
        self.draining = False
        self.stop = False
        self._finish_by_s: float | None = None  # None once the runs of that time are given back
        self._give_up_at_s: float | None = None
        self._described = False
        self._describe_call: int | None = None
        self._deregister_call: int | None = None
        self._callers: list[int] = []
        self._base = (0, 0)  # finished and given back before the drain

    @property
    def wakeups_s(self) -> tuple[float | None, float | None]:
        return self._finish_by_s, self._give_up_at_s

    def request(self, now_s: float, event: DrainCommand) -> None:
        """Takes a drain command; the earliest end of all commands counts."""
        self.begin(now_s, event.finish_s)
        if event.stop:
            self.stop = True
            self._give_up_at_s = now_s + event.finish_s + self._settings.give_up_s
        if event.caller:
            self._callers.append(event.caller)

    def begin(self, now_s: float, finish_s: float) -> None:
        finish_by_s = now_s + finish_s
        if not self.draining:
            self.draining = True
            self._finish_by_s = finish_by_s
            self._base = (self._delivery.finished, self._delivery.given_back)
        elif self._finish_by_s is not None:
            self._finish_by_s = min(self._finish_by_s, finish_by_s)

    def handle_registration(self) -> None:
        """A new incarnation is not described yet."""
        self._described = False

    def gives_up(self, now_s: float) -> bool:
        """The server did not answer for too long."""
        return self._give_up_at_s is not None and now_s >= self._give_up_at_s

    def give_back(self, now_s: float) -> list[Effect]:
        """Gives back the runs that need not, or may no longer, run here."""
        if self._finish_by_s is not None and now_s >= self._finish_by_s:
            self._finish_by_s = None
            return self.take_off_engine(self._runs.on_engine())
        return self.take_off_engine([run for run in self._runs.offloaded() if run.resumable or self._finish_by_s is None])

    def take_off_engine(self, runs: Sequence[Run]) -> list[Effect]:
        """Aborts runs, which return with their output; a run without a token counts as not started."""
        for run in runs:
            self._delivery.give_back(run, ReturnCause.DRAINED if run.has_output else ReturnCause.UNSTARTED)
        return [AbortRuns(run_ids=tuple(run.run_id for run in runs))] if runs else []

    def decide(self, now_s: float, *, owns_nothing: bool) -> list[Effect]:
        """The calls of a drain, and its answer once the agent owns nothing."""
        if not self._link.usable(now_s):
            return []
        effects: list[Effect] = []
        if not self._described and self._describe_call is None:
            self._describe_call = self._link.next_call()
            effects.append(Describe(call=self._describe_call))
        if owns_nothing:
            effects += self.answer()
            if self.stop and self._deregister_call is None:
                self._deregister_call = self._link.next_call()
                effects.append(Deregister(call=self._deregister_call))
        return effects

    def answer(self) -> list[Effect]:
        """Answers all callers."""
        if not self._callers:
            return []
        callers, self._callers = tuple(self._callers), []
        finished, given_back = self._base
        return [
            DrainAnswer(callers=callers, finished=self._delivery.finished - finished, given_back=self._delivery.given_back - given_back)
        ]

    def handle_answer(self, call: int) -> bool:
        """Whether the incarnation is deregistered with this."""
        if call == self._describe_call:
            self._describe_call = None
            self._described = True
        return call == self._deregister_call

    def handle_loss(self, call: int) -> bool:
        """Whether the incarnation counts as deregistered: its lease ends by itself."""
        if call == self._describe_call:
            self._describe_call = None
        return call == self._deregister_call
