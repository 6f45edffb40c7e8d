"""The length model as it learns: which requests it distinguishes, when it is used, which hints it believes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.statistics.length_features import LengthFacts
from qlm_core.statistics.length_model import NO_LENGTH_MODEL, LengthModel
from qlm_estimator.lengths.predictor import SAMPLES_MIN, LengthMonitor, LengthPredictor
from qlm_estimator.metrics import EstimatorMetrics
from qlm_process.wire import lengths as length_wire

MEDIAN = 100.0


def learn(predictor: LengthPredictor, facts: LengthFacts, output_tokens: int) -> None:
    """One request: predicted with what is published now, then learned from."""
    predictor.learn(facts.model, predictor.model().guess(facts, MEDIAN, 1 << 20), output_tokens)


def expected(model: LengthModel, facts: LengthFacts) -> int:
    return model.guess(facts, MEDIAN, 1 << 20).expected_tokens


def facts_of(tenant: str, **more: object) -> LengthFacts:
    return LengthFacts(**{"model": "chat", "tenant": tenant, "prompt_tokens": 200, **more})  # type: ignore[arg-type]


def taught(seed: int = 1, requests: int = 1_000) -> LengthPredictor:
    """Two tenants around one median: one short, one long."""
    rng, predictor = np.random.default_rng(seed), LengthPredictor()
    for _ in range(requests):
        tenant = ("short", "long")[int(rng.integers(2))]
        output = max(1, round(float(rng.lognormal(np.log(30 if tenant == "short" else 300), 0.5))))
        learn(predictor, facts_of(tenant), output)
    return predictor


def test_tenants_are_distinguished() -> None:
    model = taught().model()
    assert model.used_for("chat")
    assert expected(model, facts_of("short")) == pytest.approx(30, rel=0.25)
    assert expected(model, facts_of("long")) == pytest.approx(300, rel=0.25)
    score = model.scores[0]
    assert score.gain > 0.5
    assert score.model_error_tokens < score.median_error_tokens


@pytest.mark.parametrize(
    "known",
    [
        ({"application": "mail"}, {"application": "chat"}),
        ({"output_tokens_limit": 100}, {"output_tokens_limit": 4_000}),
        ({"sampling": "greedy"}, {"sampling": "structured"}),
        ({"prompt_tokens": 20}, {"prompt_tokens": 3_000}),
        ({"prompt_hashes": (1,)}, {"prompt_hashes": (2,)}),
        ({"hint_tokens": 30}, {"hint_tokens": 300}),
    ],
    ids=lambda known: next(iter(known[0])),
)
def test_each_predictor_of_an_output_is_learned_for_each_tenant(known: tuple[dict[str, object], dict[str, object]]) -> None:
    """A value means short answers of one tenant and long ones of the other; hints and prompts mean the same of both."""
    rng, predictor = np.random.default_rng(4), LengthPredictor()
    of_both = known[0].keys() & {"hint_tokens", "prompt_hashes"}
    for _ in range(1_500):
        tenant, which = (int(each) for each in rng.integers(2, size=2))
        center = (30, 300)[which if of_both else which ^ tenant]
        learn(predictor, facts_of(f"tenant {tenant}", **known[which]), max(1, round(float(rng.lognormal(np.log(center), 0.3)))))
    model = predictor.model()
    for tenant in (0, 1):
        short, long = (model.guess(facts_of(f"tenant {tenant}", **known[which]), MEDIAN, 1 << 20).model_tokens for which in (0, 1))
        assert (short > 3.0 * long) if tenant and not of_both else (long > 3.0 * short)


def test_where_nothing_distinguishes_them_the_model_is_not_used() -> None:
    for seed in range(2):
        rng, predictor = np.random.default_rng(seed), LengthPredictor()
        used = 0
        for _ in range(1_500):
            learn(predictor, facts_of(f"tenant {rng.integers(200)}"), max(1, round(float(rng.lognormal(np.log(100), 0.8)))))
            used += predictor.model().used_for("chat")
        assert used < 75


def test_it_switches_itself_off_when_it_no_longer_wins() -> None:
    monitor = LengthMonitor()
    for number in range(200):
        monitor.compare(10.0, 5.0 + number % 3)
        assert monitor.used == (number + 1 >= SAMPLES_MIN)
    for _ in range(1_000):
        monitor.compare(5.0, 8.0)
    assert not monitor.used
    assert monitor.error.mean == pytest.approx(8.0, rel=0.1)
    for number in range(3_000):  # neither wins
        monitor.compare(5.0 + number % 2, 6.0 - number % 2)
        assert not monitor.used


def test_it_is_judged_by_what_it_did_lately() -> None:
    """However long it won before, it is dropped within a thousand requests that it loses."""
    monitor = LengthMonitor()
    for number in range(10_000):
        monitor.compare(10.0, 5.0 + number % 3)
    assert monitor.used
    for number in range(1_000):
        monitor.compare(5.0, 8.0 + number % 3)
    assert not monitor.used
    assert monitor.samples == 11_000


def test_the_first_lucky_requests_bring_no_model_into_use() -> None:
    """Nearer by 3.7 standard errors: that is chance now and then, with a look after each request, and is none where it goes on."""
    monitor = LengthMonitor()
    for number in range(76):
        monitor.compare(10.0, 8.58 if number % 2 else 10.58)
    assert monitor.gain.mean > 3.0 * math.sqrt(monitor.gain.variance / monitor.gain.weight)
    assert not monitor.used
    for number in range(64):
        monitor.compare(10.0, 8.58 if number % 2 else 10.58)
    assert monitor.used


def test_a_relation_that_ends_is_unlearned() -> None:
    predictor, rng = taught(), np.random.default_rng(2)
    for _ in range(800):  # the tenants are alike now
        learn(predictor, facts_of(("short", "long")[int(rng.integers(2))]), max(1, round(float(rng.lognormal(np.log(100), 0.3)))))
    model = predictor.model()
    assert expected(model, facts_of("short")) == pytest.approx(100, rel=0.25)
    assert expected(model, facts_of("long")) == pytest.approx(100, rel=0.25)


@pytest.mark.parametrize(("honest", "follows"), [(True, True), (False, False)])
def test_hints_are_followed_as_far_as_they_proved_right(honest: bool, follows: bool) -> None:
    rng, predictor = np.random.default_rng(3), LengthPredictor()
    for _ in range(1_500):
        output = max(1, round(float(rng.lognormal(np.log(100), 1.0))))
        hint = output if honest else round(float(np.exp(rng.uniform(0.0, 12.0))))
        learn(predictor, facts_of("acme", hint_tokens=hint), output)
    model = predictor.model()
    assert model.used_for("chat") == follows
    guesses = [model.guess(facts_of("acme", hint_tokens=hint), MEDIAN, 1 << 20).model_tokens for hint in (20, 100, 500)]
    if follows:
        assert guesses == pytest.approx([20, 100, 500], rel=0.35)
    else:
        assert max(guesses) / min(guesses) < 2.0
    # Another tenant's hints have proved nothing yet.
    stranger = [model.guess(facts_of("new", hint_tokens=hint), MEDIAN, 1 << 20).model_tokens for hint in (20, 500)]
    assert stranger[0] == pytest.approx(stranger[1])


def test_absurd_hints_break_nothing() -> None:
    predictor = LengthPredictor()
    for hint in (0, 1, 2**32 - 1) * 100:
        learn(predictor, facts_of("acme", hint_tokens=hint), 100)
    assert expected(predictor.model(), facts_of("acme", hint_tokens=2**32 - 1)) <= 300


def test_the_same_requests_teach_the_same_model() -> None:
    assert taught(requests=300).model() == taught(requests=300).model()


def test_learning_goes_on_from_a_published_model() -> None:
    model = length_wire.model_from_proto(length_wire.model_to_proto(taught().model()))
    again = LengthPredictor()
    again.restore(model)
    assert again.model() == model
    for _ in range(20):
        learn(again, facts_of("short"), 30)
    later = again.model()
    assert later.used_for("chat")
    assert expected(later, facts_of("short")) == pytest.approx(30, rel=0.3)
    assert expected(later, facts_of("long")) == pytest.approx(expected(model, facts_of("long")), rel=0.1)


def test_profiles_without_a_model_leave_what_was_learned() -> None:
    """As an imported file may be."""
    predictor = taught(requests=300)
    before = predictor.model()
    predictor.restore(NO_LENGTH_MODEL)
    assert predictor.model() == before
    learn(predictor, facts_of("short"), 30)
    assert expected(predictor.model(), facts_of("short")) == pytest.approx(expected(before, facts_of("short")), rel=0.2)


def test_metrics_show_where_it_is_used() -> None:
    metrics = EstimatorMetrics()
    model = taught().model()
    (score,) = model.scores
    scores = (score, replace(score, model="code", used=False, model_error_tokens=2.0 * score.median_error_tokens))
    snapshot = ProfileSnapshot(version=1, made_s=0.0, hardware=(), length_model=replace(model, scores=scores))
    metrics.report_snapshot(snapshot)
    value = metrics.registry.get_sample_value
    assert [value("qlm_estimator_length_model_used", {"model": name}) for name in ("chat", "code")] == [1.0, 0.0]
    assert value("qlm_estimator_length_model_gain_ratio", {"model": "chat"}) == score.gain
    assert value("qlm_estimator_length_model_gain_ratio", {"model": "code"}) == -1.0
    metrics.report_snapshot(replace(snapshot, length_model=NO_LENGTH_MODEL))
    assert value("qlm_estimator_length_model_used", {"model": "chat"}) is None


def test_an_old_model_still_follows_a_change() -> None:
    model = taught().model()
    aged = LengthPredictor()
    aged.restore(replace(model, curvatures=(1e9,) * len(model.curvatures)))
    for _ in range(1_500):
        learn(aged, facts_of("short"), 300)
    assert expected(aged.model(), facts_of("short")) == pytest.approx(300, rel=0.25)


def test_models_are_judged_apart() -> None:
    predictor = taught()
    rng = np.random.default_rng(7)
    for _ in range(300):
        facts = LengthFacts(model="code", tenant="short", prompt_tokens=200)
        learn(predictor, facts, max(1, round(float(rng.lognormal(np.log(100), 0.8)))))
    model = predictor.model()
    assert [score.model for score in model.scores] == ["chat", "code"]
    assert (model.used_for("chat"), model.used_for("code")) == (True, False)
