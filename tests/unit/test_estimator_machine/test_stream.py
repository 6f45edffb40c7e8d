"""Events that repeat or are missing, and when the machine publishes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_estimator.events import Lifecycle, LifecycleKind, Publish, QueueSeen
from qlm_estimator.machine import EstimatorMachine, Learning

from .driver import BEGAN_MS, CATALOGUE, GROUPS, INSTANCE, SHIPPED, Driver, duration_s

# The stream -----------------------------------------------------------------------------------------------------------


def test_repeated_events_count_once() -> None:
    driver = Driver()
    driver.seen()
    driver.tell(LifecycleKind.PULLED, 0.0, "1")
    done = driver.tell(LifecycleKind.COMPLETED, 3.0, "1", model="chat", output_tokens=200)
    before = driver.workload()
    for _ in range(3):
        driver.again(done)
    assert driver.workload() == before
    assert (driver.machine.counts.repeated, driver.machine.counts.lengths) == (3, 1)


def test_events_of_one_entry_all_count() -> None:
    driver = Driver()
    driver.seen()
    event = driver.tell(LifecycleKind.COMPLETED, 3.0, "1", model="chat", output_tokens=200)
    driver.again(replace(event, index=1, queue_id="2"))
    assert driver.machine.counts.lengths == 2


def test_a_gap_is_noticed_and_counted() -> None:
    driver = Driver()
    driver.seen()
    for number in (5, 6, 7):
        driver.tell(LifecycleKind.ACCEPTED, number, str(number), acceptance_number=number)
    assert (driver.machine.counts.gaps, driver.machine.counts.missed) == (0, 0)
    driver.tell(LifecycleKind.PULLED, 8.0, "5")
    driver.tell(LifecycleKind.ACCEPTED, 20.0, "107", acceptance_number=107)
    assert (driver.machine.counts.gaps, driver.machine.counts.missed) == (1, 99)
    driver.tell(LifecycleKind.COMPLETED, 21.0, "5", model="chat", output_tokens=200)
    assert (driver.machine.counts.lengths, driver.machine.counts.speeds) == (1, 0), "who ran beside it is not known"
    driver.seen()
    driver.run(30.0, 33.0, "200")
    assert driver.machine.counts.speeds == 1, "after the next reading it is"


# Publication ----------------------------------------------------------------------------------------------------------


def test_publishes_at_most_so_often_and_only_news() -> None:
    driver = Driver(Learning(publish_every_s=5.0))
    driver.seen()
    driver.tick(100.0)
    assert driver.published == [], "nothing was learned"
    for number in range(40):
        driver.run(100.0 + number, 100.5 + number, str(number))
    times = [snapshot.made_s - BEGAN_MS / 1e3 for snapshot in driver.published]
    assert [snapshot.version for snapshot in driver.published] == list(range(1, len(times) + 1))
    assert len(times) == 8
    assert all(after - before >= 5.0 for before, after in pairwise(times))
    driver.tick(200.0)
    count = len(driver.published)
    driver.tick(300.0)
    assert len(driver.published) == count == 9


def test_a_clock_set_back_does_not_silence_it() -> None:
    driver = Driver(Learning(publish_every_s=5.0))
    driver.seen()
    driver.run(1_000.0, 1_003.0, "1")
    driver.now_s = 500.0
    driver.again(replace(driver.last, entry_id=(BEGAN_MS + 1_004_000, 0), queue_id="2"))
    driver.tick(504.0)
    assert [snapshot.version for snapshot in driver.published] == [1]
    driver.tick(506.0)
    assert [snapshot.version for snapshot in driver.published] == [1, 2]


def test_a_restart_goes_on_from_what_was_published() -> None:
    driver = Driver()
    driver.seen()
    at_s = 0.0
    for number in range(100):
        took_s = duration_s(200, slowdown=1.3)
        driver.run(at_s, at_s + took_s, str(number))
        at_s += took_s + 1.0
    driver.tick(at_s + 10.0)
    last = driver.published[-1]

    restarted = Driver()
    restarted.now_s = at_s + 20.0
    restarted.restore(last)
    restarted.seen()
    assert restarted.published == []
    assert restarted.machine.snapshot == last
    restarted.run(at_s + 30.0, at_s + 30.0 + duration_s(200, slowdown=1.3), "1000")
    restarted.tick(at_s + 100.0)
    newest = restarted.published[-1]
    assert newest.version == last.version + 1
    workload = {row.key: row for row in newest.workload}[("chat", "", "")]
    assert 95 <= workload.samples <= 101
    (row,) = [row for row in newest.hardware if row.instance]
    assert row.slowdown == pytest.approx(next(row for row in last.hardware if row.instance).slowdown, rel=0.02)
    assert 95 <= row.samples <= 101


events = st.builds(
    Lifecycle,
    kind=st.sampled_from(LifecycleKind),
    entry_id=st.tuples(st.integers(BEGAN_MS, BEGAN_MS + 100_000), st.integers(0, 3)),
    index=st.integers(0, 2),
    queue_id=st.sampled_from(["1", "2", "3", "4"]),
    group_id=st.sampled_from(["g", "", "gone"]),
    incarnation=st.sampled_from(["a/1", "a/2", "", "x"]),
    attempt=st.integers(0, 3),
    acceptance_number=st.integers(0, 2**60),
    prompt_tokens=st.integers(0, 2**32 - 1),
    model=st.sampled_from(["chat", "big", "", "nobody"]),
    slo_class=st.sampled_from(["64s", ""]),
    output_tokens=st.integers(0, 2**32 - 1) | st.integers(1, 500),
    finished_s=st.floats() | st.floats(BEGAN_MS / 1e3, BEGAN_MS / 1e3 + 100),
)


@given(st.lists(st.tuples(events, st.booleans()), max_size=60), st.booleans())
def test_whatever_comes_profiles_stay_sound(told: list[tuple[Lifecycle, bool]], ordered: bool) -> None:
    """Any events in any order: no exception, every published figure is finite (the profiles' own checks), and versions grow by one."""
    machine = EstimatorMachine(
        learning=Learning(publish_every_s=0.001, memory_requests=10.0), catalogue=CATALOGUE, shipped=SHIPPED.hardware
    )
    seen = QueueSeen(last_event=(BEGAN_MS, 0), instances=(INSTANCE,), running={"a/1": 1}, groups=GROUPS)
    machine.step(BEGAN_MS / 1e3, seen)
    versions: list[int] = []
    for event, look in sorted(told, key=lambda item: (item[0].entry_id, item[0].index)) if ordered else told:
        effects = machine.step(event.entry_id[0] / 1e3, event)
        if look:
            effects += machine.step(event.entry_id[0] / 1e3, replace(seen, last_event=event.entry_id))
        versions += [effect.snapshot.version for effect in effects if isinstance(effect, Publish)]
        for row in machine.snapshot.hardware:
            assert 1 / 16 <= row.slowdown <= 16
    assert versions == list(range(1, len(versions) + 1))
