"""The policy inside an engine: it decides who is admitted, who is preempted, and is consulted again when it says so."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from qlm_agent.engines.policies.port import SequenceView
from qlm_agent.engines.policies.registry import FirstComeFirstServed

from .conftest import Start
from .subjects import Can, Limits, Reader, needs, request

pytestmark = needs(Can.POLICY, Can.LIMIT)


class Recorded(FirstComeFirstServed):
    """Remembers the questions."""

    def __init__(self) -> None:
        self.shown: list[SequenceView] = []
        self.victims_calls = 0

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        self.shown += map(copy, waiting)
        return super().order(now_s, waiting, running)

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        self.victims_calls += 1
        return super().victims(now_s, running)


class ByPriority(FirstComeFirstServed):
    """Lower priorities first, and they push others out."""

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        return [view.run_id for view in sorted(waiting, key=lambda view: (view.priority, view.arrival))]

    def preempt(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        most_urgent = min((view.priority for view in waiting), default=0)
        return [view.run_id for view in running if view.priority > most_urgent][:1]


class FirstIsVictim(FirstComeFirstServed):
    """The oldest gives up its KV: not what an engine does by itself."""

    def victims(self, now_s: float, running: Sequence[SequenceView]) -> Sequence[str]:
        return [view.run_id for view in sorted(running, key=lambda view: view.arrival)]


class Delayed(FirstComeFirstServed):
    """First come first served until `turn_s`, last come from then on: it must be consulted again by then, though nothing else happened."""

    turn_s: float | None = None

    def order(self, now_s: float, waiting: Sequence[SequenceView], running: Sequence[SequenceView]) -> Sequence[str]:
        turned = self.turn_s is not None and now_s >= self.turn_s
        return [view.run_id for view in sorted(waiting, key=lambda view: -view.arrival if turned else view.arrival)]

    def next_wakeup_s(self, now_s: float) -> float | None:
        if self.turn_s is None:
            self.turn_s = now_s + 0.05
        return self.turn_s if now_s < self.turn_s else None


async def test_it_sees_the_fields_of_the_request(start: Start) -> None:
    policy = Recorded()
    subject = await start(Limits(policy=policy))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "r", prompt=25, deadline_s=1e9, priority=3))
    await reader.ends("r")
    (view,) = policy.shown
    assert (view.run_id, view.prompt_tokens, view.produced_tokens, view.deadline_s, view.priority) == ("r", 25, 0, 1e9, 3)
    assert policy.victims_calls == 0


async def test_it_orders_those_that_wait(start: Start) -> None:
    subject = await start(Limits(policy=ByPriority(), batch_max=1))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "first", answer=600))  # the others wait behind it
    for name, priority in (("late", 9), ("middle", 5), ("soon", 1)):
        await subject.engine.add(request(subject, name, number=priority, priority=priority, answer=40))
    await reader.ends("first", "late", "middle", "soon")
    order = sorted(reader.runs, key=lambda name: reader.runs[name].outputs[0].first_s)
    assert order == ["first", "soon", "middle", "late"]


async def test_it_preempts_for_a_more_urgent_request_and_output_stays_exact(start: Start) -> None:
    subject = await start(Limits(policy=ByPriority(), batch_max=1))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "alone", priority=5, answer=400))
    await reader.ends("alone")
    await subject.engine.add(request(subject, "slow", priority=5, answer=400))
    await reader.until_made(10, "slow")
    await subject.engine.add(request(subject, "urgent", number=2, priority=0, answer=20))
    slow, urgent = await reader.ends("slow", "urgent")
    assert urgent.outputs[-1].last_s < slow.outputs[-1].last_s
    assert subject.engine.stats().preemptions == 1
    assert slow.output == reader.runs["alone"].output


async def test_it_chooses_the_victims_when_kv_is_short(start: Start) -> None:
    subject = await start(Limits(policy=FirstIsVictim(), kv_capacity_tokens=640))
    reader = Reader(subject)
    names = [f"r{number}" for number in range(6)]
    for number, name in enumerate(names):
        await subject.engine.add(request(subject, name, number=number, prompt=40, answer=110))
    await reader.ends(*names)
    assert subject.engine.stats().preemptions > 0
    ends = sorted(names, key=lambda name: reader.runs[name].outputs[-1].last_s)
    assert ends[0] != "r0", "the oldest kept its KV"


async def test_it_is_consulted_again_when_it_said(start: Start) -> None:
    policy = Delayed()
    subject = await start(Limits(policy=policy, batch_max=1))
    reader = Reader(subject)
    await subject.engine.add(request(subject, "first", answer=1500))
    await subject.engine.add(request(subject, "second", number=2))
    await subject.engine.add(request(subject, "third", number=3))
    runs = await reader.ends("first", "second", "third")
    assert policy.turn_s is not None
    assert runs[0].outputs[-1].last_s > policy.turn_s, "the test is too quick to show it"
    assert runs[2].outputs[0].first_s < runs[1].outputs[0].first_s
