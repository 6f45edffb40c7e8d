"""Predictions and learned slowdowns against a tiny exact simulation of continuous batching.

The simulation below shares no formula with the predictions: it decodes token by token, prefills in chunks and admits requests in order
while their KV fits. Requests come from a seed.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from predicted_times import GroupTime, group_times, predict_request
from qlm_core.prediction.prediction_service import service
from qlm_core.prediction.prediction_views import GroupView, QueueView, RunningView
from qlm_core.profiles.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.distribution import Normal
from qlm_core.vocabulary.instance import InstanceFacts
from qlm_core.vocabulary.model import ModelSpec
from qlm_estimator.events import GroupClass, Lifecycle, LifecycleKind, QueueSeen, Tick
from qlm_estimator.machine import EstimatorMachine, Learning

SHIPPED = shipped_snapshot()
ROWS = {row.key: row for row in SHIPPED.hardware}
CHUNK_TOKENS = 2_048
BATCH_MAX = 256


@dataclass(slots=True)
class _Request:
    number: int
    arrival_s: float
    prompt: int
    output: int
    prefill_left: int = 0
    produced: int = 0
    started_s: float = 0.0
    first_token_s: float = 0.0
    ended_s: float = 0.0


def _steps(
    row: HardwareProfile,
    requests: list[_Request],
    *,
    slowdown: Callable[[], float] = lambda: 1.0,
    report: Callable[[str, float, _Request], None] = lambda _kind, _at_s, _request: None,
) -> None:
    """Serves the requests in order; fills in when each started (its prefill) and ended."""
    now_s, arrivals, waiting, batch = 0.0, deque(requests), deque[_Request](), list[_Request]()
    while arrivals or waiting or batch:
        while arrivals and (arrivals[0].arrival_s <= now_s or not (waiting or batch)):
            now_s = max(now_s, arrivals[0].arrival_s)
            waiting.append(arrivals.popleft())
        held = sum(each.prompt + each.produced for each in batch)
        while waiting and len(batch) < BATCH_MAX and (not batch or held + waiting[0].prompt <= row.kv_capacity_tokens):
            request = waiting.popleft()
            request.prefill_left = request.prompt
            held += request.prompt
            batch.append(request)
            report("pulled", now_s, request)
        decoding = [each for each in batch if not each.prefill_left]
        prefilled, budget = list[_Request](), CHUNK_TOKENS
        for request in batch:
            if request.prefill_left and budget:
                if request.prefill_left == request.prompt:
                    request.started_s = now_s
                chunk = min(budget, request.prefill_left)
                budget -= chunk
                request.prefill_left -= chunk
                if not request.prefill_left:
                    prefilled.append(request)
        ms = row.prefill_ms_per_token * (CHUNK_TOKENS - budget)
        if decoding:
            context = sum(each.prompt + each.produced for each in decoding)
            ms += row.decode_a_ms + row.decode_b_ms_per_seq * len(decoding) + row.decode_c_ms_per_context_token * context
        else:
            ms += row.prefill_base_ms
        now_s += ms / 1e3 * slowdown()
        for request in prefilled:
            request.first_token_s = now_s
        for request in (*decoding, *prefilled):
            request.produced += 1
            if request.produced == request.output:
                request.ended_s = now_s
                batch.remove(request)
                report("completed", now_s, request)


def _requests(count: int, seed: int, *, spread: float, rate_per_s: float = 0.0) -> list[_Request]:
    """Prompts of 50 to 1,500 tokens, outputs of 211 in the mean with a standard deviation of `spread` of that."""
    rng = random.Random(seed)
    made: list[_Request] = []
    arrival_s = 0.0
    for number in range(count):
        output = max(1, round(rng.gammavariate(spread**-2, 211 * spread**2))) if spread else 211
        arrival_s += rng.expovariate(rate_per_s) if rate_per_s else 0.0
        made.append(_Request(number, arrival_s, rng.randint(50, 1_500), output))
    return made


def _moments(values: list[int]) -> Normal:
    mean = sum(values) / len(values)
    return Normal(mean, sum((value - mean) ** 2 for value in values) / len(values))


PAIRS = [("A100-80GB", 1, "Mistral-7B"), ("A10", 1, "Mistral-7B"), ("A100-80GB", 1, "Vicuna-13B")]


@pytest.mark.parametrize("key", PAIRS)
@pytest.mark.parametrize("spread", [0.0, 0.77, 1.0])
def test_a_long_queue_takes_its_service_time(key: tuple[str, int, str], spread: float) -> None:
    """Where the engine is full nearly all the time, n requests end after n times their work, up to the last batch."""
    row, requests = ROWS[key], _requests(1_500, 3, spread=spread)
    _steps(row, requests)
    outputs = _moments([each.output for each in requests])
    work_s = service(sum(each.prompt for each in requests) / len(requests), outputs, row).work.mean
    starts = [each.started_s for each in requests]
    half_s = starts[-1] - starts[len(starts) // 2]
    # Equal outputs end together, so the batch comes in waves and half of the queue is no whole number of them.
    assert half_s == pytest.approx(len(requests) * work_s / 2, rel=0.06 if spread else 0.12)


@pytest.mark.parametrize("key", PAIRS)
@pytest.mark.parametrize("spread", [0.0, 0.77, 1.0])
@pytest.mark.parametrize("count", [1, 20, 200, 1_000])
def test_a_group_starts_and_ends_as_the_steps_do(key: tuple[str, int, str], spread: float, count: int) -> None:
    row, requests = ROWS[key], _requests(count, 5, spread=spread)
    _steps(row, requests)
    outputs = _moments([each.output for each in requests])
    (time,) = _queue(row, outputs, running=0, prompts=[each.prompt for each in requests])
    mean_end_s = sum(each.ended_s for each in requests) / count
    assert time.last_wait.mean == pytest.approx(requests[-1].started_s, rel=0.2, abs=1.5)
    assert (time.first_completion.mean + time.last_completion.mean) / 2 == pytest.approx(mean_end_s, rel=0.35)
    assert time.completion.mean == pytest.approx(max(each.ended_s for each in requests), rel=0.3)
    if count == 1:
        assert time.completion.mean == pytest.approx(requests[0].ended_s, rel=0.02)


@pytest.mark.parametrize("beside", [0, 1, 50, 150])
@pytest.mark.parametrize("prompt", [2_048, 16_384])
def test_a_prefill_takes_its_tokens_and_the_steps_of_its_chunks(beside: int, prompt: int) -> None:
    """One that comes while others decode: from its start to its first token."""
    row = replace(ROWS[PAIRS[0]], prefill_ms_per_token_squared=0.0)
    requests = [*(_Request(number, 0.0, 500, 1_000) for number in range(beside)), _Request(beside, 10.0, prompt, 1)]
    _steps(row, requests)
    (time,) = _queue(row, Normal(1_000.0), running=beside, prompts=[prompt])
    assert time.prefill_s == pytest.approx(requests[-1].ended_s - requests[-1].started_s, rel=0.05)


@pytest.mark.parametrize("beside", [20, 64, 128])
def test_a_batch_that_fills_up_waits_less_than_a_full_one(beside: int) -> None:
    """200 come to an engine that runs some: of the work ahead so much is in flight as a full batch holds by then, not what runs now."""
    row, output = replace(ROWS[PAIRS[0]], prefill_ms_per_token_squared=0.0), Normal(211.0, 163.0**2)
    shape, scale = output.mean**2 / output.variance, output.variance / output.mean
    starts: list[float] = []
    for seed in range(4):
        rng = random.Random(seed)
        # The rest of a running output: a part, any is as likely, of one drawn by its length.
        left = [max(1, round(rng.random() * rng.gammavariate(shape + 1.0, scale))) for _ in range(beside)]
        requests = [_Request(number, 0.0, 1, tokens) for number, tokens in enumerate(left)]
        requests += [_Request(beside + number, 0.0, 500, max(1, round(rng.gammavariate(shape, scale)))) for number in range(200)]
        _steps(row, requests)
        starts.append(requests[-1].started_s)
    (time,) = _queue(row, output, running=beside, prompts=[500] * 200)
    assert time.last_wait.mean == pytest.approx(sum(starts) / len(starts), rel=0.15)


def _snapshot(row: HardwareProfile, output: Normal, prompt_tokens: float = 500.0) -> ProfileSnapshot:
    workload = WorkloadProfile(
        model="m",
        prompt_tokens_mean=prompt_tokens,
        prompt_tokens_variance=0.0,
        output_tokens_mean=output.mean,
        output_tokens_variance=output.variance,
        samples=10**9,
    )
    return ProfileSnapshot(version=1, made_s=0.0, hardware=(row,), workload=(workload,))


def _instance(row: HardwareProfile) -> InstanceFacts:
    return InstanceFacts(name="i", incarnation="i/1", gpu=row.gpu, n_gpu=row.n_gpu, engine="simulated", models=("m",), batch_max=BATCH_MAX)


def _group(prompts: list[int]) -> GroupView:
    return GroupView(
        group_id="g",
        model="m",
        slo_class="",
        token_class="",
        waiting=len(prompts),
        waiting_prompt_tokens=sum(prompts),
        first_deadline_s=0.0,
    )


def _queue(row: HardwareProfile, output: Normal, *, running: int, prompts: list[int]) -> tuple[GroupTime, ...]:
    """The times of one group behind requests with prompts of 500 tokens that run."""
    view = QueueView(instance=_instance(row), active_model="m", running=running, groups=(_group(prompts),))
    return group_times(view, {"m": ModelSpec(name="m", profile=row.model)}, _snapshot(row, output))


@pytest.mark.parametrize("key", PAIRS[:1])
@pytest.mark.parametrize("bias", [0.86, 1.0, 1.15])
@pytest.mark.parametrize(("rate_per_s", "error"), [(1.0, 0.03), (0.0, 0.08)])
def test_a_hidden_bias_is_learned(key: tuple[str, int, str], bias: float, rate_per_s: float, error: float) -> None:
    """From lifecycle events alone, at another time scale, with 5% of noise on each step, under a steady load and from a burst."""
    learned = _learned(key, _requests(600, 13, spread=0.77, rate_per_s=rate_per_s), bias)
    assert learned.samples > 200
    assert learned.slowdown == pytest.approx(bias, rel=error)


@pytest.mark.parametrize("bias", [0.86, 1.15])
@pytest.mark.parametrize(
    ("prompt", "output", "rate_per_s", "error"),
    [
        (2_000, 27, 6.0, 0.03),
        (2_000, 25, 0.0, 0.03),
        (8_000, 12, 0.0, 0.06),
        (250, 900, 0.0, 0.03),
        (500, 4, 20.0, 0.06),
        (300, 200, 0.5, 0.03),
    ],
    ids=["code", "prefill-bound burst", "long prompts", "report", "tiny outputs", "small batches"],
)
def test_a_bias_is_learned_whatever_the_work_is(bias: float, prompt: int, output: int, rate_per_s: float, error: float) -> None:
    """Prompts and outputs spread about these lengths; where prefills are the work, where outputs are tiny, where few run."""
    rng = random.Random(5)
    requests = _requests(500, 13, spread=0.77, rate_per_s=rate_per_s)
    for request in requests:
        request.prompt = round(prompt * rng.uniform(0.5, 1.5))
        request.output = max(1, round(request.output * output / 211))
    learned = _learned(PAIRS[0], requests, bias)
    assert learned.slowdown == pytest.approx(bias, rel=error)


@pytest.mark.parametrize("bias", [1.15])
def test_the_kv_of_long_outputs_is_no_slowness(bias: float) -> None:
    """One of forty makes 6,000 tokens, the others 50 or so: the long ones hold most of the KV that each step reads, more and more of it."""
    requests = _requests(1_500, 17, spread=0.77, rate_per_s=4.0)
    for request in requests:
        request.output = 6_000 if request.number % 40 == 0 else 1 + request.output // 4
    learned = _learned(PAIRS[0], requests, bias)
    assert learned.samples > 200
    assert learned.slowdown == pytest.approx(bias, rel=0.03)


def _learned(key: tuple[str, int, str], requests: list[_Request], bias: float) -> HardwareProfile:
    """The row that the estimator's machine learns of an instance with that bias."""
    time_scale, rng = 20.0, random.Random(11)
    row = replace(ROWS[key], prefill_ms_per_token_squared=0.0)
    instance = InstanceFacts(
        name="i", incarnation="i/1", gpu=key[0], n_gpu=key[1], engine="simulated", models=("m",), time_scale=time_scale
    )
    machine = EstimatorMachine(learning=Learning(), catalogue={"m": ModelSpec(name="m", profile=key[2])}, shipped=(row,))
    began_s = 1_700_000_000.0
    groups = {"g": GroupClass(model="m", slo_class="32s")}
    machine.step(began_s, QueueSeen(last_event=(int(began_s * 1e3), 0), instances=(instance,), running={}, groups=groups))
    serial = 0

    def report(kind: str, at_s: float, request: _Request) -> None:
        nonlocal serial
        serial += 1
        event_s = began_s + at_s / time_scale
        machine.step(
            event_s,
            Lifecycle(
                kind=LifecycleKind(kind),
                entry_id=(int(event_s * 1e3), serial),
                index=0,
                queue_id=str(request.number),
                group_id="g",
                incarnation="i/1",
                attempt=1,
                prompt_tokens=request.prompt,
                model="m" if kind == "completed" else "",
                output_tokens=request.produced,
                first_token_s=began_s + request.first_token_s / time_scale if kind == "completed" else 0.0,
                finished_s=event_s,
            ),
        )

    _steps(row, requests, slowdown=lambda: bias * rng.lognormvariate(0, 0.05), report=report)
    machine.step(began_s + 1e6, Tick())
    learned = [row for row in machine.snapshot.hardware if row.instance]
    assert [(row.instance, row.model) for row in learned] == [("i", key[2])]
    return learned[0]


