"""Hardware rows of the machine: the prior's weight, pairs without a row of their own, changes, and rows that somebody brings."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qlm_core.profiles.hardware_prior import hardware_prior
from qlm_core.profiles.hardware_profile import ORIGIN_FACTS, ORIGIN_MEASURED, HardwareProfile
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.vocabulary.model import ModelFacts, ModelSpec
from qlm_estimator.events import HardwareUnknown, LifecycleKind
from qlm_estimator.machine import Learning
from qlm_estimator.speed.base_rows import ROWS_MAX, BaseRows, prior_s
from qlm_estimator.speed.factor import MEMORY_S

from .driver import BEGAN_MS, INSTANCE, SHIPPED, Driver, duration_s

A100 = next(row for row in SHIPPED.hardware if (row.gpu, row.model) == ("A100-80GB", "Mistral-7B"))
H200 = replace(INSTANCE, gpu="H200")


def runs(driver: Driver, count: int, seconds: float, *, from_s: float = 0.0) -> float:
    """Runs one after the other of so many seconds each; the time of the last end."""
    for number in range(count):
        began_s = from_s + number * (seconds + 1.0)
        driver.run(began_s, began_s + seconds, f"{from_s}-{number}")
    return from_s + count * (seconds + 1.0)


def learned(driver: Driver) -> HardwareProfile:
    (row,) = driver.learned()
    return row


def test_the_prior_yields_to_data_by_its_weight() -> None:
    """It weighs as much as 60 s of runs, and fades as they do."""
    driver = Driver()
    driver.seen()
    seconds = duration_s(200, slowdown=1.5)
    runs(driver, 10, seconds)
    row = learned(driver)
    assert row.samples == 10
    assert row.slowdown == pytest.approx(1.0 + 0.5 * (1.0 - row.prior_share), rel=0.02)
    kept = math.exp(-(seconds - duration_s(1)) / MEMORY_S)
    assert row.prior_share == pytest.approx(60.0 * kept**10 / (60.0 * kept**10 + sum(kept**n for n in range(10)) * seconds / 1.5), rel=0.05)
    assert row.origin == ""


def test_a_prior_from_facts_yields_sooner() -> None:
    shares = []
    for instance in (INSTANCE, H200):
        driver = Driver()
        driver.seen(instances=(instance,))
        runs(driver, 10, 5.0)
        shares.append(learned(driver).prior_share)
    assert shares[1] < 0.8 * shares[0]


def test_the_weights_of_priors_are_in_the_order_of_their_trust() -> None:
    facts = hardware_prior("H200", 1, "Mistral-7B")
    assert facts is not None
    assert prior_s(facts) < prior_s(A100) < prior_s(replace(A100, origin=ORIGIN_MEASURED))


def test_a_pair_never_seen_is_learned_from_facts() -> None:
    driver = Driver()
    driver.seen(instances=(H200,))
    runs(driver, 5, 4.0)
    row = learned(driver)
    assert (row.gpu, row.origin, row.samples, row.instance) == ("H200", ORIGIN_FACTS, 5, "a")
    prior = hardware_prior("H200", 1, "Mistral-7B")
    assert prior in driver.machine.snapshot.hardware  # published beside the shipped ones
    assert driver.noted == []


def test_a_pair_of_which_nothing_is_known_is_reported_once() -> None:
    driver = Driver()
    unknown = replace(INSTANCE, gpu="B300")
    driver.seen(instances=(unknown,))
    driver.seen(instances=(unknown, INSTANCE))
    notes = [each for each in driver.noted if isinstance(each, HardwareUnknown)]
    assert {(note.gpu, note.n_gpu, note.model) for note in notes} == {("B300", 1, "Mistral-7B"), ("B300", 1, "Vicuna-13B")}
    assert len(notes) == 2
    assert "'B300' is not known" in notes[0].why
    driver.run(0.0, 3.0, "1")
    assert driver.machine.counts.lengths == 1


def test_a_model_of_ones_own_is_learned_from_its_facts() -> None:
    """Nothing else is known of it; its base row is the one that all predictions use."""
    facts = ModelFacts(parameters_billion=1.0, layers=16, hidden_size=2048, kv_heads=8, head_size=64)
    spec = ModelSpec(name="own", profile="Unheard-of", facts=facts)
    driver = Driver(catalogue={"own": spec})
    driver.seen(instances=(replace(INSTANCE, models=("own",)),))
    assert driver.noted == []
    prior = SHIPPED.hardware_of_pair("A100-80GB", 1, spec)
    assert prior is not None
    for number in range(5):
        driver.report(LifecycleKind.PULLED, 10.0 * number, str(number), model="own", group_id="own")
        took_s = 2.0 * (prior.prefill_work_s(500) + 199 * prior.decode_step_s(1, 600))
        first_s = BEGAN_MS / 1e3 + 10.0 * number + 2.0 * prior.prefill_work_s(500)
        ended: dict[str, object] = {"model": "own", "group_id": "own", "output_tokens": 200, "first_token_s": first_s}
        driver.report(LifecycleKind.COMPLETED, 10.0 * number + took_s, str(number), **ended)
    row = learned(driver)
    assert (row.instance, row.model, row.origin, row.samples) == ("a", "Unheard-of", ORIGIN_FACTS, 5)
    assert row.as_pair() == prior
    assert row.slowdown == pytest.approx(2.0 - row.prior_share, rel=0.05)


def test_a_change_is_followed_within_two_minutes_of_the_engine() -> None:
    """Only 2% of the runs before are left."""
    driver = Driver()
    driver.seen()
    seconds = duration_s(200)
    at_s = runs(driver, 300, seconds)
    assert learned(driver).slowdown == pytest.approx(1.0, rel=0.02)
    runs(driver, round(120.0 / (2.0 * seconds)), 2.0 * seconds, from_s=at_s)
    assert learned(driver).slowdown == pytest.approx(2.0, rel=0.04)


def test_a_restored_row_says_what_the_published_one_said() -> None:
    driver = Driver()
    driver.seen()
    changed_s = runs(driver, 100, duration_s(200))
    runs(driver, 40, duration_s(200, slowdown=2.0), from_s=changed_s)
    row = learned(driver)
    again = Driver()
    again.restore(driver.machine.snapshot)
    again.seen()
    again.run(10_000.0, 10_000.0 + duration_s(200, slowdown=row.slowdown))
    found = learned(again)
    assert found.slowdown == pytest.approx(row.slowdown, rel=0.02)
    assert found.samples == row.samples + 1
    assert found.prior_share == pytest.approx(row.prior_share, rel=0.1) or found.prior_share < 0.05


def test_brought_rows_replace_those_of_their_keys_and_are_published_at_once() -> None:
    """Learning against another row of a pair begins afresh."""
    driver = Driver()
    driver.seen()
    runs(driver, 10, duration_s(200, slowdown=1.5))
    published = len(driver.published)
    measured = replace(A100, origin=ORIGIN_MEASURED, decode_a_ms=2.0 * A100.decode_a_ms, decode_b_ms_per_seq=2.0 * A100.decode_b_ms_per_seq)
    measured = replace(measured, decode_c_ms_per_context_token=2.0 * A100.decode_c_ms_per_context_token)
    old = replace(A100, instance="b", slowdown=1.3, samples=50, prior_share=0.2)
    of_measured = replace(measured, instance="c", slowdown=1.3, samples=50, prior_share=0.2)
    driver.bring(ProfileSnapshot(version=0, made_s=0.0, hardware=(measured, old, of_measured)))
    assert len(driver.published) == published + 1
    rows = {(row.instance, row.key): row for row in driver.published[-1].hardware}
    assert rows["", A100.key] == measured
    assert rows["c", A100.key].slowdown == pytest.approx(1.3, rel=0.001)
    assert rows["c", A100.key].samples == 50
    assert len(driver.published[-1].hardware) == len(SHIPPED.hardware) + 1, "rows of a and b were held against another row"
    runs(driver, 1, duration_s(200), from_s=driver.now_s + 10.0)
    assert next(row for row in driver.learned() if row.instance == "a").slowdown < 1.0


def test_measured_rows_survive_a_restart_and_shipped_ones_follow_the_program() -> None:
    driver = Driver()
    measured = replace(A100, gpu="L4", origin=ORIGIN_MEASURED, kv_capacity_tokens=10_000)
    old = replace(A100, decode_a_ms=99.0)  # as another version of QLM shipped it
    driver.restore(ProfileSnapshot(version=3, made_s=1.0, hardware=(measured, old)))
    driver.seen()
    driver.run(0.0, 5.0)
    driver.tick(100.0)
    rows = {row.key: row for row in driver.machine.snapshot.hardware if not row.instance}
    assert rows[measured.key] == measured
    assert rows[A100.key] == A100


def test_rows_that_are_kept_are_bounded() -> None:
    base = BaseRows(shipped=SHIPPED.hardware)
    base.take(replace(A100, gpu=f"gpu-{number}", origin=ORIGIN_MEASURED) for number in range(ROWS_MAX + 10))
    for n_gpu in range(1, ROWS_MAX + 10):
        assert base.of("H200", n_gpu, "Mistral-7B") is not None
    assert len(base.rows()) == len(SHIPPED.hardware) + 2 * ROWS_MAX
    assert base.of("gpu-0", 1, "Mistral-7B") is None
    assert base.of("gpu-20", 1, "Mistral-7B") is not None


@pytest.mark.parametrize("finished_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_absurd_ends_are_not_believed(finished_s: float) -> None:
    driver = Driver()
    driver.seen()
    seconds = duration_s(200)
    for number in range(20):
        driver.run(10.0 * number, 10.0 * number + seconds, str(number), finished_s=finished_s)
    assert learned(driver).slowdown == pytest.approx(1.0, rel=0.05)


def test_clocks_that_step_teach_nothing_absurd() -> None:
    """The queue's clock goes an hour back and then forward in the middle of runs: entry ids never go back, so the time between does."""
    driver = Driver(Learning(publish_every_s=0.1))
    driver.seen()
    seconds = duration_s(200)
    at_s = runs(driver, 60, seconds)
    driver.run(at_s, at_s + 3600.0, "step")
    runs(driver, 20, seconds, from_s=at_s + 3600.0)
    row = learned(driver)
    assert row.slowdown == pytest.approx(1.0, rel=0.05)
