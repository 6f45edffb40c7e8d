"""How fast predictions are, on one core: single requests of many groups at once, and a whole cluster assessed.

A made cluster of 100 queues of 20 groups each, of three models on A100s with the shipped profiles. CPU time of this process, the best of
a few rounds: other work on the machine can only make it longer.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

import numpy as np

from qlm_core.prediction.assessment import Assessment
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec

QUEUES = 100
GROUPS_EACH = 20
WAITING_MAX = 400
NOW_S = 1_000.0
ROUNDS = 5

VECTOR_REQUESTS = 500_000
"""Requests of one vectorised call: each with its own group and place."""

CATALOGUE: Mapping[str, ModelSpec] = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "code": ModelSpec(name="code", profile="Mistral-7B"),
    "large": ModelSpec(name="large", profile="Vicuna-13B"),
}


def measure_speed(seed: int) -> dict[str, float]:
    """`predictions_per_s`: vectorised, moments of waits and completions. `assess_ms`: 2,000 groups over 100 queues from their views to
    the table that requests are predicted from; `new_request_ms`: the best of all queues for one that joins no group."""
    views = cluster(seed)
    profiles = shipped_snapshot()
    kept = Assessment(CATALOGUE, profiles, views)
    request = _group("new", "chat", 1, 500, NOW_S + 300.0)
    return {
        "predictions_per_s": VECTOR_REQUESTS / _best_s(_vectorised(kept, seed)),
        "assess_ms": 1e3 * _best_s(lambda: Assessment(CATALOGUE, profiles, views).table),
        "new_request_ms": 1e3 * _best_s(lambda: kept.alone([request], NOW_S, [0.0])),
    }


def cluster(seed: int) -> list[QueueView]:
    """The virtual queues of all instances, each in the order of deadlines."""
    chance = random.Random(seed)
    views: list[QueueView] = []
    for number in range(QUEUES):
        name = f"a100-{number}"
        facts = InstanceFacts(
            name=name, incarnation=f"{name}/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=tuple(CATALOGUE), active_model="chat"
        )
        groups = tuple(
            _group(
                f"{name}-{place}", chance.choice(tuple(CATALOGUE)), chance.randint(1, WAITING_MAX), chance.randint(50, 2_000), place * 60.0
            )
            for place in range(GROUPS_EACH)
        )
        views.append(QueueView(instance=facts, active_model="chat", running=chance.randint(0, 256), groups=groups))
    return views


def _group(group_id: str, model: str, waiting: int, prompt_tokens: int, slack_s: float) -> GroupView:
    return GroupView(
        group_id=group_id,
        model=model,
        slo_class="64s",
        token_class="1024",
        waiting=waiting,
        waiting_prompt_tokens=waiting * prompt_tokens,
        first_deadline_s=NOW_S + slack_s,
    )


def _vectorised(kept: Assessment, seed: int) -> Callable[[], object]:
    chance = np.random.default_rng(seed)
    groups = chance.integers(0, QUEUES * GROUPS_EACH, VECTOR_REQUESTS)
    places = chance.integers(0, WAITING_MAX, VECTOR_REQUESTS).astype(np.float64)
    return lambda: kept.table.times(groups, places)


def _best_s(call: Callable[[], object]) -> float:
    """CPU seconds of the quickest round."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        call()
        best_s = min(best_s, time.process_time() - began_s)
    return best_s
