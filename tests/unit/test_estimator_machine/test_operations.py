"""Times of model loads and KV moves on an instance: those that are learned, and those that are not believed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qlm_core.profiles.hardware_profile import AS_PROFILED, ORIGIN_MEASURED, HardwareProfile, OperationSlowdown
from qlm_core.profiles.importable_profiles import SLOWDOWN_MAX, importable
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_estimator.events import LifecycleKind, OperationKind
from qlm_estimator.machine import UNSEEN_OPERATIONS_MAX, Learning
from qlm_estimator.speed.base_rows import BaseRows
from qlm_process.profile_file import dump_profiles, parse_profiles
from qlm_process.wire import profile as profile_wire

from .driver import INSTANCE, SHIPPED, Driver, duration_s
from .operations import A100, COLD_S, KV_MOVED, SWAPPED_COLD, SWAPPED_WARM, WARM_S, WARMED, learned, loads


@pytest.fixture
def driver() -> Driver:
    driver = Driver()
    driver.seen()
    return driver


# Learning -------------------------------------------------------------------------------------------------------------


def test_slow_loads_are_believed_by_and_by(driver: Driver) -> None:
    believed = []
    at_s = 0.0
    for count in (1, 3, 4, 24):
        at_s = loads(driver, count, 2.0, from_s=at_s)
        believed.append(learned(driver).swap_s(warm=True) / WARM_S)
    assert believed == sorted(believed)
    assert 1.2 < believed[0] < 1.6, "one is not believed alone"
    assert believed[2] > 1.8
    assert believed[3] == pytest.approx(2.0, rel=0.03)
    row = learned(driver)
    assert (row.swap_warm.samples, row.swap_cold, row.kv_swap) == (32, AS_PROFILED, AS_PROFILED)
    assert row.swap_warm.prior_share < 0.05
    assert row.swap_s(warm=False) == COLD_S, "loads from disk are another thing"
    assert driver.machine.counts.operations == 32


def test_a_row_of_operations_alone_leaves_runs_as_they_are(driver: Driver) -> None:
    loads(driver, 4, 2.0)
    row = learned(driver)
    assert (row.instance, row.slowdown, row.samples, row.prior_share) == ("a", 1.0, 0, 1.0)
    assert row.decode_step_s(8, 4_000) == A100.decode_step_s(8, 4_000)
    driver.run(1_000.0, 1_000.0 + duration_s(200, slowdown=1.2))
    assert learned(driver).samples == 1
    assert learned(driver).swap_warm == row.swap_warm


def test_loads_from_disk_are_learned_from_swaps_and_from_warmings(driver: Driver) -> None:
    at_s = loads(driver, 8, 3.0, kind=SWAPPED_COLD)
    assert learned(driver).swap_s(warm=False) / COLD_S == pytest.approx(2.66, rel=0.05)
    assert learned(driver).swap_s(warm=True) == WARM_S
    other = Driver()
    other.seen()
    loads(other, 16, 3.0, kind=WARMED)
    loads(other, 16, 3.0, from_s=at_s)
    loads(other, 16, 3.0, from_s=2_000.0, kind=WARMED)
    assert learned(other).swap_s(warm=False) / COLD_S == pytest.approx(2.8, rel=0.1)


def test_a_warming_is_a_load_from_disk_without_what_was_learned_of_the_rest(driver: Driver) -> None:
    """From disk as profiled, and from there three times as long: so much in all takes a load from disk to the GPU."""
    at_s = loads(driver, 24, 3.0)
    loads(driver, 32, 1.0, from_s=at_s, kind=WARMED)
    assert learned(driver).swap_s(warm=False) == pytest.approx(COLD_S - WARM_S + 3.0 * WARM_S, rel=0.04)


def test_moves_of_kv_are_held_against_their_size(driver: Driver) -> None:
    """In requests and in tokens: each request costs as much as a thousand tokens here."""
    based = replace(A100, origin=ORIGIN_MEASURED, kv_swap_base_ms=A100.kv_swap_us_per_token)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(based,)))
    sizes = random.Random(1)
    for number in range(16):
        requests = sizes.randint(1, 20)
        tokens = requests * sizes.randint(100, 6_000)
        took_s = 1.5 * A100.kv_swap_us_per_token * 1e-6 * (1_000 * requests + tokens)
        driver.operation(KV_MOVED, float(number), took_s, requests=requests, tokens=tokens)
    row = learned(driver)
    assert row.kv_swap_s(4_000) == pytest.approx(1.5 * A100.kv_swap_us_per_token * 1e-6 * 5_000, rel=0.07)
    assert row.kv_swap.samples == 16


def test_a_load_no_longer_than_a_turn_of_the_process_teaches_little(driver: Driver) -> None:
    """On an engine with a fast clock a load takes a millisecond, and its measurement half of that."""
    fast = replace(INSTANCE, time_scale=1_000.0)
    driver.seen(instances=(fast,))
    for number in range(8):
        driver.operation(SWAPPED_WARM, float(number), 2.0 * WARM_S / fast.time_scale)
    assert 1.0 < learned(driver).swap_warm.slowdown < 1.3
    assert learned(driver).swap_warm.prior_share > 0.5


def test_each_instance_and_model_has_its_own(driver: Driver) -> None:
    other = replace(INSTANCE, name="b", incarnation="b/1")
    driver.seen(instances=(INSTANCE, other))
    loads(driver, 8, 2.0)
    for number in range(8):
        driver.operation(SWAPPED_WARM, 1_000.0 + number, 0.5 * WARM_S, incarnation="b/1")
        driver.operation(SWAPPED_WARM, 1_000.5 + number, 0.85, incarnation="b/1", model="big")
    rows = {(row.instance, row.model): row.swap_warm.slowdown for row in driver.learned()}
    assert set(rows) == {("a", "Mistral-7B"), ("b", "Mistral-7B"), ("b", "Vicuna-13B")}
    assert rows["a", "Mistral-7B"] > 1.8
    assert rows["b", "Mistral-7B"] < 0.6


def test_an_instance_on_other_gpus_is_learned_anew(driver: Driver) -> None:
    loads(driver, 8, 2.0)
    driver.seen(instances=(replace(INSTANCE, gpu="A10"),))
    driver.operation(SWAPPED_WARM, 1_000.0, 1.0)
    (row,) = driver.learned()
    assert (row.gpu, row.swap_warm.samples) == ("A10", 1)


def test_learned_rows_are_bounded_and_the_oldest_goes() -> None:
    driver = Driver(Learning(hardware_rows_max=3))
    instances = tuple(replace(INSTANCE, name=f"i{number}", incarnation=f"i{number}/1") for number in range(5))
    driver.seen(instances=instances)
    for number in range(5):
        driver.operation(SWAPPED_WARM, float(number), 2.0, incarnation=f"i{number}/1")
    assert [row.instance for row in driver.learned()] == ["i2", "i3", "i4"]


# Outliers and refused times ---------------------------------------------------------------------------------------------


def test_one_load_in_four_from_a_cold_cache_moves_little(driver: Driver) -> None:
    for number in range(32):
        driver.operation(SWAPPED_COLD, 60.0 * number, (9.0 if number % 4 == 0 else 1.0) * COLD_S)
    assert learned(driver).swap_cold.slowdown < 1.2


@pytest.mark.parametrize("took_s", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e9])
def test_what_is_no_duration_is_refused(driver: Driver, took_s: float) -> None:
    driver.operation(SWAPPED_WARM, 1.0, took_s)
    assert driver.learned() == []
    assert (driver.machine.counts.operations, driver.machine.counts.refused) == (0, 1)
    assert driver.published == []


@pytest.mark.parametrize("fields", [{"model": "nobody"}, {"incarnation": "a/0"}])
def test_operations_of_nobody_teach_nothing(driver: Driver, fields: dict[str, object]) -> None:
    driver.operation(SWAPPED_WARM, 1.0, 2.0, **fields)
    driver.seen()
    driver.seen()
    assert driver.learned() == []
    assert (driver.machine.counts.operations, driver.machine.counts.refused) == (0, 1)


def test_a_move_without_size_is_refused(driver: Driver) -> None:
    driver.operation(KV_MOVED, 1.0, 2.0)
    assert (driver.learned(), driver.machine.counts.refused) == ([], 1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(OperationKind),
            st.floats() | st.floats(1e-6, 1e3),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            st.floats(-1e6, 1e6),
        ),
        max_size=60,
    )
)
@example([(SWAPPED_COLD, 5e-324, 0, 0, 0.0), (KV_MOVED, 5e-324, 2**32 - 1, 2**64 - 1, 1.0)])
def test_times_stay_sound_under_any_reports(reports: list[tuple[OperationKind, float, int, int, float]]) -> None:
    driver = Driver()
    driver.seen()
    for kind, took_s, requests, tokens, at_s in reports:
        driver.operation(kind, at_s, took_s, requests=requests, tokens=tokens)
    for row in driver.learned():
        for operation in (row.swap_warm, row.swap_cold, row.kv_swap):
            assert 1.0 / SLOWDOWN_MAX * 0.999 <= operation.slowdown <= SLOWDOWN_MAX * 1.001
        assert row.swap_s(warm=False) > 0.0


def test_an_instance_that_just_registered_is_waited_for() -> None:
    """Its first load is reported before the queue is read again."""
    driver = Driver()
    driver.seen(instances=())
    driver.operation(SWAPPED_COLD, 1.0, 2.0 * COLD_S)
    assert driver.learned() == []
    driver.seen()
    assert learned(driver).swap_cold.samples == 1
    for number in range(UNSEEN_OPERATIONS_MAX + 10):
        driver.operation(SWAPPED_COLD, 2_000.0 + number, 2.0 * COLD_S, incarnation="z/1")
    driver.seen(instances=(INSTANCE, replace(INSTANCE, name="z", incarnation="z/1")))
    assert driver.machine.counts.operations == 1 + UNSEEN_OPERATIONS_MAX


def test_an_event_that_comes_again_counts_once(driver: Driver) -> None:
    operation = driver.operation(SWAPPED_WARM, 1.0, 2.0)
    driver.report_operation(operation)
    assert learned(driver).swap_warm.samples == 1
    assert driver.machine.counts.repeated == 1


def test_a_change_is_followed_after_some_loads(driver: Driver) -> None:
    changed_s = loads(driver, 20, 1.0)
    loads(driver, 24, 3.0, from_s=changed_s)
    assert learned(driver).swap_warm.slowdown == pytest.approx(3.0, rel=0.1)


# Learned times of loads and moves after a restart, in a file, and against another row ---------------------------------


def taught() -> Driver:
    driver = Driver()
    driver.seen()
    loads(driver, 9, 2.0)
    loads(driver, 5, 0.7, from_s=1_000.0, kind=SWAPPED_COLD)
    driver.operation(KV_MOVED, 2_000.0, 2.0 * A100.kv_swap_s(20_000, 4), requests=4, tokens=20_000)
    return driver


def test_a_restored_machine_believes_the_same_and_goes_on() -> None:
    before = learned(taught())
    snapshot = profile_wire.from_body(profile_wire.to_body(ProfileSnapshot(version=3, made_s=5.0, hardware=(*SHIPPED.hardware, before))))
    assert snapshot.hardware[-1] == before
    driver = Driver()
    driver.restore(snapshot)
    driver.seen()
    driver.operation(WARMED, 3_000.0, -1.0)  # nothing, but a publication may come
    driver.report(LifecycleKind.ACCEPTED, 3_001.0)
    driver.run(3_100.0, 3_100.0 + duration_s(200))
    after = learned(driver)
    for name in ("swap_warm", "swap_cold", "kv_swap"):
        was, now = getattr(before, name), getattr(after, name)
        assert now.slowdown == pytest.approx(was.slowdown)
        assert now.samples == was.samples
    loads(driver, 3, 2.0, from_s=4_000.0)
    assert learned(driver).swap_warm.samples == 12
    assert learned(driver).swap_warm.slowdown == pytest.approx(2.0, rel=0.06)


@given(
    st.lists(st.tuples(st.floats(0.05, 20.0), st.sampled_from([1.0, 4.0, 1_000.0])), min_size=1, max_size=40),
    st.sampled_from(["A100-80GB", "H200"]),
)
def test_what_is_published_is_believed_again(loads_seen: list[tuple[float, float]], gpu: str) -> None:
    """From loads that take seconds or no longer than a turn of the process, and from each kind of prior."""
    driver = Driver()
    for at, (slowdown, scale) in enumerate(loads_seen):
        driver.seen(instances=(replace(INSTANCE, gpu=gpu, time_scale=scale),))
        driver.operation(SWAPPED_WARM, 60.0 * at, slowdown * WARM_S / scale)
    before = learned(driver)
    again = Driver()
    again.restore(driver.machine.snapshot)
    again.seen(instances=(replace(INSTANCE, gpu=gpu),))
    again.operation(SWAPPED_COLD, 10_000.0, COLD_S)
    after = learned(again)
    assert after.swap_warm.slowdown == pytest.approx(before.swap_warm.slowdown, rel=0.01)
    assert after.swap_warm.samples == before.swap_warm.samples
    assert after.swap_warm.prior_share <= before.swap_warm.prior_share + 0.01


def test_times_survive_a_file() -> None:
    driver = taught()
    before = learned(driver)
    snapshot = driver.machine.snapshot
    file = parse_profiles(dump_profiles(snapshot))
    assert file.hardware == (before,)
    other = Driver()
    other.seen()
    loads(other, 4, 5.0)
    other.bring(file)
    after = learned(other)
    assert after.swap_warm.slowdown == pytest.approx(before.swap_warm.slowdown)
    assert after.swap_cold.slowdown == pytest.approx(before.swap_cold.slowdown)


def test_a_row_without_operations_leaves_those_that_are_known() -> None:
    driver = taught()
    before = learned(driver)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(replace(A100, instance="a", slowdown=1.3, samples=50),)))
    after = learned(driver)
    assert (after.samples, after.swap_warm) == (50, before.swap_warm)


def test_a_measured_row_has_its_own_loads() -> None:
    """Learning against the row that it replaces begins afresh."""
    driver = taught()
    measured = replace(A100, origin=ORIGIN_MEASURED, load_cpu_to_gpu_s=2.0 * A100.load_cpu_to_gpu_s)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(measured,)))
    assert driver.learned() == []
    loads(driver, 1, 2.0, from_s=driver.now_s + 10.0)
    assert learned(driver).swap_s(warm=True) == pytest.approx(2.0 * WARM_S, rel=0.01)


def test_against_a_row_of_negligible_time_nothing_is_infinite() -> None:
    """Somebody brings a row whose loads take next to nothing, and one of the usual size again."""
    driver = taught()
    for seconds in (5e-324, A100.load_cpu_to_gpu_s):
        row = replace(A100, origin=ORIGIN_MEASURED, load_cpu_to_gpu_s=seconds)
        driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(row,)))
        loads(driver, 1, 2.0, from_s=driver.now_s + 10.0)
        for each in driver.learned():
            assert 1.0 / SLOWDOWN_MAX * 0.999 <= each.swap_warm.slowdown <= SLOWDOWN_MAX * 1.001


@pytest.mark.parametrize(
    "row",
    [
        replace(A100, origin=ORIGIN_MEASURED, kv_swap=OperationSlowdown(slowdown=2.0, samples=3, prior_share=0.2)),
        replace(A100, instance="a", samples=1, swap_warm=OperationSlowdown(slowdown=40.0, samples=3, prior_share=0.2)),
        replace(A100, instance="a", samples=1, swap_cold=OperationSlowdown(slowdown=2.0, samples=0)),
    ],
    ids=["of no instance", "absurd", "out of nothing"],
)
def test_contradictions_in_a_file_are_refused(row: HardwareProfile) -> None:
    with pytest.raises(ValueError, match=r"A100-80GB x1 Mistral-7B.*(swap_warm|swap_cold|kv_swap)"):
        importable(ProfileSnapshot(version=0, made_s=0.0, hardware=(row,)))


@pytest.mark.parametrize(
    "fields",
    [
        {"slowdown": math.nan},
        {"slowdown": 0.0},
        {"slowdown": math.inf},
        {"samples": -1},
        {"prior_share": 1.5},
        {"prior_share": math.nan},
    ],
)
def test_a_slowdown_that_is_none_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="operation"):
        OperationSlowdown(**fields)  # type: ignore[arg-type]


def test_rows_of_an_older_version_have_no_operations() -> None:
    body = profile_wire.to_proto(ProfileSnapshot(version=1, made_s=0.0, hardware=(replace(A100, instance="a"),)))
    assert not body.hardware[0].HasField("swap_warm")
    assert profile_wire.from_proto(body).hardware[0].swap_warm == AS_PROFILED
    assert BaseRows(shipped=SHIPPED.hardware).of(*A100.key) == A100