@pytest.mark.parametrize(
    ("key", "rate_per_s", "prompt_factor", "lookahead", "error"),
    [
        (("A100-80GB", 1, "Mistral-7B"), 11.0, 1.0, 0, 0.1),  # just above what it can serve
        (("A100-80GB", 1, "Mistral-7B"), 11.0, 1.0, 64, 0.1),  # some of those that wait do so inside the engine
        (("A100-80GB", 1, "Mistral-7B"), 11.0, 1.0, 10_000, 0.1),  # all of them
        (("A100-80GB", 1, "Mistral-7B"), 7.0, 1.0, 0, 0.15),  # a batch that is never full
        (("A100-80GB", 1, "Mistral-7B"), 1.6, 12.0, 0, 0.15),  # prompts of 9,000 tokens: prefills set the pace
    ],
)
def test_requests_that_keep_coming(
    key: tuple[str, int, str], rate_per_s: float, prompt_factor: float, lookahead: int, error: float
) -> None:
    """Each at its arrival, from what waits and runs then and how fast they come: waits one by one, decode times in the mean."""
    row, requests = replace(ROWS[key], prefill_ms_per_token_squared=0.0), _requests(1_500, 3, spread=0.77, rate_per_s=rate_per_s)
    for request in requests:
        request.prompt = round(request.prompt * prompt_factor)
    _steps(row, requests)
    outputs = _moments([each.output for each in requests])
    instance, snapshot = _instance(row), _snapshot(row, outputs, sum(each.prompt for each in requests) / len(requests))
    waits: list[tuple[float, float]] = []
    decodes: list[tuple[float, float]] = []
    for request in requests[200:-200:10]:
        view = _at_arrival(request, requests, instance, rate_per_s, lookahead)
        found = predict_request((view,), {"m": ModelSpec(name="m", profile=key[2])}, snapshot, "m", request.prompt, 10**6, math.inf)
        assert found is not None
        waits.append((found.wait.mean, request.started_s - request.arrival_s))
        decodes.append((found.completion.mean - found.wait.mean, request.ended_s - request.started_s))
    mean_wait_s = sum(actual for _, actual in waits) / len(waits)
    if mean_wait_s > 1.0:
        residual = sum((predicted - actual) ** 2 for predicted, actual in waits)
        assert residual < 0.01 * sum((actual - mean_wait_s) ** 2 for _, actual in waits), "R2 of 0.99"
    assert sum(predicted for predicted, _ in decodes) == pytest.approx(sum(actual for _, actual in decodes), rel=error)


def _at_arrival(request: _Request, requests: list[_Request], instance: InstanceFacts, rate_per_s: float, lookahead: int) -> QueueView:
    now_s = request.arrival_s
    waiting = [each for each in requests if each.arrival_s < now_s < each.started_s]
    inside, waiting = waiting[:lookahead], waiting[lookahead:]
    running = [each for each in requests if each.arrival_s < now_s and each.started_s <= now_s < each.ended_s]
    produced = tuple(int(each.output * (now_s - each.started_s) / (each.ended_s - each.started_s)) for each in running)
    runner = RunningView(
        slo_class="",
        token_class="",
        count=len(running) + len(inside),
        produced_tokens=produced + (0,) * len(inside),
        prefill_left_tokens=sum(each.prompt for each in inside),
        lookahead=lookahead > 0,
    )
    return QueueView(
        instance=instance,
        active_model="m",
        running=runner.count,
        groups=(_group([each.prompt for each in waiting]),) if waiting else (),
        runners=(runner,),
        arrivals_per_s=rate_per_s,
    )
