"""What was learned of loads and moves after a restart, in a file, and against another row."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qlm_core.hardware_profile import AS_PROFILED, ORIGIN_MEASURED, HardwareProfile, OperationSlowdown
from qlm_core.importable_profiles import SLOWDOWN_MAX, importable
from qlm_core.profile import ProfileSnapshot
from qlm_estimator.events import LifecycleKind
from qlm_estimator.speed.base_rows import BaseRows
from qlm_process.profile_file import dump_profiles, parse_profiles
from qlm_process.wire import profile as profile_wire

from .driver import INSTANCE, SHIPPED, Driver, duration_s
from .operations import A100, COLD_S, KV_MOVED, SWAPPED_COLD, SWAPPED_WARM, WARM_S, WARMED, learned, loads


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
    driver.tell(LifecycleKind.ACCEPTED, 3_001.0)
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
    """Whatever was learned, of loads that take seconds or no longer than a turn of the process, from each kind of prior."""
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


def test_a_row_that_tells_of_no_operation_leaves_those_that_are_known() -> None:
    driver = taught()
    before = learned(driver)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(replace(A100, instance="a", slowdown=1.3, samples=50),)))
    after = learned(driver)
    assert (after.samples, after.swap_warm) == (50, before.swap_warm)


def test_against_a_measured_row_the_same_loads_are_as_long() -> None:
    """An import of a pair's row changes what loads are held against, not what they took."""
    driver = taught()
    before = learned(driver)
    measured = replace(A100, origin=ORIGIN_MEASURED, load_cpu_to_gpu_s=2.0 * A100.load_cpu_to_gpu_s)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(measured,)))
    after = learned(driver)
    assert after.load_cpu_to_gpu_s == measured.load_cpu_to_gpu_s
    assert after.swap_s(warm=True) == pytest.approx(2.0 * WARM_S, rel=0.05)
    assert before.swap_s(warm=True) == pytest.approx(2.0 * WARM_S, rel=0.1)


def test_against_a_row_of_no_time_worth_telling_nothing_is_infinite() -> None:
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


def test_rows_of_an_older_version_tell_of_no_operation() -> None:
    body = profile_wire.to_proto(ProfileSnapshot(version=1, made_s=0.0, hardware=(replace(A100, instance="a"),)))
    assert not body.hardware[0].HasField("swap_warm")
    assert profile_wire.from_proto(body).hardware[0].swap_warm == AS_PROFILED
    assert BaseRows(shipped=SHIPPED.hardware).of(*A100.key) == A100
