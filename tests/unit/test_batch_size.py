"""How many requests run at once: `qlm_core.operations.batch_size`, against the step-accurate engine where it predicts steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_core.operations.batch_size import (
    MUCH_WORSE,
    NOT_COUNTED,
    THROUGHPUT_SHARE,
    BatchChoice,
    ClassDemand,
    _Course,
    _course,
    sizes,
    step_s,
)
from qlm_core.profiles.profile import WORKLOAD_PRIOR
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.statistics.length_curve import BINS, LengthCurve, curve_of_moments
from simulated_steps import make, run

MISTRAL = next(row for row in shipped_snapshot().hardware if row.key == ("A100-80GB", 1, "Mistral-7B"))


OUTPUTS = WORKLOAD_PRIOR.output_curve()


def demand(
    slo_s: float, arrivals_per_s: float, *, waiting: Sequence[tuple[float, int]] = (), running: int = 20, first_token: bool = False
) -> ClassDemand:
    """A class of which some run, each half-way to its deadline."""
    return ClassDemand(
        slo_s=slo_s,
        first_token=first_token,
        arrivals_per_s=arrivals_per_s,
        running=[(float(number), slo_s / 2) for number in range(running)],
        waiting=waiting,
        prompt_tokens=WORKLOAD_PRIOR.prompt_tokens_mean,
        outputs=OUTPUTS,
    )


def settled(*demands: ClassDemand, batch_max: int = 256, slowdown: float = 1.0, others: int = 0) -> float:
    """The mean of the last twenty of sixty choices."""
    choice = BatchChoice(batch_max)
    found = [choice.choose(MISTRAL, demands, slowdown=slowdown, others=[(0.0, others)]) for _ in range(60)]
    return sum(found[-20:]) / 20


def served_per_s(sequences: float) -> float:
    prompt, output = WORKLOAD_PRIOR.prompt_tokens_mean, WORKLOAD_PRIOR.output_tokens_mean
    return sequences / (output * step_s(MISTRAL, sequences, prompt, output))


CHAT, MINUTE, HOUR = demand(20.0, 3.0), demand(60.0, 1.5), demand(3600.0, 1.5)


LENGTHS = [(1_000, 200), (2_000, 25), (100, 400)]
CASES = [(sequences, *lengths) for sequences in (1, 16, 64, 256) for lengths in LENGTHS if sequences * lengths[0] <= 2_048 * lengths[1]]


@pytest.mark.parametrize(("sequences", "prompt", "output"), CASES)
def test_a_step_takes_as_long_as_on_the_step_accurate_engine(sequences: int, prompt: int, output: int) -> None:
    """With arrivals going on: each request that ends is replaced at once, where steps take in so many prompts. Known lengths, no bias, no
    noise."""

    def duration(decoding: int, context: int, prefills: Sequence[tuple[int, int]]) -> float:
        decode_s = MISTRAL.decode_step_s(decoding, context) if decoding else 1e-3 * MISTRAL.prefill_base_ms
        return decode_s + MISTRAL.prefill_work_s(sum(tokens for _, tokens in prefills))

    engine = make(duration, kv=1_000_000, batch_max=sequences, chunk=2_048)  # type: ignore[arg-type]
    for number in range(1, sequences + 1):
        # Ages of a batch that has gone on for long: evenly spread.
        engine.add(0.0, run(str(number), prompt, 1 + number * output // sequences))
    now_s, warm = 0.0, 2 * sequences
    ends: list[float] = []
    while len(ends) < 5 * sequences + 8:
        assert engine.next_due_s is not None
        now_s = max(now_s, engine.next_due_s)
        engine.advance(now_s)
        for each in engine.news():
            if each.done:
                ends.append(now_s)
                engine.add(now_s, run(str(sequences + len(ends)), prompt, output))
    served_s = (ends[-1] - ends[warm]) / (len(ends) - 1 - warm)
    linear = replace(MISTRAL, prefill_ms_per_token_squared=0.0)
    assert step_s(linear, sequences, prompt, output) == pytest.approx(served_s * sequences / output, rel=0.05)


def test_prefills_of_new_seats_delay_running_requests_as_on_the_step_accurate_engine() -> None:
    """150 prompts of 1,100 tokens behind 100 running requests that outlast the prefills. Known lengths, no bias, no noise."""

    def duration(decoding: int, context: int, prefills: Sequence[tuple[int, int]]) -> float:
        decode_s = MISTRAL.decode_step_s(decoding, context) if decoding else 0.0
        return decode_s + MISTRAL.prefill_work_s(sum(tokens for _, tokens in prefills))

    engine = make(duration, kv=1_000_000, batch_max=256, chunk=2_048)  # type: ignore[arg-type]
    for number in range(100):
        engine.add(0.0, run(str(number + 1), 16, 140))
    engine.advance(0.0)
    assert engine.next_due_s is not None
    began_s = now_s = engine.next_due_s
    engine.advance(now_s)
    for number in range(150):
        engine.add(now_s, run(str(number + 101), 1_100, 800))
    while engine.running > 150 or engine.waiting:
        now_s = engine.next_due_s or now_s
        engine.advance(now_s)
    arrival = (0.0, 1e6, 800.0, 800.0, MISTRAL.prefill_work_s(1_100.0), 0.0)
    course = _Course(
        running=np.array([[139.0] * 100, [now_s - began_s] * 100]),
        arrivals=np.array([arrival] * 150).T,
        horizon_s=1.0,
        base_s=MISTRAL.decode_step_s(0.0, 0.0),
        decode_s=MISTRAL.decode_step_s(1.0, 600.0) - MISTRAL.decode_step_s(0.0, 0.0),
        seat_s=0.0,
        prefilling_s=0.0,
        thinned=1.0,
        seats_max=256.0,
        share=1.0,
        due=0.0,
        later=0.0,
        outputs_s=1.0,
    )

    def in_time(factor: float) -> int:
        """How many of the running requests end in time if they are due after so many times the engine's seconds."""
        later = replace(course, running=course.running * [[1.0], [factor]])
        return later._simulate(250, 256)[0] - 150

    assert (in_time(0.95), in_time(1.05)) == (0, 100)


