"""Output lengths against the group median, on public traces in arrival order: what is predicted at arrival from what has finished by then.

Both sides are the estimator's own: the median of the request's group (model and prompt class) as its rows would publish it, and the length
model. A request finishes as on an engine of its own, by its tokens; nothing is known of it before. The traces hold no text, so a prompt is
known by its prefix blocks where the trace has them, and by its length.
"""

from __future__ import annotations

import csv
import gzip
import heapq
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.estimator.workloads import FILES, MODEL, SLO
from qlm_core.profiles.profile import ProfileSnapshot, WorkloadKey
from qlm_core.statistics.length_curve import TOKENS_MAX
from qlm_core.statistics.length_features import LengthFacts
from qlm_core.statistics.length_model import LengthGuess
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.group import prompt_class, slo_class, token_class
from qlm_estimator.lengths.classes import LengthLearner
from qlm_estimator.lengths.predictor import LengthPredictor
from qlm_load.workload.trace import read_trace

PREFILL_S_PER_TOKEN, DECODE_S_PER_TOKEN, OVERHEAD_S = 1e-4, 0.03, 0.5
"""When a request finishes after its arrival: roughly Mistral-7B on an A100."""
JITTER_S = 5.0
"""Seeds shift each finish by up to so much, which changes what is known at each arrival."""
PUBLISHED_EVERY = 50
"""Arrivals between two publications: what a gateway predicts with is never the newest."""
MEMORY_REQUESTS, ROWS_MAX = 1000.0, 4096
"""As the estimator's settings are by default."""
PREFIX_BLOCKS = (1, 2, 4)
CLASS_TOKENS, CLASSES = 102, 10
"""Length classes of S3 and UELLM, which predict a class: ten up to 1,024 tokens, the last one open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Mean absolute errors in tokens: of the group median, of the length model whether used or not, and of what was expected; and the
    share of requests whose expectation was the model's. `right_class`: share whose expected tokens are in the class of the actual ones;
    `largest_class`: share of the largest class."""

    median: float
    model: float
    expected: float
    used: float
    right_class: float
    largest_class: float

    @property
    def gain_percent(self) -> float:
        """By how much the expectation is nearer than the group median."""
        return 100.0 * (1.0 - self.expected / self.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    arrival_s: float
    output_tokens: int
    facts: LengthFacts


def measure_lengths(traces: Path, seeds: Sequence[int]) -> dict[str, dict[str, dict[str, float]]]:
    """`length_mae_gain` in percent for each trace: mean and spread over the seeds, with the errors behind it. Raises ConfigError for a
    trace that is not there."""
    gains: dict[str, dict[str, float]] = {}
    for name, file in FILES.items():
        requests = _read(traces / f"{file}.csv.gz")
        found = [prequential(requests, seed) for seed in seeds]
        percents = [errors.gain_percent for errors in found]
        gains[name] = {
            "mean": float(np.mean(percents)),
            "least": min(percents),
            "most": max(percents),
            "median_error_tokens": float(np.mean([errors.median for errors in found])),
            "expected_error_tokens": float(np.mean([errors.expected for errors in found])),
            "model_gain_if_always_used": float(np.mean([100.0 * (1.0 - errors.model / errors.median) for errors in found])),
            "used_share": float(np.mean([errors.used for errors in found])),
            "right_class": float(np.mean([errors.right_class for errors in found])),
            "largest_class": found[0].largest_class,
        }
    return {"length_mae_gain": gains}


def measure_file(path: Path, seed: int = 1) -> Errors:
    """One trace, of any name. Raises ConfigError."""
    return prequential(_read(path), seed)


def prequential(requests: Sequence[_Request], seed: int) -> Errors:
    """Each request is predicted at its arrival, from those that finished before, and learned from when it finishes."""
    rng = np.random.default_rng(seed)
    rows, predictor = LengthLearner(memory=MEMORY_REQUESTS, rows_max=ROWS_MAX), LengthPredictor()
    snapshot = ProfileSnapshot(version=0, made_s=0.0, hardware=())
    running: list[tuple[float, int, _Request, LengthGuess, Mapping[WorkloadKey, float]]] = []
    errors = np.zeros((len(requests), 5))
    name = slo_class(SLO)
    for number, request in enumerate(requests):
        while running and running[0][0] <= request.arrival_s:
            _, _, ended, guess, classes = heapq.heappop(running)
            rows.finish(classes, ended.facts.prompt_tokens, ended.output_tokens)
            predictor.learn(ended.facts.model, guess, ended.output_tokens)
        if number % PUBLISHED_EVERY == 0:
            model = predictor.model()
            snapshot = ProfileSnapshot(version=number, made_s=0.0, hardware=(), workload=rows.profiles(), length_model=model)
        facts = request.facts
        median = snapshot.output_curve_for(facts.model, name, prompt_class(facts.prompt_tokens)).median_tokens
        guess = snapshot.length_model.guess(facts, median, TOKENS_MAX)
        of_median, of_model = abs(round(guess.median_tokens) - request.output_tokens), abs(guess.model_tokens - request.output_tokens)
        right = _class_of(guess.expected_tokens) == _class_of(request.output_tokens)
        errors[number] = of_median, of_model, abs(guess.expected_tokens - request.output_tokens), guess.by_model, right
        classes = rows.classes(facts.model, name, token_class(facts.prompt_tokens, guess.class_tokens))
        ends_s = request.arrival_s + _service_s(request) + float(rng.uniform(0.0, JITTER_S))
        heapq.heappush(running, (ends_s, number, request, guess, classes))
    means = errors.mean(axis=0)
    largest = np.bincount([_class_of(request.output_tokens) for request in requests]).max() / len(requests)
    return Errors(
        median=float(means[0]),
        model=float(means[1]),
        expected=float(means[2]),
        used=float(means[3]),
        right_class=float(means[4]),
        largest_class=float(largest),
    )


def _class_of(tokens: float) -> int:
    return min(max(0, int(tokens) - 1) // CLASS_TOKENS, CLASSES - 1)


def _service_s(request: _Request) -> float:
    return OVERHEAD_S + PREFILL_S_PER_TOKEN * request.facts.prompt_tokens + DECODE_S_PER_TOKEN * request.output_tokens


def _read(path: Path) -> list[_Request]:
    if not path.exists():
        raise ConfigError(f"{path} is not there")
    blocks = _prefix_blocks(path)
    return [
        _Request(
            arrival_s=row.arrival_s,
            output_tokens=row.output_tokens,
            facts=LengthFacts(
                model=row.model or MODEL,
                tenant=row.client or "default",
                prompt_tokens=row.input_tokens,
                prompt_hashes=blocks[number] if blocks else (),
            ),
        )
        for number, row in enumerate(read_trace(path).rows)
    ]


def _prefix_blocks(path: Path) -> list[tuple[int, ...]]:
    """Hashes of the first blocks of each prompt, in the file's order; none where the trace has no `hash_ids`."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        if "hash_ids" not in (reader.fieldnames or ()):
            return []
        found: list[tuple[int, ...]] = []
        for row in reader:
            ids = row["hash_ids"].split()
            found.append(tuple(zlib.crc32(" ".join(ids[:count]).encode()) for count in PREFIX_BLOCKS if len(ids) >= count))
        return found
