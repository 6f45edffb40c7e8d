"""One A100 with Mistral-7B under one trace: capacity first, then the run that is predicted and judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.estimator.follower import Follower
from benchmarks.estimator.predictions import Prediction
from benchmarks.estimator.scores import Judged
from benchmarks.estimator.truth import Happened, Kind, TrueInstance, happenings
from benchmarks.estimator.workloads import MODEL, Arrival, stretched
from qlm_agent.engines.simulated.core import SimulatedModel
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec

GPU, PROFILE = "A100-80GB", "Mistral-7B"
LOAD = 1.1
"""Arrivals over what the engine can take, so that queues form."""
CONTEXT_TOKENS_MAX = 1 << 21
PREDICTED_MAX = 4_000
"""Requests that are predicted: of more, every so manieth. All of them are served and learned from."""
ARRIVALS_APART = 128
"""Requests further apart than this are in different groups, so that the groups of one queue keep the order of arrival."""


@dataclass(frozen=True, slots=True)
class Shift:
    """A change at `at_share` of the time: requests from then on make `output_factor` as many tokens, and steps take `slowness` as long."""

    at_share: float
    output_factor: float = 1.0
    slowness: float = 1.0


def spec() -> ModelSpec:
    """The served model; its context takes any request of the traces."""
    return ModelSpec(name=MODEL, profile=PROFILE, context_tokens_max=CONTEXT_TOKENS_MAX)


def models() -> dict[str, SimulatedModel]:
    """As the engine knows them."""
    row = next(row for row in shipped_snapshot().hardware if (row.gpu, row.n_gpu, row.model) == (GPU, 1, PROFILE))
    return {MODEL: SimulatedModel(spec=spec(), profile=row)}


def facts() -> InstanceFacts:
    """The instance, with its model loaded."""
    return InstanceFacts(name="one", incarnation="one/1", gpu=GPU, n_gpu=1, engine="simulated", models=(MODEL,))


def seconds_at_capacity(requests: Sequence[Arrival], seed: int) -> float:
    """How long the engine needs to start all requests when all of them wait from the beginning."""
    loaded_s, last_s = 0.0, 0.0
    for happened in _run(
        [replace(request, arrival_s=0.0) for request in requests], TrueInstance.of(facts(), models(), seed), lambda _: None
    ):
        if happened.kind is Kind.SWAPPED:
            loaded_s = happened.at_s
        elif happened.kind is Kind.STARTED:
            last_s = max(last_s, happened.at_s)
    return last_s - loaded_s


def predict_run(
    requests: Sequence[Arrival],
    seed: int,
    shift: Shift | None = None,
    predicted_max: int = PREDICTED_MAX,
    estimator: type[Follower] = Follower,
) -> tuple[Judged, float]:
    """The run at LOAD of capacity: predictions at arrival against outcomes, and the time of the last arrival."""
    requests = stretched(requests, seconds_at_capacity(requests, seed) / LOAD)
    duration_s = requests[-1].arrival_s
    instance = TrueInstance.of(facts(), models(), seed)
    if shift is not None:
        requests = _shifted(requests, shift)
        instance.slow_from_s, instance.slowness = shift.at_share * duration_s, shift.slowness
    follower = estimator(requests, [facts()], {MODEL: spec()}, shipped_snapshot().hardware, lambda _: instance.runs.on_gpu())
    stride = max(1, round(len(requests) / predicted_max))
    predictions: dict[int, Prediction] = {}

    def arrive(request: Arrival) -> None:
        follower.arrive(request)
        if request.number % stride == 0:
            found = follower.predict(request, request.arrival_s)
            assert found is not None, "the pair has a profile"
            predictions[request.number] = found
        follower.place(request, "one", request.number // ARRIVALS_APART)

    started_s: dict[int, float] = {}
    ended_s: dict[int, float] = {}
    for happened in _run(requests, instance, arrive):
        follower.see(happened)
        if happened.kind is Kind.STARTED:
            started_s[happened.number] = happened.at_s
        elif happened.kind is Kind.COMPLETED:
            ended_s[happened.number] = happened.at_s
    chosen = [requests[number] for number in predictions]
    return judged_of(chosen, predictions, started_s, ended_s, {MODEL: 0}), duration_s


def judged_of(
    requests: Sequence[Arrival],
    predictions: dict[int, Prediction],
    started_s: dict[int, float],
    ended_s: dict[int, float],
    numbers: dict[str, int],
) -> Judged:
    """Predictions of these requests as arrays."""
    made = [predictions[request.number] for request in requests]
    arrival_s = np.array([request.arrival_s for request in requests])
    return Judged(
        arrival_s=arrival_s,
        model=np.array([numbers[request.model] for request in requests], dtype=np.int64),
        depth=np.array([each.depth for each in made], dtype=np.float64),
        wait_s=np.array([each.wait_s[0] for each in made]),
        wait_p90_s=np.array([each.wait_s[1] for each in made]),
        wait_p99_s=np.array([each.wait_s[2] for each in made]),
        actual_wait_s=np.array([started_s[request.number] for request in requests]) - arrival_s,
        completion_s=np.array([each.completion_s[0] for each in made]),
        completion_p90_s=np.array([each.completion_s[1] for each in made]),
        completion_p99_s=np.array([each.completion_s[2] for each in made]),
        actual_completion_s=np.array([ended_s[request.number] for request in requests]) - arrival_s,
    )


def _shifted(requests: Sequence[Arrival], shift: Shift) -> tuple[Arrival, ...]:
    from_s = shift.at_share * requests[-1].arrival_s
    return tuple(
        replace(request, output_tokens=max(1, round(request.output_tokens * shift.output_factor)))
        if request.arrival_s >= from_s
        else request
        for request in requests
    )


def _run(requests: Sequence[Arrival], instance: TrueInstance, arrive: Callable[[Arrival], None]) -> Iterator[Happened]:
    """All that happens on the one instance."""
    instance.load(0.0, MODEL)

    def assign(request: Arrival) -> str:
        arrive(request)
        instance.append(request)
        return "one"

    return happenings(requests, {"one": instance}, assign)
