"""Output lengths as the machine learns them from events: requests that have not ended, guesses that return, restarts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from qlm.internal.v1 import events_pb2
from qlm_core.statistics.length_features import LengthFacts
from qlm_core.statistics.length_model import LengthGuess
from qlm_estimator.events import Lifecycle, LifecycleKind
from qlm_estimator.lifecycle_wire import events_of
from qlm_estimator.machine import Learning
from qlm_estimator.outcomes.report import Outcomes
from qlm_process.wire import lengths as length_wire
from qlm_process.wire import profile as profile_wire
from qlm_queue.values import StreamEntry

from .driver import BEGAN_MS, Driver

TOKEN_S = 0.02
"""Time of each token in these tests, after a prefill of 0.1 s."""


def finish(driver: Driver, began_s: float, queue_id: str, output_tokens: int, **more: object) -> None:
    """A run with times by its tokens; its pull was reported before."""
    first_token_s = began_s + 0.1
    ended_s = first_token_s + TOKEN_S * (output_tokens - 1)
    times = {"first_token_s": BEGAN_MS / 1e3 + first_token_s, "finished_s": BEGAN_MS / 1e3 + ended_s}
    fields: dict[str, object] = {"model": "chat", "slo_class": "64s", "output_tokens": output_tokens, **times, **more}
    driver.report(LifecycleKind.COMPLETED, ended_s, queue_id, **fields)


def used() -> Driver:
    """Twenty answers of 50 tokens ended."""
    driver = Driver()
    driver.seen()
    for number in range(20):
        driver.report(LifecycleKind.PULLED, 2.0 * number, f"past{number}")
        finish(driver, 2.0 * number, f"past{number}", 50)
    return driver


def output_mean(driver: Driver, at_s: float) -> float:
    """As published at a time; a short answer ends then, so that there is something to publish."""
    driver.report(LifecycleKind.PULLED, at_s - 1.1, f"tick{at_s}")
    finish(driver, at_s - 1.1, f"tick{at_s}", 50)
    driver.tick(at_s + 2.0)
    return {row.key: row for row in driver.machine.snapshot.workload}[("chat", "", "")].output_tokens_mean


def test_requests_that_run_on_and_on_raise_the_mean_before_they_end() -> None:
    driver = used()
    assert output_mean(driver, 50.0) == pytest.approx(50.0)
    for number in range(20):
        driver.report(LifecycleKind.PULLED, 60.0, f"long{number}")
    soon, later, much_later = (output_mean(driver, at_s) for at_s in (62.0, 70.0, 100.0))
    # 20 of 40 have made 0.8 * 50 tokens a second, and not ended.
    assert soon < later < much_later
    assert much_later > 0.4 * 0.8 * 40.0 * 50.0
    assert {row.key: row for row in driver.machine.snapshot.workload}[("chat", "", "")].censored >= 19


def test_the_cancelled_count_as_longer_than_what_they_had_made() -> None:
    left_out, cancelled = used(), used()
    for number in range(20):
        cancelled.report(LifecycleKind.PULLED, 60.0, f"long{number}")
    for number in range(20):
        cancelled.report(LifecycleKind.ENDED, 70.0, f"long{number}", output_tokens=0)
    assert output_mean(left_out, 80.0) == pytest.approx(50.0)
    assert output_mean(cancelled, 80.0) > 150.0


def test_what_never_ran_says_nothing() -> None:
    driver = used()
    for number in range(50):
        at_s = 60.0 + number / 10.0
        driver.report(LifecycleKind.ENDED, at_s, f"waited{number}", incarnation="")
        driver.report(LifecycleKind.PULLED, at_s, f"unpulled{number}")
        driver.report(LifecycleKind.RELEASED, at_s + 0.05, f"unpulled{number}", started=False)
        driver.report(LifecycleKind.ENDED, at_s + 0.06, f"unpulled{number}", incarnation="")
    assert output_mean(driver, 80.0) == pytest.approx(50.0)


@pytest.mark.parametrize("figures", [{"output_tokens": 0}, {"output_tokens": 4_000_000_000}, {"prompt_tokens": 0}])
def test_an_end_that_is_not_believed_is_an_end(figures: dict[str, int]) -> None:
    """Such as an empty answer."""
    driver = used()
    for index in range(20):
        driver.report(LifecycleKind.PULLED, 60.0, f"odd{index}")
        driver.report(LifecycleKind.COMPLETED, 61.0, f"odd{index}", **{"model": "chat", "slo_class": "64s", "output_tokens": 50, **figures})
    assert driver.machine.counts.refused == 20
    assert output_mean(driver, 1_000.0) == pytest.approx(50.0)


def test_an_evicted_request_keeps_what_it_made() -> None:
    driver = used()
    for number in range(20):
        driver.report(LifecycleKind.PULLED, 60.0, f"evicted{number}")
    for number in range(20):
        driver.report(LifecycleKind.RELEASED, 70.0, f"evicted{number}")
    soon, later = output_mean(driver, 80.0), output_mean(driver, 1_000.0)
    assert soon > 150.0
    assert later == pytest.approx(soon, rel=0.2)  # it does not grow while it waits


def test_events_that_were_missed_end_what_is_known_of_running_requests() -> None:
    driver = used()
    driver.report(LifecycleKind.ACCEPTED, 55.0, "a", acceptance_number=100)
    for number in range(20):
        driver.report(LifecycleKind.PULLED, 60.0, f"long{number}")
    driver.report(LifecycleKind.ACCEPTED, 61.0, "b", acceptance_number=300)
    driver.seen()
    assert output_mean(driver, 200.0) == pytest.approx(50.0)


def test_one_that_hangs_or_claims_absurd_figures_is_not_endless() -> None:
    hanging, claiming = used(), used()
    hanging.report(LifecycleKind.PULLED, 60.0, "hangs")
    claiming.report(LifecycleKind.PULLED, 60.0, "claims")
    claiming.report(LifecycleKind.ENDED, 61.0, "claims", output_tokens=4_000_000_000)
    assert output_mean(hanging, 1_000_000.0) < 1_000.0
    assert output_mean(claiming, 100.0) < 1_000.0


def test_a_clock_that_goes_back_makes_nothing_longer() -> None:
    driver = used()
    driver.report(LifecycleKind.PULLED, 1_000_000.0, "future")
    driver.tick(60.0)
    assert output_mean(driver, 1_000_001.0) == pytest.approx(50.0, rel=0.2)


def guess_of(driver: Driver, tenant: str) -> LengthGuess:
    """A gateway's guess with the newest snapshot."""
    snapshot = driver.machine.snapshot
    median = snapshot.output_curve_for("chat", "64s", "1024").median_tokens
    return snapshot.length_model.guess(LengthFacts(model="chat", tenant=tenant, prompt_tokens=500), median, 8_000)


