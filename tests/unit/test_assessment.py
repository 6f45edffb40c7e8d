"""What is kept of all queues: single requests, changed queues, late requests, and what a new request would find."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlm_core.assessment import Assessment
from qlm_core.calibration import CalibratedTime, CalibrationProfile, CalibrationTable
from qlm_core.clearing import GivingWay, Head, would_clear
from qlm_core.distribution import Normal
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.prediction import (
    GroupView,
    QueueView,
    RequestPrediction,
    RunningView,
    group_times,
    predict_request,
)
from qlm_core.profile import ProfileSnapshot
from qlm_core.request import SloKind
from qlm_core.shipped_profiles import shipped_snapshot

SHIPPED = shipped_snapshot()
CATALOGUE = {
    "chat": ModelSpec(name="chat", profile="Mistral-7B"),
    "big": ModelSpec(name="big", profile="Vicuna-13B"),
    "alien": ModelSpec(name="alien", profile="Unheard-of"),
}
CALIBRATED = replace(
    SHIPPED,
    version=7,
    calibration=CalibrationTable(
        (
            CalibrationProfile(time=CalibratedTime.WAIT, model="big", bias_factor=1.3, relative_variance=0.04),
            CalibrationProfile(time=CalibratedTime.COMPLETION, instance="a", model="chat", gpu="A100-80GB", n_gpu=1, bias_factor=0.8),
            CalibrationProfile(time=CalibratedTime.COMPLETION, bias_factor=1.1, base_variance_s2=9.0),
        )
    ),
)
NOW_S = 1_000.0


def _instance(name: str) -> InstanceFacts:
    return InstanceFacts(name=name, incarnation=f"{name}/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("chat", "big"))


def _group(group_id: str, waiting: int, model: str = "chat", *, slack_s: float = 300.0, band: int = 0, prompt: int = 500) -> GroupView:
    return GroupView(
        group_id=group_id,
        model=model,
        slo_class="64s",
        token_class="1024",
        waiting=waiting,
        waiting_prompt_tokens=waiting * prompt,
        first_deadline_s=NOW_S + slack_s,
        band=band,
    )


def _view(name: str, *groups: GroupView, running: int = 200, active: str = "chat") -> QueueView:
    return QueueView(instance=_instance(name), active_model=active, running=running, groups=groups)


def _assessed(*views: QueueView, profiles: ProfileSnapshot = SHIPPED) -> Assessment:
    return Assessment(CATALOGUE, profiles, views)


def _new(assessment: Assessment, request: GroupView, now_s: float | None = None) -> RequestPrediction:
    found = assessment.new(request, now_s)
    assert found is not None
    return found


TWO = (
    _view("a", _group("a1", 700, slack_s=50.0), _group("a2", 300, "big"), _group("a3", 40, slack_s=900.0)),
    _view("b", _group("b1", 60, "big", slack_s=20.0), running=0),
)


# Single requests ------------------------------------------------------------------------------------------------------


def test_the_first_and_the_last_of_a_group_are_those_of_its_times() -> None:
    made = _assessed(*TWO)
    for view in TWO:
        for group, time in zip(view.groups, group_times(view, CATALOGUE, SHIPPED), strict=True):
            ahead = sum(each.waiting for each in view.groups[: view.groups.index(group)])
            first, last = made.waiting(group.group_id, ahead), made.waiting(group.group_id, ahead + group.waiting - 1)
            assert first is not None
            assert last is not None
            assert first.instance == view.instance.name
            for found, wait, completion in (
                (first, time.wait, time.first_completion),
                (last, time.last_wait, time.last_completion),
            ):
                assert found.wait.mean == pytest.approx(wait.mean, rel=1e-6, abs=1e-9)
                assert found.wait.variance == pytest.approx(wait.variance, rel=1e-6, abs=1e-9)
                assert found.completion.mean == pytest.approx(completion.mean, rel=1e-6)
                assert found.completion.variance == pytest.approx(completion.variance, rel=1e-6)
    assert made.waiting("nobody's", 0) is None


def test_requests_wait_longer_the_further_behind_they_are() -> None:
    made = _assessed(*TWO)
    _, number = made.number_of("a1") or ("", -1)
    times = made.table.times(np.full(700, number), np.arange(700))
    assert (np.diff(times.wait_s) >= -1e-9).all()
    assert (np.diff(times.wait_variance) >= -1e-9).all()


def test_many_at_once_are_as_one_by_one() -> None:
    made = _assessed(*TWO)
    chance = np.random.default_rng(5)
    groups, places = chance.integers(0, 4, 20_000), chance.integers(0, 700, 20_000)
    prompts, outputs = chance.integers(1, 9_000, 20_000), chance.uniform(1.0, 900.0, 20_000)
    variances = chance.uniform(0.0, 1e5, 20_000)
    many = made.table.times(groups, places, prompt_tokens=prompts, output_tokens=outputs, output_variance=variances)
    for at in (0, 8_191, 8_192, 19_999):
        one = made.table.times(
            [groups[at]], [places[at]], prompt_tokens=[prompts[at]], output_tokens=[outputs[at]], output_variance=[variances[at]]
        )
        for name in ("wait_s", "wait_variance", "prefill_s", "completion_s", "completion_variance"):
            assert getattr(one, name)[0] == pytest.approx(getattr(many, name)[at])
        assert many.completion_quantile_s(0.9)[at] == pytest.approx(
            many.completion_s[at] + 1.2815515655446004 * math.sqrt(many.completion_variance[at])
        )
    assert (many.wait_quantile_s(0.001) >= 0.0).all(), "a wait is never negative"


def test_ones_own_prompt_and_output_count() -> None:
    table = _assessed(*TWO).table
    short = table.times([0], [10], prompt_tokens=[10], output_tokens=[5.0], output_variance=[0.0])
    long = table.times([0], [10], prompt_tokens=[8_000], output_tokens=[500.0], output_variance=[100.0])
    assert short.wait_s == long.wait_s
    assert short.completion_variance == short.wait_variance
    assert long.completion_s[0] > short.completion_s[0] + 5.0
    row = SHIPPED.hardware_for(_instance("a"), CATALOGUE["chat"])
    assert row is not None
    assert long.prefill_s[0] > row.prefill_work_s(8_000, 8_000**2), "its chunks ride along with the steps of others"


@pytest.mark.parametrize("place", [-1.0, math.nan])
def test_impossible_places_are_refused(place: float) -> None:
    with pytest.raises(ValueError, match="position"):
        _assessed(*TWO).table.times([0], [place])


@pytest.mark.parametrize("probability", [0.0, 1.0, math.nan])
def test_impossible_probabilities_are_refused(probability: float) -> None:
    with pytest.raises(ValueError, match="probability"):
        _assessed(*TWO).table.times([0], [0]).wait_quantile_s(probability)


# Late requests --------------------------------------------------------------------------------------------------------


def test_late_requests_are_those_of_each_group() -> None:
    """As the sum over all requests, each with its own place, time and deadline."""
    views = (_spread(TWO[0], 40.0), TWO[1])
    made = _assessed(*views)
    late, tardiness = made.late(NOW_S)
    for at, group in enumerate(group for view in views for group in view.groups):
        places = np.arange(group.waiting)
        times = made.table.times(np.full(group.waiting, at), places)
        last_s = group.first_deadline_s if group.last_deadline_s is None else group.last_deadline_s
        deadlines_s = np.linspace(group.first_deadline_s, last_s, group.waiting)
        ends = [Normal(float(mean), float(variance)) for mean, variance in zip(times.completion_s, times.completion_variance, strict=True)]
        left_s = [float(deadline_s) - NOW_S for deadline_s in deadlines_s]
        assert late[at] == pytest.approx(
            sum(end.probability_above(left) for end, left in zip(ends, left_s, strict=True)), abs=0.02 * group.waiting
        )
        excess_s = sum(end.expected_excess(left) for end, left in zip(ends, left_s, strict=True))
        assert tardiness[at] == pytest.approx(excess_s, rel=0.05, abs=1.0)


@pytest.mark.parametrize("slack_s", [12.0, 25.0, 40.0])
def test_a_group_of_one_or_two_is_late_as_its_requests_are(slack_s: float) -> None:
    for waiting in (1, 2):
        group = replace(_group("g", waiting, slack_s=slack_s), last_deadline_s=NOW_S + slack_s + 3.0 * (waiting - 1))
        view = _view("a", _group("before", 200, slack_s=0.0), group)
        time = group_times(view, CATALOGUE, SHIPPED)[1]
        ends = [time.first_completion, time.last_completion][:waiting]
        wanted = sum(NormalDist(end.mean, end.deviation).cdf(slack_s + 3.0 * number) for number, end in enumerate(ends))
        assert _assessed(view).late(NOW_S)[0][1] == pytest.approx(waiting - wanted, abs=0.02)


def _spread(view: QueueView, seconds: float) -> QueueView:
    groups = tuple(replace(group, last_deadline_s=group.first_deadline_s + seconds) for group in view.groups)
    return replace(view, groups=groups)


def test_late_requests_are_those_of_the_time_that_is_asked_for() -> None:
    """And what was worked out for another is not taken for it, also after a change."""
    made, changed = _assessed(*TWO), replace(TWO[0], running=10)
    for views in (TWO, (changed, TWO[1])):
        made.update(views[0])
        counts = []
        for now_s in (NOW_S, NOW_S + 60.0, NOW_S - 60.0):
            for found, expected in zip(made.late(now_s), _assessed(*views).late(now_s), strict=True):
                assert found == pytest.approx(expected, abs=1e-9)
            counts.append(float(made.late(now_s)[0].sum()))
        assert counts[2] + 50.0 < counts[0] < counts[1] - 50.0


def test_a_group_is_not_late_as_a_whole() -> None:
    """3,000 requests take 300 s: judged by its end, every group of a 20 s objective would be late."""
    group = _group("g", 3_000, slack_s=20.0)
    (late,), _ = _assessed(_view("a", group, running=0)).late(NOW_S)
    assert 2_300 < late < 3_000, "the first are in time"
    (spread,), _ = _assessed(_spread(_view("a", group, running=0), 2_000.0)).late(NOW_S)
    assert spread < 300, "those at the end have later deadlines"


@given(st.integers(1, 900), st.floats(-200.0, 900.0), st.floats(0.0, 300.0), st.floats(0.0, 300.0))
@settings(deadline=None)
def test_late_requests_are_a_part_and_fall_with_later_deadlines(waiting: int, slack_s: float, spread_s: float, more_s: float) -> None:
    group = replace(_group("g", waiting, slack_s=slack_s), last_deadline_s=NOW_S + slack_s + spread_s)
    relaxed = replace(group, first_deadline_s=group.first_deadline_s + more_s, last_deadline_s=NOW_S + slack_s + spread_s + more_s)
    (late,), (tardiness,) = _assessed(_view("a", group)).late(NOW_S)
    (later,), (less,) = _assessed(_view("a", relaxed)).late(NOW_S)
    assert 0.0 <= later <= late + 1e-9 <= waiting + 1e-6
    assert 0.0 <= less <= tardiness + 1e-6


def test_what_has_no_deadline_is_never_late_and_what_is_past_always() -> None:
    endless = replace(_group("p", 10), slo_kind=SloKind.PRIORITY, first_deadline_s=math.inf)
    late, tardiness = _assessed(_view("a", endless, _group("past", 40, slack_s=-1.0))).late(NOW_S)
    assert late.tolist() == [0.0, pytest.approx(40.0)]
    assert tardiness[0] == 0.0
    assert tardiness[1] > 40.0


def test_first_tokens_are_not_late_by_the_output() -> None:
    group = _group("g", 1, slack_s=1.0)
    (completion,), _ = _assessed(_view("a", group, running=0)).late(NOW_S)
    (first_token,), _ = _assessed(_view("a", replace(group, slo_kind=SloKind.FIRST_TOKEN), running=0)).late(NOW_S)
    assert completion > 0.5
    assert first_token < 0.01
    long = replace(group, slo_kind=SloKind.FIRST_TOKEN, waiting_prompt_tokens=8_000, first_deadline_s=NOW_S + 0.3)
    (late,), (tardiness,) = _assessed(_view("a", long, running=0)).late(NOW_S)
    assert late > 0.99, "it starts at once, but 8,000 tokens take 0.7 s"
    assert tardiness == pytest.approx(0.4, abs=0.1)


# Changes --------------------------------------------------------------------------------------------------------------


def _same(one: Assessment, other: Assessment) -> None:
    order = [one.instances.index(name) for name in other.instances]
    for name in other.instances:
        assert name in one.instances
    for view in (other.table.columns, one.table.columns):
        assert np.isfinite(view).all()
    firsts = [slice(int(one.first[at]), int(one.first[at + 1])) for at in order]
    moved = np.concatenate([one.table.columns[part] for part in firsts]) if firsts else one.table.columns
    assert moved == pytest.approx(other.table.columns, rel=1e-9, abs=1e-9)
    for now_s in (NOW_S, NOW_S + 100.0, NOW_S):
        late = [value for values in one.late(now_s) for part in firsts for value in values[part]]
        assert late == pytest.approx([value for values in other.late(now_s) for value in values], abs=1e-9)
    for group_id in ("a1", "a2", "a3", "b1", "b2", "c1"):
        request = _group("", 1, "big" if group_id in ("a2", "b1") else "chat")
        for found, expected in (
            (one.joining(group_id, request), other.joining(group_id, request)),
            (one.waiting(group_id, 800), other.waiting(group_id, 800)),
        ):
            assert (found is None) == (expected is None)
            if found is not None and expected is not None:
                assert (found.instance, found.requests_ahead) == (expected.instance, expected.requests_ahead)
                assert found.wait.mean == pytest.approx(expected.wait.mean, abs=1e-9)
                assert found.completion.mean == pytest.approx(expected.completion.mean)
    fresh, expected = _new(one, _group("", 1)), _new(other, _group("", 1))
    assert (fresh.instance, fresh.requests_ahead) == (expected.instance, expected.requests_ahead)
    # Where a queue is empty, what stood there is taken to share a batch.
    assert fresh.completion.mean == pytest.approx(expected.completion.mean, rel=0.01)


@pytest.mark.parametrize("profiles", [SHIPPED, CALIBRATED], ids=["formulas", "calibrated"])
@pytest.mark.parametrize("asked_before", [True, False])
def test_a_changed_queue_is_as_if_all_were_assessed_again(asked_before: bool, profiles: ProfileSnapshot) -> None:
    made = _assessed(*TWO, profiles=profiles)
    if asked_before:
        _same(made, _assessed(*TWO, profiles=profiles))
    changed = _view("a", *TWO[0].groups[1:], running=10)
    new, emptied = _view("c", _group("c1", 5)), replace(TWO[1], groups=())
    moved = replace(TWO[1], groups=(_group("b2", 20), TWO[0].groups[0]), running=80)
    for view in (changed, moved, new):
        made.update(view)
    _same(made, _assessed(changed, moved, new, profiles=profiles))
    made.update(emptied)
    _same(made, _assessed(changed, emptied, new, profiles=profiles))
    made.remove("a")
    made.remove("a")
    _same(made, _assessed(emptied, new, profiles=profiles))
    assert made.number_of("a2") is None
    assert made.number_of("c1") == ("c", 0)


def test_a_group_that_moves_is_on_one_queue_meanwhile() -> None:
    """Told first of the queue that it comes to: it is there, also when that which it left is told."""
    made = _assessed(*TWO)
    assert made.number_of("a1") == ("a", 0)
    made.update(replace(TWO[1], groups=(*TWO[1].groups, TWO[0].groups[0])))
    assert made.number_of("a1") == ("b", 4)
    made.update(replace(TWO[0], groups=TWO[0].groups[1:]))
    assert [made.number_of(group_id) for group_id in ("a2", "a3", "b1", "a1")] == [("a", 0), ("a", 1), ("b", 2), ("b", 3)]


class _Groups(tuple[GroupView, ...]):
    """The groups of a queue, which count how often somebody goes through them."""

    passes = 0

    def __iter__(self) -> Iterator[GroupView]:
        self.passes += 1
        return super().__iter__()


def test_a_changed_queue_costs_its_groups_and_a_new_request_none() -> None:
    """As the module states it: only the queue that changed is read again, and one that joins a group takes no pass over any."""
    others = _Groups(TWO[1].groups)
    made = _assessed(TWO[0], replace(TWO[1], groups=others), profiles=CALIBRATED)
    request = _group("", 1)
    made.late(NOW_S)
    assert made.joining("a1", request) is not None
    assert made.joining("b1", _group("", 1, "big")) is not None
    others.passes = 0
    groups = _Groups((*TWO[0].groups, _group("a4", 7)))
    made.update(replace(TWO[0], groups=groups))
    assert groups.passes > 0
    made.late(NOW_S)
    assert made.joining("a4", request) is not None
    table, groups.passes = made.table, 0
    for _ in range(5):
        assert made.joining("a4", request) is not None
        assert made.waiting("a4", 3) is not None
    assert made.table is table, "nothing is worked out again"
    assert (groups.passes, others.passes) == (0, 0)


def test_a_queue_that_cannot_be_predicted_is_named_until_it_can() -> None:
    strange = _view("b", _group("x", 1, "alien"))
    made = _assessed(TWO[0], strange)
    assert made.unpredictable == {"b"}
    assert made.instances == ("a",)
    made.update(TWO[1])
    assert made.unpredictable == set()
    made.update(strange)
    assert made.unpredictable == {"b"}
    _same(made, _assessed(TWO[0]))


def test_nothing_to_assess() -> None:
    made = _assessed()
    assert made.instances == ()
    assert [values.tolist() for values in made.late(NOW_S)] == [[], []]
    assert made.new(_group("", 1)) is None
    made.update(_view("a", running=0))
    assert _new(made, _group("", 1)).wait.mean == 0.0


# A new request --------------------------------------------------------------------------------------------------------


def _inserted(view: QueueView, request: GroupView) -> Sequence[GroupView]:
    place = next((at for at, group in enumerate(view.groups) if group.first_deadline_s > request.first_deadline_s), len(view.groups))
    return (*view.groups[:place], request, *view.groups[place:])


@pytest.mark.parametrize("model", ["chat", "big"])
@pytest.mark.parametrize("slack_s", [0.0, 30.0, 100.0, 500.0, math.inf])
def test_a_new_request_is_as_a_group_of_one_in_its_place(model: str, slack_s: float) -> None:
    request = _group("new", 1, model, slack_s=slack_s)
    for view in TWO:
        found = _new(_assessed(view), request)
        groups = _inserted(view, request)
        time = group_times(replace(view, groups=tuple(groups)), CATALOGUE, SHIPPED)[groups.index(request)]
        # The batch is mixed of what was there before.
        assert found.wait.mean == pytest.approx(time.wait.mean, rel=0.01, abs=0.2)
        assert found.completion.mean == pytest.approx(time.first_completion.mean, rel=0.02, abs=0.2)
        assert found.requests_ahead == sum(group.waiting for group in groups[: groups.index(request)])


@pytest.mark.parametrize("group_id", ["a1", "a2", "a3", "b1"])
def test_a_request_that_joins_a_group_is_as_the_last_of_it(group_id: str) -> None:
    """Held against the queue with one more request in that group."""
    view = next(view for view in TWO if any(group.group_id == group_id for group in view.groups))
    place = next(place for place, group in enumerate(view.groups) if group.group_id == group_id)
    group = view.groups[place]
    more = replace(group, waiting=group.waiting + 1, waiting_prompt_tokens=group.waiting_prompt_tokens + 500)
    after = replace(view, groups=(*view.groups[:place], more, *view.groups[place + 1 :]))
    found = _assessed(*TWO).joining(group_id, _group("", 1, group.model))
    last = group_times(after, CATALOGUE, SHIPPED)[place]
    assert found is not None
    assert found.instance == view.instance.name
    assert found.requests_ahead == sum(each.waiting for each in view.groups[: place + 1])
    assert found.wait.mean == pytest.approx(last.last_wait.mean, rel=0.01, abs=0.02)
    assert found.wait.deviation == pytest.approx(last.last_wait.deviation, rel=0.01, abs=0.02)
    assert found.completion.mean == pytest.approx(last.last_completion.mean, rel=0.01, abs=0.02)


def test_a_request_that_joins_has_its_own_prompt_and_limit() -> None:
    made = _assessed(*TWO)
    usual, long = made.joining("a3", _group("", 1)), made.joining("a3", _group("", 1, prompt=7_000))
    short = made.joining("a3", replace(_group("", 1), output_tokens_max=1.0))
    assert usual is not None
    assert long is not None
    assert short is not None
    assert long.wait == usual.wait == short.wait
    assert long.prefill_s > usual.prefill_s
    assert short.completion.mean < usual.completion.mean
    assert made.joining("nobody's", _group("", 1)) is None


def test_instances_that_do_not_have_the_model_change_nothing() -> None:
    unable = replace(_instance("x"), models=("chat",))
    busy = QueueView(instance=unable, active_model="chat", running=200, groups=(_group("x1", 900, slack_s=10.0), _group("x2", 50)))
    able = _view("b", _group("b1", 60, slack_s=20.0), _group("b2", 30, slack_s=400.0), running=50)
    request = _group("", 1, "big", slack_s=100.0)
    alone = _new(_assessed(able), request)
    assert alone.requests_ahead == 60
    assert _new(_assessed(busy, able), request) == _new(_assessed(able, busy), request) == alone


def test_one_that_can_join_nothing_is_a_group_of_its_own() -> None:
    made, request = _assessed(*TWO), _group("", 1, slack_s=100.0)
    assert made.arriving(request, "", NOW_S) == made.arriving(request, "gone", NOW_S) == made.new(request, NOW_S)
    assert made.arriving(request, "a1", NOW_S) == made.joining("a1", request)


def test_kept_queues_predict_as_views_do() -> None:
    kept = _new(_assessed(*TWO), _group("", 1, "big", slack_s=100.0))
    asked = predict_request(TWO, CATALOGUE, SHIPPED, "big", 500, 10**9, NOW_S + 100.0, slo_class="64s", token_class="1024")
    assert asked is not None
    assert (kept.instance, kept.requests_ahead) == (asked.instance, asked.requests_ahead)
    assert kept.completion.mean == pytest.approx(asked.completion.mean)


@pytest.mark.parametrize("slack_s", [0.0, 30.0, 500.0, math.inf])
def test_of_all_instances_the_one_where_it_ends_first_counts(slack_s: float) -> None:
    """Whichever is told first."""
    request = _group("", 1, "chat", slack_s=slack_s)
    views = (*TWO, replace(_view("c", running=0), active_model="big"))
    alone = [_new(_assessed(view), request) for view in views]
    best = min(alone, key=lambda each: each.completion.mean)
    for order in (views, views[::-1]):
        found = _new(_assessed(*order), request)
        assert found.instance == best.instance
        assert found.completion.mean == pytest.approx(best.completion.mean)


def test_a_prediction_names_the_profiles_that_it_rests_on() -> None:
    made = _assessed(*TWO, profiles=CALIBRATED)
    request = _group("", 1)
    for found in (_new(made, request), made.joining("a1", request), made.waiting("a1", 3)):
        assert found is not None
        assert found.profile_version == 7


def test_bands_come_before_deadlines() -> None:
    """A PRIORITY request of an earlier band passes all, one of a later band waits behind all, and inside its band it is the last."""
    view = _view("a", _group("p", 100, slack_s=math.inf, band=-1), _group("slo", 500), _group("q", 300, slack_s=math.inf, band=2))
    ahead = [_new(_assessed(view), _group("", 1, slack_s=math.inf, band=band)).requests_ahead for band in (-5, -1, 0, 1, 2, 3)]
    assert ahead == [0, 100, 600, 600, 900, 900]
    assert _new(_assessed(view), _group("", 1, slack_s=-10.0)).requests_ahead == 100, "of the band of requests with an SLO"


def test_what_runs_gives_way_to_an_urgent_request_of_another_model() -> None:
    """As the planner expects it and the agent does it (QLM section 5): less urgent requests are evicted, more urgent ones end first."""
    calm = RunningView(slo_class="", token_class="", count=200, deadline_s=NOW_S + 900.0)
    view = replace(_view("a"), runners=(calm,), warm_models=("big",))
    urgent = _group("", 1, "big", slack_s=8.0)
    waits, clears = _new(_assessed(view), urgent), _new(_assessed(view), urgent, NOW_S)
    assert clears.wait.mean < waits.wait.mean - 3.0
    hurried = replace(view, runners=(replace(calm, deadline_s=NOW_S + 5.0),))
    assert _new(_assessed(hurried), urgent, NOW_S).wait == waits.wait
    relaxed = _group("", 1, "big", slack_s=500.0)
    assert _new(_assessed(view), relaxed, NOW_S).wait == _new(_assessed(view), relaxed).wait


def test_what_runs_gives_way_where_the_request_would_be_late_otherwise() -> None:
    """By its swap, its prefill and its output, all of them."""
    calm = RunningView(slo_class="", token_class="", count=200, deadline_s=NOW_S + 900.0)
    view = replace(_view("a"), runners=(calm,), warm_models=("big",))
    long = _group("", 1, "big", prompt=20_000)
    waits = _new(_assessed(view), long)
    for share, clears in ((0.97, True), (1.03, False)):
        hurried = replace(long, first_deadline_s=NOW_S + share * waits.completion.mean)
        found = _new(_assessed(view), hurried, NOW_S)
        assert (found.wait.mean < waits.wait.mean - 3.0) == clears


def test_nothing_gives_way_that_would_be_late_by_it() -> None:
    """What the head takes counts, and not only that it gives way: three would be late for one."""
    way = GivingWay(displacement_s=1.0, swap_back_s=1.0, runs_left_s=10.0)
    head = Head(band=0, deadline_s=NOW_S + 6.0, requests=1, service_s=5.0)
    for slack_s, clears in ((4.0, False), (6.9, False), (7.1, True)):
        runners = [RunningView(slo_class="", token_class="", count=3, deadline_s=NOW_S + 10.0 + slack_s)]
        assert would_clear(runners, 20.0, way, head, NOW_S) == clears


# Calibration ----------------------------------------------------------------------------------------------------------


def test_times_are_calibrated_by_the_snapshots_rows() -> None:
    rows = (
        CalibrationProfile(time=CalibratedTime.WAIT, bias_factor=1.2, variance_factor=2.0, relative_variance=0.01),
        CalibrationProfile(time=CalibratedTime.COMPLETION, bias_factor=0.9, base_variance_s2=4.0),
    )
    own, told = _assessed(*TWO), Assessment(CATALOGUE, replace(SHIPPED, calibration=CalibrationTable(rows)), TWO)
    before, after = own.waiting("a1", 600), told.waiting("a1", 600)
    assert before is not None
    assert after is not None
    assert after.wait.mean == pytest.approx(1.2 * before.wait.mean)
    assert after.wait.variance == pytest.approx(2.0 * before.wait.variance + 0.01 * after.wait.mean**2)
    assert after.completion.mean == pytest.approx(0.9 * before.completion.mean)
    assert after.completion.variance == pytest.approx(4.0 + before.completion.variance)
    assert (after.own_wait, after.own_completion) == (before.wait, before.completion)
    assert before.own_wait is None
    times = told.table.times([0], [600])
    assert times.wait_s[0] == pytest.approx(after.wait.mean)
    assert times.completion_variance[0] == pytest.approx(after.completion.variance)
    assert _new(told, _group("", 1)).wait.mean == pytest.approx(1.2 * _new(own, _group("", 1)).wait.mean)