def test_without_deadlines_or_with_time_to_spare_the_batch_is_the_largest() -> None:
    assert settled() == 256
    assert settled(demand(math.inf, 5.0)) == 256
    assert settled(demand(5.0, 5.0, first_token=True), demand(math.inf, 5.0)) == 256
    assert settled(HOUR) == 256
    assert settled(demand(60.0, 0.5, running=8)) == 256


def test_outstanding_prefills_delay_running_requests() -> None:
    courses = [_course(1, MISTRAL, [replace(demand(20.0, 0.0), prefilling=count)], 256, 1.0, ()) for count in (0, 1_000)]
    in_time = [course.values([256])[0] for course in courses]
    assert in_time[0] > 0.5 > in_time[1]


def test_chat_among_patient_requests_gets_a_batch_that_is_fast_enough() -> None:
    """A cell with one model on two GPUs, of which one has half of the arrivals: the best by hand is 32 to 48."""
    assert 24 <= settled(CHAT, MINUTE, HOUR) <= 48


def test_what_comes_due_makes_the_batch_larger() -> None:
    later, soon = demand(3600.0, 1.5, waiting=[(1_800.0, 400)]), demand(3600.0, 1.5, waiting=[(60.0, 400)])
    assert settled(CHAT, soon) > 1.3 * settled(CHAT, later)


def test_what_waits_long_before_it_is_due_makes_the_batch_larger() -> None:
    """Else a queue of patient requests grows at light load until all of them are due at once."""
    found = [settled(CHAT, demand(300.0, 1.5, waiting=[(250.0, count)])) for count in (0, 200, 400, 800)]
    assert found == sorted(found)
    assert found[-2] > 1.3 * found[0]
    assert found[-1] > 2.0 * found[0]


def test_patient_requests_have_their_turn_while_urgent_ones_leave_room() -> None:
    """In a short overload too: without it, the small batch lets the queue grow until all of it is due."""
    patient = demand(300.0, 0.6 * served_per_s(256), running=0)
    soon, later = replace(patient, waiting=[(250.0, 400)]), replace(patient, waiting=[(25_000.0, 400)])
    some, all_seats = (demand(20.0, share * served_per_s(256)) for share in (0.6, 1.2))
    assert settled(some, soon) > 1.5 * settled(some, later)
    assert settled(all_seats, soon) < 1.3 * settled(all_seats, later)


def test_requests_that_will_be_late_hold_up_nobody() -> None:
    """Served by their deadlines they would be first, and all others late."""
    assert settled(demand(20.0, 3.0, waiting=[(2.0, 300)]), HOUR) < 64


