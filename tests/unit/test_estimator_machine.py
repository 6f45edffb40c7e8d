"""The estimator machine: what it learns from which events, when it publishes, and what it does not believe."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_estimator.events import Effect, EntryId, GroupClass, Lifecycle, LifecycleKind, Publish, QueueSeen, Restored, Tick
from qlm_estimator.machine import EstimatorMachine, Learning

SHIPPED = shipped_snapshot()
CATALOGUE = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "code": ModelSpec(name="code", profile="Mistral-7B"),
    "big": ModelSpec(name="big", profile="Vicuna-13B"),
}
INSTANCE = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=tuple(CATALOGUE))
GROUPS = {"g": GroupClass(model="chat", slo_class="64s")}
BEGAN_MS = 1_700_000_000_000


class Driver:
    """Feeds a machine events at times in seconds after the beginning."""

    def __init__(self, learning: Learning | None = None) -> None:
        self.machine = EstimatorMachine(learning=learning or Learning(), catalogue=CATALOGUE, shipped=SHIPPED.hardware)
        self.published: list[ProfileSnapshot] = []
        self.serial = 0
        self.now_s = 0.0

    def seen(self, *, running: int = 0, instances: tuple[InstanceFacts, ...] = (INSTANCE,), last_event: EntryId | None = None) -> None:
        at = last_event or (BEGAN_MS + int(self.now_s * 1e3), self.serial)
        counts = {facts.incarnation: running for facts in instances}
        self._take(self.machine.step(self._clock_s(), QueueSeen(last_event=at, instances=instances, running=counts, groups=GROUPS)))

    def tick(self, at_s: float) -> None:
        self.now_s = at_s
        self._take(self.machine.step(self._clock_s(), Tick()))

    def restore(self, snapshot: ProfileSnapshot) -> None:
        self._take(self.machine.step(self._clock_s(), Restored(snapshot=snapshot)))

    def tell(self, kind: LifecycleKind, at_s: float, queue_id: str = "1", **fields: object) -> Lifecycle:
        self.now_s = at_s
        self.serial += 1
        known: dict[str, object] = {"attempt": 1, "prompt_tokens": 500, "incarnation": "a/1", "group_id": "g", **fields}
        event = Lifecycle(
            kind=kind,
            entry_id=(BEGAN_MS + int(at_s * 1e3), self.serial),
            index=0,
            queue_id=queue_id,
            **known,  # type: ignore[arg-type]
        )
        self.again(event)
        return event

    def again(self, event: Lifecycle) -> None:
        self.last = event
        self._take(self.machine.step(self._clock_s(), event))

    def run(self, began_s: float, ended_s: float, queue_id: str = "1", **fields: object) -> None:
        self.tell(LifecycleKind.PULLED, began_s, queue_id, **{key: fields[key] for key in fields if key == "attempt"})
        self.tell(LifecycleKind.COMPLETED, ended_s, queue_id, **{"model": "chat", "output_tokens": 200, "slo_class": "64s", **fields})

    def workload(self) -> dict[tuple[str, str, str], WorkloadProfile]:
        self.tick(self.now_s + 1_000.0)
        return {row.key: row for row in self.machine.snapshot.workload}

    def learned(self) -> list[HardwareProfile]:
        self.tick(self.now_s + 1_000.0)
        return [row for row in self.machine.snapshot.hardware if row.instance]

    def _clock_s(self) -> float:
        return BEGAN_MS / 1e3 + self.now_s

    def _take(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert isinstance(effect, Publish)
            self.published.append(effect.snapshot)


def _duration_s(output_tokens: int, prompt_tokens: int = 500, slowdown: float = 1.0) -> float:
    """What the A100 row says of a run by itself."""
    row = SHIPPED.hardware_for(INSTANCE, CATALOGUE["chat"])
    assert row is not None
    decode_s = sum(row.decode_step_s(1, prompt_tokens + produced) for produced in range(1, output_tokens))
    return slowdown * (row.prefill_work_s(prompt_tokens) + decode_s)


# Lengths --------------------------------------------------------------------------------------------------------------


def test_lengths_are_learned_for_class_token_class_and_model() -> None:
    driver = Driver()
    driver.seen()
    for number, output in enumerate((100, 200, 300)):
        driver.run(number, number + 0.5, str(number), output_tokens=output)
    rows = driver.workload()
    assert set(rows) == {("chat", "", ""), ("chat", "", "1024"), ("chat", "64s", "1024")}
    for row in rows.values():
        assert row.output_tokens_mean == pytest.approx(200.0, rel=0.01)
        assert math.sqrt(row.output_tokens_variance) == pytest.approx(math.sqrt(20_000 / 3), rel=0.01)
        assert (row.prompt_tokens_mean, row.prompt_tokens_variance) == (500.0, 0.0)


def test_the_class_comes_from_the_event_or_else_from_the_group() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 1, "1", slo_class="8s")
    driver.run(1, 2, "2", slo_class="")
    driver.tell(LifecycleKind.COMPLETED, 3, "3", model="chat", output_tokens=9, slo_class="", group_id="gone")
    assert {key for key in driver.workload() if key[1]} == {("chat", "8s", "1024"), ("chat", "64s", "1024")}
    assert driver.workload()[("chat", "", "")].samples >= 2


def test_old_requests_fade() -> None:
    driver = Driver(Learning(memory_requests=50.0))
    driver.seen()
    for number in range(300):
        driver.run(number, number + 0.5, str(number), output_tokens=100)
    for number in range(300, 500):
        driver.run(number, number + 0.5, str(number), output_tokens=400)
    row = driver.workload()[("chat", "", "")]
    assert row.output_tokens_mean == pytest.approx(100 + 300 * (1 - math.exp(-200 / 50)), rel=0.02)
    assert row.samples <= 50


@pytest.mark.parametrize(
    "absurd",
    [
        {"output_tokens": 0},
        {"output_tokens": 8_193},
        {"output_tokens": 4_000_000_000},
        {"output_tokens": -5},
        {"prompt_tokens": 0},
        {"prompt_tokens": 4_000_000_000},
        {"model": ""},
        {"model": "nobody"},
    ],
)
def test_absurd_completions_teach_nothing(absurd: dict[str, object]) -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 3, "1", **absurd)
    assert driver.workload() == {}
    assert driver.published == []
    assert driver.machine.counts.refused == 1


def test_requests_that_did_not_complete_teach_no_length() -> None:
    driver = Driver()
    driver.seen()
    for kind in (LifecycleKind.ENDED, LifecycleKind.RELEASED):
        driver.tell(LifecycleKind.PULLED, driver.now_s + 1, "1")
        driver.tell(kind, driver.now_s + 2, "1", model="chat", output_tokens=100)
    assert driver.workload() == {}


def test_classes_are_bounded_and_the_oldest_go() -> None:
    driver = Driver(Learning(workload_rows_max=4))
    driver.seen()
    for number in range(20):
        driver.run(number, number + 0.5, str(number), slo_class=f"{2**number}s")
    rows = driver.workload()
    assert len(rows) == 4
    assert ("chat", "524288s", "1024") in rows
    assert ("chat", "", "") in rows


# Speed ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowdown", [0.85, 1.0, 1.15, 3.0])
def test_slowdown_of_runs_by_themselves(slowdown: float) -> None:
    driver = Driver()
    driver.seen()
    at_s = 0.0
    for number in range(400):
        took_s = _duration_s(200, slowdown=slowdown)
        driver.run(at_s, at_s + took_s, str(number), finished_s=BEGAN_MS / 1e3 + at_s + took_s)
        at_s += took_s + 5.0  # idle times between the runs are not the engine's
    (row,) = driver.learned()
    assert (row.instance, row.model, row.gpu) == ("a", "Mistral-7B", "A100-80GB")
    assert row.slowdown == pytest.approx(slowdown, rel=0.08)
    assert 300 < row.samples <= 400


def test_models_of_one_profile_share_a_row() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 3, "1", model="chat")
    driver.run(3, 6, "2", model="code")
    driver.run(6, 9, "3", model="big")
    assert [(row.instance, row.model) for row in driver.learned()] == [("a", "Mistral-7B"), ("a", "Vicuna-13B")]


def test_a_resumed_run_teaches_a_length_and_no_speed() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 3, "1", attempt=2)
    assert driver.machine.counts.speeds == 0
    assert driver.workload()[("chat", "", "")].samples == 1


def test_a_run_whose_pull_was_not_seen_teaches_no_speed() -> None:
    driver = Driver()
    driver.seen(running=3)
    for number in range(3):
        driver.tell(LifecycleKind.COMPLETED, number + 1.0, str(number), model="chat", output_tokens=100)
    assert (driver.machine.counts.lengths, driver.machine.counts.speeds) == (3, 0)


@pytest.mark.parametrize("finished_s", [math.nan, math.inf, -1.0, 0.0, 1e300])
def test_an_absurd_finish_is_replaced_by_the_time_of_the_event(finished_s: float) -> None:
    driver, sane = Driver(), Driver()
    for each, told_s in ((driver, finished_s), (sane, BEGAN_MS / 1e3 + 3.0)):
        each.seen()
        each.run(0.0, 3.0, "1", finished_s=told_s)
    assert driver.learned() == sane.learned()


def test_a_run_of_an_absurd_duration_teaches_no_speed() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0.0, 3_600.0, "1")
    assert driver.machine.counts.speeds == 0
    assert driver.machine.counts.refused == 1


def test_unknown_incarnations_and_gpus_teach_no_speed() -> None:
    driver = Driver()
    driver.seen(instances=(replace(INSTANCE, gpu="B200"),))
    driver.run(0, 3, "1")
    driver.run(4, 7, "2", incarnation="nobody/9")
    assert driver.machine.counts.speeds == 0
    assert driver.machine.counts.lengths == 2


def test_another_gpu_under_the_same_name_begins_afresh() -> None:
    driver = Driver()
    driver.seen()
    driver.run(0, 10, "1")
    h100 = replace(INSTANCE, incarnation="a/2", gpu="H100-80GB")
    driver.seen(instances=(h100,))
    driver.tell(LifecycleKind.PULLED, 20, "2", incarnation="a/2")
    driver.tell(LifecycleKind.COMPLETED, 22, "2", incarnation="a/2", model="chat", output_tokens=200)
    (row,) = driver.learned()
    assert (row.gpu, row.samples) == ("H100-80GB", 1)


def test_events_before_the_reading_of_the_queue_are_not_counted_twice() -> None:
    """The reading says that two run; their pulls come after it in the stream, but happened before."""
    driver, plain = Driver(), Driver()
    plain.seen()
    driver.seen(running=2, last_event=(BEGAN_MS + 500, 10_000))
    for each in (driver, plain):
        each.tell(LifecycleKind.PULLED, 0.1, "1")
        each.tell(LifecycleKind.PULLED, 0.2, "2")
        each.tell(LifecycleKind.COMPLETED, 2.0, "1", model="chat", output_tokens=100)
        each.tell(LifecycleKind.COMPLETED, 3.0, "2", model="chat", output_tokens=100)
    assert driver.machine.counts.speeds == 0, "who the two were is not known"
    assert plain.machine.counts.speeds == 2
    driver.run(10.0, 12.8, "3")
    plain.run(10.0, 12.8, "3")
    assert driver.machine.counts.speeds == 1
    (row,) = driver.learned()
    assert row.slowdown == pytest.approx(1.0, abs=0.02), "it ran by itself: none of the two is taken to run still"


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
        took_s = _duration_s(200, slowdown=1.3)
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
    restarted.run(at_s + 30.0, at_s + 30.0 + _duration_s(200, slowdown=1.3), "1000")
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
        versions += [effect.snapshot.version for effect in effects]
        for row in machine.snapshot.hardware:
            assert 1 / 16 <= row.slowdown <= 16
    assert versions == list(range(1, len(versions) + 1))
