"""Output length of one request: the median of its group, or what a learned model says where that was measured to be nearer.

The estimator learns the weights (`qlm_estimator.lengths.predictor`) and publishes them with its profiles; gateways predict with them in
their own process. A gateway's prediction travels with the request, so that all parts agree on it, and the estimator can judge it at the
end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from qlm_core.statistics.length_curve import TOKENS_MAX
from qlm_core.statistics.length_features import ANCHOR_TOKENS, BUCKETS, LengthFacts, features_of, hint_feature, hint_value

WEIGHTS_MAX = 4096
"""Most weights of a model that is published."""
TOTAL_MAX = 20.0
"""Largest sum of weights, either way, whose exponential is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthScore:
    """How the model did lately on the finished requests of one served model. `used`: it is in use there. Errors are mean absolute ones,
    in tokens, of the prediction at arrival."""

    model: str
    used: bool
    samples: int
    median_error_tokens: float
    model_error_tokens: float

    def __post_init__(self) -> None:
        errors = (self.median_error_tokens, self.model_error_tokens)
        if self.samples < 0 or not all(math.isfinite(error) and error >= 0.0 for error in errors):
            raise ValueError(f"length score of {self.model}: samples and errors are finite and >= 0")

    @property
    def gain(self) -> float:
        """By how much its error is below that of the median, as a share; negative where it is above."""
        return 1.0 - self.model_error_tokens / self.median_error_tokens if self.median_error_tokens > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthGuess:
    """Prediction of a request's output at its arrival, in tokens: the median of its group, what the model says, and what is
    `expected` of it: one of them. `hint`: the client's own, 0 for none. `features`, `hint_feature`: of
    `qlm_core.statistics.length_features`."""

    median_tokens: float
    model_tokens: float
    expected_tokens: int
    by_model: bool = False
    hint_tokens: int = 0
    features: tuple[int, ...] = ()
    hint_feature: int = 0

    def __post_init__(self) -> None:
        for tokens in (self.median_tokens, self.model_tokens, float(self.expected_tokens)):
            if not 1.0 <= tokens <= TOKENS_MAX:  # False for NaN
                raise ValueError(f"expected outputs are from 1 to {TOKENS_MAX} tokens, got {tokens}")
        if self.hint_tokens < 0 or not all(0 <= feature < BUCKETS for feature in (*self.features, self.hint_feature)):
            raise ValueError("a hint is >= 0, features are below BUCKETS")

    @property
    def class_tokens(self) -> int:
        """The output that the request's class goes by; 0 where the model is not in use."""
        return self.expected_tokens if self.by_model else 0


@dataclass(frozen=True, kw_only=True)
class LengthModel:
    """The published model. `weights` and `curvatures` (sums of squared gradients, from which learning goes on) are those of `features`, in
    order. Raises ValueError for what no learner writes."""

    features: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    curvatures: tuple[float, ...] = ()
    scores: tuple[LengthScore, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.features) == len(self.weights) == len(self.curvatures) <= WEIGHTS_MAX:
            raise ValueError(f"a length model has one weight and one curvature for each of at most {WEIGHTS_MAX} features")
        if not all(0 <= feature < BUCKETS for feature in self.features):
            raise ValueError(f"features of a length model are below {BUCKETS}")
        if not all(math.isfinite(weight) for weight in self.weights) or not all(0.0 <= each < math.inf for each in self.curvatures):
            raise ValueError("weights of a length model are finite, curvatures finite and >= 0")

    @cached_property
    def _weight_of(self) -> Mapping[int, float]:
        return dict(zip(self.features, self.weights, strict=True))

    @cached_property
    def _used(self) -> frozenset[str]:
        return frozenset(score.model for score in self.scores if score.used)

    def used_for(self, model: str) -> bool:
        """Whether it is in use for a served model: it was nearer than the median lately."""
        return model in self._used

    def guess(self, facts: LengthFacts, median_tokens: float, output_tokens_max: int) -> LengthGuess:
        """Predicts the output of a request whose group has this median > 0; at most its limit >= 1, whatever the hint says."""
        most = float(min(max(1, output_tokens_max), TOKENS_MAX))
        median = min(max(1.0, median_tokens), most)
        hint = min(facts.hint_tokens, int(most))
        features, hint_name = features_of(facts), hint_feature(facts)
        total = sum(self._weight_of.get(feature, 0.0) for feature in features)
        if hint:
            total += self._weight_of.get(hint_name, 0.0) * hint_value(hint, total)
        by_model = self.used_for(facts.model)
        modelled = min(max(1.0, ANCHOR_TOKENS * math.exp(min(max(total, -TOTAL_MAX), TOTAL_MAX))), most)
        if features[0] not in self._weight_of:  # the served model's own: nothing was learned of it
            by_model, modelled = False, median
        return LengthGuess(
            median_tokens=median,
            model_tokens=modelled,
            expected_tokens=max(1, round(modelled if by_model else median)),
            by_model=by_model,
            hint_tokens=hint,
            features=features,
            hint_feature=hint_name,
        )


NO_LENGTH_MODEL = LengthModel()
"""Nothing was learned yet: every request is expected to be the median of its group."""
