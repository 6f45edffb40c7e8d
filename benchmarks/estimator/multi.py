"""Three models on two kinds of GPU, with swaps: groups of one model in a row, which join, wait and are served as QLM's virtual queues do.

A request joins the open group of its model; there is one for each, on one of the queues. A group is closed when it is full, has been
open for GROUP_OPEN_S or its turn has come; the next one opens at the end of the queue that would have done all its work first, by the
estimator's own times. So for a while others still join groups ahead of a request that waits, which no prediction at its arrival can know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.estimator.follower import Follower
from benchmarks.estimator.predictions import Prediction
from benchmarks.estimator.scores import Judged
from benchmarks.estimator.single import CONTEXT_TOKENS_MAX, LOAD, judged_of
from benchmarks.estimator.truth import Happened, Kind, TrueInstance, happenings
from benchmarks.estimator.workloads import Arrival, stretched
from qlm_agent.engines.simulated.core import SimulatedModel
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec

MODELS = {"mistral": "Mistral-7B", "vicuna": "Vicuna-13B", "mistral-tuned": "Mistral-7B"}
"""Served models and the names of their profiles."""
SHARES = (0.5, 0.25, 0.25)
"""Shares of the requests."""
GPUS = {"a": "A100-80GB", "b": "H100-80GB"}
GROUP_REQUESTS_MAX = 256
"""As many as one batch."""
GROUP_OPEN_S = 20.0
"""A group takes requests for so long."""


@dataclass(slots=True)
class Open:
    """A group that requests may join."""

    instance: str
    number: int
    since_s: float
    requests: deque[Arrival]
    arrived: int = 0


def with_models(requests: Sequence[Arrival], seed: int) -> tuple[Arrival, ...]:
    """The same requests, each for one of MODELS by SHARES."""
    drawn = np.random.default_rng(seed).choice(list(MODELS), size=len(requests), p=SHARES)
    return tuple(replace(request, model=str(model)) for request, model in zip(requests, drawn, strict=True))


def predict_multi(requests: Sequence[Arrival], seed: int, predicted_max: int) -> tuple[Judged, float]:
    """As `single.predict_run`, of both instances."""
    requests = with_models(requests, seed)
    saturated = _Cluster([replace(request, arrival_s=0.0) for request in requests], seed)
    for _ in saturated.run(lambda _: None):
        pass
    requests = stretched(requests, len(requests) / (saturated.rate_per_s() * LOAD))
    duration_s = requests[-1].arrival_s
    cluster = _Cluster(requests, seed)
    stride = max(1, round(len(requests) / predicted_max))
    predictions: dict[int, Prediction] = {}

    def placed(request: Arrival) -> None:
        if request.number % stride == 0:
            found = cluster.follower.predict_placed(request, request.arrival_s)
            assert found is not None, "all pairs have a profile"
            predictions[request.number] = found

    for _ in cluster.run(placed):
        pass
    chosen = [requests[number] for number in predictions]
    numbers = {name: number for number, name in enumerate(MODELS)}
    return judged_of(chosen, predictions, cluster.started_s, cluster.ended_s, numbers), duration_s


class _Cluster:
    """The two instances, the estimator, and the group of each request."""

    def __init__(self, requests: Sequence[Arrival], seed: int) -> None:
        self._requests = requests
        self.started_s: dict[int, float] = {}
        self.ended_s: dict[int, float] = {}
        self._instance_of: dict[int, str] = {}
        self._open: dict[str, Open] = {}
        self._groups = 0
        catalogue = {name: ModelSpec(name=name, profile=profile, context_tokens_max=CONTEXT_TOKENS_MAX) for name, profile in MODELS.items()}
        shipped = shipped_snapshot().hardware
        rows = {(row.gpu, row.model): row for row in shipped if row.n_gpu == 1}
        self._instances: dict[str, TrueInstance] = {}
        for name, gpu in GPUS.items():
            facts = InstanceFacts(name=name, incarnation=f"{name}/1", gpu=gpu, n_gpu=1, engine="simulated", models=tuple(MODELS))
            models = {model: SimulatedModel(spec=spec, profile=rows[gpu, spec.profile]) for model, spec in catalogue.items()}
            self._instances[name] = TrueInstance.of(facts, models, seed)
        self.follower = Follower(
            requests,
            [instance.facts for instance in self._instances.values()],
            catalogue,
            shipped,
            lambda name: self._instances[name].runs.on_gpu(),
        )

    def run(self, placed: Callable[[Arrival], None]) -> Iterator[Happened]:
        """All that happens; `placed` receives each request once it is in its group."""
        for instance, first in zip(self._instances.values(), MODELS, strict=False):
            instance.load(0.0, first)
            for model in MODELS:
                if model != first:
                    instance.warm(0.0, model)

        def assign(request: Arrival) -> str:
            instance = self._join(request)
            placed(request)
            return instance

        for happened in happenings(self._requests, self._instances, assign):
            self.follower.see(happened)
            if happened.kind is Kind.STARTED:
                self.started_s[happened.number] = happened.at_s
            elif happened.kind is Kind.COMPLETED:
                self.ended_s[happened.number] = happened.at_s
            yield happened

    def rate_per_s(self) -> float:
        """Requests a second of both instances, each until it had started its last."""
        ends_s: dict[str, list[float]] = {}
        for number, started_s in self.started_s.items():
            ends_s.setdefault(self._instance_of[number], []).append(started_s)
        return sum(len(each) / max(each) for each in ends_s.values())

    def _join(self, request: Arrival) -> str:
        self.follower.arrive(request)
        group = self._open.get(request.model)
        if group is None or self._closed(group, request.arrival_s):
            ends_s = self.follower.ends_s(request.arrival_s)
            name = min(ends_s, key=lambda instance: (ends_s[instance], instance))
            self._groups += 1
            group = self._open[request.model] = Open(name, self._groups, request.arrival_s, deque())
            self._instances[name].blocks.append(group.requests)
        group.requests.append(request)
        group.arrived += 1
        self._instance_of[request.number] = group.instance
        self.follower.place(request, group.instance, group.number)
        return group.instance

    def _closed(self, group: Open, now_s: float) -> bool:
        blocks = self._instances[group.instance].blocks
        has_its_turn = not group.requests or (bool(blocks) and blocks[0] is group.requests)
        return has_its_turn or group.arrived >= GROUP_REQUESTS_MAX or now_s - group.since_s >= GROUP_OPEN_S
