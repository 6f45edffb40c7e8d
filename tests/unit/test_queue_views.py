"""From the overview of the queue to views: bands, what runs, and who is expected to come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from qlm_core.instance import InstanceFacts
from qlm_core.prediction_views import RunningView
from qlm_core.reported_runs import GroupRuns, RunsTold
from qlm_core.request import SloKind
from qlm_process.queue.arrival_rate import MEMORY_S, ArrivalRate
from qlm_process.queue.views import TOLD_MAX_S, KeptViews, queue_views
from qlm_process.wire import instance as instance_wire
from qlm_process.wire import running as running_wire
from qlm_queue.overview import InstanceRecord, Overview, VirtualQueueRecord
from qlm_queue.values import GroupRecord


def _facts(name: str) -> InstanceFacts:
    return InstanceFacts(
        name=name, incarnation=f"{name}/1", gpu="A100-80GB", n_gpu=1, engine="simulated", models=("chat", "big"), active_model="chat"
    )


def _group(group_id: str, *, instance: str = "a", waiting: int = 4, live: int = 4, last: str = "a", **meta: str) -> GroupRecord:
    own = {"model": "chat", "slo_kind": "completion", "slo_class": "64s", "token_class": "256", "priority": "0"}
    return GroupRecord(
        group_id=group_id,
        instance=instance,
        last_instance=last,
        waiting=waiting,
        live=live,
        waiting_prompt_tokens=100 * waiting,
        first_deadline_s=100.0 + int(group_id),
        next_deadline_s=110.0 + int(group_id),
        last_deadline_s=130.0 + int(group_id),
        meta=own | meta,
    )


def _overview(*groups: GroupRecord, running: Mapping[str, int]) -> Overview:
    return Overview(
        plan_version=1,
        accepted_count=0,
        live=0,
        unplaced=0,
        virtual_queues=[
            VirtualQueueRecord(
                instance=name, version=1, group_ids=[group.group_id for group in groups if group.instance == name], running=running[name]
            )
            for name in ("a", "b")
        ],
        groups={group.group_id: group for group in groups},
        instances=[
            InstanceRecord(name=name, incarnation=f"{name}/1", alive=True, body=instance_wire.to_body(_facts(name))) for name in ("a", "b")
        ],
        incarnations={"a/1": True, "b/1": True},
        last_event_id="0",
    )


@pytest.mark.parametrize(
    ("meta", "band"), [({"band": "3"}, 3), ({"band": "-2", "priority": "7"}, -2), ({"priority": "5"}, 5), ({"band": "x"}, 0), ({}, 0)]
)
def test_bands_are_those_that_the_planner_wrote(meta: Mapping[str, str], band: int) -> None:
    group = _group("1")
    (view, _) = queue_views(_overview(replace(group, meta={**group.meta, **meta}), running={"a": 0, "b": 0}))
    assert view.groups[0].band == band


def test_a_group_is_due_from_the_first_that_waits_to_its_last() -> None:
    """One whose PRIORITY has none never is."""
    (view, _) = queue_views(_overview(_group("1"), _group("2", slo_kind="priority", slo_class="p0"), running={"a": 0, "b": 0}))
    assert [(group.first_deadline_s, max(group.first_deadline_s, group.last_deadline_s)) for group in view.groups] == [
        (111.0, 131.0),
        (math.inf, math.inf),
    ]


def test_what_runs_is_told_by_class() -> None:
    """It runs where its group is or was; of each class the most urgent deadline counts."""
    view, other = queue_views(
        _overview(
            _group("1", live=10),
            _group("2", live=6),
            _group("3", instance="", waiting=0, live=5, slo_class="8s"),
            _group("4", live=9, model="big"),
            _group("5", instance="b", last="b", live=4, slo_kind="priority", slo_class="p-3", band="-3"),
            running={"a": 20, "b": 0},
        )
    )
    assert view.runners == (
        RunningView(slo_class="64s", token_class="256", count=8, deadline_s=101.0),
        RunningView(slo_class="8s", token_class="256", count=5, deadline_s=103.0),
    )
    assert other.runners == ()
    assert other.groups[0].slo_kind is SloKind.PRIORITY


def test_no_more_runs_than_an_instance_says() -> None:
    """A group that moved while some of it runs elsewhere."""
    view, _ = queue_views(_overview(_group("1", live=10), _group("2", live=9, slo_class="8s"), running={"a": 7, "b": 0}))
    assert [(runner.slo_class, runner.count) for runner in view.runners] == [("64s", 6), ("8s", 1)]


def test_strict_priorities_that_run_are_never_due() -> None:
    view, _ = queue_views(_overview(_group("1", live=5, slo_kind="priority", slo_class="p2", band="2"), running={"a": 1, "b": 0}))
    assert (view.runners[0].band, view.runners[0].deadline_s) == (2, math.inf)


def test_where_the_weights_of_models_are_is_told() -> None:
    """A clock that was set back since the load began makes it begin now."""
    overview = _overview(running={"a": 0, "b": 0})
    facts = replace(_facts("a"), warm_models=("big",), loading_since_s=1_000.0)
    told = InstanceRecord(name="a", incarnation="a/1", alive=True, body=instance_wire.to_body(facts))
    overview = replace(overview, instances=[told, *overview.instances[1:]])
    for now_s, loading_s in ((1_003.5, 3.5), (900.0, 0.0)):
        view, other = queue_views(overview, now_s=now_s)
        assert (view.warm_models, view.loading_s, other.warm_models, other.loading_s) == (("big",), loading_s, (), None)


def _with_runs(overview: Overview, told: RunsTold) -> Overview:
    """Instance a told what it runs."""
    record = InstanceRecord(name="a", incarnation="a/1", alive=True, body=running_wire.to_body(_facts("a"), told))
    return replace(overview, instances=[record, *overview.instances[1:]])


def test_what_runs_tells_what_it_made() -> None:
    """Of a group that nothing was told of all has begun since; where fewer run than were told, some of all lengths have ended; the others
    went on meanwhile."""
    overview = _overview(
        _group("1", live=7),
        _group("2", live=6),
        _group("3", live=6, slo_class="8s"),
        _group("5", live=5, slo_class="4s"),
        running={"a": 8, "b": 0},
    )
    groups = {
        "1": GroupRuns(output_tokens=(50, 10), prompt_tokens=60, prefill_left_tokens=20),
        "2": GroupRuns(output_tokens=(90,), prompt_tokens=30, offloaded_tokens=120),
        "3": GroupRuns(output_tokens=(70, 400, 20), prompt_tokens=300),
        "9": GroupRuns(output_tokens=(1,), prompt_tokens=1),
    }
    told = RunsTold(at_s=1_000.0, token_s=0.25, groups=groups)
    view, other = queue_views(_with_runs(overview, told), now_s=1_001.1)
    assert view.runners == (
        RunningView(
            slo_class="64s",
            token_class="256",
            count=5,
            deadline_s=101.0,
            produced_tokens=(0, 0, 14, 54, 94),
            prompt_tokens=150,
            prefill_left_tokens=20,
            offloaded_tokens=120,
        ),
        RunningView(slo_class="8s", token_class="256", count=2, deadline_s=103.0, produced_tokens=(24, 404), prompt_tokens=200),
        RunningView(slo_class="4s", token_class="256", count=1, deadline_s=105.0, produced_tokens=(0,)),
    )
    assert other.runners == ()
    (stale, _) = queue_views(_with_runs(overview, told), now_s=1_000.1 + TOLD_MAX_S)
    assert [(runner.count, runner.produced_tokens) for runner in stale.runners] == [(5, ()), (2, ()), (1, ())]


def test_who_comes_goes_where_most_is_served() -> None:
    groups = _group("1", waiting=20, live=20), _group("2", instance="b", last="b", waiting=5, live=5)
    overview = _overview(*groups, running={"a": 10, "b": 5})
    assert [view.arrivals_per_s for view in queue_views(overview, arrivals_per_s=4.0)] == pytest.approx([3.0, 1.0])
    assert [view.arrivals_per_s for view in queue_views(_overview(running={"a": 0, "b": 0}), arrivals_per_s=4.0)] == [0.0, 0.0]


# The rate of arrivals -------------------------------------------------------------------------------------------------


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    rate = ArrivalRate()
    assert rate.per_s == 0.0
    for second in range(100):
        rate.observe(float(second), 5 * second)
    assert rate.per_s == pytest.approx(5.0)
    for second in range(100, 100 + round(3 * MEMORY_S)):
        rate.observe(float(second), 495)
    assert rate.per_s < 0.5


def test_clock_steps_and_other_servers_start_afresh() -> None:
    rate = ArrivalRate()
    for now_s, count in ((0.0, 0), (10.0, 50), (5.0, 60), (15.0, 110), (16.0, 3), (26.0, 53)):
        rate.observe(now_s, count)
    assert rate.per_s == pytest.approx(5.0)


def test_views_of_groups_are_kept_while_their_records_are_the_same() -> None:
    first, second = _group("1"), _group("2")
    kept = KeptViews()
    before = kept.of({"1": first, "2": second})
    changed = replace(second, waiting=1)
    after = kept.of({"1": first, "2": changed})
    assert after["1"] is before["1"]
    assert after["2"].waiting == 1
    assert set(kept.of({"2": changed})) == {"2"}
    both = _overview(first, changed, running={"a": 0, "b": 0})
    assert queue_views(both, kept=kept) == queue_views(both)
