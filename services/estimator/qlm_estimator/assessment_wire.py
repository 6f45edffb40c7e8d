"""From a request for an assessment to its answer (estimator.proto)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from qlm.api.v1 import estimator_pb2
from qlm_core.assessment import Assessment
from qlm_core.errors import NotFound, invalid_field
from qlm_core.prediction_views import GroupView, QueueView
from qlm_estimator.readings import Reading
from qlm_process.wire.slo import SLO_KIND_NUMBERS

INSTANCES_MAX = 1_000
GROUPS_MAX = 10_000
GROUPS_DEFAULT = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """A group that can be predicted, by its number in the assessment."""

    group: GroupView
    number: int
    late: float
    tardiness_s: float


def assessment_message(request: estimator_pb2.AssessRequest, reading: Reading) -> estimator_pb2.Assessment:
    """Costs O(groups). Raises InvalidRequest, and NotFound (UNKNOWN_INSTANCE) for an instance without a live lease."""
    views = _asked(request, reading.views)
    assessment = reading.assessment
    queues = [_predicted(view, assessment, reading.at_s) for view in views]
    every = [told for queue in queues for told in queue]
    messages = _group_messages(_most_late(every, request.groups_max or GROUPS_DEFAULT), assessment)
    return estimator_pb2.Assessment(
        made_s=reading.at_s,
        profile_version=reading.snapshot.version,
        plan_version=reading.plan_version,
        waiting=sum(group.waiting for view in views for group in view.groups),
        late_expected=math.fsum(told.late for told in every),
        tardiness_expected_s=math.fsum(told.tardiness_s for told in every),
        groups_assessed=len(every),
        queues=[
            estimator_pb2.QueueAssessment(
                instance=view.instance.name,
                version=reading.versions.get(view.instance.name, 0),
                unpredictable=view.instance.name in assessment.unpredictable,
                late_expected=math.fsum(told.late for told in queue),
                groups=[messages[told.number] for told in queue if told.number in messages],
            )
            for view, queue in zip(views, queues, strict=True)
        ],
    )


def _asked(request: estimator_pb2.AssessRequest, views: Sequence[QueueView]) -> Sequence[QueueView]:
    """In the order of names."""
    if len(request.instances) > INSTANCES_MAX:
        raise invalid_field("instances", f"at most {INSTANCES_MAX:,}", len(request.instances))
    if request.groups_max > GROUPS_MAX:
        raise invalid_field("groups_max", f"at most {GROUPS_MAX:,}", request.groups_max)
    by_name = {view.instance.name: view for view in views}
    names = set(request.instances) or by_name.keys()
    for name in sorted(names - by_name.keys()):
        raise NotFound(f"no instance {name[:128]!r} is alive", reason="UNKNOWN_INSTANCE", details={"instance": name})
    return [by_name[name] for name in sorted(names)]


def _predicted(view: QueueView, assessment: Assessment, now_s: float) -> list[_Told]:
    """The groups of a queue in its order; none of one that cannot be predicted."""
    if view.instance.name in assessment.unpredictable or not view.groups:
        return []
    late, tardiness_s = assessment.late(now_s)
    found = assessment.number_of(view.groups[0].group_id)
    assert found is not None, "a queue that can be predicted has all its groups, numbered in a row"
    return [
        _Told(group=group, number=number, late=float(late[number]), tardiness_s=float(tardiness_s[number]))
        for number, group in enumerate(view.groups, start=found[1])
    ]


def _most_late(groups: Sequence[_Told], most: int) -> list[_Told]:
    """Those with the most expected late requests, then those that come first."""
    return heapq.nsmallest(most, groups, key=lambda told: (-told.late, told.number))


def _group_messages(chosen: Sequence[_Told], assessment: Assessment) -> dict[int, estimator_pb2.GroupAssessment]:
    """By number. All times are worked out together."""
    numbers = [told.number for told in chosen]
    firsts = assessment.table.times(numbers, [0.0] * len(chosen))
    lasts = assessment.table.times(numbers, [max(told.group.waiting - 1.0, 0.0) for told in chosen])
    wait_p50_s, wait_p90_s = (firsts.wait_quantile_s(level).tolist() for level in (0.5, 0.9))
    completion_p50_s, completion_p90_s = (lasts.completion_quantile_s(level).tolist() for level in (0.5, 0.9))
    return {
        told.number: estimator_pb2.GroupAssessment(
            group_id=told.group.group_id,
            model=told.group.model,
            slo_kind=SLO_KIND_NUMBERS[told.group.slo_kind],
            slo_class=told.group.slo_class,
            waiting=told.group.waiting,
            first_deadline_s=told.group.first_deadline_s,
            wait_p50_s=wait_p50_s[at],
            wait_p90_s=wait_p90_s[at],
            completion_p50_s=completion_p50_s[at],
            completion_p90_s=completion_p90_s[at],
            late_expected=told.late,
            tardiness_expected_s=told.tardiness_s,
        )
        for at, told in enumerate(chosen)
    }
