"""Virtual time: order of events, alarms, and processes that are frozen and killed."""

from __future__ import annotations

from qlm_sim.world.process import Process, suspend
from qlm_sim.world.schedule import Alarm, Schedule


def run(schedule: Schedule, until_s: float = 1_000.0) -> None:
    while schedule.step(until_s):
        pass


def test_events_of_one_time_happen_in_the_order_they_were_scheduled() -> None:
    schedule = Schedule(100.0)
    seen: list[str] = []
    schedule.after(2.0, lambda: seen.append("later"))
    schedule.after(1.0, lambda: seen.append("first"))
    schedule.after(1.0, lambda: seen.append("second"))
    schedule.at(0.0, lambda: seen.append("past"))
    run(schedule)
    assert seen == ["past", "first", "second", "later"]
    assert schedule.now_s == 1_000.0
    assert not schedule.step(1_000.0)


def test_an_alarm_rings_once_at_the_last_time_it_was_set_to() -> None:
    schedule = Schedule(0.0)
    rang: list[float] = []
    alarm = Alarm(schedule, lambda: rang.append(schedule.now_s))
    alarm.set(5.0)
    alarm.set(3.0)
    alarm.set(7.0)
    run(schedule)
    assert rang == [7.0]
    alarm.set(1_500.0)
    alarm.set(None)
    run(schedule, 2_000.0)
    assert rang == [7.0]


def test_a_frozen_process_hears_everything_afterwards_in_order() -> None:
    schedule = Schedule(0.0)
    process = Process(schedule, "p")
    process.begin()
    seen: list[str] = []
    process.deliver(1.0, lambda: seen.append("a"))
    process.deliver(2.0, lambda: seen.append("b"))
    process.freeze()
    run(schedule, 5.0)
    assert seen == []
    process.thaw()
    process.deliver(0.0, lambda: seen.append("c"))
    run(schedule, 6.0)
    assert seen == ["a", "b", "c"]


def test_an_alarm_that_rang_in_a_frozen_process_and_was_moved_rings_once() -> None:
    schedule = Schedule(0.0)
    process = Process(schedule, "p")
    process.begin()
    rang: list[float] = []
    alarm = process.alarm(lambda: rang.append(schedule.now_s))
    process.deliver(1.0, lambda: alarm.set(4.0))
    alarm.set(2.0)
    process.freeze()
    run(schedule, 3.0)
    process.thaw()
    run(schedule, 5.0)
    assert rang == [4.0]


def test_an_event_for_an_earlier_life_is_lost() -> None:
    schedule = Schedule(0.0)
    process = Process(schedule, "p")
    process.begin()
    seen: list[str] = []

    async def work() -> None:
        try:
            await process.sleep(1.0)
            seen.append("worked")
        finally:
            await process.sleep(1.0)  # a killed process does nothing on its way out
            seen.append("cleaned up")

    process.spawn(work())
    process.deliver(2.0, lambda: seen.append("heard"))
    run(schedule, 0.5)
    process.end()
    process.begin()
    run(schedule, 10.0)
    assert seen == []
    assert not process.tasks


def test_a_process_may_end_itself_in_the_middle_of_its_work() -> None:
    schedule = Schedule(0.0)
    process = Process(schedule, "p")
    process.begin()
    seen: list[str] = []

    async def last_words() -> None:
        await process.sleep(1.0)
        process.end()
        seen.append("ended")
        await suspend(lambda task: seen.append("went on"))

    process.spawn(last_words())
    run(schedule)
    assert seen == ["ended"]


def test_the_clock_of_a_process_is_off_and_never_goes_back() -> None:
    schedule = Schedule(50.0)
    process = Process(schedule, "p", skew_s=-0.25)
    process.begin()
    rang: list[tuple[float, float]] = []
    alarm = process.alarm(lambda: rang.append((schedule.now_s, process.now_s())))
    alarm.set(51.0)
    run(schedule, 60.0)
    assert rang == [(51.25, 51.0)]
    process.reached(70.0)
    assert process.now_s() == 70.0
