"""Learns how long the answer to each request will be, from finished requests: a linear model of hashed features, in the logarithm of the
output, under absolute error, so that it aims at a median as its rival is one (Koenker and Bassett, "Regression quantiles", 1978).

It is learned one request at a time with AdaGrad steps (Duchi et al., JMLR 2011): a feature that is seldom there, such as a small tenant,
takes large steps, a common one small ones. `LengthMonitor` decides whether the model is used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from qlm_core.statistics.length_features import ANCHOR_TOKENS, hint_value
from qlm_core.statistics.length_model import NO_LENGTH_MODEL, WEIGHTS_MAX, LengthGuess, LengthModel, LengthScore
from qlm_estimator.lengths.classes import Moments

RATE = 0.2
"""First step of a feature's weight, in logarithms of tokens."""
CURVATURE_MIN, CURVATURE_MAX = 1e-8, 1e4
"""Steps shrink no further than after 40,000 requests with a feature (each adds a quarter), so that a change is followed at any age."""
MONITOR_MEMORY = 500.0
"""Finished requests of a model after which an old comparison weighs 1 / e."""
SAMPLES_MIN = 50
"""Comparisons before a model is used."""
CHANCE = 0.01
"""Chance that a model no better than the median is used, however often it is tested."""
MODELS_MAX = 1_024
"""Served models that are judged."""


@dataclass(slots=True)
class LengthMonitor:
    """Compares predicted with produced lengths of one served model: absolute errors at arrival of the model and of the group's median."""

    used: bool = False
    samples: int = 0
    error: Moments = field(default_factory=Moments)  # of the model
    gain: Moments = field(default_factory=Moments)

    def compare(self, median_error: float, model_error: float) -> None:
        self.samples += 1
        self.error.add(model_error, MONITOR_MEMORY)
        self.gain.add(median_error - model_error, MONITOR_MEMORY)
        if self.samples >= SAMPLES_MIN:
            least = 0.0 if self.used else self._by_chance
            self.used = self.gain.mean > least * math.sqrt(self.gain.variance / self.gain.weight)

    @property
    def _by_chance(self) -> float:
        """Standard errors of the gain that are exceeded at any time with CHANCE where there is none (Robbins, "Statistical methods related
        to the law of the iterated logarithm", 1970). It is tested after every request, so two or three would often be chance."""
        share = SAMPLES_MIN / self.gain.weight
        return math.sqrt((1.0 + share) * math.log((1.0 + 1.0 / share) / CHANCE**2))


@dataclass(slots=True)
class LengthPredictor:
    """Empty, or as restored. `learned`: finished requests learned from."""

    learned: int = 0
    _weights: dict[int, float] = field(default_factory=dict)
    _curvatures: dict[int, float] = field(default_factory=dict)  # sums of squared gradients
    _monitors: dict[str, LengthMonitor] = field(default_factory=dict)
    _published: LengthModel = NO_LENGTH_MODEL
    _published_at: int = 0

    def restore(self, model: LengthModel) -> None:
        """Goes on from a published model. An empty one changes nothing."""
        if model == NO_LENGTH_MODEL:
            return
        self._weights = dict(zip(model.features, model.weights, strict=True))
        self._curvatures = dict(zip(model.features, model.curvatures, strict=True))
        self._published, self._published_at = model, self.learned
        self._monitors.clear()
        for score in model.scores[:MODELS_MAX]:
            weight = min(float(score.samples), MONITOR_MEMORY)
            error = Moments(weight, score.model_error_tokens)
            gain = Moments(weight, score.median_error_tokens - score.model_error_tokens, score.median_error_tokens**2)
            self._monitors[score.model] = LengthMonitor(score.used, score.samples, error, gain)

    def learn(self, model: str, guess: LengthGuess, output_tokens: int) -> None:
        """One finished request and what was thought of it at its arrival: first judged, then learned from."""
        if model not in self._monitors and len(self._monitors) >= MODELS_MAX:
            return
        monitor = self._monitors.setdefault(model, LengthMonitor())
        monitor.compare(abs(guess.median_tokens - output_tokens), abs(guess.model_tokens - output_tokens))
        values = dict.fromkeys(guess.features, 1.0)
        total = sum(self._weights.get(feature, 0.0) for feature in values)
        hinted = hint_value(guess.hint_tokens, total)
        if hinted:
            values[guess.hint_feature] = hinted
            total += self._weights.get(guess.hint_feature, 0.0) * hinted
        slope = 0.5 if math.log(output_tokens / ANCHOR_TOKENS) < total else -0.5
        for feature, value in values.items():
            gradient = slope * value
            curvature = self._curvatures[feature] = self._curvatures.get(feature, 0.0) + gradient * gradient
            self._weights[feature] = self._weights.get(feature, 0.0) - RATE * gradient / math.sqrt(curvature + CURVATURE_MIN)
        self.learned += 1

    def model(self) -> LengthModel:
        """The model as it is now, with its largest weights."""
        if self.learned == self._published_at:
            return self._published
        weights, curvatures = self._weights, self._curvatures
        kept = sorted(sorted(weights, key=lambda key: (-abs(weights[key]), key))[:WEIGHTS_MAX])
        for key, curvature in curvatures.items():
            curvatures[key] = min(curvature, CURVATURE_MAX)
        self._published = LengthModel(
            features=tuple(kept),
            weights=_in_single_precision([weights[key] for key in kept]),
            curvatures=_in_single_precision([curvatures.get(key, 0.0) for key in kept]),
            scores=tuple(_score(model, monitor) for model, monitor in sorted(self._monitors.items())),
        )
        self._published_at = self.learned
        return self._published


def _in_single_precision(values: list[float]) -> tuple[float, ...]:
    """As a message carries them, so that gateways and this process predict the same."""
    return tuple(np.array(values, dtype=np.float32).astype(np.float64).tolist())


def _score(model: str, monitor: LengthMonitor) -> LengthScore:
    return LengthScore(
        model=model,
        used=monitor.used,
        samples=monitor.samples,
        median_error_tokens=monitor.error.mean + monitor.gain.mean,
        model_error_tokens=monitor.error.mean,
    )
