"""A frame of `qlm top`, from what an observer may see."""

from __future__ import annotations

import math
import re
from dataclasses import asdict

from rich.console import Console

from qlm.api.v1 import agent_pb2, estimator_pb2, gateway_pb2, instance_pb2, planner_pb2, request_pb2
from qlm_cli.top.frame import GROUPS_SHOWN_MAX, frame
from qlm_core.vocabulary.request import SloKind
from qlm_process.cluster.view import (
    AgentView,
    CalibrationRowView,
    ClassView,
    ClusterView,
    GroupView,
    InstanceView,
    OutcomesView,
    PartView,
    agent_view,
    group_view,
    outcomes_view,
)

NOW_S = 1_000.0


def group(number: int, **fields: object) -> GroupView:
    values: dict[str, object] = {
        "model": "mistral-7b", "slo_kind": SloKind.COMPLETION, "slo_class": "32s", "waiting": 10, "first_deadline_s": NOW_S + 20.0,
        "completion_p50_s": NOW_S + 5.0, "completion_p90_s": NOW_S + 8.0,
    }  # fmt: skip
    return GroupView(group_id=f"g{number}", **{**values, **fields})  # type: ignore[arg-type]


def agent(**fields: object) -> AgentView:
    values: dict[str, object] = {
        "incarnation": "a/1", "gpu": "A100-80GB", "n_gpu": 1, "engine": "simulated", "draining": False, "active_model": "mistral-7b",
        "warm_models": ("vicuna-13b",), "swapping_to": "", "running": 64, "offloaded": 0, "kv_used_tokens": 300, "kv_capacity_tokens": 400,
        "host_memory_used_bytes": 1, "host_memory_bytes": 2, "completed": 1_234, "eviction_choice": "",
        "operations": {"evicted": 3, "kv_offloaded": 2},
    }  # fmt: skip
    return AgentView(**{**values, **fields})  # type: ignore[arg-type]


def instance(groups: tuple[GroupView, ...] = (), seen: AgentView | None = None, **fields: object) -> InstanceView:
    values: dict[str, object] = {
        "name": "a", "part": PartView(name="a", address="h:1"), "alive": True, "owned": 64, "active_model": "mistral-7b",
    }  # fmt: skip
    return InstanceView(agent=seen, groups=groups, **{**values, **fields})  # type: ignore[arg-type]


def cluster(**fields: object) -> ClusterView:
    values: dict[str, object] = {
        "at_s": NOW_S, "queue": "q", "live": 100, "unplaced": 5, "running": 64, "plan_version": 9, "instances": (), "unassigned": (),
        "parts": (PartView(name="gateway", address="h:2"), PartView(name="planner", address="h:3")), "outcomes": None,
    }  # fmt: skip
    return ClusterView(**{**values, **fields})  # type: ignore[arg-type]


def shown(view: ClusterView) -> str:
    console = Console(width=140, record=True, force_terminal=False, file=None, quiet=False)
    with console.capture() as capture:
        console.print(frame(view))
    return capture.get()


def test_totals_and_parts() -> None:
    text = shown(cluster(outcomes=None))
    assert "100 live = 5 not placed + 31 waiting + 64 running" in text
    assert "● planner h:3 plan 9" in text
    assert "no instance is known" in text


def test_the_choice_of_eviction_is_shown_with_its_reason() -> None:
    text = shown(
        cluster(instances=(instance(seen=agent(eviction_choice="KV swap above 92 tokens, up to there evict (there and back 2 ms)")),))
    )
    assert "evicts by KV swap above 92 tokens, up to there evict (there and back 2 ms)" in text
    assert "evicts by" not in shown(cluster(instances=(instance(seen=agent()),)))


def test_what_is_away_is_marked_and_its_figures_are_not_made_up() -> None:
    away = PartView(name="a", address="h:1", problem="down")
    parts = (PartView(name="gateway", address="h:2", problem="no answer"),)
    text = shown(
        cluster(queue="", live=None, unplaced=None, running=None, parts=parts, instances=(instance(part=away, alive=False, owned=None),))
    )
    assert "✗ gateway no answer h:2" in text
    assert "✗ a lease lost down" in text
    assert "live" not in text
    assert "- owned" in text


def test_an_engine_and_its_queue() -> None:
    groups = (
        group(1),
        group(2, slo_kind=SloKind.PRIORITY, slo_class="p-2", first_deadline_s=math.inf, completion_p50_s=None, completion_p90_s=None),
        group(3, first_deadline_s=NOW_S - 7.0),
        *(group(number) for number in range(4, 10)),
    )
    text = shown(cluster(instances=(instance(groups, agent(swapping_to="vicuna-13b", offloaded=5)),)))
    assert "mistral-7b → vicuna-13b  warm: vicuna-13b   64 running + 5 in host memory   KV" in text
    assert " 75%" in text
    assert "completed 1,234   evicted 3   KV out 2" in text
    assert re.search(r"head\s+mistral-7b\s+completion 32s\s+10\s+5 s \(8 s\)\s+20 s", text)
    assert re.search(r"2\.\s+mistral-7b\s+priority -2\s+10\s+-\s+-", text)
    assert "7 s ago" in text
    assert re.search(rf"\.\.\. {len(groups) - GROUPS_SHOWN_MAX} more\s+{10 * (len(groups) - GROUPS_SHOWN_MAX)}", text)


