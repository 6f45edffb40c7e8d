"""Which groups will have how many late requests: the assessment and its answer on the wire."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from predicted_times import group_times
from qlm.api.v1 import estimator_pb2, request_pb2
from qlm_core.errors import InvalidRequest, NotFound
from qlm_core.instance import InstanceFacts
from qlm_core.model import ModelSpec
from qlm_core.prediction_views import GroupView, QueueView
from qlm_core.request import SloKind
from qlm_core.shipped_profiles import shipped_snapshot
from qlm_estimator.assessment_wire import GROUPS_MAX, INSTANCES_MAX, assessment_message
from qlm_estimator.readings import Reading

NOW_S = 1_000_000.0
MODELS = ("chat", "big")
CATALOGUE = {"chat": ModelSpec(name="chat", profile="Mistral-7B"), "big": ModelSpec(name="big", profile="Vicuna-13B")}
SHIPPED = shipped_snapshot()


def group(name: str, *, waiting: int = 100, due_in_s: float = 60.0, model: str = "chat", kind: SloKind = SloKind.COMPLETION) -> GroupView:
    return GroupView(
        group_id=name,
        model=model,
        slo_kind=kind,
        slo_class="64s",
        token_class="1024",
        waiting=waiting,
        waiting_prompt_tokens=500 * waiting,
        first_deadline_s=math.inf if kind is SloKind.PRIORITY else NOW_S + due_in_s,
    )


def view(name: str, *groups: GroupView, gpu: str = "A100-80GB") -> QueueView:
    facts = InstanceFacts(name=name, incarnation=f"{name}/1", gpu=gpu, n_gpu=1, engine="simulated", models=MODELS)
    return QueueView(instance=facts, active_model="chat", running=0, groups=groups)


def reading(*views: QueueView) -> Reading:
    versions = {view.instance.name: number for number, view in enumerate(views, start=3)}
    return Reading(at_s=NOW_S, snapshot=SHIPPED, views=views, plan_version=11, versions=versions, catalogue=CATALOGUE)


def answer(found: Reading, **fields: object) -> estimator_pb2.Assessment:
    return assessment_message(estimator_pb2.AssessRequest(**fields), found)  # type: ignore[arg-type]


def test_groups_with_time_are_not_late_and_those_without_are() -> None:
    message = answer(reading(view("a", group("g1", due_in_s=3_600.0), group("g2", due_in_s=-1.0))))
    late = {each.group_id: each.late_expected for each in message.queues[0].groups}
    assert late["g1"] == pytest.approx(0.0, abs=1e-6)
    assert late["g2"] == pytest.approx(100.0)
    assert message.queues[0].late_expected == pytest.approx(100.0)
    assert message.tardiness_expected_s > 100.0


def test_what_is_behind_more_work_is_later() -> None:
    ahead = group("ahead", waiting=5_000, due_in_s=10_000.0)
    alone = answer(reading(view("a", group("x", due_in_s=30.0)))).queues[0].groups[0]
    behind = answer(reading(view("a", ahead, group("x", due_in_s=30.0)))).queues[0].groups[1]
    assert behind.late_expected > alone.late_expected + 50.0
    assert behind.wait_p50_s > alone.wait_p50_s + 60.0


def test_a_group_waits_until_its_first_starts_and_completes_with_its_last() -> None:
    """Medians and 90th percentiles of the times of the group's own two requests, as `scipy` has those of a normal."""
    queue = view("a", group("g1", waiting=700), group("g2", waiting=300, model="big"), group("g3", waiting=1, due_in_s=900.0))
    (told,) = answer(reading(queue)).queues
    for found, time in zip(told.groups, group_times(queue, CATALOGUE, SHIPPED), strict=True):
        ends = {
            (found.wait_p50_s, found.wait_p90_s): time.wait,
            (found.completion_p50_s, found.completion_p90_s): time.last_completion,
        }
        for quantiles_s, expected in ends.items():
            normal = norm(expected.mean, max(expected.deviation, 1e-9))
            assert quantiles_s == pytest.approx((normal.ppf(0.5), normal.ppf(0.9)), rel=1e-5, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2_000), st.floats(-100.0, 5_000.0), st.sampled_from(MODELS), st.sampled_from(list(SloKind))), max_size=12
    )
)
def test_expected_late_requests_are_between_none_and_all(kinds: list[tuple[int, float, str, SloKind]]) -> None:
    groups = [
        group(f"g{number}", waiting=waiting, due_in_s=due_in_s, model=model, kind=kind)
        for number, (waiting, due_in_s, model, kind) in enumerate(kinds)
    ]
    found = reading(view("a", *groups))
    message = answer(found)
    (queue,) = message.queues
    assert message.waiting == sum(each.waiting for each in groups)
    assert math.isclose(message.late_expected, sum(each.late_expected for each in queue.groups), abs_tol=1e-6)
    for told, asked in zip(queue.groups, groups, strict=True):
        assert told.group_id == asked.group_id
        assert -1e-9 <= told.late_expected <= asked.waiting + 1e-9
        assert told.tardiness_expected_s >= 0.0
        assert 0.0 <= told.wait_p50_s <= told.wait_p90_s
        assert 0.0 <= told.completion_p50_s <= told.completion_p90_s
        assert asked.slo_kind is not SloKind.PRIORITY or told.late_expected == 0.0