def two_tenants(driver: Driver, requests: int = 600) -> None:
    rng = np.random.default_rng(1)
    for number in range(requests):
        tenant, center = (("short", 20), ("long", 400))[number % 2]
        output = max(1, round(float(rng.lognormal(np.log(center), 0.3))))
        guess = guess_of(driver, tenant)
        driver.report(LifecycleKind.COMPLETED, 2.0 * number, str(number), model="chat", output_tokens=output, length_guess=guess)


def test_the_length_model_comes_into_use_and_moves_the_group_key() -> None:
    driver = Driver()
    driver.seen()
    two_tenants(driver)
    driver.tick(10_000.0)
    (score,) = driver.machine.snapshot.length_model.scores
    assert (score.model, score.used) == ("chat", True)
    assert score.gain > 0.0
    short, long = guess_of(driver, "short"), guess_of(driver, "long")
    assert short.by_model
    assert short.expected_tokens == pytest.approx(20, rel=0.4)
    assert long.expected_tokens == pytest.approx(400, rel=0.4)
    rows = {row.key: row for row in driver.machine.snapshot.workload}
    assert rows["chat", "64s", "1024/o64"].output_tokens_mean < 50.0
    assert rows["chat", "64s", "1024/o1024"].output_tokens_mean > 300.0
    # The group without a prediction goes on learning from all.
    assert rows["chat", "64s", "1024"].samples > rows["chat", "64s", "1024/o64"].samples


