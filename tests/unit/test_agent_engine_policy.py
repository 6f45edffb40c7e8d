"""The policies inside an engine."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from qlm_agent.engines.policies.port import QUANTILE_LEVELS, EnginePolicy, Sequences, SequenceView
from qlm_agent.engines.policies.registry import FirstComeFirstServed, engine_policy
from qlm_agent.engines.policies.urgency import UrgencyFirst
from simulated_steps import make, run


def view(name: str, arrival: int) -> SequenceView:
    return SequenceView(run_id=name, arrival=arrival, deadline_s=100.0 - arrival, priority=-arrival, prompt_tokens=1, produced_tokens=0)


def preempt(policy: EnginePolicy, now_s: float, waiting: list[SequenceView], running: list[SequenceView]) -> list[str]:
    return list(policy.preempt(now_s, Sequences(waiting), Sequences(running)))


def test_first_come_is_first_served_whatever_the_deadline() -> None:
    views = [view("b", 2), view("a", 1), view("c", 3)]
    policy = FirstComeFirstServed()
    assert policy.order(0.0, Sequences(views), Sequences(())) == ["a", "b", "c"]
    assert policy.victims(0.0, views) == ["c", "b", "a"]
    assert preempt(policy, 0.0, views, views) == []
    assert policy.next_wakeup_s(0.0) is None


def urgent(
    name: str, *, priority: int = 0, deadline_s: float = inf, produced: int = 0, arrival: int = 0, preemptions: int = 0
) -> SequenceView:
    return SequenceView(
        run_id=name,
        arrival=arrival,
        deadline_s=deadline_s,
        priority=priority,
        prompt_tokens=1,
        produced_tokens=produced,
        preemptions=preemptions,
    )


def test_urgency_is_the_band_then_the_deadline_then_the_arrival() -> None:
    policy = UrgencyFirst()
    views = [
        urgent("a", deadline_s=9.0),
        urgent("b", deadline_s=5.0),
        urgent("c", priority=-1),
        urgent("e", arrival=2),
        urgent("d", arrival=1),
    ]
    assert policy.order(0.0, Sequences(views), Sequences(())) == ["c", "b", "a", "d", "e"]
    assert policy.victims(0.0, views) == ["e", "d", "a", "b", "c"]


def test_of_equal_urgency_the_one_with_the_least_work_is_the_victim() -> None:
    assert UrgencyFirst().victims(0.0, [urgent("a", produced=9), urgent("b", produced=2), urgent("c", produced=5)]) == ["b", "c", "a"]


def test_a_lower_band_takes_the_place_of_a_higher_one_at_once() -> None:
    policy = UrgencyFirst()
    running = [urgent("mine", priority=1), urgent("later", priority=2), urgent("last", priority=3)]
    assert preempt(policy, 0.0, [urgent("w", priority=1)], running) == ["last", "later"]
    assert preempt(policy, 0.0, [urgent("w", priority=3)], running) == []


def test_inside_a_band_only_who_would_be_late_takes_a_place_of_who_can_wait() -> None:
    policy = UrgencyFirst(lead_s=10.0)
    running = [urgent("can", deadline_s=100.0), urgent("cannot", deadline_s=19.0), urgent("ever")]
    assert preempt(policy, 0.0, [urgent("w", deadline_s=10.1)], running) == []
    assert preempt(policy, 0.0, [urgent("w", deadline_s=10.0)], running) == ["ever", "can"]
    assert preempt(policy, 10.1, [urgent("w", deadline_s=10.0)], running) == []  # it is late: nobody gains
    assert preempt(
        policy, 95.0, [urgent("w", deadline_s=100.0)], [urgent("can", deadline_s=116.0), urgent("cannot", deadline_s=115.0)]
    ) == ["can"]


def test_no_run_is_preempted_more_often_than_the_bound() -> None:
    policy = UrgencyFirst(preemptions_max=2)
    running = [urgent("a", priority=9, preemptions=2), urgent("b", priority=9, preemptions=1)]
    assert preempt(policy, 0.0, [urgent("w")], running) == ["b"]
    assert policy.victims(0.0, running) == ["a", "b"]  # for want of KV somebody has to


def test_its_next_wakeup_is_when_the_next_one_becomes_urgent() -> None:
    policy = UrgencyFirst(lead_s=10.0)
    assert policy.next_wakeup_s(0.0) is None
    policy.order(0.0, Sequences([urgent("a", deadline_s=50.0), urgent("b", deadline_s=30.0), urgent("c")]), Sequences(()))
    assert policy.next_wakeup_s(0.0) == 20.0
    assert policy.next_wakeup_s(20.0) == 40.0
    assert policy.next_wakeup_s(40.0) is None


def predicted(name: str, deadline_s: float, tokens: int, *, priority: int = 0) -> SequenceView:
    return replace(urgent(name, deadline_s=deadline_s, priority=priority), quantiles=(float(tokens),) * len(QUANTILE_LEVELS))


def test_slo_odbs_starts_one_batch_by_slo_and_length_and_holds_back_the_rest() -> None:
    """UELLM, section 4.2: 0.5 a token and 1 a second of SLO."""
    views = [
        predicted("long", 60.0, 400),
        predicted("late", 300.0, 10),
        predicted("short", 70.0, 20),
        predicted("urgent", 20.0, 60),
    ]
    policy = engine_policy("slo-odbs", {"batch_max": 2})
    assert policy.order(10.0, Sequences(views), Sequences(())) == ["urgent", "short"]
    assert policy.order(10.0, Sequences(views), Sequences(views[:1])) == ()
    assert engine_policy("slo-odbs", {"batch_max": 2, "w2": 0.0}).order(10.0, Sequences(views), Sequences(())) == ["late", "short"]
    joining = engine_policy("slo-odbs", {"batch_max": 2, "joins": True})
    urgent_band = [*views, predicted("band", 900.0, 900, priority=-1)]
    assert joining.order(10.0, Sequences(urgent_band), Sequences(views[:1])) == ["band", "urgent", "short", "long", "late"]
    first_band = [*views, predicted("band", 900.0, 900, priority=-1), urgent("unpredicted", priority=-1)]
    assert policy.order(10.0, Sequences(first_band), Sequences(())) == ["unpredicted", "band"]


def test_s3_packs_the_shortest_and_takes_out_a_run_beyond_its_prediction() -> None:
    """UELLM's rival, 2 makes three times its predicted 10 tokens: out of its first batch and, while 5 waits, of its second."""
    batch = make(policy=engine_policy("s3", {"batch_max": 2}))
    for name, target, tokens in (("1", 10, 10), ("2", 30, 10), ("3", 15, 15), ("4", 60, 60), ("5", 40, 0)):
        quantiles = (float(tokens),) * len(QUANTILE_LEVELS) if tokens else ()
        batch.add(0.0, replace(run(name, prompt=20, target=target), quantiles=quantiles))
    ended: list[tuple[str, float]] = []
    while batch.next_due_s is not None:
        batch.advance(batch.next_due_s)
        ended += [(each.run_id, each.last_s) for each in batch.news() if each.done]
        assert batch.running <= 2
    assert ended == [("1", 10.0), ("3", 25.0), ("4", 70.0), ("5", 120.0), ("2", 130.0)]


def test_every_run_ends_under_slo_odbs_in_batches_that_nobody_joins() -> None:
    batch = make(policy=engine_policy("slo-odbs", {"batch_max": 3}))
    for name in range(1, 9):
        batch.add(0.0, run(str(name), prompt=20, target=4 * name))
    ended: list[str] = []
    now_s, running = 0.0, [0]
    for _ in range(100):
        now_s += 1.0
        batch.advance(now_s)
        done = [each.run_id for each in batch.news() if each.done]
        assert batch.running <= running[-1] or len(done) == running[-1]
        ended += done
        running.append(batch.running)
    assert sorted(ended) == [str(name) for name in range(1, 9)]
    assert max(running) == 3