def test_a_group_starts_with_its_first_and_ends_with_its_last() -> None:
    """Against draws of the waits of the one and the completions of the other."""
    told = answer(reading(view("a", group("ahead", waiting=900), group("g", model="big")))).queues[0].groups[-1]
    (_, time) = group_times(view("a", group("ahead", waiting=900), group("g", model="big")), CATALOGUE, SHIPPED)
    assert told.group_id == "g"
    dice = np.random.default_rng(3)
    starts_s = dice.normal(time.wait.mean, time.wait.deviation, 200_000)
    ends_s = dice.normal(time.last_wait.mean, time.last_wait.deviation, 200_000) + time.last_prefill_s
    ends_s += dice.normal(time.last_decode.mean, time.last_decode.deviation, 200_000)
    assert (told.wait_p50_s, told.wait_p90_s) == pytest.approx(tuple(np.quantile(starts_s, (0.5, 0.9))), rel=0.01)
    assert (told.completion_p50_s, told.completion_p90_s) == pytest.approx(tuple(np.quantile(ends_s, (0.5, 0.9))), rel=0.01)


def test_the_answer_names_its_versions_and_keeps_the_order_of_the_queues() -> None:
    message = answer(reading(view("b", group("g1"), group("g2")), view("a", group("g3", model="big", kind=SloKind.FIRST_TOKEN))))
    assert (message.made_s, message.profile_version, message.plan_version) == (NOW_S, SHIPPED.version, 11)
    assert [(queue.instance, queue.version) for queue in message.queues] == [("a", 4), ("b", 3)]
    assert [[each.group_id for each in queue.groups] for queue in message.queues] == [["g3"], ["g1", "g2"]]
    (told,) = message.queues[0].groups
    assert (told.model, told.slo_kind, told.slo_class, told.waiting) == ("big", request_pb2.SLO_KIND_FIRST_TOKEN, "64s", 100)
    assert told.first_deadline_s == NOW_S + 60.0


def test_with_little_room_the_most_late_are_told_and_all_are_summed() -> None:
    groups = [group("fine", due_in_s=9_000.0), group("worst", due_in_s=-1.0, waiting=300), group("bad", due_in_s=-1.0, waiting=200)]
    message = answer(reading(view("a", *groups)), groups_max=2)
    assert [each.group_id for each in message.queues[0].groups] == ["worst", "bad"]
    assert message.groups_assessed == 3
    assert message.waiting == 600
    assert message.late_expected == pytest.approx(500.0, rel=1e-3)


def test_one_instance_of_several() -> None:
    found = reading(view("a", group("g1", due_in_s=-1.0)), view("b", group("g2")))
    message = answer(found, instances=["b"])
    assert [queue.instance for queue in message.queues] == ["b"]
    assert message.waiting == 100


@pytest.mark.parametrize(
    ("fields", "field"), [({"groups_max": GROUPS_MAX + 1}, "groups_max"), ({"instances": ["a"] * (INSTANCES_MAX + 1)}, "instances")]
)
def test_sizes_are_bounded(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        answer(reading(view("a")), **fields)
    assert raised.value.details["field"] == field


def test_an_instance_that_is_not_alive_is_told_as_such() -> None:
    with pytest.raises(NotFound) as raised:
        answer(reading(view("a")), instances=["a", "gone"])
    assert (raised.value.reason, raised.value.details["instance"]) == ("UNKNOWN_INSTANCE", "gone")


def test_a_queue_with_a_model_that_nobody_knows_leaves_the_others_assessed() -> None:
    message = answer(reading(view("a", group("g1", model="unheard-of")), view("b", group("g2", due_in_s=-1.0))))
    assert [(queue.unpredictable, len(queue.groups)) for queue in message.queues] == [(True, 0), (False, 1)]
    assert message.waiting == 200
    assert message.late_expected == pytest.approx(100.0)


def test_nothing_waits_nowhere() -> None:
    message = answer(reading())
    assert (message.waiting, message.late_expected, len(message.queues)) == (0, 0.0, 0)
