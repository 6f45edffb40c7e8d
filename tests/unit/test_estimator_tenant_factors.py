"""How much longer a tenant's answers are, in their sum, than the length model says."""

from __future__ import annotations

import numpy as np
import pytest

from qlm_core.length_features import LengthFacts, features_of, tenant_feature
from qlm_core.length_model import LengthModel, LengthScore
from qlm_estimator.lengths.tenants import TENANTS_MAX, TenantFactors

SHORT, LONG = 2, 3


def factor_of(factors: TenantFactors, feature: int) -> float:
    return factors.published()[feature][0]


def taught(count: int) -> TenantFactors:
    """Two tenants whose medians are alike, as the model says; one sends an answer of 400 tokens in three."""
    rng = np.random.default_rng(1)
    factors = TenantFactors()
    for _ in range(count):
        factors.learn(SHORT, 50.0, 50.0)
        factors.learn(LONG, 50.0, 400.0 if rng.random() < 1 / 3 else 50.0)
    return factors


def test_tenants_differ_by_what_their_medians_do_not_tell() -> None:
    factors = taught(2_000)
    assert factor_of(factors, LONG) / factor_of(factors, SHORT) == pytest.approx(10 / 3, rel=0.25)


def test_one_tenant_alone_is_as_all_tenants() -> None:
    factors = TenantFactors()
    for output in (20.0, 400.0, 3_000.0):
        factors.learn(SHORT, 50.0, output)
        assert factor_of(factors, SHORT) == pytest.approx(1.0)


def test_who_is_new_leans_on_all_and_one_absurd_answer_is_bounded() -> None:
    factors = taught(1_000)
    factors.learn(9, 50.0, 1e6)
    assert 1.0 < factor_of(factors, 9) < 3.0


def test_a_restored_tenant_goes_on_as_it_was() -> None:
    again = TenantFactors()
    again.restore(LONG, 3.0, 100.0)
    again.restore(SHORT, 1.0, 0.0)
    assert SHORT not in again.published(), "it rests on nothing"
    for _ in range(50):
        again.learn(SHORT, 100.0, 100.0)
    assert factor_of(again, LONG) / factor_of(again, SHORT) == pytest.approx(3.0, rel=0.15)


def test_tenants_are_bounded() -> None:
    factors = TenantFactors()
    for feature in range(TENANTS_MAX + 2):
        factors.learn(feature, 50.0, 50.0)
    assert len(factors.published()) == TENANTS_MAX
    assert 0 not in factors.published()


def published(factor: float) -> tuple[LengthModel, LengthFacts]:
    facts = LengthFacts(model="chat", tenant="acme", prompt_tokens=500)
    features = features_of(facts)
    factors = tuple(factor if feature == tenant_feature(features) else 1.0 for feature in features)
    score = LengthScore(model="chat", used=True, samples=100, median_error_tokens=10.0, model_error_tokens=8.0)
    zeros = (0.0,) * len(features)
    model = LengthModel(features=features, weights=zeros, curvatures=zeros, scores=(score,), factors=factors, factor_samples=zeros)
    return model, facts


def test_the_factor_moves_the_class_and_leaves_the_median() -> None:
    model, facts = published(30.0)
    guess = model.guess(facts, 77.0, 100_000)
    assert (guess.expected_tokens, guess.class_tokens) == (100, 3_000)
    assert model.guess(facts, 77.0, 200).class_tokens == 200, "never more than its limit"


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_that_no_learner_writes_are_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="factors"):
        published(factor)