def test_where_all_are_late_throughput_decides() -> None:
    late = replace(demand(20.0, 0.0, waiting=[(-5.0, 400)]), running=[(float(number), -3.0) for number in range(64)])
    assert served_per_s(settled(late)) >= 0.9 * served_per_s(256)


def test_in_mixed_overload_most_of_the_throughput_stays() -> None:
    over = [demand(20.0, 4.5, waiting=[(10.0, 40)]), demand(60.0, 2.3, waiting=[(30.0, 100)]), demand(300.0, 2.3, waiting=[(150.0, 500)])]
    assert served_per_s(settled(*over)) >= 0.8 * served_per_s(256)


def test_beside_models_that_wait_throughput_counts() -> None:
    """The matrix's cell of six models on two A100s, in time: 70% as with the largest batch, 49% where only its own requests counted."""
    sizes_of = [settled(CHAT, MINUTE, HOUR, others=others) for others in (0, 60, 600)]
    assert sizes_of == sorted(sizes_of)
    assert served_per_s(sizes_of[-1]) > 0.9 * served_per_s(256)


def test_models_whose_requests_are_due_much_later_change_nothing() -> None:
    alone, beside = BatchChoice(256), BatchChoice(256)
    for _ in range(5):
        found = beside.choose(MISTRAL, (CHAT, MINUTE, HOUR), others=[(3600.0, 600)])
        assert found == alone.choose(MISTRAL, (CHAT, MINUTE, HOUR))


def test_one_course_does_not_move_the_batch_far() -> None:
    """Each course by itself has another best size, from 13 to 51."""
    choice = BatchChoice(256)
    found = [choice.choose(MISTRAL, (CHAT, MINUTE, HOUR)) for _ in range(60)][20:]
    assert max(found) <= 2 * min(found)


def test_the_batch_is_no_larger_than_its_kv() -> None:
    """Above the requests that have room in KV all sizes are the same, so the largest is taken for a class that has time."""
    small = replace(MISTRAL, kv_capacity_tokens=20_000)
    choice = BatchChoice(256)
    assert [choice.choose(small, [demand(600.0, 1.0)]) for _ in range(20)][-1] == 256


def test_equal_calls_have_equal_results() -> None:
    first, second = BatchChoice(256), BatchChoice(256)
    for _ in range(30):
        assert first.choose(MISTRAL, [CHAT, MINUTE]) == second.choose(MISTRAL, [CHAT, MINUTE])


@pytest.mark.parametrize("batch_max", [1, 2, 7, 256, 1_000])
def test_sizes_differ_by_a_quarter(batch_max: int) -> None:
    found = sizes(batch_max)
    assert (found[0], found[-1]) == (1, batch_max)
    assert all(low < high <= 1.3 * low + 1.0 for low, high in pairwise(found))


@given(shares=st.lists(st.sampled_from([0.0, 0.0, 1e-12, 0.3, 1.0, 40.0]), min_size=BINS, max_size=BINS).filter(any))
@settings(max_examples=30)
def test_quantiles_of_many_are_those_of_each(shares: list[float]) -> None:
    curve, levels = LengthCurve(np.array(shares)), (np.arange(50) + 0.5) / 50
    assert curve.quantile_of(levels).tolist() == [curve.quantile(level) for level in levels.tolist()]


