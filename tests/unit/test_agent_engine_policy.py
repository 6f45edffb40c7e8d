"""The default policy inside an engine."""

from __future__ import annotations

from qlm_agent.engine_policy import FirstComeFirstServed, SequenceView


def view(name: str, arrival: int) -> SequenceView:
    return SequenceView(run_id=name, arrival=arrival, deadline_s=100.0 - arrival, priority=-arrival, prompt_tokens=1, produced_tokens=0)


def test_first_come_is_first_served_whatever_the_deadline() -> None:
    views = [view("b", 2), view("a", 1), view("c", 3)]
    policy = FirstComeFirstServed()
    assert policy.order(0.0, views) == ["a", "b", "c"]
    assert policy.victims(0.0, views) == ["c", "b", "a"]
    assert policy.preempt(0.0, views, views) == ()
    assert policy.next_wakeup_s(0.0) is None
