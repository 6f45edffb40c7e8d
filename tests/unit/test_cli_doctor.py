"""Findings of `qlm doctor` in the state of a queue."""

from __future__ import annotations

import dataclasses

import pytest

from qlm.api.v1.instance_pb2 import Instance
from qlm_cli.operate.doctor import deployment_problems
from qlm_core.vocabulary.pauses import Pause, PauseKind
from qlm_queue.overview import InstanceRecord, Overview
from qlm_queue.values import GroupRecord


def instance(name: str, *models: str, alive: bool = True) -> InstanceRecord:
    return InstanceRecord(name=name, incarnation=f"{name}/1", alive=alive, body=Instance(name=name, models=models).SerializeToString())


def group(model: str, waiting: int) -> GroupRecord:
    fields = {field.name: 0 for field in dataclasses.fields(GroupRecord)}
    return GroupRecord(**{**fields, "meta": {"model": model}, "waiting": waiting})  # type: ignore[arg-type]


HEALTHY = Overview(
    plan_version=1,
    accepted_count=9,
    live=3,
    unplaced=0,
    virtual_queues=(),
    groups={"g1": group("a", 3)},
    instances=(instance("one", "a", "b"),),
    incarnations={"one/1": True},
    last_event_id="0",
)


def problems(overview: Overview, *, planner: str = "host:1", estimator: str = "host:2") -> list[str]:
    return list(deployment_problems(overview, planner=planner, estimator=estimator))


def test_nothing_is_found_where_all_is_there() -> None:
    assert problems(HEALTHY) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"instances": (*HEALTHY.instances, instance("two", "a", alive=False))}, ("instance two is away", "qlm agent --name two")),
        ({"groups": {"g1": group("a", 3), "g2": group("c", 2), "g3": group("c", 1)}}, ("3 requests wait for c", "agents")),
        ({"pauses": (Pause(kind=PauseKind.MODEL, name="a", since_s=1.0),)}, ("model a", "qlm resume a")),
        ({"pauses": (Pause(kind=PauseKind.TENANT, name="t", since_s=1.0),)}, ("tenant t", "qlm resume --tenant t")),
        ({"instances": (), "groups": {}}, ("no instance serves", "qlm agent")),
    ],
)
def test_each_problem_has_a_line_with_what_to_do(changes: dict[str, object], words: tuple[str, ...]) -> None:
    (line,) = problems(dataclasses.replace(HEALTHY, **changes))  # type: ignore[arg-type]
    assert all(word in line for word in words)


def test_leaders_are_missed() -> None:
    (planner,) = problems(HEALTHY, planner="")
    (estimator,) = problems(HEALTHY, estimator="")
    assert "qlm planner" in planner
    assert "qlm estimator" in estimator
