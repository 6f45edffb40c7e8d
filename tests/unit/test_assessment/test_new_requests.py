"""Predictions for a new request: by itself or in a group, where it displaces others, and by calibrated times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from predicted_times import group_times
from qlm_core.operations.clearing import EvictionCosts, Head, would_clear
from qlm_core.prediction.prediction_views import GroupView, QueueView, RunningView
from qlm_core.vocabulary.request import SloKind

from .queues import CATALOGUE, NOW_S, SHIPPED, TWO, assessed, group_of, instance_of, predicted, view_of


def _inserted(view: QueueView, request: GroupView) -> Sequence[GroupView]:
    place = next((at for at, group in enumerate(view.groups) if group.first_deadline_s > request.first_deadline_s), len(view.groups))
    return (*view.groups[:place], request, *view.groups[place:])


@pytest.mark.parametrize("model", ["chat", "big"])
@pytest.mark.parametrize("slack_s", [0.0, 30.0, 100.0, 500.0, math.inf])
def test_a_new_request_is_as_a_group_of_one_in_its_place(model: str, slack_s: float) -> None:
    request = group_of("new", 1, model, slack_s=slack_s)
    for view in TWO:
        found = predicted((view,), request)
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
    found = assessed(*TWO).joining(group_id, [0.0, 10.0])
    last = group_times(after, CATALOGUE, SHIPPED)[place]
    assert found is not None
    queue, ahead, curve = found
    assert queue.instance.name == view.instance.name
    assert ahead == sum(each.waiting for each in view.groups[: place + 1])
    assert curve.wait_s[0] == pytest.approx(last.last_wait.mean, rel=0.01, abs=0.02)
    assert math.sqrt(curve.wait_variance[0]) == pytest.approx(last.last_wait.deviation, rel=0.01, abs=0.02)
    assert curve.wait_s[1] > curve.wait_s[0], "with ten more of its class before it"


def test_instances_that_do_not_have_the_model_change_nothing() -> None:
    unable = replace(instance_of("x"), models=("chat",))
    busy = QueueView(instance=unable, active_model="chat", running=200, groups=(group_of("x1", 900, slack_s=10.0), group_of("x2", 50)))
    able = view_of("b", group_of("b1", 60, slack_s=20.0), group_of("b2", 30, slack_s=400.0), running=50)
    request = group_of("", 1, "big", slack_s=100.0)
    alone = predicted((able,), request)
    assert alone.requests_ahead == 60
    assert predicted((busy, able), request) == predicted((able, busy), request) == alone


def test_one_that_can_join_nothing_is_a_group_of_its_own() -> None:
    made, request = assessed(*TWO), group_of("", 1, slack_s=100.0)
    expected = predicted(TWO, request, NOW_S)
    assert made.joining("", [0.0]) is made.joining("gone", [0.0]) is None
    (found,) = made.alone([request], NOW_S, [0.0])
    assert found is not None
    assert (found[0].instance.name, found[1]) == (expected.instance, expected.requests_ahead)
    assert found[2].wait_s[0] == pytest.approx(expected.wait.mean)


def test_requests_that_are_predicted_at_once_are_as_one_by_one() -> None:
    """Of several models, one of which no instance has, at every place of the queues, one that clears its instance among them."""
    calm = RunningView(slo_class="", token_class="", count=200, deadline_s=NOW_S + 900.0)
    unable = replace(instance_of("x"), models=("chat",))
    views = (
        QueueView(instance=unable, active_model="chat", running=3, groups=()),
        *TWO,
        replace(view_of("c"), runners=(calm,), warm_models=("big",)),
    )
    requests = [
        group_of("", 1, model, slack_s=slack_s) for model in ("chat", "none", "big") for slack_s in (0.0, 8.0, 30.0, 500.0, math.inf)
    ]
    made = assessed(*views)
    one_by_one = [place for request in requests for place in made.alone([request], NOW_S, [0.0, 10.0])]
    for request, found, expected in zip(requests, made.alone(requests, NOW_S, [0.0, 10.0]), one_by_one, strict=True):
        assert (found is None) == (expected is None) == (request.model == "none")
        if found is not None and expected is not None:
            assert (found[0], found[1], found[2].ahead) == (expected[0], expected[1], expected[2].ahead)
            assert found[2].wait_s == pytest.approx(expected[2].wait_s, rel=1e-9, abs=1e-9)
            assert found[2].wait_variance == pytest.approx(expected[2].wait_variance, rel=1e-9, abs=1e-9)
            assert found[2].token_s == pytest.approx(expected[2].token_s, rel=1e-9)
    assert len({place[0].instance.name for place in one_by_one if place is not None}) > 1


@pytest.mark.parametrize("slack_s", [0.0, 30.0, 500.0, math.inf])
def test_of_all_instances_the_one_where_it_ends_first_counts(slack_s: float) -> None:
    """In any order of the views."""
    request = group_of("", 1, "chat", slack_s=slack_s)
    views = (*TWO, replace(view_of("c", running=0), active_model="big"))
    alone = [predicted((view,), request) for view in views]
    best = min(alone, key=lambda each: each.completion.mean)
    for order in (views, views[::-1]):
        found = predicted(order, request)
        assert found.instance == best.instance
        assert found.completion.mean == pytest.approx(best.completion.mean)


def test_bands_come_before_deadlines() -> None:
    """A PRIORITY request of an earlier band passes all, one of a later band waits behind all, and inside its band it is the last."""
    view = view_of("a", group_of("p", 100, slack_s=math.inf, band=-1), group_of("slo", 500), group_of("q", 300, slack_s=math.inf, band=2))
    ahead = [predicted((view,), group_of("", 1, slack_s=math.inf, band=band)).requests_ahead for band in (-5, -1, 0, 1, 2, 3)]
    assert ahead == [0, 100, 600, 600, 900, 900]
    assert predicted((view,), group_of("", 1, slack_s=-10.0)).requests_ahead == 100, "of the band of requests with an SLO"


def test_runs_are_displaced_by_an_urgent_request_of_another_model() -> None:
    """As the planner expects it and the agent does it (QLM section 5): less urgent requests are evicted, more urgent ones end first."""
    calm = RunningView(slo_class="", token_class="", count=200, deadline_s=NOW_S + 900.0)
    view = replace(view_of("a"), runners=(calm,), warm_models=("big",))
    urgent = group_of("", 1, "big", slack_s=8.0)
    waits, clears = predicted((view,), urgent), predicted((view,), urgent, NOW_S)
    assert clears.wait.mean < waits.wait.mean - 3.0
    hurried = replace(view, runners=(replace(calm, deadline_s=NOW_S + 5.0),))
    assert predicted((hurried,), urgent, NOW_S).wait == waits.wait
    behind = replace(view, groups=(group_of("a1", 1, "big", slack_s=1.0),))
    assert predicted((behind,), urgent, NOW_S).wait == predicted((behind,), urgent).wait, "not for one that is not the first"
    relaxed = group_of("", 1, "big", slack_s=500.0)
    assert predicted((view,), relaxed, NOW_S).wait == predicted((view,), relaxed).wait


@pytest.mark.parametrize("kind", [SloKind.COMPLETION, SloKind.FIRST_TOKEN])
def test_runs_are_displaced_where_the_request_would_be_late_otherwise(kind: SloKind) -> None:
    """By its swap, its prefill and, where the SLO bounds it, its output."""
    calm = RunningView(slo_class="", token_class="", count=200, deadline_s=NOW_S + 900.0)
    view = replace(view_of("a"), runners=(calm,), warm_models=("big",))
    long = replace(group_of("", 1, "big", prompt=20_000), slo_kind=kind)
    waits = predicted((view,), long)
    ends_s = waits.completion.mean if kind is SloKind.COMPLETION else waits.wait.mean + waits.prefill_s
    for share, clears in ((0.97, True), (1.03, False)):
        hurried = replace(long, first_deadline_s=NOW_S + share * ends_s)
        found = predicted((view,), hurried, NOW_S)
        assert (found.wait.mean < waits.wait.mean - 3.0) == clears


def test_no_run_is_displaced_that_would_be_late_by_it() -> None:
    """The head's time counts, and not only the eviction: three would be late for one."""
    way = EvictionCosts(eviction_cost_s=1.0, swap_back_s=1.0, runs_left_s=10.0)
    head = Head(band=0, deadline_s=NOW_S + 6.0, requests=1, service_s=5.0)
    for slack_s, clears in ((4.0, False), (6.9, False), (7.1, True)):
        runners = [RunningView(slo_class="", token_class="", count=3, deadline_s=NOW_S + 10.0 + slack_s)]
        assert would_clear(runners, 20.0, way, head, NOW_S) == clears


def test_an_engine_that_has_served_nothing_yet_does_not_change_predictions_of_others() -> None:
    """It has no batch that its requests could share, the others use theirs."""
    alone = (TWO[0],)
    both = (TWO[0], view_of("idle", running=200, active="big"))
    request = group_of("", 1)
    idle = replace(instance_of("idle"), time_scale=1e-3)
    slow = (TWO[0], replace(view_of("idle", running=200, active="big"), instance=idle))
    assert predicted(both, request).instance == "idle"
    found, expected = predicted(slow, request), predicted(alone, request)
    assert found.instance == expected.instance == "a"
    assert (found.wait, found.completion) == (expected.wait, expected.completion)