def whole_simulation(course: _Course, size: int) -> tuple[float, float]:
    """The value of a size and the most requests that run, by a simulation that goes on until all that count have ended."""
    limit, most = (max(1.0, seats / course.thinned) for seats in (min(size, course.seats_max), course.seats_max))
    arrivals = sorted(zip(*course.arrivals.tolist(), strict=True))
    seats, waiting, late = list(zip(*course.running.tolist(), strict=True)), list[tuple[float, int]](), list[int]()
    heapify(seats)
    now_s, clock = course.prefilling_s, 0.0
    come, in_time = 0, 0
    counted = sum(start_s < course.horizon_s for start_s, *_ in arrivals)
    requests = unsettled = counted + sum(due_s != NOT_COUNTED for _, due_s in seats)
    peak = len(seats) if requests else 0
    while requests:
        while come < len(arrivals) and arrivals[come][0] <= now_s:
            heappush(waiting, (arrivals[come][1], come))
            come += 1
        if waiting:
            due_s, index = waiting[0]
            _, _, tokens, expected, prefill_s, first_token = arrivals[index]
            token_s = course.base_s + course.decode_s * (len(seats) + 1)
            if now_s + prefill_s + (token_s if first_token else expected * token_s) > due_s:
                late.append(heappop(waiting)[1])
                unsettled -= index < counted
                continue
            if len(seats) < (most if first_token else limit):
                in_time += bool(first_token) and index < counted
                unsettled -= bool(first_token) and index < counted
                heappush(seats, (clock + tokens, NOT_COUNTED if first_token or index >= counted else due_s))
                heappop(waiting)
                now_s += prefill_s
                continue
        if late and len(seats) < limit:
            _, _, tokens, _, prefill_s, _ = arrivals[late.pop()]
            heappush(seats, (clock + tokens, NOT_COUNTED))
            now_s += prefill_s
            if unsettled:
                continue
            break
        peak = max(peak, len(seats))
        if not unsettled:
            break
        next_s = arrivals[come][0] if come < len(arrivals) else math.inf
        if not seats:
            now_s = next_s
            continue
        token_s = course.base_s + course.decode_s * len(seats)
        end_s = now_s + (seats[0][0] - clock) * token_s
        if next_s < end_s:
            clock += (next_s - now_s) / token_s
            now_s = next_s
        else:
            clock, due_s = heappop(seats)
            now_s = end_s
            in_time += due_s != NOT_COUNTED and now_s <= due_s
            unsettled -= due_s != NOT_COUNTED
    throughput = (course.base_s / most + course.seat_s) / (course.base_s / max(1, min(limit, peak)) + course.seat_s)
    kept = in_time - course.postponed(limit, most)
    return course.share * kept / max(1, requests) + max(THROUGHPUT_SHARE, 1.0 - course.share) * throughput, peak * course.thinned


@given(
    classes=st.lists(
        st.tuples(
            st.sampled_from([2.0, 20.0, 60.0, 300.0, 3_600.0, 1e9]),
            st.booleans(),
            st.sampled_from([0.0, 0.5, 3.0, 50.0]),
            st.lists(st.tuples(st.floats(-0.3, 1.0), st.integers(1, 200)), max_size=4),
            st.integers(0, 60),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(1, 1_000),
    batch_max=st.sampled_from([1, 7, 64, 256]),
    others=st.sampled_from([[], [(5.0, 40)]]),
)
@settings(max_examples=40)
def test_settled_requests_change_no_value(
    classes: list[tuple[float, bool, float, list[tuple[float, int]], int]], seed: int, batch_max: int, others: list[tuple[float, int]]
) -> None:
    """Sizes are compared as by simulations of all requests to their ends, though those end early that no size decides."""
    demands = [
        demand(slo_s, rate, waiting=[(part * slo_s, count) for part, count in waiting], running=running, first_token=first)
        for slo_s, first, rate, waiting, running in classes
    ]
    course = _course(seed, MISTRAL, demands, batch_max, 1.0, others)
    expected: list[float] = []
    value, peak = 0.0, math.inf
    for size in reversed(sizes(batch_max)):
        if size < peak and (not expected or value > max(expected) - MUCH_WORSE):
            value, peak = whole_simulation(course, size)
        expected.append(value)
    assert course.values(sizes(batch_max)) == expected[::-1]


@given(
    slos_s=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=6),
    rate=st.floats(0.0, 1e4),
    waiting=st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100_000)), max_size=4),
    running=st.integers(0, 300),
    mean=st.floats(1.0, 1e5),
    batch_max=st.integers(1, 4_096),
    slowdown=st.floats(0.01, 100.0),
    others=st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 100_000)), max_size=4),
)
@settings(max_examples=60)
def test_the_size_is_always_one_that_the_engine_allows(
    slos_s: list[float],
    rate: float,
    waiting: list[tuple[float, int]],
    running: int,
    mean: float,
    batch_max: int,
    slowdown: float,
    others: list[tuple[float, int]],
) -> None:
    outputs = curve_of_moments(mean, mean**2)
    demands = [
        replace(demand(slo_s, rate, waiting=waiting, running=running, first_token=number % 3 == 2), outputs=outputs)
        for number, slo_s in enumerate(slos_s)
    ]
    choice = BatchChoice(batch_max)
    for _ in range(6):
        assert 1 <= choice.choose(MISTRAL, demands, slowdown=slowdown, others=others) <= batch_max
