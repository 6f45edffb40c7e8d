"""How the batch of an engine goes on: against sums over all lengths, and against an engine that is stepped."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predicted_times import group_times
from qlm_core.course_reader import COURSES_MAX
from qlm_core.instance import InstanceFacts
from qlm_core.length_curve import BINS, UPPERS, LengthCurve, bin_of, survivals
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import GroupView, QueueView, RunningView
from qlm_core.profile import HardwareProfile, ProfileSnapshot, WorkloadProfile
from qlm_core.queue_columns import COURSE
from qlm_core.queue_model import DECODE
from qlm_core.queue_reader import QueueReader
from qlm_core.queue_times import queue_times
from qlm_core.request_times import RequestTable
from qlm_core.running_course import KNOTS, RESERVED_GROWTH, STEPS, ages, seat_waits_by
from qlm_core.shipped_profiles import shipped_snapshot

CATALOGUE = {"chat": ModelSpec(name="chat", profile="Mistral-7B")}
A100 = InstanceFacts(name="a", incarnation="a/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("chat",))
SHORT, LONG = (300, 50), (1_000, 6_000)
"""Prompt and mean output of two classes; outputs are memoryless."""
SAMPLES = 1_000


def _row() -> HardwareProfile:
    found = shipped_snapshot().hardware_for(A100, CATALOGUE["chat"])
    assert found is not None
    return found


ROW = _row()


def _curve(*outputs: tuple[int, float]) -> LengthCurve:
    shares = np.zeros(BINS)
    for tokens, share in outputs:
        shares[bin_of(tokens)] += share
    return LengthCurve(shares)


def _lengths(curve: LengthCurve) -> tuple[np.ndarray, np.ndarray]:
    """All lengths below 2,000 tokens, with the share of each."""
    lengths = np.arange(1, 2_000)
    at = np.array([bin_of(int(each)) for each in lengths])
    width = np.diff(np.array((0, *UPPERS)))
    return lengths, curve.shares[at] / width[at]


CURVE = _curve((3, 0.2), (40, 0.3), (200, 0.4), (900, 0.1))


def test_ages_are_sums_over_all_lengths() -> None:
    found, (lengths, share) = ages(CURVE), _lengths(CURVE)
    for knot, steps in enumerate(STEPS.tolist()):
        by_then = np.minimum(lengths, steps)
        assert found[:, knot] == pytest.approx(
            [
                share[lengths > steps].sum(),
                (share * np.maximum(lengths - steps, 0.0)).sum(),
                (share * by_then).sum(),
                (share * by_then**2).sum() / 2.0,
            ],
            abs=1e-9,
        )


@pytest.mark.parametrize("made", [0, 1, 17, 60, 300])
def test_survivals_follow_the_lengths_that_are_known(made: int) -> None:
    lengths, share = _lengths(CURVE)
    further = np.array([0.0, 1.0, 16.0, 100.0, 900.0])
    found = survivals([CURVE], np.array([1e12]), np.array([0]), np.array([float(made)]), further)
    beyond = share[lengths > made].sum()
    assert found[0] == pytest.approx([share[lengths > made + each].sum() / beyond for each in further.tolist()], abs=1e-6)


def test_one_that_outlived_all_that_is_known_may_become_twice_as_long() -> None:
    mean = CURVE.output_tokens.mean
    found = survivals([CURVE], np.array([1e3]), np.array([0]), np.array([5_000.0]), np.array([5_000.0 + mean]))
    assert found[0, 0] == pytest.approx(0.5, rel=1e-3)


@given(st.integers(0, 20_000), st.floats(0.0, 1e5), st.lists(st.floats(0.0, 1e5), min_size=2, max_size=8))
@settings(max_examples=100, deadline=None)
def test_survivals_only_fall(made: int, samples: float, further: list[float]) -> None:
    steps = np.array(sorted(further))
    found = survivals([CURVE], np.array([samples]), np.array([0]), np.array([float(made)]), steps)[0]
    assert ((found >= 0.0) & (found <= 1.0 + 1e-12)).all()
    assert (np.diff(found) <= 1e-12).all()


# Against an engine that is stepped ------------------------------------------------------------------------------------


def _snapshot() -> ProfileSnapshot:
    rows = [
        WorkloadProfile(
            model="chat",
            slo_class="64s",
            token_class=name,
            prompt_tokens_mean=prompt,
            prompt_tokens_variance=0.0,
            output_tokens_mean=output,
            output_tokens_variance=output * output,
            samples=SAMPLES * 100,
        )
        for name, (prompt, output) in (("short", SHORT), ("long", LONG))
    ]
    usual = replace(rows[0], slo_class="", token_class="")
    return ProfileSnapshot(version=1, made_s=0.0, hardware=(ROW,), workload=(usual, *rows))


SNAPSHOT = _snapshot()


def _view(short: int, long: int, made: int, waiting: int, told: bool = True) -> QueueView:
    """A batch of new short requests, of which some have made a little, and of long ones that have made so much; more short ones wait."""
    produced = {"short": tuple(10 for _ in range(short)), "long": tuple(made + 37 * number for number in range(long))}
    runners = tuple(
        RunningView(
            slo_class="64s",
            token_class=name,
            count=len(each),
            prompt_tokens=len(each) * prompt,
            produced_tokens=each if told else (),
        )
        for (name, each), (prompt, _) in zip(produced.items(), (SHORT, LONG), strict=True)
        if each
    )
    groups = tuple(
        GroupView(
            group_id=str(number),
            model="chat",
            slo_class="64s",
            token_class="short",
            waiting=waiting // 4,
            waiting_prompt_tokens=waiting // 4 * SHORT[0],
            first_deadline_s=1e6 + number,
        )
        for number in range(4)
    )
    return QueueView(instance=A100, active_model="chat", running=short + long, groups=groups, runners=runners)


def _stepped_s(view: QueueView, chance: random.Random) -> list[float]:
    """When each of those that wait starts, as an agent pulls them: a seat, and KV for the prompt and a usual output."""

    def drawn(mean: float) -> int:
        return max(1, round(chance.expovariate(1.0 / mean)))

    running: list[tuple[int, int, int]] = []  # prompt, made, output
    for runner in view.runners:
        prompt, mean = SHORT if runner.token_class == "short" else LONG
        running += [(prompt, made, made + drawn(mean)) for made in runner.produced_tokens]
    waiting = deque((SHORT[0], 0, drawn(SHORT[1])) for group in view.groups for _ in range(group.waiting))
    now_s, starts = 0.0, list[float]()
    prefill_s = ROW.prefill_work_s(SHORT[0], SHORT[0] ** 2)
    while waiting:
        reserved = sum(prompt + _reserved(made) for prompt, made, _ in running)
        while waiting and len(running) < view.instance.batch_max and reserved + SHORT[0] + SHORT[1] <= ROW.kv_capacity_tokens:
            running.append(waiting.popleft())
            reserved += SHORT[0] + SHORT[1]
            starts.append(now_s)
            now_s += prefill_s
        now_s += ROW.decode_step_s(len(running), sum(prompt + made for prompt, made, _ in running))
        running = [(prompt, made + 1, output) for prompt, made, output in running if made + 1 < output]
    return starts


def _reserved(made: int) -> float:
    """What is reserved of an output, by its agent: the usual, and each time that it is outgrown half as much again."""
    growths = math.ceil(math.log(max(made, SHORT[1]) / SHORT[1], 1.0 + RESERVED_GROWTH))
    return SHORT[1] * (1.0 + RESERVED_GROWTH) ** growths


@pytest.mark.parametrize(
    ("short", "long", "made", "error"),
    [
        (256, 0, 0, 0.03),  # nothing long
        (236, 20, 3_000, 0.03),  # long ones make steps longer
        (100, 40, 5_000, 0.03),
        (60, 36, 7_500, 0.06),  # they hold so much that the batch is not full
        (60, 38, 7_500, 0.15),
    ],
)
def test_waits_follow_what_long_requests_hold(short: int, long: int, made: int, error: float) -> None:
    view = _view(short, long, made, 4_000)
    draws = [_stepped_s(view, random.Random(seed)) for seed in range(2)]
    found = group_times(view, CATALOGUE, SNAPSHOT)
    for group in (1, 2, 3):
        actual_s = sum(starts[(group + 1) * 1_000 - 1] for starts in draws) / len(draws)
        assert found[group].last_wait.mean == pytest.approx(actual_s, rel=error)


def test_behind_the_free_seats_the_first_ends_are_waited_for() -> None:
    view = _view(100, 2, 3_000, 1_600)
    draws = [_stepped_s(view, random.Random(seed)) for seed in range(6)]
    actual_s = sum(starts[399] for starts in draws) / len(draws)
    assert group_times(view, CATALOGUE, SNAPSHOT)[0].last_wait.mean == pytest.approx(actual_s, rel=0.03)


def test_of_many_queues_none_has_a_course() -> None:
    """They would take too long; what has been made counts all the same."""
    some = [replace(_view(100, 40, 5_000, 4_000), instance=replace(A100, name=f"a{number}")) for number in range(COURSES_MAX + 1)]
    views, groups = QueueReader(CATALOGUE, SNAPSHOT).read(some[:-1])
    assert (groups.lead[COURSE:, :].any(axis=0)).all()
    assert len(views) == COURSES_MAX
    groups = QueueReader(CATALOGUE, SNAPSHOT).read(some)[1]
    assert not groups.lead[COURSE:, :].any()
    untold = QueueReader(CATALOGUE, SNAPSHOT).read([_view(100, 40, 5_000, 4_000, told=False)])[1]
    assert groups.lead[DECODE, 0] != untold.lead[DECODE, 0]


@pytest.mark.parametrize(("short", "long", "made"), [(100, 40, 5_000), (60, 36, 7_500)])
def test_so_do_waits_inside_a_group(short: int, long: int, made: int) -> None:
    view = _view(short, long, made, 4_000)
    actual_s = sum(_stepped_s(view, random.Random(seed))[500] for seed in range(4)) / 4
    table = RequestTable.of(queue_times(QueueReader(CATALOGUE, SNAPSHOT).read([view])[1]))
    assert table.times([0], [500]).wait_s[0] == pytest.approx(actual_s, rel=0.2)


def test_without_what_they_made_the_long_ones_are_taken_for_usual() -> None:
    told, untold = (group_times(_view(60, 40, 8_000, 4_000, told), CATALOGUE, SNAPSHOT)[-1].last_wait.mean for told in (True, False))
    assert untold < 0.85 * told


def test_free_seats_are_taken_at_once() -> None:
    found = group_times(_view(100, 2, 3_000, 40), CATALOGUE, SNAPSHOT)
    assert found[-1].last_wait.mean == pytest.approx(40 * ROW.prefill_work_s(SHORT[0], SHORT[0] ** 2), abs=0.1)


@pytest.mark.parametrize(("short", "long", "made", "waiting"), [(256, 0, 0, 400), (60, 40, 8_000, 4_000), (100, 2, 3_000, 800)])
def test_single_requests_wait_as_their_groups_do(short: int, long: int, made: int, waiting: int) -> None:
    times = queue_times(QueueReader(CATALOGUE, SNAPSHOT).read([_view(short, long, made, waiting)])[1])
    table = RequestTable.of(times)
    for group in range(4):
        found = table.times([group, group], [0, waiting // 4 - 1])
        assert found.wait_s == pytest.approx(times.wait_s[:, group], rel=1e-9, abs=1e-9)
        assert found.wait_variance == pytest.approx(times.wait_variance[:, group], rel=1e-9, abs=1e-9)


def test_queues_beside_each_other_are_as_each_alone() -> None:
    views = [
        replace(_view(*each), instance=replace(A100, name=str(number)))
        for number, each in enumerate(((256, 0, 0, 400), (60, 40, 8_000, 800)))
    ]
    views.insert(1, replace(_view(10, 0, 0, 400, False), instance=replace(A100, name="untold")))
    _, together = QueueReader(CATALOGUE, SNAPSHOT).read(views)
    alone = [queue_times(QueueReader(CATALOGUE, SNAPSHOT).read([view])[1]).wait_s for view in views]
    assert queue_times(together).wait_s == pytest.approx(np.concatenate(alone, axis=1))


@given(st.lists(st.floats(0.0, 1e5), min_size=2, max_size=20), st.integers(0, 256), st.integers(0, 40), st.integers(0, 20_000))
@settings(max_examples=50, deadline=None)
def test_more_work_ahead_never_waits_less(work_s: list[float], short: int, long: int, made: int) -> None:
    if short + long == 0:
        return
    groups = QueueReader(CATALOGUE, SNAPSHOT).read([_view(short, long, made, 400)])[1]
    course = groups.leads.course
    assert course is not None
    found = seat_waits_by(course, np.zeros(len(work_s), dtype=np.int64), np.array(sorted(work_s)))
    assert np.isfinite(found).all()
    assert (np.diff(found) >= -1e-9).all()
    assert (np.diff(course[:KNOTS, 0]) > 0.0).all()
    assert groups.columns().each[DECODE].min() > 0.0