def test_groups_that_no_instance_can_serve() -> None:
    text = shown(cluster(unassigned=(group(1, model="gpt"),)))
    assert "no instance can serve" in text
    assert "gpt" in text


def test_attainment_rates_and_calibration() -> None:
    outcomes = OutcomesView(
        window_s=60.0, accepted=120, completed=60, failed=2, cancelled=0, expired=0, output_tokens=6_000,
        classes=(
            ClassView(slo_class="32s", judged=40, attained=30, completed=40),
            ClassView(slo_class="p1", judged=0, attained=0, completed=20),
        ),
        calibration=(
            calibration_row(samples=1_050),
            calibration_row(depth="0", samples=40, within_p90=0.8),
            calibration_row(depth="16", samples=1_010, time="wait", r2=None),
            calibration_row(depth="262144+", samples=1, r2=-2_000.0),
        ),
        operations={"pulled": 60, "evicted": 7},
    )  # fmt: skip
    text = shown(cluster(outcomes=outcomes))
    assert "in 2.0/s  out 1.0/s  100 tokens/s" in text
    assert "SLO attainment, last 60 s" in text
    assert re.search(r"32s\s+40\s+75\.0%", text)
    assert re.search(r"p1\s+20\s+-", text)
    assert re.search(r"any\s+completion\s+1,050\s+52%\s+91%\s+99%\s+1\.5 s\s+0\.987", text)
    assert re.search(r"\b0\s+completion\s+40\s+52%\s+80%", text)
    assert re.search(r"5 - 16\s+wait\s+1,010\s+52%\s+91%\s+99%\s+1\.5 s\s+-", text)
    assert re.search(r"> 262,144\s+completion\s+1\s+52%\s+91%\s+99%\s+1\.5 s\s+< -10", text)
    assert "pulled 60  evicted 7  failed 2" in text


def calibration_row(**fields: object) -> CalibrationRowView:
    values: dict[str, object] = {
        "time": "completion", "depth": "", "samples": 1, "within_p50": 0.52, "within_p90": 0.91, "within_p99": 0.99, "bias_s": 1.5,
        "r2": 0.987,
    }  # fmt: skip
    return CalibrationRowView(**{**values, **fields})  # type: ignore[arg-type]


def test_calibration_from_messages() -> None:
    known = {name: value for name, value in asdict(calibration_row()).items() if name != "time"}
    rows = [
        estimator_pb2.CalibrationRow(time=estimator_pb2.PREDICTED_TIME_COMPLETION, **known),
        estimator_pb2.CalibrationRow(time=estimator_pb2.PREDICTED_TIME_WAIT, **{**known, "r2": None}),
        estimator_pb2.CalibrationRow(time=7, **known),  # type: ignore[arg-type]  # of a newer version
    ]
    view = outcomes_view(estimator_pb2.Outcomes(calibration=rows))
    assert view.calibration == (calibration_row(), calibration_row(time="wait", r2=None))


def test_values_from_messages() -> None:
    load = instance_pb2.InstanceLoad(
        active_model="a", warm_models=["a", "b"], swapping_to="b", running=3, kv_used_tokens=10, kv_capacity_tokens=100, model_swaps=4,
        completed=7, evictions=1, kv_offloads=2, kv_restores=3, warmings=5, offloaded=6, host_memory_used_bytes=8, host_memory_bytes=9,
        eviction_choice="evict (why)", batch=5,
    )  # fmt: skip
    facts = instance_pb2.Instance(incarnation="i/2", gpu="G", n_gpu=2, engine="simulated", draining=True, models=["a", "b", "c"])
    assert agent_view(agent_pb2.GetAgentStatusResponse(instance=facts, load=load)) == AgentView(
        incarnation="i/2", gpu="G", n_gpu=2, engine="simulated", draining=True, active_model="a", warm_models=("b",), swapping_to="b",
        running=3, offloaded=6, kv_used_tokens=10, kv_capacity_tokens=100, host_memory_used_bytes=8, host_memory_bytes=9, completed=7,
        eviction_choice="evict (why)", operations={"models_activated": 4, "models_warmed": 5, "evicted": 1, "kv_offloaded": 2,
        "kv_restored": 3}, models=("a", "b", "c"), batch=5,
    )  # fmt: skip
    planned = planner_pb2.PlannedGroup(
        group_id="g", model="a", slo_kind=request_pb2.SLO_KIND_FIRST_TOKEN, slo_class="2s", waiting=4, first_deadline_s=9.0,
        completion_p50_s=11.0, completion_p90_s=12.0,
    )  # fmt: skip
    status = gateway_pb2.GroupStatus(
        group_id="g", model="a", slo_kind=request_pb2.SLO_KIND_FIRST_TOKEN, slo_class="2s", waiting=5, first_deadline_s=9.0
    )
    assert (group_view(planned, planned).waiting, group_view(planned, planned).completion_p90_s) == (4, 12.0)
    assert (group_view(status, planned).waiting, group_view(status, planned).completion_p50_s) == (5, 11.0)
    assert group_view(status, None).completion_p50_s is None
    assert (group_view(status, planned).late, group_view(status, planned, 2.5).late) == (0.0, 2.5)
    assert group_view(status, planned).slo_kind is SloKind.FIRST_TOKEN
