"""Entries of the event stream, instances and readings of the queue on their way into the estimator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from qlm.api.v1 import instance_pb2
from qlm.internal.v1 import events_pb2
from qlm_core.profiles.shipped_profiles import shipped_snapshot
from qlm_core.vocabulary.instance import TIME_SCALE_MAX, TIME_SCALE_MIN, InstanceFacts
from qlm_core.vocabulary.stream import entry_id_of
from qlm_estimator.config import EstimatorConfig, EstimatorSettings
from qlm_estimator.events import GroupClass, Lifecycle, LifecycleKind, OperationKind, ReportedOperation
from qlm_estimator.lifecycle_wire import events_of
from qlm_estimator.outcomes.report import Outcomes
from qlm_estimator.shell import queue_seen
from qlm_process.queue.instances import instances_in
from qlm_process.wire import instance as instance_wire
from qlm_queue.overview import InstanceRecord, Overview, VirtualQueueRecord
from qlm_queue.values import GroupRecord, StreamEntry

FACTS = InstanceFacts(
    name="a",
    incarnation="a/3",
    gpu="A100-80GB",
    n_gpu=1,
    engine="simulated",
    models=("chat", "big"),
    address="127.0.0.1:1",
    time_scale=20.0,
    draining=True,
    batch_max=64,
    active_model="chat",
)


def _entry(*events: events_pb2.RequestEvent, entry_id: str = "1700000000123-4") -> StreamEntry:
    return StreamEntry(entry_id=entry_id, payload=events_pb2.RequestEvents(events=events).SerializeToString())


def _learned_from(entry: StreamEntry) -> list[Lifecycle | ReportedOperation]:
    events = events_of(entry, Outcomes(since_s=0.0), {})
    return [event for event in events if isinstance(event, Lifecycle | ReportedOperation)]


def test_every_field_of_an_event_is_read() -> None:
    (event,) = _learned_from(
        _entry(
            events_pb2.RequestEvent(
                kind=events_pb2.EVENT_KIND_COMPLETED,
                queue_id="7-0",
                group_id="g",
                incarnation="a/1",
                attempt=2,
                acceptance_number=9,
                prompt_tokens=11,
                model="chat",
                output_tokens=12,
                first_token_s=12.5,
                finished_s=13.5,
                paused_s=0.25,
                slo_class="64s",
            )
        )
    )
    assert isinstance(event, Lifecycle)
    assert event.kind is LifecycleKind.COMPLETED
    assert (event.entry_id, event.index) == ((1_700_000_000_123, 4), 0)
    assert (event.queue_id, event.group_id, event.incarnation, event.attempt) == ("7-0", "g", "a/1", 2)
    assert (event.acceptance_number, event.prompt_tokens, event.model) == (9, 11, "chat")
    assert (event.output_tokens, event.slo_class) == (12, "64s")
    assert (event.first_token_s, event.finished_s, event.paused_s) == (12.5, 13.5, 0.25)
    assert event.cached_tokens is None


@pytest.mark.parametrize("cached_tokens", [0, 7])
def test_what_was_cached_is_not_the_same_as_nothing_known(cached_tokens: int) -> None:
    (event,) = _learned_from(_entry(events_pb2.RequestEvent(kind=events_pb2.EVENT_KIND_COMPLETED, cached_tokens=cached_tokens)))
    assert isinstance(event, Lifecycle)
    assert event.cached_tokens == cached_tokens


def test_kinds() -> None:
    kinds = [events_pb2.RequestEvent(kind=kind) for kind in events_pb2.EventKind.values()]
    read = [(event.index, event.kind) for event in _learned_from(_entry(*kinds, events_pb2.RequestEvent(kind=99)))]  # type: ignore[arg-type]
    assert read == [
        (1, LifecycleKind.ACCEPTED),
        (2, LifecycleKind.PULLED),
        (3, LifecycleKind.RELEASED),
        (4, LifecycleKind.RELEASED),
        (5, LifecycleKind.COMPLETED),
        (6, LifecycleKind.ENDED),
        (7, LifecycleKind.ENDED),
        (8, LifecycleKind.ENDED),
    ]


def test_every_field_of_an_operation_is_read() -> None:
    kinds = events_pb2.EventKind
    fields: dict[str, Any] = {"incarnation": "a/1", "instance": "a", "model": "chat"}
    read = _learned_from(
        _entry(
            events_pb2.RequestEvent(kind=kinds.EVENT_KIND_MODEL_SWAPPED, took_s=0.5, from_warm=True, **fields),
            events_pb2.RequestEvent(kind=kinds.EVENT_KIND_MODEL_SWAPPED, took_s=5.5, **fields),
            events_pb2.RequestEvent(kind=kinds.EVENT_KIND_MODEL_WARMED, took_s=4.5, **fields),
            events_pb2.RequestEvent(kind=kinds.EVENT_KIND_KV_OFFLOADED, took_s=0.25, moved_requests=2, moved_tokens=900, **fields),
            events_pb2.RequestEvent(kind=kinds.EVENT_KIND_KV_OFFLOADED, kv_tokens=400, **fields),
            events_pb2.RequestEvent(kind=kinds.EVENT_KIND_KV_RESTORED, took_s=0.5, moved_requests=1, moved_tokens=70, **fields),
        )
    )
    known: dict[str, Any] = {"entry_id": (1_700_000_000_123, 4), "incarnation": "a/1", "model": "chat"}
    assert read == [
        ReportedOperation(kind=OperationKind.SWAPPED_WARM, index=0, took_s=0.5, **known),
        ReportedOperation(kind=OperationKind.SWAPPED_COLD, index=1, took_s=5.5, **known),
        ReportedOperation(kind=OperationKind.WARMED, index=2, took_s=4.5, **known),
        ReportedOperation(kind=OperationKind.KV_MOVED, index=3, took_s=0.25, requests=2, tokens=900, **known),
        ReportedOperation(kind=OperationKind.KV_MOVED, index=5, took_s=0.5, requests=1, tokens=70, **known),
    ]


def test_malformed_entries_are_refused() -> None:
    with pytest.raises(ValueError, match="1-1"):
        _learned_from(StreamEntry(entry_id="1-1", payload=b"\xff\xff"))
    with pytest.raises(ValueError, match="invalid literal"):
        _learned_from(_entry(events_pb2.RequestEvent(kind=events_pb2.EVENT_KIND_PULLED), entry_id="now"))


@pytest.mark.parametrize(("text", "expected"), [("", (0, 0)), ("0", (0, 0)), ("12-3", (12, 3)), ("12", (12, 0))])
def test_entry_ids(text: str, expected: tuple[int, int]) -> None:
    assert entry_id_of(text) == expected


def test_an_instance_survives_the_wire() -> None:
    assert instance_wire.from_body(instance_wire.to_body(FACTS)) == FACTS
    assert instance_wire.from_body(instance_wire.to_body(FACTS), "a/9").incarnation == "a/9"
    runs = {"running", "running_reported_s", "token_s"}  # of `running_wire`
    assert set(InstanceFacts.__slots__) == {field.name for field in instance_pb2.Instance.DESCRIPTOR.fields} - runs


def test_every_shipped_profile_can_be_scaled_as_far_as_an_instance_may() -> None:
    for scale in (TIME_SCALE_MIN, TIME_SCALE_MAX):
        for row in shipped_snapshot().hardware:
            assert row.scaled(scale).decode_step_s(1, 0) == pytest.approx(row.decode_step_s(1, 0) / scale)


def test_absent_numbers_of_an_instance_have_defaults() -> None:
    found = instance_wire.from_proto(instance_pb2.Instance(name="a", n_gpu=1))
    assert (found.time_scale, found.batch_max) == (1.0, 256)


@pytest.mark.parametrize(
    "wrong",
    [
        instance_pb2.Instance(n_gpu=1),
        instance_pb2.Instance(name="a"),
        instance_pb2.Instance(name="a", n_gpu=1, time_scale=-1.0),
        instance_pb2.Instance(name="a", n_gpu=1, time_scale=math.nan),
        instance_pb2.Instance(name="a", n_gpu=1, time_scale=math.inf),
        instance_pb2.Instance(name="a", n_gpu=1, time_scale=1e-12),
        instance_pb2.Instance(name="a", n_gpu=1, time_scale=1e12),
    ],
)
def test_impossible_instances_are_refused(wrong: instance_pb2.Instance) -> None:
    with pytest.raises(ValueError, match="an instance has"):
        instance_wire.from_proto(wrong)
    with pytest.raises(ValueError, match="not an Instance"):
        instance_wire.from_body(b"\xff\xff")


def _group(group_id: str, model: str, **meta: str) -> GroupRecord:
    return GroupRecord(
        group_id=group_id,
        instance="a",
        last_instance="a",
        waiting=4,
        live=6,
        waiting_prompt_tokens=400,
        first_deadline_s=123.0,
        next_deadline_s=123.0,
        last_deadline_s=150.0,
        meta={"model": model, "slo_kind": "completion", "slo_class": "64s", "token_class": "256", "tenant_class": "1", **meta},
    )


def _overview(*, running: int = 3, alive: bool = True, body: bytes | None = None) -> Overview:
    groups = {"1": _group("1", "chat"), "2": _group("2", "big", slo_kind="priority", slo_class="p3")}
    return Overview(
        plan_version=1,
        accepted_count=10,
        live=8,
        unplaced=0,
        virtual_queues=[
            VirtualQueueRecord(instance="a", version=1, group_ids=["1", "2"], running=running),
            VirtualQueueRecord(instance="unassigned", version=1, group_ids=[], running=0),
        ],
        groups=groups,
        instances=[
            InstanceRecord(name="a", incarnation="a/3", alive=alive, body=instance_wire.to_body(FACTS) if body is None else body),
            InstanceRecord(name="fresh", incarnation="fresh/1", alive=True, body=instance_wire.to_body(replace(FACTS, name="fresh"))),
        ],
        incarnations={"a/3": alive, "fresh/1": True},
        last_event_id="1700000000123-4",
    )


def test_dead_and_unreadable_instances_are_left_out() -> None:
    assert [facts.name for facts in instances_in(_overview(alive=False))] == ["fresh"]
    assert [facts.name for facts in instances_in(_overview(body=b"\xff\xff"))] == ["fresh"]


def test_a_reading_as_the_machine_sees_it() -> None:
    seen = queue_seen(_overview())
    assert seen.last_event == (1_700_000_000_123, 4)
    assert seen.running == {"a/3": 3, "fresh/1": 0}
    assert seen.groups == {
        "1": GroupClass(model="chat", slo_class="64s", token_class="256"),
        "2": GroupClass(model="big", slo_class="p3", token_class="256"),
    }


def test_settings() -> None:
    assert EstimatorSettings().learning().publish_every_s == 1.0
    config = EstimatorConfig.model_validate({"models": [{"name": "chat", "profile": "Mistral-7B"}]})
    assert config.catalogue()["chat"].profile == "Mistral-7B"
    with pytest.raises(ValueError, match="memory_requests"):
        EstimatorSettings(memory_requests=1.0)
