"""The engine model against the step-accurate engine, regime by regime: hidden bias 0, distributions of lengths known, no feedback."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.estimator.follower import Follower
from benchmarks.estimator.scores import Floats
from benchmarks.estimator.single import ARRIVALS_APART, LOAD, facts, models, spec
from benchmarks.estimator.truth import Happened, Kind, TrueInstance, happenings
from benchmarks.estimator.workloads import MODEL, SLO, Arrival, arrivals, stretched

from predicted_times import group_times
from qlm_agent.engines.simulated.timing import ATTENTION_SHARE
from qlm_core.prediction.prediction_views import GroupView, QueueView
from qlm_core.profiles.profile import ProfileSnapshot
from qlm_core.profiles.workload_profile import WorkloadProfile
from qlm_core.vocabulary.group import prompt_class, slo_class
from qlm_estimator.lengths.classes import LengthLearner
from qlm_load.workload.trace import TraceRow

REQUESTS = 1_500
EVERY = 5
ERROR_MAX = 0.03
SHARED_PREFIX = 1_008
WARM_SHARE = 0.3
"""The engine fills up in this share of the requests."""


class Known(Follower):
    """Predicts with the distributions that the requests were drawn from."""

    known: ProfileSnapshot

    @property
    def snapshot(self) -> ProfileSnapshot:
        return self.known


class Learned(Known):
    """As it, but with the uncached shares of prompts that the estimator learned by now."""

    @property
    def snapshot(self) -> ProfileSnapshot:
        learned = self._machine.snapshot
        rows = (replace(row, uncached_share=learned.workload_for(*row.key).uncached_share) for row in self.known.workload)
        return replace(self.known, workload=tuple(rows))


def _requests(prompt: float, output: float, *, together: float = 1.0, spread: float = 0.5) -> tuple[Arrival, ...]:
    """Lognormal lengths with these means; `together`: requests of a burst."""
    rng = np.random.default_rng(3)

    def lengths(mean: float) -> Floats:
        return mean * np.exp(rng.normal(-(spread**2) / 2.0, spread, REQUESTS))

    gaps = np.where(rng.random(REQUESTS) < 1.0 / together, rng.exponential(together, REQUESTS), 0.01)
    rows = zip(np.cumsum(gaps).tolist(), lengths(prompt).tolist(), lengths(output).tolist(), strict=True)
    return arrivals([TraceRow(arrival_s=at_s, input_tokens=max(1, round(p)), output_tokens=max(1, round(o))) for at_s, p, o in rows])


def _workload(requests: tuple[Arrival, ...]) -> tuple[WorkloadProfile, ...]:
    learner = LengthLearner(memory=1e9, rows_max=4_096)
    for request in requests:
        classes = learner.classes(MODEL, slo_class(SLO), prompt_class(request.prompt_tokens))
        learner.finish(classes, request.prompt_tokens, request.output_tokens)
    return learner.profiles()


@pytest.mark.parametrize(
    ("requests", "batch_max", "kv_tokens"),
    [
        (_requests(2_400.0, 30.0), 256, None),
        (_requests(2_400.0, 30.0, together=40.0), 256, None),
        (_requests(500.0, 4.0), 256, None),
        (_requests(300.0, 300.0, spread=0.3), 8, None),
        (_requests(1_000.0, 300.0), 256, 60_000),
        (_requests(300.0, 300.0), 256, 20_000),
        (_requests(1_000.0, 300.0), 256, 16_000),
        (_requests(500.0, 200.0), 256, None),
    ],
    ids=[
        "prefill-bound",
        "prefill-bound bursts",
        "tiny outputs",
        "small batches",
        "KV is the limit",
        "KV for thirty of long outputs",
        "KV for eight",
        "full batches",
    ],
)
def test_waits_are_right_where_lengths_are_known(requests: tuple[Arrival, ...], batch_max: int, kv_tokens: int | None) -> None:
    predicted_s, actual_s = _waits(Known, requests, batch_max, kv_tokens)
    assert predicted_s == pytest.approx(actual_s, rel=ERROR_MAX)


@pytest.mark.parametrize("output", [30.0, 200.0], ids=["prefill-bound", "full batches"])
def test_waits_behind_cached_prompts_are_right_once_the_share_is_learned(output: float) -> None:
    predicted_s, actual_s = _waits(Learned, _alike(output), shared_prefix=SHARED_PREFIX, after_ends=50)
    assert predicted_s == pytest.approx(actual_s, rel=ERROR_MAX)


def test_waits_behind_cached_prompts_are_far_too_long_for_whole_ones() -> None:
    predicted_s, actual_s = _waits(Known, _alike(30.0), shared_prefix=SHARED_PREFIX, after_ends=50)
    assert predicted_s > 1.3 * actual_s


def _alike(output: float) -> tuple[Arrival, ...]:
    """Prompts of 2,400 tokens share 1,008."""
    own = _requests(2_400.0 - SHARED_PREFIX, output)
    return tuple(replace(each, prompt_tokens=each.prompt_tokens + SHARED_PREFIX) for each in own)


def _waits(
    follows: type[Known],
    requests: tuple[Arrival, ...],
    batch_max: int = 256,
    kv_tokens: int | None = None,
    *,
    shared_prefix: int = 0,
    after_ends: int | None = None,
) -> tuple[float, float]:
    """Sums of the predicted and of the actual waits. `after_ends`: the first predictions are after so many ends, else WARM_SHARE."""
    (row,) = (model.profile for model in models().values())
    row = replace(row, kv_capacity_tokens=kv_tokens or row.kv_capacity_tokens)
    if shared_prefix:  # attention to what is cached counts more beside what is computed, and the row's is 13% above the engine's
        row = replace(row, prefill_ms_per_token_squared=ATTENTION_SHARE * row.prefill_ms_per_token)
    instance_facts = replace(facts(), batch_max=batch_max)

    def instance() -> TrueInstance:
        of = {name: replace(model, profile=row) for name, model in models().items()}
        made = TrueInstance.of(instance_facts, of, 1, bias_max=0.0, shared_prefix=shared_prefix)
        made.load(0.0, MODEL)
        return made

    at_once = [replace(request, arrival_s=0.0) for request in requests]
    capacity_s = max(_starts(at_once, instance(), lambda _: None, lambda _: None).values())
    requests, engine = stretched(requests, capacity_s / LOAD), instance()
    follower = follows(requests, [instance_facts], {MODEL: spec()}, (row,), lambda _: engine.runs.on_gpu())
    follower.known = ProfileSnapshot(version=1, made_s=0.0, hardware=(row,), workload=_workload(requests))
    predicted_s: dict[int, float] = {}
    ends = 0

    def see(happened: Happened) -> None:
        nonlocal ends
        ends += happened.kind is Kind.COMPLETED
        follower.see(happened)

    def arrive(request: Arrival) -> None:
        follower.arrive(request)
        warm = request.number >= WARM_SHARE * REQUESTS if after_ends is None else ends >= after_ends
        if request.number % EVERY == 0 and warm:
            found = follower.predict(request, request.arrival_s)
            assert found is not None
            predicted_s[request.number] = found.own_wait.mean
        follower.place(request, "one", request.number // ARRIVALS_APART)

    started_s = _starts(requests, engine, arrive, see)
    actual_s = [started_s[number] - requests[number].arrival_s for number in predicted_s]
    return math.fsum(predicted_s.values()), math.fsum(actual_s)


def test_a_model_swap_waits_for_the_last_output_of_all_classes_of_a_run() -> None:
    """Four classes of prompts with five requests each: any of the twenty may make the longest output."""
    rng = np.random.default_rng(4)
    prompts = [60, 120, 240, 480]

    def drawn(count: int) -> tuple[Arrival, ...]:
        outputs = 150.0 * np.exp(rng.normal(0.0, 0.7, count))
        return arrivals(
            [TraceRow(arrival_s=0.0, input_tokens=prompts[at % 4], output_tokens=round(made)) for at, made in enumerate(outputs)]
        )

    def group(model: str, prompt: int, waiting: int) -> GroupView:
        return GroupView(
            group_id=f"{model} {prompt}",
            model=model,
            slo_class="",
            token_class=prompt_class(prompt),
            waiting=waiting,
            waiting_prompt_tokens=waiting * prompt,
            first_deadline_s=1e9,
        )

    (row,) = (model.profile for model in models().values())
    served = {MODEL: spec(), "other": replace(spec(), name="other")}
    groups = (*(group(MODEL, prompt, 5) for prompt in prompts), group("other", 60, 1))
    instance_facts = replace(facts(), models=tuple(served))
    view = QueueView(instance=instance_facts, active_model=MODEL, running=0, groups=groups, warm_models=("other",))
    profiles = ProfileSnapshot(version=1, made_s=0.0, hardware=(row,), workload=_workload(drawn(4_000)))
    expected_s = group_times(view, served, profiles)[-1].wait.mean - row.swap_s(warm=True)

    ran_s: list[float] = []
    for seed in range(40):
        engine = TrueInstance.of(instance_facts, models(), seed, bias_max=0.0)
        engine.load(0.0, MODEL)
        for request in drawn(20):
            engine.append(request)
        at_s = {happened.kind: happened.at_s for happened in happenings((), {"one": engine}, lambda _: "one")}
        ran_s.append(at_s[Kind.COMPLETED] - at_s[Kind.SWAPPED])
    assert expected_s == pytest.approx(math.fsum(ran_s) / len(ran_s), rel=0.06)


def _starts(
    requests: tuple[Arrival, ...] | list[Arrival],
    instance: TrueInstance,
    arrive: Callable[[Arrival], None],
    see: Callable[[Happened], None],
) -> dict[int, float]:
    """When each request started."""

    def assign(request: Arrival) -> str:
        arrive(request)
        instance.append(request)
        return "one"

    found: dict[int, float] = {}
    for happened in happenings(requests, {"one": instance}, assign):
        see(happened)
        if happened.kind is Kind.STARTED:
            found[happened.number] = happened.at_s
    return found