def test_the_length_model_outlives_a_restart_and_goes_out_of_use_when_it_is_wrong() -> None:
    driver = Driver()
    driver.seen()
    two_tenants(driver)
    driver.tick(10_000.0)
    snapshot = profile_wire.from_body(profile_wire.to_body(driver.machine.snapshot))
    assert snapshot == driver.machine.snapshot
    again = Driver()
    again.restore(snapshot)
    again.seen()
    again.report(LifecycleKind.COMPLETED, 20_000.0, "next", model="chat", output_tokens=20, length_guess=guess_of(again, "short"))
    again.tick(20_010.0)
    assert [score.used for score in again.machine.snapshot.length_model.scores] == [True]
    for tenant in ("short", "long"):
        assert guess_of(again, tenant).expected_tokens == pytest.approx(guess_of(driver, tenant).expected_tokens, rel=0.1)
    before, after = (each.machine.snapshot.output_curve_for("chat", "64s", "1024") for each in (driver, again))
    assert after.quantile(0.9) == pytest.approx(before.quantile(0.9), rel=0.05)
    wrong = replace(guess_of(driver, "short"), median_tokens=50.0, model_tokens=500.0, expected_tokens=500)
    for number in range(600):
        driver.report(LifecycleKind.COMPLETED, 10_001.0 + number, f"w{number}", model="chat", output_tokens=50, length_guess=wrong)
    driver.tick(20_000.0)
    (score,) = driver.machine.snapshot.length_model.scores
    assert (score.model, score.used) == ("chat", False)
    assert score.gain <= 0.0
    short = guess_of(driver, "short")
    assert (short.by_model, short.class_tokens, short.expected_tokens) == (False, 0, round(short.median_tokens))


@pytest.mark.parametrize("field", ["median_tokens", "model_tokens"])
def test_a_guess_that_no_gateway_makes_is_left_out_and_the_rest_believed(field: str) -> None:
    event = events_pb2.RequestEvent(kind=events_pb2.EVENT_KIND_COMPLETED, queue_id="1-1", model="chat", output_tokens=7, prompt_tokens=5)
    event.length_guess.CopyFrom(length_wire.guess_to_proto(LengthGuess(median_tokens=5.0, model_tokens=5.0, expected_tokens=5)))
    body = events_pb2.RequestEvents(events=[event])
    read, _ = events_of(StreamEntry(entry_id="1-1", payload=body.SerializeToString()), Outcomes(since_s=0.0), {})
    assert isinstance(read, Lifecycle)
    assert read.length_guess is not None
    setattr(body.events[0].length_guess, field, float("nan"))
    read, _ = events_of(StreamEntry(entry_id="1-1", payload=body.SerializeToString()), Outcomes(since_s=0.0), {})
    assert isinstance(read, Lifecycle)
    assert (read.length_guess, read.output_tokens) == (None, 7)


def test_the_uncached_share_is_learned_by_class_and_forgotten() -> None:
    driver = Driver(Learning(memory_requests=50.0))
    driver.seen()

    def end(count: int, prompt_tokens: int, cached_tokens: int | None, slo_class: str = "64s", attempt: int = 1) -> None:
        for _ in range(count):
            at_s = driver.now_s + 5.0
            fields = {"prompt_tokens": prompt_tokens, "attempt": attempt, "group_id": ""}
            driver.report(LifecycleKind.PULLED, at_s, f"{driver.serial}", model="chat", **fields)
            finish(driver, at_s, f"{driver.serial - 1}", 50, cached_tokens=cached_tokens, slo_class=slo_class, **fields)

    def share(slo_class: str = "64s", tokens: str = "1024") -> float:
        driver.tick(driver.now_s + 5.0)
        return driver.machine.snapshot.workload_for("chat", slo_class, tokens).uncached_share

    end(5, 500, None)
    end(5, 500, 400, attempt=2)
    end(5, 500, 500)
    assert share() == 1.0, "not known, a run that was resumed, and what no engine does"
    end(1, 400, 300)
    end(1, 1_000, 100)
    assert share() == pytest.approx(1_000 / 1_400, rel=0.01), "of the tokens of prompts, not of the prompts"
    end(400, 1_000, 750)
    end(400, 1_000, 0, slo_class="8s")
    assert share() == pytest.approx(0.25, abs=1e-3)
    assert share("8s") == pytest.approx(1.0, abs=1e-3)
    assert share("64s", "4096") == share("") > 0.9, "a class without ends has that of its model, which is mostly of the last ones"
    restored = profile_wire.from_body(profile_wire.to_body(driver.machine.snapshot))
    driver.restore(restored)
    driver.seen()
    end(50, 1_000, 0)
    assert share() == pytest.approx(1.0 - 0.75 / 2.718, abs=0.01), "1 / e of what was restored is left after the memory"
